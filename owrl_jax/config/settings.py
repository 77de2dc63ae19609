"""What a run is made of: the model and its mesh, browsers, the agent, rollouts, tasks, evaluation, files."""

from __future__ import annotations

import dataclasses
from typing import Literal

from owrl_jax.config.checks import at_least_one, finite, need


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
        need(bool(self.size), "size", self.size, "the name of a model size, such as '4b'")
        need(self.weights != "", "weights", self.weights, "a folder or a hub id, or null for random parameters")
        low, high = self.image_area or (1024, 1024)
        need(1024 <= low <= high, "image_area", self.image_area, "two areas of at least 1024 pixels, the smaller first")


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
            need(size == -1 or size >= 1, axis, size, "at least 1, or -1 for all devices that are left")
        free = [axis for axis, size in sizes.items() if size == -1]
        for axis in free[1:]:
            need(
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
        finite(self)
        need(self.retries >= 0, "retries", self.retries, "0 or more")
        need(all(100 <= side <= 8192 for side in self.viewport), "viewport", self.viewport, "100 to 8192 pixels a side")
        need(self.step_s > 0, "step_s", self.step_s, "a positive number of seconds")
        need(self.episode_s >= self.step_s, "episode_s", self.episode_s, f"at least step_s, which is {self.step_s:g}")
        need(
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
        at_least_one(self, "max_steps", "max_response_tokens", "screenshots", "max_parse_failures")
        need(
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
        finite(self)
        need(
            self.temperature > 0,
            "temperature",
            self.temperature,
            "positive: a greedy policy has no log-probs to learn from",
        )
        need(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        need(self.top_k >= 0, "top_k", self.top_k, "0 (off) or the number of tokens to keep")


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
        need(bool(self.tasks) and all(self.tasks), "tasks", self.tasks, "at least one name, none empty")
        need(bool(self.split), "split", self.split, "the name of a split, such as 'train'")
        at_least_one(self, "instances")


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
        finite(self)
        at_least_one(self, "tasks", "samples")
        need(self.every >= 0, "every", self.every, "0 or more iterations")
        need(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")


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
        finite(self)
        at_least_one(self, "every", "keep")
        need(self.keep_every is None or self.keep_every >= 1, "keep_every", self.keep_every, "null or at least 1")
        need(self.host_gib > 0, "host_gib", self.host_gib, "a positive number of GiB")


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
        at_least_one(self, "every")
