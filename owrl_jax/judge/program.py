"""The program's word: local worlds know the state that a task must end in, and look at it."""

from __future__ import annotations

import logging

from owrl_jax.judge.protocol import Evidence, verdict
from owrl_jax.types import Trajectory, Verdict, VerdictValue

_log = logging.getLogger(__name__)


class ProgramJudge:
    """Asks the task's own program (`Evidence.program`); exact, free, and at once."""

    name = "program"

    async def judge(self, trajectory: Trajectory, evidence: Evidence) -> Verdict:
        """See `Judge`. An ending that is not the policy's doing is invalid, whatever state the site is in."""
        if not trajectory.outcome.trains:
            why = f"The episode ended by {trajectory.outcome.key}, which is not the policy's doing."
            return verdict(VerdictValue.INVALID, self.name, why, reasons=("outcome",))
        if evidence.program is None:
            why = f"Task {trajectory.task.id} has no program that could tell: ask a model judge."
            return verdict(VerdictValue.INVALID, self.name, why, reasons=("no_program",))
        try:
            return evidence.program(trajectory.answer)
        except Exception as error:  # noqa: BLE001 - a bug of a world is no failure of the policy
            _log.exception("the program of task %s failed", trajectory.task.id)
            why = f"The task's program failed ({type(error).__name__}: {error})."
            return verdict(VerdictValue.INVALID, self.name, why, reasons=("program_error",))
