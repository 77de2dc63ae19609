"""Random trajectories for the tests of the learner: siblings, retries, several pictures, and a model small enough."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from owrl_jax.models.processor import Patches
from owrl_jax.models.qwen3_vl.config import ModelConfig, MoEConfig, TextConfig, VisionConfig
from owrl_jax.rl.batch import TrainSample
from owrl_jax.types import Turn

IMAGE, START, END, WORDS = 120, 121, 122, 110
"""Ids of the placeholder and of the marks around it; ordinary words are below `WORDS`."""


def config(*, moe: bool = False, tied: bool = True) -> ModelConfig:
    """Two decoder layers, the first of which takes DeepStack features, and one block of vision tower."""
    text = TextConfig(
        vocab=128, model=32, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=48, mrope_section=(4, 2, 2), tied=tied,
        moe=MoEConfig(experts=4, top_k=2, mlp=16) if moe else None,
    )  # fmt: skip
    vision = VisionConfig(depth=1, model=16, heads=2, mlp=24, out=32, taps=(0,), positions=6)
    return ModelConfig(text=text, vision=vision, image_token=IMAGE, vision_start=START, vision_end=END)


GRIDS = ((4, 4), (2, 6), (4, 2))


@functools.cache
def picture(sha: str) -> Patches:
    """The patches that a hash stands for; its first digit chooses the grid."""
    h, w = GRIDS[int(sha[0]) % len(GRIDS)]
    values = np.random.default_rng(int(sha[1:])).integers(0, 256, (h * w, 768), dtype=np.uint8)
    return Patches(patches=values, grid=(h, w), tokens=h * w // 4)


def words(rng: np.random.Generator, low: int, high: int) -> tuple[int, ...]:
    return tuple(rng.integers(1, WORDS, rng.integers(low, high + 1)).tolist())


def leaf_of(sha: str | None, after: Sequence[int]) -> tuple[int, ...]:
    """A leaf: the picture, if there is one, and closing tokens."""
    shown = () if sha is None else (START, *(IMAGE,) * picture(sha).tokens, END)
    return (5, *shown, *after)


def turn(
    trunk: Sequence[int], leaf: Sequence[int], response: Sequence[int], sha: str | None, *, parsed: bool = True,
    logprobs: Sequence[float] | None = None,
) -> Turn:  # fmt: skip
    grid = None if sha is None else picture(sha).grid
    drawn = tuple(logprobs) if logprobs is not None else tuple(-0.1 - 0.01 * (i % 7) for i in response)
    return Turn(
        trunk_ids=tuple(trunk), leaf_ids=tuple(leaf), response_ids=tuple(response), logprobs=drawn,
        versions=(0,) * len(response), screenshot=sha, grid=grid, parsed=parsed,
    )  # fmt: skip


def trajectory_turns(
    rng: np.random.Generator, turns: int, *, first: tuple[int, ...], first_sha: str, malformed: float = 0.2,
    text_only: float = 0.1,
) -> tuple[Turn, ...]:  # fmt: skip
    """Turns under the paper's history rule: the response comes back in the next trunk, a retry shows its picture again.

    Args:
      first: system, tools, task and first observation.
      first_sha: the first picture.
      malformed: share of turns that cannot be parsed.
      text_only: share of later turns without a picture.
    """
    found, sha, trunk = [], first_sha, first
    for number in range(turns):
        response = (*words(rng, 1, 6), 7)
        parsed = rng.random() >= malformed
        shown = None if number and rng.random() < text_only else sha
        logprobs = [-float(x) for x in rng.random(len(response)) * 3 + 1e-3]
        found.append(turn(trunk, leaf_of(shown, (6, 8)), response, shown, parsed=parsed, logprobs=logprobs))
        trunk = (6, 8, *response, 9, *words(rng, 1, 5))
        if parsed:
            sha = f"{rng.integers(0, 9)}{rng.integers(0, 10**6)}"
    return tuple(found)


def group(
    seed: int, *, size: int = 3, turns: tuple[int, int] = (1, 5), share_picture: bool = True, system: int = 12
) -> list[TrainSample]:
    """Siblings: the same system prompt for all seeds, the same task within the group, random episodes."""
    rng = np.random.default_rng(seed)
    prompt = tuple(np.random.default_rng(77).integers(1, WORDS, system).tolist())
    first = (*prompt, *words(rng, 2, 4))
    sha = f"{seed % 9}{seed}"
    samples = []
    for index in range(size):
        own = sha if share_picture else f"{(seed + index) % 9}{1000 + 10 * seed + index}"
        made = trajectory_turns(rng, int(rng.integers(turns[0], turns[1] + 1)), first=first, first_sha=own)
        advantage = float(rng.normal()) or 1.0
        samples.append(TrainSample(name=f"g{seed}/{index}", turns=made, advantage=advantage, group=f"g{seed}"))
    return samples
