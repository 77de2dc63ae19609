"""What lives on the device: weights, pages, working copies, embeddings, and the compiled programs that touch them.

Programs are compiled ahead of time for a handful of static sizes and called as executables, so a call that does not fit
one of them is an error and never a hidden compilation. Every call takes small arrays made here from sessions, and gives
back a few numbers per row. Only the engine's thread may call these methods, except `compile`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from owrl_jax.engine.request import Token
from owrl_jax.engine.sampler import Draw, Drawn
from owrl_jax.engine.session import MAX_STOPS, ImageRun, Segment, Session
from owrl_jax.engine.settings import EngineSettings
from owrl_jax.engine.step import GROUPS, Chunk, Programs, Rows
from owrl_jax.engine.vision_cache import Embedded
from owrl_jax.models.qwen3_vl.batch import batch_images
from owrl_jax.models.qwen3_vl.config import ModelConfig
from owrl_jax.models.qwen3_vl.positions import choose_bucket
from owrl_jax.models.qwen3_vl.table import build_tree
from owrl_jax.models.qwen3_vl.vision import VisionInput
from owrl_jax.models.run import Params, Run


@dataclasses.dataclass(kw_only=True)
class Work:
    """What the device did so far."""

    prefill_calls: int = 0
    decode_calls: int = 0
    decode_steps: int = 0
    pictures_encoded: int = 0
    pages_copied: int = 0


class Device:
    """See the head of the file.

    Args:
      config, settings, run: the model, the sizes, and how it is computed.
      banned: ids that are never sampled.
    """

    def __init__(self, config: ModelConfig, settings: EngineSettings, run: Run, banned: tuple[int, ...]) -> None:
        self.programs = Programs(config, run, settings, banned)
        self.config, self.settings, self.run = config, settings, run
        own = settings.weights == "own" or (settings.weights == "auto" and jax.default_backend() == "cpu")
        self._own = own
        self.params: Params | None = None
        self.work = Work()
        self._compiled: dict[tuple[str, int], Any] = {}
        self.reset()

    def reset(self) -> None:
        """Empty pages, working copies and embeddings; also after a call failed and may have eaten its arguments."""
        self._pages = self.programs.pages()
        self._rows = self.programs.rows()
        self._flat = self.programs.flat()
        self._pool = self.programs.pool()

    # --- programs ---------------------------------------------------------------------------------------------------

    def compile(self, threads: int = 4) -> None:
        """Compiles every program, some side by side."""
        p, s = self.programs, self.settings
        params = self._param_shapes()
        shape = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)  # noqa: E731
        pages, rows, flat, pool = map(shape, (self._pages, self._rows, self._flat, self._pool))
        jobs: dict[tuple[str, int], tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]] = {}
        for size in s.chunk_tokens:
            jobs["prefill", size] = (p.prefill, (1, 2), (params, pages, flat, pool, shape(self._blank_chunk(size))))
        for size in s.decode_rows:
            jobs["decode", size] = (p.decode, (1, 2), (params, pages, rows, shape(self._blank_rows(size))))
        if self.config.vision is not None:
            for size in s.patch_buckets:
                images = shape(batch_images(self.config, [[]], patches=size))
                merge = self.config.vision.merge**2
                ints = jax.ShapeDtypeStruct((size // merge,), jnp.int32)
                jobs["encode", size] = (p.encode, (1,), ({"vision": params["vision"]}, pool, images, ints))

        jobs["scrub", 0] = (p.scrub, (0, 1), (pages, rows))
        if self._own:
            jobs["split", 0] = (p.layered, (), (self._param_shapes(stacked=True),))

        def build(job):
            function, donated, shapes = job
            return jax.jit(function, donate_argnums=donated).lower(*shapes).compile()

        with concurrent.futures.ThreadPoolExecutor(threads) as workers:
            built = workers.map(build, jobs.values())
            self._compiled = dict(zip(jobs, built, strict=True))

    def _param_shapes(self, *, stacked: bool = False) -> Params:
        shardings = self.run.shard.tree(self.config) if self.run.shard else None
        dtype = self.run.compute
        tree = build_tree(self.config, lambda row: jax.ShapeDtypeStruct(row.full_shape, dtype))
        if shardings is not None:
            tree = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)
        return jax.eval_shape(self.programs.layered, tree) if self._own and not stacked else tree

    def set_weights(self, params: Params) -> None:
        """Takes new weights: the very arrays where they are as needed, copies where they are not.

        Raises:
          ValueError: if a leaf has the wrong shape or is missing.
        """
        wanted = build_tree(self.config, lambda row: row.full_shape)
        given = {group: params[group] for group in params if group in wanted}
        if jax.tree.structure(given) != jax.tree.structure(wanted, is_leaf=lambda x: isinstance(x, tuple)):
            raise ValueError("the published tree does not have the parameters of this model: is it another family?")
        shapes = jax.tree.leaves(wanted, is_leaf=lambda x: isinstance(x, tuple))
        for leaf, shape in zip(jax.tree.leaves(given), shapes, strict=True):
            if tuple(leaf.shape) != shape:
                raise ValueError(f"a published parameter has shape {tuple(leaf.shape)}, the model needs {shape}")
        given = jax.tree.map(lambda x: jnp.asarray(x).astype(self.run.compute), given)
        if self._own:
            split = self._compiled["split", 0](given)
            given = given | {group: split[group] for group in GROUPS if group in given}
        self.params = jax.block_until_ready(given)

    # --- calls ------------------------------------------------------------------------------------------------------

    def encode(self, run: ImageRun, entry: Embedded) -> None:
        """Embeds one picture."""
        assert self.config.vision is not None and self.params is not None
        bucket = choose_bucket(len(run.patches.patches), self.settings.patch_buckets)
        images = batch_images(self.config, [[run.patches]], patches=bucket)
        assert isinstance(images, VisionInput)
        rows = np.full(bucket // self.config.vision.merge**2, self.settings.vision_rows, np.int32)
        rows[: len(entry.rows)] = entry.rows
        params = {"vision": self.params["vision"]}
        self._pool = self._compiled["encode", bucket](params, self._pool, images, rows)
        self.work.pictures_encoded += 1

    def prefill(self, segments: Sequence[Segment]) -> Callable[[], list[tuple[Token, bool]]]:
        """Starts computing keys for segments of prompts.

        Returns:
          a call that waits and gives, for each segment, the token drawn after it and whether its logits were finite.
        """
        size = self.settings.page_tokens
        total = sum(s.end - s.start for s in segments)
        bucket = choose_bucket(total, self.settings.chunk_tokens)
        chunk = self._blank_chunk(bucket)
        at, place, copied = 0, 0, 0
        for n, segment in enumerate(segments):
            session, length = segment.session, segment.end - segment.start
            here = slice(at, at + length)
            pages = np.asarray(session.pages, np.int32)
            index = np.arange(segment.start, segment.end)
            chunk.tokens[0, here] = session.tokens[segment.start : segment.end]
            chunk.positions[:, 0, here] = session.rope(segment.start, segment.end)
            chunk.until[0, here] = at + length
            chunk.page[here], chunk.offset[here] = pages[index // size], index % size
            for number, entry in segment.entries.items():
                run = session.images[number]
                first, end = max(run.start, segment.start), min(run.end, segment.end)
                into = slice(at + first - segment.start, at + end - segment.start)
                chunk.visual[0, into] = entry.rows[first - run.start : end - run.start]
            past = -(-segment.start // size)
            chunk.copies[0, copied : copied + past] = place + np.arange(past)
            chunk.copies[1, copied : copied + past] = pages[:past]
            seen = slice(place * size, place * size + segment.start)
            chunk.past_from[0, seen], chunk.past_until[0, seen] = at, at + length
            chunk.last[n] = at + length - 1
            self._draw(chunk.draw, n, session)
            at, place, copied = at + length, place + past, copied + past
        chunk = dataclasses.replace(
            chunk,
            count=np.int32(at),
            copied=np.int32(copied),
            want_top=np.bool_(any(s.session.request.top_logprobs for s in segments)),
        )
        self._pages, self._flat, drawn = self._compiled["prefill", bucket](
            self.params, self._pages, self._flat, self._pool, chunk
        )
        self.work.prefill_calls += 1
        self.work.pages_copied += copied

        def wait() -> list[tuple[Token, bool]]:
            got = jax.device_get(drawn)
            return [
                (_token(got, (n,), segment.session.request.top_logprobs), bool(got.finite[n]))
                for n, segment in enumerate(segments)
            ]

        return wait

    def decode(self, sessions: Sequence[Session], steps: int) -> list[tuple[list[Token], bool]]:
        """Makes up to `steps` tokens for each session. Gives them, and whether all logits were finite."""
        size = self.settings.page_tokens
        rows = [s.row for s in sessions]
        bucket = choose_bucket(max(r for r in rows if r is not None) + 1, self.settings.decode_rows)
        batch = self._blank_rows(bucket)
        copied = 0
        for n, session in enumerate(sessions):
            row = session.row
            assert row is not None
            pages = np.asarray(session.pages, np.int32)
            batch.token[row] = session.tokens[-1]
            batch.past[row] = session.computed
            batch.position[row] = session.next_position + session.computed - session.prompt
            batch.limit[row] = limit = min(steps, session.remaining)
            batch.stop[row, : len(session.stop)] = session.stop
            batch.active[n] = row
            index = np.minimum(session.computed + np.arange(self.settings.decode_steps), session.computed + limit - 1)
            batch.page[row], batch.offset[row] = pages[index // size], index % size
            first, last = session.loaded // size, -(-session.computed // size)
            new = slice(copied, copied + last - first)
            batch.copies[0, new], batch.copies[1, new] = row, np.arange(first, last)
            batch.copies[2, new] = pages[first:last]
            copied += last - first
            session.loaded = session.computed
            self._draw(batch.draw, row, session)
        batch = dataclasses.replace(
            batch,
            count=np.int32(len(sessions)),
            copied=np.int32(copied),
            steps=np.int32(steps),
            want_top=np.bool_(any(s.request.top_logprobs for s in sessions)),
        )
        self._pages, self._rows, drawn, made = self._compiled["decode", bucket](
            self.params, self._pages, self._rows, batch
        )
        got, made = jax.device_get((drawn, made))
        self.work.decode_calls += 1
        self.work.decode_steps += int(made.max())
        self.work.pages_copied += copied
        out = []
        for session in sessions:
            row, n = session.row, int(made[session.row])
            tokens = [_token(got, (row, i), session.request.top_logprobs) for i in range(n)]
            out.append((tokens, bool(np.all(got.finite[row, :n]))))
        return out

    def scrub(self) -> None:
        """Makes keys and values finite; after a call whose logits were not."""
        self._pages, self._rows = self._compiled["scrub", 0](self._pages, self._rows)

    # --- arrays -----------------------------------------------------------------------------------------------------

    def _draw(self, draw: Draw, n: int, session: Session) -> None:
        sampling = session.request.sampling
        draw.seed[n] = sampling.seed & 0xFFFFFFFF
        draw.place[n] = len(session.answer)
        draw.temperature[n] = sampling.temperature
        draw.top_p[n] = sampling.top_p
        draw.top_k[n] = sampling.top_k

    def _blank_chunk(self, tokens: int) -> Chunk:
        s = self.settings
        return Chunk(
            tokens=np.zeros((1, tokens), np.int32),
            visual=np.full((1, tokens), -1, np.int32),
            positions=np.zeros((3, 1, tokens), np.int32),
            until=np.zeros((1, tokens), np.int32),
            page=np.zeros(tokens, np.int32),
            offset=np.zeros(tokens, np.int32),
            count=np.int32(0),
            copies=np.zeros((2, s.past_slots // s.page_tokens), np.int32),
            copied=np.int32(0),
            past_from=np.zeros((1, s.past_slots), np.int32),
            past_until=np.zeros((1, s.past_slots), np.int32),
            last=np.zeros(s.segments, np.int32),
            draw=Draw.empty(s.segments),
            want_top=np.bool_(False),
        )

    def _blank_rows(self, rows: int) -> Rows:
        s = self.settings
        return Rows(
            token=np.zeros(rows, np.int32),
            past=np.zeros(rows, np.int32),
            position=np.zeros(rows, np.int32),
            limit=np.zeros(rows, np.int32),
            stop=np.full((rows, MAX_STOPS), -1, np.int32),
            active=np.zeros(rows, np.int32),
            count=np.int32(0),
            page=np.zeros((rows, s.decode_steps), np.int32),
            offset=np.zeros((rows, s.decode_steps), np.int32),
            copies=np.zeros((3, rows * (s.past_slots // s.page_tokens)), np.int32),
            copied=np.int32(0),
            steps=np.int32(0),
            draw=Draw.empty(rows),
            want_top=np.bool_(False),
        )


def _token(drawn: Drawn, at: tuple[int | None, ...], top: int) -> Token:
    """One token as plain numbers; its version is filled in by whoever knows it."""
    likeliest = tuple(
        (int(i), float(p)) for i, p in zip(drawn.top_ids[at][:top], drawn.top_logprobs[at][:top], strict=True)
    )
    return Token(id=int(drawn.ids[at]), logprob=float(drawn.logprobs[at]), version=-1, top=likeliest)
