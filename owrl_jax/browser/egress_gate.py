"""The way out of one episode: its policy, its secret, its account, and the life of each of its connections.

A gate is made by `egress.EgressProxy.open` and is what the sandbox of an episode talks to: it signs the browser in,
says why a host could not be reached (with a proxy, Chromium itself only knows that the tunnel failed), and cuts
everything when the episode ends.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

from owrl_jax.browser.egress_fetch import fetch_text
from owrl_jax.browser.egress_http import MARKER, BadMessage, Request, parse_response, read_head
from owrl_jax.browser.policy import Refusal, UrlPolicy, url_host_port
from owrl_jax.browser.reach import Failure, Reach, Refused, Unreachable
from owrl_jax.browser.relay import answer, cancel_all, pump, send_body, tunnel

SIGN_IN_URL = "http://sign-in.owrl.invalid/"
_SIGN_IN_HOST = "sign-in.owrl.invalid"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EgressLimits:
    """Bounds of one gate. Sizes in bytes, times in seconds."""

    head_bytes: int = 64 * 1024
    request_body_bytes: int = 64 * 1024 * 1024
    connections: int = 256  # open at once; Chromium itself stops at 32 per proxy plus WebSockets
    total_bytes: int = 2 * 1024**3  # both directions, whole episode
    idle_s: float = 300.0  # an open connection that has asked nothing yet (browsers open spare ones)
    response_s: float = 60.0  # from request to the head of the response


@dataclasses.dataclass(frozen=True, kw_only=True)
class EgressEvent:
    """One thing the proxy decided or saw.

    Attributes:
      verdict: `allowed` (connected), `refused` (by policy), `failed` (upstream), `closed` (end of an allowed one).
      detail: the refusal's or failure's detail, else empty.
      status: HTTP status where the proxy can see it (plain http), else None.
      sent, received: bytes to and from the host (`closed` only).
    """

    time: float
    episode: str
    host: str
    port: int
    tunnel: bool
    verdict: str
    detail: str = ""
    address: str = ""
    status: int | None = None
    sent: int = 0
    received: int = 0
    duration_ms: float = 0.0


class ConnectionGovernor(Protocol):
    """What the proxy asks before it opens a connection (`hosts.HostGovernor`)."""

    async def admit_connection(self, host: str) -> None:
        """Returns when a connection to `host` may start."""
        ...


class EgressError(RuntimeError):
    """The browser could not be signed in to the proxy, or the proxy is not running."""


class EgressGate:
    """The way out of one episode; made by `EgressProxy.open`.

    Attributes:
      episode, policy: as given.
      username, password: its proxy credentials.
      nonce: stands in the marker header of answers made by the proxy itself, so that a site cannot imitate one.
      sent, received: bytes so far.
    """

    def __init__(
        self,
        *,
        episode: str,
        policy: UrlPolicy,
        server: str,
        reach: Reach,
        limits: EgressLimits,
        governor: ConnectionGovernor | None,
        publish: Callable[[EgressEvent, list[Callable[[EgressEvent], None]]], None],
        forget: Callable[[str], object],
    ):
        # The name goes into Basic credentials, where a colon would split it.
        if ":" in episode or not episode.isascii() or not episode.isprintable():
            raise ValueError(f"an episode name must be printable ASCII without a colon, got {episode!r}")
        self.episode, self.policy, self.server = episode, policy, server
        self.username, self.password, self.nonce = episode, secrets.token_urlsafe(24), secrets.token_hex(8)
        self._reach, self._limits, self._governor = reach, limits, governor
        self._publish, self._forget = publish, forget
        self.sent = self.received = 0
        self._tasks: set[asyncio.Task] = set()
        self._failures: collections.OrderedDict[str, Failure] = collections.OrderedDict()
        self._refusals: collections.OrderedDict[str, Refusal] = collections.OrderedDict()
        self._callbacks: list[Callable[[EgressEvent], None]] = []
        self._closed = False

    def playwright_proxy(self, *, credentials: bool = False) -> dict[str, str]:
        """The `proxy=` argument of `browser.new_context`. With `credentials` no `sign_in` is needed, at the price of
        Playwright intercepting every request."""
        settings = {"server": self.server, "bypass": "<-loopback>"}
        return settings | ({"username": self.username, "password": self.password} if credentials else {})

    async def sign_in(self, context: Any, page: Any, *, timeout_s: float = 5.0) -> None:
        """Teaches a Playwright context the gate's credentials, on a page that still shows `about:blank`.

        Raises:
          EgressError: if it did not work within `timeout_s`; the context then reaches nothing.
        """
        cdp = await context.new_cdp_session(page)
        answers: set[asyncio.Future] = set()

        def send(method: str, **params: Any) -> None:
            task = asyncio.ensure_future(cdp.send(method, params))
            answers.add(task)

        credentials = {"response": "ProvideCredentials", "username": self.username, "password": self.password}
        cdp.on(
            "Fetch.authRequired",
            lambda e: send("Fetch.continueWithAuth", requestId=e["requestId"], authChallengeResponse=credentials),
        )
        cdp.on("Fetch.requestPaused", lambda e: send("Fetch.continueRequest", requestId=e["requestId"]))
        try:
            async with asyncio.timeout(timeout_s):
                patterns = [{"urlPattern": SIGN_IN_URL + "*"}]
                await cdp.send("Fetch.enable", {"handleAuthRequests": True, "patterns": patterns})
                fetch = f"fetch('{SIGN_IN_URL}', {{mode: 'no-cors', cache: 'no-store'}}).then(() => true)"
                await page.evaluate(fetch)
                await cdp.send("Fetch.disable")
        except TimeoutError as error:
            raise EgressError(f"the browser did not sign in to the egress proxy within {timeout_s:g} s") from error
        except Exception as error:
            raise EgressError(f"the browser could not sign in to the egress proxy: {error}") from error
        finally:
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)
            with contextlib.suppress(Exception):  # the page may be gone; then so is its session
                await asyncio.wait_for(cdp.detach(), 1.0)

    def subscribe(self, callback: Callable[[EgressEvent], None]) -> Callable[[], None]:
        """Calls `callback` for each event of this gate, in the event loop; returns the way to stop it."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    def failure_for(self, url_or_host: str) -> Failure | None:
        """Why the host could not be reached the last time, None if it could or was not tried."""
        return self._failures.get(_host_of(url_or_host))

    def refusal_for(self, url_or_host: str) -> Refusal | None:
        """The policy's last refusal for the host, None if there was none since it was last reached."""
        return self._refusals.get(_host_of(url_or_host))

    def is_own_answer(self, headers: dict[str, str]) -> bool:
        """Whether a response (lower-case header names) was written by the proxy and not by a site."""
        return headers.get(MARKER.lower(), "").startswith(self.nonce + " ")

    async def fetch_text(self, url: str, /, *, max_bytes: int = 512 * 1024, timeout_s: float = 10.0) -> tuple[int, str]:
        """(status, text) of a small resource, under this gate's policy; see `egress_fetch.fetch_text`.

        Raises:
          egress_fetch.FetchError: an OSError that says why.
        """
        return await fetch_text(url, reach=self._reach, policy=self.policy, max_bytes=max_bytes, timeout_s=timeout_s)

    async def close(self) -> None:
        """Revokes the secret and cuts the episode's connections. May be called twice."""
        self._closed = True
        self._forget(self.episode)
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The life of one connection.

    async def handle(
        self, request: Request, rest: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serves one authenticated connection; called by the proxy."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if request.host == _SIGN_IN_HOST:
                await answer(writer, 200, f"{MARKER}: {self.nonce} signed-in -", "signed in")
                return
            await self._relay(request, rest, reader, writer)
        finally:
            self._tasks.discard(task)

    async def _relay(
        self, request: Request, rest: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        started = time.monotonic()
        host, port = request.host, request.port
        upstream: asyncio.StreamWriter | None = None
        meter = _Meter(self)
        status: int | None = None
        try:
            self._check_bounds(host, port)
            if self._governor is not None and not self.policy.is_exception(host, port):
                await self._governor.admit_connection(host)
            source, upstream, address = await self._reach.connect(host, port, self.policy)
            self._failures.pop(host, None)
            self._refusals.pop(host, None)
            self._emit(request, "allowed", address=str(address))
            if request.method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await tunnel(pump(reader, upstream, meter.up, rest), pump(source, writer, meter.down))
            else:
                status = await self._exchange(request, rest, reader, writer, source, upstream, meter)
        except Refused as error:
            _remember(self._refusals, host, error.refusal)
            self._emit(request, "refused", error.refusal.detail)
            mark = f"{MARKER}: {self.nonce} refused {error.refusal.detail}"
            await answer(writer, 403, mark, f"Blocked by policy. {error.refusal.message}")
        except Unreachable as error:
            _remember(self._failures, host, error.failure)
            self._emit(request, "failed", error.failure.detail)
            code = 504 if error.failure.detail == "nav_timeout" else 502
            mark = f"{MARKER}: {self.nonce} failed {error.failure.detail}"
            await answer(writer, code, mark, error.failure.message)
        finally:
            if upstream is not None:
                upstream.transport.abort()
                took_ms = (time.monotonic() - started) * 1e3
                self._emit(
                    request, "closed", status=status, sent=meter.sent, received=meter.received, duration_ms=took_ms
                )

    async def _exchange(
        self,
        request: Request,
        rest: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        source: asyncio.StreamReader,
        upstream: asyncio.StreamWriter,
        meter: _Meter,
    ) -> int | None:
        """One plain request and its response; returns the status, None if the browser left before there was one.

        Raises:
          Unreachable: if no usable response came.
        """
        upstream.write(request.forwarded())
        # Two sides at once: a browser that gives up ends the exchange, whatever the server is doing.
        client = asyncio.ensure_future(send_body(reader, upstream, rest, request.length, meter.up))
        server = asyncio.ensure_future(self._response(request, writer, source, meter))
        try:
            await asyncio.wait([client, server], return_when=asyncio.FIRST_COMPLETED)
            return server.result() if server.done() else None
        finally:
            await cancel_all(client, server)

    async def _response(
        self, request: Request, writer: asyncio.StreamWriter, source: asyncio.StreamReader, meter: _Meter
    ) -> int:
        limits = self._limits
        tail = b""

        def fail(detail: str, why: str) -> Unreachable:
            message = f"{request.host}:{request.port} {why}"
            return Unreachable(Failure(detail=detail, host=request.host, port=request.port, message=message))

        try:
            async with asyncio.timeout(limits.response_s):
                while True:
                    head, tail = await read_head(source, limits.head_bytes, strict=False, first=tail)
                    response = parse_response(head)
                    if response.status in (101, 407):
                        raise BadMessage(f"a status {response.status} that nobody asked for")
                    writer.write(response.forwarded())
                    if response.status >= 200:
                        break
        except TimeoutError:
            raise fail("nav_timeout", f"sent no response in {limits.response_s:g} s") from None
        except (EOFError, OSError):
            raise fail("nav_aborted", "closed the connection without a response") from None
        except BadMessage as error:
            raise fail("bad_response", f"answered with something that is not HTTP: {error}") from None
        with contextlib.suppress(OSError):  # cut within the body: the browser notices by the missing rest
            await pump(source, writer, meter.down, tail)
        return response.status

    def _check_bounds(self, host: str, port: int) -> None:
        limits = self._limits
        why = None
        if self._closed:
            why = "the episode is over"
        elif len(self._tasks) > limits.connections:
            why = f"the page holds more than {limits.connections} connections"
        elif self.sent + self.received > limits.total_bytes:
            why = f"the episode moved more than {limits.total_bytes} bytes"
        if why is not None:
            raise Unreachable(
                Failure(detail="page_hostile", host=host, port=port, message=f"{host} was not asked: {why}")
            )

    def _emit(self, request: Request, verdict: str, detail: str = "", **fields: Any) -> None:
        event = EgressEvent(
            time=time.time(),
            episode=self.episode,
            host=request.host,
            port=request.port,
            tunnel=request.method == "CONNECT",
            verdict=verdict,
            detail=detail,
            **fields,
        )
        self._publish(event, self._callbacks)


class _Meter:
    """Counts the bytes of one connection into its gate and ends it when the episode's budget is spent."""

    def __init__(self, gate: EgressGate):
        self._gate = gate
        self.sent = self.received = 0

    def up(self, n: int) -> None:
        self.sent += n
        self._gate.sent += n
        self._check()

    def down(self, n: int) -> None:
        self.received += n
        self._gate.received += n
        self._check()

    def _check(self) -> None:
        if self._gate.sent + self._gate.received > self._gate._limits.total_bytes:
            raise ConnectionAbortedError("the episode's byte budget is spent")


def _host_of(url_or_host: str) -> str:
    found = url_host_port(url_or_host if "://" in url_or_host else f"http://{url_or_host}")
    return found[0] if found else url_or_host.lower()


def _remember(table: collections.OrderedDict, host: str, value: Any) -> None:
    table[host] = value
    table.move_to_end(host)
    while len(table) > 256:
        table.popitem(last=False)
