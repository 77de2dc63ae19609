"""The run on the terminal: progress, reward, valid share, outcome reasons, tokens/s, time split, ETA.

    with LiveView("quickstart") as view:
        view.begin("rl", total=50, unit="iterations", done=12)
        view.ended(trajectory)                     # each episode as it ends
        view.log(13, {"reward/mean_per_trajectory": 0.4, ...})      # the dict that `Metrics.log` gets

On a terminal it is one panel, drawn at most `per_s` times a second whatever comes in; elsewhere (a file, CI) it is
plain lines, one every `every_s` seconds and at the ends of stages. Drawing never fails a run: what cannot be shown is
left out. Words of episodes (task names, outcomes) are shown as text, never as markup.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from owrl_jax.obs.metrics import NO_PHASES
from owrl_jax.types import Trajectory, VerdictValue

# Metrics that get a place of their own, in this order, by label; the first of the names that was logged is shown.
_SHOWN: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("reward/mean_per_trajectory",), "{:.3f}"),
    ("loss", ("loss/total", "sft/loss_nats_per_token"), "{:.4g}"),
    ("accuracy", ("sft/accuracy_share_per_token",), "{:.1%}"),
    ("grad norm", ("grad/norm", "sft/grad_norm"), "{:.3g}"),
    ("entropy", ("policy/entropy_mean",), "{:.3f} nats"),
    ("tokens/s", ("engine/tokens_per_s", "sft/tokens_per_s"), "{:,.0f}"),
    ("steps/s", ("browser/steps_per_s",), "{:.1f}"),
)
_BAR = 32
_RECENT = 100  # episodes that outcome counts and success share are over


@dataclasses.dataclass
class _Stage:
    name: str
    total: int | None
    unit: str
    done: int
    first: int
    began: float
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    time_s: dict[str, float] = dataclasses.field(default_factory=dict)


class LiveView:
    """A context manager; its methods may be called from any thread, and outside of the block do nothing harmful.

    Args:
      title: of the run.
      console: where to draw; by default standard error, so that what a command prints stays apart.
      per_s: drawings a second, at most.
      every_s: of plain lines, seconds between them.
      clock: seconds.
    """

    def __init__(
        self,
        title: str,
        *,
        console: Console | None = None,
        per_s: float = 4.0,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = title
        self.console = console or Console(stderr=True)
        self._per_s, self._every_s, self._clock = per_s, every_s, clock
        self._lock = threading.RLock()
        self._stage: _Stage | None = None
        self._finished: list[tuple[str, str]] = []
        self._recent: collections.deque[tuple[str, bool, bool | None]] = collections.deque(maxlen=_RECENT)
        self._episodes = 0
        self._said_at = -math.inf
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=self._panel, console=self.console, refresh_per_second=self._per_s, transient=False
            )
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        if self._live is not None:
            self._live.stop()
            self._live = None

    # --- What the run tells ----------------------------------------------------------------------------------------

    def begin(self, name: str, *, total: int | None = None, unit: str = "iterations", done: int = 0) -> None:
        """A stage begins; the one before it is over.

        Args:
          name: what people call it.
          total: of its units; None if nobody knows.
          unit: plural.
          done: units that an earlier process did already.
        """
        with self._lock:
            self.end()
            self._stage = _Stage(name=name, total=total, unit=unit, done=done, first=done, began=self._clock())
            if self._live is None:
                self._say(f"{name}: begins" + (f", {done} of {total} {unit} done" if done and total else ""))

    def log(self, done: int, values: Mapping[str, Any] | None = None) -> None:
        """`done` units are done; `values` are metrics by name, those that are shown are picked."""
        with self._lock:
            if self._stage is None:
                return
            self._stage.done = done
            for name, value in (values or {}).items():
                try:
                    number = float(value)
                except (TypeError, ValueError):
                    continue
                if name.startswith("time/") and name.endswith("_s") and name not in NO_PHASES:
                    phase = name[len("time/") : -len("_s")]
                    self._stage.time_s[phase] = self._stage.time_s.get(phase, 0.0) + number
                else:
                    self._stage.values[name] = number
            self._plain()

    def ended(self, trajectory: Trajectory) -> None:
        """An episode ended."""
        verdict = trajectory.verdict
        good = None if verdict is None else verdict.value is VerdictValue.SUCCESS
        with self._lock:
            self._episodes += 1
            self._recent.append((trajectory.outcome.key, trajectory.valid, good if trajectory.valid else None))
            self._plain()

    def note(self, text: str) -> None:
        """A line that stays, above the panel. Control characters are shown as �: they could rewrite the screen."""
        with self._lock:
            self.console.print(Text("".join(c if c.isprintable() or c == "\n" else "�" for c in text)), soft_wrap=True)

    def end(self) -> None:
        """The stage is over."""
        with self._lock:
            if self._stage is None:
                return
            stage = self._stage
            took = f"{stage.done - stage.first} {stage.unit} in {duration(self._clock() - stage.began)}"
            self._finished.append((stage.name, took))
            if self._live is None:
                self._say(self._line() + f" – over after {took}")
            self._stage = None

    # --- What is shown ---------------------------------------------------------------------------------------------

    @property
    def eta_s(self) -> float | None:
        """Seconds until the stage is over at its mean pace so far; None while nothing is known."""
        stage = self._stage
        if stage is None or stage.total is None or stage.done <= stage.first:
            return None
        pace = (self._clock() - stage.began) / (stage.done - stage.first)
        return max(0.0, pace * (stage.total - stage.done))

    def _facts(self) -> list[tuple[str, str]]:
        stage, facts = self._stage, []
        values = stage.values if stage else {}
        for label, names, form in _SHOWN:
            name = next((name for name in names if name in values), None)
            if name is not None:
                facts.append((label, form.format(values[name])))
        if self._recent:
            valid = [good for _, ok, good in self._recent if ok]
            judged = [good for good in valid if good is not None]
            facts.append(("success", f"{sum(judged)} of {len(judged)} judged" if judged else "none judged yet"))
            facts.append(("valid", f"{len(valid) / len(self._recent):.0%} of the last {len(self._recent)}"))
            facts.append(("episodes", f"{self._episodes} ended"))
            counts = collections.Counter(key for key, _, _ in self._recent)
            facts.append(("outcomes", ", ".join(f"{key} {n}" for key, n in counts.most_common(5))))
        split = stage.time_s if stage else {}
        total = sum(split.values())
        if total > 0:
            parts = sorted(split.items(), key=lambda part: -part[1])
            facts.append(("time", ", ".join(f"{name} {s / total:.0%}" for name, s in parts)))
        return facts

    def _progress(self) -> str:
        stage = self._stage
        if stage is None:
            return ""
        spent = duration(self._clock() - stage.began)
        if stage.total is None:
            return f"{stage.done} {stage.unit}, {spent}"
        eta = self.eta_s
        left = "" if eta is None else f", {duration(eta)} left"
        return f"{stage.done}/{stage.total} {stage.unit}, {spent}{left}"

    def _panel(self) -> Group:
        with self._lock:
            rows: list[Any] = [Text(self.title, style="bold")]
            rows += [Text(f"✓ {name}  {took}", style="dim") for name, took in self._finished]
            stage = self._stage
            if stage is not None:
                head = Text(f"▸ {stage.name}  ", style="bold cyan")
                if stage.total:
                    full = min(_BAR, round(_BAR * stage.done / stage.total))
                    head.append("━" * full, style="green").append("━" * (_BAR - full), style="dim")
                    head.append("  ")
                head.append(self._progress(), style="default not bold")
                rows.append(head)
            grid = Table.grid(padding=(0, 2))
            for label, value in self._facts():
                grid.add_row(Text("  " + label, style="dim"), Text(value))
            rows.append(grid)
            return Group(*rows)

    def _line(self) -> str:
        parts = [self._progress(), *(f"{label} {value}" for label, value in self._facts())]
        return f"{self._stage.name if self._stage else self.title}: " + " | ".join(filter(None, parts))

    def _plain(self) -> None:
        if self._live is None and self._stage is not None and self._clock() - self._said_at >= self._every_s:
            self._say(self._line())

    def _say(self, text: str) -> None:
        self._said_at = self._clock()
        self.console.print(Text(text), soft_wrap=True)


def duration(seconds: float) -> str:
    """`41s`, `3m 05s`, `2h 07m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
