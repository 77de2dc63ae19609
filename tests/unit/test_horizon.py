"""The horizon that grows by itself: worked cases, and who has a say."""

import dataclasses

import pytest

from owrl_jax.config import HorizonSettings
from owrl_jax.outcome import Outcome, Reason
from owrl_jax.rl.horizon import next_horizon
from owrl_jax.types import Verdict, VerdictValue

from .judge_world import COMPLETED, trajectory, turn

LATE = Outcome(reason=Reason.STEP_BUDGET, detail="max_steps")
CRASH = Outcome(reason=Reason.SANDBOX_ERROR, detail="renderer_crash")
GROWING = HorizonSettings(start=8, most=30, finished_share=0.8, growth=1.25)


def episode(turns, outcome=COMPLETED, value=VerdictValue.FAILURE):
    one = trajectory(*[turn(0)] * turns, outcome=outcome)
    return dataclasses.replace(one, verdict=Verdict(value=value, judge="j"))


EARLY, LAST, CUT = episode(3), episode(8), episode(8, LATE)
DEAD, UNTOLD = episode(1, CRASH), episode(8, LATE, VerdictValue.INVALID)


@pytest.mark.parametrize(
    ("played", "wanted"),
    [
        ([EARLY] * 4 + [CUT], 10),  # 4 of 5: 8 x 1.25
        ([EARLY] * 3 + [CUT], 8),  # 3 of 4 are too few
        ([EARLY] * 3 + [LAST], 8),  # done in the last turn is not early
        ([EARLY] * 4 + [CUT] + [DEAD] * 9, 10),  # a fault has no say
        ([EARLY] * 4 + [CUT] + [UNTOLD] * 9, 10),  # neither has what nobody could judge
        ([DEAD, UNTOLD], 8),
        ([], 8),
    ],
)
def test_it_grows_when_valid_episodes_finish_early(played, wanted):
    assert next_horizon(8, played, GROWING) == wanted


def test_it_grows_by_a_turn_at_least_stops_at_the_most_and_can_be_off():
    assert next_horizon(2, [episode(1)], dataclasses.replace(GROWING, start=2, growth=1.01)) == 3
    steps = [8]
    while steps[-1] != (after := next_horizon(steps[-1], [EARLY], GROWING)):
        steps.append(after)
    assert steps == [8, 10, 13, 17, 22, 28, 30]
    assert next_horizon(0, [EARLY], HorizonSettings()) == 0
