"""Batches of several processes: one plan, and every process builds the rows that its own devices hold.

Process 0 says what an update is made of; that is a few hundred kilobytes of token ids, and it is broadcast. The plan of
rows is a pure function of it (`packing.plan_batches`), so every process makes the same one, and a number computed from
it is compared before anything is trained. Pixels never pass through process 0: each process reads the pictures of its
own rows. With one process all of this is `packing.stream`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from owrl_jax.models.qwen3_vl.config import ModelConfig
from owrl_jax.rl.batch import PackedBatch, TrainSample
from owrl_jax.rl.packing import BatchPlan, PackSettings, Pictures, build, plan_batches
from owrl_jax.sharding import Sharder


class HostsDisagree(RuntimeError):
    """Processes that should have made the same plan have made different ones."""


def shared(value: bytes | None) -> bytes:
    """What process 0 gives, on every process. All of them call it; the others give None."""
    if jax.process_count() == 1:
        assert value is not None
        return value
    own = value if jax.process_index() == 0 and value is not None else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(own))))
    buffer = np.zeros(size, np.uint8)
    if jax.process_index() == 0:
        buffer[:] = np.frombuffer(own, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(buffer)).astype(np.uint8).tobytes()


def shared_samples(samples: Sequence[TrainSample] | None) -> tuple[TrainSample, ...]:
    """The samples of process 0, on every process."""
    own = None if samples is None else msgspec.json.encode([dataclasses.asdict(sample) for sample in samples])
    if jax.process_count() == 1:
        return tuple(samples or ())
    return msgspec.json.decode(shared(own), type=tuple[TrainSample, ...])


def own_rows(shard: Sharder | None, rows: int) -> slice:
    """The rows of a batch that this process's devices hold.

    Raises:
      HostsDisagree: if they do not lie side by side; then the mesh does not follow the order of processes.
    """
    if shard is None or jax.process_count() == 1:
        return slice(0, rows)
    sharding = shard.sharding(("batch",), (rows,))
    places = sharding.addressable_devices_indices_map((rows,)).values()
    held = sorted({index[0].indices(rows)[:2] for index in places if index})
    for (_, end), (start, _) in itertools.pairwise(held):
        if end != start:
            raise HostsDisagree(f"this process holds rows {held} of {rows}: make the mesh from jax.devices() in order")
    return slice(held[0][0], held[-1][1])


def stream(
    samples: Sequence[TrainSample],
    config: ModelConfig,
    *,
    pictures: Pictures,
    settings: PackSettings,
    shard: Sharder | None,
) -> Iterator[PackedBatch]:
    """The micro-batches of an update, one at a time, with the rows of this process alone.

    Args:
      samples: the same on every process (`shared_samples`).
      config: of the model.
      pictures: patches by content hash; asked for this process's rows only.
      settings: shapes of whole batches, all processes together.
      shard: of the learner; None on one device.
    Raises:
      HostsDisagree: if processes have made different plans.
    """
    plans = plan_batches(samples, config, settings)
    _agree(plans)
    rows = own_rows(shard, settings.rows)
    for plan in plans:
        batch = build(plan, config, pictures=pictures, settings=settings, rows=rows)
        yield dataclasses.replace(
            batch,
            again=lambda some: stream(some, config, pictures=pictures, settings=settings, shard=shard),
        )


def _agree(plans: Sequence[BatchPlan]) -> None:
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256()
    for plan in plans:
        digest.update(repr((plan.shape, [[(p.sample, p.turn) for p in row.paths] for row in plan.rows])).encode())
    own = np.frombuffer(digest.digest(), np.uint8)
    everyone = np.asarray(multihost_utils.process_allgather(own))
    different = [number for number, other in enumerate(everyone) if not np.array_equal(other, everyone[0])]
    if different:
        raise HostsDisagree(
            f"processes {different} have planned other batches than process 0: data, settings or code differ on them"
        )
