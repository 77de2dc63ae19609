"""Supervised training on demonstrations: multi-turn behaviour cloning over the same rows, model and checkpoints as RL.

    owrl data build runs/teacher demos        # the shortest success of each task
    owrl sft tiny_cpu --sft.data demos        # the same command resumes

`train` is the loop and reads from top to bottom. The state of a run is the learner's state and a position in the data,
both in the checkpoint; a run that was killed and started again ends with the same bits as one that was not. The
learning rate is a function of the count of updates and of nothing else. The same code fine-tunes a judge: only the
demonstrations differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from owrl_jax.build import Parts, build
from owrl_jax.checkpoint import Checkpoints
from owrl_jax.config import ConfigError, RunConfig, SftSettings, config_hash, resolve, split_overrides, to_dict
from owrl_jax.data.dataset import Dataset
from owrl_jax.data.pipeline import Pipeline, PipelineSettings
from owrl_jax.models.hf import export
from owrl_jax.models.processor import ImageProcessor, Patches
from owrl_jax.models.qwen3_vl.config import to_hf
from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.obs.metrics import Metrics
from owrl_jax.obs.sinks import open_sinks
from owrl_jax.rl import hosts
from owrl_jax.rl.batch import PackedBatch
from owrl_jax.rl.epochs import updates as updates_of
from owrl_jax.rl.imitation import demonstrations
from owrl_jax.rl.loss import NllSettings
from owrl_jax.rl.optimizer import OptimizerSettings
from owrl_jax.rl.packing import PackSettings, Pictures, pack
from owrl_jax.rl.trainable import Trainable
from owrl_jax.rl.update import Learner, TrainState
from owrl_jax.shutdown import RESUME_EXIT_CODE, Shutdown
from owrl_jax.types import Trajectory

_log = logging.getLogger(__name__)
STAGE = "sft"
MEASURED_GROUPS = 64
"""Groups from which the shapes of a run's batches are taken."""


class NothingTrained(RuntimeError):
    """A call that was asked to train had nothing to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """How a call of `train` ended.

    Attributes:
      updates: done in all, earlier calls included.
      planned: that the schedule is made for.
      finished: whether that is what was wanted; else it was told to stop and can be resumed.
      folder: of the run.
      state: the learner's.
    """

    updates: int
    planned: int
    finished: bool
    folder: Path
    state: TrainState


def planned_updates(groups: int, settings: SftSettings) -> int:
    """Updates of all epochs; the last one may reach into an epoch that is not counted."""
    return math.ceil(groups * settings.epochs / settings.groups_per_update)


def optimizer_of(settings: SftSettings, planned: int) -> OptimizerSettings:
    """AdamW with a warm-up and half a cosine over the planned updates."""
    warmup = round(settings.warmup_share * planned)
    return OptimizerSettings(
        learning_rate=settings.learning_rate, schedule="cosine", warmup_updates=warmup,
        decay_updates=max(planned, warmup + 1), final_fraction=settings.final_fraction,
        b1=settings.adam_b1, b2=settings.adam_b2, weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )  # fmt: skip


def learner_of(model: Qwen3VL, settings: SftSettings, planned: int) -> Learner:
    """The learner of supervised training."""
    trainable = Trainable(freeze=settings.freeze, lora_rank=settings.lora_rank, lora_alpha=settings.lora_alpha)
    return Learner(model, optimizer_of(settings, planned), loss=NllSettings(), trainable=trainable)


def measured(dataset: Sequence[list[Trajectory]] | Dataset) -> list[Trajectory]:
    """What shapes are taken from: groups from everywhere. Neighbours may share pictures, and an update's rarely do."""
    chosen = random.Random(0).sample(range(len(dataset)), min(MEASURED_GROUPS, len(dataset)))
    return [trajectory for number in chosen for trajectory in dataset[number]]


def shapes_of(trajectories: Sequence[Trajectory], model: Qwen3VL, settings: SftSettings) -> PackSettings:
    """Shapes of batches in which updates of such trajectories fit."""
    mesh = model.run.mesh
    shards = 1 if mesh is None else mesh.shape["replica"] * mesh.shape["fsdp"]
    return PackSettings.fitted(
        demonstrations(trajectories), model.config, tokens=settings.row_tokens, mode=settings.packing,
        rows=settings.rows_per_device * shards, shards=shards,
    )  # fmt: skip


def train(
    config: RunConfig,
    *,
    until: int | None = None,
    parts: Parts | None = None,
    shutdown: Shutdown | None = None,
    on_update: Callable[[int, TrainState, dict[str, float]], None] | None = None,
) -> Trained:
    """Trains on the data set of `config.sft.data`, from where the run's folder stands.

    Args:
      config: of the run.
      until: updates of the run in all; None is all that the epochs plan.
      parts: of the run, if they are built already.
      shutdown: when to stop early; None listens to SIGTERM and Ctrl-C.
      on_update: called after every update with its count, the state and its numbers; must not keep the state.
    Raises:
      ConfigError: if settings do not go together, or the folder is of another run.
      DataError: if there is no such data set, or it is not the one that the run began with.
      NothingTrained: if the run has that many updates already.
    """
    settings = config.sft
    if not settings.data:
        raise ConfigError("sft.data='' names no data set: give the folder that `owrl data build` wrote")
    dataset = Dataset(settings.data)
    planned = planned_updates(len(dataset), settings)
    until = planned if until is None else until
    if until > planned and settings.final_fraction == 0:
        raise ConfigError(
            f"updates up to {until} are wanted, but the rate is 0 from update {planned} on: more sft.epochs, or a "
            "sft.final_fraction above 0, in a run of another name that begins with this one's export"
        )
    parts = parts or build(config)
    model, learner = parts.model, learner_of(parts.model, settings, planned)
    with contextlib.ExitStack() as stack:
        shutdown = shutdown or stack.enter_context(Shutdown())
        checkpoints = stack.enter_context(Checkpoints(parts.folder.checkpoints, config.checkpoint))
        # Where the run stands: a state, a position in the data, and the shapes that it began with.
        saved = checkpoints.latest()
        if saved is None:
            state, record = learner.init(parts.start_params()), None
            checkpoints.check_space(state)
            shapes = shapes_of(measured(dataset), model, settings)
        else:
            state, record = checkpoints.restore(learner.abstract(config.dtypes.params))
            shapes = PackSettings(**{**record["shapes"], "buckets": tuple(record["shapes"]["buckets"])})
        done = int(state.updates)
        if done >= until:
            raise NothingTrained(
                f"{parts.folder.path} has {done} updates, and {until} are wanted: nothing to train (--more N trains N "
                "more)"
            )
        prepare = functools.partial(
            _prepared, model=model, shapes=shapes, pictures=pictures_of(dataset, parts.processor)
        )
        order = PipelineSettings(groups=settings.groups_per_update, seed=config.seed, ahead=_ahead())
        pipeline = Pipeline(dataset, order, prepare)
        if record is not None:
            pipeline.restore(record["data"])
        sinks = open_sinks(config.logging.sinks, parts.folder.path, run=config.name, stage=STAGE, resume_at=done)
        metrics = stack.enter_context(Metrics(parts.folder.path, stage=STAGE, resume_at=done, sinks=sinks))
        durable = done if saved else -1
        while done < until and not shutdown.requested():
            began = time.monotonic()
            state, numbers = learner.update(state, next(pipeline))
            done += 1
            numbers = _named(numbers, time.monotonic() - began)
            if done % config.logging.every == 0 or done == until:
                metrics.log(done, numbers)
            if on_update is not None:
                on_update(done, state, numbers)
            if done % config.checkpoint.every == 0:
                _save(checkpoints, parts, state, pipeline, shapes)
                durable = done
        if durable != done:
            _save(checkpoints, parts, state, pipeline, shapes)
        checkpoints.wait()
    if done >= until:
        export(
            learner.policy(state), model.config, parts.folder.export, dtype=config.dtypes.params,
            tokenizer_from=parts.folder.tokenizer, overwrite=True,
        )  # fmt: skip
    return Trained(updates=done, planned=planned, finished=done >= until, folder=parts.folder.path, state=state)


def imitate(
    learner: Learner,
    state: TrainState,
    trajectories: Sequence[Trajectory],
    *,
    pictures: Pictures,
    settings: SftSettings,
    seed: int = 0,
    on_update: Callable[[int, dict[str, float]], None] | None = None,
) -> tuple[TrainState, list[dict[str, float]]]:
    """Trains in this process on trajectories in memory, `settings.epochs` times; nothing is saved.

    Args:
      learner: of `learner_of(model, settings, planned_updates(number of groups, settings))`.
      state: it is used up.
      trajectories: demonstrations.
      pictures: patches by content hash.
    Returns:
      the new state, and the numbers of each update.
    Raises:
      NothingTrained: if no trajectory has a turn to learn from.
    """
    samples = demonstrations(trajectories)
    turns = sum(len(sample.live) for sample in samples)
    if not turns:
        raise NothingTrained(f"none of {len(samples)} trajectories has a turn to learn from")
    groups = len({sample.group for sample in samples})
    shapes = shapes_of(trajectories, learner.model, settings)
    per_update = max(1, round(turns * settings.groups_per_update / groups))
    rows = []
    for plan in updates_of(samples, turns_per_update=per_update, epochs=settings.epochs, seed=seed, iteration=0):
        batches = pack(plan.samples, learner.model.config, pictures=pictures, settings=shapes)
        began = time.monotonic()
        state, numbers = learner.update(state, batches)
        rows.append(_named(numbers, time.monotonic() - began))
        if on_update is not None:
            on_update(len(rows), rows[-1])
    return state, rows


def pictures_of(dataset: Dataset, processor: ImageProcessor, keep: int = 512) -> Pictures:
    """Patches of a data set's screenshots by content hash, the last few kept."""

    @functools.lru_cache(maxsize=keep)
    def patches(name: str) -> Patches:
        return processor.process(dataset.screenshot(name))

    return patches


def _prepared(
    trajectories: Sequence[Trajectory], *, model: Qwen3VL, shapes: PackSettings, pictures: Pictures
) -> list[PackedBatch]:
    samples = demonstrations(trajectories)
    return list(hosts.stream(samples, model.config, pictures=pictures, settings=shapes, shard=model.run.shard))


def _ahead() -> int:
    """Updates prepared in the background; none with several processes, whose plans are compared in order."""
    return 2 if jax.process_count() == 1 else 0


def _named(numbers: dict[str, float], seconds: float) -> dict[str, float]:
    return numbers | {
        "sft/loss_nats_per_token": -numbers["policy/logp_mean"],
        "sft/tokens_per_s": numbers["update/response_tokens"] / seconds,
        "sft/learning_rate": numbers["optimizer/learning_rate"],
        "sft/grad_norm": numbers["grad/norm"],
    }


def _save(checkpoints: Checkpoints, parts: Parts, state: TrainState, pipeline: Pipeline, shapes: PackSettings) -> None:
    record: dict[str, Any] = {
        "stage": STAGE,
        "data": pipeline.state(),
        "shapes": dataclasses.asdict(shapes),
        "config": to_dict(parts.config),
        "config_hash": config_hash(parts.config),
        "model": to_hf(parts.model.config),
    }
    checkpoints.save(int(state.updates), state, record)


def main(argv: list[str]) -> int:
    """`owrl sft`. Exit codes: 0 trained to the end, 75 stopped and saved (start it again), 1 failed, 2 a wrong call."""
    import tyro

    from owrl_jax.checkpoint import CheckpointError
    from owrl_jax.data.dataset import DataError
    from owrl_jax.models.hf import ExportError, LoadError

    def run(preset: str = "", /, until: int | None = None, more: int | None = None) -> int:
        """Train a policy on demonstrations; the same command resumes.

        Any setting can be given as --section.key VALUE, for instance --sft.data demos --sft.epochs 1 or --name mine.

        Args:
            preset: name of a preset in configs/, or path of a Python file.
            until: train until the run has this many updates.
            more: train this many updates more than the run has.
        """
        config = resolve(preset or None, overrides)
        if until is not None and more is not None:
            raise ConfigError("give --until or --more, not both: one counts from the start, the other from here")
        if more is not None:
            latest = Checkpoints(Path(config.out_dir) / config.name / "checkpoints", write=False).latest()
            until = more + (latest.step if latest else 0)
        trained = train(config, until=until)
        if not trained.finished:
            _say(f"owrl sft: stopped and saved after {trained.updates} updates; the same command goes on")
            return RESUME_EXIT_CODE
        _say(f"owrl sft: {trained.updates} updates of {trained.planned} planned; see {trained.folder}")
        return 0

    try:
        overrides, rest = split_overrides(argv)
        return tyro.cli(run, args=rest, prog="owrl sft")
    except ConfigError as error:
        print(f"owrl sft: {error}", file=sys.stderr)  # noqa: T201 - a command talks to its user
        return 2
    except (NothingTrained, DataError, CheckpointError, LoadError, ExportError) as error:
        _log.debug("training failed", exc_info=error)
        print(f"owrl sft: {error}", file=sys.stderr)  # noqa: T201 - a command talks to its user
        return 1


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command talks to its user
