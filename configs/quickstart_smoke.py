"""What `owrl quickstart --smoke` runs: a few of everything, to see that all stages work together."""

import dataclasses
import importlib.util
from pathlib import Path

from owrl_jax.config import CheckpointSettings, DataSettings, EvalSettings, RolloutSettings, RunConfig


def get_config() -> RunConfig:
    """The configuration; `owrl config quickstart_smoke` prints it."""
    spec = importlib.util.spec_from_file_location("_quickstart", Path(__file__).with_name("quickstart.py"))
    assert spec is not None and spec.loader is not None
    whole = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(whole)
    config: RunConfig = whole.get_config()
    return dataclasses.replace(
        config,
        name="quickstart-smoke",
        iterations=1,
        data=DataSettings(tasks=("worlds:starter/pair_colour",), instances=4000),
        rollout=RolloutSettings(temperature=1.0),
        eval=EvalSettings(tasks=4, temperature=1.0),
        # A model that has seen so little solves nothing: the format, kept or broken, is what siblings differ in.
        rl=dataclasses.replace(
            config.rl,
            groups=2,
            group_size=4,
            turns_per_update=24,
            epochs=1,
            format_error_reward=-1.0,
            diagnosed_share=0.2,
        ),
        sft=dataclasses.replace(config.sft, epochs=16, groups_per_update=4, learning_rate=3e-3, warmup_share=0.1),
        checkpoint=CheckpointSettings(every=20),
    )
