"""The Flax model against `transformers` on the same random weights: logits, hidden states, every gradient.

All in float32 at the highest matmul precision. "Relative" is the largest absolute difference over the largest absolute
reference value of the same tensor.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from owrl_jax.models import hf
from owrl_jax.models.processor import Patches
from owrl_jax.models.qwen3_vl.batch import Sample, batch_rows
from owrl_jax.models.qwen3_vl.config import from_hf
from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.qwen3_vl.table import leaves
from owrl_jax.models.run import Run
from tests.parity import tiny_models as tiny

pytestmark = pytest.mark.torch

KINDS = ("tied", "moe")  # the sparse model is untied; the dense untied one is compared in test_export_logits.py


def image(seed: int, h: int, w: int) -> Patches:
    """A picture of noise, h x w patches."""
    values = np.random.default_rng(seed).integers(0, 256, (h * w, 768), dtype=np.uint8)
    return Patches(patches=values, grid=(h, w), tokens=h * w // 4)


def sample(seed: int, *parts: int | Patches, touching: bool = False) -> Sample:
    """Tokens of a sequence: a number stands for that many random text tokens, a picture for its placeholders."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(1, 490, part).tolist()
        else:
            run = [tiny.IMAGE] * part.tokens
            ids += run if touching else [tiny.VISION_START, *run, tiny.VISION_END]
    return Sample(tokens=np.array(ids, np.int32), images=tuple(p for p in parts if isinstance(p, Patches)))


# One row each: no image; one wide image; three images of different shapes, two of them adjacent; an image first.
SAMPLES = (
    sample(1, 17),
    sample(2, 5, image(21, 4, 6), 7),
    sample(3, 3, image(31, 2, 4), image(32, 6, 2), 4, image(33, 8, 6), 6),
    sample(4, image(41, 4, 4), 9, image(42, 2, 10), 2),
)


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """(transformers model, our configuration, our parameters) with the same weights, through real files."""
    reference = tiny.tiny_hf_model(request.param, seed=7)
    folder = tiny.save(reference, tmp_path_factory.mktemp(request.param))
    config, params = hf.load(folder)
    return reference, config, params


def hf_inputs(samples, pad: str = "right") -> dict:
    """The same batch as `transformers` wants it."""
    import torch

    length = max(len(s.tokens) for s in samples)
    ids, mask = np.zeros((2, len(samples), length), np.int64)
    for b, s in enumerate(samples):
        here = slice(0, len(s.tokens)) if pad == "right" else slice(length - len(s.tokens), length)
        ids[b, here], mask[b, here] = s.tokens, 1
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    images = [i for s in samples for i in s.images]
    if images:
        pixels = np.concatenate([i.patches for i in images]).astype(np.float32) / 127.5 - 1
        pixels = np.repeat(pixels.reshape(-1, 3, 1, 256), 2, axis=2).reshape(len(pixels), -1)
        inputs["pixel_values"] = torch.tensor(pixels)
        inputs["image_grid_thw"] = torch.tensor([[1, *i.grid] for i in images])
        inputs["mm_token_type_ids"] = torch.tensor((ids == tiny.IMAGE).astype(np.int64))
    return inputs


def valid(samples, pad: str = "right") -> np.ndarray:
    return hf_inputs(samples, pad)["attention_mask"].numpy().astype(bool)


def relative(ours, reference) -> float:
    ours, reference = np.asarray(ours, np.float64), np.asarray(reference, np.float64)
    assert ours.shape == reference.shape
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


@functools.partial(jax.jit, static_argnums=0)
def forward(model: Qwen3VL, params, text, images):
    visual = model.encode(params, images) if images is not None else None
    hidden = model.hidden(params, text, visual)
    return hidden, model.logits(params, hidden)


def reference_forward(reference, inputs):
    import torch

    with torch.no_grad():
        out = reference(**inputs, output_hidden_states=True, use_cache=False)
    return out.hidden_states[-1].numpy(), out.logits.numpy()


@pytest.mark.parametrize("pad", ["right", "left"])
def test_logits_and_hidden_states(pair, pad):
    """0, 1, 2 and 3 images of different shapes, different in every row of one padded batch."""
    reference, config, params = pair
    hidden, logits = forward(Qwen3VL(config), params, *batch_rows(config, [[s] for s in SAMPLES], pad=pad))
    ref_hidden, ref_logits = reference_forward(reference, hf_inputs(SAMPLES, pad))
    keep = valid(SAMPLES, pad)
    assert relative(np.asarray(logits)[keep], ref_logits[keep]) < 1e-4
    assert relative(np.asarray(hidden)[keep], ref_hidden[keep]) < 1e-4
    assert np.array_equal(np.asarray(logits)[keep].argmax(-1), ref_logits[keep].argmax(-1))


def test_packed_row_equals_the_samples_alone(pair):
    """All samples in one row, in another order; the reference sees them one at a time."""
    reference, config, params = pair
    order = [2, 0, 3, 1]
    _, logits = forward(
        Qwen3VL(config), params, *batch_rows(config, [[SAMPLES[i] for i in order]], length=192, patches=256)
    )
    begin = 0
    for i in order:
        alone = reference_forward(reference, hf_inputs([SAMPLES[i]]))[1][0]
        assert relative(logits[0, begin : begin + len(alone)], alone) < 1e-4
        begin += len(alone)


def test_touching_placeholder_runs(pair):
    """Two images with no token between them are told apart by their grids."""
    reference, config, params = pair
    touching = sample(5, 4, image(51, 4, 2), image(52, 2, 6), 5, touching=True)
    _, logits = forward(Qwen3VL(config), params, *batch_rows(config, [[touching]]))
    # transformers reads one run of image tokens per image, so it gets the positions from us and checks everything else.
    import torch

    text, _ = batch_rows(config, [[touching]])
    inputs = hf_inputs([touching]) | {"position_ids": torch.tensor(text.positions.astype(np.int64))}
    assert relative(logits[0], reference_forward(reference, inputs)[1][0]) < 1e-4


def test_gradients_of_every_parameter(pair):
    """Weighted log-likelihood of every next token, through packing-free rows with and without images."""
    import torch

    reference, config, params = pair
    samples = SAMPLES
    weights = np.random.default_rng(0).uniform(0.2, 1.0, valid(samples).shape).astype(np.float32) * valid(samples)
    weights[:, -1] = 0
    weights[:, :-1] *= valid(samples)[:, 1:]

    reference.zero_grad()
    inputs = hf_inputs(samples)
    logits = reference(**inputs, use_cache=False).logits
    logp = torch.log_softmax(logits[:, :-1], -1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    (logp * torch.tensor(weights[:, :-1])).sum().backward()
    reference_grads = dict(reference.named_parameters())

    text, images = batch_rows(config, [[s] for s in samples])
    assert images is not None

    @jax.jit
    def grads(params):
        def loss(params):
            model = Qwen3VL(config)
            hidden = model.hidden(params, text, model.encode(params, images))
            index = jnp.broadcast_to(jnp.arange(text.tokens.shape[1] - 1), weights[:, :-1].shape)
            logp, _ = model.logprobs(params, hidden, index, jnp.asarray(text.tokens[:, 1:]), chunk=24)
            return jnp.sum(logp * weights[:, :-1])

        return jax.grad(loss)(params)

    seen = 0
    for row, grad in leaves(config, grads(params)):
        for i, name in enumerate(row.hf_names()):
            ours = np.asarray(grad[i] if row.layers else grad)
            theirs = reference_grads[name].grad.numpy()
            if row.expert:  # in memory transformers keeps expert weights output-major, in files input-major
                theirs = theirs.swapaxes(-1, -2)
            assert np.abs(theirs).max() > 0, f"{name}: the reference has no gradient, so nothing is tested"
            assert relative(row.layout.to_hf(ours), theirs) < 1e-3, name
            seen += 1
    assert seen == len(reference_grads)


def test_deepstack_matters_and_stays_in_its_row(pair):
    """Off is not on; and a picture changed in one row changes no other row."""
    _, config, params = pair
    model = Qwen3VL(config)
    text, images = batch_rows(config, [[s] for s in SAMPLES])
    assert images is not None
    visual = jax.jit(model.encode)(params, images)
    run = jax.jit(lambda v: model.logits(params, model.hidden(params, text, v)))
    on = np.asarray(run(visual))
    off = np.asarray(run(type(visual)(embeddings=visual.embeddings, deepstack=jnp.zeros_like(visual.deepstack))))
    assert relative(off[1], on[1]) > 1e-2
    assert np.array_equal(off[0], on[0])

    changed = np.array(images.patches)
    changed[2] = 255 - changed[2]
    other = np.asarray(run(jax.jit(model.encode)(params, type(images)(**(vars(images) | {"patches": changed})))))
    assert relative(other[2], on[2]) > 1e-2
    for row in (0, 1, 3):
        assert np.array_equal(other[row][valid(SAMPLES)[row]], on[row][valid(SAMPLES)[row]])


def test_text_only_qwen3(tmp_path):
    """The embedding model's decoder: no tower, three equal position axes."""
    reference = tiny.tiny_hf_model("text", seed=3)
    config, params = hf.load(tiny.save(reference, tmp_path))
    samples = [sample(8, 23), sample(9, 11)]
    hidden, logits = forward(Qwen3VL(config), params, *batch_rows(config, [[s] for s in samples]))
    ref_hidden, ref_logits = reference_forward(reference, hf_inputs(samples))
    keep = valid(samples)
    assert relative(np.asarray(logits)[keep], ref_logits[keep]) < 1e-4
    assert relative(np.asarray(hidden)[keep], ref_hidden[keep]) < 1e-4
    _, images = batch_rows(from_hf(tiny.tiny_hf_config("tied")), [[SAMPLES[1]]])
    assert images is not None
    with pytest.raises(ValueError, match="no vision tower"):
        Qwen3VL(config).encode(params, images)


def test_vision_tower_on_the_screenshot_grid(pair):
    """T4: 80 x 62 patches (a 1280 x 992 screenshot turned), where a wrong corner rule would show."""
    import torch

    reference, config, params = pair
    picture = image(61, 62, 80)
    _, images = batch_rows(config, [[Sample(tokens=np.full(picture.tokens, tiny.IMAGE, np.int32), images=(picture,))]])
    assert images is not None
    visual = jax.jit(Qwen3VL(config).encode)(params, images)
    inputs = hf_inputs([Sample(tokens=np.zeros(1, np.int32), images=(picture,))])
    with torch.no_grad():
        out = reference.model.visual(inputs["pixel_values"], inputs["image_grid_thw"])
    assert relative(visual.embeddings[0], out.pooler_output.numpy()) < 1e-4
    for level, features in enumerate(out.deepstack_features):
        assert relative(visual.deepstack[level, 0], features.numpy()) < 1e-4


def test_bfloat16_stays_close(pair):
    """Mean KL of the bf16 run against the float32 reference, over all valid positions: below 1e-3."""
    reference, config, params = pair
    _, logits = forward(Qwen3VL(config, Run(compute=jnp.bfloat16)), params, *batch_rows(config, [[s] for s in SAMPLES]))
    keep = valid(SAMPLES)
    ours = jax.nn.log_softmax(np.asarray(logits)[keep].astype(np.float64))
    theirs = jax.nn.log_softmax(reference_forward(reference, hf_inputs(SAMPLES))[1][keep].astype(np.float64))
    kl = float(np.mean(np.sum(np.exp(theirs) * (theirs - ours), -1)))
    assert logits.dtype == jnp.float32
    assert 0 < kl < 1e-3


def test_a_blind_model_would_be_noticed(pair):
    """T14: the same text with a red and a blue picture, at the first and at the third turn."""
    _, config, params = pair

    def flat(channel: int) -> Patches:
        values = np.zeros((24, 3, 256), np.uint8)
        values[:, channel] = 255
        return Patches(patches=values.reshape(24, 768), grid=(4, 6), tokens=6)

    model = Qwen3VL(config)
    for before in (3, 60):
        red, blue = (
            np.asarray(forward(model, params, *batch_rows(config, [[sample(11, before, flat(c), 4)]]))[1])[0, -1]
            for c in (0, 2)
        )
        assert relative(red, blue) > 1e-2
