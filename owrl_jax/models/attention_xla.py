"""Blockwise attention in plain XLA operations, forward and backward, that skips blocks in which nothing is seen.

Queries and keys of a row are cut into tiles. For one tile of queries the forward pass walks over tiles of keys and
keeps the running maximum, sum and weighted values of an online softmax; the backward pass walks over the same pairs
of tiles once, recomputes the weights from the saved log-sum-exp, and adds to the gradients of q, k and v together
(five products per pair; a second walk for k and v would make it seven). Nothing of size T x T ever exists.

The pairs to walk are found on the device from the visibility intervals: the loop over key tiles of one query tile
runs exactly as often as there are key tiles with a visible pair, so cost follows visible pairs. A loop with a traced
trip count has no reverse-mode derivative in JAX, hence the hand-written `jax.custom_vjp`. Rows of the batch are mapped
one after the other, not vectorised: a vectorised loop would run as long as its longest row. Only rows that fit into
a single tile, where there is nothing to skip, are computed side by side and without loops.

Invariants: scores, softmax statistics and accumulators are at least fp32 (fp64 for fp64 inputs); a query that sees no
key gives zeros and passes no gradient; keys that no query sees may hold anything, NaN included.
Not here: what the visibility intervals mean and the public entry point (`attention.py`); second derivatives.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

# Any real score lies far above this, so a running maximum that starts here is finite from the first tile on, and
# exp(-inf - maximum) is an exact zero for masked scores: no infinity is ever subtracted from another.
_LOWEST_MAXIMUM = -1e30

# Scores of short rows that are computed side by side, 4 MiB in fp32: more of them leave the caches of a CPU (8 rows of
# 256 tokens with 8 heads of 64: forward 14 ms one by one, 22 ms at once).
_SCORES_AT_ONCE = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is static about one call, hashable so that it can ride along as a non-differentiable argument.

    `batch_axes`, `context_axes` and `head_axes` are the axes of `mesh` that divide batch, queries and heads; with no
    mesh everything runs where it is called.
    """

    scale: float
    block_q: int
    block_k: int
    mesh: Mesh | None = None
    batch_axes: tuple[str, ...] = ()
    context_axes: tuple[str, ...] = ()
    head_axes: tuple[str, ...] = ()


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def blockwise_attention(q, k, v, visible_from, visible_until, q_start, plan: Plan):
    """Attention of `q [B,T,H,N]` over `k`, `v` `[B,S,K,N]`; int32 `visible_from`, `visible_until [B,S]`, `q_start [B]`.

    Query i of row b has index q_start[b] + i and sees key j iff visible_from[b,j] <= index < visible_until[b,j].
    """
    return _forward_rule(q, k, v, visible_from, visible_until, q_start, plan)[0]


def _forward_rule(q, k, v, visible_from, visible_until, q_start, plan: Plan):
    operands = (q, k, v, visible_from, visible_until, q_start)
    out, logsumexp = _over_mesh(_forward, plan, "q k k key key row", "q stat")(*operands)
    # Named, so that a remat policy that saves these two does not run the forward walk a second time.
    out, logsumexp = checkpoint_name(out, "attn_out"), checkpoint_name(logsumexp, "attn_lse")
    return out, (*operands, out, logsumexp)


def _backward_rule(plan: Plan, saved, out_bar):
    grads = _over_mesh(_backward, plan, "q k k key key row q stat q", "q k k")(*saved, out_bar)
    return *grads, None, None, None


blockwise_attention.defvjp(_forward_rule, _backward_rule)


def active_blocks(visible_from: Array, visible_until: Array, q_start: Array, q_len: int, plan: Plan) -> Array:
    """bool `[B, query tiles, key tiles]`: the pairs of tiles that both passes compute for `q_len` queries per row."""
    tiles = _Tiles.cut(q_len, visible_from.shape[1], plan)
    return jax.vmap(tiles.active)(visible_from, visible_until, q_start)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiles:
    """How one row is cut: `q_len` queries into `q_count` tiles of `q_size`, keys alike; the last tile may be ragged."""

    q_len: int
    q_count: int
    q_size: int
    k_len: int
    k_count: int
    k_size: int

    @classmethod
    def cut(cls, q_len: int, k_len: int, plan: Plan) -> "_Tiles":
        q_count, q_size = _even_cut(q_len, plan.block_q)
        # Few queries (decoding) leave room for more keys in a tile of the same area, and so for fewer steps.
        k_count, k_size = _even_cut(k_len, max(plan.block_k, plan.block_q * plan.block_k // q_size))
        return cls(q_len=q_len, q_count=q_count, q_size=q_size, k_len=k_len, k_count=k_count, k_size=k_size)

    @property
    def single(self) -> bool:
        return self.q_count == self.k_count == 1

    def queries(self, x: Array, kv_heads: int) -> Array:
        """`[T, H, ...]` to `[query tiles, q_size, K, G, ...]`; query head h reads kv head h // G."""
        x = _pad_to(x, self.q_count * self.q_size)
        return x.reshape(self.q_count, self.q_size, kv_heads, -1, *x.shape[2:])

    def from_queries(self, x: Array) -> Array:
        """The inverse of `queries`."""
        return x.reshape(self.q_count * self.q_size, -1, *x.shape[4:])[: self.q_len]

    def keys(self, x: Array) -> Array:
        """`[S, ...]` to `[key tiles, k_size, ...]`; padded keys have an empty interval, nobody sees them."""
        x = _pad_to(x, self.k_count * self.k_size)
        return x.reshape(self.k_count, self.k_size, *x.shape[1:])

    def positions(self, q_start: Array) -> Array:
        """The index of every query, int32 `[query tiles, q_size]`."""
        return (q_start + jnp.arange(self.q_count * self.q_size)).reshape(self.q_count, self.q_size)

    def active(self, visible_from: Array, visible_until: Array, q_start: Array) -> Array:
        """bool `[query tiles, key tiles]`: does any query of the tile see any key of the tile? Exact."""
        first = q_start + jnp.arange(self.q_count)[:, None, None] * self.q_size
        end = jnp.minimum(first + self.q_size, q_start + self.q_len)
        some_query_sees_key = jnp.maximum(self.keys(visible_from), first) < jnp.minimum(self.keys(visible_until), end)
        return some_query_sees_key.any(-1)

    def walks(self, visible_from: Array, visible_until: Array, q_start: Array) -> tuple[Array, Array]:
        """Per query tile the active key tiles, in order and then filled up `[query tiles, key tiles]`, and how many."""
        active = self.active(visible_from, visible_until, q_start)
        return jnp.argsort(~active, axis=-1, stable=True), active.sum(-1)


def _even_cut(length: int, block: int) -> tuple[int, int]:
    """The fewest tiles of at most `block` (rounded up to 8), made equally long so that little is padded."""
    tiles = math.ceil(length / block)
    size = 8 * math.ceil(length / tiles / 8)
    return math.ceil(length / size), size


def _pad_to(x: Array, length: int) -> Array:
    return jnp.pad(x, [(0, length - x.shape[0])] + [(0, 0)] * (x.ndim - 1)) if length != x.shape[0] else x


# --- the forward pass -------------------------------------------------------------------------------------------------


def _forward(q, k, v, visible_from, visible_until, q_start, *, plan: Plan):
    """Returns out `[B,T,H,N]` and logsumexp `[B,T,H]`, which is +inf where a query sees nothing."""
    tiles = _Tiles.cut(q.shape[1], k.shape[1], plan)
    return _map_rows(
        functools.partial(_forward_row, tiles=tiles, scale=plan.scale),
        (q, k, v, visible_from, visible_until, q_start),
        tiles,
    )


def _forward_row(q, k, v, visible_from, visible_until, q_start, *, tiles: _Tiles, scale: float):
    dtype = _accumulation_dtype(q)
    keys = _key_tiles(tiles, k, v, visible_from, visible_until, q_start)

    def query_tile(_, xs):
        q_tile, positions, walk = xs
        q_tile = _heads_first(q_tile)
        state = (
            jnp.full(q_tile.shape[:-1], _LOWEST_MAXIMUM, dtype),
            jnp.zeros(q_tile.shape[:-1], dtype),
            jnp.zeros(q_tile.shape, dtype),
        )

        def step(j, state):
            return _forward_tile(state, q_tile, positions, *_pick(keys, j), scale=scale)

        maximum, total, weighted = _walk(tiles, walk, step, state)
        sees = total > 0
        total = jnp.where(sees, total, 1)
        logsumexp = jnp.where(sees, maximum + jnp.log(total), jnp.inf)
        return None, (_queries_first(weighted / total[..., None]).astype(q.dtype), _queries_first(logsumexp))

    xs = (tiles.queries(q, k.shape[1]), tiles.positions(q_start), tiles.walks(visible_from, visible_until, q_start))
    _, (out, logsumexp) = _scan_query_tiles(tiles, query_tile, None, xs)
    return tiles.from_queries(out), tiles.from_queries(logsumexp)


def _forward_tile(state, q, positions, k, v, visible_from, visible_until, *, scale):
    """Online softmax: state (maximum `[K,G,Q]`, total `[K,G,Q]`, weighted `[K,G,Q,N]`) after one more tile of keys."""
    maximum, total, weighted = state
    scores = _scores(q, positions, k, visible_from, visible_until, scale)
    new_maximum = jnp.maximum(maximum, scores.max(-1))
    weights = jnp.exp(scores - new_maximum[..., None])
    kept = jnp.exp(maximum - new_maximum)
    return (
        new_maximum,
        total * kept + weights.sum(-1),
        weighted * kept[..., None] + _product("kgqs,ksn->kgqn", weights.astype(v.dtype), v),
    )


def _scores(q, positions, k, visible_from, visible_until, scale):
    """`[K,G,Q,S]`, scaled, -inf where a query does not see a key."""
    visible = (visible_from <= positions[:, None]) & (positions[:, None] < visible_until)
    return jnp.where(visible, _product("kgqn,ksn->kgqs", q, k) * scale, -jnp.inf)


# --- the backward pass ------------------------------------------------------------------------------------------------


def _backward(q, k, v, visible_from, visible_until, q_start, out, logsumexp, out_bar, *, plan: Plan):
    """Gradients of q, k and v, in their dtypes."""
    tiles = _Tiles.cut(q.shape[1], k.shape[1], plan)
    q_bar, k_bar, v_bar = _map_rows(
        functools.partial(_backward_row, tiles=tiles, scale=plan.scale),
        (q, k, v, visible_from, visible_until, q_start, out, logsumexp, out_bar),
        tiles,
    )
    if plan.context_axes:  # every device holds all keys of its rows but only some of the queries that saw them
        k_bar, v_bar = lax.psum((k_bar, v_bar), plan.context_axes)
    return q_bar, k_bar.astype(k.dtype), v_bar.astype(v.dtype)


def _backward_row(
    q, k, v, visible_from, visible_until, q_start, out, logsumexp, out_bar, *, tiles: _Tiles, scale: float
):
    dtype = _accumulation_dtype(q)
    keys = _key_tiles(tiles, k, v, visible_from, visible_until, q_start)

    def query_tile(kv_bar, xs):
        (q_tile, out_tile, logsumexp_tile, out_bar_tile), positions, walk = xs
        q_tile, out_tile, out_bar_tile = _heads_first(q_tile), _heads_first(out_tile), _heads_first(out_bar_tile)
        logsumexp_tile = _heads_first(logsumexp_tile)
        # Zero weights do not silence a NaN in a product: a query that sees nothing must bring none.
        sees = (logsumexp_tile < jnp.inf)[..., None]
        q_tile, out_bar_tile = jnp.where(sees, q_tile, 0), jnp.where(sees, out_bar_tile, 0)
        mean_bar = (out_tile.astype(dtype) * out_bar_tile).sum(-1)
        # Turned once per tile of queries, for the products that contract over queries.
        q_turned, out_bar_turned = jnp.moveaxis(q_tile, -1, 1), jnp.moveaxis(out_bar_tile, -1, 1)

        def step(j, state):
            q_bar, k_bars, v_bars = state
            k_tile, v_tile, starts, ends = _pick(keys, j)
            scores = _scores(q_tile, positions, k_tile, starts, ends, scale)
            weights = jnp.exp(scores - logsumexp_tile[..., None])
            weights_bar = _product("kgqn,ksn->kgqs", out_bar_tile, v_tile)
            scores_bar = (weights * (weights_bar - mean_bar[..., None])).astype(q.dtype)
            q_part = _product("kgqs,ksn->kgqn", scores_bar, k_tile)
            k_part = _product("kngq,kgqs->kns", q_turned, scores_bar)
            v_part = _product("kngq,kgqs->kns", out_bar_turned, weights.astype(v.dtype))
            return q_bar + q_part, _add_at(k_bars, j, k_part), _add_at(v_bars, j, v_part)

        q_bar, *kv_bar = _walk(tiles, walk, step, (jnp.zeros(q_tile.shape, dtype), *kv_bar))
        return kv_bar, _queries_first(q_bar * scale).astype(q.dtype)

    cut = functools.partial(tiles.queries, kv_heads=k.shape[1])
    xs = (
        tuple(map(cut, (q, out, logsumexp, out_bar))),
        tiles.positions(q_start),
        tiles.walks(visible_from, visible_until, q_start),
    )
    # Head dimension before keys: the products that fill these then read their operands as they lie (on CPU a tenth off
    # the whole backward pass at N = 64, nothing at 128).
    kv_bar = [jnp.zeros((tiles.k_count, *k.shape[1:], tiles.k_size), dtype) for _ in range(2)]
    kv_bar, q_bar = _scan_query_tiles(tiles, query_tile, kv_bar, xs)
    k_bar, v_bar = (x.transpose(0, 3, 1, 2).reshape(-1, *k.shape[1:])[: k.shape[0]] for x in kv_bar)
    return tiles.from_queries(q_bar), k_bar * scale, v_bar


# --- loops, layouts, devices ------------------------------------------------------------------------------------------


def _map_rows(row, operands, tiles: _Tiles):
    batch, _, heads = operands[0].shape[:3]
    if not tiles.single:
        return lax.map(lambda xs: row(*xs), operands)
    at_once = max(1, _SCORES_AT_ONCE // (heads * tiles.q_size * tiles.k_size))
    if batch <= at_once:
        return jax.vmap(row)(*operands)
    return lax.map(lambda xs: row(*xs), operands, batch_size=at_once)


def _scan_query_tiles(tiles: _Tiles, body, carry, xs):
    if not tiles.single:
        return lax.scan(body, carry, xs)
    carry, y = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], y)


def _walk(tiles: _Tiles, walk, step, state):
    if tiles.single:
        return step(0, state)
    order, count = walk
    return lax.fori_loop(0, count, lambda i, state: step(order[i], state), state)


def _key_tiles(tiles: _Tiles, k, v, visible_from, visible_until, q_start):
    """k, v `[key tiles, K, k_size, N]` and their intervals, with zeros for keys that no query of the row sees."""
    seen = jnp.maximum(visible_from, q_start) < jnp.minimum(visible_until, q_start + tiles.q_len)
    k, v = (tiles.keys(jnp.where(seen[:, None, None], x, 0)).swapaxes(1, 2) for x in (k, v))
    return k, v, tiles.keys(visible_from), tiles.keys(visible_until)


def _pick(arrays, j) -> list[Array]:
    return [lax.dynamic_index_in_dim(x, j, keepdims=False) for x in arrays]


def _add_at(x, j, part):
    return lax.dynamic_update_index_in_dim(x, lax.dynamic_index_in_dim(x, j, keepdims=False) + part, j, 0)


def _heads_first(x):
    """`[Q,K,G,...]` to `[K,G,Q,...]`: kv heads are the batch of every product."""
    return jnp.moveaxis(x, 0, 2)


def _queries_first(x):
    return jnp.moveaxis(x, 2, 0)


def _product(subscripts, x, y):
    return jnp.einsum(subscripts, x, y, preferred_element_type=_accumulation_dtype(x))


def _accumulation_dtype(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _over_mesh(f, plan: Plan, inputs: str, outputs: str) -> Callable[..., Any]:
    """`f(..., plan=plan)` under `jax.shard_map`: whole keys everywhere, queries of a row cut along the context axes.

    Differentiation happens outside (both passes come through here), so shard_map itself is never transposed.
    """
    if plan.mesh is None:
        return functools.partial(f, plan=plan)
    batch, context, heads = plan.batch_axes, plan.context_axes, plan.head_axes
    specs = {
        "q": P(batch, context, heads, None),
        "stat": P(batch, context, heads),
        "k": P(batch, None, heads, None),
        "key": P(batch, None),
        "row": P(batch),
    }

    def local(q, k, v, visible_from, visible_until, q_start, *rest):
        if context:
            q_start = q_start + lax.axis_index(context) * q.shape[1]
        return f(q, k, v, visible_from, visible_until, q_start, *rest, plan=plan)

    return jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=tuple(specs[name] for name in inputs.split()),
        out_specs=tuple(specs[name] for name in outputs.split()),
        check_vma=False,
    )
