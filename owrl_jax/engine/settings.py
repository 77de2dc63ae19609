"""The few numbers that shape an engine: pages, buckets, queue. Every compiled program follows from these and the model.

Buckets decide how many programs there are (`len(decode_rows) + len(chunk_tokens) + len(patch_buckets)`), and with that
how long a start takes. Nothing here needs jax.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How an engine runs.

    Attributes:
      max_context: longest prompt plus response, in tokens; a multiple of `page_tokens`.
      page_tokens: tokens of one KV page, the unit of allocation and of prefix sharing.
      pages: KV pages of the pool; `None`: enough for the largest decode bucket at half the longest context.
      decode_rows: numbers of sessions decoded together; the largest is how many sessions run at once.
      decode_steps: most tokens a decode call makes before the host looks again; fewer while prompts wait.
      chunk_tokens: sizes of a prefill call; the largest is the token budget that prompts have in one step.
      segments: most prompts that share one prefill call.
      patch_buckets: sizes of a vision call, in patches; the largest must hold the largest picture.
      vision_rows: image tokens whose embeddings are kept on the device.
      max_queue: requests that may wait; more are refused as overloaded.
      prefix_cache: share KV pages of equal prefixes.
      on_publish: what becomes of half-made responses when weights change: "finish" goes on from the old context with
        the new weights, tokens stamped; "restart" begins them anew.
      weights: "shared" uses the learner's stacked arrays as they are; "own" keeps a copy cut into layers, which a
        product on a CPU reads in place; "auto" is "own" on CPU and "shared" elsewhere.
      kv: "compute" stores keys and values in the compute dtype, "int8" with one scale per token and head.
      key_block: keys attended at a time while decoding; a multiple of `page_tokens`.
      deadline_s: for requests that name none; `None`: no deadline.
      top_logprobs: most alternatives a request may ask for per token.
      pictures_kept: decoded pictures kept on the host, so that one asked about again is not decoded again.
    """

    max_context: int = 4096
    page_tokens: int = 16
    pages: int | None = None
    decode_rows: tuple[int, ...] = (1, 8, 32)
    decode_steps: int = 16
    chunk_tokens: tuple[int, ...] = (64, 256)
    segments: int = 8
    patch_buckets: tuple[int, ...] = (256, 1024, 4096)
    vision_rows: int = 8192
    max_queue: int = 1024
    prefix_cache: bool = True
    on_publish: Literal["finish", "restart"] = "finish"
    weights: Literal["auto", "shared", "own"] = "auto"
    kv: Literal["compute", "int8"] = "compute"
    key_block: int = 256
    deadline_s: float | None = None
    top_logprobs: int = 20
    pictures_kept: int = 64

    def __post_init__(self) -> None:
        for name in (
            "max_context",
            "page_tokens",
            "decode_steps",
            "segments",
            "max_queue",
            "key_block",
            "top_logprobs",
        ):
            _need(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("decode_rows", "chunk_tokens", "patch_buckets"):
            sizes = getattr(self, name)
            _need(
                len(sizes) > 0 and min(sizes) >= 1 and list(sizes) == sorted(set(sizes)),
                f"{name} must be increasing positive sizes, got {sizes}",
            )
        for name in ("max_context", "key_block"):
            _need(
                getattr(self, name) % self.page_tokens == 0,
                f"{name}={getattr(self, name)} must be a multiple of page_tokens={self.page_tokens}",
            )
        _need(
            self.pages is None or self.pages * self.page_tokens >= self.max_context,
            f"pages={self.pages} of {self.page_tokens} tokens do not hold a context of max_context={self.max_context}",
        )
        _need(self.vision_rows >= 1, f"vision_rows must be at least 1, got {self.vision_rows}")
        _need(self.pictures_kept >= 0, f"pictures_kept must be 0 or more, got {self.pictures_kept}")
        for name, allowed in (
            ("on_publish", ("finish", "restart")),
            ("weights", ("auto", "shared", "own")),
            ("kv", ("compute", "int8")),
        ):
            _need(getattr(self, name) in allowed, f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")

    @property
    def max_rows(self) -> int:
        """Sessions that run at once."""
        return self.decode_rows[-1]

    @property
    def pool_pages(self) -> int:
        """KV pages of the pool."""
        if self.pages is not None:
            return self.pages
        per_context = self.max_context // self.page_tokens
        return max(per_context, self.max_rows * per_context // 2)

    @property
    def past_slots(self) -> int:
        """Tokens of the working copy of one session's keys: the longest context, rounded up to whole blocks."""
        return -(-self.max_context // self.key_block) * self.key_block
