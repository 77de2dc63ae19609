"""Oracle episodes a minute on local worlds, reset times, and where the time of an episode goes.

    owrl bench episode [--repeat N] [--quick] [--json]

Everything happens on loopback in one run: world server, pool of warm browsers, harness, and the worlds' own oracles in
the policy's place. So what is measured is all that a training run pays besides the model. At 1, 4 and 8 sessions at
once, on the shop (its templates in turn, 1280 x 1000) and on those MiniWoB++ click tasks that have an oracle (160 x 210
at four device pixels each). `--repeat` times four is the seconds per case.

The floor is one session of sandbox and oracle without a harness. Shares are of the episodes' own time: `harness` is
prompt, parsing and whatever no phase claims; `policy` is the oracle, which looks at the page by script; `browser` is
reset, steps and release, with `settle`, the waiting for the page, as a part of it; `queue` is the wait for a sandbox;
`site` is what the world server computes, inside the browser's share. `processor` rows are shares of all cores; what is
left is idle, or used by others on the machine.
"""

from __future__ import annotations

import asyncio
import os
import statistics

from owrl_jax.bench import _episode_run as runs
from owrl_jax.bench.report import BenchResult, Goal, Row
from owrl_jax.worlds import miniwob, templates
from owrl_jax.worlds.miniwob_oracle import SOLVERS

HARNESS_GOAL = 0.03
CLICK_GOAL = 60.0
_PER_TURN = {"harness": runs.HARNESS, "policy": ("generate",), "step": ("step",)}


def run(*, repeat: int, quick: bool) -> BenchResult:
    """Measures everything.

    Args:
      repeat: a quarter of the seconds that each case is run.
      quick: two sessions for a moment, only to see that it runs.
    Raises:
      BrowserMissing: with what to do about it.
    """
    return asyncio.run(_run(repeat=repeat, quick=quick))


async def _run(*, repeat: int, quick: bool) -> BenchResult:
    from owrl_jax.obs.explain import small_tokenizer

    sizes = (2,) if quick else (1, 4, 8)
    seconds = 3.0 if quick else 4.0 * repeat
    tokens = small_tokenizer()
    worlds = {"shop": [("shop", kind) for kind in templates("shop")]}
    notes = {}
    if miniwob.installed():
        clicks = sorted(name for name in SOLVERS if name.startswith("click-"))
        worlds["miniwob_click"] = [(miniwob.NAME, name) for name in clicks]
    else:
        notes["miniwob"] = "not installed: pip install miniwob"
    rows: list[Row] = []
    goals: list[Goal] = []
    shares: list[float] = []
    for world, tasks in worlds.items():
        best = 0.0
        for sessions in sizes:
            async with runs.rig(tasks, tokens, sessions=sessions) as rig:
                floor = await rig.bare(seconds) if sessions == sizes[0] else None
                crowd = await rig.crowd(sessions, seconds)
            rows += _rows(f"{world}/{sessions}_at_once", crowd, floor)
            best = max(best, crowd.per_minute)
            shares.append(crowd.share(*runs.HARNESS))
        if world == "miniwob_click":
            name = "miniwob_click_episodes_per_minute"
            goals.append(Goal(name=name, value=best, goal=CLICK_GOAL, better="higher", unit="1/min"))
    goals.append(
        Goal(name="harness_share_of_episode", value=max(shares), goal=HARNESS_GOAL, better="lower", unit="of 1")
    )
    settings = {"quick": quick, "seconds_per_case": seconds, "policy": "oracle", "tokenizer": "small", **notes}
    return BenchResult(bench="episode", settings=settings, rows=tuple(rows), goals=tuple(goals))


def _rows(case: str, crowd: runs.Crowd, floor: float | None) -> list[Row]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    turns = max(crowd.turns, 1)
    resets = [p.ms("reset") for p in crowd.played]
    parts = {
        "harness": crowd.share(*runs.HARNESS),
        "policy": crowd.share("generate"),
        "browser": crowd.share(*runs.BROWSER),
        "settle": crowd.share("step.settle"),
        "queue": crowd.share("queue"),
        "site": crowd.site_s * 1e3 / sum(p.ms("total") for p in crowd.played),
    }
    per_turn = {name: sum(p.ms(*phases) for p in crowd.played) / turns for name, phases in _PER_TURN.items()}
    return [
        Row(
            name=f"episodes_per_minute/{case}",
            ours=crowd.per_minute,
            floor=floor,
            extra={"solved": crowd.solved, "turns_each": turns / len(crowd.played)},
        ),
        Row(name=f"reset_ms/{case}", ours=statistics.median(resets), extra={"max": max(resets)}),
        Row(name=f"reset_ms_world_state/{case}", ours=statistics.median(p.opened_ms for p in crowd.played)),
        *(Row(name=f"{name}_ms_per_turn/{case}", ours=ms) for name, ms in per_turn.items()),
        *(Row(name=f"share_of_time/{case}/{name}", ours=share) for name, share in parts.items()),
        *(
            Row(name=f"processor/{case}/{name}", ours=spent / (crowd.seconds * cores))
            for name, spent in crowd.cpu_s.items()
        ),
    ]
