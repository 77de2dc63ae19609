"""The thirteen tools, executed: each looks before it acts, acts once with real input, and says how to verify itself.

A tool returns an `Effect`: whether it was done, what to say of it, and (where the truth is known only after the page
has settled) a question to ask then. It does not wait for the page: that is `settle.py`, between the act and the
question. It never retries an action; looking may be repeated, acting may not. `write` and `press_keys` are in
`keyboard_tools.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from owrl_jax.browser import faults, feedback, finder
from owrl_jax.browser.config import SandboxConfig
from owrl_jax.browser.effects import Answer, Effect, public, refused, send_input
from owrl_jax.browser.finder import Element
from owrl_jax.browser.keyboard_tools import KeyboardTools
from owrl_jax.browser.rules import Rules
from owrl_jax.browser.stage import Stage
from owrl_jax.browser.tabs import Tab
from owrl_jax.geometry import grid_point_to_pixel


class Actor:
    """Executes checked calls on a stage.

    Args:
      stage: where.
      rules: what may be done.
      config: limits.
      image_size: size of the last screenshot, in pixels: what the policy's grid was laid over.
    """

    def __init__(self, stage: Stage, rules: Rules, config: SandboxConfig) -> None:
        self.stage = stage
        self.rules = rules
        self.config = config
        self.image_size: tuple[int, int] = (
            round(config.viewport[0] * config.dpr),
            round(config.viewport[1] * config.dpr),
        )
        self.css_width: float = config.viewport[0]
        keyboard = KeyboardTools(rules, stage.engine.platform)
        self._tools: dict[str, Callable[..., Awaitable[Effect]]] = {
            "click": self._click,
            "write": keyboard.write,
            "press_keys": keyboard.press_keys,
            "scroll": self._scroll,
            "wait": self._wait,
            "done": self._done,
            "goto_url": self._goto_url,
            "go_back": self._go_back,
            "drag": self._drag,
            "hover": self._hover,
            "new_tab": self._new_tab,
            "switch_tab": self._switch_tab,
            "close_tab": self._close_tab,
        }

    async def run(self, name: str, arguments: Mapping[str, Any]) -> Effect:
        """Executes one checked call."""
        return await self._tools[name](self.stage.active, **arguments)

    def pixel(self, grid_point: tuple[float, float]) -> tuple[int, int]:
        """The CSS pixel of a grid point."""
        return grid_point_to_pixel(grid_point, image_size=self.image_size, css_width=self.css_width)

    # ---- pointer --------------------------------------------------------------------------------------------------

    async def _click(self, tab: Tab, *, point_2d: tuple[float, float], clicks: int, button: str) -> Effect:
        x, y = self.pixel(point_2d)
        element = await finder.at_point(tab, x, y)
        refusal = await self.rules.click(element)
        if refusal is not None:
            return refused(refusal)
        facts = element.facts if element else None
        before = await element.node.backend_id() if element and element.kind not in ("none", "unknown") else None
        if element and button == "left" and _has_popup(element):
            await element.node.call("guardPicker")
        await send_input(tab, "click", tab.page.mouse.click(x, y, button=button, click_count=clicks))
        times = {1: "clicked", 2: "double-clicked", 3: "triple-clicked"}[clicks]
        if button != "left":
            times = f"{times} with the {button} button"
        text = f"{times} {feedback.element(facts)} at {feedback.point(point_2d)}"
        if facts and facts["disabled"]:
            text += "; it is disabled"
        told = {"element": public(facts), "point": list(point_2d)}
        return Effect(
            ok=True, text=text, facts=told, quiet=True, verify=lambda: self._after_click(tab, element, facts, before)
        )

    async def _after_click(
        self, tab: Tab, element: Element | None, before: dict[str, Any] | None, backend_id: int | None
    ) -> Answer:
        if element is None or before is None or not tab.usable:
            return Answer()
        now = await element.again()
        if now is None:
            return Answer()
        parts = []
        for name, yes, no in (
            ("checked", "it is now checked", "it is now not checked"),
            ("expanded", "it is now expanded", "it is now collapsed"),
            ("pressed", "it is now pressed", "it is now not pressed"),
            ("selected", "it is now selected", "it is now not selected"),
        ):
            if now[name] != before[name] and now[name] not in (None, ""):
                parts.append(yes if now[name] in (True, "true") else no)
        if now.get("dropdown"):
            parts.append(f"it shows {feedback.quoted(now['value'])}; {feedback.options(now)}")
        elif element.kind == "choice":
            form = feedback.FORMATS.get(now["type"], "a value")
            holds = f"it holds {feedback.quoted(now['value'])}" if now["value"] else "it is empty"
            parts.append(f"{holds}; set it with write, as {form}")
        elif backend_id is not None:
            focus = await finder.focused(tab)
            if focus is not None and await focus.node.backend_id() == backend_id:
                holds = "" if now["secret"] else f" and holds {feedback.quoted(now['value'])}" if now["value"] else ""
                parts.append(f"the field has the focus{holds}")
            else:
                parts.append("the field did not take the focus")
        return Answer(text="; ".join(parts), facts={"after": public(now)})

    async def _hover(self, tab: Tab, *, point_2d: tuple[float, float]) -> Effect:
        x, y = self.pixel(point_2d)
        element = await finder.at_point(tab, x, y)
        await send_input(tab, "hover", tab.page.mouse.move(x, y))
        text = (
            f"the pointer is over {feedback.element(element.facts if element else None)} at {feedback.point(point_2d)}"
        )
        return Effect(ok=True, text=text, facts={"element": public(element.facts if element else None)}, grace_s=0.05)

    async def _drag(
        self, tab: Tab, *, start_point_2d: tuple[float, float], end_point_2d: tuple[float, float], steps: int
    ) -> Effect:
        start, end = self.pixel(start_point_2d), self.pixel(end_point_2d)
        taken = await finder.at_point(tab, *start)
        refusal = await self.rules.click(taken)
        if refusal is not None:
            return refused(refusal)
        mouse = tab.page.mouse
        await send_input(tab, "drag", mouse.move(*start))
        await send_input(tab, "drag", mouse.down())
        try:
            for n in range(1, steps + 1):
                at = [a + (b - a) * n / steps for a, b in zip(start, end, strict=True)]
                await send_input(tab, "drag", mouse.move(*at))
        finally:
            # Whatever happened on the way: a button that stays down would turn every later move into a drag.
            await send_input(tab, "drag", mouse.up())
        text = (
            f"dragged {feedback.element(taken.facts if taken else None)} from {feedback.point(start_point_2d)} "
            f"to {feedback.point(end_point_2d)}"
        )
        return Effect(
            ok=True,
            text=text,
            facts={"element": public(taken.facts if taken else None)},
            quiet=True,
            verify=lambda: self._after_drag(tab, taken),
        )

    async def _after_drag(self, tab: Tab, taken: Element | None) -> Answer:
        if taken is None or taken.facts["type"] != "range" or not tab.usable:
            return Answer()
        now = await taken.again()
        return Answer(text=f"its value is now {feedback.quoted(now['value'])}" if now else "")

    async def _scroll(self, tab: Tab, *, direction: str, amount: float, point_2d: tuple[float, float] | None) -> Effect:
        element = None
        if point_2d is not None:
            x, y = self.pixel(point_2d)
            await send_input(tab, "scroll", tab.page.mouse.move(x, y))
            element = await finder.at_point(tab, x, y)
        if element is not None:
            facts = await element.node.call("scroll", direction, amount)
            if not facts["scrollable"] and element.node.world is not tab.world:
                facts = await tab.world.call("scroll", None, direction, amount, once=True)
        else:
            facts = await tab.world.call("scroll", None, direction, amount, once=True)
        if not facts["scrollable"]:
            # Maps and canvases scroll nothing, but listen to the wheel.
            width, height = self.config.viewport
            at = self.pixel(point_2d) if point_2d else (width // 2, height // 2)
            if point_2d is None:
                await send_input(tab, "scroll", tab.page.mouse.move(*at))
            dx = {"left": -1, "right": 1}.get(direction, 0) * amount * width
            dy = {"up": -1, "down": 1}.get(direction, 0) * amount * height
            await send_input(tab, "scroll", tab.page.mouse.wheel(dx, dy))
        text, moved = feedback.scrolled(facts, direction, amount)
        return Effect(ok=True, text=text, facts=dict(facts) | {"moved_any": moved}, grace_s=0.0)

    # ---- navigation and tabs --------------------------------------------------------------------------------------

    async def _goto_url(self, tab: Tab, *, url: str) -> Effect:
        refusal = await self.rules.visit(url)
        if refusal is not None:
            return refused(refusal)
        failed = await self.navigate(tab, url, self.config.settle.commit_s)
        why = self.rules.why(url) if failed else None
        if why is not None:
            failed = why.message.rstrip(".")
        if failed:
            text = f"{feedback.address(url)} could not be opened: {failed}"
            return Effect(ok=False, text=text, facts={"error": failed})
        return Effect(ok=True, text="", facts={"url": url}, grace_s=0.0, verify=lambda: self._after_goto(tab, url))

    async def _after_goto(self, tab: Tab, url: str) -> Answer:
        why = self.rules.unreachable(tab.document)
        if why is not None:
            text = f"{feedback.address(url)} could not be opened: {why.message.rstrip('.')}"
            return Answer(ok=False, text=text, facts={"error": why.detail})
        return Answer(text=f"opened {feedback.address(url)}")

    async def navigate(self, tab: Tab, url: str, timeout_s: float) -> str:
        """Opens an address and waits until its document has arrived.

        Returns:
          Empty if it did; else Chromium's error name, or a phrase where that would mislead.
        """
        for attempt in range(2):
            try:
                answer = await tab.send("Page.navigate", {"url": url}, timeout_s)
            except faults.DeadlineExceeded:
                await tab.send("Page.stopLoading")
                return f"no answer within {timeout_s:g} seconds"
            error = answer.get("errorText", "")
            # The error page of an earlier failure may still be on its way and take our place once.
            if error == "net::ERR_ABORTED" and tab.url.startswith("chrome-error:") and attempt == 0:
                continue
            break
        if answer.get("isDownload"):
            return "it is a file to download, not a page"
        if error == "net::ERR_ABORTED":
            return "the server sent no page (net::ERR_ABORTED)"
        return error

    async def _go_back(self, tab: Tab) -> Effect:
        history = await tab.send("Page.getNavigationHistory")
        index, entries = history["currentIndex"], history["entries"]
        target = index - 1
        if target < 0 or (entries[target]["url"] == "about:blank" and target == 0):
            return Effect(ok=False, text="there is no earlier page in this tab")
        await tab.send("Page.navigateToHistoryEntry", {"entryId": entries[target]["id"]})
        return Effect(ok=True, text="went back", facts={"url": entries[target]["url"]})

    async def _wait(self, tab: Tab, *, seconds: float) -> Effect:
        await asyncio.sleep(seconds)
        return Effect(ok=True, text=f"waited {seconds:g} seconds", grace_s=0.0)

    async def _done(self, tab: Tab, *, response: str) -> Effect:
        return Effect(
            ok=True, text=f"the task was ended with the answer {feedback.quoted(response, 300)}", answer=response
        )

    async def _new_tab(self, tab: Tab) -> Effect:
        if len(self.stage.open_tabs) >= self.config.max_tabs:
            return Effect(ok=False, text=f"{self.config.max_tabs} tabs are open; close one first")
        new = await self.stage.new_tab()
        return Effect(ok=True, text=f"opened an empty tab; tab {self.stage.index(new)} is now active", grace_s=0.0)

    async def _switch_tab(self, tab: Tab, *, tab_index: int) -> Effect:
        tabs = self.stage.open_tabs
        if tab_index >= len(tabs):
            return Effect(ok=False, text=f"there is no tab {tab_index}; open tabs are 0 to {len(tabs) - 1}")
        await self.stage.activate(tabs[tab_index])
        return Effect(
            ok=True, text=f"tab {tab_index} is now active: {feedback.address(tabs[tab_index].url)}", grace_s=0.0
        )

    async def _close_tab(self, tab: Tab) -> Effect:
        if len(self.stage.open_tabs) == 1:
            return Effect(ok=False, text="the last open tab cannot be closed")
        index = self.stage.index(tab)
        await self.stage.close_tab(tab)
        return Effect(
            ok=True, text=f"closed tab {index}; tab {self.stage.index(self.stage.active)} is now active", grace_s=0.0
        )


def _has_popup(element: Element) -> bool:
    """Whether a click would open a native popup: a list of options, a calendar, a colour chooser."""
    return bool(element.facts["dropdown"]) or (element.kind == "choice" and element.facts["type"] != "range")
