"""The learner of a configuration on a target, its programs and their shapes, without one array."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp

from owrl_jax.config import RunConfig
from owrl_jax.models.processor import ImageProcessor
from owrl_jax.models.qwen3_vl.config import ModelConfig, preset, read_config
from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.qwen3_vl.table import forward_flops
from owrl_jax.models.run import Run
from owrl_jax.plan.devices import PlanError, Target
from owrl_jax.plan.hlo import Array, Collective, read
from owrl_jax.rl.loss import LossSettings
from owrl_jax.rl.optimizer import OptimizerSettings
from owrl_jax.rl.packing import PackSettings, empty_row
from owrl_jax.rl.trainable import Trainable
from owrl_jax.rl.update import Learner
from owrl_jax.sharding import TRAIN_RULES, MeshConfig, Sharder, make_mesh

TURN_TEXT, TURN_RESPONSE = 330, 300
"""Tokens that a turn adds to a row beside its screenshot: of text, and of the response (docs/learner.md)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A learner and one batch of it.

    Attributes:
      learner: of the configuration, on a mesh of the target.
      packing: shapes of the batch.
      pictures, picture_patches: of one row: how many, and patches of each.
      dtype: of the parameters.
    """

    learner: Learner
    packing: PackSettings
    pictures: int
    picture_patches: int
    dtype: Any

    @property
    def shard(self) -> Sharder:
        assert self.learner.model.run.shard is not None
        return self.learner.model.run.shard

    @property
    def config(self) -> ModelConfig:
        return self.learner.model.config

    def flops(self) -> tuple[float, float]:
        """Of one micro-step on all devices: by the usual count (forward and twice that backward), and with what
        rematerialisation computes again. Causal pairs: rows of a tree have fewer."""
        tokens, rows = self.packing.tokens, self.packing.rows
        forward = forward_flops(
            self.config,
            tokens=tokens * rows,
            pairs=rows * tokens * (tokens + 1) // 2,
            patches=rows * self.pictures * self.picture_patches,
            patch_pairs=rows * self.pictures * self.picture_patches**2,
            responses=rows * self.packing.responses,
        )
        return 3 * forward, (3 if self.learner.model.run.remat == "none" else 4) * forward


def prepare(config: RunConfig, devices: list[Any]) -> Work:
    """What `owrl train` would run with this configuration on these devices.

    Raises:
      ShardingError: if mesh and devices do not fit.
    """
    weights = config.model.weights
    if weights is None:
        model, processor = preset(config.model.size), ImageProcessor()
    else:
        from pathlib import Path

        model, processor = read_config(Path(weights)), ImageProcessor.load(weights)
    if config.model.image_area is not None:
        low, high = config.model.image_area
        processor = dataclasses.replace(processor, min_area=low, max_area=high)
    mesh = make_mesh(MeshConfig(**dataclasses.asdict(config.mesh)), devices)
    run = Run(compute=jnp.dtype(config.dtypes.compute), remat=config.model.remat, shard=Sharder(mesh, TRAIN_RULES))
    learner = Learner(
        Qwen3VL(model, run),
        OptimizerSettings.of(config.rl),
        loss=LossSettings.of(config.rl),
        trainable=Trainable.of(config.rl),
        temperature=config.rollout.temperature,
        moments_on_host=config.rl.optimizer_on_host,
    )
    width, height = config.browser.viewport
    rows_px, cols_px = processor.resized(height, width)
    patches = rows_px * cols_px // processor.patch_size**2
    merge = model.vision.merge if model.vision else 2
    tokens, shards = config.rl.row_tokens, mesh.shape["replica"] * mesh.shape["fsdp"]
    turn = patches // merge**2 + TURN_TEXT + TURN_RESPONSE
    turns = max(1, tokens // turn)
    if patches // merge**2 >= tokens:
        raise PlanError(
            f"rl.row_tokens={tokens} has no room for one screenshot of {patches // merge**2} tokens: make rows larger "
            "or browser.viewport smaller"
        )
    packing = PackSettings(
        tokens=tokens,
        rows=config.rl.rows_per_device * shards,
        patches=math.ceil(turns * patches * 1.05) if model.vision else 0,
        responses=min(tokens, math.ceil(turns * TURN_RESPONSE * 1.05)),
        shards=shards,
        mode=config.rl.packing,
    )
    return Work(
        learner=learner,
        packing=packing,
        pictures=turns if model.vision else 0,
        picture_patches=patches,
        dtype=jnp.dtype(config.dtypes.params),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler says of one program, bytes on one device.

    Attributes:
      arguments, outputs, aliased, temporary, code: of `memory_analysis`; aliased outputs reuse donated arguments.
      collectives, arrays: see `hlo`.
      seconds: that compiling took.
      refused: why the compiler gave up, if it did: the program is larger than the device's memory.
    """

    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporary: int = 0
    code: int = 0
    collectives: tuple[Collective, ...] = ()
    arrays: tuple[Array, ...] = ()
    seconds: float = 0.0
    refused: str = ""

    @property
    def peak(self) -> int:
        """Bytes while it runs."""
        return self.arguments + self.outputs - self.aliased + self.temporary + self.code


def compile_all(work: Work, target: Target, progress=lambda line: None) -> dict[str, Compiled]:
    """Compiles every program of an update for the target."""
    traced = work.learner.traced(with_optional(work), work.packing.rows, work.dtype)
    found = {}
    for name, program in traced.items():
        progress(f"compiling {name} for {target.name}")
        found[name] = _compiled(program, work, target)
    return found


def with_optional(work: Work):
    """The empty row, with the columns that the loss needs."""
    row = empty_row(work.config, work.packing)
    blank = row.responses.behaviour
    responses = dataclasses.replace(
        row.responses,
        proximal=blank if work.learner.loss.needs_proximal else None,  # type: ignore[attr-defined]
        reference=blank if work.learner.loss.needs_reference else None,  # type: ignore[attr-defined]
    )
    return dataclasses.replace(row, responses=responses)


def _compiled(program: jax.stages.Traced, work: Work, target: Target) -> Compiled:
    started = time.perf_counter()
    try:
        done = program.lower(lowering_platforms=(target.chip.kind,)).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(refused=str(error), seconds=time.perf_counter() - started)
    seconds = time.perf_counter() - started
    memory = done.memory_analysis()
    assert memory is not None
    collectives, arrays = read(done.as_text() or "", work.shard.mesh.size, target.slices)
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        collectives=tuple(collectives),
        arrays=tuple(arrays[:8]),
        seconds=seconds,
    )
