"""Where the time of an episode went: one phase at a time, in milliseconds, nothing counted twice.

Phases of the harness are measured here; the sandbox reports what it did within `step` and `reset` itself, and that is
kept under dotted names (`step.settle`), so that the undotted ones add up to the whole.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping


class TimeLedger:
    """Adds up wall time by phase.

    Attributes:
      phase: the one that is running, or the last one that ran.
      ms: milliseconds by phase.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = self._phase_began = clock()
        self.phase = "queue"
        self.ms: dict[str, float] = {}

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The time inside the block belongs to `phase`, however the block is left."""
        self.phase, self._phase_began = phase, self._clock()
        try:
            yield
        finally:
            self._add(phase, self.phase_ms)

    @property
    def phase_ms(self) -> float:
        """Since the current phase began."""
        return (self._clock() - self._phase_began) * 1e3

    def within(self, phase: str, parts: Mapping[str, float]) -> None:
        """Adds what the sandbox says it did within a phase."""
        for name, ms in parts.items():
            self._add(f"{phase}.{name}", ms)

    def mark(self) -> dict[str, float]:
        """A copy, to take the difference from later."""
        return dict(self.ms)

    def since(self, mark: Mapping[str, float]) -> dict[str, float]:
        """What was added after `mark`."""
        spent = {name: ms - mark.get(name, 0.0) for name, ms in self.ms.items()}
        return {name: ms for name, ms in spent.items() if ms > 0}

    def total(self) -> dict[str, float]:
        """All phases, the whole since the start as `total`, and what no phase claims as `other`."""
        total = (self._clock() - self._began) * 1e3
        claimed = sum(ms for name, ms in self.ms.items() if "." not in name)
        return {**self.ms, "other": max(total - claimed, 0.0), "total": total}

    def _add(self, name: str, ms: float) -> None:
        self.ms[name] = self.ms.get(name, 0.0) + ms
