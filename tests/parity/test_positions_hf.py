"""Positions, rotary ids and position-table taps against transformers, case by case and at random."""

from __future__ import annotations

import types

import numpy as np
import pytest

from owrl_jax.models.qwen3_vl import positions as ours

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

IMAGE, START, END = 900, 901, 902


def hf_rope_index(tokens, grids, mask=None):
    """`get_rope_index` without the weights of a model: it reads nothing of `self` but the merge size."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    tokens = torch.tensor(np.asarray(tokens, np.int64))[None]
    shell = types.SimpleNamespace(
        config=types.SimpleNamespace(vision_config=types.SimpleNamespace(spatial_merge_size=2))
    )
    shell.get_vision_position_ids = types.MethodType(Qwen3VLModel.get_vision_position_ids, shell)
    positions, delta = Qwen3VLModel.get_rope_index(
        shell,
        tokens,
        mm_token_type_ids=(tokens == IMAGE).int(),
        image_grid_thw=torch.tensor([[1, *g] for g in grids]) if grids else None,
        attention_mask=None if mask is None else torch.tensor(np.asarray(mask))[None].long(),
    )
    return positions[:, 0].numpy(), int(delta[0, 0])


def row_of(rng, grids, *, longest=9, lead=None):
    """Random text with each image between its vision_start and vision_end tokens."""
    text = lambda n: rng.integers(0, 800, n).tolist()  # noqa: E731
    tokens = text(rng.integers(0, longest) if lead is None else lead)
    for h, w in grids:
        tokens += [START] + [IMAGE] * (h * w // 4) + [END] + text(rng.integers(0, longest))
    return np.array(tokens, np.int32)


CASES = {
    "T1 two images 2x4 and 6x2": [(2, 4), (6, 2)],
    "text only": [],
    "one token": [(2, 2)],
    "tall and wide": [(40, 2), (2, 40)],
    "screenshot 1280x1000": [(62, 80)],
    "five images": [(4, 6), (6, 4), (8, 8), (2, 10), (12, 4)],
}


@pytest.mark.parametrize("grids", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_positions_equal_transformers(grids, padding):
    rng = np.random.default_rng(len(grids))
    tokens = row_of(rng, grids, lead=5)
    mask = np.ones(tokens.size, bool)
    if padding != "none":
        side = (7, 0) if padding == "left" else (0, 7)
        tokens, mask = np.pad(tokens, side, constant_values=3), np.pad(mask, side)
    expected, delta = hf_rope_index(tokens, grids, mask)
    got = ours.mrope_positions(tokens, grids, image_token_id=IMAGE, mask=mask)
    np.testing.assert_array_equal(got.positions, expected)
    assert got.positions.dtype == np.int32
    assert got.rope_delta.tolist() == [delta]
    assert got.next_position.tolist() == [expected.max() + 1]


def test_packed_rows_restart_and_equal_each_sequence_alone():
    rng = np.random.default_rng(3)
    parts = [[(2, 4), (6, 2)], [], [(8, 4)]]
    rows = [row_of(rng, part, lead=4) for part in parts]
    starts = np.cumsum([0] + [r.size for r in rows[:-1]])
    grids = [grid for part in parts for grid in part]
    got = ours.mrope_positions(np.concatenate(rows), grids, image_token_id=IMAGE, segment_starts=starts.tolist())
    alone = [hf_rope_index(row, grids) for row, grids in zip(rows, parts, strict=True)]
    np.testing.assert_array_equal(got.positions, np.concatenate([p for p, _ in alone], axis=1))
    assert got.rope_delta.tolist() == [d for _, d in alone]


def test_a_continuation_stands_where_the_whole_sequence_puts_it():
    rng = np.random.default_rng(4)
    trunk, leaf = row_of(rng, [(4, 8)], lead=6), row_of(rng, [(6, 2)], lead=0)
    whole, _ = hf_rope_index(np.concatenate([trunk, leaf]), [(4, 8), (6, 2)])
    before = ours.mrope_positions(trunk, [(4, 8)], image_token_id=IMAGE)
    after = ours.mrope_positions(leaf, [(6, 2)], image_token_id=IMAGE, start=int(before.next_position[0]))
    np.testing.assert_array_equal(np.concatenate([before.positions, after.positions], axis=1), whole)


# Tall, wide, native (48), beyond native, and several images in one plan.
GRIDS = [[(62, 80)], [(48, 48)], [(2, 4), (6, 2)], [(2, 2), (96, 34), (4, 188)], [(1600, 10)], [(94, 144), (20, 36)]]


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_plan_equals_transformers_bit_for_bit(grids):
    from transformers import vision_utils

    thw = torch.tensor([[1, *g] for g in grids])
    taps, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        thw, 48, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    seqlens = vision_utils.get_vision_cu_seqlens(thw).numpy()
    plan = ours.plan_vision(grids, bucket=None)
    np.testing.assert_array_equal(plan.rc, vision_utils.get_vision_position_ids(thw, 2).numpy())
    np.testing.assert_array_equal(plan.taps, taps.numpy())
    np.testing.assert_array_equal(plan.tap_weights, weights.numpy())
    np.testing.assert_array_equal(np.flatnonzero(np.diff(plan.segment)) + 1, seqlens[1:-1])
    assert plan.n_valid == seqlens[-1]


def test_every_axis_length_up_to_512_takes_the_taps_of_transformers():
    from transformers.vision_utils import _interpolation_axis_taps_weights

    for size in range(2, 513, 2):
        taps, weights = _interpolation_axis_taps_weights(torch.arange(size), torch.tensor(size), 48, "bilinear", True)
        mine = ours._axis_taps(size, 48)
        np.testing.assert_array_equal(mine[0], taps.numpy(), err_msg=f"axis of {size}")
        np.testing.assert_array_equal(mine[1], weights.numpy(), err_msg=f"axis of {size}")


@pytest.mark.parametrize("grid", [(62, 80), (6, 2), (2, 4), (94, 36)], ids=str)
def test_taps_reproduce_interpolate_with_aligned_corners(grid):
    """Against torch's own interpolation of a table, so that a shared mistake in the taps would show (T4)."""
    side, width = 48, 3
    table = torch.randn(side * side, width, generator=torch.Generator().manual_seed(0))
    image = table.T.reshape(1, width, side, side)
    expected = torch.nn.functional.interpolate(image, size=grid, mode="bilinear", align_corners=True)[0].numpy()
    plan = ours.plan_vision([grid], bucket=None)
    mine = (table.numpy()[plan.taps] * plan.tap_weights[..., None]).sum(1)
    np.testing.assert_allclose(mine, expected[:, plan.rc[:, 0], plan.rc[:, 1]].T, atol=2e-5)
