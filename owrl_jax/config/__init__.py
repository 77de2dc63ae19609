"""The configuration of a run: one tree of frozen records, its presets, its JSON form and its hash.

Presets are Python files in `configs/` with a function `get_config() -> RunConfig`. `resolve` loads one and lays
overrides over it (`{"rl.learning_rate": "5e-7"}`); what comes out is complete and checked, prints, saves as JSON, reads
back equal, and has a hash that stands beside every checkpoint. An unknown key or a value of the wrong type is an error
with its dotted path. Defaults are those of the paper's first stage (arXiv 2606.02031). No environment variable is read.

Here stands only what must be chosen for a run. Shapes come from the model's own `config.json`, and the finer settings
of a sandbox or a pool stay with them. Imports no jax: CPU hosts read the same tree.
"""

from __future__ import annotations

from owrl_jax.config.checks import ConfigError
from owrl_jax.config.judging import EndpointSettings, JudgeSettings
from owrl_jax.config.plain import config_hash, from_dict, from_json, same_run, to_dict, to_json
from owrl_jax.config.presets import PRESET_FOLDERS, load_preset, preset_files, resolve, split_overrides
from owrl_jax.config.run import RunConfig
from owrl_jax.config.settings import (
    MESH_AXES,
    AgentSettings,
    BrowserSettings,
    CheckpointSettings,
    DataSettings,
    DtypeSettings,
    EvalSettings,
    LoggingSettings,
    MeshSettings,
    ModelSettings,
    RolloutSettings,
)
from owrl_jax.config.training import HorizonSettings, Objective, RlSettings, SftSettings, Stage

__all__ = [
    "MESH_AXES",
    "PRESET_FOLDERS",
    "AgentSettings",
    "BrowserSettings",
    "CheckpointSettings",
    "ConfigError",
    "DataSettings",
    "DtypeSettings",
    "EndpointSettings",
    "EvalSettings",
    "HorizonSettings",
    "JudgeSettings",
    "LoggingSettings",
    "MeshSettings",
    "ModelSettings",
    "Objective",
    "RlSettings",
    "RolloutSettings",
    "RunConfig",
    "SftSettings",
    "Stage",
    "config_hash",
    "from_dict",
    "from_json",
    "load_preset",
    "preset_files",
    "resolve",
    "same_run",
    "split_overrides",
    "to_dict",
    "to_json",
]  # fmt: skip
