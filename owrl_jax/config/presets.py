"""Presets are Python files with a function `get_config() -> RunConfig`; overrides are laid over them."""

from __future__ import annotations

import dataclasses
import importlib.util
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from owrl_jax.config.checks import ConfigError
from owrl_jax.config.plain import build_record, nearest
from owrl_jax.config.run import RunConfig

# In an installed package the presets lie inside it; in a checkout, beside it.
PRESET_FOLDERS = tuple(folder / "configs" for folder in Path(__file__).parents[1:3])


def preset_files() -> dict[str, Path]:
    """Name and file of every preset."""
    return {path.stem: path for folder in PRESET_FOLDERS for path in sorted(folder.glob("[a-z]*.py"))}


def load_preset(preset: str) -> RunConfig:
    """The configuration that a preset gives: a name in `configs/`, or the path of a Python file.

    Raises:
      ConfigError: if there is no such preset, or its `get_config` does not give a `RunConfig`.
    """
    if preset.endswith(".py"):
        path = Path(preset)
        if not path.is_file():
            raise ConfigError(f"there is no preset file {preset}: check the path")
    else:
        known = preset_files()
        if preset not in known:
            raise ConfigError(f"there is no preset {preset!r}; {nearest(preset, list(known), '')}")
        path = known[preset]
    spec = importlib.util.spec_from_file_location(f"_owrl_preset_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"{path} has no function get_config() -> RunConfig; a preset needs one")
    config = module.get_config()
    if not isinstance(config, RunConfig):
        raise ConfigError(f"get_config() in {path} must return a RunConfig, got {type(config).__name__}")
    return config


def _parse(text: str, hint: Any) -> Any:
    """The value that command-line text stands for, given its type: JSON, or bare words with commas for a list of them.

    Text stays text where text is wanted.
    """
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text.split(",") if typing.get_origin(hint) is tuple and not text.startswith("[") else text
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    wants_text = hint is str or (is_union and str in typing.get_args(hint) and value is not None)
    return text if wants_text else value


def _nest(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`{"rl.epochs": 1}` as `{"rl": {"epochs": 1}}`, text parsed by the type of the setting."""
    nested: dict[str, Any] = {}
    for dotted, value in overrides.items():
        *groups, leaf = dotted.split(".")
        cls: Any = RunConfig
        node = nested
        for group in groups:
            cls = typing.get_type_hints(cls).get(group) if dataclasses.is_dataclass(cls) else None
            node = node.setdefault(group, {})
        hint = typing.get_type_hints(cls).get(leaf) if dataclasses.is_dataclass(cls) else None
        node[leaf] = _parse(value, hint) if isinstance(value, str) and hint is not None else value
    return nested


def resolve(preset: str | RunConfig | None = None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A complete, checked configuration.

    Args:
      preset: name or path of a preset, a configuration, or None for the defaults.
      overrides: dotted name to value; text is read as JSON where the setting is not text itself.

    Raises:
      ConfigError: naming the dotted path, the value and what to do.
    """
    base = preset if isinstance(preset, RunConfig) else RunConfig() if preset is None else load_preset(preset)
    return build_record(RunConfig, _nest(overrides or {}), "", base)


def split_overrides(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Takes `--rl.epochs 1` and `--seed=3` out of a command line. Returns the overrides and the other arguments.

    Raises:
      ConfigError: for a setting without a value.
    """
    top = {field.name for field in dataclasses.fields(RunConfig)}
    overrides: dict[str, str] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        name, has_value, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or not ("." in name or name in top):
            rest.append(word)
            continue
        if not has_value:
            following = next(words, None)
            if following is None:
                raise ConfigError(f"--{name} needs a value after it")
            value = following
        overrides[name] = value
    return overrides, rest
