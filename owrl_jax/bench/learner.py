"""`owrl bench learner`: tokens and wall time of an update, prefix tree against one prompt per turn, and against torch.

Episodes of 8, 15 and 30 turns with prompts of the real harness (`_learner_episodes` says what is real in them).
Tokens are counted at full size: 1280 x 1000 screenshots, all tools. Wall time is measured at a size that a CPU can
train in a minute, tree and plain on the same program, device and weights, in turns; and for torch + transformers on the
same trajectories, weights and threads. All of them make one optimiser step in float32 and must give the same loss.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from owrl_jax.bench._learner_episodes import FULL, SMALL, Episodes, tokenizer
from owrl_jax.bench.report import BenchResult, Goal, Row

TURNS = {8: 2.5, 15: 3.5, 30: 5.0}
"""Turns of an episode, and how many times fewer tokens the tree should take."""


def _count(samples: Sequence[Any], config: Any) -> tuple[int, int]:
    """Tokens that the tree computes for these samples, and tokens as one prompt per turn."""
    from owrl_jax.rl.packing import PackSettings, plan_batches

    found = []
    for mode in ("tree", "plain"):
        settings = PackSettings(tokens=10**7, patches=10**8, responses=10**6, buckets=(1.0,), mode=mode)
        (plan,) = plan_batches(samples, config, settings)
        found.append(sum(row.tokens for row in plan.rows))
    return found[0], found[1]


def _filled(episodes: Episodes, config: Any, seed: int) -> dict[str, float]:
    """Useful shares of an update of 256 turns at full size, 8 rows of 16,384 tokens a batch, 4 data shards."""
    from owrl_jax.rl.packing import PackSettings, plan_batches

    rng = np.random.default_rng(seed)
    samples: list[Any] = []
    while sum(len(s.turns) for s in samples) < 256:
        samples += episodes.group(rng.integers(4, 16, 5).tolist(), seed=1000 + len(samples))
    started = time.perf_counter()
    settings = PackSettings.fitted(samples, config, tokens=16384, rows=8, shards=4)
    plans = plan_batches(samples, config, settings)
    seconds = time.perf_counter() - started
    slots = sum(plan.shape[0] * len(plan.rows) for plan in plans)
    patch_slots = sum(plan.shape[1] * len(plan.rows) for plan in plans)
    tokens = sum(row.tokens for plan in plans for row in plan.rows)
    loads = [[sum(r.tokens for r in plan.rows[at : at + 2]) for at in range(0, 8, 2)] for plan in plans]
    return {
        "useful_token_share": tokens / slots,
        "useful_patch_share": sum(row.patches for plan in plans for row in plan.rows) / patch_slots,
        "computed_tokens_per_trajectory": tokens / len(samples),
        "plan_ms_per_trajectory": 1000 * seconds / len(samples),
        "batches": len(plans),
        "shapes": len({plan.shape for plan in plans}),
        "largest_shard_over_mean": max(max(load) / statistics.mean(load) for load in loads),
    }


def _settings(samples: Sequence[Any], config: Any, mode: str, most: int) -> Any:
    """Rows of about `most` tokens that these samples fill: one shape, little padding, so that work is compared."""
    from owrl_jax.rl.packing import PackSettings, plan_batches

    tree, plain = _count(samples, config)
    total = tree if mode == "tree" else plain
    rows = max(1, round(total / most))
    best: tuple[int, Any] | None = None
    for spare in (1.0, 1.02, 1.05, 1.1, 1.2, 1.35):
        tokens = math.ceil(total / rows * spare / 64) * 64
        settings = PackSettings.fitted(samples, config, tokens=tokens, mode=mode, buckets=(1.0,))
        slots = sum(plan.shape[0] for plan in plan_batches(samples, config, settings))
        if best is None or slots < best[0]:
            best = (slots, settings)
    assert best is not None
    return best[1]


class _Case:
    """One trajectory of so many turns and a model."""

    def __init__(self, name: str, turns: int, episodes: Episodes, most: int) -> None:
        import jax

        from owrl_jax.bench.model import shapes
        from owrl_jax.models.qwen3_vl.model import Qwen3VL
        from owrl_jax.rl.optimizer import OptimizerSettings
        from owrl_jax.rl.packing import pack
        from owrl_jax.rl.update import Learner

        self.config, self.picture = shapes()[name][0], episodes.picture
        self.samples = episodes.into(episodes.group([turns], seed=turns), self.config)
        self.learner = Learner(Qwen3VL(self.config), OptimizerSettings())
        self.params = jax.device_get(Qwen3VL(self.config).init(jax.random.key(0)))
        self.batches: dict[str, Any] = {}
        self.pack_s: dict[str, float] = {}
        for mode in ("tree", "plain"):
            settings = _settings(self.samples, self.config, mode, most)
            started = time.perf_counter()
            self.batches[mode] = pack(self.samples, self.config, pictures=self.picture, settings=settings)
            self.pack_s[mode] = time.perf_counter() - started

    def tokens(self, mode: str) -> int:
        """Computed, without padding."""
        return sum(batch.counts.tokens for batch in self.batches[mode])

    def ours(self, mode: str) -> Callable[[], float]:
        """One update from the initial parameters; its loss. What is not the update is not timed: see `timed`."""

        def update() -> float:
            _, metrics = self.learner.update(self._state, self.batches[mode])
            return metrics["loss/total"]

        return update

    def prepare(self) -> None:
        """A fresh state: an update uses its state up."""
        import jax

        self._state = self.learner.init(jax.device_put(self.params))
        jax.block_until_ready(self._state)

    def warm(self, mode: str) -> None:
        """Compiles the programs on one batch."""
        self.prepare()
        first = self.batches[mode][:1]
        self.learner.update(self._state, first)


def _timed(calls: Sequence[Callable[[], float]], prepare: Callable[[], None], repeat: int) -> list[tuple[float, float]]:
    """Median seconds and loss of each call, measured in turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    losses = [0.0] * len(calls)
    for number in range(repeat):
        for n, call in enumerate(calls):
            prepare()
            started = time.perf_counter()
            loss = call()
            seconds[n].append(time.perf_counter() - started)
            if number == 0:
                losses[n] = loss
    return [(statistics.median(s), loss) for s, loss in zip(seconds, losses, strict=True)]


def _same(losses: Sequence[float], what: str) -> None:
    """Raises if the calls did not compute the same loss: then their times say nothing."""
    if max(losses) - min(losses) > 1e-4 * max(abs(x) for x in losses) + 1e-7:
        raise AssertionError(f"{what}: tree, plain and torch must give one loss, got {list(losses)}")


_QUICK = (("tiny", 4, True),)
_CASES = (("tiny", 8, True), ("tiny", 15, True), ("100m", 8, False), ("tiny", 30, True))


def measure(name: str, turns: int, episodes: Episodes, *, repeat: int, plain_too: bool) -> tuple[list[Row], list[Goal]]:
    """Wall time of an update on one trajectory: tree, plain if asked, and torch up to 15 turns.

    Torch makes one update where a step takes it more than seconds: it has nothing to compile.
    """
    from owrl_jax.bench._learner_peer import per_turn_update

    case, label = _Case(name, turns, episodes, most=4096), f"{name}/{turns}_turns"
    modes = ("tree", "plain") if plain_too else ("tree",)
    for mode in modes:
        case.warm(mode)
    times = _timed([case.ours(mode) for mode in modes], case.prepare, repeat)
    step = per_turn_update(case.config, case.params, case.samples, case.picture) if turns <= 15 else None
    peer = _timed([step], lambda: None, repeat if (name, turns) == ("tiny", 8) else 1)[0] if step else None
    _same([loss for _, loss in (*times, *([peer] if peer else []))], label)
    ours, saved = times[0][0], case.tokens("plain") / case.tokens("tree")
    extra = {"tokens": case.tokens("tree"), "plain_tokens": case.tokens("plain"), "tokens_saved": saved}
    goals = []
    if plain_too:
        wall = times[1][0] / ours
        extra |= {"plain": times[1][0], "wall_saved": wall}
        goal = f"wall_saved_of_tokens_saved/{label}"
        goals.append(Goal(name=goal, value=wall / saved, goal=0.7, better="higher", unit="x"))
    if peer:
        goals.append(Goal(name=f"wall_vs_torch/{label}", value=peer[0] / ours, goal=3.0, better="higher", unit="x"))
    rows = [
        Row(name=f"update_s_per_trajectory/{label}", ours=ours, peer=peer[0] if peer else None, extra=extra),
        Row(name=f"pack_ms_per_trajectory/{label}", ours=1000 * case.pack_s["tree"]),
    ]
    print(f"{label}: {ours:.2f} s, {extra}, torch {peer}", file=sys.stderr, flush=True)
    return rows, goals


def run(*, repeat: int, quick: bool) -> BenchResult:
    """Measures everything the module's head names.

    Args:
      repeat: timed updates of each kind, at most three: each takes seconds to minutes.
      quick: one short episode, no full-size counts beyond 8 turns.
    """
    import jax

    from owrl_jax.models.qwen3_vl.config import preset

    tokens, vocabulary = tokenizer()
    repeat = 1 if quick else min(repeat, 3)
    full, small = Episodes(tokens, FULL), Episodes(tokens, SMALL)
    rows: list[Row] = []
    goals: list[Goal] = []
    settings: dict[str, Any] = {
        "quick": quick,
        "repeat": repeat,
        "jax": jax.__version__,
        "dtype": "float32",
        "tokenizer": vocabulary,
        "full": "1280x1000 screenshots (1,240 tokens), all tools, 120-260 words a response",
        "small": "448x320 screenshots (140 tokens), compact prompt, 5 tools, 20-50 words a response",
        "100m": "8 turns, and torch once: 15 turns take it minutes a step on two cores",
    }
    counted = preset("4b")
    for turns, goal in TURNS.items():
        if quick and turns > 8:
            continue
        tree, plain = _count(full.group([turns], seed=turns), counted)
        rows.append(Row(name=f"tokens_per_trajectory/{turns}_turns", ours=tree, extra={"plain": plain}))
        goals.append(Goal(name=f"tokens_saved/{turns}_turns", value=plain / tree, goal=goal, better="higher", unit="x"))
        tree, plain = _count(full.group([turns] * 5, seed=turns), counted)
        rows.append(
            Row(name=f"tokens_per_trajectory/{turns}_turns_5_siblings", ours=tree / 5, extra={"plain": plain / 5})
        )
    if not quick:
        found = _filled(full, counted, seed=0)
        rows += [Row(name=f"update_of_256_turns/{name}", ours=value) for name, value in found.items()]
        goals.append(
            Goal(name="useful_token_share", value=found["useful_token_share"], goal=0.95, better="higher", unit="")
        )

    for name, turns, plain_too in _QUICK if quick else _CASES:
        more_rows, more_goals = measure(name, turns, small, repeat=repeat, plain_too=plain_too)
        rows += more_rows
        goals += more_goals
    return BenchResult(bench="learner", settings=settings, rows=tuple(rows), goals=tuple(goals))
