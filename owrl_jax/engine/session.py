"""One request on its way through the engine: what was asked, how far it is, and what it holds.

A session's tokens are its prompt and what it has answered so far. `computed` of them have keys in pages; the last token
that was sampled never has, since it is the next call's input. A session that loses its pages (preemption) starts again
at `computed` = 0 with all its tokens as the prompt, and goes on as if nothing had happened.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import hashlib

import numpy as np

from owrl_jax.engine.radix import Node, content_keys
from owrl_jax.engine.request import Completion, Request, Token
from owrl_jax.engine.vision_cache import Embedded
from owrl_jax.models.processor import Patches

MAX_STOPS = 8
"""Most ids that may end one response."""


class State(enum.Enum):
    """Where a session is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ImageRun:
    """One picture of a prompt: its placeholders are tokens `start` … `end`-1."""

    start: int
    end: int
    digest: bytes
    patches: Patches


@dataclasses.dataclass(kw_only=True, eq=False)
class Session:
    """See the head of the file.

    Attributes:
      number: order of arrival; a smaller one is older.
      request, future: what was asked, and where the answer goes.
      positions: int32 [3, prompt], rotary positions; `next_position` is that of the first token of the answer.
      images: in order.
      keys: int64, of prompt and answer, for the prefix tree.
      limit: most tokens of the answer.
      stop: ids that end it.
      deadline: on the clock of the engine; infinite if there is none.
    """

    number: int
    request: Request
    positions: np.ndarray
    next_position: int
    images: tuple[ImageRun, ...]
    limit: int
    stop: tuple[int, ...]
    deadline: float
    arrived: float
    future: concurrent.futures.Future[Completion] = dataclasses.field(default_factory=concurrent.futures.Future)
    keys: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))

    state: State = State.WAITING
    tokens: list[int] = dataclasses.field(default_factory=list)
    answer: list[Token] = dataclasses.field(default_factory=list)
    computed: int = 0
    path: Node | None = None  # deepest node of the prefix tree whose pages this session reads; None: none pinned
    shared: list[int] = dataclasses.field(default_factory=list)  # pages of the tree, from the root down
    own: list[int] = dataclasses.field(default_factory=list)  # pages after those
    cacheable: bool = True  # false once the weights changed under it
    row: int | None = None  # of the decoding working copy
    loaded: int = 0  # tokens that lie in that row
    pinned: dict[int, Embedded] = dataclasses.field(default_factory=dict)  # by number of the image
    alone: bool = False  # a prefill that it shared gave NaN: its prompt is computed in calls of its own
    cached: int = 0
    preemptions: int = 0
    admitted: float | None = None
    first_token: float | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.request.ids)
        if not len(self.keys):
            runs = [(image.start, image.end - image.start, image.digest) for image in self.images]
            self.keys = content_keys(self.tokens, runs)

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.ids)

    @property
    def pages(self) -> list[int]:
        """All its pages, in order."""
        return self.shared + self.own

    @property
    def remaining(self) -> int:
        """Tokens that the answer may still get."""
        return self.limit - len(self.answer)

    @property
    def uncomputed(self) -> int:
        """Tokens without keys."""
        return len(self.tokens) - self.computed

    def rope(self, start: int, end: int) -> np.ndarray:
        """int32 [3, end - start]: rotary positions of tokens of prompt and answer."""
        prompt = self.positions[:, start : min(end, self.prompt)]
        if end <= self.prompt:
            return prompt
        first = max(start, self.prompt)
        after = np.arange(first, end, dtype=np.int32) - self.prompt + self.next_position
        return np.concatenate([prompt, np.broadcast_to(after, (3, len(after)))], axis=1)

    def page_key(self, index: int, size: int) -> bytes | None:
        """Key of a whole page of its tokens; None if it is not full yet."""
        end = (index + 1) * size
        if end > len(self.tokens):
            return None
        if end > len(self.keys):
            answer = np.asarray(self.tokens[len(self.keys) :], np.int64)
            self.keys = np.concatenate([self.keys, answer])
        return self.keys[end - size : end].tobytes()


def digest_of(data: bytes) -> bytes:
    """Content hash of a picture."""
    return hashlib.sha256(data).digest()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Tokens `start` … `end`-1 of a session, for a prefill call; `entries` are those of its images there."""

    session: Session
    start: int
    end: int
    entries: dict[int, Embedded] = dataclasses.field(default_factory=dict)

    @property
    def final(self) -> bool:
        """Whether a token is sampled after it."""
        return self.end == len(self.session.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What one step computes.

    Attributes:
      encode: pictures to embed first, with where to.
      prefill: segments of one call.
      decode: sessions of the decode call, each with a row.
      steps: most tokens each of them gets.
    """

    encode: tuple[tuple[ImageRun, Embedded], ...] = ()
    prefill: tuple[Segment, ...] = ()
    decode: tuple[Session, ...] = ()
    steps: int = 0

    @property
    def empty(self) -> bool:
        """Nothing to do."""
        return not (self.encode or self.prefill or self.decode)
