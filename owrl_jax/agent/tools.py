"""The thirteen tools that the policy may call: their schemas as the model sees them, and the check of its arguments.

Names, parameters and order are those that released policies were trained with; a change here is a change of protocol.
`check_call` turns what the model wrote into arguments the browser can execute, or into a refusal that teaches. What can
be understood without guessing is normalised (numeric strings, key names, a missing scheme) and what was changed is said
in a note; what cannot is refused. Everything here is pure: no browser, no clock, no state, and the caller's call is
never mutated, so that checking the same call twice gives the same answer.

Not here: scaling of points to pixels (`owrl_jax.geometry`), safety rules (`owrl_jax.browser`), parsing of responses.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from owrl_jax.agent import keys as key_names
from owrl_jax.agent import urls
from owrl_jax.geometry import GRID
from owrl_jax.types import ToolCall

MAX_CLICKS = 3
MAX_PRESSES = 50
MAX_KEYS = 50
MAX_DRAG_STEPS = 100
MAX_WAIT_S = 30.0
MAX_MESSAGE_CHARS = 10_000
NEAR_MISS = 20  # grid units: a point this far outside is a slip and is clamped; further out it is a misunderstanding


def _point(text: str) -> dict[str, Any]:
    return {
        "type": "array",
        "items": {"type": "number"},
        "minItems": 2,
        "maxItems": 2,
        "description": f"{text} Given as [x, y] on a grid of 0 to {GRID} over the screenshot; [0, 0] is its top left.",
    }


def _tool(
    name: str, description: str, properties: dict[str, Any] | None = None, required: tuple[str, ...] = ()
) -> dict:
    parameters = {"type": "object", "properties": properties or {}, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOL_SCHEMAS: tuple[dict[str, Any], ...] = (
    _tool(
        "click",
        "Press a mouse button at a point of the page. Two clicks open or select, the right button opens a menu.",
        {
            "point_2d": _point("Where to click."),
            "clicks": {"type": "integer", "default": 1, "description": f"How often to click, 1 to {MAX_CLICKS}."},
            "button": {
                "type": "string",
                "enum": ["left", "right", "middle"],
                "default": "left",
                "description": "Which mouse button.",
            },
        },
        ("point_2d",),
    ),
    _tool(
        "write",
        "Replace the content of the focused field by a text. Click the field first: without focus nothing is typed.",
        {"message": {"type": "string", "description": "The text that the field shall hold."}},
        ("message",),
    ),
    _tool(
        "press_keys",
        "Press keys, one after another or together as a hotkey.",
        {
            "keys": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Names of keys, such as Enter, Tab, Escape, PageDown, Control, or single characters.",
            },
            "is_hotkey": {
                "type": "boolean",
                "default": False,
                "description": "True: hold all keys down together, as in Control and A. False: press them in order.",
            },
            "presses": {"type": "integer", "default": 1, "description": "How often to press."},
        },
        ("keys",),
    ),
    _tool(
        "scroll",
        "Scroll the page, or the scrollable area under a point.",
        {
            "direction": {
                "type": "string",
                "enum": ["up", "down", "left", "right"],
                "default": "down",
                "description": "Which way to move.",
            },
            "amount": {
                "type": "number",
                "minimum": 0.0,
                "maximum": 1.0,
                "default": 0.5,
                "description": "Fraction of the visible height (of the width, when going sideways).",
            },
            "point_2d": _point("A point inside the area to scroll; leave it out to scroll the page."),
        },
    ),
    _tool(
        "wait",
        "Let time pass, when the page is still working on something.",
        {"seconds": {"type": "integer", "default": 3, "description": f"How long, at most {MAX_WAIT_S:g}."}},
    ),
    _tool(
        "done",
        "End the task and hand in the final answer, or say why the task cannot be done.",
        {"response": {"type": "string", "description": "The final answer for the user, in plain text."}},
        ("response",),
    ),
    _tool(
        "goto_url",
        "Open an address in the current tab.",
        {"url": {"type": "string", "description": "The full web address."}},
        ("url",),
    ),
    _tool("go_back", "Return to the previous page in the history of the current tab."),
    _tool(
        "drag",
        "Press the mouse button at one point, move to another and release it there.",
        {
            "start_point_2d": _point("Where to take hold."),
            "end_point_2d": _point("Where to let go."),
            "steps": {"type": "integer", "default": 10, "description": "Number of mouse moves on the way."},
        },
        ("start_point_2d", "end_point_2d"),
    ),
    _tool(
        "hover",
        "Move the mouse pointer to a point without clicking, to open menus or hints.",
        {"point_2d": _point("Where to move the pointer.")},
        ("point_2d",),
    ),
    _tool("new_tab", "Open an empty tab and make it the current one."),
    _tool(
        "switch_tab",
        "Make another open tab the current one.",
        {"tab_index": {"type": "integer", "description": "Number of the tab in the list of tabs; the first is 0."}},
        ("tab_index",),
    ),
    _tool("close_tab", "Close the current tab. The last open tab cannot be closed."),
)

TOOL_NAMES: tuple[str, ...] = tuple(schema["function"]["name"] for schema in TOOL_SCHEMAS)
_PARAMETERS: dict[str, dict[str, Any]] = {s["function"]["name"]: s["function"]["parameters"] for s in TOOL_SCHEMAS}

# Names other action spaces use for the same parameter.
_PARAMETER_ALIASES = {
    "coordinate": "point_2d",
    "coordinates": "point_2d",
    "point": "point_2d",
    "text": "message",
    "content": "message",
    "answer": "response",
    "key": "keys",
    "time": "seconds",
    "duration": "seconds",
    "index": "tab_index",
    "start_point": "start_point_2d",
    "end_point": "end_point_2d",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedCall:
    """A call that can be executed.

    Attributes:
      name: one of `TOOL_NAMES`.
      arguments: every parameter of the tool, defaults filled in. Points are (x, y) floats within the grid or None;
        `press_keys` holds `chords`, a tuple of key combinations in order, each a tuple of legal key names.
      notes: what was changed to make sense of the call, one short sentence each, to be told to the policy.
    """

    name: str
    arguments: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A call that was not executed: one line that says what was wrong, which value, and what would be right."""

    name: str
    message: str


class _Refuse(Exception):
    """Raised inside the check, turned into a `Refusal` by `check_call`."""


def openai_schemas() -> list[dict[str, Any]]:
    """The tool list in the OpenAI function format: a fresh deep copy, in the order the policy was trained with."""
    return json.loads(json.dumps(TOOL_SCHEMAS))


def check_call(call: ToolCall, *, base_url: str | None = None) -> CheckedCall | Refusal:
    """Validates and normalises one call.

    Args:
      call: as the policy wrote it.
      base_url: address of the current page, against which `goto_url` resolves a path such as `/cart`.

    Returns:
      The executable call, or a refusal with a message for the policy. Never raises on anything a model can write.
    """
    notes: list[str] = []
    try:
        if not isinstance(call.name, str) or call.name not in _CHECKS:
            raise _Refuse(_unknown_tool(call.name))
        given = _own_parameters(call, notes)
        arguments = _CHECKS[call.name](given, notes, base_url)
    except _Refuse as refusal:
        return Refusal(name=str(call.name), message=str(refusal))
    return CheckedCall(name=call.name, arguments=arguments, notes=tuple(notes))


def _unknown_tool(name: Any) -> str:
    near = difflib.get_close_matches(str(name), TOOL_NAMES, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"there is no tool named {_show(name)}.{hint} The tools are: {', '.join(TOOL_NAMES)}."


def _own_parameters(call: ToolCall, notes: list[str]) -> dict[str, Any]:
    """The arguments that belong to the tool. Aliases are translated, unknown ones are dropped with a note."""
    properties = _PARAMETERS[call.name]["properties"]
    if not isinstance(call.arguments, Mapping):
        raise _Refuse(f"the arguments of {call.name} must be a JSON object, got {_show(call.arguments)}.")
    own: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in call.arguments.items():
        alias = _PARAMETER_ALIASES.get(str(name))
        if name in properties:
            own[name] = value
        elif alias is not None and alias in properties and alias not in call.arguments:
            own[alias] = value
            notes.append(f"{name} was read as {alias}")
        else:
            unknown.append(str(name))
    if unknown:
        known = f"its parameters are {', '.join(properties)}" if properties else "it takes no parameters"
        notes.append(f"{call.name} has no parameter {', '.join(_show(u) for u in unknown[:3])} and ignored it; {known}")
    # An explicit null on an optional parameter means "not given".
    required = _PARAMETERS[call.name]["required"]
    own = {k: v for k, v in own.items() if v is not None or k in required}
    missing = [name for name in required if own.get(name) is None]
    if missing:
        raise _Refuse(f"{call.name} needs {' and '.join(missing)}; {_parameter_help(call.name, missing[0])}")
    return own


def _parameter_help(tool: str, parameter: str) -> str:
    return _PARAMETERS[tool]["properties"][parameter]["description"]


def _show(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _number(value: Any, what: str) -> float:
    """A finite number, also from a string that spells one. Booleans are not numbers."""
    if isinstance(value, str):
        try:
            value = float(value.strip())
        except ValueError:
            raise _Refuse(f"{what} must be a number, got {_show(value)}.") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Refuse(f"{what} must be a number, got {_show(value)}.")
    try:
        number = float(value)
    except OverflowError:
        raise _Refuse(f"{what} is far too large: {_show(value)}.") from None
    if not math.isfinite(number):
        raise _Refuse(f"{what} must be a finite number, got {value!r}.")
    return number


def _clamped(value: Any, what: str, low: float, high: float, notes: list[str]) -> float:
    number = _number(value, what)
    clamped = min(max(number, low), high)
    if clamped != number:
        notes.append(f"{what} was limited to {clamped:g}, allowed are {low:g} to {high:g}")
    return clamped


def _integer(value: Any, what: str, low: int, high: int, notes: list[str]) -> int:
    number = _number(value, what)
    if number != int(number):
        raise _Refuse(f"{what} must be a whole number, got {_show(value)}.")
    return int(_clamped(number, what, low, high, notes))


def _boolean(value: Any, what: str) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if not isinstance(value, bool):
        raise _Refuse(f"{what} must be true or false, got {_show(value)}.")
    return value


def _choice(value: Any, what: str, choices: list[str]) -> str:
    if isinstance(value, str) and value.strip().lower() in choices:
        return value.strip().lower()
    raise _Refuse(f"{what} must be one of {', '.join(choices)}, got {_show(value)}.")


def _string(value: Any, what: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _Refuse(f"{what} must be a text, got {_show(value)}.")
    # A lone surrogate cannot travel to the browser; JSON escapes in a model's answer can produce one.
    return str(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _grid_point(value: Any, what: str, notes: list[str]) -> tuple[float, float]:
    """A point on the grid. Accepts [x, y], {"x":, "y":} and the string spellings of both numbers."""
    form = f"{what} must be two numbers [x, y] between 0 and {GRID}"
    if isinstance(value, str):
        parts: Any = value.strip().strip("[]()").replace(",", " ").split()
    elif isinstance(value, Mapping):
        parts = [value.get("x"), value.get("y")]
    else:
        parts = value
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        raise _Refuse(f"{form}, got {_show(value)}.")
    try:
        x, y = _number(parts[0], "x"), _number(parts[1], "y")
    except _Refuse:
        raise _Refuse(f"{form}, got {_show(value)}.") from None
    if not all(-NEAR_MISS <= v <= GRID + NEAR_MISS for v in (x, y)):
        raise _Refuse(
            f"{what} ({x:g}, {y:g}) lies outside the screenshot: coordinates run from 0 to {GRID} on both axes, "
            f"whatever the size of the screenshot in pixels. Scroll if the target is not in view."
        )
    clamped = min(max(x, 0.0), float(GRID)), min(max(y, 0.0), float(GRID))
    if clamped != (x, y):
        notes.append(f"{what} ({x:g}, {y:g}) was moved to the border ({clamped[0]:g}, {clamped[1]:g})")
    return clamped


Given = dict[str, Any]


def _check_click(given: Given, notes: list[str], base_url: str | None) -> dict[str, Any]:
    return {
        "point_2d": _grid_point(given["point_2d"], "point_2d", notes),
        "clicks": _integer(given.get("clicks", 1), "clicks", 1, MAX_CLICKS, notes),
        "button": _choice(given.get("button", "left"), "button", ["left", "right", "middle"]),
    }


def _check_write(given: Given, notes: list[str], base_url: str | None) -> dict[str, Any]:
    message = _string(given["message"], "message")
    if len(message) > MAX_MESSAGE_CHARS:
        raise _Refuse(f"message has {len(message)} characters; at most {MAX_MESSAGE_CHARS} can be typed in one call.")
    return {"message": message}


def _check_press_keys(given: Given, notes: list[str], base_url: str | None) -> dict[str, Any]:
    keys = given["keys"]
    if isinstance(keys, str):
        keys = [keys]
    if not isinstance(keys, list | tuple) or not keys or not all(isinstance(k, str) for k in keys):
        raise _Refuse(f"keys must be a list of key names such as ['Enter'], got {_show(given['keys'])}.")
    if len(keys) > MAX_KEYS:
        raise _Refuse(f"keys holds {len(keys)} names; at most {MAX_KEYS} in one call. Use write for text.")
    hotkey = _boolean(given.get("is_hotkey", False), "is_hotkey")
    try:
        chords = tuple(key_names.parse_chord(key) for key in keys)
    except key_names.UnknownKey as error:
        raise _Refuse(str(error)) from None
    if hotkey:
        chords = (tuple(dict.fromkeys(key for chord in chords for key in chord)),)
    elif len(chords) > 1 and chords[0][0] in key_names.MODIFIERS and len(chords[0]) == 1:
        notes.append("the keys were pressed one after another; set is_hotkey to true to hold them together")
    return {
        "chords": chords,
        "is_hotkey": hotkey,
        "presses": _integer(given.get("presses", 1), "presses", 1, MAX_PRESSES, notes),
    }


def _check_scroll(given: Given, notes: list[str], base_url: str | None) -> dict[str, Any]:
    point = given.get("point_2d")
    return {
        "direction": _choice(given.get("direction", "down"), "direction", ["up", "down", "left", "right"]),
        "amount": _clamped(given.get("amount", 0.5), "amount", 0.0, 1.0, notes),
        "point_2d": None if point is None else _grid_point(point, "point_2d", notes),
    }


def _check_wait(given: Given, notes: list[str], base_url: str | None) -> dict[str, Any]:
    return {"seconds": _clamped(given.get("seconds", 3), "seconds", 0.0, MAX_WAIT_S, notes)}


def _check_done(given: Given, notes: list[str], base_url: str | None) -> dict[str, Any]:
    response = _string(given["response"], "response")
    if not response.strip():
        raise _Refuse("response is empty: give the final answer, or say why the task cannot be done.")
    return {"response": response}


def _check_goto_url(given: Given, notes: list[str], base_url: str | None) -> dict[str, Any]:
    try:
        url = urls.normalise(_string(given["url"], "url"), base_url=base_url)
    except urls.BadUrl as error:
        raise _Refuse(str(error)) from None
    return {"url": url}


def _check_drag(given: Given, notes: list[str], base_url: str | None) -> dict[str, Any]:
    return {
        "start_point_2d": _grid_point(given["start_point_2d"], "start_point_2d", notes),
        "end_point_2d": _grid_point(given["end_point_2d"], "end_point_2d", notes),
        "steps": _integer(given.get("steps", 10), "steps", 1, MAX_DRAG_STEPS, notes),
    }


def _check_hover(given: Given, notes: list[str], base_url: str | None) -> dict[str, Any]:
    return {"point_2d": _grid_point(given["point_2d"], "point_2d", notes)}


def _check_switch_tab(given: Given, notes: list[str], base_url: str | None) -> dict[str, Any]:
    index = _number(given["tab_index"], "tab_index")
    if index != int(index) or index < 0:
        raise _Refuse(f"tab_index must be a whole number from 0, got {_show(given['tab_index'])}.")
    return {"tab_index": int(index)}


def _check_nothing(given: Given, notes: list[str], base_url: str | None) -> dict[str, Any]:
    return {}


_CHECKS: dict[str, Callable[[Given, list[str], str | None], dict[str, Any]]] = {
    "click": _check_click,
    "write": _check_write,
    "press_keys": _check_press_keys,
    "scroll": _check_scroll,
    "wait": _check_wait,
    "done": _check_done,
    "goto_url": _check_goto_url,
    "go_back": _check_nothing,
    "drag": _check_drag,
    "hover": _check_hover,
    "new_tab": _check_nothing,
    "switch_tab": _check_switch_tab,
    "close_tab": _check_nothing,
}
