"""A small internet on loopback for tests of the egress proxy.

Names under `.test` resolve to public-looking addresses, and a dialler leads those addresses to servers on 127.0.0.1;
so nothing leaves the machine and the policy still sees a public site. `Secret` is the server that must never be
reached: it counts every TCP connection and UDP packet.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable

PUBLIC = "93.184.215.14"  # never dialled: `World.dial` leads it to the page server
OTHER = "93.184.215.15"

Handler = Callable[[str, dict[str, str]], tuple[int, dict[str, str], bytes]]


class Secret:
    """A server on 127.0.0.1 (and ::1 where there is one), TCP and UDP on one port, that counts who came."""

    def __init__(self) -> None:
        self.hits: list[str] = []
        self._servers: list[asyncio.Server] = []
        self._udp: list[asyncio.DatagramTransport] = []

    async def start(self) -> Secret:
        self._servers.append(await asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._servers[0].sockets[0].getsockname()[1]
        hosts = ["127.0.0.1"]
        try:
            self._servers.append(await asyncio.start_server(self._serve, "::1", self.port))
            hosts.append("::1")
        except OSError:
            pass  # a machine without IPv6
        for host in hosts:
            transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: _Datagrams(self.hits), local_addr=(host, self.port)
            )
            self._udp.append(transport)
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.hits.append("tcp")
        try:
            self.hits.append((await asyncio.wait_for(reader.readline(), 2)).decode("latin-1").strip())
            body = b"<title>secret</title>SECRET"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
            await writer.drain()
        except (TimeoutError, ConnectionError):
            pass  # the hit is counted already
        finally:
            writer.close()

    async def stop(self) -> None:
        for transport in self._udp:
            transport.close()
        for server in self._servers:
            server.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, hits: list[str]):
        self._hits = hits

    def datagram_received(self, data: bytes, addr: tuple) -> None:
        self._hits.append("udp")


class World:
    """Names, addresses and one page server. `routes[(host, path)] = (status, headers, body)`, or a function of both."""

    def __init__(self) -> None:
        self.names: dict[str, list[str] | Callable[[], list[str]]] = {}
        self.routes: dict[tuple[str, str], tuple[int, dict[str, str], bytes]] = {}
        self.requests: list[tuple[str, str, str, dict[str, str]]] = []
        self.dialled: list[tuple[str, int]] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> World:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    def page(self, url: str, body: str, status: int = 200, **headers: str) -> None:
        host, _, path = url.removeprefix("http://").partition("/")
        fields = {"Content-Type": "text/html"} | {k.replace("_", "-"): v for k, v in headers.items()}
        self.routes[(host, "/" + path)] = (status, fields, body.encode())

    async def resolve(self, host: str) -> list[str]:
        entry = self.names.get(host)
        if entry is None:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return list(entry() if callable(entry) else entry)

    async def dial(self, ip: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.dialled.append((ip, port))
        if ip in (PUBLIC, OTHER):
            return await asyncio.open_connection("127.0.0.1", self.port)
        return await asyncio.open_connection(ip, port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
            host = headers.get("host", "").partition(":")[0]
            if int(headers.get("content-length", "0")):
                headers["_body"] = (await reader.readexactly(int(headers["content-length"]))).decode("latin-1")
            self.requests.append((method, host, path, headers))
            path_only = path.partition("?")[0]
            status, fields, body = self.routes.get((host, path_only), (404, {"Content-Type": "text/html"}, b"none"))
            fields = fields | {"Content-Length": str(len(body)), "Connection": "close"}
            lines = "".join(f"{k}: {v}\r\n" for k, v in fields.items())
            writer.write(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + body)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # a spare connection of the browser
        finally:
            writer.close()


def within(seconds: float):
    """Ends a test that hangs, with a traceback of where it stood."""

    def decorate(test):
        @functools.wraps(test)
        async def bounded(*args, **kwargs):
            async with asyncio.timeout(seconds):
                await test(*args, **kwargs)

        return bounded

    return decorate
