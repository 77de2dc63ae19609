"""A run that fits a laptop CPU: float32, two groups of two short episodes, one device."""

from owrl_jax.config import (
    AgentSettings,
    BrowserSettings,
    CheckpointSettings,
    DtypeSettings,
    MeshSettings,
    ModelSettings,
    RlSettings,
    RunConfig,
)


def get_config() -> RunConfig:
    """The configuration; `owrl config tiny_cpu` prints it."""
    return RunConfig(
        name="tiny_cpu",
        iterations=4,
        model=ModelSettings(size="tiny", remat="none"),  # no published size: a few million parameters
        mesh=MeshSettings(fsdp=1),
        dtypes=DtypeSettings(compute="float32"),
        browser=BrowserSettings(viewport=(448, 320), max_episodes=2),
        agent=AgentSettings(max_steps=4, max_context_tokens=2048, max_response_tokens=64),
        rl=RlSettings(groups=2, group_size=2, turns_per_update=8, epochs=1, learning_rate=1e-4),
        checkpoint=CheckpointSettings(every=2),
    )
