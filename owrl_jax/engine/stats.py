"""What an engine counts, for people, metrics and tests. No jax here."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Plain numbers since the start; those named `_now` are of this moment.

    Attributes:
      prompt_tokens_asked, prompt_tokens_cached, prompt_tokens_computed: of admitted requests; asked is the sum of the
        other two once their prompts are computed.
      tokens_recomputed: keys computed again after a preemption or a change of weights.
      vision_hits, vision_misses, pictures_encoded: of the embedding cache.
      recompiles: programs compiled by the engine's thread after the start; 0 unless something is wrong.
    """

    version: int = -1
    requests_submitted: int = 0
    requests_completed: int = 0
    requests_failed: int = 0
    requests_refused: int = 0
    requests_cancelled: int = 0
    prompt_tokens_asked: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_computed: int = 0
    tokens_recomputed: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    pages_evicted: int = 0
    vision_hits: int = 0
    vision_misses: int = 0
    pictures_encoded: int = 0
    steps: int = 0
    prefill_calls: int = 0
    decode_calls: int = 0
    decode_steps: int = 0
    pages_copied: int = 0
    recompiles: int = 0
    publishes: int = 0
    device_failures: int = 0
    pages_total: int = 0
    pages_used_now: int = 0
    pages_cached_now: int = 0
    waiting_now: int = 0
    running_now: int = 0
    start_s: float = 0.0
    busy_s: float = 0.0
