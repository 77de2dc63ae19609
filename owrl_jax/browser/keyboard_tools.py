"""The tools that use the keyboard: `write` and `press_keys`.

`write` first finds out what has the focus, through frames and shadow roots, and refuses where text would go nowhere.
It replaces what the field holds, types with real key events, chooses in a native select and sets date, time, colour
and range inputs by value, since their popups take no clicks in a headless browser. Afterwards the real value is read
back.
"""

from __future__ import annotations

from typing import Any

from owrl_jax.browser import feedback, finder, typing_text
from owrl_jax.browser.effects import Answer, Effect, public, refused, send_input
from owrl_jax.browser.elements import FieldFacts
from owrl_jax.browser.finder import Element
from owrl_jax.browser.redact import REDACTED
from owrl_jax.browser.rules import Rules
from owrl_jax.browser.tabs import Tab


class KeyboardTools:
    """Executes `write` and `press_keys`.

    Args:
      rules: what may be done.
      platform: user agent of the browser, which names the operating system.
    """

    def __init__(self, rules: Rules, platform: str) -> None:
        self.rules = rules
        self.platform = platform

    async def write(self, tab: Tab, *, message: str) -> Effect:
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
                facts={"focus": public(facts)},
            )
        if facts["disabled"] or facts["readonly"]:
            state = "disabled" if facts["disabled"] else "read-only"
            return Effect(ok=False, text=f"nothing was typed: {feedback.element(facts)} is {state}")
        refusal = await self.rules.write(element, message)
        if refusal is not None:
            return refused(refusal)
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
                text=f"{feedback.element(facts)} has no option {feedback.quoted(message, 40)}; "
                f"{feedback.options(facts)}",
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
                text=f"{name} did not take {feedback.quoted(message, 40)}: "
                f"write {feedback.FORMATS[type_]}{limits}{kept}",
            )
        text = f"set {name} to {feedback.quoted(result['value'])}"
        return Effect(ok=True, text=text, facts={"value": result["value"]}, verify=lambda: self._after_value(element))

    async def _after_value(self, element: Element) -> Answer:
        now = await element.again()
        return Answer(facts={"after": public(now)}) if now else Answer()

    async def _type(self, tab: Tab, element: Element, message: str) -> Effect:
        keyboard = typing_text.Keyboard(tab.page, self.platform, lambda a: send_input(tab, "write", a))
        body, enter = message, False
        if element.kind == "text":
            # In a field of one line a line break is the Enter key; only at the end can that be meant.
            body = message.rstrip("\r\n")
            enter = body != message
        if enter:
            refusal = await self.rules.key(("Enter",), element)
            if refusal is not None:
                return refused(refusal)
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
            facts={"field": public(element.facts)},
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

    async def press_keys(
        self, tab: Tab, *, chords: tuple[tuple[str, ...], ...], is_hotkey: bool, presses: int
    ) -> Effect:
        keyboard = typing_text.Keyboard(tab.page, self.platform, lambda a: send_input(tab, "press_keys", a))
        focus = await finder.focused(tab)
        names = ", ".join("+".join(chord) for chord in chords)
        pressed, field = 0, focus
        spells = any(len(key) == 1 for chord in chords for key in chord)
        for _ in range(presses):
            for chord in chords:
                if set(chord) & {"Enter", "NumpadEnter", "Space"}:
                    if pressed:
                        focus = await finder.focused(tab)
                    refusal = await self.rules.key(chord, focus)
                    if refusal is not None:
                        return refused(refusal)
                await keyboard.press(chord)
                pressed += 1
                if tab.navigating or tab.commits or not tab.usable:
                    break
                if spells and pressed < len(chords) * presses and any(len(key) > 1 for key in chord):
                    # Tab and its kind take the next letters to another field, and what is spelt there may be a secret.
                    field = _more_secret(field, await finder.focused(tab))
            else:
                continue
            break
        total = len(chords) * presses
        if field is not None and FieldFacts.of(field.facts).is_secret:
            names = ", ".join("+".join("•" if len(key) == 1 else key for key in chord) for chord in chords)
        times = f" {presses} times" if presses > 1 else ""
        text = f"pressed {names}{times}"
        if pressed < total:
            text += f"; stopped after {pressed} of {total} keys because the page changed"
        if focus is not None and focus.facts["kind"] != "none":
            text += f" in {feedback.element(focus.facts)}"
        return Effect(
            ok=True,
            text=text,
            facts=_pressed(chords, field),
            quiet=True,
            verify=lambda: self._after_keys(tab, focus),
        )

    async def _after_keys(self, tab: Tab, focus: Element | None) -> Answer:
        if focus is None or tab.commits or not tab.usable:
            return Answer()
        now = await focus.again()
        if now is None or FieldFacts.of(now).is_secret or now["value"] == focus.facts["value"]:
            return Answer()
        return Answer(text=f"the field now holds {feedback.quoted(now['value'])}", facts={"value": now["value"][:1000]})


def _more_secret(one: Element | None, other: Element | None) -> Element | None:
    """Of two fields that keys went to, the one that decides what may be kept of them."""
    return other if other is not None and (one is None or FieldFacts.of(other.facts).is_secret) else one


def _pressed(chords: tuple[tuple[str, ...], ...], field: Element | None) -> dict[str, Any]:
    """Facts about keys; letters that went to a secret field are not among them."""
    secret = field is not None and FieldFacts.of(field.facts).is_secret
    keys = ["+".join(REDACTED if secret and len(key) == 1 else key for key in chord) for chord in chords]
    return {"keys": keys} | ({"field": public(field.facts)} if field is not None else {})
