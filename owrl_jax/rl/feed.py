"""Which groups are played, and which are trained on next: the staleness rule, in one place. No jax.

Policy version v is the parameters after v iterations. A group may be admitted while

    accepted + running  <  (η + v + 1) · batch          η = max_staleness

where `accepted` counts all groups ever taken into training or waiting for it, and `running` those being played.
With η = 0 that is the synchronous loop: an iteration plays its batch, and one more for each group that turns out to
teach nothing. With η ≥ 1 the pool is never drained: it plays up to η batches ahead, and what is left over waits.
A waiting group whose oldest token falls more than η versions behind is discarded and counted, and its place is played
again, so nothing staler is ever trained on.

A task whose groups end without one valid member again and again (its page kills every browser) is not played any more:
quarantined, not fatal. If an iteration has played `cap` times its batch, it trains on the groups that it has.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from owrl_jax.types import Group, GroupRequest, Task

QUARANTINE_AFTER = 2
"""Groups in a row without a valid member, after which a task is not played any more."""


class NothingToLearn(RuntimeError):
    """An iteration's groups were all rejected; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waiting:
    """An accepted group.

    Attributes:
      group: the group.
      version: of its oldest token.
    """

    group: Group
    version: int


class GroupFeed:
    """Makes wishes for the pool, takes its groups, gives batches to the learner.

    Args:
      draw: the task of a draw by its number.
      judge: why a group teaches nothing; empty if it is accepted.
      oldest: version of a group's oldest token.
      batch: groups of an iteration.
      size: members of a group.
      max_staleness: η.
      cap: an iteration plays at most this many times its batch.
      version: of the policy now.
      chosen: iterations whose groups are chosen already, by a process that got further than its last checkpoint.
      next_number: of the first draw.
      name: of a group, by its draw.
    """

    def __init__(
        self,
        *,
        draw: Callable[[int], Task],
        judge: Callable[[Group], str],
        oldest: Callable[[Group], int],
        batch: int,
        size: int,
        max_staleness: int = 0,
        cap: float = 4.0,
        version: int = 0,
        chosen: int = 0,
        next_number: int = 0,
        name: Callable[[int], str] = "g{:07d}".format,
    ) -> None:
        self._draw, self._judge, self._oldest, self._name = draw, judge, oldest, name
        self.batch, self.size, self.max_staleness, self.cap = batch, size, max_staleness, cap
        self.version, self.next_number = version, next_number
        self.running = 0
        # By the learner; a full batch per iteration, whatever its real number was.
        self._taken = max(version, chosen) * batch
        self.waiting: list[Waiting] = []
        self.rejected: Counter[str] = Counter()  # of the iteration that is being collected
        self.played = 0
        self.quarantined: set[str] = set()
        self._barren: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._closed = False

    # --- The pool's side -------------------------------------------------------------------------------------------

    async def requests(self) -> AsyncIterator[GroupRequest]:
        """Wishes, each made when the rule allows one more and the pool has a place for it."""
        while True:
            while not self._may_admit():
                if self._closed:
                    return
                self._changed.clear()
                await self._changed.wait()
            if self._closed:
                return
            task = self._next_task()
            self.running += 1
            yield GroupRequest(task=task, group_id=self._name(self.next_number - 1), n=self.size)

    def take(self, group: Group, *, played: bool = True) -> None:
        """A finished group. `played`: by this process (else it comes from the journal)."""
        if played:
            self.running -= 1
            self.played += 1
        task = group.request.task.id
        if group.valid:
            self._barren[task] = 0
        elif played:  # what an earlier process met may have been an outage, and is over
            self._barren[task] += 1
            if self._barren[task] >= QUARANTINE_AFTER:
                self.quarantined.add(task)
        why = self._judge(group)
        if why:
            self.rejected[why] += 1
        else:
            self.waiting.append(Waiting(group=group, version=self._oldest(group)))
        self._changed.set()

    def close(self) -> None:
        """No wishes any more."""
        self._closed = True
        self._changed.set()

    # --- The learner's side ----------------------------------------------------------------------------------------

    async def next_batch(self) -> tuple[Group, ...]:
        """The groups of the next iteration, oldest first.

        Raises:
          NothingToLearn: if the cap is reached without one accepted group.
        """
        while True:
            self._discard_stale()
            if len(self.waiting) >= self.batch:
                break
            if self._exhausted() and self.running == 0:
                if not self.waiting:
                    raise NothingToLearn(
                        f"none of {self.played} groups taught anything: {dict(self.rejected)}. With zero_variance all "
                        "members of each group did equally well: choose easier or harder tasks, larger groups or a "
                        "higher temperature. With all_invalid something is broken: see the outcomes in the journal"
                    )
                break
            self._changed.clear()
            await self._changed.wait()
        self.waiting.sort(key=lambda w: (w.version, w.group.request.group_id))
        taken, self.waiting = self.waiting[: self.batch], self.waiting[self.batch :]
        self._taken = (self.version + 1) * self.batch
        return tuple(w.group for w in taken)

    def advance(self, version: int) -> Counter[str]:
        """An iteration has been trained: the policy is `version` now. Gives what was rejected meanwhile, by reason."""
        self.version = version
        self._taken = max(self._taken, version * self.batch)
        rejected, self.rejected = self.rejected, Counter()
        self.played = 0
        self._changed.set()
        return rejected

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"next_number": self.next_number, "quarantined": sorted(self.quarantined)}

    # --- The rule --------------------------------------------------------------------------------------------------

    def _may_admit(self) -> bool:
        ahead = self._taken + len(self.waiting) + self.running
        return ahead < (self.max_staleness + self.version + 1) * self.batch and not self._exhausted()

    def _exhausted(self) -> bool:
        return self.played + self.running >= self.cap * self.batch * (1 + self.max_staleness)

    def _discard_stale(self) -> None:
        fresh = [w for w in self.waiting if self.version - w.version <= self.max_staleness]
        if len(fresh) < len(self.waiting):
            self.rejected["stale"] += len(self.waiting) - len(fresh)
            self.waiting = fresh
            self._changed.set()

    def _next_task(self) -> Task:
        for _ in range(1000):
            task = self._draw(self.next_number)
            self.next_number += 1
            if task.id not in self.quarantined:
                return task
        raise NothingToLearn(f"all of 1000 drawn tasks are quarantined: {_some(sorted(self.quarantined))}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
