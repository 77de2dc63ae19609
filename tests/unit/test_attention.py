"""`attend` against dense attention in numpy fp64. Masks come from what a pattern means, where it means something."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from owrl_jax.models.attention import attend, causal_visibility, segment_visibility
from owrl_jax.models.attention_xla import Plan, active_blocks
from tests.unit.dense_attention import dense_attention, operands, random_tree

UNSEEN = 2**31 - 1


def intervals(visible_from, visible_until):
    return {
        "visible_from": jnp.asarray(visible_from, jnp.int32),
        "visible_until": jnp.asarray(visible_until, jnp.int32),
    }


def interval_mask(visible_from, visible_until, q_len, q_start=0):
    index = (np.reshape(q_start, (-1, 1)) + np.arange(q_len))[:, :, None]
    return (np.asarray(visible_from)[:, None] <= index) & (index < np.asarray(visible_until)[:, None])


def random_intervals(rng, batch, q_len, k_len):
    """Short, long, empty and inverted intervals; the queries of the first fifth see nothing."""
    bounds = rng.integers(q_len // 5, q_len + 3, (2, batch, k_len))
    ordered = rng.random((batch, k_len)) < 0.8
    low, high = np.where(ordered, bounds.min(0), bounds[0]), np.where(ordered, bounds.max(0), bounds[1])
    return low, np.where(rng.random((batch, k_len)) < 0.2, 0, high)


def tree_case(rng, batch, length):
    rows = [random_tree(rng, length) for _ in range(batch)]
    until = np.stack([r[0] for r in rows])
    return causal_visibility(jnp.asarray(until)), until, np.stack([r[1] for r in rows])


def segment_case(rng, batch, length):
    segments = np.sort(rng.integers(-2, 4, (batch, length)), axis=1)[:, ::-1].copy()
    mask = (segments[:, :, None] == segments[:, None, :]) & (segments >= 0)[:, :, None]
    return *segment_visibility(jnp.asarray(segments)), mask


def check(arrays, mask, visible, tolerance, **options):
    """Output and all three gradients, compared by the largest difference relative to the largest value."""
    q, k, v, out_bar = arrays
    expected = dense_attention(q, k, v, out_bar, mask, options.get("scale"))

    @jax.jit
    def both(q, k, v, out_bar):
        out, vjp = jax.vjp(lambda *x: attend(*x, **visible, **options), q, k, v)
        return out, *vjp(out_bar)

    for name, got, want in zip(("out", "q", "k", "v"), both(q, k, v, out_bar), expected, strict=True):
        assert got.dtype == q.dtype
        error = np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()
        assert error < tolerance, f"{name}: {error:.2e}"


@pytest.mark.parametrize(
    ("pattern", "shape", "block_q", "block_k"),
    [
        # shape: B, Tq, Tk, H, K, N
        ("random", (2, 53, 53, 4, 2, 64), 16, 16),
        ("random", (1, 40, 71, 6, 6, 72), 16, 24),
        ("random", (3, 9, 30, 4, 1, 16), 256, 256),
        ("random", (2, 100, 20, 2, 1, 16), 24, 256),
        ("tree", (2, 90, 90, 4, 2, 128), 32, 16),
        ("tree", (2, 64, 64, 8, 2, 16), 64, 64),
        ("segments", (2, 77, 77, 3, 3, 72), 16, 32),
    ],
)
def test_output_and_gradients_equal_dense_attention(pattern, shape, block_q, block_k):
    rng = np.random.default_rng(sum(shape))
    batch, q_len, k_len = shape[:3]
    if pattern == "tree":
        low, high, mask = tree_case(rng, batch, k_len)
    elif pattern == "segments":
        low, high, mask = segment_case(rng, batch, k_len)
    else:
        low, high = random_intervals(rng, batch, q_len, k_len)
        mask = interval_mask(low, high, q_len)
        assert not mask.any(-1).all(), "the case must have queries that see nothing"
    options = {"block_q": block_q, "block_k": block_k}
    check(operands(rng, *shape), mask, intervals(low, high), 3e-6, **options)


def test_fp64_inputs_stay_fp64():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        low, high, mask = tree_case(rng, 2, 50)
        arrays = operands(rng, 2, 50, 50, 4, 2, 16, np.float64)
        check(arrays, mask, intervals(low, high), 1e-13, block_q=16, block_k=16, scale=0.3)


def test_bf16_stays_near_dense():
    rng = np.random.default_rng(1)
    low, high, mask = tree_case(rng, 1, 100)
    arrays = operands(rng, 1, 100, 100, 4, 2, 64, jnp.bfloat16)
    check(arrays, mask, intervals(low, high), 1.5e-2, block_q=32, block_k=32)


def test_many_short_rows_and_steep_scores():
    """Rows that are computed in groups (more scores than fit at once), with scores above what exp can hold."""
    rng = np.random.default_rng(2)
    shape = (10, 96, 96, 32, 2, 8)  # 3 rows fit at once, so one is left over
    low, high = random_intervals(rng, 10, 96, 96)
    q, k, v, out_bar = operands(rng, *shape)
    check((q * 5, k * 5, v, out_bar), interval_mask(low, high, 96), intervals(low, high), 3e-5)


def test_decoding_with_a_cache_equals_the_full_row():
    """Chunks of one row at traced, per-row offsets, over a cache whose later slots hold garbage."""
    rng = np.random.default_rng(3)
    until, mask = (np.stack(x) for x in zip(*(random_tree(rng, 48) for _ in range(2)), strict=True))
    q, k, v, out_bar = operands(rng, 2, 48, 48, 4, 2, 16)
    expected = dense_attention(q, k, v, out_bar, mask)[0]
    cache = [np.concatenate([x, np.full((2, 16, 2, 16), np.nan, np.float32)], axis=1) for x in (k, v)]
    until = np.concatenate([until, np.full((2, 16), UNSEEN)], axis=1)

    @functools.partial(jax.jit, static_argnames="block")
    def chunk(q, q_start, block):
        written = q_start[:, None] + q.shape[1]
        alive = jnp.where(jnp.arange(64) < written, until, 0)
        visible = intervals(causal_visibility(alive), alive)
        return attend(q, *map(jnp.asarray, cache), **visible, q_start=q_start, block_q=block, block_k=block)

    for length, block in ((1, 8), (8, 256), (16, 8)):
        for first in (0, 13, 48 - length):
            start = np.array([first, (first + 5) % (49 - length)])
            rows = np.arange(2)[:, None], start[:, None] + np.arange(length)
            np.testing.assert_allclose(chunk(q[rows], start, block), expected[rows], atol=3e-6)
    until = jnp.asarray(until[:, :48])
    scalar = attend(*map(jnp.asarray, (q[:, 20:28], k, v)), **intervals(causal_visibility(until), until), q_start=20)
    np.testing.assert_allclose(scalar, expected[:, 20:28], atol=3e-6)


@pytest.mark.parametrize("block", [16, 256])
def test_what_nobody_sees_cannot_be_felt(block):
    """NaN in keys that no query sees and in queries that see no key; zeros come out, exactly."""
    rng = np.random.default_rng(4)
    low, high = random_intervals(rng, 2, 60, 60)
    mask = interval_mask(low, high, 60)
    blind, unseen = ~mask.any(2), ~mask.any(1)
    assert blind.any()
    assert unseen.any()
    clean = operands(rng, 2, 60, 60, 4, 2, 16)
    dirty = [x.copy() for x in clean]
    for x, rows in zip(dirty, (blind, unseen, unseen, blind), strict=True):
        x[rows] = np.nan
    expected = dense_attention(*clean, mask)
    out, vjp = jax.vjp(lambda *x: attend(*x, **intervals(low, high), block_q=block, block_k=block), *dirty[:3])
    for got, want, zero in zip(
        (out, *vjp(jnp.asarray(dirty[3]))), expected, (blind, blind, unseen, unseen), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-5)
        assert (np.asarray(got)[zero] == 0).all()


def brute_force_active(mask, size):
    batch, q_len, k_len = mask.shape
    starts = range(0, q_len, size), range(0, k_len, size)
    return np.array(
        [[[mask[b, i : i + size, j : j + size].any() for j in starts[1]] for i in starts[0]] for b in range(batch)]
    )


def test_active_blocks_are_those_with_a_visible_pair():
    rng = np.random.default_rng(5)
    plan = Plan(scale=1.0, block_q=8, block_k=8)
    for q_start in (0, 30):
        low = rng.integers(0, 100, (3, 60))
        high = low + rng.integers(-5, 12, (3, 60))
        got = active_blocks(jnp.asarray(low), jnp.asarray(high), jnp.full(3, q_start), 52, plan)
        want = brute_force_active(interval_mask(low, high, 52, q_start), 8)
        assert 0.1 < want.mean() < 0.9
        np.testing.assert_array_equal(got, want)


def test_blocks_without_a_visible_pair_are_not_computed():
    """A NaN reaches everything that a block with it in is multiplied into, seen or not: so it shows which ones ran.

    Forward: keys and values of one block are NaN; a block of queries stays finite iff it never touched that block.
    Backward: one block of queries has NaN cotangents; the gradient of a key block stays finite iff the two never met.
    """
    rng = np.random.default_rng(6)
    size, blocks = 8, 8
    length = size * blocks
    until, mask = (x[None] for x in random_tree(rng, length))
    visible = intervals(causal_visibility(jnp.asarray(until)), until)
    active = brute_force_active(mask, size)[0]
    assert active.sum() < blocks * (blocks + 1) // 2, "the tree must leave blocks to skip below the diagonal"
    q, k, v, out_bar = (jnp.asarray(x) for x in operands(rng, 1, length, length, 2, 1, 16))

    @jax.jit
    def both(q, k, v, out_bar):
        out, vjp = jax.vjp(lambda *x: attend(*x, **visible, block_q=size, block_k=size), q, k, v)
        return out, *vjp(out_bar)

    def finite(x):
        return np.isfinite(np.asarray(x)).reshape(blocks, -1).all(1)

    for j in range(blocks):
        here = slice(j * size, (j + 1) * size)
        out, q_bar, _, _ = both(q, k.at[:, here].set(jnp.nan), v.at[:, here].set(jnp.nan), out_bar)
        np.testing.assert_array_equal(finite(out), ~active[:, j])
        np.testing.assert_array_equal(finite(q_bar), ~active[:, j])
        _, _, k_bar, v_bar = both(q, k, v, out_bar.at[:, here].set(jnp.nan))
        np.testing.assert_array_equal(finite(k_bar), ~active[j])
        np.testing.assert_array_equal(finite(v_bar), ~active[j])


def test_intervals_by_hand():
    segments = jnp.array([[4, 4, 0, 0, 0, -1], [-1, 7, 7, 7, 7, 7], [2, 1, 1, 2, -1, -1]])
    low, high = segment_visibility(segments)
    np.testing.assert_array_equal(low, [[0, 0, 2, 2, 2, 0], [0, 1, 1, 1, 1, 1], [0, 1, 1, 3, 0, 0]])
    np.testing.assert_array_equal(high, [[2, 2, 5, 5, 5, 0], [0, 6, 6, 6, 6, 6], [1, 3, 3, 4, 0, 0]])
    np.testing.assert_array_equal(causal_visibility(high[:1]), [[0, 1, 2, 3, 4, 5]])


def count_loops(jaxpr) -> int:
    """Loops with a traced trip count, anywhere inside: one per walk over key tiles."""
    inner = [j for eqn in jaxpr.eqns for j in jaxprs_in_params(eqn.params)]
    return sum(eqn.primitive.name == "while" for eqn in jaxpr.eqns) + sum(map(count_loops, inner))


def test_saving_the_named_residuals_spares_the_second_forward_walk():
    """Three layers under scan and checkpoint: forward, recomputed forward, backward walks, and the same gradient."""
    rng = np.random.default_rng(7)
    q, k, v, _ = operands(rng, 1, 40, 40, 2, 2, 16)
    until = jnp.full((1, 40), 40, jnp.int32)

    def loss(x, policy):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x, w):
            h = jnp.tanh(x * w)
            visible = {"visible_from": causal_visibility(until), "visible_until": until}
            return x + attend(h, h * k, h + v, **visible, block_q=16, block_k=16), None

        return jax.lax.scan(layer, x, jnp.array([0.5, 1.0, 1.5]))[0].sum()

    policies = jax.checkpoint_policies
    saved = policies.save_only_these_names("attn_out", "attn_lse")
    walks = {p: count_loops(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(q, p).jaxpr) for p in (None, saved)}
    assert walks == {None: 3, saved: 2}
    everything = jax.jit(jax.grad(loss), static_argnums=1)(q, policies.everything_saveable)
    for policy in walks:
        np.testing.assert_allclose(
            jax.jit(jax.grad(loss), static_argnums=1)(q, policy), everything, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_forward_and_backward_of_a_32k_row_fit_in_4_gib(dtype):
    """At the head shapes of Qwen3-VL-4B; the scores alone would be 128 GiB in fp32. Compiled, not run."""
    q, kv = (jax.ShapeDtypeStruct((1, 32768, heads, 128), dtype) for heads in (32, 8))
    until = jax.ShapeDtypeStruct((1, 32768), jnp.int32)

    def both(q, k, v, until, out_bar):
        out, vjp = jax.vjp(lambda *x: attend(*x, visible_from=causal_visibility(until), visible_until=until), q, k, v)
        return out, vjp(out_bar)

    memory = jax.jit(both).lower(q, kv, kv, until, q).compile().memory_analysis()
    used = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert used < 4 * 2**30, f"{used / 2**30:.2f} GiB"


def test_errors_say_what_does_not_fit():
    x = {h: jnp.zeros((1, 8, h, 16)) for h in (2, 3)}
    visible = intervals(np.zeros((1, 8)), np.zeros((1, 8)))
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        attend(x[3], x[2], x[2], **visible)
    with pytest.raises(ValueError, match="one dtype"):
        attend(x[2], x[2], x[2].astype(jnp.bfloat16), **visible)
    with pytest.raises(ValueError, match="'flash'"):
        attend(x[2], x[2], x[2], **visible, implementation="flash")
    for name in ("splash", "cudnn"):
        with pytest.raises(NotImplementedError, match="use 'xla'"):
            attend(x[2], x[2], x[2], **visible, implementation=name)
