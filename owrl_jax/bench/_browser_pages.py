"""The pages that `owrl bench browser` measures on, and the small loopback server that serves them.

Every page has the same body (a bar of controls at fixed places, two dozen cards, room to scroll) and one burden:

    /light  none                         /poll   a request that is answered never, renewed for ever
    /font   a web font that never comes  /late   empty until a request made after load is answered

The late page proves what a picture shows: its block has a colour that encodes the number asked for (`late_colour`), so
a stale picture (an older number) and an empty one (no block) are told from the right one by a single pixel. The server
answers by hand on asyncio streams, since half of its job is to misbehave: hang, cut off, talk nonsense.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from urllib.parse import parse_qsl, urlsplit

WIDTH, HEIGHT = 1280, 1000

# Centres of the controls in CSS pixels.
NOTHING = (60, 40)
COUNT = (200, 40)
LINK = (340, 40)
FIELD = (520, 40)
FILL = (720, 40)
BLOCK = (1140, 52)  # inside the late page's block, away from its text
LATE_MS = (60, 200, 450, 900)  # delays that `ms=vary` goes through by number

_CARDS = "".join(
    f'<article><i style="background:hsl({h},60%,70%)"></i><b>Item {n}</b>'
    f"<p>A sentence about item {n}, as shops have it.</p><button>Add</button></article>"
    for n, h in enumerate(range(0, 360, 15))
)
_STYLE = """
body{margin:0;font:15px sans-serif;background:#fff;color:#222}
#bar{position:fixed;top:0;left:0;right:0;height:80px;background:#eef;z-index:9}
#bar>*{position:absolute;top:20px;width:110px;height:40px;box-sizing:border-box;font:inherit}
main{padding:100px 20px;display:grid;grid-template-columns:repeat(5,1fr);gap:16px;min-height:2600px}
article{border:1px solid #ccc;border-radius:8px;padding:10px;height:300px}article i{display:block;height:150px}
"""
_BAR = """
<div id=bar><div id=nothing style="left:5px;background:#ddd"></div>
<button id=count style="left:145px" onclick="this.textContent=1+ +this.textContent">0</button>
<a id=link style="left:285px;line-height:40px;background:#dfd;text-align:center" href="{next}">next</a>
<input id=field style="left:425px;width:190px"><button id=fill style="left:665px" onclick="fill()">fill</button>
<div id=block style="left:1045px"></div></div>
"""
_BURDENS = {
    "light": "",
    "poll": "<script>(async function poll(){for(;;){try{await fetch('/hang?n='+Math.random())}catch(e){}"
    "await new Promise(r=>setTimeout(r,100))}})()</script>",
    "font": "<style>@font-face{font-family:slow;src:url(/hang.woff2)}article b{font-family:slow,serif}</style>",
    "late": "",
}
_LATE = """
<script>let number=%(n)d;
async function fill(){const m=++number;document.getElementById('link').href='/late?n='+(m+1)+'&ms=%(ms)s';
  const c=await (await fetch('/late-data?n='+m+'&ms=%(ms)s')).text();
  const b=document.getElementById('block');b.style.background=c;b.textContent=m}
number--;fill()</script>
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a handler says: bytes as they are, or a status and a body to be framed as HTTP."""

    body: bytes = b""
    status: int = 200
    kind: str = "text/html; charset=utf-8"
    raw: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()


def late_colour(number: int) -> tuple[int, int, int]:
    """The colour of the late page's block for a number: different from white and from its neighbours' by far."""
    return (40 + 37 * number % 180, 40 + 101 * number % 180, 40 + 61 * number % 180)


def page(name: str, *, n: int = 0, ms: str = "300") -> str:
    """HTML of one of the four pages; `n` is its number, its link leads to the next; `ms` delays the late page."""
    following = f"/{name}?n={n + 1}&ms={ms}"
    script = _LATE % {"n": n, "ms": ms} if name == "late" else "<script>function fill(){}</script>"
    return (
        f"<!doctype html><meta charset=utf-8><title>{name} {n}</title><style>{_STYLE}</style>{_BURDENS[name]}"
        f"{_BAR.format(next=following)}<main>{'' if name == 'late' else _CARDS}</main>{script}"
    )


class PageServer:
    """Serves the pages on a free loopback port. An async context manager.

    Attributes:
      port: after the start.
      hits: requests by path.
      answers: path to `Answer`; entries here go before the built-in pages, so that a test can add its own.
    """

    def __init__(self) -> None:
        self.port = 0
        self.hits: Counter[str] = Counter()
        self.answers: dict[str, Answer] = {}
        self._server: asyncio.Server | None = None
        self._busy: set[asyncio.Task] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> PageServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._busy):
            task.cancel()
        await asyncio.gather(*self._busy, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._busy.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the browser left, as browsers do
        except asyncio.CancelledError:
            pass  # the server is closing; asyncio would log this as an error of the connection
        finally:
            self._busy.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        target = head.split(" ", 2)[1]
        length = next((int(v.split(":")[1]) for v in head.lower().split("\r\n") if v.startswith("content-length:")), 0)
        if length:
            await reader.readexactly(length)
        parts = urlsplit(target)
        self.hits[parts.path] += 1
        answer = await self._answer(parts.path, dict(parse_qsl(parts.query)))
        if answer.raw is not None:
            writer.write(answer.raw)
            await writer.drain()
            return False
        extra = "".join(f"{name}: {value}\r\n" for name, value in answer.headers)
        writer.write(
            f"HTTP/1.1 {answer.status} X\r\nContent-Type: {answer.kind}\r\nContent-Length: {len(answer.body)}\r\n"
            f"Cache-Control: no-store\r\n{extra}\r\n".encode("latin-1")
            + answer.body
        )
        await writer.drain()
        return True

    async def _answer(self, path: str, query: dict[str, str]) -> Answer:
        if path in self.answers:
            return self.answers[path]
        number, ms = int(query.get("n", "0").split(".")[0] or 0), query.get("ms", "300")
        if path.startswith("/hang"):
            await asyncio.Event().wait()
        if path == "/late-data":
            await asyncio.sleep((LATE_MS[number % len(LATE_MS)] if ms == "vary" else int(ms)) / 1e3)
            return Answer(body="rgb({},{},{})".format(*late_colour(number)).encode(), kind="text/plain")
        name = path.lstrip("/")
        if name in _BURDENS:
            return Answer(body=page(name, n=number, ms=ms if ms.isdigit() else "vary").encode())
        return Answer(status=404, body=b"<!doctype html><title>not found</title>nothing here")


@contextlib.asynccontextmanager
async def pages():
    """A running server."""
    async with PageServer() as server:
        yield server
