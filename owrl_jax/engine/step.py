"""The programs that run on the device: a chunk of prompts, some steps of decoding, a picture.

Keys and values live in pages, one pair of arrays per layer, handed from call to call and updated in place (donated).
A call first copies the pages it needs into a working copy that lies the way its products read it, and writes what is
new back to pages at its end:

- `decode` runs up to `decode_steps` tokens for B sessions in one `while_loop`. A session keeps its row of the working
  copy, so only pages written since its last call are copied. New keys go to a small buffer at the loop's own index, the
  same for all rows: one update per layer and step instead of one per row. Attention walks the blocks of the longest
  row, one after another, and joins the buffer.
- `prefill` runs the tokens of several prompts as one row, [new tokens | past of all of them], under the model's own
  visibility rule: a past key is visible to the queries of its prompt and to no others.

Past keys are kept transposed, [K, N, S], so that a row of products is a sweep over memory: on a CPU that is three times
as fast as products of [S, N] with one or two queries. A kernel that reads pages in place (TPU ragged paged attention,
cuDNN or Pallas on a GPU) takes the place of `load_rows` and `attend_past`, and of nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from owrl_jax.engine.sampler import Draw, Drawn, sample
from owrl_jax.engine.settings import EngineSettings
from owrl_jax.models.attention import attend
from owrl_jax.models.qwen3_vl.config import ModelConfig
from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.qwen3_vl.text import TextInput, decode
from owrl_jax.models.qwen3_vl.vision import VisionInput, Visual
from owrl_jax.models.run import Params, Run

GROUPS = ("deep", "layers")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
    """The KV pool. Letters: Z pages (of the pool, and one more for what nobody will read), S tokens of a page.

    Attributes:
      keys, values: per layer [Z, K, N, S] and [Z, K, S, N].
      key_scales, value_scales: per layer float32 [Z, K, S] for int8 pages, else empty.
    """

    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    key_scales: tuple[Any, ...]
    value_scales: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Past:
    """A working copy, per layer: keys [B, K, N, S], values [B, K, S, N] for decoding; [1, S, K, N] for prefill."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """Embeddings of images by row, see `vision_cache.py`: [M, D], and DeepStack [levels, M, D]."""

    embeddings: Any
    deepstack: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """A prefill call: T tokens of at most G prompts.

    Attributes:
      tokens, visual: int32 [1, T]; ids, and rows of the image pool (-1: text).
      positions: int32 [3, 1, T].
      until: int32 [1, T]; end of the token's prompt in this call, 0 for padding.
      page, offset: int32 [T]; where each token's keys go.
      count: int32; real tokens.
      copies: int32 [2, C]; (place among the past pages of this call, page), the first `copied` of them.
      past_from, past_until: int32 [1, past slots]; which tokens of this call see each past key.
      last: int32 [G]; index of each prompt's last token.
      draw: of G rows.
    """

    tokens: Any
    visual: Any
    positions: Any
    until: Any
    page: Any
    offset: Any
    count: Any
    copies: Any
    copied: Any
    past_from: Any
    past_until: Any
    last: Any
    draw: Draw
    want_top: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """A decode call over B rows of the working copy.

    Attributes:
      token: int32 [B]; last token of each session, whose keys are not written yet.
      past: int32 [B]; tokens before it.
      position: int32 [B]; its rotary position, equal on all three axes.
      limit: int32 [B]; most tokens to make in this call; 0 for a row without session.
      stop: int32 [B, n]; ids that end a response, -1 for none.
      active, count: int32 [B], int32; the rows that hold a session, the first `count` entries.
      page, offset: int32 [B, steps]; where the keys of each step go.
      copies, copied: int32 [3, C], int32; (row, place in it, page) to be copied first.
      steps: int32; most tokens of any row.
      draw: of B rows.
    """

    token: Any
    past: Any
    position: Any
    limit: Any
    stop: Any
    active: Any
    count: Any
    page: Any
    offset: Any
    copies: Any
    copied: Any
    steps: Any
    draw: Draw
    want_top: Any


@dataclasses.dataclass(frozen=True)
class Programs:
    """What is static about the programs; hashable."""

    config: ModelConfig
    run: Run
    settings: EngineSettings
    banned: tuple[int, ...]

    @property
    def model(self) -> Qwen3VL:
        """The model, run as said."""
        return Qwen3VL(self.config, self.run)

    # --- memory -----------------------------------------------------------------------------------------------------

    def pages(self) -> Pages:
        """An empty pool."""
        c, s = self.config.text, self.settings
        int8 = s.kv == "int8"
        dtype = jnp.int8 if int8 else self.run.compute
        each = lambda shape, dtype: tuple(jnp.zeros(shape, dtype) for _ in range(c.layers))  # noqa: E731
        z = s.pool_pages + 1
        scale = (z, c.kv_heads, s.page_tokens)
        return Pages(
            keys=each((z, c.kv_heads, c.head_dim, s.page_tokens), dtype),
            values=each((z, c.kv_heads, s.page_tokens, c.head_dim), dtype),
            key_scales=each(scale, jnp.float32) if int8 else (),
            value_scales=each(scale, jnp.float32) if int8 else (),
        )

    def rows(self) -> Past:
        """The working copy of decoding."""
        c, s = self.config.text, self.settings
        each = lambda shape: tuple(jnp.zeros(shape, self.run.compute) for _ in range(c.layers))  # noqa: E731
        return Past(
            keys=each((s.max_rows, c.kv_heads, c.head_dim, s.past_slots)),
            values=each((s.max_rows, c.kv_heads, s.past_slots, c.head_dim)),
        )

    def flat(self) -> Past:
        """The working copy of prefill: new tokens first, then past ones."""
        c, s = self.config.text, self.settings
        shape = (1, s.chunk_tokens[-1] + s.past_slots, c.kv_heads, c.head_dim)
        each = lambda: tuple(jnp.zeros(shape, self.run.compute) for _ in range(c.layers))  # noqa: E731
        return Past(keys=each(), values=each())

    def pool(self) -> Pool:
        """Room for the embeddings of images; none for a text-only model."""
        size = (self.settings.vision_rows if self.config.vision else 0, self.config.text.model)
        return Pool(
            embeddings=jnp.zeros(size, self.run.compute),
            deepstack=jnp.zeros((self.config.deep_layers, *size), self.run.compute),
        )

    # --- weights ----------------------------------------------------------------------------------------------------

    def layered(self, params: Params) -> Params:
        """The parameter tree with a tuple of layers in place of stacked ones; a tree that has it is left alone."""
        out = dict(params)
        for group in GROUPS:
            if group in params and not isinstance(params[group], tuple):
                layers = len(jax.tree.leaves(params[group])[0])
                out[group] = tuple(jax.tree.map(lambda x, i=i: x[i], params[group]) for i in range(layers))
        return out

    def _groups(self, per_layer: list[Any]) -> dict[str, tuple[Any, ...]]:
        deep = self.config.deep_layers
        return {g: tuple(p) for g, p in zip(GROUPS, (per_layer[:deep], per_layer[deep:]), strict=True)}

    @staticmethod
    def _flat(groups: dict[str, Any]) -> list[Any]:
        return [layer for group in GROUPS for layer in groups.get(group, ())]

    # --- quantisation -----------------------------------------------------------------------------------------------

    def _stored(self, x: jax.Array) -> jax.Array:
        """`x [..., N]` as it will read once it has been in a page, so that every chunking computes with the same."""
        if self.settings.kv == "compute":
            return x
        small, scale = _quantise(x, -1)
        return (small.astype(jnp.float32) * scale).astype(x.dtype)

    def _read(self, pages: Pages, layer: int, page: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys [K, N, S] and values [K, S, N] of one page, in the compute dtype."""
        at = lambda x: jax.lax.dynamic_index_in_dim(x, page, keepdims=False)  # noqa: E731
        key, value = at(pages.keys[layer]), at(pages.values[layer])
        if self.settings.kv == "int8":
            key = key.astype(jnp.float32) * at(pages.key_scales[layer])[:, None, :]
            value = value.astype(jnp.float32) * at(pages.value_scales[layer])[:, :, None]
        return key.astype(self.run.compute), value.astype(self.run.compute)

    def _write(self, pages: Pages, new: list[tuple[Any, Any]], page: jax.Array, offset: jax.Array) -> Pages:
        """Puts the key and value [K, N] of one token into each layer's page."""
        keys, values = list(pages.keys), list(pages.values)
        key_scales, value_scales = list(pages.key_scales), list(pages.value_scales)
        put = jax.lax.dynamic_update_slice
        for i, (key, value) in enumerate(new):
            if self.settings.kv == "int8":
                key, scale = _quantise(key, -1)
                key_scales[i] = put(key_scales[i], scale[None], (page, 0, offset))
                value, scale = _quantise(value, -1)
                value_scales[i] = put(value_scales[i], scale[None], (page, 0, offset))
            keys[i] = put(keys[i], key[None, :, :, None].astype(keys[i].dtype), (page, 0, 0, offset))
            values[i] = put(values[i], value[None, :, None, :].astype(values[i].dtype), (page, 0, offset, 0))
        return Pages(
            keys=tuple(keys),
            values=tuple(values),
            key_scales=tuple(key_scales),
            value_scales=tuple(value_scales),
        )

    # --- prefill ----------------------------------------------------------------------------------------------------

    def prefill(self, params: Params, pages: Pages, flat: Past, pool: Pool, chunk: Chunk) -> tuple[Pages, Past, Drawn]:
        """Computes the keys of a chunk of prompts and draws a token after each prompt's last one in it."""
        params, size, first = self.layered(params), self.settings.page_tokens, self.settings.chunk_tokens[-1]

        def load(i, flat):
            place, page = first + chunk.copies[0, i] * size, chunk.copies[1, i]
            keys, values = list(flat.keys), list(flat.values)
            for layer in range(len(keys)):
                key, value = self._read(pages, layer, page)
                at = (0, place, 0, 0)
                keys[layer] = jax.lax.dynamic_update_slice(keys[layer], jnp.moveaxis(key, 2, 0)[None], at)
                values[layer] = jax.lax.dynamic_update_slice(values[layer], value.swapaxes(0, 1)[None], at)
            return Past(keys=tuple(keys), values=tuple(values))

        flat = jax.lax.fori_loop(0, chunk.copied, load, flat)
        new = chunk.tokens.shape[1]
        unseen = jnp.zeros((1, first - new), jnp.int32)
        visible_from = jnp.concatenate([jnp.arange(new, dtype=jnp.int32)[None], unseen, chunk.past_from], axis=1)
        visible_until = jnp.concatenate([chunk.until, unseen, chunk.past_until], axis=1)

        def mix(q, k, v, cache):
            start = (0, 0, 0, 0)
            keys = jax.lax.dynamic_update_slice(cache[0], self._stored(k), start)
            values = jax.lax.dynamic_update_slice(cache[1], self._stored(v), start)
            out = attend(
                q, keys, values, visible_from=visible_from, visible_until=visible_until,
                mesh=self.run.mesh, implementation=self.run.attention,
            )  # fmt: skip
            return out, (keys, values)

        text = TextInput(
            tokens=chunk.tokens, positions=chunk.positions, visible_until=chunk.until, visual_index=chunk.visual
        )
        visual = None
        if self.config.vision is not None:
            visual = Visual(embeddings=pool.embeddings[None], deepstack=pool.deepstack[:, None])
        caches = self._groups(list(zip(flat.keys, flat.values, strict=True)))
        model = self.model
        hidden, caches = decode(self.config, params, model.axes, text, visual, self.run, mix, caches)
        layers = self._flat(caches)

        def store(i, pages):
            at = lambda x: jax.lax.dynamic_index_in_dim(x[0], i, keepdims=False)  # noqa: E731
            return self._write(pages, [(at(k), at(v)) for k, v in layers], chunk.page[i], chunk.offset[i])

        pages = jax.lax.fori_loop(0, chunk.count, store, pages)
        last = jnp.take(hidden[0], chunk.last, axis=0)[:, None]
        drawn = self._draw(params, last, chunk.draw, chunk.want_top)
        return pages, Past(keys=tuple(k for k, _ in layers), values=tuple(v for _, v in layers)), drawn

    def _draw(self, params: Params, hidden: jax.Array, draw: Draw, want_top: jax.Array) -> Drawn:
        logits = self.model.logits(params, hidden)[:, 0]
        return sample(logits, draw, self.banned, self.settings.top_logprobs, want_top)

    # --- decoding ---------------------------------------------------------------------------------------------------

    def load_rows(self, pages: Pages, rows: Past, copies: jax.Array, copied: jax.Array) -> Past:
        """Copies pages into the working copy of decoding."""
        size = self.settings.page_tokens

        def load(i, rows):
            row, place, page = copies[0, i], copies[1, i] * size, copies[2, i]
            keys, values = list(rows.keys), list(rows.values)
            for layer in range(len(keys)):
                key, value = self._read(pages, layer, page)
                keys[layer] = jax.lax.dynamic_update_slice(keys[layer], key[None], (row, 0, 0, place))
                values[layer] = jax.lax.dynamic_update_slice(values[layer], value[None], (row, 0, place, 0))
            return Past(keys=tuple(keys), values=tuple(values))

        return jax.lax.fori_loop(0, copied, load, rows)

    def decode(self, params: Params, pages: Pages, rows: Past, batch: Rows) -> tuple[Pages, Past, Drawn, jax.Array]:
        """Makes up to `batch.steps` tokens for each row.

        Returns:
          pages and working copy; `Drawn` with an axis of steps after that of rows; int32 [B], tokens made per row (what
          is drawn beyond them is to be ignored).
        """
        params, c, most, top = (
            self.layered(params),
            self.config.text,
            self.settings.decode_steps,
            self.settings.top_logprobs,
        )
        rows = self.load_rows(pages, rows, batch.copies, batch.copied)
        b = batch.token.shape[0]
        new = [
            (
                jnp.zeros((b, c.kv_heads, c.head_dim, most), self.run.compute),
                jnp.zeros((b, c.kv_heads, most, c.head_dim), self.run.compute),
            )
            for _ in range(c.layers)
        ]
        blank = Drawn(
            ids=jnp.zeros((b, most), jnp.int32),
            logprobs=jnp.zeros((b, most), jnp.float32),
            finite=jnp.ones((b, most), bool),
            top_ids=jnp.zeros((b, most, top), jnp.int32),
            top_logprobs=jnp.zeros((b, most, top), jnp.float32),
        )
        longest = jnp.max(jnp.where(batch.limit > 0, batch.past, 0))

        def going(state):
            i, _, _, done, _, _ = state
            return (i < batch.steps) & ~jnp.all(done)

        def step(state):
            i, token, made, done, new, drawn = state

            def mix(q, k, v, cache):
                past_keys, past_values, keys, values = cache
                keys = jax.lax.dynamic_update_slice(keys, jnp.moveaxis(self._stored(k), 1, 3), (0, 0, 0, i))
                values = jax.lax.dynamic_update_slice(values, jnp.moveaxis(self._stored(v), 1, 2), (0, 0, i, 0))
                out = self.attend_past(q, past_keys, past_values, keys, values, batch.past, longest, i)
                return out, (keys, values)

            position = jnp.broadcast_to((batch.position + i)[None, :, None], (3, b, 1))
            text = TextInput(
                tokens=token[:, None],
                positions=position,
                visible_until=jnp.ones((b, 1), jnp.int32),
                visual_index=jnp.full((b, 1), -1, jnp.int32),
            )
            per_layer = [(*past, *n) for *past, n in zip(rows.keys, rows.values, new, strict=True)]
            caches = self._groups(per_layer)
            hidden, caches = decode(self.config, params, self.model.axes, text, None, self.run, mix, caches)
            draw = dataclasses.replace(batch.draw, place=batch.draw.place + i)
            now = self._draw(params, hidden, draw, batch.want_top)
            drawn = jax.tree.map(
                lambda all_, one: jax.lax.dynamic_update_slice_in_dim(all_, one[:, None], i, axis=1), drawn, now
            )
            made = jnp.where(done, made, i + 1)
            ended = jnp.any(now.ids[:, None] == batch.stop, axis=-1) | ~now.finite | (i + 1 >= batch.limit)
            return i + 1, jnp.where(done, token, now.ids), made, done | ended, self._flat(caches), drawn

        start = (jnp.int32(0), batch.token, jnp.zeros(b, jnp.int32), batch.limit <= 0, new, blank)
        steps, _, made, _, new, drawn = jax.lax.while_loop(going, step, start)

        def store(n, pages):
            row, i = batch.active[n // steps], n % steps
            at = lambda x, axis: jax.lax.dynamic_index_in_dim(  # noqa: E731
                jax.lax.dynamic_index_in_dim(x, row, keepdims=False), i, axis, keepdims=False
            )
            pairs = [(at(k, 2), at(v, 1)) for k, v in new]
            page = jnp.where(i < made[row], batch.page[row, i], self.settings.pool_pages)
            return self._write(pages, pairs, page, batch.offset[row, i])

        pages = jax.lax.fori_loop(0, batch.count * steps, store, pages)
        return pages, rows, drawn, made

    def attend_past(self, q, past_keys, past_values, keys, values, past, longest, i):
        """Attention of one query a row over its working copy and the first i + 1 keys of the buffer.

        Args:
          q: [B, 1, H, N].
          past_keys, past_values: [rows ≥ B, K, N, S] and [rows ≥ B, K, S, N]; of row b the first `past[b]` count.
          keys, values: [B, K, N, R] and [B, K, R, N].
          longest: the largest of `past`.
        Returns:
          [B, 1, H, N].
        """
        b, _, heads, n = q.shape
        kv, block = keys.shape[1], self.settings.key_block
        grouped = q.reshape(b, kv, heads // kv, n)

        def scores(keys, visible):
            found = jnp.einsum("bkgn,bkns->bkgs", grouped, keys, preferred_element_type=jnp.float32) * n**-0.5
            return jnp.where(visible, found, -jnp.inf)

        def mixed(weights, values):
            # What is not visible has a weight of zero and is finite: `scrub` sees to that.
            weights = weights.astype(values.dtype)
            return jnp.einsum("bkgs,bksn->bkgn", weights, values, preferred_element_type=jnp.float32)

        shown = (jnp.arange(keys.shape[3]) <= i)[None, None, None]
        found = scores(keys, shown)
        highest = jnp.max(found, axis=-1)
        weights = jnp.exp(found - highest[..., None])
        state = (highest, jnp.sum(weights, axis=-1), mixed(weights, values))

        def walk(j, state):
            highest, total, out = state
            at = (0, 0, 0, j * block)
            some_keys = jax.lax.dynamic_slice(past_keys, at, (b, kv, n, block))
            some_values = jax.lax.dynamic_slice(past_values, (0, 0, j * block, 0), (b, kv, block, n))
            seen = (j * block + jnp.arange(block) < past[:, None])[:, None, None]
            found = scores(some_keys, seen)
            higher = jnp.maximum(highest, jnp.max(found, axis=-1))
            kept = jnp.exp(highest - higher)
            weights = jnp.exp(found - higher[..., None])
            total = total * kept + jnp.sum(weights, axis=-1)
            return higher, total, out * kept[..., None] + mixed(weights, some_values)

        _, total, out = jax.lax.fori_loop(0, -(-longest // block), walk, state)
        return (out / total[..., None]).astype(q.dtype).reshape(b, 1, heads, n)

    def scrub(self, pages: Pages, rows: Past) -> tuple[Pages, Past]:
        """Makes everything finite, after a request left NaN behind: a masked weight of zero does not silence it."""
        clean = lambda x: x if x.dtype == jnp.int8 else jnp.nan_to_num(x, posinf=0, neginf=0)  # noqa: E731
        return jax.tree.map(clean, (pages, rows))

    # --- pictures ---------------------------------------------------------------------------------------------------

    def encode(self, params: Params, pool: Pool, images: VisionInput, rows: jax.Array) -> Pool:
        """Runs the tower over one picture, puts its tokens into `rows` of the pool; rows past its end are dropped."""
        visual = self.model.encode(params, images)
        return Pool(
            embeddings=pool.embeddings.at[rows].set(visual.embeddings[0], mode="drop"),
            deepstack=pool.deepstack.at[:, rows].set(visual.deepstack[:, 0], mode="drop"),
        )


def _quantise(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """int8 values and float32 scale, one scale along `axis` (kept as size one when -1 is not dropped by the caller)."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / 127
    return jnp.round(x / jnp.where(scale > 0, scale, 1)).astype(jnp.int8), scale
