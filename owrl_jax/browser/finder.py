"""Finding the element under a point, or the one with the focus, wherever it hides.

`page.js` walks through open shadow roots and through frames of the same process. Two things it cannot enter: closed
shadow roots, which CDP opens for us, and frames in a process of their own, which have a session of their own. This
module goes through both, so that the answer is the real element with its real value, never a bare `<iframe>` or the
host of a closed root. If the way is barred (the frame went away), the answer is the last element that could be
reached, and says so.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from owrl_jax.browser import faults
from owrl_jax.browser.tabs import Tab
from owrl_jax.browser.world import Node, World

_FRAMES = ("iframe", "frame", "object", "fencedframe")
_DEPTH = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Element:
    """An element that was found: how to ask it, what was true of it then, and whether it is surely the deepest."""

    node: Node
    facts: dict[str, Any]
    certain: bool

    @property
    def tag(self) -> str:
        """Lower-case tag name."""
        return self.facts["tag"]

    @property
    def kind(self) -> str:
        """How text gets into it: text, multiline, rich, select, choice, none, unknown."""
        return "unknown" if not self.certain and self.facts["kind"] == "none" else self.facts["kind"]

    async def again(self) -> dict[str, Any] | None:
        """Its facts now; None if it is gone."""
        try:
            facts = await self.node.call("describe")
        except Exception as error:
            if faults.is_stale_context(error) or faults.is_gone(error):
                return None
            raise
        return facts if facts and facts["attached"] else None


async def at_point(tab: Tab, x: float, y: float) -> Element | None:
    """The deepest element at a point of the viewport, in CSS pixels."""
    return await _deepest(tab, "pick", [x, y])


async def focused(tab: Tab) -> Element | None:
    """The deepest element with the focus; None if the page itself has it."""
    return await _deepest(tab, "focused", [])


async def _deepest(tab: Tab, function: str, args: list[float]) -> Element | None:
    world = tab.world
    node = await world.element(function, *args)
    if node is None:
        return None
    certain = True
    for _ in range(_DEPTH):
        info = await node.info()
        name = info.get("localName", "")
        if name in _FRAMES:
            inner = await tab.frame_world(info.get("frameId", ""), world)
            if inner is None or inner is node.world:
                certain = False
                break
            if args:
                left, top = await node.call("origin")
                args = [args[0] - left, args[1] - top]
            world = inner
            deeper = await world.element(function, *args)
        else:
            closed = [r for r in info.get("shadowRoots", ()) if r.get("shadowRootType") == "closed"]
            if not closed:
                break
            deeper = await _inside(world, closed[0]["backendNodeId"], function, args)
        if deeper is None:
            # Nothing deeper has the focus, or the point hits the element itself.
            certain = name not in _FRAMES
            break
        node = deeper
    facts = await node.call("describe")
    return Element(node=node, facts=facts, certain=certain) if facts else None


async def _inside(world: World, root_backend_id: int, function: str, args: list[float]) -> Node | None:
    root = await world.resolve(root_backend_id)
    if root is None:
        return None
    at = "function(x, y) { return this.elementFromPoint(x, y); }"
    result = await world.raw(root.object_id, at if args else "function() { return this.activeElement; }", *args)
    return Node(world, result["objectId"]) if "objectId" in result else None
