"""The sparse MLP of Qwen3-VL-MoE: each token goes through its `top_k` experts, weighted and summed.

Routing follows the reference: router logits in the compute dtype, softmax in float32 over *all* experts, the top k,
renormalised. No token is ever dropped and no capacity exists: tokens are sorted by expert and one ragged matmul runs
each expert over its own rows. Over a mesh, tokens stay where they are; each expert shard computes its experts' part for
its tokens and the parts are summed (no all-to-all; right for the few thousand tokens a chip holds here).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from owrl_jax.models.layers import param
from owrl_jax.models.qwen3_vl.config import TextConfig
from owrl_jax.sharding import Sharder


class SparseMLP(nnx.Module):
    """Router and expert weights. Letters: E experts, D model, I expert mlp."""

    def __init__(self, config: TextConfig):
        moe = config.moe
        assert moe is not None, "a dense configuration has no sparse MLP"
        self.router = param(config.model, moe.experts)
        self.gate_up = param(moe.experts, config.model, 2, moe.mlp)
        self.down = param(moe.experts, moe.mlp, config.model)
        self.top_k = moe.top_k

    def __call__(self, x: Float[Array, "B T D"], shard: Sharder | None) -> Float[Array, "B T D"]:
        logits = x @ self.router[...]
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), self.top_k)
        weights = (weights / jnp.sum(weights, axis=-1, keepdims=True)).astype(x.dtype)
        gate_up, down = self.gate_up[...], self.down[...]
        if shard is None:
            return _experts(x, weights, chosen, gate_up, down)

        tokens = shard.spec(("batch", "length", None), x.shape)
        w_spec = shard.spec(("expert", None, None, "mlp"), gate_up.shape)
        d_spec = shard.spec(("expert", "mlp", None), down.shape)
        expert_axis, mlp_axis = (*d_spec, None, None)[:2]

        def local(x, weights, chosen, gate_up, down):
            first = 0 if expert_axis is None else jax.lax.axis_index(expert_axis) * gate_up.shape[0]
            part = _experts(x, weights, chosen - first, gate_up, down)
            axes = tuple(a for a in (expert_axis, mlp_axis) if a is not None)
            return jax.lax.psum(part, axes) if axes else part

        return jax.shard_map(
            local, mesh=shard.mesh, in_specs=(tokens, tokens, tokens, w_spec, d_spec), out_specs=tokens, check_vma=False
        )(x, weights, chosen, gate_up, down)


def _experts(
    x: Float[Array, "B T D"],
    weights: Float[Array, "B T k"],
    chosen: Int[Array, "B T k"],
    gate_up: Float[Array, "E D 2 I"],
    down: Float[Array, "E I D"],
) -> Float[Array, "B T D"]:
    """The sum over those chosen experts that lie in `0 … E-1`; others are another shard's and count as zero."""
    experts, model, _, mlp = gate_up.shape
    top_k = chosen.shape[-1]
    flat = x.reshape(-1, model)
    expert = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts).reshape(-1)
    order = jnp.argsort(expert, stable=True)  # rows by expert, foreign ones last
    token = order // top_k
    sizes = jnp.bincount(expert, length=experts + 1)[:experts].astype(jnp.int32)
    hidden = jax.lax.ragged_dot(flat[token], gate_up.reshape(experts, model, 2 * mlp), sizes)
    gate, up = jnp.split(hidden, 2, axis=-1)
    out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes)
    mine = (jnp.arange(out.shape[0]) < jnp.sum(sizes))[:, None]  # rows past the last group are undefined
    out = jnp.where(mine, out * weights.reshape(-1)[order][:, None], 0)
    return jnp.zeros_like(flat).at[token].add(out).reshape(x.shape)
