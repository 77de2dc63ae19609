"""The seam between episodes and whoever judges them: a trajectory and its evidence in, a `Verdict` out.

A verdict is one of three. `invalid` means that nobody could tell: the judge was down, its reply had no verdict, the
evidence is missing, or the episode did not end by the policy's doing. It is never read as failure: what is invalid
leaves rewards, baselines and denominators (`Trajectory.valid`). So a judge that is down costs time, not truth.

`gate` holds the rules that need no judge. They come first everywhere, and save the calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from owrl_jax.outcome import Reason
from owrl_jax.types import Screenshot, Trajectory, Verdict, VerdictValue


class JudgingStopped(Exception):
    """The spending limit of a judge is reached; the call was not made. Whoever runs the episodes must stop."""


class EvidenceMissing(LookupError):
    """A picture that a judge must see cannot be had."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a judge may look at beside the trajectory.

    Attributes:
      picture: the bytes of a screenshot by content hash, `ScreenshotStore.get` for instance; raises LookupError.
      program: what the task's own program says, given the answer; `Visit.verdict` of a local world. None on the web.
    """

    picture: Callable[[str], bytes]
    program: Callable[[str | None], Verdict] | None = None

    @classmethod
    def of_screenshots(
        cls, screenshots: Iterable[Screenshot], program: Callable[[str | None], Verdict] | None = None
    ) -> Evidence:
        """Evidence that is at hand in memory."""
        known = {shot.sha256: shot.data for shot in screenshots}
        return cls(picture=known.__getitem__, program=program)


class Judge(Protocol):
    """Whoever judges."""

    @property
    def name(self) -> str:
        """Names the judge with everything that its verdicts depend on; stands on each verdict."""
        ...

    async def judge(self, trajectory: Trajectory, evidence: Evidence) -> Verdict:
        """What came of the episode. Faults of the judge are an invalid verdict, never an exception.

        Raises:
          JudgingStopped: if its spending limit is reached.
        """
        ...


def judge_call(judge: Judge, picture: Callable[[str], bytes]) -> Callable[[Trajectory], Awaitable[Verdict]]:
    """A judge as a pool asks it: the trajectory alone, its pictures by hash from a store (`ScreenshotStore.get`)."""

    async def call(trajectory: Trajectory) -> Verdict:
        return await judge.judge(trajectory, Evidence(picture=picture))

    return call


def verdict(value: VerdictValue, judge: str, rationale: str, **fields: Any) -> Verdict:
    """A verdict, its rationale cut to a length that a journal can bear."""
    return Verdict(value=value, judge=judge, rationale=rationale[:4000], **fields)


def gate(trajectory: Trajectory, judge: str) -> Verdict | None:
    """The verdict that follows from how the episode ended, without looking; None if somebody must look.

    | ending | verdict |
    |---|---|
    | not the policy's doing (site, sandbox, judge, operator) | invalid |
    | the policy's, but it never called done (steps, context, format) | failure |
    | done with an empty answer | failure |
    | done with an answer | None: somebody must look |
    """
    outcome = trajectory.outcome
    if not outcome.trains:
        why = f"The episode ended by {outcome.key}, which is not the policy's doing."
        return verdict(VerdictValue.INVALID, judge, why, reasons=("outcome",))
    if outcome.reason is not Reason.COMPLETED:
        why = f"The episode ended by {outcome.key}; done was never called."
        return verdict(VerdictValue.FAILURE, judge, why, reasons=("not_completed",))
    if not (trajectory.answer or "").strip():
        return verdict(VerdictValue.FAILURE, judge, "done was called without an answer.", reasons=("no_answer",))
    return None
