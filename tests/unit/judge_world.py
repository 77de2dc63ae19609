"""Trajectories and pictures for the tests of judges."""

from __future__ import annotations

from owrl_jax.outcome import Outcome, Reason
from owrl_jax.types import CallResult, CallStatus, Screenshot, Task, ToolCall, Trajectory, Turn

from .engine_world import png

COMPLETED = Outcome(reason=Reason.COMPLETED, detail="answered")


def picture(mark: int) -> Screenshot:
    return Screenshot(data=png(64, 64, mark), width=64, height=64)


def turn(mark: int | None, *calls: tuple[str, dict, str], parsed: bool = True) -> Turn:
    """A turn that saw picture `mark` and made calls (name, arguments, feedback)."""
    return Turn(
        trunk_ids=(1,),
        leaf_ids=(2,),
        response_ids=(3,),
        logprobs=(-0.5,),
        versions=(0,),
        screenshot=None if mark is None else picture(mark).sha256,
        grid=None if mark is None else (4, 4),
        calls=tuple(ToolCall(name=name, arguments=arguments) for name, arguments, _ in calls),
        results=tuple(CallResult(name=name, status=CallStatus.OK, feedback=said) for name, _, said in calls),
        parsed=parsed,
    )


def trajectory(
    *turns: Turn,
    answer: str | None = "It costs 12.50.",
    outcome: Outcome = COMPLETED,
    final: int | None = 9,
    rubric: tuple[str, ...] = (),
    instruction: str = "What does the red lamp cost?",
) -> Trajectory:
    shown = turns or (
        turn(0, ("click", {"point_2d": [1, 2]}, "Succeed: clicked.")),
        turn(1, ("done", {"response": answer or ""}, "Succeed: done.")),
    )
    return Trajectory(
        task=Task(id="t1", instruction=instruction, start_url="http://a.b/", rubric=rubric),
        group_id="g1",
        index=2,
        protocol="p",
        turns=tuple(shown),
        outcome=outcome,
        answer=answer,
        final_screenshot=None if final is None else picture(final).sha256,
    )
