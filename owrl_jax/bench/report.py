"""What a benchmark hands back, and how it is printed: as tables for a person, as one JSON line for a program.

A benchmark fills in `BenchResult`; commit, machine and wall time are added here, so that no benchmark can forget them.
A goal that is missed is printed like one that is met: the number is the point.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

Scalar = float | int | str | bool | None


def _number(name: str, field: str, value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{name}: {field}={value} is no measurement; leave it None and say in the settings why")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured quantity: `name` carries the unit and the case, as in `step_p50_ms/click_no_change`.

    Attributes:
      ours: median of our own measurements.
      floor: what the machine cannot go below (or above), measured in the same run; None where there is none.
      peer: the same by another system in the same run; None where none was measured.
      extra: further columns, such as `ours_min` and `ours_max`.
    """

    name: str
    ours: float | None
    floor: float | None = None
    peer: float | None = None
    extra: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = {"name", "ours", "floor", "peer"} & self.extra.keys()
        if taken:
            raise ValueError(f"row {self.name!r}: extra columns may not be called {sorted(taken)}")
        for field in ("ours", "floor", "peer"):
            _number(f"row {self.name!r}", field, getattr(self, field))
        for field, value in self.extra.items():
            _number(f"row {self.name!r}", field, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """A number that was promised, and what it came to."""

    name: str
    value: float
    goal: float
    better: Literal["higher", "lower"]
    unit: str

    def __post_init__(self) -> None:
        if self.better not in ("higher", "lower"):
            raise ValueError(f"goal {self.name!r}: better must be 'higher' or 'lower', got {self.better!r}")
        _number(f"goal {self.name!r}", "value", self.value)

    @property
    def met(self) -> bool:
        """Whether the value is at least as good as the goal."""
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchResult:
    """All that one benchmark measured.

    `settings` holds what a reader must know to repeat it: shapes, thread counts, versions of peers, and `quick`.
    """

    bench: str
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    goals: tuple[Goal, ...] = ()


def machine_facts() -> dict[str, Any]:
    """Cores this process may use, processor model, and memory in GiB."""
    import psutil

    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        cpus = os.cpu_count() or 1
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {"cpus": cpus, "model": model, "mem_gib": round(psutil.virtual_memory().total / 2**30, 1)}


def commit(folder: Path = Path(__file__).parent) -> str:
    """Short commit of the checkout this file lies in, `+changes` if it was edited; `unknown` outside of one."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def as_dict(result: BenchResult, machine: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The JSON object of a result. `None` columns of a row are left out; `extra` columns stand beside the others."""
    rows = []
    for row in result.rows:
        flat: dict[str, Any] = {"name": row.name, "ours": row.ours, "floor": row.floor, "peer": row.peer, **row.extra}
        rows.append({key: value for key, value in flat.items() if value is not None})
    return {
        "bench": result.bench,
        "commit": commit(),
        "machine": dict(machine),
        "seconds": round(seconds, 1),
        "settings": dict(result.settings),
        "rows": rows,
        "goals": [dataclasses.asdict(goal) for goal in result.goals],
    }


def format_json(result: BenchResult, machine: Mapping[str, Any], seconds: float) -> str:
    """One object on one line."""
    return msgspec.json.encode(as_dict(result, machine, seconds)).decode()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def format_text(result: BenchResult, machine: Mapping[str, Any], seconds: float, width: int = 140) -> str:
    """Tables for a person: where it was measured, what, and how it compares with the goals."""
    from rich.console import Console
    from rich.table import Table

    out = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    out.print(f"bench {result.bench}  commit {commit()}  {seconds:.1f} s", markup=False)
    out.print(f"{machine['cpus']} cores, {machine['model']}, {machine['mem_gib']} GiB", markup=False)
    out.print("  ".join(f"{key}={value}" for key, value in result.settings.items()), markup=False)
    extras = list(dict.fromkeys(key for row in result.rows for key in row.extra))
    columns = ["ours", *(c for c in ("floor", "peer") if any(getattr(r, c) is not None for r in result.rows))]
    table = Table("measured", box=None, pad_edge=False)
    for name in (*columns, *extras):
        table.add_column(name, justify="right")
    for row in result.rows:
        cells = [_cell(getattr(row, c)) for c in columns] + [_cell(row.extra.get(key)) for key in extras]
        table.add_row(row.name, *cells)
    out.print(table)
    if result.goals:
        goals = Table("goal", box=None, pad_edge=False)
        for name in ("value", "goal", "unit", "met"):
            goals.add_column(name, justify="right")
        for goal in result.goals:
            sign = "≥" if goal.better == "higher" else "≤"
            goals.add_row(
                goal.name, _cell(goal.value), f"{sign} {_cell(goal.goal)}", goal.unit, "yes" if goal.met else "no"
            )
        out.print(goals)
    return out.file.getvalue().rstrip()  # type: ignore[attr-defined]
