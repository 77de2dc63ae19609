"""The one place where things that go wrong in a sandbox become outcomes.

Code that knows what happened raises a `Fault` with its typed reason. Everything else (driver errors, deadlines, full
disks) is mapped by `outcome_of`, by exception class and by Chromium's own error names, never by free text of a page.
What maps to nothing is `sandbox_error/unknown` with its traceback: counted as a bug of ours, never as a failure of the
policy.

`within` puts a deadline on an await; the sandbox uses no other way to wait for the browser.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Awaitable
from typing import TypeVar

from owrl_jax.outcome import Outcome, Owner, Phase, Reason, from_exception

_T = TypeVar("_T")


class Fault(Exception):
    """Something that ends the episode, and what it is. Arguments as in `Outcome`."""

    def __init__(self, reason: Reason, detail: str, message: str, *, owner: Owner | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.detail = detail
        self.owner = owner


class DeadlineExceeded(Exception):
    """An await took longer than it may."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what} took longer than {seconds:g} s")
        self.what = what
        self.seconds = seconds


class NavigationFailed(Exception):
    """The browser could not open an address. `error` is Chromium's name for it, as in `net::ERR_TIMED_OUT`."""

    def __init__(self, url: str, error: str) -> None:
        super().__init__(f"{url}: {error}")
        self.url = url
        self.error = error


class ScriptError(Exception):
    """One of our own questions to a page raised in the page."""


class PageGone(Exception):
    """The page that was asked has crashed or was closed."""


async def within_life(gone: asyncio.Event, seconds: float, awaitable: Awaitable[_T], what: str) -> _T:
    """As `within`, but ends with `PageGone` as soon as `gone` is set: the dead do not answer."""
    if gone.is_set():
        asyncio.ensure_future(awaitable).cancel()
        raise PageGone(f"{what}: the page is gone")
    answer, end = asyncio.ensure_future(awaitable), asyncio.ensure_future(gone.wait())
    try:
        done, _ = await asyncio.wait((answer, end), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if answer in done:
            return answer.result()
        if end in done:
            raise PageGone(f"{what}: the page is gone")
        raise DeadlineExceeded(what, seconds)
    finally:
        for task in (answer, end):
            task.cancel()


async def within(seconds: float, awaitable: Awaitable[_T], what: str) -> _T:
    """The result of `awaitable`, or `DeadlineExceeded` naming what was waited for."""
    try:
        async with asyncio.timeout(max(seconds, 0.001)):
            return await awaitable
    except TimeoutError as error:
        raise DeadlineExceeded(what, seconds) from error


# Chromium's error names by kind. What is not here is `nav_aborted`.
_NAVIGATION: tuple[tuple[str, str], ...] = (
    (r"NAME_NOT_RESOLVED|NAME_RESOLUTION|DNS_|ICANN_NAME", "nav_dns"),
    (r"TOO_MANY_REDIRECTS", "redirect_loop"),
    (r"CERT_|SSL_|TLS|BAD_SSL", "nav_tls"),
    (r"TIMED_OUT|TIMEOUT", "nav_timeout"),
    (r"EMPTY_RESPONSE|INVALID_RESPONSE|INVALID_HTTP|HTTP2_|QUIC_|CONTENT_|RESPONSE_HEADERS|INCOMPLETE", "bad_response"),
    (r"CONNECTION_|ADDRESS_|INTERNET_DISCONNECTED|NETWORK_|TUNNEL_|PROXY_|SOCKET_", "nav_refused"),
)


def navigation_detail(error: str) -> str:
    """The outcome detail for a Chromium network error name."""
    return next((detail for pattern, detail in _NAVIGATION if re.search(pattern, error)), "nav_aborted")


_GONE = re.compile(r"has been closed|Target closed|Browser closed|Connection closed|disconnected|pipe closed", re.I)


def outcome_of(
    error: BaseException,
    *,
    phase: Phase,
    browser_alive: bool,
    crashed: bool = False,
    latency_ms: float | None = None,
    rss_mib: float | None = None,
) -> Outcome:
    """The outcome that an exception ends an episode with.

    Args:
      error: what was caught.
      phase: what the sandbox was doing.
      browser_alive: whether the browser still runs; if not, that is the cause and not whatever failed because of it.
      crashed: whether the renderer of the page is gone.
      latency_ms, rss_mib: for the record.
    """
    reason, detail, owner = _classify(error, browser_alive=browser_alive, crashed=crashed)
    return from_exception(
        error, reason=reason, detail=detail, phase=phase, owner=owner, latency_ms=latency_ms, rss_mib=rss_mib
    )


def _classify(error: BaseException, *, browser_alive: bool, crashed: bool) -> tuple[Reason, str, Owner | None]:
    if not browser_alive:
        return Reason.SANDBOX_ERROR, "browser_gone", None
    if isinstance(error, Fault):
        return error.reason, error.detail, error.owner
    if isinstance(error, NavigationFailed):
        return Reason.ENVIRONMENT_ERROR, navigation_detail(error.error), None
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Reason.SANDBOX_ERROR, "disk_full", None
    if isinstance(error, MemoryError):
        return Reason.SANDBOX_ERROR, "out_of_memory", None
    if crashed:
        return Reason.SANDBOX_ERROR, "renderer_crash", None
    if isinstance(error, DeadlineExceeded):
        return Reason.SANDBOX_ERROR, "step_deadline" if error.what == "step" else "cdp_timeout", None
    if is_gone(error) or isinstance(error, ConnectionError):
        return Reason.SANDBOX_ERROR, "transport", None
    return Reason.SANDBOX_ERROR, "unknown", Owner.SANDBOX


def is_gone(error: BaseException) -> bool:
    """Whether an error says that the page, context or browser it concerned is closed."""
    return (
        isinstance(error, PageGone)
        or type(error).__name__ == "TargetClosedError"
        or (type(error).__module__.startswith("playwright") and _GONE.search(str(error)) is not None)
    )


def is_stale_context(error: BaseException) -> bool:
    """Whether a driver error says that the document was replaced while we asked: to be asked again, not a fault."""
    if isinstance(error, ScriptError):
        return "no longer runnable" in str(error)  # an element of a document that is gone was asked
    return type(error).__module__.startswith("playwright") and (
        re.search(
            r"Cannot find context|context was destroyed|Execution context|uniqueContextId not found|"
            r"Cannot find object|Could not find object|Object reference chain|Promise was collected|"
            r"No node with given id|Could not find node|does not belong to the document|"
            r"Inspected target navigated|Frame .*not found|No frame|not attached",
            str(error),
            re.I,
        )
        is not None
    )
