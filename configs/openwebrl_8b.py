"""OpenWebRL-8B: the recipe of `openwebrl_4b.py` for Qwen3-VL-8B-Thinking, from 912 demonstrations instead of 412.

owrl sft openwebrl_8b --name openwebrl-8b-sft --model.weights models/Qwen3-VL-8B-Thinking --sft.data data/sft_8b
owrl train openwebrl_8b
"""

import dataclasses
import importlib.util
from pathlib import Path

from owrl_jax.config import ModelSettings, RunConfig


def get_config() -> RunConfig:
    """The configuration; `owrl config openwebrl_8b` prints it."""
    spec = importlib.util.spec_from_file_location("_openwebrl_4b", Path(__file__).with_name("openwebrl_4b.py"))
    assert spec is not None and spec.loader is not None
    small = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(small)
    config: RunConfig = small.get_config()
    return dataclasses.replace(
        config,
        name="openwebrl-8b",
        model=ModelSettings(size="8b", weights="runs/openwebrl-8b-sft/export", remat="full"),
    )
