"""One name for everything that makes two numbers comparable, and the refusal to mix what does not share it.

A success rate means something only beside the prompt, the tools, the viewport and the budgets it was measured under; a
matched comparison with another system prompt is none. `Harness` puts all of it into one canonical record, the record's
hash stands on every trajectory, and statistics over trajectories go through `require_one_protocol`.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from owrl_jax.types import Trajectory


class MixedProtocols(ValueError):
    """Trajectories of different protocols were put into one statistic."""


def protocol_id(parts: Mapping[str, Any]) -> str:
    """The name of a protocol: 16 hex digits of the SHA-256 of its canonical JSON.

    Raises:
      TypeError: for a value that JSON does not have; what cannot be written down cannot be compared.
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Which parts of two protocols differ, one line each."""
    keys = sorted({*one, *other})
    return [
        f"{key}: {_short(one.get(key))} / {_short(other.get(key))}" for key in keys if one.get(key) != other.get(key)
    ]


def require_one_protocol(trajectories: Iterable[Trajectory], expected: str | None = None) -> str:
    """The protocol that all of them share.

    Args:
      trajectories: at least one.
      expected: the protocol they must have; None takes the first one's.

    Raises:
      MixedProtocols: if they do not share one, with the number of trajectories of each.
      ValueError: if there are none.
    """
    counts = collections.Counter(trajectory.protocol for trajectory in trajectories)
    if not counts:
        raise ValueError("there are no trajectories, so there is no protocol")
    known = set(counts) | ({expected} if expected is not None else set())
    if len(known) > 1:
        found = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
        wanted = f"; expected {expected}" if expected is not None else ""
        raise MixedProtocols(
            f"trajectories of different protocols cannot be compared or trained on together: {found}{wanted}. "
            "Run them again under one prompt, tool list, viewport and budget, or keep the statistics apart."
        )
    return next(iter(counts))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return (
        text
        if len(text) <= 80
        else f"{text[:40]}… ({len(text)} characters, {hashlib.sha256(text.encode()).hexdigest()[:8]})"
    )
