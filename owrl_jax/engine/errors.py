"""Why a request got no answer: one exception a reason, each of which becomes a `PolicyFailed` for the harness.

`reason` is a short word for metrics and HTTP bodies, `status` the HTTP status that says the same. No jax here.
"""

from __future__ import annotations

from typing import ClassVar

from owrl_jax.agent.policy import FailureKind, PolicyFailed


class EngineError(Exception):
    """A request that ends without an answer. The message says what was wrong and what can be done."""

    reason: ClassVar[str] = "engine_error"
    status: ClassVar[int] = 500
    kind: ClassVar[FailureKind] = FailureKind.UNAVAILABLE

    def policy_failed(self) -> PolicyFailed:
        """The same for the harness."""
        return PolicyFailed(self.kind, f"{self.reason}: {self}")


class BadRequest(EngineError):
    """The request can never be answered as it is: token ids out of range, pictures that do not fit the placeholders."""

    reason = "bad_request"
    status = 400
    kind = FailureKind.REJECTED


class TruncatedTraining(BadRequest):
    """A training request asked for top-p or top-k: the learner does not know the distribution of its log-probs."""

    reason = "truncated_training"


class PromptTooLong(BadRequest):
    """The prompt leaves no room for a response in the longest context, or can never fit into the page pool."""

    reason = "prompt_too_long"


class BadPicture(BadRequest):
    """A picture that cannot be decoded, or that has more patches than the vision tower was compiled for."""

    reason = "bad_picture"


class Overloaded(EngineError):
    """The queue is full: ask again later."""

    reason = "overloaded"
    status = 503


class NoWeights(EngineError):
    """Nothing has been published yet; random weights would look like an answer."""

    reason = "no_weights"
    status = 503


class DeadlineExceeded(EngineError):
    """The request's own deadline passed before the answer was complete."""

    reason = "deadline_exceeded"
    status = 504


class NotFinite(EngineError):
    """The model gave NaN or infinite logits for this request."""

    reason = "not_finite"
    status = 500


class Closed(EngineError):
    """The engine was closed, or its device failed, before the answer was complete."""

    reason = "closed"
    status = 503
