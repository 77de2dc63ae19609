"""What goes into the engine and what comes out. Nothing here needs jax.

A request is ids and pictures, an answer is ids with their log-probs and policy versions. Words are not the engine's
business: chat templates, tools and stop strings belong to the harness and to the server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, Protocol

from owrl_jax.agent.policy import Generation, Sampling


class SpecialTokens(Protocol):
    """What the engine must know of a vocabulary; `owrl_jax.models.tokenizer.SpecialIds` has it."""

    @property
    def im_end(self) -> int: ...
    @property
    def endoftext(self) -> int: ...
    @property
    def image_pad(self) -> int: ...
    @property
    def video_pad(self) -> int: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """One sampled token.

    Attributes:
      id: of the vocabulary.
      logprob: natural log of its probability, as `Completion.logprobs`.
      version: of the policy that sampled it.
      top: (id, log-prob) of the likeliest tokens, as many as were asked for.
    """

    id: int
    logprob: float
    version: int
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt.

    Attributes:
      ids: as the model reads them, image placeholders expanded to one per visual token.
      pictures: bytes of the images (PNG, JPEG or WebP) of the placeholder runs, in order.
      sampling: how to draw. `max_new_tokens` is cut to what fits into the context.
      stop: ids that end the response, themselves included; None: the vocabulary's end of turn and end of text.
      deadline_s: seconds from submission after which the request fails; None: the engine's default.
      training: the answer will be trained on. Truncated sampling is then refused, because the learner's log-probs are
        those of the whole distribution.
      on_token: called on the engine's thread with each run of new tokens, for streaming; must return at once. If it
        raises, this request fails with that error.
      top_logprobs: how many of the likeliest tokens to report beside each sampled one.
    """

    ids: tuple[int, ...]
    pictures: tuple[bytes, ...] = ()
    sampling: Sampling
    stop: tuple[int, ...] | None = None
    deadline_s: float | None = None
    training: bool = False
    on_token: Callable[[tuple[Token, ...]], None] | None = None
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError("a request needs at least one prompt token")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ValueError(f"deadline_s must be above 0, got {self.deadline_s}")
        if self.top_logprobs < 0:
            raise ValueError(f"top_logprobs must be 0 or more, got {self.top_logprobs}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The answer to a request.

    Attributes:
      tokens: as sampled, the stop token included if it came.
      finish: `stop` or `length`.
      prompt_tokens: length of the prompt.
      cached_tokens: how many of them were found in the prefix cache.
      preemptions: how often the request gave its memory to an older one and was computed again.
      queue_s, prefill_s, decode_s: waiting for a place, from there to the first token, and the rest.
    """

    tokens: tuple[Token, ...]
    finish: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int
    preemptions: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def ids(self) -> tuple[int, ...]:
        """Sampled ids."""
        return tuple(t.id for t in self.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-prob of each: of the distribution at the request's temperature over the whole vocabulary, as the learner
        computes it; over the tokens that top-p and top-k left, if they were on; at temperature 1 if greedy.
        """
        return tuple(t.logprob for t in self.tokens)

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy version of each."""
        return tuple(t.version for t in self.tokens)

    @property
    def generation(self) -> Generation:
        """The same as the harness sees it."""
        return Generation(ids=self.ids, logprobs=self.logprobs, versions=self.versions, finish=self.finish)
