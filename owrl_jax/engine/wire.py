"""What crosses the wire on the raw route, `POST /v1/generate`: ids and pictures in, ids out.

Pictures travel once: a request names every picture by the hash of its bytes and brings the bytes of those that the
server may not have. A server that lacks one says so (`unknown_pictures`, with the hashes), and the client sends again
with bytes. Log-probs are JSON numbers with all their digits, so that what comes out is bit for bit what went in.
"""

from __future__ import annotations

import dataclasses
import re

import msgspec

from owrl_jax.agent.policy import Sampling

SHA256 = re.compile(r"[0-9a-f]{64}")
UNKNOWN_PICTURES = "unknown_pictures"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WirePicture:
    """One picture: the hash of its file's bytes, and the bytes themselves where the server may not have them."""

    sha256: str
    data: bytes | None = None

    def __post_init__(self) -> None:
        if not SHA256.fullmatch(self.sha256):
            raise ValueError(f"a picture is named by 64 hexadecimal digits, got {self.sha256[:80]!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateBody:
    """A request.

    Attributes:
      trunk, leaf: ids; the prompt is both in a row.
      pictures: of the placeholder runs, in order.
      sampling: how to draw.
      training: the answer will be trained on; see `engine.request.Request`.
    """

    trunk: tuple[int, ...]
    leaf: tuple[int, ...]
    sampling: Sampling
    pictures: tuple[WirePicture, ...] = ()
    training: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateAnswer:
    """An answer; see `agent.policy.Generation` and `engine.request.Completion`."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: str
    prompt_tokens: int
    cached_tokens: int


def encode(value: GenerateBody | GenerateAnswer) -> bytes:
    """JSON."""
    return msgspec.json.encode(value)
