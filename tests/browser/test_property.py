"""Any interleaving of acquire, step, cancel, crash and release, on real Chromium, by seed.

A small world of actors plays: episodes that step or sit, a hand that cancels them (sometimes twice), one that kills
browsers and renderers, one that drops leases without a word. Whatever the order, afterwards every lease is given back,
every episode has exactly one ending, no process of ours and no defunct child is left, and the pool still works.
"""

import asyncio
import contextlib
import random

import psutil
import pytest

from owrl_jax.bench._browser_pages import COUNT, LINK, PageServer
from owrl_jax.browser.config import Deadlines, EngineConfig
from owrl_jax.outcome import Outcome, Reason
from owrl_jax.pool import NoSandbox
from tests.browser.pool_world import click, fresh_tag, kill, local_sandbox, pool_on, tagged, task

pytestmark = pytest.mark.browser

FAST = Deadlines(cdp_s=2.0, call_s=4.0, step_s=8.0, navigation_s=5.0, reset_s=10.0, close_s=3.0)


class Play:
    """One random history."""

    def __init__(self, seed: int, site: PageServer, pool, tag: str) -> None:
        self.rng, self.site, self.pool, self.tag = random.Random(seed), site, pool, tag
        self.held: list = []
        self.tasks: list[asyncio.Task] = []
        self.endings: dict[str, list[Outcome]] = {}
        self.trace: list[str] = []

    async def episode(self, steps: int, path: str) -> None:
        async with self.pool.episode(wait_s=30) as sandbox:
            self.held.append(sandbox)
            results = [await sandbox.reset(task(self.site.url + path))]
            for number in range(steps):
                results.append(await sandbox.step([click(LINK if number % 2 else COUNT)]))
            seen = [r.outcome for r in results if r.outcome is not None]
            assert all(o == seen[0] for o in seen), "an episode that is over keeps its ending"
            if not seen:
                sandbox.finish(Outcome(reason=Reason.STEP_BUDGET, detail="max_steps"))

    async def forget(self) -> None:
        """Takes a lease and never comes back."""
        sandbox = await self.pool.acquire(wait_s=30)
        self.held.append(sandbox)
        await sandbox.reset(task(self.site.url + "/light"))

    async def act(self) -> None:
        kind = self.rng.choices(
            ["start", "cancel", "kill browser", "kill renderer", "forget", "release twice", "pause"],
            [8, 3, 1, 1, 1, 2, 4],
        )[0]
        self.trace.append(kind)
        if kind == "start":
            path = self.rng.choice(["/light", "/late?n=0&ms=200", "/hang", "/light", "/poll"])
            self.tasks.append(asyncio.create_task(self.episode(self.rng.randrange(3), path)))
        elif kind == "forget":
            self.tasks.append(asyncio.create_task(self.forget()))
        elif kind == "cancel" and self.tasks:
            victim = self.rng.choice(self.tasks)
            victim.cancel()
            if self.rng.random() < 0.5:
                await asyncio.sleep(0)
                victim.cancel()
        elif kind.startswith("kill"):
            self.kill(kind)
        elif kind == "release twice" and self.held:
            sandbox = self.rng.choice(self.held)
            self.tasks += [asyncio.create_task(sandbox.close()) for _ in range(2)]
        await asyncio.sleep(self.rng.choice([0.0, 0.01, 0.05, 0.2]))

    def kill(self, kind: str) -> None:
        browsers = tagged(self.tag)
        if not browsers:
            return
        leader = self.rng.choice(browsers)
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if kind == "kill browser":
                kill(leader.pid)
                return
            renderers = [p for p in leader.children(recursive=True) if "--type=renderer" in p.cmdline()]
            if renderers:
                kill(self.rng.choice(renderers).pid)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
async def test_any_order_ends_in_balance(seed):
    async with PageServer() as site:
        tag = fresh_tag()
        async with pool_on(
            engine=EngineConfig(tag=tag),
            sandbox=local_sandbox(site.port, deadlines=FAST, start_attempts=1),
            max_episodes=4,
            contexts_per_browser=2,
            recycle_after=5,
            lease_ttl_s=20.0,
            release_deadline_s=4.0,
        ) as pool:
            play = Play(seed, site, pool, tag)
            for _ in range(25):
                await play.act()
            for one in play.tasks:
                if play.rng.random() < 0.3:
                    one.cancel()
            done = await asyncio.wait_for(asyncio.gather(*play.tasks, return_exceptions=True), 90)
            # Browsers killed as they start, several in a row, are a refusal with its reason; nothing else may happen.
            unexpected = [e for e in done if isinstance(e, Exception) and not isinstance(e, NoSandbox)]
            assert not unexpected, (play.trace, unexpected)
            for sandbox in play.held:
                await sandbox.close()
                assert sandbox.outcome is not None, play.trace
            assert pool.audit().live == 0, play.trace
            await asyncio.sleep(2.1)  # the longest pause after launches that failed here
            async with pool.episode(wait_s=30) as sandbox:
                assert (await sandbox.reset(task(f"{site.url}/light"))).outcome is None, play.trace
