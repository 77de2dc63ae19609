"""Rollout engine: output tokens/s against transformers' generate, multi-turn episodes, prefix cache, decode roofline.

Random weights of three sizes, prompts with one 448 x 448 picture (196 image tokens), the same threads for both sides.
Episodes are synthetic in their words and real in their shape: a trunk that only grows, a leaf with the newest
screenshot, groups of four siblings with one system prompt, task and first screenshot.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import os
import statistics
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from owrl_jax.bench.report import BenchResult, Goal, Row

_SHAPES = {  # layers, model, heads, kv heads, head_dim, mlp, vocab
    "2m": (4, 128, 4, 2, 32, 384, 2048),
    "20m": (10, 384, 6, 2, 64, 1152, 4096),
    "100m": (12, 768, 12, 4, 64, 2304, 8192),
}
_PATCHES, _IMAGE = 784, 196
_NEW = 128


def _config(name: str) -> Any:
    from owrl_jax.models.qwen3_vl.config import TINY

    layers, model, heads, kv, head_dim, mlp, vocab = _SHAPES[name]
    side = head_dim // 2 * 5 // 16
    text = dataclasses.replace(
        TINY.text, vocab=vocab, model=model, layers=layers, heads=heads, kv_heads=kv, head_dim=head_dim, mlp=mlp,
        mrope_section=(head_dim // 2 - 2 * side, side, side),
    )  # fmt: skip
    assert TINY.vision is not None
    return dataclasses.replace(
        TINY, text=text, vision=dataclasses.replace(TINY.vision, out=model),
        image_token=vocab - 4, video_token=vocab - 3, vision_start=vocab - 2, vision_end=vocab - 1,
    )  # fmt: skip


def _special(config: Any) -> Any:
    return types.SimpleNamespace(im_end=1, endoftext=2, image_pad=config.image_token, video_pad=config.video_token)


def _picture(seed: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (448, 448, 3), dtype=np.uint8)).save(out, "PNG")
    return out.getvalue()


def _ids(config: Any, rng: np.random.Generator, n: int) -> list[int]:
    return rng.integers(3, config.text.vocab - 8, n).tolist()


def _image_run(config: Any) -> list[int]:
    return [config.vision_start, *[config.image_token] * _IMAGE, config.vision_end]


def _engine(config: Any, params: Any, **settings: Any) -> Any:
    from owrl_jax.engine.engine import Engine
    from owrl_jax.engine.settings import EngineSettings
    from owrl_jax.models.processor import ImageProcessor

    run = settings.pop("run", None)
    engine = Engine(
        config, processor=ImageProcessor(max_area=448 * 448), special=_special(config), run=run,
        settings=EngineSettings(patch_buckets=(_PATCHES,), **settings),
    )  # fmt: skip
    engine.start()
    engine.publish(0, params)
    return engine


def _request(ids: list[int], pictures: list[bytes], new: int, *, seed: int = 0, temperature: float = 0.0) -> Any:
    from owrl_jax.agent.policy import Sampling
    from owrl_jax.engine.request import Request

    sampling = Sampling(max_new_tokens=new, temperature=temperature, seed=seed)
    return Request(ids=tuple(ids), pictures=tuple(pictures), sampling=sampling, stop=())


def _peer(config: Any, params: Any) -> Callable[[list[list[int]], list[bytes], int], None] | None:
    """`generate` of transformers on the same weights, prompts of equal length; None where torch is missing."""
    try:
        import torch
        import transformers
    except ImportError:
        return None
    from owrl_jax.models import hf
    from owrl_jax.models.processor import ImageProcessor

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        hf.export(params, config, folder + "/model", dtype="float32")
        model: Any = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
            folder + "/model", dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
    processor = ImageProcessor(max_area=448 * 448)

    def generate(rows: list[list[int]], pictures: list[bytes], new: int) -> None:
        ids = torch.tensor(rows)
        patches = np.concatenate([processor.process(p).patches for p in pictures])
        pixels = patches.reshape(-1, 3, 1, 256).astype(np.float32) / 127.5 - 1
        with torch.no_grad():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                pixel_values=torch.tensor(np.repeat(pixels, 2, axis=2).reshape(len(pixels), -1)),
                image_grid_thw=torch.tensor([[1, 28, 28]] * len(pictures)),
                mm_token_type_ids=(ids == config.image_token).long(),
                min_new_tokens=new, max_new_tokens=new, pad_token_id=0,
            )  # fmt: skip
        assert out.shape[1] == ids.shape[1] + new

    return generate


def _against_generate(name: str, batches: tuple[int, ...], repeat: int, goals: list[Goal]) -> Iterator[Row]:
    """Output tokens/s of whole requests, prefill and tower included; every repeat has new prompts and pictures."""
    import jax

    from owrl_jax.models.qwen3_vl.model import Qwen3VL

    config = _config(name)
    params = Qwen3VL(config).init(jax.random.key(0))
    peer = _peer(config, params)
    rng = np.random.default_rng(0)
    for batch in batches:
        engine = _engine(
            config, params, max_context=512, key_block=512, decode_rows=(batch,), decode_steps=32, vision_rows=8192,
            chunk_tokens=(256,),
        )  # fmt: skip
        ours, theirs = [], []
        for n in range(repeat + 1):
            pictures = [_picture(1000 * n + b) for b in range(batch)]
            rows = [[*_ids(config, rng, 20), *_image_run(config), *_ids(config, rng, 12)] for _ in range(batch)]
            start = time.perf_counter()
            jobs = [engine.submit(_request(r, [p], _NEW)) for r, p in zip(rows, pictures, strict=True)]
            done = [job.result() for job in jobs]
            ours.append(time.perf_counter() - start)
            assert all(len(d.ids) == _NEW for d in done)
            if peer:
                start = time.perf_counter()
                peer(rows, pictures, _NEW)
                theirs.append(time.perf_counter() - start)
        stats = engine.stats()
        engine.close()
        tokens = batch * _NEW
        mine, other = statistics.median(ours[1:]), statistics.median(theirs[1:]) if peer else None
        rate = tokens / other if other else None
        yield Row(
            name=f"output_tokens_per_s/{name}/batch_{batch}", ours=tokens / mine, peer=rate,
            extra={"start_s": stats.start_s},
        )  # fmt: skip
        goal = {("100m", 8): 1.5}.get((name, batch), {8: 3.0, 32: 4.0}.get(batch))
        if other and goal:
            goals.append(
                Goal(name=f"vs_generate/{name}/batch_{batch}", value=other / mine, goal=goal, better="higher", unit="x")
            )


@dataclasses.dataclass
class _Episode:
    """The prompts of one synthetic episode; `grow` appends what was answered and the next observation."""

    config: Any
    rng: np.random.Generator
    trunk: list[int]
    first: bytes
    new: int
    turn: int = 0

    def prompt(self) -> tuple[list[int], bytes]:
        picture = self.first if self.turn == 0 else _picture(int(self.rng.integers(1 << 30)))
        return [*self.trunk, *_image_run(self.config), *range(3, 11)], picture

    def grow(self, answer: list[int]) -> None:
        self.trunk += [*range(3, 11), *answer, *_ids(self.config, self.rng, 90)]
        self.turn += 1


def _episodes(config: Any, count: int, new: int, system: int = 600) -> list[_Episode]:
    shared = _ids(config, np.random.default_rng(7), system)
    episodes = []
    for n in range(count):
        group = np.random.default_rng(100 + n // 4)  # four siblings share task and first screenshot
        trunk = [*shared, *_ids(config, group, 60)]
        episodes.append(_Episode(config, np.random.default_rng(n), trunk, _picture(n // 4), new))
    return episodes


def _play(engine: Any, episode: _Episode, turns: int) -> list[float]:
    """Seconds of each turn."""
    times = []
    for turn in range(turns):
        ids, picture = episode.prompt()
        start = time.perf_counter()
        done = engine.submit(_request(ids, [picture], episode.new, seed=turn, temperature=0.8)).result()
        times.append(time.perf_counter() - start)
        episode.grow(list(done.ids))
    return times


def _replay(quick: bool, goals: list[Goal]) -> Iterator[Row]:
    """Many sessions at once, cache on and off; and one episode against a peer that reads every prompt anew."""
    import jax

    from owrl_jax.models.qwen3_vl.model import Qwen3VL

    config, new = _config("2m"), 32
    params = Qwen3VL(config).init(jax.random.key(0))
    turns = 2 if quick else 8
    for sessions in (8,) if quick else (8, 32):
        for cached in (True, False):
            engine = _engine(
                config, params, max_context=2048, decode_rows=(sessions,), prefix_cache=cached, chunk_tokens=(64, 256)
            )
            with concurrent.futures.ThreadPoolExecutor(sessions) as workers:
                start = time.perf_counter()
                times = list(
                    workers.map(lambda e, engine=engine: _play(engine, e, turns), _episodes(config, sessions, new))
                )
                wall = time.perf_counter() - start
            stats = engine.stats()
            engine.close()
            flat = [1000 * t for episode in times for t in episode]
            label = f"{sessions}_sessions/cache_{'on' if cached else 'off'}"
            yield Row(
                name=f"turn_ms/{label}", ours=statistics.median(flat),
                extra={"p95": float(np.percentile(flat, 95)), "wall_s": wall},
            )  # fmt: skip
            saved = 1 - stats.prompt_tokens_computed / stats.prompt_tokens_asked
            yield Row(name=f"prompt_tokens_saved/{label}", ours=saved)
            if cached:
                goals.append(
                    Goal(
                        name=f"prompt_saved/{sessions}_sessions", value=saved, goal=0.75, better="higher", unit="share"
                    )
                )
    peer = _peer(config, params)
    for length in (2,) if quick else (8, 15):
        engine = _engine(config, params, max_context=3072, decode_rows=(1,), decode_steps=32, chunk_tokens=(64, 256))
        _play(engine, _episodes(config, 1, new)[0], 1)  # touches memory once
        engine.publish(1, params)
        start = time.perf_counter()
        _play(engine, _episodes(config, 1, new)[0], length)
        mine = time.perf_counter() - start
        engine.close()
        other = None
        if peer:
            episode = _episodes(config, 1, new)[0]
            start = time.perf_counter()
            for _ in range(length):
                ids, picture = episode.prompt()
                peer([ids], [picture], new)
                episode.grow(ids[:new])
            other = time.perf_counter() - start
            goals.append(
                Goal(
                    name=f"episode_vs_generate/{length}_turns", value=other / mine, goal=6.0, better="higher", unit="x"
                )
            )
        yield Row(name=f"episode_s/{length}_turns", ours=mine, peer=other)


def _bandwidth() -> float:
    """Bytes a second that a sum over 256 MiB reads."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((1 << 26,), jnp.float32)
    total = jax.jit(jnp.sum)
    jax.block_until_ready(total(x))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(total(x))
        times.append(time.perf_counter() - start)
    return x.nbytes / min(times)


def _roofline(name: str, batch: int) -> Iterator[Row]:
    """Decode step against the time that reading weights and keys once takes; text-only prompts of 300 tokens."""
    import jax

    from owrl_jax.models.qwen3_vl.model import Qwen3VL

    config = _config(name)
    params = Qwen3VL(config).init(jax.random.key(0))
    engine = _engine(config, params, max_context=512, key_block=512, decode_rows=(batch,), chunk_tokens=(256,))
    rng = np.random.default_rng(0)
    steps = []
    for n in range(3):
        jobs = [engine.submit(_request(_ids(config, rng, 300), [], 64, seed=n)) for _ in range(batch)]
        steps.append(min(job.result().decode_s for job in jobs) / 63)  # the last to start decodes in company of all
    engine.close()
    text = sum(x.nbytes for k, v in params.items() if k != "vision" for x in jax.tree.leaves(v))
    keys = 2 * 4 * config.text.layers * config.text.kv_heads * config.text.head_dim * 332 * batch
    yield Row(
        name=f"decode_step_ms/{name}/batch_{batch}", ours=1000 * min(steps), floor=1000 * (text + keys) / _bandwidth(),
        extra={"weights_mib": text / 2**20, "keys_mib": keys / 2**20},
    )  # fmt: skip


def _mismatch(quick: bool) -> Iterator[Row]:
    """|engine log-prob - learner log-prob|, by turn for bf16, over all for int8 keys; sampled at temperature 0.8."""
    import jax
    import jax.numpy as jnp

    from owrl_jax.models.processor import ImageProcessor
    from owrl_jax.models.qwen3_vl.batch import Sample, batch_rows
    from owrl_jax.models.qwen3_vl.model import Qwen3VL
    from owrl_jax.models.run import Run

    config, processor = _config("2m"), ImageProcessor(max_area=448 * 448)
    params = Qwen3VL(config).init(jax.random.key(0))
    params = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, params)  # a distribution that is not flat
    for kind in ("fp32", "bf16", "int8_keys"):
        run = Run(compute=jnp.bfloat16 if kind == "bf16" else jnp.float32)
        model = Qwen3VL(config, run)
        engine = _engine(
            config, params, run=run, max_context=2048, decode_rows=(4,), kv="int8" if kind == "int8_keys" else "compute"
        )

        @jax.jit
        def learner(params, text, images, index, targets, model=model):
            hidden = model.hidden(params, text, model.encode(params, images))
            return model.logprobs(params, hidden, index, targets, temperature=0.8)[0]

        turns: list[list[float]] = []
        for episode in _episodes(config, 1 if quick else 4, 32, system=200):
            for turn in range(2 if quick else 4):
                ids, picture = episode.prompt()
                done = engine.submit(_request(ids, [picture], 32, seed=turn, temperature=0.8)).result()
                tokens = np.asarray([*ids, *done.ids], np.int32)
                text, images = batch_rows(
                    config,
                    [[Sample(tokens=tokens, images=(processor.process(picture),))]],
                    length=1280,
                    patches=_PATCHES,
                )
                index = (len(ids) - 1 + np.arange(32))[None]
                theirs = np.asarray(learner(params, text, images, index, np.asarray(done.ids)[None]))[0]
                turns += [[] for _ in range(turn + 1 - len(turns))]
                turns[turn] += np.abs(theirs - np.asarray(done.logprobs)).tolist()
                episode.grow(list(done.ids))
        engine.close()
        every = [d for turn in turns for d in turn]
        cases = [("all", every)] + ([(f"turn_{n}", t) for n, t in enumerate(turns)] if kind == "bf16" else [])
        for label, values in cases:
            yield Row(
                name=f"logprob_distance/{kind}/{label}", ours=statistics.fmean(values),
                extra={"p99": float(np.percentile(values, 99)), "max": max(values)},
            )  # fmt: skip


def run(*, repeat: int, quick: bool) -> BenchResult:
    """Measures everything the module's head names.

    Args:
      repeat: timed generations per batch size; medians are reported.
      quick: the smallest shape at one batch size and short episodes.
    """
    import jax

    goals: list[Goal] = []
    rows: list[Row] = []
    for name in ("2m",) if quick else ("2m", "20m", "100m"):
        batches = (8,) if quick or name == "100m" else (1, 8, 32)
        rows += _against_generate(name, batches, 1 if quick else repeat, goals)
    rows += _replay(quick, goals)
    for name, batch in (("2m", 8),) if quick else (("2m", 8), ("20m", 8), ("20m", 32)):
        rows += _roofline(name, batch)
    rows += _mismatch(quick)
    settings = {
        "quick": quick, "repeat": repeat, "jax": jax.__version__, "new_tokens": _NEW,
        "prompt": "32 text + 196 image tokens", "load_1m": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    return BenchResult(bench="engine", settings=settings, rows=tuple(rows), goals=tuple(goals))
