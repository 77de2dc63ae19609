"""The sandbox pool of one machine: ask for a sandbox, use it for one episode, give it back, whatever happens.

    async with SandboxPool(SandboxPoolConfig(max_episodes=8), ...) as pool:
        async with pool.episode() as sandbox:
            first = await sandbox.reset(task)
            ...

Requests wait in one queue, first come first served, until a place is free and the host is not under pressure. What they
get is a `LeasedSandbox`: the ordinary sandbox protocol with the lease around it. It beats the lease's heart on every
call, answers with a typed outcome once the lease is lost or the browser has died, and remembers the first outcome it
met, so that every episode ends in exactly one.

Invariant: acquired == released + live at every moment (`audit`), and after `close` nothing is live and no process of
ours is left, also if the holder is cancelled at any await, twice. Giving back runs in a task of its own that no
cancellation reaches. There is one concurrency setting, `max_episodes`; everything else follows from it and is logged
once at start. Browser processes are `pool/fleet.py`'s business; what happens inside a page is `browser/sandbox.py`'s.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from owrl_jax.browser.source import NoSandbox
from owrl_jax.outcome import Outcome, Phase, Reason
from owrl_jax.pool.fleet import Engine, Fleet, FleetConfig, FleetCounts
from owrl_jax.pool.leased import LeasedSandbox, Sandbox, lost_outcome
from owrl_jax.pool.leases import Audit, BrowserState, Lease, LeaseBook
from owrl_jax.pool.pressure import Load, PressureConfig, PressureGauge, PressureReading, host_load

_log = logging.getLogger(__name__)

# After these the browser itself is under suspicion, not only the page.
_SUSPICIOUS = frozenset(
    {
        "browser_gone",
        "renderer_crash",
        "out_of_memory",
        "cdp_timeout",
        "step_deadline",
        "capture_failed",
        "sandbox_timeout",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxPoolConfig:
    """Sizes, limits and deadlines of a pool.

    Attributes:
      max_episodes: episodes at one time, the one concurrency setting; None takes what the memory allows, at most eight
        a core (a browser paints in software: more episodes than that wait for each other).
      contexts_per_browser: episodes that share a browser process. A shared one saves about 60 of the 90 MiB that a
        browser of its own costs (a real page takes 300), and makes its episodes share a fate and one painting thread;
        frames on request cannot be had then (two pages of one process must not draw at the same time).
      min_ready: browsers up before anyone asks; None for all of them, as far as a quarter of the memory goes.
      recycle_after: episodes after which a browser is replaced.
      rss_drain_mib, rss_kill_mib: see `FleetConfig`.
      launch_parallel: launches at one time; None for half the cores.
      lease_ttl_s: silence after which a lease is taken back.
      acquire_deadline_s: how long a request waits for a place before it is refused.
      max_waiting: requests that may wait; the next is refused at once.
      release_deadline_s: how long closing a context may take before the browser is examined.
      pressure: thresholds of admission.
    """

    max_episodes: int | None = None
    contexts_per_browser: int = 1
    min_ready: int | None = None
    recycle_after: int = 40
    rss_drain_mib: float = 1500.0
    rss_kill_mib: float = 4000.0
    launch_parallel: int | None = None
    launch_jitter_s: float = 0.05
    launch_deadline_s: float = 20.0
    launch_attempts: int = 2
    lease_ttl_s: float = 900.0
    acquire_deadline_s: float = 600.0
    max_waiting: int = 1024
    release_deadline_s: float = 8.0
    end_deadline_s: float = 8.0
    tick_s: float = 0.5
    pressure: PressureConfig = dataclasses.field(default_factory=PressureConfig)

    def __post_init__(self) -> None:
        if self.max_episodes is not None and self.max_episodes < 1:
            raise ValueError(f"max_episodes must be at least 1, got {self.max_episodes}")
        for name in ("lease_ttl_s", "acquire_deadline_s", "release_deadline_s", "end_deadline_s", "tick_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}; no wait here is without end")

    def resolve(self, *, cores: int, memory_mib: float) -> ResolvedSizes:
        """The sizes that follow from the settings on a machine of `cores` and `memory_mib` free for browsers."""
        width = self.contexts_per_browser
        if self.max_episodes is None:
            # Real pages take about 300 MiB each (light ones 30); half the memory is left to everything else.
            episodes = max(1, min(8 * cores, int(memory_mib * 0.5 / 300)))
        else:
            episodes = self.max_episodes
        browsers = max(1, -(-episodes // width), min(cores, episodes))
        affordable = max(cores, int(memory_mib * 0.25 / 100))  # an idle browser takes about 95 MiB
        ready = min(browsers, affordable if self.min_ready is None else self.min_ready)
        parallel = max(1, cores // 2) if self.launch_parallel is None else self.launch_parallel
        return ResolvedSizes(max_episodes=episodes, max_browsers=browsers, min_ready=ready, launch_parallel=parallel)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedSizes:
    """The effective numbers, logged once at start."""

    max_episodes: int
    max_browsers: int
    min_ready: int
    launch_parallel: int


class SandboxPool:
    """Sandboxes for the episodes of one machine.

    Args:
      config: sizes and deadlines.
      make_engine: a new, unstarted browser.
      open_sandbox: a sandbox on a running browser; must not wait.
      probe: see `Fleet`.
      missing: see `Fleet`.
      load: where the host's load is read.
      cores: processor cores to plan for; None for those of this process.
    """

    def __init__(
        self,
        config: SandboxPoolConfig,
        *,
        make_engine: Callable[[], Engine],
        open_sandbox: Callable[[Any], Sandbox],
        probe: Callable[[Any], Awaitable[bool]],
        missing: Callable[[BaseException], bool] = lambda error: False,
        load: Callable[[], Load] = host_load,
        cores: int | None = None,
    ) -> None:
        self.config = config
        first = load()
        self.sizes = config.resolve(
            cores=cores or _usable_cores(), memory_mib=first.mem_total_mib * max(0.0, 1.0 - first.mem)
        )
        self._open_sandbox = open_sandbox
        self._gauge = PressureGauge(config.pressure, source=load)
        self._book = LeaseBook(contexts_per_browser=config.contexts_per_browser, recycle_after=config.recycle_after)
        self._fleet = Fleet(
            self._book,
            FleetConfig(
                max_browsers=self.sizes.max_browsers,
                min_ready=self.sizes.min_ready,
                launch_parallel=self.sizes.launch_parallel,
                launch_jitter_s=config.launch_jitter_s,
                launch_deadline_s=config.launch_deadline_s,
                launch_attempts=config.launch_attempts,
                end_deadline_s=config.end_deadline_s,
                rss_drain_mib=config.rss_drain_mib,
                rss_kill_mib=config.rss_kill_mib,
            ),
            make_engine=make_engine,
            probe=probe,
            on_change=self._dispatch,
            on_lost=self._browser_lost,
            missing=missing,
        )
        self._waiters: collections.deque[asyncio.Future[LeasedSandbox]] = collections.deque()
        self._live: dict[str, LeasedSandbox] = {}
        self._releases: dict[str, asyncio.Task[None]] = {}
        self._outcomes: collections.Counter[str] = collections.Counter()
        self._ticker: asyncio.Task[None] | None = None
        self._closing = False
        self._closed: asyncio.Task[None] | None = None

    async def __aenter__(self) -> SandboxPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self, *, wait_ready: bool = False) -> None:
        """Starts the clockwork and the first `min_ready` browsers; with `wait_ready`, waits for one of them to be up.

        Raises:
          NoSandbox: with `wait_ready`, if no browser starts.
        """
        if self._ticker is None:
            _log.info(
                "sandbox pool: at most %d episodes at once on %d browsers of %d contexts; %d warm, %d launches at once",
                self.sizes.max_episodes,
                self.sizes.max_browsers,
                self.config.contexts_per_browser,
                self.sizes.min_ready,
                self.sizes.launch_parallel,
            )
            self._fleet.ensure(0)
            self._ticker = asyncio.create_task(self._tick_for_ever(), name="sandbox pool clockwork")
        if wait_ready:
            sandbox = await self.acquire(wait_s=self.config.launch_deadline_s * self.config.launch_attempts + 5.0)
            sandbox.finish(Outcome(reason=Reason.CANCELLED, detail="surplus", phase=Phase.LAUNCH, message="warm-up"))
            await sandbox.close()

    @property
    def started(self) -> bool:
        """Whether `start` has been called."""
        return self._ticker is not None

    async def acquire(self, *, wait_s: float | None = None) -> LeasedSandbox:
        """A sandbox for one episode; prefer `episode`, which cannot forget to give it back.

        Args:
          wait_s: how long to wait for a place; None for the configured deadline, 0 to be told at once.
        Raises:
          NoSandbox: with the outcome, if there is no place in time, no browser starts, or the pool is closing.
        """
        if self._ticker is None:
            raise RuntimeError("the pool has not been started: use `async with SandboxPool(...)` or await `start()`")
        wait_s = self.config.acquire_deadline_s if wait_s is None else wait_s
        began = time.monotonic()
        if self._closing:
            raise NoSandbox(
                Outcome(reason=Reason.CANCELLED, detail="shutdown", phase=Phase.QUEUE, message="pool is closing")
            )
        if len(self._waiters) >= self.config.max_waiting:
            raise self._no_capacity(f"{len(self._waiters)} requests are waiting already", began)
        waiter: asyncio.Future[LeasedSandbox] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            self._dispatch()
            if not waiter.done():
                await asyncio.wait({waiter}, timeout=wait_s)
            if not waiter.done():
                raise self._no_capacity(self._why_waiting(), began)
            return waiter.result()
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._begin_release(waiter.result())  # granted in the same moment: nobody else knows of it
            raise
        finally:
            waiter.cancel()
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)

    @contextlib.asynccontextmanager
    async def episode(self, *, wait_s: float | None = None) -> AsyncIterator[LeasedSandbox]:
        """A sandbox for the length of a block, given back at its end, also if the block raises or is cancelled."""
        sandbox = await self.acquire(wait_s=wait_s)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def heartbeat(self, lease: Lease) -> bool:
        """A sign of life from the holder; False if the lease is over."""
        return self._book.valid(lease.id) and self._book.heartbeat(lease.id)

    def is_released(self, lease: Lease) -> bool:
        """Whether a lease of this pool has been given back, or is being given back."""
        return lease.id not in self._live or lease.id in self._releases

    async def release(self, sandbox: LeasedSandbox) -> None:
        """Gives a sandbox back: idempotent, and finished even if the caller is cancelled while it waits."""
        await asyncio.shield(self._begin_release(sandbox))

    async def browser_fault(self, lease: Lease, blamed: Outcome) -> Outcome | None:
        """The sandbox-owned outcome in place of one that blames a site, if in truth the browser does not answer."""
        if await self._fleet.answers(lease.generation):
            return None
        stopped = self._book.valid(lease.id) and self._fleet.engine(lease.generation).alive
        return Outcome(
            reason=Reason.SANDBOX_ERROR,
            detail="cdp_timeout" if stopped else "browser_gone",
            phase=blamed.phase,
            latency_ms=blamed.latency_ms,
            message=f"the browser itself does not answer (seen as {blamed.key})",
        )

    def reading(self) -> PressureReading:
        """Pressure and occupation now."""
        live = len(self._live)
        return self._gauge.reading(
            running=live, queued=len(self._waiters), full=live >= self.sizes.max_episodes, closing=self._closing
        )

    def audit(self) -> Audit:
        """The ledger's balance."""
        return self._book.audit()

    def counts(self) -> FleetCounts:
        """Launches and endings of browsers."""
        return self._fleet.counts

    def outcomes(self) -> dict[str, int]:
        """How many episodes ended in what, by `reason/detail`; sums to the leases released."""
        return dict(self._outcomes)

    def engines(self) -> dict[int, Engine]:
        """Browsers up or being ended, by generation (metrics, tests)."""
        return self._fleet.engines()

    async def close(self) -> None:
        """Cancels waiting requests, gives back every lease, ends every browser. Any number of times."""
        if self._closed is None:
            self._closing = True
            self._closed = asyncio.create_task(self._close(), name="close sandbox pool")
        await asyncio.shield(self._closed)

    # Below: everything that changes the ledger runs without an await between looking and doing.

    def _dispatch(self) -> None:
        """Hands free places to those who wait, in order, as far as places, limit and pressure allow."""
        while self._waiters:
            if self._waiters[0].done():
                self._waiters.popleft()
                continue
            if self._closing:
                outcome = Outcome(
                    reason=Reason.CANCELLED, detail="shutdown", phase=Phase.QUEUE, message="pool is closing"
                )
                self._waiters.popleft().set_exception(NoSandbox(outcome))
                continue
            if len(self._live) >= self.sizes.max_episodes or self._gauge.refusal(len(self._live)):
                return
            generation = self._book.place()
            if generation is not None and not self._fleet.engine(generation).alive:
                self._fleet.retire(generation, "died")  # nobody has looked since; this comes back here by on_change
                continue
            if generation is None:
                if self._fleet.hopeless and self._fleet.last_failure is not None:
                    self._waiters.popleft().set_exception(NoSandbox(self._fleet.last_failure))
                    continue
                self._fleet.ensure(min(len(self._waiters), self.sizes.max_episodes - len(self._live)))
                return
            waiter = self._waiters.popleft()
            try:
                waiter.set_result(self._grant(generation))
            except Exception as error:  # noqa: BLE001 - a bug of ours, told to the one who asked; the others go on
                waiter.set_exception(error)
        if not self._closing:
            self._fleet.ensure(0)

    def _grant(self, generation: int) -> LeasedSandbox:
        inner = self._open_sandbox(self._fleet.engine(generation))
        lease = self._book.grant(generation, ttl_s=self.config.lease_ttl_s)
        sandbox = LeasedSandbox(self, lease, inner)
        self._live[lease.id] = sandbox
        return sandbox

    def _begin_release(self, sandbox: LeasedSandbox) -> asyncio.Task[None]:
        lease = sandbox.lease
        task = self._releases.get(lease.id)
        if task is not None:
            return task
        if not self._book.begin_release(lease.id):
            return asyncio.create_task(_nothing())  # given back and forgotten
        sandbox.lose(
            Outcome(
                reason=Reason.CANCELLED, detail="operator", phase=Phase.RELEASE, message="given back without an ending"
            )
        )
        task = asyncio.create_task(self._finish_release(sandbox), name=f"release {lease.id}")
        self._releases[lease.id] = task
        task.add_done_callback(lambda _: self._releases.pop(lease.id, None))
        return task

    async def _finish_release(self, sandbox: LeasedSandbox) -> None:
        lease, stuck, began = sandbox.lease, False, time.monotonic()
        try:
            async with asyncio.timeout(self.config.release_deadline_s):
                await sandbox.inner.close()
        except Exception as error:  # noqa: BLE001 - TimeoutError included: the lease comes back regardless
            stuck = True
            _log.warning("a context of browser %d did not close: %s: %s", lease.generation, type(error).__name__, error)
        try:
            if not stuck and time.monotonic() - began > 1.0:
                stuck = not await self._fleet.answers(lease.generation)
            assert sandbox.outcome is not None  # _begin_release saw to it
            fault = sandbox.outcome.reason is Reason.SANDBOX_ERROR and sandbox.outcome.detail in _SUSPICIOUS
            if stuck or fault:  # before the place is free: nobody else shall get it
                self._fleet.drain(lease.generation, "fault")
        finally:
            self._live.pop(lease.id, None)
            self._outcomes[sandbox.outcome.key if sandbox.outcome else "none"] += 1
            self._book.finish_release(lease.id)
            self._fleet.end_if_drained(lease.generation)
            self._dispatch()
        if stuck or fault:
            await self._fleet.examine(lease.generation)

    def _browser_lost(self, generation: int, outcome: Outcome) -> None:
        """A browser has died: its leases end now, each with the same typed outcome."""
        for lease in self._book.leases_of(generation):
            sandbox = self._live.get(lease.id)
            if sandbox is not None:
                sandbox.lose(outcome)

    async def _tick_for_ever(self) -> None:
        ticks = 0
        while True:
            await asyncio.sleep(self.config.tick_s)
            ticks += 1
            try:
                self._gauge.sample()
                self._fleet.check()
                if ticks % 8 == 0:
                    self._fleet.weigh()
                for lease in self._book.expired():
                    sandbox = self._live[lease.id]
                    sandbox.lose(lost_outcome(f"no sign of life from its holder for {lease.ttl_s:.0f} s"))
                    self._begin_release(sandbox)
                self._dispatch()
            except Exception:  # noqa: BLE001 - one bad look must not stop the clock; the log has the traceback
                _log.exception("sandbox pool clockwork")

    async def _close(self) -> None:
        self._dispatch()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait({self._ticker})
        shutdown = Outcome(reason=Reason.CANCELLED, detail="shutdown", phase=Phase.RELEASE, message="pool is closing")
        for sandbox in list(self._live.values()):
            sandbox.lose(shutdown)
            self._begin_release(sandbox)
        while self._releases:
            await asyncio.wait(set(self._releases.values()))
        await self._fleet.close()
        audit = self._book.audit()
        if not audit.balanced or audit.live:
            _log.error("sandbox pool closed out of balance: %s", audit)

    def _no_capacity(self, why: str, began: float) -> NoSandbox:
        self._gauge.rejected()
        latency_ms = (time.monotonic() - began) * 1e3
        return NoSandbox(
            Outcome(
                reason=Reason.INIT_ERROR, detail="no_capacity", phase=Phase.QUEUE, message=why, latency_ms=latency_ms
            )
        )

    def _why_waiting(self) -> str:
        reading = self.reading()
        if reading.reason == "full":
            return f"all {self.sizes.max_episodes} places are taken (max_episodes)"
        if reading.reason:
            return (
                f"host under pressure ({reading.reason}): cores {reading.cpu_ema:.0%}, memory {reading.mem:.0%} in use"
            )
        up = self._book.generations(BrowserState.READY, BrowserState.LEASED)
        return f"no browser has room ({len(up)} up, {self._fleet.counts.launch_failures} launches failed)"


async def _nothing() -> None:
    return None


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
