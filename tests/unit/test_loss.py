"""The loss against values worked out by hand, its gradient against finite differences, its masks against nothing."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from owrl_jax.rl.batch import Responses
from owrl_jax.rl.loss import LossSettings, mm_grpo_loss, nll_loss

PLAIN = LossSettings()


def responses(ratios, advantages, weights, turn=None, behaviour=-1.0, **more) -> tuple[jax.Array, Responses]:
    """One row; log-probs such that the ratios are these."""
    n = len(ratios)
    row = lambda values, kind: jnp.asarray([values], kind)  # noqa: E731
    batch = Responses(
        index=row(range(n), jnp.int32), targets=row([1] * n, jnp.int32), behaviour=row([behaviour] * n, jnp.float32),
        advantages=row(advantages, jnp.float32), weights=row(weights, jnp.float32),
        turn=row([0] * n if turn is None else turn, jnp.int32), trajectory=row([0] * n, jnp.int32),
        step=row([0] * n, jnp.int32), **{name: row(values, jnp.float32) for name, values in more.items()},
    )  # fmt: skip
    return row([behaviour + math.log(r) for r in ratios], jnp.float32), batch


def value(logp, batch, settings=PLAIN) -> float:
    return float(mm_grpo_loss(logp, jnp.zeros_like(logp), batch, settings)[0])


def gradient(logp, batch, settings=PLAIN) -> list[float]:
    return jax.grad(lambda x: mm_grpo_loss(x, jnp.zeros_like(x), batch, settings)[0])(logp)[0].tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # d loss / d log π is -A·ρ inside the clip and 0 outside on the side where clipping binds
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.4),
        (1.5, 2.0, -2.56, 0.0),  # 1 + 0.28 binds
        (0.5, 2.0, -1.0, -1.0),  # below, a positive advantage is never clipped
        (0.9, -2.0, 1.8, 1.8),
        (0.5, -2.0, 1.6, 0.0),  # 1 - 0.2 binds
        (1.5, -2.0, 3.0, 3.0),  # above, a negative advantage is never clipped
    ],
)
def test_clip_on_both_sides(ratio, advantage, loss, slope):
    logp, batch = responses([ratio], [advantage], [1.0])
    assert value(logp, batch) == pytest.approx(loss, rel=1e-5)
    assert gradient(logp, batch) == pytest.approx([slope], rel=1e-5, abs=1e-7)


def test_a_worked_batch():
    """Two turns of 2 and 4 tokens of one trajectory with A = 1: sum over turns of the token mean, then 1/Z outside."""
    ratios = [1.0, 1.4, 0.5, 1.0, 1.1, 1.3]
    logp, batch = responses(ratios, [1.0] * 6, [1 / 2] * 2 + [1 / 4] * 4, turn=[0, 0, 1, 1, 1, 1])
    by_hand = -((1.0 + 1.28) / 2 + (0.5 + 1.0 + 1.1 + 1.28) / 4)
    assert value(logp, batch) == pytest.approx(by_hand, rel=1e-6)
    _, sums = mm_grpo_loss(logp, jnp.ones_like(logp), batch, PLAIN)
    assert float(sums.total["clipped_above"]) == 2 and float(sums.total["clipped_below"]) == 0
    assert float(sums.total["tokens"]) == 6 and float(sums.total["weight"]) == pytest.approx(2)
    assert float(sums.total["ratio"]) == pytest.approx(sum(ratios), rel=1e-6)
    assert float(sums.largest["ratio"]) == pytest.approx(1.4, rel=1e-6)
    assert float(sums.total["entropy"]) == 6


@pytest.mark.parametrize("junk", [0.0, 1e30, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("objective", ["mm_grpo", "gspo_token", "decoupled"])
def test_padding_has_neither_loss_nor_gradient_whatever_stands_there(junk, objective):
    settings = LossSettings(objective=objective, kl_coef=0.1, entropy_coef=0.0)
    more = {"proximal": [-1.0, -1.1, -1.0], "reference": [-1.2, -0.9, -1.0]}
    short, batch = responses([1.1, 0.9], [1.0, -1.0], [0.5, 0.5], **{k: v[:2] for k, v in more.items()})
    logp, padded = responses([1.1, 0.9, 1.0], [1.0, -1.0, 3.0], [0.5, 0.5, 0.0], turn=[0, 0, -1], **more)
    logp = logp.at[0, 2].set(junk)
    assert value(logp, padded, settings) == pytest.approx(value(short, batch, settings), rel=1e-6)
    assert gradient(logp, padded, settings) == pytest.approx([*gradient(short, batch, settings), 0.0], rel=1e-6)


def test_an_extreme_ratio_is_held_and_finite():
    logp, batch = responses([1.0, 1.0], [1.0, -1.0], [1.0, 1.0])
    logp = logp + jnp.asarray([[1e4, -1e4]])
    assert value(logp, batch) == pytest.approx(-1.28 + 0.8, rel=1e-6)
    assert gradient(logp, batch) == [0.0, 0.0]


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    logp, batch = responses([5.0, 2.0, 5.0], [-2.0, -2.0, 2.0], [1.0, 1.0, 1.0])
    assert value(logp, batch, LossSettings(objective="dual_clip")) == pytest.approx(6.0 + 4.0 - 2.56, rel=1e-5)
    assert gradient(logp, batch, LossSettings(objective="dual_clip")) == pytest.approx([0, 4.0, 0], rel=1e-5)


@pytest.mark.parametrize("objective", ["decoupled", "truncated_is"])
def test_a_stale_token_is_clipped_around_the_proximal_policy_and_weighed(objective):
    # behaviour -1, proximal -1 + log 1.5 and -1 + log 4; the policy 1.2 and 1.5 times the proximal
    prox = [-1 + math.log(1.5), -1 + math.log(4)]
    logp, batch = responses([1.5 * 1.2, 4 * 1.5], [1.0, 1.0], [1.0, 1.0], proximal=prox)
    settings = LossSettings(objective=objective, importance_cap=2.0)
    assert value(logp, batch, settings) == pytest.approx(-(1.5 * 1.2 + 2.0 * 1.28), rel=1e-5)
    assert gradient(logp, batch, settings) == pytest.approx([-1.5 * 1.2, 0.0], rel=1e-5, abs=1e-6)
    # plain MM-GRPO clips both
    assert gradient(logp, batch, PLAIN) == pytest.approx([0.0, 0.0], abs=1e-7)
    _, sums = mm_grpo_loss(logp, logp, batch, settings)
    assert float(sums.total["importance_capped"]) == 1
    with pytest.raises(ValueError, match="proximal"):
        value(logp, dataclasses.replace(batch, proximal=None), settings)


def test_gspo_token_clips_whole_turns_by_their_mean_ratio():
    """Turn 0: ratios 2 and 0.5, mean ratio 1: both tokens live. Turn 1: 1.5 and 1.5: both clipped."""
    logp, batch = responses([2.0, 0.5, 1.5, 1.5], [1.0] * 4, [0.5] * 4, turn=[0, 0, 1, 1])
    settings = LossSettings(objective="gspo_token")
    assert value(logp, batch, settings) == pytest.approx(-(1.0 + 1.28), rel=1e-5)
    assert gradient(logp, batch, settings) == pytest.approx([-0.5, -0.5, 0.0, 0.0], rel=1e-5, abs=1e-7)


def test_kl_to_a_reference_and_entropy_bonus():
    logp, batch = responses([1.0, 1.0], [0.0, 0.0], [0.5, 0.5], reference=[-1.5, -1.0])
    by_hand = 0.5 * (math.exp(-0.5) + 0.5 - 1)
    assert value(logp, batch, LossSettings(kl_coef=0.2)) == pytest.approx(0.2 * by_hand, rel=1e-5)
    slopes = gradient(logp, batch, LossSettings(kl_coef=0.2))
    assert slopes == pytest.approx([0.2 * 0.5 * (1 - math.exp(-0.5)), 0.0], rel=1e-5, abs=1e-7)
    entropy = jnp.asarray([[2.0, 4.0]])
    settings = LossSettings(entropy_coef=0.01)
    assert float(mm_grpo_loss(logp, entropy, batch, settings)[0]) == pytest.approx(-0.03, rel=1e-5)
    with pytest.raises(ValueError, match="reference"):
        value(logp, dataclasses.replace(batch, reference=None), LossSettings(kl_coef=0.2))


def test_likelihood_of_demonstrations():
    logp, batch = responses([1.0, 1.0, 1.0], [1.0] * 3, [0.5, 0.5, 0.0], behaviour=-3.0)
    loss, sums = nll_loss(logp, logp, batch)
    assert float(loss) == pytest.approx(3.0)
    assert float(sums.total["tokens"]) == 2


@pytest.mark.parametrize("objective", ["mm_grpo", "decoupled", "dual_clip"])
def test_gradients_equal_finite_differences(objective):
    """In float64, away from the kinks."""
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        n = 6
        batch = Responses(
            index=jnp.zeros((1, n), jnp.int32), targets=jnp.zeros((1, n), jnp.int32),
            behaviour=jnp.asarray(rng.normal(-1, 0.1, (1, n))), advantages=jnp.asarray(rng.normal(0, 1, (1, n))),
            weights=jnp.asarray(rng.random((1, n))), turn=jnp.asarray([[0, 0, 0, 1, 1, 1]]),
            trajectory=jnp.zeros((1, n), jnp.int32), step=jnp.zeros((1, n), jnp.int32),
            proximal=jnp.asarray(rng.normal(-1, 0.1, (1, n))), reference=jnp.asarray(rng.normal(-1, 0.2, (1, n))),
        )  # fmt: skip
        settings = LossSettings(objective=objective, kl_coef=0.1)
        logp = jnp.asarray(rng.normal(-1, 0.08, (1, n)))
        f = lambda x: mm_grpo_loss(x, jnp.zeros_like(x), batch, settings)[0]  # noqa: E731
        got = np.asarray(jax.grad(f)(logp))[0]
        step = 1e-6
        numeric = np.array([
            float(f(logp.at[0, i].add(step)) - f(logp.at[0, i].add(-step))) / (2 * step) for i in range(n)
        ])  # fmt: skip
    np.testing.assert_allclose(got, numeric, rtol=1e-5, atol=1e-8)
