"""One turn on its way from calls to results, and the protocol that every sandbox speaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from owrl_jax.agent.page_text import one_line
from owrl_jax.browser import feedback
from owrl_jax.browser.settle import Settled
from owrl_jax.types import CallResult, CallStatus, StepResult, Task, ToolCall


@runtime_checkable
class SandboxProtocol(Protocol):
    """What every sandbox offers: this one, one over a CDP endpoint, one behind HTTP, a recording or leased one."""

    async def reset(self, task: Task) -> StepResult:
        """Begins an episode. The result has no `results`, and either an observation or an outcome."""
        ...

    async def step(self, calls: Sequence[ToolCall]) -> StepResult:
        """Executes the calls of one turn, in order; one result per call."""
        ...

    async def close(self) -> None:
        """Gives everything back. Idempotent, survives cancellation."""
        ...


@dataclasses.dataclass
class Turn:
    """What one turn has come to so far."""

    results: list[CallResult] = dataclasses.field(default_factory=list)
    act_ms: float = 0.0
    settle_ms: float = 0.0
    settled: Settled | None = None
    answer: str | None = None
    stop: str = ""  # why nothing more is run
    moved: str = ""  # why calls that were meant for the page seen are not run
    keys: str = ""  # why keyboard calls are not run


def shown_name(call: ToolCall) -> str:
    """The name of a call, as harmless text."""
    return one_line(call.name, 30)


def result(name: str, status: CallStatus, parts: list[str]) -> CallResult:
    """A result with its line of feedback."""
    return CallResult(name=str(name), status=status, feedback=feedback.line(status, parts))


def skipped(call: ToolCall, why: str) -> CallResult:
    """The result of a call that was not run."""
    return result(call.name, CallStatus.SKIPPED, [f"{shown_name(call)} was not run because {why}"])


def bare(url: str) -> str:
    """An address without scheme and final slash, for comparing."""
    return url.rstrip("/").split("://", 1)[-1].lower()
