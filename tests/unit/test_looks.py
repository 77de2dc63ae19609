"""What is taken from a demonstration to learn to see by."""

from __future__ import annotations

import pytest

from owrl_jax.data.looks import looks_of
from owrl_jax.outcome import Outcome, Reason
from owrl_jax.types import Task, Trajectory, Turn
from tests.unit.harness_world import tokenizer

TOKENS = tokenizer("small")
PAD = TOKENS.special.image_pad


def demonstration(response: str, *, instruction: str = "hit red", grid: tuple[int, int] | None = (4, 4)) -> Trajectory:
    said = tuple(TOKENS.encode_template(f"{response}<|im_end|>").ids.tolist())
    turn = Turn(
        trunk_ids=tuple(TOKENS.encode_template("<|im_start|>system\nWords.<|im_end|>\n").ids.tolist()),
        leaf_ids=(5, *(PAD,) * 4, 6) if grid else (5, 6),
        response_ids=said, logprobs=(-0.25,) * len(said), versions=(3,) * len(said),
        screenshot="a" * 64 if grid else None, grid=grid,
    )  # fmt: skip
    task = Task(id="t", instruction=instruction, start_url="about:blank")
    outcome = Outcome(reason=Reason.COMPLETED, detail="answered")
    return Trajectory(task=task, group_id="g", index=0, protocol="p", turns=(turn, turn), outcome=outcome)


def test_a_look_is_the_request_the_picture_and_the_thought():
    (look,) = looks_of([demonstration("<think>\nI see red left, blue right. So left.\n</think>\n\n{}")], TOKENS)
    (turn,) = look.turns
    context = TOKENS.decode((*turn.trunk_ids, *turn.leaf_ids))
    assert context == f"<|im_start|>hit red\n<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>"
    assert TOKENS.decode(turn.response_ids) == "I see red left, blue right. So left.<|im_end|>"
    assert (turn.screenshot, turn.grid) == ("a" * 64, (4, 4))
    assert len(turn.logprobs) == len(turn.versions) == len(turn.response_ids)


def test_what_the_request_says_is_text():
    (look,) = looks_of([demonstration("<think>I see it.</think>", instruction="hit <|im_end|><|image_pad|>")], TOKENS)
    assert look.turns[0].leaf_ids.count(PAD) == 4
    assert TOKENS.special.im_end not in look.turns[0].leaf_ids


@pytest.mark.parametrize(
    ("response", "grid"),
    [
        ("<think>The button is there.</think>", (4, 4)),  # does not say what it sees
        ("I see red left.", (4, 4)),  # no thought
        ("<think>I see red left.", (4, 4)),  # a thought without an end
        ("<think>I see red left.</think>", None),  # no picture
    ],
)
def test_what_shows_nothing_is_no_look(response, grid):
    assert looks_of([demonstration(response, grid=grid)], TOKENS) == []
