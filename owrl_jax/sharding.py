"""Where every array lies: one mesh, one table of rules per role, one resolver.

Code names the meaning of each dimension (a logical axis: "heads", "batch"); a rule table says which mesh axes that
meaning is split over; the resolver turns both into a `PartitionSpec`. TPU slice, GPU node and laptop differ in
`MeshConfig` alone.

Mesh axes, from the slowest links to the fastest:

    replica   copies of everything: one gradient all-reduce per step, fit for the network between slices
    fsdp      batch and stored weights: weights are gathered once per layer, ahead of their use
    context   positions of a row: keys and values move once per layer
    expert    experts: one sum of partial results in every sparse layer, and the layer waits for it
    tensor    heads and mlp columns: several all-reduces of activations per layer, each waited for

Invariant: the resolver never fails on sizes. A mesh axis that does not divide a dimension, or that an earlier dimension
of the same array already uses, is left out, and the reason is logged once and listed by `Sharder.explain`. An unknown
logical axis is an error, for it is always a slip. All axes are of jax's `Auto` type: the compiler propagates shardings
from the parameters and from `Sharder.constrain`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from owrl_jax.models.qwen3_vl.config import ModelConfig
from owrl_jax.models.qwen3_vl.table import build_tree, table

log = logging.getLogger(__name__)

AXES = ("replica", "fsdp", "context", "expert", "tensor")
"""Mesh axes, slow links first."""

MeshAxes = str | tuple[str, ...] | None
Rules = tuple[tuple[str, MeshAxes], ...]
"""Pairs of a logical axis and the mesh axes it is split over; with several, the first is the outermost."""


class ShardingError(ValueError):
    """A mesh or a logical axis that makes no sense, with the value and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; at most one may be -1, which takes the devices that the others leave.

    On GPUs keep `tensor` (and `expert`) within one NVLink domain. Their useful maximum is bounded by the model: 8 key
    heads (4 in the sparse sizes) end the gain of `tensor` at 8 (4), and 16 heads in the vision tower at 16.
    """

    replica: int = 1
    fsdp: int = -1
    context: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        sizes = self._sizes()
        bad = {name: size for name, size in sizes.items() if size != -1 and size < 1}
        if bad:
            raise ShardingError(f"mesh {_product(bad)}: a size is at least 1, or -1 to take the remaining devices")
        fills = [name for name, size in sizes.items() if size == -1]
        if len(fills) > 1:
            raise ShardingError(f"mesh {' and '.join(fills)} are both -1: only one axis can take the remaining devices")

    def _sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in AXES}

    def sizes(self, devices: int) -> dict[str, int]:
        """Size of each mesh axis on so many devices.

        Raises:
          ShardingError: if the sizes do not multiply to `devices`.
        """
        sizes = self._sizes()
        fixed = math.prod(size for size in sizes.values() if size != -1)
        fill = next((name for name, size in sizes.items() if size == -1), None)
        if fill is None:
            if fixed != devices:
                raise ShardingError(
                    f"mesh {_product(sizes)} needs {fixed} devices, but there are {devices}: "
                    "change a size, or set one to -1 to take what is left"
                )
            return sizes
        if devices % fixed:
            raise ShardingError(
                f"mesh {fill}=-1 cannot take what is left: {_product({k: v for k, v in sizes.items() if k != fill})} "
                f"= {fixed} does not divide the {devices} devices"
            )
        return sizes | {fill: devices // fixed}


def _product(sizes: dict[str, int]) -> str:
    return " × ".join(f"{name}={size}" for name, size in sizes.items())


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The device mesh with axes `AXES`.

    Devices of several TPU slices (they differ in `slice_index`) are laid out so that only `replica` crosses slices.

    Args:
      config: sizes.
      devices: the devices to use; all by default.
    Raises:
      ShardingError: if sizes and devices do not fit, or `replica` is no multiple of the number of slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = config.sizes(len(devices))
    shape = tuple(sizes.values())
    types = (AxisType.Auto,) * len(AXES)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return jax.make_mesh(shape, AXES, devices=devices, axis_types=types)
    if sizes["replica"] % slices:
        raise ShardingError(
            f"mesh replica={sizes['replica']} is no multiple of the {slices} slices: only `replica` may cross slices, "
            f"for the network between them is too slow for the other axes; set replica={slices}"
        )
    inside = (sizes["replica"] // slices, *shape[1:])
    across = (slices, *(1 for _ in shape[1:]))
    grid = mesh_utils.create_hybrid_device_mesh(inside, across, devices=devices)
    return Mesh(grid, AXES, axis_types=types)


_DATA = ("replica", "fsdp")

TRAIN_RULES: Rules = (
    # Parameters, and with them gradients and optimiser state: every matrix is split over fsdp along its model side and
    # over tensor along its other side.
    ("vocab", "tensor"),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("head_dim", None),
    ("mlp", "tensor"),
    ("expert", "expert"),
    ("layers", None),  # scanned over: a split would move a layer's weights at every step of the scan
    ("vis_embed", "fsdp"),
    ("vis_heads", "tensor"),
    ("vis_mlp", "tensor"),
    # Activations. Rows stay off `expert`: sparse layers sum over it what each shard's experts make of the same tokens.
    ("batch", _DATA),
    ("length", "context"),
    ("act_embed", None),
    ("act_heads", "tensor"),
    ("act_kv_heads", "tensor"),
    ("act_mlp", "tensor"),
    ("act_vocab", "tensor"),
    ("patch", "context"),
    ("pages", _DATA),
)
"""Learner: weights sharded over fsdp and tensor, rows over replica and fsdp, positions over context."""


def with_rules(rules: Rules, **changes: MeshAxes) -> Rules:
    """The table with some logical axes mapped differently.

    Raises:
      ShardingError: on a logical axis that the table lacks.
    """
    known = [name for name, _ in rules]
    for name in changes:
        if name not in known:
            raise _unknown(name, known)
    return tuple((name, changes.get(name, axes)) for name, axes in rules)


ROLLOUT_RULES: Rules = with_rules(TRAIN_RULES, embed=None, vis_embed=None)
"""Rollout: as the learner, but weights are whole on every fsdp member, which serves its own sequences. A decoding step
reads each weight once for a handful of tokens; gathering it over the links first would cost far more than the step. A
model too large for that is split by `tensor` and `expert`, or takes `with_rules(ROLLOUT_RULES, embed="fsdp")`."""

JUDGE_RULES: Rules = TRAIN_RULES
"""Judge: one long prompt with many screenshots and a short answer. Gathering a layer is paid back by thousands of
prompt tokens, and a judge larger than the policy must share the chips with it, so weights stay split over fsdp."""


def _unknown(name: str, known: Sequence[str]) -> ShardingError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ShardingError(f"unknown logical axis {name!r}{hint} (known: {', '.join(known)})")


@dataclasses.dataclass(frozen=True)
class Sharder:
    """A mesh with a rule table. Hashable, so it can be a static argument of `jax.jit`.

    Attributes:
      mesh: any mesh whose axes are among `AXES`; one that is not there counts as size 1. An abstract one, names and
        sizes without devices, is enough to say where things would lie.
      rules: logical axis → mesh axes.
    """

    mesh: Mesh | AbstractMesh
    rules: Rules

    def __post_init__(self) -> None:
        names = [name for name, _ in self.rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ShardingError(f"the rules name {', '.join(twice)} more than once")
        for name, axes in self.rules:
            for axis in _tuple(axes):
                if axis not in AXES:
                    raise ShardingError(f"rule {name!r} → {axis!r}: not a mesh axis (known: {', '.join(AXES)})")

    def spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """How an array is split.

        Args:
          axes: logical axis of each dimension; None is never split.
          shape: sizes of the dimensions.
        Returns:
          The specification without trailing Nones. Mesh axes of size 1 are left out.
        Raises:
          ShardingError: on an unknown logical axis, or if `axes` and `shape` differ in length.
        """
        return _resolve(self, tuple(axes), tuple(shape))[0]

    def sharding(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
        """`spec` on this mesh."""
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """`x`, with its sharding fixed at this point of a program; unchanged on a mesh of one device."""
        spec = self.spec(axes, x.shape)
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def tree(self, config: ModelConfig) -> dict[str, Any]:
        """Sharding of every parameter, in the shape of the parameter tree."""
        return build_tree(config, lambda row: self.sharding(row.full_axes, row.full_shape))

    def dropped(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> tuple[str, ...]:
        """Why mesh axes that the rules ask for were left out, a sentence each; empty if none was."""
        return _resolve(self, tuple(axes), tuple(shape))[1]

    def explain(self, config: ModelConfig) -> list[str]:
        """What `dropped` says of the model's parameters: each sentence once, with the parameters that it concerns."""
        concerned: dict[str, list[str]] = {}
        for row in table(config):
            for reason in self.dropped(row.full_axes, row.full_shape):
                concerned.setdefault(reason, []).append(row.name)
        return [f"{reason} ({', '.join(names)})" for reason, names in concerned.items()]


def _tuple(axes: MeshAxes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()


@functools.cache
def _resolve(
    sharder: Sharder, axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> tuple[PartitionSpec, tuple[str, ...]]:
    """Specification and reasons. Cached, which also is what makes each reason appear in the log once."""
    if len(axes) != len(shape):
        raise ShardingError(f"{len(axes)} logical axes {axes} for shape {shape}: one per dimension is needed")
    rules, sizes = dict(sharder.rules), dict(sharder.mesh.shape)
    used: dict[str, str] = {}
    entries: list[MeshAxes] = []
    reasons: list[str] = []
    for name, length in zip(axes, shape, strict=True):
        if name is not None and name not in rules:
            raise _unknown(name, list(rules))
        kept: list[str] = []
        for axis in _tuple(rules[name]) if name is not None else ():
            size = sizes.get(axis, 1)
            split = math.prod(sizes[other] for other in kept)
            if size == 1:
                continue
            if axis in used:
                reasons.append(f"{name} is not split over {axis}: {used[axis]} of the same array already is")
            elif length % (split * size):
                part = f"{length} / {split}" if split > 1 else f"{length}"
                reasons.append(f"{name}={part} is not split over {axis}: {size} does not divide it")
            else:
                kept.append(axis)
                used[axis] = str(name)
        entries.append(tuple(kept) if len(kept) > 1 else kept[0] if kept else None)
    while entries and entries[-1] is None:
        entries.pop()
    for reason in reasons:
        log.info("array %s of shape %s: %s", axes, shape, reason)
    return PartitionSpec(*entries), tuple(reasons)
