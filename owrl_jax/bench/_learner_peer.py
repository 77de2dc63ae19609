"""The peer of `owrl bench learner`: torch + transformers, one prompt per turn, the same weights and the same step.

Each turn is a forward and a backward pass of its whole prompt, as in stacks that train on turns as separate samples;
log-probs are computed at the response alone, so the head costs no more than ours. Then one step of AdamW.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from owrl_jax.models.processor import Patches
from owrl_jax.rl.batch import TrainSample


def per_turn_update(
    config: Any, params: Any, samples: Sequence[TrainSample], picture: Callable[[str], Patches]
) -> Callable[[], float] | None:
    """A call that makes one update and gives its loss; None where torch is missing."""
    try:
        import torch
        import transformers
    except ImportError:
        return None
    from owrl_jax.models import hf

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        hf.export(params, config, folder + "/model", dtype="float32")
        model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
            folder + "/model", dtype=torch.float32, attn_implementation="sdpa"
        )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.98), weight_decay=0.1)
    turns = [(sample, number) for sample in samples for number in range(len(sample.turns))]

    def inputs(sample: TrainSample, number: int) -> tuple[dict[str, Any], Any, Any]:
        now = sample.turns[number]
        prompt = [i for turn in sample.turns[: number + 1] for i in turn.trunk_ids] + list(now.leaf_ids)
        ids = torch.tensor([prompt + list(now.response_ids[:-1])])
        shown = picture(str(now.screenshot))
        pixels = shown.patches.astype(np.float32).reshape(-1, 3, 1, 256) / 127.5 - 1
        given = {
            "input_ids": ids,
            "pixel_values": torch.tensor(np.repeat(pixels, 2, axis=2).reshape(len(pixels), -1)),
            "image_grid_thw": torch.tensor([[1, *shown.grid]]),
            "mm_token_type_ids": (ids == config.image_token).long(),
            "use_cache": False,
            "logits_to_keep": len(now.response_ids),
        }
        return given, torch.tensor(now.response_ids), torch.tensor(now.logprobs)

    def update() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for sample, number in turns:
            given, targets, behaviour = inputs(sample, number)
            logits = model(**given).logits[0].float()
            logp = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
            ratio, a = torch.exp(logp - behaviour), sample.advantage
            loss = -torch.minimum(ratio * a, torch.clamp(ratio, 0.8, 1.28) * a).mean() / len(turns)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return update
