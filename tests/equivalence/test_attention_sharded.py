"""`attend` on 8 devices equals dense attention, gradients too, on every kind of axis and where axes do not divide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from owrl_jax.models.attention import attend, causal_visibility
from tests.unit.dense_attention import dense_attention, operands, random_tree

AXES = ("replica", "fsdp", "context", "tensor", "expert")


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        # mesh sizes in the order of AXES; shape: B, T, H, K, N
        ((1, 2, 2, 2, 1), (2, 80, 4, 2, 16)),
        ((2, 2, 1, 1, 2), (4, 40, 4, 2, 16)),
        ((1, 1, 8, 1, 1), (2, 64, 2, 1, 16)),
        # fsdp does not divide the batch, tensor divides the query heads but not the kv heads, context divides
        ((2, 1, 2, 2, 1), (3, 36, 6, 3, 16)),
        # nothing divides
        ((1, 2, 2, 2, 1), (1, 33, 3, 1, 16)),
    ],
)
def test_sharded_equals_dense(sizes, shape):
    devices = jax.devices()
    if len(devices) < 8:
        pytest.skip("needs 8 (fake) devices")
    batch, length, heads, kv_heads, head_dim = shape
    rng = np.random.default_rng(length)
    until, mask = (np.stack(x) for x in zip(*(random_tree(rng, length) for _ in range(batch)), strict=True))
    arrays = operands(rng, batch, length, length, heads, kv_heads, head_dim)
    mesh = Mesh(np.array(devices[:8]).reshape(sizes), AXES)

    @jax.jit
    def both(q, k, v, until, out_bar):
        @jax.checkpoint
        def attention(q, k, v):
            visible = {"visible_from": causal_visibility(until), "visible_until": until}
            return attend(q, k, v, **visible, mesh=mesh, block_q=16, block_k=16)

        out, vjp = jax.vjp(attention, q, k, v)
        return out, *vjp(out_bar)

    got = both(*arrays[:3], jnp.asarray(until, jnp.int32), arrays[3])
    for name, x, want in zip(("out", "q", "k", "v"), got, dense_attention(*arrays, mask), strict=True):
        np.testing.assert_allclose(x, want, atol=5e-6 * np.abs(want).max(), err_msg=name)


def test_axes_are_used_where_they_divide():
    """Each device computes its share only: the compiled loop works on local heads, and the output comes out sharded."""
    devices = jax.devices()
    if len(devices) < 8:
        pytest.skip("needs 8 (fake) devices")
    mesh = Mesh(np.array(devices[:8]).reshape(1, 2, 2, 2, 1), AXES)
    q, k, v, _ = (jnp.asarray(x) for x in operands(np.random.default_rng(0), 2, 64, 64, 4, 2, 16))
    until = jnp.full((2, 64), 64, jnp.int32)
    out = jax.jit(lambda *x: attend(*x, visible_from=causal_visibility(until), visible_until=until, mesh=mesh))(q, k, v)
    assert {shard.data.shape for shard in out.addressable_shards} == {(1, 32, 2, 16)}
