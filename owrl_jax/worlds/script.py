"""The moves of a solution, as data: what an oracle clicks and types, and why.

Every target is the id of an element. Two interpreters know this language: `oracle.Oracle` plays it in a real browser
with the agent's own tools and grid points, and `driver.Driver` plays it against the site's state machine without a
browser.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Click:
    """Click the element."""

    target: str
    why: str


@dataclasses.dataclass(frozen=True)
class Fill:
    """Make a text field hold `text`; `enter` sends its form with the Enter key."""

    target: str
    text: str
    why: str
    enter: bool = False


@dataclasses.dataclass(frozen=True)
class Choose:
    """Choose the option with `value` of a native select."""

    target: str
    value: str
    why: str


@dataclasses.dataclass(frozen=True)
class PickDate:
    """Pick a day (YYYY-MM-DD) in the calendar that a date field opens."""

    target: str
    day: str
    why: str


@dataclasses.dataclass(frozen=True)
class Suggest:
    """Type into a field with suggestions and take the suggestion `option`; the field then holds `text`."""

    target: str
    typed: str
    option: str
    text: str
    why: str


@dataclasses.dataclass(frozen=True)
class Read:
    """Have the element in view."""

    target: str
    why: str


@dataclasses.dataclass(frozen=True)
class Say:
    """Call done with `text`."""

    text: str
    why: str


Move = Click | Fill | Choose | PickDate | Suggest | Read | Say
