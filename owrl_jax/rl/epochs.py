"""Which samples make up which update: epochs over an iteration's trajectories, reshuffled, nothing left over.

A pure function of seed, iteration and epoch, so that a run that was stopped between two updates goes on with the same
ones. An update is made of whole trajectories (by default whole groups, which share the most tokens and whose advantages
balance); its size follows `turns_per_update` and the turns of an epoch are dealt out evenly. The reference fills
updates of exactly 256 turns and drops the rest of each epoch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from owrl_jax.rl.batch import TrainSample


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """One update of an iteration.

    Attributes:
      epoch, number: which, both from 0; `number` counts within the epoch.
      of: updates of the epoch.
      samples: what it is made of.
    """

    epoch: int
    number: int
    of: int
    samples: tuple[TrainSample, ...]


def updates(
    samples: Sequence[TrainSample],
    *,
    turns_per_update: int,
    epochs: int,
    seed: int,
    iteration: int,
    unit: Literal["group", "trajectory"] = "group",
) -> Iterator[UpdatePlan]:
    """All updates of an iteration, in order.

    Args:
      samples: of the iteration; those without a loss are left out.
      turns_per_update: turns with a loss per update, about.
      epochs: passes.
      seed, iteration: of the shuffles.
      unit: what stays together. A unit is never cut; one that is larger than `turns_per_update` is an update.
    """
    if turns_per_update < 1 or epochs < 1:
        raise ValueError(f"turns_per_update={turns_per_update} and epochs={epochs} must be at least 1")
    units: dict[str, list[TrainSample]] = {}
    for number, sample in enumerate(samples):
        if sample.live:
            # A sample without siblings is a unit of its own.
            name = f"g{sample.group}" if unit == "group" and sample.group else f"n{number}"
            units.setdefault(name, []).append(sample)
    members = list(units.values())
    if not members:
        return
    turns = np.array([sum(len(sample.live) for sample in unit) for unit in members])
    count = int(min(max(1, round(turns.sum() / turns_per_update)), len(members)))
    for epoch in range(epochs):
        order = np.random.default_rng([seed, iteration, epoch]).permutation(len(members))
        for number, chosen in enumerate(_dealt(order, turns, count)):
            found = tuple(sample for at in chosen for sample in members[at])
            yield UpdatePlan(epoch=epoch, number=number, of=count, samples=found)


def _dealt(order: np.ndarray, turns: np.ndarray, count: int) -> list[list[int]]:
    """Cuts the shuffled units into `count` runs, none empty, of as equal numbers of turns as whole units allow."""
    ends = np.cumsum(turns[order])
    cuts = [0]
    for number in range(1, count):
        target = ends[-1] * number / count
        cut = int(np.argmin(np.abs(ends - target))) + 1
        cuts.append(min(max(cut, cuts[-1] + 1), len(order) - (count - number)))
    cuts.append(len(order))
    return [order[a:b].tolist() for a, b in itertools.pairwise(cuts)]
