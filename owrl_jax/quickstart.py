"""`owrl quickstart`: from nothing to an agent that acts on web pages, in six stages that are ordinary runs.

    demos     oracles solve tasks of the starter site in a real browser; every episode goes to a journal
    data      the shortest success of each task, as a data set
    look      a small Qwen3-VL with random weights learns to say what a screenshot shows, and which of it is meant
    sft       it learns to do as they did
    rl        MM-GRPO: it plays groups of episodes, a program checks them, and it learns from the difference
    result    held-out success before and after, the export read back, the report

Each stage is finished before the next begins and leaves its files under `runs/NAME/`; the same command goes on where it
was stopped, by Ctrl-C or by a power cut. Nothing here trains: the stages are `owrl sft` and `owrl train`, with the
settings of a preset (`configs/quickstart.py`, `configs/quickstart_smoke.py`). `--hours` goes on with `rl`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from owrl_jax.agent.policies import ActorPolicy, OracleActor
from owrl_jax.agent.policy import Policy
from owrl_jax.build import Parts, build, stage
from owrl_jax.checkpoint import Checkpoints
from owrl_jax.config import ConfigError, RunConfig, resolve, split_overrides
from owrl_jax.data.dataset import Dataset, write_dataset
from owrl_jax.data.demonstrations import select
from owrl_jax.data.looks import looks_of
from owrl_jax.data.tasks import TaskSource
from owrl_jax.obs.live import LiveView
from owrl_jax.obs.metrics import read as read_metrics
from owrl_jax.obs.metrics import series
from owrl_jax.obs.report import write_report
from owrl_jax.obs.stats import Evaluation, compare, read_evaluations, success
from owrl_jax.pool.journal import Journal
from owrl_jax.pool.rollout import LocalPool
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.sft import NothingTrained as NothingImitated
from owrl_jax.sft import planned_updates
from owrl_jax.sft import train as imitate
from owrl_jax.shutdown import RESUME_EXIT_CODE, Shutdown
from owrl_jax.train import STAGE as RL
from owrl_jax.train import NothingTrained, train
from owrl_jax.types import GroupRequest
from owrl_jax.worlds.oracle import PageProbe
from owrl_jax.worlds.trial import oracle_for

_log = logging.getLogger(__name__)


LOOKING: dict[str, Any] = {"learning_rate": 1.5e-3, "warmup_share": 0.3}
"""How seeing is trained, beyond what imitation says."""
LOOKS_PER_UPDATE = 48


class Stopped(Exception):
    """Told to stop; everything that was finished is kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What came of it.

    Attributes:
      before, after: evaluations of the same held-out tasks, before reinforcement learning and after it.
      iterations: of reinforcement learning.
      export: the model in Hugging Face format.
      report: the page.
    """

    before: Evaluation
    after: Evaluation
    iterations: int
    export: Path
    report: Path


def quickstart(
    config: RunConfig,
    *,
    demonstrations: int,
    looking_epochs: int,
    hours: float = 0.0,
    view: LiveView,
    shutdown: Shutdown,
) -> Result:
    """Runs the stages that are left.

    Args:
      config: of all stages; each gets a folder of its own under `out_dir`/`name`.
      demonstrations: episodes of the oracles.
      looking_epochs: passes over their first pictures, to learn to see.
      hours: of reinforcement learning beyond the iterations of `config`, counted from where those end.
    Raises:
      Stopped: if `shutdown` was asked for; call again to go on.
      ConfigError: if the folder is of other settings.
    """
    home = Path(config.out_dir) / config.name

    def part(name: str, **fields: Any) -> RunConfig:
        return dataclasses.replace(config, name=name, out_dir=str(home), **fields)

    # Demonstrations.
    demos = build(part("demos"))
    asyncio.run(_demonstrate(demos, demonstrations, view, shutdown))
    _unless_stopped(shutdown)
    data = home / "data"
    if not data.exists():
        store = ScreenshotStore(demos.folder.screenshots)
        with Journal(demos.folder.journal, readonly=True) as journal:
            chosen = select(e.trajectory for e in journal.entries() if e.trajectory is not None).chosen
        write_dataset(data, chosen, store.get, source={"run": str(demos.folder.path)})
    looks = home / "looks"
    if not looks.exists():
        shown = Dataset(data)
        seen = looks_of((demo for number in range(len(shown)) for demo in shown[number]), demos.tokens)
        write_dataset(looks, seen, shown.screenshot, source={"data": str(data)})
    # Seeing, then imitation.
    together = min(LOOKS_PER_UPDATE, len(Dataset(looks)))
    look = part(
        "look",
        sft=dataclasses.replace(
            config.sft, data=str(looks), **LOOKING, groups_per_update=together, epochs=looking_epochs
        ),
    )
    sft = part(
        "sft",
        model=dataclasses.replace(config.model, weights=str(home / "look" / "export")),
        sft=dataclasses.replace(config.sft, data=str(data)),
    )
    for name, stage_config in (("seeing", look), ("imitation", sft)):
        view.begin(name, total=planned_updates(len(Dataset(stage_config.sft.data)), stage_config.sft), unit="updates")
        with contextlib.suppress(NothingImitated):  # done by an earlier call
            imitated = imitate(
                stage_config, shutdown=shutdown, on_update=lambda done, _, numbers: view.log(done, numbers)
            )
            if not imitated.finished:
                raise Stopped
        _unless_stopped(shutdown)
    # Reinforcement.
    weights = str(home / "sft" / "export")
    rl = part("rl", model=dataclasses.replace(config.model, weights=weights))
    _reinforce(rl, view, shutdown)
    deadline = time.monotonic() + 3600 * hours
    while (more := _iterations_until(deadline, home / "rl")) > 0:
        rl = dataclasses.replace(rl, iterations=_iterations_done(home / "rl") + more)
        _reinforce(rl, view, shutdown)
    # What came of it.
    folder = home / "rl"
    evaluations = [e for e in read_evaluations(folder) if e.name == "held_out"]
    export, done = folder / "export", _iterations_done(folder)
    _read_back(export)
    return Result(
        before=next(e for e in evaluations if e.at == 0),
        after=[e for e in evaluations if e.at == done][-1],
        iterations=done,
        export=export,
        report=write_report(folder)[0],
    )


async def _demonstrate(parts: Parts, wanted: int, view: LiveView, shutdown: Shutdown) -> None:
    """Oracles play until `wanted` episodes are in the journal."""
    # Other draws than the ones of reinforcement: on a page that was imitated there is nothing to find out.
    tasks = TaskSource.of(parts.config.data, seed=-1 - parts.config.seed)
    store = ScreenshotStore(parts.folder.screenshots)
    with Journal(parts.folder.journal) as journal:
        known = set(journal.group_ids)
        view.begin("demonstrations", total=wanted, unit="episodes", done=len(known))
        if len(known) >= wanted:
            return

        async def wishes() -> AsyncIterator[GroupRequest]:
            for number in range(wanted):
                if shutdown.requested():
                    return
                if (name := f"demo-{number:06d}") not in known:
                    yield GroupRequest(task=tasks.draw(number), group_id=name, n=1)

        def oracle(place: Any) -> Policy:
            return ActorPolicy(OracleActor(oracle_for(place), PageProbe), parts.tokens)

        async with stage(parts.config, parts.limits()) as (sandboxes, places):
            pool = LocalPool(
                harness=parts.harness,
                policy_of=oracle,
                sandboxes=sandboxes,
                places=places,
                sampling=parts.sampling(parts.config.seed),
                journal=journal,
                screenshots=store,
                limits=parts.limits(),
            )
            done = len(known)
            async for group in pool.run(wishes()):
                done += 1
                view.ended(group.trajectories[0])
                view.log(done)


def _reinforce(rl: RunConfig, view: LiveView, shutdown: Shutdown) -> None:
    with contextlib.suppress(NothingTrained):  # done by an earlier call
        if not train(rl, view=view, shutdown=shutdown).finished:
            raise Stopped


def _iterations_done(folder: Path) -> int:
    latest = Checkpoints(folder / "checkpoints", write=False).latest()
    return latest.step if latest else 0


def _iterations_until(deadline: float, folder: Path) -> int:
    """How many iterations, as long as the last ten were, end before `deadline`."""
    lengths = series(read_metrics(folder), "time/iteration_s", stage=RL)[1][-10:]
    left = deadline - time.monotonic()
    return int(left * len(lengths) / sum(lengths)) if lengths and left > 0 else 0


def _unless_stopped(shutdown: Shutdown) -> None:
    if shutdown.requested():
        raise Stopped


def _read_back(folder: Path) -> None:
    """The export as `transformers` sees it: configuration, tokenizer and image processor files are its own kinds."""
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if config.model_type != "qwen3_vl" or tokenizer.convert_tokens_to_ids("<|image_pad|>") != config.image_token_id:
        raise RuntimeError(f"{folder} does not read back as the Qwen3-VL that was written: {config.model_type}")


def tell(result: Result) -> str:
    """The table at the end."""
    before, after = success(result.before.tasks).over_valid, success(result.after.tasks).over_valid
    return "\n".join(
        [
            "held-out success, over valid episodes",
            f"  after imitation                         {before}",
            f"  after {result.iterations:3d} iterations of MM-GRPO         {after}",
            f"  {compare(result.before, result.after)}",
            f"model   {result.export}",
            f"report  {result.report}",
        ]
    )


def main(argv: list[str]) -> int:
    """`owrl quickstart`. Exit codes: 0 done, 75 stopped and kept (start it again), 1 failed, 2 a wrong call."""
    import tyro

    def run(smoke: bool = False, demonstrations: int | None = None, hours: float = 0.0) -> int:
        """Collect demonstrations, imitate them, improve by reinforcement, and report; the same command goes on.

        Any setting can be given as --section.key VALUE, for instance --name mine or --iterations 40.

        Args:
            smoke: a few of everything, to see that all of it works; learns next to nothing.
            demonstrations: episodes of the oracles to collect.
            hours: go on with reinforcement for so long, once the preset's iterations are done; a finished run, too.
        """
        if not 0 <= hours < math.inf:
            raise ConfigError(f"--hours {hours} must be 0 or a positive number of hours")
        preset, count, epochs = ("quickstart_smoke", 24, 8) if smoke else ("quickstart", 600, 10)
        config = resolve(preset, overrides)
        with LiveView(config.name) as view, Shutdown() as shutdown:
            try:
                result = quickstart(
                    config,
                    demonstrations=count if demonstrations is None else demonstrations,
                    looking_epochs=epochs,
                    hours=hours,
                    view=view,
                    shutdown=shutdown,
                )
            except Stopped:
                print("owrl quickstart: stopped; what was finished is kept, and the same command goes on")
                return RESUME_EXIT_CODE
        print(tell(result))
        return 0

    try:
        overrides, rest = split_overrides(argv)
        return tyro.cli(run, args=rest, prog="owrl quickstart")
    except ConfigError as error:
        print(f"owrl quickstart: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        _log.debug("quickstart failed", exc_info=error)
        print(f"owrl quickstart: {error}", file=sys.stderr)
        return 1
