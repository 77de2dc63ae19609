"""Plain data in, checked records out; and the JSON form and the hash of a configuration."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from owrl_jax.config.checks import ConfigError
from owrl_jax.config.run import RunConfig

T = TypeVar("T")


_hints = functools.cache(typing.get_type_hints)


def nearest(name: str, known: Sequence[str], prefix: str) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(known)}"


def build_record(cls: type[T], data: object, path: str, base: T | None = None) -> T:
    """The record of `cls` that `data` describes. What `data` leaves out comes from `base`, or has its default."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path or 'the configuration'} must be a group of settings, got {data!r}")
    hints = _hints(cls)
    prefix = f"{path}." if path else ""
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in hints:
            raise ConfigError(f"unknown setting {prefix}{key}; {nearest(str(key), list(hints), prefix)}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            values[key] = build_record(hint, value, prefix + key, None if base is None else getattr(base, key))  # type: ignore[arg-type]
            continue
        record = _record_of(hint)
        if record is not None and isinstance(value, list | tuple):
            items = enumerate(value)
            values[key] = tuple(build_record(record, _plain(item), f"{prefix}{key}[{n}]") for n, item in items)
            continue
        try:
            values[key] = msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{prefix}{key}={value!r}: {error}") from None
    missing = [f.name for f in dataclasses.fields(cls) if _required(f) and f.name not in values]  # type: ignore[arg-type]
    if missing and base is None:
        raise ConfigError(f"{path} needs a value for {', '.join(missing)}")
    try:
        return cls(**values) if base is None else dataclasses.replace(base, **values)  # type: ignore[type-var]
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _record_of(hint: Any) -> Any:
    """The record that a tuple is of; None for everything else."""
    items = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    return items[0] if len(items) == 2 and items[1] is Ellipsis and dataclasses.is_dataclass(items[0]) else None


def _plain(item: object) -> object:
    return msgspec.to_builtins(item) if dataclasses.is_dataclass(item) else item


def from_dict(data: Mapping[str, Any]) -> RunConfig:
    """A configuration from nested plain data; what is left out has its default.

    Raises:
      ConfigError: for an unknown setting, a wrong type or a value out of range, with its dotted path.
    """
    return build_record(RunConfig, data, "")


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested plain data, complete."""
    return msgspec.to_builtins(config)


def to_json(config: RunConfig) -> str:
    """The configuration as indented JSON, complete, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2).decode() + "\n"


def from_json(text: str | bytes) -> RunConfig:
    """The inverse of `to_json`.

    Raises:
      ConfigError: as `from_dict`, and for text that is not JSON.
    """
    try:
        data = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the configuration is not valid JSON: {error}") from None
    return from_dict(data)


def config_hash(config: RunConfig) -> str:
    """SHA-256 (hex) of the canonical JSON: keys sorted, no spaces, a float setting always written as a float."""
    canonical = from_dict(to_dict(config))
    return hashlib.sha256(msgspec.json.encode(canonical, order="sorted")).hexdigest()


def same_run(config: RunConfig, other: RunConfig) -> bool:
    """Whether a run of `other` can go on with the settings of `config`.

    How long it is, what its verdicts may cost and where its judges are to be found may change; nothing else may.
    """

    def kept(run: RunConfig) -> RunConfig:
        ends = {
            name: dataclasses.replace(end, url=end.url and "http://", key_env="")
            for name, end in (("endpoint", run.judge.endpoint), ("second", run.judge.second))
        }
        judge = dataclasses.replace(run.judge, max_usd=None, max_calls=None, **ends)
        return dataclasses.replace(run, iterations=1, judge=judge)

    return config_hash(kept(config)) == config_hash(kept(other))
