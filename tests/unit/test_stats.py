"""Statistics of evaluations, against values worked out by hand, tables of the literature, and scipy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from owrl_jax.obs.stats import (
    Attempt,
    Evaluation,
    NotComparable,
    append_evaluation,
    attempt_of,
    bootstrap,
    compare,
    mcnemar_exact,
    mean_pass_at_k,
    pass_at_k,
    rate,
    read_evaluations,
    success,
    success_over_units,
    table,
    wilson,
)
from owrl_jax.outcome import Outcome, Owner, Reason
from owrl_jax.types import Trajectory, Verdict, VerdictValue

from .harness_world import task


def attempts(*said: bool | None, **fields) -> tuple[Attempt, ...]:
    return tuple(Attempt(task=f"t{n}", seed=n, success=s, **fields) for n, s in enumerate(said))


# --- One rate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3 (score without continuity correction)
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_the_published_intervals(successes, n, low, high):
    assert wilson(successes, n) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_wilson_at_the_ends():
    assert wilson(0, 0) == (0, 1)
    assert wilson(7, 7)[1] == 1 and wilson(0, 7)[0] == 0
    low, high = wilson(3, 7)
    assert wilson(4, 7) == (pytest.approx(1 - high), pytest.approx(1 - low))
    assert wilson(3, 7, confidence=0.5)[0] > low
    with pytest.raises(ValueError, match="8 of 7"):
        wilson(8, 7)
    with pytest.raises(ValueError, match="got 95"):
        wilson(1, 7, confidence=95)


def test_wilson_covers_what_it_promises():
    """By the definition of an interval of 95 %: exact coverage over the binomial, averaged over shares."""
    n = 40
    shares = np.linspace(0.05, 0.95, 181)
    covered = []
    for p in shares:
        covered.append(
            sum(
                math.comb(n, k) * p**k * (1 - p) ** (n - k)
                for k in range(n + 1)
                if wilson(k, n)[0] <= p <= wilson(k, n)[1]
            )
        )
    assert 0.945 < np.mean(covered) < 0.96


def test_success_over_all_and_over_valid():
    found = success(attempts(True, True, False, None, None))
    assert (found.over_all.successes, found.over_all.n, found.over_all.share) == (2, 5, 0.4)
    assert (found.over_valid.successes, found.over_valid.n) == (2, 3) and found.invalid == 2
    assert str(rate(1, 2)) == "50.0% [9.5%, 90.5%] (1 of 2)"
    assert math.isnan(success([]).over_all.share) and str(rate(0, 0)) == "none of 0"


def test_tables_by_site_and_level():
    rows = (
        *attempts(True, False, site="shop", level=2.0),
        *attempts(True, None, site="desk", level=10.0),
        *attempts(False, site="desk"),
    )
    by_site = table(rows, "site")
    assert list(by_site) == ["desk", "shop"]
    assert (by_site["desk"].over_all.n, by_site["desk"].over_valid.n, by_site["desk"].invalid) == (3, 2, 1)
    assert list(table(rows, "level")) == ["2", "10", "unknown"]


# --- Several tries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 2), (5, 2, 4), (4, 0, 3), (4, 4, 1), (6, 1, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_success(n, c, k):
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_pass_at_k_refuses_more_tries_than_there_are():
    with pytest.raises(ValueError, match="n=2, c=1, k=3"):
        pass_at_k(2, 1, 3)


def test_mean_pass_at_k_leaves_out_what_was_tried_too_rarely():
    def tries(name, *said):
        return [Attempt(task=name, success=s, attempt=n) for n, s in enumerate(said)]

    rows = [*tries("a", True, False, False), *tries("b", False, False, None), *tries("c", True, None, None)]
    found = mean_pass_at_k(rows, 2)
    assert found.units == 2  # c has one valid try
    assert found.value == pytest.approx((2 / 3 + 0) / 2)  # a: 2 of the 3 pairs hold the success; b: none
    assert mean_pass_at_k(rows, 1).value == pytest.approx((1 / 3 + 0 + 1) / 3)
    assert math.isnan(mean_pass_at_k(rows, 4).value)


def test_the_bootstrap_gives_the_same_interval_again_and_about_the_normal_one():
    row = np.random.default_rng(1).normal(3, 2, 400)
    found = bootstrap(row.tolist(), samples=4000)
    assert found == bootstrap(row.tolist(), samples=4000) and found.value == pytest.approx(row.mean())
    half = 1.96 * row.std(ddof=1) / 20
    assert found.low == pytest.approx(row.mean() - half, abs=0.02)
    assert found.high == pytest.approx(row.mean() + half, abs=0.02)
    assert bootstrap([2.0, 2.0]).low == 2.0 and math.isnan(bootstrap([]).value)


def test_instances_of_one_template_are_no_independent_tries():
    """Ten templates, each all right or all wrong over 20 seeds: 200 attempts that are worth ten."""
    rows = [
        Attempt(task=f"s/{t}/{seed}", seed=seed, site="s", template=str(t), success=t < 5)
        for t in range(10)
        for seed in range(20)
    ]
    found, naive = success_over_units(rows), success(rows).over_valid
    assert found.units == 10 and found.value == naive.share == 0.5
    assert found.high - found.low > 3 * (naive.high - naive.low)


# --- Two checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (0, 5, 0.0625), (2, 8, 0.109375), (10, 10, 1.0), (8, 2, 0.109375)],
)
def test_mcnemar_by_hand(b, c, p):
    assert mcnemar_exact(b, c) == pytest.approx(p)  # 2 · Σ C(n, i) / 2^n for i up to the smaller one


def test_mcnemar_equals_a_binomial_test():
    binomtest = pytest.importorskip("scipy.stats", reason="scipy comes with jax").binomtest
    for b, c in itertools.product(range(12), repeat=2):
        if b + c:
            assert mcnemar_exact(b, c) == pytest.approx(binomtest(b, b + c, 0.5).pvalue)


def evaluation(said, *, at=0, **fields) -> Evaluation:
    return Evaluation(at=at, name="held_out", protocol="p", tasks=attempts(*said), **fields)


def test_a_paired_comparison_counts_pairs():
    first = evaluation([True, True, False, False, False, None, True])
    second = evaluation([True, False, True, True, False, True], at=9)
    found = compare(first, second)
    assert (found.both, found.only_first, found.only_second, found.neither) == (1, 1, 2, 1)
    assert (found.pairs, found.dropped, found.unmatched) == (5, 1, 1)
    assert found.difference == pytest.approx(0.2) and found.low < 0.2 < found.high
    assert found.p_value == 1.0  # 2 of 3
    assert str(found).startswith("+20.0 points [") and "(2 gained, 1 lost of 5 pairs)" in str(found)


def test_one_template_alone_has_an_interval_of_its_instances():
    """Drawing whole templates gave a point where a run has one: +18.0 [+18.0, +18.0]. The mean's own error, by hand."""
    one = [True] * 22 + [False] * 78
    other = [True] * 9 + [False] * 13 + [True] * 31 + [False] * 47
    before, after = (
        Evaluation(at=at, name="held_out", protocol="p", tasks=attempts(*said, template="colour_shape"))
        for at, said in ((0, one), (10, other))
    )
    found = compare(before, after)
    assert found.difference == pytest.approx(0.18)
    error = math.sqrt((0.44 - 0.18**2) / 100)  # of 44 differences of one, 31 up and 13 down
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    alone = success_over_units(after.tasks)
    assert alone.units == 1 and alone.low < 0.34 and alone.high > 0.46


def test_what_cannot_be_compared_is_refused():
    one = evaluation([True])
    with pytest.raises(NotComparable, match="protocols differ"):
        compare(one, Evaluation(at=1, name="held_out", protocol="q", tasks=one.tasks))
    with pytest.raises(NotComparable, match="different task sets"):
        compare(one, Evaluation(at=1, name="train", protocol="p", tasks=one.tasks))
    with pytest.raises(NotComparable, match="share no task"):
        compare(one, Evaluation(at=1, name="held_out", protocol="p", tasks=(Attempt(task="z", success=True),)))
    with pytest.raises(NotComparable, match="twice"):
        compare(one, Evaluation(at=1, name="held_out", protocol="p", tasks=one.tasks * 2))


# --- On disk, and from trajectories ----------------------------------------------------------------------------------


def test_evaluations_read_back_and_a_repeated_one_counts_once(tmp_path):
    append_evaluation(tmp_path, evaluation([True, None], at=5))
    append_evaluation(tmp_path, evaluation([False], at=0))
    with (tmp_path / "evals.jsonl").open("ab") as file:
        file.write(b'{"at": 7, "name": "held')  # a crash
    append_evaluation(tmp_path, evaluation([True, True], at=5))
    found = read_evaluations(tmp_path)
    assert found == [evaluation([False], at=0), evaluation([True, True], at=5)]
    assert read_evaluations(tmp_path / "nowhere") == []


def test_a_line_as_the_evaluation_writes_it_is_understood(tmp_path):
    attempt = '{"task": "a", "seed": 1, "site": "s", "level": 2, "success": null, "new": 1}'
    line = f'{{"at": 3, "name": "x", "tasks": [{attempt}]}}'
    (tmp_path / "evals.jsonl").write_text(line + "\n")
    (found,) = read_evaluations(tmp_path)
    assert found.at == 3 and found.tasks == (Attempt(task="a", seed=1, site="s", level=2.0, success=None),)


@pytest.mark.parametrize(
    ("outcome", "verdict", "said"),
    [
        (Outcome(reason=Reason.COMPLETED, detail="answered"), VerdictValue.SUCCESS, True),
        (Outcome(reason=Reason.COMPLETED, detail="answered"), VerdictValue.FAILURE, False),
        (Outcome(reason=Reason.COMPLETED, detail="answered"), VerdictValue.INVALID, None),
        (Outcome(reason=Reason.COMPLETED, detail="answered"), None, None),
        (Outcome(reason=Reason.STEP_BUDGET, detail="max_steps"), None, False),
        (Outcome(reason=Reason.SANDBOX_ERROR, detail="browser_gone"), VerdictValue.FAILURE, None),
        (Outcome(reason=Reason.SANDBOX_ERROR, detail="unknown", owner=Owner.ENV), None, None),
    ],
)
def test_an_attempt_is_what_its_trajectory_allows_to_say(outcome, verdict, said):
    one = Trajectory(
        task=task(site="shop", difficulty=2.0, seed=4, metadata={"template": "buy"}),
        group_id="g",
        index=0,
        protocol="p",
        turns=(),
        outcome=outcome,
        verdict=None if verdict is None else Verdict(value=verdict, judge="j"),
    )
    found = attempt_of(one, attempt=2)
    assert (found.success, found.site, found.level, found.seed, found.template) == (said, "shop", 2.0, 4, "buy")
    assert found.outcome == outcome.key and found.attempt == 2
