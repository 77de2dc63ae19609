"""The rollout engine: one thread that owns the device, and doors to it for any other thread or event loop.

    engine = Engine(config, processor=processor, special=tokens.special, settings=EngineSettings())
    with engine:                                     # compiles everything, starts the thread
        engine.publish(0, params)                    # nothing is answered before this
        future = engine.submit(Request(ids=…, pictures=…, sampling=…))
        generation = await engine.generate(trunk, leaf, sampling)     # the harness's `Policy`

A request is looked at on a small pool of threads (pictures decoded, positions counted), then waits in the scheduler's
queue. The engine's thread plans a step, runs it, hands out what came out, and looks at its mailbox: new requests,
abandoned ones, new weights. Whatever is wrong with one request ends that request alone. An error of the device ends
all that were on it and begins with empty memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from owrl_jax.agent.policy import Generation, Leaf, PolicyFailed, Sampling
from owrl_jax.engine.device import Device
from owrl_jax.engine.errors import (
    BadRequest,
    Closed,
    DeadlineExceeded,
    EngineError,
    NotFinite,
    NoWeights,
    Overloaded,
)
from owrl_jax.engine.intake import Intake
from owrl_jax.engine.request import Completion, Request, SpecialTokens, Token
from owrl_jax.engine.scheduler import Scheduler
from owrl_jax.engine.session import Plan, Session, State
from owrl_jax.engine.settings import EngineSettings
from owrl_jax.engine.stats import EngineStats
from owrl_jax.models.processor import ImageProcessor
from owrl_jax.models.qwen3_vl.config import ModelConfig
from owrl_jax.models.run import Params, Run

log = logging.getLogger(__name__)

_COMPILED = "/jax/core/compile/backend_compile_duration"


class Engine:
    """See the head of the file. Implements `owrl_jax.agent.policy.Policy`.

    Args:
      config: the model.
      processor: how pictures become patches; None for a text-only model.
      special: ids of the vocabulary that end a response, and those that are never sampled.
      settings: sizes and limits.
      run: compute dtype and mesh; float32 on one device if None.
      clock: seconds, for deadlines.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        processor: ImageProcessor | None = None,
        special: SpecialTokens,
        settings: EngineSettings | None = None,
        run: Run | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.vision is not None and processor is None:
            raise ValueError("a model that sees needs an image processor: give processor=ImageProcessor.load(folder)")
        self.config, self.processor, self.special = config, processor, special
        self.settings = settings or EngineSettings()
        self.run = run or Run()
        self._clock = clock
        banned = {special.image_pad, special.video_pad, config.image_token, config.video_token}
        self._banned = tuple(sorted(i for i in banned if 0 <= i < config.text.vocab))
        self._scheduler = Scheduler(self.settings)
        self._device = Device(config, self.settings, self.run, self._banned)
        self._numbers = itertools.count()
        self._mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0  # accepted and not yet admitted
        self._intake = Intake(config, processor, special, self.settings)
        self._version = -1
        self._counts: dict[str, int] = dict.fromkeys(
            ("submitted", "completed", "failed", "refused", "cancelled", "tokens", "steps", "publishes", "broken"), 0
        )
        self._recompiles = 0
        self._start_s = self._busy_s = 0.0
        self._thread: threading.Thread | None = None
        self._preparing: concurrent.futures.ThreadPoolExecutor | None = None
        self._open = False
        self._closing = False

    # --- life -------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the weights now in use; -1 before the first publish."""
        return self._version

    def start(self) -> None:
        """Compiles every program and starts the thread. Does nothing if it runs already.

        Raises:
          RuntimeError: if the engine was closed.
        """
        if self._open:
            return
        if self._closing:
            raise RuntimeError("a closed engine does not start again: make a new one")
        begin = time.perf_counter()
        self._device.compile()
        self._start_s = time.perf_counter() - begin
        self._preparing = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="engine-prepare")
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._open = True
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        self._thread.start()

    def close(self) -> None:
        """Fails everything that is not answered yet and ends the thread. Safe to call twice."""
        self._closing = True
        if not self._open:
            return
        self._open = False
        assert self._thread is not None and self._preparing is not None
        self._preparing.shutdown(wait=True)
        self._mail.put(self._shut)
        self._thread.join()
        with contextlib.suppress(Exception):
            jax.monitoring.unregister_event_duration_listener(self._on_event)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        # Listeners run in the thread that compiles.
        if event == _COMPILED and threading.current_thread() is self._thread:
            self._recompiles += 1

    # --- weights ----------------------------------------------------------------------------------------------------

    def publish(self, version: int, params: Params) -> None:
        """Swaps weights between two steps and returns when it is done. Caches of the old version are forgotten.

        With `weights="shared"` the engine reads the very arrays of `params` whose dtype is the compute dtype: keep them
        alive, and do not donate them to an update, until the next publish. Blocks for at most one step; call it from a
        thread, not from an event loop (`asyncio.to_thread`).

        Args:
          version: of the policy; stamped on every token sampled from now on. Must not go backwards.
          params: the parameter tree of `Qwen3VL.init` or `hf.load`.
        Raises:
          ValueError: if the version goes backwards, or the tree is not of this model; the old weights then stay.
          Closed: if the engine does not run.
        """
        if version < 0:
            raise ValueError(f"a policy version is 0 or more, got {version}")
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def swap() -> None:
            try:
                if version < self._version:
                    raise ValueError(f"version {version} is older than {self._version}, which is in use")
                self._device.set_weights(params)
                self._version = version
                self._scheduler.flush(restart=self.settings.on_publish == "restart")
                self._counts["publishes"] += 1
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with the tree, the caller is told
                done.set_exception(error)

        if not self._open:
            raise Closed("the engine does not run: call start() before publish()")
        self._mail.put(swap)
        while True:
            try:
                return done.result(timeout=1)
            except concurrent.futures.TimeoutError:
                if done.done():  # the swap itself ended with a TimeoutError
                    raise
                if self._thread is None:
                    raise Closed("the engine was closed before the weights were taken") from None

    # --- requests ---------------------------------------------------------------------------------------------------

    async def generate(self, trunk: tuple[int, ...], leaf: Leaf, sampling: Sampling) -> Generation:
        """One response to `trunk + leaf.ids`; see `Policy`. Cancelling the call abandons the request.

        Raises:
          PolicyFailed: with the reason.
        """
        try:
            pictures = tuple(p.screenshot.data for p in leaf.pictures)
            request = Request(ids=(*trunk, *leaf.ids), pictures=pictures, sampling=sampling)
            completion = await asyncio.wrap_future(self.submit(request))
        except EngineError as error:
            raise error.policy_failed() from error
        return completion.generation

    def submit(self, request: Request) -> concurrent.futures.Future[Completion]:
        """Hands in a request from any thread. The future ends with a `Completion` or an `EngineError`.

        `cancel()` on the future abandons the request, also while it runs.
        """
        future: concurrent.futures.Future[Completion] = concurrent.futures.Future()
        with self._lock:
            self._counts["submitted"] += 1
            refusal = self._refusal()
            if refusal is None:
                self._queued += 1
        if refusal is not None:
            self._end(future, refusal)
            return future
        assert self._preparing is not None
        number, arrived = next(self._numbers), self._clock()
        try:
            self._preparing.submit(self._prepare, number, arrived, request, future)
        except RuntimeError:  # closed in between
            with self._lock:
                self._queued -= 1
            self._end(future, Closed("the engine was closed"))
        return future

    def _refusal(self) -> EngineError | None:
        if not self._open:
            return Closed("the engine does not run")
        if self._version < 0:
            return NoWeights("no weights were published yet: call publish(version, params) first")
        if self._queued >= self.settings.max_queue:
            return Overloaded(f"{self._queued} requests wait already (max_queue): try again later")
        return None

    def _prepare(self, number: int, arrived: float, request: Request, future: concurrent.futures.Future) -> None:
        """Turns a request into a session, on a thread of its own."""
        try:
            session = self._intake.session(number, arrived, request, future)
        except EngineError as error:
            self._leave_queue()
            self._end(future, error)
        except Exception as error:
            log.exception("a request could not be prepared")
            self._leave_queue()
            self._end(future, BadRequest(f"the request could not be read ({type(error).__name__}: {error})"))
        else:
            self._mail.put(lambda: self._enter(session))

    def _leave_queue(self) -> None:
        with self._lock:
            self._queued -= 1

    # --- the thread -------------------------------------------------------------------------------------------------

    def _enter(self, session: Session) -> None:
        if not session.future.cancelled():
            self._scheduler.add(session)
            return
        self._leave_queue()
        self._counts["cancelled"] += 1

    def _loop(self) -> None:
        while True:
            try:
                self._read_mail(block=not self._scheduler.sessions())
                if self._thread is None:
                    return
                begin = time.perf_counter()
                self._sweep()
                self._step()
                self._busy_s += time.perf_counter() - begin
            except Exception as error:  # of the device, or a mistake here: everybody is told, memory starts afresh
                log.exception("an engine step failed")
                self._break(error)

    def _read_mail(self, *, block: bool) -> None:
        with contextlib.suppress(queue.Empty):
            while self._thread is not None:
                self._mail.get(block)()
                block = False

    def _shut(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._mail.get_nowait()()
        for session in self._scheduler.sessions():
            self._fail(session, Closed("the engine was closed"))
        self._thread = None

    def _sweep(self) -> None:
        """Ends what was abandoned or is late."""
        now = self._clock()
        for session in self._scheduler.sessions():
            if session.future.cancelled():
                self._counts["cancelled"] += 1
                self._remove(session)
            elif now > session.deadline:
                waited = now - session.arrived
                made = len(session.answer)
                self._fail(session, DeadlineExceeded(f"{waited:.1f} s have passed and {made} tokens were made"))

    def _step(self) -> None:
        scheduler, device = self._scheduler, self._device
        before = sum(s.admitted is None for s in scheduler.waiting)
        plan = scheduler.plan(self._clock())
        admitted = before - sum(s.admitted is None for s in scheduler.waiting)
        if admitted:
            with self._lock:
                self._queued -= admitted
        if plan.empty:
            if scheduler.running and not scheduler.waiting and len(scheduler.running) == 1:
                raise RuntimeError("the only running request cannot go on: the plan is empty")
            return
        self._counts["steps"] += 1
        for run, entry in plan.encode:
            device.encode(run, entry)
        waiting = device.prefill(plan.prefill) if plan.prefill else None
        if plan.decode:
            decoded = device.decode(plan.decode, plan.steps)
            for session, (tokens, finite) in zip(plan.decode, decoded, strict=True):
                self._take(session, tokens, finite)
        if waiting is not None:
            self._take_prefill(plan, waiting())

    def _take_prefill(self, plan: Plan, drawn: list[tuple[Token, bool]]) -> None:
        for segment, (token, finite) in zip(plan.prefill, drawn, strict=True):
            if not finite:
                if len(plan.prefill) > 1:
                    self._scheduler.suspect(segment.session)
                else:
                    self._fail(segment.session, NotFinite("the model's logits for this prompt are NaN or infinite"))
                self._device.scrub()
                continue
            self._scheduler.commit_prefill(segment)
            if segment.final:
                self._take(segment.session, [token], finite)

    def _take(self, session: Session, tokens: list[Token], finite: bool) -> None:
        """New tokens of a session, which may be its last."""
        if session.state == State.DONE:
            return
        if not finite:
            self._fail(session, NotFinite("the model's logits for this response became NaN or infinite"))
            self._device.scrub()
            return
        now = self._clock()
        tokens = [dataclasses.replace(t, version=self._version) for t in tokens]
        self._scheduler.commit_token(session, tokens, now)
        self._counts["tokens"] += len(tokens)
        if session.request.on_token is not None:
            try:
                session.request.on_token(tuple(tokens))
            except Exception as error:  # noqa: BLE001 - a caller's mistake, and that caller's alone
                self._fail(session, error)
                return
        stopped = session.answer[-1].id in session.stop
        if not stopped and session.remaining > 0:
            return
        assert session.admitted is not None and session.first_token is not None
        completion = Completion(
            tokens=tuple(session.answer),
            finish="stop" if stopped else "length",
            prompt_tokens=session.prompt,
            cached_tokens=session.cached,
            preemptions=session.preemptions,
            queue_s=session.admitted - session.arrived,
            prefill_s=session.first_token - session.admitted,
            decode_s=now - session.first_token,
        )
        self._scheduler.finish(session)
        self._counts["completed"] += 1
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # abandoned at the last moment
            session.future.set_result(completion)

    def _remove(self, session: Session) -> None:
        if session.admitted is None:
            self._leave_queue()
        self._scheduler.remove(session)

    def _fail(self, session: Session, error: Exception) -> None:
        self._remove(session)
        self._end(session.future, error)

    def _end(self, future: concurrent.futures.Future, error: Exception) -> None:
        with self._lock:
            self._counts["refused" if isinstance(error, BadRequest | Overloaded | NoWeights) else "failed"] += 1
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            future.set_exception(error)

    def _break(self, error: Exception) -> None:
        self._counts["broken"] += 1
        for session in self._scheduler.sessions():
            session.state = State.DONE
            if session.admitted is None:
                self._leave_queue()
            self._end(session.future, Closed(f"the engine's device failed ({type(error).__name__}: {error})"))
        self._scheduler = Scheduler(self.settings)
        self._device.reset()

    # --- numbers ----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """What happened so far; a snapshot, safe from any thread."""
        s, w, n = self._scheduler, self._device.work, self._counts
        c = s.counts
        return EngineStats(
            version=self._version,
            requests_submitted=n["submitted"],
            requests_completed=n["completed"],
            requests_failed=n["failed"],
            requests_refused=n["refused"],
            requests_cancelled=n["cancelled"],
            prompt_tokens_asked=c.prompt_tokens_asked,
            prompt_tokens_cached=c.prompt_tokens_cached,
            prompt_tokens_computed=c.prompt_tokens_computed,
            tokens_recomputed=c.tokens_recomputed,
            output_tokens=n["tokens"],
            preemptions=c.preemptions,
            pages_evicted=c.pages_evicted,
            vision_hits=s.vision.hits,
            vision_misses=s.vision.misses,
            pictures_encoded=w.pictures_encoded,
            steps=n["steps"],
            prefill_calls=w.prefill_calls,
            decode_calls=w.decode_calls,
            decode_steps=w.decode_steps,
            pages_copied=w.pages_copied,
            recompiles=self._recompiles,
            publishes=n["publishes"],
            device_failures=n["broken"],
            pages_total=s.pool.total,
            pages_used_now=s.pool.used,
            pages_cached_now=s.tree.nodes,
            waiting_now=self._queued,
            running_now=len(s.running),
            start_s=self._start_s,
            busy_s=self._busy_s,
        )


__all__ = ["Engine", "EngineStats", "PolicyFailed"]
