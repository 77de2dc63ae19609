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
        iterations=14,
        # Pictures of 128 x 128 pixels are shown as they are: 16 visual tokens.
        model=ModelSettings(size="nano", remat="none", image_area=(1024, 1048576)),
        mesh=MeshSettings(fsdp=1),
        dtypes=DtypeSettings(compute="float32"),
        browser=BrowserSettings(viewport=(128, 128), max_episodes=8),
        agent=AgentSettings(
            prompt="terse",
            tools=("click", "done"),
            feedback=False,
            max_steps=3,
            max_context_tokens=768,
            max_response_tokens=96,
        ),
        rollout=RolloutSettings(temperature=0.7),
        data=DataSettings(tasks=("worlds:starter/colour_shape",), instances=4000),
        eval=EvalSettings(tasks=100, samples=1, temperature=0.7),
        # Each update moves every weight by about the rate, whatever its gradient is worth: too high a rate forgets the
        # format of a response sooner than it learns anything.
        rl=RlSettings(
            groups=16,
            group_size=8,
            turns_per_update=128,
            epochs=2,
            learning_rate=1.5e-4,
            warmup_updates=4,
            row_tokens=1024,
            format_gate="every",
            format_error_reward=0.0,
            credit_malformed=False,
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
