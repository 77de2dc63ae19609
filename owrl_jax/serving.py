"""What every HTTP server of ours does alike: who may reach it, its socket, its signals, its metrics text.

A server of ours can drive browsers or spend an accelerator, so one rule holds for all: loopback without a token, or
anywhere with one. Tokens live in files that their owner alone may read, never on a command line, and are compared in
constant time. Requests that a web page could have sent are refused, since our own browsers show hostile pages on the
same machine: an `Origin` header, a body that is not JSON, and, without a token, a `Host` that is not loopback (a name
that was rebound to it).

Routes are not here, nor is anything heavy.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import os
import secrets
import signal
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

MIN_TOKEN_CHARS = 16


def is_loopback(host: str) -> bool:
    """Whether a listening address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may resolve to anything


def check_access(host: str, token: str | None, danger: str) -> None:
    """Refuses to listen where strangers could call, or with a secret that is none.

    Args:
      host: address to listen on.
      token: the secret; None for none.
      danger: what a stranger could do, for the message.
    Raises:
      ValueError: for a host beyond loopback without a token, or a token too short to be a secret.
    """
    if token is None and not is_loopback(host):
        raise ValueError(f"listening on {host!r} needs a token: anyone who can reach it could {danger}")
    if token is not None and len(token) < MIN_TOKEN_CHARS:
        raise ValueError(f"the token has {len(token)} characters; a secret needs at least {MIN_TOKEN_CHARS}")


def authorised(headers: Mapping[str, str], token: str | None) -> bool:
    """Whether the headers carry `Authorization: Bearer TOKEN`, in constant time; always, if there is no token."""
    if token is None:
        return True
    given = headers.get("authorization", "").encode("utf-8", "surrogateescape")
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def from_a_web_page(headers: Mapping[str, str], token: str | None) -> bool:
    """Whether a page in some browser may have sent this: it names its origin, or came under a name rebound to us."""
    if "origin" in headers:
        return True
    if token is not None:
        return False
    host = headers.get("host", "localhost")
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return not is_loopback(name)


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
    return read_token(path)


def read_token(path: Path) -> str:
    """The secret in a file.

    Raises:
      OSError: if there is no such file.
      ValueError: if others may read it, or it holds nothing that could be a secret.
    """
    path = path.expanduser()
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ValueError(f"the token file {path} has mode {mode:04o}, so others may read it: chmod 600 {path}")
    token = path.read_text().strip()
    if len(token) < MIN_TOKEN_CHARS or any(c.isspace() for c in token):
        raise ValueError(
            f"the token file {path} must hold one word of at least {MIN_TOKEN_CHARS} characters; delete it to have one "
            "made"
        )
    return token


# --- The process ------------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
      OSError: naming the address, if it cannot be listened on.
    """
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


def address(host: str, listener: socket.socket) -> str:
    """The URL of a listening socket, as people type it."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


class Signal(asyncio.Future):
    """A future that a signal completes."""

    def ring(self) -> None:
        if not self.done():
            self.set_result(None)


@contextlib.contextmanager
def signals() -> Iterator[tuple[Signal, Signal]]:
    """Two futures: the first SIGTERM or SIGINT completes the first, the second one both."""
    loop = asyncio.get_running_loop()
    stop, hurry = Signal(), Signal()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if stop.done() else stop).ring())
    try:
        yield stop, hurry
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def http_server_class() -> type:
    """`uvicorn.Server` without its signal handlers: they would end the process by the signal, not with code 0.

    Raises:
      ModuleNotFoundError: without uvicorn (extra `host`).
    """
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server


# --- Prometheus text, version 0.0.4 -----------------------------------------------------------------------------

METRICS_TYPE = "text/plain; version=0.0.4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One metric family: name without prefix, kind (counter or gauge), help, and values by label."""

    name: str
    kind: str
    help: str
    values: tuple[tuple[Mapping[str, str], float], ...]


def counter(name: str, help: str, value: float) -> Sample:
    """A number that only grows."""
    return Sample(name=name, kind="counter", help=help, values=(({}, value),))


def gauge(name: str, help: str, value: float) -> Sample:
    """A number that goes up and down."""
    return Sample(name=name, kind="gauge", help=help, values=(({}, value),))


def by_label(name: str, kind: str, help: str, label: str, values: Mapping[str, float]) -> Sample:
    """A family with one label."""
    return Sample(name=name, kind=kind, help=help, values=tuple(({label: k}, v) for k, v in sorted(values.items())))


def prometheus_text(samples: Iterable[Sample], *, prefix: str) -> str:
    """The families as Prometheus reads them; names get the prefix, and counters `_total`."""
    lines = []
    for sample in samples:
        name = prefix + sample.name + ("_total" if sample.kind == "counter" else "")
        lines += [f"# HELP {name} {sample.help}", f"# TYPE {name} {sample.kind}"]
        for labels, value in sample.values:
            inner = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
            lines.append(f"{name}{'{' + inner + '}' if inner else ''} {value:.12g}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
