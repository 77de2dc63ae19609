"""Two processes of two devices each, over loopback, train as one process with one device does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.qwen3_vl.table import leaves
from owrl_jax.rl.packing import pack
from owrl_jax.rl.update import Learner
from tests.conftest import ROOT
from tests.equivalence.process_run import RATE, SETTINGS, UPDATES, samples
from tests.unit.learner_world import config, picture

PROCESSES = 2


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What each process saw, and the parameters at the end."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "tests.equivalence.process_run", str(port), str(PROCESSES)]
    logs = [folder / f"{number}.log" for number in range(PROCESSES)]
    running = []
    try:
        for number, log in enumerate(logs):
            with log.open("wb") as out:
                running.append(
                    subprocess.Popen(
                        [*command, str(number), str(folder)], cwd=ROOT, env=environment, stdout=out, stderr=out
                    )
                )
        codes = [process.wait(timeout=300) for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert codes == [0] * PROCESSES, "\n".join(log.read_text()[-3000:] for log in logs)
    seen = [json.loads((folder / f"{number}.json").read_text()) for number in range(PROCESSES)]
    return seen, np.load(folder / "params.npz")


def test_processes_train_as_one(together):
    seen, params = together
    learner = Learner(Qwen3VL(config()), RATE)
    state = learner.init(learner.model.init(jax.random.key(0)))
    batches = pack(samples(), config(), pictures=picture, settings=SETTINGS)
    assert len(batches) > 1
    for number in range(UPDATES):
        state, metrics = learner.update(state, batches)
        for process in seen:
            theirs = process["metrics"][number]
            for name in ("loss/total", "grad/norm", "update/normaliser"):
                assert theirs[name] == pytest.approx(metrics[name], rel=2e-5), name
    for row, leaf in leaves(config(), state.params):
        # Adam's first steps are signs: where a gradient is rounding noise, so is the step.
        assert np.mean(np.abs(params[row.name] - np.asarray(leaf)) > 1e-5) < 2e-3, row.name


def test_each_process_has_all_samples_and_reads_its_own_pictures(together):
    seen, _ = together
    assert [(one["devices"], one["own_devices"]) for one in seen] == [(4, 2)] * PROCESSES
    assert [one["samples"] for one in seen] == [[sample.name for sample in samples()]] * PROCESSES
    every = {turn.screenshot for sample in samples() for turn in sample.turns if turn.screenshot}
    asked = [set(one["asked"]) for one in seen]
    assert asked[0] | asked[1] == every
    assert asked[0] < every and asked[1] < every


def test_another_plan_is_noticed(together):
    seen, _ = together
    for one in seen:
        assert "processes [1] have planned other batches than process 0" in one["disagreed"]
