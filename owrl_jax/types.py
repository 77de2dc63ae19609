"""The nouns that flow between the rooms: tasks, calls, observations, turns, trajectories, verdicts, groups.

All are frozen, keyword-only dataclasses with validation, and `msgspec` reads and writes them as they are (`encode`,
`decode`). Token ids are stored once, when they are made; text is derived from ids and never the reverse. Screenshots
are bytes only inside a `Screenshot`; everything that outlives a step carries the content hash. This module imports
nothing heavy: CPU hosts, judges and viewers read these types without an accelerator stack.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
from typing import Any, TypeVar

import msgspec

from owrl_jax.outcome import Outcome

_T = TypeVar("_T")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to do on the web.

    Attributes:
      id: unique within its source.
      instruction: what the user asks for.
      start_url: where the episode begins.
      site: registrable domain or world name, for tables and rate limits; derived from nothing, may be empty.
      split: train, held_out, test …
      difficulty: level or score; None if unknown.
      rubric: facts a judge may use, one per entry.
      verifier: reference of a program check (`worlds`), empty if a judge must decide.
      seed: seed of a resettable world; None for live sites.
      metadata: anything else from the source, JSON-compatible.
    """

    id: str
    instruction: str
    start_url: str
    site: str = ""
    split: str = "train"
    difficulty: float | None = None
    rubric: tuple[str, ...] = ()
    verifier: str = ""
    seed: int | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(bool(self.id), "a task needs a non-empty id")
        _require(bool(self.instruction.strip()), f"task {self.id!r} has an empty instruction")
        _require(bool(self.start_url), f"task {self.id!r} has no start_url")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call as the policy wrote it. `arguments` is what its JSON held, not yet validated."""

    name: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


class CallStatus(str, enum.Enum):
    """What became of one call."""

    OK = "ok"  # done, and its effect was verified or none was expected
    FAILED = "failed"  # tried or refused; the feedback says why
    SKIPPED = "skipped"  # not run, because of an earlier call of the same turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallResult:
    """What one call did: exactly one line of feedback for the policy, and facts for programs."""

    name: str
    status: CallStatus
    feedback: str
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(
            "\n" not in self.feedback and "\r" not in self.feedback, f"feedback is one line, got {self.feedback!r}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tab:
    """One open tab as the policy is told of it."""

    index: int
    url: str
    title: str
    active: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Screenshot:
    """The bytes of one picture of the viewport and its size in pixels, read from the bytes.

    `stale` marks the last good picture handed out again because a fresh one could not be had.
    """

    data: bytes
    width: int
    height: int
    format: str = "png"
    stale: bool = False

    def __post_init__(self) -> None:
        _require(len(self.data) > 0, "a screenshot needs bytes")
        _require(self.width > 0 and self.height > 0, f"a screenshot needs a size, got {self.width}x{self.height}")

    @property
    def sha256(self) -> str:
        """Content hash: the name under which everything else knows this picture."""
        return hashlib.sha256(self.data).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settle:
    """Why the page was taken as settled after an action, and how long that took."""

    reason: str
    ms: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """What the policy sees after a reset or a step: image and metadata of one page state.

    Attributes:
      screenshot: the viewport; None only if the episode ended before one could be taken.
      screen_size: (width, height) in pixels of the image.
      tabs: all open tabs, in order; exactly one is active.
      changes: compact summary of what appeared and vanished in view, empty if nothing did.
      settle: why and when the page was taken as settled.
      signature: hash of the page state that image and metadata were both taken from.
    """

    screenshot: Screenshot | None
    screen_size: tuple[int, int]
    tabs: tuple[Tab, ...]
    changes: str = ""
    settle: Settle | None = None
    signature: str = ""

    @property
    def active_tab(self) -> Tab:
        """The tab that the screenshot shows."""
        return next(tab for tab in self.tabs if tab.active)

    def __post_init__(self) -> None:
        active = sum(tab.active for tab in self.tabs)
        _require(active == 1, f"exactly one tab must be active, got {active} of {len(self.tabs)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """The answer to one turn's calls.

    Attributes:
      results: one per call, in order.
      observation: the page afterwards; None if the episode ended in a fault that left nothing to see.
      answer: the text of a successful `done`, else None.
      outcome: set when the episode is over (a fault, a block, `done`), else None.
      timings_ms: wall time by phase (act, settle, capture, …).
    """

    results: tuple[CallResult, ...]
    observation: Observation | None
    answer: str | None = None
    outcome: Outcome | None = None
    timings_ms: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of one episode, enough to train on it without re-tokenising anything.

    Attributes:
      trunk_ids: ids appended to the trunk before this turn was sampled (this turn's share of the append-only context).
      leaf_ids: ids seen by this turn alone, before the response; the image is one placeholder run.
      response_ids: sampled ids, end of turn included.
      logprobs: behaviour log-prob of each response id, natural log, under the distribution it was sampled from.
      versions: policy version of each response id.
      screenshot: content hash of the picture in the leaf, None for a text-only turn.
      grid: patches of that picture (height, width).
      older_pictures: hash and grid of the pictures before the newest in the leaf, where the history rule keeps several.
      calls, results: what was parsed and what became of it.
      parsed: whether the response obeyed the format.
      timings_ms: wall time by phase.
    """

    trunk_ids: tuple[int, ...]
    leaf_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    screenshot: str | None = None
    grid: tuple[int, int] | None = None
    older_pictures: tuple[tuple[str, tuple[int, int]], ...] = ()
    calls: tuple[ToolCall, ...] = ()
    results: tuple[CallResult, ...] = ()
    parsed: bool = True
    timings_ms: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.response_ids)
        _require(
            len(self.logprobs) == n and len(self.versions) == n,
            f"a turn of {n} response ids needs as many log-probs and versions, "
            f"got {len(self.logprobs)} and {len(self.versions)}",
        )
        bad = next((p for p in self.logprobs if not (math.isfinite(p) and p <= 1e-6)), None)
        _require(bad is None, f"a log-prob must be finite and at most 0, got {bad}")
        _require(
            (self.screenshot is None) == (self.grid is None),
            "screenshot hash and grid go together: give both or neither",
        )


class VerdictValue(str, enum.Enum):
    """Tri-state: a judge that cannot tell must not be read as failure."""

    SUCCESS = "success"
    FAILURE = "failure"
    INVALID = "invalid"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a judge or a program said about one trajectory."""

    value: VerdictValue
    judge: str
    rationale: str = ""
    reasons: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()  # content hashes of the images that were looked at
    prompt_sha256: str = ""
    latency_ms: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One finished episode.

    Attributes:
      task: what was asked.
      group_id, index: which group of siblings, and which of them.
      protocol: id of prompt, tools, template, image format, viewport and budgets; never mixed in one statistic.
      turns: in order.
      outcome: the one ending.
      answer: text of `done`.
      verdict: None until judged.
      final_screenshot: content hash of the picture after the last action, which no turn has seen; judges look at it.
      timings_ms: wall time by phase over the whole episode.
    """

    task: Task
    group_id: str
    index: int
    protocol: str
    turns: tuple[Turn, ...]
    outcome: Outcome
    answer: str | None = None
    verdict: Verdict | None = None
    final_screenshot: str | None = None
    timings_ms: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """Whether it may be learned from: policy-owned ending, and no invalid verdict."""
        return self.outcome.trains and (self.verdict is None or self.verdict.value != VerdictValue.INVALID)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """A wish for `n` sibling episodes of one task."""

    task: Task
    group_id: str
    n: int

    def __post_init__(self) -> None:
        _require(self.n >= 1, f"a group needs at least one member, got n={self.n}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The siblings of one task, complete or given up on. Statistics run over `valid` alone."""

    request: GroupRequest
    trajectories: tuple[Trajectory, ...]

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        """Members that may be learned from."""
        return tuple(t for t in self.trajectories if t.valid)


def encode(value: Any) -> bytes:
    """JSON bytes of any of these types (bytes become base64)."""
    return msgspec.json.encode(value)


def decode(data: bytes | str, type: type[_T]) -> _T:
    """The value of `type` that `data` holds.

    Raises:
      msgspec.ValidationError: naming the path and the expected type; validation of the dataclass itself included.
    """
    return msgspec.json.decode(data, type=type)
