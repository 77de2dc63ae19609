"""How an episode ended, as one typed record.

Every episode ends in exactly one `Outcome`. Its `reason` says what happened, its `owner` says whose doing it was, and
the owner decides what the record may touch: **only policy-owned outcomes reach rewards, group statistics, filters and
denominators**. A dead renderer, a bot wall or a full disk must never be learned as a mistake of the model.

The vocabulary is closed. `DETAILS` lists, for each reason, the details that may stand beside it and the owners that may
carry them; a new kind of ending is a new row here, not a new string somewhere else. Nothing in this module parses text.
"""

from __future__ import annotations

import dataclasses
import enum
import traceback as traceback_module


class Reason(str, enum.Enum):
    """What ended the episode: the seven reasons of the paper and three that a live web needs."""

    COMPLETED = "completed"  # the policy called `done`
    STEP_BUDGET = "step_budget"  # the horizon was reached
    GENERATION_LIMIT = "generation_limit"  # response cap or context length
    FORMAT_ERROR = "format_error"  # too many unparsable turns in a row
    ENVIRONMENT_ERROR = "environment_error"  # the site failed
    SANDBOX_ERROR = "sandbox_error"  # our browser, host or transport failed
    INIT_ERROR = "init_error"  # the episode never started
    BLOCKED = "blocked"  # bot wall, CAPTCHA, rate limit, consent dead-end
    POLICY_BLOCK = "policy_block"  # a safety rule stopped the agent
    CANCELLED = "cancelled"  # an operator or the scheduler stopped it


class Owner(str, enum.Enum):
    """Whose doing it was."""

    POLICY = "policy"
    SITE = "site"
    ENV = "env"  # harness or tool implementation
    SANDBOX = "sandbox"
    JUDGE = "judge"
    OPERATOR = "operator"


class Phase(str, enum.Enum):
    """Where in an episode's life it happened."""

    QUEUE = "queue"
    LAUNCH = "launch"
    RESET = "reset"
    OBSERVE = "observe"
    GENERATE = "generate"
    PARSE = "parse"
    STEP = "step"
    CAPTURE = "capture"
    JUDGE = "judge"
    RELEASE = "release"


_P, _SITE, _ENV, _SB, _OP = Owner.POLICY, Owner.SITE, Owner.ENV, Owner.SANDBOX, Owner.OPERATOR

# reason -> detail -> (owners that may carry it, whether a fresh attempt may help)
DETAILS: dict[Reason, dict[str, tuple[frozenset[Owner], bool]]] = {
    Reason.COMPLETED: {
        "answered": (frozenset({_P}), False),
        "infeasible_claimed": (frozenset({_P}), False),
    },
    Reason.STEP_BUDGET: {
        "max_steps": (frozenset({_P}), False),
        "loop_truncated": (frozenset({_P}), False),
    },
    Reason.GENERATION_LIMIT: {
        "response_cap": (frozenset({_P}), False),
        "context_overflow": (frozenset({_P}), False),
        "policy_timeout": (frozenset({_P}), False),
    },
    Reason.FORMAT_ERROR: {
        "consecutive_parse_failures": (frozenset({_P}), False),
    },
    Reason.ENVIRONMENT_ERROR: {
        "nav_dns": (frozenset({_SITE}), True),
        "nav_refused": (frozenset({_SITE}), True),
        "nav_tls": (frozenset({_SITE}), True),
        "nav_timeout": (frozenset({_SITE}), True),
        "nav_aborted": (frozenset({_SITE}), True),
        "redirect_loop": (frozenset({_SITE}), False),
        "http_4xx": (frozenset({_SITE}), False),
        "http_5xx": (frozenset({_SITE}), True),
        "bad_response": (frozenset({_SITE}), True),
        "blank_page": (frozenset({_SITE}), True),
        "page_crash": (frozenset({_SITE}), True),  # this page kills its renderer, again after recovery
        "page_frozen": (frozenset({_SITE}), True),  # endless script: the page's own doing
        "page_hostile": (frozenset({_SITE}), False),  # endless dialogs, popups or reloads
        "site_timeout": (frozenset({_SITE}), True),
    },
    Reason.SANDBOX_ERROR: {
        "browser_gone": (frozenset({_SB}), True),
        "renderer_crash": (frozenset({_SB}), True),
        "out_of_memory": (frozenset({_SB}), True),
        "cdp_timeout": (frozenset({_SB}), True),
        "step_deadline": (frozenset({_SB}), True),
        "capture_failed": (frozenset({_SB}), True),
        "lease_lost": (frozenset({_SB}), True),
        "transport": (frozenset({_SB}), True),
        "disk_full": (frozenset({_SB}), False),
        "sandbox_timeout": (frozenset({_SB}), True),
        "policy_unavailable": (frozenset({_SB}), True),  # the engine or endpoint, not the model's answer
        "unknown": (frozenset({_SB, _ENV}), True),  # unmapped exception: counted as a bug of ours
    },
    Reason.INIT_ERROR: {
        "no_capacity": (frozenset({_SB}), True),
        "launch_failed": (frozenset({_SB}), True),
        "browser_missing": (frozenset({_SB, _OP}), False),
        "first_navigation_failed": (frozenset({_SITE, _SB}), True),
        "host_cooling_down": (frozenset({_SITE}), True),
        "bad_task": (frozenset({_OP}), False),
    },
    Reason.BLOCKED: {
        "bot_wall": (frozenset({_SITE}), True),
        "captcha": (frozenset({_SITE}), True),
        "consent_dead_end": (frozenset({_SITE}), False),
        "forbidden": (frozenset({_SITE}), False),  # HTTP 401 and 403
        "rate_limited": (frozenset({_SITE}), True),  # HTTP 429
        "login_wall": (frozenset({_SITE}), False),
        "geo_block": (frozenset({_SITE}), False),
        "robots": (frozenset({_SITE, _OP}), False),
    },
    Reason.POLICY_BLOCK: {
        "private_address": (frozenset({_P, _OP}), False),
        "scheme": (frozenset({_P, _OP}), False),
        "deny_list": (frozenset({_P, _OP}), False),
        "purchase_guard": (frozenset({_P}), False),
        "login_guard": (frozenset({_P}), False),
        "account_guard": (frozenset({_P}), False),
        "posting_guard": (frozenset({_P}), False),
    },
    Reason.CANCELLED: {
        "operator": (frozenset({_OP}), True),
        "shutdown": (frozenset({_OP}), True),
        "surplus": (frozenset({_OP}), False),  # the scheduler no longer needs it
        "deadline": (frozenset({_OP}), True),
        "budget": (frozenset({_OP}), False),  # a spending limit was reached
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The one ending of one episode.

    Attributes:
      reason: what happened.
      detail: which kind of it; one of `DETAILS[reason]`.
      owner: whose doing; filled in when the detail leaves no choice.
      retryable: whether a fresh attempt at the same task may end differently; filled from `DETAILS` unless given.
      phase: where in the episode it happened.
      message: one line for people; never read by the program.
      latency_ms: time from the start of `phase` to this ending.
      rss_mib: resident memory of the sandbox at the end, if it was measured.
      traceback: Python traceback where an exception was mapped.
    Raises:
      ValueError: if the detail does not belong to the reason or the owner cannot carry it.
    """

    reason: Reason
    detail: str
    owner: Owner = None  # type: ignore[assignment]  # derived in __post_init__
    retryable: bool = None  # type: ignore[assignment]  # derived in __post_init__
    phase: Phase = Phase.STEP
    message: str = ""
    latency_ms: float | None = None
    rss_mib: float | None = None
    traceback: str | None = None

    def __post_init__(self) -> None:
        rows = DETAILS[Reason(self.reason)]
        if self.detail not in rows:
            raise ValueError(
                f"outcome detail {self.detail!r} does not belong to reason {Reason(self.reason).value!r}; "
                f"known: {', '.join(sorted(rows))}. A new kind of ending is a new row in outcome.DETAILS."
            )
        owners, retryable = rows[self.detail]
        if self.owner is None:
            if len(owners) > 1:
                raise ValueError(
                    f"{Reason(self.reason).value}/{self.detail} can be owned by "
                    f"{sorted(o.value for o in owners)}: say which"
                )
            object.__setattr__(self, "owner", next(iter(owners)))
        elif Owner(self.owner) not in owners:
            raise ValueError(
                f"{Reason(self.reason).value}/{self.detail} cannot be owned by {Owner(self.owner).value!r}; "
                f"possible: {sorted(o.value for o in owners)}"
            )
        if self.retryable is None:
            object.__setattr__(self, "retryable", retryable)

    @property
    def trains(self) -> bool:
        """Whether this episode may reach rewards, group statistics, filters and denominators."""
        return self.owner == Owner.POLICY

    @property
    def key(self) -> str:
        """`reason/detail`, for counters and tables."""
        return f"{Reason(self.reason).value}/{self.detail}"


def from_exception(error: BaseException, *, reason: Reason, detail: str, phase: Phase, **fields) -> Outcome:
    """An outcome that carries the exception's class, first line and traceback."""
    first_line = (str(error).strip().splitlines() or [""])[0][:300]
    return Outcome(
        reason=reason,
        detail=detail,
        phase=phase,
        message=f"{type(error).__name__}: {first_line}",
        traceback="".join(traceback_module.format_exception(error))[-8000:],
        **fields,
    )
