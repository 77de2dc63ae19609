"""The loss: MM-GRPO (arXiv 2606.02031, section 8.1) and its alternatives, as pure functions of log-probs.

With m response tokens in turn t of trajectory i, advantage A_i and ratio ρ = exp(log π(y) - log π_behaviour(y)),

    L = 1/Z · Σ_i Σ_t  1/m_it · Σ_k  max( -A_i ρ_itk ,  -A_i clip(ρ_itk, 1 - clip_low, 1 + clip_high) )

A token mean per turn, a sum over turns, nothing divided by the length of the trajectory. Z is known before anything
is computed: the number of turns that have a loss (the paper writes 1/G for one group, its code divides by the turns of
the optimiser's batch: the same weights). The weights 1/(m_it) come with the batch; functions here return sums, and who
adds them up divides by Z once. So it does not matter how turns are cut into rows and batches.

Each alternative is MM-GRPO with one thing changed (`config.Objective`):

    constant          turns weigh 1/k, Z counts trajectories
    trajectory_mean   turns weigh 1/T_i, Z counts trajectories
    decoupled         ρ = π/π_proximal is clipped; the token's loss is weighed by min(π_proximal/π_behaviour, cap)
    truncated_is      as decoupled, where π_proximal is the recomputed behaviour policy itself: what is corrected is the
                      difference between two programs, not between two policies
    gspo_token        ρ of a token is that of its whole turn, exp(mean_k log ratio), its gradient the token's own
    dual_clip         for A < 0 the loss is at most dual_clip · |A|

`decoupled` and `truncated_is` are one formula; they differ in the policy that computed `proximal`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from owrl_jax.config import Objective, RlSettings
from owrl_jax.models.run import Leaf
from owrl_jax.rl.advantage import Scored
from owrl_jax.rl.batch import Responses, TrainSample

LOG_RATIO_LIMIT = 20.0
"""Beyond this a log ratio is held and has no gradient: exp(20) is no statement about a policy any more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What the loss function needs of `RlSettings`; hashable."""

    objective: Objective = "mm_grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    importance_cap: float = 2.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    @classmethod
    def of(cls, rl: RlSettings) -> LossSettings:
        """The part of the settings that is the loss."""
        return cls(**{field.name: getattr(rl, field.name) for field in dataclasses.fields(cls)})

    @property
    def needs_proximal(self) -> bool:
        """Whether samples must carry log-probs of a proximal policy."""
        return self.objective in ("decoupled", "truncated_is")

    @property
    def needs_reference(self) -> bool:
        """Whether samples must carry log-probs of a reference policy."""
        return self.kl_coef > 0

    def __call__(
        self, logp: Float[Array, "B R"], entropy: Float[Array, "B R"], responses: Responses
    ) -> tuple[Float[Array, ""], Sums]:
        """`mm_grpo_loss` with these settings."""
        return mm_grpo_loss(logp, entropy, responses, self)


@dataclasses.dataclass(frozen=True)
class NllSettings:
    """Supervised training: minus the log-prob of each response token, mean per turn, times the turn's weight."""

    needs_proximal = needs_reference = False

    def __call__(
        self, logp: Float[Array, "B R"], entropy: Float[Array, "B R"], responses: Responses
    ) -> tuple[Float[Array, ""], Sums]:
        """`nll_loss`."""
        return nll_loss(logp, entropy, responses)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """Statistics that add up over batches.

    Attributes:
      total: sums; `tokens` counts what the token-weighted ones are divided by, `weight` the weights.
      largest: maxima.
    """

    total: dict[str, Leaf]
    largest: dict[str, Leaf]


def samples_of(scored: Scored, settings: RlSettings) -> list[TrainSample]:
    """The learner's samples of an iteration: weights of turns as the objective has them."""
    found = []
    for item in scored.samples:
        trajectory = item.trajectory
        has_loss = [
            bool(turn.response_ids) and (settings.credit_malformed or turn.parsed or item.advantage <= 0)
            for turn in trajectory.turns
        ]
        live = sum(has_loss)
        each = {"constant": 1 / settings.turn_constant, "trajectory_mean": 1 / max(live, 1)}
        weight = each.get(settings.objective, 1.0)
        found.append(
            TrainSample(
                name=f"{item.group_id}/{trajectory.index}",
                turns=trajectory.turns,
                advantage=item.advantage,
                turn_weights=tuple(weight * ok for ok in has_loss),
                unit=float(live > 0) if settings.objective in each else float(live),
                group=item.group_id,
            )
        )
    return found


def normaliser(samples: Sequence[TrainSample]) -> float:
    """Z of an update that is made of these samples."""
    return sum(sample.share for sample in samples)


def mm_grpo_loss(
    logp: Float[Array, "B R"], entropy: Float[Array, "B R"], r: Responses, settings: LossSettings
) -> tuple[Float[Array, ""], Sums]:
    """The sum over response positions of weight times token loss, not yet divided by Z.

    Args:
      logp: log-probs of the targets under the policy that is trained, nats.
      entropy: of the policy at those positions, nats.
      r: everything else about the positions.
      settings: objective and its numbers.
    Returns:
      the sum, and statistics over the live positions.
    Raises:
      ValueError: if the batch lacks log-probs that the settings need.
    """
    live = r.weights > 0
    stale = jnp.zeros_like(logp)
    old = r.behaviour
    if settings.needs_proximal:
        if r.proximal is None:
            raise ValueError(
                f"objective {settings.objective} needs proximal log-probs: let `recompute` add them to the samples"
            )
        old, stale = r.proximal, _held(r.proximal - r.behaviour)
    # Padding must be finite before any function of it, or its zero weight would not silence its gradient.
    log_ratio = _held(jnp.where(live, logp - old, 0))
    own = jnp.exp(log_ratio)
    ratio = own
    if settings.objective == "gspo_token":
        turn_log_ratio = jax.lax.stop_gradient(_turn_mean(log_ratio, r, live))
        # The turn's ratio in value, the token's own in gradient.
        ratio = jnp.exp(turn_log_ratio) * jnp.exp(log_ratio - jax.lax.stop_gradient(log_ratio))
    a = r.advantages
    clipped = jnp.clip(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    loss = jnp.maximum(-a * ratio, -a * clipped)
    if settings.objective == "dual_clip":
        loss = jnp.where(a < 0, jnp.minimum(loss, -a * settings.dual_clip), loss)
    if settings.needs_proximal:
        loss = loss * jnp.minimum(jnp.exp(stale), settings.importance_cap)
    policy = jnp.sum(jnp.where(live, r.weights * loss, 0))
    value = policy
    total = {"policy_loss": policy}
    if settings.kl_coef > 0:
        if r.reference is None:
            raise ValueError("kl_coef above 0 needs reference log-probs: let `recompute` add them to the samples")
        away = _held(jnp.where(live, r.reference - logp, 0))
        kl = jnp.sum(jnp.where(live, r.weights * (jnp.exp(away) - away - 1), 0))  # low-variance estimate, never below 0
        value = value + settings.kl_coef * kl
        total["kl_reference"] = kl
    if settings.entropy_coef > 0:
        value = value - settings.entropy_coef * jnp.sum(jnp.where(live, r.weights * entropy, 0))
    above = live & (a > 0) & (ratio > 1 + settings.clip_high)
    below = live & (a < 0) & (ratio < 1 - settings.clip_low)
    count = lambda mask: jnp.sum(mask, dtype=jnp.float32)  # noqa: E731
    total |= {
        "loss": value,
        "weight": jnp.sum(r.weights),
        "tokens": count(live),
        "clipped_above": count(above),
        "clipped_below": count(below),
        "ratio": jnp.sum(jnp.where(live, own, 0)),
        "kl_behaviour": jnp.sum(jnp.where(live, own - log_ratio - 1, 0)),
        "entropy": jnp.sum(jnp.where(live, entropy, 0)),
        "logp": jnp.sum(jnp.where(live, logp, 0)),
    }
    if settings.needs_proximal:
        total["importance"] = jnp.sum(jnp.where(live, jnp.exp(stale), 0))
        total["importance_capped"] = count(live & (jnp.exp(stale) > settings.importance_cap))
    largest = {
        "ratio": jnp.max(jnp.where(live, own, 0)),
        "log_ratio": jnp.max(jnp.abs(log_ratio)),
        "advantage": jnp.max(jnp.where(live, jnp.abs(a), 0)),
    }
    return value, Sums(total=jax.lax.stop_gradient(total), largest=jax.lax.stop_gradient(largest))


def nll_loss(logp: Float[Array, "B R"], entropy: Float[Array, "B R"], r: Responses) -> tuple[Float[Array, ""], Sums]:
    """The sum over response positions of weight times -log π, not yet divided by Z; arguments as `mm_grpo_loss`."""
    live = r.weights > 0
    value = jnp.sum(jnp.where(live, -r.weights * r.advantages * logp, 0))
    total = {
        "loss": value,
        "weight": jnp.sum(r.weights),
        "tokens": jnp.sum(live, dtype=jnp.float32),
        "entropy": jnp.sum(jnp.where(live, entropy, 0)),
        "logp": jnp.sum(jnp.where(live, logp, 0)),
    }
    return value, Sums(total=jax.lax.stop_gradient(total), largest={})


def _held(log_ratio: Float[Array, "B R"]) -> Float[Array, "B R"]:
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _turn_mean(values: Float[Array, "B R"], r: Responses, live: Bool[Array, "B R"]) -> Float[Array, "B R"]:
    """Mean over the live positions of each position's turn. Turns never straddle rows."""
    asked = values.shape[1]

    def row(values, turn, live):
        turn = jnp.where(live, turn, asked)
        sums = jax.ops.segment_sum(jnp.where(live, values, 0), turn, num_segments=asked + 1)
        sizes = jax.ops.segment_sum(live.astype(values.dtype), turn, num_segments=asked + 1)
        return (sums / jnp.maximum(sizes, 1))[turn]

    return jax.vmap(row)(values, r.turn, live)
