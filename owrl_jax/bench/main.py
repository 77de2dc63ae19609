"""The main job: held-out success before and after reinforcement, on several seeds, and where the time goes.

    owrl bench main [--repeat SEEDS] [--quick] [--json]

Each seed is one `owrl quickstart` from nothing, in a process of its own and a folder that is removed afterwards: real
Chromium, real gradients, nothing shared but the compilation cache. `--repeat` is the number of seeds (three say
something); one takes about twenty minutes on two cores.

Shares are of the wall time of the reinforcement stage. `rollout` is the time in which the loop waited for episodes; in
it, engine and browsers work side by side. Memory is that of the trainer and all its browsers at one moment, at most.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from owrl_jax.bench.report import BenchResult, Goal, Row
from owrl_jax.obs.metrics import read, series
from owrl_jax.obs.stats import Attempt, Evaluation, Rate, compare, read_evaluations, success
from owrl_jax.pool.journal import Journal
from owrl_jax.train import STAGE

GAIN_GOAL = 20.0
MINUTES_GOAL = 20.0
PHASES = ("rollout", "learner", "publish", "checkpoint", "evaluate")


def run(*, repeat: int, quick: bool) -> BenchResult:
    """Measures everything.

    Args:
      repeat: number of seeds.
      quick: one seed of the smoke preset, only to see that it runs.
    Raises:
      RuntimeError: if a run fails, with the end of what it said.
    """
    seeds = range(1 if quick else repeat)
    rows: list[Row] = []
    before: list[Attempt] = []
    after: list[Attempt] = []
    gains, minutes = [], []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            seconds, peak = _play(Path(folder), seed=seed, quick=quick)
            rl = next(Path(folder).glob("*/rl"))
            first, last = _ends(read_evaluations(rl))
            paired = compare(first, last)
            before += first.tasks
            after += last.tasks
            gains.append(100 * paired.difference)
            minutes.append(seconds / 60)
            rows += [
                _rate(f"held_out_success/seed_{seed}/after_imitation", success(first.tasks).over_valid),
                _rate(f"held_out_success/seed_{seed}/after_reinforcement", success(last.tasks).over_valid),
                Row(name=f"gain_points/seed_{seed}", ours=gains[-1], extra={"ours_p_value": paired.p_value}),
                Row(name=f"minutes/seed_{seed}", ours=minutes[-1]),
                Row(name=f"peak_memory_mib/seed_{seed}", ours=peak),
                *_time(rl, seed),
                *_disk(rl, seed),
            ]
    rows += [
        _rate("held_out_success/all/after_imitation", success(before).over_valid),
        _rate("held_out_success/all/after_reinforcement", success(after).over_valid),
    ]
    goals = (
        Goal(name="gain", value=statistics.mean(gains), goal=GAIN_GOAL, better="higher", unit="points"),
        Goal(name="quickstart", value=max(minutes), goal=MINUTES_GOAL, better="lower", unit="min"),
    )
    settings = {"quick": quick, "seeds": len(seeds), "preset": "quickstart_smoke" if quick else "quickstart"}
    return BenchResult(bench="main", settings=settings, rows=tuple(rows), goals=goals)


def _play(folder: Path, *, seed: int, quick: bool) -> tuple[float, float]:
    """One quickstart. Returns its seconds, and the largest memory in MiB of all its processes together."""
    command = [sys.executable, "-m", "owrl_jax.cli", "quickstart", "--out_dir", str(folder), "--seed", str(seed)]
    began, peak = time.monotonic(), 0
    with tempfile.TemporaryFile() as said:
        run = subprocess.Popen([*command, *(["--smoke"] if quick else [])], stdout=said, stderr=subprocess.STDOUT)
        try:
            while run.poll() is None:
                peak = max(peak, _memory(psutil.Process(run.pid)))
                time.sleep(1)
        finally:
            if run.poll() is None:
                run.terminate()
                run.wait()
        if run.returncode:
            said.seek(0)
            tail = said.read()[-2000:].decode(errors="replace")
            raise RuntimeError(f"owrl quickstart of seed {seed} ended with exit code {run.returncode}:\n{tail}")
    return time.monotonic() - began, peak / 2**20


def _memory(process: psutil.Process) -> int:
    """Bytes of a process and its children; of pages that several share, each one's part."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # gone since it was listed
            full = one.memory_full_info()
            total += getattr(full, "pss", full.uss)
    return total


def _ends(evaluations: list[Evaluation]) -> tuple[Evaluation, Evaluation]:
    held_out = [one for one in evaluations if one.name == "held_out"]
    return held_out[0], held_out[-1]


def _rate(name: str, rate: Rate) -> Row:
    return Row(name=name, ours=rate.share, extra={"ours_low": rate.low, "ours_high": rate.high})


def _time(rl: Path, seed: int) -> list[Row]:
    records = read(rl)

    def total(name: str) -> float:
        return sum(series(records, name, stage=STAGE)[1])

    wall = total("time/total_s")
    played = total("rollout/trajectories_valid") + total("rollout/trajectories_excluded")
    rows = [Row(name=f"share_of_time/{phase}/seed_{seed}", ours=total(f"time/{phase}_s") / wall) for phase in PHASES]
    return [
        *rows,
        Row(name=f"share_of_time/idle/seed_{seed}", ours=total("time/idle_s") / wall),
        Row(name=f"trajectories_trained_per_minute/seed_{seed}", ours=60 * played / (wall - total("time/evaluate_s"))),
    ]


def _disk(rl: Path, seed: int) -> list[Row]:
    with Journal(rl / "journal.jsonl", readonly=True) as journal:
        episodes = sum(entry.trajectory is not None for entry in journal.entries())
    used = (rl / "journal.jsonl").stat().st_size
    used += sum(path.stat().st_size for path in (rl / "screenshots").rglob("*") if path.is_file())
    return [Row(name=f"disk_mib_per_1000_trajectories/seed_{seed}", ours=used / 2**20 / episodes * 1000)]
