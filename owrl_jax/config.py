"""The configuration of a run: one tree of frozen records, its presets, its JSON form and its hash.

Presets are Python files in `configs/` with a function `get_config() -> RunConfig`. `resolve` loads one and lays
overrides over it (`{"rl.learning_rate": "5e-7"}`); what comes out is complete and checked, prints, saves as JSON, reads
back equal, and has a hash that stands beside every checkpoint. An unknown key or a value of the wrong type is an error
with its dotted path. Defaults are those of the paper's first stage (arXiv 2606.02031). No environment variable is read.

Here stands only what must be chosen for a run. Shapes come from the model's own `config.json`, and the finer settings
of a sandbox or a pool stay with them. Imports no jax: CPU hosts read the same tree.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

T = TypeVar("T")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message has the dotted path, the value, and what to do."""


def _need(condition: bool, field: str, value: object, wanted: str) -> None:
    if not condition:
        raise ConfigError(f"{field}={value!r} must be {wanted}")


def _finite(record: Any) -> None:
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, float):  # JSON has neither infinity nor NaN, so neither could be saved
            _need(math.isfinite(value), field.name, value, "a finite number")


def _at_least_one(record: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(record, field)
        _need(value >= 1, field, value, "at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which policy to train and how to run it.

    Attributes:
      size: size of the model by name, such as `4b`; used when there are no weights.
      weights: folder or hub id of a checkpoint; None starts from random parameters of `size`, with a tokenizer made
        from the harness's own words.
      image_area: smallest and largest area of a picture as the model sees it, pixels; None as the model's files say.
      remat: what the backward pass keeps of a layer: everything, nothing, the attention output, or that in host memory.
    """

    size: str = "4b"
    weights: str | None = None
    image_area: tuple[int, int] | None = None
    remat: Literal["none", "full", "attention", "offload"] = "full"

    def __post_init__(self) -> None:
        _need(bool(self.size), "size", self.size, "the name of a model size, such as '4b'")
        _need(self.weights != "", "weights", self.weights, "a folder or a hub id, or null for random parameters")
        low, high = self.image_area or (1024, 1024)
        _need(
            1024 <= low <= high, "image_area", self.image_area, "two areas of at least 1024 pixels, the smaller first"
        )


MESH_AXES = ("replica", "fsdp", "context", "tensor", "expert")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """Devices along each axis of the mesh; at most one axis is -1 and takes what the others leave."""

    replica: int = 1
    fsdp: int = -1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        for axis, size in sizes.items():
            _need(size == -1 or size >= 1, axis, size, "at least 1, or -1 for all devices that are left")
        free = [axis for axis, size in sizes.items() if size == -1]
        for axis in free[1:]:
            _need(
                False, axis, -1, f"a number of devices: only one axis can take what is left, and {free[0]} does already"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DtypeSettings:
    """Storage and arithmetic. Norms, rotations, softmax, logits and log-probs are float32 whatever stands here."""

    params: Literal["float32", "bfloat16"] = "float32"
    compute: Literal["float32", "bfloat16"] = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrowserSettings:
    """What every sandbox of the run looks like, and how many there are.

    Attributes:
      viewport: width and height of the page in CSS pixels; trajectories of different viewports are never mixed.
      image_format: of the screenshots.
      step_s: deadline of one turn's calls with the observation after them, seconds.
      episode_s: deadline of an episode, seconds.
      max_episodes: episodes at one time; None takes what the machine's memory allows.
      executable: path of the browser, or its kind (`headless_shell`, `chromium`); None takes the best there is.
      retries: fresh attempts of one episode after a fault of browser, site or engine.
    """

    viewport: tuple[int, int] = (1280, 1000)
    image_format: Literal["png", "jpeg"] = "png"
    step_s: float = 45.0
    episode_s: float = 600.0
    max_episodes: int | None = None
    executable: str | None = None
    retries: int = 2

    def __post_init__(self) -> None:
        _finite(self)
        _need(self.retries >= 0, "retries", self.retries, "0 or more")
        _need(
            all(100 <= side <= 8192 for side in self.viewport), "viewport", self.viewport, "100 to 8192 pixels a side"
        )
        _need(self.step_s > 0, "step_s", self.step_s, "a positive number of seconds")
        _need(self.episode_s >= self.step_s, "episode_s", self.episode_s, f"at least step_s, which is {self.step_s:g}")
        _need(
            self.max_episodes is None or self.max_episodes >= 1, "max_episodes", self.max_episodes, "null or at least 1"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What the policy is told, and budgets of one episode.

    Attributes:
      prompt: the words around the work: `full` explains it, `compact` says the format alone, `terse` leaves out what
        the smallest models and worlds can do without (`PromptStyle`).
      tools: names of the tools on offer; none named, all of them.
      feedback: whether later turns say in words what became of the calls; the screenshot shows it in any case.
      max_steps: turns before the episode ends in `step_budget`.
      max_context_tokens, max_response_tokens: of one turn's prompt with its response, and of the response.
      screenshots: how many of the newest pictures stay in the context; 1 makes the trunk append-only.
      max_parse_failures: turns in a row that cannot be parsed before the episode ends in `format_error`.
    """

    prompt: Literal["full", "compact", "terse"] = "full"
    tools: tuple[str, ...] = ()
    feedback: bool = True
    max_steps: int = 15
    max_context_tokens: int = 32768
    max_response_tokens: int = 1024
    screenshots: int = 1
    max_parse_failures: int = 3

    def __post_init__(self) -> None:
        _at_least_one(self, "max_steps", "max_response_tokens", "screenshots", "max_parse_failures")
        _need(
            self.max_response_tokens < self.max_context_tokens,
            "max_response_tokens",
            self.max_response_tokens,
            f"less than max_context_tokens, which is {self.max_context_tokens}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How responses are sampled. `top_p` 1 and `top_k` 0 leave the distribution whole."""

    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        _finite(self)
        _need(
            self.temperature > 0,
            "temperature",
            self.temperature,
            "positive: a greedy policy has no log-probs to learn from",
        )
        _need(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _need(self.top_k >= 0, "top_k", self.top_k, "0 (off) or the number of tokens to keep")


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
        _finite(self)
        _at_least_one(self, "groups", "turns_per_update", "epochs", "row_tokens", "rows_per_device")
        _need(self.group_size >= 2, "group_size", self.group_size, "at least 2: an advantage compares siblings")
        _need(0 < self.clip_low < 1, "clip_low", self.clip_low, "above 0 and below 1 (the paper has 0.2)")
        _need(self.clip_high > 0, "clip_high", self.clip_high, "positive (the paper has 0.28)")
        _need(self.dual_clip > 1, "dual_clip", self.dual_clip, "above 1 (3 is usual): below it clips on-policy tokens")
        _need(self.importance_cap >= 1, "importance_cap", self.importance_cap, "at least 1 (2 is usual)")
        _need(self.turn_constant > 0, "turn_constant", self.turn_constant, "positive, such as the budget of turns")
        _need(self.max_staleness >= 0, "max_staleness", self.max_staleness, "0 (on-policy) or more")
        _need(self.resampling_cap >= 1, "resampling_cap", self.resampling_cap, "at least 1")
        _need(
            self.learning_rate >= 0, "learning_rate", self.learning_rate, "positive, or 0 to measure without learning"
        )
        for field in ("adam_b1", "adam_b2"):
            value = getattr(self, field)
            _need(0 <= value < 1, field, value, "at least 0 and below 1")
        for field in ("kl_coef", "entropy_coef", "min_reward_spread", "weight_decay", "warmup_updates", "lora_rank"):
            value = getattr(self, field)
            _need(value >= 0, field, value, "0 or more")
        if self.schedule != "constant":
            _need(
                self.decay_updates > self.warmup_updates,
                "decay_updates",
                self.decay_updates,
                f"more than warmup_updates ({self.warmup_updates}): the {self.schedule} schedule ends there",
            )
        _need(self.max_grad_norm > 0, "max_grad_norm", self.max_grad_norm, "positive")
        _need(self.lora_alpha > 0, "lora_alpha", self.lora_alpha, "positive")
        _need(
            not {"vision", "projector", "language"} <= set(self.freeze),
            "freeze",
            self.freeze,
            "not the whole model: something must learn",
        )
        _need(0 <= self.diagnosed_share <= 1, "diagnosed_share", self.diagnosed_share, "between 0 and 1")


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
        _finite(self)
        _at_least_one(self, "epochs", "groups_per_update", "row_tokens", "rows_per_device")
        _need(self.learning_rate > 0, "learning_rate", self.learning_rate, "positive")
        _need(0 <= self.warmup_share < 1, "warmup_share", self.warmup_share, "at least 0 and below 1")
        _need(0 <= self.final_fraction <= 1, "final_fraction", self.final_fraction, "between 0 and 1")
        for field in ("adam_b1", "adam_b2"):
            value = getattr(self, field)
            _need(0 <= value < 1, field, value, "at least 0 and below 1")
        _need(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        _need(self.max_grad_norm > 0, "max_grad_norm", self.max_grad_norm, "positive")
        _need(self.lora_rank >= 0, "lora_rank", self.lora_rank, "0 (none) or more")
        _need(
            not {"vision", "projector", "language"} <= set(self.freeze), "freeze", self.freeze,
            "not the whole model: something must learn",
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which tasks.

    Attributes:
      tasks: task tables (paths), and local worlds by name: `worlds:starter` for all templates of a site,
        `worlds:starter/pair_colour` for one.
      split: which part of the tables to train on.
      instances: seeds of each template that are trained on.
      sampling: `uniform`, or `adaptive`: kinds of tasks that the policy solves sometimes, more often than those it
        always or never solves.
    """

    tasks: tuple[str, ...] = ("worlds:starter",)
    split: str = "train"
    instances: int = 1000
    sampling: Literal["uniform", "adaptive"] = "uniform"

    def __post_init__(self) -> None:
        _need(bool(self.tasks) and all(self.tasks), "tasks", self.tasks, "at least one name, none empty")
        _need(bool(self.split), "split", self.split, "the name of a split, such as 'train'")
        _at_least_one(self, "instances")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """How a policy is measured: on held-out tasks, always the same ones.

    Attributes:
      every: iterations between two evaluations; 0 evaluates before the first and after the last alone.
      tasks: held-out tasks, spread over the kinds.
      samples: episodes of each.
      temperature: 0 is greedy.
    """

    every: int = 0
    tasks: int = 100
    samples: int = 1
    temperature: float = 0.8

    def __post_init__(self) -> None:
        _finite(self)
        _at_least_one(self, "tasks", "samples")
        _need(self.every >= 0, "every", self.every, "0 or more iterations")
        _need(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """A model behind an OpenAI-compatible API.

    Attributes:
      url: base address, up to and with the version; empty: there is none.
      model: its name there.
      key_env: name of the environment variable that holds the key; empty: no key is sent. The key itself never stands
        in a configuration, which is saved and shown.
      usd_per_million_in, usd_per_million_out: price of prompt and reply tokens.
      attempts: of one reply.
      attempt_s, deadline_s: seconds for one attempt, and for all of them with their pauses.
    """

    url: str = ""
    model: str = ""
    key_env: str = ""
    usd_per_million_in: float = 0.0
    usd_per_million_out: float = 0.0
    attempts: int = 5
    attempt_s: float = 120.0
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        _finite(self)
        _at_least_one(self, "attempts")
        _need(
            not self.url or self.url.startswith(("http://", "https://")),
            "url",
            self.url,
            "empty, or an address such as 'http://127.0.0.1:8730/v1'",
        )
        _need(
            bool(self.model) == bool(self.url),
            "model",
            self.model,
            f"given exactly where url ({self.url!r}) is",
        )
        if self.key_env and not _VARIABLE.fullmatch(self.key_env):  # it may be a key: not shown
            raise ConfigError(
                f"key_env (of {len(self.key_env)} characters) must be the name of an environment variable, such as "
                "'JUDGE_KEY', never the key itself"
            )
        for field in ("usd_per_million_in", "usd_per_million_out"):
            _need(getattr(self, field) >= 0, field, getattr(self, field), "0 or more")
        for field in ("attempt_s", "deadline_s"):
            _need(getattr(self, field) > 0, field, getattr(self, field), "a positive number of seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """Who says whether an episode fulfilled its task.

    Attributes:
      kind: `program`: local worlds look at their own state, and nobody judges the live web. `rubric`: a model looks.
      endpoint: of that model.
      programs: where a world's program knows: it decides, or it is only compared with and the model's word is learned.
      compared_share: where programs decide: share of their episodes that the model judges too, to be compared.
      screenshots: how many of the newest pictures are shown, the one after the last action included.
      form: how the verdict is asked for: a final line, or JSON.
      coded: whether it carries a code that no page can know; off for judges trained on a form of their own.
      temperature, max_tokens: of a reply.
      concurrency: questions at one time.
      max_usd, max_calls: what all verdicts of the run may cost together; the run stops there. Null is no limit.
      second: a held-out judge that nothing is trained against; without a url there is none.
      second_share: share of the model's verdicts that the held-out judge gives too.
      drift_window: comparisons after which it is tested whether the training judge has become too kind.
    """

    kind: Literal["program", "rubric"] = "program"
    endpoint: EndpointSettings = dataclasses.field(default_factory=EndpointSettings)
    programs: Literal["decide", "compare"] = "decide"
    compared_share: float = 0.0
    screenshots: int = 3
    form: Literal["line", "json"] = "line"
    coded: bool = True
    temperature: float = 0.0
    max_tokens: int = 2048
    concurrency: int = 8
    max_usd: float | None = None
    max_calls: int | None = None
    second: EndpointSettings = dataclasses.field(default_factory=EndpointSettings)
    second_share: float = 0.1
    drift_window: int = 100

    def __post_init__(self) -> None:
        _finite(self)
        _at_least_one(self, "screenshots", "max_tokens", "concurrency", "drift_window")
        _need(
            self.kind == "program" or bool(self.endpoint.url),
            "endpoint.url",
            self.endpoint.url,
            "the address of a model, such as 'http://127.0.0.1:8730/v1', where kind is 'rubric'",
        )
        _need(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        for field in ("compared_share", "second_share"):
            _need(0 <= getattr(self, field) <= 1, field, getattr(self, field), "between 0 and 1")
        _need(self.max_calls is None or self.max_calls >= 1, "max_calls", self.max_calls, "null or at least 1")
        _need(self.max_usd is None or self.max_usd > 0, "max_usd", self.max_usd, "null or a positive number")
        for name in ("endpoint", "second"):
            asked: EndpointSettings = getattr(self, name)
            _need(
                self.max_usd is None or not asked.url or asked.usd_per_million_in + asked.usd_per_million_out > 0,
                f"{name}.usd_per_million_in",
                asked.usd_per_million_in,
                f"positive, for max_usd={self.max_usd} to mean anything",
            )


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
        _finite(self)
        _at_least_one(self, "iterations", "max_steps")
        _need(self.learning_rate >= 0, "learning_rate", self.learning_rate, "0 or more")


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
        _finite(self)
        _at_least_one(self, "start")
        _need(self.most == 0 or self.most >= self.start, "most", self.most, f"0 (off) or at least start, {self.start}")
        _need(0 < self.finished_share <= 1, "finished_share", self.finished_share, "above 0 and at most 1")
        _need(self.growth > 1, "growth", self.growth, "above 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """How often to save, and what to keep.

    Attributes:
      every: iterations between two saves.
      keep: how many of the newest saved states stay on the disk.
      keep_every: steps that this divides stay for good; None keeps none but the newest.
      host_gib: host memory that a save or a restore may take at one time, GiB.
    """

    every: int = 5
    keep: int = 3
    keep_every: int | None = None
    host_gib: float = 8.0

    def __post_init__(self) -> None:
        _finite(self)
        _at_least_one(self, "every", "keep")
        _need(self.keep_every is None or self.keep_every >= 1, "keep_every", self.keep_every, "null or at least 1")
        _need(self.host_gib > 0, "host_gib", self.host_gib, "a positive number of GiB")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    """Where numbers go.

    Attributes:
      every: iterations between two lines of metrics.
      sinks: trackers beside `metrics.jsonl`.
    """

    every: int = 1
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()

    def __post_init__(self) -> None:
        _at_least_one(self, "every")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that is chosen for a run.

    Attributes:
      name: of the run; its files go to `out_dir`/`name`.
      out_dir: folder of all runs.
      seed: of parameters, sampling and task order.
      iterations: rounds of rollout and update.
      curriculum: stages that take the place of `agent.max_steps` and `rl.learning_rate` in training; evaluation keeps
        `agent.max_steps`, so that its numbers stay comparable. Without stages, those two hold throughout.
    """

    name: str = "run"
    out_dir: str = "runs"
    seed: int = 0
    iterations: int = 90
    curriculum: tuple[Stage, ...] = ()
    horizon: HorizonSettings = dataclasses.field(default_factory=HorizonSettings)
    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    mesh: MeshSettings = dataclasses.field(default_factory=MeshSettings)
    dtypes: DtypeSettings = dataclasses.field(default_factory=DtypeSettings)
    browser: BrowserSettings = dataclasses.field(default_factory=BrowserSettings)
    agent: AgentSettings = dataclasses.field(default_factory=AgentSettings)
    rollout: RolloutSettings = dataclasses.field(default_factory=RolloutSettings)
    rl: RlSettings = dataclasses.field(default_factory=RlSettings)
    sft: SftSettings = dataclasses.field(default_factory=SftSettings)
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    eval: EvalSettings = dataclasses.field(default_factory=EvalSettings)
    judge: JudgeSettings = dataclasses.field(default_factory=JudgeSettings)
    checkpoint: CheckpointSettings = dataclasses.field(default_factory=CheckpointSettings)
    logging: LoggingSettings = dataclasses.field(default_factory=LoggingSettings)

    def __post_init__(self) -> None:
        _need(bool(self.name) and "/" not in self.name, "name", self.name, "a plain name: it becomes a folder")
        _need(0 <= self.seed < 2**32, "seed", self.seed, "between 0 and 2**32 - 1")
        _at_least_one(self, "iterations")
        _need(
            not (self.curriculum and self.horizon.most), "horizon.most", self.horizon.most,
            "0 where a curriculum sets the horizon",
        )  # fmt: skip

    def stage_of(self, iteration: int) -> Stage:
        """The stage that an iteration (counted from 0) belongs to: a function of its number and of nothing else."""
        if not self.curriculum:
            return Stage(
                iterations=self.iterations, max_steps=self.agent.max_steps, learning_rate=self.rl.learning_rate
            )
        end = 0
        for stage in self.curriculum:
            end += stage.iterations
            if iteration < end:
                return stage
        return self.curriculum[-1]

    def same_run(self, other: RunConfig) -> bool:
        """Whether a run of `other` can go on with these settings.

        How long it is, what its verdicts may cost and where its judges are to be found may change; nothing else may.
        """

        def kept(run: RunConfig) -> RunConfig:
            ends = {
                name: dataclasses.replace(end, url=end.url and "http://", key_env="")
                for name, end in (("endpoint", run.judge.endpoint), ("second", run.judge.second))
            }
            judge = dataclasses.replace(run.judge, max_usd=None, max_calls=None, **ends)
            return dataclasses.replace(run, iterations=1, judge=judge)

        return config_hash(kept(self)) == config_hash(kept(other))


# --- Plain data in, checked records out ---------------------------------------------------------------------


_hints = functools.cache(typing.get_type_hints)


def _nearest(name: str, known: Sequence[str], prefix: str) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(known)}"


def _build(cls: type[T], data: object, path: str, base: T | None = None) -> T:
    """The record of `cls` that `data` describes. What `data` leaves out comes from `base`, or has its default."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path or 'the configuration'} must be a group of settings, got {data!r}")
    hints = _hints(cls)
    prefix = f"{path}." if path else ""
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in hints:
            raise ConfigError(f"unknown setting {prefix}{key}; {_nearest(str(key), list(hints), prefix)}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            values[key] = _build(hint, value, prefix + key, None if base is None else getattr(base, key))  # type: ignore[arg-type]
            continue
        record = _record_of(hint)
        if record is not None and isinstance(value, list | tuple):
            values[key] = tuple(_build(record, _plain(item), f"{prefix}{key}[{n}]") for n, item in enumerate(value))
            continue
        try:
            values[key] = msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{prefix}{key}={value!r}: {error}") from None
    missing = [f.name for f in dataclasses.fields(cls) if _required(f) and f.name not in values]  # type: ignore[arg-type]
    if missing and base is None:
        raise ConfigError(f"{path} needs a value for {', '.join(missing)}")
    try:
        return cls(**values) if base is None else dataclasses.replace(base, **values)  # type: ignore[type-var]
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _record_of(hint: Any) -> Any:
    """The record that a tuple is of; None for everything else."""
    items = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    return items[0] if len(items) == 2 and items[1] is Ellipsis and dataclasses.is_dataclass(items[0]) else None


def _plain(item: object) -> object:
    return msgspec.to_builtins(item) if dataclasses.is_dataclass(item) else item


def from_dict(data: Mapping[str, Any]) -> RunConfig:
    """A configuration from nested plain data; what is left out has its default.

    Raises:
      ConfigError: for an unknown setting, a wrong type or a value out of range, with its dotted path.
    """
    return _build(RunConfig, data, "")


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested plain data, complete."""
    return msgspec.to_builtins(config)


def to_json(config: RunConfig) -> str:
    """The configuration as indented JSON, complete, ending in a newline."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2).decode() + "\n"


def from_json(text: str | bytes) -> RunConfig:
    """The inverse of `to_json`.

    Raises:
      ConfigError: as `from_dict`, and for text that is not JSON.
    """
    try:
        data = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the configuration is not valid JSON: {error}") from None
    return from_dict(data)


def config_hash(config: RunConfig) -> str:
    """SHA-256 (hex) of the canonical JSON: keys sorted, no spaces, a float setting always written as a float."""
    canonical = from_dict(to_dict(config))
    return hashlib.sha256(msgspec.json.encode(canonical, order="sorted")).hexdigest()


# --- Presets and overrides ----------------------------------------------------------------------------------

# In an installed package the presets lie inside it; in a checkout, beside it.
PRESET_FOLDERS = (Path(__file__).parent / "configs", Path(__file__).parent.parent / "configs")


def preset_files() -> dict[str, Path]:
    """Name and file of every preset."""
    return {path.stem: path for folder in PRESET_FOLDERS for path in sorted(folder.glob("[a-z]*.py"))}


def load_preset(preset: str) -> RunConfig:
    """The configuration that a preset gives: a name in `configs/`, or the path of a Python file.

    Raises:
      ConfigError: if there is no such preset, or its `get_config` does not give a `RunConfig`.
    """
    if preset.endswith(".py"):
        path = Path(preset)
        if not path.is_file():
            raise ConfigError(f"there is no preset file {preset}: check the path")
    else:
        known = preset_files()
        if preset not in known:
            raise ConfigError(f"there is no preset {preset!r}; {_nearest(preset, list(known), '')}")
        path = known[preset]
    spec = importlib.util.spec_from_file_location(f"_owrl_preset_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"{path} has no function get_config() -> RunConfig; a preset needs one")
    config = module.get_config()
    if not isinstance(config, RunConfig):
        raise ConfigError(f"get_config() in {path} must return a RunConfig, got {type(config).__name__}")
    return config


def _parse(text: str, hint: Any) -> Any:
    """The value that command-line text stands for, given its type. Text stays text where text is wanted."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    wants_text = hint is str or (is_union and str in typing.get_args(hint) and value is not None)
    return text if wants_text else value


def _nest(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`{"rl.epochs": 1}` as `{"rl": {"epochs": 1}}`, text parsed by the type of the setting."""
    nested: dict[str, Any] = {}
    for dotted, value in overrides.items():
        *groups, leaf = dotted.split(".")
        cls: Any = RunConfig
        node = nested
        for group in groups:
            cls = typing.get_type_hints(cls).get(group) if dataclasses.is_dataclass(cls) else None
            node = node.setdefault(group, {})
        hint = typing.get_type_hints(cls).get(leaf) if dataclasses.is_dataclass(cls) else None
        node[leaf] = _parse(value, hint) if isinstance(value, str) and hint is not None else value
    return nested


def resolve(preset: str | RunConfig | None = None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A complete, checked configuration.

    Args:
      preset: name or path of a preset, a configuration, or None for the defaults.
      overrides: dotted name to value; text is read as JSON where the setting is not text itself.

    Raises:
      ConfigError: naming the dotted path, the value and what to do.
    """
    base = preset if isinstance(preset, RunConfig) else RunConfig() if preset is None else load_preset(preset)
    return _build(RunConfig, _nest(overrides or {}), "", base)


def split_overrides(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Takes `--rl.epochs 1` and `--seed=3` out of a command line. Returns the overrides and the other arguments.

    Raises:
      ConfigError: for a setting without a value.
    """
    top = {field.name for field in dataclasses.fields(RunConfig)}
    overrides: dict[str, str] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        name, has_value, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or not ("." in name or name in top):
            rest.append(word)
            continue
        if not has_value:
            following = next(words, None)
            if following is None:
                raise ConfigError(f"--{name} needs a value after it")
            value = following
        overrides[name] = value
    return overrides, rest
