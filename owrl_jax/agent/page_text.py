"""Words that are not ours on their way into the prompt: titles, addresses, feedback, the task itself.

Two walls stand between a page and the policy's control tokens. This file is the first: text that spells a tag of the
chat format or of our message layout loses its opening bracket, so that it reads the same but means nothing, to a
tokenizer, to a remote endpoint and to the eye of the policy alike. The second is `Tokens.guard`, which makes the
tokenizer unable to yield a control token from such text whatever it spells (`context.py`). Both are idempotent.

It says nothing about what the words mean: a page may still lie.
"""

from __future__ import annotations

import re
import unicodedata

FEEDBACK_CHARS = 512
TITLE_CHARS = 50
URL_CHARS = 300
HEAD_SHARE = 0.7  # of what is kept of a long line; the rest is its tail

_TAGS = ("think", "thinking", "tool_call", "tool_response", "tools", "function", "parameter", "im_start", "im_end")
_TAGS += ("observation", "user_request", "action", "answer")
_TAG = re.compile(rf"<(?=\s*/?\s*(?:{'|'.join(_TAGS)})\b)", re.IGNORECASE)
_JOINERS = "\u200c\u200d"  # scripts and emoji need them


def inert(text: str) -> str:
    """The text with every tag of the chat format and of our layout defused; line breaks and spaces stay.

    `<|im_end|>` becomes `‹|im_end|›`, `</think>` becomes `‹/think>`. Before that, control characters and invisible ones
    go (they could hide between the letters of a tag; those that part lines become spaces), lone surrogates become
    U+FFFD, and the rest is composed (NFC).
    """
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    shown = "".join(c if c in "\n\t" else " " if c.isspace() else c if _visible(c) else "" for c in whole)
    composed = unicodedata.normalize("NFC", shown)
    return _TAG.sub("‹", composed.replace("<|", "‹|").replace("|>", "|›"))


def one_line(text: str, limit: int) -> str:
    """The inert text as one line of at most `limit` characters, its middle cut out with a note if it is longer."""
    # What cannot survive the cap is dropped before the per-character work: a page may hand out megabytes.
    bound = 16 * limit + 256
    dropped = max(len(text) - 2 * bound - 1, 0)  # a space takes the place of what is dropped
    if dropped:
        text = f"{text[:bound]} {text[-bound:]}"
    return shorten(" ".join(inert(text).split()), limit, dropped)


def shorten(line: str, limit: int, dropped: int = 0) -> str:
    """Head (70 %) and tail of a line around a note of how many characters were cut; unchanged if it fits.

    Args:
      line: the text.
      limit: longest result, in characters.
      dropped: characters of its middle that are already gone, to be counted in the note.
    """
    if len(line) <= limit and not dropped:
        return line
    # The note's own length depends on the number in it, and the number on the note; the third round changes nothing.
    cut = len(line) - limit + dropped
    for _ in range(3):
        note = f" … [{cut} characters cut] … "
        cut = len(line) - (limit - len(note)) + dropped
    room = limit - len(note)
    if room < 10:
        return line[: limit - 1] + "…"
    head = int(room * HEAD_SHARE)
    return inert(line[:head] + note + line[len(line) - (room - head) :])


def _visible(char: str) -> bool:
    return unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Cn", "Co") or char in _JOINERS
