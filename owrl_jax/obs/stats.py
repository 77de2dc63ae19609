"""Statistics of an evaluation: what may be said of success rates, and of two checkpoints on the same tasks.

Evaluations are kept as lines of `evals.jsonl` in the run folder, one for each pass over a task set. An attempt is a
success, a failure, or invalid (`None`: the sandbox or the judge failed it, not the policy). Two rates are always given:
over all attempts, where an invalid one counts as no success, and over valid ones. Nothing here is picked by looking at
it: intervals of one rate are Wilson's, intervals over tasks come from a bootstrap of whole tasks, pass@k is the
unbiased estimator, and two checkpoints are compared pair by pair with McNemar's exact test.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from owrl_jax.outcome import Reason
from owrl_jax.types import Trajectory, VerdictValue

_log = logging.getLogger(__name__)

FILE = "evals.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try at one task in an evaluation.

    Attributes:
      task: id of the task.
      seed: of the world's instance; None for live sites.
      site, level: for tables.
      template: what several tasks are instances of; they rise and fall together, so intervals draw whole templates.
      success: None if it was invalid.
      attempt: number of the try at this task and seed, from 0.
      outcome: `reason/detail` of the ending.
    """

    task: str
    seed: int | None = None
    site: str = ""
    level: float | None = None
    template: str = ""
    success: bool | None
    attempt: int = 0
    outcome: str = ""

    @property
    def key(self) -> tuple[str, int | None, int]:
        """What must agree for two attempts of different checkpoints to be a pair."""
        return self.task, self.seed, self.attempt

    @property
    def unit(self) -> str:
        """What is drawn as a whole in a bootstrap."""
        return f"{self.site} {self.template}" if self.template else self.task


def attempt_of(trajectory: Trajectory, *, attempt: int = 0) -> Attempt:
    """The attempt that a judged trajectory is.

    Only an ending that is the policy's own counts, and no verdict stands for failure only where the policy did not even
    claim to be done: a completed episode without a verdict is invalid.
    """
    task, verdict = trajectory.task, trajectory.verdict
    said: bool | None = None
    if trajectory.valid and verdict is not None:
        said = verdict.value is VerdictValue.SUCCESS
    elif trajectory.valid and trajectory.outcome.reason is not Reason.COMPLETED:
        said = False
    return Attempt(
        task=task.id,
        seed=task.seed,
        site=task.site,
        level=task.difficulty,
        template=str(task.metadata.get("template", "")),
        success=said,
        attempt=attempt,
        outcome=trajectory.outcome.key,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One pass over a task set: one line of `evals.jsonl`.

    Attributes:
      at: iteration whose parameters were evaluated; -1 before any training.
      name: of the task set (`held_out`, `miniwob`).
      tasks: the attempts.
      protocol: id of prompts, tools and budgets; passes of different protocols are never compared.
      stage: part of the run that counts iterations.
    """

    at: int
    name: str
    tasks: tuple[Attempt, ...]
    protocol: str = ""
    stage: str = ""


class NotComparable(ValueError):
    """Two evaluations that say nothing about each other; the message says why."""


def append_evaluation(folder: str | Path, evaluation: Evaluation) -> None:
    """Adds a line to `evals.jsonl` of a run and syncs it."""
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    line = msgspec.json.encode(evaluation) + b"\n"
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line  # a torn line of a crash must not swallow this one
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_evaluations(folder: str | Path) -> list[Evaluation]:
    """The evaluations of a run in the order of `at`; of two with the same `stage`, `at` and `name` the later line.

    Args:
      folder: the run, or the file itself; without the file there are none. Damaged lines are passed over and logged.
    """
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    if not path.exists():
        return []
    found: dict[tuple[str, int, str], Evaluation] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            one = msgspec.json.decode(line, type=Evaluation)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            _log.warning("line %d of %s is damaged and was passed over: %s", number, path, error)
            continue
        found.pop((one.stage, one.at, one.name), None)
        found[one.stage, one.at, one.name] = one
    return sorted(found.values(), key=lambda one: one.at)


# --- One rate -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """A share of successes with its interval.

    Attributes:
      successes, n: of how many.
      low, high: Wilson's interval.
    """

    successes: int
    n: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Not a number when there is nothing to divide by."""
        return self.successes / self.n if self.n else math.nan

    def __str__(self) -> str:
        if not self.n:
            return "none of 0"
        return f"{self.share:.1%} [{self.low:.1%}, {self.high:.1%}] ({self.successes} of {self.n})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Success:
    """Both rates of a set of attempts, and how many were invalid."""

    over_all: Rate
    over_valid: Rate
    invalid: int


def rate(successes: int, n: int, *, confidence: float = 0.95) -> Rate:
    """A share with its Wilson interval."""
    low, high = wilson(successes, n, confidence=confidence)
    return Rate(successes=successes, n=n, low=low, high=high)


def wilson(successes: int, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a binomial share (Wilson 1927); (0, 1) when nothing was tried.

    Raises:
      ValueError: unless 0 <= successes <= n and 0 < confidence < 1.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie between 0 and n, got {successes} of {n}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, such as 0.95, got {confidence}")
    if n == 0:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    p = successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At the ends the exact bound is 0 or 1; rounding must not leave it beside.
    return (0.0 if successes == 0 else max(0.0, middle - half)), (1.0 if successes == n else min(1.0, middle + half))


def success(attempts: Iterable[Attempt], *, confidence: float = 0.95) -> Success:
    """Success over all attempts and over valid ones."""
    said = [one.success for one in attempts]
    good, valid = sum(s is True for s in said), sum(s is not None for s in said)
    return Success(
        over_all=rate(good, len(said), confidence=confidence),
        over_valid=rate(good, valid, confidence=confidence),
        invalid=len(said) - valid,
    )


def table(attempts: Iterable[Attempt], by: Literal["site", "level", "task"]) -> dict[str, Success]:
    """Success by site, level or task, in the order of their names; levels as numbers."""
    rows: dict[tuple[float, str], list[Attempt]] = collections.defaultdict(list)
    for one in attempts:
        value = getattr(one, by)
        if by == "level":
            rows[(math.inf, "unknown") if value is None else (float(value), f"{value:g}")].append(one)
        else:
            rows[0.0, str(value) or "unknown"].append(one)
    return {name: success(rows[order, name]) for order, name in sorted(rows)}


# --- Several tries per task -----------------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k tries drawn from n, of which c succeeded, is a success.

    The unbiased estimator 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, section 2.1).

    Raises:
      ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over tasks with its bootstrap interval.

    Attributes:
      value: not a number when no task is left.
      low, high: percentile interval.
      units: how many tasks or templates it is over.
    """

    value: float
    low: float
    high: float
    units: int


def mean_pass_at_k(attempts: Iterable[Attempt], k: int, *, samples: int = 2000, seed: int = 0) -> Estimate:
    """pass@k over tasks (an instance is a task of its own) with a bootstrap interval.

    Over valid attempts; a task with fewer than k of them says nothing about k tries and is left out.
    """
    tries: dict[tuple[str, int | None], list[bool]] = collections.defaultdict(list)
    for one in attempts:
        if one.success is not None:
            tries[one.task, one.seed].append(one.success)
    values = [pass_at_k(len(said), sum(said), k) for said in tries.values() if len(said) >= k]
    return bootstrap(values, samples=samples, seed=seed)


def success_over_units(attempts: Iterable[Attempt], *, samples: int = 2000, seed: int = 0) -> Estimate:
    """Success over valid attempts with an interval from drawing whole templates (tasks, where there are none).

    Wider than Wilson's where instances of one template succeed together: there they are no independent tries. Single
    tries are drawn where all are of one template.
    """
    tries: dict[str, list[bool]] = collections.defaultdict(list)
    for one in attempts:
        if one.success is not None:
            tries[one.unit].append(one.success)
    return _over_units(tries, samples=samples, seed=seed)


def _over_units(values: Mapping[str, Sequence[float]], *, samples: int, seed: int) -> Estimate:
    """The mean over all values, with an interval from drawing whole units; from single values where there is one unit.

    A unit with more values weighs more, in the mean and in every drawing. A lone unit would be drawn every time, and
    the interval be a point.
    """
    sums = [(sum(some), len(some)) for some in values.values()]
    if len(sums) == 1:
        sums = [(value, 1) for value in next(iter(values.values()))]
    found = bootstrap(sums, statistic=_ratio, samples=samples, seed=seed)
    return dataclasses.replace(found, units=len(values))


def _mean(drawn: np.ndarray) -> np.ndarray:
    return drawn.mean(axis=1)


def _ratio(drawn: np.ndarray) -> np.ndarray:
    return drawn[..., 0].sum(axis=1) / drawn[..., 1].sum(axis=1)


def bootstrap(
    values: Sequence[float] | Sequence[tuple[float, float]],
    *,
    statistic: Callable[[np.ndarray], np.ndarray] = _mean,
    confidence: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """Percentile bootstrap over units (tasks, groups): the same numbers for the same seed.

    Args:
      values: one number, or one pair of numbers, per unit.
      statistic: from drawn values [samples, units, …] to [samples].
      confidence: of the interval.
      samples: how often units are drawn anew.
      seed: of the drawing.
    """
    row = np.asarray(values, np.float64)
    units = len(row)
    if units == 0:
        return Estimate(value=math.nan, low=math.nan, high=math.nan, units=0)
    generator = np.random.default_rng(seed)
    most = max(1, 1_000_000 // units)  # rows drawn at a time: 8 MiB for any number of units
    drawn = np.concatenate(
        [
            statistic(row[generator.integers(0, units, (min(most, samples - at), units))])
            for at in range(0, samples, most)
        ]
    )
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(value=float(statistic(row[None])[0]), low=float(low), high=float(high), units=units)


# --- Two checkpoints ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paired:
    """Two checkpoints on the same tasks, seeds and tries.

    Attributes:
      pairs: valid in both.
      dropped: pairs in which one side was invalid.
      unmatched: attempts that only one side has.
      both, only_first, only_second, neither: how the pairs fell out.
      difference: second minus first, over pairs.
      low, high: bootstrap interval of the difference, drawing whole templates, or pairs of a lone template.
      p_value: two-sided exact McNemar: of the pairs that differ, how surprising this split or a more uneven one is.
    """

    pairs: int
    dropped: int
    unmatched: int
    both: int
    only_first: int
    only_second: int
    neither: int
    difference: float
    low: float
    high: float
    p_value: float

    def __str__(self) -> str:
        if not self.pairs:
            return "no pairs"
        return (
            f"{100 * self.difference:+.1f} points [{100 * self.low:+.1f}, {100 * self.high:+.1f}], "
            f"p = {self.p_value:.3g} ({self.only_second} gained, {self.only_first} lost of {self.pairs} pairs)"
        )


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided p-value that as many pairs fell to either side by a fair coin; 1 if none differ."""
    if only_first < 0 or only_second < 0:
        raise ValueError(f"counts of pairs cannot be negative, got {only_first} and {only_second}")
    n = only_first + only_second
    tail = sum(math.comb(n, i) for i in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**n)


def compare(first: Evaluation, second: Evaluation, *, samples: int = 2000, seed: int = 0) -> Paired:
    """Compares two evaluations pair by pair.

    Raises:
      NotComparable: if they are of different task sets or protocols, have no task in common, or name an attempt twice.
    """
    if first.name != second.name:
        raise NotComparable(f"{first.name!r} and {second.name!r} are different task sets")
    if first.protocol != second.protocol:
        raise NotComparable(
            f"protocols differ ({first.protocol!r} and {second.protocol!r}): prompts, tools or budgets changed between "
            "the two, so a difference would not be the checkpoints'. Evaluate both under one protocol"
        )
    one, other = _by_key(first), _by_key(second)
    shared = [key for key in one if key in other]
    if not shared:
        raise NotComparable(f"the two evaluations of {first.name!r} share no task, seed and attempt")
    kept: list[tuple[bool, bool]] = []
    units: dict[str, list[int]] = collections.defaultdict(list)
    for key in shared:
        a, b = one[key].success, other[key].success
        if a is not None and b is not None:
            kept.append((a, b))
            units[one[key].unit].append(int(b) - int(a))
    counts = collections.Counter(kept)
    interval = _over_units(units, samples=samples, seed=seed)
    return Paired(
        pairs=len(kept),
        dropped=len(shared) - len(kept),
        unmatched=len(one) + len(other) - 2 * len(shared),
        both=counts[True, True],
        only_first=counts[True, False],
        only_second=counts[False, True],
        neither=counts[False, False],
        difference=(counts[False, True] - counts[True, False]) / len(kept) if kept else math.nan,
        low=interval.low,
        high=interval.high,
        p_value=mcnemar_exact(counts[True, False], counts[False, True]),
    )


def _by_key(evaluation: Evaluation) -> dict[tuple[str, int | None, int], Attempt]:
    found = {one.key: one for one in evaluation.tasks}
    if len(found) < len(evaluation.tasks):
        twice = next(key for key, n in collections.Counter(one.key for one in evaluation.tasks).items() if n > 1)
        raise NotComparable(f"{evaluation.name!r} at {evaluation.at} has {twice} twice: number the attempts")
    return found
