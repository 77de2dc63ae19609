"""An OpenAI-compatible endpoint on loopback that says what a test wants it to say."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable


def chat_answer(content: str | None, *, finish: str = "stop", usage=(1000, 100), **message) -> bytes:
    """A whole answer with these words."""
    body = {
        "choices": [{"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}],
        "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]},
    }
    return b"200 OK\r\n\r\n" + json.dumps(body).encode()


class FakeEndpoint:
    """Gives its answers one after another, the last one for ever.

    An answer is status, headers, an empty line and a body; or `hang`; or `drop` to cut the connection; or a function
    that gives one of these for a request, where several are on their way at once and come in any order.
    """

    def __init__(self, *answers: bytes | Callable[[dict], bytes]) -> None:
        self.answers = list(answers)
        self.requests: list[dict] = []
        self.headers: list[str] = []

    async def handle(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(int(h.split(":")[1]) for h in head.split("\r\n") if h.lower().startswith("content-length"))
            self.headers.append(head)
            self.requests.append(json.loads(await reader.readexactly(length)))
            given = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            given = given(self.requests[-1]) if callable(given) else given
            if given == b"hang":
                await asyncio.sleep(30)
            if given != b"drop":
                top, body = given.split(b"\r\n\r\n", 1)
                writer.write(
                    b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (top, len(body), body)
                )
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def fake_endpoint(*answers: bytes | Callable[[dict], bytes]):
    """A running one, and its base address."""
    server = FakeEndpoint(*answers)
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    try:
        yield server, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    finally:
        listening.close()
