"""The RL stage under fire: slow and dying browsers, a broken step of the device, a poisoned task, kill -9, a dead site.

A policy that has learned the format from demonstrations plays real pages in real browsers through the real engine, and
learns from them. `troubles.py` says where things go wrong and what must hold whatever does.
"""

import asyncio
import dataclasses
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest

from owrl_jax.build import build
from owrl_jax.config import DataSettings, EvalSettings, resolve
from owrl_jax.data.dataset import Dataset, write_dataset
from owrl_jax.data.demonstrations import select
from owrl_jax.data.tasks import TaskSource
from owrl_jax.engine.device import Device
from owrl_jax.obs.live import LiveView
from owrl_jax.obs.metrics import read
from owrl_jax.outcome import Owner
from owrl_jax.pool.journal import Journal
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.quickstart import _demonstrate
from owrl_jax.rl.feed import QUARANTINE_AFTER, NothingToLearn
from owrl_jax.rl.packing import PackSettings
from owrl_jax.sft import train as imitate
from owrl_jax.shutdown import Shutdown
from owrl_jax.train import train
from owrl_jax.worlds.server import WorldServer
from tests.browser.pool_world import eventually

from .troubles import Moment, Troubles, browsers_of, kill_browser, must_hold

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def imitator(tmp_path_factory):
    """Weights that click one of two boxes and say done, most of the time: groups of such episodes differ in reward."""
    home = tmp_path_factory.mktemp("imitator")
    config = dataclasses.replace(resolve("quickstart_smoke"), out_dir=str(home))
    demos = build(dataclasses.replace(config, name="demos"))
    with LiveView("demos") as view:
        asyncio.run(_demonstrate(demos, 16, view, Shutdown()))
    with Journal(demos.folder.journal, readonly=True) as journal:
        chosen = select(e.trajectory for e in journal.entries() if e.trajectory is not None).chosen
    write_dataset(home / "data", chosen, ScreenshotStore(demos.folder.screenshots).get, source={})
    assert len(Dataset(home / "data")) == 16
    sft = dataclasses.replace(
        config.sft, data=str(home / "data"), epochs=12, groups_per_update=2, learning_rate=4e-3, weight_decay=0.0
    )
    assert imitate(dataclasses.replace(config, name="sft", sft=sft), shutdown=Shutdown()).finished
    return home / "sft" / "export"


def group_of(episode):
    return episode.split("/")[0]


def settings(folder, weights, *, iterations, max_staleness, seed=0, instances=1000):
    """Two groups of four a time, and patience with groups whose members did equally well."""
    base = resolve("quickstart_smoke")
    return dataclasses.replace(
        base,
        name="run",
        out_dir=str(folder),
        seed=seed,
        iterations=iterations,
        model=dataclasses.replace(base.model, weights=str(weights)),
        browser=dataclasses.replace(base.browser, retries=1),
        data=DataSettings(tasks=("worlds:starter/pair_colour",), instances=instances),
        eval=EvalSettings(tasks=1, temperature=1.0),
        rl=dataclasses.replace(base.rl, max_staleness=max_staleness, resampling_cap=20.0),
    )


def test_asynchronous_training_through_slow_and_dying_browsers(tmp_path, imitator, monkeypatch):
    config = settings(tmp_path, imitator, iterations=4, max_staleness=1, seed=126, instances=3)
    drawn = [TaskSource.of(config.data, seed=config.seed).draw(n).id for n in range(40)]
    poisoned = drawn[2]
    assert drawn[3] == poisoned and poisoned not in drawn[:2] and poisoned in drawn[7:9], "another seed is needed"
    held, dying = {}, []  # two of the four browsers say nothing until two iterations have passed; three are killed
    steps_at_release = []
    steps = itertools.count(1)

    async def before_step(now: Moment) -> None:
        if now.task.id == poisoned:
            raise RuntimeError("whoever plays this task falls over")
        if now.step == now.attempt == 0:
            if len(held) < 2 and group_of(now.episode) not in map(group_of, held):
                held[now.episode] = now.engine.stats().steps
                await eventually(lambda: now.engine.version >= 2, 240)
                steps_at_release.append(now.engine.stats().steps)
            elif len(dying) < 3:
                dying.append(now.episode)
                kill_browser(now.browser)
        if next(steps) % 16 == 0:
            await asyncio.sleep(1.0)

    async def before_episode(name: str) -> None:
        # Whoever comes after them waits until those that were held have ended: so they do end before the run does.
        if steps_at_release and group_of(name) not in map(group_of, held):
            await eventually(lambda: all(troubles.ended[h] for h in held), 60)

    troubles = Troubles(monkeypatch, before_step=before_step, before_episode=before_episode)
    decode, failed = Device.decode, []

    def failing(device, sessions, steps):
        if not failed and troubles.engine.version == 1:
            failed.append(len(sessions))
            raise RuntimeError("the device fell over")
        return decode(device, sessions, steps)

    monkeypatch.setattr(Device, "decode", failing)
    # One shape for every run of this test: its program is then compiled once and kept. Others are fitted to what was
    # sampled.
    fixed = PackSettings(tokens=1024, patches=768, responses=1024, rows=config.rl.rows_per_device, buckets=(1.0,))
    monkeypatch.setattr(PackSettings, "fitted", lambda *samples, **fields: fixed)
    assert train(config, shutdown=Shutdown()).finished

    folder = tmp_path / "run"
    entries = must_hold(folder, iterations=4, max_staleness=1)
    # Every episode that ended stands in the journal, each attempt once.
    kept = Counter(f"{e.group_id}/{e.trajectory.index}" for e in entries["trajectory"])
    assert kept == troubles.ended
    attempts = {(f"{e.group_id}/{e.trajectory.index}", e.attempt): e.trajectory for e in entries["trajectory"]}
    assert len(attempts) == len(entries["trajectory"])
    # While two browsers stood still, the engine went on: two iterations were played, trained and published.
    trained = {name for entry in entries["batch"] for name in entry.groups}
    assert len(steps_at_release) == len(held) == 2 and min(steps_at_release) > max(held.values())
    for name in held:
        ended = attempts[name, 0]
        versions = [v for turn in ended.turns for v in turn.versions]
        assert ended.outcome.trains and min(versions) == 0 and max(versions) >= 2  # too old for whoever came after
        assert group_of(name) not in trained
    # A browser that died is the sandbox's doing: no verdict, and the member was played again.
    assert len(dying) == 3
    for name in dying:
        first, second = attempts[name, 0], attempts[name, 1]
        assert first.outcome.key == "sandbox_error/browser_gone" and first.outcome.owner == Owner.SANDBOX
        assert not first.valid and first.verdict is None and second.valid
    # So is a step of the device that failed: once, and whoever was on it was played again.
    records = [r for r in read(folder) if "loss/total" in r.values]
    assert records[-1].values["engine/device_failures"] == 1
    lost = [e for e in entries["trajectory"] if e.trajectory.outcome.key == "sandbox_error/policy_unavailable"]
    assert len(lost) == failed[0]
    assert all(not e.trajectory.valid and e.trajectory.verdict is None for e in lost)
    # The poisoned task was given up twice, then left alone; the run had others.
    of_task = [e for e in entries["group"] if e.task.id == poisoned]
    assert [e.reason for e in of_task] == ["given_up"] * QUARANTINE_AFTER
    last = int(entries["group"][-1].group_id[1:])
    assert drawn[: last + 1].count(poisoned) > QUARANTINE_AFTER  # it was drawn again, and passed over
    assert not trained & {e.group_id for e in of_task}


def command(config):
    """The run as a user would start it, in a process of its own."""
    words = [
        "quickstart_smoke", "--name", config.name, "--out_dir", config.out_dir, "--iterations", config.iterations,
        "--model.weights", config.model.weights, "--eval.tasks", 1, "--browser.retries", config.browser.retries,
        "--rl.max_staleness", config.rl.max_staleness, "--rl.resampling_cap", config.rl.resampling_cap,
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, "-m", "owrl_jax.cli", "train", *map(str, words)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_until(condition, process, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


@pytest.mark.parametrize(("max_staleness", "lives"), [pytest.param(0, 1), pytest.param(1, 3, marks=pytest.mark.slow)])
def test_a_killed_trainer_goes_on_and_trains_nothing_twice(tmp_path, imitator, max_staleness, lives):
    chance = random.Random()
    seed = chance.randrange(2**32)
    chance.seed(seed)
    print("the moments follow from", seed)
    config = settings(tmp_path, imitator, iterations=3, max_staleness=max_staleness)
    folder = tmp_path / "run"
    journal = folder / "journal.jsonl"

    def lines(kind=b""):
        return journal.read_bytes().count(b'{"kind":"%s' % kind) if journal.exists() else 0

    orphans, kept = [], []
    for _ in range(lives):
        # Somewhere after the first choice of a batch: before, in or after an update. There is no checkpoint yet, so
        # whoever comes next learns from the same groups again, with new parameters.
        process = command(config)
        wanted = lines() + chance.randrange(6)
        wait_until(lambda: lines(b"batch") >= 1 and lines() >= wanted, process)  # noqa: B023
        time.sleep(chance.random())
        orphans += browsers_of(process.pid)
        process.kill()
        said, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, said
        kept.append(journal.read_bytes())
    process = command(config)
    wait_until(lambda: lines() > kept[-1].count(b"\n") + 1, process)
    for browser in browsers_of(process.pid)[:1]:
        browser.kill()
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said

    whole = journal.read_bytes()
    for before in kept:  # but for a line that was being written
        assert whole.startswith(before[: before.rindex(b"\n") + 1]), "something that was finished has gone"
    entries = must_hold(folder, iterations=3, max_staleness=max_staleness)
    assert all(r.values["engine/device_failures"] == 0 for r in read(folder) if "loss/total" in r.values)
    # Nobody played for iterations whose batches the journal has: neither in vain, nor while they were trained on again.
    closed = kept[-1][: kept[-1].rindex(b"\n")].split(b"\n")
    chosen, groups = (sum(line.startswith(b'{"kind":"%s"' % kind) for line in closed) for kind in (b"batch", b"group"))
    assert all(entry.version >= chosen - max_staleness for entry in entries["group"][groups:])
    assert not [p for p in orphans if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_a_site_that_dies_ends_the_run_with_a_reason_and_the_same_command_goes_on(tmp_path, imitator, monkeypatch):
    config = settings(tmp_path, imitator, iterations=3, max_staleness=1, instances=3)
    dead = []

    async def no_answer(server, reader, writer):
        return False

    with monkeypatch.context() as patched:

        async def before_step(now: Moment) -> None:
            if now.engine.version >= 1 and not dead:
                dead.append(now.episode)
                patched.setattr(WorldServer, "_exchange", no_answer)
                for connection in troubles.places._worlds._connections:
                    connection.cancel()

        troubles = Troubles(patched, before_step=before_step)
        with pytest.raises(NothingToLearn, match=r"all_invalid|quarantined"):
            train(config, shutdown=Shutdown())
    folder = tmp_path / "run"
    before = (folder / "journal.jsonl").read_bytes()
    with Journal(folder / "journal.jsonl", readonly=True) as journal:
        faults = [e.trajectory for e in journal.entries() if e.trajectory and not e.trajectory.outcome.trains]
    assert faults and all(t.verdict is None and t.outcome.owner == Owner.SITE for t in faults)
    assert train(config, shutdown=Shutdown()).finished
    assert (folder / "journal.jsonl").read_bytes().startswith(before)
    must_hold(folder, iterations=3, max_staleness=1)
