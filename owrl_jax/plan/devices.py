"""The devices that a plan can be made for: their names, what they have, and how a mesh of them is got without them.

    v5p:2x2x4        one TPU slice by its topology          v5p:2x2x4*2   two such slices
    v6e-16           a TPU slice by its size                b200:16       GPUs in nodes of eight          cpu:4

Rates are the makers' dense bfloat16 numbers. A TPU's link rate is one torus axis in both directions: a collective over
one mesh axis gets at least that much. Memory is what a program may use: for TPUs the compiler's own limit, for GPUs
nine tenths of the card, since the driver and the communication buffers take some.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from typing import Any, Literal

GIB = 2**30


class PlanError(ValueError):
    """A plan that cannot be made, and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device as jax counts them.

    Attributes:
      kind: which compiler it needs.
      memory_gib: that a program may use; None where the user must say.
      flops: bfloat16 operations per second; None where nothing can be predicted.
      memory_rate, link_rate, far_rate: bytes per second of the memory, of the links within a slice or node, and of
        the network between slices or nodes.
      node: GPUs of one NVLink domain; 0 for others.
    """

    kind: Literal["tpu", "gpu", "cpu"]
    memory_gib: float | None
    flops: float | None = None
    memory_rate: float | None = None
    link_rate: float | None = None
    far_rate: float | None = None
    node: int = 0


CHIPS: dict[str, Chip] = {
    "v5e": Chip(
        kind="tpu", memory_gib=15.75, flops=197e12, memory_rate=819e9, link_rate=90e9, far_rate=3.1e9
    ),
    "v5p": Chip(
        kind="tpu", memory_gib=95.74, flops=459e12, memory_rate=2765e9, link_rate=180e9, far_rate=6.25e9
    ),
    "v6e": Chip(
        kind="tpu", memory_gib=31.25, flops=918e12, memory_rate=1640e9, link_rate=180e9, far_rate=12.5e9
    ),
    # jax counts the two halves of a chip.
    "tpu7x": Chip(
        kind="tpu", memory_gib=94.75, flops=1153e12, memory_rate=3690e9, link_rate=200e9, far_rate=12.5e9
    ),
    "h100": Chip(
        kind="gpu", memory_gib=71.2, flops=989e12, memory_rate=3352e9, link_rate=450e9, far_rate=50e9, node=8
    ),
    "h200": Chip(
        kind="gpu", memory_gib=126.9, flops=989e12, memory_rate=4800e9, link_rate=450e9, far_rate=50e9, node=8
    ),
    "b200": Chip(
        kind="gpu", memory_gib=160.5, flops=2250e12, memory_rate=7672e9, link_rate=900e9, far_rate=50e9, node=8
    ),
    "cpu": Chip(kind="cpu", memory_gib=None),
}  # fmt: skip

# Slices by size. v5p counts TensorCores, two a chip; jax sees a chip as one device there.
_SIZES = {
    "v5e": {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    "v6e": {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    "v5p": {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """So many devices of one kind.

    Attributes:
      name: as the user wrote it.
      family: key of `CHIPS`.
      topology: of one TPU slice, such as "2x2x4"; empty for others.
      slices: TPU slices, or nodes of GPUs.
      count: devices of a GPU or CPU target.
    """

    name: str
    family: str
    topology: str = ""
    slices: int = 1
    count: int = 0

    @property
    def chip(self) -> Chip:
        return CHIPS[self.family]


def parse(name: str) -> Target:
    """The target that a user names.

    Raises:
      PlanError: with the names that there are.
    """
    match = re.fullmatch(r"(\w+?)(?::(\d+(?:x\d+)+|\d+)|-(\d+))(?:\*(\d+))?", name.lower())
    family = {"v7x": "tpu7x"}.get(match[1], match[1]) if match else ""
    if not match or family not in CHIPS:
        raise PlanError(
            f"--device {name!r} is no device: write v5p:2x2x4, v6e-16, two slices as v5e:4x4*2, b200:8 or cpu:4 "
            f"(known: {', '.join(CHIPS)})"
        )
    size, slices = match[2] or match[3], int(match[4] or 1)
    chip = CHIPS[family]
    if chip.kind != "tpu":
        if "x" in size or slices > 1 or int(size) < 1:
            raise PlanError(f"--device {name!r}: write the number of devices, such as {family}:8")
        count = int(size)
        nodes = math.ceil(count / chip.node) if chip.node else 1
        if nodes > 1 and count % chip.node:
            raise PlanError(f"--device {name!r}: several nodes of {chip.node} are a multiple of {chip.node} devices")
        return Target(name=name, family=family, count=count, slices=nodes)
    if "x" not in size:
        known = _SIZES.get(family, {})
        if int(size) not in known:
            raise PlanError(
                f"--device {name!r}: no slice of that size is known (known: {', '.join(map(str, known)) or 'none'}); "
                f"write the topology, such as {family}:{'2x2x1' if family in ('v5p', 'tpu7x') else '2x4'}"
            )
        size = known[int(size)]
    return Target(name=name, family=family, topology=size, slices=slices)


def devices(target: Target) -> list[Any]:
    """jax devices to compile for. No GPU program can be compiled without its toolkit: there they only have places.

    Raises:
      PlanError: if there is no compiler for the target, or no such topology.
    """
    if target.chip.kind != "tpu":
        return _cpus(target.count)
    try:
        import libtpu  # noqa: F401  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        raise PlanError(
            f"--device {target.name!r} needs the TPU compiler: pip install 'owrl-jax[tpu]' (no TPU is needed)"
        ) from None
    from jax.experimental import topologies

    # libtpu reads these: it must not look for a TPU's metadata server, nor insist on being the only one of its kind.
    for key, value in {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}.items():
        os.environ.setdefault(key, value)
    try:
        name = f"{target.family}:{target.topology}"
        described = topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=target.slices)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise PlanError(f"--device {target.name!r}: the TPU compiler does not know this topology ({reason})") from None
    return list(described.devices)


def _cpus(count: int) -> list[Any]:
    """Virtual devices of this host. Their number is fixed when jax first looks for devices."""
    import jax

    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # jax has looked already; what it found is counted below
            jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices("cpu")
    if len(found) < count:
        raise PlanError(
            f"this process has {len(found)} CPU devices and the plan needs {count}: start owrl plan anew with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return found[:count]
