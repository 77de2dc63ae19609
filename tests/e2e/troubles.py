"""A stage of real browsers on which things go wrong at a place of the test's choosing, and what must hold all the same.

`Troubles` stands between the pool and its sandboxes. It knows an episode by the pool's name for it (`g0000002/1`: group
and member) and by the number of its attempt, and does as it is told before a step of that episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from owrl_jax import build, train
from owrl_jax.browser.process import TAG_FLAG
from owrl_jax.obs.metrics import read
from owrl_jax.outcome import Outcome
from owrl_jax.pool.journal import Entry, Journal
from owrl_jax.types import StepResult, Task, ToolCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """Something that an episode is about to do.

    Attributes:
      episode: the pool's name of it.
      attempt: from 0.
      step: from 0; -1 for the opening of the first page.
      task: what is played.
      browser: process id of its browser.
      engine: the rollout engine of the run.
    """

    episode: str
    attempt: int
    step: int
    task: Task
    browser: int
    engine: Any


class Troubles:
    """What befalls the episodes of a run in this process.

    Args:
      monkeypatch: puts it in place.
      before_step: told of each step of training's episodes; may wait, kill or raise.
      before_episode: awaited before an episode gets its sandbox, by the pool's name.

    Attributes:
      ended: how many attempts ended and gave their sandbox back, by the pool's name; those that the end of the run
        cut off are not among them.
      places: the run's places.
    """

    def __init__(
        self,
        monkeypatch: Any,
        *,
        before_step: Callable[[Moment], Awaitable[None]],
        before_episode: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self.before_step, self.before_episode = before_step, before_episode
        self.ended: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()
        self.engine: Any = None
        self.places: Any = None
        real_stage, real_engine = build.stage, build.Parts.engine

        @contextlib.asynccontextmanager
        async def stage(*args: Any):
            async with real_stage(*args) as (self.pool, self.places):
                yield self, self.places

        def engine(parts: Any, **fields: Any) -> Any:
            self.engine = real_engine(parts, **fields)
            return self.engine

        monkeypatch.setattr(train, "stage", stage)
        monkeypatch.setattr(build.Parts, "engine", engine)

    async def acquire(self, *, wait_s: float | None = None) -> Any:
        task = asyncio.current_task()
        name = task.get_name() if task else ""
        if not name.startswith("g"):  # an evaluation
            return await self.pool.acquire(wait_s=wait_s)
        if self.before_episode is not None:
            await self.before_episode(name)
        attempt = self.attempts[name]
        self.attempts[name] += 1
        return _Troubled(await self.pool.acquire(wait_s=wait_s), self, name, attempt)


class _Troubled:
    """A sandbox with its troubles before each step."""

    def __init__(self, inner: Any, troubles: Troubles, name: str, attempt: int) -> None:
        self._inner, self._troubles, self._name, self._attempt = inner, troubles, name, attempt
        self._step = -1
        self._ending: Outcome | None = None

    async def reset(self, task: Task) -> StepResult:
        self._task = task
        await self._trouble()
        return await self._inner.reset(task)

    async def step(self, calls: Sequence[ToolCall]) -> StepResult:
        await self._trouble()
        return await self._inner.step(calls)

    async def _trouble(self) -> None:
        browser = self._troubles.pool.engines()[self._inner.lease.generation].pid
        moment = Moment(
            episode=self._name, attempt=self._attempt, step=self._step, task=self._task, browser=browser,
            engine=self._troubles.engine,
        )  # fmt: skip
        self._step += 1
        await self._troubles.before_step(moment)

    def finish(self, outcome: Outcome) -> Outcome:
        self._ending = outcome
        return self._inner.finish(outcome)

    async def close(self) -> None:
        await self._inner.close()
        if self._ending is not None and self._ending.key != "cancelled/operator":
            self._troubles.ended[self._name] += 1


def browsers_of(pid: int) -> list[psutil.Process]:
    """The browsers that a process started: its own children with our tag, not theirs."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                line = child.cmdline()
                if any(word.startswith(TAG_FLAG) for word in line) and "--type=" not in " ".join(line):
                    found.append(child)
    return found


def kill_browser(pid: int) -> None:
    """SIGKILL, after a look that it is a browser of this very process."""
    assert pid in {browser.pid for browser in browsers_of(os.getpid())}
    os.kill(pid, signal.SIGKILL)


def must_hold(folder: Path, *, iterations: int, max_staleness: int) -> dict[str, list[Entry]]:
    """What is true of every run that has trained `iterations`, whatever befell it. Gives the journal's entries by kind.

    Everything is read from what the run left: the journal says what was played and trained, the metrics what was done.
    """
    entries: dict[str, list[Entry]] = defaultdict(list)
    with Journal(folder / "journal.jsonl", readonly=True) as journal:
        for entry in journal.entries():
            entries[entry.kind].append(entry)
        groups = {name: journal.group(name) for name in journal.group_ids}
    assert len(entries["group"]) == len(groups), "a group was closed twice"
    members = [offset for entry in entries["group"] for offset in entry.members]
    assert len(set(members)) == len(members), "a trajectory is in two groups"
    # Each iteration has one batch, and no group is in two: no trajectory is trained twice.
    batches = {entry.iteration: entry.groups for entry in entries["batch"]}
    assert len(batches) == len(entries["batch"]) and sorted(batches) == list(range(iterations))
    spent = Counter(name for names in batches.values() for name in names)
    assert set(spent.values()) == {1}
    for iteration, names in batches.items():
        for name in names:
            for trajectory in groups[name].trajectories:
                # A fault of ours has no verdict, so no reward, and is not among the valid ones.
                assert trajectory.outcome.trains == trajectory.valid == (trajectory.verdict is not None)
                if trajectory.valid:
                    versions = [v for turn in trajectory.turns for v in turn.versions]
                    assert iteration - max_staleness <= min(versions) <= max(versions) <= iteration
    # The metrics have each iteration once, and trained what the journal says.
    records = [r for r in read(folder) if r.stage == "rl" and "loss/total" in r.values]
    assert [r.step for r in records] == list(range(iterations))
    for record in records:
        valid = sum(len(groups[name].valid) for name in batches[record.step])
        assert record.values["rollout/trajectories_trained"] == valid
        assert record.values["engine/recompiles"] == 0
    updates = [record.values["update/updates"] for record in records]
    assert records[-1].values["update/count"] == sum(updates)
    return entries
