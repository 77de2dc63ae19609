"""Log-probs computed anew: how far the sampler's are from the learner's, and those of other policies for the loss.

The sampler stores a log-prob with every id. The learner computes the same number with another program: other shapes,
other caches, perhaps other kernels. Training is on-policy only as far as both agree, so a share of every iteration's
trajectories is computed anew under the parameters that sampled them and compared. Averages hide the bad turn: the
largest difference, the 99th percentile and the mean per turn number are logged beside the mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from owrl_jax.models.run import Params
from owrl_jax.rl.batch import PackedBatch, TrainSample
from owrl_jax.rl.update import Learner

Pack = Callable[[Sequence[TrainSample]], Iterable[PackedBatch]]


def share_of(samples: Sequence[TrainSample], share: float, *, seed: int, iteration: int) -> list[TrainSample]:
    """A random share of the samples, at least one unless `share` is 0; the same for the same seed."""
    live = [sample for sample in samples if sample.live]
    if not live or share <= 0:
        return []
    count = min(len(live), max(1, round(share * len(live))))
    chosen = np.random.default_rng([seed, iteration, 1]).choice(len(live), count, replace=False)
    return [live[at] for at in sorted(chosen.tolist())]


def recomputed(
    learner: Learner, params: Params, samples: Sequence[TrainSample], pack: Pack
) -> list[dict[int, np.ndarray]]:
    """Log-probs of every response under `params`, per sample: turn -> one value per response id.

    Args:
      learner: its program, temperature included.
      params: of the policy in question; `learner.policy(state)` for the one that is trained.
      pack: packs samples into batches.
    """
    found: list[dict[int, np.ndarray]] = [{} for _ in samples]
    for batch in pack(samples):
        (logp,) = learner.logprobs(params, [batch])
        for (sample, turn), values in batch.by_turn(logp).items():
            found[sample][turn] = values
    return found


def with_proximal(learner: Learner, params: Params, samples: Sequence[TrainSample], pack: Pack) -> list[TrainSample]:
    """The samples with log-probs under a proximal policy, for `decoupled` and `truncated_is`."""
    return _with(samples, recomputed(learner, params, samples, pack), "proximal")


def with_reference(learner: Learner, params: Params, samples: Sequence[TrainSample], pack: Pack) -> list[TrainSample]:
    """The samples with log-probs under a reference policy, for `kl_coef` above 0."""
    return _with(samples, recomputed(learner, params, samples, pack), "reference")


def mismatch(samples: Sequence[TrainSample], computed: Sequence[dict[int, np.ndarray]]) -> dict[str, float]:
    """Numbers for the log: |log-prob at sampling - log-prob now|, nats per token.

    Args:
      samples: with the log-probs at sampling.
      computed: of `recomputed` under the parameters that sampled them.
    Returns:
      mean, 99th percentile and maximum, the mean signed difference, the mean per turn number, and how many tokens and
      trajectories were compared; empty if none were.
    """
    by_turn: dict[int, list[np.ndarray]] = {}
    for sample, turns in zip(samples, computed, strict=True):
        for turn, values in turns.items():
            by_turn.setdefault(turn, []).append(values - np.asarray(sample.turns[turn].logprobs))
    if not by_turn:
        return {}
    signed = np.concatenate([part for parts in by_turn.values() for part in parts])
    away = np.abs(signed)
    found = {
        "mismatch/logp_mean": float(away.mean()),
        "mismatch/logp_p99": float(np.quantile(away, 0.99)),
        "mismatch/logp_max": float(away.max()),
        "mismatch/logp_signed_mean": float(signed.mean()),
        "mismatch/ratio_max": float(np.exp(np.minimum(signed.max(), 20.0))),
        "mismatch/tokens": float(len(signed)),
        "mismatch/trajectories": float(sum(bool(turns) for turns in computed)),
    }
    for turn, parts in sorted(by_turn.items()):
        found[f"mismatch/logp_mean_turn_{turn:02d}"] = float(np.abs(np.concatenate(parts)).mean())
    return found


def _with(samples: Sequence[TrainSample], computed: Sequence[dict[int, np.ndarray]], field: str) -> list[TrainSample]:
    made = []
    for sample, turns in zip(samples, computed, strict=True):
        values = tuple(
            tuple(turns[number].tolist()) if number in turns else (0.0,) * len(turn.response_ids)
            for number, turn in enumerate(sample.turns)  # turns without a loss are never looked at
        )
        made.append(dataclasses.replace(sample, **{field: values}))
    return made
