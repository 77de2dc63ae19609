"""What a prompt shows of the past, and how a past response is shortened, in ids.

The paper's rule (K = 1, all reasoning kept) is append-only and is what `context.py` is built around. The others are for
comparisons: without past reasoning the reference loses 14 to 24 points.

A shortened response is cut out of the ids that were sampled; nothing is tokenised again.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from owrl_jax.agent.chat import ChatTokens, encode


@dataclasses.dataclass(frozen=True, kw_only=True)
class HistoryRule:
    """What of the past a prompt shows.

    Attributes:
      screenshots: K, how many of the newest pictures stay; None keeps all. A picture that is sent again after a
        response that could not be parsed counts once and stands in the newer message.
      reasoning: `full` keeps past responses as sampled; `hide_thinking` drops their reasoning; `action_only` keeps
        their calls alone.
      reasoning_turns: how many of the newest past responses keep their reasoning where it is kept; 0 means all.
    """

    screenshots: int | None = 1
    reasoning: Literal["full", "hide_thinking", "action_only"] = "full"
    reasoning_turns: int = 0

    def __post_init__(self) -> None:
        if self.screenshots is not None and self.screenshots < 0:
            raise ValueError(f"screenshots must be 0 or more, or None for all of them, got {self.screenshots}")
        if self.reasoning not in ("full", "hide_thinking", "action_only"):
            raise ValueError(f"reasoning must be full, hide_thinking or action_only, got {self.reasoning!r}")
        if self.reasoning_turns < 0:
            raise ValueError(f"reasoning_turns must be 0 (all) or more, got {self.reasoning_turns}")

    @property
    def append_only(self) -> bool:
        """Whether each prompt's trunk is a prefix of the next one's, free of pictures."""
        return self.screenshots in (0, 1) and self.reasoning == "full" and self.reasoning_turns == 0


def remembered(
    tokens: ChatTokens, response: tuple[int, ...], mode: Literal["hide_thinking", "action_only"]
) -> tuple[tuple[int, ...], bool]:
    """A past response without its reasoning, or with its calls alone; and whether it is whole after all.

    A response whose reasoning was never closed is all reasoning, and stays whole: an empty turn would teach silence.
    """
    special = tokens.special
    body, calls = _parts(tokens, response)
    if not body:
        return response, True
    if mode == "action_only" and calls:
        newline = encode(tokens, "\n")
        joined = [i for start, end in calls for i in (*newline, *response[start:end])]
        return tuple(joined[len(newline) :]), False
    rest = list(response[body:])
    while rest and rest[0] != special.im_end and not tokens.decode([rest[0]]).strip():
        rest.pop(0)
    return tuple(rest), False


def _parts(tokens: ChatTokens, ids: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
    """Where the reasoning ends (0 if it never does), and where each call begins and ends: `parser`'s rules, in ids."""
    special = tokens.special
    body, calls, opened, reasoning = 0, [], -1, True
    for n, i in enumerate(ids):
        if i == special.end_tool_call and opened >= 0:
            calls.append((opened, n + 1))
            opened = -1
        elif opened < 0 and i == special.end_think:
            body, calls, reasoning = n + 1, [], False
        elif opened < 0 and i == special.think:
            reasoning = True
        elif opened < 0 and not reasoning and i == special.tool_call:
            opened = n
    return (0, []) if reasoning else (body, calls)
