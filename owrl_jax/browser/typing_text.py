"""Keys and text into a page: real key events where sites listen to them, one insertion where they would take too long.

Also the forms in which people and models write dates, times and colours, brought to the one that HTML controls take.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Awaitable, Callable
from typing import Any

KEYED = 100  # characters that are typed key by key; of a longer text only the end is, so that listeners fire
KEYED_END = 12


class Keyboard:
    """The keyboard of one page.

    Args:
      page: the page.
      platform: user agent of the browser, which names the operating system.
      send: runs one input under its deadline.
    """

    def __init__(self, page: Any, platform: str, send: Callable[[Awaitable[Any]], Awaitable[None]]) -> None:
        self._keyboard = page.keyboard
        self._platform = platform
        self._send = send

    async def press(self, chord: tuple[str, ...]) -> None:
        """Keys down in order and up in reverse."""
        if len(chord) == 1 and len(chord[0]) == 1 and not _on_keyboard(chord[0]):
            await self._send(self._keyboard.insert_text(chord[0]))
            return
        down: list[str] = []
        try:
            for key in map(_place, chord) if "Shift" in chord else chord:
                await self._send(self._keyboard.down(key))
                down.append(key)
        finally:
            for key in reversed(down):  # a modifier that stays down would change every later key
                await self._send(self._keyboard.up(key))

    async def type(self, text: str, *, slow: bool) -> None:
        """Types a text. `slow` sends key events, which suggestions listen to; line breaks never press Enter."""
        split = len(text) if not slow or "\n" in text else 0 if len(text) <= KEYED else len(text) - KEYED_END
        if text[:split]:
            await self._send(self._keyboard.insert_text(text[:split]))
        for char in text[split:]:
            if _on_keyboard(char):
                await self._send(self._keyboard.press("Space" if char == " " else char))
            else:
                await self._send(self._keyboard.insert_text(char))

    async def clear_blindly(self) -> bool:
        """Select-all and Backspace where the field cannot be reached otherwise; False if the platform is unknown."""
        if re.search(r"Macintosh|Mac OS", self._platform):
            modifier = "Meta"
        elif re.search(r"Linux|X11|Windows|CrOS|Android", self._platform):
            modifier = "Control"
        else:
            return False
        await self.press((modifier, "a"))
        await self.press(("Backspace",))
        return True


def _place(key: str) -> str:
    """Where a letter or digit lies on the keyboard: the key there types what Shift makes of it."""
    if len(key) != 1 or not key.isascii() or not key.isalnum():
        return key
    return f"Digit{key}" if key.isdigit() else f"Key{key.upper()}"


def _on_keyboard(char: str) -> bool:
    return char.isascii() and char.isprintable()


_MONTHS = {
    name: n
    for n, names in enumerate(
        (
            "jan january",
            "feb february",
            "mar march",
            "apr april",
            "may",
            "jun june",
            "jul july",
            "aug august",
            "sep sept september",
            "oct october",
            "nov november",
            "dec december",
        ),
        1,
    )
    for name in names.split()
}


def control_value(type_: str, text: str) -> str:
    """What to give an HTML control of this type for what the policy wrote; unchanged if it is not understood.

    Dates as `2025-03-31`, `2025/3/31`, `31 March 2025`, `March 31, 2025` and `3/31/2025` (read as in the United States,
    unless the first number cannot be a month); times with am and pm; colours by three digits.
    """
    text = " ".join(text.split())
    if type_ == "date":
        return _date(text) or text
    if type_ == "time":
        return _time(text) or text
    if type_ == "datetime-local":
        match = re.match(r"(.+?)(?:T|,? (?:at )?)(\d{1,2}(?::\d{2}){0,2}(?: ?[ap]\.?m\.?)?)$", text, re.IGNORECASE)
        day, clock = (_date(match[1]), _time(match[2])) if match else (None, None)
        return f"{day}T{clock}" if day and clock else text
    if type_ == "month":
        match = re.fullmatch(r"([A-Za-z]+)\.? (\d{4})", text)
        if match and match[1].lower() in _MONTHS:
            return f"{match[2]}-{_MONTHS[match[1].lower()]:02d}"
        match = re.fullmatch(r"(\d{4})[-/](\d{1,2})", text) or None
        return f"{match[1]}-{int(match[2]):02d}" if match else text
    if type_ == "color":
        match = re.fullmatch(r"#?([0-9a-fA-F]{3}|[0-9a-fA-F]{6})", text)
        if match:
            digits = match[1] if len(match[1]) == 6 else "".join(c * 2 for c in match[1])
            return f"#{digits.lower()}"
    if type_ == "range":
        return text.rstrip("%").strip()
    return text


def _date(text: str) -> str | None:
    parts: tuple[int, int, int] | None = None
    if match := re.fullmatch(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})", text):
        parts = int(match[1]), int(match[2]), int(match[3])
    elif match := re.fullmatch(r"(\d{1,2})([/.\-])(\d{1,2})\2(\d{4})", text):
        first, second = int(match[1]), int(match[3])
        day_first = first > 12 or match[2] == "."
        parts = int(match[4]), *((second, first) if day_first else (first, second))
    elif match := re.fullmatch(r"([A-Za-z]+)\.? (\d{1,2})(?:st|nd|rd|th)?,? (\d{4})", text):
        if match[1].lower() in _MONTHS:
            parts = int(match[3]), _MONTHS[match[1].lower()], int(match[2])
    elif (match := re.fullmatch(r"(\d{1,2})(?:st|nd|rd|th|\.)? ([A-Za-z]+)\.?,? (\d{4})", text)) and (
        match[2].lower() in _MONTHS
    ):
        parts = int(match[3]), _MONTHS[match[2].lower()], int(match[1])
    if parts is None:
        return None
    try:
        return datetime.date(*parts).isoformat()
    except ValueError:
        return None


def _time(text: str) -> str | None:
    match = re.fullmatch(r"(\d{1,2})(?::(\d{2}))?(?::(\d{2}))? ?(?:([ap])\.?m\.?)?", text, re.IGNORECASE)
    if match is None or (match[2] is None and match[4] is None):
        return None
    hour, minute, seconds = int(match[1]), int(match[2] or 0), match[3]
    if match[4]:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + (12 if match[4].lower() == "p" else 0)
    if hour > 23 or minute > 59:
        return None
    return f"{hour:02d}:{minute:02d}" + (f":{seconds}" if seconds else "")
