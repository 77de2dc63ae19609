"""Attention with one rule: every key says from which query index on, and up to which, it can be seen.

Two integers per key are the whole mask,

    query with index p sees key j   iff   visible_from[j] <= p < visible_until[j],

and every pattern this project needs is a choice of those two integers:

- **Prefix tree** (language model). A training row is a depth-first walk of a tree of contexts. A key is seen by
  itself and by what follows it inside its subtree: visible_from[j] = j, visible_until[j] = end of j's subtree in the
  walk. A node's tokens see their ancestors and nothing of a sibling branch, because the sibling's subtree ended
  before. Plain causal attention is the tree with one node (visible_until = T); packed independent sequences are a
  tree with many roots; padding has an empty interval.
- **Segments** (vision tower). Patches of one image see each other in both directions and nothing else: both integers
  are the bounds of the image's run of patches (`segment_visibility`).
- **Decoding with a cache**. Keys are cache slots, queries are the newest tokens; `q_start` says which index the first
  query has, and slots not yet written have visible_until = 0.

Why intervals and not a mask or segment ids: a mask costs T x T; segment ids cannot say that a trunk outlives its
leaves; and for intervals it is cheap and exact to decide whether a whole block of queries sees any key of a block, so
blocks that nobody sees are skipped and cost follows visible pairs.

`attend` is the only entry point, and it chooses the kernel. The invariant that every kernel must hold: it equals dense
softmax attention under the rule, a query that sees nothing gives exactly zero and no gradient, and keys that nobody
sees may hold anything. Not here: rotary positions, caches, projections.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jaxtyping import Float, Int

from owrl_jax.models.attention_xla import Plan, blockwise_attention

IMPLEMENTATIONS = ("xla", "splash", "cudnn")


def attend(
    q: Float[Array, "B Tq H N"],
    k: Float[Array, "B Tk K N"],
    v: Float[Array, "B Tk K N"],
    *,
    visible_from: Int[Array, "B Tk"],
    visible_until: Int[Array, "B Tk"],
    q_start: int | Int[Array, ""] | Int[Array, "B"] = 0,
    scale: float | None = None,
    mesh: Mesh | None = None,
    implementation: str | None = None,
    block_q: int = 256,
    block_k: int = 256,
) -> Float[Array, "B Tq H N"]:
    """Softmax attention in which query i of a row, with index p = q_start + i, sees key j iff
    visible_from[j] <= p < visible_until[j].

    Args:
      q: queries. Query head h reads kv head h // (H // K), so H must be a multiple of K; keys are not repeated.
      k, v: keys and values, in the dtype of q. Products accumulate in fp32 (fp64 for fp64 inputs).
      visible_from, visible_until: integers per key, see the head of this module.
      q_start: index of the first query, for all rows or per row; may be traced.
      scale: factor of the scores, N ** -0.5 if not given.
      mesh: runs the kernel under `jax.shard_map`, with axes of these names where the mesh has them: batch over
        `replica` and `fsdp`, queries over `context` (keys and intervals are gathered along it), heads over `tensor`.
        An axis that does not divide its dimension is not used there, and the work is repeated along it; `tensor` must
        divide both H and K. A causal row gives later context shards more work than earlier ones.
      implementation: `xla` (blockwise, every platform) or None, which chooses by platform: `xla` everywhere for now.
      block_q, block_k: queries and keys per tile. 256 x 256 is fastest on CPU for T of 512 to 4096 (N 64 and 128).

    Returns:
      The attended values in the dtype of q; exactly zero for a query that sees no key. Differentiable once in q, k
      and v. Under `jax.checkpoint`, a policy that saves the names `attn_out` and `attn_lse` avoids a second forward.

    Raises:
      ValueError: shapes or dtypes do not fit together, or an unknown implementation.
      NotImplementedError: `splash` and `cudnn`.
    """
    _validate(q, k, v, visible_from, visible_until, implementation, block_q, block_k)
    if implementation in ("splash", "cudnn"):
        raise NotImplementedError(
            f"attention implementation {implementation!r} does not exist yet; use 'xla' or None, which run everywhere"
        )
    batch, q_len, heads, head_dim = q.shape
    plan = Plan(
        scale=head_dim**-0.5 if scale is None else scale,
        block_q=block_q,
        block_k=block_k,
        mesh=mesh if mesh is not None and mesh.size > 1 else None,
        batch_axes=_dividing_axes(mesh, ("replica", "fsdp"), batch),
        context_axes=_dividing_axes(mesh, ("context",), q_len),
        head_axes=_dividing_axes(mesh, ("tensor",), heads, k.shape[2]),
    )
    q_start = jnp.broadcast_to(jnp.asarray(q_start, jnp.int32), (batch,))
    return blockwise_attention(q, k, v, visible_from.astype(jnp.int32), visible_until.astype(jnp.int32), q_start, plan)


def causal_visibility(visible_until: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """`visible_from` of the tree rule: key j is visible from query j on, int32."""
    return jnp.broadcast_to(jnp.arange(visible_until.shape[1], dtype=jnp.int32), visible_until.shape)


def segment_visibility(segments: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Intervals under which tokens of one segment see each other, both ways, and nothing else.

    Args:
      segments: a segment is a run of equal non-negative values (two runs of one value are two segments); negative
        values are padding, which sees nothing and is seen by nothing.

    Returns:
      int32 `visible_from` and `visible_until`: first index of the token's segment and one past its last.
    """
    length = segments.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    boundary = segments[:, 1:] != segments[:, :-1]
    starts = jnp.pad(boundary, [(0, 0), (1, 0)], constant_values=True)
    ends = jnp.pad(boundary, [(0, 0), (0, 1)], constant_values=True)
    visible_from = lax.cummax(jnp.where(starts, index, 0), axis=1)
    visible_until = lax.cummin(jnp.where(ends, index + 1, length), axis=1, reverse=True)
    return jnp.where(segments >= 0, visible_from, 0), jnp.where(segments >= 0, visible_until, 0)


def _dividing_axes(mesh: Mesh | None, names: tuple[str, ...], *dimensions: int) -> tuple[str, ...]:
    """Those of `names`, in order, whose sizes in `mesh` together divide every one of `dimensions`."""
    axes, parts = (), 1
    sizes = {} if mesh is None else mesh.shape
    for name in names:
        size = sizes.get(name, 1)
        if size > 1 and all(dimension % (parts * size) == 0 for dimension in dimensions):
            axes, parts = (*axes, name), parts * size
    return axes


def _validate(q, k, v, visible_from, visible_until, implementation, block_q, block_k) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown attention implementation {implementation!r}; choose one of {IMPLEMENTATIONS} or None"
        )
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"need q [B,Tq,H,N] and k, v [B,Tk,K,N], got {q.shape}, {k.shape}, {v.shape}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} kv heads")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"attention over nothing: q {q.shape}, k {k.shape}; leave the call out instead")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast before the call")
    for name, x in (("visible_from", visible_from), ("visible_until", visible_until)):
        if x.shape != k.shape[:2] or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers of shape {k.shape[:2]} (one per key), got {x.dtype} {x.shape}")
    if block_q < 1 or block_k < 1:
        raise ValueError(f"block_q and block_k must be positive, got {block_q} and {block_k}")
