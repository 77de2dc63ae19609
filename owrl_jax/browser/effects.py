"""What a tool did, and how to find out whether it worked: the records between acting and telling, and raw input."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from owrl_jax.browser import faults
from owrl_jax.browser.policy import Refusal
from owrl_jax.browser.tabs import Tab

Question = Callable[[], Awaitable["Answer"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What turned out after the page settled: a further phrase, and whether the call still counts as done."""

    text: str = ""
    ok: bool = True
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """What a tool did.

    Attributes:
      ok: whether it was done.
      text: what to say, without prefix.
      facts: the same for programs.
      grace_s: how long the page may take to ask for a navigation; None for the usual grace.
      verify: asked after settling.
      quiet: whether "nothing changed" is worth saying.
      refusal: set if a safety rule said no.
      answer: the text of `done`.
      waits: seconds that the policy asked to wait.
    """

    ok: bool
    text: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    grace_s: float | None = None
    verify: Question | None = None
    quiet: bool = False
    refusal: Refusal | None = None
    answer: str | None = None


async def send_input(tab: Tab, what: str, awaitable: Awaitable[Any]) -> None:
    """One input event under the deadline of a CDP request.

    A page that answers an input by running a script without end never acknowledges it, and a tab may close under the
    pointer: the first is found out by settling, the second by following. Neither undoes the input.
    """
    started = time.monotonic()
    try:
        await faults.within_life(tab.gone, tab.timeout_s, awaitable, what)
    except faults.DeadlineExceeded:
        tab.unanswered_input = time.monotonic() - started
    except Exception as error:
        if not (faults.is_gone(error) and (tab.closed or tab.crashed)):
            raise


def refused(refusal: Refusal) -> Effect:
    """The effect of a call that a safety rule did not allow."""
    return Effect(ok=False, text=refusal.message.rstrip("."), facts={"policy_block": refusal.detail}, refusal=refusal)


def public(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What of an element goes into the record: no values of secret fields, no long texts."""
    if facts is None:
        return None
    kept = ("tag", "type", "role", "label", "id", "name", "autocomplete", "href")
    kept += ("kind", "checked", "expanded", "disabled", "value")
    return {name: facts[name][:300] if isinstance(facts[name], str) else facts[name] for name in kept}
