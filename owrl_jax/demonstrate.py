"""`owrl data`: from the journal of a run to a data set of demonstrations that `owrl sft` trains on.

    owrl data build runs/teacher demos --per-site 10
    owrl data show demos --check

Reads the run's journal and its store of screenshots; the run may still be going on. The arrangement of the folder is
`data/dataset.py`, the choice of episodes `data/demonstrations.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from owrl_jax.data.dataset import DataError, Dataset, write_dataset
from owrl_jax.data.demonstrations import MixedProtocols, SelectionSettings, select
from owrl_jax.pool.journal import Journal, JournalError
from owrl_jax.pool.store import MissingScreenshot, ScreenshotStore
from owrl_jax.types import Trajectory

USAGE = """usage: owrl data build RUN OUT [--per-task N] [--per-site N] [--protocol ID] [--with-malformed] [--seed N]
       owrl data show FOLDER [--check]

build   the shortest success of each task of a run, as a data set
show    what is in a data set; --check reads all of it"""


def main(argv: list[str]) -> int:
    """Run one of the two. Exit code 2 for a wrong call, 1 if something is wrong with the data."""
    import tyro

    commands = {"build": build, "show": show}
    if not argv or argv[0] not in commands:
        asked = bool(argv) and argv[0] in ("-h", "--help")
        _say(USAGE, error=not asked)
        return 0 if asked else 2
    try:
        return tyro.cli(commands[argv[0]], args=argv[1:], prog=f"owrl data {argv[0]}")
    except (DataError, MixedProtocols, JournalError, MissingScreenshot, ValueError) as error:
        _say(f"owrl data: {error}", error=True)
        return 1


def trajectories_of(run: Path, protocol: str | None = None) -> Iterator[Trajectory]:
    """Every episode in a run's journal, evaluations left out."""
    with Journal(run / "journal.jsonl", readonly=True) as journal:
        for entry in journal.entries():
            trajectory = entry.trajectory
            if trajectory is None or trajectory.group_id.startswith("eval-"):
                continue
            if protocol is None or trajectory.protocol == protocol:
                yield trajectory


def build(
    run: Path,
    out: Path,
    /,
    per_task: int = 1,
    per_site: int | None = None,
    protocol: str | None = None,
    with_malformed: bool = False,
    seed: int = 0,
) -> int:
    """Write the demonstrations of a run as a data set.

    Args:
        run: folder of the run: its journal and screenshots are read.
        out: folder to write; must not exist.
        per_task: successes of one task.
        per_site: tasks of one site; all if not given.
        protocol: take episodes of this protocol only.
        with_malformed: also take episodes with turns that broke the format (those turns are never a target).
        seed: of the choice of a site's tasks.
    """
    settings = SelectionSettings(per_task=per_task, per_site=per_site, whole=not with_malformed, seed=seed)
    selection = select(trajectories_of(run, protocol), settings)
    if not selection.chosen:
        raise DataError(f"{run} has no episode to imitate: {selection.dropped or 'its journal is empty'}")
    source = {"run": run.name, "per_task": per_task, "per_site": per_site, "dropped": selection.dropped}
    facts = write_dataset(out, selection.chosen, ScreenshotStore(run / "screenshots").get, source=source)
    left = ", ".join(f"{n} {why}" for why, n in selection.dropped.items()) or "none"
    _say(f"{out}: {facts.trajectories} trajectories of {facts.tasks} tasks on {facts.sites} sites; left out: {left}")
    return 0


def show(folder: Path, /, check: bool = False) -> int:
    """Say what is in a data set.

    Args:
        folder: of the data set.
        check: read everything and compare it with fingerprint and hashes.
    """
    dataset = Dataset(folder)
    facts = dataset.facts
    _say(f"{folder}: {facts.groups} groups, {facts.trajectories} trajectories, {facts.turns} turns,")
    _say(f"  {facts.response_tokens} response tokens, {len(facts.screenshots)} pictures, protocol {facts.protocol}")
    _say(f"  fingerprint {facts.fingerprint}")
    if check:
        dataset.check()
        _say("  all of it read: as it was built")
    return 0


def _say(text: str, *, error: bool = False) -> None:
    print(text, file=sys.stderr if error else sys.stdout, flush=True)
