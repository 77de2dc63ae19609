"""The parameter table: layouts invert, names are unique, sizes are those of the published models."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from owrl_jax.models.qwen3_vl.config import (
    PRESETS,
    ConfigError,
    ModelConfig,
    MoEConfig,
    TextConfig,
    VisionConfig,
    from_hf,
    preset,
    to_hf,
)
from owrl_jax.models.qwen3_vl.table import build_tree, forward_flops, leaves, parameter_count, table

TEXT = TextConfig(vocab=40, model=16, layers=4, heads=4, kv_heads=2, head_dim=8, mlp=24, mrope_section=(2, 1, 1))
VISION = VisionConfig(depth=5, model=8, heads=2, mlp=12, out=16, taps=(0, 2), patch=4, positions=3)
DENSE = ModelConfig(text=TEXT, vision=VISION, image_token=5)
CONFIGS = {
    "dense": DENSE,
    "untied": dataclasses.replace(DENSE, text=dataclasses.replace(TEXT, tied=False)),
    "moe": dataclasses.replace(DENSE, text=dataclasses.replace(TEXT, moe=MoEConfig(experts=3, top_k=2, mlp=6))),
    "text": ModelConfig(text=TEXT),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_layouts_are_invertible_rearrangements(config):
    rng = np.random.default_rng(0)
    for row in table(config):
        stored = rng.permutation(int(np.prod(row.layout.hf_shape))).reshape(row.layout.hf_shape)
        ours = row.layout.from_hf(stored, row.shape)
        assert ours.shape == row.shape, row.name
        assert sorted(ours.ravel()) == list(range(stored.size)), f"{row.name}: a value is lost or doubled"
        np.testing.assert_array_equal(row.layout.to_hf(ours), stored, err_msg=row.name)


def test_layouts_of_each_kind_by_hand():
    """Where one value goes, worked out from what torch stores: [out, in] matrices, fused qkv, Conv3d, fused experts."""
    rows = {row.name: row for row in table(CONFIGS["moe"])}

    def ours(name: str, at: tuple[int, ...]) -> np.ndarray:
        row = rows[name]
        stored = np.zeros(row.layout.hf_shape)
        stored[at] = 1
        return np.argwhere(row.layout.from_hf(stored, row.shape))[0]

    assert ours("layers.attn.q", (2 * 8 + 5, 9)).tolist() == [9, 2, 5]  # [model, head, head_dim]
    assert ours("layers.attn.o", (9, 2 * 8 + 5)).tolist() == [2, 5, 9]  # [head, head_dim, model]
    assert ours("vision.stage0.attn.qkv.kernel", (16 + 4 + 3, 7)).tolist() == [7, 2, 1, 3]  # v, head 1, value 3
    assert ours("vision.stage0.attn.qkv.bias", (8 + 1,)).tolist() == [1, 0, 1]  # k, head 0, value 1
    assert ours("vision.patch.kernel", (6, 2, 1, 3, 0)).tolist() == [
        1,
        2 * 16 + 3 * 4,
        6,
    ]  # time, (channel, row, column)
    assert ours("layers.mlp.gate_up", (1, 15, 6 + 2)).tolist() == [1, 15, 1, 2]  # expert, model, up, column
    assert ours("layers.mlp.down", (2, 4, 11)).tolist() == [2, 4, 11]
    assert ours("layers.mlp.router", (2, 13)).tolist() == [13, 2]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_names_and_paths_are_unique_and_layers_complete(config):
    rows = table(config)
    names = [name for row in rows for name in row.hf_names()]
    assert len(names) == len(set(names))
    assert len({row.path for row in rows}) == len(rows)
    for name, count in (
        ("input_layernorm", config.text.layers),
        ("norm1.weight", config.vision.depth if config.vision else 0),
    ):
        assert sum(name in other for other in names) == count
    tree = build_tree(config, lambda row: row.name)
    assert all(row.name == leaf for row, leaf in leaves(config, tree))
    assert any("lm_head" in name for name in names) != config.text.tied


def test_a_tree_that_lacks_a_leaf_is_named():
    tree = build_tree(DENSE, lambda row: 0)
    del tree["vision"]["stage1"]["mlp"]["fc1"]["bias"]
    with pytest.raises(KeyError, match=r"vision\.stage1\.mlp\.fc1\.bias"):
        list(leaves(DENSE, tree))


# hidden, layers, heads, kv heads, MLP (of an expert), tied; tower depth, width, MLP, taps: the published configurations
PUBLISHED = {
    "2b": (2048, 28, 16, 8, 6144, True, 24, 1024, 4096, (5, 11, 17)),
    "4b": (2560, 36, 32, 8, 9728, True, 24, 1024, 4096, (5, 11, 17)),
    "8b": (4096, 36, 32, 8, 12288, False, 27, 1152, 4304, (8, 16, 24)),
    "32b": (5120, 64, 64, 8, 25600, False, 27, 1152, 4304, (8, 16, 24)),
    "30b-a3b": (2048, 48, 32, 4, 768, False, 27, 1152, 4304, (8, 16, 24)),
    "235b-a22b": (4096, 94, 64, 4, 1536, False, 27, 1152, 4304, (8, 16, 24)),
}
BILLIONS = {"2b": 2.13, "4b": 4.44, "8b": 8.77, "32b": 33.4, "30b-a3b": 31.1, "235b-a22b": 235.7}
"""Parameters, vision and every expert included. The parity tests compare exact counts with transformers."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_sizes(name):
    config = PRESETS[name]
    text, vision = config.text, config.vision
    assert vision is not None
    mlp = text.moe.mlp if text.moe else text.mlp
    sizes = (text.model, text.layers, text.heads, text.kv_heads, mlp, text.tied)
    assert (*sizes, vision.depth, vision.model, vision.mlp, vision.taps) == PUBLISHED[name]
    assert (text.vocab, text.head_dim, text.max_positions) == (151936, 128, 262144)
    assert (text.rope_theta, text.rms_eps) == (5e6, 1e-6)
    assert text.mrope_section == (24, 20, 20) and vision.heads == 16 and vision.out == text.model
    assert text.moe is None or (text.moe.experts, text.moe.top_k) == (128, 8)
    assert parameter_count(config) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    assert from_hf(to_hf(config)) == config


def test_flops_by_hand():
    """A dense text model of 2 layers, counted matrix by matrix."""
    text = TextConfig(
        vocab=10, model=4, layers=2, heads=2, kv_heads=1, head_dim=4, mlp=6, mrope_section=(2, 0, 0), tied=True
    )
    per_token = 2 * (4 * 8 + 4 * 4 + 4 * 4 + 8 * 4 + 3 * 4 * 6)  # q k v o, and gate up down; both layers
    pairs = 5 * 6 // 2
    want = 2 * 5 * per_token + 4 * 2 * 2 * 4 * pairs + 2 * 3 * 4 * 10
    assert forward_flops(ModelConfig(text=text), tokens=5, pairs=pairs, responses=3) == want


def test_tiny_is_a_size_by_name_and_an_unknown_name_lists_them():
    assert preset("tiny").deep_layers == 3
    assert parameter_count(preset("tiny")) == pytest.approx(8.6e6, rel=0.01)
    with pytest.raises(ConfigError, match=r"'5b'.*4b.*tiny"):
        preset("5b")
