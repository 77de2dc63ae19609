"""`owrl bench model`: the Flax model against torch + transformers on the same weights, rows and threads, on CPU.

Both run the same batch of rows, each with one picture, in float32, and both compute log-probabilities of every next
token. Forward and forward + backward are timed in turns, ours and theirs, so that a busy machine hurts both. The
floor is the time that the counted floating-point operations take at the speed of a large matrix product measured in
the same run; everything above it is not matrix products. Parts (tower, decoder, head) are timed alone to say where
the time goes.

Also: compile seconds and program size of a 4-layer and a 36-layer decoder, which must hardly differ.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from owrl_jax.bench.report import BenchResult, Goal, Row


def shapes() -> dict[str, Any]:
    from owrl_jax.models.qwen3_vl.config import TINY, ModelConfig, TextConfig, VisionConfig

    large = ModelConfig(
        text=TextConfig(
            vocab=16384, model=768, layers=12, heads=12, kv_heads=4, head_dim=64, mlp=2304, mrope_section=(12, 10, 10)
        ),
        vision=VisionConfig(depth=6, model=384, heads=6, mlp=1536, out=768, taps=(1, 2, 3)),
        image_token=16000, video_token=16001, vision_start=16002, vision_end=16003,
    )  # fmt: skip
    return {"tiny": (TINY, 8, 512), "100m": (large, 2, 512)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    config: Any
    text: Any
    images: Any
    params: Any
    tokens: int

    @property
    def pairs(self) -> int:
        """Visible query-key pairs."""
        return self.text.tokens.shape[0] * self.text.tokens.shape[1] * (self.text.tokens.shape[1] + 1) // 2

    def flops(self) -> float:
        from owrl_jax.models.qwen3_vl.table import forward_flops

        patches = int(np.sum(self.images.segment >= 0))
        per_row = patches // self.images.segment.shape[0]
        return forward_flops(
            self.config, tokens=self.tokens, pairs=self.pairs, patches=patches, patch_pairs=patches * per_row,
            responses=self.tokens,
        )  # fmt: skip


def _case(config: Any, rows: int, length: int) -> _Case:
    """Rows of `length` tokens, each with one 448 x 448 picture (196 image tokens)."""
    import jax

    from owrl_jax.models.processor import Patches
    from owrl_jax.models.qwen3_vl.batch import Sample, batch_rows
    from owrl_jax.models.qwen3_vl.model import Qwen3VL

    rng = np.random.default_rng(0)
    samples = []
    for _ in range(rows):
        picture = Patches(patches=rng.integers(0, 256, (784, 768), dtype=np.uint8), grid=(28, 28), tokens=196)
        rest = rng.integers(1, 3000, length - 196 - 2)
        ids = np.concatenate(
            [rest[:50], [config.vision_start], np.full(196, config.image_token), [config.vision_end], rest[50:]]
        )
        samples.append(Sample(tokens=ids.astype(np.int32), images=(picture,)))
    text, images = batch_rows(config, [[s] for s in samples])
    params = Qwen3VL(config).init(jax.random.key(0))
    return _Case(config=config, text=text, images=images, params=params, tokens=rows * length)


def _ours(case: _Case) -> dict[str, Callable[[], Any]]:
    """Timed calls; each waits for its result."""
    import jax
    import jax.numpy as jnp

    from owrl_jax.models.qwen3_vl.model import Qwen3VL

    model = Qwen3VL(case.config)
    targets = jnp.asarray(case.text.tokens[:, 1:])
    index = jnp.broadcast_to(jnp.arange(targets.shape[1]), targets.shape)
    text, images = jax.device_put((case.text, case.images))

    def loss(params):
        hidden = model.hidden(params, text, model.encode(params, images))
        return jnp.mean(model.logprobs(params, hidden, index, targets)[0])

    forward, both = jax.jit(loss), jax.jit(jax.grad(loss))
    tower = jax.jit(lambda p: model.encode(p, images).embeddings)
    visual = jax.jit(model.encode)(case.params, images)
    decoder = jax.jit(lambda p: model.hidden(p, text, visual))
    hidden = decoder(case.params)
    head = jax.jit(lambda p: model.logprobs(p, hidden, index, targets)[0])
    calls = {"forward": forward, "forward_backward": both, "tower": tower, "decoder": decoder, "head": head}
    return {name: functools.partial(lambda f: jax.block_until_ready(f(case.params)), f) for name, f in calls.items()}


def _peer(case: _Case) -> dict[str, Callable[[], Any]] | None:
    """The same two calls by torch + transformers, from an export of the same weights; None where torch is missing."""
    try:
        import torch
        import transformers
    except ImportError:
        return None
    from owrl_jax.models import hf

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        hf.export(case.params, case.config, folder + "/model", dtype="float32")
        model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
            folder + "/model", dtype=torch.float32, attn_implementation="sdpa"
        )
    model.train()
    ids = torch.tensor(case.text.tokens.astype(np.int64))
    pixels = case.images.patches.reshape(-1, 3, 1, 256).astype(np.float32) / 127.5 - 1
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.tensor(np.repeat(pixels, 2, axis=2).reshape(len(pixels), -1)),
        "image_grid_thw": torch.tensor([[1, 28, 28]] * len(ids)),
        "mm_token_type_ids": (ids == case.config.image_token).long(),
        "use_cache": False,
    }

    def loss():
        logits = model(**inputs).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def forward():
        with torch.no_grad():
            return loss().item()

    def both():
        model.zero_grad(set_to_none=True)
        loss().backward()

    return {"forward": forward, "forward_backward": both}


def _seconds(calls: list[Callable[[], Any]], repeat: int) -> list[list[float]]:
    """Wall seconds of each call, `repeat` times, in turns."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeat):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return times


def _matmul_flops(repeat: int) -> float:
    """Operations a second of a 1024³ float32 product: what this machine's cores can do."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((1024, 1024), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    (times,) = _seconds([lambda: jax.block_until_ready(product(x))], max(repeat, 10))
    return 2 * 1024**3 / statistics.median(times)


def _compile(layers: int) -> tuple[float, int]:
    """Seconds to lower and compile forward + backward of a decoder of that depth, and bytes of its lowered text."""
    import jax
    import jax.numpy as jnp

    from owrl_jax.models.qwen3_vl.model import Qwen3VL
    from owrl_jax.models.qwen3_vl.text import TextInput
    from owrl_jax.models.run import Run

    config = shapes()["tiny"][0]
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, layers=layers))
    model = Qwen3VL(config, Run(remat="full"))
    ints = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    text = TextInput(
        tokens=ints, positions=jax.ShapeDtypeStruct((3, 2, 512), jnp.int32), visible_until=ints, visual_index=ints
    )
    params = jax.eval_shape(model.init, jax.random.key(0))

    def loss(params, text):
        hidden = model.hidden(params, text)
        return jnp.mean(model.logprobs(params, hidden, text.tokens, text.tokens)[0])

    cached = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009  (options are not typed attributes)
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        start = time.perf_counter()
        lowered = jax.jit(jax.grad(loss)).lower(params, text)
        size = len(lowered.as_text())
        lowered.compile()
        return time.perf_counter() - start, size
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)


def run(*, repeat: int, quick: bool) -> BenchResult:
    """Measures everything the module's head names.

    Args:
      repeat: timed calls of each kind; medians are reported.
      quick: the tiny shape alone, shallow compile comparison.
    """
    import jax

    rows: list[Row] = []
    goals: list[Goal] = []
    speed = _matmul_flops(repeat)
    rows.append(Row(name="matmul_gflops", ours=speed / 1e9))
    known = shapes()
    settings: dict[str, Any] = {"quick": quick, "repeat": repeat, "jax": jax.__version__, "dtype": "float32"}
    for name in ("tiny",) if quick else ("tiny", "100m"):
        config, batch, length = known[name]
        case = _case(config, batch, length)
        ours, peer = _ours(case), _peer(case)
        settings[name] = f"{batch} rows of {length} tokens, one 448x448 picture each"
        settings["peer"] = "torch + transformers, sdpa" if peer else "none: torch is not installed"
        for kind, factor in (("forward", 1), ("forward_backward", 3)):
            times = _seconds([ours[kind], *([peer[kind]] if peer else [])], repeat)
            mine = statistics.median(times[0])
            theirs = statistics.median(times[1]) if peer else None
            rows.append(
                Row(
                    name=f"{kind}_tokens_per_s/{name}",
                    ours=case.tokens / mine,
                    floor=case.tokens / (factor * case.flops() / speed),
                    peer=case.tokens / theirs if theirs else None,
                    extra={"ours_min": case.tokens / max(times[0]), "ours_max": case.tokens / min(times[0])},
                )
            )
            if theirs:
                goals.append(
                    Goal(
                        name=f"{kind}_vs_transformers/{name}", value=theirs / mine, goal=1.0, better="higher", unit="x"
                    )
                )
        for part in ("tower", "decoder", "head"):
            (times,) = _seconds([ours[part]], repeat)
            rows.append(Row(name=f"part_ms/{part}/{name}", ours=1000 * statistics.median(times)))
        del ours, peer, case
    sizes = {}
    for layers in (4, 36):
        seconds, sizes[layers] = _compile(layers)
        rows.append(Row(name=f"compile_s/{layers}_layers", ours=seconds))
        rows.append(Row(name=f"lowered_kib/{layers}_layers", ours=sizes[layers] / 1024))
    goals.append(Goal(name="program_36_vs_4_layers", value=sizes[36] / sizes[4], goal=1.02, better="lower", unit="x"))
    return BenchResult(bench="model", settings=settings, rows=tuple(rows), goals=tuple(goals))
