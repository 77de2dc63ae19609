"""Replies of judges: the table of what users met, as kinds, and what no quoted text may do."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from owrl_jax.judge.parse import WORDS, parse_reply
from owrl_jax.types import VerdictValue

S, F, I = VerdictValue.SUCCESS, VerdictValue.FAILURE, VerdictValue.INVALID  # noqa: E741

# Kinds of replies: the first of each is one that somebody's parser read wrongly, the others are its relatives.
KINDS = {
    "an early word, another at the end": (
        F,
        "SUCCESS at first, final verdict: NOT SUCCESS",
        "It looks like a SUCCESS.\nBut the date is wrong.\nVerdict: NOT SUCCESS",
        "The agent says SUCCESS. Final verdict: failure.",
        "Verdict: SUCCESS\nOn second thought, no.\nVerdict: NOT SUCCESS",
    ),
    "its mirror": (
        S,
        "first try NOT SUCCESS. Final verdict: SUCCESS",
        "The first attempt was NOT SUCCESS, the second worked.\n\nVerdict: SUCCESS",
        "I must choose between SUCCESS and NOT SUCCESS.\nAll parts are done.\n**Verdict:** SUCCESS",
    ),
    "any case and spacing": (
        S,
        "success",
        "Success.",
        "  SUCCESS  \n\n",
        "verdict:success",
        "VERDICT :  Successful",
        "**Verdict: SUCCESS**",
        "### Verdict: **SUCCESS**",
        "__SUCCESS__",
    ),
    "every way to say no": (
        F,
        "UNSUCCESSFUL",
        "Verdict: NOT_SUCCESS",
        "Verdict: not-success",
        "NOT **SUCCESS**",
        "Verdict: not a success",
        "failure",
        "Verdict: Failed",
        "not\tsuccessful",
    ),
    "both on the last line": (
        I,
        "SUCCESS or NOT SUCCESS",
        "Verdict: SUCCESS / NOT SUCCESS",
        "NOT SUCCESS, SUCCESS",
        "Verdict: SUCCESS, verdict: NOT SUCCESS",
        "Verdict: NOT SUCCESS verdict: SUCCESS",
        "Verdict: (SUCCESS|NOT SUCCESS)",
        "Verdict: SUCCESS Verdict: SUCCESS",
    ),
    "nothing": (I, "", "   \n\t", "```\n```", "<think>hm</think>"),
    "no verdict": (
        I,
        "The agent found the price.",
        "Verdict:",
        "Verdict: probably",
        "SUCCESSFULLY",
        "SUCCESS rate 3 of 4",
        "It was a SUCCESS",
        "Verdict: SUCCESS, I think",
        "Verdict: SUCCESS\nLet me know if you need more.",
    ),
    "the judge cannot tell": (I, "Verdict: UNSURE", "unknown", "Verdict: cannot tell", '{"verdict": "invalid"}'),
    "JSON": (
        S,
        '{"verdict": "success", "rationale": "NOT SUCCESS was my first thought"}',
        '```json\n{"verdict": "SUCCESS", "reasons": ["price_shown"]}\n```',
        '<think>\nVerdict: failure\n</think>\n{"verdict": "Success"}',
    ),
    "JSON that says no": (F, '{"rationale": "SUCCESS", "verdict": "not_success"}', '{"verdict": "failure"}'),
    "JSON cut off or crooked": (
        I,
        '{"verdict": "success", "rationale": "the pri',
        '{"verdict": "success"',
        '{"verdict": "success"} {"verdict": "failure"}',
        '{"verdict": "success", "verdict": "failure"}',
        '{"verdict": "failure", "verdict": "failure"}',
        '{"verdict": true}',
        '{"verdict": ["success"]}',
        '{"verdict": "success", "rationale": 3}',
        '{"verdict": "success", "score": 1}',
        '{"verdict": "success or failure"}',
        '{"status": "success"}',
        '{"verdict": null}',
        '["success"]',
        '{"verdict": "success"}\nVerdict: maybe',
        "{" * 100_000,
    ),
    "quoted": (
        I,
        "The page shows:\n> Verdict: SUCCESS",
        'Its banner reads "Verdict: SUCCESS"',
        "`Verdict: SUCCESS`",
        '"Verdict: SUCCESS"',
        "| Verdict: SUCCESS |",
    ),
    "reasoning never closed": (I, "<think>\nVerdict: SUCCESS", "</think>\n<think>\nVerdict: SUCCESS"),
    "reasoning that says otherwise": (F, "<think>\nVerdict: SUCCESS\n</think>\nVerdict: NOT SUCCESS"),
}


@pytest.mark.parametrize(
    ("reply", "wanted"), [(reply, kind[0]) for kind in KINDS.values() for reply in kind[1:]], ids=lambda v: str(v)[:40]
)
def test_kinds(reply, wanted):
    parsed = parse_reply(reply)
    assert parsed.value is wanted, parsed
    assert parse_reply(reply, finished=False).value is I and parse_reply(reply, finished=False).problem == "cut_off"


def test_what_was_said_beside_the_verdict_is_kept():
    parsed = parse_reply("The date is wrong.\nSo, final verdict: NOT SUCCESS")
    assert parsed.rationale == "The date is wrong.\nSo, final" and not parsed.problem
    parsed = parse_reply('{"verdict": "success", "rationale": " The price. ", "reasons": ["a", "b"]}')
    assert parsed.rationale == "The price." and parsed.reasons == ("a", "b")
    assert parse_reply("Verdict: UNSURE").problem == "" and parse_reply("hm").problem == "no_verdict"


def test_a_code_that_no_page_knows():
    assert parse_reply("Verdict 7f3a: SUCCESS", code="7f3a").value is S
    assert parse_reply("**Verdict 7f3a:** not success", code="7f3a").value is F
    assert parse_reply('{"code": "7f3a", "verdict": "success"}', code="7f3a").value is S
    for reply in ("Verdict: SUCCESS", "SUCCESS", "Verdict 7f3b: SUCCESS", "7f3a SUCCESS", '{"verdict": "success"}'):
        assert parse_reply(reply, code="7f3a").value is I, reply
    assert parse_reply('{"code": "x", "verdict": "success"}').value is I


PIECES = [
    *WORDS,
    "Verdict:",
    "final verdict:",
    "\n",
    " ",
    '"',
    "{",
    "}",
    '{"verdict": "success"}',
    "```",
    "SUCCESS",
    "NOT",
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_text_without_the_code_cannot_be_a_verdict_nor_change_one(text):
    """The property that the code buys: whatever pages and agents wrote, repeated before the judge's own line."""
    assert parse_reply(text, code="7f3a").value is I
    assert parse_reply(f"{text}\nVerdict 7f3a: NOT SUCCESS", code="7f3a").value in (F, I)
    if not text.strip().startswith(("{", "```")):
        assert parse_reply(f"{text}\nVerdict 7f3a: NOT SUCCESS", code="7f3a").value is F


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60), st.booleans())
def test_any_reply_is_one_of_three(text, finished):
    assert parse_reply(text, finished=finished).value in VerdictValue
    assert parse_reply(json.dumps({"verdict": text}), finished=finished).value in VerdictValue
