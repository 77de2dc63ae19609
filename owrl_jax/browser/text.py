"""Page text on its way into the transcript: capped, one line, and unable to speak the chat template's language.

A page is untrusted, and its titles, labels and dialogs end up in the policy's context. `neutralise` guarantees that its
result holds no control character, no line break, no lone surrogate, and nothing that the tokenizer or the transcript
format would read as structure (`<|im_end|>`, `</tool_response>`, `<think>`), whatever the page wrote. It does not judge
what the text says.
"""

from __future__ import annotations

import re
import unicodedata

FEEDBACK_CHARS = 512
LABEL_CHARS = 60

# Names that mean something to the chat template, the parser or the transcript when they stand in angle brackets.
_STRUCTURE = "|".join(
    (
        *("tool_call", "tool_response", "tools", "think", "thinking", "function", "parameter"),
        *("observation", "user_request", "action", "answer", "im_start", "im_end"),
    )
)
_TAG = re.compile(rf"<(?=\s*/?\s*(?:{_STRUCTURE})\b)", re.IGNORECASE)
_KEEP_FORMAT = "\u200c\u200d"  # joiners that scripts and emoji need; they cannot build a token


def neutralise(text: object, limit: int = FEEDBACK_CHARS) -> str:
    """One harmless line of at most `limit` characters.

    Args:
      text: anything a page gave us; non-strings are shown as text.
      limit: longest result; a longer text keeps about 70 % head and the tail around a note of how much was cut.
    """
    raw = text if isinstance(text, str) else str(text)
    # No cost for megabytes of page text: what cannot survive the cap is dropped before the per-character work.
    dropped = 0
    bound = 8 * limit + 64
    if len(raw) > 2 * bound:
        dropped = len(raw) - 2 * bound
        raw = raw[:bound] + " " + raw[-bound:]
    # Composing first: after it, nothing the tokenizer's own normalisation does can create a new bracket.
    composed = unicodedata.normalize("NFC", _repaired(raw))
    kept = "".join(_visible(c) for c in composed)
    line = " ".join(kept.split())
    return shorten(_defused(line), limit, already_dropped=dropped)


def shorten(line: str, limit: int, *, already_dropped: int = 0) -> str:
    """Head and tail of a line around a note of how many characters were cut; unchanged if it fits."""
    if len(line) <= limit and not already_dropped:
        return line
    cut = max(len(line) - limit, 0) + already_dropped
    marker = f" … [{cut} characters cut] … "
    room = limit - len(marker)
    if room < 10:
        return line[: max(limit - 1, 0)] + "…"
    head = int(room * 0.7)
    return line[:head] + marker + line[len(line) - (room - head) :]


def _repaired(text: str) -> str:
    """Surrogate pairs joined, lone halves replaced by U+FFFD."""
    if not any("\ud800" <= c <= "\udfff" for c in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _visible(char: str) -> str:
    category = unicodedata.category(char)
    if category in ("Cc", "Zl", "Zp"):
        return " "
    if category == "Cf" and char not in _KEEP_FORMAT:
        return ""
    return char


def _defused(line: str) -> str:
    return _TAG.sub("‹", line.replace("<|", "‹|").replace("|>", "|›"))
