"""`owrl plan`: does an update fit on devices that are not here, what fills them, how fast could it be, what to change.

For TPUs and virtual CPU devices the learner's own programs are compiled and the compiler is asked. For GPUs, whose
programs cannot be compiled without their toolkit, the same shapes and sharding rules are added up; the plan says so.
Times are rooflines, lower bounds: nothing was run. The rollout engine is not in here; give its share as --reserve-gib.
"""

from __future__ import annotations

import dataclasses
import json as json_module
import math
import sys
from typing import Any

from owrl_jax.config import ConfigError, RunConfig, resolve, split_overrides
from owrl_jax.plan.devices import GIB, PlanError, Target, devices, parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is known about an update on a target. Bytes are those of one device.

    Attributes:
      compiled: whether a compiler was asked; else everything but the state is a formula.
      budget: that the update may take.
      peak: largest over the programs; None where the compiler gave up.
      fits: whether it is within the budget.
      refused: what the compiler said when it gave up.
    """

    device: str
    devices: int
    mesh: dict[str, int]
    batch: dict[str, int]
    parameters: int
    compiled: bool
    budget: int
    peak: int | None
    fits: bool
    refused: str
    state: dict[str, int]
    peaks: dict[str, int]
    programs: dict[str, dict[str, Any]]
    flops_micro_step: float
    flops_computed: float
    micro_steps: int
    roofline: dict[str, Any] | None
    collectives: dict[str, dict[str, float]]
    largest_collectives: list[dict[str, Any]]
    largest_arrays: list[dict[str, Any]]
    not_split: list[str]
    advice: list[str]


def make(
    config: RunConfig,
    target: Target,
    *,
    memory_gib: float | None = None,
    reserve_gib: float = 0.0,
    compiling: bool = True,
    progress=lambda line: None,
) -> Plan:
    """The plan of a configuration on a target.

    Raises:
      PlanError, ShardingError, ConfigError: if it cannot be made, with what to do.
    """
    found = devices(target)
    from owrl_jax.models.qwen3_vl.table import parameter_count
    from owrl_jax.plan import arithmetic
    from owrl_jax.plan.programs import compile_all, prepare

    limit = memory_gib if memory_gib is not None else target.chip.memory_gib
    if limit is None:
        raise PlanError(f"--device {target.name!r}: say how much memory one device has, as --memory-gib NUMBER")
    budget = int((limit - reserve_gib) * GIB)
    work = prepare(config, found)
    state = arithmetic.state_bytes(work)
    compiling = compiling and target.chip.kind != "gpu"
    programs = compile_all(work, target, progress) if compiling else {}
    peaks = arithmetic.peaks(work, state, programs)
    refused = " ".join(f"{name}: {_short(p.refused)}" for name, p in programs.items() if p.refused)
    peak = None if refused else max(peaks.values())
    micro = programs.get("micro_step")
    moved = micro.collectives if micro is not None and not micro.refused else arithmetic.traffic(work, target)
    line = arithmetic.roofline(work, target, moved, state)
    kinds: dict[str, dict[str, float]] = {}
    for c in moved:
        kind = kinds.setdefault(c.kind, {"count": 0, "runs": 0, "bytes": 0.0})
        kind["count"], kind["runs"], kind["bytes"] = kind["count"] + 1, kind["runs"] + c.runs, kind["bytes"] + c.bytes
    model_flops, computed = work.flops()
    turns = max(work.pictures, 1) * work.packing.rows
    return Plan(
        device=target.name,
        devices=work.shard.mesh.size,
        mesh=dict(work.shard.mesh.shape),
        batch={
            "rows": work.packing.rows, "tokens": work.packing.tokens, "patches": work.packing.patches,
            "responses": work.packing.responses,
        },
        parameters=parameter_count(work.config),
        compiled=compiling,
        budget=budget,
        peak=peak,
        fits=peak is not None and peak <= budget,
        refused=refused,
        state=dataclasses.asdict(state),
        peaks=peaks,
        programs={
            name: {key: value for key, value in dataclasses.asdict(p).items() if key not in ("collectives", "arrays")}
            for name, p in programs.items()
        },
        flops_micro_step=model_flops,
        flops_computed=computed,
        micro_steps=math.ceil(config.rl.turns_per_update / turns),
        roofline=None if line is None else {**dataclasses.asdict(line), "seconds": line.seconds, "bound": line.bound},
        collectives=kinds,
        largest_collectives=[dataclasses.asdict(c) for c in moved[:8]],
        largest_arrays=[dataclasses.asdict(a) for a in (micro.arrays if micro else ())],
        not_split=work.shard.explain(work.config),
        advice=_advice(config, state, budget, peak, line),
    )  # fmt: skip


def _short(message: str) -> str:
    """The sentence of the compiler that has the numbers."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    chosen = [line for line in lines if "Ran out of memory" in line or "Used" in line or "Exceeded" in line]
    return " ".join(chosen or lines[:1])[:400]


def _advice(config: RunConfig, state: Any, budget: int, peak: int | None, line: Any) -> list[str]:
    """What to change, what helps most first."""
    found = []
    if peak is None or peak > budget:
        held = state.parameters + state.gradients + state.moments
        gib = lambda size: f"{size / GIB:.1f} GiB"  # noqa: E731
        if config.model.remat == "none":
            found.append("--model.remat full: the backward pass keeps only the input of each layer")
        if held > budget:
            found.append(f"parameters, gradients and moments alone take {gib(held)} a device: more devices on fsdp")
        if state.moments:
            found.append(f"--rl.optimizer_on_host true: takes {gib(state.moments)} of moments off each device")
        if config.rl.rows_per_device > 1:
            found.append(f"--rl.rows_per_device {config.rl.rows_per_device // 2}: activations shrink with it")
        elif config.rl.row_tokens > 4096:
            found.append(f"--rl.row_tokens {config.rl.row_tokens // 2}: activations shrink with it")
        if config.dtypes.params == "float32":
            saved = gib(state.parameters / 2)
            found.append(f"--dtypes.params bfloat16: {saved} less, but updates below 1/256 of a weight are lost")
        if config.mesh.context == 1:
            found.append("--mesh.context 2: each row lies on two devices; half the rows at a time")
        return found
    if line is not None and line.bound == "links":
        found.append("links bound the step: --rl.rows_per_device higher, so that a gathered weight does more work")
        if line.far_s > line.near_s:
            found.append("most of it between slices or nodes: set --mesh.replica to their number")
    if peak < budget / 2:
        found.append("more than half of the memory is free: --rl.rows_per_device 2, or --model.remat attention")
    return found


def text(plan: Plan) -> str:
    """The plan for a person."""
    gib = lambda size: f"{size / GIB:8.2f} GiB"  # noqa: E731
    axes = " ".join(f"{name}={size}" for name, size in plan.mesh.items() if size > 1) or "one device"
    batch = plan.batch
    source = "compiled for it" if plan.compiled else "ARITHMETIC ONLY: nothing was compiled, activations are a formula"
    verdict = "fits" if plan.fits else "does not fit"
    most = "more than there is" if plan.peak is None else f"{plan.peak / GIB:.2f} GiB"
    out = [
        f"{plan.device}: {plan.devices} devices, {axes}; {plan.parameters / 1e9:.2f} B parameters; {source}",
        f"batch: {batch['rows']} rows of {batch['tokens']} tokens, {batch['patches']} patches, "
        f"{batch['responses']} response positions; about {plan.micro_steps} micro-steps an update",
        f"{verdict}: {most} of {plan.budget / GIB:.2f} GiB a device",
    ]
    if plan.refused:
        out.append(f"the compiler gave up: {plan.refused}")
    out += ["", "on one device"]
    out += [f"  {name:<22}{gib(size)}" for name, size in plan.state.items() if size and name != "frozen"]
    for name, size in plan.peaks.items():
        program = plan.programs.get(name)
        if program is None:
            out.append(f"  peak of {name:<14}{gib(size)}   by formula")
        else:
            out.append(
                f"  peak of {name:<14}{gib(size)}   temporary {program['temporary'] / GIB:.2f}, donated "
                f"{program['aliased'] / GIB:.2f}, compiled in {program['seconds']:.0f} s"
            )
    if plan.collectives:
        out += ["", "moved over links in a micro-step, received by one device"]
        out += [
            f"  {kind:<22}{gib(c['bytes'])}   {c['runs']:.0f} runs" for kind, c in sorted(
                plan.collectives.items(), key=lambda item: -item[1]["bytes"])
        ]  # fmt: skip
        out += ["  largest"]
        out += [
            f"    {c['kind']} {c['array']} x{c['runs']} over {c['group']}: {c['bytes'] / GIB:.2f} GiB"
            f"{' BETWEEN SLICES' if c['far'] else ''}{' (in a loop of unknown length)' if c['unknown'] else ''}"
            f"   {_place(c['where'])}"
            for c in plan.largest_collectives
        ]
    if plan.largest_arrays:
        out += ["", "largest arrays that a micro-step makes"]
        out += [f"  {a['array']:<34}{gib(a['bytes'])}   {_place(a['where'])}" for a in plan.largest_arrays]
    if plan.roofline is not None:
        line = plan.roofline
        out += [
            "",
            f"at best {line['seconds']:.2f} s a micro-step, by {line['bound']}: arithmetic {line['compute_s']:.2f}, "
            f"memory {line['memory_s']:.2f}, links {line['near_s']:.2f}, between slices {line['far_s']:.2f}; "
            f"MFU at most {line['mfu']:.0%}; nothing was run",
        ]
    out += [f"not split: {reason}" for reason in plan.not_split]
    out += ["", *(f"change: {advice}" for advice in plan.advice)] if plan.advice else []
    return "\n".join(out)


def _place(where: str) -> str:
    """The end of an operation's name."""
    return where if len(where) < 60 else "…" + where[-59:]


def main(argv: list[str]) -> int:
    """`owrl plan`. Exit codes: 0 fits, 1 does not fit, 2 a plan that cannot be made."""
    import tyro

    def run(
        preset: str = "",
        /,
        device: str = "",
        memory_gib: float | None = None,
        reserve_gib: float = 0.0,
        compile: bool = True,
        json: bool = False,
    ) -> int:
        """What an update takes on devices that are not here: memory, collectives, least time, and what to change.

        Any setting can be given as --section.key VALUE, for instance --model.size 8b or --mesh.tensor 2.

        Args:
            preset: name of a preset in configs/, or path of a Python file.
            device: such as v5p:2x2x4, v6e-16, v5e:4x4*2 (two slices), b200:8, cpu:4.
            memory_gib: that one device has; known for TPUs and GPUs.
            reserve_gib: of it for others, such as the rollout engine's weights and pages.
            compile: ask the compiler (minutes); without, everything is arithmetic.
            json: print one JSON object.
        """
        import jax

        jax.config.update("jax_platforms", "cpu")  # what is here, if anything, is not what is planned for
        target = parse(device)
        plan = make(
            resolve(preset or None, overrides), target, memory_gib=memory_gib, reserve_gib=reserve_gib,
            compiling=compile, progress=lambda line: print(f"owrl plan: {line}", file=sys.stderr, flush=True),
        )  # fmt: skip
        print(json_module.dumps(dataclasses.asdict(plan)) if json else text(plan))
        return 0 if plan.fits else 1

    try:
        overrides, rest = split_overrides(argv)
        return tyro.cli(run, args=rest, prog="owrl plan")
    except ValueError as error:  # of the configuration, the model, the mesh or the device
        if not isinstance(error, ConfigError | PlanError) and type(error).__module__.partition(".")[0] != "owrl_jax":
            raise
        print(f"owrl plan: {error}", file=sys.stderr)
        return 2
