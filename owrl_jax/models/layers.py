"""The small layers both towers are made of: linear maps, norms, rotary positions, and how they are declared.

`flax.nnx` defines layers and nothing more: a module names its parameters and computes from them. Parameters travel as
one plain nested dict; `Block` turns a module class into a pure function of (parameters, inputs), so that everything
runs under `jax.jit` and `lax.scan` with no state. Shapes come from the parameter table and are checked against it by
a test.

Norm statistics, rotary tables and rotations are computed in float32 whatever the compute dtype is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from owrl_jax.models.run import Run


def param(*shape: int) -> nnx.Param:
    """A declared parameter. Its value here is never used: real values come from the parameter tree."""
    return nnx.Param(jnp.zeros(shape, jnp.float32))


class Block:
    """A module class bound to its constructor arguments, callable on plain parameter dicts.

    `Block(Attention, config)(params)` gives a module whose parameters are the arrays in `params`; only its structure is
    kept here, no array is ever allocated.
    """

    def __init__(self, module: Callable[..., nnx.Module], *args: Any, **kwargs: Any):
        self._graph, state = nnx.split(nnx.eval_shape(lambda: module(*args, **kwargs)))
        self.shapes: dict[str, Any] = nnx.to_pure_dict(state)

    def __call__(self, params: dict[str, Any]) -> Any:
        return nnx.merge(self._graph, params)


class Kernel(nnx.Module):
    """A linear map with bias; `inputs` leading axes are contracted, the others are its outputs."""

    def __init__(self, *shape: int, inputs: int = 1):
        self.kernel = param(*shape)
        self.bias = param(*shape[inputs:])
        self.inputs = inputs

    def __call__(self, x: Float[Array, "*given"], run: Run) -> Float[Array, "*made"]:
        return run.linear(x, self.kernel[...], inputs=self.inputs) + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm: statistics in float32, cast to the input's dtype, then the learned scale."""

    def __init__(self, n: int, eps: float):
        self.scale = param(n)
        self.eps = eps

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * self.scale[...]


class LayerNorm(nnx.Module):
    """Mean-variance norm with scale and bias, computed in float32 and cast back."""

    def __init__(self, n: int, eps: float):
        self.scale = param(n)
        self.bias = param(n)
        self.eps = eps

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return (y * self.scale[...] + self.bias[...]).astype(x.dtype)


def inverse_frequencies(dim: int, theta: float) -> np.ndarray:
    """Rotary frequencies `theta ** (-2i / dim)`, i < dim/2, float32 [dim/2]."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (np.float32(1) / np.float32(theta) ** exponent).astype(np.float32)


def mrope_angles(
    positions: Int[Array, "3 B T"], *, head_dim: int, theta: float, section: tuple[int, int, int]
) -> Float[Array, "B T half"]:
    """Angles of interleaved M-RoPE: frequency f turns with the time, height or width position.

    Frequencies 1, 4, 7 … below 3·section[1] follow height, 2, 5, 8 … below 3·section[2] follow width, all others time
    (Qwen3-VL; contiguous sections would be Qwen2-VL's layout). Float32.
    """
    axis = np.zeros(head_dim // 2, np.int32)
    for dim in (1, 2):
        axis[dim : 3 * section[dim] : 3] = dim
    per_frequency = jnp.moveaxis(positions.astype(jnp.float32)[axis], 0, -1)
    return per_frequency * inverse_frequencies(head_dim, theta)


def axial_angles(rc: Int[Array, "B P 2"], *, head_dim: int, theta: float) -> Float[Array, "B P half"]:
    """Angles of 2-D rotary positions: half of the frequencies turn with the row, half with the column."""
    inverse = inverse_frequencies(head_dim // 2, theta)
    return (rc.astype(jnp.float32)[..., None] * inverse).reshape(*rc.shape[:-1], head_dim // 2)


def rotate(x: Float[Array, "B T H N"], angles: Float[Array, "B T half"]) -> Float[Array, "B T H N"]:
    """Rotary position embedding of the half-split kind, in float32, cast back to x's dtype."""
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
