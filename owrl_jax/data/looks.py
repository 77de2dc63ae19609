"""Looks: a first screenshot, a request that it serves, and what an oracle thinks of it; without all else.

    <|im_start|>hit red
    PICTURE I see red left, blue right. So red left.<|im_end|>

Fifty tokens instead of a context of three hundred, and several for one screenshot, since a page serves several goals: a
small model sees many times as many as from demonstrations in the same time. It learns to see, and to find what it was
asked for among what it saw, before it learns to act. No jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from owrl_jax.data.tasks import beside, task_words
from owrl_jax.models.tokenizer import Tokens
from owrl_jax.types import Trajectory

SEEING = "I see "
"""How the first thought of an oracle begins that says what it sees."""


def looks_of(demonstrations: Iterable[Trajectory], tokens: Tokens) -> list[Trajectory]:
    """One-turn trajectories to imitate, each picture and request once.

    None of tasks whose oracle does not begin with what it sees, and none of turns without a picture.

    Args:
      demonstrations: of tasks of local worlds; others give no look.
      tokens: the tokenizer of the run that they are for.
    """
    found: dict[tuple[str | None, str], Trajectory] = {}
    for trajectory in demonstrations:
        turn = trajectory.turns[0]
        if turn.grid is None:
            continue
        picture = "<|image_pad|>" * turn.leaf_ids.count(tokens.special.image_pad)
        for task in beside(trajectory.task):
            thought = next(iter(task_words(task)[1:]), "")
            key = (turn.screenshot, task.instruction)
            if not thought.startswith(SEEING) or key in found:
                continue
            opening, shown, words = (
                tuple(tokens.encode_template(text).ids.tolist())
                for text in ("<|im_start|>", f"<|vision_start|>{picture}<|vision_end|>", f"{thought}<|im_end|>")
            )
            asked = tuple(tokens.encode_text(f"{task.instruction}\n").tolist())
            bare = dataclasses.replace(
                turn, trunk_ids=opening, leaf_ids=(*asked, *shown), response_ids=words,
                logprobs=(0.0,) * len(words), versions=(0,) * len(words),
            )  # fmt: skip
            name = f"look-{len(found):06d}"
            found[key] = dataclasses.replace(trajectory, task=task, group_id=name, turns=(bare,))
    return list(found.values())
