"""Time of one step, three ways on the same pages: the sandbox, the floor, and the reference system's waits.

The floor is the same input through raw CDP and one capture, with no wait between: nothing that shows the effect of
the input can be faster. The peer is plain Playwright with the waits of the reference system: network idle for at most
5 s, then one second, then `page.screenshot`. All three use the same browser binary; the floor draws frames the way
our engine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from owrl_jax.bench._browser_pages import (
    BLOCK,
    FIELD,
    FILL,
    HEIGHT,
    LINK,
    NOTHING,
    WIDTH,
    PageServer,
    late_colour,
)
from owrl_jax.browser.config import SandboxConfig
from owrl_jax.browser.engine import BrowserEngine
from owrl_jax.browser.safety import Safety
from owrl_jax.types import Screenshot, StepResult, Task, ToolCall

PAGES = ("light", "poll", "font", "late")
ACTIONS = ("click_no_change", "click_navigate", "type", "scroll")
PEER_SCREENSHOT_S = 10.0  # the reference waits 30 s; a hanging font always uses all of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of one way to do one action on one page."""

    ms: tuple[float, ...]

    @property
    def p50(self) -> float:
        return statistics.median(self.ms)

    @property
    def p95(self) -> float:
        ordered = sorted(self.ms)
        return ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]


Cells = dict[tuple[str, str], Times]


def config_for(server: PageServer) -> SandboxConfig:
    """The sandbox as users have it, but for the one address on loopback that it may visit."""
    return SandboxConfig(viewport=(WIDTH, HEIGHT), safety=Safety.for_local_worlds({("127.0.0.1", server.port)}))


def task_for(server: PageServer, path: str) -> Task:
    return Task(id="bench", instruction="bench", start_url=server.url + path)


def click(point: tuple[int, int]) -> ToolCall:
    return ToolCall(name="click", arguments={"point_2d": [point[0] * 1000 / WIDTH, point[1] * 1000 / HEIGHT]})


def seen(result: StepResult) -> Screenshot:
    """The screenshot of a result that must have one."""
    if result.outcome is not None or result.observation is None or result.observation.screenshot is None:
        raise RuntimeError(f"the bench met an ending where there should be none: {result.outcome}")
    return result.observation.screenshot


async def ours(make: Callable[[], Any], server: PageServer, *, steps: int) -> Cells:
    """Each action `steps` times on each page, one episode per page; the first of each is warm-up."""
    cells: Cells = {}
    for page in PAGES:
        sandbox = make()
        try:
            seen(await sandbox.reset(task_for(server, f"/{page}?n=0")))
            for action in ACTIONS:
                times = []
                if action == "type":
                    seen(await sandbox.step([click(FIELD)]))
                for number in range(steps + 1):
                    call = _call(action, number)
                    began = time.perf_counter()
                    seen(await sandbox.step([call]))
                    times.append((time.perf_counter() - began) * 1e3)
                cells[page, action] = Times(ms=tuple(times[1:]))
        finally:
            await sandbox.close()
    return cells


async def floor(engine: BrowserEngine, server: PageServer, *, steps: int) -> Cells:
    """The same input through raw CDP and one capture."""
    cells: Cells = {}
    for page_name in PAGES:
        handle = await engine.open_context(viewport={"width": WIDTH, "height": HEIGHT})
        try:
            page = await handle.new_page(width=WIDTH, height=HEIGHT)
            raw = RawPage(engine, page, await handle.context.new_cdp_session(page))
            await page.goto(f"{server.url}/{page_name}?n=0", wait_until="commit")
            await asyncio.sleep(1.0)  # whatever the page still does is not to be measured
            for action in ACTIONS:
                if action == "type":
                    await raw.act("click_at", FIELD)
                times = [await _timed(raw.step(action, number)) for number in range(steps + 1)]
                cells[page_name, action] = Times(ms=tuple(times[1:]))
            await raw.rest()
        finally:
            await handle.context.close()
    return cells


async def peer(binary_path: str, server: PageServer, *, steps: int, pages: tuple[str, ...]) -> Cells:
    """The reference's waits. The pages run side by side, since nearly all of it is timers."""
    from playwright.async_api import async_playwright

    cells: Cells = {}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=binary_path, args=["--no-sandbox"])

        async def one(name: str) -> None:
            context = await browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
            page = await context.new_page()
            await page.goto(f"{server.url}/{name}?n=0", wait_until="domcontentloaded")
            for action in ACTIONS:
                if action == "type":
                    await page.mouse.click(*FIELD)
                count = 1 if name == "font" else steps  # sixteen seconds each
                times = [await _timed(_peer_step(page, action, number)) for number in range(count)]
                cells[name, action] = Times(ms=tuple(times))
            await context.close()

        await asyncio.gather(*(one(name) for name in pages))
        await browser.close()
    return cells


async def late_pictures(sandbox: Any, server: PageServer, *, steps: int) -> tuple[int, int, list[float]]:
    """Steps of one episode on the late page, in turn a navigation and a fill, with delays that vary.

    Returns:
      How many pictures showed an earlier state, how many showed none, and the milliseconds of each step.
    """
    stale = empty = 0
    times = []
    try:
        seen(await sandbox.reset(task_for(server, "/late?n=0&ms=vary")))
        for number in range(1, steps + 1):
            began = time.perf_counter()
            shot = seen(await sandbox.step([click(FILL if number % 2 else LINK)]))
            times.append((time.perf_counter() - began) * 1e3)
            colour = await asyncio.to_thread(_pixel, shot)
            if _near(colour, late_colour(number)):
                continue
            if _near(colour, late_colour(number - 1)):
                stale += 1
            else:
                empty += 1
            # Let the page come to rest, so that one late answer is counted once.
            await asyncio.sleep(2.0)
    finally:
        await sandbox.close()
    return stale, empty, times


class RawPage:
    """CDP input and capture on one page, without any of the sandbox."""

    def __init__(self, engine: BrowserEngine, page: Any, session: Any) -> None:
        self._engine, self._page, self._session = engine, page, session
        self._unanswered: list[asyncio.Future[Any]] = []

    async def step(self, action: str, number: int) -> int:
        """One action and one capture; returns the size of the picture's base64."""
        await self.act(action, {"click_no_change": NOTHING, "click_navigate": LINK}.get(action), number)
        return await self.capture()

    async def act(self, action: str, point: tuple[int, int] | None, number: int = 0) -> None:
        """The bare input events of an action."""
        send = self._session.send
        if point is not None:
            mouse = {"x": point[0], "y": point[1], "button": "left", "clickCount": 1}
            await send("Input.dispatchMouseEvent", {"type": "mousePressed", **mouse})
            await send("Input.dispatchMouseEvent", {"type": "mouseReleased", **mouse})
        elif action == "type":
            await send("Input.insertText", {"text": f"w{number}"})
        else:
            delta = 300 if number % 2 else -300
            wheel = {"type": "mouseWheel", "x": WIDTH // 2, "y": HEIGHT // 2, "deltaX": 0, "deltaY": delta}
            # A wheel event is answered by the next frame, which nobody draws before the capture: do not wait for it.
            self._unanswered.append(asyncio.ensure_future(send("Input.dispatchMouseEvent", wheel)))
            await asyncio.sleep(0)

    async def rest(self) -> None:
        """Waits a moment for the answers to wheel events, and forgets those that never come."""
        if self._unanswered:
            await asyncio.wait(self._unanswered, timeout=1.0)
            for answer in self._unanswered:
                answer.cancel()
            await asyncio.gather(*self._unanswered, return_exceptions=True)

    async def capture(self) -> int:
        """One picture, the way the engine draws."""
        if self._engine.begin_frame:
            shot = {"format": "png", "optimizeForSpeed": True}
            answer = await self._session.send("HeadlessExperimental.beginFrame", {"screenshot": shot})
            return len(answer.get("screenshotData", ""))
        answer = await self._session.send("Page.captureScreenshot", {"format": "png", "optimizeForSpeed": True})
        return len(answer["data"])


async def _peer_step(page: Any, action: str, number: int) -> None:
    from playwright.async_api import Error

    if action == "type":
        await page.keyboard.press("Control+A")
        await page.keyboard.type(f"word {number}")
    elif action == "scroll":
        await page.mouse.wheel(0, 300 if number % 2 else -300)
    else:
        await page.mouse.click(*(LINK if action == "click_navigate" else NOTHING))
    with contextlib.suppress(Error):  # the reference ignores that the network never came to rest
        await page.wait_for_load_state("networkidle", timeout=5000)
    await asyncio.sleep(1.0)
    with contextlib.suppress(Error):  # a font that never comes: no picture, after all that time
        await page.screenshot(timeout=PEER_SCREENSHOT_S * 1e3)


def _call(action: str, number: int) -> ToolCall:
    if action == "type":
        return ToolCall(name="write", arguments={"message": f"word {number}"})
    if action == "scroll":
        return ToolCall(name="scroll", arguments={"direction": "up" if number % 2 else "down", "amount": 0.3})
    return click(LINK if action == "click_navigate" else NOTHING)


async def _timed(work: Awaitable[Any]) -> float:
    began = time.perf_counter()
    await work
    return (time.perf_counter() - began) * 1e3


def _pixel(shot: Screenshot) -> tuple[int, int, int]:
    from PIL import Image

    with Image.open(io.BytesIO(shot.data)) as image:
        pixel = image.convert("RGB").getpixel((BLOCK[0] * shot.width // WIDTH, BLOCK[1] * shot.height // HEIGHT))
    assert isinstance(pixel, tuple)
    return pixel[0], pixel[1], pixel[2]


def _near(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) <= 6
