"""The browser processes behind the leases: warm ones kept ready, launches staggered, tired and broken ones replaced.

A launch costs a tenth of a second alone and many seconds when thirty happen at once, so launches pass a semaphore of
their own (half the cores) with jitter, and `min_ready` browsers are up before anyone asks. A browser drains after a
number of episodes, above a memory limit, or once something in it broke; it is ended at once when it stops answering.
All of a browser's leases end together when it dies, each told why; nobody else's do.

Invariant: every engine that was started is closed exactly once, in a task that `close` waits for, so no process of ours
outlives the fleet. Not here: who may have a lease (`pool/sandboxes.py`), and how a browser is started
(`browser/engine.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from owrl_jax.outcome import Outcome, Owner, Phase, Reason, from_exception
from owrl_jax.pool.leases import BrowserState, LeaseBook

_log = logging.getLogger(__name__)

_UP = (BrowserState.READY, BrowserState.LEASED)
_COMING = (BrowserState.COLD, BrowserState.LAUNCHING)


class Engine(Protocol):
    """What the fleet asks of a browser process (`browser.engine.BrowserEngine` in real life)."""

    @property
    def pid(self) -> int | None: ...
    @property
    def pgid(self) -> int | None: ...
    @property
    def alive(self) -> bool: ...
    def rss_mib(self) -> float: ...
    async def start(self) -> object: ...
    async def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """How browsers come and go.

    Attributes:
      max_browsers: browsers that take episodes at one time (draining ones come on top).
      min_ready: browsers started before they are needed.
      launch_parallel: launches at one time.
      launch_jitter_s: up to this long a launch waits at random before it starts.
      launch_deadline_s: a launch that takes longer has failed.
      launch_attempts: failed launches in a row after which waiting requests are refused.
      end_deadline_s: time to close politely before the process group is killed.
      rss_drain_mib: resident memory of one browser (all its processes) above which it takes no new episode.
      rss_kill_mib: above this it is ended at once, its leases with it.
    """

    max_browsers: int
    min_ready: int
    launch_parallel: int
    launch_jitter_s: float = 0.05
    launch_deadline_s: float = 20.0
    launch_attempts: int = 2
    end_deadline_s: float = 8.0
    rss_drain_mib: float = 1500.0
    rss_kill_mib: float = 4000.0

    def __post_init__(self) -> None:
        if self.max_browsers < 1 or self.launch_parallel < 1 or self.launch_attempts < 1:
            raise ValueError(
                "max_browsers, launch_parallel and launch_attempts must be at least 1, got "
                f"{self.max_browsers}, {self.launch_parallel} and {self.launch_attempts}"
            )
        if not 0 <= self.min_ready <= self.max_browsers:
            raise ValueError(f"min_ready must lie in 0..max_browsers={self.max_browsers}, got {self.min_ready}")
        if not 0 < self.rss_drain_mib <= self.rss_kill_mib:
            raise ValueError(
                "rss_drain_mib must be positive and at most rss_kill_mib, got "
                f"{self.rss_drain_mib} and {self.rss_kill_mib}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetCounts:
    """Since the start: launches tried and failed, browsers ended, and by which cause."""

    launches: int
    launch_failures: int
    ended: int
    causes: dict[str, int]
    launch_ms: tuple[float, ...]  # the last hundred, in order


class Fleet:
    """Keeps browsers in step with the ledger.

    Args:
      book: the ledger, shared with the pool.
      config: sizes and deadlines.
      make_engine: a new, unstarted engine.
      probe: whether a browser still answers, within a second or two; raises or returns False if not.
      on_change: called (synchronously) when places may have become free or a launch has failed.
      on_lost: called with a generation and the outcome for its leases when a browser has died under them.
      missing: tells whether a launch error means that there is no browser to launch (no retry helps).
    """

    def __init__(
        self,
        book: LeaseBook,
        config: FleetConfig,
        *,
        make_engine: Callable[[], Engine],
        probe: Callable[[Engine], Awaitable[bool]],
        on_change: Callable[[], None],
        on_lost: Callable[[int, Outcome], None],
        missing: Callable[[BaseException], bool] = lambda error: False,
        rng: random.Random | None = None,
    ) -> None:
        self._book = book
        self._config = config
        self._make_engine = make_engine
        self._probe = probe
        self._on_change = on_change
        self._on_lost = on_lost
        self._missing = missing
        self._rng = rng or random.Random()
        self._launch_slots = asyncio.Semaphore(config.launch_parallel)
        self._engines: dict[int, Engine] = {}
        self._tasks: set[asyncio.Task] = set()
        self._launches: dict[int, asyncio.Task] = {}
        self._closing = False
        self._failures_in_row = 0
        self._not_before_s = 0.0
        self.last_failure: Outcome | None = None
        self._launch_count = self._failure_count = self._ended = 0
        self._causes: dict[str, int] = {}
        self._drain_cause: dict[int, str] = {}
        self._launch_ms: list[float] = []

    @property
    def counts(self) -> FleetCounts:
        return FleetCounts(
            launches=self._launch_count,
            launch_failures=self._failure_count,
            ended=self._ended,
            causes=dict(self._causes),
            launch_ms=tuple(self._launch_ms[-100:]),
        )

    @property
    def hopeless(self) -> bool:
        """Whether launches keep failing and no browser is up or coming: waiting would be in vain.

        Only until the pause after the last failure is over; whoever asks then has another launch tried for him.
        """
        if self.last_failure is None or self._book.generations(*_UP, *_COMING):
            return False
        if time.monotonic() >= self._not_before_s:
            return False
        return self._failures_in_row >= self._config.launch_attempts or not self.last_failure.retryable

    def engine(self, generation: int) -> Engine:
        """The engine of a browser that is up."""
        return self._engines[generation]

    def engines(self) -> dict[int, Engine]:
        """Those up or still being ended, by generation."""
        return dict(self._engines)

    def ensure(self, wanted_places: int) -> None:
        """Starts the launches that `wanted_places` waiting episodes and `min_ready` call for, within `max_browsers`."""
        if self._closing or time.monotonic() < self._not_before_s:
            return
        for _ in range(self._config.max_browsers):
            active = len(self._book.generations(*_UP, *_COMING))
            short = wanted_places > self._book.free_places() + self._book.coming_places()
            if active >= self._config.max_browsers or not (short or active < self._config.min_ready):
                return
            generation = self._book.add_browser()
            task = asyncio.create_task(self._launch(generation), name=f"launch browser {generation}")
            self._launches[generation] = task
            self._keep(task)
            task.add_done_callback(lambda _, g=generation: self._launches.pop(g, None))

    def check(self) -> None:
        """Looks after the browsers: the dead, the fat, the drained. Call it every half second or so; it never waits."""
        for generation, engine in list(self._engines.items()):
            state = self._book.state(generation)
            if state is BrowserState.DEAD:
                continue  # being ended already
            if not engine.alive:
                self.retire(generation, "died")
                continue
            if state is BrowserState.DRAINING:
                self.end_if_drained(generation)

    def weigh(self) -> None:
        """Compares each browser's memory with the limits (reads /proc, so less often than `check`)."""
        for generation, engine in list(self._engines.items()):
            state = self._book.state(generation)
            if state is BrowserState.DEAD:
                continue
            rss = engine.rss_mib()
            if rss > self._config.rss_kill_mib:
                self.retire(generation, "memory", detail="out_of_memory", rss_mib=rss)
            elif rss > self._config.rss_drain_mib and state in _UP:
                self.drain(generation, "memory")

    def drain(self, generation: int, cause: str) -> None:
        """Lets a browser take no new episode and end when its last one has left."""
        if self._book.state(generation) in _UP:
            _log.info("browser %d drains (%s) after %d episodes", generation, cause, self._book.episodes(generation))
            self._book.move(generation, BrowserState.DRAINING)
            self._drain_cause[generation] = cause
        self.end_if_drained(generation)
        self._on_change()

    def end_if_drained(self, generation: int) -> None:
        """Ends a draining browser on which no episode is left."""
        if self._book.state(generation) is BrowserState.DRAINING and not self._book.leases_of(generation):
            self._end(generation, self._drain_cause.pop(generation, "episodes"))

    def retire(
        self, generation: int, cause: str, *, detail: str = "browser_gone", rss_mib: float | None = None
    ) -> None:
        """Ends a browser now; its leases are lost, each with a sandbox-owned, retryable outcome."""
        if self._book.state(generation) is BrowserState.DEAD or generation not in self._engines:
            return
        _log.warning("browser %d is ended: %s (%d leases)", generation, cause, len(self._book.leases_of(generation)))
        outcome = Outcome(
            reason=Reason.SANDBOX_ERROR,
            detail=detail,
            message=f"browser {generation} was lost under this episode ({cause})",
            rss_mib=rss_mib,
        )
        self._end(generation, cause)
        self._on_lost(generation, outcome)
        self._on_change()

    async def answers(self, generation: int) -> bool:
        """Whether the browser process itself still answers; False for one that is gone."""
        engine = self._engines.get(generation)
        if engine is None or self._book.state(generation) is BrowserState.DEAD:
            return False
        try:
            return engine.alive and await self._probe(engine)
        except Exception as error:  # noqa: BLE001 - any failure to answer is the answer
            _log.info("browser %d failed its probe: %s: %s", generation, type(error).__name__, error)
            return False

    async def examine(self, generation: int) -> None:
        """After a fault: a browser that still answers drains, one that does not is ended at once."""
        if await self.answers(generation):
            self.drain(generation, "fault")
        else:
            self.retire(generation, "no answer")

    async def close(self) -> None:
        """Ends every browser and every launch; returns when no process of ours is left. Safe to call twice."""
        self._closing = True
        for generation, task in list(self._launches.items()):
            if self._book.state(generation) is BrowserState.COLD:
                task.cancel()
        if self._launches:  # one that has begun is let finish and then ended: half a launch is hard to take back
            await asyncio.wait(set(self._launches.values()), timeout=self._config.end_deadline_s)
        for task in list(self._launches.values()):
            task.cancel()
        for generation in list(self._engines):
            if self._book.state(generation) is not BrowserState.DEAD:
                self._end(generation, "closing")
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _launch(self, generation: int) -> None:
        engine: Engine | None = None
        started = time.monotonic()
        try:
            async with self._launch_slots:
                await asyncio.sleep(self._rng.uniform(0.0, self._config.launch_jitter_s) * (generation > 1))
                started = time.monotonic()
                self._book.move(generation, BrowserState.LAUNCHING)
                self._launch_count += 1
                engine = self._make_engine()
                async with asyncio.timeout(self._config.launch_deadline_s):
                    await engine.start()
        except asyncio.CancelledError:
            self._abandon(generation, engine)
            raise
        except Exception as error:  # noqa: BLE001 - becomes a typed outcome, traceback included
            self._abandon(generation, engine)
            self._launch_failed(generation, error, (time.monotonic() - started) * 1e3)
            return
        self._launch_ms.append((time.monotonic() - started) * 1e3)
        self._engines[generation] = engine
        self._failures_in_row = 0
        self._book.move(generation, BrowserState.READY)
        if self._closing:
            self._end(generation, "closing")
        self._on_change()

    def _abandon(self, generation: int, engine: Engine | None) -> None:
        """A launch that did not succeed: its half-started process is ended too."""
        self._book.move(generation, BrowserState.DEAD)
        if engine is not None:
            self._keep(asyncio.create_task(self._close_engine(generation, engine)))

    def _launch_failed(self, generation: int, error: Exception, latency_ms: float) -> None:
        self._failure_count += 1
        self._failures_in_row += 1
        missing = self._missing(error)
        self.last_failure = from_exception(
            error,
            reason=Reason.INIT_ERROR,
            detail="browser_missing" if missing else "launch_failed",
            owner=Owner.SANDBOX,
            phase=Phase.LAUNCH,
            latency_ms=latency_ms,
        )
        pause = min(30.0, 0.25 * 2**self._failures_in_row)
        self._not_before_s = time.monotonic() + pause
        _log.warning("browser %d did not start: %s; next try in %.1f s", generation, self.last_failure.message, pause)
        self._on_change()

    def _end(self, generation: int, cause: str) -> None:
        self._book.move(generation, BrowserState.DEAD)
        self._ended += 1
        self._causes[cause] = self._causes.get(cause, 0) + 1
        task = asyncio.create_task(self._close_engine(generation, self._engines[generation]))
        self._keep(task)

    async def _close_engine(self, generation: int, engine: Engine) -> None:
        """Polite close within the deadline; then the group is killed and the close finished. Never raises."""
        pgid = engine.pgid
        try:
            for attempt in ("politely", "after SIGKILL"):
                try:
                    async with asyncio.timeout(self._config.end_deadline_s):
                        await engine.close()
                    break
                except Exception as error:  # noqa: BLE001 - TimeoutError included: whatever happened, the group must go
                    _log.warning(
                        "browser %d did not close %s: %s: %s", generation, attempt, type(error).__name__, error
                    )
                    _kill_group(pgid)
        finally:
            self._engines.pop(generation, None)
            self._on_change()

    def _keep(self, task: asyncio.Task) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _kill_group(pgid: int | None) -> None:
    """SIGKILL to a browser's own process group, if it is still there; never to ours."""
    if pgid is None or pgid <= 1 or pgid == os.getpgrp():
        return
    with contextlib.suppress(ProcessLookupError):  # gone already, as it should be
        os.killpg(pgid, signal.SIGKILL)
