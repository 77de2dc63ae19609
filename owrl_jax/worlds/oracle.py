"""The oracle: plays a script in a real browser with the tools and the grid points that the agent has.

It looks at the page through a `Probe`, which tells where an element is, and acts through `ToolCall`s alone: an
element out of view is scrolled to, a field is clicked before it is written to, a calendar is leafed through. Every
turn comes with a short reasoning, so that its episodes serve as demonstrations. It never touches the page itself.

    oracle = Oracle(case.moves)
    while not oracle.finished:
        reasoning, calls = await oracle.act(probe, last)      # last: StepResult of the turn before, or None
        last = await sandbox.step(calls)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from owrl_jax.geometry import pixel_to_grid_point
from owrl_jax.types import CallStatus, StepResult, ToolCall
from owrl_jax.worlds import script as moves
from owrl_jax.worlds.script import Move

Turn = tuple[str, list[ToolCall]]

# Where an element is, and a point of it that a click would really reach.
LOCATE_JS = """
(id) => {
  const el = document.getElementById(id);
  if (!el) return null;
  const box = el.getClientRects()[0] || el.getBoundingClientRect(), whole = el.getBoundingClientRect();
  const vw = innerWidth, vh = innerHeight, mine = (n) => n && (el.contains(n) || n.contains(el) && n.tagName ===
  'LABEL'); let point = null;
  for (const [fx, fy] of [[.5, .5], [.3, .5], [.7, .5], [.5, .25], [.5, .75], [.1, .5], [.9, .5]]) {
    const x = box.left + box.width * fx, y = box.top + box.height * fy;
    if (x >= 0 && y >= 0 && x < vw && y < vh && mine(document.elementFromPoint(x, y))) { point = [x, y]; break; }
  }
  const options = el.tagName === 'SELECT' ? [...el.options].map((o) => [o.value, o.label]) : [];
  return {point, top: whole.top, bottom: whole.bottom, middle: box.top + box.height / 2, width: vw, height: vh,
    drawn: whole.width > 0 && whole.height > 0, value: el.value === undefined ? '' : String(el.value), options,
    month: el.dataset.month || ''};
}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sight:
    """What a probe tells of an element. Lengths in CSS pixels of the viewport, `point` on the agent's grid.

    Attributes:
      point: where to click; None if no part that could be clicked is in view.
      top, bottom, middle: of the element, relative to the top of the viewport.
      height: of the viewport.
      value: of a field.
      options: (value, label) of a select.
      month: shown by a calendar.
    """

    point: tuple[int, int] | None
    top: float
    bottom: float
    middle: float
    height: float
    value: str = ""
    options: tuple[tuple[str, str], ...] = ()
    month: str = ""

    @property
    def readable(self) -> bool:
        """Whether a good part of the element is in view."""
        shown = min(self.bottom, self.height) - max(self.top, 0)
        return shown >= min(self.bottom - self.top, self.height * 0.5) * 0.9


class Probe(Protocol):
    """Tells where things are on the page in front."""

    async def find(self, target: str) -> Sight | None:
        """The drawn element with this id, or None."""
        ...


class PageProbe:
    """A probe that asks the page of a local sandbox by script.

    Args:
      sandbox: a `browser.sandbox.Sandbox` (anything with `.stage.active.page`).
    """

    def __init__(self, sandbox: Any):
        while (inner := getattr(sandbox, "inner", None)) is not None:  # leased or recorded: look at the page itself
            sandbox = inner
        self._sandbox = sandbox

    async def evaluate(self, script: str, argument: Any = None) -> Any:
        """The value of a function in the page; asked again if a navigation came in between."""
        for attempt in range(4):
            try:
                return await self._sandbox.stage.active.page.evaluate(script, argument)
            except Exception as error:
                if attempt == 3 or "context" not in str(error).lower():
                    raise
        return None

    async def find(self, target: str) -> Sight | None:
        seen = await self.evaluate(LOCATE_JS, target)
        if seen is None or not seen["drawn"]:
            return None
        point = seen["point"]
        size = (round(seen["width"]), round(seen["height"]))
        return Sight(
            point=None if point is None else pixel_to_grid_point((int(point[0]), int(point[1])), image_size=size),
            top=seen["top"],
            bottom=seen["bottom"],
            middle=seen["middle"],
            height=seen["height"],
            value=seen["value"],
            options=tuple((v, label) for v, label in seen["options"]),
            month=seen["month"],
        )


class Lost(RuntimeError):
    """The oracle does not find what its script speaks of."""


# What may stand in the way: id of the button that ends it, and what one thinks.
INTERRUPTIONS = (
    ("resume", "The site has interrupted me; I continue."),
    ("popup-close", "A window covers the page; I close it."),
    ("cookies-reject", "There is a cookie banner; only what is necessary."),
)
_PATIENCE = 5  # waits for something that is not there


def _call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def _click(point: tuple[int, int]) -> ToolCall:
    return _call("click", point_2d=list(point))


class Oracle:
    """One solution being played.

    Args:
      script: the moves, the closing `Say` included.
    """

    def __init__(self, script: Sequence[Move]):
        self._script = tuple(script)
        self._at = 0
        self._waited = 0
        self._returns = 0
        self._advance = False  # whether the turn before completed its move, if it went well

    @property
    def finished(self) -> bool:
        """Whether `done` has been called."""
        return self._at >= len(self._script)

    async def act(self, probe: Probe, last: StepResult | None = None) -> Turn:
        """The next turn: reasoning and calls.

        Args:
          probe: looks at the page as it is now.
          last: what the turn before came to; a failed call is made again.

        Raises:
          Lost: if what the script needs does not come.
        """
        failed = last is not None and any(r.status is not CallStatus.OK for r in last.results)
        if self._advance and not failed:
            self._at += 1
            self._waited = 0
        self._advance = False
        if failed:
            self._be_patient(f"a call failed: {last.results[-1].feedback}" if last and last.results else "")
        for ident, why in INTERRUPTIONS:
            sight = await probe.find(ident)
            if sight is not None and sight.point is not None:
                return why, [_click(sight.point)]
        thoughts: list[str] = []
        while True:
            step = self._script[self._at]
            if isinstance(step, moves.Say):
                self._at = len(self._script)
                return " ".join([*thoughts, step.why]), [_call("done", response=step.text)]
            thoughts.append(step.why)
            sight = await probe.find(step.target)
            if sight is None:
                return self._missing(step.target)
            if isinstance(step, moves.Read) and sight.readable:
                self._at += 1
                self._waited = 0
                continue
            if (sight.point is None) or (isinstance(step, moves.Read) and not sight.readable):
                return self._scroll(sight, step.target)
            return " ".join(thoughts), await self._do(step, sight, probe)

    def _be_patient(self, why: str) -> None:
        self._waited += 1
        if self._waited > _PATIENCE:
            raise Lost(f"move {self._at + 1}, {self._script[self._at]}: {why}")

    def _missing(self, target: str) -> Turn:
        """Waits; if that does not help, makes the click again that should have brought the target."""
        self._be_patient(f"there is no {target}")
        if self._waited == 3 and self._at and self._returns < 2 and isinstance(self._script[self._at - 1], moves.Click):
            self._returns += 1
            self._at -= 1
            return "Nothing has come of my click; I look again.", [_call("wait", seconds=1)]
        return "The page is not complete yet; I wait.", [_call("wait", seconds=1)]

    def _scroll(self, sight: Sight, target: str) -> Turn:
        self._be_patient(f"{target} cannot be brought into view")
        middle = sight.middle
        if self._script[self._at].__class__ is moves.Read:
            middle = (sight.top + min(sight.bottom, sight.top + sight.height)) / 2
        away = middle - sight.height / 2
        amount = round(min(1.0, max(0.1, abs(away) / sight.height)), 2)
        direction = "down" if away > 0 else "up"
        return f"It is further {direction}; I scroll.", [_call("scroll", direction=direction, amount=amount)]

    async def _do(self, step: Move, sight: Sight, probe: Probe) -> list[ToolCall]:
        """Calls that make a move, or the next part of it."""
        assert sight.point is not None
        calls = [_click(sight.point)]
        match step:
            case moves.Click():
                self._advance = True
            case moves.Fill(_, text, _, enter):
                calls.append(_call("write", message=text))
                if enter:
                    calls.append(_call("press_keys", keys=["Enter"]))
                self._advance = True
            case moves.Choose(_, value):
                label = next((label for v, label in sight.options if v == value), None)
                if label is None:
                    raise Lost(f"{step.target} has no option {value!r}")
                calls.append(_call("write", message=label))
                self._advance = True
            case moves.Suggest(_, typed, option):
                offered = await probe.find(f"suggest-{option}")
                if offered is not None and offered.point is not None:
                    self._advance = True
                    return [_click(offered.point)]
                self._be_patient(f"{option} is not suggested")
                if self._waited % 2 == 0:  # to type again at once would throw away an answer that is under way
                    return [_call("wait", seconds=1)]
                calls.append(_call("write", message=typed))
            case moves.PickDate(_, day):
                return await self._leaf(day, calls, probe)
        return calls

    async def _leaf(self, day: str, opening: list[ToolCall], probe: Probe) -> list[ToolCall]:
        """Open the calendar, leaf to the month, take the day."""
        title = await probe.find("cal-title")
        if title is None:
            self._be_patient("the calendar does not open")
            return opening
        wanted, shown = _months(day), _months(title.month)
        if wanted == shown:
            square = await probe.find(f"day-{day}")
            if square is None or square.point is None:
                raise Lost(f"the calendar shows no {day}")
            self._advance = True
            return [_click(square.point)]
        arrow = await probe.find("cal-next" if wanted > shown else "cal-prev")
        if arrow is None or arrow.point is None:
            raise Lost("the calendar has no arrow")
        return [_click(arrow.point)] * min(abs(wanted - shown), 3)


def _months(text: str) -> int:
    year, month = text.split("-")[:2]
    return int(year) * 12 + int(month)
