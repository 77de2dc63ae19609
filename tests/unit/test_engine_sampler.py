"""What is drawn, how often, and with which log-prob."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from owrl_jax.engine.sampler import Draw, sample

V, ROWS = 150, 64
BANNED = (7, 149)


@functools.partial(jax.jit, static_argnums=(2, 3))
def drawn_by(logits, draw, banned, top, want):
    return sample(logits, draw, banned, top, want)


def draw_rows(logits, *, banned=BANNED, want=False, **fields):
    """`ROWS` rows of the same settings but for what `fields` says per row."""
    draw = Draw.empty(ROWS)
    draw.temperature[:] = 1.0
    for name, value in fields.items():
        getattr(draw, name)[:] = value
    return jax.device_get(drawn_by(jnp.broadcast_to(logits, (ROWS, V)), draw, banned, 5, want))


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return (2 * np.random.default_rng(0).standard_normal(V)).astype(np.float32)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def test_frequencies_are_those_of_the_distribution(logits):
    counts = np.zeros(V)
    for place in range(400):
        ids = draw_rows(logits, seed=np.arange(ROWS), place=place).ids
        np.add.at(counts, ids, 1)
    n = counts.sum()
    p = np.exp(log_softmax(np.where(np.isin(np.arange(V), BANNED), -np.inf, logits)))
    assert counts[list(BANNED)].sum() == 0
    often = p * n >= 5
    chi2 = ((counts - p * n)[often] ** 2 / (p * n)[often]).sum()
    free = often.sum() - 1
    assert abs(chi2 - free) < 5 * np.sqrt(2 * free)  # five standard deviations of its distribution


def test_logprob_is_the_learners(logits):
    """Of the whole distribution at that temperature, placeholders included."""
    for temperature in (0.5, 0.8, 1.7):
        out = draw_rows(logits, seed=np.arange(ROWS), temperature=temperature)
        expected = log_softmax(logits / np.float32(temperature))[out.ids]
        np.testing.assert_allclose(out.logprobs, expected, atol=2e-6)


def test_greedy_takes_the_largest_that_is_allowed(logits):
    best = logits.copy()
    best[7] = 50  # an image placeholder
    out = draw_rows(best, temperature=0.0)
    allowed = np.where(np.isin(np.arange(V), BANNED), -np.inf, best)
    assert (out.ids == allowed.argmax()).all()
    np.testing.assert_allclose(out.logprobs, log_softmax(best)[allowed.argmax()], rtol=1e-6)


def test_a_draw_depends_on_its_seed_and_place_and_nothing_else(logits):
    rng = np.random.default_rng(1)
    seeds = rng.integers(0, 2**32, ROWS, dtype=np.uint32)
    temperature = rng.uniform(0, 2, ROWS).astype(np.float32)
    top_k = rng.integers(0, 9, ROWS).astype(np.int32)
    all_ = draw_rows(logits, seed=seeds, place=3, temperature=temperature, top_k=top_k)
    order = rng.permutation(ROWS)
    again = draw_rows(logits, seed=seeds[order], place=3, temperature=temperature[order], top_k=top_k[order])
    assert (all_.ids[order] == again.ids).all()
    only_first = np.where(np.arange(ROWS) == 0, top_k, 0)
    alone = draw_rows(logits, seed=seeds, place=3, temperature=temperature, top_k=only_first)
    untouched = (top_k == 0) | (np.arange(ROWS) == 0)
    assert (alone.ids == all_.ids)[untouched].all()
    other = draw_rows(logits, seed=seeds, place=4, temperature=1.0)
    assert (other.ids != draw_rows(logits, seed=seeds, place=3, temperature=1.0).ids).mean() > 0.5


@pytest.mark.parametrize(("top_p", "top_k"), [(0.6, 0), (1.0, 5), (0.9, 12), (1e-6, 0), (1.0, 1)])
def test_truncation_keeps_what_it_says_and_renormalises(logits, top_p, top_k):
    p = np.exp(log_softmax(np.where(np.isin(np.arange(V), BANNED), -np.inf, logits)))
    order = np.argsort(-p)[: top_k or V]
    share = np.cumsum(p[order]) / p[order].sum()
    kept = order[: 1 + int((share < top_p).sum())]
    seen = set()
    for place in range(30):
        out = draw_rows(logits, seed=np.arange(ROWS), place=place, top_p=top_p, top_k=top_k)
        seen |= set(out.ids.tolist())
        np.testing.assert_allclose(out.logprobs, np.log(p[out.ids] / p[kept].sum()), atol=1e-5)
    assert seen <= set(kept.tolist())
    assert len(seen) > 0.5 * len(kept)


def test_one_dead_row_is_reported_alone(logits):
    bad = np.broadcast_to(logits, (ROWS, V)).copy()
    bad[3, 20], bad[5, 21] = np.nan, np.inf
    good = jax.device_get(drawn_by(jnp.asarray(bad), dataclasses.replace(Draw.empty(ROWS)), BANNED, 5, False))
    assert list(np.flatnonzero(~good.finite)) == [3, 5]


def test_a_weight_of_zero_is_never_drawn():
    """Almost everything is impossible, and rounding must not find it."""
    steep = np.full(V, -200, np.float32)
    steep[[64, 65, 130]] = [0, 0.5, -0.2]
    for place in range(50):
        assert set(draw_rows(steep, seed=np.arange(ROWS), place=place).ids.tolist()) <= {64, 65, 130}


def test_the_likeliest_are_reported_when_asked_for(logits):
    out = draw_rows(logits, want=True, temperature=0.7)
    expected = log_softmax(logits / np.float32(0.7))
    order = np.argsort(-expected)[:5]
    assert (out.top_ids[0] == order).all()
    np.testing.assert_allclose(out.top_logprobs[0], expected[order], atol=2e-6)
