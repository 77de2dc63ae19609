"""Admission by pressure: whether this host can take another episode, and why not.

A fixed number of episodes is either too small on a quiet evening or too large when pages are heavy. The gauge therefore
looks at two things the host really runs out of, processor time and memory, smooths the first, and uses two thresholds
for
each: refusing starts above the high one and ends below the low one, so that the answer does not flutter. A host on
which nothing of ours runs always admits one episode: waiting for somebody else's load to end could wait for ever.

Invariant: the gauge only answers; it holds no places and ends nothing. Memory is the host's or, where it is smaller,
the control group's limit (a container sees the whole host otherwise).
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable

_MIB = 1024 * 1024
_CGROUP = pathlib.Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PressureConfig:
    """Thresholds; a fraction of 1.0 or more never refuses.

    Attributes:
      cpu_high, cpu_low: smoothed share of all cores in use, refusing from `cpu_high` until below `cpu_low`.
      mem_high, mem_low: the same for memory in use.
      tau_s: time constant of the smoothing of the processor share, seconds.
    """

    cpu_high: float = 0.97
    cpu_low: float = 0.85
    mem_high: float = 0.92
    mem_low: float = 0.85
    tau_s: float = 8.0

    def __post_init__(self) -> None:
        for name in ("cpu", "mem"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if not 0 < low <= high:
                raise ValueError(f"{name}_low must be positive and at most {name}_high, got {low} and {high}")
        if not self.tau_s > 0:
            raise ValueError(f"tau_s must be positive, got {self.tau_s}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """One look at the host: shares between 0 and 1, and memory in MiB."""

    cpu: float
    mem: float
    mem_total_mib: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PressureReading:
    """What `/health` and the scheduler see.

    Attributes:
      available: whether another episode is admitted now.
      reason: empty, or one of full, cpu, memory, closing.
      running, queued: episodes holding a lease, and requests waiting for one.
      rejected_recently: requests turned away in the last minute.
      cpu_ema, mem: smoothed share of the cores and share of the memory in use.
    """

    available: bool
    reason: str
    running: int
    queued: int
    rejected_recently: int
    cpu_ema: float
    mem: float


def host_load() -> Load:
    """The load now. The processor share covers the time since the previous call (0.0 at the first)."""
    import psutil

    memory = psutil.virtual_memory()
    total, used = memory.total, memory.total - memory.available
    limit = _cgroup_bytes("memory.max")
    current = _cgroup_bytes("memory.current")
    if limit and current is not None and limit < total:
        total, used = limit, max(0, current - (_cgroup_reclaimable() or 0))
    return Load(cpu=psutil.cpu_percent(interval=None) / 100.0, mem=used / total, mem_total_mib=total / _MIB)


class PressureGauge:
    """Smoothing and hysteresis over a source of `Load`.

    Args:
      config: thresholds.
      source: where a load comes from (the host, or a script in tests).
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: PressureConfig,
        *,
        source: Callable[[], Load] = host_load,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._source = source
        self._clock = clock
        first = source()
        self.cpu_ema = first.cpu
        self.mem = first.mem
        self._sampled_s = clock()
        self._refusing: set[str] = set()
        self._rejections: list[float] = []

    def sample(self) -> None:
        """Takes one look; call it every half second or so."""
        load, now = self._source(), self._clock()
        weight = 1.0 - math.exp(-max(0.0, now - self._sampled_s) / self._config.tau_s)
        self.cpu_ema += weight * (load.cpu - self.cpu_ema)
        self.mem = load.mem
        self._sampled_s = now
        self._latch("memory", self.mem, self._config.mem_low, self._config.mem_high)
        self._latch("cpu", self.cpu_ema, self._config.cpu_low, self._config.cpu_high)

    def refusal(self, running: int) -> str:
        """Why another episode is not admitted: memory, cpu, or empty if it is."""
        if running == 0:
            return ""
        return next((name for name in ("memory", "cpu") if name in self._refusing), "")

    def rejected(self) -> None:
        """Counts a request that was turned away."""
        self._rejections.append(self._clock())

    def reading(self, *, running: int, queued: int, full: bool, closing: bool = False) -> PressureReading:
        """All of it in one record."""
        now = self._clock()
        self._rejections = [t for t in self._rejections if now - t <= 60.0]
        reason = "closing" if closing else "full" if full else self.refusal(running)
        return PressureReading(
            available=not reason,
            reason=reason,
            running=running,
            queued=queued,
            rejected_recently=len(self._rejections),
            cpu_ema=self.cpu_ema,
            mem=self.mem,
        )

    def _latch(self, name: str, value: float, low: float, high: float) -> None:
        if high >= 1.0:
            self._refusing.discard(name)
        elif value >= high:
            self._refusing.add(name)
        elif value < low:
            self._refusing.discard(name)


def _cgroup_bytes(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:  # no control group of version 2 here
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


def _cgroup_reclaimable() -> int | None:
    try:
        rows = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    return next((int(r.split()[1]) for r in rows if r.startswith("inactive_file ")), None)
