"""`owrl bench NAME`: each module of this folder measures one part against its floor and against a peer, in one run.

A benchmark is a module `owrl_jax/bench/NAME.py` with a function `run(*, repeat: int, quick: bool) -> BenchResult`
and a docstring whose first line says what it measures. Nothing registers it: its file is enough. A benchmark edits no
file and needs no network. `report` says what a result is and prints it.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from owrl_jax.bench.report import BenchResult, Goal, Row, format_json, format_text, machine_facts

__all__ = ["BenchResult", "Goal", "Row", "available", "main"]

_NO_BENCHMARKS = {"__init__", "report"}


def available(folder: Path = Path(__file__).parent) -> dict[str, str]:
    """Name and one-line description of every benchmark in `folder`, read without importing any of them."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        if path.stem in _NO_BENCHMARKS or path.stem.startswith("_"):
            continue
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.stem] = doc.strip().partition("\n")[0] or "(says nothing about itself)"
    return found


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `owrl bench`."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME", help="which benchmark")]
    json: bool = False
    """Print one JSON object on the last line instead of tables."""
    repeat: int = 5
    """Timed repetitions after warm-up; medians are reported."""
    quick: bool = False
    """Only check that it runs, in under a minute; the numbers mean little."""


def _listing(names: dict[str, str]) -> str:
    width = max((len(n) for n in names), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in names.items()) or "  (none yet)"


def main(argv: list[str]) -> int:
    """Run one benchmark and print its result. Returns 0 if it ran (met goals or not), 2 for a wrong call."""
    names = available()

    options = tyro.cli(
        Options,
        args=argv,
        prog="owrl bench",
        description="Measure one part against its floor and against a peer, in one run.\n\n" + _listing(names),
    )
    if options.name not in names:
        near = difflib.get_close_matches(options.name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(
            f"owrl bench: there is no benchmark {options.name!r}.{hint} There are:\n{_listing(names)}", file=sys.stderr
        )
        return 2
    if options.repeat < 1:
        print(f"owrl bench: --repeat must be at least 1, got {options.repeat}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"owrl_jax.bench.{options.name}")
    start = time.perf_counter()
    result: BenchResult = module.run(repeat=options.repeat, quick=options.quick)
    seconds = time.perf_counter() - start
    facts = machine_facts()
    print(format_json(result, facts, seconds) if options.json else format_text(result, facts, seconds))
    return 0
