"""Oracle episodes of local worlds, many at once, timed: what `owrl bench episode` does between two looks at the clock.

`Rig` is a running system as users have it (a pool of warm browsers, a world server, the harness with a small
tokenizer); `crowd` plays episodes in it without a pause for a while; `bare` plays the same episodes without a
harness. Where the processor went is read from the operating system: this process, the browser driver, the browsers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import psutil

from owrl_jax.agent.episode import Episode
from owrl_jax.agent.harness import Budgets, Harness
from owrl_jax.agent.policies import ActorPolicy, OracleActor
from owrl_jax.agent.prompt import PromptStyle
from owrl_jax.browser.config import SandboxConfig
from owrl_jax.browser.safety import Safety
from owrl_jax.pool.local import browser_pool
from owrl_jax.pool.pressure import PressureConfig
from owrl_jax.pool.sandboxes import SandboxPool, SandboxPoolConfig
from owrl_jax.types import Task, Trajectory, VerdictValue
from owrl_jax.worlds import PageProbe, WorldServer, make_task
from owrl_jax.worlds.trial import oracle_for

# Of an episode's phases, what is the harness's own: everything but the policy's answer and the sandbox's work.
HARNESS = ("prompt", "parse", "other")
BROWSER = ("reset", "step", "release")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """One finished episode. `opened_ms` is what it took to make its state on the world server."""

    trajectory: Trajectory
    solved: bool
    opened_ms: float

    def ms(self, *phases: str) -> float:
        """Milliseconds in phases of the time ledger."""
        return sum(self.trajectory.timings_ms.get(phase, 0.0) for phase in phases)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crowd:
    """What a number of sessions did in a stretch of time.

    Attributes:
      played: the episodes that ended in it.
      seconds: how long it was.
      cpu_s: processor seconds in it by kind of process: `python`, `driver`, `browser`.
      site_s: seconds that the world server spent on answers; part of `python`.
    """

    played: tuple[Played, ...]
    seconds: float
    cpu_s: dict[str, float]
    site_s: float

    @property
    def per_minute(self) -> float:
        return 60 * len(self.played) / self.seconds

    @property
    def solved(self) -> float:
        """Share of the episodes that the program calls a success."""
        return sum(p.solved for p in self.played) / max(len(self.played), 1)

    @property
    def turns(self) -> int:
        return sum(len(p.trajectory.turns) for p in self.played)

    def share(self, *phases: str) -> float:
        """Share of the episodes' own time (all of them added up) in phases of the ledger."""
        return sum(p.ms(*phases) for p in self.played) / max(sum(p.ms("total") for p in self.played), 1e-9)

    def median_ms(self, *phases: str) -> float:
        """Median over episodes of the milliseconds in phases."""
        return statistics.median(p.ms(*phases) for p in self.played)


class Rig:
    """Everything that episodes of one kind of task need. Made by `rig`.

    Args:
      tasks: (world, template) pairs of one viewport; sessions go through them in turn, with a new seed each time.
    """

    def __init__(
        self, tasks: Sequence[tuple[str, str]], worlds: WorldServer, pool: SandboxPool, harness: Harness
    ) -> None:
        self.worlds, self.pool, self.harness = worlds, pool, harness
        self._tasks, self._number = tuple(tasks), itertools.count()

    def next_task(self) -> Task:
        number = next(self._number)
        world, kind = self._tasks[number % len(self._tasks)]
        return make_task(world, kind, number // len(self._tasks))

    async def episode(self) -> Played:
        """One episode with everything: a fresh state, a leased sandbox, the harness, the oracle as its policy."""
        task = self.next_task()
        began = time.perf_counter()
        visit = await self.worlds.open(task)
        opened_ms = (time.perf_counter() - began) * 1e3
        policy = ActorPolicy(
            OracleActor(oracle_for(visit), lambda leased: PageProbe(leased.inner)),
            self.harness.tokens,
        )
        episode = Episode(
            visit.task,
            harness=self.harness,
            policy=policy,
            open_sandbox=self.pool.acquire,
            instruction=lambda: visit.instruction,
        )
        trajectory = await episode.run()
        verdict = visit.verdict(trajectory.answer)
        self.worlds.forget(visit.key)
        return Played(trajectory=trajectory, solved=verdict.value is VerdictValue.SUCCESS, opened_ms=opened_ms)

    async def crowd(self, sessions: int, seconds: float) -> Crowd:
        """`sessions` at once, each one episode after another; all that ended in `seconds` after the first round."""
        await asyncio.gather(*(self.episode() for _ in range(sessions)))  # browsers up, pages compiled
        cpu, site, began = cpu_seconds(), self.worlds.handler_s, time.perf_counter()
        played: list[Played] = []

        async def one() -> None:
            while time.perf_counter() < began + seconds:
                done = await self.episode()
                if time.perf_counter() < began + seconds or not played:
                    played.append(done)

        await asyncio.gather(*(one() for _ in range(sessions)))
        # The last round counts in neither: its episodes ended too late, and its processor time is not the stretch's.
        spent = time.perf_counter() - began
        after = cpu_seconds()
        return Crowd(
            played=tuple(played),
            seconds=seconds if spent > seconds else spent,
            cpu_s={name: (after[name] - cpu[name]) * min(seconds / spent, 1.0) for name in after},
            site_s=(self.worlds.handler_s - site) * min(seconds / spent, 1.0),
        )

    async def bare(self, seconds: float) -> float:
        """Episodes a minute of one session without any harness: sandbox and oracle alone, on a warm browser."""
        count, began = -1, time.perf_counter()  # the first is warm-up
        while count < 1 or time.perf_counter() < began + seconds:
            visit = await self.worlds.open(self.next_task())
            sandbox = await self.pool.acquire()
            try:
                last = await sandbox.reset(visit.task)
                oracle, probe, first = oracle_for(visit), PageProbe(sandbox.inner), True
                while last.outcome is None:
                    _, calls = await oracle.act(probe, None if first else last)
                    last, first = await sandbox.step(calls), False
            finally:
                await sandbox.close()
                self.worlds.forget(visit.key)
            count += 1
            if count == 0:
                began = time.perf_counter()
        return 60 * count / (time.perf_counter() - began)


@contextlib.asynccontextmanager
async def rig(tasks: Sequence[tuple[str, str]], tokens: Any, *, sessions: int) -> AsyncIterator[Rig]:
    """A running system for `sessions` episodes at once of these (world, template) pairs, its browsers up."""
    from owrl_jax.models.processor import ImageProcessor

    first = make_task(*tasks[0], 0)
    width, height = first.metadata.get("viewport", (1280, 1000))
    harness = Harness(
        tokens=tokens,
        picture_rule=ImageProcessor(),
        style=PromptStyle(system="full"),
        budgets=Budgets(max_steps=60, max_response_tokens=4096),
        viewport=(width, height),
    )
    async with WorldServer() as worlds:
        pool = browser_pool(
            SandboxPoolConfig(
                max_episodes=sessions,
                # The bench loads the machine on purpose; admission would turn the measurement into a queue.
                pressure=PressureConfig(cpu_high=1.0, cpu_low=1.0),
            ),
            sandbox=SandboxConfig(
                viewport=(width, height),
                dpr=float(first.metadata.get("dpr", 1)),
                safety=Safety.for_local_worlds(worlds.exceptions),
            ),
        )
        async with pool:
            while pool.audit().browsers.get("ready", 0) < pool.sizes.min_ready:  # noqa: ASYNC110 - before the clock
                await asyncio.sleep(0.01)
            yield Rig(tasks, worlds, pool, harness)


def cpu_seconds() -> dict[str, float]:
    """Processor seconds so far of this process, of the browser driver below it, and of all browsers."""
    spent = {"python": 0.0, "driver": 0.0, "browser": 0.0}
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            kind = "python" if process == me else "driver" if "node" in process.name() else "browser"
            times = process.cpu_times()
            # Children that have ended count with their parent.
            ended = 0.0 if process == me else times.children_user + times.children_system
            spent[kind] += times.user + times.system + ended
    return spent
