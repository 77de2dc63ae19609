"""The sandbox behind HTTP: routes, token, limits, health and metrics around an `EpisodeService`.

    POST   /episodes                          open an episode: task in, first observation out
    POST   /episodes/{id}/step                run one turn's calls, once per (step, nonce)
    GET    /episodes/{id}/screenshots/{sha}   bytes of a screenshot that an answer named
    POST   /episodes/{id}/heartbeat           keep the lease
    DELETE /episodes/{id}                     end it; the ending that stands comes back
    GET    /health                            alive and not draining; details with a valid token
    GET    /metrics                           Prometheus text

Every answer that is not 2xx is JSON: a sentence, and a typed outcome where there is one. Whoever can reach this
server can drive browsers from this host, so a server that listens beyond loopback refuses to be built without a
token, tokens are compared in constant time, and requests that a web page could forge (an Origin header, a body that
is not JSON) are refused. Not here: what a request means (`browser/episodes.py`), processes and signals
(`pool/serve.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from owrl_jax.browser import wire
from owrl_jax.browser.episodes import EpisodeService, ServiceError
from owrl_jax.outcome import Owner, Phase, Reason, from_exception
from owrl_jax.serving import METRICS_TYPE, authorised, check_access, from_a_web_page

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where to listen and what to refuse.

    Attributes:
      host: address to listen on; anything that is not loopback needs a token.
      token: secret that clients send as `Authorization: Bearer …`; None for none.
      body_bytes: longest request body.
    Raises:
      ValueError: for a host beyond loopback without a token, or a token too short to be a secret.
    """

    host: str = "127.0.0.1"
    port: int = 8740
    token: str | None = None
    body_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        check_access(self.host, self.token, "drive browsers from here")


def build_app(
    service: EpisodeService,
    config: ServerConfig,
    *,
    health: Callable[[], Mapping[str, Any]],
    metrics: Callable[[], str],
    retry_after_s: float = 1.0,
) -> Any:
    """The Starlette application.

    Args:
      service: what the routes call.
      config: token and limits.
      health: details for a caller with a valid token.
      metrics: the Prometheus text.
      retry_after_s: what a client that found no place is told to wait.
    Raises:
      ModuleNotFoundError: without starlette (extra `host`).
    """
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    def answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
        return Response(wire.encode(value), status, headers, media_type="application/json")

    def guarded(act: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def route(request: Request) -> Response:
            try:
                if not authorised(request.headers, config.token):
                    raise ServiceError(401, "a valid token is needed: Authorization: Bearer …")
                if from_a_web_page(request.headers, config.token):
                    raise ServiceError(403, "requests from web pages are refused")
                return await act(request)
            except ServiceError as error:
                headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": f"{retry_after_s:g}"}}
                return answer(
                    wire.ErrorAnswer(error=error.message, outcome=error.outcome),
                    error.status,
                    headers.get(error.status),
                )
            except Exception as error:  # noqa: BLE001 - mapped here, once, and logged as the bug it is
                _log.exception("%s %s", request.method, request.url.path)
                outcome = from_exception(
                    error, reason=Reason.SANDBOX_ERROR, detail="unknown", owner=Owner.SANDBOX, phase=Phase.STEP
                )
                return answer(
                    wire.ErrorAnswer(error="a bug of the server; its log has the traceback", outcome=outcome), 500
                )

        return route

    async def body(request: Request, type_: type[_T]) -> _T:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ServiceError(415, f"the body must be application/json, got {kind[:80]!r}")
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > config.body_bytes:
                raise ServiceError(413, f"the body is longer than {config.body_bytes} bytes")
        try:
            return msgspec.json.decode(bytes(data), type=type_)
        except (msgspec.DecodeError, ValueError) as error:
            raise ServiceError(400, f"the body cannot be read: {error}") from error

    async def open_episode(request: Request) -> Response:
        return answer(await service.open(await body(request, wire.OpenRequest)))

    async def step(request: Request) -> Response:
        return answer(await service.step(request.path_params["id"], await body(request, wire.StepRequest)))

    async def screenshot(request: Request) -> Response:
        sha = request.path_params["sha"]
        if not wire.SHA256.fullmatch(sha):
            raise ServiceError(400, "a screenshot is named by 64 hexadecimal digits")
        shot = service.screenshot(request.path_params["id"], sha)
        return Response(shot.data, media_type=f"image/{shot.format}", headers={"ETag": f'"{sha}"'})

    async def heartbeat(request: Request) -> Response:
        service.heartbeat(request.path_params["id"])
        return answer({})

    async def close(request: Request) -> Response:
        ending = await body(request, wire.CloseRequest) if request.headers.get("content-type") else wire.CloseRequest()
        return answer(wire.CloseAnswer(outcome=await service.close(request.path_params["id"], ending.outcome)))

    async def get_health(request: Request) -> Response:
        state = "draining" if service.draining else "ok"
        details = health() if authorised(request.headers, config.token) else {}
        return answer({"status": state, **details}, 503 if service.draining else 200)

    async def get_metrics(request: Request) -> Response:
        return Response(metrics(), media_type=METRICS_TYPE)

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async def sweep_for_ever() -> None:
            while True:
                await asyncio.sleep(1.0)
                service.sweep()

        sweeper = asyncio.create_task(sweep_for_ever(), name="bury abandoned episodes")
        try:
            yield
        finally:
            sweeper.cancel()

    async def nowhere(request: Request, error: Any) -> Response:
        return answer(wire.ErrorAnswer(error=f"{request.method} {request.url.path}: {error.detail}"), error.status_code)

    return Starlette(
        routes=[
            Route("/episodes", guarded(open_episode), methods=["POST"]),
            Route("/episodes/{id}", guarded(close), methods=["DELETE"]),
            Route("/episodes/{id}/step", guarded(step), methods=["POST"]),
            Route("/episodes/{id}/heartbeat", guarded(heartbeat), methods=["POST"]),
            Route("/episodes/{id}/screenshots/{sha}", guarded(screenshot), methods=["GET"]),
            Route("/health", get_health, methods=["GET"]),
            Route("/metrics", guarded(get_metrics), methods=["GET"]),
        ],
        exception_handlers={404: nowhere, 405: nowhere},
        lifespan=lifespan,
    )
