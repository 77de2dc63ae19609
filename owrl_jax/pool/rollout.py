"""Groups of episodes on this machine: wishes go in, finished groups come out as they complete, in any order.

    pool = LocalPool(harness=..., policy_of=lambda place: engine, sandboxes=browser_pool(...), places=..., ...)
    async for group in pool.run(requests):
        ...

A wish is pulled only when there is a free place for its first member, so whoever makes wishes decides as late as can
be. Every member plays until it has an ending that is the policy's own, within a budget of fresh attempts: a fault of
browser, site, engine or host is played again and never counted against the policy. Each attempt is in the journal,
with its verdict and its pictures, before its group is handed out; a group that has used up its attempts is handed out
as it is, with the members that are valid, and the journal says so (`given_up`).

Invariants: every wish that was pulled ends in exactly one group, or in the exception that ends `run`; never more than
`max_episodes` run at once; leaving `run` early cancels what is running and waits until it has given its sandbox back.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from owrl_jax.agent.episode import Episode, SeenTurn
from owrl_jax.agent.harness import Harness
from owrl_jax.agent.policy import Policy, Sampling
from owrl_jax.browser.source import SandboxSource
from owrl_jax.pool.journal import Journal
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.types import Group, GroupRequest, Screenshot, Task, Trajectory, Verdict, VerdictValue
from owrl_jax.worlds.server import Visit, WorldServer

_log = logging.getLogger(__name__)


class Place(Protocol):
    """Where one episode happens."""

    @property
    def task(self) -> Task:
        """The task with the start address of this very episode."""
        ...

    @property
    def instruction(self) -> str:
        """What is asked for; may be known only after the first page."""
        ...

    def verdict(self, said: str | None) -> Verdict | None:
        """What a program says, None where a judge must decide."""
        ...


class Places(Protocol):
    """Opens places for tasks."""

    async def open(self, task: Task) -> Place: ...
    def close(self, place: Place) -> None: ...


class WorldPlaces:
    """Tasks of local worlds get a fresh state on the world server; all others are pages of the live web."""

    def __init__(self, worlds: WorldServer | None = None) -> None:
        self._worlds = worlds

    async def open(self, task: Task) -> Place:
        """Raises ValueError, KeyError: for a task of a world that does not exist, or without a world server."""
        if not task.verifier:
            return _LivePlace(task=task)
        if self._worlds is None:
            raise ValueError(f"task {task.id!r} is of a local world, and no world server was given")
        return await self._worlds.open(task)

    def close(self, place: Place) -> None:
        if isinstance(place, Visit) and self._worlds is not None:
            self._worlds.forget(place.key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LivePlace:
    task: Task

    @property
    def instruction(self) -> str:
        return self.task.instruction

    def verdict(self, said: str | None) -> Verdict | None:
        return None


# (the trajectory, its pictures in the store by hash, with what a program said of it) -> the verdict to keep. A judge
# that is down gives an invalid one; what is raised (a spending limit) ends the pool's run.
JudgeCall = Callable[[Trajectory], Awaitable[Verdict]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutLimits:
    """How much may run and be tried again.

    Attributes:
      max_episodes: episodes at one time.
      retries: fresh attempts of one member after faults that may pass.
      group_retries: fresh attempts of all members of a group together; None for twice its size.
      retry_wait_s: before a member's second attempt; doubles with each further one.
      episode_s: deadline of one episode, from its first page on.
      generate_s: deadline of one response.
    """

    max_episodes: int = 4
    retries: int = 2
    group_retries: int | None = None
    retry_wait_s: float = 0.2
    episode_s: float = 600.0
    generate_s: float = 300.0

    def __post_init__(self) -> None:
        if self.max_episodes < 1:
            raise ValueError(f"max_episodes must be at least 1, got {self.max_episodes}")
        if self.retries < 0 or (self.group_retries is not None and self.group_retries < 0):
            raise ValueError(f"retries must be 0 or more, got {self.retries} and {self.group_retries}")
        for name in ("retry_wait_s", "episode_s", "generate_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Live:
    """What is going on, for a live view.

    Attributes:
      running: episodes.
      finished: attempts that have ended, by `reason/detail`.
      retried: attempts that were played again.
      turns: finished turns of all attempts.
    """

    running: int
    finished: dict[str, int]
    retried: int
    turns: int


@dataclasses.dataclass
class _Open:
    """A group that is being played."""

    request: GroupRequest
    version: int
    budget: int
    members: dict[int, tuple[int, Trajectory]] = dataclasses.field(default_factory=dict)


class LocalPool:
    """Plays groups of episodes with the sandboxes of this machine.

    Args:
      harness: the fixed part of all episodes; a function gives that of the policy's version when a group begins.
      policy_of: what answers in a place: the one engine for all, or an oracle of the place's own.
      sandboxes: where sandboxes come from; started and closed by its owner.
      places: opens the place of a task.
      journal, screenshots: where everything that ended is kept. Without them nothing outlives the run (evaluation).
      judge: asked about every ending of the policy's own; None leaves the verdict to the places' programs.
      sampling: how responses are drawn; the harness cuts the length, and seeds each turn.
      limits: see `RolloutLimits`.
      version: the policy's version now; stamped on groups when they begin.
    """

    def __init__(
        self,
        *,
        harness: Harness | Callable[[int], Harness],
        policy_of: Callable[[Place], Policy],
        sandboxes: SandboxSource,
        places: Places,
        sampling: Sampling,
        journal: Journal | None = None,
        screenshots: ScreenshotStore | None = None,
        judge: JudgeCall | None = None,
        limits: RolloutLimits | None = None,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        self._policy_of, self._sandboxes, self._places = policy_of, sandboxes, places
        self._harness_at = harness if callable(harness) else lambda version: harness
        self._sampling, self._journal, self._screenshots = sampling, journal, screenshots
        self._judge, self._version = judge, version
        self.limits = limits or RolloutLimits()
        self._finished: Counter[str] = Counter()
        self._running = self._retried = self._turns = 0

    @property
    def live(self) -> Live:
        """What is going on now."""
        return Live(running=self._running, finished=dict(self._finished), retried=self._retried, turns=self._turns)

    async def run(self, requests: AsyncIterable[GroupRequest]) -> AsyncIterator[Group]:
        """Plays what is asked for; gives each group when it is complete.

        Raises:
          OSError: if the journal or the store cannot be written; what was written before is kept.
          Exception: whatever `requests` raises, after everything that runs has been cancelled.
        """
        slots = asyncio.Semaphore(self.limits.max_episodes)
        done: asyncio.Queue[Group | None] = asyncio.Queue()
        # One thread writes, so that lines have an order and syncing does not stop the episodes.
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="journal") as writer:
            work = asyncio.create_task(self._work(requests, slots, done, writer), name="rollout")
            try:
                while (group := await _next(done, work)) is not None:
                    yield group
            finally:
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work

    # --- Below: one task per member -----------------------------------------------------------------

    async def _work(
        self,
        requests: AsyncIterable[GroupRequest],
        slots: asyncio.Semaphore,
        done: asyncio.Queue[Group | None],
        writer: concurrent.futures.Executor,
    ) -> None:
        async def member(group: _Open, index: int) -> None:
            self._running += 1
            try:
                await self._member(group, index, writer)
            finally:
                self._running -= 1
                slots.release()
            if len(group.members) == group.request.n:
                await done.put(await self._close(group, writer))

        wishes = aiter(requests)
        try:
            async with asyncio.TaskGroup() as members:
                while True:
                    await slots.acquire()
                    request = await anext(wishes, None)
                    if request is None:
                        break
                    limit = self.limits.group_retries
                    group = _Open(
                        request=request, version=self._version(), budget=2 * request.n if limit is None else limit
                    )
                    # All siblings before the next wish: groups are finished, not begun.
                    for index in range(request.n):
                        if index > 0:
                            await slots.acquire()
                        members.create_task(member(group, index), name=f"{request.group_id}/{index}")
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        await done.put(None)

    async def _close(self, group: _Open, writer: concurrent.futures.Executor) -> Group:
        request = group.request
        ended = [group.members[index] for index in range(request.n)]
        result = Group(request=request, trajectories=tuple(trajectory for _, trajectory in ended))
        if self._journal is not None:
            reason = "complete" if len(result.valid) == request.n else "given_up"
            offsets = [offset for offset, _ in ended]
            await self._write(writer, self._journal.add_group, request, offsets, version=group.version, reason=reason)
        return result

    async def _member(self, group: _Open, index: int, writer: concurrent.futures.Executor) -> None:
        """Plays one member until it has an ending of its own, or its attempts are used up."""
        attempt = 0
        while True:
            trajectory, pictures = await self._attempt(group, index)
            self._finished[trajectory.outcome.key] += 1
            self._turns += len(trajectory.turns)
            offset, trajectory = await self._keep(trajectory, pictures, attempt, writer)
            final = trajectory.outcome.trains or not trajectory.outcome.retryable
            if final or attempt >= self.limits.retries or group.budget < 1:
                group.members[index] = (offset, trajectory)
                return
            _log.info("%s/%d: %s; played again", group.request.group_id, index, trajectory.outcome.key)
            group.budget -= 1
            self._retried += 1
            await asyncio.sleep(self.limits.retry_wait_s * 2**attempt)
            attempt += 1

    async def _attempt(self, group: _Open, index: int) -> tuple[Trajectory, list[Screenshot]]:
        """One episode with its program's verdict, and the pictures that it saw."""
        request = group.request
        place = await self._places.open(request.task)
        pictures: list[Screenshot] = []

        def seen(turn: SeenTurn) -> None:
            if turn.observation.screenshot is not None:
                pictures.append(turn.observation.screenshot)

        try:
            episode = Episode(
                place.task,
                harness=self._harness_at(group.version),
                policy=self._policy_of(place),
                open_sandbox=self._sandboxes.acquire,
                sampling=self._sampling,
                group_id=request.group_id,
                index=index,
                deadline_s=self.limits.episode_s,
                generate_s=self.limits.generate_s,
                instruction=lambda: place.instruction,
                on_turn=seen,
            )
            trajectory = await episode.run()
            if episode.observation is not None and episode.observation.screenshot is not None:
                pictures.append(episode.observation.screenshot)
            # The address was of this episode alone; the record names the task as it was asked for.
            task = dataclasses.replace(request.task, instruction=trajectory.task.instruction)
            verdict = _checked(place, trajectory.answer) if trajectory.outcome.trains else None
            return dataclasses.replace(trajectory, task=task, verdict=verdict), pictures
        finally:
            self._places.close(place)

    async def _keep(
        self, trajectory: Trajectory, pictures: list[Screenshot], attempt: int, writer: concurrent.futures.Executor
    ) -> tuple[int, Trajectory]:
        """Stores the pictures, asks the judge, and writes the line. Gives its offset.

        An episode whose judging is cut short (a spending limit, a shutdown) is written as it is: it was finished.
        """
        store, journal = self._screenshots, self._journal
        try:
            if store is not None:
                await self._write(writer, lambda: [store.put(picture) for picture in pictures])
            if self._judge is not None and trajectory.outcome.trains:
                trajectory = dataclasses.replace(trajectory, verdict=await self._judge(trajectory))
        except OSError:
            raise
        except BaseException:
            if journal is not None:  # the writer ends with all that it was given
                writer.submit(journal.add_trajectory, trajectory, attempt=attempt)
            raise
        if journal is None:
            return -1, trajectory
        return await self._write(writer, journal.add_trajectory, trajectory, attempt=attempt), trajectory

    async def _write(
        self, writer: concurrent.futures.Executor, act: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        # Shielded: a write that waits its turn is made even if the episode is cancelled meanwhile.
        return await asyncio.shield(asyncio.wrap_future(writer.submit(lambda: act(*args, **named))))


def _checked(place: Place, said: str | None) -> Verdict | None:
    """What the place's program says; that it cannot tell, if it raises."""
    try:
        return place.verdict(said)
    except Exception as error:  # noqa: BLE001 - a mistake in one task's check must not end the run of all others
        _log.error("the check of task %s failed", place.task.id, exc_info=error)
        why = f"the check failed: {type(error).__name__}: {error}"
        return Verdict(value=VerdictValue.INVALID, judge=f"program:{place.task.id}", rationale=why)


async def _next(done: asyncio.Queue[Group | None], work: asyncio.Task[None]) -> Group | None:
    """The next finished group; None at the end. Raises what ended the work."""
    if done.empty() and not work.done():
        getting = asyncio.ensure_future(done.get())
        try:
            await asyncio.wait({getting, work}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
        finally:
            if not getting.done():
                getting.cancel()
    if done.empty():
        work.result()
        return None
    return done.get_nowait()


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The first plain exception in a group of groups: callers should not have to know how this is put together."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
