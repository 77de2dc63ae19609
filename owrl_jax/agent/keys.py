"""Names of keys: from what models write to the names that the browser's keyboard knows.

Models know several dialects (`ctrl`, `Return`, `page_down`, `kp_1`, `ctrl+a`). All of them map to one legal name, the
one that the W3C key values and Playwright's keyboard share. A name that maps to nothing is refused, never dropped:
dropping `Foo` from `ctrl+Foo` would press Control alone and report success.
"""

from __future__ import annotations

import difflib

MODIFIERS = ("Control", "Shift", "Alt", "Meta")

_NAMED = (
    *MODIFIERS,
    *("Enter", "Tab", "Escape", "Backspace", "Delete", "Insert", "Home", "End", "PageUp", "PageDown", "Space"),
    *("ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"),
    *("CapsLock", "NumLock", "ScrollLock", "Pause", "ContextMenu"),
    *(f"F{n}" for n in range(1, 13)),
    *(f"Numpad{n}" for n in range(10)),
    *("NumpadAdd", "NumpadSubtract", "NumpadMultiply", "NumpadDivide", "NumpadDecimal", "NumpadEnter"),
)
_ALIASES = {
    "ctrl": "Control",
    "ctl": "Control",
    "controlleft": "Control",
    "controlright": "Control",
    "ctrlleft": "Control",
    "ctrlright": "Control",
    "controlormeta": "Control",
    "shiftleft": "Shift",
    "shiftright": "Shift",
    "option": "Alt",
    "opt": "Alt",
    "altleft": "Alt",
    "altright": "Alt",
    "altgr": "Alt",
    "cmd": "Meta",
    "command": "Meta",
    "win": "Meta",
    "windows": "Meta",
    "super": "Meta",
    "metaleft": "Meta",
    "return": "Enter",
    "esc": "Escape",
    "del": "Delete",
    "ins": "Insert",
    "bksp": "Backspace",
    "spacebar": "Space",
    "pgup": "PageUp",
    "pgdn": "PageDown",
    "pgdown": "PageDown",
    "prior": "PageUp",
    "next": "PageDown",
    "up": "ArrowUp",
    "down": "ArrowDown",
    "left": "ArrowLeft",
    "right": "ArrowRight",
    "menu": "ContextMenu",
    "apps": "ContextMenu",
    "add": "NumpadAdd",
    "subtract": "NumpadSubtract",
    "multiply": "NumpadMultiply",
    "divide": "NumpadDivide",
    "decimal": "NumpadDecimal",
    "kpenter": "NumpadEnter",
    **{f"num{n}": f"Numpad{n}" for n in range(10)},
    **{f"kp{n}": f"Numpad{n}" for n in range(10)},
    "plus": "+",
    "minus": "-",
    "comma": ",",
    "period": ".",
    "dot": ".",
    "slash": "/",
    "backslash": "\\",
    "equal": "=",
    "equals": "=",
    "semicolon": ";",
    "colon": ":",
    "quote": "'",
    "underscore": "_",
    "asterisk": "*",
    "\n": "Enter",
    "\r": "Enter",
    "\t": "Tab",
}
_BY_LOWER = {**{name.lower(): name for name in _NAMED}, **_ALIASES}


class UnknownKey(ValueError):
    """The name means no key; the message says what was meant, if that can be guessed."""


def normalise_key(name: str) -> str:
    """The legal name of one key. Single characters stand for themselves.

    Raises:
      UnknownKey: with the nearest known names.
    """
    if len(name) == 1:
        return _ALIASES.get(name, "Space" if name == " " else name)
    squeezed = name.strip().lower().replace("_", "").replace("-", "").replace(" ", "")
    if len(name.strip()) == 1:
        return name.strip()
    if squeezed in _BY_LOWER:
        return _BY_LOWER[squeezed]
    near = difflib.get_close_matches(squeezed, list(_BY_LOWER), n=1, cutoff=0.7)
    hint = f" Did you mean {_BY_LOWER[near[0]]}?" if near else ""
    text = name if len(name) <= 40 else name[:39] + "…"
    raise UnknownKey(
        f"there is no key named {text!r}, so nothing was pressed.{hint} Use names such as Enter, Tab, Escape, "
        "Control, PageDown or ArrowUp, or single characters; use write for text."
    )


def parse_chord(text: str) -> tuple[str, ...]:
    """The keys of `ctrl+shift+t`, `Control++` or `Enter`, in the order they go down, without repeats.

    Raises:
      UnknownKey: if any part is empty or unknown.
    """
    if len(text) == 1:
        return (normalise_key(text),)
    text = text.strip()
    if text == "+":
        return ("+",)
    parts = text.split("+")
    if text.endswith("++"):  # the last key is the plus sign itself
        parts = [*parts[:-2], "+"]
    return tuple(dict.fromkeys(normalise_key(part) for part in parts))
