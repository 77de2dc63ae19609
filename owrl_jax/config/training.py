"""How a policy learns: by reinforcement, by imitation, in stages, with a horizon that grows."""

from __future__ import annotations

import dataclasses
from typing import Literal

from owrl_jax.config.checks import at_least_one, finite, need

Objective = Literal["mm_grpo", "constant", "trajectory_mean", "decoupled", "truncated_is", "gspo_token", "dual_clip"]
"""MM-GRPO, or MM-GRPO with one thing changed; `owrl_jax.rl.loss` has the equations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlSettings:
    """MM-GRPO: group-relative advantages per trajectory, token mean per turn, turns summed, asymmetric clip, no KL.

    Attributes:
      groups: accepted groups per iteration.
      group_size: sibling episodes of one task.
      turns_per_update: turns in one optimiser step, about: an epoch is dealt out evenly and no turn is left over.
      epochs: passes over the turns of an iteration.
      shuffle: what an epoch's reshuffle moves as a whole; groups share the most tokens and balance the advantages.
      objective: the loss.
      clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
      dual_clip: of objective `dual_clip`: negative advantages never weigh more than this many times.
      importance_cap: of `truncated_is` and `decoupled`: largest weight of a stale token.
      turn_constant: k of objective `constant`, which weighs every turn 1/k.
      kl_coef, entropy_coef: of the distance to a reference policy and of the entropy bonus; 0 computes neither.
      min_reward_spread: a group whose valid rewards span no more than this teaches nothing and is dropped.
      advantage_std: whether advantages are divided by the group's standard deviation.
      format_error_reward: reward of an episode that ended in `format_error`.
      format_gate: which turns must have obeyed the format for a reward above 0: the last one, as the reference has it,
        every one, or none.
      credit_malformed: whether a turn that broke the format shares a positive advantage of its episode.
      max_staleness: policy versions a trajectory may be behind when it is trained on; 0 is on-policy.
      resampling_cap: an iteration plays at most this many times its groups before it takes what it has.
      learning_rate: after the warm-up.
      schedule: how the rate goes on from there; a pure function of the count of updates.
      warmup_updates: over which the rate rises from 0.
      decay_updates: update at which `linear` and `cosine` reach 0.
      adam_b1, adam_b2, weight_decay, max_grad_norm: AdamW; the decay leaves norms and biases alone.
      freeze: parts of the model that stay as they are.
      lora_rank: above 0 the model's matrices stay and adapters of this rank are trained.
      lora_alpha: adapters are scaled by alpha / rank.
      optimizer_on_host: keeps Adam's moments in host memory between updates.
      packing: rows that walk the tree of contexts, or one segment per turn.
      row_tokens: tokens of a row.
      rows_per_device: rows that one data shard computes at a time.
      diagnosed_share: share of an iteration's trajectories whose log-probs are computed anew and compared.
    """

    groups: int = 48
    group_size: int = 5
    turns_per_update: int = 256
    epochs: int = 2
    shuffle: Literal["group", "trajectory"] = "group"
    objective: Objective = "mm_grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    importance_cap: float = 2.0
    turn_constant: float = 15.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    min_reward_spread: float = 1e-6
    advantage_std: bool = True
    format_error_reward: float = -1.0
    format_gate: Literal["last", "every", "off"] = "last"
    credit_malformed: bool = True
    max_staleness: int = 0
    resampling_cap: float = 4.0
    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: int = 0
    decay_updates: int = 0
    adam_b1: float = 0.9
    adam_b2: float = 0.98
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    freeze: tuple[Literal["vision", "projector", "language"], ...] = ()
    lora_rank: int = 0
    lora_alpha: float = 16.0
    optimizer_on_host: bool = False
    packing: Literal["tree", "plain"] = "tree"
    row_tokens: int = 16384
    rows_per_device: int = 1
    diagnosed_share: float = 0.05

    def __post_init__(self) -> None:
        finite(self)
        at_least_one(self, "groups", "turns_per_update", "epochs", "row_tokens", "rows_per_device")
        need(self.group_size >= 2, "group_size", self.group_size, "at least 2: an advantage compares siblings")
        need(0 < self.clip_low < 1, "clip_low", self.clip_low, "above 0 and below 1 (the paper has 0.2)")
        need(self.clip_high > 0, "clip_high", self.clip_high, "positive (the paper has 0.28)")
        need(self.dual_clip > 1, "dual_clip", self.dual_clip, "above 1 (3 is usual): below it clips on-policy tokens")
        need(self.importance_cap >= 1, "importance_cap", self.importance_cap, "at least 1 (2 is usual)")
        need(self.turn_constant > 0, "turn_constant", self.turn_constant, "positive, such as the budget of turns")
        need(self.max_staleness >= 0, "max_staleness", self.max_staleness, "0 (on-policy) or more")
        need(self.resampling_cap >= 1, "resampling_cap", self.resampling_cap, "at least 1")
        need(self.learning_rate >= 0, "learning_rate", self.learning_rate, "positive, or 0 to measure without learning")
        for field in ("adam_b1", "adam_b2"):
            value = getattr(self, field)
            need(0 <= value < 1, field, value, "at least 0 and below 1")
        for field in ("kl_coef", "entropy_coef", "min_reward_spread", "weight_decay", "warmup_updates", "lora_rank"):
            value = getattr(self, field)
            need(value >= 0, field, value, "0 or more")
        if self.schedule != "constant":
            need(
                self.decay_updates > self.warmup_updates,
                "decay_updates",
                self.decay_updates,
                f"more than warmup_updates ({self.warmup_updates}): the {self.schedule} schedule ends there",
            )
        need(self.max_grad_norm > 0, "max_grad_norm", self.max_grad_norm, "positive")
        need(self.lora_alpha > 0, "lora_alpha", self.lora_alpha, "positive")
        need(
            not {"vision", "projector", "language"} <= set(self.freeze),
            "freeze",
            self.freeze,
            "not the whole model: something must learn",
        )
        need(0 <= self.diagnosed_share <= 1, "diagnosed_share", self.diagnosed_share, "between 0 and 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftSettings:
    """Supervised training on demonstrations: each turn's response, given the context it was written in.

    Attributes:
      data: folder of a data set (`owrl data build`).
      epochs: passes over it; with the size of the data they give the number of updates that the schedule is made for.
      groups_per_update: groups of siblings (with one demonstration per task: demonstrations) in one update.
      learning_rate: after the warm-up.
      warmup_share: share of the planned updates over which the rate rises.
      final_fraction: of the rate, at the end of the half cosine; with 0 nothing can be learned after it.
      adam_b1, adam_b2, weight_decay, max_grad_norm: AdamW.
      freeze: parts of the model that stay as they are.
      lora_rank: above 0, low-rank adapters are trained instead of the matrices.
      lora_alpha: adapters are scaled by alpha / rank.
      packing, row_tokens, rows_per_device: as in RlSettings.
    """

    data: str = ""
    epochs: int = 3
    groups_per_update: int = 16
    learning_rate: float = 1e-5
    warmup_share: float = 0.1
    final_fraction: float = 0.0
    adam_b1: float = 0.9
    adam_b2: float = 0.98
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    freeze: tuple[Literal["vision", "projector", "language"], ...] = ("vision", "projector")
    lora_rank: int = 0
    lora_alpha: float = 16.0
    packing: Literal["tree", "plain"] = "tree"
    row_tokens: int = 16384
    rows_per_device: int = 1

    def __post_init__(self) -> None:
        finite(self)
        at_least_one(self, "epochs", "groups_per_update", "row_tokens", "rows_per_device")
        need(self.learning_rate > 0, "learning_rate", self.learning_rate, "positive")
        need(0 <= self.warmup_share < 1, "warmup_share", self.warmup_share, "at least 0 and below 1")
        need(0 <= self.final_fraction <= 1, "final_fraction", self.final_fraction, "between 0 and 1")
        for field in ("adam_b1", "adam_b2"):
            value = getattr(self, field)
            need(0 <= value < 1, field, value, "at least 0 and below 1")
        need(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        need(self.max_grad_norm > 0, "max_grad_norm", self.max_grad_norm, "positive")
        need(self.lora_rank >= 0, "lora_rank", self.lora_rank, "0 (none) or more")
        need(
            not {"vision", "projector", "language"} <= set(self.freeze), "freeze", self.freeze,
            "not the whole model: something must learn",
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a curriculum.

    Attributes:
      iterations: how many; the last stage goes on for as long as the run does.
      max_steps: turns before an episode ends in `step_budget`.
      learning_rate: of the updates.
    """

    iterations: int
    max_steps: int
    learning_rate: float

    def __post_init__(self) -> None:
        finite(self)
        at_least_one(self, "iterations", "max_steps")
        need(self.learning_rate >= 0, "learning_rate", self.learning_rate, "0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HorizonSettings:
    """A horizon of training that grows by itself, instead of stages (`owrl_jax.rl.horizon`).

    Attributes:
      start: turns of an episode in the first iteration.
      most: to which it grows; 0: there is no such horizon.
      finished_share: share of an iteration's valid episodes that must have called `done` before their last turn.
      growth: factor of one step.
    """

    start: int = 8
    most: int = 0
    finished_share: float = 0.8
    growth: float = 1.25

    def __post_init__(self) -> None:
        finite(self)
        at_least_one(self, "start")
        need(self.most == 0 or self.most >= self.start, "most", self.most, f"0 (off) or at least start, {self.start}")
        need(0 < self.finished_share <= 1, "finished_share", self.finished_share, "above 0 and at most 1")
        need(self.growth > 1, "growth", self.growth, "above 1")
