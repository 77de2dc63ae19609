"""An engine that says what a test wants it to say, and a running server around any engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import io
import threading
import time

import numpy as np
import uvicorn
from PIL import Image

from owrl_jax.engine.chat_prompt import ChatPrompts
from owrl_jax.engine.errors import EngineError
from owrl_jax.engine.request import Completion, Request, Token
from owrl_jax.engine.server import build_app
from owrl_jax.engine.service import EngineService, ServerConfig
from owrl_jax.engine.settings import EngineSettings
from owrl_jax.models.processor import ImageProcessor
from owrl_jax.serving import http_server_class, listen

PROCESSOR = ImageProcessor(min_area=32 * 32, max_area=512 * 512)


def png(width: int = 64, height: int = 64, mark: int = 0) -> bytes:
    """A small picture, another one for each mark."""
    pixels = np.random.default_rng(mark).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    requests_submitted: int = 0
    waiting_now: int = 0
    version: int = 3


class StandInEngine:
    """Says its words token by token, as an engine would: the same `Request`, `Token`, `Completion` and errors.

    Args:
      tokens: makes ids of the words.
      says: the answer, or an error.
      pause_s: between two tokens; `gate`, if set, is waited for before the last one.
    """

    def __init__(self, tokens, says: str | EngineError = "Hello.", *, pause_s: float = 0.0):
        self.tokens, self.says, self.pause_s = tokens, says, pause_s
        self.settings = EngineSettings(max_context=4096)
        self.version = 3
        self.requests: list[Request] = []
        self.made = 0
        self.cancelled = threading.Event()
        self.gate: threading.Event | None = None

    def stats(self) -> Stats:
        return Stats(requests_submitted=len(self.requests))

    def answer(self, request: Request) -> list[Token]:
        words = self.tokens.encode_template(self.says).ids.tolist()
        ids = [*words, self.tokens.special.im_end][: request.sampling.max_new_tokens]
        top = request.top_logprobs
        return [
            Token(id=i, logprob=-0.25 * n, version=3, top=tuple((i + k, -0.25 * n - k) for k in range(top)))
            for n, i in enumerate(ids)
        ]

    def submit(self, request: Request) -> concurrent.futures.Future[Completion]:
        self.requests.append(request)
        future: concurrent.futures.Future[Completion] = concurrent.futures.Future()
        if isinstance(self.says, EngineError):
            future.set_exception(self.says)
            return future
        threading.Thread(target=self._work, args=(request, future), daemon=True).start()
        return future

    def _work(self, request, future):
        made = self.answer(request)
        for n, token in enumerate(made):
            time.sleep(self.pause_s)
            if self.gate is not None and n == len(made) - 1:
                self.gate.wait(20)
            if future.cancelled():
                self.cancelled.set()
                return
            self.made += 1
            if request.on_token is not None:
                request.on_token((token,))
        whole = made[-1].id == self.tokens.special.im_end
        done = Completion(
            tokens=tuple(made),
            finish="stop" if whole else "length",
            prompt_tokens=len(request.ids),
            cached_tokens=7,
        )
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            future.set_result(done)


@contextlib.asynccontextmanager
async def serving(engine, tokens, *, processor=PROCESSOR, **config):
    """A server on loopback: its service and its address up to and with /v1."""
    settings = ServerConfig(model="tiny", port=0, **config)
    service = EngineService(engine, ChatPrompts(tokens, processor, settings.pictures), settings)
    listener = listen("127.0.0.1", 0)
    server = http_server_class()(uvicorn.Config(build_app(service), log_level="warning", access_log=False))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield service, f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        await task
