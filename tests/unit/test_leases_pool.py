"""The pool's queueing and lease logic, with engines that are switches instead of processes.

What only real processes can show (nothing left behind, crashes, memory) is in tests/browser; here every interleaving is
under the test's control.
"""

import asyncio
import random

import pytest

from owrl_jax.outcome import Outcome, Reason
from owrl_jax.pool import NoSandbox, SandboxPool, SandboxPoolConfig
from owrl_jax.pool.pressure import Load, PressureConfig
from owrl_jax.types import Observation, StepResult, Tab, Task, ToolCall

TASK = Task(id="t", instruction="look", start_url="http://127.0.0.1/")
CALL = ToolCall(name="wait", arguments={"seconds": 0})
SEEN = Observation(screenshot=None, screen_size=(1, 1), tabs=(Tab(index=0, url="", title="", active=True),))


class FakeEngine:
    pid = pgid = None

    def __init__(self, house):
        self.house, self.alive, self.answers, self.closed, self.rss = house, False, True, 0, 100.0
        house.engines.append(self)

    def rss_mib(self):
        return self.rss

    async def start(self):
        self.house.launching += 1
        self.house.most_launching = max(self.house.most_launching, self.house.launching)
        try:
            await asyncio.sleep(self.house.launch_s)
            if self.house.launch_error:
                raise self.house.launch_error
            self.alive = True
        finally:
            self.house.launching -= 1

    async def close(self):
        self.closed += 1
        self.alive = False
        await asyncio.sleep(0)


class FakeSandbox:
    """A sandbox whose steps last as long as its gate is shut."""

    def __init__(self, house, engine):
        self.house, self.engine, self.closed = house, engine, 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.next_outcome, self.error, self.close_s = None, None, 0.0

    async def reset(self, task):
        return await self.step(())

    async def step(self, calls):
        await self.gate.wait()
        if self.error:
            raise self.error
        return StepResult(results=(), observation=SEEN, outcome=self.next_outcome)

    async def close(self):
        self.closed += 1
        await asyncio.sleep(self.close_s)


class House:
    """Everything a test turns: launch time and errors, load, and the engines made so far."""

    def __init__(self, *, cores=2, **config):
        self.engines, self.launching, self.most_launching = [], 0, 0
        self.launch_s, self.mem = 0.0, 0.1
        self.launch_error: Exception | None = None
        settings = {
            "max_episodes": 2,
            "contexts_per_browser": 2,
            "launch_jitter_s": 0.0,
            "tick_s": 0.01,
            "release_deadline_s": 0.2,
            "min_ready": 0,
            "launch_parallel": 1,
            "pressure": PressureConfig(cpu_high=1.0, cpu_low=1.0),
        }
        self.pool = SandboxPool(
            SandboxPoolConfig(**{**settings, **config}),
            make_engine=lambda: FakeEngine(self),
            open_sandbox=lambda engine: FakeSandbox(self, engine),
            probe=self.probe,
            missing=lambda error: isinstance(error, FileNotFoundError),
            load=lambda: Load(cpu=0.0, mem=self.mem, mem_total_mib=8000.0),
            cores=cores,
        )

    async def probe(self, engine):
        return engine.answers

    async def __aenter__(self):
        await self.pool.start()
        return self

    async def __aexit__(self, *_):
        await self.pool.close()
        audit = self.pool.audit()
        assert audit.balanced and audit.live == 0, audit
        assert sum(self.pool.outcomes().values()) == audit.released, "exactly one outcome per episode"
        assert not any(engine.alive for engine in self.engines)
        assert all(engine.closed == 1 for engine in self.engines), "every engine is closed exactly once"


def ending(result_or_sandbox) -> Outcome:
    assert result_or_sandbox.outcome is not None
    return result_or_sandbox.outcome


async def eventually(condition, seconds=2.0):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def test_places_are_given_in_order_and_never_more_than_the_one_limit():
    async with House(max_episodes=2) as house:
        order, most = [], 0

        async def episode(name):
            nonlocal most
            async with house.pool.episode() as sandbox:
                order.append(name)
                most = max(most, house.pool.audit().live)
                await sandbox.step((CALL,))
                await asyncio.sleep(0.002)

        await asyncio.gather(*(episode(n) for n in range(12)))
        assert order == list(range(12))
        assert most == 2
        assert house.pool.sizes.max_browsers == 2, (
            "two cores, two episodes: one browser each is faster than one for both"
        )


async def test_launches_pass_their_own_semaphore():
    house = House(max_episodes=8, contexts_per_browser=1, min_ready=8, launch_parallel=2)
    house.launch_s = 0.01
    async with house:
        await eventually(lambda: house.pool.counts().launches == 8 and house.launching == 0)
    assert house.most_launching == 2


async def test_asked_at_once_it_says_at_once_that_it_is_full():
    async with House(max_episodes=1) as house:
        async with house.pool.episode() as _:
            with pytest.raises(NoSandbox) as refused:
                await house.pool.acquire(wait_s=0)
            assert refused.value.outcome.key == "init_error/no_capacity" and refused.value.outcome.retryable
            assert "max_episodes" in refused.value.outcome.message
            reading = house.pool.reading()
            assert (reading.available, reading.reason, reading.rejected_recently) == (False, "full", 1)
        assert house.pool.reading().available


async def test_a_queue_that_is_full_refuses_the_next():
    async with House(max_episodes=1, max_waiting=1) as house, house.pool.episode():
        waiting = asyncio.create_task(house.pool.acquire())
        await asyncio.sleep(0)
        with pytest.raises(NoSandbox, match="waiting already"):
            await house.pool.acquire()
        waiting.cancel()
        await asyncio.wait({waiting})


async def test_pressure_holds_back_all_but_the_first_and_lets_go():
    async with House(max_episodes=4) as house:
        house.mem = 0.99
        async with house.pool.episode():
            await asyncio.sleep(0.05)
            waiting = asyncio.create_task(house.pool.acquire())
            await asyncio.sleep(0.05)
            assert not waiting.done() and house.pool.reading().reason == "memory"
            house.mem = 0.1
            await (await asyncio.wait_for(waiting, 2)).close()


@pytest.mark.parametrize(
    ("error", "detail", "launches"),
    [(RuntimeError("boom"), "launch_failed", 2), (FileNotFoundError("x"), "browser_missing", 1)],
)
async def test_when_no_browser_starts_the_waiting_are_told_why(error, detail, launches):
    house = House(launch_attempts=2)
    house.launch_error = error
    async with house:
        with pytest.raises(NoSandbox) as refused:
            await house.pool.acquire(wait_s=5)
        outcome = refused.value.outcome
        assert outcome.key == f"init_error/{detail}" and outcome.owner.value == "sandbox"
        assert type(error).__name__ in outcome.message and outcome.traceback
        assert house.pool.counts().launch_failures == launches


async def test_after_failed_launches_it_recovers():
    house = House(launch_attempts=3)
    house.launch_error = RuntimeError("not yet")
    async with house:
        waiting = asyncio.create_task(house.pool.acquire())
        await eventually(lambda: house.pool.counts().launch_failures == 1)
        house.launch_error = None
        await (await asyncio.wait_for(waiting, 5)).close()


async def test_a_refusal_does_not_last():
    house = House(launch_attempts=1)
    house.launch_error = FileNotFoundError("no browser yet")
    async with house:
        for _ in range(2):  # the second is refused at once, during the pause
            with pytest.raises(NoSandbox, match="browser_missing"):
                await house.pool.acquire(wait_s=5)
        assert house.pool.counts().launches == 1
        house.launch_error = None
        await asyncio.sleep(0.55)
        await (await house.pool.acquire(wait_s=5)).close()


async def test_a_dead_browser_ends_its_own_leases_alone():
    async with House(max_episodes=4, contexts_per_browser=2, min_ready=2) as house:
        await eventually(lambda: house.pool.audit().browsers == {"ready": 2})
        held = [await house.pool.acquire() for _ in range(4)]
        first, others = held[0].inner.engine, [s for s in held if s.inner.engine is not held[0].inner.engine]
        assert len(others) == 2
        for sandbox in held:
            sandbox.inner.gate.clear()
        steps = [asyncio.create_task(s.step((CALL, CALL))) for s in held]
        await asyncio.sleep(0)
        first.alive = False
        lost = [t for s, t in zip(held, steps, strict=True) if s.inner.engine is first]
        for result in await asyncio.wait_for(asyncio.gather(*lost), 2):
            assert ending(result).key == "sandbox_error/browser_gone" and ending(result).retryable
            assert [r.status.value for r in result.results] == ["skipped", "skipped"]
        for sandbox in others:
            sandbox.inner.gate.set()
        for sandbox, task in zip(held, steps, strict=True):
            if sandbox in others:
                assert (await task).outcome is None
        again = await held[0].step((CALL,))
        assert again.outcome is held[0].outcome, "the episode keeps the ending it had"
        for sandbox in held:
            await sandbox.close()
        fresh = await house.pool.acquire()
        assert fresh.inner.engine is not first
        await fresh.close()


async def test_silence_loses_the_lease_and_a_call_keeps_it():
    async with House(lease_ttl_s=0.15) as house:
        quiet, lively = await house.pool.acquire(), await house.pool.acquire()
        for _ in range(6):
            await asyncio.sleep(0.05)
            await lively.step((CALL,))
        await eventually(lambda: quiet.inner.closed == 1)
        assert ending(await quiet.step((CALL,))).key == "sandbox_error/lease_lost"
        assert not quiet.heartbeat() and lively.heartbeat()
        assert (await lively.step((CALL,))).outcome is None
        await quiet.close()
        await lively.close()


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("detail", ["page_frozen", "page_hostile", "nav_timeout"])
async def test_a_page_is_not_blamed_for_a_browser_that_does_not_answer(answers, detail):
    async with House() as house, house.pool.episode() as sandbox:
        frozen = Outcome(reason=Reason.ENVIRONMENT_ERROR, detail=detail)
        sandbox.inner.engine.answers, sandbox.inner.next_outcome = answers, frozen
        outcome = ending(await sandbox.step((CALL,)))
        assert outcome.key == (f"environment_error/{detail}" if answers else "sandbox_error/cdp_timeout")
        assert sandbox.outcome == outcome


async def test_a_browser_that_is_up_as_the_pool_closes_is_ended_too():
    house = House(min_ready=1)
    house.launch_s = 0.05
    async with house:
        await eventually(lambda: house.launching == 1)
    assert house.pool.counts().launches == 1 and house.pool.counts().causes == {"closing": 1}


async def test_the_first_ending_stands():
    async with House() as house:
        sandbox = await house.pool.acquire()
        budget = Outcome(reason=Reason.STEP_BUDGET, detail="max_steps")
        assert sandbox.finish(budget) is budget
        assert sandbox.finish(Outcome(reason=Reason.CANCELLED, detail="surplus")) is budget
        await sandbox.close()
        assert house.pool.outcomes() == {"step_budget/max_steps": 1}


async def test_a_sandbox_that_raises_is_a_bug_with_an_outcome():
    async with House() as house, house.pool.episode() as sandbox:
        sandbox.inner.error = KeyError("nobody mapped this")
        result = await sandbox.step((CALL,))
        assert ending(result).key == "sandbox_error/unknown" and "KeyError" in (ending(result).traceback or "")


@pytest.mark.parametrize("answers", [True, False])
async def test_a_context_that_does_not_close_costs_its_browser_not_its_siblings(answers):
    async with House(max_episodes=2, contexts_per_browser=2, cores=1) as house:
        stuck, sibling = await house.pool.acquire(), await house.pool.acquire()
        engine = stuck.inner.engine
        assert sibling.inner.engine is engine, "one core: one browser for both"
        engine.answers = answers
        stuck.inner.close_s = 60.0
        await asyncio.wait_for(stuck.close(), 2)
        if answers:
            assert (await sibling.step((CALL,))).outcome is None
            assert house.pool.audit().browsers.get("draining") == 1
        else:
            assert ending(await sibling.step((CALL,))).key == "sandbox_error/browser_gone"
        await sibling.close()
        await eventually(lambda: engine.closed == 1)


async def test_browsers_are_recycled_by_count_and_by_memory():
    async with House(max_episodes=1, recycle_after=3, rss_drain_mib=500, rss_kill_mib=900) as house:
        for _ in range(7):
            async with house.pool.episode() as sandbox:
                await sandbox.step((CALL,))
        assert len(house.engines) == 3 and house.pool.counts().causes == {"episodes": 2}
        house.engines[-1].rss = 600.0
        await eventually(lambda: house.pool.counts().causes.get("memory") == 1)
        async with house.pool.episode() as sandbox:
            house.engines[-1].rss = 1000.0
            await eventually(lambda: sandbox.outcome is not None)
            assert ending(sandbox).detail == "out_of_memory" and ending(sandbox).rss_mib == 1000.0


async def test_closing_tells_the_waiting_and_the_holders():
    house = House(max_episodes=1)
    await house.pool.start()
    holder = await house.pool.acquire()
    waiting = asyncio.create_task(house.pool.acquire())
    await asyncio.sleep(0)
    await asyncio.gather(house.pool.close(), house.pool.close())
    with pytest.raises(NoSandbox) as refused:
        await waiting
    assert refused.value.outcome.key == "cancelled/shutdown" == ending(holder).key
    await holder.close()
    with pytest.raises(NoSandbox):
        await house.pool.acquire()


@pytest.mark.parametrize("seed", range(8))
async def test_cancelled_twice_anywhere_nothing_leaks(seed):
    """Thirty-two episodes, each cancelled at a random moment of its life and again before it has unwound."""
    rng = random.Random(seed)
    house = House(max_episodes=4, contexts_per_browser=2, recycle_after=5, launch_parallel=2)
    house.launch_s = 0.003

    async def episode():
        async with house.pool.episode() as sandbox:
            sandbox.inner.close_s = 0.005
            for _ in range(3):
                await sandbox.step((CALL,))
                await asyncio.sleep(0.001)

    async with house:
        tasks = [asyncio.create_task(episode()) for _ in range(32)]
        for task in rng.sample(tasks, len(tasks)):
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.002]))
            task.cancel()
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: house.pool.audit().live == 0)
        async with house.pool.episode() as sandbox:  # and it still works
            assert (await sandbox.step((CALL,))).outcome is None


def test_sizes_follow_from_one_setting():
    def resolved(cores, memory_mib, **settings):
        sizes = SandboxPoolConfig(**settings).resolve(cores=cores, memory_mib=memory_mib)
        return sizes.max_episodes, sizes.max_browsers, sizes.min_ready, sizes.launch_parallel

    assert resolved(2, 16000, max_episodes=16) == (16, 16, 16, 1)
    assert resolved(2, 16000, max_episodes=16, contexts_per_browser=4) == (16, 4, 4, 1)
    assert resolved(8, 16000, max_episodes=6, contexts_per_browser=4) == (6, 6, 6, 4), (
        "a browser a core where it can be"
    )
    assert resolved(2, 16000) == (16, 16, 16, 1), "eight a core"
    assert resolved(64, 6000) == (10, 10, 10, 32), "half the memory, 300 MiB each"
    assert resolved(4, 4000, max_episodes=40) == (40, 40, 10, 2), "warm as far as a quarter of the memory goes"
    with pytest.raises(ValueError, match="max_episodes"):
        SandboxPoolConfig(max_episodes=0)
    with pytest.raises(ValueError, match="without end"):
        SandboxPoolConfig(acquire_deadline_s=0)


async def test_who_closes_second_waits_for_the_first():
    async with House() as house:
        sandbox = await house.pool.acquire()
        sandbox.inner.close_s = 0.05
        first = asyncio.create_task(sandbox.close())
        await asyncio.sleep(0)
        await sandbox.close()
        assert house.pool.audit().live == 0 and sandbox.inner.closed == 1
        await first


async def test_closing_in_the_middle_of_a_launch_ends_the_half_started():
    house = House(min_ready=2, launch_parallel=2, end_deadline_s=0.1)
    house.launch_s = 60.0
    async with house:
        await eventually(lambda: house.launching == 2)
    assert len(house.engines) == 2  # and both were closed, which the house looks at when it shuts
