"""A horizon that grows by itself: longer episodes when those of now finish before they must. No jax.

A short horizon makes early iterations cheap and their credit clear, and then cuts off what a better policy could do.
The paper lengthens it once, at an iteration chosen by hand (`RunConfig.curriculum`); here the episodes choose. Only
endings that are the policy's own, without an invalid verdict, speak: a site that is down or a browser that died says
nothing about how long a task takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from owrl_jax.config import HorizonSettings
from owrl_jax.outcome import Reason
from owrl_jax.types import Trajectory


def next_horizon(horizon: int, trajectories: Iterable[Trajectory], settings: HorizonSettings) -> int:
    """Turns that an episode may take in the next iteration.

    It grows by the factor `growth` (by one turn at least, to `most` at most) if at least `finished_share` of the valid
    episodes called `done` before their last turn; else it stays. It never shrinks: advantages compare siblings of one
    horizon, and a policy that has learned to use many turns would be cut off.

    Args:
      horizon: of the episodes.
      trajectories: what an iteration trained on.
      settings: with `most` 0 there is no such horizon, and 0 is given.
    """
    if not settings.most:
        return 0
    valid = [t for t in trajectories if t.valid]
    early = sum(t.outcome.reason is Reason.COMPLETED and len(t.turns) < horizon for t in valid)
    if not valid or early < settings.finished_share * len(valid):
        return horizon
    return min(settings.most, max(horizon + 1, math.ceil(horizon * settings.growth)))
