"""The one line that each call gets: facts in words, in the coordinates of the policy's own grid.

Every line begins with `Succeed:`, `Failed:` or `Skipped:`. What a page wrote stands in quotes, capped and
neutralised; the finished line is neutralised once more, so that no combination of pieces can become structure in the
transcript. Pure: facts in, text out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from owrl_jax.agent.page_text import FEEDBACK_CHARS, one_line
from owrl_jax.geometry import pixel_to_grid_point
from owrl_jax.types import CallStatus

_PREFIX = {CallStatus.OK: "Succeed:", CallStatus.FAILED: "Failed:", CallStatus.SKIPPED: "Skipped:"}
_LABEL = 60
_VALUE = 80
_URL = 200
_OPTIONS_CHARS = 300

FORMATS = {
    "date": "YYYY-MM-DD, such as 2025-03-31",
    "time": "HH:MM in 24 hours, such as 14:30",
    "datetime-local": "YYYY-MM-DDTHH:MM, such as 2025-03-31T14:30",
    "month": "YYYY-MM, such as 2025-03",
    "week": "YYYY-Www, such as 2025-W14",
    "color": "#rrggbb, such as #ff8800",
    "range": "a number",
}


def line(status: CallStatus, parts: Iterable[str]) -> str:
    """The finished line."""
    return one_line(f"{_PREFIX[status]} " + "; ".join(p for p in parts if p), FEEDBACK_CHARS)


def quoted(text: object, limit: int = _VALUE) -> str:
    """Page text in quotes."""
    return f'"{one_line(str(text), limit)}"'


def address(url: str) -> str:
    """A web address."""
    return one_line(url, _URL)


def point(grid_point: tuple[float, float]) -> str:
    """A point as the policy wrote it."""
    return f"({round(grid_point[0], 1):g}, {round(grid_point[1], 1):g})"


def pixel(xy: tuple[float, float], image_size: tuple[int, int], css_width: float) -> str:
    """A pixel of the page, told on the policy's grid."""
    return point(pixel_to_grid_point(xy, image_size=image_size, css_width=css_width))


def element(facts: Mapping[str, Any] | None) -> str:
    """What an element is: `<button> "Buy"`, `<input type=checkbox, checked> "Agree"`."""
    if facts is None:
        return "the empty page"
    traits = []
    if facts["type"] and facts["tag"] in ("input", "button") and facts["type"] not in ("text", "submit"):
        traits.append(f"type={one_line(facts['type'], 20)}")
    if facts["role"]:
        traits.append(f"role={one_line(facts['role'], 20)}")
    if facts["checked"] is not None:
        traits.append("checked" if facts["checked"] else "not checked")
    for name in ("expanded", "pressed", "selected"):
        if facts[name] in ("true", "false"):
            traits.append(name if facts[name] == "true" else f"not {name}")
    if facts["disabled"]:
        traits.append("disabled")
    what = f"<{' '.join([one_line(facts['tag'], 30), ', '.join(traits)]).strip()}>"
    return f"{what} {quoted(facts['label'], _LABEL)}" if facts["label"] else what


def options(facts: Mapping[str, Any]) -> str:
    """The options of a select, and how to choose one."""
    names, used = [], 0
    for option in facts.get("options", ()):
        name = quoted(option["label"], 40) + (" (disabled)" if option["disabled"] else "")
        used += len(name) + 2
        if used > _OPTIONS_CHARS:
            break
        names.append(name)
    more = facts.get("optionCount", len(names)) - len(names)
    listed = ", ".join(names) + (f" and {more} more" if more > 0 else "")
    return f"its options are {listed or 'none'}; choose one with write and the text of the option"


def scrolled(facts: Mapping[str, Any], direction: str, amount: float) -> tuple[str, bool]:
    """What scrolling did, and whether anything moved."""
    if not facts.get("scrollable"):
        return f"nothing moved: there is nothing to scroll {direction} here", False
    area = "the page" if facts["page"] else f"the area {quoted(facts['label'], 40)}" if facts["label"] else "the area"
    edge = {"down": "bottom", "up": "top", "right": "right end", "left": "left end"}[direction]
    at_edge = facts["end"] if direction in ("down", "right") else facts["start"]
    where = f"{area} is now at {round(100 * min(max(facts['position'], 0), 1))}% of its length"
    if not facts["moved"]:
        return f"nothing moved: {area} is already at its {edge}", False
    return f"scrolled {direction} by {round(100 * amount)}%; {where}" + (f", its {edge}" if at_edge else ""), True


def mismatch(wanted: str, facts: Mapping[str, Any]) -> str:
    """A note if a field does not hold what was typed; empty if it does."""
    if facts["secret"]:
        return "" if facts["length"] == len(wanted) else f"but the field holds {facts['length']} characters"
    real = _plain(facts["value"])
    if real == _plain(wanted):
        return ""
    if not real:
        return "but the field is empty now"
    return f"but the field now holds {quoted(facts['value'])}"


def _plain(text: str) -> str:
    return " ".join(text.replace("\u00a0", " ").replace("\u200b", "").split())
