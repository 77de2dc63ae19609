"""One episode's sandbox with the lease around it: what `SandboxPool.acquire` hands out.

It is the ordinary sandbox protocol. Around every call it beats the lease's heart, cuts the call off with a typed
outcome when the lease is lost (the browser died, nobody gave a sign of life, the pool closed), and asks whether the
browser itself still answers before it passes on an outcome that blames the site: seen from inside, a browser that
dies or stops looks like a page that closes, crashes or says nothing.

Invariant: an episode has one ending. The first one stands, whoever says it; after it, calls are skipped and it comes
again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from owrl_jax.outcome import Outcome, Owner, Phase, Reason, from_exception
from owrl_jax.pool.leases import Lease
from owrl_jax.types import CallResult, CallStatus, StepResult, Task, ToolCall

_log = logging.getLogger(__name__)


class Sandbox(Protocol):
    """What the pool asks of a sandbox (`browser.sandbox.Sandbox` in real life)."""

    async def reset(self, task: Task) -> StepResult: ...
    async def step(self, calls: Sequence[ToolCall]) -> StepResult: ...
    async def close(self) -> None: ...


class LeaseKeeper(Protocol):
    """What a leased sandbox asks of the pool that it came from."""

    def heartbeat(self, lease: Lease) -> bool: ...
    def is_released(self, lease: Lease) -> bool: ...
    async def release(self, sandbox: LeasedSandbox) -> None: ...
    async def browser_fault(self, lease: Lease, blamed: Outcome) -> Outcome | None: ...


class LeasedSandbox:
    """One episode's sandbox: the sandbox protocol with a lease around it. Made by `SandboxPool.acquire` alone."""

    def __init__(self, keeper: LeaseKeeper, lease: Lease, inner: Sandbox) -> None:
        self._keeper = keeper
        self._inner = inner
        self._lost: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.lease = lease
        self.outcome: Outcome | None = None

    @property
    def released(self) -> bool:
        """Whether the lease has been given back, or is being given back."""
        return self._keeper.is_released(self.lease)

    @property
    def inner(self) -> Any:
        """The sandbox itself, for what the protocol does not have (recording, tests)."""
        return self._inner

    def heartbeat(self) -> bool:
        """Keeps the lease alive; False if it is over."""
        return self._keeper.heartbeat(self.lease)

    def finish(self, outcome: Outcome) -> Outcome:
        """Says how the episode ended (step budget, cancelled …). The first word stands; returns the one that does."""
        if self.outcome is None:
            self.outcome = outcome
        return self.outcome

    async def reset(self, task: Task) -> StepResult:
        """The start page of `task`, or an outcome that says why there is none."""
        return await self._guarded(self._inner.reset, task, calls=(), phase=Phase.RESET)

    async def step(self, calls: Sequence[ToolCall]) -> StepResult:
        """Runs the calls of one turn; once the episode is over they are skipped and its outcome comes again."""
        return await self._guarded(self._inner.step, calls, calls=calls, phase=Phase.STEP)

    async def close(self) -> None:
        """Gives the sandbox back. Any number of times, from anywhere; finishes even if the caller is cancelled."""
        await self._keeper.release(self)

    async def _guarded(
        self, act: Callable[[Any], Awaitable[StepResult]], argument: Any, *, calls: Sequence[ToolCall], phase: Phase
    ) -> StepResult:
        if self.outcome is None and not self.heartbeat():
            self.finish(lost_outcome("the lease ended before this call: no heartbeat, or given back"))
        if self.outcome is not None:
            return _refused(calls, self.outcome)
        work = asyncio.ensure_future(act(argument))
        try:
            await asyncio.wait({work, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():  # the lease was lost while the sandbox was at work
                return _refused(calls, self.finish(dataclasses.replace(self._lost.result(), phase=phase)))
            result = work.result()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the sandbox promises outcomes: a bug of ours, logged as one
            _log.exception("a sandbox raised instead of ending with an outcome")
            outcome = from_exception(
                error, reason=Reason.SANDBOX_ERROR, detail="unknown", owner=Owner.SANDBOX, phase=phase
            )
            return _refused(calls, self.finish(outcome))
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=1.0)
        self.heartbeat()
        if self.outcome is None and result.outcome is not None and result.outcome.owner is Owner.SITE:
            # Seen from inside, a browser that dies or stops looks like a page that closes, crashes or says nothing.
            fault = await self._keeper.browser_fault(self.lease, result.outcome)
            if fault is not None:
                result = dataclasses.replace(result, outcome=self.finish(fault))
        if result.outcome is not None and self.finish(result.outcome) is not result.outcome:
            result = dataclasses.replace(result, outcome=self.outcome)
        return result

    def lose(self, outcome: Outcome) -> None:
        self.finish(outcome)
        if not self._lost.done():
            self._lost.set_result(outcome)


def _refused(calls: Sequence[ToolCall], outcome: Outcome) -> StepResult:
    """The answer to calls that were not run, or whose run was cut off, because the episode is over."""
    line = f"Not run to its end: the episode is over ({outcome.key})."
    results = tuple(CallResult(name=call.name, status=CallStatus.SKIPPED, feedback=line) for call in calls)
    return StepResult(results=results, observation=None, outcome=outcome)


def lost_outcome(message: str) -> Outcome:
    return Outcome(reason=Reason.SANDBOX_ERROR, detail="lease_lost", message=message)
