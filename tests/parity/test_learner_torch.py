"""A whole update against torch: `transformers` on one prompt per turn, the loss written out, clipping, AdamW.

Nothing of ours is used on the other side but the patches of the pictures and the names of the parameters.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from owrl_jax.models import hf
from owrl_jax.models.processor import Patches
from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.qwen3_vl.table import leaves
from owrl_jax.rl.batch import TrainSample
from owrl_jax.rl.loss import LossSettings
from owrl_jax.rl.optimizer import OptimizerSettings
from owrl_jax.rl.packing import PackSettings, pack
from owrl_jax.rl.update import Learner
from owrl_jax.types import Turn
from tests.parity import tiny_models as tiny

pytestmark = pytest.mark.torch

RATE, DECAY, EPS, CLIP, TEMPERATURE = 1e-3, 0.1, 1e-3, 0.05, 0.8
PICTURES = {
    sha: Patches(
        patches=np.random.default_rng(n).integers(0, 256, (h * w, 768), dtype=np.uint8), grid=(h, w), tokens=h * w // 4
    )
    for n, (sha, h, w) in enumerate([("a", 4, 6), ("b", 2, 4), ("c", 6, 2)])
}


def turn(trunk, response, sha, logprobs) -> Turn:
    picture = PICTURES[sha]
    leaf = (5, tiny.VISION_START, *(tiny.IMAGE,) * picture.tokens, tiny.VISION_END, 6)
    return Turn(
        trunk_ids=tuple(trunk), leaf_ids=leaf, response_ids=tuple(response), logprobs=tuple(logprobs),
        versions=(0,) * len(response), screenshot=sha, grid=picture.grid,
    )  # fmt: skip


def samples() -> list[TrainSample]:
    """Two siblings that share the first screenshot and the beginning of their answers; 3 turns and 2, one a retry."""
    rng = np.random.default_rng(5)
    draw = lambda n: rng.integers(10, 490, n).tolist()  # noqa: E731
    prompt, made = draw(9), []
    for index, shas in enumerate(["aba", "ac"]):
        trunk, turns = prompt, []
        for sha in shas:
            response = [11, *draw(3 + index), 7]
            turns.append(turn(trunk, response, sha, -4.5 - rng.random(len(response)) * 2))
            trunk = [6, *response, 9, *draw(4)]
        made.append(TrainSample(name=f"g/{index}", turns=tuple(turns), advantage=(1.3, -0.7)[index], group="g"))
    return made


def torch_step(model, made: list[TrainSample]) -> tuple[float, float]:
    """One update of the model in place; loss and norm of the gradient."""
    import torch

    turns = [(s, t) for s in made for t in range(len(s.turns))]
    total = 0.0
    model.zero_grad()
    for sample, number in turns:
        now = sample.turns[number]
        prompt = [i for t in sample.turns[: number + 1] for i in t.trunk_ids] + list(now.leaf_ids)
        ids = torch.tensor([prompt + list(now.response_ids)])
        picture = PICTURES[str(now.screenshot)]
        pixels = picture.patches.astype(np.float32).reshape(-1, 3, 1, 256) / 127.5 - 1
        out = model(
            input_ids=ids,
            pixel_values=torch.tensor(np.repeat(pixels, 2, axis=2).reshape(len(pixels), -1)),
            image_grid_thw=torch.tensor([[1, *picture.grid]]),
            mm_token_type_ids=(ids == tiny.IMAGE).long(),
            use_cache=False,
        )
        n = len(now.response_ids)
        logp = torch.log_softmax(out.logits[0, -n - 1 : -1].float() / TEMPERATURE, dim=-1)
        logp = logp.gather(1, ids[0, -n:, None])[:, 0]
        ratio = torch.exp(logp - torch.tensor(now.logprobs))
        a = sample.advantage
        loss = -torch.minimum(ratio * a, torch.clamp(ratio, 0.8, 1.28) * a).mean() / len(turns)
        loss.backward()
        total += float(loss)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    if not hasattr(model, "step_with"):
        model.step_with = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), eps=EPS)
    model.step_with.step()
    return total, norm


@pytest.mark.parametrize("kind", ["tied", pytest.param("moe", marks=pytest.mark.slow)])
def test_two_updates_equal_torch(kind, tmp_path):
    """Losses, norms and parameters; the second update is off-policy, so that the clip binds on some tokens."""
    reference = tiny.tiny_hf_model(kind, seed=3)
    config, params = hf.load(tiny.save(reference, tmp_path))
    before = {row.name: np.array(leaf) for row, leaf in leaves(config, params)}
    optimizer = OptimizerSettings(learning_rate=RATE, weight_decay=DECAY, eps=EPS, max_grad_norm=CLIP)
    learner = Learner(Qwen3VL(config), optimizer, loss=LossSettings(), temperature=TEMPERATURE)
    state = learner.init(params)
    made = samples()
    settings = PackSettings(tokens=160, rows=1, patches=96, responses=48, buckets=(1.0,))
    batches = pack(made, config, pictures=PICTURES.__getitem__, settings=settings)
    assert len(batches) == 1 and batches[0].counts.tokens < 0.75 * batches[0].counts.separate_tokens
    for _ in range(2):
        state, metrics = learner.update(state, batches)
        loss, norm = torch_step(reference, made)
        assert metrics["loss/total"] == pytest.approx(loss, rel=2e-5)
        assert metrics["grad/norm"] == pytest.approx(norm, rel=1e-4) and norm > CLIP
    assert metrics["policy/clip_fraction"] > 0
    theirs = dict(reference.named_parameters())
    for row, leaf in leaves(config, state.params):
        for i, name in enumerate(row.hf_names()):
            ours, start = (np.asarray(x[i] if row.layers else x) for x in (leaf, before[row.name]))
            stored = theirs[name].detach().numpy()
            if row.expert:  # in memory transformers keeps expert weights output-major, in files input-major
                stored = stored.swapaxes(-1, -2)
            want = row.layout.from_hf(stored, row.shape)
            moved = np.abs(want - start).max()
            assert moved > 1e-6, name
            assert np.abs(ours - want).max() <= 2e-3 * moved, name


def test_samples_are_what_they_claim():
    made = samples()
    assert made[0].turns[0].screenshot == made[1].turns[0].screenshot == made[0].turns[2].screenshot
    assert dataclasses.asdict(made[0].turns[0])["trunk_ids"] == made[1].turns[0].trunk_ids
