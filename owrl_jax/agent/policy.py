"""The seam between the harness and whatever answers: ids in, ids out.

A policy gets one prompt as two rows of ids, `trunk + leaf`, and gives the ids of one response. An engine reads the ids
and the pictures; an actor that thinks in words (a script, an oracle, a remote endpoint) reads the `Scene` that hangs
on the leaf, and its words become ids in `policies.py`. A policy that cannot answer raises `PolicyFailed`; a bad
answer is an answer.

Only nouns here, and nothing heavy. `engine/client.py` hands them out under the engine's address.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any, Literal, Protocol

from owrl_jax.outcome import Outcome, Phase, Reason
from owrl_jax.types import CallResult, Observation, Screenshot, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one response is drawn.

    Attributes:
      max_new_tokens: longest response, end of turn included; the harness has cut it to what fits into the context.
      temperature: 0 is greedy.
      top_p, top_k: 1 and 0 leave the distribution whole.
      seed: of this response; the same prompt, seed and weights give the same ids.
    """

    max_new_tokens: int
    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """One image of a prompt.

    Attributes:
      screenshot: its bytes.
      grid: (h, w), patches down and across.
      tokens: length of its run of placeholders.
    """

    screenshot: Screenshot
    grid: tuple[int, int]
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One message of the conversation as words: `text` with `\\0` where a picture stands."""

    role: Literal["system", "user", "assistant"]
    text: str
    pictures: tuple[Picture, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """What an actor that thinks in words may look at. Engines never do.

    Attributes:
      task: what is to be done.
      turn: number of this turn, from 0.
      observation: the page now.
      results: what became of the calls of the turn before.
      problem: why the response before could not be parsed, empty if it could.
      messages: the conversation so far, pictures as the history rule leaves them.
      tools: schemas of the tools on offer.
      sandbox: the running sandbox, for oracles, which may ask it where things are.
    """

    task: Task
    turn: int
    observation: Observation
    results: tuple[CallResult, ...] = ()
    problem: str = ""
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    sandbox: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """The part of a prompt that this turn alone sees.

    Attributes:
      ids: as the model reads them: one placeholder per visual token, the opening of the response at the end.
      pictures: images of the placeholder runs, in order.
      scene: the same moment in words.
    """

    ids: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()
    scene: Scene | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """One response.

    Attributes:
      ids: as sampled, the end-of-turn token included if it came.
      logprobs: natural log of the probability of each, under the distribution it was drawn from.
      versions: policy version of each; -1 for actors that are no model.
      finish: `stop` if the policy ended its turn, `length` if `max_new_tokens` did.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Literal["stop", "length"] = "stop"

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"{len(self.ids)} ids need as many log-probs and versions, got {len(self.logprobs)} and "
                f"{len(self.versions)}"
            )


class Policy(Protocol):
    """Whatever answers."""

    async def generate(self, trunk: tuple[int, ...], leaf: Leaf, sampling: Sampling) -> Generation:
        """One response to `trunk + leaf.ids`. Cancelling the call abandons it.

        Never emits an image placeholder: a run of them is a picture, and there is none in a response.

        Raises:
          PolicyFailed: if there is no answer; an answer that makes no sense is not a failure.
        """
        ...


class FailureKind(str, enum.Enum):
    """Why there was no answer."""

    UNAVAILABLE = "unavailable"  # engine or endpoint down, overloaded, or broken; all attempts used up
    REJECTED = "rejected"  # the endpoint will never answer this request (wrong key, unknown model, filtered)
    BUDGET = "budget"  # a spending limit was reached before the call
    EXHAUSTED = "exhausted"  # a script or a recording has no more turns


class PolicyFailed(Exception):
    """There is no answer, and it is not the policy's doing."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def outcome(self, latency_ms: float | None = None) -> Outcome:
        """How an episode ends that met this. Never owned by the policy: nothing is learned from it."""
        fields: dict[str, Any] = {"phase": Phase.GENERATE, "message": str(self)[:300], "latency_ms": latency_ms}
        if self.kind == FailureKind.BUDGET:
            return Outcome(reason=Reason.CANCELLED, detail="budget", **fields)
        if self.kind == FailureKind.EXHAUSTED:
            return Outcome(reason=Reason.CANCELLED, detail="operator", retryable=False, **fields)
        retryable = self.kind == FailureKind.UNAVAILABLE
        return Outcome(reason=Reason.SANDBOX_ERROR, detail="policy_unavailable", retryable=retryable, **fields)
