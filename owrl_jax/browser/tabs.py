"""One tab: its page, its CDP session, and what its events say about navigation, loading and requests.

A `Tab` listens from the moment it is attached, so that whatever an action causes is seen however fast it comes. It
keeps counts and states, no bodies and no history beyond the current document. Who waits for what is `settle.py`'s
business.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any
from urllib.parse import urlsplit

from owrl_jax.browser import faults
from owrl_jax.browser.policy import registrable_domain
from owrl_jax.browser.world import Node, World

_CONTENT_TYPES = frozenset({"Document", "XHR", "Fetch", "Script", "Stylesheet"})
_POLL_COUNT = 3  # the same address asked for this often by one document is a poll


class Pulse:
    """Wakes everybody who waits whenever something happened."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float) -> None:
        """Until the next `fire`, or `timeout_s` later."""
        event = self._event
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await event.wait()
        except TimeoutError:
            return


@dataclasses.dataclass
class Request:
    """A request that content may depend on, in flight.

    Attributes:
      key: method and address without query.
      started, heard: when it was sent, and when the server last said something (0 if it has not), monotonic seconds.
      own: whether it went to the page's own site.
      length: bytes that the whole answer has; None if the server did not say.
      received: bytes of them that have come.
      packed: whether bytes are counted before they are unpacked.
    """

    key: str
    started: float
    own: bool
    kind: str
    loader_id: str
    heard: float = 0.0
    length: int | None = None
    received: int = 0
    packed: bool = False

    @property
    def whole(self) -> bool:
        """Whether all of the answer has come. The browser calls it finished only once the page has read it."""
        return bool(self.heard) and self.length is not None and self.received >= self.length


@dataclasses.dataclass
class DocumentState:
    """What is known of the document shown in the main frame."""

    loader_id: str = ""
    url: str = "about:blank"
    status: int | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    mime: str = ""
    error: str = ""
    restless: bool = False  # its DOM never became still once: not waited for as long again
    asked: dict[str, int] = dataclasses.field(default_factory=dict)  # address without query -> how often


class Tab:
    """One open page."""

    def __init__(
        self,
        page: Any,
        *,
        timeout_s: float,
        metrics: dict[str, Any] | None = None,
        opener: Tab | None = None,
        slow: dict[str, float] | None = None,
    ) -> None:
        self.page = page
        # Addresses that once were not answered while they were waited for, and how long that was; the same for all tabs
        # of an episode. Long polls, mostly.
        self.slow: dict[str, float] = {} if slow is None else slow
        self.metrics = metrics
        self.opener = opener
        self.timeout_s = timeout_s
        self.pulse = Pulse()
        self.cdp: Any = None
        self.world: World = None  # type: ignore[assignment]  # set by attach
        self.frame_id = ""
        self.document = DocumentState()
        self.requests: dict[str, Request] = {}
        self.last_own_finish = 0.0
        self.closed = False
        self.crashed = False
        self.failed: Exception | None = None
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()  # closed or crashed
        self.title = ""
        self.told = False  # whether the policy knows of it
        self.told_closed = False  # the same of its end
        self.unanswered_input = 0.0  # seconds for which the page left an input unanswered; 0 if it did not
        # Of the current action, reset by `begin`:
        self.navigating_since: float | None = None
        self.commits = 0
        self.same_document = 0
        self.aborted = 0
        self.opening = 0  # tabs that the page asked for and that are not there yet
        self.navigation_error = ""
        self._pending_documents: dict[str, str] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self._frames: dict[str, World] = {}
        page.on("close", lambda *_: self._gone())
        page.on("crash", lambda *_: self._crash())

    async def attach(self) -> None:
        """Opens the CDP session and starts to listen.

        Raises:
          Exception: of the driver, if the page vanished meanwhile; `failed` then holds it too.
        """
        try:
            self.cdp = await faults.within(self.timeout_s, self.page.context.new_cdp_session(self.page), "attach")
            for name, handler in (
                ("Page.frameRequestedNavigation", self._on_navigation_requested),
                ("Page.frameStartedNavigating", self._on_navigation_started),
                ("Page.frameNavigated", self._on_navigated),
                ("Page.navigatedWithinDocument", self._on_same_document),
                ("Page.frameStoppedLoading", self._on_stopped),
                ("Page.windowOpen", self._on_window_open),
                ("Page.domContentEventFired", self._on_something),
                ("Page.loadEventFired", self._on_something),
                ("Network.requestWillBeSent", self._on_request),
                ("Network.responseReceived", self._on_response),
                ("Network.dataReceived", self._on_data),
                ("Network.loadingFinished", self._on_finished),
                ("Network.loadingFailed", self._on_failed),
            ):
                self.cdp.on(name, handler)
            tree, *_ = await faults.within(
                self.timeout_s,
                asyncio.gather(
                    self.cdp.send("Page.getFrameTree"),
                    self.cdp.send("Page.enable"),
                    self.cdp.send("Network.enable", {"maxTotalBufferSize": 1 << 20, "maxResourceBufferSize": 1 << 18}),
                ),
                "attach",
            )
            if self.metrics is not None:
                # Pictures are scaled by what this very session emulates; Playwright's own emulation does not count.
                await self.send("Emulation.setDeviceMetricsOverride", self.metrics)
            frame = tree["frameTree"]["frame"]
            self.frame_id = frame["id"]
            self.world = World(self.cdp, self.frame_id, self.timeout_s, self.gone)
            if not self.document.loader_id:
                self.document = DocumentState(loader_id=frame["loaderId"], url=frame["url"])
        except Exception as error:
            self.failed = error
            raise
        finally:
            self.ready.set()
            self.pulse.fire()

    @property
    def usable(self) -> bool:
        """Whether it can be looked at and acted in."""
        return self.ready.is_set() and self.failed is None and not self.closed and not self.crashed

    @property
    def url(self) -> str:
        """Address of the document, or the one that could not be opened."""
        return self.document.url

    @property
    def navigating(self) -> bool:
        """Whether the main frame is on its way to another document."""
        return self.navigating_since is not None or bool(self._pending_documents)

    def begin(self) -> None:
        """An action starts: count from zero what it causes. A navigation under way stays under way."""
        self.commits = self.same_document = self.aborted = self.opening = 0
        self.navigation_error = ""
        self.unanswered_input = 0.0

    def own_requests(self, youngest_s: float, again_s: float, silent_s: float) -> list[Request]:
        """Content requests of the page's own site in flight that are young and no polls.

        Args:
          youngest_s: age at which one is not waited for any more.
          again_s: the same for an address that reached `youngest_s` before; it is taken at its word again once it
            answers in that time.
          silent_s: how long one whose answer has begun may say nothing. A stream is silent, and so is an answer that
            the page does not read.
        """
        now = time.monotonic()
        waited_for = []
        for request in self.requests.values():
            age = now - request.started
            if not request.own or self.document.asked.get(request.key, 0) >= _POLL_COUNT:
                continue
            if age >= youngest_s and not request.heard:
                self.slow[request.key] = youngest_s
            if age >= (again_s if request.key in self.slow else youngest_s):
                continue
            if not request.heard or now - request.heard < silent_s:
                waited_for.append(request)
        return waited_for

    def foreign_blocking(self, youngest_s: float) -> list[Request]:
        """Scripts and style sheets of other sites in flight: a page that is loading may need them."""
        now = time.monotonic()
        return [
            r
            for r in self.requests.values()
            if not r.own and r.kind in ("Script", "Stylesheet") and now - r.started < youngest_s
        ]

    async def send(self, method: str, params: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """One CDP request to this tab under a deadline."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        return await faults.within_life(self.gone, limit, self.cdp.send(method, params or {}), method)

    async def frame_world(self, frame_id: str, parent: World) -> World | None:
        """The world of a frame inside `parent`; None if there is no such frame."""
        if frame_id not in self._frames:
            # A frame of the parent's process is in the parent's session, any other in one of its own.
            local = World(parent.session, frame_id, self.timeout_s, self.gone)
            try:
                await local.call("probe")
            except Exception as error:
                if not faults.is_stale_context(error):
                    raise
            else:
                self._frames[frame_id] = local
                return local
            for frame in self.page.frames:
                if frame.parent_frame is None:
                    continue
                try:
                    session = await faults.within(self.timeout_s, self.page.context.new_cdp_session(frame), "attach")
                    tree = await faults.within(self.timeout_s, session.send("Page.getFrameTree"), "attach")
                except faults.DeadlineExceeded:
                    raise
                except Exception as error:
                    if type(error).__module__.startswith("playwright"):
                        continue
                    raise
                found = tree["frameTree"]["frame"]["id"]
                self._frames.setdefault(found, World(session, found, self.timeout_s, self.gone))
        return self._frames.get(frame_id)

    def own_site(self, url: str) -> bool:
        """Whether an address belongs to the site of the current document."""
        return _site(url) == _site(self.document.url)

    # ---- events ---------------------------------------------------------------------------------------------------

    def _gone(self) -> None:
        self.closed = True
        self.gone.set()
        self.ready.set()
        self.pulse.fire()

    def _crash(self) -> None:
        self.crashed = True
        self.gone.set()
        self.pulse.fire()

    def _on_something(self, event: dict[str, Any]) -> None:
        self.pulse.fire()

    def _on_window_open(self, event: dict[str, Any]) -> None:
        self.opening += 1
        self.pulse.fire()

    def opened(self) -> None:
        """One of the tabs that the page asked for is there, or was turned away."""
        self.opening = max(self.opening - 1, 0)
        self.pulse.fire()

    def _on_navigation_requested(self, event: dict[str, Any]) -> None:
        if event.get("frameId") == self.frame_id and event.get("disposition") in (None, "currentTab"):
            if not str(event.get("url", "")).startswith("javascript:"):
                self.navigating_since = time.monotonic()
            self.pulse.fire()

    def _on_navigation_started(self, event: dict[str, Any]) -> None:
        if event.get("frameId") == self.frame_id:
            if event.get("navigationType") in ("sameDocument", "historySameDocument"):
                return
            self.navigating_since = time.monotonic()
            self.pulse.fire()

    def _on_navigated(self, event: dict[str, Any]) -> None:
        frame = event["frame"]
        if frame.get("parentId"):
            return
        self.frame_id = frame["id"]
        if self.world is not None:
            self.world.frame_id = self.frame_id
            self.world.forget()
        loader_id = frame.get("loaderId", "")
        answer = self._answers.pop(loader_id, {})
        unreachable = frame.get("unreachableUrl", "")
        self.document = DocumentState(
            loader_id=loader_id,
            url=unreachable or frame.get("url", "") + frame.get("urlFragment", ""),
            status=answer.get("status"),
            headers=answer.get("headers", {}),
            mime=answer.get("mime", frame.get("mimeType", "")),
            error=(self.navigation_error or "net::ERR_FAILED") if unreachable else "",
        )
        self._frames.clear()
        self._answers.clear()
        self.requests = {k: r for k, r in self.requests.items() if r.loader_id == loader_id}
        self.commits += 1
        self.navigating_since = None
        self._pending_documents.clear()
        self.pulse.fire()

    def _on_same_document(self, event: dict[str, Any]) -> None:
        if event.get("frameId") == self.frame_id:
            self.document.url = event["url"]
            self.same_document += 1
            self.pulse.fire()

    def _on_stopped(self, event: dict[str, Any]) -> None:
        if event.get("frameId") == self.frame_id:
            self.navigating_since = None
            self._pending_documents.clear()
            self.pulse.fire()

    def _on_request(self, event: dict[str, Any]) -> None:
        kind, request_id = event.get("type", ""), event["requestId"]
        if kind == "Document" and event.get("frameId") == self.frame_id:
            if event.get("loaderId") == request_id:
                self._pending_documents[request_id] = event["request"]["url"]
                self.navigating_since = self.navigating_since or time.monotonic()
            self.pulse.fire()
            return
        if kind not in _CONTENT_TYPES:
            return
        url = event["request"]["url"]
        if not url.startswith("http"):
            return
        key = f"{event['request']['method']} {url.split('?', 1)[0]}"
        if "redirectResponse" not in event:
            self.document.asked[key] = self.document.asked.get(key, 0) + 1
        self.requests[request_id] = Request(
            key=key, started=time.monotonic(), own=self.own_site(url), kind=kind, loader_id=event.get("loaderId", "")
        )
        self.pulse.fire()

    def _on_response(self, event: dict[str, Any]) -> None:
        request = self.requests.get(event["requestId"])
        if request is not None:
            headers = {k.lower(): v for k, v in event["response"].get("headers", {}).items()}
            length = headers.get("content-length", "")
            request.length = int(length) if length.isdecimal() else None
            request.packed = "content-encoding" in headers
            self._heard(event["requestId"], request, 0)
        if event.get("type") == "Document" and event.get("frameId") == self.frame_id:
            response = event["response"]
            answer = {
                "status": int(response.get("status", 0)) or None,
                "headers": {k.lower(): v for k, v in response.get("headers", {}).items()},
                "mime": response.get("mimeType", ""),
            }
            if event.get("loaderId") == self.document.loader_id:
                self.document.status, self.document.headers = answer["status"], answer["headers"]
                self.document.mime = answer["mime"]
            else:
                self._answers[event.get("loaderId", "")] = answer
            self.pulse.fire()

    def _on_data(self, event: dict[str, Any]) -> None:
        request = self.requests.get(event["requestId"])
        if request is not None:
            size = event.get("encodedDataLength", 0) if request.packed else event.get("dataLength", 0)
            self._heard(event["requestId"], request, size)

    def _heard(self, request_id: str, request: Request, size: int) -> None:
        request.heard = time.monotonic()
        request.received += size
        if request.whole:
            self._end(request_id)

    def _on_finished(self, event: dict[str, Any]) -> None:
        self._end(event["requestId"])

    def _on_failed(self, event: dict[str, Any]) -> None:
        request_id = event["requestId"]
        if request_id in self._pending_documents:
            del self._pending_documents[request_id]
            self.navigation_error = event.get("errorText", "")
            # An error page follows, unless the request was given up: a download, an answer without content, a stop.
            if self.navigation_error == "net::ERR_ABORTED" or event.get("canceled"):
                self.aborted += 1
                if not self._pending_documents:
                    self.navigating_since = None
        self._end(request_id)

    def _end(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is not None and request.own:
            self.last_own_finish = time.monotonic()
            if request.heard and request.heard - request.started < self.slow.get(request.key, 0.0):
                del self.slow[request.key]
        self.pulse.fire()


def _site(url: str) -> str:
    host = urlsplit(url).hostname or ""
    return registrable_domain(host) if host else ""


__all__ = ["DocumentState", "Node", "Pulse", "Request", "Tab"]
