"""What a settings record checks when it is made. Errors name the field; whoever builds the tree adds the path."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be used; the message has the dotted path, the value, and what to do."""


def need(condition: bool, field: str, value: object, wanted: str) -> None:
    if not condition:
        raise ConfigError(f"{field}={value!r} must be {wanted}")


def finite(record: Any) -> None:
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, float):  # JSON has neither infinity nor NaN, so neither could be saved
            need(math.isfinite(value), field.name, value, "a finite number")


def at_least_one(record: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(record, field)
        need(value >= 1, field, value, "at least 1")
