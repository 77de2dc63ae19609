"""How far two sources of verdicts agree, and whether a training judge is being talked into things.

`agreement` compares a judge with a truth (a program, a person, a stronger judge) over the same trajectories. Invalid
verdicts count in no ratio but their own: a judge must not look better or worse because it was down.

`drift` watches a training judge against a held-out judge that no gradient ever saw. Agreement on a fixed set is
necessary and not enough: a policy that learns to please its judge raises exactly those verdicts that the other judge
does not share. So the alarm looks at the trajectories where the two part: if the training judge were as fair as the
other, either would be the lenient one equally often, which the exact binomial (sign, McNemar) test decides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from owrl_jax.types import VerdictValue

Pair = tuple[VerdictValue, VerdictValue]
"""(the judge's verdict, the other's) on one trajectory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreement:
    """Counts over trajectories that both sources looked at; success is the positive class.

    Attributes:
      hits: both say success; `rejections`: both say failure.
      false_alarms: the judge says success, the truth failure; `misses`: the reverse.
      judge_invalid: the judge could not tell where the truth could.
      truth_invalid: the truth could not tell; such trajectories are in no other count.
    """

    hits: int = 0
    rejections: int = 0
    false_alarms: int = 0
    misses: int = 0
    judge_invalid: int = 0
    truth_invalid: int = 0

    @property
    def compared(self) -> int:
        """Trajectories on which both could tell."""
        return self.hits + self.rejections + self.false_alarms + self.misses

    @property
    def accuracy(self) -> float | None:
        """Share of equal verdicts; None if nothing was compared."""
        return _ratio(self.hits + self.rejections, self.compared)

    @property
    def precision(self) -> float | None:
        """Of what the judge calls success, how much is; None if it calls nothing so."""
        return _ratio(self.hits, self.hits + self.false_alarms)

    @property
    def recall(self) -> float | None:
        """Of what is success, how much the judge calls so; None if nothing is."""
        return _ratio(self.hits, self.hits + self.misses)

    @property
    def f1(self) -> float | None:
        """Harmonic mean of precision and recall; None where neither exists."""
        return _ratio(2 * self.hits, 2 * self.hits + self.false_alarms + self.misses)

    @property
    def false_positive_rate(self) -> float | None:
        """Of what is failure, how much the judge calls success."""
        return _ratio(self.false_alarms, self.false_alarms + self.rejections)

    @property
    def invalid_rate(self) -> float | None:
        """Of what the truth could tell, how much the judge could not."""
        return _ratio(self.judge_invalid, self.compared + self.judge_invalid)

    @property
    def kappa(self) -> float | None:
        """Cohen's kappa: agreement beyond what the two rates of success give by chance; None where undefined."""
        n = self.compared
        if not n:
            return None
        judge, truth = (self.hits + self.false_alarms) / n, (self.hits + self.misses) / n
        chance = judge * truth + (1 - judge) * (1 - truth)
        accuracy = (self.hits + self.rejections) / n
        return None if chance == 1 else (accuracy - chance) / (1 - chance)

    def lines(self) -> list[str]:
        """For people."""
        show = lambda value: "-" if value is None else f"{100 * value:.1f} %"  # noqa: E731
        return [
            f"compared         {self.compared} trajectories ({self.truth_invalid} without a truth left out)",
            f"accuracy         {show(self.accuracy)}",
            f"precision        {show(self.precision)}",
            f"recall           {show(self.recall)}",
            f"F1               {show(self.f1)}",
            f"false positives  {show(self.false_positive_rate)} of the failures",
            f"kappa            {'-' if self.kappa is None else f'{self.kappa:.2f}'}",
            f"invalid          {show(self.invalid_rate)}",
        ]


def agreement(pairs: Iterable[Pair]) -> Agreement:
    """Counts (judge, truth) pairs."""
    success, failure, invalid = VerdictValue.SUCCESS, VerdictValue.FAILURE, VerdictValue.INVALID
    counts = dict.fromkeys((f.name for f in dataclasses.fields(Agreement)), 0)
    for judge, truth in pairs:
        if truth is invalid:
            counts["truth_invalid"] += 1
        elif judge is invalid:
            counts["judge_invalid"] += 1
        elif judge is truth:
            counts["hits" if truth is success else "rejections"] += 1
        else:
            counts["misses" if judge is failure else "false_alarms"] += 1
    return Agreement(**counts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drift:
    """Whether a training judge is more lenient than a held-out one.

    Attributes:
      compared: trajectories on which both could tell.
      lenient: success for the training judge, failure for the held-out one; `strict`: the reverse.
      p: probability of at least so many lenient ones among those on which they part, were both equally so.
      gap: success rate of the training judge minus that of the other.
      alarm: `p` is below `alpha` and `gap` at least `min_gap`.
    """

    compared: int
    lenient: int
    strict: int
    p: float
    gap: float
    alarm: bool

    def line(self) -> str:
        """For people."""
        word = "ALARM: the training judge calls success what the held-out judge does not" if self.alarm else "no drift"
        return (
            f"{word} (gap {100 * self.gap:+.1f} points over {self.compared}; parted {self.lenient} to {self.strict}, "
            f"p = {self.p:.2g})"
        )


def drift(pairs: Iterable[Pair], *, alpha: float = 0.01, min_gap: float = 0.05) -> Drift:
    """Compares a training judge with a held-out judge.

    Args:
      pairs: (training judge, held-out judge) on the same recent trajectories.
      alpha: level of the test, per look; look at disjoint windows, or lower it.
      min_gap: smaller gaps are no alarm however certain.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    counts = agreement(pairs)
    parted = counts.false_alarms + counts.misses
    p = binomial_tail(counts.false_alarms, parted)
    gap = (counts.false_alarms - counts.misses) / counts.compared if counts.compared else 0.0
    return Drift(
        compared=counts.compared,
        lenient=counts.false_alarms,
        strict=counts.misses,
        p=p,
        gap=gap,
        alarm=p < alpha and gap >= min_gap,
    )


def binomial_tail(k: int, n: int) -> float:
    """Probability of at least `k` heads in `n` tosses of a fair coin, exact."""
    return sum(math.comb(n, i) for i in range(k, n + 1)) / 2**n


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
