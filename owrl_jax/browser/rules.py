"""Asking the safety rules about one action, with the facts they need.

`safety` says what the rules are; this module only fetches what they judge: the address, or the element that an action
would touch, described by the safety layer's own script. A page that keeps us from describing an element (it went away
meanwhile) is not refused: there is nothing there any more to act on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from owrl_jax.browser import faults
from owrl_jax.browser.blocks import Wall, classify
from owrl_jax.browser.elements import DESCRIBE_JS, ElementFacts
from owrl_jax.browser.finder import Element
from owrl_jax.browser.page_facts import COLLECT_JS, PageFacts
from owrl_jax.browser.policy import Refusal
from owrl_jax.browser.tabs import Tab

if TYPE_CHECKING:
    from owrl_jax.browser.safety import Safety


class Rules:
    """The rules of one episode."""

    def __init__(self, safety: Safety | None) -> None:
        if safety is None:
            from owrl_jax.browser.safety import Safety

            safety = Safety()
        self.safety = safety

    def url(self, url: str) -> Refusal | None:
        """Whether an address may be opened."""
        return self.safety.policy.check(url)

    async def click(self, element: Element | None) -> Refusal | None:
        """Whether an element may be clicked; a link also by where it leads."""
        if element is None:
            return None
        href = element.facts["href"]
        if href.startswith(("http:", "https:", "file:", "data:", "chrome:", "view-source:", "ftp:")):
            refusal = self.safety.policy.check(href)
            if refusal is not None:
                return refusal
        return self.safety.guards.check_click(await _facts(element))

    async def key(self, chord: tuple[str, ...], element: Element | None) -> Refusal | None:
        """Whether a key combination may be pressed while `element` has the focus."""
        if element is None:
            return None
        return self.safety.guards.check_key("+".join(chord), await _facts(element))

    async def write(self, element: Element, text: str) -> Refusal | None:
        """Whether `text` may be typed into an element."""
        return self.safety.guards.check_write(await _facts(element), text)


async def wall(tab: Tab, requested_url: str = "") -> Wall | None:
    """The wall that a page is, if it is one that keeps visitors out."""
    data = await tab.world.evaluate(COLLECT_JS)
    facts = PageFacts.read(data, status=tab.document.status, headers=tab.document.headers, requested_url=requested_url)
    return classify(facts)


async def _facts(element: Element) -> ElementFacts | None:
    declaration = f"function() {{ return ({DESCRIBE_JS})(this); }}"
    params: dict[str, Any] = {
        "functionDeclaration": declaration,
        "objectId": element.node.object_id,
        "returnByValue": True,
    }
    try:
        answer = await element.node.world.send("Runtime.callFunctionOn", params)
    except Exception as error:
        if faults.is_stale_context(error):
            return None
        raise
    if "exceptionDetails" in answer:
        raise RuntimeError(f"describing an element failed: {answer['exceptionDetails'].get('text', '')}")
    return ElementFacts.read(answer["result"].get("value"))
