"""What crosses the wire between `client` and `server`: the nouns of `types` as JSON, and pictures apart.

A screenshot travels once, as raw bytes under its content hash, and only if the receiver does not have it yet: base64 in
JSON costs a third more, and a step that changes nothing would send the same picture again. So a `StepAnswer` holds the
step's result without the bytes and, beside it, what is needed to put them back.
"""

from __future__ import annotations

import dataclasses
import re

import msgspec

from owrl_jax.outcome import Outcome
from owrl_jax.types import Screenshot, StepResult, Task, ToolCall

# Ids and nonces are made by the client; this is what the server accepts as one.
TOKEN = re.compile(r"[A-Za-z0-9_-]{8,64}")
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """POST /episodes. `episode` is the client's choice, which makes the request idempotent."""

    episode: str
    task: Task
    wait_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRequest:
    """POST /episodes/{id}/step. `step` counts from 0; `nonce` names this attempt at acting, not the HTTP request."""

    step: int
    nonce: str
    calls: tuple[ToolCall, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloseRequest:
    """DELETE /episodes/{id}. `outcome` is the caller's ending for an episode that has none yet (step budget …)."""

    outcome: Outcome | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScreenshotRef:
    """A screenshot by name: its bytes are at GET /episodes/{id}/screenshots/{sha256}."""

    sha256: str
    width: int
    height: int
    format: str
    stale: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepAnswer:
    """A `StepResult` without the bytes of its screenshot, and the lease's time to live for the client's heartbeat."""

    result: StepResult
    screenshot: ScreenshotRef | None
    ttl_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloseAnswer:
    """The ending that stands."""

    outcome: Outcome


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorAnswer:
    """Every answer that is not 2xx: one sentence for a person and the outcome for a program."""

    error: str
    outcome: Outcome | None = None


def split(result: StepResult, *, ttl_s: float | None = None) -> tuple[StepAnswer, Screenshot | None]:
    """A result as an answer, and its screenshot apart."""
    shot = result.observation.screenshot if result.observation else None
    if result.observation is None or shot is None:
        return StepAnswer(result=result, screenshot=None, ttl_s=ttl_s), None
    ref = ScreenshotRef(sha256=shot.sha256, width=shot.width, height=shot.height, format=shot.format, stale=shot.stale)
    bare = dataclasses.replace(result, observation=dataclasses.replace(result.observation, screenshot=None))
    return StepAnswer(result=bare, screenshot=ref, ttl_s=ttl_s), shot


def join(answer: StepAnswer, data: bytes | None) -> StepResult:
    """The result as it was before `split`.

    Args:
      data: bytes of the screenshot; None only if the answer names none.
    Raises:
      ValueError: if the bytes are not those that the answer names.
    """
    ref = answer.screenshot
    if ref is None or answer.result.observation is None:
        return answer.result
    if data is None:
        raise ValueError(f"the answer names screenshot {ref.sha256[:12]} but no bytes came with it")
    shot = Screenshot(data=data, width=ref.width, height=ref.height, format=ref.format, stale=ref.stale)
    if shot.sha256 != ref.sha256:
        raise ValueError(f"screenshot bytes hash to {shot.sha256[:12]}, the answer names {ref.sha256[:12]}")
    observation = dataclasses.replace(answer.result.observation, screenshot=shot)
    return dataclasses.replace(answer.result, observation=observation)


def encode(value: object) -> bytes:
    """JSON bytes of any of these."""
    return msgspec.json.encode(value)
