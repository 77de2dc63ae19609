"""Looks: the first screenshot of a demonstration and what its oracle thought of it, without all else.

    <|im_start|>hit red
    PICTURE I see red left, blue right. So left.<|im_end|>

Fifty tokens instead of a context of three hundred: in the time of one demonstration a small model sees six pictures. It
learns to see, and to find what it was asked for among what it saw, before it learns to act. No jax.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from owrl_jax.models.tokenizer import Tokens
from owrl_jax.types import Trajectory

_THOUGHT = re.compile(r"<think>\s*(I see .*?)\s*</think>", re.DOTALL)


def looks_of(group: Sequence[Trajectory], tokens: Tokens) -> list[Trajectory]:
    """One-turn trajectories to imitate; none of those whose first thought does not begin with what it sees.

    Args:
      group: siblings; their turns' ids are of `tokens`.
      tokens: the run's tokenizer.
    """
    found = []
    for trajectory in group:
        turn = trajectory.turns[0]
        thought = _THOUGHT.search(tokens.decode(turn.response_ids))
        if thought is None or turn.grid is None:
            continue
        picture = "<|image_pad|>" * turn.leaf_ids.count(tokens.special.image_pad)
        opening, shown, words = (
            tuple(tokens.encode_template(text).ids.tolist())
            for text in ("<|im_start|>", f"<|vision_start|>{picture}<|vision_end|>", f"{thought[1]}<|im_end|>")
        )
        asked = tuple(tokens.encode_text(f"{trajectory.task.instruction}\n").tolist())
        bare = dataclasses.replace(
            turn, trunk_ids=opening, leaf_ids=(*asked, *shown), response_ids=words,
            logprobs=(0.0,) * len(words), versions=(0,) * len(words),
        )  # fmt: skip
        found.append(dataclasses.replace(trajectory, turns=(bare,)))
    return found
