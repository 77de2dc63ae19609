"""What follows from shapes and rules alone: bytes of the state on one device, activations and traffic by formula.

State bytes are exact: every array's shape cut by its sharding. Activations and traffic are formulas, used where nothing
can be compiled; the compiler's own numbers replace them where there is a compiler.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from owrl_jax.models.qwen3_vl.table import parameter_count
from owrl_jax.plan.devices import Target
from owrl_jax.plan.hlo import Collective
from owrl_jax.plan.programs import Compiled, Work, with_optional


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """Bytes on one device between and during the programs of an update.

    Attributes:
      parameters: all of them; `frozen` of these are not trained.
      gradients: float32, of what is trained; they exist while an update runs.
      moments: Adam's two; 0 on the device if they live on the host.
      moments_on_host: those of this device in host memory.
      batch: one micro-batch.
    """

    parameters: int
    frozen: int
    gradients: int
    moments: int
    moments_on_host: int
    batch: int


def _bytes(tree: Any) -> int:
    """Of all arrays of a tree, the part that one device holds."""
    return sum(
        math.prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def state_bytes(work: Work) -> State:
    """Exact bytes of the learner's state on one device."""
    learner = work.learner
    state = learner.abstract(work.dtype)
    moving, frozen = learner.trainable.split(work.config, state.params, state.adapters)
    width = {name: _bytes(leaf) * 4 // leaf.dtype.itemsize for name, leaf in moving.items()}
    moments = _bytes(state.moments)
    held = learner.moments_on_host
    batch = sum(leaf.nbytes for leaf in jax.tree.leaves(with_optional(work).arrays))
    return State(
        parameters=_bytes(state.params) + _bytes(state.adapters),
        frozen=_bytes(frozen),
        gradients=sum(width.values()),
        moments=0 if held else moments,
        moments_on_host=moments if held else 0,
        batch=batch * work.packing.rows // work.packing.shards,
    )


def activation_bytes(work: Work) -> int:
    """About what a micro-step needs beside its arguments, full rematerialisation assumed unless `remat` is "none"."""
    run, text, vision = work.learner.model.run, work.config.text, work.config.vision
    sizes = work.shard.mesh.shape
    rows = work.packing.rows // work.packing.shards
    tokens = rows * work.packing.tokens // sizes["context"]
    patches = rows * work.packing.patches // sizes["context"]
    wide = run.compute.itemsize
    inside = 4 * text.model + 3 * text.mlp // sizes["tensor"] + 4 * text.heads * text.head_dim // sizes["tensor"]
    kept = text.layers * (text.model if run.remat != "none" else inside) * tokens * wide
    if run.remat in ("attention", "offload"):
        kept += (run.remat == "attention") * text.layers * tokens * text.heads * text.head_dim * wide // sizes["tensor"]
    working = 2 * inside * tokens * wide  # one layer, forward again and backward
    if vision:
        within = 8 * vision.model + 2 * vision.mlp // sizes["tensor"]
        kept += vision.depth * (vision.model if run.remat != "none" else within) * patches * wide
        working = max(working, 2 * within * patches * wide)
    vocab = text.vocab // sizes["tensor"]
    head = rows * work.learner.chunk * vocab * 4 * 3 + vocab * text.model * (wide + 4)
    return int(kept + max(working, head))


def traffic(work: Work, target: Target) -> tuple[Collective, ...]:
    """What a micro-step moves over links, by formula: weights gathered twice, gradients scattered, tensor sums."""
    sizes, run, text = work.shard.mesh.shape, work.learner.model.run, work.config.text
    count = parameter_count(work.config) / sizes["tensor"] / sizes["expert"]
    far = target.slices > 1
    found = []

    def add(kind: str, size: float, group: int, far: bool, where: str) -> None:
        if group > 1:
            found.append(
                Collective(
                    kind=kind, bytes=size, runs=1, group=group, far=far, array="", where=where, unknown=False
                )
            )  # fmt: skip

    f, r, t = sizes["fsdp"], sizes["replica"], sizes["tensor"]
    crosses = far and r < target.slices  # then fsdp itself spans nodes
    add("all-gather", 2 * count * run.compute.itemsize * (f - 1) / f, f, crosses, "weights, forward and backward")
    add("reduce-scatter", count * 4 * (f - 1) / f, f, crosses, "gradients")
    add("all-reduce", 2 * count / f * 4 * (r - 1) / r, r, far, "gradients between replicas")
    row = work.packing.rows // work.packing.shards * work.packing.tokens // sizes["context"]
    add(
        "all-reduce", 6 * text.layers * 2 * row * text.model * run.compute.itemsize * (t - 1) / t, t, False,
        "activations",
    )  # fmt: skip
    return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """The least seconds of one micro-step, all overlapped, and what bounds it."""

    compute_s: float
    memory_s: float
    near_s: float
    far_s: float
    mfu: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s, self.near_s + self.far_s)

    @property
    def bound(self) -> str:
        by = {"arithmetic": self.compute_s, "memory": self.memory_s, "links": self.near_s + self.far_s}
        return max(by, key=by.__getitem__)


def roofline(work: Work, target: Target, moved: tuple[Collective, ...], state: State) -> Roofline | None:
    """None where the rates of the device are not known."""
    chip = target.chip
    if chip.flops is None or chip.memory_rate is None or chip.link_rate is None or chip.far_rate is None:
        return None
    devices = work.shard.mesh.size
    model, computed = work.flops()
    # Every weight is read in the compute dtype, forward, again and backward; gradients are read and written.
    split = work.shard.mesh.shape["tensor"] * work.shard.mesh.shape["expert"]
    read = 3 * parameter_count(work.config) / split * work.learner.model.run.compute.itemsize
    near = sum(c.bytes for c in moved if not c.far) / chip.link_rate
    far = sum(c.bytes for c in moved if c.far) / chip.far_rate
    found = Roofline(
        compute_s=computed / devices / chip.flops,
        memory_s=(read + 2 * state.gradients) / chip.memory_rate,
        near_s=near,
        far_s=far,
        mfu=0.0,
    )
    return dataclasses.replace(found, mfu=model / devices / chip.flops / found.seconds)


def peaks(work: Work, state: State, programs: dict[str, Compiled]) -> dict[str, int]:
    """Bytes on one device while each program runs, with what lies there beside its arguments."""
    if not programs:
        wide = state.parameters + state.gradients + state.moments
        held = state.moments + state.moments_on_host
        return {
            "micro_step": wide + state.batch + activation_bytes(work),
            "apply": state.parameters + 2 * state.gradients + held,
        }
    beside = {"micro_step": state.moments, "apply": state.frozen, "score": state.moments}
    return {name: done.peak + beside[name] for name, done in programs.items() if not done.refused}
