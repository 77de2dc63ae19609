"""Where an episode gets its sandbox from, said once for the local pool and for whatever serves it to others.

A source hands out sandboxes one episode at a time. `NoSandbox` is its only refusal, and it carries the typed outcome,
so that a caller can end the episode without guessing. `browser/episodes.py` serves any source over HTTP; `pool` has
the one for this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from owrl_jax.outcome import Outcome
from owrl_jax.types import StepResult, Task, ToolCall


class NoSandbox(Exception):
    """No sandbox could be had; `outcome` says why (no capacity, launch failed, browser missing, shutting down)."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.key}: {outcome.message}")
        self.outcome = outcome


class EpisodeSandbox(Protocol):
    """A sandbox held for one episode."""

    outcome: Outcome | None

    @property
    def released(self) -> bool:
        """Whether it has been given back, by its holder or because nobody gave a sign of life."""
        ...

    async def reset(self, task: Task) -> StepResult: ...
    async def step(self, calls: Sequence[ToolCall]) -> StepResult: ...
    def heartbeat(self) -> bool: ...
    def finish(self, outcome: Outcome) -> Outcome: ...
    async def close(self) -> None: ...


class SandboxSource(Protocol):
    """Hands out sandboxes."""

    async def acquire(self, *, wait_s: float | None = None) -> Any:
        """An `EpisodeSandbox`. Raises `NoSandbox`."""
        ...
