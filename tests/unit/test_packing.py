"""Every turn sees in its row exactly what it saw when it was sampled: ids, positions, pictures, nothing else.

The oracle lays each turn's context out flat and alone; rows are read through the dense mask that `visible_until` means.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from owrl_jax.models.processor import Patches
from owrl_jax.models.qwen3_vl.positions import mrope_positions
from owrl_jax.rl.batch import Counts, PackedBatch, TrainSample
from owrl_jax.rl.epochs import updates
from owrl_jax.rl.loss import normaliser
from owrl_jax.rl.packing import BUCKETS, PackSettings, build, pack, plan_batches
from tests.unit.learner_world import IMAGE, config, group, leaf_of, picture, trajectory_turns, turn

CONFIG = config()


def context(sample: TrainSample, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids [n], positions [3, n] and patches [visual tokens, 4, 768] of one turn alone, response but its last id."""
    turns = sample.turns[: number + 1]
    now = turns[-1]
    ids = np.array([i for t in turns for i in t.trunk_ids] + [*now.leaf_ids, *now.response_ids[:-1]])
    shown = [*now.older_pictures, *([(now.screenshot, now.grid)] if now.screenshot and now.grid else [])]
    positions = mrope_positions(ids, [grid for _, grid in shown], image_token_id=IMAGE).positions
    pixels = [picture(sha).patches.reshape(-1, 4, 768) for sha, _ in shown]
    return ids, positions, np.concatenate(pixels) if pixels else np.zeros((0, 4, 768), np.uint8)


def check(samples: list[TrainSample], batches: list[PackedBatch], options: PackSettings) -> None:
    """All that must hold of any packing."""
    seen = []
    for batch in batches:
        text, r = batch.text, batch.responses
        rows, length = text.tokens.shape
        assert rows == options.rows and batch.shape[1:] in options.shapes()
        assert batch.counts.tokens == int((text.visible_until > 0).sum())
        index = np.arange(length)
        pairs = 0
        for row in range(rows):
            until = text.visible_until[row]
            mask = (index[None, :] <= index[:, None]) & (index[:, None] < until[None, :])  # [query, key]
            pairs += int(mask[until > 0].sum())
            assert np.all(mask[until > 0].any(axis=1)), "a real token sees at least itself"
            assert not np.any(mask[:, until == 0]), "padding is seen by nobody"
            for number, (s, t) in enumerate(batch.origins[row]):
                mine = r.turn[row] == number
                at = r.index[row][mine]
                now = samples[s].turns[t]
                assert r.targets[row][mine].tolist() == list(now.response_ids)
                np.testing.assert_allclose(r.behaviour[row][mine], now.logprobs, rtol=1e-6)
                assert np.all(r.trajectory[row][mine] == s) and np.all(r.step[row][mine] == t)
                np.testing.assert_allclose(r.advantages[row][mine], samples[s].advantage, rtol=1e-6)
                np.testing.assert_allclose(r.weights[row][mine].sum(), samples[s].weight(t), rtol=1e-6)
                ids, positions, pixels = context(samples[s], t)
                path = np.flatnonzero(mask[at[-1]])
                assert text.tokens[row][path].tolist() == ids.tolist()
                assert text.positions[:, row][:, path].tolist() == positions.tolist()
                # along the path every token sees exactly what stands before it
                np.testing.assert_array_equal(mask[np.ix_(path, path)], np.tri(len(path), dtype=bool))
                assert all(np.flatnonzero(mask[q]).tolist() == path[: n + 1].tolist() for n, q in enumerate(path))
                assert at.tolist() == path[len(path) - len(at) :].tolist()
                visual = text.visual_index[row][path]
                assert np.array_equal(visual >= 0, ids == IMAGE)
                if len(pixels):
                    blocks = batch.images.patches[row].reshape(-1, 4, 768)  # type: ignore[union-attr]
                    assert np.array_equal(blocks[visual[visual >= 0]], pixels)
                seen.append((s, t))
            padding = r.turn[row] < 0
            assert not r.weights[row][padding].any() and np.all(r.index[row][padding] < length)
        assert batch.counts.pairs == pairs
    assert sorted(seen) == [(s, t) for s, sample in enumerate(samples) for t in sample.live]
    total = Counts.total([batch.counts for batch in batches])
    assert total.turns == len(seen)
    assert total.separate_tokens == sum(len(context(samples[s], t)[0]) for s, t in seen)
    weights = sum(float(batch.responses.weights.sum(dtype=np.float64)) for batch in batches)
    assert weights == pytest.approx(normaliser(samples), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 3),
    size=st.integers(1, 4),
    share=st.booleans(),
    mode=st.sampled_from(["tree", "plain"]),
    tokens=st.sampled_from([70, 128, 400]),
    rows=st.sampled_from([1, 2, 4]),
    buckets=st.sampled_from([(1.0,), (1.0, 0.5), (1.0, 0.9, 0.8, 0.6, 0.4, 0.2)]),
    most=st.sampled_from([2, 12]),
)
def test_every_turn_sees_its_own_context(seed, groups, size, share, mode, tokens, rows, buckets, most):
    samples = [s for g in range(groups) for s in group(seed + g, size=size, share_picture=share, turns=(1, most))]
    options = PackSettings.fitted(samples, CONFIG, tokens=tokens, rows=rows, mode=mode, buckets=buckets)
    batches = pack(samples, CONFIG, pictures=picture, settings=options)
    check(samples, batches, options)
    assert len({batch.shape for batch in batches}) <= len(buckets)


def one_row(samples, mode="tree", tokens=600):
    options = PackSettings.fitted(samples, CONFIG, tokens=tokens, rows=1, mode=mode, buckets=(1.0,))
    (batch,) = pack(samples, CONFIG, pictures=picture, settings=options)
    check(samples, [batch], options)
    return batch


def test_a_row_by_hand():
    """System 1 2; task 3; screenshot; two turns. The walk is trunk 0, trunk 1, leaf 1, leaf 0, as drawn in the docs."""
    sha = "20"  # 4 x 2 patches, two tokens
    first = turn((1, 2, 3), leaf_of(sha, (6,)), (10, 11, 7), sha)
    second = turn((6, 10, 11, 7, 4), leaf_of(None, (6,)), (12, 7), None)
    batch = one_row([TrainSample(name="s", turns=(first, second))])
    real = batch.text.visible_until[0] > 0
    tokens, until = batch.text.tokens[0][real].tolist(), batch.text.visible_until[0][real].tolist()
    trunk0, trunk1 = [1, 2, 3], [6, 10, 11, 7, 4]
    leaf1, leaf0 = [5, 6, 12], [5, 121, IMAGE, IMAGE, 122, 6, 10, 11]
    assert tokens == trunk0 + trunk1 + leaf1 + leaf0
    assert until == [19] * 3 + [11] * 5 + [11] * 3 + [19] * 8
    # the picture stands at 5 and advances the clock by its longer side, 2
    leaf0_positions = batch.text.positions[:, 0, 11:19].tolist()
    assert leaf0_positions == [[3, 4, 5, 5, 7, 8, 9, 10], [3, 4, 5, 6, 7, 8, 9, 10], [3, 4, 5, 5, 7, 8, 9, 10]]
    assert batch.text.positions[0, 0, 3:11].tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    r = batch.responses
    assert r.index[0, :5].tolist() == [16, 17, 18, 9, 10]
    assert r.targets[0, :5].tolist() == [10, 11, 7, 12, 7]
    assert r.weights[0, :6].tolist() == pytest.approx([1 / 3] * 3 + [1 / 2] * 2 + [0])
    assert batch.counts == Counts(
        tokens=19, token_slots=batch.shape[1], separate_tokens=11 + 11, patches=8, patch_slots=batch.shape[2],
        responses=5, turns=2, trajectories=1, pairs=3 * 4 // 2 + (5 * 3 + 15) + (3 * 8 + 6) + (8 * 3 + 36),
    )  # fmt: skip


def test_siblings_share_what_is_equal_and_nothing_else():
    """System, task and screenshot once; responses share their beginning; each has its own weight there."""
    sha, prompt = "20", (1, 2, 3)
    a = turn(prompt, leaf_of(sha, (6,)), (10, 11, 7), sha, logprobs=(-0.1, -0.2, -0.3))
    b = turn(prompt, leaf_of(sha, (6,)), (10, 12, 7), sha, logprobs=(-0.4, -0.5, -0.6))
    samples = [TrainSample(name="a", turns=(a,), advantage=1.0), TrainSample(name="b", turns=(b,), advantage=-1.0)]
    batch = one_row(samples)
    assert batch.counts.tokens == 3 + 6 + 1 + 2  # prompt, leaf, the common first word, one second word each
    assert batch.counts.patches == 8
    index = batch.responses.index[0]
    assert index[0] == index[3] and index[1] == index[4] and index[2] != index[5]
    other = dataclasses.replace(b, screenshot="21")  # another picture of the same size: only the text before is shared
    apart = one_row([samples[0], dataclasses.replace(samples[1], turns=(other,))])
    assert (apart.counts.tokens, apart.counts.patches) == (3 + 2 + 2 * (4 + 2), 16)


def test_a_retry_shows_the_same_picture_and_it_is_encoded_once():
    sha = "03"
    turns = (
        turn((1, 2), leaf_of(sha, (6,)), (10, 7), sha, parsed=False),
        turn((6, 10, 7, 9), leaf_of(sha, (6,)), (11, 7), sha),
    )
    batch = one_row([TrainSample(name="s", turns=turns)])
    assert batch.counts.patches == 16
    assert one_row([TrainSample(name="s", turns=turns)], mode="plain").counts.patches == 32


def test_turns_without_weight_stay_in_the_context_alone():
    turns = trajectory_turns(np.random.default_rng(0), 4, first=(1, 2, 3), first_sha="11", text_only=0)
    masked = TrainSample(name="s", turns=turns, turn_weights=(1.0, 0.0, 2.0, 0.0))
    batch = one_row([masked])
    assert batch.origins == (((0, 0), (0, 2)),)
    assert normaliser([masked]) == 3
    assert batch.counts.patches == sum(len(picture(str(turns[t].screenshot)).patches) for t in (0, 2))


def test_token_weights_are_normalised_within_their_turn():
    one = turn((1, 2), (5,), (10, 11, 12, 7), None)
    sample = TrainSample(name="s", turns=(one,), token_weights=((0.0, 1.0, 0.0, 3.0),), turn_weights=(0.5,))
    batch = one_row([sample])
    assert batch.responses.weights[0, :4].tolist() == pytest.approx([0, 0.125, 0, 0.375])
    silent = dataclasses.replace(sample, token_weights=((0.0,) * 4,))
    options = PackSettings(tokens=16, responses=8, patches=16, buckets=(1.0,))
    (batch,) = pack([silent], CONFIG, pictures=picture, settings=options)
    assert not batch.responses.weights.any()


def test_a_history_rule_that_keeps_several_pictures():
    """K = 2: the trunk is empty, the leaf is the whole prompt; what prompts have in common they still share."""
    first = turn((), (1, 2, *leaf_of("20", (6,))), (10, 7), "20")
    second = dataclasses.replace(
        turn((), (1, 2, *leaf_of("20", (6,)), 10, 7, *leaf_of("21", (6,))), (11, 7), "21"),
        older_pictures=(("20", picture("20").grid),),
    )
    batch = one_row([TrainSample(name="s", turns=(first, second))])
    assert batch.counts.tokens == 2 + 6 + 2 + 6 + 1
    assert batch.counts.patches == 16


def test_the_tree_holds_far_fewer_tokens():
    """Fifteen turns: the trunk is computed once instead of fifteen times."""
    turns = trajectory_turns(np.random.default_rng(1), 15, first=tuple(range(1, 60)), first_sha="11")
    batch = one_row([TrainSample(name="s", turns=turns)])
    assert batch.counts.separate_tokens > 4 * batch.counts.tokens


def test_rows_are_filled():
    """At least 95 % of the tokens of full-size batches are real, with turns of a tenth of a row."""
    samples = [s for g in range(24) for s in group(g, size=5, turns=(3, 9), system=30)]
    options = PackSettings.fitted(samples, CONFIG, tokens=512, rows=4, shards=2, buckets=BUCKETS)
    batches = pack(samples, CONFIG, pictures=picture, settings=options)
    total = Counts.total([batch.counts for batch in batches])
    assert len(batches) > 5 and total.useful_share >= 0.95
    loads = [batch.text.visible_until.reshape(2, -1) > 0 for batch in batches]
    for load in loads:
        one, other = load.sum(axis=1)
        assert abs(int(one) - int(other)) <= 512 * 0.5


def test_a_last_batch_is_spread_over_all_rows():
    samples = group(5, size=4, turns=(3, 3))
    options = PackSettings.fitted(samples, CONFIG, tokens=600, rows=4)
    (batch,) = pack(samples, CONFIG, pictures=picture, settings=options)
    check(samples, [batch], options)
    assert (batch.text.visible_until > 0).any(axis=1).sum() > 1
    assert batch.shape[1] < 600


def test_rows_of_one_process_are_a_slice_of_the_plan():
    samples = group(6, size=4)
    options = PackSettings.fitted(samples, CONFIG, tokens=128, rows=2, buckets=(1.0,))
    for plan in plan_batches(samples, CONFIG, options):
        whole = build(plan, CONFIG, pictures=picture, settings=options)
        for row in range(2):
            part = build(plan, CONFIG, pictures=picture, settings=options, rows=slice(row, row + 1))
            assert np.array_equal(part.text.tokens[0], whole.text.tokens[row])
            assert np.array_equal(part.images.patches[0], whole.images.patches[row])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"leaf_ids": (5, IMAGE, 6)}, "turn 0, leaf: 1 image placeholders, but its 1 pictures"),
        ({"trunk_ids": (1, IMAGE)}, "turn 0, trunk: 1 image placeholders"),
        ({"response_ids": (IMAGE, 7), "logprobs": (-1.0, -1.0), "versions": (0, 0)}, "response: 1 image"),
        ({"trunk_ids": (), "leaf_ids": (), "screenshot": None, "grid": None}, "empty prompt"),
    ],
)
def test_a_turn_that_contradicts_itself_is_refused_by_name(change, message):
    broken = dataclasses.replace(turn((1, 2), leaf_of("20", (6,)), (10, 7), "20"), **change)
    options = PackSettings(tokens=64, patches=64, responses=16)
    with pytest.raises(ValueError, match=f"sample bad, .*{message}"):
        pack([TrainSample(name="bad", turns=(broken,))], CONFIG, pictures=picture, settings=options)


def test_a_turn_that_fits_into_no_row_and_a_picture_of_another_size_are_refused():
    long = TrainSample(name="long", turns=(turn(range(1, 90), (5,), (10, 7), None),))
    with pytest.raises(ValueError, match="a turn is never cut"):
        pack([long], CONFIG, pictures=picture, settings=PackSettings(tokens=64, patches=64, responses=16))
    good = TrainSample(name="good", turns=(turn((1, 2), leaf_of("20", (6,)), (10, 7), "20"),))
    other = Patches(patches=np.zeros((16, 768), np.uint8), grid=(4, 4), tokens=4)
    with pytest.raises(ValueError, match="other limits"):
        pack([good], CONFIG, pictures=lambda sha: other, settings=PackSettings(tokens=64, patches=64, responses=16))


# --- Epochs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["group", "trajectory"])
@pytest.mark.parametrize("per_update", [1, 10, 25, 10_000])
def test_epochs_hold_every_turn_once_and_drop_none(unit, per_update):
    samples = [s for g in range(7) for s in group(g, size=3)]
    plans = list(updates(samples, turns_per_update=per_update, epochs=3, seed=1, iteration=4, unit=unit))
    by_epoch = [[p for p in plans if p.epoch == epoch] for epoch in range(3)]
    turns = sum(len(s.live) for s in samples)
    for one in by_epoch:
        names = [s.name for plan in one for s in plan.samples]
        assert sorted(names) == sorted(s.name for s in samples)
        assert [plan.number for plan in one] == list(range(one[0].of))
        sizes = [sum(len(s.live) for s in plan.samples) for plan in one]
        assert min(sizes) > 0
        if per_update == 25:
            largest = max(sum(len(s.live) for s in samples if s.group == f"g{g}") for g in range(7))
            assert len(sizes) == round(turns / 25) and max(sizes) - min(sizes) <= 2 * largest
    orders = [[s.name for plan in one for s in plan.samples] for one in by_epoch]
    assert all(a != b for a, b in itertools.pairwise(orders)), "epochs are shuffled anew"
    again = list(updates(samples, turns_per_update=per_update, epochs=3, seed=1, iteration=4, unit=unit))
    assert [[s.name for s in p.samples] for p in again] == [[s.name for s in p.samples] for p in plans]
    other = list(updates(samples, turns_per_update=per_update, epochs=1, seed=1, iteration=5, unit=unit))
    assert [s.name for p in other for s in p.samples] != orders[0]
    if unit == "group" and per_update == 10:
        for plan in plans:
            for name in {s.group for s in plan.samples}:
                assert sum(s.group == name for s in plan.samples) == 3
