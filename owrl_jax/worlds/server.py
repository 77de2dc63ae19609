"""All sites behind one port of loopback, each under a host name of its own; one state per episode.

    async with WorldServer() as worlds:
        visit = await worlds.open(task)              # fresh state, whatever else is running
        … visit.task.start_url …                     # shop.localhost:port/_e/<key>: sets a cookie, leads to the first
        page verdict = visit.verdict(answer)

The key of an episode stands in its first address and from then on in a cookie, never in a page or a later address: the
siblings of a group see the same bytes and the same URLs. Browser contexts do not share cookies, so neither do episodes.
`exceptions` is what a sandbox's safety policy must let through; names under `.localhost` are loopback everywhere (RFC
6761).

A small HTTP/1.1 server: GET, HEAD and POST with Content-Length, keep-alive. It hangs, delays and refuses on purpose
when an episode's faults say so, and never otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http
import secrets
import time
from http.cookies import CookieError, SimpleCookie
from typing import Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from owrl_jax.types import Task, Verdict
from owrl_jax.worlds import registry
from owrl_jax.worlds.html import e
from owrl_jax.worlds.messages import Request, Response, html_response, whole

COOKIE = "owrl_episode"
_HEAD_LIMIT = 64 * 1024
_BODY_LIMIT = 1024 * 1024


class AnyEpisode(Protocol):
    """What the server needs of an episode."""

    @property
    def start(self) -> str: ...
    @property
    def instruction(self) -> str: ...
    def handle(self, request: Request) -> Response: ...
    def verdict(self, said: str | None) -> Verdict: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visit:
    """An open episode.

    Attributes:
      key: names it.
      task: the task, with the start address of this very episode.
      episode: its state.
    """

    key: str
    task: Task
    episode: AnyEpisode

    @property
    def start_url(self) -> str:
        return self.task.start_url

    @property
    def instruction(self) -> str:
        """What is asked for. MiniWoB++ makes it up while the page loads, so it may change after the first page."""
        return self.episode.instruction or self.task.instruction

    def verdict(self, said: str | None) -> Verdict:
        """What the program says now; `said` is the text of `done`, None if it was never called."""
        return self.episode.verdict(said)


class WorldServer:
    """Serves the sites. An async context manager; `start` and `close` do the same.

    Args:
      port: 0 takes a free one.
    """

    def __init__(self, *, port: int = 0):
        self._wanted_port = port
        self._server: asyncio.Server | None = None
        self._visits: dict[str, Visit] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self.handler_s = 0.0
        self.requests = 0

    async def __aenter__(self) -> WorldServer:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Listens on 127.0.0.1."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._wanted_port, limit=_HEAD_LIMIT)

    async def close(self) -> None:
        """Cuts every connection and forgets every episode. May be called twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if server is not None:
            await server.wait_closed()
        self._visits.clear()

    @property
    def port(self) -> int:
        """Where it listens."""
        if self._server is None:
            raise RuntimeError("the world server is not running: call start(), or use it as a context manager")
        return self._server.sockets[0].getsockname()[1]

    def base_url(self, name: str) -> str:
        """The root of a site."""
        return f"http://{name}.localhost:{self.port}"

    @property
    def exceptions(self) -> frozenset[tuple[str, int]]:
        """(host, port) pairs that a sandbox's policy must let through: `Safety.for_local_worlds(server.exceptions)`."""
        return frozenset({("*.localhost", self.port)})

    async def open(self, task: Task) -> Visit:
        """A new episode of a task.

        Raises:
          ValueError, KeyError: if the task is not one of a local world.
        """
        episode = registry.open_episode(task)
        key = secrets.token_hex(8)
        name = task.verifier.removeprefix(registry.VERIFIER).partition("/")[0]
        visit = Visit(
            key=key,
            task=dataclasses.replace(task, start_url=f"{self.base_url(name)}/_e/{key}"),
            episode=episode,
        )
        self._visits[key] = visit
        return visit

    def visit(self, key: str) -> Visit:
        """The open episode of that key."""
        if key not in self._visits:
            raise KeyError(f"there is no open episode {key!r}")
        return self._visits[key]

    def verdict(self, key: str, said: str | None) -> Verdict:
        """`visit(key).verdict(said)`."""
        return self.visit(key).verdict(said)

    def forget(self, key: str) -> None:
        """Gives an episode's state up. Unknown keys are fine."""
        self._visits.pop(key, None)

    # ---- the wire -------------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: Python 3.11 logs an error for every cancelled task that asyncio.streams made itself.
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether the connection stays."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        parts = head[0].split(" ")
        if len(parts) != 3:
            return False
        method, target, _ = parts
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:]) if v}
        length = headers.get("content-length", "0")
        if not 0 <= whole(length) <= _BODY_LIMIT:
            return False
        body = await reader.readexactly(whole(length))
        if method not in ("GET", "HEAD", "POST"):
            response = Response(status=405, content_type="text/plain")
        else:
            began = time.perf_counter()
            response = self._answer(method, target, headers, body)
            self.handler_s += time.perf_counter() - began
            self.requests += 1
        if response.hang:
            await reader.read(1)  # nothing more comes until the visitor gives up
            return False
        if response.delay_s:
            await asyncio.sleep(response.delay_s)
        lines = [
            f"HTTP/1.1 {response.status} {http.HTTPStatus(response.status).phrase}",
            f"Content-Type: {response.content_type}",
            f"Content-Length: {len(response.body)}",
            *(f"{k}: {v}" for k, v in response.headers),
        ]
        if not any(k == "Cache-Control" for k, _ in response.headers):
            lines.append("Cache-Control: no-store")
        payload = b"" if method == "HEAD" else response.body
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + payload)
        await writer.drain()
        return headers.get("connection", "").lower() != "close"

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Response:
        parts = urlsplit(target)
        name = headers.get("host", "").partition(":")[0].removesuffix(".localhost")
        path = unquote(parts.path) or "/"
        if path.startswith("/_e/"):
            return self._enter(name, path.removeprefix("/_e/"))
        cookies = _cookies(headers.get("cookie", ""))
        visit = self._visits.get(cookies.get(COOKIE, ""))
        if visit is None or visit.task.site.removesuffix(".localhost") != name:
            return _lost(404)
        request = Request(
            method="POST" if method == "POST" else "GET",
            path=path,
            query=tuple(parse_qsl(parts.query, keep_blank_values=True)),
            form=tuple(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True)),
            host=name,
            cookies=cookies,
            headers=headers,
        )
        return visit.episode.handle(request)

    def _enter(self, name: str, key: str) -> Response:
        visit = self._visits.get(key)
        if visit is None or visit.task.site.removesuffix(".localhost") != name:
            return _lost(404)
        cookie = f"{COOKIE}={key}; Path=/; HttpOnly; SameSite=Lax"
        return Response(status=303, headers=(("Location", visit.episode.start), ("Set-Cookie", cookie)))


def _cookies(text: str) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(text).items()}
    except CookieError:
        return {}


def _lost(status: int) -> Response:
    text = "This address belongs to no running episode. Open the start address that you were given."
    return html_response(e.html(e.title("No episode"), e.body(e.p(text))), status)
