"""Measuring a policy: held-out tasks, always the same ones, each sibling with a seed of its own.

    evaluation = await evaluate(parts, policy, sandboxes, places, tasks, at=iteration)

Faults are played again and, if they stay, left out: success is over valid episodes, and how many there were is said.
`owrl eval CHECKPOINT` measures a model folder, `owrl eval A B` compares two on the same tasks and seeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from owrl_jax.agent.policy import Policy
from owrl_jax.browser.source import SandboxSource
from owrl_jax.build import Parts, build, stage
from owrl_jax.config import ConfigError, resolve, split_overrides
from owrl_jax.data.tasks import TaskSource
from owrl_jax.judge.panel import Tally
from owrl_jax.judge.protocol import JudgingStopped
from owrl_jax.obs.stats import Attempt, Evaluation, append_evaluation, attempt_of, compare, success, table
from owrl_jax.pool.journal import Journal
from owrl_jax.pool.rollout import JudgeCall, LocalPool, Places
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.types import GroupRequest, Task, Trajectory

SEED = 20_000
"""Of evaluations; training draws with the run's own."""


async def evaluate(
    parts: Parts,
    policy: Policy,
    sandboxes: SandboxSource,
    places: Places,
    tasks: Sequence[Task],
    *,
    at: int = -1,
    name: str = "held_out",
    stage: str = "rl",
    judge: JudgeCall | None = None,
    journal: Journal | None = None,
    screenshots: ScreenshotStore | None = None,
    on_end: Callable[[Trajectory], None] = lambda trajectory: None,
) -> Evaluation:
    """Plays every task `eval.samples` times and gives what came of it.

    Args:
      policy: what answers; its weights must not change meanwhile if `at` is to mean anything.
      at: iteration whose parameters are measured.
      name: of the task set.
      stage: part of the run that counts iterations.
      judge: whom to ask; it needs `screenshots`.
      journal, screenshots: where the episodes are kept; without them only the counts stay.
      on_end: called with each episode, for a live view.
    """
    settings = parts.config.eval
    pool = LocalPool(
        harness=parts.harness,
        policy_of=lambda place: policy,
        sandboxes=sandboxes,
        places=places,
        sampling=parts.sampling(SEED, settings.temperature),
        judge=judge,
        journal=journal,
        screenshots=screenshots,
        limits=parts.limits(),
    )

    async def wishes() -> AsyncIterator[GroupRequest]:
        for number, task in enumerate(tasks):
            yield GroupRequest(task=task, group_id=f"eval-{name}-{number:05d}", n=settings.samples)

    found: dict[str, list[Attempt]] = {}
    async for group in pool.run(wishes()):
        found[group.request.group_id] = [attempt_of(t, attempt=t.index) for t in group.trajectories]
        for trajectory in group.trajectories:
            on_end(trajectory)
    attempts = tuple(attempt for _, members in sorted(found.items()) for attempt in members)
    return Evaluation(at=at, name=name, tasks=attempts, protocol=parts.harness.protocol, stage=stage)


async def measure_folder(
    parts: Parts, tasks: Sequence[Task], *, at: int = -1, **fields: Any
) -> tuple[Evaluation, Tally]:
    """Measures the parameters that `parts` starts from: an engine, browsers and worlds for this alone.

    Gives what came of it, and how the run's judge agreed with programs and with a held-out judge.

    Raises:
      JudgingStopped: at the judge's spending limit; nothing is given then.
    """
    engine, store, tally = parts.engine(), ScreenshotStore(parts.folder.screenshots), Tally()
    judge = parts.judge(store)
    async with stage(parts.config, parts.limits()) as (sandboxes, places), engine, judge or contextlib.nullcontext():
        await asyncio.to_thread(engine.publish, 0, parts.start_params())
        if judge is not None:
            fields |= {"judge": judge.call(tally, measuring=True), "screenshots": store}
        found = await evaluate(parts, engine, sandboxes, places, tasks, at=at, **fields)
    return found, tally


def tell(evaluation: Evaluation) -> str:
    """A few lines for people."""
    whole = success(evaluation.tasks)
    lines = [f"{evaluation.name} after iteration {evaluation.at}: {whole.over_valid} of valid episodes"]
    rows = table(evaluation.tasks, "task" if not any(a.template for a in evaluation.tasks) else "level")
    lines += [f"  level {level}: {part.over_valid}" for level, part in rows.items()]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """`owrl eval`. Exit codes: 0 measured, 2 a wrong call, 3 the judge's spending limit stopped it."""
    import tyro

    def run(folders: tuple[Path, ...], /, preset: str = "", out: Path | None = None) -> int:
        """Measure one model on held-out tasks, or compare two on the same tasks and seeds.

        Any setting can be given as --section.key VALUE; what matters here stands under --eval, --data and --browser.

        Args:
            folders: one or two model folders in Hugging Face format (a run's export/ is one).
            preset: name of a preset in configs/, or path of a Python file.
            out: folder to which the evaluation is appended (evals.jsonl).
        """
        if not 1 <= len(folders) <= 2:
            raise ConfigError(f"give one model folder or two, got {len(folders)}")
        found = []
        for number, folder in enumerate(folders):
            config = resolve(preset or None, {**overrides, "model.weights": str(folder)})
            config = dataclasses.replace(config, name=f"{config.name}-eval-{number}")
            parts = build(config)
            tasks = TaskSource.of(config.data, seed=config.seed).held_out(config.eval.tasks)
            evaluation, tally = asyncio.run(measure_folder(parts, tasks, name="held_out"))
            if out is not None:
                append_evaluation(out, evaluation)
            print("\n".join([f"{folder}: {tell(evaluation)}", *tally.lines()]))
            found.append(evaluation)
        if len(found) == 2:
            print(compare(*found))
        return 0

    try:
        overrides, rest = split_overrides(argv)
        return tyro.cli(run, args=rest, prog="owrl eval")
    except ConfigError as error:
        print(f"owrl eval: {error}", file=sys.stderr)
        return 2
    except JudgingStopped as limit:
        print(f"owrl eval: stopped, nothing was measured. {limit}", file=sys.stderr)
        return 3
