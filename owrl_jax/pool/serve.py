"""`owrl browser serve`: the sandbox pool of this machine behind HTTP, from the command line to the last browser's end.

This module is about the process: options, the token file, the listening socket, signals, and the order of ending. On
SIGTERM or SIGINT it takes no new episode, lets the open ones go on for `drain_s`, ends the rest as cancelled/shutdown,
closes every browser and exits with code 0; a second signal skips the waiting. The loop is the standard one: uvloop has
aborted natively under mass cancellation. Routes are in `browser/server.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import time
from pathlib import Path

from owrl_jax.browser.config import EngineConfig, SandboxConfig
from owrl_jax.browser.episodes import EpisodeService
from owrl_jax.browser.safety import Safety
from owrl_jax.browser.server import ServerConfig, build_app
from owrl_jax.pool import metrics
from owrl_jax.pool.local import browser_pool
from owrl_jax.pool.sandboxes import SandboxPool, SandboxPoolConfig
from owrl_jax.serving import address, http_server_class, is_loopback, listen, read_or_make_token, signals

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
    listener = listen(options.host, options.port)
    server = http_server_class()(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=75, timeout_graceful_shutdown=5)
    )
    async with pool:
        _say(address(options.host, listener), token_from, pool)
        with signals() as (stop, hurry):
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


def _say(url: str, token_from: str, pool: SandboxPool) -> None:
    print(  # noqa: T201 - the one line a person or a script waits for
        f"owrl browser serve: {url} ({token_from}), at most {pool.sizes.max_episodes} episodes at once",
        flush=True,
    )
