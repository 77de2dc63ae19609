"""The engine as its HTTP server sees it: places for open requests, requests to answers, pictures, counts.

Routes are in `server.py`, chat answers in `chat_answer.py`. Nothing here needs jax.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Protocol

from owrl_jax.agent.policy import Sampling
from owrl_jax.engine import openai_api as api
from owrl_jax.engine import wire
from owrl_jax.engine.answer import AnswerReader, TokenBytes
from owrl_jax.engine.chat_prompt import BadMessages, ChatPrompt, ChatPrompts, PictureLimits
from owrl_jax.engine.errors import BadPicture, BadRequest, EngineError, Overloaded, PromptTooLong
from owrl_jax.engine.openai_api import ApiError
from owrl_jax.engine.request import Completion, Request, Token
from owrl_jax.serving import Sample, by_label, check_access, counter, gauge, prometheus_text
from owrl_jax.types import Screenshot


class Backend(Protocol):
    """What the server needs of an engine; `owrl_jax.engine.engine.Engine` is one."""

    @property
    def version(self) -> int: ...
    @property
    def settings(self) -> Any: ...  # `EngineSettings`
    def submit(self, request: Request) -> concurrent.futures.Future[Completion]: ...
    def stats(self) -> Any: ...  # a dataclass of numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where to listen and what to refuse.

    Attributes:
      model: the name that requests must give.
      host, port: address to listen on; anything that is not loopback needs a token.
      token: secret that clients send as `Authorization: Bearer …`; None for none.
      body_bytes: longest request body.
      pictures: limits of pictures.
      picture_cache_bytes: pictures remembered for the raw route, so that they travel once.
      max_open: requests at one time; further ones get 429.
      default_max_tokens: of an answer, where the request sets no limit.
      retry_after_s: what a client that found no place is told to wait.
    Raises:
      ValueError: for a host beyond loopback without a token, or a token too short to be a secret.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8730
    token: str | None = dataclasses.field(default=None, repr=False)
    body_bytes: int = 64 << 20
    pictures: PictureLimits = dataclasses.field(default_factory=PictureLimits)
    picture_cache_bytes: int = 256 << 20
    max_open: int = 512
    default_max_tokens: int = 2048
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        check_access(self.host, self.token, "use this machine's accelerator")
        if self.max_open < 1 or self.body_bytes < 1 or self.default_max_tokens < 1:
            raise ValueError(
                f"max_open, body_bytes and default_max_tokens must be at least 1, got {self.max_open}, "
                f"{self.body_bytes} and {self.default_max_tokens}"
            )


def check_sampling(sampling: Sampling) -> None:
    """Refuses numbers that the engine's 32-bit arrays cannot hold: they would fail far from their cause.

    Raises:
      ApiError: 400.
    """
    if sampling.top_k >= 2**31:
        raise ApiError(
            400, f"top_k must be below 2**31, got a number of {len(str(sampling.top_k))} digits", param="top_k"
        )


class PictureCache:
    """Pictures by the hash of their bytes, up to so many bytes; the ones that were not asked for longest go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max, self._bytes = max_bytes, 0
        self._kept: collections.OrderedDict[str, Screenshot] = collections.OrderedDict()

    def get(self, sha256: str) -> Screenshot | None:
        """The picture, or None."""
        if sha256 in self._kept:
            self._kept.move_to_end(sha256)
        return self._kept.get(sha256)

    def put(self, sha256: str, shot: Screenshot) -> None:
        """Keeps a picture."""
        if sha256 not in self._kept:
            self._kept[sha256] = shot
            self._bytes += len(shot.data)
        while self._bytes > self._max and self._kept:
            self._bytes -= len(self._kept.popitem(last=False)[1].data)


class EngineService:
    """What the routes call: requests to answers, and counts of both.

    Args:
      engine: answers.
      prompts: makes prompts of messages.
      config: limits.

    Attributes:
      open: requests being answered now.
      draining: set to refuse all further ones.
    """

    def __init__(self, engine: Backend, prompts: ChatPrompts, config: ServerConfig) -> None:
        self.engine, self.prompts, self.config = engine, prompts, config
        self.token_bytes = TokenBytes(prompts.tokens)
        special = prompts.tokens.special
        self.end_ids = (special.im_end, special.endoftext)
        self.cache = PictureCache(config.picture_cache_bytes)
        self.open = 0
        self.draining = False
        self.started = int(time.time())
        self.answers: collections.Counter[tuple[str, str]] = collections.Counter()  # by route and status
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.tokens: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """A place among the open requests.

        Raises:
          ApiError: 429 if there is none, 503 while draining.
        """
        wait = self.config.retry_after_s
        if self.draining:
            raise ApiError(503, "the server is shutting down", kind="server_error", code="draining", retry_after_s=wait)
        if self.open >= self.config.max_open:
            why = f"{self.open} requests are open, which is as many as may be: try again later"
            raise ApiError(429, why, kind="rate_limit_error", code="overloaded", retry_after_s=wait)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def run(self, request: Request, *, stream: bool) -> AsyncGenerator[tuple[Token, ...] | Completion, None]:
        """Tokens as they come, if streaming is wanted, and the completion at last. Closing it abandons the request.

        Raises:
          ApiError: if there is no answer.
        """
        check_sampling(request.sampling)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[Token, ...] | None] = asyncio.Queue()

        def tell(tokens: tuple[Token, ...] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended; nobody listens
                loop.call_soon_threadsafe(queue.put_nowait, tokens)

        if stream:
            request = dataclasses.replace(request, on_token=tell)
        future = self.engine.submit(request)
        future.add_done_callback(lambda _: tell(None))
        try:
            while (tokens := await queue.get()) is not None:
                yield tokens
            try:
                completion = future.result()
            except EngineError as error:
                raise api_error(error, self.config.retry_after_s) from error
        finally:
            future.cancel()
        self.tokens["prompt"] += completion.prompt_tokens
        self.tokens["cached"] += completion.cached_tokens
        yield completion

    async def whole(self, request: Request) -> Completion:
        """The completion of a request that is not streamed."""
        async with contextlib.aclosing(self.run(request, stream=False)) as parts:
            async for part in parts:
                if isinstance(part, Completion):
                    self.tokens["answer"] += len(part.tokens)
                    return part
        raise AssertionError("a request ends with a completion or an error")

    async def chat_prompt(self, chat: api.ChatRequest) -> ChatPrompt:
        """The prompt of a chat request, made on another thread: long texts take their time."""
        try:
            prompt = await asyncio.to_thread(self.prompts.build, chat.messages, tools=chat.tools, options=chat.options)
        except BadMessages as error:
            raise ApiError(400, str(error), param=error.where or "messages") from error
        longest = self.engine.settings.max_context
        if len(prompt.ids) >= longest:
            why = f"the messages have {len(prompt.ids)} tokens and the context has {longest}: nothing is left to answer"
            raise ApiError(400, why, param="messages", code="context_length_exceeded")
        return prompt

    def reader(self, chat: api.ChatRequest, prompt: ChatPrompt) -> AnswerReader:
        """A reader for the answer."""
        return AnswerReader(
            self.token_bytes,
            end_ids=self.end_ids,
            stop=chat.stop,
            thinking=prompt.thinking,
            tools=chat.tool_names,
        )

    def pictures(self, given: tuple[wire.WirePicture, ...]) -> tuple[Screenshot, ...]:
        """The pictures of a raw request.

        Raises:
          ApiError: 422 with the hashes of those that are not known, 400 for bytes that are not what the hash says.
        """
        if len(given) > self.config.pictures.count:
            raise ApiError(400, f"at most {self.config.pictures.count} pictures are taken", param="pictures")
        found, missing = [], []
        for number, picture in enumerate(given):
            shot = self.cache.get(picture.sha256)
            if shot is None and picture.data is not None:
                if hashlib.sha256(picture.data).hexdigest() != picture.sha256:
                    raise ApiError(400, "the picture's bytes do not have that hash", param=f"pictures[{number}].sha256")
                try:
                    shot = self.prompts.picture(picture.data)
                except BadMessages as error:
                    raise ApiError(400, str(error), param=f"pictures[{number}]", code="bad_picture") from error
                self.cache.put(picture.sha256, shot)
            if shot is None:
                missing.append(picture.sha256)
            else:
                found.append(shot)
        if missing:
            why = f"{len(missing)} of the pictures are not known here: send their bytes"
            raise ApiError(422, why, param="pictures", code=wire.UNKNOWN_PICTURES, extra={"missing": missing})
        return tuple(found)

    def metrics(self) -> str:
        """The Prometheus text."""
        samples = [
            Sample(
                name="requests",
                kind="counter",
                help="requests by route and HTTP status; 499 for clients that hung up",
                values=tuple(({"route": r, "status": s}, n) for (r, s), n in sorted(self.answers.items())),
            ),
            by_label("request_seconds", "counter", "time spent on requests", "route", dict(self.seconds)),
            by_label("tokens", "counter", "tokens by part of the request", "part", dict(self.tokens)),
            gauge("requests_open", "requests being answered now", self.open),
            gauge("draining", "1 if no request is taken any more", self.draining),
        ]
        for name, value in dataclasses.asdict(self.engine.stats()).items():
            fixed = name.endswith("_now") or name in ("version", "pages_total", "start_s")
            make = gauge if fixed else counter
            samples.append(make(f"engine_{name.removesuffix('_now')}", f"engine: {name.replace('_', ' ')}", value))
        return prometheus_text(samples, prefix="owrl_serve_")


def api_error(error: EngineError, retry_after_s: float) -> ApiError:
    """An engine's refusal in the API's terms."""
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, BadPicture):
        return ApiError(400, str(error), code="invalid_image")
    if isinstance(error, BadRequest):
        return ApiError(400, str(error), code=error.reason)
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), kind="rate_limit_error", code=error.reason, retry_after_s=retry_after_s)
    wait = retry_after_s if error.status == 503 else None
    return ApiError(error.status, str(error), kind="server_error", code=error.reason, retry_after_s=wait)
