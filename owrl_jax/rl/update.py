"""One optimiser step: gradients of micro-batches added up, divided once, applied once.

    state, metrics = learner.update(state, pack(samples, …))

The sum over micro-batches is not a mean of means: losses are sums whose normaliser is known from the samples, so the
step does not depend on how turns were packed. Every micro-batch of one shape runs one compiled program.

A sample whose loss or gradient is not finite is left out. It cannot be masked: zero times NaN is NaN, and in a packed
row it can reach its neighbours through the products of a shared tile. So a micro-batch whose gradient is not finite
adds nothing; its samples are tried one by one, those that fail alone are named in a warning, and the update is packed
again without them and computed from the start. What is applied is exactly the step without them, normaliser included.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.qwen3_vl.table import build_tree
from owrl_jax.models.run import Params
from owrl_jax.rl.batch import Counts, PackedBatch, Responses, TrainSample
from owrl_jax.rl.loss import LossSettings, Sums, normaliser
from owrl_jax.rl.optimizer import Leaves, OptimizerSettings, adam, step
from owrl_jax.rl.trainable import Trainable, module_of

log = logging.getLogger(__name__)


Loss = Callable[[Any, Any, Responses], tuple[Any, Sums]]
"""(log-probs, entropies, responses) -> (sum, statistics): `LossSettings` or `NllSettings`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """What an update changes; a plain tree of arrays.

    Attributes:
      params: the model's parameters.
      adapters: LoRA by name; None without.
      moments: Adam's, of what is trained.
      updates: int32; how many there were. The learning rate is a function of it.
    """

    params: Params
    adapters: Leaves | None
    moments: Any
    updates: Any


class NothingFinite(FloatingPointError):
    """No gradient of an update is finite, or none of the samples that were tried is to blame."""


class Learner:
    """A model and how it is trained. Holds no state but compiled programs.

    Args:
      model: configuration and way of running.
      optimizer: how parameters move.
      loss: MM-GRPO and its alternatives (`LossSettings`), or supervised training (`NllSettings()`).
      trainable: what is trained.
      temperature: logits are divided by it, as the sampler's were.
      chunk: response positions a row whose logits exist at one time.
      moments_on_host: keeps Adam's moments in host memory between updates.
    """

    def __init__(
        self,
        model: Qwen3VL,
        optimizer: OptimizerSettings,
        *,
        loss: Loss | None = None,
        trainable: Trainable | None = None,
        temperature: float = 1.0,
        chunk: int = 256,
        moments_on_host: bool = False,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.loss: Loss = LossSettings() if loss is None else loss
        self.trainable = trainable or Trainable()
        self.temperature, self.chunk, self.moments_on_host = temperature, chunk, moments_on_host
        self._rows = self.trainable.rows(model.config)
        self._decayed = self.trainable.decayed(model.config)
        spread = self._leaf_shardings()
        moments = self._moment_shardings(spread)
        self._micro = jax.jit(self._micro_step, donate_argnums=2, out_shardings=(spread, None, None))
        self._apply = jax.jit(self._apply_step, donate_argnums=(0, 1), out_shardings=(spread, moments, None))
        self._score = jax.jit(self._logprobs)
        zeros = lambda leaves: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), leaves)  # noqa: E731
        self._zeros = jax.jit(zeros, out_shardings=spread)

    # --- State --------------------------------------------------------------------------------------------------

    def init(self, params: Params, *, key: jax.Array | None = None) -> TrainState:
        """The state before the first update. `key`: of new adapters, where there are any."""
        config = self.model.config
        key = jax.random.key(0) if key is None else key
        shardings = self._adapter_shardings()
        adapters = jax.jit(lambda key: self.trainable.start(config, key), out_shardings=shardings)(key)
        moving, _ = self.trainable.split(config, params, adapters)
        moments = jax.jit(adam(self.optimizer).init, out_shardings=self._moment_shardings(self._leaf_shardings()))(
            moving
        )
        return TrainState(
            params=params, adapters=adapters, moments=self._stored(moments), updates=jnp.zeros((), jnp.int32)
        )

    def abstract(self, dtype: Any = jnp.float32) -> TrainState:
        """Shapes, dtypes and shardings of a state, for restoring and for compiling ahead of time."""
        key = jax.random.key(0)
        shapes = jax.eval_shape(lambda key: self._shapes(key, dtype), key)
        spread = self._leaf_shardings()
        if not spread:
            here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
        assert self.model.run.shard is not None
        whole = jax.sharding.NamedSharding(self.model.run.shard.mesh, jax.sharding.PartitionSpec())
        moments = self._moment_shardings(spread)
        if self.moments_on_host:
            moments = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), moments)
        shardings = TrainState(
            params=self.model.run.shard.tree(self.model.config),
            adapters=self._adapter_shardings(),
            moments=moments,
            updates=whole,
        )
        return jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, shardings)

    def policy(self, state: TrainState) -> Params:
        """The parameters to sample from and to export: adapters merged in, if there are any."""
        return self.trainable.merged(self.model.config, state.params, state.adapters)

    # --- Steps --------------------------------------------------------------------------------------------------

    def update(
        self, state: TrainState, batches: Iterable[PackedBatch], *, learning_rate: float | None = None
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimiser step over all of these micro-batches, which come from one call of `pack`.

        Args:
          state: it is used up: its buffers become those of the new one.
          learning_rate: takes the place of the optimiser's, for a curriculum; warm-up and schedule stay.
        Returns:
          the new state, and numbers for the log.
        Raises:
          ValueError: without any batch.
          NothingFinite: if no sample gives a finite gradient.
        """
        config = self.model.config
        moving, frozen = self.trainable.split(config, state.params, state.adapters)
        dropped: list[str] = []
        while True:
            gradients, sums, counts, samples, poisoned, again = self._accumulate(moving, frozen, batches)
            if not poisoned:
                break
            bad = self._blame(moving, frozen, poisoned)
            names = [samples[number].name for number in sorted(bad)]
            if not bad or len(bad) == len([s for s in samples if s.live]):
                raise NothingFinite(
                    f"the gradient is not finite {'of any sample' if bad else 'although that of each sample is'}: "
                    "look at the parameters (a checkpoint with NaN?), the learning rate and the compute dtype"
                )
            log.warning("left out of the update, their loss or gradient is not finite: %s", ", ".join(names))
            dropped += names
            batches = again([sample for number, sample in enumerate(samples) if number not in bad])
        z = normaliser(samples)
        if not z > 0:
            raise ValueError("these samples have no turn with a loss: nothing to learn from")
        moments = self._fetched(state.moments)
        rate = jnp.float32(self.optimizer.learning_rate if learning_rate is None else learning_rate)
        moving, moments, facts = self._apply(moving, moments, gradients, state.updates, jnp.float32(z), rate)
        params, adapters = self.trainable.join(config, moving, frozen)
        updated = TrainState(params=params, adapters=adapters, moments=self._stored(moments), updates=state.updates + 1)
        facts = {name: float(value) for name, value in jax.device_get(facts).items()}
        metrics = {**_summary(sums, z), **facts, **_counted(counts, samples), "update/normaliser": z}
        metrics["update/trajectories_dropped_nonfinite"] = float(len(dropped))
        metrics["update/count"] = float(updated.updates)
        return updated, metrics

    def gradients(self, state: TrainState, batches: Iterable[PackedBatch]) -> tuple[float, Leaves]:
        """Loss and gradients of what is trained, by name, both divided by Z; for tests and diagnostics."""
        moving, frozen = self.trainable.split(self.model.config, state.params, state.adapters)
        gradients, sums, _, samples, poisoned, _ = self._accumulate(moving, frozen, batches)
        if poisoned:
            raise NothingFinite("the gradient is not finite")
        z = normaliser(samples)
        return _summary(sums, z)["loss/total"], jax.tree.map(lambda g: g / z, gradients)

    def logprobs(self, params: Params, batches: Iterable[PackedBatch]) -> list[np.ndarray]:
        """Log-probs [B, R] of the targets of each batch under `params`, by the program that also trains."""
        return [np.asarray(self._score(params, self._put(batch))[0]) for batch in batches]

    def traced(self, row: PackedBatch, rows: int, dtype: Any = jnp.float32) -> dict[str, jax.stages.Traced]:
        """The very programs that `update` and `logprobs` run, traced but not compiled; no array is made.

        Args:
          row: one row of the batches, such as `packing.empty_row`; its shapes and dtypes count, not its values.
          rows: B of a batch, all processes together.
          dtype: of the parameters.
        Returns:
          "micro_step", "apply" and "score" (log-probs alone), for the mesh of the model, which may be of devices that
          are not here.
        """
        state = self.abstract(dtype)
        moving, frozen = self.trainable.split(self.model.config, state.params, state.adapters)
        wide = lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32, sharding=s.sharding)  # noqa: E731
        gradients = jax.tree.map(wide, moving)
        moments = state.moments
        if self.moments_on_host:
            here = lambda s: jax.ShapeDtypeStruct(  # noqa: E731
                s.shape, s.dtype, sharding=s.sharding.with_memory_kind("device")
            )
            moments = jax.tree.map(here, moments)

        def spread(axis: int, leaf: np.ndarray) -> jax.ShapeDtypeStruct:
            shape = tuple(rows if dim == axis else size for dim, size in enumerate(leaf.shape))
            shard = self.model.run.shard
            return jax.ShapeDtypeStruct(
                shape, leaf.dtype, sharding=None if shard is None else shard.sharding(_rows_on(axis, shape), shape)
            )

        batch = _each_leaf(spread, row.arrays)
        return {
            "micro_step": self._micro.trace(moving, frozen, gradients, batch),
            "apply": self._apply.trace(moving, moments, gradients, state.updates, jnp.float32(1)),
            "score": self._score.trace(state.params, batch),
        }

    def _accumulate(self, moving: Leaves, frozen: Leaves, batches: Iterable[PackedBatch]):
        gradients = self._zeros(moving)
        sums: list[Sums] = []
        counts: list[Counts] = []
        poisoned: list[PackedBatch] = []
        waiting: tuple[PackedBatch, jax.Array] | None = None
        samples: tuple[TrainSample, ...] = ()
        again = None
        for batch in batches:
            if again is not None and batch.samples is not samples:
                raise ValueError("the batches of one update come from one call of pack; these have different samples")
            samples, again = batch.samples, batch.again
            gradients, statistics, finite = self._micro(moving, frozen, gradients, self._put(batch))
            sums.append(statistics)
            counts.append(batch.counts)
            if waiting is not None and not bool(waiting[1]):  # one step is always in flight
                poisoned.append(waiting[0])
            waiting = (batch, finite)
        if waiting is None or again is None:
            raise ValueError("an update needs at least one batch: no sample has a turn with a loss")
        if not bool(waiting[1]):
            poisoned.append(waiting[0])
        return gradients, sums, counts, samples, poisoned, again

    def _blame(self, moving: Leaves, frozen: Leaves, poisoned: Sequence[PackedBatch]) -> set[int]:
        """Numbers of the samples whose own gradient is not finite."""
        bad: set[int] = set()
        for batch in poisoned:
            for number in batch.members:
                if number in bad:
                    continue
                for alone in batch.again([batch.samples[number]]):
                    *_, finite = self._micro(moving, frozen, self._zeros(moving), self._put(alone))
                    if not bool(finite):
                        bad.add(number)
                        break
        return bad

    # --- Programs -----------------------------------------------------------------------------------------------

    def _logprobs(self, params: Params, arrays):
        text, images, responses = arrays
        visual = None if images is None else self.model.encode(params, images)
        hidden = self.model.hidden(params, text, visual)
        return self.model.logprobs(
            params, hidden, responses.index, responses.targets, temperature=self.temperature, chunk=self.chunk
        )

    def _micro_step(self, moving: Leaves, frozen: Leaves, gradients: Leaves, arrays):
        def objective(moving):
            params, adapters = self.trainable.join(self.model.config, moving, frozen)
            params = self.trainable.merged(self.model.config, params, adapters)
            return self.loss(*self._logprobs(params, arrays), arrays[2])

        (value, sums), new = jax.value_and_grad(objective, has_aux=True)(moving)
        finite = jnp.isfinite(value)
        for leaf in jax.tree.leaves(new):
            finite &= jnp.all(jnp.isfinite(leaf))
        add = lambda total, g: total + jnp.where(finite, g.astype(jnp.float32), 0)  # noqa: E731
        return jax.tree.map(add, gradients, new), sums, finite

    def _apply_step(self, moving: Leaves, moments, gradients: Leaves, updates, z, rate=None):
        gradients = jax.tree.map(lambda g: g / z, gradients)
        squares: dict[str, Any] = {}
        for name, leaf in gradients.items():
            module = module_of(name)
            squares[module] = squares.get(module, 0.0) + jnp.sum(jnp.square(leaf))
        moving, moments, facts = step(self.optimizer, moving, moments, gradients, updates, self._decayed, rate)
        facts |= {f"grad/norm/{module}": jnp.sqrt(square) for module, square in squares.items()}
        return moving, moments, facts

    # --- Where things lie ---------------------------------------------------------------------------------------

    def _put(self, batch: PackedBatch):
        """The batch on the devices, rows split over the data axes. Processes of many hold their rows alone."""
        shard = self.model.run.shard
        if shard is None:
            return jax.device_put(batch.arrays)
        processes = jax.process_count()

        def put(axis: int, leaf: np.ndarray) -> jax.Array:
            shape = tuple(size * processes if dim == axis else size for dim, size in enumerate(leaf.shape))
            return jax.make_array_from_process_local_data(shard.sharding(_rows_on(axis, shape), shape), leaf, shape)

        return _each_leaf(put, batch.arrays)

    def _shapes(self, key, dtype) -> TrainState:
        config = self.model.config
        params = build_tree(config, lambda row: jnp.zeros(row.full_shape, dtype))
        adapters = self.trainable.start(config, key)
        moving, _ = self.trainable.split(config, params, adapters)
        moments = adam(self.optimizer).init(moving)
        return TrainState(params=params, adapters=adapters, moments=moments, updates=jnp.zeros((), jnp.int32))

    def _leaf_shardings(self) -> dict[str, Any] | None:
        """Sharding of everything that is trained, by name; None on one device."""
        shard = self.model.run.shard
        if shard is None:
            return None
        place = lambda row: shard.sharding(row.full_axes, row.full_shape)  # noqa: E731
        return {name: place(row) for name, row in self._rows.items()} | (self._adapter_shardings() or {})

    def _adapter_shardings(self) -> dict[str, Any] | None:
        shard = self.model.run.shard
        adapters = self.trainable.adapters(self.model.config)
        if shard is None or not adapters:
            return None
        whole = jax.sharding.NamedSharding(shard.mesh, jax.sharding.PartitionSpec())
        return {f"lora.{name}.{side}": whole for name in adapters for side in "ab"}

    def _moment_shardings(self, spread: dict[str, Any] | None) -> Any:
        if spread is None:
            return None
        assert self.model.run.shard is not None
        whole = jax.sharding.NamedSharding(self.model.run.shard.mesh, jax.sharding.PartitionSpec())
        shapes = jax.eval_shape(adam(self.optimizer).init, {name: jnp.zeros(()) for name in spread})
        return shapes._replace(count=whole, mu=dict(spread), nu=dict(spread))

    def _stored(self, moments: Any) -> Any:
        return self._moved(moments, "pinned_host") if self.moments_on_host else moments

    def _fetched(self, moments: Any) -> Any:
        return self._moved(moments, "device") if self.moments_on_host else moments

    @staticmethod
    def _moved(tree: Any, kind: str) -> Any:
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), tree)


def _rows_on(axis: int, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """Logical axes of an array of a batch whose rows lie along `axis`."""
    return tuple("batch" if dim == axis else None for dim in range(len(shape)))


def _each_leaf(place: Callable[[int, np.ndarray], Any], arrays):
    """`place(axis of the rows, leaf)` of every array of a batch; positions alone have rows second."""
    text, images, responses = arrays
    rows = functools.partial(place, 0)
    placed = jax.tree.map(rows, (dataclasses.replace(text, positions=None), images, responses))
    return (dataclasses.replace(placed[0], positions=place(1, text.positions)), *placed[1:])


def _summary(sums: Sequence[Sums], z: float) -> dict[str, float]:
    """Statistics of an update from those of its micro-batches."""
    fetched = jax.device_get(list(sums))
    total = {name: float(np.sum([s.total[name] for s in fetched], dtype=np.float64)) for name in fetched[0].total}
    largest = {name: float(np.max([s.largest[name] for s in fetched])) for name in fetched[0].largest}
    tokens = max(total.pop("tokens"), 1.0)
    found = {"loss/total": total.pop("loss") / z, "update/weight": total.pop("weight")}
    for name, label in (("policy_loss", "loss/policy"), ("kl_reference", "loss/kl_reference")):
        if name in total:
            found[label] = total.pop(name) / z
    if "clipped_above" in total:
        above, below = total.pop("clipped_above") / tokens, total.pop("clipped_below") / tokens
        found |= {"policy/clip_fraction": above + below, "policy/clip_fraction_above": above}
    found |= {f"policy/{name}_mean": value / tokens for name, value in total.items()}
    return found | {f"policy/{name}_max": value for name, value in largest.items()}


def _counted(counts: Sequence[Counts], samples: Sequence[TrainSample]) -> dict[str, float]:
    """What an update was made of: tokens, turns and trajectories apart."""
    whole = Counts.total(list(counts))
    return {
        "update/trajectories": float(sum(bool(s.live) for s in samples)),
        "update/turns": float(whole.turns),
        "update/response_tokens": float(whole.responses),
        "update/tokens": float(whole.tokens),
        "update/token_slots": float(whole.token_slots),
        "update/useful_token_share": whole.useful_share,
        "update/tokens_saved_ratio": whole.separate_tokens / max(whole.tokens, 1),
        "update/patches": float(whole.patches),
        "update/micro_batches": float(len(counts)),
    }
