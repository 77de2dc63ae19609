"""The only way out: an HTTP proxy on loopback through which a sandbox's browser must go.

Everything a page can cause (redirects, sub-resources, frames, popups, WebSockets, beacons, service workers) arrives
here as a plain request or a CONNECT. Each is resolved, checked and connected by `reach.Reach`, so the rules hold
wherever the request came from. In-page guards are for good messages only.

One `EgressProxy` serves a process; one `EgressGate` per episode carries its policy, its secret and its account. The
secret keeps other local processes from using the proxy and tells the episodes of one browser apart. Playwright's own
credentials would work too, but they switch on interception of every request for the life of the context (a page of 40
images loads in about twice the time); `EgressGate.sign_in` answers the one challenge instead, and Chromium then sends
the credentials by itself, for CONNECT and WebSockets as well.

Invariants: no connection without a valid secret; no packet to an address that the gate's policy has not passed; after
`close` or `stop` no task and no connection of theirs is left.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import dataclasses
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from owrl_jax.browser.egress_http import (
    MARKER,
    BadMessage,
    Request,
    parse_request,
    parse_response,
    read_head,
)
from owrl_jax.browser.policy import Refusal, UrlPolicy, url_host_port
from owrl_jax.browser.reach import BUFFER, Failure, Reach, Refused, Unreachable

logger = logging.getLogger(__name__)

SIGN_IN_URL = "http://sign-in.owrl.invalid/"
_SIGN_IN_HOST = "sign-in.owrl.invalid"
_LINGER_S = 10.0  # for a peer that still has to take or close something

# What Chromium must be told so that nothing goes around a proxy. Each line closes one way past it.
EGRESS_FLAGS: tuple[str, ...] = (
    "--disable-quic",  # HTTP/3 and WebTransport are UDP
    # WebRTC over UDP. Two spellings because chromium reads the first and chromium-headless-shell the second.
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    # No name is looked up by the browser, be it for prefetch or ICE servers. Proxied requests do not need it.
    "--dns-prefetch-disable",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    # Traffic of the browser itself, which belongs to no episode.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-sync",
    "--no-pings",
    "--no-first-run",
)


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


class EgressProxy:
    """The proxy of one process. An async context manager; `start` and `stop` do the same.

    Args:
      reach: resolver and dialler; the default asks the system.
      governor: paces connection starts per domain; None for no pacing.
      on_event: called for every event of every gate (audit). Must not block.
      limits: bounds of each gate.
    """

    def __init__(
        self,
        *,
        reach: Reach | None = None,
        governor: ConnectionGovernor | None = None,
        on_event: Callable[[EgressEvent], None] | None = None,
        limits: EgressLimits | None = None,
    ):
        self.reach = reach or Reach()
        self.limits = limits or EgressLimits()
        self._governor, self._on_event = governor, on_event
        self._gates: dict[str, EgressGate] = {}
        self._tasks: set[asyncio.Task] = set()
        self._server: asyncio.Server | None = None
        self.unauthenticated = 0  # requests without a valid secret

    async def __aenter__(self) -> EgressProxy:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens on a free port of 127.0.0.1."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=BUFFER, backlog=512)

    async def stop(self) -> None:
        """Cuts every connection, waits for every task, closes the port. May be called twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for gate in list(self._gates.values()):
            await gate.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if server is not None:
            await server.wait_closed()
        self.reach.close()

    @property
    def server(self) -> str:
        """`http://127.0.0.1:port`."""
        if self._server is None:
            raise EgressError("the egress proxy is not running: call start(), or use it as a context manager")
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def launch_flags(self) -> tuple[str, ...]:
        """Flags that send what belongs to no context here, where it is turned away for want of a secret."""
        return (f"--proxy-server={self.server}", "--proxy-bypass-list=<-loopback>")

    def open(self, *, episode: str, policy: UrlPolicy) -> EgressGate:
        """A gate for one episode.

        Raises:
          ValueError: if the episode already has one.
        """
        if episode in self._gates:
            raise ValueError(f"episode {episode!r} already has an egress gate; close it first")
        gate = EgressGate(proxy=self, episode=episode, policy=policy)
        self._gates[episode] = gate
        return gate

    # One task per connection, kept in `_tasks` until it ends.

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gate: EgressGate | None = None
        try:
            try:
                async with asyncio.timeout(self.limits.idle_s):
                    head, rest = await read_head(reader, self.limits.head_bytes, strict=True)
                request = parse_request(head, max_body=self.limits.request_body_bytes)
                gate = self._authenticate(request)
            except BadMessage as error:
                await _answer(writer, error.status, f"{MARKER}: - bad {error.status}", str(error))
                await _finish(writer)
                return
            if gate is None:
                self.unauthenticated += 1
                await _answer(writer, 407, 'Proxy-Authenticate: Basic realm="owrl"', "sign in to this proxy")
                await _finish(writer)
                return
            await gate._handle(request, rest, reader, writer)
        except (EOFError, TimeoutError, ConnectionError):
            pass  # the browser went away or never asked: nothing to answer, nothing to tell
        except Exception:
            logger.exception("egress proxy: unexpected error while serving a connection")
        else:
            await _finish(writer)
        finally:
            writer.transport.abort()

    def _authenticate(self, request: Request) -> EgressGate | None:
        scheme, _, token = (request.header("proxy-authorization") or "").partition(" ")
        if scheme.lower() != "basic":
            return None
        try:
            episode, _, secret = base64.b64decode(token.strip(), validate=True).decode().partition(":")
        except ValueError:
            return None
        gate = self._gates.get(episode)
        if gate is None or not hmac.compare_digest(gate.password.encode(), secret.encode()):
            return None
        return gate

    def _emit(self, event: EgressEvent, callbacks: list[Callable[[EgressEvent], None]]) -> None:
        for callback in [*([self._on_event] if self._on_event else []), *callbacks]:
            try:
                callback(event)
            except Exception:
                logger.exception("egress proxy: a subscriber failed on an event")


class EgressGate:
    """The way out of one episode; made by `EgressProxy.open`.

    Attributes:
      episode, policy: as given.
      username, password: its proxy credentials.
      nonce: stands in the marker header of answers made by the proxy itself, so that a site cannot imitate one.
      sent, received: bytes so far.
    """

    def __init__(self, *, proxy: EgressProxy, episode: str, policy: UrlPolicy):
        self._proxy = proxy
        self.episode, self.policy = episode, policy
        # The name goes into Basic credentials, where a colon would split it.
        self.username, self.password, self.nonce = episode, secrets.token_urlsafe(24), secrets.token_hex(8)
        if ":" in episode or not episode.isascii() or not episode.isprintable():
            raise ValueError(f"an episode name must be printable ASCII without a colon, got {episode!r}")
        self.sent = self.received = 0
        self._tasks: set[asyncio.Task] = set()
        self._failures: collections.OrderedDict[str, Failure] = collections.OrderedDict()
        self._refusals: collections.OrderedDict[str, Refusal] = collections.OrderedDict()
        self._callbacks: list[Callable[[EgressEvent], None]] = []
        self._closed = False

    def playwright_proxy(self, *, credentials: bool = False) -> dict[str, str]:
        """The `proxy=` argument of `browser.new_context`. With `credentials` no `sign_in` is needed, at the price of
        Playwright intercepting every request."""
        settings = {"server": self._proxy.server, "bypass": "<-loopback>"}
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

    async def close(self) -> None:
        """Revokes the secret and cuts the episode's connections. May be called twice."""
        self._closed = True
        self._proxy._gates.pop(self.episode, None)
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The life of one connection.

    async def _handle(
        self, request: Request, rest: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if request.host == _SIGN_IN_HOST:
                await _answer(writer, 200, f"{MARKER}: {self.nonce} signed-in -", "signed in")
                return
            await self._relay(request, rest, reader, writer)
        finally:
            self._tasks.discard(task)

    async def _relay(
        self, request: Request, rest: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        started = time.monotonic()
        host, port, tunnel = request.host, request.port, request.method == "CONNECT"
        upstream: asyncio.StreamWriter | None = None
        meter = _Meter(self)
        status: int | None = None
        try:
            self._check_bounds(host, port)
            if self._proxy._governor is not None and not self.policy.is_exception(host, port):
                await self._proxy._governor.admit_connection(host)
            source, upstream, address = await self._proxy.reach.connect(host, port, self.policy)
            self._failures.pop(host, None)
            self._refusals.pop(host, None)
            self._emit(request, "allowed", address=str(address))
            if tunnel:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await _tunnel(_pump(reader, upstream, meter.up, rest), _pump(source, writer, meter.down))
            else:
                status = await self._exchange(request, rest, reader, writer, source, upstream, meter)
            self._emit(
                request,
                "closed",
                address=str(address),
                status=status,
                sent=meter.sent,
                received=meter.received,
                duration_ms=(time.monotonic() - started) * 1e3,
            )
        except Refused as error:
            _remember(self._refusals, host, error.refusal)
            self._emit(request, "refused", error.refusal.detail)
            mark = f"{MARKER}: {self.nonce} refused {error.refusal.detail}"
            await _answer(writer, 403, mark, f"Blocked by policy. {error.refusal.message}")
        except Unreachable as error:
            _remember(self._failures, host, error.failure)
            self._emit(request, "failed", error.failure.detail)
            code = 504 if error.failure.detail == "nav_timeout" else 502
            mark = f"{MARKER}: {self.nonce} failed {error.failure.detail}"
            await _answer(writer, code, mark, error.failure.message)
        finally:
            if upstream is not None:
                upstream.transport.abort()

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
        client = asyncio.ensure_future(_send_body(reader, upstream, rest, request.length, meter))
        server = asyncio.ensure_future(self._response(request, writer, source, meter))
        try:
            await asyncio.wait([client, server], return_when=asyncio.FIRST_COMPLETED)
            return server.result() if server.done() else None
        finally:
            await _cancel(client, server)

    async def _response(
        self, request: Request, writer: asyncio.StreamWriter, source: asyncio.StreamReader, meter: _Meter
    ) -> int:
        limits = self._proxy.limits
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
        except (EOFError, ConnectionError):
            raise fail("nav_aborted", "closed the connection without a response") from None
        except BadMessage as error:
            raise fail("bad_response", f"answered with something that is not HTTP: {error}") from None
        with contextlib.suppress(ConnectionError):  # cut within the body: the browser notices by the missing rest
            await _pump(source, writer, meter.down, tail)
        return response.status

    def _check_bounds(self, host: str, port: int) -> None:
        limits = self._proxy.limits
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
        self._proxy._emit(event, self._callbacks)


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
        if self._gate.sent + self._gate.received > self._gate._proxy.limits.total_bytes:
            raise ConnectionAbortedError("the episode's byte budget is spent")


def _host_of(url_or_host: str) -> str:
    found = url_host_port(url_or_host if "://" in url_or_host else f"http://{url_or_host}")
    return found[0] if found else url_or_host.lower()


def _remember(table: collections.OrderedDict, host: str, value: Any) -> None:
    table[host] = value
    table.move_to_end(host)
    while len(table) > 256:
        table.popitem(last=False)


async def _answer(writer: asyncio.StreamWriter, status: int, header: str, text: str) -> None:
    """A whole small response of the proxy itself, and the end of the connection."""
    body = text.encode("utf-8", "replace") + b"\n"
    phrases = {200: "OK", 403: "Forbidden", 407: "Proxy Authentication Required", 502: "Bad Gateway", 504: "Timeout"}
    head = (
        f"HTTP/1.1 {status} {phrases.get(status, 'Error')}\r\n{header}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode("latin-1", "replace") + body)
    with contextlib.suppress(ConnectionError):  # the reader may have left; the answer was for nobody else
        await writer.drain()


async def _pump(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, count: Callable[[int], None], first: bytes = b""
) -> None:
    """Copies until the end of `source`, never holding more than one buffer; then half-closes `sink`."""
    chunk = first
    while True:
        if chunk:
            count(len(chunk))
            sink.write(chunk)
            await sink.drain()
        chunk = await source.read(BUFFER)
        if not chunk:
            break
    if sink.can_write_eof():
        sink.write_eof()


async def _send_body(
    reader: asyncio.StreamReader, upstream: asyncio.StreamWriter, rest: bytes, length: int, meter: _Meter
) -> None:
    """Exactly `length` bytes of request body; then waits until the browser closes. What it sends beyond is dropped."""
    left, chunk, refused = length, rest[:length], False
    while left:
        chunk = chunk or await reader.read(min(BUFFER, left))
        if not chunk:
            return
        left -= len(chunk)
        if not refused:
            meter.up(len(chunk))
            upstream.write(chunk)
            try:
                await upstream.drain()
            except ConnectionError:
                refused = True  # a server may answer and close before it has read everything; its answer still counts
        chunk = b""
    try:
        while await reader.read(BUFFER):
            pass
    except ConnectionError:
        pass  # gone as well


async def _tunnel(upward: Coroutine[Any, Any, None], downward: Coroutine[Any, Any, None]) -> None:
    """Runs both directions. A browser never half-closes, so its end is the end; a server's end leaves it a moment."""
    up, down = asyncio.ensure_future(upward), asyncio.ensure_future(downward)
    try:
        await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            await asyncio.wait([up], timeout=_LINGER_S)
        for task in (up, down):
            error = task.exception() if task.done() else None
            if error is not None and not isinstance(error, ConnectionError):  # a reset is how many tunnels end
                raise error
    finally:
        await _cancel(up, down)


async def _cancel(*tasks: asyncio.Future) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _finish(writer: asyncio.StreamWriter) -> None:
    """Closes after what is still buffered has gone out, or cuts a peer that does not take it."""
    try:
        async with asyncio.timeout(_LINGER_S):
            writer.close()
            await writer.wait_closed()
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
