"""A small web server for browser tests: pages with every kind of fault, counted, on a free port of loopback.

    async with PageServer() as server:
        server.page("/hello", "<h1>Hello</h1>")
        server.route("/slow", slow_handler)      # async (Request) -> Response | None; None means: never answer
        url = server.url("/hello")
        server.hits["/hello"]

Add pages with `page` and `route`; nothing is global, and each server has a port (an origin) of its own.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import parse_qs, urlsplit


@dataclasses.dataclass(frozen=True)
class Request:
    """What the browser asked."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclasses.dataclass(frozen=True)
class Response:
    """What to answer. `stream`, if given, is sent chunk by chunk after the body and may never end."""

    body: str | bytes = ""
    status: int = 200
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    content_type: str = "text/html; charset=utf-8"
    stream: AsyncIterator[bytes] | None = None


FOOTER = (
    "<p style='position:absolute;left:20px;top:940px;margin:0;font:12px sans-serif;pointer-events:none'>"
    "These words at the bottom of the page are here to be read and have no other purpose.</p>"
)
Handler = Callable[[Request], Awaitable[Response | None]]
_REASONS = {200: "OK", 204: "No Content", 302: "Found", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found"}


class PageServer:
    """An HTTP/1.1 server whose pages tests make up."""

    def __init__(self) -> None:
        self.hits: collections.Counter[str] = collections.Counter()
        self.requests: list[Request] = []
        self.port = 0
        self._routes: dict[str, Handler] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> PageServer:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        """Full address of a path."""
        return f"http://{host}:{self.port}{path}"

    def page(
        self, path: str, html: str, *, title: str = "", status: int = 200, delay_s: float = 0.0, footer: str = FOOTER
    ) -> str:
        """Serves a page; gives its address. The footer keeps pages of a few boxes from looking like blank ones."""
        document = f"<!doctype html><meta charset=utf-8><title>{title or path}</title>{html}{footer}"

        async def handler(request: Request) -> Response:
            await asyncio.sleep(delay_s)
            return Response(document, status=status)

        return self.route(path, handler)

    def route(self, path: str, handler: Handler) -> str:
        """Serves a path by a handler; gives its address. `*` at the end matches any rest."""
        self._routes[path] = handler
        return self.url(path.rstrip("*"))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                while await self._one(reader, writer):
                    pass
            finally:
                writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").strip().split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        parts = urlsplit(target)
        query = {k: v[-1] for k, v in parse_qs(parts.query).items()}
        request = Request(method, parts.path, query, headers, body)
        self.hits[parts.path] += 1
        self.requests.append(request)
        response = await self._handler(parts.path)(request)
        if response is None:
            await asyncio.Event().wait()  # a server that accepts and says nothing
            return False
        data = response.body.encode() if isinstance(response.body, str) else response.body
        fields = {"Content-Type": response.content_type, "Cache-Control": "no-store"} | response.headers
        if response.stream is None:
            fields["Content-Length"] = str(len(data))
        else:
            fields["Transfer-Encoding"] = "chunked"
        if response.status == 204:
            fields = {"Cache-Control": "no-store"}
        status = f"HTTP/1.1 {response.status} {_REASONS.get(response.status, 'Status')}\r\n"
        writer.write((status + "".join(f"{k}: {v}\r\n" for k, v in fields.items()) + "\r\n").encode("latin-1"))
        if response.stream is None:
            writer.write(data if method != "HEAD" else b"")
        else:
            async for chunk in response.stream:
                writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _handler(self, path: str) -> Handler:
        if path in self._routes:
            return self._routes[path]
        for pattern, handler in self._routes.items():
            if pattern.endswith("*") and path.startswith(pattern[:-1]):
                return handler
        return _not_found


async def _not_found(request: Request) -> Response:
    if request.path == "/favicon.ico":
        return Response(status=204)
    return Response("<title>404</title><h1>Not found</h1>", status=404)


async def never(request: Request) -> None:
    """Accepts and says nothing."""
    return


def after(seconds: float, body: str | bytes, content_type: str = "text/html; charset=utf-8") -> Handler:
    """Answers late."""

    async def handler(request: Request) -> Response:
        await asyncio.sleep(seconds)
        return Response(body, content_type=content_type)

    return handler


def redirect(target: str) -> Handler:
    """Answers with a redirect."""

    async def handler(request: Request) -> Response:
        return Response(status=302, headers={"Location": target})

    return handler


def attachment(name: str, body: bytes = b"x" * 1024, content_type: str = "application/octet-stream") -> Handler:
    """A file to download."""

    async def handler(request: Request) -> Response:
        disposition = f'attachment; filename="{name}"'
        return Response(body, headers={"Content-Disposition": disposition}, content_type=content_type)

    return handler


async def endless_download(request: Request) -> Response:
    """A file that never ends, about 20 MB a second."""

    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536
            await asyncio.sleep(0.003)

    return Response(
        headers={"Content-Disposition": 'attachment; filename="endless.bin"'},
        content_type="application/octet-stream",
        stream=chunks(),
    )
