"""Numbers of a run: `metrics.jsonl` first, every tracker a copy of it; and where wall time went.

    with Metrics(run, stage="rl", resume_at=iteration, sinks=open_sinks(("tensorboard",), run)) as metrics:
        metrics.log(iteration, {"rollout/trajectories_valid": 31, "reward/mean_per_trajectory": 0.4})

A line goes to the system in one write before any tracker hears of it, so a killed process loses none, and a torn last
line (a full disk, a power cut) is cut off by the next writer and passed over by readers. The file is never rewritten:
a run that comes back to iteration i first writes `{"resume": i}`, which makes what an earlier life of the same stage
logged from i on void. Within a step the last value of a name wins. Which names there are, and what each one counts,
stands in `metric_names`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

_log = logging.getLogger(__name__)

FILE = "metrics.jsonl"
_NAME = re.compile(r"[a-z][a-z0-9_]*(/[A-Za-z0-9_.@=+-]+)+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of one step of one stage.

    Attributes:
      step: the iteration, or the update where a stage has no iterations.
      stage: part of the run that counts its own steps (`sft`, `rl`).
      at: seconds since the epoch, of the newest value.
      values: by name; not a number and infinities are kept as such.
    """

    step: int
    stage: str
    at: float
    values: dict[str, float]


class Sink(Protocol):
    """A tracker: gets a copy of every line. What it raises ends its own service and nothing else."""

    name: str

    def write(self, step: int, values: Mapping[str, float], at: float) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """Writes the numbers of one stage of a run. Threads may share it.

    Args:
      folder: of the run; made if missing.
      stage: part of the run that counts its own steps; each may be resumed without touching the others.
      resume_at: first step that this process may log again; None for a stage that begins.
      sinks: trackers that get copies (`owrl_jax.obs.sinks.open_sinks`).
      clock: seconds since the epoch.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        stage: str = "train",
        resume_at: int | None = None,
        sinks: Sequence[Sink] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(folder) / FILE
        self.stage = stage
        self._sinks = list(sinks)
        self._clock = clock
        self._lock = threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        _cut_torn_line(self._file)
        if resume_at is not None:
            self._append({"resume": int(resume_at), "stage": stage, "at": clock()})

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes one line, then tells the trackers.

        Args:
          step: the iteration or update.
          values: numbers by name; an array without dimensions is taken as its number.

        Raises:
          ValueError: for a name that is not of the form `room/quantity_unit`.
          TypeError: for a value that is no number.
          OSError: if the line cannot be written (disk full). The file is then as it was before.
        """
        numbers = {_checked(name): _number(name, value) for name, value in values.items()}
        at = self._clock()
        written = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
        with self._lock:
            self._append({"step": int(step), "stage": self.stage, "at": at, "values": written})
            for sink in tuple(self._sinks):
                try:
                    sink.write(int(step), numbers, at)
                except Exception as error:  # noqa: BLE001 - a tracker must never end a run; the file has the line
                    self._sinks.remove(sink)
                    _log.warning("%s gets no more metrics (%s); %s goes on", sink.name, error, self.path, exc_info=True)

    def close(self) -> None:
        """Closes file and trackers. Again does nothing."""
        with self._lock:
            file, self._file = self._file, None
            if file is None:
                return
            os.close(file)
            for sink in self._sinks:
                try:
                    sink.close()
                except Exception as error:  # noqa: BLE001 - as above
                    _log.warning("%s did not close (%s); %s is complete", sink.name, error, self.path, exc_info=True)

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} was closed; make another Metrics to go on")
        rest = memoryview(json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        end = os.fstat(self._file).st_size
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # else the next writer cuts the torn line off
                os.ftruncate(self._file, end)
            raise


def read(path: str | Path) -> list[Record]:
    """The records of a run, one for each stage and step, in the order of stages' first lines and then of steps.

    Args:
      path: the run folder or its `metrics.jsonl`; a missing file has no records.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    if not path.exists():
        return []
    stages: dict[str, dict[int, Record]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break  # torn, or being written just now
            try:
                _take(json.loads(line), stages)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                _log.warning("line %d of %s is damaged and was passed over: %s", number, path, error)
    return [by_step[step] for by_step in stages.values() for step in sorted(by_step)]


def series(records: Iterable[Record], name: str, *, stage: str | None = None) -> tuple[list[int], list[float]]:
    """Steps and values of one name, where it was logged."""
    found = [r for r in records if name in r.values and stage in (None, r.stage)]
    return [r.step for r in found], [r.values[name] for r in found]


def _take(line: dict[str, Any], stages: dict[str, dict[int, Record]]) -> None:
    by_step = stages.setdefault(str(line.get("stage", "")), {})
    if "resume" in line:
        for step in [step for step in by_step if step >= int(line["resume"])]:
            del by_step[step]
        return
    step, values = int(line["step"]), {str(name): float(value) for name, value in line["values"].items()}
    before = by_step[step].values if step in by_step else {}
    by_step[step] = Record(
        step=step, stage=str(line.get("stage", "")), at=float(line.get("at", 0.0)), values={**before, **values}
    )


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name of a metric: write room/quantity_unit, such as rollout/trajectories_valid"
        )
    return name


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool | int):
        return int(value)
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"the metric {name} must be one number, got {type(value).__name__} {value!r:.80}") from None


def _cut_torn_line(file: int) -> None:
    """Cuts the file behind its last line break."""
    end = at = os.fstat(file).st_size
    while at > 0:
        start = max(0, at - 65536)
        found = os.pread(file, at - start, start).rfind(b"\n")
        if found >= 0:
            at = start + found + 1
            break
        at = start
    if at < end:
        os.ftruncate(file, at)


# --- Where wall time went -------------------------------------------------------------------------------------------

PHASES = ("browser", "engine", "learner", "judge")
NO_PHASES = ("time/total_s", "time/iteration_s")
"""Times that are sums over phases, and no phases themselves."""


class TimeSplit:
    """Wall time by phase, where phases may overlap and each may be entered many times at once, from any thread.

    Two readings. `wall_s` adds up to the time that passed: a moment in which two phases are busy is shared by them in
    equal parts, and one without any is `idle`. `busy_s` is the time in which at least one entry of a phase was open;
    it says how well the phases overlap, and adds up to more than the whole when they do.

    Args:
      phases: their names.
      clock: seconds.
    """

    def __init__(self, phases: Sequence[str] = PHASES, *, clock: Callable[[], float] = time.perf_counter) -> None:
        if "idle" in phases:
            raise ValueError("idle is what no phase claims; leave it out of the phases")
        self._clock = clock
        self._lock = threading.Lock()
        self._open = dict.fromkeys(phases, 0)
        self._wall = dict.fromkeys((*phases, "idle"), 0.0)
        self._busy = dict.fromkeys(phases, 0.0)
        self._at = clock()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The time inside the block belongs to `phase`, also where it overlaps others. May be held across awaits."""
        self._change(phase, 1)
        try:
            yield
        finally:
            self._change(phase, -1)

    def wall_s(self) -> dict[str, float]:
        """Seconds by phase and `idle`, since the beginning or the last `take`; they add up to the whole."""
        with self._lock:
            self._pass()
            return dict(self._wall)

    def busy_s(self) -> dict[str, float]:
        """Seconds in which each phase had at least one entry open, since the beginning or the last `take`."""
        with self._lock:
            self._pass()
            return dict(self._busy)

    def take(self) -> dict[str, float]:
        """Both readings as metrics (`time/browser_s`, `busy/browser_s`, `time/total_s`), and begins anew at zero."""
        with self._lock:
            self._pass()
            found = {f"time/{phase}_s": s for phase, s in self._wall.items()}
            found |= {f"busy/{phase}_s": s for phase, s in self._busy.items()}
            found["time/total_s"] = sum(self._wall.values())
            self._wall = dict.fromkeys(self._wall, 0.0)
            self._busy = dict.fromkeys(self._busy, 0.0)
            return found

    def _change(self, phase: str, by: int) -> None:
        with self._lock:
            if phase not in self._open:
                raise ValueError(f"there is no phase {phase!r}; there are {', '.join(self._open)}")
            self._pass()
            self._open[phase] += by

    def _pass(self) -> None:
        now = self._clock()
        spent, self._at = now - self._at, now
        busy = [phase for phase, n in self._open.items() if n]
        for phase in busy:
            self._wall[phase] += spent / len(busy)
            self._busy[phase] += spent
        if not busy:
            self._wall["idle"] += spent
