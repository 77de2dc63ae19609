"""What a response means. One parser, for acting and for the format reward, so the two can never disagree.

    response  =  [<think>] reasoning </think>  { text | call }
    call      =  <tool_call> {"name": …, "arguments": {…}} </tool_call>

A response is read from left to right. Reasoning ends at `</think>`; a `<think>` or a lone `</think>` further on,
outside of a call, says that everything before it was reasoning too. Calls inside reasoning never run. A call is
exactly one JSON object; its extent is that of the JSON, so a `</tool_call>` inside a string is a part of the string.
Either the whole response can be read and all its calls run in order, or none does and the policy is told why: a chain
of which one link is missing would act on the wrong page.

What is understood without guessing is accepted, with a note to the policy (`parameters` for `arguments`, arguments as
JSON text, further keys, words after a call). `PROBLEMS` is the whole list of what is not; it is printed in
docs/harness.md. Wrong arguments of a known tool are no matter of format: the call fails when it runs
(`tools.check_call`).

`parse` never raises, whatever the text. The opening tag may be missing, since templates put it into the prompt.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from owrl_jax.agent.page_text import FEEDBACK_CHARS, inert, one_line
from owrl_jax.agent.tools import TOOL_NAMES
from owrl_jax.types import ToolCall

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
END_OF_TURN = "<|im_end|>"
_MARK = re.compile("|".join(map(re.escape, (THINK, END_THINK, CALL, END_CALL))))
_BLANKS = re.compile(r"\s*")


class Problem(str, enum.Enum):
    """Why a response has no meaning."""

    UNCLOSED_REASONING = "unclosed_reasoning"
    CALLS_IN_REASONING = "calls_in_reasoning"
    NO_CALL = "no_call"
    UNCLOSED_CALL = "unclosed_call"
    STRAY_CLOSING = "stray_closing"
    BROKEN_JSON = "broken_json"
    DUPLICATE_KEY = "duplicate_key"
    NOT_A_CALL = "not_a_call"
    BAD_ARGUMENTS = "bad_arguments"
    UNKNOWN_TOOL = "unknown_tool"


# What the policy is told. {which} names the call, {detail} the particular; "Nothing was run" is put in front.
PROBLEMS: dict[Problem, str] = {
    Problem.UNCLOSED_REASONING: "Your reasoning was not closed. Write </think> after it, and then your tool calls.",
    Problem.CALLS_IN_REASONING: (
        "Your tool calls stand inside your reasoning, where calls are only thoughts. Close the reasoning with </think> "
        "first, then write the calls."
    ),
    Problem.NO_CALL: (
        "There is no tool call after your reasoning. End each turn with at least one block "
        "<tool_call>{{…}}</tool_call>; call done if the task is finished."
    ),
    Problem.UNCLOSED_CALL: "{which} was not closed. End each call with </tool_call>.",
    Problem.STRAY_CLOSING: "There is a </tool_call> without its <tool_call>. Write each call between both tags.",
    Problem.BROKEN_JSON: (
        "{which} is not valid JSON: {detail}. Write one object such as "
        '{{"name": "scroll", "arguments": {{"direction": "down"}}}}.'
    ),
    Problem.DUPLICATE_KEY: "{which} has the key {detail} twice, so it is not clear which one is meant. Write it once.",
    Problem.NOT_A_CALL: (
        "{which} is {detail}. Write one object with the keys name and arguments in each <tool_call> block."
    ),
    Problem.BAD_ARGUMENTS: "{which} has {detail}. The value of arguments must be one JSON object.",
    Problem.UNKNOWN_TOOL: "{which} asks for a tool that does not exist, {detail}",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parsed:
    """A response, read.

    Attributes:
      reasoning: what stands before the last end of reasoning, without tags at its ends.
      calls: in order; empty if there is a problem.
      problem: None if the response obeys the format.
      feedback: the one line that the policy gets for the problem, else empty.
      notes: what was read in an unusual way or left out.
    """

    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    problem: Problem | None = None
    feedback: str = ""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the response obeys the format: this, and nothing else, is the format reward."""
        return self.problem is None


class _Bad(Exception):
    """A problem, and which call has it (from 1)."""

    def __init__(self, problem: Problem, detail: str = "", number: int = 0) -> None:
        super().__init__(problem.value)
        self.problem, self.detail, self.number = problem, detail, number


def parse(text: str, *, tools: Sequence[str] = TOOL_NAMES, reasoning_required: bool = True) -> Parsed:
    """Reads one response.

    Args:
      text: the decoded response, with what the prompt opened for it or without; a closing end-of-turn tag is ignored.
      tools: names on offer.
      reasoning_required: whether a response without any reasoning is refused.
    """
    text = text.removesuffix("\n").removesuffix(END_OF_TURN)
    notes: list[str] = []
    reasoning = ""
    try:
        body, blocks = _scan(text, reasoning_required)
        reasoning = text[:body].strip().removesuffix(END_THINK).removeprefix(THINK).strip()
        calls = tuple(_call(block, number, tools, notes) for number, block in enumerate(blocks, 1))
        if not calls:
            raise _Bad(Problem.CALLS_IN_REASONING if CALL in text[:body] else Problem.NO_CALL)
    except _Bad as bad:
        return Parsed(reasoning=reasoning, problem=bad.problem, feedback=_feedback(bad))
    if "done" in [call.name for call in calls[:-1]]:
        notes.append("done ends the task, so calls after it are never run")
    if CALL in text[:body]:
        notes.append("the calls inside your reasoning were not run")
    if not text.rstrip().endswith(END_CALL):
        notes.append("nobody reads the words after your last call; the answer belongs into done")
    return Parsed(reasoning=reasoning, calls=calls, notes=tuple(dict.fromkeys(notes)))


def _scan(text: str, reasoning: bool) -> tuple[int, list[Any]]:
    """Where the reasoning ends, and what follows: the JSON value of each call, or the problem that stands in its place.

    Args:
      text: the response.
      reasoning: whether it begins inside the reasoning, its opening tag written or not.
    """
    body, blocks = 0, []
    at = len(THINK) + text.index(THINK) if text.lstrip().startswith(THINK) else 0
    reasoning = reasoning or at > 0
    while True:
        if reasoning:
            end = text.find(END_THINK, at)
            if end < 0:
                raise _Bad(Problem.UNCLOSED_REASONING)
            at = body = end + len(END_THINK)
            reasoning, blocks = False, []
        mark = _MARK.search(text, at)
        if mark is None:
            return body, blocks
        at = mark.end()
        if mark[0] == CALL:
            value, at = _block(text, at)
            blocks.append(value)
        elif mark[0] == END_CALL:
            blocks.append(_Bad(Problem.STRAY_CLOSING))
        elif mark[0] == THINK:
            reasoning = True
        else:
            body, blocks = at, []


def _block(text: str, at: int) -> tuple[Any, int]:
    """The JSON value of the call whose opening tag ends at `at`, or the problem with it, and where to read on."""
    closing = text.find(END_CALL, at)
    if closing < 0:
        return _Bad(Problem.UNCLOSED_CALL), at
    start = _skip_blanks(text, at)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except _Bad as bad:
        return bad, closing + len(END_CALL)
    except RecursionError:
        return _Bad(Problem.BROKEN_JSON, "it is nested too deeply"), closing + len(END_CALL)
    except ValueError as error:  # JSONDecodeError, which has a position, and Python's limit on digits, which has not
        where = f" at character {error.pos - start + 1}" if isinstance(error, json.JSONDecodeError) else ""
        what = error.msg if isinstance(error, json.JSONDecodeError) else "a number has too many digits"
        return _Bad(Problem.BROKEN_JSON, what[:1].lower() + what[1:] + where), closing + len(END_CALL)
    end = _skip_blanks(text, end)
    if not text.startswith(END_CALL, end):
        closing = text.find(END_CALL, end)
        if closing < 0:
            return _Bad(Problem.UNCLOSED_CALL), end
        detail = f"after the object comes {_show(text[end : end + 20])}"
        return _Bad(Problem.BROKEN_JSON, detail), closing + len(END_CALL)
    return value, end + len(END_CALL)


def _call(block: Any, number: int, tools: Sequence[str], notes: list[str]) -> ToolCall:
    """The call that a JSON value describes.

    Raises:
      _Bad: if it describes none.
    """
    try:
        if isinstance(block, _Bad):
            raise block
        if not isinstance(block, dict):
            raise _Bad(Problem.NOT_A_CALL, f"{_KINDS.get(type(block), 'a bare value')} instead of an object")
        name = block.get("name")
        if not isinstance(name, str) or not name:
            raise _Bad(Problem.NOT_A_CALL, "without the name of a tool")
        arguments = _arguments(block, notes)
        if name not in tools:
            near = difflib.get_close_matches(name, tools, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise _Bad(Problem.UNKNOWN_TOOL, f"{_show(name)}.{hint} The tools are: {', '.join(tools)}.")
        return ToolCall(name=name, arguments=_clean(arguments))
    except _Bad as bad:
        bad.number = number
        raise


def _arguments(block: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    if "arguments" in block and "parameters" in block:
        raise _Bad(Problem.BAD_ARGUMENTS, "both arguments and parameters")
    key = "parameters" if "parameters" in block else "arguments"
    arguments = block.get(key)
    if key == "parameters":
        notes.append("parameters was read as arguments")
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            raise _Bad(Problem.BAD_ARGUMENTS, "a text as arguments") from None
        notes.append("arguments was a text and was read as the JSON in it")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise _Bad(Problem.BAD_ARGUMENTS, f"{_KINDS.get(type(arguments), 'a bare value')} as arguments")
    further = [k for k in block if k not in ("name", "arguments", "parameters")]
    if further:
        notes.append(f"only name and arguments of a call are read, {_show(further[0])} was not")
    return arguments


_KINDS: dict[type, str] = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "a truth value"}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _Bad(Problem.DUPLICATE_KEY, _show(key))
        made[key] = value
    return made


def _number(text: str) -> float:
    value = float(text)
    if value - value != 0:  # 1e999 is infinite
        raise _Bad(Problem.BROKEN_JSON, f"the number {_show(text)} is out of range")
    return value


def _whole_number(text: str) -> int:
    if len(text) > 18:  # what no 64-bit integer holds, nobody downstream could write down either
        raise _Bad(Problem.BROKEN_JSON, f"the number {_show(text)} is out of range")
    return int(text)


def _no_constant(text: str) -> float:
    raise _Bad(Problem.BROKEN_JSON, f"{text} is no JSON value")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_number, parse_int=_whole_number, parse_constant=_no_constant
)
_MAX_DEPTH = 16


def _clean(value: Any, depth: int = 0) -> Any:
    """The value with lone surrogates replaced, which JSON escapes can spell and nothing downstream can write."""
    if depth > _MAX_DEPTH:
        raise _Bad(Problem.BROKEN_JSON, "it is nested too deeply")
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_clean(k): _clean(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list):
        return [_clean(item, depth + 1) for item in value]
    return value


def _skip_blanks(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    return blanks.end() if blanks else at


def _show(text: str, limit: int = 40) -> str:
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def _feedback(bad: _Bad) -> str:
    # The tags in our own sentences stay as they are: they must be seen to be learned, and `guard` makes them mere text.
    sentence = PROBLEMS[bad.problem].format(
        which=f"Call {bad.number}", detail=one_line(bad.detail, FEEDBACK_CHARS // 2)
    )
    return f"Failed: Nothing was run. {sentence}"


# --- The inverse -----------------------------------------------------------------------------------------------------


def write(reasoning: str, calls: Iterable[ToolCall]) -> str:
    """The response that `parse` reads as this reasoning and these calls: how scripts and oracles speak.

    Tags inside the reasoning are defused, and brackets that could spell one inside of arguments are written as JSON
    escapes, so that what is only mentioned cannot end or begin anything.
    """
    blocks = "\n".join(f"{CALL}\n{_json(call)}\n{END_CALL}" for call in calls)
    return f"{THINK}\n{inert(reasoning).strip()}\n{END_THINK}\n\n{blocks}"


def _json(call: ToolCall) -> str:
    text = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return text if inert(text) == text else text.replace("<", "\\u003c").replace("|>", "|\\u003e")
