"""AdamW with a clipped gradient, and the learning rate as a pure function of the count of updates.

Adam's moments are optax's; weight decay and rate are applied here, because the rate depends on the one count of updates
that is saved with the state and on nothing else: a resumed run cannot advance a schedule twice.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from owrl_jax.config import RlSettings

Leaves = dict[str, Any]
"""Arrays by dotted name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """How parameters move.

    Attributes:
      learning_rate: after the warm-up.
      schedule: from there on: constant, or down to `final_fraction` of it at update `decay_updates`, straight or along
        half a cosine.
      warmup_updates: the rate of update n (counted from 0) is (n + 1) / warmup_updates of the full one.
      b1, b2, eps: Adam.
      weight_decay: of matrices; norms and biases are left alone.
      max_grad_norm: longer gradients are scaled down to it.
    """

    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: int = 0
    decay_updates: int = 0
    final_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule={self.schedule!r} is not one of constant, linear, cosine")
        if self.schedule != "constant" and self.decay_updates <= self.warmup_updates:
            raise ValueError(
                f"decay_updates={self.decay_updates} must be more than warmup_updates={self.warmup_updates}: the "
                f"{self.schedule} schedule ends there"
            )
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm} must be positive")

    @classmethod
    def of(cls, rl: RlSettings) -> OptimizerSettings:
        """The part of the settings that is the optimiser."""
        return cls(
            learning_rate=rl.learning_rate,
            schedule=rl.schedule,
            warmup_updates=rl.warmup_updates,
            decay_updates=rl.decay_updates,
            b1=rl.adam_b1,
            b2=rl.adam_b2,
            weight_decay=rl.weight_decay,
            max_grad_norm=rl.max_grad_norm,
        )


def learning_rate(
    settings: OptimizerSettings, updates: Int[Array, ""] | int, full: Float[Array, ""] | float | None = None
) -> Float[Array, ""]:
    """The rate of the update that follows after `updates` updates; `full` takes the place of the one in settings."""
    n = jnp.asarray(updates, jnp.float32)
    rate = jnp.float32(settings.learning_rate) if full is None else jnp.asarray(full, jnp.float32)
    if settings.schedule != "constant":
        span = settings.decay_updates - settings.warmup_updates
        done = jnp.clip((n - settings.warmup_updates) / span, 0, 1)
        left = 1 - done if settings.schedule == "linear" else (1 + jnp.cos(jnp.pi * done)) / 2
        rate = rate * (settings.final_fraction + (1 - settings.final_fraction) * left)
    if settings.warmup_updates:
        rate = rate * jnp.minimum(1, (n + 1) / settings.warmup_updates)
    return rate


def adam(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Adam's moments, kept in float32."""
    return optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.eps, mu_dtype=jnp.float32)


def step(
    settings: OptimizerSettings,
    leaves: Leaves,
    moments: Any,
    gradients: Leaves,
    updates: Array,
    decayed: frozenset[str],
    full: Array | None = None,
) -> tuple[Leaves, Any, dict[str, Array]]:
    """One step of AdamW.

    Args:
      leaves: what is trained, by name.
      moments: of the same.
      gradients: float32, already divided by the normaliser.
      updates: how many steps came before.
      decayed: names that weight decay applies to.
      full: learning rate instead of the one in settings.
    Returns:
      the new leaves and moments, and norm of the gradient, its clip factor and the learning rate.
    """
    norm = optax.tree.norm(gradients)
    factor = jnp.minimum(1.0, settings.max_grad_norm / jnp.maximum(norm, 1e-30))
    gradients = jax.tree.map(lambda g: g * factor, gradients)
    found, moments = adam(settings).update(gradients, moments)
    directions = cast(Leaves, found)
    rate = learning_rate(settings, updates, full)

    def moved(name: str, leaf: Array) -> Array:
        wide = leaf.astype(jnp.float32)
        decay = settings.weight_decay * wide if name in decayed else 0.0
        return (wide - rate * (directions[name] + decay)).astype(leaf.dtype)

    facts = {"grad/norm": norm, "grad/clip_factor": factor, "optimizer/learning_rate": rate}
    return {name: moved(name, leaf) for name, leaf in leaves.items()}, moments, facts
