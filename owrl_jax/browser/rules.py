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
from owrl_jax.browser.policy import Refusal, url_host_port
from owrl_jax.browser.tabs import DocumentState, Tab

if TYPE_CHECKING:
    from owrl_jax.browser.egress import EgressGate
    from owrl_jax.browser.reach import Failure
    from owrl_jax.browser.safety import Safety


class Rules:
    """The rules of one episode.

    Attributes:
      safety: what the rules are.
      gate: the episode's way out, where there is one; it knows what the browser only calls a failed tunnel.
    """

    def __init__(self, safety: Safety | None) -> None:
        if safety is None:
            from owrl_jax.browser.safety import Safety

            safety = Safety()
        self.safety = safety
        self.gate: EgressGate | None = None

    def is_exception(self, url: str) -> bool:
        """Whether an address belongs to a local world, where no manners are needed."""
        place = url_host_port(url)
        return place is not None and self.safety.policy.is_exception(*place)

    async def visit(self, url: str) -> Refusal | None:
        """Whether the agent or a task may open an address; waits until a visit to its host is due."""
        if self.gate is None:
            refusal = self.safety.policy.check(url)
        else:
            refusal = await self.safety.check_visit(url, self.gate)
        place = url_host_port(url)
        if refusal is None and place is not None and not self.safety.policy.is_exception(*place):
            await self.safety.hosts.pace(place[0])
        return refusal

    def charge(self, url: str) -> None:
        """Notes a navigation that happened by itself: a click, a redirect, a script."""
        place = url_host_port(url)
        if place is not None and not self.safety.policy.is_exception(*place):
            self.safety.hosts.debit(place[0])

    def why(self, url: str) -> Refusal | Failure | None:
        """What kept the browser from reaching an address, as far as the way out knows."""
        return None if self.gate is None else self.gate.refusal_for(url) or self.gate.failure_for(url)

    def unreachable(self, document: DocumentState) -> Refusal | Failure | None:
        """Why a document is none: the answer came from our own way out, or the browser shows its error page."""
        if self.gate is None or not (document.error or self.gate.is_own_answer(document.headers)):
            return None
        return self.why(document.url)

    def report(self, url: str, document: DocumentState | None, detail: str = "") -> None:
        """Tells the host's record how a visit went."""
        place = url_host_port(url)
        if place is None or self.safety.policy.is_exception(*place):
            return
        status = document.status if document else None
        retry_after = document.headers.get("retry-after") if document else None
        self.safety.hosts.report(place[0], detail=detail, status=status, retry_after=retry_after)

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


async def wall(tab: Tab, requested_url: str = "", *, excepted: bool = False) -> Wall | None:
    """The wall that a page is, if it is one that keeps visitors out.

    Args:
      tab: shows the page.
      requested_url: where the episode began.
      excepted: whether the host is one that the operator excepted. A form to sign in is part of the task there,
        whatever its address is; all other walls are walls there too.
    """
    data = await tab.world.evaluate(COLLECT_JS)
    facts = PageFacts.read(data, status=tab.document.status, headers=tab.document.headers, requested_url=requested_url)
    found = classify(facts)
    return None if excepted and found is not None and found.detail == "login_wall" else found


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
