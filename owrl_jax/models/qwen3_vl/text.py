"""The decoder: two scans over stacked layers, the first of which takes DeepStack features.

A layer is cut in two halves around attention, `project` (norm, q, k, v, q/k norm, rotation) and `finish` (output map,
MLP), so that what lies between — a plain row, a contiguous cache here, a paged cache in the rollout engine — is the
caller's.

After decoder layer k the k-th DeepStack level is added at visual tokens. `visual_index` says which row of the visual
buffer a token takes (-1: none), for embeddings and DeepStack alike; a buffer of zeros and an index of -1 mean "no
image", so the program is the same with and without pictures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from owrl_jax.models.layers import Block, RMSNorm, mrope_angles, param, rotate
from owrl_jax.models.moe import SparseMLP
from owrl_jax.models.qwen3_vl.config import ModelConfig, TextConfig
from owrl_jax.models.qwen3_vl.vision import Visual
from owrl_jax.models.run import Leaf, Params, Run, scan_layers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextInput:
    """Tokens of a batch of rows.

    Attributes:
      tokens: int32 [B, T]; image placeholders included.
      positions: int32 [3, B, T]; time, height and width position of each token (all equal for text).
      visible_until: int32 [B, T]; token k is seen by queries k ≤ q < visible_until[k] of its row; 0 for padding.
      visual_index: int32 [B, T]; row of the visual buffer that replaces the token's embedding, -1 for text.
    """

    tokens: Leaf
    positions: Leaf
    visible_until: Leaf
    visual_index: Leaf


class DenseMLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, c: TextConfig):
        self.gate = param(c.model, c.mlp)
        self.up = param(c.model, c.mlp)
        self.down = param(c.mlp, c.model)

    def __call__(self, x: Float[Array, "B T D"], run: Run) -> Float[Array, "B T D"]:
        hidden = jax.nn.silu(run.linear(x, self.gate[...])) * run.linear(x, self.up[...])
        return run.linear(run.constrain(hidden, "batch", "length", "act_mlp"), self.down[...])


class Attention(nnx.Module):
    """Projections of grouped-query attention with per-head q/k norm."""

    def __init__(self, c: TextConfig):
        self.q = param(c.model, c.heads, c.head_dim)
        self.k = param(c.model, c.kv_heads, c.head_dim)
        self.v = param(c.model, c.kv_heads, c.head_dim)
        self.o = param(c.heads, c.head_dim, c.model)
        self.q_norm = RMSNorm(c.head_dim, c.rms_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_eps)


class DecoderLayer(nnx.Module):
    """One layer, in two halves around attention."""

    def __init__(self, c: TextConfig):
        self.attn_norm = RMSNorm(c.model, c.rms_eps)
        self.attn = Attention(c)
        self.mlp_norm = RMSNorm(c.model, c.rms_eps)
        self.mlp = SparseMLP(c) if c.moe else DenseMLP(c)

    def project(
        self, x: Float[Array, "B T D"], angles: Float[Array, "B T half"], run: Run
    ) -> tuple[Float[Array, "B T H N"], Float[Array, "B T K N"], Float[Array, "B T K N"]]:
        """Rotated queries and keys, and values."""
        h, a = self.attn_norm(x), self.attn
        q = run.constrain(run.linear(h, a.q[...]), "batch", "length", "act_heads", None)
        k = run.constrain(run.linear(h, a.k[...]), "batch", "length", "act_kv_heads", None)
        v = run.constrain(run.linear(h, a.v[...]), "batch", "length", "act_kv_heads", None)
        return rotate(a.q_norm(q), angles), rotate(a.k_norm(k), angles), v

    def finish(self, x: Float[Array, "B T D"], attended: Float[Array, "B T H N"], run: Run) -> Float[Array, "B T D"]:
        """Residual sums of the output map and the MLP."""
        x = x + run.linear(attended, self.attn.o[...], inputs=2)
        h = self.mlp_norm(x)
        h = self.mlp(h, run.shard) if isinstance(self.mlp, SparseMLP) else self.mlp(h, run)
        return run.constrain(x + h, "batch", "length", "act_embed")


# (q, k, v, this layer's cache) -> (attended, updated cache)
Mix = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


def _visual_rows(rows: Float[Array, "B M D"], index: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Row `index` of the visual buffer for each token, zero where the index is negative."""
    picked = jnp.take_along_axis(rows, jnp.maximum(index, 0)[..., None], axis=1)
    return jnp.where(index[..., None] >= 0, picked, 0)


def decode(
    config: ModelConfig,
    params: Params,
    axes: Params,
    text: TextInput,
    visual: Visual | None,
    run: Run,
    mix: Mix,
    caches: dict[str, Any],
) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
    """Runs embedding, all layers and the final norm.

    Args:
      params, axes: the whole parameter tree, and the logical axes of its leaves. "deep" and "layers" may be tuples of
        one tree per layer (see `scan_layers`); caches are then tuples of what each layer has.
      visual: output of the vision tower for these rows, or None if no row holds an image.
      mix: attention between the two halves of a layer.
      caches: for "deep" and "layers", a tree with a leading layer axis handed to `mix` slice by slice (None: no cache).
    Returns:
      hidden states after the final norm, in the compute dtype, and the updated caches.
    """
    c = config.text
    x = params["embed"]["table"][text.tokens].astype(run.compute)
    if visual is not None:
        x = jnp.where(text.visual_index[..., None] >= 0, _visual_rows(visual.embeddings, text.visual_index), x)
    x = run.constrain(x, "batch", "length", "act_embed")
    angles = mrope_angles(text.positions, head_dim=c.head_dim, theta=c.rope_theta, section=c.mrope_section)
    block = Block(DecoderLayer, c)

    def body(x, layer, slices):
        levels, cache = slices
        layer = block(layer)
        q, k, v = layer.project(x, angles, run)
        attended, cache = mix(q, k, v, cache)
        x = layer.finish(x, attended, run)
        if levels is not None:
            x = x + _visual_rows(levels, text.visual_index)
        return x, cache

    updated = {}
    for group in ("deep", "layers"):
        if group in params:
            levels = visual.deepstack if visual is not None and group == "deep" else None
            xs: Any = (levels, caches.get(group))
            if isinstance(params[group], tuple):
                at = lambda part, i: None if part is None else part[i]  # noqa: E731
                xs = [(at(levels, i), at(caches.get(group), i)) for i in range(len(params[group]))]
            x, updated[group] = scan_layers(run, body, x, params[group], axes[group], xs)
    norm = Block(RMSNorm, c.model, c.rms_eps)(run.cast(params["norm"]))
    return norm(x), updated
