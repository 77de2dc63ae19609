"""Moving bytes between two asyncio streams: bounded, in both directions, and finished cleanly.

At most one buffer (`reach.BUFFER`) is held per direction; a slow receiver slows its sender down. Nothing here knows of
policy or HTTP beyond the proxy's own small answers. Peers that reset or leave are the normal end of a connection, not
errors.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from owrl_jax.browser.reach import BUFFER

LINGER_S = 10.0  # for a peer that still has to take or close something


async def answer(writer: asyncio.StreamWriter, status: int, header: str, text: str) -> None:
    """A whole small response of the proxy itself, and the end of the connection."""
    body = text.encode("utf-8", "replace") + b"\n"
    phrases = {200: "OK", 403: "Forbidden", 407: "Proxy Authentication Required", 502: "Bad Gateway", 504: "Timeout"}
    head = (
        f"HTTP/1.1 {status} {phrases.get(status, 'Error')}\r\n{header}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode("latin-1", "replace") + body)
    with contextlib.suppress(OSError):  # the reader may have left; the answer was for nobody else
        await writer.drain()


async def pump(
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
        with contextlib.suppress(OSError):  # the peer has reset meanwhile
            sink.write_eof()


async def send_body(
    reader: asyncio.StreamReader, upstream: asyncio.StreamWriter, rest: bytes, length: int, count: Callable[[int], None]
) -> None:
    """Exactly `length` bytes of request body; then waits until the browser closes. What it sends beyond is dropped."""
    left, chunk, refused = length, rest[:length], False
    while left:
        chunk = chunk or await reader.read(min(BUFFER, left))
        if not chunk:
            return
        left -= len(chunk)
        if not refused:
            count(len(chunk))
            upstream.write(chunk)
            try:
                await upstream.drain()
            except OSError:
                refused = True  # a server may answer and close before it has read everything; its answer still counts
        chunk = b""
    try:
        while await reader.read(BUFFER):
            pass
    except OSError:
        pass  # gone as well


async def tunnel(upward: Coroutine[Any, Any, None], downward: Coroutine[Any, Any, None]) -> None:
    """Runs both directions. A browser never half-closes, so its end is the end; a server's end leaves it a moment."""
    up, down = asyncio.ensure_future(upward), asyncio.ensure_future(downward)
    try:
        await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            await asyncio.wait([up], timeout=LINGER_S)
        for task in (up, down):
            error = task.exception() if task.done() else None
            if error is not None and not isinstance(error, OSError):  # a reset is how many tunnels end
                raise error
    finally:
        await cancel_all(up, down)


async def cancel_all(*tasks: asyncio.Future) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def finish(writer: asyncio.StreamWriter) -> None:
    """Closes after what is still buffered has gone out, or cuts a peer that does not take it."""
    try:
        async with asyncio.timeout(LINGER_S):
            writer.close()
            await writer.wait_closed()
    except OSError:
        pass  # it has reset, or did not take the rest in time: cut below
    finally:
        writer.transport.abort()
