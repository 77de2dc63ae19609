"""A browser that episodes can be opened in: found and launched here, or reached at a CDP address elsewhere.

    engine = BrowserEngine(EngineConfig())
    await engine.start()
    handle = await engine.open_context(viewport={"width": 1280, "height": 1000})
    page = await handle.new_page()
    …
    await engine.close()

Launched and remote browsers are driven the same way, through Playwright's connection to a DevTools endpoint. Launched
ones are processes of ours (`process.py`): their process group is known from the first moment and killed as a whole.

Preference: `headless_shell` before full Chromium. It takes half the memory, opens pages four times faster, has no
background traffic, and can draw frames on request only (`begin_frame`), which makes pictures deterministic.

Not here: what an episode does (`sandbox.py`); when browsers are made and replaced (`pool/fleet.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from owrl_jax.browser.config import EngineConfig
from owrl_jax.browser.egress import EGRESS_FLAGS, EgressProxy
from owrl_jax.browser.process import BASE_ARGS, BEGIN_FRAME_ARGS, BrowserProcess, LaunchError

_log = logging.getLogger(__name__)

# Real binaries before the shell scripts that wrap them: a wrapper's process id is not the browser's.
_PATHS: dict[str, tuple[str, ...]] = {
    "headless_shell": (
        "/usr/lib/chromium/chromium-headless-shell",
        "/usr/lib/chromium/headless_shell",
        "/usr/lib/chromium-browser/headless_shell",
        "/usr/bin/chromium-headless-shell",
        "/usr/bin/headless_shell",
        "/opt/chromium/headless_shell",
    ),
    "chromium": (
        "/usr/lib/chromium/chromium",
        "/usr/lib/chromium-browser/chromium-browser",
        "/opt/google/chrome/chrome",
        "/usr/bin/chromium",
        "/usr/bin/chromium-browser",
        "/usr/bin/google-chrome",
        "/Applications/Chromium.app/Contents/MacOS/Chromium",
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    ),
}
# Where Playwright keeps the browsers it downloaded, newest first.
_CACHES = ("~/.cache/ms-playwright", "~/Library/Caches/ms-playwright")
_CACHED: dict[str, tuple[str, ...]] = {
    "headless_shell": (
        "chromium_headless_shell-*/chrome-*/headless_shell",
        "chromium_headless_shell-*/chrome-*/chrome-headless-shell",
    ),
    "chromium": (
        "chromium-*/chrome-*/chrome",
        "chromium-*/chrome-mac*/*.app/Contents/MacOS/*",
    ),
}
KINDS = tuple(_PATHS)
DRIVER_STARTS = 24  # browsers served by one Playwright driver process before a fresh one takes over (its memory grows)


class BrowserMissing(RuntimeError):
    """No usable browser on this machine; the message says how to get one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrowserBinary:
    """A browser on this machine. `kind` is `headless_shell` or `chromium`; `version` is a dotted number."""

    path: str
    kind: str
    version: str


def find_browser(preferred: str | None = None) -> BrowserBinary:
    """The best browser on this machine.

    Args:
      preferred: a path, or one of `KINDS` to insist on that kind; None takes a headless shell, else any Chromium.

    Raises:
      BrowserMissing: with what to do about it.
    """
    if preferred is not None and preferred not in KINDS:
        path = Path(preferred).expanduser()
        if not path.is_file():
            raise BrowserMissing(f"there is no browser at {preferred}. {_advice()}")
        return _binary(str(path), "headless_shell" if "headless" in path.name else "chromium")
    kinds = (preferred,) if preferred else KINDS
    for kind in kinds:
        for candidate in _candidates(kind):
            with contextlib.suppress(BrowserMissing):
                return _binary(candidate, kind)
    raise BrowserMissing(f"no {' or '.join(kinds)} was found on this machine. {_advice()}")


def _candidates(kind: str) -> Iterator[str]:
    for cache in _CACHES:
        root = Path(cache).expanduser()
        for pattern in _CACHED[kind]:
            yield from (str(p) for p in sorted(root.glob(pattern), reverse=True) if p.is_file())
    yield from (path for path in _PATHS[kind] if Path(path).is_file())


@functools.lru_cache(maxsize=32)
def _binary(path: str, kind: str) -> BrowserBinary:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BrowserMissing(f"{path} does not run: {error}. {_advice()}") from error
    match = re.search(r"\d+(\.\d+)+", said.stdout)
    if match is None:
        raise BrowserMissing(f"{path} does not run: {(said.stderr or said.stdout).strip()[-300:]!r}. {_advice()}")
    return BrowserBinary(path=path, kind=kind, version=match[0])


def _advice() -> str:
    return (
        "Run `owrl browser install`, or install one yourself: Debian and Ubuntu have `apt install "
        "chromium-headless-shell` or `chromium`, and Playwright `playwright install --only-shell chromium`. "
        "A browser elsewhere is given by its path."
    )


class _Driver:
    """One Playwright driver process, shared by the engines of one event loop; it ends when its last user leaves."""

    _current: _Driver | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.users = 0
        self.starts = 0
        self._ready: asyncio.Future[Any] | None = None
        self._manager: Any = None

    @classmethod
    async def take(cls) -> _Driver:
        loop = asyncio.get_running_loop()
        driver = cls._current
        if driver is None or driver.loop is not loop or driver.starts >= DRIVER_STARTS or driver.broken:
            driver = cls._current = cls(loop)
        driver.users += 1
        driver.starts += 1
        try:
            if driver._ready is None:
                driver._ready = asyncio.ensure_future(driver._start())
            await asyncio.shield(driver._ready)
        except BaseException:
            await asyncio.shield(driver.give_back())
            raise
        return driver

    @property
    def broken(self) -> bool:
        return (
            self._ready is not None
            and self._ready.done()
            and (self._ready.cancelled() or self._ready.exception() is not None)
        )

    @property
    def playwright(self) -> Any:
        assert self._ready is not None
        return self._ready.result()

    async def _start(self) -> Any:
        try:
            from playwright.async_api import async_playwright
        except ImportError as error:
            raise ImportError("driving a browser needs playwright: pip install 'owrl_jax[host]'") from error
        self._manager = async_playwright()
        return await self._manager.start()

    async def give_back(self) -> None:
        self.users -= 1
        if self.users > 0:
            return
        if _Driver._current is self:
            _Driver._current = None
        if self._ready is not None and self._ready.done() and not self.broken:
            try:
                await asyncio.wait_for(self.playwright.stop(), 5.0)
            except Exception as error:  # noqa: BLE001 - a driver that died already has nothing left to stop
                _log.info("the Playwright driver did not stop cleanly: %s: %s", type(error).__name__, error)
        elif self._ready is not None:
            self._ready.cancel()


@dataclasses.dataclass(eq=False, kw_only=True)
class ContextHandle:
    """A browser context of one episode, and how to open a page in it."""

    context: Any  # playwright.async_api.BrowserContext
    engine: BrowserEngine
    browser_context_id: str
    max_download_bytes: int

    async def new_page(self, *, width: int, height: int) -> Any:
        """A fresh page; with frames on request where the engine draws that way."""
        if not self.engine.begin_frame:
            return await self.context.new_page()
        async with self.context.expect_page(timeout=5000) as opened:
            await self.engine.session.send(
                "Target.createTarget",
                {
                    "url": "about:blank",
                    "enableBeginFrameControl": True,
                    "browserContextId": self.browser_context_id,
                    "width": width,
                    "height": height,
                },
            )
        return await opened.value

    async def dispose(self, timeout_s: float) -> None:
        """Throws the context away without asking its pages; does not raise."""
        self.engine.handles.discard(self)
        try:
            params = {"browserContextId": self.browser_context_id}
            await asyncio.wait_for(self.engine.session.send("Target.disposeBrowserContext", params), timeout_s)
        except Exception as error:  # noqa: BLE001 - the browser may be gone; its owner looks after that
            _log.info("a context was not disposed of: %s: %s", type(error).__name__, str(error)[:200])


class BrowserEngine:
    """One browser process, or one connection to a remote one. Start once, close once; closing is idempotent.

    Args:
      config: see there.
      egress: a running proxy through which all traffic of a launched browser goes, for engines to share. Without one
        the engine runs its own, unless `config.egress` is off. A remote browser cannot reach a proxy of ours: what it
        may visit is up to the network it stands in, and a warning says so.
    """

    def __init__(self, config: EngineConfig | None = None, *, egress: EgressProxy | None = None) -> None:
        self.config = config or EngineConfig()
        self.egress = egress
        self._own_egress: EgressProxy | None = None
        self.binary: BrowserBinary | None = None
        self.begin_frame = False
        self.browser: Any = None  # playwright.async_api.Browser
        self.session: Any = None  # browser-wide CDP session
        self.version = ""
        self.platform = ""
        self._process: BrowserProcess | None = None
        self._driver: _Driver | None = None
        self._connected = False
        self.handles: set[ContextHandle] = set()
        self._contexts = asyncio.Lock()
        self._cancelling: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Launches or connects.

        Raises:
          BrowserMissing: there is no browser on this machine.
          LaunchError: it did not come up, or the endpoint did not answer, within `launch_s`.
        """
        if self.browser is not None or self._closing is not None:
            raise RuntimeError("an engine is started once; make a new one")
        try:
            async with asyncio.timeout(self.config.launch_s):
                await self._start()
        except TimeoutError as error:
            await self.close()
            where = self.config.endpoint or (self.binary.path if self.binary else "the browser")
            raise LaunchError(f"{where} was not ready within {self.config.launch_s:g} s") from error
        except BaseException:
            await asyncio.shield(self.close())
            raise

    @property
    def kind(self) -> str:
        """`headless_shell`, `chromium` or `remote`."""
        return self.binary.kind if self.binary else "remote"

    @property
    def pid(self) -> int | None:
        """Process id of the browser, None for a remote one or before the start."""
        return self._process.pid if self._process else None

    @property
    def pgid(self) -> int | None:
        """Process group of the browser and all its children."""
        return self._process.pgid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the browser runs and the connection to it stands."""
        return self._connected and self._closing is None and (self._process is None or self._process.alive)

    async def look_alive(self, grace_s: float = 0.5) -> bool:
        """`alive`, for when pages have vanished and the news of a death may be on its way: waits a moment for it."""
        if self._process is not None and self.alive:
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.exited.wait()
            except TimeoutError:
                return self.alive
        return self.alive

    def rss_mib(self) -> float:
        """Resident memory of the browser's processes in MiB; 0 for a remote one."""
        return self._process.rss_mib() if self._process else 0.0

    async def open_context(self, *, max_download_bytes: int = 0, **options: Any) -> ContextHandle:
        """A fresh, isolated browser context. `options` are those of Playwright's `new_context`.

        A download that grows beyond `max_download_bytes` is cancelled while it runs; with several contexts of different
        limits, at the largest of them (the sandbox throws away what is larger than its own when it is complete).
        """
        async with self._contexts:  # the id of the new context is found by comparing before and after
            before = set((await self.session.send("Target.getBrowserContexts"))["browserContextIds"])
            context = await self.browser.new_context(**options)
            after = set((await self.session.send("Target.getBrowserContexts"))["browserContextIds"])
            added = after - before
            if len(added) != 1:
                # Somebody else uses the same remote browser; the page itself knows where it is.
                await context.close()
                raise RuntimeError(f"{len(added)} contexts appeared at once: is another client using this browser?")
            handle = ContextHandle(
                context=context, engine=self, browser_context_id=added.pop(), max_download_bytes=max_download_bytes
            )
            self.handles.add(handle)
            context.on("close", lambda *_: self.handles.discard(handle))
            return handle

    async def close(self) -> None:
        """Ends the connection and, for a browser of ours, the whole group. Survives cancellation, idempotent."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    def kill(self) -> None:
        """Kills the process group at once, without waiting; `close` still has to be called."""
        if self._process is not None:
            self._process.kill()

    async def _start(self) -> None:
        address = self.config.endpoint
        if address is not None:
            self.egress = None
            _log.warning(
                "the remote browser at %s is not behind our egress proxy: its network must refuse for us", address
            )
        driver = asyncio.ensure_future(_Driver.take())  # takes as long as the browser: do both at the same time
        try:
            if address is None:
                self.binary = await asyncio.to_thread(find_browser, self.config.browser)
                self.begin_frame = self.binary.kind == "headless_shell" and self.config.begin_frame is not False
                if self.config.begin_frame and not self.begin_frame:
                    raise BrowserMissing(
                        f"frames on request (begin_frame=True) need a headless shell; {self.binary.path} is none"
                    )
                args = [*BASE_ARGS, *(BEGIN_FRAME_ARGS if self.begin_frame else ()), *await self._egress_args()]
                if self.binary.kind == "chromium":
                    args.append("--headless=new")
                args.extend(self.config.extra_args)
                self._process, address = await BrowserProcess.launch(
                    self.binary.path, args, tag=self.config.tag, timeout_s=self.config.launch_s
                )
        finally:
            # Also when launching failed or was cancelled: whoever was taken must be given back.
            self._driver = taken = await asyncio.shield(driver)
        self.browser = await taken.playwright.chromium.connect_over_cdp(
            address, timeout=self.config.launch_s * 1000, headers=dict(self.config.endpoint_headers)
        )
        self._connected = True
        self.browser.on("disconnected", lambda *_: self._disconnected())
        self.session = await self.browser.new_browser_cdp_session()
        self.session.on("Browser.downloadProgress", self._on_download_progress)
        # Nobody downloads in the default context; what this asks for is to be told of all downloads while they run.
        await self.session.send("Browser.setDownloadBehavior", {"behavior": "deny", "eventsEnabled": True})
        version = await self.session.send("Browser.getVersion")
        self.version = version.get("product", "")
        self.platform = version.get("userAgent", "")

    async def _egress_args(self) -> list[str]:
        if self.egress is None and self.config.egress:
            self._own_egress = self.egress = EgressProxy()
            await self._own_egress.start()
        return [*EGRESS_FLAGS, *self.egress.launch_flags()] if self.egress is not None else []

    def _on_download_progress(self, event: dict[str, Any]) -> None:
        limits = [h.max_download_bytes for h in self.handles if h.max_download_bytes]
        if event.get("state") != "inProgress" or not limits or event.get("receivedBytes", 0) <= max(limits):
            return
        for handle in self.handles:
            task = asyncio.ensure_future(self._cancel_download(event["guid"], handle.browser_context_id))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)

    async def _cancel_download(self, guid: str, context_id: str) -> None:
        try:
            params = {"guid": guid, "browserContextId": context_id}
            await asyncio.wait_for(self.session.send("Browser.cancelDownload", params), 5.0)
        except Exception as error:  # noqa: BLE001 - it belongs to another context, or has ended
            _log.debug("download %s was not cancelled: %s", guid, error)

    def _disconnected(self) -> None:
        self._connected = False

    async def _close(self) -> None:
        if self.browser is not None and self._connected:
            try:
                await asyncio.wait_for(self.browser.close(), 2.0)
            except Exception as error:  # noqa: BLE001 - the process group is killed below whatever happened here
                _log.info("the browser did not close politely: %s: %s", type(error).__name__, error)
        self._connected = False
        if self._process is not None:
            await self._process.end()
        if self._driver is not None:
            driver, self._driver = self._driver, None
            await driver.give_back()
        if self._own_egress is not None:
            await self._own_egress.stop()
