"""The conversation as ids: a trunk that only grows, and a leaf that hangs on it for one turn.

    trunk_0  =  preamble, user tag │ request, observation 0 without its picture
    leaf_0   =  "screenshot:" picture 0, closing tags, assistant tag │ [response 0]
    trunk_1  =  trunk_0, closing tags, assistant tag │ response 0 │ user tag, feedback, observation 1 …
    leaf_1   =  "screenshot:" picture 1, closing tags, assistant tag │ [response 1]

In ids (a small example; `owrl episode --explain` prints a whole one):

    trunk_0   … - Tab 0 (active): u - t ⏎
    leaf_0        screenshot: ⏎ ▷ ▨▨▨▨ ◁ ⏎ </observation> ■ ⏎ □ assistant ⏎     ▷◁ vision tags   ▨ image placeholder
    response_0    <think> … </think> <tool_call> … </tool_call> ■                    □ <|im_start|>   ■ <|im_end|>
    trunk_1   … - Tab 0 (active): u - t ⏎ </observation> ■ ⏎ □ assistant ⏎ ‹response_0› ⏎ □ user ⏎ … u' - t' ⏎
    leaf_1        screenshot: ⏎ ▷ ▨▨▨▨ ◁ ⏎ </observation> ⏎ …

The picture and its label leave the history, so response_0 stands twice: behind leaf_0, where it was sampled, and in
trunk_1, as the past. Every cut lies beside a control token or between a line break and a character that is no white
space; no token of the vocabulary reaches across such a place, so pieces encoded one by one are, id for id, the whole
conversation rendered by the model's chat template and encoded at once (property test). Responses are never
encoded: their ids are kept as they were sampled, whatever their text would give.

Other history rules rewrite the past (`HistoryRule.append_only` is false): the trunk is then empty and the leaf is the
whole prompt, built anew each turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from owrl_jax.agent.chat import ChatFormat, ChatTokens, encode
from owrl_jax.agent.history import HistoryRule, remembered
from owrl_jax.agent.policy import FailureKind, Message, Picture, PolicyFailed
from owrl_jax.agent.prompt import PICTURE, UserText, first_message, later_message, unguarded
from owrl_jax.types import Observation, Screenshot, Task


class PictureRule(Protocol):
    """How large a picture is to the model; `owrl_jax.models.processor.ImageProcessor` is one."""

    @property
    def patch_size(self) -> int: ...
    def resized(self, height: int, width: int) -> tuple[int, int]: ...
    def token_count(self, height: int, width: int) -> int: ...


class UnusablePicture(ValueError):
    """A screenshot that the model cannot be shown: too thin, too small, too many tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """What one turn is sampled from: `trunk + leaf`.

    Attributes:
      trunk: all of it; empty where the history rule is not append-only.
      extension: its ids since the turn before.
      leaf: ids of this turn alone, up to and with the opening of the response.
      pictures: of the placeholder runs in the leaf, in order; the newest is the last.
    """

    trunk: tuple[int, ...]
    extension: tuple[int, ...]
    leaf: tuple[int, ...]
    pictures: tuple[Picture, ...]

    def __len__(self) -> int:
        return len(self.trunk) + len(self.leaf)


@dataclasses.dataclass
class _Exchange:
    """One user message and, once given, the response to it."""

    user: UserText  # guarded, for ids
    words: UserText  # the same, for those who read words
    observation: Observation
    picture: Picture | None
    response: tuple[int, ...] | None = None
    said: str = ""
    repeated: bool = False  # the next message shows the same observation again


class Context:
    """The conversation of one episode. `prompt`, then `respond`, then `observe` or `retry`, and again.

    Args:
      tokens: the tokenizer.
      chat: its template, taken apart.
      picture_rule: sizes of pictures.
      rule: what stays of the past.
      task, observation: what the first message is about.
      terse: whether observations are the picture alone.
    """

    def __init__(
        self,
        *,
        tokens: ChatTokens,
        chat: ChatFormat,
        picture_rule: PictureRule,
        rule: HistoryRule,
        task: Task,
        observation: Observation,
        terse: bool = False,
    ) -> None:
        self._terse = terse
        self._tokens, self._chat, self._picture_rule, self._rule = tokens, chat, picture_rule, rule
        shows = rule.screenshots != 0
        guarded, words = (
            first_message(task, observation, g, picture=shows, terse=terse) for g in (self._guard, unguarded)
        )
        self._past: list[_Exchange] = [_Exchange(guarded, words, observation, self._picture(observation))]
        self._trunk: list[int] = list(encode(tokens, chat.preamble + chat.user + guarded.seen))
        self._extended_from = 0

    @property
    def observation(self) -> Observation:
        """The newest one."""
        return self._past[-1].observation

    def prompt(self) -> Prompt:
        """What the next response is sampled from."""
        now = self._past[-1]
        if not self._rule.append_only:
            return self._whole()
        pictures = () if now.picture is None else (now.picture,)
        leaf = encode(self._tokens, now.user.shown + now.user.closing + self._chat.answer + self._chat.opener, pictures)
        trunk = tuple(self._trunk)
        return Prompt(trunk=trunk, extension=trunk[self._extended_from :], leaf=leaf, pictures=pictures)

    def respond(self, ids: Sequence[int]) -> str:
        """Takes the ids of the response as they were sampled, end of turn included or not. Gives their text.

        Raises:
          PolicyFailed: if they hold an image placeholder: the next prompt would then have more pictures than it shows.
        """
        special = self._tokens.special
        if special.image_pad in ids or special.video_pad in ids:
            why = "the response holds an image placeholder, which a policy must never emit: mask it when sampling"
            raise PolicyFailed(FailureKind.UNAVAILABLE, why)
        now = self._past[-1]
        now.response = tuple(ids)
        now.said = self._tokens.decode([i for i in ids if i != special.im_end])
        return now.said

    def observe(self, feedback: Sequence[str], observation: Observation) -> None:
        """The next user message: what became of the calls, and the page now."""
        self._follow(feedback, observation, self._picture(observation))

    def retry(self, feedback: Sequence[str]) -> None:
        """The next user message after a response that could not be read: why, and the same observation again.

        Its picture moves to the new message instead of standing in both.
        """
        now = self._past[-1]
        now.repeated = True
        self._follow(feedback, now.observation, now.picture)

    def messages(self, system: str) -> tuple[Message, ...]:
        """The conversation in words, under the history rule as far as pictures go."""
        kept = self._kept_pictures()
        found = [Message(role="system", text=system)]
        for number, exchange in enumerate(self._past):
            shown = number in kept and exchange.picture is not None
            text = exchange.words.with_picture if shown else exchange.words.without_picture
            pictures = (exchange.picture,) if shown and exchange.picture is not None else ()
            found.append(Message(role="user", text=text, pictures=pictures))
            if exchange.response is not None:
                found.append(Message(role="assistant", text=self._chat.opener + exchange.said))
        return tuple(found)

    def _follow(self, feedback: Sequence[str], observation: Observation, picture: Picture | None) -> None:
        before = self._past[-1]
        if before.response is None:
            raise RuntimeError("respond comes before the next observation")
        shows = picture is not None
        user, words = (
            later_message(feedback, observation, g, picture=shows, terse=self._terse) for g in (self._guard, unguarded)
        )
        self._past.append(_Exchange(user, words, observation, picture))
        if self._rule.append_only:
            self._extended_from = len(self._trunk)
            opening = before.user.closing + self._chat.answer + self._chat.opener
            self._trunk += encode(self._tokens, opening)
            self._trunk += self._ended(before.response)
            self._trunk += encode(self._tokens, self._chat.reply + user.seen)

    def _guard(self, text: str) -> str:
        """Words that are not ours, unable to become a control token or to claim a picture."""
        return self._tokens.guard(text.replace(PICTURE, ""))

    def _ended(self, response: tuple[int, ...]) -> tuple[int, ...]:
        """The response with its end of turn, which history has even where the policy did not get to it."""
        end = self._tokens.special.im_end
        return response if response and response[-1] == end else (*response, end)

    def _picture(self, observation: Observation) -> Picture | None:
        shot: Screenshot | None = observation.screenshot
        if shot is None or self._rule.screenshots == 0:
            return None
        try:
            rows, cols = self._picture_rule.resized(shot.height, shot.width)
            tokens = self._picture_rule.token_count(shot.height, shot.width)
        except ValueError as error:
            raise UnusablePicture(str(error)) from error
        patch = self._picture_rule.patch_size
        return Picture(screenshot=shot, grid=(rows // patch, cols // patch), tokens=tokens)

    # --- The plain path: everything anew, for rules that rewrite the past ------------------------------------------

    def _kept_pictures(self) -> set[int]:
        candidates = [n for n, e in enumerate(self._past) if e.picture is not None and not e.repeated]
        limit = self._rule.screenshots
        return set(candidates if limit is None else candidates[len(candidates) - min(limit, len(candidates)) :])

    def _whole(self) -> Prompt:
        kept = self._kept_pictures()
        ids: list[int] = []
        pictures: list[Picture] = []
        text = self._chat.preamble + self._chat.user
        for number, exchange in enumerate(self._past):
            shown = (exchange.picture,) if number in kept and exchange.picture is not None else ()
            text += exchange.user.with_picture if shown else exchange.user.without_picture
            text += self._chat.answer
            pictures += shown
            if exchange.response is None:
                ids += encode(self._tokens, text + self._chat.opener, shown)
                break
            past, whole = self._remembered(number, exchange.response)
            ids += encode(self._tokens, text + (self._chat.opener if whole else ""), shown)
            ids += self._ended(past)
            text = self._chat.reply
        return Prompt(trunk=(), extension=(), leaf=tuple(ids), pictures=tuple(pictures))

    def _remembered(self, number: int, response: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """A past response under the history rule, and whether it is whole (then its opening stands before it)."""
        age = len(self._past) - 1 - number
        mode = self._rule.reasoning
        if mode == "full" and self._rule.reasoning_turns and age > self._rule.reasoning_turns:
            mode = "hide_thinking"
        if mode == "full":
            return response, True
        return remembered(self._tokens, response, mode)


def picture_text(message: Message) -> str:
    """The words of a message with a note where a picture stands, for people."""
    return message.text.replace(PICTURE, "[screenshot]")
