"""A judge's reply to a verdict: strict, tri-state, and deaf to everything but the reply's own last word.

Two forms are understood.

- **JSON**: the whole reply, or one fenced block that is the whole reply, is an object
  `{"verdict": …, "rationale": …, "reasons": […]}`; `verdict` is one of the words below, `rationale` (optional) a text,
  `reasons` (optional) a list of texts, and there is no other key and none twice.
- **A final line**: the last line that is not blank says `Verdict: SUCCESS`, or the word alone. Words may stand before
  the mark (`At first SUCCESS, final verdict: NOT SUCCESS`), none behind it, and there is one mark on that line.

With a `code`, which the prompt gave and no page can know, the mark is `Verdict CODE:` (in JSON a key `code`), and a
word alone is no verdict: then nothing that is merely repeated can count, wherever it stands.

| word (any case, spaces, `_`, `-` and Markdown stars between) | verdict |
|---|---|
| success, successful | success |
| not success, not a success, not successful, unsuccessful, failure, failed, fail | failure |
| unsure, uncertain, unclear, cannot tell, unknown, invalid | invalid |

Anything else is invalid, with a reason: an empty reply, one that was cut off, both words on the last line, a verdict
that is quoted (behind `>` or in quotation marks), JSON with a missing, doubled or foreign key. Words further up, of a
page, an agent or the judge itself, do not count. Reasoning in think tags is left out first; if it was never closed,
there was no verdict.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from owrl_jax.types import VerdictValue

WORDS: dict[str, VerdictValue] = {
    **dict.fromkeys(("success", "successful"), VerdictValue.SUCCESS),
    **dict.fromkeys(
        ("not success", "not a success", "not successful", "unsuccessful", "failure", "failed", "fail"),
        VerdictValue.FAILURE,
    ),
    **dict.fromkeys(
        ("unsure", "uncertain", "unclear", "cannot tell", "unknown", "invalid"),
        VerdictValue.INVALID,
    ),
}
_FENCE = re.compile(r"\A```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```\Z", re.DOTALL | re.IGNORECASE)
_END_THINK = "</think>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParsedReply:
    """A reply, read.

    Attributes:
      value: the verdict.
      rationale: what the judge said for it.
      reasons: codes that it gave.
      problem: why the reply could not be read, one word; empty if it could, also where the judge itself was unsure.
    """

    value: VerdictValue
    rationale: str = ""
    reasons: tuple[str, ...] = ()
    problem: str = ""


def parse_reply(reply: str, *, finished: bool = True, code: str = "") -> ParsedReply:
    """Reads a reply. Never raises.

    Args:
      reply: the judge's words.
      finished: whether the judge came to its end; a reply that was cut off has no verdict.
      code: that the prompt asked to be repeated; empty for none.
    """
    if not finished:
        return _unreadable("cut_off", reply)
    text = reply.strip()
    if "<think>" in text or _END_THINK in text:
        _, tag, text = text.rpartition(_END_THINK)
        text = text.strip()
        if not tag or "<think>" in text:
            return _unreadable("cut_off", reply)
    if not text:
        return _unreadable("empty", reply)
    fenced = _FENCE.match(text)
    body = fenced[1].strip() if fenced else text
    if body.startswith("{"):
        return _from_json(body, code)
    return _from_last_line(text, code)


def _unreadable(problem: str, reply: str) -> ParsedReply:
    return ParsedReply(value=VerdictValue.INVALID, rationale=reply.strip(), problem=problem)


def _from_json(body: str, code: str) -> ParsedReply:
    try:
        value = json.loads(body, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return _unreadable("broken_json", body)
    if not isinstance(value, dict):
        return _unreadable("schema", body)
    word, rationale, reasons = value.get("verdict"), value.get("rationale", ""), value.get("reasons", [])
    fits = (
        isinstance(word, str)
        and isinstance(rationale, str)
        and isinstance(reasons, list)
        and all(isinstance(reason, str) for reason in reasons)
        and set(value) <= {"verdict", "rationale", "reasons"} | ({"code"} if code else set())
    )
    if not fits:
        return _unreadable("schema", body)
    if value.get("code", "") != code:
        return _unreadable("code", body)
    found = _word(str(word))
    if found is None:
        return _unreadable("unknown_word", body)
    return ParsedReply(value=found, rationale=rationale.strip(), reasons=tuple(reasons))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _from_last_line(text: str, code: str) -> ParsedReply:
    *before, line = text.splitlines()
    named = rf"[\s*_]+{re.escape(code)}" if code else ""
    marks = list(re.finditer(rf"\bverdict{named}[\s*_]*[:=]", line, re.IGNORECASE))
    if not marks:
        found = None if code else _word(line)
        if found is None:
            return _unreadable("no_verdict", text)
        return ParsedReply(value=found, rationale="\n".join(before).strip())
    if len(marks) > 1:
        return _unreadable("ambiguous", text)
    if line.lstrip().startswith((">", '"', "'", "“", "`", "|")):
        return _unreadable("quoted", text)
    found = _word(line[marks[0].end() :])
    if found is None:
        return _unreadable("unknown_word", text)
    return ParsedReply(value=found, rationale="\n".join([*before, line[: marks[0].start()]]).strip())


def _word(text: str) -> VerdictValue | None:
    """The verdict that a text is, with nothing beside it but Markdown and one full stop."""
    plain = re.sub(r"[*_\-\s]+", " ", text.strip().strip("*_`#").strip()).strip()
    return WORDS.get(plain.rstrip(".!").strip().lower())
