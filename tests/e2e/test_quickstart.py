"""The main job, small: demonstrations in a real browser, imitation, MM-GRPO, evaluation, export, report.

The same command is stopped on its way and goes on, and a second call of a finished run has nothing left to do.
"""

import json
import os
import signal
import subprocess
import sys
import time

from owrl_jax.checkpoint import verify
from owrl_jax.models import hf
from owrl_jax.obs.stats import read_evaluations
from owrl_jax.pool.journal import Journal
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.shutdown import RESUME_EXIT_CODE

COMMAND = [sys.executable, "-m", "owrl_jax.cli", "quickstart", "--smoke", "--demonstrations", "16"]


def start(folder):
    """The command in a folder of its own, on one device as on a user's machine."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment.pop("JAX_DEFAULT_MATMUL_PRECISION", None)
    return subprocess.Popen(
        COMMAND, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(path, process, seconds):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def test_every_stage_runs_and_a_stopped_run_goes_on(tmp_path):
    home = tmp_path / "runs" / "quickstart-smoke"
    # Killed in the middle of the demonstrations: what was finished stays finished.
    first = start(tmp_path)
    wait_for(home / "demos" / "journal.jsonl", first, 120)
    while (home / "demos" / "journal.jsonl").read_bytes().count(b'"kind":"group"') < 3:
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    first.communicate()
    kept = (home / "demos" / "journal.jsonl").read_bytes().count(b'"kind":"group"')
    assert 3 <= kept < 16
    # Told to stop in the middle of imitation.
    second = start(tmp_path)
    wait_for(home / "sft" / "metrics.jsonl", second, 240)
    while b'"stage":"sft"' not in (home / "sft" / "metrics.jsonl").read_bytes():
        assert second.poll() is None
        time.sleep(0.05)
    second.send_signal(signal.SIGTERM)
    _, error = second.communicate(timeout=240)
    assert second.returncode == RESUME_EXIT_CODE, error
    # To the end.
    third = start(tmp_path)
    said, error = third.communicate(timeout=600)
    assert third.returncode == 0, error
    assert "held-out success" in said and "after   1 iterations of MM-GRPO" in said

    with Journal(home / "demos" / "journal.jsonl", readonly=True) as journal:
        assert len(journal.group_ids) == 16  # each once, whoever played it
        imitated = {journal.group(name).trajectories[0].task.id for name in journal.group_ids}
    with Journal(home / "rl" / "journal.jsonl", readonly=True) as journal:
        (batch,) = journal.batches.values()
        store = ScreenshotStore(home / "rl" / "screenshots")
        played = {journal.group(name).trajectories[0].task.id for name in journal.group_ids}
        assert len(played & imitated) <= 1  # 4,000 pages: what was imitated is not played again
        for name in batch:
            for trajectory in journal.group(name).trajectories:
                assert all(turn.screenshot and turn.screenshot in store for turn in trajectory.turns)
                assert all(version == 0 for turn in trajectory.turns for version in turn.versions)
    assert [e.at for e in read_evaluations(home / "rl")] == [0, 1]
    for stage in ("sft", "rl"):
        _, damage = verify(home / stage / "checkpoints")
        assert damage == []
    lines = [json.loads(line) for line in (home / "rl" / "metrics.jsonl").read_text().splitlines()]
    (numbers,) = [line["values"] for line in lines if "loss/total" in line.get("values", {})]
    assert numbers["mismatch/logp_max"] < 1e-4 and numbers["policy/clip_fraction"] == 0  # on-policy, engine and learner
    assert numbers["engine/recompiles"] == 0 and numbers["grad/norm"] > 0
    config, params = hf.load(home / "rl" / "export")
    assert config.vision is not None and params
    assert (home / "rl" / "report.html").stat().st_size > 100_000

    fourth = start(tmp_path)  # nothing is left to do, and it says the same again
    again, error = fourth.communicate(timeout=120)
    assert fourth.returncode == 0, error
    assert again == said
