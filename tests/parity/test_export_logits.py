"""A model made here, exported, loaded strictly by `transformers`: the same logits."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from owrl_jax.models import hf
from owrl_jax.models.qwen3_vl.batch import batch_rows
from owrl_jax.models.qwen3_vl.config import from_hf
from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.qwen3_vl.table import build_tree, leaves
from tests.parity import tiny_models as tiny
from tests.parity.test_model_hf import SAMPLES, forward, hf_inputs, reference_forward, relative, sample, valid

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_export_loads_strictly_and_gives_the_same_logits(kind, tmp_path):
    import torch
    import transformers

    config = from_hf(tiny.tiny_hf_config(kind))
    model = Qwen3VL(config)
    scaled = {
        r.name: leaf * 4 if r.init == "normal" else leaf for r, leaf in leaves(config, model.init(jax.random.key(1)))
    }
    params = build_tree(config, lambda row: scaled[row.name])
    hf.export(params, config, tmp_path / "out", dtype="float32")

    architecture = tiny.tiny_hf_config(kind)["architectures"][0]
    reference, info = getattr(transformers, architecture).from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))

    samples = [sample(8, 23), sample(9, 11)] if kind == "text" else list(SAMPLES)
    _, logits = forward(model, params, *batch_rows(config, [[s] for s in samples]))
    keep = valid(samples)
    ours = np.asarray(logits)[keep]
    assert np.abs(ours).max() > 0.1, "degenerate logits prove nothing"
    assert relative(ours, reference_forward(reference.eval(), hf_inputs(samples))[1][keep]) < 1e-5
