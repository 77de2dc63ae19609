"""Rewards, advantages and filters against values worked out by hand."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from owrl_jax.config import RlSettings
from owrl_jax.outcome import Outcome, Owner, Reason
from owrl_jax.rl.advantage import group_advantages, reward_of, score, staleness
from owrl_jax.rl.loss import normaliser, samples_of
from owrl_jax.types import Group, GroupRequest, Task, Trajectory, Turn, Verdict, VerdictValue

SETTINGS = RlSettings()
TASK = Task(id="t", instruction="find it", start_url="http://a/")
DONE = Outcome(reason=Reason.COMPLETED, detail="answered")
DIED = Outcome(reason=Reason.SANDBOX_ERROR, detail="renderer_crash")
SPENT = Outcome(reason=Reason.STEP_BUDGET, detail="max_steps")
GARBLED = Outcome(reason=Reason.FORMAT_ERROR, detail="consecutive_parse_failures")


def turn(parsed: bool = True, response: int = 2, version: int = 0) -> Turn:
    return Turn(
        trunk_ids=(1,), leaf_ids=(2,), response_ids=(3,) * response, logprobs=(-0.5,) * response,
        versions=(version,) * response, parsed=parsed,
    )  # fmt: skip


def episode(
    value: VerdictValue | None = VerdictValue.SUCCESS, outcome: Outcome = DONE, *, index: int = 0,
    turns: tuple[Turn, ...] = (turn(), turn()), protocol: str = "p",
) -> Trajectory:  # fmt: skip
    verdict = None if value is None else Verdict(value=value, judge="program")
    return Trajectory(
        task=TASK, group_id="g", index=index, protocol=protocol, turns=turns, outcome=outcome, verdict=verdict
    )


YES, NO, UNSURE = VerdictValue.SUCCESS, VerdictValue.FAILURE, VerdictValue.INVALID
KINDS = {
    "1": episode(YES),
    "0": episode(NO),
    "-1": episode(None, GARBLED),
    "spent": episode(None, SPENT),
    "died": episode(None, DIED),
    "unsure": episode(UNSURE),
    "unjudged": episode(None),
}


def group(*kinds: str, name: str = "g") -> Group:
    members = tuple(dataclasses.replace(KINDS[kind], index=i) for i, kind in enumerate(kinds))
    return Group(request=GroupRequest(task=TASK, group_id=name, n=max(len(kinds), 1)), trajectories=members)


@pytest.mark.parametrize(
    ("successes", "up", "down"),
    [(1, 1.789, -0.447), (2, 1.095, -0.730), (3, 0.730, -1.095), (4, 0.447, -1.789)],
)
def test_five_siblings_with_rewards_of_zero_and_one(successes, up, down):
    scored = score([group(*["1"] * successes, *["0"] * (5 - successes))], SETTINGS)
    found = [sample.advantage for sample in scored.samples]
    assert found == pytest.approx([up] * successes + [down] * (5 - successes), abs=5e-4)
    assert abs(sum(found)) < 1e-9


def test_the_small_number_stands_in_the_denominator():
    # mean 0.5, std 0.0007071…: without the floor these would be ±0.70711
    up, down = group_advantages([0.5005, 0.4995])
    assert up == pytest.approx(0.0005 / (0.001 / math.sqrt(2) + 1e-6), rel=1e-9)
    assert down == pytest.approx(-up)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_advantages_are_standard_scores(rewards):
    found = group_advantages(rewards)
    std = statistics.stdev(rewards)
    assert found == pytest.approx([(r - statistics.mean(rewards)) / (std + 1e-6) for r in rewards], rel=1e-6, abs=1e-6)
    assert group_advantages(rewards, divide=False) == pytest.approx([r - statistics.mean(rewards) for r in rewards])


@pytest.mark.parametrize(
    ("kinds", "kept", "reason"),
    [
        # the rows of T46
        (["1"] * 5, 0, "zero_variance"),
        (["0"] * 5, 0, "zero_variance"),
        (["1", "0", "died", "unsure", "died"], 2, ""),
        (["1", "died", "died", "unsure", "died"], 0, "single_valid"),
        (["-1", "0", "0", "0", "0"], 5, ""),
        # four successes and a judge that could not tell: no contrast, whatever placeholder stands for the fifth (J3)
        (["1", "1", "1", "1", "unsure"], 0, "zero_variance"),
        (["died", "unsure"], 0, "all_invalid"),
        ([], 0, "empty"),
        # a spent budget and garbled turns are failures of the policy, and valid
        (["spent", "1"], 2, ""),
        (["spent", "0"], 0, "zero_variance"),
        (["unjudged", "1", "0"], 2, ""),
    ],
)
def test_groups_that_teach_nothing_are_dropped_with_their_reason(kinds, kept, reason):
    scored = score([group(*kinds)], SETTINGS)
    assert len(scored.samples) == kept
    assert dict(scored.dropped) == ({reason: 1} if reason else {})
    assert all(math.isfinite(sample.advantage) for sample in scored.samples)
    assert sum(scored.excluded.values()) + len(scored.rewards) == len(kinds)


def test_a_partial_credit_that_differs_by_rounding_is_no_contrast():
    assert score([group("1", "0")], dataclasses.replace(SETTINGS, min_reward_spread=1.0)).dropped == {
        "zero_variance": 1
    }
    # 0.95 and 0.95 + 1e-9 through a format reward that lies a hair off the verdict's zero
    hair = dataclasses.replace(SETTINGS, format_error_reward=1e-9)
    assert score([group("-1", "0", "0")], hair).dropped == {"zero_variance": 1}
    assert len(score([group("-1", "0", "0")], dataclasses.replace(SETTINGS, format_error_reward=1e-5)).samples) == 3


def test_removing_a_dead_member_changes_the_statistics_of_the_others():
    without = score([group("1", "0", "0")], SETTINGS).samples
    beside = score([group("1", "died", "0", "unsure", "0")], SETTINGS).samples
    assert [s.advantage for s in without] == [s.advantage for s in beside]
    assert [s.trajectory.index for s in beside] == [0, 2, 4]


BROKEN_IN_THE_MIDDLE = (turn(), turn(parsed=False), turn())
BROKEN_AT_THE_END = (turn(), turn(parsed=False))


@pytest.mark.parametrize(
    ("trajectory", "gate", "reward"),
    [
        (episode(YES), "last", 1.0),
        (episode(NO), "last", 0.0),
        (episode(UNSURE), "last", None),
        (episode(None), "last", None),
        (episode(YES, GARBLED), "last", -1.0),
        (episode(YES, SPENT), "last", 0.0),
        (episode(YES, Outcome(reason=Reason.GENERATION_LIMIT, detail="response_cap")), "last", 0.0),
        (episode(YES, Outcome(reason=Reason.POLICY_BLOCK, detail="scheme", owner=Owner.POLICY)), "last", 0.0),
        (episode(YES, DIED), "last", None),
        (episode(YES, Outcome(reason=Reason.CANCELLED, detail="surplus")), "last", None),
        (episode(YES, turns=BROKEN_IN_THE_MIDDLE), "last", 1.0),
        (episode(YES, turns=BROKEN_IN_THE_MIDDLE), "every", 0.0),
        (episode(YES, turns=BROKEN_AT_THE_END), "last", 0.0),
        (episode(YES, turns=BROKEN_AT_THE_END), "off", 1.0),
        # the gate comes before the verdict: nobody was asked
        (episode(None, turns=BROKEN_AT_THE_END), "last", 0.0),
    ],
)
def test_rewards(trajectory, gate, reward):
    assert reward_of(trajectory, dataclasses.replace(SETTINGS, format_gate=gate)) == reward


def test_stale_members_leave_their_group():
    fresh = dataclasses.replace(KINDS["1"], turns=(turn(version=4), turn(version=5)))
    stale = dataclasses.replace(KINDS["0"], index=1, turns=(turn(version=3), turn(version=5)))
    assert (staleness(fresh, 5), staleness(stale, 5), staleness(episode(turns=(turn(version=-1),)), 5)) == (1, 2, 0)
    both = Group(request=GroupRequest(task=TASK, group_id="g", n=2), trajectories=(fresh, stale))
    one = score([both], dataclasses.replace(SETTINGS, max_staleness=1), version=5)
    assert (dict(one.excluded), dict(one.dropped)) == ({"stale": 1}, {"single_valid": 1})
    assert len(score([both], dataclasses.replace(SETTINGS, max_staleness=2), version=5).samples) == 2


def test_protocols_are_never_mixed():
    members = (KINDS["1"], dataclasses.replace(KINDS["0"], index=1, protocol="q"))
    mixed = Group(request=GroupRequest(task=TASK, group_id="g", n=2), trajectories=members)
    assert score([mixed], SETTINGS).dropped == {"mixed_protocol": 1}


def test_an_episode_is_scored_once():
    with pytest.raises(ValueError, match="twice"):
        score([group("1", "0"), group("1", "0")], SETTINGS)
    twins = Group(request=GroupRequest(task=TASK, group_id="g", n=2), trajectories=(KINDS["1"], KINDS["0"]))
    with pytest.raises(ValueError, match="twice"):
        score([twins], SETTINGS)


def test_numbers_for_the_log_say_what_they_count():
    long = dataclasses.replace(KINDS["0"], turns=(turn(), turn(parsed=False), turn(), turn()))
    members = (KINDS["1"], dataclasses.replace(long, index=1), dataclasses.replace(KINDS["died"], index=2))
    kept = Group(request=GroupRequest(task=TASK, group_id="a", n=3), trajectories=members)
    found = score([kept, group("1", "1", name="b")], SETTINGS).metrics()
    assert found["reward/mean_per_trajectory"] == pytest.approx(3 / 4)
    assert found["reward/mean_per_trained_trajectory"] == pytest.approx(1 / 2)
    assert found["reward/mean_per_trained_turn"] == pytest.approx(2 / 6)
    assert found["rollout/groups_dropped_zero_variance"] == 1
    assert found["rollout/trajectories_excluded/sandbox_error/renderer_crash"] == 1
    assert (found["rollout/turns_trained"], found["rollout/turns_malformed"]) == (6, 1)


@pytest.mark.parametrize(
    ("objective", "weights", "z"),
    [
        ("mm_grpo", [[1, 1], [1, 1, 1, 1]], 6),
        ("trajectory_mean", [[0.5, 0.5], [0.25] * 4], 2),
        ("constant", [[0.1, 0.1], [0.1] * 4], 2),
    ],
)
def test_weights_and_normaliser_of_the_objectives(objective, weights, z):
    settings = dataclasses.replace(SETTINGS, objective=objective, turn_constant=10.0)
    long = dataclasses.replace(KINDS["0"], turns=(turn(), turn(parsed=False), turn(), turn()), index=1)
    pair = Group(request=GroupRequest(task=TASK, group_id="a", n=2), trajectories=(KINDS["1"], long))
    samples = samples_of(score([pair], settings), settings)
    assert [list(sample.turn_weights) for sample in samples] == weights
    assert normaliser(samples) == z


def test_a_malformed_turn_may_be_kept_from_the_credit_of_its_episode():
    broken = dataclasses.replace(KINDS["1"], turns=BROKEN_IN_THE_MIDDLE)
    failed = dataclasses.replace(KINDS["0"], turns=BROKEN_IN_THE_MIDDLE, index=1)
    pair = Group(request=GroupRequest(task=TASK, group_id="a", n=2), trajectories=(broken, failed))
    strict = dataclasses.replace(SETTINGS, credit_malformed=False)
    good, bad = samples_of(score([pair], strict), strict)
    assert (good.turn_weights, bad.turn_weights) == ((1, 0, 1), (1, 1, 1))
    assert normaliser([good, bad]) == 5
    assert [sample.turn_weights for sample in samples_of(score([pair], SETTINGS), SETTINGS)] == [(1, 1, 1)] * 2


def test_a_turn_without_a_response_has_no_weight():
    mute = dataclasses.replace(KINDS["1"], turns=(turn(), turn(response=0)))
    pair = Group(
        request=GroupRequest(task=TASK, group_id="a", n=2),
        trajectories=(mute, dataclasses.replace(KINDS["0"], index=1)),
    )
    samples = samples_of(score([pair], SETTINGS), SETTINGS)
    assert samples[0].live == (0,)
    assert normaliser(samples) == 3
