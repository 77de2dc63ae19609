"""Trajectories with pictures for the tests of data sets and of supervised training: a task that can be learned.

Each episode shows one of a few plain pictures a turn, and the response names its colour, so a model that looks can
reproduce every response, and one that does not cannot.
"""

from __future__ import annotations

import hashlib
import io

import numpy as np
from PIL import Image

from owrl_jax.outcome import Outcome, Reason
from owrl_jax.types import Task, Trajectory, Turn, Verdict, VerdictValue

IMAGE, START, END, STOP = 120, 121, 122, 7
COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0))


def png(colour: int) -> bytes:
    """A plain picture of 32 x 32 pixels: 2 x 2 patches, one token."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), COLOURS[colour]).save(buffer, "PNG")
    return buffer.getvalue()


PICTURES = {hashlib.sha256(png(c)).hexdigest(): png(c) for c in range(len(COLOURS))}
NAMES = tuple(PICTURES)


def trajectory(
    number: int, *, turns: int = 2, site: str = "shop", task: str = "", success: bool = True, tokens: int = 2,
    parsed: bool = True, reason: tuple[Reason, str] = (Reason.COMPLETED, "answered"), protocol: str = "p",
) -> Trajectory:  # fmt: skip
    rng = np.random.default_rng(number)
    made = []
    for step in range(turns):
        colour = int(rng.integers(len(COLOURS)))
        response = (*(20 + colour,) * (tokens - 1), STOP)
        history = (9, *made[-1].response_ids, 9) if made else (10, 11, 12)
        made.append(
            Turn(
                trunk_ids=history,
                leaf_ids=(5, START, IMAGE, END, 6),
                response_ids=response,
                logprobs=(-0.5,) * len(response),
                versions=(0,) * len(response),
                screenshot=NAMES[colour],
                grid=(2, 2),
                parsed=parsed or step > 0,
            )
        )
    value = VerdictValue.SUCCESS if success else VerdictValue.FAILURE
    return Trajectory(
        task=Task(id=task or f"t{number}", instruction="name the colour", start_url="about:blank", site=site),
        group_id=f"g{number}", index=0, protocol=protocol, turns=tuple(made),
        outcome=Outcome(reason=reason[0], detail=reason[1]), verdict=Verdict(value=value, judge="test"),
    )  # fmt: skip
