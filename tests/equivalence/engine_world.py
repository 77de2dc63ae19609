"""A model small enough to compile in seconds, prompts with pictures, and the full forward pass as the oracle."""

from __future__ import annotations

import functools
import io
import types

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from owrl_jax.agent.policy import Sampling
from owrl_jax.engine.request import Completion, Request
from owrl_jax.engine.settings import EngineSettings
from owrl_jax.models.processor import ImageProcessor
from owrl_jax.models.qwen3_vl.batch import Sample, batch_rows
from owrl_jax.models.qwen3_vl.config import ModelConfig, TextConfig, VisionConfig
from owrl_jax.models.qwen3_vl.model import Qwen3VL

IMAGE, VIDEO, END, EOT = 100, 101, 120, 121
CONFIG = ModelConfig(
    text=TextConfig(
        vocab=128, model=64, layers=3, heads=4, kv_heads=2, head_dim=16, mlp=96, mrope_section=(4, 2, 2), tied=False
    ),
    vision=VisionConfig(depth=2, model=32, heads=2, mlp=64, out=64, taps=(0, 1), positions=6),
    image_token=IMAGE, video_token=VIDEO, vision_start=102, vision_end=103,
)  # fmt: skip
SPECIAL = types.SimpleNamespace(im_end=END, endoftext=EOT, image_pad=IMAGE, video_pad=VIDEO)
PROCESSOR = ImageProcessor(min_area=32 * 32, max_area=64 * 96)
LONGEST = 192
SETTINGS = EngineSettings(
    max_context=LONGEST, page_tokens=8, pages=64, decode_rows=(1, 4), decode_steps=4, chunk_tokens=(16, 48), segments=4,
    patch_buckets=(24,), vision_rows=24, key_block=32, top_logprobs=4, max_queue=1000,
)  # fmt: skip
MODEL = Qwen3VL(CONFIG)


def params(seed: int = 0):
    """Weights large enough that every part matters."""
    tree = MODEL.init(jax.random.key(seed))
    flat, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        structure, [jnp.asarray(x + 0.12 * rng.standard_normal(x.shape), jnp.float32) for x in flat]
    )


def png(seed: int, height: int = 64, width: int = 64) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def request(seed: int, *parts: int | bytes, new: int = 24, temperature: float = 0.0, **kw) -> Request:
    """Random text of the given lengths, pictures between."""
    rng = np.random.default_rng(seed)
    ids, pictures = [], []
    for part in parts:
        if isinstance(part, bytes):
            ids += [102, *[IMAGE] * PROCESSOR.process(part).tokens, 103]
            pictures.append(part)
        else:
            ids += rng.integers(1, 99, part).tolist()
    sampling = kw.pop("sampling", None) or Sampling(max_new_tokens=new, temperature=temperature, seed=seed)
    kw.setdefault("stop", ())
    return Request(ids=tuple(map(int, ids)), pictures=tuple(pictures), sampling=sampling, **kw)


@functools.partial(jax.jit, static_argnums=2)
def _logits(weights, batch, model):
    text, images = batch
    return model.logits(weights, model.hidden(weights, text, model.encode(weights, images)))[0]


def full_logits(weights, asked: Request, answer: tuple[int, ...]) -> np.ndarray:
    """Logits [answer, V] of the full forward pass over prompt and answer, before each token of the answer."""
    tokens = np.asarray([*asked.ids, *answer], np.int32)
    sample = Sample(tokens=tokens, images=tuple(PROCESSOR.process(p) for p in asked.pictures))
    batch = batch_rows(CONFIG, [[sample]], length=LONGEST, patches=72)
    logits = np.asarray(_logits(weights, batch, MODEL))
    return logits[len(asked.ids) - 1 : len(tokens) - 1]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def assert_greedy(weights, asked: Request, got: Completion, tolerance: float = 1e-5) -> None:
    """Every token is the full forward pass's best, and its log-prob the learner's."""
    logits = full_logits(weights, asked, got.ids)
    allowed = np.where(np.isin(np.arange(CONFIG.text.vocab), (IMAGE, VIDEO)), -np.inf, logits)
    assert got.ids == tuple(allowed.argmax(-1).tolist())
    assert_logprobs(logits, got, tolerance=tolerance)


def assert_logprobs(logits: np.ndarray, got: Completion, temperature: float = 1.0, tolerance: float = 1e-5) -> None:
    expected = log_softmax(logits / np.float32(temperature))[np.arange(len(got.ids)), list(got.ids)]
    np.testing.assert_allclose(got.logprobs, expected, atol=tolerance, rtol=0)
