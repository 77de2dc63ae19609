"""Ids to what a chat client gets: bytes, stop strings, tags, in any cutting of the stream."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from owrl_jax.engine.answer import AnswerReader, TokenBytes
from owrl_jax.engine.request import Token

from .harness_world import tokenizer

CLICK = '<tool_call>\n{"name": "click", "arguments": {}}\n</tool_call>'


@functools.cache
def token_bytes(name: str) -> TokenBytes:
    return TokenBytes(tokenizer(name))


def tokens_of(text: str, name: str = "small") -> list[Token]:
    return [Token(id=int(i), logprob=-1.0, version=0) for i in tokenizer(name).encode_template(text).ids]


def reader(**fields) -> AnswerReader:
    special = tokenizer("small").special
    return AnswerReader(token_bytes("small"), end_ids=(special.im_end, special.endoftext), **fields)


def read(pieces: list[list[Token]], *, whole: bool = True, **fields):
    one = reader(**fields)
    given = [one.feed(piece) for piece in pieces] + [one.end(whole=whole)]
    return "".join(p.reasoning for p in given), "".join(p.content for p in given), [c.name for c in one.calls]


@pytest.mark.parametrize("name", ["small", "qwen"])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_bytes_of_ids_are_what_the_tokenizer_decodes(name, seed):
    tokens, of = tokenizer(name), token_bytes(name)
    ids = np.random.default_rng(seed).integers(0, len(tokens.hf), 40).tolist()
    assert b"".join(map(of, ids)).decode("utf-8", "replace") == tokens.decode(ids)
    assert of(10**7) == b""


CASES = [
    # text, fields, (reasoning, content, calls)
    ("Hello.", {}, ("", "Hello.", [])),
    ("  Hello. \n", {}, ("", "  Hello. \n", [])),
    ("<think>\nA b.\n</think>\n\nHello.", {}, ("A b.", "Hello.", [])),
    ("A b.\n</think>\n\nHello.", {"thinking": True}, ("A b.", "Hello.", [])),
    ("<think>A</think>B", {"thinking": True}, ("A", "B", [])),
    ("<think>\nnever closed ", {}, ("never closed", "", [])),
    ("</think> alone", {}, ("", "</think> alone", [])),
    ("<thin", {}, ("", "<thin", [])),
    ("a < b and <tool_ but no call", {"tools": ("click",)}, ("", "a < b and <tool_ but no call", [])),
    (f"I click.\n\n{CLICK}", {"tools": ("click",)}, ("", "I click.", ["click"])),
    (f"I click.\n\n{CLICK}", {}, ("", f"I click.\n\n{CLICK}", [])),
    (f"{CLICK}\n{CLICK} so.", {"tools": ("click",)}, ("", "", ["click", "click"])),
    (f"x \n{CLICK}", {"tools": ("done",)}, ("", f"x \n{CLICK}", [])),
    (f"<think>{CLICK}</think>no", {"tools": ("click",)}, (CLICK, "no", [])),
    ("one STOP two", {"stop": ("STOP",)}, ("", "one ", [])),
    ("one STO", {"stop": ("STOP",)}, ("", "one STO", [])),
    ("one two", {"stop": ("wo", "two", "e t")}, ("", "on", [])),
    ("<think>\nab STOP", {"stop": ("STOP",)}, ("ab", "", [])),
    (f"{CLICK} STOP more", {"stop": ("STOP",), "tools": ("click",)}, ("", "", ["click"])),
    ("é — 你好 🙂!", {"stop": ("🙂!",)}, ("", "é — 你好 ", [])),
    ("ends<|im_end|>", {}, ("", "ends", [])),
]


@pytest.mark.parametrize(("text", "fields", "wanted"), CASES)
def test_answers_at_once_and_token_by_token(text, fields, wanted):
    tokens = tokens_of(text)
    assert read([tokens], **fields) == wanted
    assert read([[token] for token in tokens], **fields) == wanted


def test_an_answer_that_was_cut_off_has_no_calls():
    assert read([tokens_of(f"x {CLICK}")], tools=("click",), whole=False) == ("", f"x {CLICK}", [])


TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CLICK]
PARTS = [*TAGS, "\n", "\n\n", " ", "word", "é", "🙂", "STOP", "ST", "<"]


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=12),
    cuts=st.lists(st.integers(1, 5), max_size=40),
    thinking=st.booleans(),
    tools=st.booleans(),
    stop=st.booleans(),
)
def test_the_pieces_of_a_stream_are_the_answer(parts, cuts, thinking, tools, stop):
    """However the tokens come, and nothing that was given is ever taken back (pieces are only joined)."""
    fields = {
        "thinking": thinking,
        "tools": ("click",) if tools else (),
        "stop": ("STOP", "d\n") if stop else (),
    }
    tokens = tokens_of("".join(parts))
    pieces, rest = [], list(tokens)
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    pieces.append(rest)
    assert read(pieces, **fields) == read([tokens], **fields)


def test_tokens_that_count():
    one = reader(stop=("two",))
    tokens = tokens_of("one two three")
    one.feed(tokens)
    said = tokenizer("small").decode([t.id for t in one.tokens])
    assert one.stopped and said.startswith("one two") and len(one.tokens) < len(tokens)
    assert not one.feed(tokens)
