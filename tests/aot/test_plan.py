"""`owrl plan`: bytes and collectives of the learner's own programs, for devices that are not here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from owrl_jax.models.processor import ImageProcessor
from owrl_jax.models.qwen3_vl.config import preset, to_hf
from owrl_jax.models.qwen3_vl.table import table
from owrl_jax.plan import cli
from owrl_jax.plan.devices import PlanError, parse
from owrl_jax.plan.hlo import read
from tests.unit.learner_world import config

ROWS = ("--rl.row_tokens", "256", "--browser.viewport", "[128,128]", "--model.image_area", "[1024,4096]")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with the shapes of a very small model; no weights, for a plan reads none."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(to_hf(config())))
    (folder / "preprocessor_config.json").write_text(json.dumps(ImageProcessor().to_hf()))
    return folder


def owrl_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A plan in a process of its own: how many devices there are is settled once per process."""
    return subprocess.run(
        [sys.executable, "-m", "owrl_jax.cli", "plan", *arguments], capture_output=True, text=True, timeout=900,
        env={**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_compiled_plan_agrees_with_arithmetic(model):
    done = owrl_plan("--device", "cpu:4", "--memory-gib", "1", "--json", "--model.weights", str(model), *ROWS)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["fits"] and plan["compiled"] and plan["mesh"]["fsdp"] == plan["batch"]["rows"] == 4
    # Matrices are cut along their model side, in four; norms and biases of other widths are whole everywhere.
    cut = {"embed", "vis_embed"}
    parameters = sum(4 * row.size // (4 if cut & set(row.full_axes) else 1) for row in table(config()))
    state = plan["state"]
    assert state["parameters"] == state["gradients"] == parameters
    assert state["moments"] == 2 * parameters + 4  # and a count
    # The compiler's own count of what a micro-step is given, and of what it may write over.
    micro = plan["programs"]["micro_step"]
    dropped = 3 * 256 * 4  # the numbers of turn, sample and step are for the host: no loss reads them
    assert micro["arguments"] == parameters + state["gradients"] + state["batch"] - dropped
    assert micro["aliased"] == state["gradients"], "the sum of gradients must be donated"
    assert plan["programs"]["apply"]["aliased"] == parameters + state["moments"], "so must parameters and moments"
    # Weights are gathered, gradients summed over the rows' devices; nothing in a loop that nobody can count.
    kinds = plan["collectives"]
    assert kinds["all-gather"]["bytes"] >= 3 / 4 * sum(2 * row.size for row in table(config()) if row.unit == "token")
    assert {"all-reduce", "reduce-scatter"} & kinds.keys()
    assert not any(c["unknown"] for c in plan["largest_collectives"])


def test_too_little_memory_is_said_with_what_to_change(model, capsys):
    small = ("--memory-gib", "0.0005", "--no-compile", "--model.weights", str(model), *ROWS)
    assert cli.main(["--device", "cpu:4", *small]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out and "--rl.optimizer_on_host true" in out and "ARITHMETIC ONLY" in out
    assert cli.main(["--device", "cpu:4", *small, "--reserve-gib", "-1"]) == 0  # a reserve is taken off the budget


@pytest.mark.parametrize("size", ["4b", "8b"])
def test_real_sizes_on_a_node_of_gpus(size, capsys):
    """Bytes of a published size over eight devices, none of them here; sixteen a parameter with float32 AdamW."""
    assert cli.main(["--device", "h100:8", "--json", "--model.size", size]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not plan["compiled"]
    held = sum(plan["state"][name] for name in ("parameters", "gradients", "moments"))
    whole = 16 * sum(row.size for row in table(preset(size)))
    assert whole / 8 <= held < 1.01 * whole / 8


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v9:2x2", "known: v5e"), ("v5p:3x", "is no device"), ("v6e-7", "known: 1, 4, 8"), ("cpu:2x2", "such as cpu:8"),
        ("h100:12", "a multiple of 8"), ("", "is no device"),
    ],
)  # fmt: skip
def test_a_wrong_device_is_refused_with_a_reason(name, says, capsys):
    assert cli.main(["--device", name]) == 2
    assert says in capsys.readouterr().err


def test_names_of_devices():
    assert parse("v5p-32").topology == "2x2x4"
    assert (parse("v5e:4x4*2").slices, parse("b200:16").slices, parse("b200:8").slices) == (2, 2, 1)
    assert parse("v7x:2x2x1").family == "tpu7x"
    with pytest.raises(PlanError, match="no device"):
        parse("v5p:2x2x1*")


def test_a_mesh_that_does_not_fit_is_refused(capsys):
    assert cli.main(["--device", "h100:8", "--mesh.fsdp", "3"]) == 2
    assert "there are 8" in capsys.readouterr().err


HLO = """HloModule m
%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %g = bf16[64,4]{1,0:T(8,128)(2,1)} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="w"}
}
%cond (arg: (s32[], f32[8])) -> pred[] {
  %c = pred[] compare(%a, %b), direction=LT
}
%walk (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %r = f32[10]{0} all-reduce(%y), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%cond
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %v = (s32[], f32[8]) while(%t), condition=%cond, body=%walk
  %s = f32[16,2]{1,0} reduce-scatter(%z), replica_groups=mesh['a'=4,'b'=2] {'a'}, dimensions={0}
  %ag = (f32[4]{0}, f32[32]{0}) all-gather-start(%q), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %big = f32[1000]{0} add(%p, %p)
}
"""


def test_collectives_are_counted_by_hand():
    found, arrays = read(HLO, devices=8, slices=2)
    by = {(c.kind, c.group): c for c in found}
    inside = by["all-gather", 4]
    assert (inside.bytes, inside.runs, inside.far) == (5 * 64 * 4 * 2 * 3 / 4, 5, False)
    unsure = by["all-reduce", 2]
    assert (unsure.bytes, unsure.unknown, unsure.far) == (2 * 40 / 2, True, True)
    assert (by["reduce-scatter", 4].bytes, by["reduce-scatter", 4].far) == (16 * 2 * 4 * 3, True)
    assert by["all-gather", 8].bytes == 32 * 4 * 7 / 8
    assert (arrays[0].bytes, arrays[0].array) == (4000, "f32[1000]")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no TPU compiler here: install owrl-jax[tpu]")
def test_the_learner_compiles_for_tpus(model):
    """One slice, and two of them with a replica in each; arguments as arithmetic has them, tiles' padding aside."""
    for device, more in (("v6e:2x2", ()), ("v5e:2x2*2", ("--mesh.replica", "2"))):
        done = owrl_plan("--device", device, "--json", "--model.weights", str(model), *ROWS, *more)
        assert done.returncode == 0, done.stderr
        plan = json.loads(done.stdout)
        assert plan["fits"] and "all-gather" in plan["collectives"]
        assert plan["programs"]["micro_step"]["arguments"] >= plan["state"]["parameters"] + plan["state"]["gradients"]
        between = [c for c in plan["largest_collectives"] if c["far"]]
        assert bool(between) == bool(more)
        assert {c["kind"] for c in between} <= {"all-reduce", "reduce-scatter"}, "only gradients may cross slices"
