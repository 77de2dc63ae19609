"""`owrl browser serve`: the sandbox pool of this machine behind HTTP, from the command line to the last browser's end.

This module is about the process: options, the token file, the listening socket, signals, and the order of ending. On
SIGTERM or SIGINT it takes no new episode, lets the open ones go on for `drain_s`, ends the rest as cancelled/shutdown,
closes every browser and exits with code 0; a second signal skips the waiting. The loop is the standard one: uvloop has
aborted natively under mass cancellation. Routes are in `browser/server.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from owrl_jax.browser.config import EngineConfig, SandboxConfig
from owrl_jax.browser.episodes import EpisodeService
from owrl_jax.browser.safety import Safety
from owrl_jax.browser.server import ServerConfig, build_app, is_loopback
from owrl_jax.pool import metrics
from owrl_jax.pool.local import browser_pool
from owrl_jax.pool.sandboxes import SandboxPool, SandboxPoolConfig

_log = logging.getLogger(__name__)

DEFAULT_TOKEN_FILE = Path("~/.owrl/browser-token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The arguments of `owrl browser serve`."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, a token is required and made if there is none."""
    port: int = 8740
    """Port; 0 takes a free one."""
    token_file: Path | None = None
    """File with the secret clients must send; made with mode 0600 if it does not exist."""
    max_episodes: int | None = None
    """Episodes at one time; left out, what cores and memory allow."""
    contexts_per_browser: int = 1
    """Episodes that share one browser process."""
    recycle_after: int = 40
    """Episodes after which a browser is replaced."""
    lease_ttl_s: float = 120.0
    """A client that is silent for so long loses its sandbox."""
    drain_s: float = 20.0
    """After SIGTERM, how long open episodes may go on."""
    browser: str | None = None
    """Path of the browser, or `headless_shell` or `chromium`; left out, the best there is."""
    allow: tuple[str, ...] = ()
    """host:port pairs that may be visited although they are private, for local sites."""
    log_level: str = "info"


def main(argv: list[str]) -> int:
    """Serves until a signal comes. Returns the exit code: 0 after a clean drain, 2 for a wrong call."""
    import tyro

    options = tyro.cli(ServeOptions, args=argv, prog="owrl browser serve", description=__doc__)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        return asyncio.run(serve(options))
    except (ValueError, OSError) as error:
        print(f"owrl browser serve: {error}", file=sys.stderr)  # noqa: T201 - a command talks to its user
        return 2


async def serve(options: ServeOptions) -> int:
    """Serves until SIGTERM or SIGINT, then drains. Returns 0.

    Raises:
      ValueError: for options that cannot be (token file readable by others, a malformed --allow).
      OSError: if the address cannot be listened on.
    """
    import uvicorn

    token, token_from = _token(options)
    config = ServerConfig(host=options.host, port=options.port, token=token)
    pool = _pool(options)
    service = EpisodeService(pool, ttl_s=options.lease_ttl_s)
    started_s = time.monotonic()
    app = build_app(
        service,
        config,
        health=lambda: metrics.health(pool, service, started_s=started_s),
        metrics=lambda: metrics.prometheus(pool, service),
    )
    listener = _listen(options.host, options.port)
    server = _server_class()(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=75, timeout_graceful_shutdown=5)
    )
    async with pool:
        _say(options.host, listener.getsockname()[1], token_from, pool)
        with _signals() as (stop, hurry):
            serving = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
            await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
            _log.info("draining: %d episodes open, at most %g s", service.live, options.drain_s)
            draining = asyncio.create_task(service.drain(options.drain_s), name="drain")
            await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            await service.drain(0.0)
            server.should_exit = True
            await serving
    audit = pool.audit()
    _log.info("closed: %d leases acquired, %d released", audit.acquired, audit.released)
    return 0


def read_or_make_token(path: Path) -> str:
    """The secret in `path`; a file that does not exist is made with a fresh one, readable by its owner alone.

    Raises:
      ValueError: if others may read it, or it holds nothing that could be a secret.
    """
    path = path.expanduser()
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ValueError(f"the token file {path} has mode {mode:04o}, so others may read it: chmod 600 {path}")
    token = path.read_text().strip()
    if len(token) < 16 or any(c.isspace() for c in token):
        raise ValueError(
            f"the token file {path} must hold one word of at least 16 characters; delete it to have one made"
        )
    return token


class _Stop(asyncio.Future):
    def ring(self) -> None:
        if not self.done():
            self.set_result(None)


@contextlib.contextmanager
def _signals() -> Iterator[tuple[_Stop, _Stop]]:
    """Two futures: the first signal completes the first, the second both."""
    loop = asyncio.get_running_loop()
    stop, hurry = _Stop(), _Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if stop.done() else stop).ring())
    try:
        yield stop, hurry
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _token(options: ServeOptions) -> tuple[str | None, str]:
    if options.token_file is None and is_loopback(options.host):
        return None, "no token"
    path = options.token_file or DEFAULT_TOKEN_FILE
    return read_or_make_token(path), f"token in {path.expanduser()}"


def _pool(options: ServeOptions) -> SandboxPool:
    exceptions = set()
    for text in options.allow:
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit():
            raise ValueError(f"--allow takes host:port, e.g. 127.0.0.1:8000, got {text!r}")
        exceptions.add((host, int(port)))
    safety = Safety.for_local_worlds(exceptions) if exceptions else Safety()
    return browser_pool(
        SandboxPoolConfig(
            max_episodes=options.max_episodes,
            contexts_per_browser=options.contexts_per_browser,
            recycle_after=options.recycle_after,
            lease_ttl_s=options.lease_ttl_s,
        ),
        engine=EngineConfig(browser=options.browser),
        sandbox=SandboxConfig(safety=safety),
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.listen(1024)  # so that the address that is printed takes connections at once
    return listener


def _say(host: str, port: int, token_from: str, pool: SandboxPool) -> None:
    shown = f"[{host}]" if ":" in host else host
    print(  # noqa: T201 - the one line a person or a script waits for
        f"owrl browser serve: http://{shown}:{port} ({token_from}), at most {pool.sizes.max_episodes} episodes at once",
        flush=True,
    )


def _server_class() -> type:
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn without its signal handlers: they would end the process by the signal, not with code 0."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server
