"""Mesh sizes, and the resolver on hand-worked cases: what is split, what is not, and what it says about that."""

from __future__ import annotations

import functools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from owrl_jax.models.qwen3_vl.config import PRESETS
from owrl_jax.models.qwen3_vl.table import leaves, table
from owrl_jax.sharding import (
    AXES,
    JUDGE_RULES,
    ROLLOUT_RULES,
    TRAIN_RULES,
    MeshConfig,
    Sharder,
    ShardingError,
    make_mesh,
    with_rules,
)

P = PartitionSpec


def sharder(rules=TRAIN_RULES, **sizes: int) -> Sharder:
    return Sharder(make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())]), rules)


class FakeDevice:
    """Enough of a device to stand in a mesh that nothing runs on."""

    platform = device_kind = "cpu"

    def __init__(self, number: int, slice_index: int = 0):
        self.id, self.slice_index, self.process_index = number, slice_index, slice_index


def large(rules=TRAIN_RULES, **sizes: int) -> Sharder:
    """A sharder for more devices than there are here; the resolver asks for sizes only."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    devices = np.array([FakeDevice(n) for n in range(math.prod(shape))], dtype=object).reshape(shape)
    return Sharder(jax.sharding.Mesh(devices, AXES), rules)


def test_sizes_fill():
    assert MeshConfig(tensor=2, replica=2).sizes(8) == {"replica": 2, "fsdp": 2, "context": 1, "expert": 1, "tensor": 2}
    assert MeshConfig(fsdp=4, tensor=-1).sizes(8)["tensor"] == 2
    assert MeshConfig().sizes(1) == dict.fromkeys(AXES, 1)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: MeshConfig(fsdp=0), ["fsdp=0", "at least 1"]),
        (lambda: MeshConfig(tensor=-2), ["tensor=-2", "-1"]),
        (lambda: MeshConfig(fsdp=-1, tensor=-1), ["fsdp and tensor", "only one"]),
        (lambda: MeshConfig(fsdp=3).sizes(8), ["fsdp=3", "needs 3 devices", "there are 8"]),
        (lambda: MeshConfig(fsdp=-1, tensor=3).sizes(8), ["fsdp=-1", "tensor=3", "does not divide the 8"]),
        (lambda: with_rules(TRAIN_RULES, embd="fsdp"), ["'embd'", "did you mean 'embed'"]),
        (lambda: sharder().spec(("batchh",), (4,)), ["'batchh'", "did you mean 'batch'"]),
        (lambda: sharder().spec(("batch",), (4, 4)), ["1 logical axes", "(4, 4)"]),
        (lambda: sharder(rules=(("batch", "tensr"),)), ["'batch'", "'tensr'", "tensor"]),
        (lambda: sharder(rules=(("batch", "fsdp"), ("batch", None))), ["batch more than once"]),
    ],
)
def test_errors_name_the_value_and_the_way_out(make, words):
    with pytest.raises(ShardingError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_mesh_is_automatic_and_ordered():
    mesh = make_mesh(MeshConfig(replica=2, fsdp=2, tensor=2))
    assert mesh.axis_names == AXES == ("replica", "fsdp", "context", "expert", "tensor")
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh.devices.shape == (2, 2, 1, 1, 2)
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(2, 2, 2)
    assert (np.diff(ids, axis=2) == 1).all(), "tensor partners are neighbours"


def test_only_replica_crosses_slices():
    devices = [FakeDevice(n, slice_index=n // 4) for n in range(8)]
    mesh = make_mesh(MeshConfig(replica=4, fsdp=2), devices)
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert slices.shape == (4, 2, 1, 1, 1)
    assert sorted(slices[:, 0, 0, 0, 0]) == [0, 0, 1, 1]
    assert (slices == slices[:, :1]).all(), "no fsdp group reaches over two slices"
    with pytest.raises(ShardingError, match=r"replica=1 .*2 slices"):
        make_mesh(MeshConfig(fsdp=8), devices)


HAND_WORKED = {
    # (mesh sizes, logical axes, shape): specification
    "a matrix": ({"fsdp": 4, "tensor": 2}, ("embed", "mlp"), (64, 96), P("fsdp", "tensor")),
    "two mesh axes, one dimension": ({"replica": 2, "fsdp": 4}, ("batch", "length"), (8, 16), P(("replica", "fsdp"))),
    "only the part that divides": ({"replica": 2, "fsdp": 4}, ("batch", None), (6, 16), P("replica")),
    "what is left must divide": ({"replica": 2, "fsdp": 2}, ("batch",), (2,), P("replica")),
    "the second of two alone": ({"replica": 4, "fsdp": 2}, ("batch",), (2,), P("fsdp")),
    "size 1 is left out": ({"fsdp": 1, "tensor": 2}, ("embed", "heads", "head_dim"), (64, 4, 32), P(None, "tensor")),
    "one use per array": ({"tensor": 2}, ("heads", "mlp"), (4, 4), P("tensor")),
    "experts": ({"fsdp": 2, "expert": 2, "tensor": 2}, ("expert", "embed", None, "mlp"), (8, 64, 2, 40),
                P("expert", "fsdp", None, "tensor")),
    "nothing": ({"fsdp": 8}, (None, None), (8, 8), P()),
    "a scalar": ({"fsdp": 8}, (), (), P()),
    "vision mlp 4304 on 16": ({"tensor": 16}, ("vis_embed", "vis_mlp"), (1152, 4304), P(None, "tensor")),
    "vision mlp 4304 on 32": ({"tensor": 32}, ("vis_embed", "vis_mlp"), (1152, 4304), P()),
    "16 vision heads on 32": ({"tensor": 32}, ("vis_embed", None, "vis_heads", "head_dim"), (1152, 3, 16, 72), P()),
    "8 key heads on 8": ({"tensor": 8}, ("embed", "kv_heads", "head_dim"), (2560, 8, 128), P(None, "tensor")),
    "8 key heads on 16": ({"tensor": 16}, ("embed", "kv_heads", "head_dim"), (2560, 8, 128), P()),
}  # fmt: skip


@pytest.mark.parametrize("sizes, axes, shape, spec", HAND_WORKED.values(), ids=HAND_WORKED.keys())
def test_resolver(sizes, axes, shape, spec):
    assert large(**sizes).spec(axes, shape) == spec


def test_reasons_are_told_and_logged_once(caplog):
    here = large(tensor=16)
    with caplog.at_level(logging.INFO, logger="owrl_jax.sharding"):
        for _ in range(3):
            (reason,) = here.dropped(("embed", "kv_heads", "head_dim"), (2048, 8, 128))
    assert reason == "kv_heads=8 is not split over tensor: 16 does not divide it"
    assert [record.getMessage().count(reason) for record in caplog.records] == [1]
    (reason,) = large(replica=2, fsdp=4).dropped(("batch",), (6,))
    assert reason == "batch=6 / 2 is not split over fsdp: 4 does not divide it"
    (reason,) = large(tensor=2).dropped(("heads", "mlp"), (4, 4))
    assert reason == "mlp is not split over tensor: heads of the same array already is"
    assert large(fsdp=4, tensor=2).dropped(("embed", "mlp"), (64, 96)) == ()


def test_explain_names_what_limits_the_published_sizes():
    """8 key heads (4 in the sparse sizes), 16 vision heads; 4304 = 16 · 269 ends at 16 as well."""
    assert large(fsdp=8, tensor=4, expert=8).explain(PRESETS["30b-a3b"]) == []
    assert large(fsdp=8, tensor=8).explain(PRESETS["8b"]) == []
    sixteen = large(tensor=16).explain(PRESETS["8b"])
    assert len(sixteen) == 1 and sixteen[0].startswith("kv_heads=8 is not split over tensor")
    assert "layers.attn.k" in sixteen[0] and "layers.attn.q" not in sixteen[0]
    eight = large(tensor=8).explain(PRESETS["30b-a3b"])
    assert len(eight) == 1 and eight[0].startswith("kv_heads=4 ")
    said = " ".join(large(tensor=32).explain(PRESETS["8b"]))
    assert "vis_mlp=4304" in said and "vis_heads=16" in said


def test_every_role_knows_every_axis():
    names = [name for name, _ in TRAIN_RULES]
    assert [name for name, _ in ROLLOUT_RULES] == [name for name, _ in JUDGE_RULES] == names
    used = {axis for config in PRESETS.values() for row in table(config) for axis in row.full_axes if axis}
    assert used <= set(names)


def test_roles_differ_in_where_weights_lie():
    axes, shape = ("embed", "mlp"), (2560, 9728)
    assert large(TRAIN_RULES, fsdp=4, tensor=2).spec(axes, shape) == P("fsdp", "tensor")
    assert large(ROLLOUT_RULES, fsdp=4, tensor=2).spec(axes, shape) == P(None, "tensor")
    assert large(with_rules(ROLLOUT_RULES, embed="fsdp"), fsdp=4, tensor=2).spec(axes, shape) == P("fsdp", "tensor")


def test_trained_weights_are_split_almost_entirely():
    """At 8B on 8 × 8 devices a device holds 1/64 of the weights, up to the few small vectors."""
    here = large(fsdp=8, tensor=8)
    held = total = 0
    for row in table(PRESETS["8b"]):
        split = 1
        for entry in here.spec(row.full_axes, row.full_shape):
            split *= math.prod(here.mesh.shape[axis] for axis in ((entry,) if isinstance(entry, str) else entry or ()))
        held += row.size // split
        total += row.size
    assert held * 64 < total * 1.01


def test_tree_matches_the_table():
    here = sharder(fsdp=4, tensor=2)
    for row, sharding in leaves(PRESETS["2b"], here.tree(PRESETS["2b"])):
        assert sharding.mesh == here.mesh and sharding.spec == here.spec(row.full_axes, row.full_shape)
        assert sharding.shard_shape(row.full_shape)


def test_constrain_inside_a_program_with_the_sharder_static():
    here = sharder(fsdp=2, context=2, tensor=2)
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def program(s, x):
        traced.append(s)
        return s.constrain(x * 2, "batch", "length", "act_mlp")

    x = jnp.arange(4 * 8 * 6, dtype=jnp.float32).reshape(4, 8, 6)
    out = program(here, x)
    assert out.sharding.spec == P("fsdp", "context", "tensor")
    np.testing.assert_array_equal(out, np.asarray(x) * 2)
    assert program(sharder(fsdp=2, context=2, tensor=2), x).sharding == out.sharding
    assert len(traced) == 1, "equal sharders are one static argument"


def test_one_device_leaves_arrays_alone():
    here = sharder()
    x = jnp.ones((4, 8, 6))
    assert here.constrain(x, "batch", "length", "act_mlp") is x
    with pytest.raises(ShardingError, match="lenght"):
        here.constrain(x, "batch", "lenght", "act_mlp")


NAMES = st.sampled_from([name for name, _ in TRAIN_RULES] + [None])


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES}),
    dims=st.lists(st.tuples(NAMES, st.integers(1, 48)), max_size=5),
)
def test_any_specification_is_valid(sizes, dims):
    """Whatever the sizes: no mesh axis twice, every split exact, every axis asked for either used or explained."""
    here = large(**sizes)
    axes, shape = tuple(name for name, _ in dims), tuple(length for _, length in dims)
    spec = here.spec(axes, shape)
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    used = [axis for entry in entries for axis in entry]
    assert len(used) == len(set(used))
    assert all(n % math.prod(sizes[a] for a in entry) == 0 for n, entry in zip(shape, entries, strict=False))
    rules = dict(TRAIN_RULES)
    asked = 0
    for name in axes:
        wanted = rules[name] if name else None
        asked += sum(sizes[a] > 1 for a in ((wanted,) if isinstance(wanted, str) else wanted or ()))
    assert asked == len(used) + len(here.dropped(axes, shape))
