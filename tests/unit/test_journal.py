"""The journal and the screenshot store: nothing finished is lost, nothing is trained twice, damage is told."""

import os
import subprocess
import sys
import textwrap
import time

import msgspec
import pytest

from owrl_jax.outcome import Outcome, Reason
from owrl_jax.pool.journal import Entry, Journal, JournalError
from owrl_jax.pool.store import MissingScreenshot, ScreenshotStore
from owrl_jax.types import GroupRequest, Screenshot, Task, Trajectory, Turn, Verdict, VerdictValue


def episode(group: str, index: int, *, answer: str = "yes") -> Trajectory:
    turn = Turn(trunk_ids=(1, 2), leaf_ids=(3,), response_ids=(4, 5), logprobs=(-0.5, -0.25), versions=(7, 7))
    return Trajectory(
        task=Task(id=f"task-{group}", instruction="click “red”\n", start_url="http://a.test/"),
        group_id=group,
        index=index,
        protocol="p",
        turns=(turn, turn),
        outcome=Outcome(reason=Reason.COMPLETED, detail="answered"),
        answer=answer,
        verdict=Verdict(value=VerdictValue.SUCCESS, judge="program"),
    )


def close_group(journal: Journal, name: str, n: int = 2, version: int = 3) -> None:
    offsets = [journal.add_trajectory(episode(name, i), attempt=0) for i in range(n)]
    request = GroupRequest(task=episode(name, 0).task, group_id=name, n=n)
    journal.add_group(request, offsets, version=version, reason="complete")


def test_what_was_written_reads_back(tmp_path):
    with Journal(tmp_path / "j.jsonl") as journal:
        close_group(journal, "a")
        journal.add_trajectory(episode("b", 0, answer="faulty attempt"), attempt=0)
        close_group(journal, "b")
        journal.add_batch(0, ["a"])
        group = journal.group("a")  # reading in between does not disturb writing
        close_group(journal, "c", version=4)
    assert group.request.n == 2 and group.trajectories == (episode("a", 0), episode("a", 1))
    with Journal(tmp_path / "j.jsonl", readonly=True) as journal:
        assert len(journal) == 7 and journal.group_ids == ("a", "b", "c")
        assert journal.batches == {0: ("a",)} and journal.version_of("c") == 4
        assert journal.group("b").trajectories == (episode("b", 0), episode("b", 1))
        kinds = [entry.kind for entry in journal.entries()]
        assert kinds == ["trajectory"] * 2 + ["group"] + ["trajectory"] * 3 + ["group", "batch"] + [
            "trajectory",
            "trajectory",
            "group",
        ]
        with pytest.raises(KeyError):
            journal.group("d")
        with pytest.raises(JournalError, match="reading only"):
            close_group(journal, "e")
    # A line is plain JSON for anyone else.
    lines = (tmp_path / "j.jsonl").read_bytes().splitlines()
    assert msgspec.json.decode(lines[0])["trajectory"]["turns"][0]["response_ids"] == [4, 5]


def test_a_batch_is_spent_and_never_given_to_another_iteration(tmp_path):
    with Journal(tmp_path / "j.jsonl") as journal:
        for name in "abcd":
            close_group(journal, name)
        assert journal.unspent() == ("a", "b", "c", "d")
        journal.add_batch(0, ["b", "a"])
        journal.add_batch(1, ["d"])
        assert journal.unspent() == ("c",)
        journal.add_batch(1, ["d"])  # a restart says the same again
        with pytest.raises(JournalError, match="trained twice"):
            journal.add_batch(1, ["c"])


def test_a_torn_last_line_is_cut_off_and_nothing_else_is_lost(tmp_path):
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        close_group(journal, "a")
    whole = path.read_bytes()
    for cut in (1, 2, 50, len(whole.splitlines()[-1])):
        path.write_bytes(whole + whole.splitlines()[0][:cut])
        with Journal(path, readonly=True) as reader:
            assert len(reader) == 2 and reader.torn_bytes == cut and len(list(reader.entries())) == 3
        with Journal(path) as journal:
            assert journal.torn_bytes == cut and journal.group_ids == ("a",)
            close_group(journal, "b")
        with Journal(path) as journal:
            assert journal.group_ids == ("a", "b") and journal.torn_bytes == 0
    damaged = bytearray(whole)
    damaged[10] = 0
    path.write_bytes(damaged)
    with pytest.raises(JournalError, match="damaged at byte 0"):
        Journal(path)


def test_one_writer(tmp_path):
    with Journal(tmp_path / "j.jsonl") as journal:
        close_group(journal, "a")
        with pytest.raises(JournalError, match="another process"):
            Journal(tmp_path / "j.jsonl")
        with Journal(tmp_path / "j.jsonl", readonly=True) as reader:
            assert reader.group_ids == ("a",)
    with pytest.raises(JournalError, match="no journal"):
        Journal(tmp_path / "none.jsonl", readonly=True)


def test_a_full_disk_surfaces_and_leaves_the_journal_whole(tmp_path):
    script = textwrap.dedent("""
        import resource, signal, sys
        sys.path.insert(0, sys.argv[2])
        from tests.unit.test_journal import close_group, episode
        from owrl_jax.pool.journal import Journal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with Journal(sys.argv[1]) as journal:
            close_group(journal, "a")
            size = journal.path.stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
            try:
                close_group(journal, "b")
            except OSError as error:
                print("surfaced", journal.path.stat().st_size == size)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            close_group(journal, "c")
    """)
    root = str(__import__("pathlib").Path(__file__).resolve().parents[2])
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "j.jsonl", root], capture_output=True, text=True)
    assert done.stdout.strip() == "surfaced True", done.stderr
    with Journal(tmp_path / "j.jsonl") as journal:
        assert journal.group_ids == ("a", "c") and len(journal) == 4


def test_a_writer_killed_at_any_moment_loses_nothing_it_was_told_is_there(tmp_path):
    script = textwrap.dedent("""
        import sys
        sys.path.insert(0, sys.argv[2])
        from tests.unit.test_journal import close_group
        from owrl_jax.pool.journal import Journal
        with Journal(sys.argv[1]) as journal:
            for n in range(100000):
                close_group(journal, f"g{n}")
                print(n, flush=True)
    """)
    root = str(__import__("pathlib").Path(__file__).resolve().parents[2])
    path = tmp_path / "j.jsonl"
    for round in range(3):
        path.unlink(missing_ok=True)
        writer = subprocess.Popen([sys.executable, "-c", script, path, root], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        said = -1
        for _ in range(3 + 5 * round):
            said = int(writer.stdout.readline())
        time.sleep(0.003 * round)
        writer.kill()
        said = max([said, *(int(line) for line in writer.stdout.read().split())])
        writer.wait()
        with Journal(path) as journal:
            assert len(journal.group_ids) >= said + 1
            assert journal.group(f"g{said}").trajectories == (episode(f"g{said}", 0), episode(f"g{said}", 1))


def test_screenshots_live_once_under_their_hash(tmp_path):
    store = ScreenshotStore(tmp_path / "shots")
    shot = Screenshot(data=b"not really a picture", width=4, height=3)
    name = store.put(shot)
    assert name == store.put(shot) == ScreenshotStore(tmp_path / "shots").put(shot) == shot.sha256
    assert store.get(name) == shot.data and name in store and store.path(name).suffix == ".png"
    assert [p.name for p in (tmp_path / "shots").rglob("*") if p.is_file()] == [f"{name}.png"]
    assert "0" * 64 not in store and "../../etc/passwd" not in store
    with pytest.raises(MissingScreenshot, match="not the hash"):
        store.get("../x")
    store.path(name).write_bytes(b"other")
    with pytest.raises(MissingScreenshot, match="changed or damaged"):
        store.get(name)


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    store = ScreenshotStore(tmp_path / "shots")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    shot = Screenshot(data=b"x", width=1, height=1)
    with pytest.raises(OSError, match="No space"):
        store.put(shot)
    assert shot.sha256 not in store and not [p for p in store.root.rglob("*") if p.is_file()]


def test_an_entry_of_another_kind_is_refused():
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"kind": "nonsense", "at": 0}', type=Entry)
