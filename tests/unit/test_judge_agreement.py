"""Agreement and drift, against cases worked out by hand and the binomial distribution of scipy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from owrl_jax.judge.agreement import agreement, binomial_tail, drift
from owrl_jax.types import VerdictValue

S, F, I = VerdictValue.SUCCESS, VerdictValue.FAILURE, VerdictValue.INVALID  # noqa: E741


def test_by_hand():
    # 10 trajectories with a truth; the judge: 4 right yes, 3 right no, 2 wrong yes, 1 wrong no; 2 it could not tell.
    pairs = [(S, S)] * 4 + [(F, F)] * 3 + [(S, F)] * 2 + [(F, S)] + [(I, S), (I, F)] + [(S, I)] * 3 + [(I, I)]
    got = agreement(pairs)
    assert got.compared == 10 and got.truth_invalid == 4 and got.judge_invalid == 2
    assert got.accuracy == 0.7
    assert got.precision == pytest.approx(4 / 6) and got.recall == 0.8
    assert got.f1 == pytest.approx(8 / 11)  # 2·(4/6)·(4/5) / (4/6 + 4/5)
    assert got.false_positive_rate == 0.4 and got.invalid_rate == pytest.approx(2 / 12)
    # By chance: 0.6·0.5 + 0.4·0.5 = 0.5; so (0.7 − 0.5) / 0.5.
    assert got.kappa == pytest.approx(0.4)
    assert any("70.0 %" in line for line in got.lines())


def test_the_paper_s_row_is_consistent_with_these_formulas():
    """Judge-8B of the paper: precision 89.5, recall 94.8, F1 92.1 on 500 trajectories."""
    truths = 300
    hits = round(0.948 * truths)
    alarms = round(hits / 0.895 - hits)
    got = agreement([(S, S)] * hits + [(F, S)] * (truths - hits) + [(S, F)] * alarms + [(F, F)] * (200 - alarms))
    assert got.f1 == pytest.approx(0.921, abs=0.002)


def test_nothing_to_compare():
    got = agreement([(I, I), (S, I)])
    assert (got.accuracy, got.precision, got.recall, got.f1, got.kappa, got.invalid_rate) == (None,) * 6
    assert got.lines() and agreement([]).compared == 0
    assert agreement([(S, S)] * 3).kappa is None and agreement([(F, F)] * 3).precision is None


def test_invalid_verdicts_change_no_ratio_but_their_own():
    pairs = [(S, S), (F, S), (S, F)]
    with_invalid = agreement([*pairs, *[(I, S)] * 50, *[(S, I)] * 50])
    plain = agreement(pairs)
    assert (with_invalid.accuracy, with_invalid.precision, with_invalid.recall) == (
        plain.accuracy,
        plain.precision,
        plain.recall,
    )


def test_the_tail_by_hand():
    assert binomial_tail(0, 0) == 1.0 and binomial_tail(0, 5) == 1.0
    assert binomial_tail(5, 5) == 1 / 32
    assert binomial_tail(4, 5) == 6 / 32
    assert binomial_tail(8, 10) == 56 / 1024  # 45 + 10 + 1


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 60))
def test_the_tail_is_scipys(k, extra):
    from scipy.stats import binom

    n = k + extra
    assert binomial_tail(k, n) == pytest.approx(binom.sf(k - 1, n, 0.5), rel=1e-9)


def test_drift():
    same = [(S, S)] * 60 + [(F, F)] * 40
    fair = drift([*same, *[(S, F)] * 6, *[(F, S)] * 6])
    assert not fair.alarm and fair.gap == 0 and fair.p > 0.5
    hacked = drift([*same, *[(S, F)] * 12, *[(F, S)] * 1])
    assert hacked.alarm and (hacked.lenient, hacked.strict) == (12, 1)
    assert hacked.p == pytest.approx(14 / 2**13)  # 13 + 1 of 8192
    assert hacked.gap == pytest.approx(11 / 113) and "ALARM" in hacked.line()
    strict = drift([*same, *[(S, F)] * 1, *[(F, S)] * 12])
    assert not strict.alarm and strict.gap < 0  # a judge that is too hard is no hack
    few = drift([*same, *[(S, F)] * 3])
    assert not few.alarm  # 1/8
    small = drift([(S, S)] * 1000 + [(S, F)] * 12)
    assert not small.alarm and small.p < 0.01  # certain, and too small to matter
    assert not drift([(I, S)] * 20 + [(S, I)] * 20).alarm
    assert not drift([]).alarm and drift([]).p == 1.0
    with pytest.raises(ValueError, match="alpha"):
        drift([], alpha=0)
