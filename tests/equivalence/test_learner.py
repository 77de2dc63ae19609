"""The learner computes one thing however its turns are packed, ordered, sharded or interrupted by a broken sample.

All runs of one model share a compiled program: one shape, one learner.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.qwen3_vl.table import build_tree, leaves
from owrl_jax.models.run import Run
from owrl_jax.rl.batch import PackedBatch, TrainSample
from owrl_jax.rl.diagnostics import mismatch, recomputed, share_of, with_proximal, with_reference
from owrl_jax.rl.loss import LossSettings, NllSettings, normaliser
from owrl_jax.rl.optimizer import OptimizerSettings
from owrl_jax.rl.packing import PackSettings, pack, stream
from owrl_jax.rl.trainable import Trainable
from owrl_jax.rl.update import Learner, NothingFinite, TrainState
from owrl_jax.sharding import TRAIN_RULES, MeshConfig, Sharder, make_mesh
from tests.unit.learner_world import config, group, picture, trajectory_turns

RATE = OptimizerSettings(learning_rate=2e-3)
TREE = PackSettings(tokens=256, rows=2, patches=256, responses=96, buckets=(1.0,))
PLAIN = dataclasses.replace(TREE, mode="plain")


@functools.cache
def learner(moe: bool = False) -> Learner:
    return Learner(Qwen3VL(config(moe=moe, tied=not moe)), RATE)


def fresh(moe: bool = False, scale: float = 4.0) -> TrainState:
    """A new state; parameters large enough that every part matters."""
    model = learner(moe).model
    params = model.init(jax.random.key(0))
    scaled = {row.name: leaf * scale if row.init == "normal" else leaf for row, leaf in leaves(model.config, params)}
    return learner(moe).init(build_tree(model.config, lambda row: scaled[row.name]))


def packed(samples, settings=TREE, c=None) -> list[PackedBatch]:
    return pack(samples, c or config(), pictures=picture, settings=settings)


def sampled_from(state: TrainState, samples, moe: bool = False, noise: float = 0.25) -> list[TrainSample]:
    """The samples with behaviour log-probs near the policy's, so that some tokens are clipped on either side."""
    pack_plain = functools.partial(stream, config=config(), pictures=picture, settings=PLAIN)
    found = recomputed(learner(moe), state.params, samples, pack_plain)
    rng = np.random.default_rng(0)
    made = []
    for sample, logps in zip(samples, found, strict=True):
        drawn = [np.minimum(logps[t] + noise * rng.normal(size=len(logps[t])), -1e-6) for t in range(len(sample.turns))]
        turns = tuple(
            dataclasses.replace(turn, logprobs=tuple(map(float, values)))
            for turn, values in zip(sample.turns, drawn, strict=True)
        )
        made.append(dataclasses.replace(sample, turns=turns))
    return made


def random_groups(seed: int) -> list[TrainSample]:
    """Two groups, one of which shares its first picture; retries among the turns; one long episode."""
    samples = group(seed, size=3, turns=(1, 6)) + group(seed + 1, size=2, turns=(2, 5), share_picture=False)
    rng = np.random.default_rng(seed)
    long = trajectory_turns(rng, 12, first=samples[0].turns[0].trunk_ids, first_sha="31", malformed=0.3)
    return [*samples, TrainSample(name="long", turns=long, advantage=-1.3, group=samples[0].group)]


def assert_same(ours, reference, *, loss: float = 1e-6, gradient: float = 1e-5) -> None:
    assert abs(ours[0] - reference[0]) <= loss * max(abs(reference[0]), 1e-3)
    assert ours[1].keys() == reference[1].keys()
    for name, want in reference[1].items():
        want, got = np.asarray(want), np.asarray(ours[1][name])
        assert np.abs(want).max() > 0, f"{name} has no gradient: the case is too small"
        assert np.abs(got - want).max() <= gradient * np.abs(want).max(), name


@pytest.mark.parametrize(("moe", "seed"), [(False, 1), (False, 20), (True, 1), (True, 40)])
def test_tree_equals_one_prompt_per_turn(moe, seed):
    """Loss and the gradient of every parameter, in the first epoch and after an update in the second."""
    state = fresh(moe)
    samples = sampled_from(state, random_groups(seed), moe)
    tree, plain = packed(samples), packed(samples, PLAIN)
    assert sum(b.counts.tokens for b in tree) < 0.6 * sum(b.counts.tokens for b in plain)
    assert_same(learner(moe).gradients(state, tree), learner(moe).gradients(state, plain))
    state, metrics = learner(moe).update(state, tree)
    assert 0.05 < metrics["policy/clip_fraction"] < 0.9
    second = learner(moe).gradients(state, tree), learner(moe).gradients(state, plain)
    assert second[0][0] != pytest.approx(metrics["loss/total"], rel=1e-3)
    assert_same(*second)


def test_packed_equals_alone():
    state = fresh()
    samples = sampled_from(state, random_groups(3))
    together = learner().gradients(state, packed(samples))
    z = normaliser(samples)
    parts = [(normaliser([s]), learner().gradients(state, packed([s]))) for s in samples]
    loss = sum(share * value for share, (value, _) in parts) / z
    gradients = {
        name: sum(share * np.asarray(g[name], np.float64) for share, (_, g) in parts) / z for name in together[1]
    }
    assert_same((loss, gradients), together)


def test_order_of_samples_rows_and_batches_is_irrelevant():
    state = fresh()
    samples = sampled_from(state, random_groups(5))
    batches = packed(samples)
    assert len(batches) > 1
    reference = learner().gradients(state, batches)
    assert_same(learner().gradients(state, batches[::-1]), reference)
    assert_same(learner().gradients(state, packed(samples[::-1])), reference)


def turned(batch: PackedBatch) -> PackedBatch:
    """The same batch, rows in reverse."""
    flip = lambda x, axis=0: np.flip(x, axis)  # noqa: E731
    text = dataclasses.replace(
        jax.tree.map(flip, dataclasses.replace(batch.text, positions=None)), positions=flip(batch.text.positions, 1)
    )
    images, responses = jax.tree.map(flip, (batch.images, batch.responses))
    return dataclasses.replace(batch, text=text, images=images, responses=responses, origins=batch.origins[::-1])


def test_order_within_a_batch_is_irrelevant():
    state = fresh()
    batches = packed(sampled_from(state, random_groups(6)))
    assert_same(learner().gradients(state, [turned(b) for b in batches]), learner().gradients(state, batches))


@pytest.mark.parametrize(("given", "rate"), [(None, 2e-3), (5e-4, 5e-4)])
def test_an_update_is_its_gradients_applied_once(given, rate):
    """Two micro-batches or more; every parameter moves by AdamW on the gradient that `gradients` reports."""
    state = fresh()
    samples = sampled_from(state, random_groups(7))
    before = {row.name: np.array(leaf) for row, leaf in leaves(config(), state.params)}
    loss, gradients = learner().gradients(state, packed(samples))
    state, metrics = learner().update(state, packed(samples), learning_rate=given)
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in gradients.values()))
    assert metrics["grad/norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["grad/clip_factor"] == pytest.approx(min(1, 1 / norm), rel=1e-5)
    modules = [v for k, v in metrics.items() if k.startswith("grad/norm/")]
    assert np.sqrt(np.sum(np.square(modules))) == pytest.approx(norm, rel=1e-5)
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-6)
    assert metrics["update/weight"] == pytest.approx(metrics["update/normaliser"], rel=1e-6)
    assert (metrics["update/trajectories"], metrics["update/turns"]) == (6, sum(len(s.turns) for s in samples))
    assert int(state.updates) == metrics["update/count"] == 1
    for row, leaf in leaves(config(), state.params):
        g = np.asarray(gradients[row.name], np.float64) * min(1, 1 / norm)
        direction = g / (np.abs(g) + 1e-8)  # the first step of Adam
        decay = 0.1 * before[row.name] if row.init == "normal" else 0
        np.testing.assert_allclose(
            leaf, before[row.name] - rate * (direction + decay), atol=rate / 1e3, err_msg=row.name
        )


def test_learning_rate_zero_leaves_ratio_one():
    """T17: three iterations of two epochs on what this policy sampled, packed anew each time."""
    still = Learner(learner().model, dataclasses.replace(RATE, learning_rate=0.0))
    state = fresh()
    before = {row.name: np.array(leaf) for row, leaf in leaves(config(), state.params)}
    for iteration in range(3):
        samples = sampled_from(state, random_groups(50 + iteration), noise=0.0)
        for settings in (TREE, PLAIN):
            state, metrics = still.update(state, packed(samples, settings))
            assert metrics["policy/clip_fraction"] == 0
            assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
            assert metrics["policy/log_ratio_max"] < 2e-5
    assert all(np.array_equal(leaf, before[row.name]) for row, leaf in leaves(config(), state.params))
    assert int(state.updates) == 6


# --- A broken sample ----------------------------------------------------------------------------------------


def test_a_sample_that_is_not_finite_is_left_out_exactly(caplog):
    """Its advantage is NaN; the step is that of the others alone, normaliser included, and the log has its name."""
    samples = sampled_from(fresh(), random_groups(9))
    broken = [*samples[:2], dataclasses.replace(samples[2], advantage=float("nan")), *samples[3:]]
    rest = [s for n, s in enumerate(samples) if n != 2]
    want, reference = learner().update(fresh(), packed(rest))
    with caplog.at_level(logging.WARNING):
        got, metrics = learner().update(fresh(), packed(broken))
    assert samples[2].name in caplog.text and samples[1].name not in caplog.text
    assert metrics["update/trajectories_dropped_nonfinite"] == 1
    assert metrics["update/normaliser"] == reference["update/normaliser"]
    for (row, a), (_, b) in zip(leaves(config(), got.params), leaves(config(), want.params), strict=True):
        assert np.array_equal(a, b), row.name


def test_a_forward_pass_that_overflows_is_blamed_on_its_samples(caplog):
    """One row of the embedding table is NaN (untied): the trajectories that hold this word go, wherever they lie."""
    moe = True  # the untied model
    samples = sampled_from(fresh(moe), random_groups(11), moe)

    def holders(word: int) -> list[bool]:
        return [any(word in (*t.trunk_ids, *t.leaf_ids, *t.response_ids[:-1]) for t in s.turns) for s in samples]

    word = next(w for w in range(1, 110) if 1 <= sum(holders(w)) <= 3)
    state = fresh(moe)
    params = dict(state.params)
    params["embed"] = {"table": params["embed"]["table"].at[word].set(jnp.nan)}
    state = dataclasses.replace(state, params=params)
    with caplog.at_level(logging.WARNING):
        state, metrics = learner(moe).update(state, packed(samples))
    assert metrics["update/trajectories_dropped_nonfinite"] == sum(holders(word))
    for sample, hit in zip(samples, holders(word), strict=True):
        assert (sample.name in caplog.text) == hit
    finite = {row.name: np.isfinite(leaf).all() for row, leaf in leaves(config(moe=True, tied=False), state.params)}
    assert [name for name, ok in finite.items() if not ok] == ["embed.table"]


def test_nothing_finite_is_an_error():
    samples = [dataclasses.replace(s, advantage=float("nan")) for s in group(2, size=2)]
    with pytest.raises(NothingFinite, match="any sample"):
        learner().update(fresh(), packed(samples))


def test_batches_of_different_calls_and_no_batches_are_refused():
    with pytest.raises(ValueError, match="one call of pack"):
        learner().gradients(fresh(), packed(group(1)) + packed(group(2)))
    with pytest.raises(ValueError, match="at least one batch"):
        learner().update(fresh(), [])


# --- Devices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moe", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_eight_devices_equal_one(moe):
    """Gradients, and parameters after two updates; rows are split, moments are sharded like their parameters."""
    c = config(moe=moe, tied=not moe)
    mesh = MeshConfig(fsdp=2, expert=2, tensor=2) if moe else MeshConfig(replica=2, fsdp=2, tensor=2)
    shard = Sharder(mesh=make_mesh(mesh), rules=TRAIN_RULES)
    spread = Learner(Qwen3VL(c, Run(shard=shard)), RATE)
    one, many = fresh(moe), spread.init(jax.device_put(fresh(moe).params, shard.tree(c)))
    samples = sampled_from(one, random_groups(13), moe)
    settings = dataclasses.replace(TREE, rows=4, shards=4 // (2 if moe else 1))
    batches = packed(samples, settings)
    assert_same(spread.gradients(many, batches), learner(moe).gradients(one, packed(samples)), gradient=2e-5)
    for _ in range(2):
        one, _ = learner(moe).update(one, packed(samples))
        many, _ = spread.update(many, batches)
    for (row, a), (_, b) in zip(leaves(c, many.params), leaves(c, one.params), strict=True):
        # Adam's first steps are signs: where a gradient is rounding noise, so is the step.
        assert np.mean(np.abs(np.asarray(a) - np.asarray(b)) > 1e-5) < 2e-3, row.name
    kernel, moment = many.params["layers"]["attn"]["q"], many.moments.mu["layers.attn.q"]
    assert kernel.sharding == moment.sharding == spread.abstract().moments.mu["layers.attn.q"].sharding
    assert kernel.addressable_shards[0].data.size < kernel.size


def test_abstract_state_is_the_shape_of_a_state():
    for trainable in (Trainable(), Trainable(lora_rank=2, freeze=("vision",))):
        one = Learner(learner().model, RATE, trainable=trainable)
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), one.init(fresh().params))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), one.abstract()) == shapes


# --- What is trained ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "freeze",
    [("vision",), *(pytest.param(f, marks=pytest.mark.slow) for f in (("vision", "projector"), ("language",)))],
)
def test_frozen_parts_stay_and_the_others_have_their_usual_gradient(freeze):
    part = Learner(learner().model, RATE, trainable=Trainable(freeze=freeze))
    samples = sampled_from(fresh(), group(15, size=3))
    loss, reference = learner().gradients(fresh(), packed(samples))
    state = part.init(fresh().params)
    before = {row.name: np.array(leaf) for row, leaf in leaves(config(), state.params)}
    found = part.gradients(state, packed(samples))
    assert_same(found, (loss, {name: reference[name] for name in found[1]}))
    frozen = {name for name in before if name not in found[1]}
    assert frozen and state.moments.mu.keys() == found[1].keys()
    state, _ = part.update(state, packed(samples))
    for row, leaf in leaves(config(), state.params):
        assert np.array_equal(leaf, before[row.name]) == (row.name in frozen), row.name


@pytest.mark.parametrize("moe", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adapters_follow_the_chain_rule_and_merge(moe):
    """dA = s·dW·Bᵀ and dB = s·Aᵀ·dW, dW from full training of the merged weights; the model itself stays."""
    c = config(moe=moe, tied=not moe)
    low = Learner(learner(moe).model, RATE, trainable=Trainable(lora_rank=2, lora_alpha=6.0))
    state = low.init(fresh(moe).params, key=jax.random.key(3))
    for (row, a), (_, b) in zip(leaves(c, low.policy(state)), leaves(c, state.params), strict=True):
        assert np.array_equal(a, b), f"{row.name}: new adapters change nothing"
    samples = sampled_from(fresh(moe), group(15, size=3), moe)
    before = {row.name: np.array(leaf) for row, leaf in leaves(c, state.params)}
    state, _ = low.update(state, packed(samples))
    for row, leaf in leaves(c, state.params):
        assert np.array_equal(leaf, before[row.name]), row.name
    merged = low.policy(state)
    assert not np.array_equal(merged["layers"]["attn"]["q"], state.params["layers"]["attn"]["q"])

    loss, small = low.gradients(state, packed(samples))
    full_loss, full = learner(moe).gradients(learner(moe).init(merged), packed(samples))
    assert loss == pytest.approx(full_loss, rel=1e-6)
    assert {n.removeprefix("lora.")[:-2] for n in small} == set(low.trainable.adapters(c))
    for name in low.trainable.adapters(c):
        a, b = (np.asarray(state.adapters[f"lora.{name}.{s}"], np.float64) for s in "ab")  # type: ignore[index]
        dw = np.asarray(full[name], np.float64).reshape(*a.shape[:-1], b.shape[-1])
        for side, want in (("a", 3 * dw @ b.swapaxes(-1, -2)), ("b", 3 * a.swapaxes(-1, -2) @ dw)):
            got = np.asarray(small[f"lora.{name}.{side}"])
            assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max(), (name, side)


def test_moments_may_rest_in_host_memory():
    samples = sampled_from(fresh(), group(15, size=3))
    host = Learner(learner().model, RATE, moments_on_host=True)
    here, there = fresh(), host.init(fresh().params)
    for _ in range(2):
        here, _ = learner().update(here, packed(samples))
        there, _ = host.update(there, packed(samples))
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(there.moments)} == {"pinned_host"}
    for (row, a), (_, b) in zip(leaves(config(), there.params), leaves(config(), here.params), strict=True):
        assert np.array_equal(a, b), row.name


# --- Other losses, log-probs, programs ----------------------------------------------------------------------


def test_supervised_loss_is_the_mean_likelihood_per_turn():
    taught = Learner(learner().model, RATE, loss=NllSettings())
    samples = [dataclasses.replace(s, advantage=1.0) for s in group(17, size=3)]
    pack_plain = functools.partial(stream, config=config(), pictures=picture, settings=PLAIN)
    logps = recomputed(learner(), fresh().params, samples, pack_plain)
    per_turn = [-float(np.mean(values)) for turns in logps for values in turns.values()]
    loss, _ = taught.gradients(fresh(), packed(samples))
    assert loss == pytest.approx(np.mean(per_turn), rel=1e-6)
    state = fresh()
    for _ in range(3):
        state, metrics = taught.update(state, packed(samples))
    assert metrics["loss/total"] < loss


def test_log_probs_computed_anew_are_those_of_each_turn_alone():
    """Tree against plain, and the numbers that are logged about the difference."""
    state = fresh()
    samples = random_groups(19)
    by = {
        settings.mode: recomputed(
            learner(), state.params, samples,
            functools.partial(stream, config=config(), pictures=picture, settings=settings),
        )
        for settings in (TREE, PLAIN)
    }  # fmt: skip
    for sample, tree, plain in zip(samples, by["tree"], by["plain"], strict=True):
        assert tree.keys() == plain.keys() == set(range(len(sample.turns)))
        for turn in tree:
            np.testing.assert_allclose(tree[turn], plain[turn], atol=2e-5)
    exact = sampled_from(state, samples, noise=0.0)
    found = mismatch(exact, by["tree"])
    assert found["mismatch/logp_max"] < 2e-5 and found["mismatch/trajectories"] == len(samples)
    # one turn number is off by 0.5
    off = [
        dataclasses.replace(s, turns=tuple(
            dataclasses.replace(t, logprobs=tuple(p - 0.5 for p in t.logprobs)) if n == 1 else t
            for n, t in enumerate(s.turns)
        ))
        for s in exact
    ]  # fmt: skip
    found = mismatch(off, by["tree"])
    assert found["mismatch/logp_mean_turn_01"] == pytest.approx(0.5, abs=1e-4)
    assert found["mismatch/logp_mean_turn_00"] < 2e-5
    assert found["mismatch/logp_max"] == pytest.approx(0.5, abs=1e-4)
    assert mismatch([], []) == {}
    some = share_of(samples, 0.4, seed=1, iteration=2)
    assert len(some) == round(0.4 * len(samples)) and share_of(samples, 0.0, seed=1, iteration=2) == []
    assert [s.name for s in share_of(samples, 0.4, seed=1, iteration=2)] == [s.name for s in some]


def test_proximal_and_reference_log_probs_travel_with_their_tokens():
    """`decoupled` with the policy itself as proximal has ratio 1 everywhere, whatever the behaviour was."""
    state = fresh()
    samples = sampled_from(state, random_groups(21), noise=0.5)
    pack_tree = functools.partial(stream, config=config(), pictures=picture, settings=TREE)
    settings = LossSettings(objective="decoupled", importance_cap=1e3, kl_coef=0.5)
    stale = Learner(learner().model, RATE, loss=settings)
    with pytest.raises(ValueError, match="proximal"):
        stale.gradients(state, packed(samples))
    ready = with_reference(
        learner(), state.params, with_proximal(learner(), state.params, samples, pack_tree), pack_tree
    )
    state, metrics = stale.update(state, packed(ready, PLAIN))
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/clip_fraction"] == 0
    assert metrics["loss/kl_reference"] == pytest.approx(0, abs=1e-6)
    assert metrics["policy/importance_mean"] == pytest.approx(np.mean([
        np.exp(p - b) for s in ready for t, ps in zip(s.turns, s.proximal, strict=True)
        for p, b in zip(ps, t.logprobs, strict=True)
    ]), rel=1e-4)  # fmt: skip


def test_one_program_per_shape():
    buckets = dataclasses.replace(TREE, buckets=(1.0, 0.75, 0.5))
    one = Learner(learner().model, RATE)
    state = fresh()
    for seed in range(4):
        state, _ = one.update(state, packed(random_groups(60 + seed), buckets))
    assert one._micro._cache_size() <= 3 and one._apply._cache_size() == 1
