"""`owrl train PRESET --dry-run`: what a run would need and what is missing, without weights and without allocating.

    owrl train openwebrl_4b --dry-run --device-gib 180
    owrl train openwebrl_4b --dry-run --devices 16 --mesh.fsdp 16 --data.tasks '["my_tasks.jsonl"]'

Arithmetic and a few questions: the configuration is resolved, the tasks are read, the judges are asked which models
they serve, the budget is multiplied out, and the bytes of parameters, gradients, moments and key-value pages are added
up for each device of the mesh, from the shapes and sharding rules that training itself uses. The mesh need not be here.

What a compiler decides (scratch, the buffers of collectives) is not in these sums: they are a lower bound.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import httpx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from owrl_jax.build import engine_settings, episodes, image_processor
from owrl_jax.config import ConfigError, EndpointSettings, RunConfig, Stage, config_hash
from owrl_jax.data.tasks import TaskSource
from owrl_jax.doctor import Finding, format_findings, healthy
from owrl_jax.engine.step import Programs
from owrl_jax.judge.panel import key_of
from owrl_jax.models.processor import ImageProcessor
from owrl_jax.models.qwen3_vl.config import ModelConfig, preset, read_config
from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.qwen3_vl.table import parameter_count
from owrl_jax.models.run import Run
from owrl_jax.rl.optimizer import OptimizerSettings
from owrl_jax.rl.trainable import Trainable
from owrl_jax.rl.update import Learner
from owrl_jax.sharding import AXES, TRAIN_RULES, MeshConfig, Sharder, ShardingError

GIB = 2**30
PROBE_S = 5.0
"""For a judge to say which models it serves."""
CASE_TOKENS = 6000
"""Words of a judge's question, rules and log included, as a guess on the high side; pictures come on top."""


# --- Budget -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """What one stage takes; all but `iterations` and `max_steps` are of one iteration, and most are upper bounds.

    Attributes:
      episodes: if every group teaches something; `most_episodes` if the cap on resampling is reached.
      turns: of the trained episodes, at most; likewise `response_tokens`, `context_tokens` and `updates`.
    """

    iterations: int
    max_steps: int
    learning_rate: float
    episodes: int
    most_episodes: int
    turns: int
    response_tokens: int
    context_tokens: int
    updates: int


def budgets(config: RunConfig) -> list[Budget]:
    """The budget of each stage, cut to the iterations of the run."""
    rl, agent = config.rl, config.agent
    found = []
    for stage in _stages(config):
        played = rl.groups * rl.group_size
        steps = config.horizon.most or stage.max_steps
        turns = played * steps
        found.append(
            Budget(
                iterations=stage.iterations,
                max_steps=steps,
                learning_rate=stage.learning_rate,
                episodes=played,
                most_episodes=math.ceil(rl.groups * rl.resampling_cap) * rl.group_size,
                turns=turns,
                response_tokens=turns * agent.max_response_tokens,
                context_tokens=turns * agent.max_context_tokens,
                updates=rl.epochs * math.ceil(turns / rl.turns_per_update),
            )
        )
    return found


def _stages(config: RunConfig) -> list[Stage]:
    """Stages with the iterations that this run has of each."""
    found: list[Stage] = []
    for stage in config.curriculum or (config.stage_of(0),):
        left = config.iterations - sum(s.iterations for s in found)
        if left > 0:
            found.append(dataclasses.replace(stage, iterations=min(stage.iterations, left)))
    left = config.iterations - sum(s.iterations for s in found)
    return [*found[:-1], dataclasses.replace(found[-1], iterations=found[-1].iterations + left)]


# --- Memory -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of one kind of array: on the fullest device, or in host memory for one device's share."""

    what: str
    bytes: int
    where: Literal["device", "host"] = "device"


def memory(config: RunConfig, model: ModelConfig, processor: ImageProcessor, mesh: AbstractMesh | None) -> list[Held]:
    """What lies on each device between and during updates, by what it is.

    Args:
      mesh: of training; None on one device.
    """
    params = jnp.dtype(config.dtypes.params)
    compute = jnp.dtype(config.dtypes.compute)
    shard = None if mesh is None else Sharder(mesh, TRAIN_RULES)
    run = Run(compute=compute, remat=config.model.remat, shard=shard)
    learner = Learner(
        Qwen3VL(model, run),
        OptimizerSettings.of(config.rl),
        trainable=Trainable.of(config.rl),
        moments_on_host=config.rl.optimizer_on_host and mesh is not None,
    )
    state = learner.abstract(params)
    moving, _ = learner.trainable.split(model, state.params, state.adapters)
    engine = Programs(model, Run(compute=compute), engine_settings(config, processor), ())
    # An engine shares the learner's arrays where it can compute with them, and does not play while they change.
    copies = params != compute or config.rl.max_staleness > 0
    rows, context = config.rl.rows_per_device, 1 if mesh is None else mesh.shape["context"]
    tokens = -(-config.rl.row_tokens // context)
    return [
        Held(what=f"parameters, {params.name}", bytes=_bytes(state.params)),
        Held(what="adapters, float32", bytes=_bytes(state.adapters)),
        Held(
            what="Adam's moments",
            bytes=_bytes(state.moments),
            where="host" if config.rl.optimizer_on_host else "device",
        ),
        Held(what="gradients, added up in float32", bytes=_bytes(moving, jnp.dtype("float32"))),
        Held(what="gradients of a micro-batch", bytes=_bytes(moving)),
        Held(
            what=f"inputs of the layers, {rows} x {tokens} tokens",
            bytes=rows * tokens * model.text.layers * model.text.model * compute.itemsize,
        ),
        Held(what=f"the engine's parameters, {compute.name}", bytes=_bytes(state.params, compute) if copies else 0),
        Held(
            what=f"key-value pages, {engine.settings.pool_pages} x {engine.settings.page_tokens} tokens",
            bytes=_whole(engine.pages),
        ),
        Held(
            what=f"working copies of {engine.settings.max_rows} contexts of {engine.settings.past_slots} tokens",
            bytes=_whole(engine.rows) + _whole(engine.flat),
        ),
        Held(what=f"embeddings of {engine.settings.vision_rows} picture tokens", bytes=_whole(engine.pool)),
    ]


def _bytes(tree: Any, dtype: Any = None) -> int:
    """Of one device's share of abstract arrays."""

    def share(leaf: Any) -> int:
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * (dtype or leaf.dtype).itemsize

    return sum(share(leaf) for leaf in jax.tree.leaves(tree))


def _whole(make: Any) -> int:
    """Of arrays that lie on one device as they are."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(make)))


# --- Questions --------------------------------------------------------------------------------------------------


def check_weights(config: RunConfig) -> tuple[Finding, ModelConfig | None, ImageProcessor]:
    """Whether the weights are here; the shapes that will be planned for, None if nothing says what they are."""
    settings, processor = config.model, ImageProcessor()
    try:
        if settings.weights is None:
            model = preset(settings.size)
            found = f"random ones of size {settings.size}, {parameter_count(model) / 1e9:.2f} billion"
            return Finding(name="weights", status="ok", found=found), model, image_processor(processor, config)
        folder = Path(settings.weights)
        if folder.is_dir():
            model, processor = read_config(folder), ImageProcessor.load(folder)
            if not list(folder.glob("*.safetensors")):
                raise ConfigError(f"{folder} has no *.safetensors")
            found = f"{folder}: {model.family}, {parameter_count(model) / 1e9:.2f} billion parameters"
            return Finding(name="weights", status="ok", found=found), model, image_processor(processor, config)
        model = preset(settings.size)
    except (ValueError, OSError) as error:
        advice = "give a folder in Hugging Face format (--model.weights), or a known size (--model.size)"
        return Finding(name="weights", status="fail", found=str(error), advice=advice), None, processor
    return (
        Finding(
            name="weights",
            status="warn",
            found=f"no folder {folder}; planned for size {settings.size}, {parameter_count(model) / 1e9:.2f} billion",
            advice="the run needs it: make it with owrl sft, or name another (--model.weights)",
        ),
        model,
        image_processor(processor, config),
    )


def check_tasks(config: RunConfig) -> list[Finding]:
    """Whether the tasks can be read, and whether somebody can tell that they were fulfilled."""
    try:
        source = TaskSource.of(config.data, seed=config.seed)
    except ConfigError as error:
        return [Finding(name="tasks", status="fail", found=str(error), advice="name what there is (--data.tasks)")]
    total = sum(kind.instances for kind in source.kinds)
    found = [Finding(name="tasks", status="ok", found=f"{total} of {len(source.kinds)} kinds to train on")]
    try:
        held_out = source.held_out(config.eval.tasks)
        found.append(Finding(name="held-out tasks", status="ok", found=f"{len(held_out)}"))
    except ConfigError as error:
        advice = "ask for fewer (--eval.tasks), or add tasks of another split to the tables"
        found.append(Finding(name="held-out tasks", status="fail", found=str(error), advice=advice))
    open_ended = [kind.name for kind in source.kinds if not kind.make(0).verifier]
    if open_ended and config.judge.kind == "program":
        found.append(
            Finding(
                name="verdicts",
                status="fail",
                found=f"{len(open_ended)} kinds of tasks have no program, {open_ended[0]} for one, and no model judges",
                advice="set a judge: --judge.kind rubric with --judge.endpoint.url and --judge.endpoint.model",
            )
        )
    return found


def check_judges(config: RunConfig, environment: Mapping[str, str]) -> list[Finding]:
    """Whether the judges answer and have the models that are asked for, and what their verdicts may cost."""
    judge = config.judge
    if judge.kind == "program":
        return [Finding(name="judge", status="ok", found="programs of local worlds")]
    found = [probe(judge.endpoint, "judge", "judge.endpoint", environment)]
    if judge.second.url:
        found.append(probe(judge.second, "held-out judge", "judge.second", environment))
    price = _usd_per_verdict(config)
    if price:
        verdicts = sum(b.iterations * b.episodes for b in budgets(config))
        shown = f"up to ${price:.4f} a verdict, ${price * verdicts:.0f} for {verdicts} episodes"
        short = judge.max_usd is not None and judge.max_usd < price * verdicts
        found.append(
            Finding(
                name="judge's money",
                status="warn" if short or judge.max_usd is None else "ok",
                found=shown + (f"; the limit is ${judge.max_usd:.0f}" if judge.max_usd is not None else "; no limit"),
                advice=("the run may stop there and goes on with a higher one" if short else "set --judge.max_usd")
                if short or judge.max_usd is None
                else "",
            )
        )
    return found


def _usd_per_verdict(config: RunConfig) -> float:
    """At most about: a question with its pictures, and the longest reply."""
    judge, (width, height) = config.judge, config.browser.viewport
    tokens = CASE_TOKENS + judge.screenshots * width * height // 1024
    ends = [(judge.endpoint, 1.0), (judge.second, judge.second_share if judge.second.url else 0.0)]
    return sum(
        share * (tokens * end.usd_per_million_in + judge.max_tokens * end.usd_per_million_out) / 1e6
        for end, share in ends
    )


def probe(endpoint: EndpointSettings, name: str, path: str, environment: Mapping[str, str]) -> Finding:
    """Asks an endpoint which models it serves."""

    def bad(found: str, advice: str, status: Literal["warn", "fail"] = "fail") -> Finding:
        return Finding(name=name, status=status, found=found, advice=advice)

    try:
        key = key_of(endpoint, path, environment)
    except ConfigError as error:
        return bad(str(error), f"export {endpoint.key_env}=...")
    where = endpoint.url.rstrip("/") + "/models"
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.get(where, headers=headers, timeout=PROBE_S, trust_env=False)
        models = [str(one["id"]) for one in answer.json()["data"]] if answer.status_code == 200 else []
    except httpx.TransportError as error:
        return bad(
            f"{endpoint.url} does not answer ({type(error).__name__}: {error})",
            f"start it, or name another (--{path}.url); `owrl serve FOLDER` serves a model of yours",
        )
    except (ValueError, LookupError, TypeError) as error:
        return bad(
            f"{where} answers with something else than a list of models ({error})", f"check --{path}.url", "warn"
        )
    if answer.status_code in (401, 403):
        return bad(f"{endpoint.url} refuses the key (HTTP {answer.status_code})", f"check what --{path}.key_env names")
    if answer.status_code != 200:
        return bad(f"{where} answers HTTP {answer.status_code}", f"check --{path}.url: it ends in /v1 mostly", "warn")
    if endpoint.model not in models:
        shown = ", ".join(models[:5]) or "none"
        return bad(
            f"{endpoint.url} has no model {endpoint.model!r}; it has {shown}", f"name one of these (--{path}.model)"
        )
    return Finding(name=name, status="ok", found=f"{endpoint.model} at {endpoint.url}")


def check_rows(config: RunConfig) -> Finding:
    """Whether every context fits a row of training."""
    tokens, longest = config.rl.row_tokens, config.agent.max_context_tokens
    if tokens >= longest:
        return Finding(name="rows", status="ok", found=f"{tokens} tokens hold the longest context, {longest}")
    return Finding(
        name="rows",
        status="warn",
        found=f"rl.row_tokens={tokens} is less than agent.max_context_tokens={longest}",
        advice="a turn that is longer than the rows of the first iteration ends the run: give rows the longest context",
    )


# --- All of it --------------------------------------------------------------------------------------------------


def plan_mesh(config: RunConfig, devices: int | None) -> AbstractMesh | None:
    """The mesh to plan for; None on one device.

    Args:
      devices: how many; None for as many as the mesh names, or as there are here if one axis takes the rest.
    Raises:
      ShardingError: if they do not fit together.
    """
    asked = MeshConfig(**dataclasses.asdict(config.mesh))
    sizes = dataclasses.asdict(config.mesh)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    count = devices or (fixed if -1 not in sizes.values() else max(jax.device_count(), fixed))
    found = asked.sizes(count)
    return None if count == 1 else AbstractMesh(tuple(found.values()), AXES)


def check_memory(held: list[Held], mesh: AbstractMesh | None, device_gib: float | None) -> Finding:
    """Whether it fits a device: of `device_gib`, or of those that are here if it is they that are planned for."""
    needed = sum(row.bytes for row in held if row.where == "device") / GIB
    count = 1 if mesh is None else mesh.size
    if device_gib is None and count <= jax.device_count():
        stats = jax.devices()[0].memory_stats() or {}
        device_gib = stats["bytes_limit"] / GIB if "bytes_limit" in stats else None
    if device_gib is None:
        found = f"{needed:.1f} GiB on each of {count} devices, at least"
        return Finding(name="memory", status="ok", found=f"{found}; --device-gib says how much there is")
    found = f"{needed:.1f} of {device_gib:.1f} GiB on each of {count} devices, at least"
    if needed > device_gib:
        return Finding(
            name="memory",
            status="fail",
            found=found,
            advice="more devices, fewer episodes at once (--browser.max_episodes), shorter contexts, bfloat16 "
            "parameters (--dtypes.params), --rl.optimizer_on_host true or --rl.lora_rank",
        )
    return Finding(name="memory", status="ok", found=found)


def dry_run(
    config: RunConfig,
    *,
    devices: int | None = None,
    device_gib: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Prints plan and findings. Gives the exit code: 0 if the run could start, 2 if something must be mended."""
    environment = os.environ if environment is None else environment
    findings = [*check_tasks(config), *check_judges(config, environment), check_rows(config)]
    weights, model, processor = check_weights(config)
    findings.append(weights)
    lines = [f"{config.name}  sha256 {config_hash(config)}", "", *_budget_lines(config)]
    try:
        mesh = plan_mesh(config, devices)
        shown = "one device" if mesh is None else " x ".join(f"{n}={s}" for n, s in mesh.shape.items() if s > 1)
        findings.append(_here(mesh, shown))
        if model is not None:
            held = memory(config, model, processor, mesh)
            lines += ["", *_memory_lines(held, shown)]
            findings.append(check_memory(held, mesh, device_gib))
    except (ShardingError, ValueError) as error:
        advice = "change a size (--mesh.fsdp and so on), the number of devices (--devices) or other settings"
        findings.append(Finding(name="mesh", status="fail", found=str(error), advice=advice))
    lines += ["", format_findings(findings, subject=config.name)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if healthy(findings) else 2


def _here(mesh: AbstractMesh | None, shown: str) -> Finding:
    count, here = 1 if mesh is None else mesh.size, jax.device_count()
    if count <= here:
        return Finding(name="mesh", status="ok", found=shown)
    found = f"{shown}: {count} devices, and this machine has {here}"
    return Finding(name="mesh", status="warn", found=found, advice="this is a plan for a machine that has them")


def _budget_lines(config: RunConfig) -> list[str]:
    lines = [f"budget, with {episodes(config)} episodes at one time"]
    for number, b in enumerate(budgets(config), start=1):
        lines += [
            f"  stage {number}: {b.iterations} iterations, {b.max_steps} turns an episode, learning rate "
            f"{b.learning_rate:g}",
            f"    an iteration: {b.episodes} episodes if every group teaches, {b.most_episodes} at most;",
            f"    up to {b.turns:,} turns in {b.updates} updates, {b.response_tokens:,} tokens of responses, "
            f"{b.context_tokens:,} of contexts",
        ]
    all_of_them = budgets(config)
    lines.append(
        f"  together: {sum(b.iterations * b.episodes for b in all_of_them):,} episodes if every group teaches, up to "
        f"{sum(b.iterations * b.turns for b in all_of_them):,} turns"
    )
    return lines


def _memory_lines(held: list[Held], shown: str) -> list[str]:
    rows = [row for row in held if row.bytes]
    width = max(len(row.what) for row in rows)
    lines = [f"memory of each device, on {shown}, GiB"]
    lines += [
        f"  {row.what:<{width}}  {row.bytes / GIB:9.3f}{'  in host memory' if row.where == 'host' else ''}"
        for row in rows
    ]
    total = sum(row.bytes for row in rows if row.where == "device")
    return [*lines, f"  {'together, at least':<{width}}  {total / GIB:9.3f}"]
