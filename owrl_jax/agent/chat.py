"""The chat template of a model, taken apart once: the strings between messages, and the ids of ours.

A template is a program, and running it over a growing conversation at every turn is where prompts drift from what was
sampled: reasoning is dropped, a newline is lost, text is tokenised anew. So it is run once, on a probe conversation
with markers, and what stands between the markers is kept. `ChatFormat.of` refuses a template that changes what
assistants said when they said it in the canonical form, since then no append-only context could equal it.

    preamble    <|im_start|>system … tools …<|im_end|>\\n
    user        <|im_start|>user\\n
    answer      <|im_end|>\\n<|im_start|>assistant\\n        from a user message to the assistant's own words
    opener      <think>\\n, or nothing                           what the generation prompt has beyond that
    reply       \\n<|im_start|>user\\n                            from the end of a turn to the next user message

Everything is ids through one door, `encode`: control tokens where our own strings spell them, plain text elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from owrl_jax.agent.parser import CALL, END_CALL, END_THINK, THINK
from owrl_jax.agent.policy import Picture
from owrl_jax.agent.prompt import PICTURE

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_RESPONSE_TAGS = (THINK, END_THINK, CALL, END_CALL)
_USER, _ASSISTANT, _LATER = "Find 0x5A1.", "<think>\nI see 0x5A2.\n</think>\n\nSo it is 0x5A3.", "It is 0x5A4."


class ChatTokens(Protocol):
    """What is needed of a tokenizer; `owrl_jax.models.tokenizer.Tokens` has it."""

    hf: Any
    special: Any
    control_ids: Any

    def guard(self, text: str) -> str: ...
    def encode_template(self, rendered: str) -> Any: ...
    def expand_images(self, ids: Any, token_counts: Sequence[int]) -> Any: ...
    def render_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str: ...
    def decode(self, ids: Any) -> str: ...


class TemplateMismatch(ValueError):
    """The model's chat template cannot be used append-only; the message says what it does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """The pieces of one template for one system prompt and tool list; see the head of the file."""

    preamble: str
    user: str
    answer: str
    opener: str
    reply: str

    @classmethod
    def of(
        cls,
        tokens: ChatTokens,
        *,
        system: str,
        tools: Sequence[dict[str, Any]],
        options: dict[str, Any],
        prefill: str = "",
    ) -> ChatFormat:
        """The format of a tokenizer's chat template.

        Args:
          tokens: the tokenizer.
          system: text of the system message.
          tools: schemas, for the template to list.
          options: further options of the template, `enable_thinking` for instance.
          prefill: put behind the generation prompt, `<think>\\n` for policies that were trained so.

        Raises:
          TemplateMismatch: if past turns do not come out as they went in.
        """
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": _ASSISTANT},
            {"role": "user", "content": f"<tool_response>\n{_LATER}\n</tool_response>"},
        ]
        given = {"tools": list(tools) or None, **options}
        history = tokens.render_chat(messages, **given)
        prompt = tokens.render_chat(messages, **given, add_generation_prompt=True)
        last = f"<tool_response>\n{_LATER}\n</tool_response>"
        places = [history.find(part) for part in (_USER, _ASSISTANT, last)]
        if -1 in places:
            lost = ("the request", "what the assistant said", "the tool's answer")[places.index(-1)]
            raise TemplateMismatch(
                f"this chat template changes {lost}, so that past turns are not what was sampled. Use a template that "
                f"keeps messages as they are (owrl_jax/models/chat_template.jinja does). It made: {history[-600:]!r}"
            )
        head = history[: places[0]]
        answer = history[places[0] + len(_USER) : places[1]]
        between = history[places[1] + len(_ASSISTANT) : places[2]]
        closing = history[places[2] + len(last) :]
        end = tokens.decode([tokens.special.im_end])
        if not prompt.startswith(history) or not answer.startswith(closing) or not between.startswith(end):
            raise TemplateMismatch(
                f"this chat template does not end every turn in {end} and the same words: after a user message came "
                f"{answer!r}, after the assistant {between!r}, at the end {closing!r}"
            )
        opening = answer[len(closing) :]
        generation = prompt[len(history) :]
        if not generation.startswith(opening):
            raise TemplateMismatch(f"the generation prompt {generation!r} does not begin with {opening!r}")
        reply = between[len(end) :]
        user = reply[len(closing) - len(end) :]
        return cls(
            preamble=head[: len(head) - len(user)],
            user=user,
            answer=answer,
            opener=generation[len(opening) :] + prefill,
            reply=reply,
        )


def encode(tokens: ChatTokens, text: str, pictures: Sequence[Picture] = ()) -> tuple[int, ...]:
    """Ids of a piece of a prompt, `PICTURE` in it as runs of placeholders of the pictures' lengths.

    The piece must begin and end where no token of the vocabulary can reach across: beside a control token, or between a
    line break and a character that is no white space.
    """
    unexpanded = tokens.encode_template(text.replace(PICTURE, IMAGE))
    return tuple(tokens.expand_images(unexpanded, [picture.tokens for picture in pictures]).ids.tolist())


def guard_response(tokens: ChatTokens, text: str) -> str:
    """A response that was written as words, for the template: tags of the format stay tags, all else is mere text."""
    out, rest = "", text
    while rest:
        found = [(rest.index(tag), tag) for tag in _RESPONSE_TAGS if tag in rest]
        at, tag = min(found, default=(len(rest), ""))
        out += guard_words(tokens, rest[:at]) + tag
        rest = rest[at + len(tag) :]
    return out


def guard_words(tokens: ChatTokens, text: str) -> str:
    """`Tokens.guard` that leaves white space at both ends outside, where templates look for it to strip it."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core[0])
    return text[:start] + tokens.guard(core) + text[start + len(core) :]


def encode_response(tokens: ChatTokens, text: str) -> tuple[int, ...]:
    """Ids of a response that was written as words: tags of the format become control tokens, all other words text."""
    return (*tokens.encode_template(guard_response(tokens, text)).ids.tolist(), tokens.special.im_end)
