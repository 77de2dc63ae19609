"""Trackers that get a copy of the metrics: TensorBoard, Weights & Biases, trackio. Each is optional and imported late.

`metrics.jsonl` is the truth; a tracker that is missing, slow to start or broken is told of once and left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from owrl_jax.obs.metrics import Sink

_log = logging.getLogger(__name__)
_told: set[str] = set()


def open_sinks(
    names: Sequence[str],
    folder: str | Path,
    *,
    project: str = "owrl_jax",
    run: str = "",
    stage: str = "train",
    config: Mapping[str, Any] | None = None,
    resume_at: int | None = None,
) -> tuple[Sink, ...]:
    """The trackers of these names that can be had; the log says once which cannot, and why.

    Args:
      names: of `tensorboard`, `wandb`, `trackio`.
      folder: of the run; TensorBoard's event files go to `tensorboard/STAGE` in it.
      project, run: what trackers file the run under; `run` is the folder's name if empty. A run of the same name is
        gone on with.
      stage: as that of the `Metrics`: event files of different stages are kept apart, since a resume voids by step.
      config: settings to show beside the curves. No secrets: they leave the machine.
      resume_at: first step that may be logged again.

    Raises:
      ValueError: for another name.
    """
    folder = Path(folder)
    unknown = sorted(set(names) - SINKS.keys())
    if unknown:
        raise ValueError(f"there is no tracker {unknown[0]!r}; there are {', '.join(SINKS)}")
    found = []
    for name in dict.fromkeys(names):
        extra = "tensorboard" if name == "tensorboard" else "trackers"
        try:
            found.append(
                SINKS[name](
                    folder,
                    project=project,
                    run=run or folder.resolve().name,
                    stage=stage,
                    config=config or {},
                    resume_at=resume_at,
                )
            )
        except ModuleNotFoundError as error:
            if name not in _told:
                _told.add(name)
                _log.warning("no %s: the package %s is missing (pip install 'owrl-jax[%s]')", name, error.name, extra)
        except Exception as error:  # noqa: BLE001 - a tracker must never keep a run from starting
            _log.warning("no %s: %s", name, error, exc_info=True)
    return tuple(found)


class TensorBoard:
    """Event files in `tensorboard/STAGE` of the run. Steps from `resume_at` on of earlier files are marked as void."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, stage: str, resume_at: int | None = None, **_: Any) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard" / stage), purge_step=resume_at, flush_secs=10)

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """One point on each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at)

    def close(self) -> None:
        """Flushes and closes."""
        self._writer.close()


class Wandb:
    """Weights & Biases. Curves run over `step`, not over its own counter, which cannot go back after a resume."""

    name = "wandb"

    def __init__(self, folder: Path, *, project: str, run: str, config: Mapping[str, Any], **_: Any) -> None:
        import wandb

        id = re.sub(r"[^A-Za-z0-9_.-]", "-", run)
        self._run = wandb.init(project=project, name=run, id=id, dir=str(folder), config=dict(config), resume="allow")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """One row."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Waits until all has been sent."""
        self._run.finish()


class Trackio:
    """trackio, which keeps runs in a local database."""

    name = "trackio"

    def __init__(self, folder: Path, *, project: str, run: str, config: Mapping[str, Any], **_: Any) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=project, name=run, config=dict(config), resume="allow")

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """One row."""
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Waits until all has been written."""
        self._trackio.finish()


SINKS: dict[str, Callable[..., Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
