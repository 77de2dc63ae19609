"""Asking a document questions from an isolated world, where the page can neither listen nor lie.

A `World` belongs to one frame of one CDP session and calls the functions of `page.js` there. It survives navigations:
if the document was replaced while we asked, the question is put again to the new one, within the same deadline.
Objects (elements) are handed out as `Node`s and can be asked by the same functions.

Invariant: nothing is awaited without a deadline, and a question that acts (scrolls, assigns) is asked once only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.resources
import json
import time
from typing import Any

from owrl_jax.browser import faults

WORLD_NAME = "owrl"


@functools.cache
def library() -> str:
    """The source of `page.js`, an expression that gives the object of functions."""
    return importlib.resources.files("owrl_jax.browser").joinpath("page.js").read_text(encoding="utf-8")


def install_script() -> str:
    """Script that puts the functions into an isolated world."""
    return f"globalThis.__owrl = {library()}"


@dataclasses.dataclass(frozen=True)
class Node:
    """An element of a document, alive as long as that document is."""

    world: World
    object_id: str

    async def call(self, function: str, *args: Any) -> Any:
        """`page.js` `function(element, *args)`, by value."""
        return await self.world.call_on(self.object_id, function, *args)

    async def backend_id(self) -> int | None:
        """A number that stays the same for the same element; None if it is gone."""
        return (await self.info()).get("backendNodeId")

    async def info(self) -> dict[str, Any]:
        """CDP's description: names, frame id of a frame element, shadow roots."""
        try:
            answer = await self.world.send("DOM.describeNode", {"objectId": self.object_id, "depth": 0})
        except Exception as error:
            if faults.is_stale_context(error):
                return {}
            raise
        return answer["node"]


class World:
    """The isolated world of one frame.

    Args:
      session: CDP session of the target that holds the frame.
      frame_id: the frame.
      timeout_s: for one request.
      gone: set once the page has crashed or was closed.
    """

    def __init__(self, session: Any, frame_id: str, timeout_s: float, gone: asyncio.Event) -> None:
        self.session = session
        self.gone = gone
        self.frame_id = frame_id
        self.timeout_s = timeout_s
        self._context: int | None = None

    def forget(self) -> None:
        """The document was replaced: the next question goes to the new one."""
        self._context = None

    async def send(self, method: str, params: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """One CDP request under a deadline."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        return await faults.within_life(self.gone, limit, self.session.send(method, params or {}), method)

    async def call(self, function: str, *args: Any, timeout_s: float | None = None, once: bool = False) -> Any:
        """`page.js` `function(*args)`, its result by value. With `once`, never asked a second time."""
        result = await self._evaluate(function, args, by_value=True, timeout_s=timeout_s, once=once)
        return (result.get("value") or {}).get("v")

    async def frames(self) -> None:
        """Waits until two frames were drawn, so that a picture shows what scripts did; a quarter second at most."""
        expression = (
            "new Promise(r => { requestAnimationFrame(() => requestAnimationFrame(() => r(0))); setTimeout(r, 250); })"
        )
        await self._evaluate("probe", (), by_value=True, timeout_s=None, once=False)  # makes the world if need be
        await self._evaluate_once(expression, True, self.timeout_s, "frames", wait=True)

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression, evaluated in the isolated world."""
        await self._evaluate("probe", (), by_value=True, timeout_s=None, once=False)  # makes the world if need be
        return (await self._evaluate_once(expression, True, self.timeout_s, "expression")).get("value")

    async def element(self, function: str, *args: Any) -> Node | None:
        """The element that `page.js` `function(*args)` gives, or None."""
        result = await self._evaluate(function, args, by_value=False, timeout_s=None, once=False)
        if result.get("subtype") == "null" or "objectId" not in result:
            return None
        return Node(self, result["objectId"])

    async def call_on(self, object_id: str, function: str, *args: Any) -> Any:
        """`page.js` `function(object, *args)` by value; the object may live in any world of this session."""
        params: dict[str, Any] = {
            "functionDeclaration": "function(n, ...a) { return globalThis.__owrl ? {v: __owrl[n](this, ...a)} : 0; }",
            "objectId": object_id,
            "arguments": [{"value": function}, *({"value": a} for a in args)],
            "returnByValue": True,
        }
        result = self._value(await self.send("Runtime.callFunctionOn", params), function)
        if not isinstance(result.get("value"), dict):
            # An object of the page's own world (closed shadow roots): the functions come along for this one call.
            params["functionDeclaration"] = f"function(n, ...a) {{ return {{v: ({library()})[n](this, ...a)}}; }}"
            result = self._value(await self.send("Runtime.callFunctionOn", params), function)
        return result["value"].get("v")

    async def resolve(self, backend_id: int) -> Node | None:
        """The element with this backend id, in the page's own world."""
        try:
            answer = await self.send("DOM.resolveNode", {"backendNodeId": backend_id})
        except Exception as error:
            if faults.is_stale_context(error):
                return None
            raise
        object_id = answer["object"].get("objectId")
        return Node(self, object_id) if object_id else None

    async def raw(self, object_id: str, declaration: str, *args: Any) -> dict[str, Any]:
        """The remote object that a function declaration gives when called on an object."""
        params = {
            "functionDeclaration": declaration,
            "objectId": object_id,
            "arguments": [{"value": a} for a in args],
            "returnByValue": False,
        }
        return self._value(await self.send("Runtime.callFunctionOn", params), "function")

    async def _evaluate(
        self, function: str, args: tuple[Any, ...], *, by_value: bool, timeout_s: float | None, once: bool
    ) -> dict[str, Any]:
        limit = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        call = f"__owrl.{function}({', '.join(json.dumps(a) for a in args)})"
        expression = f"globalThis.__owrl ? {f'({{v: {call}}})' if by_value else call} : 'no library'"
        for attempt in range(4):
            left = deadline - time.monotonic()
            if left <= 0:
                raise faults.DeadlineExceeded(f"page.{function}", limit)
            try:
                result = await self._evaluate_once(expression, by_value, left, function)
                if result.get("value") == "no library":
                    await self._evaluate_once(f"{install_script()}; 0", True, left, "install")
                    result = await self._evaluate_once(expression, by_value, left, function)
                return result
            except Exception as error:
                if once or attempt == 3 or not faults.is_stale_context(error):
                    raise
                self.forget()
        raise AssertionError("unreachable")

    async def _evaluate_once(
        self, expression: str, by_value: bool, timeout_s: float, what: str, *, wait: bool = False
    ) -> dict[str, Any]:
        if self._context is None:
            params = {"frameId": self.frame_id, "worldName": WORLD_NAME, "grantUniveralAccess": True}
            self._context = (await self.send("Page.createIsolatedWorld", params, timeout_s))["executionContextId"]
        answer = await self.send(
            "Runtime.evaluate",
            {
                "expression": expression,
                "contextId": self._context,
                "returnByValue": by_value,
                "objectGroup": "owrl",
                "silent": True,
                "awaitPromise": wait,
            },
            timeout_s,
        )
        return self._value(answer, what)

    def _value(self, answer: dict[str, Any], what: str) -> dict[str, Any]:
        details = answer.get("exceptionDetails")
        if details:
            text = details.get("exception", {}).get("description") or details.get("text", "")
            raise faults.ScriptError(f"page.{what} failed: {text[:400]}")
        return answer["result"]

    async def release(self) -> None:
        """Lets go of all elements handed out, so that documents can be collected."""
        await self.send("Runtime.releaseObjectGroup", {"objectGroup": "owrl"})
