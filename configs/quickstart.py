"""What `owrl quickstart` runs: a model of a million parameters learns the starter site on a laptop CPU."""

from owrl_jax.config import (
    AgentSettings,
    BrowserSettings,
    CheckpointSettings,
    DataSettings,
    DtypeSettings,
    EvalSettings,
    MeshSettings,
    ModelSettings,
    RlSettings,
    RolloutSettings,
    RunConfig,
    SftSettings,
)


def get_config() -> RunConfig:
    """The configuration; `owrl config quickstart` prints it."""
    return RunConfig(
        name="quickstart",
        iterations=20,
        # Pictures of 128 x 128 pixels are shown as they are: 16 visual tokens.
        model=ModelSettings(size="nano", remat="none", image_area=(1024, 1048576)),
        mesh=MeshSettings(fsdp=1),
        dtypes=DtypeSettings(compute="float32"),
        browser=BrowserSettings(viewport=(128, 128), max_episodes=4),
        agent=AgentSettings(
            prompt="terse",
            tools=("click", "done"),
            feedback=False,
            max_steps=3,
            max_context_tokens=768,
            max_response_tokens=96,
        ),
        rollout=RolloutSettings(temperature=1.0),
        data=DataSettings(tasks=("worlds:starter/pair_colour", "worlds:starter/colour_shape")),
        eval=EvalSettings(tasks=60, samples=2, temperature=1.0),
        rl=RlSettings(
            groups=8, group_size=6, turns_per_update=96, epochs=1, learning_rate=1e-4, row_tokens=1024, adam_b2=0.95
        ),
        sft=SftSettings(
            epochs=8,
            groups_per_update=16,
            learning_rate=1.5e-3,
            warmup_share=0.15,
            final_fraction=0.2,
            freeze=(),
            row_tokens=1024,
        ),
        checkpoint=CheckpointSettings(every=10),
    )
