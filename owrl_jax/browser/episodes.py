"""Episodes behind a wire: every request may come twice, late, or after its client has died, and nothing acts twice.

A step is named by (episode, step number, nonce). The first request with that name runs; one that comes while it runs
waits for it; one that comes later gets the stored answer. Another nonce for a step that was done, or a step out of
turn, is a conflict and does not act. Work runs in tasks of this service, so that a client that hangs up does not tear
a step in two. An episode whose lease was taken back, or that was closed, leaves a tombstone with its ending, and is
answered from it.

Invariant: for each (episode, step) the source's `step` is called at most once. This module knows nothing of HTTP
(`browser/server.py` maps `ServiceError.status`) and nothing of browsers (`browser/source.py`).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from owrl_jax.browser import wire
from owrl_jax.browser.source import EpisodeSandbox, NoSandbox, SandboxSource
from owrl_jax.outcome import Outcome, Phase, Reason
from owrl_jax.types import Screenshot, StepResult

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class ServiceError(Exception):
    """A request that is refused: an HTTP status, a sentence, and the outcome where there is one."""

    def __init__(self, status: int, message: str, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.outcome = outcome


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """How much is remembered.

    Attributes:
      answers: answers to past steps kept for repeated requests, per episode.
      screenshots: pictures kept for fetching, per episode.
      tombstones: endings of closed episodes kept.
      max_wait_s: longest time a request may wait for a free place.
    """

    answers: int = 4
    screenshots: int = 4
    tombstones: int = 1024
    max_wait_s: float = 120.0


@dataclasses.dataclass
class ServiceCounts:
    """Since the start."""

    opened: int = 0
    steps: int = 0
    calls: int = 0
    duplicates: int = 0  # requests answered from another one's work
    conflicts: int = 0
    step_seconds: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])  # sum, count


class _Episode:
    def __init__(self, request: wire.OpenRequest) -> None:
        self.request = request
        self.sandbox: EpisodeSandbox | None = None
        self.opening: asyncio.Task[wire.StepAnswer] | None = None
        self.closing: asyncio.Task[Outcome] | None = None
        self.next_step = 0
        # step -> (nonce, task); the newest few.
        self.steps: collections.OrderedDict[int, tuple[str, asyncio.Task[wire.StepAnswer]]] = collections.OrderedDict()
        self.shots: collections.OrderedDict[str, Screenshot] = collections.OrderedDict()


class EpisodeService:
    """Opens, steps and closes episodes on the sandboxes of a source.

    Args:
      source: where sandboxes come from.
      limits: how much is remembered.
      ttl_s: the lease's time to live, told to clients so that they send heartbeats in time.
    """

    def __init__(self, source: SandboxSource, *, limits: ServiceLimits | None = None, ttl_s: float = 120.0) -> None:
        self._source = source
        self._limits = limits or ServiceLimits()
        self._ttl_s = ttl_s
        self._episodes: dict[str, _Episode] = {}
        self._tombstones: collections.OrderedDict[str, Outcome] = collections.OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.draining = False
        self.counts = ServiceCounts()

    @property
    def live(self) -> int:
        """Episodes open or opening."""
        return len(self._episodes)

    async def open(self, request: wire.OpenRequest) -> wire.StepAnswer:
        """The first observation of an episode. The same request again gets the same answer.

        Raises:
          ServiceError: 400 for an unusable id, 409 for an id in use for another task, 410 for an ended episode, 503
          when
            there is no place, no browser, or the service is draining.
        """
        if not wire.TOKEN.fullmatch(request.episode):
            raise ServiceError(
                400, f"episode id {request.episode[:80]!r}: 8 to 64 letters, digits, - and _ are allowed"
            )
        self.sweep()
        self._refuse_if_buried(request.episode)
        episode = self._episodes.get(request.episode)
        if episode is not None:
            if episode.request.task != request.task:
                self.counts.conflicts += 1
                raise ServiceError(409, f"episode {request.episode} is open for another task; choose a fresh id")
            self.counts.duplicates += 1
        else:
            if self.draining:
                raise ServiceError(503, "this server is shutting down", _shutdown(Phase.QUEUE))
            episode = self._episodes[request.episode] = _Episode(request)
            episode.opening = self._start(self._open(episode))
        assert episode.opening is not None
        try:
            return await asyncio.shield(episode.opening)
        except asyncio.CancelledError:
            if not episode.opening.cancelled():
                raise  # the caller was cancelled; the opening goes on
            raise ServiceError(410, f"episode {request.episode} was closed while it opened") from None

    async def step(self, episode_id: str, request: wire.StepRequest) -> wire.StepAnswer:
        """Runs the calls of one turn, once.

        Raises:
          ServiceError: 404 for an unknown episode, 409 for a step out of turn or another nonce for a step that was
          done,
            410 for an ended episode or an answer that is no longer kept.
        """
        if not wire.TOKEN.fullmatch(request.nonce):
            raise ServiceError(400, f"nonce {request.nonce[:80]!r}: 8 to 64 letters, digits, - and _ are allowed")
        episode = self._get(episode_id)
        known = episode.steps.get(request.step)
        if known is not None:
            nonce, task = known
            if nonce != request.nonce:
                self.counts.conflicts += 1
                raise ServiceError(409, f"step {request.step} was asked for with another nonce; it is not run again")
            self.counts.duplicates += 1
            return await asyncio.shield(task)
        if request.step != episode.next_step:
            self.counts.conflicts += 1
            gone = request.step < episode.next_step
            text = "was answered and is no longer kept" if gone else "is out of turn"
            raise ServiceError(410 if gone else 409, f"step {request.step} {text}; the next is {episode.next_step}")
        if episode.sandbox is None:
            raise ServiceError(409, f"episode {episode_id} is still opening; wait for the answer to POST /episodes")
        running = [task for _, task in episode.steps.values() if not task.done()]
        if running:
            raise ServiceError(409, f"step {episode.next_step - 1} is still running; one step at a time")
        episode.next_step += 1
        task = self._start(self._step(episode, episode.sandbox, request))
        episode.steps[request.step] = (request.nonce, task)
        while len(episode.steps) > self._limits.answers:
            episode.steps.popitem(last=False)
        return await asyncio.shield(task)

    def heartbeat(self, episode_id: str) -> None:
        """A sign of life from the client.

        Raises:
          ServiceError: 404 for an unknown episode, 410 for one that is over.
        """
        episode = self._get(episode_id)
        if episode.sandbox is not None and not episode.sandbox.heartbeat():
            raise ServiceError(410, f"the lease of episode {episode_id} is over", episode.sandbox.outcome)

    def screenshot(self, episode_id: str, sha256: str) -> Screenshot:
        """One of the newest screenshots of an episode, by content hash.

        Raises:
          ServiceError: 404 if the episode never had it or it is no longer kept.
        """
        shot = self._get(episode_id).shots.get(sha256)
        if shot is None:
            raise ServiceError(404, f"screenshot {sha256[:12]} is not among the newest {self._limits.screenshots}")
        return shot

    async def close(self, episode_id: str, outcome: Outcome | None = None) -> Outcome:
        """Ends an episode and returns the ending that stands: its own if it had one, else `outcome`, else cancelled.

        Raises:
          ServiceError: 404 for an episode this server has never had, or has forgotten.
        """
        if episode_id in self._tombstones:
            return self._tombstones[episode_id]
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise ServiceError(404, f"there is no episode {episode_id[:80]!r}")
        if episode.closing is None:
            episode.closing = self._start(self._close(episode_id, episode, outcome))
        return await asyncio.shield(episode.closing)

    def sweep(self) -> None:
        """Buries episodes whose lease was taken back because their client fell silent."""
        for episode_id, episode in list(self._episodes.items()):
            if episode.sandbox is not None and episode.sandbox.released and episode.closing is None:
                episode.closing = self._start(self._close(episode_id, episode, None))

    async def drain(self, deadline_s: float) -> None:
        """Takes no new episode, lets the open ones go on for `deadline_s`, then ends them as cancelled/shutdown."""
        self.draining = True
        end = time.monotonic() + deadline_s
        while self._episodes and time.monotonic() < end:  # noqa: ASYNC110 - once in the life of a server
            await asyncio.sleep(0.05)
        for episode_id in list(self._episodes):
            await self.close(episode_id, _shutdown(Phase.STEP))
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen here, so that a client that hung up leaves no warning

    def _get(self, episode_id: str) -> _Episode:
        self._refuse_if_buried(episode_id)
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise ServiceError(404, f"there is no episode {episode_id[:80]!r}")
        return episode

    def _refuse_if_buried(self, episode_id: str) -> None:
        outcome = self._tombstones.get(episode_id)
        if outcome is not None:
            raise ServiceError(410, f"episode {episode_id} is over: {outcome.key}", outcome)

    async def _open(self, episode: _Episode) -> wire.StepAnswer:
        request = episode.request
        try:
            episode.sandbox = await self._source.acquire(wait_s=min(max(0.0, request.wait_s), self._limits.max_wait_s))
        except NoSandbox as error:
            # No tombstone: with a place free, the same request may succeed later.
            self._episodes.pop(request.episode, None)
            raise ServiceError(503, str(error), error.outcome) from error
        except BaseException:
            self._episodes.pop(request.episode, None)
            raise
        assert episode.sandbox is not None
        self.counts.opened += 1
        return self._answer(episode, await episode.sandbox.reset(request.task))

    async def _step(self, episode: _Episode, sandbox: EpisodeSandbox, request: wire.StepRequest) -> wire.StepAnswer:
        began = time.monotonic()
        result = await sandbox.step(request.calls)
        self.counts.steps += 1
        self.counts.calls += len(request.calls)
        self.counts.step_seconds[0] += time.monotonic() - began
        self.counts.step_seconds[1] += 1
        return self._answer(episode, result)

    def _answer(self, episode: _Episode, result: StepResult) -> wire.StepAnswer:
        answer, shot = wire.split(result, ttl_s=self._ttl_s)
        if shot is not None and answer.screenshot is not None:
            episode.shots[answer.screenshot.sha256] = shot
            episode.shots.move_to_end(answer.screenshot.sha256)
            while len(episode.shots) > self._limits.screenshots:
                episode.shots.popitem(last=False)
        return answer

    async def _close(self, episode_id: str, episode: _Episode, outcome: Outcome | None) -> Outcome:
        if episode.opening is not None and not episode.opening.done():
            episode.opening.cancel()
            await asyncio.wait({episode.opening})
        sandbox = episode.sandbox
        stands = outcome or Outcome(
            reason=Reason.CANCELLED, detail="operator", phase=Phase.RELEASE, message="closed without an ending"
        )
        if sandbox is not None:
            stands = sandbox.finish(stands)
            await sandbox.close()
        self._episodes.pop(episode_id, None)
        self._tombstones[episode_id] = stands
        while len(self._tombstones) > self._limits.tombstones:
            self._tombstones.popitem(last=False)
        return stands


def _shutdown(phase: Phase) -> Outcome:
    return Outcome(reason=Reason.CANCELLED, detail="shutdown", phase=phase, message="the server is shutting down")
