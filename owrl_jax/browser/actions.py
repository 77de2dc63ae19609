"""The thirteen tools, executed. Each looks before it acts, acts once with real input, and says how to verify its effect.

A tool returns an `Effect`: whether it was done, what to say of it, and (where the truth is known only after the page has
settled) a question to ask then. It does not wait for the page: that is `settle.py`, between the act and the question. It
never retries an action; looking may be repeated, acting may not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from owrl_jax.browser import faults, feedback, finder, typing_text
from owrl_jax.browser.config import SandboxConfig
from owrl_jax.browser.finder import Element
from owrl_jax.browser.policy import Refusal
from owrl_jax.browser.rules import Rules
from owrl_jax.browser.stage import Stage
from owrl_jax.browser.tabs import Tab
from owrl_jax.geometry import grid_point_to_pixel

Question = Callable[[], Awaitable["Answer"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What turned out after the page settled: a further phrase, and whether the call still counts as done."""

    text: str = ""
    ok: bool = True
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """What a tool did.

    Attributes:
      ok: whether it was done.
      text: what to say, without prefix.
      facts: the same for programs.
      grace_s: how long the page may take to ask for a navigation; None for the usual grace.
      verify: asked after settling.
      quiet: whether "nothing changed" is worth saying.
      refusal: set if a safety rule said no.
      answer: the text of `done`.
      waits: seconds that the policy asked to wait.
    """

    ok: bool
    text: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    grace_s: float | None = None
    verify: Question | None = None
    quiet: bool = False
    refusal: Refusal | None = None
    answer: str | None = None


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
        self._tools: dict[str, Callable[..., Awaitable[Effect]]] = {
            "click": self._click,
            "write": self._write,
            "press_keys": self._press_keys,
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
            return _refused(refusal)
        facts = element.facts if element else None
        before = await element.node.backend_id() if element and element.kind not in ("none", "unknown") else None
        if element and button == "left" and (element.facts.get("dropdown") or element.kind == "choice"):
            if element.facts["type"] != "range":
                await element.node.call("guardPicker")
        await self._input(tab, "click", tab.page.mouse.click(x, y, button=button, click_count=clicks))
        times = {1: "clicked", 2: "double-clicked", 3: "triple-clicked"}[clicks]
        if button != "left":
            times = f"{times} with the {button} button"
        text = f"{times} {feedback.element(facts)} at {feedback.point(point_2d)}"
        if facts and facts["disabled"]:
            text += "; it is disabled"
        told = {"element": _public(facts), "point": list(point_2d)}
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
        return Answer(text="; ".join(parts), facts={"after": _public(now)})

    async def _hover(self, tab: Tab, *, point_2d: tuple[float, float]) -> Effect:
        x, y = self.pixel(point_2d)
        element = await finder.at_point(tab, x, y)
        await self._input(tab, "hover", tab.page.mouse.move(x, y))
        text = (
            f"the pointer is over {feedback.element(element.facts if element else None)} at {feedback.point(point_2d)}"
        )
        return Effect(ok=True, text=text, facts={"element": _public(element.facts if element else None)}, grace_s=0.05)

    async def _drag(
        self, tab: Tab, *, start_point_2d: tuple[float, float], end_point_2d: tuple[float, float], steps: int
    ) -> Effect:
        start, end = self.pixel(start_point_2d), self.pixel(end_point_2d)
        taken = await finder.at_point(tab, *start)
        refusal = await self.rules.click(taken)
        if refusal is not None:
            return _refused(refusal)
        mouse = tab.page.mouse
        await self._input(tab, "drag", mouse.move(*start))
        await self._input(tab, "drag", mouse.down())
        try:
            for n in range(1, steps + 1):
                at = [a + (b - a) * n / steps for a, b in zip(start, end, strict=True)]
                await self._input(tab, "drag", mouse.move(*at))
        finally:
            # Whatever happened on the way: a button that stays down would turn every later move into a drag.
            await self._input(tab, "drag", mouse.up())
        text = (
            f"dragged {feedback.element(taken.facts if taken else None)} from {feedback.point(start_point_2d)} "
            f"to {feedback.point(end_point_2d)}"
        )
        return Effect(
            ok=True,
            text=text,
            facts={"element": _public(taken.facts if taken else None)},
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
            await self._input(tab, "scroll", tab.page.mouse.move(x, y))
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
                await self._input(tab, "scroll", tab.page.mouse.move(*at))
            dx = {"left": -1, "right": 1}.get(direction, 0) * amount * width
            dy = {"up": -1, "down": 1}.get(direction, 0) * amount * height
            await self._input(tab, "scroll", tab.page.mouse.wheel(dx, dy))
        text, moved = feedback.scrolled(facts, direction, amount)
        return Effect(ok=True, text=text, facts=dict(facts) | {"moved_any": moved}, grace_s=0.0)

    # ---- keyboard -------------------------------------------------------------------------------------------------

    async def _write(self, tab: Tab, *, message: str) -> Effect:
        element = await finder.focused(tab)
        if element is None:
            return Effect(
                ok=False,
                text="nothing was typed: no field has the focus. Click a text field first, then write",
                facts={"focus": None},
            )
        facts = element.facts
        if element.kind == "none":
            return Effect(
                ok=False,
                text=f"nothing was typed: {feedback.element(facts)} has the focus and takes no text. Click a text "
                "field first, then write",
                facts={"focus": _public(facts)},
            )
        if facts["disabled"] or facts["readonly"]:
            state = "disabled" if facts["disabled"] else "read-only"
            return Effect(ok=False, text=f"nothing was typed: {feedback.element(facts)} is {state}")
        refusal = await self.rules.write(element, message)
        if refusal is not None:
            return _refused(refusal)
        if element.kind == "select":
            return await self._choose(element, message)
        if element.kind == "choice":
            return await self._assign(element, message)
        return await self._type(tab, element, message)

    async def _choose(self, element: Element, message: str) -> Effect:
        result = await element.node.call("choose", message)
        facts = await element.again() or element.facts
        if result["chosen"] is None:
            if result["ambiguous"]:
                names = ", ".join(feedback.quoted(n, 40) for n in result["ambiguous"])
                return Effect(ok=False, text=f"{feedback.quoted(message, 40)} could mean {names}; write one in full")
            return Effect(
                ok=False,
                text=f"{feedback.element(facts)} has no option {feedback.quoted(message, 40)}; {feedback.options(facts)}",
            )
        text = f"chose {feedback.quoted(result['chosen'])} in {feedback.element(facts)}"
        return Effect(ok=True, text=text, facts={"value": result["chosen"]}, verify=lambda: self._after_value(element))

    async def _assign(self, element: Element, message: str) -> Effect:
        type_ = element.facts["type"]
        value = typing_text.control_value(type_, message)
        result = await element.node.call("assign", value)
        name = feedback.element(element.facts)
        if not result["taken"]:
            limits = "".join(
                f", {word} {feedback.quoted(result[key], 30)}"
                for key, word in (("min", "from"), ("max", "to"), ("step", "in steps of"))
                if result[key]
            )
            kept = f"; it holds {feedback.quoted(result['value'])}" if result["value"] else ""
            return Effect(
                ok=False,
                text=f"{name} did not take {feedback.quoted(message, 40)}: write {feedback.FORMATS[type_]}{limits}{kept}",
            )
        text = f"set {name} to {feedback.quoted(result['value'])}"
        return Effect(ok=True, text=text, facts={"value": result["value"]}, verify=lambda: self._after_value(element))

    async def _after_value(self, element: Element) -> Answer:
        now = await element.again()
        return Answer(facts={"after": _public(now)}) if now else Answer()

    async def _type(self, tab: Tab, element: Element, message: str) -> Effect:
        keyboard = typing_text.Keyboard(tab.page, self.stage.engine.platform, lambda a: self._input(tab, "write", a))
        body, enter = message, False
        if element.kind == "text":
            # In a field of one line a line break is the Enter key; only at the end can that be meant.
            body = message.rstrip("\r\n")
            enter = body != message
        if enter:
            refusal = await self.rules.key(("Enter",), element)
            if refusal is not None:
                return _refused(refusal)
        if element.kind == "unknown":
            if not await keyboard.clear_blindly():
                return Effect(ok=False, text="nothing was typed: the platform of the browser is not known")
        elif element.facts["length"]:
            await element.node.call("selectAll")
            await keyboard.press(("Backspace",))
        await keyboard.type(body, slow=element.kind in ("text", "unknown"))
        if enter:
            await keyboard.press(("Enter",))
        secret = element.facts["secret"]
        shown = f"{len(body)} characters" if secret else feedback.quoted(body, 200)
        text = f"typed {shown} into {feedback.element(element.facts)}" + (" and pressed Enter" if enter else "")
        return Effect(
            ok=True,
            text=text,
            facts={"field": _public(element.facts)},
            verify=lambda: self._after_type(tab, element, body),
        )

    async def _after_type(self, tab: Tab, element: Element, wanted: str) -> Answer:
        if not tab.usable or tab.commits:
            return Answer()
        now = await element.again()
        if now is None:
            focus = await finder.focused(tab)
            now = focus.facts if focus is not None and focus.kind not in ("none", "unknown") else None
        if now is None:
            return Answer(text="the field is gone from the page")
        if element.kind == "unknown" and now["kind"] in ("none", "unknown"):
            return Answer(text="whether it took the text cannot be read, look at the screenshot")
        note = feedback.mismatch(wanted, now)
        focus = await finder.focused(tab)
        moved = focus is None or await focus.node.backend_id() != await element.node.backend_id()
        if moved and focus is not None:
            note = "; ".join(p for p in (note, f"the focus moved to {feedback.element(focus.facts)}") if p)
        facts = {"value": "" if now["secret"] else now["value"][:1000], "mismatch": bool(note), "focus_moved": moved}
        return Answer(text=note, facts=facts)

    async def _press_keys(
        self, tab: Tab, *, chords: tuple[tuple[str, ...], ...], is_hotkey: bool, presses: int
    ) -> Effect:
        keyboard = typing_text.Keyboard(
            tab.page, self.stage.engine.platform, lambda a: self._input(tab, "press_keys", a)
        )
        focus = await finder.focused(tab)
        names = ", ".join("+".join(chord) for chord in chords)
        pressed = 0
        for n in range(presses):
            for chord in chords:
                if set(chord) & {"Enter", "NumpadEnter", "Space"}:
                    if pressed:
                        focus = await finder.focused(tab)
                    refusal = await self.rules.key(chord, focus)
                    if refusal is not None:
                        return _refused(refusal)
                await keyboard.press(chord)
                pressed += 1
                if tab.navigating or tab.commits or not tab.usable:
                    break
            else:
                continue
            break
        total = len(chords) * presses
        times = f" {presses} times" if presses > 1 else ""
        text = f"pressed {names}{times}"
        if pressed < total:
            text += f"; stopped after {pressed} of {total} keys because the page changed"
        if focus is not None and focus.facts["kind"] != "none":
            text += f" in {feedback.element(focus.facts)}"
        return Effect(
            ok=True,
            text=text,
            facts={"keys": ["+".join(c) for c in chords]},
            quiet=True,
            verify=lambda: self._after_keys(tab, focus),
        )

    async def _after_keys(self, tab: Tab, focus: Element | None) -> Answer:
        if focus is None or tab.commits or not tab.usable:
            return Answer()
        now = await focus.again()
        if now is None or now["secret"] or now["value"] == focus.facts["value"]:
            return Answer()
        return Answer(text=f"the field now holds {feedback.quoted(now['value'])}", facts={"value": now["value"][:1000]})

    # ---- navigation and tabs --------------------------------------------------------------------------------------

    async def _goto_url(self, tab: Tab, *, url: str) -> Effect:
        refusal = await self.rules.visit(url)
        if refusal is not None:
            return _refused(refusal)
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

    async def _input(self, tab: Tab, what: str, awaitable: Awaitable[Any]) -> None:
        """One input event under the deadline of a CDP request.

        A page that answers an input by running a script without end never acknowledges it, and a tab may close under the
        pointer: the first is found out by settling, the second by following. Neither undoes the input.
        """
        started = time.monotonic()
        try:
            await faults.within(self.config.deadlines.cdp_s, awaitable, what)
        except faults.DeadlineExceeded:
            tab.unanswered_input = time.monotonic() - started
        except Exception as error:
            if not (faults.is_gone(error) and (tab.closed or tab.crashed)):
                raise


def _refused(refusal: Refusal) -> Effect:
    return Effect(ok=False, text=refusal.message.rstrip("."), facts={"policy_block": refusal.detail}, refusal=refusal)


def _public(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What of an element goes into the record: no values of secret fields, no long texts."""
    if facts is None:
        return None
    kept = ("tag", "type", "role", "label", "id", "name", "href", "kind", "checked", "expanded", "disabled", "value")
    return {name: facts[name][:300] if isinstance(facts[name], str) else facts[name] for name in kept}
