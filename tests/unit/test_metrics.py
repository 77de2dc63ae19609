"""Metrics on disk and at trackers, their names, and the split of wall time."""

from __future__ import annotations

import json
import logging
import math
import struct
import subprocess
import sys
import textwrap
import threading
import types

import numpy as np
import pytest

from owrl_jax.obs import metric_names, sinks
from owrl_jax.obs.metrics import Metrics, TimeSplit, read, series
from owrl_jax.obs.sinks import open_sinks


class Recorder:
    name = "recorder"

    def __init__(self, fail_at: int | None = None) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self.fail_at = fail_at

    def write(self, step, values, at):
        if step == self.fail_at:
            raise ConnectionError("down")
        self.rows.append((step, dict(values)))

    def close(self):
        self.closed += 1


def test_what_was_logged_reads_back(tmp_path):
    with Metrics(tmp_path, stage="rl") as metrics:
        metrics.log(0, {"rollout/trajectories_valid": 31, "reward/mean_per_trajectory": np.float32(0.5)})
        metrics.log(0, {"loss/total": np.array(0.25)})
        metrics.log(1, {"loss/total": math.nan, "grad/norm": math.inf})
    first, second = read(tmp_path)
    assert (first.step, first.stage) == (0, "rl")
    assert first.values == {"rollout/trajectories_valid": 31, "reward/mean_per_trajectory": 0.5, "loss/total": 0.25}
    assert math.isnan(second.values["loss/total"]) and second.values["grad/norm"] == math.inf
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():  # JSON that every reader takes
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert series(read(tmp_path), "reward/mean_per_trajectory") == ([0], [0.5])
    assert read(tmp_path / "nowhere") == []


def test_a_resume_voids_what_came_after_it_in_its_own_stage(tmp_path):
    with Metrics(tmp_path, stage="sft") as metrics:
        for step in range(10):
            metrics.log(step, {"sft/loss_nats_per_token": step})
    with Metrics(tmp_path, stage="rl") as metrics:
        for step in range(5):
            metrics.log(step, {"loss/total": step, "update/updates": step})
    with Metrics(tmp_path, stage="rl", resume_at=3) as metrics:  # killed in 5, last checkpoint before 3
        metrics.log(3, {"loss/total": 30})
    records = read(tmp_path)
    assert series(records, "sft/loss_nats_per_token")[0] == list(range(10))
    assert series(records, "loss/total") == ([0, 1, 2, 3], [0, 1, 2, 30])
    assert "update/updates" not in records[-1].values  # no value of another life stands beside this one's


def test_the_last_value_of_a_name_wins_within_a_step(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.log(2, {"loss/total": 1, "update/updates": 5})
        metrics.log(2, {"loss/total": 2})
    (record,) = read(tmp_path)
    assert record.values == {"loss/total": 2, "update/updates": 5}


def test_a_torn_last_line_is_passed_over_and_then_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(tmp_path) as metrics:
        metrics.log(0, {"loss/total": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step":1,"stage":"train","at":0,"values":{"train/lo')
    assert [r.step for r in read(path)] == [0]
    with Metrics(tmp_path) as metrics:
        metrics.log(1, {"loss/total": 2})
    assert [(r.step, r.values["loss/total"]) for r in read(path)] == [(0, 1), (1, 2)]
    assert path.read_bytes().startswith(whole + b'{"step":1,')


@pytest.mark.parametrize("size", [0, 10, 65536, 65537, 200_000])
def test_a_torn_line_of_any_length_is_cut_off(tmp_path, size):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"{}\n" + b"x" * size)
    Metrics(tmp_path).close()
    assert path.read_bytes() == b"{}\n"


def test_a_damaged_line_costs_no_other(tmp_path, caplog):
    with Metrics(tmp_path) as metrics:
        metrics.log(0, {"loss/total": 1})
        (tmp_path / "metrics.jsonl").open("ab").write(b'\x00\xff[]\n["x"]\n{"step": 1}\n')
        metrics.log(2, {"loss/total": 3})
    assert [r.step for r in read(tmp_path)] == [0, 2]
    assert caplog.text.count("passed over") == 3 and "line 2 of" in caplog.text


@pytest.mark.parametrize("name", ["loss", "Train/loss", "train/", "train/lo ss", "../x", "train//x", "train/x\n"])
def test_a_name_of_another_form_is_refused(tmp_path, name):
    with Metrics(tmp_path) as metrics, pytest.raises(ValueError, match="room/quantity_unit"):
        metrics.log(0, {name: 1})
    assert read(tmp_path) == []


@pytest.mark.parametrize("value", ["1", None, [1, 2], np.zeros(3)])
def test_a_value_that_is_no_number_is_refused(tmp_path, value):
    with Metrics(tmp_path) as metrics, pytest.raises(TypeError, match="loss/total must be one number"):
        metrics.log(0, {"loss/total": value})


def test_a_killed_process_loses_no_line_it_was_told_of(tmp_path):
    script = textwrap.dedent("""
        import sys
        from owrl_jax.obs.metrics import Metrics
        metrics = Metrics(sys.argv[1])
        for n in range(10**9):
            metrics.log(n, {"loss/total": n})
            print(n, flush=True)
    """)
    writer = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True)
    for _ in range(50):
        writer.stdout.readline()
    writer.kill()
    said = [int(line) for line in writer.stdout.read().split()]
    writer.wait()
    steps, values = series(read(tmp_path), "loss/total")
    assert steps[: max(said, default=49) + 1] == list(range(max(said, default=49) + 1)) and values == steps


def test_threads_share_a_file_and_tear_no_line(tmp_path):
    with Metrics(tmp_path) as metrics:
        threads = [
            threading.Thread(target=lambda n=n: [metrics.log(n * 100 + i, {"loss/total": i}) for i in range(50)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read(tmp_path)) == 200


# --- Trackers --------------------------------------------------------------------------------------------------------


def test_a_tracker_that_fails_is_left_and_the_file_goes_on(tmp_path, caplog):
    good, bad = Recorder(), Recorder(fail_at=1)
    with Metrics(tmp_path, sinks=[bad, good]) as metrics:
        for step in range(4):
            metrics.log(step, {"loss/total": step})
    assert [step for step, _ in good.rows] == [0, 1, 2, 3] and [step for step, _ in bad.rows] == [0]
    assert len(read(tmp_path)) == 4 and caplog.text.count("gets no more metrics") == 1
    assert good.closed == 1


def events(folder):
    """(tag, step, value) of all TensorBoard event files below a folder, read by the format's definition: records of
    length, checksum, bytes, checksum; the bytes are the published protobuf message."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.rglob("events.*")):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            yield from ((value.tag, event.step, value.simple_value) for value in event.summary.value)


def test_tensorboard_gets_every_point(tmp_path):
    pytest.importorskip("tensorboardX", reason="the extra `tensorboard` is not installed")
    with Metrics(tmp_path, stage="rl", sinks=open_sinks(["tensorboard"], tmp_path, stage="rl")) as metrics:
        metrics.log(3, {"loss/total": 0.5, "update/updates": 7})
        metrics.log(4, {"loss/total": 0.25})
    assert sorted(events(tmp_path / "tensorboard" / "rl")) == [
        ("loss/total", 3, 0.5),
        ("loss/total", 4, 0.25),
        ("update/updates", 3, 7.0),
    ]


class FakeTracker(types.ModuleType):
    """Stands at the border of wandb and trackio: keeps what was called."""

    def __init__(self) -> None:
        super().__init__("fake")
        self.calls: list[tuple[str, object, dict]] = []

    def init(self, **options):
        self.calls.append(("init", None, options))
        return self

    def define_metric(self, name, **options):
        self.calls.append(("define_metric", name, options))

    def log(self, values, **options):
        self.calls.append(("log", values, options))

    def finish(self):
        self.calls.append(("finish", None, {}))


def test_wandb_counts_by_our_step(tmp_path, monkeypatch):
    fake = FakeTracker()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    found = open_sinks(["wandb"], tmp_path, project="p", run="a/b", config={"seed": 3})
    with Metrics(tmp_path, sinks=found) as metrics:
        metrics.log(7, {"loss/total": 0.5})
    init = fake.calls[0][2]
    assert init["id"] == "a-b" and init["name"] == "a/b" and init["resume"] == "allow" and init["config"] == {"seed": 3}
    assert fake.calls[1:] == [
        ("define_metric", "step", {}),
        ("define_metric", "*", {"step_metric": "step"}),
        ("log", {"loss/total": 0.5, "step": 7}, {}),
        ("finish", None, {}),
    ]


def test_trackio_gets_rows_with_their_step(tmp_path, monkeypatch):
    fake = FakeTracker()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    with Metrics(tmp_path, sinks=open_sinks(["trackio"], tmp_path)) as metrics:
        metrics.log(7, {"loss/total": 0.5})
    assert fake.calls[0][2]["project"] == "owrl_jax" and fake.calls[0][2]["name"] == tmp_path.name
    assert fake.calls[1:] == [("log", {"loss/total": 0.5}, {"step": 7}), ("finish", None, {})]


def test_a_missing_tracker_is_told_once_with_its_extra(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr(sinks, "_told", set())
    with caplog.at_level(logging.WARNING):
        assert open_sinks(["wandb", "tensorboard"], tmp_path) == open_sinks(["wandb"], tmp_path) == ()
    assert caplog.text.count("owrl-jax[trackers]") == 1 and caplog.text.count("owrl-jax[tensorboard]") == 1
    with pytest.raises(ValueError, match="no tracker 'mlflow'"):
        open_sinks(["mlflow"], tmp_path)


# --- Names -----------------------------------------------------------------------------------------------------------


def test_names_that_the_learner_logs_are_in_the_table():
    from owrl_jax.config import RlSettings
    from owrl_jax.rl.advantage import score
    from owrl_jax.types import Group, GroupRequest

    from .test_journal import episode

    members = [episode("a", 0), episode("a", 1)]
    group = Group(request=GroupRequest(task=members[0].task, group_id="a", n=2), trajectories=tuple(members))
    logged = score([group], RlSettings()).metrics()
    assert logged and metric_names.undocumented(logged) == []
    assert metric_names.undocumented(["rollout/trajectories_excluded/sandbox_error/browser_gone"]) == []


def test_a_name_is_in_the_table_or_it_is_found():
    assert metric_names.meaning("outcome/step_budget_trajectories").startswith("finished episodes by reason")
    assert metric_names.undocumented(["loss/total", "loss/total2", "foo/bar", "outcome/_trajectories"]) == [
        "foo/bar",
        "loss/total2",
        "outcome/_trajectories",
    ]
    assert all(row.meaning for row in metric_names.NAMES)
    assert len({row.name for row in metric_names.NAMES}) == len(metric_names.NAMES)


def test_the_table_of_the_docs_is_this_one(repo_root):
    text = (repo_root / "docs" / "report.md").read_text(encoding="utf-8")
    assert metric_names.markdown() in text, "print it again: python -m owrl_jax.obs.metric_names"


# --- Wall time -------------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_split_adds_up_and_shares_what_overlaps():
    clock = Clock()
    split = TimeSplit(clock=clock)
    clock.now = 102  # 2 s idle
    with split.during("browser"):
        clock.now = 105  # 3 s browser
        with split.during("engine"), split.during("browser"):  # a second browser changes nothing
            clock.now = 109  # 4 s shared by two
    with split.during("learner"):
        clock.now = 110  # 1 s learner
    assert split.wall_s() == {"browser": 5, "engine": 2, "learner": 1, "judge": 0, "idle": 2}
    assert split.busy_s() == {"browser": 7, "engine": 4, "learner": 1, "judge": 0}
    found = split.take()
    assert found["time/total_s"] == 10 and found["time/browser_s"] == 5 and found["busy/browser_s"] == 7
    assert metric_names.undocumented(found) == []
    clock.now = 111
    assert split.take()["time/total_s"] == 1


def test_an_entry_that_is_open_across_a_take_goes_on():
    clock = Clock()
    split = TimeSplit(("a",), clock=clock)
    with split.during("a"):
        clock.now += 1
        assert split.take()["time/a_s"] == 1
        clock.now += 2
        assert split.take()["time/a_s"] == 2
    with pytest.raises(ValueError, match="no phase 'b'"), split.during("b"):
        pass
