"""Rewards of episodes, advantages within groups, and which groups are worth training on. Pure, no jax.

A reward is a number or nothing. Nothing (`None`) means that the episode says nothing about the policy: the browser
died, the site was down, the judge could not tell. Such members leave their group before any statistic is taken, so
that four successes and one dead browser are a group of four equal rewards, not a group with a failure in it.

    reward   -1 (setting) for too many unreadable turns in a row, 0 for any other end without `done` or for a format
             that the gate refuses, otherwise the verdict
    A_i    = (r_i - mean r) / (std r + 1e-6), sample standard deviation, over the valid members of the group

One advantage for all turns of an episode. Groups are compared as they are: of trajectories, each counted once, however
many turns it has. What is dropped is counted by reason; nothing vanishes silently.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from owrl_jax.config import RlSettings
from owrl_jax.outcome import Reason
from owrl_jax.types import Group, Trajectory, VerdictValue

STD_FLOOR = 1e-6
"""Added to the standard deviation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredTrajectory:
    """One trajectory that is trained on.

    Attributes:
      trajectory: the episode.
      reward: its own.
      advantage: against its siblings.
      group_id: of the siblings.
    """

    trajectory: Trajectory
    reward: float
    advantage: float
    group_id: str

    @property
    def parsed(self) -> tuple[bool, ...]:
        """Per turn, whether it obeyed the format."""
        return tuple(turn.parsed for turn in self.trajectory.turns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """What of an iteration is trained on, and what is not.

    Attributes:
      samples: members of the groups that were kept, siblings side by side.
      dropped: groups that were dropped, by reason: `empty`, `all_invalid`, `single_valid`, `zero_variance`,
        `mixed_protocol`.
      excluded: members that left their group, by reason: `unjudged`, `stale`, `invalid_verdict`, or `reason/detail` of
        an outcome that is not the policy's.
      rewards: of every valid member, dropped groups included.
    """

    samples: tuple[ScoredTrajectory, ...]
    dropped: Counter[str]
    excluded: Counter[str]
    rewards: tuple[float, ...]

    def metrics(self) -> dict[str, int | float]:
        """Numbers for the log; the name says what is counted."""
        turns = [len(s.trajectory.turns) for s in self.samples]
        kept = [s.reward for s in self.samples]
        found: dict[str, int | float] = {
            "rollout/groups_kept": len({s.group_id for s in self.samples}),
            "rollout/groups_dropped": sum(self.dropped.values()),
            "rollout/trajectories_valid": len(self.rewards),
            "rollout/trajectories_excluded": sum(self.excluded.values()),
            "rollout/trajectories_trained": len(self.samples),
            "rollout/turns_trained": sum(turns),
            "rollout/turns_malformed": sum(not ok for s in self.samples for ok in s.parsed),
        }
        if self.rewards:
            found["reward/mean_per_trajectory"] = math.fsum(self.rewards) / len(self.rewards)
        if kept:
            found["reward/mean_per_trained_trajectory"] = math.fsum(kept) / len(kept)
        if sum(turns):  # the same, as the gradient sees it: long episodes count by their turns
            found["reward/mean_per_trained_turn"] = math.fsum(r * n for r, n in zip(kept, turns, strict=True)) / sum(
                turns
            )
        found |= {f"rollout/groups_dropped_{reason}": n for reason, n in sorted(self.dropped.items())}
        found |= {f"rollout/trajectories_excluded/{reason}": n for reason, n in sorted(self.excluded.items())}
        return {name: float(value) for name, value in found.items()}


def reward_of(trajectory: Trajectory, settings: RlSettings) -> float | None:
    """The reward of one episode; None if there is nothing to learn from it.

    None stands for outcomes that the policy does not own, for a verdict of `invalid`, and for an episode that called
    `done` and has no verdict yet.
    """
    reward, _ = _reward(trajectory, settings)
    return reward


def _reward(trajectory: Trajectory, settings: RlSettings) -> tuple[float | None, str]:
    """The reward, or None and why."""
    outcome, verdict = trajectory.outcome, trajectory.verdict
    if not outcome.trains:
        return None, outcome.key
    if outcome.reason == Reason.FORMAT_ERROR:
        return settings.format_error_reward, ""
    if outcome.reason != Reason.COMPLETED:  # horizon, response cap, context, a safety rule: the policy did not finish
        return 0.0, ""
    gated = {"last": trajectory.turns[-1:], "every": trajectory.turns, "off": ()}[settings.format_gate]
    if not all(turn.parsed for turn in gated):
        return 0.0, ""
    if verdict is None:
        return None, "unjudged"
    if verdict.value == VerdictValue.INVALID:
        return None, "invalid_verdict"
    return float(verdict.value == VerdictValue.SUCCESS), ""


def group_advantages(rewards: Sequence[float], *, divide: bool = True) -> tuple[float, ...]:
    """`(r - mean) / (std + 1e-6)` with the sample standard deviation (ddof 1); without the division if not `divide`.

    Raises:
      ValueError: for fewer than two rewards, or one that is not finite.
    """
    if len(rewards) < 2 or not all(math.isfinite(r) for r in rewards):
        raise ValueError(f"an advantage compares at least two finite rewards, got {list(rewards)}")
    mean = math.fsum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if not divide:
        return tuple(centred)
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return tuple(c / (std + STD_FLOOR) for c in centred)


def staleness(trajectory: Trajectory, version: int) -> int:
    """How many policy versions the oldest sampled token is behind `version`; 0 for actors that are no model."""
    sampled = [v for turn in trajectory.turns for v in turn.versions if v >= 0]
    return version - min(sampled) if sampled else 0


def score(groups: Sequence[Group], settings: RlSettings, *, version: int | None = None) -> Scored:
    """Rewards and advantages of an iteration's groups.

    Args:
      groups: finished ones; a judge has seen those members that called `done`.
      settings: rewards, gate, smallest spread, staleness.
      version: of the policy that is about to be trained; given, members that are more than `max_staleness` behind
        leave their group.
    Raises:
      ValueError: if two members of a group have the same index, or a group comes twice: an episode is trained on once.
    """
    samples: list[ScoredTrajectory] = []
    dropped: Counter[str] = Counter()
    excluded: Counter[str] = Counter()
    rewards: list[float] = []
    seen: set[str] = set()
    for group in groups:
        name = group.request.group_id
        indices = [t.index for t in group.trajectories]
        if name in seen or len(set(indices)) < len(indices):
            twice = f"group {name!r}" if name in seen else f"a member of group {name!r} (indices {indices})"
            raise ValueError(f"{twice} stands twice in one iteration: an episode is trained on once")
        seen.add(name)
        members: list[tuple[Trajectory, float]] = []
        for trajectory in group.trajectories:
            reward, why = _reward(trajectory, settings)
            if reward is not None and version is not None and staleness(trajectory, version) > settings.max_staleness:
                reward, why = None, "stale"
            if reward is None:
                excluded[why] += 1
            else:
                members.append((trajectory, reward))
        values = [reward for _, reward in members]
        rewards += values
        why = _unfit(group, members, settings)
        if why:
            dropped[why] += 1
            continue
        advantages = group_advantages(values, divide=settings.advantage_std)
        samples += [
            ScoredTrajectory(trajectory=t, reward=r, advantage=a, group_id=name)
            for (t, r), a in zip(members, advantages, strict=True)
        ]
    return Scored(samples=tuple(samples), dropped=dropped, excluded=excluded, rewards=tuple(rewards))


def _unfit(group: Group, members: Sequence[tuple[Trajectory, float]], settings: RlSettings) -> str:
    """Why a group teaches nothing; empty if it does."""
    if not group.trajectories:
        return "empty"
    if not members:
        return "all_invalid"
    if len(members) < 2:
        return "single_valid"
    if len({t.protocol for t, _ in members}) > 1:
        return "mixed_protocol"
    values = [reward for _, reward in members]
    # The span and not the standard deviation: exactly equal rewards can have a deviation of a few ulp.
    return "zero_variance" if max(values) - min(values) <= settings.min_reward_spread else ""
