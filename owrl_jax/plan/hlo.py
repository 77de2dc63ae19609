"""What a compiled program says of itself: collectives with their bytes, and the largest arrays that it makes.

Read from the optimised HLO text. A scan is a loop whose body stands in the text once, so every computation gets a
count: how often it runs, the product of the known trip counts of the loops around it. Loops whose count depends on data
(attention walks over visible tiles) count once, and a collective inside one is marked, because nobody knows its bytes.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

_COLLECTIVE = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_OP = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|bf16|c64|c128|[sufSUF]\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|called_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_META = re.compile(r'op_name="([^"]*)"')
_NOT_MADE = {
    "parameter", "tuple", "get-tuple-element", "while", "bitcast", "constant", "conditional", "call", "async-done",
    "optimization-barrier", "copy-done", "all-gather-done", "all-reduce-done", "collective-permute-done",
    "async-update",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: such as "all-gather".
      bytes: that each device receives in one run of the program, all loops counted.
      runs: how often it runs.
      group: devices that take part together.
      far: whether a group holds devices of several slices.
      array: the largest array of it, such as "bf16[2560,9728]".
      where: which operation of the model it belongs to.
      unknown: whether it stands in a loop of unknown length; then it is counted once.
    """

    kind: str
    bytes: float
    runs: int
    group: int
    far: bool
    array: str
    where: str
    unknown: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Array:
    """An array that a program makes: bytes on one device, its type, and the operation that makes it."""

    bytes: float
    array: str
    where: str


def _size(dtype: str, dims: str) -> float:
    bits = _BITS.get(dtype) or int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
    return math.prod(int(d) for d in dims.split(",") if d) * bits / 8


def _arrays(text: str) -> list[tuple[float, str]]:
    return [(_size(dtype, dims), f"{dtype}[{dims}]") for dtype, dims in _ARRAY.findall(text)]


def _groups(rest: str, devices: int, per_slice: int) -> tuple[int, bool]:
    """Size of a replica group, and whether one crosses slices. XLA writes groups in four ways."""
    far = lambda members: len({int(m) // per_slice for m in members}) > 1  # noqa: E731
    pairs = re.search(r"source_target_pairs=\{\{(.*?)\}\}", rest)
    if pairs:
        return 2, any(far(pair.split(",")) for pair in pairs[1].split("},{"))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    if listed:
        members = listed[1].split(",")
        return len(members), far(members)
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota:
        count, size = int(iota[1]), int(iota[2])
        ids = np.arange(count * size).reshape([int(d) for d in iota[3].split(",")])
        if iota[4]:
            ids = ids.transpose([int(d) for d in iota[4].split(",")])
        return size, far(ids.reshape(count, size)[0])
    mesh = re.search(r"replica_groups=\w*mesh\[([^\]]*)\] \{([^}]*)\}", rest)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        chosen = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", mesh[2])]
        ids = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        members = np.moveaxis(ids, chosen, range(len(chosen))).reshape(math.prod(ids.shape[c] for c in chosen), -1)
        return len(members), far(members[:, 0])
    return devices, devices > per_slice


def _received(kind: str, results: float, group: int) -> float:
    """Bytes that one device receives, of the best known algorithm; `results` are those of the operation's result."""
    share = (group - 1) / group
    if kind == "all-gather":
        return results * share
    if kind == "reduce-scatter":
        return results * (group - 1)
    if kind == "all-reduce":
        return 2 * results * share
    return results if kind == "collective-permute" else results * share


def read(text: str, devices: int, slices: int = 1) -> tuple[list[Collective], list[Array]]:
    """Collectives, most bytes first, and arrays, largest first, of an optimised program.

    Args:
      text: `compiled.as_text()`.
      devices: that the program runs on.
      slices: that they lie in, in order.
    """
    bodies: dict[str, list[tuple[str, str, str, str]]] = {}
    entry = name = ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name = head[1]
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name:
            op = _OP.match(line)
            if op:
                bodies[name].append((op[1], op[2], op[3], op[4]))
    runs, unknown, fused = _counts(bodies, entry)
    per_slice = max(devices // slices, 1)
    collectives: list[Collective] = []
    arrays: list[Array] = []
    for name, ops in bodies.items():
        if not runs.get(name):
            continue
        for _, result, kind, rest in ops:
            found = _META.search(rest)
            where = found[1] if found else ""
            base = kind.removesuffix("-start")
            if base in _COLLECTIVE:
                group, far = _groups(rest, devices, per_slice)
                sizes = _arrays(result)
                if kind.endswith("-start") and base in ("all-gather", "collective-permute"):
                    sizes = sizes[len(sizes) // 2 :] if base == "all-gather" else sizes[1:2]  # (operands, results, …)
                if group > 1 and sizes:
                    total = _received(base, sum(size for size, _ in sizes), group)
                    collectives.append(Collective(
                        kind=base, bytes=total * runs[name], runs=runs[name], group=group, far=far,
                        array=max(sizes)[1], where=where, unknown=name in unknown,
                    ))  # fmt: skip
            elif kind not in _NOT_MADE and name not in fused:
                arrays += [Array(bytes=size, array=array, where=where) for size, array in _arrays(result)]
    return (
        sorted(collectives, key=lambda c: -c.bytes),
        sorted(dict.fromkeys(arrays), key=lambda a: -a.bytes),
    )


def _counts(bodies: dict, entry: str) -> tuple[dict[str, int], set[str], set[str]]:
    """How often each computation runs, which lie in a loop of unknown length, and which are insides of a fusion."""
    runs: dict[str, int] = {}
    unknown: set[str] = set()
    fused: set[str] = set()

    def visit(name: str, times: int, unsure: bool, inside: bool) -> None:
        runs[name] = runs.get(name, 0) + times
        if unsure:
            unknown.add(name)
        if inside:
            fused.add(name)
        for _, _, kind, rest in bodies[name]:
            trips = _TRIPS.search(rest) if kind == "while" else None
            for names in _CALLED.findall(rest):
                for called in re.findall(r"[\w.\-]+", names):
                    if called in bodies:
                        visit(
                            called,
                            times * (int(trips[1]) if trips else 1),
                            unsure or (kind == "while" and trips is None),
                            inside or kind in ("fusion", "reduce", "scatter", "sort", "map", "reduce-window"),
                        )

    if entry:
        visit(entry, 1, False, False)
    return runs, unknown, fused
