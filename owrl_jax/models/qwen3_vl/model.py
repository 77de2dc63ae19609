"""Qwen3-VL in Flax: screenshots and tokens in, hidden states, logits and log-probs out.

`Qwen3VL` binds a configuration to a way of running it. It holds no parameters: they are a plain tree, made by `init`
or `models.hf.load`, and every method is a pure function of it, to be called under `jax.jit`.

    model = Qwen3VL(config, Run(compute=jnp.bfloat16, remat="full", shard=sharder))
    params = model.init(jax.random.key(0))
    visual = model.encode(params, images)                  # or None for rows without pictures
    hidden = model.hidden(params, text, visual)            # packed rows, one visibility rule
    logp, entropy = model.logprobs(params, hidden, index, targets)

Attention has one rule, query q sees key k iff k ≤ q < visible_until[k]: causal rows, packed rows, prefix trees and
padding are all values of `visible_until`. The [T, vocab] matrix never exists: `logprobs` gathers the asked positions
first and runs the head over them in chunks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from owrl_jax.models.attention import attend, causal_visibility
from owrl_jax.models.qwen3_vl.config import ModelConfig
from owrl_jax.models.qwen3_vl.table import Row, build_tree
from owrl_jax.models.qwen3_vl.text import TextInput, decode
from owrl_jax.models.qwen3_vl.vision import VisionInput, Visual, encode_images
from owrl_jax.models.run import Leaf, Params, Run


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """A contiguous key-value cache of S slots a row, for stepwise decoding (the rollout engine has a paged one).

    Attributes:
      keys, values: per layer group ("deep", "layers"), [layers, B, S, K, N].
      visible_until: int32 [B, S]; 0 in slots not yet written.
      length: int32 [B]; slots written so far: the index of the next token of the row.
    """

    keys: dict[str, Leaf]
    values: dict[str, Leaf]
    visible_until: Leaf
    length: Leaf


@dataclasses.dataclass(frozen=True)
class Qwen3VL:
    """A configuration and how to run it; hashable, static under `jax.jit`."""

    config: ModelConfig
    run: Run = dataclasses.field(default_factory=Run)

    @functools.cached_property
    def axes(self) -> Params:
        """Logical axes of every parameter, as a tree."""
        return build_tree(self.config, lambda row: row.full_axes)

    def init(self, key: jax.Array, dtype: Any = jnp.float32) -> Params:
        """Random parameters: normal with the configuration's standard deviation, norms at one, biases at zero.

        On a mesh every leaf is made where it will live. Values depend on `key` alone, not on the mesh.
        """

        def leaf(row: Row) -> jax.Array:
            if row.init != "normal":
                return jnp.full(row.full_shape, row.init == "ones", dtype)
            noise = jax.random.normal(jax.random.fold_in(key, _stable_number(row.name)), row.full_shape, jnp.float32)
            return (row.std * noise).astype(dtype)

        shardings = self.run.shard.tree(self.config) if self.run.shard else None
        return jax.jit(lambda: build_tree(self.config, leaf), out_shardings=shardings)()

    def encode(self, params: Params, images: VisionInput) -> Visual:
        """Runs the vision tower over the images of each row.

        Raises:
          ValueError: if the model is text-only.
        """
        if self.config.vision is None:
            raise ValueError("a text-only Qwen3 has no vision tower: its rows cannot hold images")
        images = jax.tree.map(jnp.asarray, images)
        return encode_images(self.config.vision, params["vision"], self.axes["vision"], images, self.run)

    def hidden(self, params: Params, text: TextInput, visual: Visual | None = None) -> Float[Array, "B T D"]:
        """Hidden states of whole rows after the final norm.

        Args:
          text: B rows of T tokens; packing, trees and padding are said by `visible_until`.
          visual: `encode` of the rows' images.
        Returns:
          [B, T, D] in the compute dtype; padding positions hold arbitrary finite values.
        """
        text = jax.tree.map(jnp.asarray, text)
        visible_from = causal_visibility(text.visible_until)

        def mix(q, k, v, cache):
            out = attend(
                q, k, v, visible_from=visible_from, visible_until=text.visible_until,
                mesh=self.run.mesh, implementation=self.run.attention,
            )  # fmt: skip
            return out, cache

        return decode(self.config, params, self.axes, text, visual, self.run, mix, {})[0]

    def empty_cache(self, batch: int, slots: int) -> Cache:
        """A cache of `slots` tokens for each of `batch` rows, in the compute dtype."""
        c, deep = self.config.text, self.config.deep_layers
        groups = {name: n for name, n in (("deep", deep), ("layers", c.layers - deep)) if n}
        zeros = {g: jnp.zeros((n, batch, slots, c.kv_heads, c.head_dim), self.run.compute) for g, n in groups.items()}
        return Cache(
            keys=zeros,
            values=jax.tree.map(jnp.copy, zeros),
            visible_until=jnp.zeros((batch, slots), jnp.int32),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def extend(
        self, params: Params, text: TextInput, cache: Cache, visual: Visual | None = None
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Appends T tokens to each row of a cache: a prefill, a chunk of one, or one decoded token.

        `text.visible_until` counts in slots of the cache: a token that all later ones may see has at least S. Every row
        appends all T tokens; rows that have fewer mark the rest as padding with 0 and never look at them again.
        """
        text = jax.tree.map(jnp.asarray, text)
        start, new = cache.length, text.tokens.shape[1]
        write = jax.vmap(lambda buffer, rows, at: jax.lax.dynamic_update_slice_in_dim(buffer, rows, at, axis=0))
        until = write(cache.visible_until, text.visible_until, start)
        visible_from = causal_visibility(until)

        def mix(q, k, v, slots):
            keys, values = (
                write(slots[0], k.astype(slots[0].dtype), start),
                write(slots[1], v.astype(slots[1].dtype), start),
            )
            out = attend(
                q, keys, values, visible_from=visible_from, visible_until=until, q_start=start,
                mesh=self.run.mesh, implementation=self.run.attention,
            )  # fmt: skip
            return out, (keys, values)

        slots = {group: (cache.keys[group], cache.values[group]) for group in cache.keys}
        hidden, slots = decode(self.config, params, self.axes, text, visual, self.run, mix, slots)
        updated = Cache(
            keys={g: s[0] for g, s in slots.items()},
            values={g: s[1] for g, s in slots.items()},
            visible_until=until,
            length=start + new,
        )
        return hidden, updated

    def head(self, params: Params) -> Float[Array, "D V"]:
        """The output map, in the compute dtype: the embedding table's transpose when tied."""
        kernel = params["embed"]["table"].T if self.config.text.tied else params["head"]["kernel"]
        return self.run.constrain(kernel.astype(self.run.compute), "embed", "vocab")

    def logits(self, params: Params, hidden: Float[Array, "B R D"]) -> Float[Array, "B R V"]:
        """Float32 logits at the given hidden states; gather the positions you need before calling."""
        out = self.run.linear(hidden, self.head(params), out=jnp.float32)
        return self.run.constrain(out, "batch", None, "act_vocab")

    def logprobs(
        self,
        params: Params,
        hidden: Float[Array, "B T D"],
        index: Int[Array, "B R"],
        targets: Int[Array, "B R"],
        *,
        temperature: float = 1.0,
        chunk: int = 256,
    ) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
        """Log-probability of each target, and entropy, at asked positions only.

        Args:
          hidden: hidden states of whole rows.
          index: positions whose hidden state predicts the target (the position before it); any valid index for padding.
          targets: token ids.
          temperature: logits are divided by it, as the sampler's were.
          chunk: positions a row per step of the head; memory is B·chunk·V float32 values, twice that backward.
        Returns:
          natural-log probabilities and entropies in nats, float32 [B, R].
        """
        rows = jnp.take_along_axis(hidden, index[..., None], axis=1)
        batch, asked, _ = rows.shape
        kernel = self.head(params)

        def some(rows, targets):
            logits = self.run.linear(rows, kernel, out=jnp.float32) / temperature
            logits = self.run.constrain(logits, "batch", None, "act_vocab")
            norm = jax.nn.logsumexp(logits, axis=-1)
            target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            mean = jnp.sum(jnp.exp(logits - norm[..., None]) * logits, axis=-1)
            return target - norm, norm - mean

        if asked <= chunk:
            return some(rows, targets)
        steps = -(-asked // chunk)
        pad = steps * chunk - asked
        rows = jnp.pad(rows, ((0, 0), (0, pad), (0, 0))).reshape(batch, steps, chunk, -1).swapaxes(0, 1)
        padded = jnp.pad(targets, ((0, 0), (0, pad))).reshape(batch, steps, chunk).swapaxes(0, 1)
        # prevent_cse is not needed inside a scan; without it the recomputation fuses freely.
        body = jax.checkpoint(lambda _, xs: (None, some(*xs)), prevent_cse=False)
        _, (logp, entropy) = jax.lax.scan(body, None, (rows, padded))
        join = lambda x: x.swapaxes(0, 1).reshape(batch, -1)[:, :asked]  # noqa: E731
        return join(logp), join(entropy)


def _stable_number(name: str) -> int:
    """A number that depends on the name alone (Python's hash changes from run to run)."""
    return int.from_bytes(name.encode(), "little") % (2**31 - 1)
