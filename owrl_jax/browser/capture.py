"""Pictures of the viewport by raw CDP, under a deadline, with fallbacks.

Playwright's own screenshot waits for web fonts and hangs with them; `Page.captureScreenshot` does not. If it fails,
loading is stopped and it is tried once more, then Playwright is asked, then the last good picture is handed out
marked `stale`. Size is read from the bytes, never taken from what was asked for.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import struct
from typing import Any

from owrl_jax.browser import faults
from owrl_jax.browser.config import SandboxConfig
from owrl_jax.browser.tabs import Tab
from owrl_jax.outcome import Reason
from owrl_jax.types import Screenshot

_log = logging.getLogger(__name__)
_FRAME_S = 1 / 60
_PENDING = "frame is pending"  # of the browser's answer where two frames would overlap


class Camera:
    """Takes the pictures of one episode.

    Args:
      config: format and limits.
      begin_frame: whether the browser draws frames only when asked; then `running` must surround everything that needs
        the page to live (scripts wait for animation frames, and so does mouse input).
    """

    def __init__(self, config: SandboxConfig, *, begin_frame: bool) -> None:
        self.config = config
        self.begin_frame = begin_frame
        self.last: Screenshot | None = None
        self.tab: Tab | None = None  # the one whose frames are drawn
        self._pump: asyncio.Task[None] | None = None
        self._drawing = asyncio.Lock()
        self._frames: set[asyncio.Future[dict[str, Any]]] = set()

    @contextlib.asynccontextmanager
    async def running(self):
        """Frames are drawn, sixty a second, until the block is left. Does nothing where the browser draws by itself."""
        if not self.begin_frame or self._pump is not None:
            yield
            return
        self._pump = asyncio.create_task(self._draw())
        try:
            yield
        finally:
            pump, self._pump = self._pump, None
            pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pump

    async def take(self, tab: Tab) -> Screenshot:
        """A picture of what `tab` shows now.

        Raises:
          Fault: sandbox_error/capture_failed, if nothing helped and there is no earlier picture.
        """
        problems: list[str] = []
        for attempt in (self._by_cdp, self._stopped, self._by_playwright):
            try:
                shot = _screenshot(await attempt(tab), self.config)
            except Exception as error:
                problems.append(f"{attempt.__name__.strip('_')}: {type(error).__name__}: {str(error)[:120]}")
                if tab.closed or tab.crashed:
                    raise
                continue
            self.last = shot
            return shot
        _log.warning("no fresh picture: %s", "; ".join(problems))
        if self.last is not None:
            return Screenshot(
                data=self.last.data,
                width=self.last.width,
                height=self.last.height,
                format=self.last.format,
                stale=True,
            )
        raise faults.Fault(Reason.SANDBOX_ERROR, "capture_failed", "; ".join(problems))

    async def _by_cdp(self, tab: Tab) -> bytes:
        options: dict[str, Any] = {"format": self.config.image_format}
        if self.config.image_format == "jpeg":
            options["quality"] = self.config.jpeg_quality
        else:
            options["optimizeForSpeed"] = True  # two thirds of the time, three times the bytes, same pixels
        timeout_s = self.config.deadlines.cdp_s
        if not self.begin_frame or self.config.dpr != 1.0:
            # A requested frame is as large as the window; only this command scales it to the emulated pixel ratio.
            answer = await tab.send("Page.captureScreenshot", options, timeout_s)
            return base64.b64decode(answer["data"])
        empty = 0
        async with asyncio.timeout(timeout_s):
            while empty < 3:
                try:
                    answer = await self._frame(tab, {"screenshot": options})
                except Exception as error:
                    if _PENDING not in str(error):
                        raise
                    await asyncio.sleep(_FRAME_S)  # one that nobody waits for any more is still being drawn
                    continue
                if answer.get("screenshotData"):
                    return base64.b64decode(answer["screenshotData"])
                empty += 1
        raise RuntimeError("three frames were drawn and none of them gave a picture")

    async def _frame(self, tab: Tab, options: dict[str, Any]) -> dict[str, Any]:
        """Draws one frame. The browser draws one at a time: whoever is cancelled here leaves his to be finished."""

        async def draw() -> dict[str, Any]:
            async with self._drawing:
                return await tab.send("HeadlessExperimental.beginFrame", options)

        drawing = asyncio.ensure_future(draw())
        self._frames.add(drawing)
        drawing.add_done_callback(self._drawn)
        return await asyncio.shield(drawing)

    def _drawn(self, drawing: asyncio.Future[dict[str, Any]]) -> None:
        self._frames.discard(drawing)
        if not drawing.cancelled():
            drawing.exception()  # heard, also where nobody waits

    async def _stopped(self, tab: Tab) -> bytes:
        await tab.send("Page.stopLoading")
        return await self._by_cdp(tab)

    async def _by_playwright(self, tab: Tab) -> bytes:
        if self.begin_frame:
            raise RuntimeError("Playwright waits for frames that nobody asks for")
        options: dict[str, Any] = {"type": self.config.image_format, "timeout": 2000}
        if self.config.image_format == "jpeg":
            options["quality"] = self.config.jpeg_quality
        return await faults.within(3.0, tab.page.screenshot(**options), "page.screenshot")

    async def _draw(self) -> None:
        """Draws frames of the current tab, one at a time."""
        while True:
            tab = self.tab
            if tab is not None and tab.usable:
                try:
                    await self._frame(tab, {"noDisplayUpdates": False})
                except Exception as error:  # noqa: BLE001 - a page that is busy, closing or between documents draws later
                    _log.debug("no frame: %s: %s", type(error).__name__, error)
                    await asyncio.sleep(5 * _FRAME_S)
            await asyncio.sleep(_FRAME_S)


def _screenshot(data: bytes, config: SandboxConfig) -> Screenshot:
    if len(data) > config.max_image_bytes:
        raise ValueError(f"the picture has {len(data)} bytes, more than max_image_bytes={config.max_image_bytes}")
    width, height = image_size(data)
    return Screenshot(data=data, width=width, height=height, format=config.image_format)


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height in pixels, from the bytes of a PNG or JPEG.

    Raises:
      ValueError: if it is neither, or cut short.
    """
    if data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) >= 24:
        return struct.unpack(">II", data[16:24])
    if data[:2] == b"\xff\xd8":
        at = 2
        while at + 9 < len(data):
            marker, length = data[at + 1], struct.unpack(">H", data[at + 2 : at + 4])[0]
            if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
                height, width = struct.unpack(">HH", data[at + 5 : at + 9])
                return width, height
            at += 2 + length
    raise ValueError(f"{len(data)} bytes that are neither a PNG nor a JPEG: {data[:8]!r}")
