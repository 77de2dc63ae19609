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
import hmac
import logging
from collections.abc import Callable

from owrl_jax.browser.egress_gate import (
    SIGN_IN_URL,
    ConnectionGovernor,
    EgressError,
    EgressEvent,
    EgressGate,
    EgressLimits,
)
from owrl_jax.browser.egress_http import MARKER, BadMessage, Request, parse_request, read_head
from owrl_jax.browser.policy import UrlPolicy
from owrl_jax.browser.reach import BUFFER, Reach
from owrl_jax.browser.relay import answer, finish

__all__ = ["EGRESS_FLAGS", "SIGN_IN_URL", "EgressError", "EgressEvent", "EgressGate", "EgressLimits", "EgressProxy"]

logger = logging.getLogger(__name__)

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
        gate = EgressGate(
            episode=episode,
            policy=policy,
            server=self.server,
            reach=self.reach,
            limits=self.limits,
            governor=self._governor,
            publish=self._publish,
            forget=lambda name: self._gates.pop(name, None),
        )
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
                await answer(writer, error.status, f"{MARKER}: - bad {error.status}", str(error))
                await finish(writer)
                return
            if gate is None:
                self.unauthenticated += 1
                logger.debug("egress proxy: turned away %s %s:%d", request.method, request.host, request.port)
                await answer(writer, 407, 'Proxy-Authenticate: Basic realm="owrl"', "sign in to this proxy")
                await finish(writer)
                return
            await gate.handle(request, rest, reader, writer)
        except (EOFError, OSError):
            pass  # the browser went away or never asked: nothing to answer, nothing to tell
        except Exception:
            logger.exception("egress proxy: unexpected error while serving a connection")
        else:
            await finish(writer)
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

    def _publish(self, event: EgressEvent, callbacks: list[Callable[[EgressEvent], None]]) -> None:
        for callback in [*([self._on_event] if self._on_event else []), *callbacks]:
            try:
                callback(event)
            except Exception:
                logger.exception("egress proxy: a subscriber failed on an event")
