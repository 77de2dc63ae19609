"""MM-GRPO on live pages: sample tasks, play groups, judge, filter, pack, update, publish, log, save, evaluate. Again.

`_iterate` is the algorithm and reads from top to bottom. Around it: a pool that plays groups of episodes as the feed
allows (`rl/feed.py` has the staleness rule, so the same loop is synchronous with η = 0 and asynchronous above), a
journal that makes every finished episode durable before it is used, and a checkpoint that says where the loop stands.

Resuming. The state of the loop is the learner's state and the iteration; everything drawn by chance is a function of
the seed and of a number. The journal names the groups of an iteration before they are trained on, so a process that
was killed comes back to its last checkpoint, trains the same iterations on the same groups to the same bits, and goes
on playing where the journal ends. Ctrl-C and SIGTERM finish the iteration, save, and leave with an exit code that says
"start me again".
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from owrl_jax.build import Parts, build, stage
from owrl_jax.checkpoint import Checkpoints
from owrl_jax.config import ConfigError, RunConfig, config_hash, resolve, split_overrides, to_dict
from owrl_jax.data.tasks import TaskSource
from owrl_jax.engine.engine import Engine
from owrl_jax.evaluate import evaluate, tell
from owrl_jax.judge.panel import Tally
from owrl_jax.judge.protocol import JudgingStopped
from owrl_jax.models.hf import export
from owrl_jax.models.qwen3_vl.config import to_hf
from owrl_jax.obs.live import LiveView
from owrl_jax.obs.metrics import Metrics, TimeSplit
from owrl_jax.obs.sinks import open_sinks
from owrl_jax.obs.stats import append_evaluation, success
from owrl_jax.pool.journal import Journal
from owrl_jax.pool.rollout import LocalPool
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.rl.advantage import Scored, score
from owrl_jax.rl.batch import PackedBatch, TrainSample
from owrl_jax.rl.diagnostics import mismatch, recomputed, share_of, with_proximal, with_reference
from owrl_jax.rl.epochs import updates
from owrl_jax.rl.feed import GroupFeed
from owrl_jax.rl.horizon import next_horizon
from owrl_jax.rl.loss import LossSettings, samples_of
from owrl_jax.rl.optimizer import OptimizerSettings
from owrl_jax.rl.packing import PackSettings, pack
from owrl_jax.rl.trainable import Trainable
from owrl_jax.rl.update import Learner, TrainState
from owrl_jax.shutdown import RESUME_EXIT_CODE, Shutdown
from owrl_jax.types import Group

_log = logging.getLogger(__name__)
STAGE = "rl"
LIMIT_EXIT_CODE = 3
"""The judge's spending limit stopped the run; starting it again as it is would stop it again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """How a call of `train` ended.

    Attributes:
      iterations: done in all, earlier calls included.
      finished: whether that is what was wanted; else it was told to stop and can be resumed.
      folder: of the run.
      limit: the sentence of the judge's spending limit, if that stopped it.
    """

    iterations: int
    finished: bool
    folder: Path
    limit: str = ""


class NothingTrained(RuntimeError):
    """A call that was asked to train had nothing to do."""


def train(config: RunConfig, *, view: LiveView | None = None, shutdown: Shutdown | None = None) -> Trained:
    """Trains until `config.iterations`, from where the run's folder stands.

    Raises:
      ConfigError: if settings do not go together, or the folder is of another run.
      NothingTrained: if the run has that many iterations already.
      NothingToLearn: if an iteration's groups teach nothing.
    """
    parts = build(config)
    with contextlib.ExitStack() as stack:
        view = view or stack.enter_context(LiveView(config.name))
        shutdown = shutdown or stack.enter_context(Shutdown())
        loop = Loop(parts, view=view, shutdown=shutdown, stack=stack)
        return asyncio.run(loop.run())


class Loop:
    """The state of a training run in one process."""

    def __init__(self, parts: Parts, *, view: LiveView, shutdown: Shutdown, stack: contextlib.ExitStack) -> None:
        config = parts.config
        self.parts, self.view, self.shutdown = parts, view, shutdown
        self.tasks = TaskSource.of(config.data, seed=config.seed)
        self.learner = Learner(
            parts.model,
            OptimizerSettings.of(config.rl),
            loss=LossSettings.of(config.rl),
            trainable=Trainable.of(config.rl),
            temperature=config.rollout.temperature,
            moments_on_host=config.rl.optimizer_on_host,
        )
        self.screenshots = ScreenshotStore(parts.folder.screenshots)
        self.pictures = parts.pictures(self.screenshots)
        self.judge, self.tally = parts.judge(self.screenshots), Tally()
        self.journal = stack.enter_context(Journal(parts.folder.journal))
        self.checkpoints = stack.enter_context(Checkpoints(parts.folder.checkpoints, config.checkpoint))
        self.shapes: PackSettings | None = None  # of the first iteration, kept for all: others would be compiled anew
        self.horizon = config.horizon.start if config.horizon.most else 0  # 0: that of the stage
        self.state, self.iteration, next_number = self._start()
        self.metrics = stack.enter_context(
            Metrics(
                parts.folder.path,
                stage=STAGE,
                resume_at=self.iteration,
                sinks=open_sinks(
                    config.logging.sinks, parts.folder.path, run=config.name, stage=STAGE, resume_at=self.iteration
                ),
            )
        )
        self.time = TimeSplit(("rollout", "learner", "publish", "checkpoint", "evaluate"))
        self.feed = GroupFeed(
            draw=self.tasks.draw,
            judge=self._why_not,
            oldest=lambda group: min((v for t in group.valid for turn in t.turns for v in turn.versions), default=0),
            batch=config.rl.groups,
            size=config.rl.group_size,
            max_staleness=config.rl.max_staleness,
            cap=config.rl.resampling_cap,
            version=self.iteration,
            chosen=max(self.journal.batches, default=-1) + 1,
            next_number=next_number,
        )

    async def run(self) -> Trained:
        """All iterations that are left."""
        config, parts = self.parts.config, self.parts
        if self.iteration >= config.iterations:
            raise NothingTrained(
                f"{parts.folder.path} has {self.iteration} iterations, and {config.iterations} are wanted: give more"
            )
        self.view.begin("mm-grpo", total=config.iterations, unit="iterations", done=self.iteration)
        limit = ""
        try:
            async with self.judge or contextlib.nullcontext():
                await self._all()
        except JudgingStopped as stopped:  # between two iterations: what was played since is in the journal
            limit = str(stopped)
            await asyncio.to_thread(self._save)
        finished = self.iteration >= config.iterations
        self.checkpoints.wait()
        if finished:
            export(
                self.learner.policy(self.state), parts.model.config, parts.folder.export, dtype=config.dtypes.params,
                tokenizer_from=parts.folder.tokenizer, overwrite=True,
            )  # fmt: skip
        return Trained(
            iterations=self.iteration, finished=finished and not limit, folder=parts.folder.path, limit=limit
        )

    async def _all(self) -> None:
        config, parts = self.parts.config, self.parts
        engine = parts.engine()
        async with stage(config, parts.limits()) as (sandboxes, places), engine:
            await asyncio.to_thread(self._publish, engine)
            self.pool = LocalPool(
                harness=lambda version: parts.harness_of(self._turns(version)),
                policy_of=lambda place: engine,
                sandboxes=sandboxes,
                places=places,
                sampling=parts.sampling(config.seed),
                journal=self.journal,
                screenshots=self.screenshots,
                judge=self.judge and self.judge.call(self.tally),
                limits=parts.limits(),
                version=lambda: engine.version,
            )

            async def measure() -> None:
                if config.eval.every >= 0:
                    tasks, tally = self.tasks.held_out(config.eval.tasks), Tally()
                    with self.time.during("evaluate"):
                        found = await evaluate(
                            parts, engine, sandboxes, places, tasks, at=self.iteration,
                            judge=self.judge and self.judge.call(tally, measuring=True),
                            screenshots=self.judge and self.screenshots,
                        )  # fmt: skip
                    append_evaluation(parts.folder.path, found)
                    self.metrics.log(self.iteration, {"eval/success_over_valid": success(found.tasks).over_valid.share})
                    self.view.note("\n".join([tell(found), *tally.lines()]))

            if self.iteration == 0:
                await measure()
            collecting = asyncio.create_task(self._collect(), name="collect")
            try:
                while self.iteration < config.iterations and not self.shutdown.requested():
                    await self._iterate(engine, collecting)
                    last = self.iteration == config.iterations or self.shutdown.requested()
                    if last or self.iteration % config.checkpoint.every == 0:
                        with self.time.during("checkpoint"):
                            await asyncio.to_thread(self._save)
                    if config.eval.every and self.iteration % config.eval.every == 0 and not last:
                        await measure()
            finally:
                self.feed.close()
                collecting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await collecting
            if self.iteration >= config.iterations:
                await measure()

    async def _iterate(self, engine: Engine, collecting: asyncio.Task[None]) -> None:
        """One iteration: a batch of groups, a few updates, new weights in the engine."""
        config, rl, iteration = self.parts.config, self.parts.config.rl, self.iteration
        began = time.monotonic()
        # The groups: those that the journal has for this iteration already, or the next ones of the feed.
        with self.time.during("rollout"):
            if iteration in self.journal.batches:
                groups = tuple(self.journal.group(name) for name in self.journal.batches[iteration])
            else:
                groups = await _unless(collecting, self.feed.next_batch())
                self.journal.add_batch(iteration, [group.request.group_id for group in groups])
        # What they are worth.
        scored = score(groups, rl, version=iteration)
        samples = samples_of(scored, rl)
        numbers: dict[str, float] = dict(scored.metrics())
        # The policy moves.
        with self.time.during("learner"):
            numbers |= await asyncio.to_thread(self._learn, samples, iteration)
        self.iteration += 1
        with self.time.during("publish"):
            await asyncio.to_thread(self._publish, engine)
        # What happened.
        rejected = self.feed.advance(self.iteration)
        numbers |= {f"rollout/groups_rejected_{why}": float(n) for why, n in rejected.items()}
        numbers |= self._judged() | {"rollout/horizon_turns": float(self._turns(iteration))}
        self.horizon = next_horizon(self.horizon, (t for g in groups for t in g.trajectories), config.horizon)
        numbers |= _engine_numbers(engine) | self.time.take() | {"time/iteration_s": time.monotonic() - began}
        if iteration % config.logging.every == 0:
            self.metrics.log(iteration, numbers)
        self.view.log(self.iteration, numbers)

    def _publish(self, engine: Engine) -> None:
        """The policy as it is now, to the engine.

        One that plays while the learner works gets arrays of its own: an update uses up those that it begins with.
        """
        policy = self.learner.policy(self.state)
        if self.parts.config.rl.max_staleness:
            policy = jax.tree.map(jnp.copy, policy)
        engine.publish(self.iteration, policy)

    def _learn(self, samples: Sequence[TrainSample], iteration: int) -> dict[str, float]:
        """All updates of an iteration; numbers averaged over them."""
        rl, learner = self.parts.config.rl, self.learner
        rate = self.parts.config.stage_of(iteration).learning_rate
        if self.shapes is None:
            self.shapes = PackSettings.fitted(
                samples, self.parts.model.config, tokens=rl.row_tokens, mode=rl.packing,
                rows=rl.rows_per_device * self._shards, shards=self._shards,
            )  # fmt: skip
        policy = learner.policy(self.state)
        found: dict[str, float] = {}
        if rl.max_staleness == 0:  # the parameters that sampled are still here: the engine's numbers can be checked
            checked = share_of(samples, rl.diagnosed_share, seed=self.parts.config.seed, iteration=iteration)
            found |= mismatch(checked, recomputed(learner, policy, checked, self._pack))
        loss = LossSettings.of(rl)
        if loss.needs_proximal:
            samples = with_proximal(learner, policy, samples, self._pack)
        if loss.needs_reference:
            samples = with_reference(learner, self._reference(), samples, self._pack)
        del policy
        plans = updates(
            samples, turns_per_update=rl.turns_per_update, epochs=rl.epochs,
            seed=self.parts.config.seed, iteration=iteration, unit=rl.shuffle,
        )  # fmt: skip
        rows = []
        for plan in plans:
            self.state, numbers = learner.update(self.state, self._pack(plan.samples), learning_rate=rate)
            rows.append(numbers)
        if not rows:
            return found
        names = {name for row in rows for name in row}
        found |= {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}
        return found | {"update/updates": float(len(rows)), "update/count": rows[-1]["update/count"]}

    async def _collect(self) -> None:
        """Plays what the feed asks for, as long as the run goes on."""
        for name in self.journal.unspent():  # finished before a restart, and not trained on yet
            if not name.startswith("eval-"):
                self.feed.take(self.journal.group(name), played=False)
        async for group in self.pool.run(self.feed.requests()):
            self.tasks.observe(group.trajectories)
            self.feed.take(group)
            for trajectory in group.trajectories:
                self.view.ended(trajectory)

    def _turns(self, iteration: int) -> int:
        """Turns that an episode which begins now may take."""
        return self.horizon or self.parts.config.stage_of(iteration).max_steps

    def _judged(self) -> dict[str, float]:
        """What the judge said since the last iteration, how it agreed with others, and what it cost."""
        if self.judge is None:
            return {}
        for seen in self.tally.drifts:
            self.view.note(seen.line())
        return self.tally.take() | self.judge.spent()

    def _why_not(self, group: Group) -> str:
        """Why a group teaches nothing, before anything is known of its age; empty if it is accepted."""
        scored: Scored = score([group], self.parts.config.rl)
        return next(iter(scored.dropped), "")

    def _pack(self, samples: Iterable[TrainSample]) -> list[PackedBatch]:
        assert self.shapes is not None
        return pack(list(samples), self.parts.model.config, pictures=self.pictures, settings=self.shapes)

    @property
    def _shards(self) -> int:
        mesh = self.parts.model.run.mesh
        return 1 if mesh is None else mesh.shape["replica"] * mesh.shape["fsdp"]

    def _reference(self) -> Any:
        """The policy that the run started from, for a KL term."""
        if not hasattr(self, "_reference_params"):
            self._reference_params = self.parts.start_params()
        return self._reference_params

    # --- Where the loop stands -------------------------------------------------------------------------------------

    def _start(self) -> tuple[TrainState, int, int]:
        """The state, the iteration and the number of the next draw: of the newest checkpoint, or of a new run."""
        played = [int(name[1:]) + 1 for name in self.journal.group_ids if name[0] == "g"]
        saved = self.checkpoints.latest()
        if saved is None:
            return self.learner.init(self.parts.start_params()), 0, max(played, default=0)
        state, record = self.checkpoints.restore(self.learner.abstract(self.parts.config.dtypes.params))
        self.tasks.restore(record["tasks"])
        self.horizon = record.get("horizon", self.horizon)
        if record["shapes"] is not None:
            self.shapes = PackSettings(**{**record["shapes"], "buckets": tuple(record["shapes"]["buckets"])})
        return state, record["iteration"], max([*played, record["feed"]["next_number"]])

    def _save(self) -> None:
        record = {
            "iteration": self.iteration,
            "feed": self.feed.state(),
            "tasks": self.tasks.state(),
            "horizon": self.horizon,
            "shapes": None if self.shapes is None else dataclasses.asdict(self.shapes),
            "config": to_dict(self.parts.config),
            "config_hash": config_hash(self.parts.config),
            "model": to_hf(self.parts.model.config),
        }
        self.checkpoints.save(self.iteration, self.state, record)


async def _unless(other: asyncio.Task[None], wanted: Any) -> Any:
    """What `wanted` gives, unless `other` fails first."""
    task = asyncio.ensure_future(wanted)
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            other.result()  # raises what ended it
            raise RuntimeError("the pool ended before the iteration had its groups")
        return task.result()
    finally:
        if not task.done():
            task.cancel()


def _engine_numbers(engine: Engine) -> dict[str, float]:
    stats = dataclasses.asdict(engine.stats())
    return {f"engine/{name}": float(value) for name, value in stats.items() if isinstance(value, int | float)}


def main(argv: list[str]) -> int:
    """`owrl train`. Exit codes: 0 trained to the end, 75 stopped and saved (start again), 3 stopped and saved at the
    judge's spending limit, 1 failed, 2 a wrong call."""
    import tyro

    def run(
        preset: str = "",
        /,
        until: int | None = None,
        more: int | None = None,
        dry_run: bool = False,
        devices: int | None = None,
        device_gib: float | None = None,
    ) -> int:
        """Train a policy by online multi-turn reinforcement learning; the same command resumes.

        Any setting can be given as --section.key VALUE, for instance --rl.learning_rate 5e-7 or --name mine.

        Args:
            preset: name of a preset in configs/, or path of a Python file.
            until: train until the run has this many iterations.
            more: train this many iterations more than the run has.
            dry_run: only say what the run would need and what is missing; nothing is loaded or written.
            devices: of the dry run: plan for so many.
            device_gib: of the dry run: memory of each of them, GiB.
        """
        config = resolve(preset or None, overrides)
        if until is not None and more is not None:
            raise ConfigError("give --until or --more, not both")
        if more is not None:
            latest = Checkpoints(Path(config.out_dir) / config.name / "checkpoints", write=False).latest()
            until = more + (latest.step if latest else 0)
        if until is not None:
            config = dataclasses.replace(config, iterations=until)
        if dry_run:
            from owrl_jax.dry_run import dry_run as plan

            return plan(config, devices=devices, device_gib=device_gib)
        trained = train(config)
        if trained.limit:
            print(
                f"owrl train: stopped and saved after {trained.iterations} iterations. {trained.limit}. Raise "
                "judge.max_usd or judge.max_calls, and the same command goes on",
                file=sys.stderr,
            )
            return LIMIT_EXIT_CODE
        if not trained.finished:
            print(f"owrl train: stopped and saved after {trained.iterations} iterations; the same command goes on")
            return RESUME_EXIT_CODE
        print(f"owrl train: {trained.iterations} iterations; see {trained.folder}, or: owrl report {trained.folder}")
        return 0

    try:
        overrides, rest = split_overrides(argv)
        return tyro.cli(run, args=rest, prog="owrl train")
    except ConfigError as error:
        print(f"owrl train: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        _log.debug("training failed", exc_info=error)
        print(f"owrl train: {error}", file=sys.stderr)
        return 1
