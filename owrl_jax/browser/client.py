"""The sandbox on another host: the same protocol as the local one, over HTTP, with outcomes instead of exceptions.

    async with RemoteHost("http://10.0.0.7:8740", token=token) as host:
        sandbox = host.sandbox()
        first = await sandbox.reset(task)
        ...
        await sandbox.close()

Every request names what it asks for (episode, step, nonce), so a request that met a fault on the way is sent again
without any danger of acting twice. When the server cannot be reached, answers nonsense or has died, the call ends
with `sandbox_error/transport` within its deadline; when the server refuses, with the outcome it gives. A heartbeat
runs beside the episode, so that the server takes the browser back soon after this process has died, and no sooner.

Invariant: `reset`, `step` and `close` return within their deadlines and raise nothing but cancellation.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

import httpx
import msgspec

from owrl_jax.browser import wire
from owrl_jax.outcome import Outcome, Phase, Reason
from owrl_jax.types import CallResult, CallStatus, StepResult, Task, ToolCall

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_AGAIN = frozenset({502, 504})  # a proxy on the way, not our server


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientDeadlines:
    """Seconds, all attempts of one call together, except `attempt_s` and `connect_s`, which bound one.

    A server that cannot be reached at all is given up after `unreachable_s`, long before the step's deadline: it has
    probably died, and the episode with it.
    """

    connect_s: float = 5.0
    attempt_s: float = 75.0  # longer than the server's own step deadline (45 s and a `wait` of up to 20 s)
    open_s: float = 240.0
    step_s: float = 120.0
    close_s: float = 20.0
    unreachable_s: float = 15.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} must be positive, got {getattr(self, field.name)}")


class _Refused(Exception):
    """The server's own answer: nothing a repetition would change."""

    def __init__(self, status: int, answer: wire.ErrorAnswer) -> None:
        super().__init__(answer.error)
        self.status = status
        self.answer = answer


class _Lost(Exception):
    """No usable answer within the deadline."""


class RemoteHost:
    """One server: a connection pool, a cache of screenshots by hash, and sandboxes on it.

    Args:
      url: base address, e.g. `http://127.0.0.1:8740`.
      token: the server's secret, if it has one.
      deadlines: see there.
      transport: httpx transport, for tests that need a bad network.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        deadlines: ClientDeadlines | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.deadlines = deadlines or ClientDeadlines()
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(self.deadlines.attempt_s, connect=self.deadlines.connect_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
            trust_env=False,
        )
        self._shots: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self.retries = 0  # requests sent again, for metrics

    async def __aenter__(self) -> RemoteHost:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def sandbox(self) -> RemoteSandbox:
        """A sandbox for one episode; nothing is asked of the server before `reset`."""
        return RemoteSandbox(self)

    async def health(self) -> dict[str, Any]:
        """The server's health record.

        Raises:
          httpx.HTTPError: if it cannot be reached. This is for operators and tests; episodes never need it.
        """
        response = await self._http.get("/health", timeout=self.deadlines.connect_s)
        return msgspec.json.decode(response.content)

    async def close(self) -> None:
        """Closes the connections. Sandboxes must be closed before."""
        await self._http.aclose()

    async def _call(self, method: str, path: str, body: object, type_: type[_T], deadline_s: float) -> _T:
        """One idempotent request, sent again until it is answered.

        Raises:
          _Refused: with the server's answer.
          _Lost: if there was none in time.
        """
        return await self._send(method, path, body, deadline_s, lambda r: msgspec.json.decode(r.content, type=type_))

    async def _screenshot(self, episode: str, sha256: str, deadline_s: float) -> bytes:
        if sha256 in self._shots:
            self._shots.move_to_end(sha256)
            return self._shots[sha256]
        data = await self._send(
            "GET", f"/episodes/{episode}/screenshots/{sha256}", None, deadline_s, lambda r: _checked(r, sha256)
        )
        self._shots[sha256] = data
        while len(self._shots) > 64:
            self._shots.popitem(last=False)
        return data

    async def _send(self, method: str, path: str, body: object, deadline_s: float, read: Any) -> Any:
        began = time.monotonic()
        last_heard = began
        content = None if body is None else wire.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        pause, fault = 0.1, ""
        while True:
            left = deadline_s - (time.monotonic() - began)
            if left <= 0:
                raise _Lost(f"no usable answer to {method} {path} within {deadline_s:g} s; last: {fault or 'silence'}")
            wait_s = pause
            try:
                async with asyncio.timeout(left):
                    response = await self._http.request(method, path, content=content, headers=headers)
                last_heard = time.monotonic()
                if response.status_code == 200:
                    return read(response)
                if response.status_code not in _AGAIN:
                    refusal = _refusal(response)
                    if not _may_wait(refusal):
                        raise refusal
                    wait_s = _retry_after(response, pause)
                fault = f"HTTP {response.status_code}"
            except TimeoutError:
                continue  # the deadline; said above
            except (httpx.TransportError, msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
                fault = f"{type(error).__name__}: {error}"
                if isinstance(error, httpx.TransportError) and not isinstance(error, httpx.ReadTimeout):
                    if time.monotonic() - last_heard > self.deadlines.unreachable_s:
                        raise _Lost(f"{self.url} is gone: {fault}") from error
                else:
                    last_heard = time.monotonic()
            self.retries += 1
            await asyncio.sleep(min(wait_s, max(0.0, deadline_s - (time.monotonic() - began))))
            pause = min(2.0, pause * 2)


class RemoteSandbox:
    """One episode on a `RemoteHost`: the sandbox protocol."""

    def __init__(self, host: RemoteHost) -> None:
        self._host = host
        self._episode: str | None = None
        self._next_step = 0
        self._heart: asyncio.Task[None] | None = None
        self._closed = False
        self.outcome: Outcome | None = None

    def finish(self, outcome: Outcome) -> Outcome:
        """Says how the episode ended; the first word stands. The server learns of it in `close`."""
        if self.outcome is None:
            self.outcome = outcome
        return self.outcome

    async def reset(self, task: Task) -> StepResult:
        """Opens the episode: waits for a place, opens the start page. Once per sandbox."""
        if self._episode is not None:
            raise RuntimeError("a remote sandbox is for one episode: ask the host for another")
        self._episode = uuid.uuid4().hex
        deadline_s = self._host.deadlines.open_s
        request = wire.OpenRequest(episode=self._episode, task=task, wait_s=max(0.0, min(60.0, deadline_s / 2)))
        return await self._ask("/episodes", request, (), Phase.RESET, deadline_s)

    async def step(self, calls: Sequence[ToolCall]) -> StepResult:
        """Runs the calls of one turn. After the end they are skipped and the same outcome comes again."""
        if self._episode is None:
            raise RuntimeError("call reset(task) before step")
        if self.outcome is not None:
            return _refused_result(calls, self.outcome)
        request = wire.StepRequest(step=self._next_step, nonce=uuid.uuid4().hex, calls=tuple(calls))
        self._next_step += 1
        path = f"/episodes/{self._episode}/step"
        return await self._ask(path, request, calls, Phase.STEP, self._host.deadlines.step_s)

    async def close(self) -> None:
        """Gives the sandbox back. Any number of times; a server that cannot be told takes it back by itself."""
        heart, self._heart = self._heart, None
        if heart is not None:
            heart.cancel()
        episode = self._episode
        if episode is None or self._closed:
            return
        self._closed = True
        request = wire.CloseRequest(outcome=self.outcome)
        deadline_s = self._host.deadlines.close_s
        try:
            answer = await self._host._call("DELETE", f"/episodes/{episode}", request, wire.CloseAnswer, deadline_s)
            self.finish(answer.outcome)
        except (_Refused, _Lost) as error:
            _log.warning("episode %s was not closed by its server (its lease will run out): %s", episode, error)
            self.finish(_transport(str(error), Phase.RELEASE))

    async def _ask(
        self, path: str, request: object, calls: Sequence[ToolCall], phase: Phase, deadline_s: float
    ) -> StepResult:
        began = time.monotonic()
        assert self._episode is not None
        try:
            answer = await self._host._call("POST", path, request, wire.StepAnswer, deadline_s)
            data = None
            if answer.screenshot is not None:
                left = max(1.0, deadline_s - (time.monotonic() - began))
                data = await self._host._screenshot(self._episode, answer.screenshot.sha256, left)
            result = wire.join(answer, data)
        except _Refused as error:
            outcome = error.answer.outcome or _transport(f"HTTP {error.status}: {error}", phase, retryable=False)
            return _refused_result(calls, self.finish(outcome))
        except (_Lost, ValueError) as error:
            latency_ms = (time.monotonic() - began) * 1e3
            return _refused_result(calls, self.finish(_transport(str(error), phase, latency_ms=latency_ms)))
        if result.outcome is not None:
            self.finish(result.outcome)
        if self._heart is None and not self._closed and answer.ttl_s is not None:
            self._heart = asyncio.create_task(self._beat(self._episode, answer.ttl_s / 4), name="remote heartbeat")
        return result

    async def _beat(self, episode: str, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            with contextlib.suppress(_Refused, _Lost):  # the next step learns of it, with an outcome
                await self._host._call("POST", f"/episodes/{episode}/heartbeat", {}, dict, every_s)


def _checked(response: httpx.Response, sha256: str) -> bytes:
    if hashlib.sha256(response.content).hexdigest() != sha256:
        raise ValueError(f"screenshot {sha256[:12]} arrived damaged")
    return response.content


def _refusal(response: httpx.Response) -> _Refused:
    """The server's refusal; raises ValueError if it is not in our server's words (then it is a fault on the way)."""
    return _Refused(response.status_code, msgspec.json.decode(response.content, type=wire.ErrorAnswer))


def _may_wait(refusal: _Refused) -> bool:
    """Whether the same request may be granted later: no place just now."""
    outcome = refusal.answer.outcome
    return refusal.status == 503 and outcome is not None and outcome.detail == "no_capacity"


def _retry_after(response: httpx.Response, default_s: float) -> float:
    text = response.headers.get("retry-after", "")
    return min(10.0, float(text)) if text.replace(".", "", 1).isdigit() else default_s


def _transport(message: str, phase: Phase, **fields: Any) -> Outcome:
    return Outcome(reason=Reason.SANDBOX_ERROR, detail="transport", phase=phase, message=message[:400], **fields)


def _refused_result(calls: Sequence[ToolCall], outcome: Outcome) -> StepResult:
    line = f"Not run to its end: the episode is over ({outcome.key})."
    results = tuple(CallResult(name=call.name, status=CallStatus.SKIPPED, feedback=line) for call in calls)
    return StepResult(results=results, observation=None, outcome=outcome)
