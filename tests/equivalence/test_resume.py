"""A run that was killed and started again ends with the same bits as one that was not, wherever it was killed."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from owrl_jax.checkpoint import Checkpoints
from owrl_jax.checkpoint.folders import read_manifest
from owrl_jax.rl.hosts import own_rows
from owrl_jax.shutdown import RESUME_EXIT_CODE
from tests.equivalence.resume_run import EVERY, UPDATES


def run(folder, *arguments):
    """Exit code, and the losses by update (as hexadecimal floats: every bit counts)."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.equivalence.resume_run", str(folder), *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    lines = [line.split() for line in found.stdout.splitlines() if line.startswith("update ")]
    return found.returncode, {int(n): loss for _, n, loss in lines}, found.stdout + found.stderr


def fingerprints(folder):
    """What lies in the newest checkpoint, array by array, and where the data stand."""
    store = Checkpoints(folder / "run" / "checkpoints", write=False)
    saved = store.latest()
    arrays = read_manifest(saved.folder)["arrays"]
    return saved.step, {name: fact["fingerprint"] for name, fact in arrays.items()}, store.record()["data"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    code, losses, text = run(folder)
    assert code == 0, text
    assert list(losses) == list(range(1, UPDATES + 1))
    return losses, fingerprints(folder)


@pytest.mark.parametrize(
    ("place", "resumes_after"),
    [
        ("mid-epoch", EVERY),
        pytest.param("before-pointer", EVERY, marks=pytest.mark.slow),
        pytest.param("collected", EVERY, marks=pytest.mark.slow),
        pytest.param("during-save", EVERY, marks=pytest.mark.slow),
        pytest.param("before-name", EVERY, marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_is_uninterrupted_bit_for_bit(tmp_path, whole, place, resumes_after):
    code, before, text = run(tmp_path, "--die", place)
    assert code == -9, text
    assert fingerprints(tmp_path)[0] == resumes_after
    code, after, text = run(tmp_path)
    assert code == 0, text
    assert list(after) == list(range(resumes_after + 1, UPDATES + 1))
    assert before | after == whole[0] and {n: before[n] for n in before.keys() & after.keys()} == {
        n: after[n] for n in before.keys() & after.keys()
    }
    assert fingerprints(tmp_path) == whole[1]


def test_sigterm_saves_and_says_resume_me_and_a_run_with_nothing_to_train_fails(tmp_path, whole):
    code, before, text = run(tmp_path, "--sigterm-at", "2")
    assert code == RESUME_EXIT_CODE == 75, text
    assert list(before) == [1, 2] and fingerprints(tmp_path)[0] == 2  # saved, although it was not its turn
    code, after, text = run(tmp_path)
    assert code == 0, text
    assert before | after == whole[0] and fingerprints(tmp_path) == whole[1]
    code, nothing, text = run(tmp_path)
    assert code == 1 and nothing == {}
    assert "has 7 updates, and 7 are wanted" in text


def test_one_process_holds_all_rows():
    assert jax.process_count() == 1
    assert own_rows(None, 8) == slice(0, 8)
    assert np.arange(8)[own_rows(None, 8)].tolist() == list(range(8))
