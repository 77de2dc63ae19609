"""How a model runs, apart from what it is: dtypes, rematerialisation, layer loop, mesh.

A `Run` is hashable and static under `jax.jit`. Parameters are float32 masters (or already in the compute dtype for
rollouts) and are cast layer by layer inside the scan, so that no second copy of the model exists and, on a mesh, the
all-gather of a layer moves the smaller dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp

from owrl_jax.sharding import Sharder

Params = dict[str, Any]
Leaf = Any
"""A jax array; a numpy array while it is still on the host; a `ShapeDtypeStruct` when compiling ahead of time."""
Remat = Literal["none", "full", "attention", "offload"]

# Names that models.attention gives to what its backward pass needs and cannot cheaply recompute.
_ATTENTION_NAMES = ("attn_out", "attn_lse")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Execution choices.

    Attributes:
      compute: dtype of activations and matrix products; statistics, rotations, softmax and log-probs stay float32.
      remat: what the backward pass keeps of a layer: "none" (recompute nothing), "full" (keep only the layer's input),
        "attention" (also keep the attention output), "offload" (the same, in host memory).
      unroll: run layers as a Python-like unrolled loop instead of a scan: faster decode, larger program.
      shard: mesh and rules; None on one device.
      attention: implementation passed on to `attend`; None chooses by platform.
    """

    compute: Any = jnp.float32
    remat: Remat = "none"
    unroll: bool = False
    shard: Sharder | None = None
    attention: str | None = None

    def __post_init__(self) -> None:
        if self.remat not in ("none", "full", "attention", "offload"):
            raise ValueError(f"remat={self.remat!r} is not one of none, full, attention, offload")
        object.__setattr__(self, "compute", jnp.dtype(self.compute))

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh, if any."""
        return cast(jax.sharding.Mesh, self.shard.mesh) if self.shard else None  # nothing runs on an abstract one

    def linear(self, x: jax.Array, kernel: jax.Array, *, inputs: int = 1, out: Any = None) -> jax.Array:
        """`x [B, T, in…] · kernel [in…, out…]`, `inputs` axes contracted; `out`: dtype of the result, x's if None.

        Rows and positions are merged into one axis first: with two, the backward products contract over two axes,
        which XLA on CPU does by transposed copies (about twice as slow, forward and backward of an MLP). Positions
        that are split over a mesh stay apart, for merging them would gather them.
        """
        if self.mesh is not None and self.mesh.shape.get("context", 1) > 1:
            return jax.lax.dot_general(
                x, kernel, ((range(x.ndim - inputs, x.ndim), range(inputs)), ((), ())), preferred_element_type=out
            )
        rows, width = x.shape[: x.ndim - inputs], math.prod(kernel.shape[:inputs])
        product = jnp.matmul(x.reshape(-1, width), kernel.reshape(width, -1), preferred_element_type=out)
        return product.reshape(*rows, *kernel.shape[inputs:])

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Asks for the sharding that the rules give these logical axes; does nothing on one device."""
        return self.shard.constrain(x, *axes) if self.shard else x

    def cast(self, params: Params, axes: Params | None = None) -> Params:
        """Parameters in the compute dtype, still sharded as stored if their logical axes are given.

        `axes` may name a leading layer axis that a scan has already taken away.
        """
        if self.shard is None or axes is None:
            return jax.tree.map(lambda leaf: leaf.astype(self.compute), params)
        return jax.tree.map(
            lambda leaf, names: self.constrain(leaf.astype(self.compute), *names[-leaf.ndim :]), params, axes
        )


def _policy(remat: Remat):
    names = jax.checkpoint_policies
    if remat == "full":
        return names.nothing_saveable
    if remat == "attention":
        return names.save_only_these_names(*_ATTENTION_NAMES)
    return names.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=list(_ATTENTION_NAMES),
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip


def scan_layers(
    run: Run,
    body: Callable[[Any, Params, Any], tuple[Any, Any]],
    carry: Any,
    params: Params | tuple[Params, ...],
    axes: Params,
    xs: Any = None,
) -> tuple[Any, Any]:
    """Runs stacked layers one after another.

    Args:
      body: `(carry, layer parameters in the compute dtype, this layer's slice of xs) -> (carry, output)`.
      params: leaves with a leading layer axis; `axes` holds the logical axes of each leaf, the layer axis first. Or a
        tuple with the tree of each layer: then there is no scan, and no slice of a stacked array to be copied (on a
        CPU a product of few rows takes two to three times as long with such a slice as its operand).
      xs: optional tree with a leading layer axis (DeepStack rows, caches); of a tuple, what each layer gets.
    Returns:
      the last carry and the stacked outputs (of a tuple: a tuple of outputs).
    """

    def step(carry, slices):
        layer, x = slices
        return body(carry, run.cast(layer, axes), x)

    if run.remat != "none":
        step = jax.checkpoint(step, policy=_policy(run.remat), prevent_cse=run.unroll)
    if isinstance(params, tuple):
        outputs = []
        for layer, x in zip(params, [None] * len(params) if xs is None else xs, strict=True):
            carry, output = step(carry, (layer, x))
            outputs.append(output)
        return carry, tuple(outputs)
    layers = len(jax.tree.leaves(params)[0])
    return jax.lax.scan(step, carry, (params, xs), unroll=layers if run.unroll else 1)
