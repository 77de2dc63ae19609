"""Hundreds of episodes of mixed pages through one pool: memory and process count are flat once browsers are recycled.

The short form runs with every suite; the long one (300 episodes, field study scenario 20 and user report T29) is marked
slow. The pages include a heavy one of five megabytes, one that polls for ever, one that fills late, one that hangs and
one that crashes its renderer.
"""

import asyncio
import statistics
import time

import psutil
import pytest

from owrl_jax.bench._browser_pages import COUNT, LINK, Answer, PageServer
from owrl_jax.browser.config import Deadlines, EngineConfig
from tests.browser.pool_world import click, defunct, fresh_tag, local_sandbox, pool_on, tagged, task

pytestmark = pytest.mark.browser

RECYCLE = 10
DEADLINES = Deadlines(cdp_s=3.0, call_s=5.0, step_s=10.0, navigation_s=1.5, reset_s=8.0, close_s=3.0)


def heavy_page() -> bytes:
    """Five megabytes of text and a script that keeps a copy of it."""
    words = b"<p>" + b"lorem ipsum dolor sit amet " * 40 + b"</p>\n"
    script = b"<script>window.kept=document.documentElement.outerHTML.repeat(2)</script>"
    return b"<!doctype html><title>heavy</title>" + words * (5_000_000 // len(words)) + script


def mix(number: int) -> str:
    paths = ("/light", "/late?n=0&ms=100", "/light", "/heavy", "/light", "/poll", "/light", "/late?n=0&ms=60")
    return "/hang" if number % 40 == 17 else paths[number % len(paths)]


async def soak(episodes: int) -> list[tuple[float, float, int]]:
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
            recycle_after=RECYCLE,
        ) as pool:
            numbers = iter(range(episodes))

            async def worker() -> None:
                for number in numbers:
                    async with pool.episode() as sandbox:
                        first = await sandbox.reset(task(site.url + mix(number)))
                        if first.outcome is None:
                            await sandbox.step([click(COUNT)])
                            await sandbox.step([click(LINK)])
                    below = us.children(recursive=True)
                    rss = 0.0
                    for process in below:
                        try:
                            rss += process.memory_info().rss / 2**20
                        except psutil.NoSuchProcess:
                            continue
                    looks.append((us.memory_info().rss / 2**20, rss, len(below)))

            await asyncio.gather(worker(), worker())
            assert pool.counts().ended >= episodes // RECYCLE - 3, "browsers were recycled on the way"
            assert len(tagged(tag)) > 0 and defunct() == []
            outcomes = pool.outcomes()
            assert sum(outcomes.values()) == episodes
            bad = {k: n for k, n in outcomes.items() if k.startswith("sandbox_error")}
            assert not bad, outcomes
    return looks


def assert_flat(looks: list[tuple[float, float, int]]) -> None:
    """After the first recycling the second half is as high as the first, but for noise."""
    settled = looks[2 * RECYCLE :]
    half = len(settled) // 2
    for column, name, slack in (
        (0, "this process, MiB", 25.0),
        (1, "processes below, MiB", 150.0),
        (2, "processes", 3.0),
    ):
        early = statistics.median(row[column] for row in settled[:half])
        late = statistics.median(row[column] for row in settled[half:])
        assert late <= early * 1.1 + slack, f"{name}: median {early:.0f}, then {late:.0f}"


async def test_forty_episodes_stay_flat():
    assert_flat(await soak(40))


@pytest.mark.slow
async def test_three_hundred_episodes_stay_flat():
    began = time.monotonic()
    looks = await soak(300)
    assert_flat(looks)
    assert time.monotonic() - began < 300
