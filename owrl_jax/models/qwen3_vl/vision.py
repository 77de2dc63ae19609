"""The vision tower: patches of screenshots in, one embedding per 2×2 patches and three levels of DeepStack features
out.

Ragged structure (which patch belongs to which image, its row and column, its taps into the learned position table) is
decided on the host (`positions.plan_vision`); the device sees flat arrays of fixed size. Attention is full within one
image and nothing else, padding patches included: they see nothing and are seen by nobody.

A picture is still, so its two frames are equal; the patch kernel's two temporal halves are summed (in float32) and
one frame is multiplied: the same result from half the input. Both halves stay parameters, so gradients and export are
faithful.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from owrl_jax.models.attention import attend, segment_visibility
from owrl_jax.models.layers import Block, Kernel, LayerNorm, axial_angles, rotate
from owrl_jax.models.qwen3_vl.config import VisionConfig
from owrl_jax.models.run import Leaf, Params, Run, scan_layers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionInput:
    """Patches of any number of images for each row of a batch, padded to a bucket of P patches.

    Attributes:
      patches: uint8 [B, P, 768]; values of one frame in order (channel, row, column); patches in 2×2 merge-block order.
      rc: int32 [B, P, 2]; row and column of each patch in its image.
      taps, tap_weights: int32 and float32 [B, P, 4]; bilinear taps into the learned position table.
      segment: int32 [B, P]; number of the image within its row, -1 for padding.
    """

    patches: Leaf
    rc: Leaf
    taps: Leaf
    tap_weights: Leaf
    segment: Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Visual:
    """What the tower hands to the decoder: rows that `visual_index` points into.

    Attributes:
      embeddings: [B, M, D]; one row per image token, M = P / merge².
      deepstack: [levels, B, M, D]; added after decoder layers 0 … levels-1 at the same tokens.
    """

    embeddings: Leaf
    deepstack: Leaf


class VisionAttention(nnx.Module):
    """Bidirectional attention within an image, with 2-D rotary positions."""

    def __init__(self, c: VisionConfig):
        self.qkv = Kernel(c.model, 3, c.heads, c.head_dim)
        self.proj = Kernel(c.heads, c.head_dim, c.model, inputs=2)

    def __call__(self, x, angles, visible, run: Run):
        q, k, v = jnp.moveaxis(self.qkv(x, run), 2, 0)
        q, k = rotate(q, angles), rotate(k, angles)
        out = attend(
            q, k, v, visible_from=visible[0], visible_until=visible[1], mesh=run.mesh, implementation=run.attention
        )
        return self.proj(out, run)


class VisionMLP(nnx.Module):
    """Two linear maps with the tanh form of GELU between them."""

    def __init__(self, c: VisionConfig):
        self.fc1 = Kernel(c.model, c.mlp)
        self.fc2 = Kernel(c.mlp, c.model)

    def __call__(self, x, run: Run):
        return self.fc2(jax.nn.gelu(self.fc1(x, run), approximate=True), run)


class VisionBlock(nnx.Module):
    """Pre-norm transformer block."""

    def __init__(self, c: VisionConfig):
        self.norm1 = LayerNorm(c.model, c.eps)
        self.attn = VisionAttention(c)
        self.norm2 = LayerNorm(c.model, c.eps)
        self.mlp = VisionMLP(c)

    def __call__(self, x, angles, visible, run: Run):
        x = x + self.attn(self.norm1(x), angles, visible, run)
        return x + self.mlp(self.norm2(x), run)


class Merger(nnx.Module):
    """Groups merge² neighbouring patches and maps them to the decoder's width, with the exact (erf) GELU.

    The final merger normalises patches before grouping, DeepStack mergers normalise the group.
    """

    def __init__(self, c: VisionConfig, *, grouped_norm: bool):
        merged = c.model * c.merge**2
        self.norm = LayerNorm(merged if grouped_norm else c.model, c.eps)
        self.fc1 = Kernel(merged, merged)
        self.fc2 = Kernel(merged, c.out)
        self.merged, self.grouped_norm = merged, grouped_norm

    def __call__(self, x: Float[Array, "B P W"], run: Run) -> Float[Array, "B M D"]:
        batch = x.shape[0]
        x = self.norm(x.reshape(batch, -1, self.merged)) if self.grouped_norm else self.norm(x)
        return self.fc2(jax.nn.gelu(self.fc1(x.reshape(batch, -1, self.merged), run), approximate=False), run)


def vision_blocks(c: VisionConfig) -> dict[str, Block]:
    """The tower's modules by the key under which their parameters live."""
    blocks = {f"stage{i}": Block(VisionBlock, c) for i in range(len(c.stages))}
    blocks["merger"] = Block(Merger, c, grouped_norm=False)
    if c.taps:
        blocks["deepstack"] = Block(Merger, c, grouped_norm=True)
    return blocks


def encode_images(c: VisionConfig, params: Params, axes: Params, images: VisionInput, run: Run) -> Visual:
    """Runs the tower.

    Args:
      params, axes: the `vision` part of the parameter tree, and the logical axes of its leaves.
      images: patches of each row's images.
    Returns:
      embeddings and DeepStack features in the compute dtype; rows of padding patches hold arbitrary finite values.
    """
    blocks = vision_blocks(c)
    kernel = jnp.sum(params["patch"]["kernel"].astype(jnp.float32), axis=0).astype(run.compute)
    pixels = (images.patches.astype(jnp.float32) / 127.5 - 1).astype(run.compute)
    x = run.linear(pixels, kernel) + params["patch"]["bias"].astype(run.compute)
    table = params["position"]["table"].astype(jnp.float32)
    position = jnp.zeros((), jnp.float32)
    for t in range(4):  # tap by tap: [B, P, 4, W] at once would be four times the activations
        position = position + table[images.taps[..., t]] * images.tap_weights[..., t, None]
    x = run.constrain(x + position.astype(run.compute), "batch", "patch", None)

    angles = axial_angles(images.rc, head_dim=c.head_dim, theta=c.rope_theta)
    visible = segment_visibility(images.segment)
    levels = []
    for stage in range(len(c.stages)):
        block = blocks[f"stage{stage}"]

        def body(x, layer, _, block=block):
            return run.constrain(block(layer)(x, angles, visible, run), "batch", "patch", None), None

        x, _ = scan_layers(run, body, x, params[f"stage{stage}"], axes[f"stage{stage}"])
        if stage < len(c.taps):
            merger = run.cast(jax.tree.map(lambda leaf, stage=stage: leaf[stage], params["deepstack"]))
            levels.append(blocks["deepstack"](merger)(x, run))
    embeddings = blocks["merger"](run.cast(params["merger"]))(x, run)
    empty = jnp.zeros((0, *embeddings.shape), embeddings.dtype)
    return Visual(embeddings=embeddings, deepstack=jnp.stack(levels) if levels else empty)
