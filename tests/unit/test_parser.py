"""What a response means: every problem with its text, what is forgiven, and that nothing a model writes raises."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from owrl_jax.agent.parser import PROBLEMS, Problem, parse, write
from owrl_jax.agent.tools import TOOL_NAMES, Refusal, check_call
from owrl_jax.types import ToolCall

from .harness_world import call

BACK = '<tool_call>\n{"name": "go_back", "arguments": {}}\n</tool_call>'


def block(text: str) -> str:
    return f"<think>\nr\n</think>\n\n<tool_call>\n{text}\n</tool_call>"


def test_the_form_that_was_trained():
    text = (
        "<think>\nI see a box.\n</think>\n\n"
        '<tool_call>\n{"name": "click", "arguments": {"point_2d": [500, 120.5]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "write", "arguments": {"message": "a \\"b\\" <c> ü\\n"}}\n</tool_call><|im_end|>'
    )
    parsed = parse(text)
    assert parsed.ok and parsed.reasoning == "I see a box." and parsed.notes == () and parsed.feedback == ""
    assert parsed.calls == (call("click", point_2d=[500, 120.5]), call("write", message='a "b" <c> ü\n'))


# (what, response, problem, words of the feedback)
REFUSED = [
    ("nothing at all", "", Problem.UNCLOSED_REASONING, "</think>"),
    ("words alone", "Let me see.", Problem.UNCLOSED_REASONING, "</think>"),
    ("reasoning without end", "<think>\nhm", Problem.UNCLOSED_REASONING, "was not closed"),
    ("a call without reasoning", BACK, Problem.UNCLOSED_REASONING, "</think>"),
    ("a call in reasoning without end", f"<think>\n{BACK}", Problem.UNCLOSED_REASONING, "</think>"),
    ("reasoning opened again", f"<think>a</think>{BACK}<think>b", Problem.UNCLOSED_REASONING, "</think>"),
    ("a call in reasoning alone", f"<think>{BACK}</think>", Problem.CALLS_IN_REASONING, "inside your reasoning"),
    (
        "a call before a lone end",
        f"<think>a</think>{BACK}</think>",
        Problem.CALLS_IN_REASONING,
        "inside your reasoning",
    ),
    (
        "a second thought",
        f"<think>a</think>{BACK}<think>b</think>",
        Problem.CALLS_IN_REASONING,
        "inside your reasoning",
    ),
    ("no call", "<think>a</think>I am done.", Problem.NO_CALL, "call done if the task is finished"),
    ("a call without end", '<think>a</think><tool_call>{"name":"go_back"}', Problem.UNCLOSED_CALL, "</tool_call>"),
    ("half a call", '<think>a</think><tool_call>{"name":"go_b', Problem.UNCLOSED_CALL, "Call 1 was not closed"),
    ("an end without call", f"<think>a</think></tool_call>{BACK}", Problem.STRAY_CLOSING, "without its <tool_call>"),
    ("a cut object", block('{"name": "go_back", "arguments": {}'), Problem.BROKEN_JSON, "Call 1 is not valid JSON"),
    ("single quotes", block("{'name': 'go_back'}"), Problem.BROKEN_JSON, "double quotes"),
    ("a trailing comma", block('{"name": "go_back",}'), Problem.BROKEN_JSON, "character"),
    ("a code fence", block('```json\n{"name": "go_back"}\n```'), Problem.BROKEN_JSON, "not valid JSON"),
    ("python", block("go_back()"), Problem.BROKEN_JSON, '{"name": "scroll"'),
    ("an empty block", block(""), Problem.BROKEN_JSON, "not valid JSON"),
    ("two objects", block('{"name": "go_back"} {"name": "go_back"}'), Problem.BROKEN_JSON, "after the object comes"),
    (
        "a raw line break",
        block('{"name": "write", "arguments": {"message": "a\nb"}}'),
        Problem.BROKEN_JSON,
        "control char",
    ),
    ("NaN", block('{"name": "wait", "arguments": {"seconds": NaN}}'), Problem.BROKEN_JSON, "NaN"),
    (
        "an infinite number",
        block('{"name": "wait", "arguments": {"seconds": 1e999}}'),
        Problem.BROKEN_JSON,
        "out of range",
    ),
    (
        "a huge number",
        block('{"name": "wait", "arguments": {"seconds": ' + "9" * 5000 + "}}"),
        Problem.BROKEN_JSON,
        "out of",
    ),
    ("a deep hole", block("[" * 100_000), Problem.BROKEN_JSON, "deeply"),
    (
        "deep arguments",
        block('{"name": "done", "arguments": {"response": ' + "[" * 50 + "]" * 50 + "}}"),
        Problem.BROKEN_JSON,
        "deeply",
    ),
    ("one name twice", block('{"name": "go_back", "name": "done"}'), Problem.DUPLICATE_KEY, "'name' twice"),
    (
        "one argument twice",
        block('{"name": "wait", "arguments": {"seconds": 1, "seconds": 9}}'),
        Problem.DUPLICATE_KEY,
        "'seconds'",
    ),
    ("a list", block('[{"name": "go_back"}]'), Problem.NOT_A_CALL, "a list instead of an object"),
    ("a text", block('"go_back"'), Problem.NOT_A_CALL, "a text"),
    ("null", block("null"), Problem.NOT_A_CALL, "a bare value"),
    ("no name", block('{"arguments": {}}'), Problem.NOT_A_CALL, "without the name"),
    ("a name that is none", block('{"name": 7, "arguments": {}}'), Problem.NOT_A_CALL, "without the name"),
    (
        "arguments in a list",
        block('{"name": "click", "arguments": [1, 2]}'),
        Problem.BAD_ARGUMENTS,
        "a list as arguments",
    ),
    (
        "arguments in words",
        block('{"name": "click", "arguments": "at 1,2"}'),
        Problem.BAD_ARGUMENTS,
        "a text as arguments",
    ),
    (
        "both names of arguments",
        block('{"name": "wait", "arguments": {}, "parameters": {}}'),
        Problem.BAD_ARGUMENTS,
        "both",
    ),
    ("an unknown tool", block('{"name": "clik", "arguments": {}}'), Problem.UNKNOWN_TOOL, "Did you mean click?"),
    ("a foreign tool", block('{"name": "call_user", "arguments": {}}'), Problem.UNKNOWN_TOOL, ", ".join(TOOL_NAMES)),
    ("a wrong case", block('{"name": "Click", "arguments": {}}'), Problem.UNKNOWN_TOOL, "Did you mean click?"),
]


@pytest.mark.parametrize(
    ("response", "problem", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_what_has_no_meaning_is_refused_and_explained(response, problem, words):
    parsed = parse(response)
    assert parsed.problem is problem and not parsed.ok and parsed.calls == ()
    assert words in parsed.feedback
    assert parsed.feedback.startswith("Failed: Nothing was run. ")
    assert "\n" not in parsed.feedback and len(parsed.feedback) <= 512


def test_the_table_is_whole_and_each_problem_has_one_text():
    assert set(PROBLEMS) == set(Problem) == {row[2] for row in REFUSED}
    assert len(set(PROBLEMS.values())) == len(PROBLEMS)


@pytest.mark.parametrize("response", [row[1] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_one_bad_call_stops_all_of_them(response):
    """A good call before or after a bad one does not run: a chain with a link missing acts on the wrong page."""
    good = '<tool_call>{"name": "close_tab"}</tool_call>'
    if response.count("</think>") == 1 and response.count("<tool_call>") == 1 and response.startswith("<think>"):
        head, tail = response.split("</think>")
        if "tool_call" in tail:
            assert not parse(f"{head}</think>{good}{tail}").ok
            assert not parse(response + good).ok


# (what, response, calls, words of a note)
FORGIVEN = [
    ("no opening tag", f"r</think>{BACK}", 1, None),
    ("text before the call", f"<think>r</think> So: {BACK}", 1, None),
    ("on one line", '<think>r</think><tool_call>{"name": "go_back"}</tool_call>', 1, None),
    ("no arguments", block('{"name": "go_back"}'), 1, None),
    ("null arguments", block('{"name": "go_back", "arguments": null}'), 1, None),
    ("parameters", block('{"name": "go_back", "parameters": {}}'), 1, "parameters was read as arguments"),
    ("arguments as JSON text", block('{"name": "go_back", "arguments": "{}"}'), 1, "read as the JSON in it"),
    ("further keys", block('{"name": "go_back", "arguments": {}, "id": 3}'), 1, "'id' was not"),
    ("words afterwards", f"<think>r</think>{BACK} That should do.", 1, "nobody reads"),
    ("calls in reasoning too", f"<think>{BACK}</think>{BACK}", 1, "inside your reasoning were not run"),
    ("calls after done", block('{"name": "done", "arguments": {"response": "x"}}') + BACK, 2, "done ends the task"),
    ("an end of turn", f"<think>r</think>{BACK}<|im_end|>\n", 1, None),
]


@pytest.mark.parametrize(("response", "count", "note"), [row[1:] for row in FORGIVEN], ids=[row[0] for row in FORGIVEN])
def test_what_is_understood_without_guessing_runs(response, count, note):
    parsed = parse(response)
    assert parsed.ok and len(parsed.calls) == count
    assert len(parsed.notes) == (note is not None) and (note is None or note in parsed.notes[0])


def test_tags_inside_of_strings_are_words():
    message = "</tool_call> <tool_call> </think> <think> <|im_end|>"
    parsed = parse(block(json.dumps({"name": "write", "arguments": {"message": message}})) + BACK)
    assert parsed.calls == (call("write", message=message), call("go_back"))


def test_wrong_arguments_are_a_failing_call_not_a_format_error():
    parsed = parse(block('{"name": "click", "arguments": {"point_2d": [1]}}'))
    assert parsed.ok
    refusal = check_call(parsed.calls[0])
    assert isinstance(refusal, Refusal) and "two numbers [x, y]" in refusal.message


def test_a_shorter_list_of_tools_is_the_list():
    parsed = parse(block('{"name": "drag", "arguments": {}}'), tools=("click", "done"))
    assert parsed.problem is Problem.UNKNOWN_TOOL and "The tools are: click, done." in parsed.feedback


def test_reasoning_may_be_optional():
    assert parse(BACK, reasoning_required=False).calls == (call("go_back"),)
    assert parse(f"<think>{BACK}", reasoning_required=False).problem is Problem.UNCLOSED_REASONING
    assert parse(f"a{BACK}</think>", reasoning_required=False).problem is Problem.CALLS_IN_REASONING


def test_feedback_never_repeats_a_tag_that_the_response_made_up():
    parsed = parse(block('{"name": "</tool_response><|im_end|>x", "arguments": {}}'))
    assert parsed.problem is Problem.UNKNOWN_TOOL
    assert "</tool_response>" not in parsed.feedback and "<|im_end|>" not in parsed.feedback


pieces = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|im_end|>",
        '{"name": "done"',
        '"arguments": {',
        "}",
        "[",
        '"response": "x"',
        ",",
        "1e99999",
        "-",
        "\\ud83d",
        '"',
        "\\",
        "\n",
        "\0",
        "NaN",
        BACK,
    ]
)


@settings(deadline=None, max_examples=600)
@given(st.lists(st.one_of(pieces, st.text(max_size=4)), max_size=14).map("".join), st.booleans())
def test_nothing_raises_and_every_answer_is_whole(text, required):
    parsed = parse(text, reasoning_required=required)
    assert parsed.ok == bool(parsed.calls) == (not parsed.feedback)
    assert "\n" not in parsed.feedback
    for one in parsed.calls:
        assert one.name in TOOL_NAMES
        check_call(one)
    msgspec.json.encode(parsed.calls)  # what was parsed can be written down


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False,
    width=32) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
tool_calls = st.builds(
    ToolCall, name=st.sampled_from(TOOL_NAMES), arguments=st.dictionaries(st.text(max_size=8), json_values, max_size=3)
)


@settings(deadline=None, max_examples=150)
@given(st.one_of(st.text(max_size=30), pieces), st.lists(tool_calls, min_size=1, max_size=4))
def test_what_is_written_is_read_as_it_was_meant(reasoning, calls):
    parsed = parse(write(reasoning, calls))
    wanted = tuple(msgspec.json.decode(json.dumps([c.arguments for c in calls]).encode()))
    assert parsed.ok and [c.name for c in parsed.calls] == [c.name for c in calls]
    assert [c.arguments for c in parsed.calls] == list(wanted)
