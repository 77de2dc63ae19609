"""The stage of one episode: a browser context with its tabs, and everything that enters it uninvited.

Tabs are followed as a person would: a tab that the acted page opens comes to the front, one that closes itself gives
  the front back to its opener. Dialogs are answered the moment they show, whatever else is going on, since an open
  dialog stops the page, its pictures and its navigations. Downloads are saved, capped and named here. All of it is
  told through `Happenings`.

Invariant: there is always exactly one active tab as long as any is open, and `active` is never a tab that is known to
  be closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from owrl_jax.agent.page_text import one_line
from owrl_jax.browser import faults
from owrl_jax.browser.capture import Camera
from owrl_jax.browser.config import SandboxConfig
from owrl_jax.browser.engine import BrowserEngine, ContextHandle
from owrl_jax.browser.happenings import Happenings, safe_filename
from owrl_jax.browser.tabs import Pulse, Tab
from owrl_jax.outcome import Reason
from owrl_jax.types import Tab as TabView

_log = logging.getLogger(__name__)
_TITLE = 50
_URL = 300


class Stage:
    """One context and what is in it. Made by `Stage.open`, ended by `close`."""

    def __init__(
        self, engine: BrowserEngine, config: SandboxConfig, handle: ContextHandle, downloads: Path | None
    ) -> None:
        self.engine = engine
        self.config = config
        self.handle = handle
        self.context = handle.context
        self.downloads = downloads
        self.camera = Camera(config, begin_frame=engine.begin_frame)
        self.happenings = Happenings()
        self.pulse = Pulse()
        self.tabs: list[Tab] = []
        self.slow: dict[str, float] = {}  # see Tab
        self.dialogs_in_step = 0
        self.popups_in_step = 0
        self.download_count = 0
        self.hostile = ""
        self._active: Tab | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._wanted_page = False
        self.context.on("page", self._on_page)
        self.context.on("dialog", lambda dialog: self._spawn(self._on_dialog(dialog)))

    @classmethod
    async def open(
        cls, engine: BrowserEngine, config: SandboxConfig, *, downloads: Path | None = None, **options: Any
    ) -> Stage:
        """A fresh context with one blank tab.

        Args:
          engine: a started browser.
          config: size, limits, deadlines.
          downloads: folder for this episode's downloads; None discards them.
          options: further options of the context, the proxy among them.
        """
        handle = await faults.within(
            config.deadlines.cdp_s * 2,
            engine.open_context(max_download_bytes=config.max_download_bytes, **_context_options(config), **options),
            "new context",
        )
        stage = cls(engine, config, handle, downloads)
        try:
            if config.replay_har is not None:
                await faults.within(
                    config.deadlines.call_s,
                    handle.context.route_from_har(str(config.replay_har), not_found="abort"),
                    "replay",
                )
            await stage.new_tab()
        except BaseException:
            await asyncio.shield(stage.close())
            raise
        return stage

    @property
    def active(self) -> Tab:
        """The tab in front.

        Raises:
          Fault: if none is left.
        """
        tab = self._active
        if tab is None or tab.closed:
            tab = self._successor(tab)
            self._show(tab)
        return tab

    def index(self, tab: Tab) -> int:
        """Its number in the list of tabs."""
        return self.open_tabs.index(tab)

    @property
    def open_tabs(self) -> list[Tab]:
        """All tabs that are not closed, in the order they were opened."""
        return [tab for tab in self.tabs if not tab.closed]

    def begin_step(self) -> None:
        """A turn begins: its dialogs and popups are counted from zero."""
        self.dialogs_in_step = self.popups_in_step = 0

    async def new_tab(self) -> Tab:
        """Opens a blank tab and brings it to the front."""
        width, height = self.config.viewport
        deadline = time.monotonic() + self.config.deadlines.call_s
        self._wanted_page = True
        try:
            page = await faults.within(
                self.config.deadlines.call_s, self.handle.new_page(width=width, height=height), "new page"
            )
        finally:
            self._wanted_page = False
        tab = self._tab_of(page) or self._add(page, None)
        await faults.within(deadline - time.monotonic(), tab.ready.wait(), "new page")
        if tab.failed is not None:
            raise tab.failed
        if self.engine.begin_frame:
            await faults.within(
                self.config.deadlines.cdp_s, page.set_viewport_size({"width": width, "height": height}), "viewport"
            )
        self._show(tab)
        return tab

    async def activate(self, tab: Tab) -> None:
        """Brings an open tab to the front."""
        self._show(tab)
        if tab.usable:
            await tab.send("Page.bringToFront")

    async def close_tab(self, tab: Tab) -> None:
        """Closes a tab without asking it; the next one in the row comes to the front."""
        index = self.index(tab)
        was_active = tab is self._active
        await faults.within(self.config.deadlines.cdp_s, tab.page.close(run_before_unload=False), "close tab")
        tab.closed = tab.told_closed = True
        if was_active and self.open_tabs:
            await self.activate(self.open_tabs[min(index, len(self.open_tabs) - 1)])

    async def follow(self, acted: Tab) -> Tab:
        """The tab to look at after `acted` was acted in: a tab it opened, itself, or its heir if it closed itself."""
        opened = [t for t in self.open_tabs if t.opener is acted and not t.told]
        for tab in opened:
            with contextlib.suppress(faults.DeadlineExceeded):
                await faults.within(self.config.deadlines.cdp_s, tab.ready.wait(), "new tab")
        opened = [t for t in opened if t.usable]
        for tab in opened:
            tab.told = True
        if opened and self._active is not opened[-1]:
            await self.activate(opened[-1])
            self.happenings.followed = True
            more = f" ({len(opened)} tabs were opened)" if len(opened) > 1 else ""
            self.happenings.note(f"a new tab opened and is now active: tab {self.index(opened[-1])}{more}", event="tab")
        elif acted.closed and not acted.told_closed:
            acted.told_closed = True
            tab = self.active
            self.happenings.followed = True
            self.happenings.note(f"the tab closed itself; tab {self.index(tab)} is now active", event="tab_closed")
        return self.active

    def views(self) -> tuple[TabView, ...]:
        """The tabs as the policy is told of them."""
        front = self.active
        return tuple(
            TabView(
                index=i,
                url=one_line(tab.url, _URL) or "about:blank",
                title=one_line(tab.title, _TITLE),
                active=tab is front,
            )
            for i, tab in enumerate(self.open_tabs)
        )

    async def recover(self, crashed: Tab) -> Tab:
        """A fresh tab in place of one whose renderer died; the old one is closed."""
        tab = await self.new_tab()
        tab.opener = crashed.opener
        position = self.tabs.index(crashed)
        self.tabs.remove(tab)
        self.tabs.insert(position, tab)
        with contextlib.suppress(Exception):  # a dead page may refuse to close; the context will take it along
            await faults.within(2.0, crashed.page.close(run_before_unload=False), "close tab")
        crashed.closed = True
        self._show(tab)
        return tab

    async def close(self) -> None:
        """Ends the context and all tasks. Idempotent; does not raise."""
        if self._closing:
            return
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        try:
            await faults.within(self.config.deadlines.close_s / 2, self.context.close(), "close context")
        except Exception as error:  # noqa: BLE001 - a page that keeps its process busy, or a browser that is gone
            _log.info("a context did not close: %s: %s", type(error).__name__, str(error)[:200])
            await self.handle.dispose(self.config.deadlines.close_s / 2)

    # ---- what enters uninvited ------------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.info("while handling an event: %s: %s", type(task.exception()).__name__, str(task.exception())[:200])
        self.pulse.fire()

    def _tab_of(self, page: Any) -> Tab | None:
        return next((t for t in self.tabs if t.page == page), None)

    def _show(self, tab: Tab) -> None:
        self._active = tab
        self.camera.tab = tab

    def _successor(self, tab: Tab | None) -> Tab:
        heir = tab.opener if tab is not None else None
        while heir is not None and heir.closed:
            heir = heir.opener
        if heir is None and self.open_tabs:
            heir = self.open_tabs[-1]
        if heir is None:
            why = self.hostile or "the page closed the last tab"
            raise faults.Fault(Reason.ENVIRONMENT_ERROR, "page_hostile", why)
        return heir

    def _add(self, page: Any, opener: Tab | None) -> Tab:
        width, height = self.config.viewport
        metrics = {"width": width, "height": height, "deviceScaleFactor": self.config.dpr, "mobile": False}
        tab = Tab(page, timeout_s=self.config.deadlines.cdp_s, metrics=metrics, opener=opener, slow=self.slow)
        self.tabs.append(tab)
        page.on("download", lambda download: self._spawn(self._on_download(download)))
        page.on("filechooser", lambda chooser: self._on_file_chooser())
        page.on("close", lambda *_: (tab.opener or tab).pulse.fire())
        self._spawn(tab.attach())
        return tab

    def _on_page(self, page: Any) -> None:
        if self._closing or self._tab_of(page) is not None:
            return
        if self._wanted_page:
            self._add(page, None)
            return
        self._spawn(self._on_popup(page))

    async def _on_popup(self, page: Any) -> None:
        opener_page = await faults.within(self.config.deadlines.cdp_s, page.opener(), "opener")
        opener = self._tab_of(opener_page) if opener_page is not None else None
        if self._tab_of(page) is not None:
            return
        asked = opener or next((t for t in self.open_tabs if t.opening), None)
        try:
            await self._let_in(page, opener)
        finally:
            if asked is not None:
                asked.opened()

    async def _let_in(self, page: Any, opener: Tab | None) -> None:
        """A popup becomes a tab, or is closed where there are too many."""
        self.popups_in_step += 1
        self.happenings.popups += 1
        if self.popups_in_step > self.config.max_popups or len(self.open_tabs) >= self.config.max_tabs:
            if self.popups_in_step in (1, self.config.max_popups + 1):
                self.happenings.note(
                    "further tabs that the page tried to open were closed at once", event="popup_closed"
                )
            if self.popups_in_step > 4 * self.config.max_popups:
                self.hostile = f"the page opened {self.popups_in_step} tabs in one step"
            await faults.within(self.config.deadlines.cdp_s, page.close(run_before_unload=False), "close popup")
            return
        self._add(page, opener)
        self.pulse.fire()

    async def _on_dialog(self, dialog: Any) -> None:
        kind, text = dialog.type, dialog.message
        self.dialogs_in_step += 1
        accept = kind in ("alert", "beforeunload") or self.config.accept_dialogs
        if self.dialogs_in_step > self.config.max_dialogs:
            self.hostile = f"the page showed {self.dialogs_in_step} dialogs in one step"
        # Recorded before it is answered: the answer lets the page run on, and the call may end meanwhile.
        if kind != "beforeunload":
            answer = ("acknowledged" if kind == "alert" else "accepted") if accept else "dismissed"
            self.happenings.dialog(kind, text, answer)
        else:
            self.happenings.note("the page asked whether to leave; yes was answered", event="dialog", type=kind)
        # An answer that does not arrive is a page that is gone: noticed elsewhere.
        await faults.within(
            self.config.deadlines.cdp_s,
            dialog.accept(dialog.default_value)
            if accept and kind == "prompt"
            else dialog.accept()
            if accept
            else dialog.dismiss(),
            "answer a dialog",
        )
        if self.hostile:
            # Nothing else stops a page that shows dialogs without end.
            await faults.within(self.config.deadlines.cdp_s, dialog.page.close(run_before_unload=False), "close tab")

    def _on_file_chooser(self) -> None:
        self.happenings.note("the page asked for a file; there are no files to upload here", event="file_chooser")
        self.pulse.fire()

    async def _on_download(self, download: Any) -> None:
        """Waits for a download to end, moves it into the episode's folder, and tells."""
        name = safe_filename(download.suggested_filename or "")
        shown = one_line(name, 80)
        self.download_count += 1
        for tab in self.open_tabs:
            tab.pulse.fire()
        if self.downloads is None or self.download_count > self.config.max_downloads:
            self.happenings.note(f'a download of "{shown}" was refused: no files are kept', event="download", name=name)
            await faults.within(self.config.deadlines.cdp_s, download.cancel(), "cancel download")
            return
        started = time.monotonic()
        self.happenings.note(f'a download started: "{shown}"', event="download", name=name, state="started")
        waiting = asyncio.ensure_future(download.path())
        try:
            path = await faults.within(self.config.deadlines.step_s, waiting, "download")
        except Exception as error:  # noqa: BLE001 - every way to fail is told alike
            with contextlib.suppress(Exception):
                await faults.within(self.config.deadlines.cdp_s, download.cancel(), "cancel download")
            why = "it was too large or too slow" if "cancel" in str(error).lower() else type(error).__name__
            self.happenings.note(
                f'the download of "{shown}" failed ({why})', event="download", name=name, state="failed"
            )
            return
        size = await asyncio.to_thread(lambda: path.stat().st_size)
        if size > self.config.max_download_bytes:
            await asyncio.to_thread(path.unlink, True)
            self.happenings.note(
                f'the download of "{shown}" was thrown away: {size} bytes are too many',
                event="download",
                name=name,
                state="too_large",
                bytes=size,
            )
            return
        try:
            target = await asyncio.to_thread(_keep, path, self.downloads, name)
        except OSError as error:
            _log.error("a download could not be kept in %s: %s", self.downloads, error)
            line = f'the download of "{shown}" could not be kept: {error.strerror}'
            self.happenings.note(line, event="download", name=name, state="failed")
            return
        self.happenings.note(
            f'"{one_line(target.name, 80)}" was downloaded ({size} bytes)',
            event="download",
            name=target.name,
            state="saved",
            bytes=size,
            ms=round((time.monotonic() - started) * 1e3),
        )


def _keep(path: Path, folder: Path, name: str) -> Path:
    """Moves a finished download into `folder` under a name that is free there."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, dot, suffix = name.rpartition(".")
    target, n = folder / name, 1
    while target.exists():
        target = folder / (f"{stem} ({n}){dot}{suffix}" if dot else f"{name} ({n})")
        n += 1
    with path.open("rb") as source, target.open("xb") as sink:
        while block := source.read(1 << 20):
            sink.write(block)
    path.unlink(missing_ok=True)
    return target


def _context_options(config: SandboxConfig) -> dict[str, Any]:
    width, height = config.viewport
    options: dict[str, Any] = {
        "viewport": {"width": width, "height": height},
        "screen": {"width": width, "height": height},
        "device_scale_factor": config.dpr,
        "accept_downloads": True,
        "service_workers": "block",
        "permissions": [],
        "bypass_csp": False,
        "user_agent": config.user_agent,
        "locale": config.locale,
        "timezone_id": config.timezone,
    }
    if config.record_har is not None:
        options |= {"record_har_path": str(config.record_har), "record_har_content": "embed", "record_har_mode": "full"}
    return {name: value for name, value in options.items() if value is not None}
