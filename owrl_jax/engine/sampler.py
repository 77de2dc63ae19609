"""From logits to one token per row, and what the learner needs to know about it.

A row's draw depends on its logits, its seed and its place in the response, and on nothing else in the batch: the random
number is that of `fold_in(key(seed), place)`. Two uniform numbers choose by inverse distribution function, first a run
of 64 tokens, then one inside it: one pass over the vocabulary, where a Gumbel draw would make a random number per
token, and a resolution of 2⁻⁴⁸.

Ids in `banned` (image and video placeholders) are never drawn. The reported log-prob is still that of the whole
distribution at the row's temperature, for that is what the learner computes: were it renormalised without them, the
ratio of an unchanged policy would not be one. Under top-p or top-k it is that of the kept tokens, renormalised.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_RUN = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """How each of B rows is drawn; numpy on the host.

    Attributes:
      seed: uint32 [B]; of the request.
      place: int32 [B]; number of the token in the response.
      temperature: float32 [B]; 0 is greedy.
      top_p: float32 [B]; 1 is off.
      top_k: int32 [B]; 0 is off.
    """

    seed: Any
    place: Any
    temperature: Any
    top_p: Any
    top_k: Any

    @classmethod
    def empty(cls, rows: int) -> Draw:
        """Greedy rows, to be filled in."""
        return cls(
            seed=np.zeros(rows, np.uint32),
            place=np.zeros(rows, np.int32),
            temperature=np.zeros(rows, np.float32),
            top_p=np.ones(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """What came of it.

    Attributes:
      ids: int32 [B].
      logprobs: float32 [B].
      finite: bool [B]; false if a logit of the row was NaN or infinite, and the rest then means nothing.
      top_ids, top_logprobs: int32 and float32 [B, n]; the likeliest tokens at the same temperature, if asked for.
    """

    ids: Any
    logprobs: Any
    finite: Any
    top_ids: Any
    top_logprobs: Any


def sample(logits: jax.Array, draw: Draw, banned: tuple[int, ...], top: int, want_top: jax.Array) -> Drawn:
    """Draws a token for each row of float32 `logits [B, V]`.

    Args:
      draw: per row.
      banned: ids that are never drawn.
      top: how many of the likeliest tokens to report.
      want_top: bool scalar; false saves the search for them, and they are then zero.
    """
    rows = logits.shape[0]
    greedy = draw.temperature <= 0
    scaled = logits / jnp.where(greedy, 1, draw.temperature)[:, None]
    highest = jnp.max(scaled, axis=-1, keepdims=True)
    weights = jnp.exp(scaled - highest)
    norm = jnp.log(jnp.sum(weights, axis=-1)) + highest[:, 0]
    if banned:
        weights = weights.at[:, np.asarray(sorted(set(banned)))].set(0)
    truncated = (draw.top_p < 1) | (draw.top_k > 0)
    weights = jax.lax.cond(jnp.any(truncated), lambda w: jnp.where(_kept(w, draw), w, 0), lambda w: w, weights)
    kept_norm = jnp.log(jnp.sum(weights, axis=-1)) + highest[:, 0]
    ids = jnp.where(greedy, jnp.argmax(weights, axis=-1), _inverse(weights, draw)).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, ids[:, None], axis=-1)[:, 0]
    finite = jnp.isfinite(norm) & jnp.isfinite(chosen)

    def likeliest(scaled):
        values, found = jax.lax.top_k(scaled, min(top, scaled.shape[1]))
        pad = ((0, 0), (0, top - values.shape[1]))
        return jnp.pad(found.astype(jnp.int32), pad), jnp.pad(values - norm[:, None], pad, constant_values=-jnp.inf)

    def nothing(_):
        return jnp.zeros((rows, top), jnp.int32), jnp.zeros((rows, top), jnp.float32)

    top_ids, top_logprobs = jax.lax.cond(want_top, likeliest, nothing, scaled)
    logprobs = chosen - jnp.where(truncated & ~greedy, kept_norm, norm)
    return Drawn(ids=ids, logprobs=logprobs, finite=finite, top_ids=top_ids, top_logprobs=top_logprobs)


def _kept(weights: jax.Array, draw: Draw) -> jax.Array:
    """bool [B, V]: the top k, and of these the fewest that hold a share of top_p. Ties with the last one stay."""
    ordered = -jnp.sort(-weights, axis=-1)
    place = jnp.arange(weights.shape[-1])
    inside = (draw.top_k[:, None] == 0) | (place < draw.top_k[:, None])
    ordered = jnp.where(inside, ordered, 0)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    inside &= (before < draw.top_p[:, None] * jnp.sum(ordered, axis=-1, keepdims=True)) & (ordered > 0)
    least = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return weights >= least


def _inverse(weights: jax.Array, draw: Draw) -> jax.Array:
    """int32 [B]: a token in proportion to its weight."""
    rows, vocab = weights.shape
    runs = -(-vocab // _RUN)
    cut = jnp.pad(weights, ((0, 0), (0, runs * _RUN - vocab))).reshape(rows, runs, _RUN)
    uniform = jax.vmap(
        lambda seed, place: jax.random.uniform(jax.random.fold_in(jax.random.key(seed), place), (2,), jnp.float32)
    )(draw.seed, draw.place)
    run = _pick(jnp.sum(cut, axis=-1), uniform[:, 0])
    inside = jnp.take_along_axis(cut, run[:, None, None], axis=1)[:, 0]
    return run * _RUN + _pick(inside, uniform[:, 1])


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Index of the cell in which `uniform` of the total falls; never one of weight zero."""
    total = jnp.cumsum(weights, axis=-1)
    index = jnp.sum(total <= uniform[:, None] * total[:, -1:], axis=-1)
    index = jnp.minimum(index, weights.shape[-1] - 1)
    positive = jnp.take_along_axis(weights, index[:, None], axis=-1)[:, 0] > 0
    # Rounding can make the sums step where the weight is zero, or never reach the last of them.
    return jnp.where(positive, index, jnp.argmax(weights, axis=-1))
