"""From a data set to the samples of each update: shuffled anew in every epoch, and resumable to the bit.

A grain pipeline. Its whole state is how many updates it has given; with the data's fingerprint and the settings that
determines everything that follows, so it stands in a checkpoint as a few numbers, and a resumed run trains on exactly
what an uninterrupted one would have. Every process of many runs the same pipeline, for it carries no pixels; what a
process then builds are its own rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from owrl_jax.data.dataset import DataError, Dataset
from owrl_jax.types import Trajectory

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """Order and size.

    Attributes:
      groups: groups of trajectories in one update.
      seed: of the order; each epoch has another.
      ahead: updates that are prepared while the devices work; 0 prepares each when it is asked for.
    """

    groups: int
    seed: int = 0
    ahead: int = 2

    def __post_init__(self) -> None:
        if self.groups < 1 or self.ahead < 0:
            raise ValueError(f"groups={self.groups} must be at least 1 and ahead={self.ahead} at least 0")


class Pipeline(Iterator[T]):
    """Endless; each step gives `prepare` of the trajectories of one update.

    Args:
      dataset: what is read.
      settings: order and size.
      prepare: what is made of the trajectories of an update, in background threads; a pure function.
    Raises:
      DataError: if an update is larger than the data set: it would hold trajectories twice.
    """

    def __init__(
        self, dataset: Dataset, settings: PipelineSettings, prepare: Callable[[Sequence[Trajectory]], T]
    ) -> None:
        import grain

        if settings.groups > len(dataset):
            raise DataError(
                f"an update of {settings.groups} groups is larger than {dataset.folder}, which has {len(dataset)}: "
                "make updates smaller"
            )
        self.dataset, self.settings = dataset, settings
        flow = grain.MapDataset.source(dataset).seed(settings.seed).shuffle().repeat()
        flow = flow.batch(settings.groups, batch_fn=_joined).map(prepare)
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=max(1, settings.ahead))
        if settings.ahead == 0:
            options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._iterator = iter(flow.to_iter_dataset(options))

    def __iter__(self) -> Pipeline[T]:
        return self

    def __next__(self) -> T:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        """Where it stands, as JSON."""
        return {
            "iterator": self._iterator.get_state(),
            "fingerprint": self.dataset.facts.fingerprint,
            "groups": self.settings.groups,
            "seed": self.settings.seed,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
          DataError: if it was taken over other data or with other settings; the position would mean something else.
        """
        for name, here in self.state().items():
            if name != "iterator" and state.get(name) != here:
                raise DataError(
                    f"the position is of a run with {name}={state.get(name)!r}, here it is {here!r}: resume with the "
                    "data and settings that the run began with, or begin a new run"
                )
        self._iterator.set_state(state["iterator"])


def _joined(groups: Sequence[Sequence[Trajectory]]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group]
