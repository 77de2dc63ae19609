"""Which episodes are worth imitating: for each task its shortest success, and not too many of one site.

The selection of the reference's 412 demonstrations: several attempts per task by a teacher, the fewest turns win, ties
go to fewer response tokens; then a cap per site, so that one easy shop does not make up half of the data. A pure
function of the trajectories, whatever their order. No jax.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable

from owrl_jax.types import Trajectory, VerdictValue


class MixedProtocols(ValueError):
    """Episodes of different prompts, tools, templates or viewports must not stand in one data set."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionSettings:
    """What is chosen.

    Attributes:
      per_task: successes of one task.
      per_site: tasks of one site; None takes all.
      whole: leave out episodes with a turn that broke the format: imitation would teach it.
      seed: of the order in which a site's tasks fill its cap.
    """

    per_task: int = 1
    per_site: int | None = None
    whole: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.per_task < 1 or (self.per_site is not None and self.per_site < 1):
            raise ValueError(f"per_task={self.per_task} and per_site={self.per_site} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """What was chosen, and how many were not and why (each trajectory counted once)."""

    chosen: tuple[Trajectory, ...]
    dropped: dict[str, int]


def select(trajectories: Iterable[Trajectory], settings: SelectionSettings | None = None) -> Selection:
    """The demonstrations among some trajectories, ordered by site and task.

    Raises:
      MixedProtocols: if the successes are of more than one protocol; the message counts them.
    """
    settings = settings or SelectionSettings()
    dropped: Counter[str] = Counter()
    by_task: dict[tuple[str, str], list[Trajectory]] = {}
    for trajectory in trajectories:
        why = _unfit(trajectory, settings)
        if why:
            dropped[why] += 1
        else:
            by_task.setdefault((trajectory.task.site, trajectory.task.id), []).append(trajectory)
    protocols = Counter(t.protocol for found in by_task.values() for t in found)
    if len(protocols) > 1:
        raise MixedProtocols(
            f"the successes are of {len(protocols)} protocols ({dict(protocols)}): prompts, tools or pictures differ "
            "between them; choose one with --protocol"
        )
    by_site: dict[str, list[tuple[str, str]]] = {}
    for key in by_task:
        by_site.setdefault(key[0], []).append(key)
    chosen = []
    for site, keys in sorted(by_site.items()):
        keys.sort(key=lambda key: _lot(settings.seed, *key))
        kept = keys if settings.per_site is None or not site else keys[: settings.per_site]
        dropped["site_cap"] += sum(len(by_task[key]) for key in keys[len(kept) :])
        for key in sorted(kept):
            ranked = sorted(by_task[key], key=_length)
            chosen += ranked[: settings.per_task]
            dropped["longer_success"] += len(ranked[settings.per_task :])
    return Selection(chosen=tuple(chosen), dropped={why: n for why, n in sorted(dropped.items()) if n})


def _unfit(trajectory: Trajectory, settings: SelectionSettings) -> str:
    if not trajectory.valid:
        return "invalid"
    if trajectory.verdict is None:
        return "not_judged"
    if trajectory.verdict.value != VerdictValue.SUCCESS:
        return "failure"
    if settings.whole and not all(turn.parsed for turn in trajectory.turns):
        return "malformed_turn"
    return ""


def _length(trajectory: Trajectory) -> tuple[int, int, str, int]:
    """Turns, then response tokens; the rest makes the order complete."""
    tokens = sum(len(turn.response_ids) for turn in trajectory.turns)
    return len(trajectory.turns), tokens, trajectory.group_id, trajectory.index


def _lot(seed: int, *key: str) -> str:
    """A place in an order that depends on nothing but the seed and the key."""
    return hashlib.sha256("\0".join((str(seed), *key)).encode()).hexdigest()
