"""Different ways of running the model give the same numbers: caches, chunks, loops, remat, buckets, meshes."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from owrl_jax.models.processor import Patches
from owrl_jax.models.qwen3_vl.batch import Sample, batch_rows
from owrl_jax.models.qwen3_vl.config import ModelConfig, MoEConfig, TextConfig, VisionConfig
from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.qwen3_vl.positions import choose_bucket
from owrl_jax.models.qwen3_vl.table import build_tree, leaves
from owrl_jax.models.run import Run
from owrl_jax.sharding import TRAIN_RULES, MeshConfig, Sharder, make_mesh

IMAGE = 100


def config(moe: bool = False, layers: int = 4, tied: bool = True) -> ModelConfig:
    text = TextConfig(
        vocab=128, model=64, layers=layers, heads=4, kv_heads=2, head_dim=16, mlp=96, mrope_section=(4, 2, 2),
        tied=tied, moe=MoEConfig(experts=8, top_k=2, mlp=32) if moe else None,
    )  # fmt: skip
    vision = VisionConfig(depth=2, model=32, heads=2, mlp=64, out=64, taps=(0, 1), positions=6)
    return ModelConfig(text=text, vision=vision, image_token=IMAGE)


def init(model: Qwen3VL):
    """Random parameters large enough that every part matters."""
    params = model.init(jax.random.key(0))
    scaled = {row.name: leaf * 4 if row.init == "normal" else leaf for row, leaf in leaves(model.config, params)}
    return build_tree(model.config, lambda row: scaled[row.name])


def image(seed: int, h: int, w: int) -> Patches:
    values = np.random.default_rng(seed).integers(0, 256, (h * w, 768), dtype=np.uint8)
    return Patches(patches=values, grid=(h, w), tokens=h * w // 4)


def sample(seed: int, *parts: int | Patches) -> Sample:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(1, 90, p) if isinstance(p, int) else np.full(p.tokens, IMAGE) for p in parts]
    return Sample(tokens=np.concatenate(ids).astype(np.int32), images=tuple(p for p in parts if isinstance(p, Patches)))


ROWS = [[sample(i, 4 + i, image(i, 4, 2 + 2 * (i % 3)), 9), sample(90 + i, 6)] for i in range(8)]


@functools.partial(jax.jit, static_argnums=0)
def loss_and_grads(model: Qwen3VL, params, text, images, targets):
    def loss(params):
        hidden = model.hidden(params, text, model.encode(params, images))
        index = jnp.broadcast_to(jnp.arange(targets.shape[1]), targets.shape)
        logp, entropy = model.logprobs(params, hidden, index, targets, chunk=8)
        live = (text.visible_until > 0) & (text.visual_index < 0)
        return jnp.sum(jnp.where(live, logp + 0.1 * entropy, 0)), hidden

    (value, hidden), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, hidden, grads


def batch(c: ModelConfig):
    text, images = batch_rows(c, ROWS, length=32, patches=32)
    targets = np.random.default_rng(1).integers(0, 128, text.tokens.shape).astype(np.int32)
    return text, images, targets


def assert_same(c: ModelConfig, ours, reference, tolerance: float):
    assert abs(float(ours[0] - reference[0])) <= tolerance * abs(float(reference[0]))
    for (row, a), (_, b) in zip(leaves(c, ours[2]), leaves(c, reference[2]), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(b).max() > 0, row.name
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), row.name


@pytest.mark.parametrize(
    "moe,mesh",
    [
        (False, MeshConfig(fsdp=2, tensor=2, context=2)),
        pytest.param(True, MeshConfig(replica=2, fsdp=1, expert=2, tensor=2), marks=pytest.mark.slow),
        (True, MeshConfig(fsdp=2, expert=2, context=2)),
    ],
    ids=["dense_fsdp_tensor_context", "moe_replica_expert_tensor", "moe_fsdp_expert_context"],
)
def test_eight_devices_equal_one(moe, mesh):
    """Loss and the gradient of every parameter, images included; parameters really are spread out."""
    c = config(moe, tied=not moe)
    plain = Qwen3VL(c)
    params = init(plain)
    reference = loss_and_grads(plain, params, *batch(c))

    shard = Sharder(mesh=make_mesh(mesh), rules=TRAIN_RULES)
    spread = jax.device_put(params, shard.tree(c))
    ours = loss_and_grads(Qwen3VL(c, Run(shard=shard)), spread, *batch(c))
    assert_same(c, ours, reference, 2e-5)
    kernel = spread["layers"]["mlp"]["down"]
    assert kernel.addressable_shards[0].data.size < kernel.size, "the parameters were not sharded"


def test_initial_values_do_not_depend_on_the_mesh():
    c = config()
    shard = Sharder(mesh=make_mesh(MeshConfig(fsdp=4, tensor=2)), rules=TRAIN_RULES)
    one, many = Qwen3VL(c).init(jax.random.key(5)), Qwen3VL(c, Run(shard=shard)).init(jax.random.key(5))
    for (row, a), (_, b) in zip(leaves(c, one), leaves(c, many), strict=True):
        assert np.array_equal(a, b), row.name


@pytest.mark.parametrize(
    "change", [{"unroll": True}, {"remat": "full"}, {"remat": "attention"}, {"remat": "offload"}], ids=str
)
def test_loop_and_rematerialisation_change_nothing(change):
    c = config()
    params = init(Qwen3VL(c))
    reference = loss_and_grads(Qwen3VL(c), params, *batch(c))
    assert_same(c, loss_and_grads(Qwen3VL(c, Run(**change)), params, *batch(c)), reference, 1e-5)


@pytest.mark.parametrize("moe", [False, True])
def test_prefill_and_decode_equal_the_full_forward(moe):
    """Two rows with an image; prefill in chunks that hold none, some and all image tokens, then token by token."""
    c = config(moe)
    model = Qwen3VL(c)
    params = init(model)
    rows = [[sample(1, 5, image(1, 4, 6), 9)], [sample(2, 7, image(2, 6, 4), 7)]]  # 20 tokens each
    text, images = batch_rows(c, rows)
    visual = jax.jit(model.encode)(params, images)
    full = np.asarray(jax.jit(model.hidden)(params, text, visual))
    slots = 24
    extend = jax.jit(model.extend)

    for cuts in ([0, 3, 8, 20], [0, 20], [0, 14, *range(15, 21)]):
        cache = model.empty_cache(2, slots)
        out = []
        for a, b in itertools.pairwise(cuts):
            part = dataclasses.replace(
                text, tokens=text.tokens[:, a:b], positions=text.positions[:, :, a:b],
                visible_until=np.full((2, b - a), slots, np.int32), visual_index=text.visual_index[:, a:b],
            )  # fmt: skip
            hidden, cache = extend(params, part, cache, visual)
            out.append(np.asarray(hidden))
        np.testing.assert_allclose(np.concatenate(out, 1), full, rtol=0, atol=2e-5 * np.abs(full).max())
        assert cache.length.tolist() == [20, 20]


def test_a_row_does_not_depend_on_its_company():
    """T5: alone, beside a longer row, left or right padded, in a larger bucket."""
    c = config()
    model = Qwen3VL(c)
    params = init(model)
    short, long = sample(3, 6, image(3, 4, 4), 5), sample(4, 40, image(4, 6, 6), 20)

    @jax.jit
    def logits(params, text, images):
        return model.logits(params, model.hidden(params, text, model.encode(params, images)))

    alone = np.asarray(logits(params, *batch_rows(c, [[short]])))[0]
    scale = np.abs(alone).max()
    n = len(short.tokens)
    for pad in ("left", "right"):
        both = np.asarray(logits(params, *batch_rows(c, [[short], [long]], pad=pad, patches=64)))[0]
        here = slice(0, n) if pad == "right" else slice(-n, None)
        np.testing.assert_allclose(both[here], alone, rtol=0, atol=1e-5 * scale)


def test_warming_up_without_an_image_compiles_what_images_use():
    """T3: zero buffers stand for "no image"; a later picture takes the same program and is not ignored."""
    c = config()
    model = Qwen3VL(c)
    params = init(model)

    traces = []

    @jax.jit
    def hidden(params, text, images):
        traces.append(text)
        return model.hidden(params, text, model.encode(params, images))

    text_only = batch_rows(c, [[sample(5, 20)]], length=32, patches=32)
    pictured = batch_rows(c, [[sample(5, 6, image(5, 4, 4), 5)]], length=32, patches=32)
    warm = np.asarray(hidden(params, *text_only))
    seen = np.asarray(hidden(params, *pictured))
    assert len(traces) == 1
    fresh = np.asarray(jax.jit(lambda p, t, i: model.hidden(p, t, model.encode(p, i)))(params, *pictured))
    assert np.array_equal(seen, fresh)
    without = np.asarray(model.hidden(params, text_only[0], None))
    np.testing.assert_allclose(warm[0, :20], without[0, :20], rtol=0, atol=1e-5 * np.abs(warm).max())


def test_logprobs_are_log_softmax_at_temperature():
    """T16, and chunked = unchunked, for a number of positions that no chunk divides."""
    c = config(tied=False)
    model = Qwen3VL(c)
    params = init(model)
    hidden = jax.random.normal(jax.random.key(2), (2, 30, 64))
    rng = np.random.default_rng(0)
    index, targets = rng.integers(0, 30, (2, 13)), rng.integers(0, 128, (2, 13))
    logits = (
        np.einsum("brd,dv->brv", np.asarray(hidden, np.float64), np.asarray(params["head"]["kernel"], np.float64)) / 0.8
    )
    norm = np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = np.take_along_axis(logits - norm, index[..., None], axis=1)
    expected = np.take_along_axis(rows, targets[..., None], axis=-1)[..., 0]
    entropy = -(np.exp(rows) * rows).sum(-1)
    for chunk in (4, 13, 64):
        logp, ent = jax.jit(functools.partial(model.logprobs, temperature=0.8, chunk=chunk))(
            params, hidden, index, targets
        )
        np.testing.assert_allclose(logp, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ent, entropy, rtol=1e-5, atol=1e-5)


def test_the_program_does_not_grow_with_depth():
    """Operations of the lowered forward and backward pass at 12 and at 30 decoder layers."""

    def operations(layers: int) -> int:
        c = config(layers=layers)
        model = Qwen3VL(c, Run(remat="full"))
        params = jax.eval_shape(model.init, jax.random.key(0))
        return len(loss_and_grads.lower(model, params, *batch(c)).as_text().splitlines())

    assert operations(30) == operations(12)


def test_no_vocabulary_sized_matrix_over_tokens():
    """At T = 4096 and a 151,936-token vocabulary the whole backward pass of the head stays below one [T, V] matrix."""
    text = TextConfig(
        vocab=151936, model=64, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=64, mrope_section=(4, 2, 2)
    )
    model = Qwen3VL(ModelConfig(text=text))
    params = jax.eval_shape(model.init, jax.random.key(0))
    length, asked = 4096, 512

    def loss(params, hidden, index, targets):
        return jnp.sum(model.logprobs(params, hidden, index, targets, chunk=64)[0])

    shapes = (jax.ShapeDtypeStruct((1, length, 64), jnp.float32), *[jax.ShapeDtypeStruct((1, asked), jnp.int32)] * 2)
    memory = jax.jit(jax.grad(loss)).lower(params, *shapes).compile().memory_analysis()
    # The embedding's own gradient (39 MB) is there; [T, V] would be 2.5 GB, [asked, V] 311 MB.
    assert memory.temp_size_in_bytes < 200e6


def test_thirty_sizes_and_lengths_compile_once_per_bucket():
    """T10: screenshots of 30 shapes beside prompts of 30 lengths take at most four programs."""
    c = config()
    model = Qwen3VL(c)
    params = init(model)
    traces = []

    @jax.jit
    def hidden(params, text, images):
        traces.append(text)
        return model.hidden(params, text, model.encode(params, images))

    lengths, patches = (64, 256), (48, 192)
    rng = np.random.default_rng(3)
    seen = set()
    for seed in range(30):
        h, w = (2 * rng.integers(1, 7, 2)).tolist()
        one = sample(seed, int(rng.integers(1, 200)), image(seed, h, w), 3)
        buckets = choose_bucket(len(one.tokens), lengths), choose_bucket(h * w, patches)
        seen.add((h, w, len(one.tokens)))
        assert np.isfinite(hidden(params, *batch_rows(c, [[one]], length=buckets[0], patches=buckets[1]))).all()
    assert len(seen) > 25
    assert len(traces) <= len(lengths) * len(patches)
