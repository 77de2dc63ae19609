"""Hundreds of episodes of mixed pages through one pool: memory and process count are flat once browsers are recycled.

The short form runs with every suite; the long one (300 episodes, 200 of them on a page of five megabytes) is marked
slow. The other pages: a light one, one that polls for ever, one that fills late, and one that never answers.
"""

import asyncio
import statistics
import time
from collections.abc import Callable

import psutil
import pytest

from owrl_jax.bench._browser_pages import COUNT, LINK, Answer, PageServer
from owrl_jax.browser.config import Deadlines, EngineConfig
from tests.browser.pool_world import click, defunct, fresh_tag, local_sandbox, pool_on, tagged, task

pytestmark = pytest.mark.browser

DEADLINES = Deadlines(cdp_s=3.0, call_s=5.0, step_s=10.0, navigation_s=1.5, reset_s=8.0, close_s=3.0)


def heavy_page() -> bytes:
    """Five megabytes, most of them in a script that keeps them and a copy: memory is tested here, not layout."""
    words = b"lorem ipsum dolor sit amet " * 40
    text = b"<p>" + words + b"</p>" + b"<h1>heavy</h1>"
    script = b"<script>window.kept='" + words * (5_000_000 // len(words)) + b"'.split('').join('')</script>"
    return b"<!doctype html><title>heavy</title>" + text + script


def mixed(number: int) -> str:
    """All kinds of pages."""
    paths = ("/light", "/late?n=0&ms=100", "/light", "/heavy", "/light", "/poll", "/light", "/late?n=0&ms=60")
    return "/hang" if number % 40 == 17 else paths[number % len(paths)]


def mostly_heavy(number: int) -> str:
    """Two of three are the page of five megabytes."""
    return mixed(number) if number % 3 == 0 else "/heavy"


async def soak(episodes: int, path: Callable[[int], str], recycle: int) -> list[tuple[float, float, int]]:
    """(our resident memory, that of all processes below us, their number) after each episode."""
    tag, looks = fresh_tag(), []
    us = psutil.Process()
    async with PageServer() as site:
        site.answers["/heavy"] = Answer(body=heavy_page())
        async with pool_on(
            engine=EngineConfig(tag=tag),
            sandbox=local_sandbox(site.port, deadlines=DEADLINES, start_attempts=1),
            max_episodes=2,
            contexts_per_browser=2,
            recycle_after=recycle,
        ) as pool:
            numbers = iter(range(episodes))

            async def worker() -> None:
                for number in numbers:
                    async with pool.episode() as sandbox:
                        first = await sandbox.reset(task(site.url + path(number)))
                        if first.outcome is None:
                            await sandbox.step([click(LINK if number % 2 else COUNT)])
                    below = us.children(recursive=True)
                    rss = 0.0
                    for process in below:
                        try:
                            rss += process.memory_info().rss / 2**20
                        except psutil.NoSuchProcess:
                            continue
                    looks.append((us.memory_info().rss / 2**20, rss, len(below)))

            await asyncio.gather(worker(), worker())
            assert pool.counts().ended >= episodes // recycle - 3, "browsers were recycled on the way"
            assert len(tagged(tag)) > 0 and defunct() == []
            outcomes = pool.outcomes()
            assert sum(outcomes.values()) == episodes
            bad = {k: n for k, n in outcomes.items() if k.startswith("sandbox_error")}
            assert not bad, outcomes
    return looks


def assert_flat(looks: list[tuple[float, float, int]], settled_after: int) -> None:
    """After the first recycling the second half is as high as the first, but for noise."""
    settled = looks[settled_after:]
    half = len(settled) // 2
    for column, name, slack in (
        (0, "this process, MiB", 25.0),
        (1, "processes below, MiB", 150.0),
        (2, "processes", 3.0),
    ):
        early = statistics.median(row[column] for row in settled[:half])
        late = statistics.median(row[column] for row in settled[half:])
        assert late <= early * 1.1 + slack, f"{name}: median {early:.0f}, then {late:.0f}"


async def test_a_short_soak_stays_flat():
    assert_flat(await soak(20, mixed, recycle=4), settled_after=8)


@pytest.mark.slow
async def test_three_hundred_episodes_stay_flat():
    """Two hundred of them on the heavy page."""
    began = time.monotonic()
    assert_flat(await soak(300, mostly_heavy, recycle=20), settled_after=60)
    assert time.monotonic() - began < 300
