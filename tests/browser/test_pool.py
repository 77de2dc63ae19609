"""The pool on real Chromium: warm browsers, fresh contexts, recycling, crashes that stay local, nothing left behind."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from owrl_jax.bench._browser_pages import COUNT, Answer, PageServer
from owrl_jax.browser.config import Deadlines
from owrl_jax.browser.process import TAG_FLAG, sweep
from owrl_jax.pool import NoSandbox
from tests.browser.pool_world import (
    NO_CPU_LIMIT,
    click,
    defunct,
    ending,
    eventually,
    freeze,
    fresh_tag,
    kill,
    local_sandbox,
    observed,
    picture,
    pool_on,
    tagged,
    task,
)

pytestmark = pytest.mark.browser


@pytest.fixture
async def site():
    async with PageServer() as server:
        yield server


async def test_an_episode_from_start_to_end(site):
    async with pool_on(site.port) as pool, pool.episode() as sandbox:
        first = await sandbox.reset(task(f"{site.url}/light"))
        assert first.outcome is None and first.observation is not None
        assert first.observation.active_tab.title == "light 0"
        after = await sandbox.step([click(COUNT)])
        assert [r.status.value for r in after.results] == ["ok"] and after.observation is not None
        assert picture(after) != picture(first)
        assert site.hits["/light"] == 1, "one navigation per episode"
        assert pool.engines(), "the browser is still up"


async def test_browsers_are_warm_before_anyone_asks(site):
    async with pool_on(site.port, max_episodes=8, min_ready=2) as pool:
        await eventually(lambda: pool.audit().browsers == {"ready": 2}, 15)
        began = time.monotonic()
        async with pool.episode() as sandbox:
            assert (await sandbox.reset(task(f"{site.url}/light"))).outcome is None
        assert time.monotonic() - began < 5 and pool.counts().launches == 2


async def test_each_episode_starts_with_nothing_of_the_last(site):
    """Same browser, next episode: no cookie, no storage, no history."""
    body = (
        b"<script>document.title=document.cookie+localStorage.length+history.length;"
        b"document.cookie='a=1';localStorage.b=2</script><h1>A page that remembers</h1><p>if it can.</p>"
    )
    site.answers["/memory"] = Answer(body=body)
    async with pool_on(site.port, max_episodes=1, contexts_per_browser=1) as pool:
        titles, pids = set(), set()
        for _ in range(3):
            async with pool.episode() as sandbox:
                titles.add(observed(await sandbox.reset(task(f"{site.url}/memory"))).active_tab.title)
                pids |= {engine.pid for engine in pool.engines().values()}
    assert len(titles) == 1 and titles.pop().startswith("0"), "no cookie before the zero of an empty storage"
    assert len(pids) == 1


async def test_recycling_replaces_the_process(site):
    async with pool_on(site.port, max_episodes=1, contexts_per_browser=1, recycle_after=2) as pool:
        pids = []
        for _ in range(5):
            async with pool.episode() as sandbox:
                assert (await sandbox.reset(task(f"{site.url}/light"))).outcome is None
                pids += [e.pid for g, e in pool.engines().items() if g == sandbox.lease.generation]
        assert [pids.count(p) for p in dict.fromkeys(pids)] == [2, 2, 1]
        await eventually(lambda: not any(psutil.pid_exists(p) for p in pids[:4]))


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_a_browser_that_breaks_takes_only_its_own_episodes(site, fault):
    """Two browsers of two episodes. One is hit in the middle of a step; the other two episodes notice nothing."""
    site.answers["/slow"] = Answer(body=b"<title>slow</title><script>fetch('/hang')</script>")
    fast = Deadlines(cdp_s=2.0, call_s=3.0, step_s=6.0, navigation_s=5.0, close_s=2.0)
    sandbox = local_sandbox(site.port, deadlines=fast)
    async with pool_on(sandbox=sandbox, max_episodes=4, contexts_per_browser=2, min_ready=2) as pool:
        await eventually(lambda: pool.audit().browsers.get("ready") == 2, 15)
        held = [await pool.acquire() for _ in range(4)]
        await asyncio.gather(*(s.reset(task(f"{site.url}/light")) for s in held))
        hit = held[0].lease.generation
        engine = pool.engines()[hit]
        (kill if fault == "killed" else freeze)(engine.pid if fault == "killed" else engine.pgid)
        began = time.monotonic()
        results = await asyncio.gather(*(s.step([click(COUNT)]) for s in held))
        for sandbox, result in zip(held, results, strict=True):
            if sandbox.lease.generation == hit:
                outcome = ending(result)
                assert (
                    outcome.reason.value == "sandbox_error" and outcome.owner.value == "sandbox" and outcome.retryable
                )
                assert len(result.results) == 1
            else:
                assert result.outcome is None
        assert time.monotonic() - began < (3 if fault == "killed" else 12)
        await asyncio.gather(*(s.close() for s in held))
        await eventually(lambda: not psutil.pid_exists(engine.pid or 0), 15)
        async with pool.episode() as sandbox:
            assert (await sandbox.reset(task(f"{site.url}/light"))).outcome is None


async def test_no_browser_is_told_at_once(tmp_path, site):
    from owrl_jax.browser.config import EngineConfig

    engine = EngineConfig(browser=str(tmp_path / "none"), tag=fresh_tag())
    async with pool_on(site.port, engine=engine) as pool:
        with pytest.raises(NoSandbox) as refused:
            await pool.acquire(wait_s=30)
        assert refused.value.outcome.key == "init_error/browser_missing" and not refused.value.outcome.retryable
        assert "owrl browser install" in refused.value.outcome.message


async def test_cancellation_storm(site):
    """Thirty-two episodes that start and finish, each cancelled twice at its own moment (user report T24)."""
    loop = asyncio.get_running_loop()
    assert type(loop).__module__.startswith("asyncio"), "the standard loop"
    async with pool_on(site.port, max_episodes=6, contexts_per_browser=3, recycle_after=6) as pool:

        async def episode():
            async with pool.episode() as sandbox:
                await sandbox.reset(task(f"{site.url}/light"))
                await sandbox.step([click(COUNT)])

        running = [asyncio.create_task(episode()) for _ in range(32)]
        for number, one in enumerate(running):
            await asyncio.sleep(0.02 * (number % 5))
            one.cancel()
            await asyncio.sleep(0)
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await eventually(lambda: pool.audit().live == 0, 20)
        async with pool.episode() as sandbox:
            assert (await sandbox.reset(task(f"{site.url}/light"))).outcome is None
        audit = pool.audit()
        assert audit.acquired == audit.released + audit.live


WORKER = """
    import asyncio, json, sys
    from tests.browser.pool_world import pool_on, task
    from owrl_jax.browser.config import EngineConfig

    async def main(port, tag):
        sizes = {"max_episodes": 4, "contexts_per_browser": 2, "min_ready": 2}
        async with pool_on(port, engine=EngineConfig(tag=tag), **sizes) as pool:
            async with pool.episode() as one, pool.episode() as two:
                await asyncio.gather(*(s.reset(task(f"http://127.0.0.1:{port}/light")) for s in (one, two)))
                print(json.dumps([e.pid for e in pool.engines().values()]), flush=True)
                await asyncio.sleep(600)

    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
"""


async def test_a_killed_worker_leaves_nothing(site):
    """SIGKILL to the process that holds the pool (user report T30): five seconds later nothing of it is there."""
    tag = fresh_tag()
    worker = subprocess.Popen(  # noqa: ASYNC220 - it must be an ordinary process, to be killed like one
        [sys.executable, "-c", textwrap.dedent(WORKER), str(site.port), tag],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    )
    try:
        assert worker.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(worker.stdout.readline), 60)
        pids = json.loads(line)
        family = psutil.Process(worker.pid).children(recursive=True)
        assert tagged(tag) and {p.pid for p in family} >= set(pids)
        worker.kill()
        worker.wait()
        await eventually(lambda: tagged(tag) == [], 5)
        await eventually(
            lambda: not any(p.is_running() and p.status() != "zombie" for p in family if p.is_running()), 5
        )
        assert sweep(tag) == [] and defunct() == []
    finally:
        worker.kill()


def test_the_sweep_takes_orphans_of_ours_alone():
    """Four programs: an orphan of ours, one with a living parent, somebody else's, one whose tag begins like ours."""
    tag = fresh_tag()
    orphan = textwrap.dedent(
        """
        import os, subprocess, sys
        sleep = [sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]]
        null = subprocess.DEVNULL
        child = subprocess.Popen(sleep, start_new_session=True, stdout=null, stderr=null)
        print(child.pid, flush=True)
        """
    )

    def orphaned(flag):
        done = subprocess.run([sys.executable, "-c", orphan, flag], capture_output=True, text=True, check=True)
        return int(done.stdout)

    flag = f"{TAG_FLAG}={tag}"
    ours, theirs, longer = orphaned(flag), orphaned(f"{TAG_FLAG}=someone-else"), orphaned(flag + "-2")
    held = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", flag], start_new_session=True)
    try:
        end = time.monotonic() + 5
        while any(psutil.Process(p).ppid() == os.getpid() for p in (ours, theirs, longer)):
            assert time.monotonic() < end
            time.sleep(0.02)
        assert sweep(tag) == [ours]
        time.sleep(0.2)
        alive = [
            psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in (ours, theirs, longer, held.pid)
        ]
        assert alive == [False, True, True, True]
    finally:
        for pid in (theirs, longer):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        held.kill()
        held.wait()


async def test_the_concurrency_setting_is_logged_once_with_its_effect(site, caplog):
    with caplog.at_level("INFO", logger="owrl_jax.pool.sandboxes"):
        async with pool_on(site.port, max_episodes=5, contexts_per_browser=2, pressure=NO_CPU_LIMIT) as pool:
            await pool.start()
    lines = [r.getMessage() for r in caplog.records if "episodes at once" in r.getMessage()]
    assert len(lines) == 1 and "at most 5 episodes at once on 3 browsers of 2 contexts" in lines[0]
