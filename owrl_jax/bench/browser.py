"""Steps, starts, memory and throughput of the browser sandbox, against raw CDP and the reference system's waits.

    owrl bench browser [--repeat N] [--quick] [--json]

Everything happens on loopback in one run: a page server, the sandbox on a warm browser, the floor (raw CDP input and
one capture on the same browser) and the peer (plain Playwright with the reference's waits; one process, server and
browser per episode for the starts). `--repeat` is the number of timed steps per action and page, times four. What the
pages are is in `_browser_pages`, how a step is timed in `_browser_steps`, how starts and memory are in
`_browser_load`.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from owrl_jax.bench import _browser_load as load
from owrl_jax.bench import _browser_steps as steps_of
from owrl_jax.bench._browser_pages import PageServer
from owrl_jax.bench._browser_steps import ACTIONS, PAGES, Cells
from owrl_jax.bench.report import BenchResult, Goal, Row

# Where nothing is pending after the action, so that only our own work may be added to the floor.
_QUIET = tuple(("light", action) for action in ACTIONS if action != "click_navigate")


def run(*, repeat: int, quick: bool) -> BenchResult:
    """Measures everything.

    Args:
      repeat: a quarter of the timed steps per cell.
      quick: few steps, small starts, only to see that it runs.
    Raises:
      BrowserMissing: with what to do about it.
    """
    return asyncio.run(_run(repeat=repeat, quick=quick))


async def _run(*, repeat: int, quick: bool) -> BenchResult:
    from owrl_jax.browser.engine import BrowserEngine
    from owrl_jax.browser.sandbox import Sandbox

    sizes = [2] if quick else [1, 8, 32]
    steps = 1 if quick else 4 * repeat
    late_steps = 12 if quick else 500
    peer_pages = ("light",) if quick else PAGES  # the others take the peer a minute
    async with PageServer() as server:
        engine = BrowserEngine()
        await engine.start()
        assert engine.binary is not None
        binary, version, begin_frame = engine.binary.path, engine.version, engine.begin_frame
        config = steps_of.config_for(server)
        make: Callable[[], Any] = lambda: Sandbox(engine, config)  # noqa: E731 - three users below
        try:
            ours = await steps_of.ours(make, server, steps=steps)
            floor = await steps_of.floor(engine, server, steps=steps)
        finally:
            await engine.close()
        stale, empty, late = await load.late(server, steps=late_steps)
        peer = await steps_of.peer(binary, server, steps=1 if quick else 3, pages=peer_pages)
        rows, goals = _step_rows(ours, floor, peer)
        rows.append(
            Row(
                name=f"late_pictures_wrong/of_{late_steps}",
                ours=stale + empty,
                extra={"stale": stale, "empty": empty},
            )
        )
        rows.append(Row(name="late_step_ms/4_at_once", ours=late.p50, extra={"p95": late.p95, "max": max(late.ms)}))
        goals.append(Goal(name="late_pictures_wrong", value=stale + empty, goal=0, better="lower", unit="pictures"))
        more_rows, more_goals = await _load(server, binary, sizes=sizes, seconds=1.0 if quick else 8.0)
    settings = {
        "quick": quick,
        "browser": version,
        "frames_on_request": begin_frame,
        "viewport": "1280x1000",
        "steps_per_cell": steps,
        "peer_screenshot_timeout_s": steps_of.PEER_SCREENSHOT_S,
        "peer_start": "uvicorn + Playwright launch per episode, without the reference's second navigation and sleeps",
    }
    return BenchResult(bench="browser", settings=settings, rows=(*rows, *more_rows), goals=(*goals, *more_goals))


def _step_rows(ours: Cells, floor: Cells, peer: Cells) -> tuple[list[Row], list[Goal]]:
    rows = []
    for page, action in ours:
        mine, low, theirs = ours[page, action], floor[page, action], peer.get((page, action))
        extra = {"p95": mine.p95, "min": min(mine.ms), "max": max(mine.ms), "floor_p95": low.p95}
        rows.append(
            Row(
                name=f"step_ms/{action}/{page}",
                ours=mine.p50,
                floor=low.p50,
                peer=theirs.p50 if theirs else None,
                extra=extra,
            )
        )
    over = max(ours[cell].p50 - 1.5 * floor[cell].p50 for cell in _QUIET)
    ratios = [peer[cell].p50 / ours[cell].p50 for cell in peer]
    mean = math.exp(sum(math.log(r) for r in ratios) / len(ratios))
    goals = [
        Goal(name="step_over_1.5x_floor_quiet_page", value=over, goal=150.0, better="lower", unit="ms"),
        Goal(name="step_vs_reference_waits_mean", value=mean, goal=10.0, better="higher", unit="x"),
        Goal(name="step_vs_reference_waits_worst_cell", value=min(ratios), goal=10.0, better="higher", unit="x"),
    ]
    return rows, goals


async def _load(
    server: PageServer, binary: str, *, sizes: Sequence[int], seconds: float
) -> tuple[list[Row], list[Goal]]:
    rows, goals = [], []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for episodes in sizes:
        warm, memory = await load.start_ours(server, episodes, warm=True)
        cold, _ = await load.start_ours(server, episodes, warm=False)
        theirs, their_memory = await load.start_peer(binary, server, episodes)
        rows.append(
            Row(
                name=f"start_s_last/{episodes}_at_once",
                ours=max(warm),
                peer=max(theirs),
                extra={"cold_pool": max(cold)},
            )
        )
        rows.append(Row(name=f"pss_mib_per_episode/{episodes}_at_once", ours=memory, peer=their_memory))
        if episodes == 8 or (len(sizes) < 3 and episodes == sizes[-1]):
            goal = f"start_vs_process_per_episode_at_{episodes}"
            goals.append(Goal(name=goal, value=max(theirs) / max(warm), goal=5.0, better="higher", unit="x"))
    episodes = 2 * cores
    ours = await load.throughput(server, episodes=episodes, seconds=seconds)
    floor = await load.raw_throughput(server, episodes=episodes, seconds=seconds)
    rows.append(Row(name=f"steps_per_s_per_core/{episodes}_at_once", ours=ours / cores, floor=floor / cores))
    return rows, goals
