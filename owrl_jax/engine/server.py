"""The engine behind HTTP: an OpenAI-compatible face for anyone, and ids in, ids out for our own rollouts.

    POST /v1/chat/completions   messages, pictures, tools; whole or streamed
    POST /v1/generate           a prompt in ids, an answer in ids (`wire.py`)
    GET  /v1/models             the one model that is served
    GET  /health                200 if it answers requests
    GET  /metrics               Prometheus text

Every refusal is JSON in OpenAI's error shape, with the reason and the field. A request whose client hangs up is
abandoned at once, and so is its place in the engine. When as many requests are open as may be, further ones get 429
with Retry-After, before their bodies are looked at. Whoever can reach this server can spend the accelerator, so the
rules of `owrl_jax/serving.py` hold.

Here are routes and connections alone; what they ask for is in `service.py` and `chat_answer.py`, the process in
`serve.py`. Nothing here needs jax.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from owrl_jax.engine import openai_api as api
from owrl_jax.engine import wire
from owrl_jax.engine.chat_answer import chat_events, chat_whole, event_bytes
from owrl_jax.engine.openai_api import ApiError
from owrl_jax.engine.request import Request
from owrl_jax.engine.service import EngineService
from owrl_jax.serving import METRICS_TYPE, authorised, from_a_web_page

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class _Gone(Exception):
    """The client has hung up."""


def build_app(service: EngineService) -> Any:
    """The Starlette application.

    Raises:
      ModuleNotFoundError: without starlette (extra `host`).
    """
    from starlette.applications import Starlette
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    config = service.config

    def refusal(error: ApiError) -> Response:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        if error.retry_after_s is not None:
            headers["Retry-After"] = f"{max(1, round(error.retry_after_s))}"
        return JSONResponse(error.body(), error.status, headers)

    def checked(request: HttpRequest) -> None:
        if not authorised(request.headers, config.token):
            raise ApiError(
                401,
                "a valid token is needed: Authorization: Bearer …",
                kind="authentication_error",
                code="invalid_api_key",
            )
        if from_a_web_page(request.headers, config.token):
            raise ApiError(403, "requests from web pages are refused", kind="permission_error")

    def guarded(name: str, act: Callable[[HttpRequest], Awaitable[Any]]):
        async def route(request: HttpRequest) -> Any:
            began = time.perf_counter()
            status = "499"
            try:
                checked(request)
                response = await act(request)
                status = str(response.status_code)
                return response
            except ApiError as error:
                status = str(error.status)
                return refusal(error)
            except _Gone:
                return Response(status_code=499)
            except Exception:  # noqa: BLE001 - mapped here, once, and logged as the bug it is
                _log.exception("%s %s", request.method, request.url.path)
                status = "500"
                why = "a bug of the server; its log has the traceback"
                return refusal(ApiError(500, why, kind="server_error"))
            finally:
                service.answers[name, status] += 1
                service.seconds[name] += time.perf_counter() - began

        return route

    async def body(request: HttpRequest) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"the body must be application/json, got {kind[:80]!r}")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "compressed bodies are not taken")
        declared = request.headers.get("content-length", "")
        data = bytearray()
        if not declared.isdigit() or int(declared) <= config.body_bytes:
            async for chunk in request.stream():
                data += chunk
                if len(data) > config.body_bytes:
                    break
            else:
                return bytes(data)
        raise ApiError(413, f"the body is longer than {config.body_bytes} bytes", code="body_too_large")

    async def chat(request: HttpRequest) -> Any:
        place = contextlib.ExitStack()
        with place:
            place.enter_context(service.place())
            asked = api.read_chat(await body(request), model=config.model, default_max_tokens=config.default_max_tokens)
            if not asked.stream:
                return JSONResponse(await _unless_gone(request, chat_whole(service, asked)))
            events = chat_events(service, asked)
            first = await _unless_gone(request, anext(events))  # what is wrong shows here, while a status can say so
            return _EventStream(first, events, place.pop_all())

    async def generate(request: HttpRequest) -> Response:
        with service.place():
            try:
                asked = msgspec.json.decode(await body(request), type=wire.GenerateBody)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
                raise ApiError(400, f"the body cannot be read: {error}") from error
            if not (asked.trunk or asked.leaf):
                raise ApiError(400, "the prompt has no ids", param="leaf")
            pictures = service.pictures(asked.pictures)
            job = Request(
                ids=asked.trunk + asked.leaf,
                pictures=tuple(shot.data for shot in pictures),
                sampling=asked.sampling,
                training=asked.training,
            )
            done = await _unless_gone(request, service.whole(job))
            answer = wire.GenerateAnswer(
                ids=done.ids,
                logprobs=done.logprobs,
                versions=done.versions,
                finish=done.finish,
                prompt_tokens=done.prompt_tokens,
                cached_tokens=done.cached_tokens,
            )
            return Response(wire.encode(answer), media_type="application/json")

    def model_card() -> dict[str, Any]:
        return {
            "id": config.model,
            "object": "model",
            "created": service.started,
            "owned_by": "owrl_jax",
            "max_model_len": service.engine.settings.max_context,
            "version": service.engine.version,
        }

    async def models(request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [model_card()]})

    async def model(request: HttpRequest) -> Response:
        if request.path_params["id"] != config.model:
            raise ApiError(404, f"there is no model {request.path_params['id']!r} here", code="model_not_found")
        return JSONResponse(model_card())

    async def health(request: HttpRequest) -> Response:
        version = service.engine.version
        state = "draining" if service.draining else "ok" if version >= 0 else "no_weights"
        details: dict[str, Any] = {"status": state}
        if authorised(request.headers, config.token):
            details |= {"model": config.model, "version": version, "open": service.open}
        return JSONResponse(details, 200 if state == "ok" else 503)

    async def metrics(request: HttpRequest) -> Response:
        return Response(service.metrics(), media_type=METRICS_TYPE)

    async def nowhere(request: HttpRequest, error: Any) -> Response:
        return refusal(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))

    return Starlette(
        routes=[
            Route("/v1/chat/completions", guarded("chat", chat), methods=["POST"]),
            Route("/v1/generate", guarded("generate", generate), methods=["POST"]),
            Route("/v1/models", guarded("models", models), methods=["GET"]),
            Route("/v1/models/{id:path}", guarded("models", model), methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", guarded("metrics", metrics), methods=["GET"]),
        ],
        exception_handlers={404: nowhere, 405: nowhere},
    )


class _EventStream:
    """Server-sent events; the generator is closed when the client hangs up, whatever the server's ASGI version."""

    status_code = 200
    background = None

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], place: contextlib.ExitStack) -> None:
        self._first, self._events, self._place = first, events, place

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sending = asyncio.create_task(self._send(send), name="send events")
        watching = asyncio.create_task(_hung_up(receive), name="watch for a hang-up")
        try:
            with self._place:
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
        finally:
            sending.cancel()
            watching.cancel()
        if not sending.cancelled() and (error := sending.exception()) is not None:
            raise error

    async def _send(self, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        async with contextlib.aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except ApiError as error:  # too late for a status
                await send({"type": "http.response.body", "body": event_bytes(error.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _hung_up(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(request: Any, work: Coroutine[Any, Any, _T] | Awaitable[_T]) -> _T:
    """The result of some work, which is abandoned when the client hangs up.

    Raises:
      _Gone: if it did.
    """
    job = asyncio.ensure_future(work)
    watching = asyncio.create_task(_hung_up(request.receive), name="watch for a hang-up")
    try:
        await asyncio.wait({job, watching}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
    finally:
        watching.cancel()
        if not job.done():
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
    raise _Gone
