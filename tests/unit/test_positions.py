"""Positions and vision plans: hand-worked rows, images that touch, refusals, properties. transformers: tests/parity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from owrl_jax.models.qwen3_vl.positions import choose_bucket, mrope_positions, plan_vision, visual_index

X = 99  # the placeholder


def positions(tokens, grids, **options):
    return mrope_positions(np.array(tokens, np.int32), grids, image_token_id=X, **options)


def test_two_images_by_hand():
    """T1: grids 2x4 and 6x2 in patches are 1x2 and 3x1 in tokens; each advances the clock by its longer side."""
    got = positions([1, 1, X, X, 1, X, X, X, 1], [(2, 4), (6, 2)])
    assert got.positions.tolist() == [
        [0, 1, 2, 2, 4, 5, 5, 5, 8],
        [0, 1, 2, 2, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 5, 5, 8],
    ]
    assert got.next_position.tolist() == [9] and got.rope_delta.tolist() == [0]


def test_an_image_advances_by_its_longer_side_not_by_its_tokens():
    got = positions([1] + [X] * 12 + [1], [(6, 8)])
    assert got.positions[:, -1].tolist() == [5, 5, 5]
    assert got.next_position.tolist() == [6] and got.rope_delta.tolist() == [6 - 14]


def test_touching_placeholder_runs_are_two_images():
    """transformers would read one run as one image; the grids tell them apart."""
    got = positions([X, X, X, X, 1], [(2, 4), (4, 2)])
    assert got.positions.tolist() == [[0, 0, 2, 2, 4], [0, 0, 2, 3, 4], [0, 1, 2, 2, 4]]
    assert visual_index(np.array([X, X, X, X, 1]), [(2, 4), (4, 2)], image_token_id=X).tolist() == [0, 1, 2, 3, -1]


def test_packed_rows_restart_also_where_images_touch_the_border():
    got = positions([1, X, X, X, 1, 1], [(2, 4), (2, 2)], segment_starts=[0, 3, 5])
    assert got.positions[2].tolist() == [0, 1, 2, 0, 1, 0]
    assert got.next_position.tolist() == [3, 2, 1] and got.rope_delta.tolist() == [0, 0, 0]
    shifted = positions([1, X, X, X, 1, 1], [(2, 4), (2, 2)], segment_starts=[0, 3, 5], start=[10, 20, 30])
    assert shifted.positions[0].tolist() == [10, 11, 11, 20, 21, 30]
    assert shifted.next_position.tolist() == [13, 22, 31] and shifted.rope_delta.tolist() == [0, 0, 0]


def test_padding_takes_no_position_wherever_it_stands():
    mask = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0], bool)
    got = positions([X, 7, 1, 1, 5, X, X, 1, X], [(2, 4)], mask=mask)  # placeholders under padding do not count
    assert got.positions[0].tolist() == [0, 0, 0, 1, 0, 2, 2, 4, 0]
    assert got.rope_delta.tolist() == [0]
    index = visual_index(np.array([X, 7, 1, 1, 5, X, X, 1, X]), [(2, 4)], image_token_id=X, mask=mask, first_row=6)
    assert index.tolist() == [-1, -1, -1, -1, -1, 6, 7, -1, -1] and index.dtype == np.int32


def test_empty_and_text_only_rows():
    empty = positions([], [])
    assert empty.positions.shape == (3, 0) and empty.next_position.tolist() == [0]
    text = positions([4, 5, 6], [], start=7)
    assert text.positions.tolist() == [[7, 8, 9]] * 3 and text.next_position.tolist() == [10]


@pytest.mark.parametrize(
    ("tokens", "grids", "options", "message"),
    [
        ([1, X, 1], [(2, 4)], {}, r"1 image tokens but its 1 grids ask for 2"),
        ([1, X, X, X], [(2, 4)], {}, r"3 image tokens but its 1 grids ask for 2"),
        ([1, X], [], {}, r"1 image tokens but its 0 grids ask for 0"),
        ([1, 1], [(2, 2)], {}, r"0 image tokens but its 1 grids ask for 1"),
        ([X, 1, X, X], [(2, 4), (2, 2)], {}, r"image 0 of 1x2 tokens needs 2 placeholders .* token 0 .* ends after 1"),
        ([X, X], [(2, 4)], {"segment_starts": [0, 1]}, r"image 0 .*ends after 1"),
        ([X, X, X], [(2, 4)], {"mask": np.array([1, 0, 1], bool)}, r"image 0 .*ends after 1"),
        ([X], [(3, 2)], {}, r"grid 0 is 3x2 patches"),
        ([X], [(0, 2)], {}, r"grid 0 is 0x2 patches"),
        ([1, 1], [], {"mask": np.ones(3, bool)}, r"mask has shape \(3,\) but tokens have shape \(2,\)"),
        ([1, 1], [], {"segment_starts": [1]}, r"segment_starts"),
        ([1, 1], [], {"segment_starts": [0, 2]}, r"segment_starts"),
        ([[1, 1]], [], {}, r"one row"),
    ],
)
def test_rows_that_do_not_fit_their_grids(tokens, grids, options, message):
    for entry in (mrope_positions, visual_index):
        with pytest.raises(ValueError, match=message):
            entry(np.array(tokens, np.int32), grids, image_token_id=X, **options)


grid_sides = st.integers(1, 6).map(lambda n: 2 * n)
rows = st.lists(st.one_of(st.integers(0, 4), st.tuples(grid_sides, grid_sides)), max_size=8)


@given(rows, st.integers(0, 50))
def test_position_properties(parts, start):
    """A row is text lengths and grids in any order, so that images touch often."""
    tokens, grids, clock = [], [], start
    for part in parts:
        if isinstance(part, int):
            tokens += [1] * part
            clock += part
        else:
            tokens += [X] * (part[0] * part[1] // 4)
            grids.append(part)
            clock += max(part) // 2
    got = positions(tokens, grids, start=start)
    text = np.array(tokens, np.int32) != X
    assert got.next_position.tolist() == [clock]
    assert (got.positions[:, text] == got.positions[0, text]).all()  # text has three equal axes
    assert (np.diff(got.positions[0]) >= 0).all()  # the temporal axis never goes back
    assert (np.diff(got.positions[0, text]) > 0).all()
    if tokens:
        assert got.positions.max() == clock - 1
        assert got.rope_delta.tolist() == [clock - start - len(tokens)]
        assert len({tuple(p) for p in got.positions.T}) == len(tokens)  # no two tokens share a place
    index = visual_index(np.array(tokens, np.int32), grids, image_token_id=X, first_row=start)
    assert index[~text].tolist() == list(range(start, start + int((~text).sum())))
    assert (index[text] == -1).all()


@given(rows, st.integers(0, 8))
def test_a_row_cut_anywhere_outside_of_images_continues(parts, cut):
    def build(some):
        tokens = [t for p in some for t in ([1] * p if isinstance(p, int) else [X] * (p[0] * p[1] // 4))]
        return tokens, [p for p in some if not isinstance(p, int)]

    whole = positions(*build(parts))
    head = positions(*build(parts[:cut]))
    tail = positions(*build(parts[cut:]), start=int(head.next_position[0]))
    np.testing.assert_array_equal(whole.positions, np.concatenate([head.positions, tail.positions], axis=1))
    assert whole.next_position.tolist() == tail.next_position.tolist()


def test_plan_pads_to_the_bucket_and_numbers_images():
    plan = plan_vision([(2, 4), (2, 2)], bucket=16)
    assert plan.n_valid == 12
    assert plan.segment.tolist() == [0] * 8 + [1] * 4 + [-1] * 4
    # merge blocks: the first 2x2 block of the 2x4 image, then the second
    assert plan.rc[:8].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert not plan.tap_weights[12:].any() and not plan.taps[12:].any() and not plan.rc[12:].any()
    assert [a.dtype for a in (plan.rc, plan.taps, plan.tap_weights, plan.segment)] == [
        np.int32,
        np.int32,
        np.float32,
        np.int32,
    ]


def test_corners_read_the_corners_of_the_table():
    plan = plan_vision([(6, 10)], bucket=None, position_side=48)
    weight = {}
    for (row, col), taps, weights in zip(plan.rc.tolist(), plan.taps, plan.tap_weights, strict=True):
        weight[row, col] = {int(t): float(w) for t, w in zip(taps, weights, strict=True) if w}
    assert weight[0, 0] == {0: 1.0}
    assert weight[0, 9] == {47: 1.0}
    assert weight[5, 0] == {47 * 48: 1.0}
    assert weight[5, 9] == {47 * 48 + 47: 1.0}


@given(st.lists(st.tuples(grid_sides, grid_sides), max_size=4), st.integers(2, 60))
def test_plan_properties(grids, side):
    n = sum(h * w for h, w in grids)
    plan = plan_vision(grids, bucket=n + 8, position_side=side)
    assert plan.n_valid == n
    np.testing.assert_allclose(plan.tap_weights[:n].sum(1), 1, atol=1e-6)
    assert (plan.taps >= 0).all() and (plan.taps < side * side).all() and (plan.tap_weights >= 0).all()
    # The taps and weights of a patch average to its place on the table, that is a linear table is reproduced.
    for number, (h, w) in enumerate(grids):
        of = plan.segment == number
        rows, cols = np.divmod(plan.taps[of], side)
        np.testing.assert_allclose(
            (rows * plan.tap_weights[of]).sum(1), plan.rc[of, 0] * (side - 1) / (h - 1), atol=1e-3
        )
        np.testing.assert_allclose(
            (cols * plan.tap_weights[of]).sum(1), plan.rc[of, 1] * (side - 1) / (w - 1), atol=1e-3
        )
        assert len({tuple(p) for p in plan.rc[of].tolist()}) == h * w


def test_no_image_is_a_plan_of_padding():
    plan = plan_vision([], bucket=8)
    assert plan.n_valid == 0 and (plan.segment == -1).all()


def test_buckets():
    assert [choose_bucket(n, (4096, 1024)) for n in (0, 1024, 1025, 4096)] == [1024, 1024, 4096, 4096]
    with pytest.raises(ValueError, match=r"4097 does not fit .*\[1024, 4096\]"):
        choose_bucket(4097, (4096, 1024))
    with pytest.raises(ValueError, match=r"bucket of 8 patches does not hold 16 patches of 1 images"):
        plan_vision([(4, 4)], bucket=8)
    with pytest.raises(ValueError, match=r"multiple of 4"):
        plan_vision([(2, 2)], bucket=6)
