"""Everything that stays the same over all episodes of a run: tokenizer, template, prompt, history rule, budgets.

One `Harness` serves any number of episodes at once; it holds no state of any of them. Its `protocol` names all of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from owrl_jax.agent.chat import ChatFormat, ChatTokens, encode
from owrl_jax.agent.context import Context, PictureRule, Prompt
from owrl_jax.agent.history import HistoryRule
from owrl_jax.agent.page_text import FEEDBACK_CHARS, TITLE_CHARS, URL_CHARS
from owrl_jax.agent.parser import Parsed, parse
from owrl_jax.agent.prompt import PromptStyle
from owrl_jax.agent.protocol import protocol_id
from owrl_jax.config import AgentSettings, BrowserSettings
from owrl_jax.types import Observation, Task

LAYOUT = 1  # version of the message layout in prompt.py; a change of words there is a change of protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budgets:
    """What an episode may use.

    Attributes:
      max_steps: turns, unparsable ones included.
      max_context_tokens: one prompt together with its response.
      max_response_tokens: one response; cut to what is left of the context.
      max_parse_failures: unparsable responses in a row that end the episode.
    """

    max_steps: int = 15
    max_context_tokens: int = 32768
    max_response_tokens: int = 1024
    max_parse_failures: int = 3

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")
        if self.max_response_tokens >= self.max_context_tokens:
            raise ValueError(
                f"max_response_tokens={self.max_response_tokens} must be less than "
                f"max_context_tokens={self.max_context_tokens}: the prompt needs room too"
            )


class Harness:
    """The fixed part of all episodes.

    Args:
      tokens: the model's tokenizer (`owrl_jax.models.tokenizer.Tokens`).
      picture_rule: its image processor (`owrl_jax.models.processor.ImageProcessor`).
      style: system prompt, tools, feedback.
      rule: what stays of the past.
      budgets: limits of an episode.
      viewport, image_format: what the sandboxes are set to; part of the protocol.
      template_options: for the chat template, `{"enable_thinking": True}` for instance.
      prefill: put behind the generation prompt; it stands in the history before each response as well.
      reasoning_required: whether a response without reasoning is unparsable.

    Attributes:
      chat: the chat template, taken apart.
      protocol_parts: all that makes results comparable, as plain data.
      protocol: its name.

    Raises:
      TemplateMismatch: if the tokenizer's chat template rewrites past turns.
    """

    def __init__(
        self,
        *,
        tokens: ChatTokens,
        picture_rule: PictureRule,
        style: PromptStyle | None = None,
        rule: HistoryRule | None = None,
        budgets: Budgets | None = None,
        viewport: tuple[int, int] = (1280, 1000),
        image_format: str = "png",
        template_options: Mapping[str, Any] | None = None,
        prefill: str = "",
        reasoning_required: bool = True,
    ) -> None:
        self.tokens, self.picture_rule = tokens, picture_rule
        self.style, self.rule, self.budgets = style or PromptStyle(), rule or HistoryRule(), budgets or Budgets()
        self.viewport, self.image_format = viewport, image_format
        self.reasoning_required = reasoning_required
        self.tools = tuple(self.style.schemas())
        self.chat = ChatFormat.of(
            tokens,
            system=self.style.system_prompt(),
            tools=self.tools,
            options=dict(template_options or {}),
            prefill=prefill,
        )
        self.protocol_parts = self._parts()
        self.protocol = protocol_id(self.protocol_parts)

    @classmethod
    def from_settings(
        cls,
        tokens: ChatTokens,
        picture_rule: PictureRule,
        agent: AgentSettings,
        browser: BrowserSettings,
        **fields: Any,
    ) -> Harness:
        """The harness of a run's configuration; `fields` are the arguments that it does not have."""
        budgets = Budgets(
            max_steps=agent.max_steps,
            max_context_tokens=agent.max_context_tokens,
            max_response_tokens=agent.max_response_tokens,
            max_parse_failures=agent.max_parse_failures,
        )
        return cls(
            tokens=tokens,
            picture_rule=picture_rule,
            rule=HistoryRule(screenshots=agent.screenshots),
            budgets=budgets,
            viewport=browser.viewport,
            image_format=browser.image_format,
            **fields,
        )

    def context(self, task: Task, observation: Observation) -> Context:
        """The conversation of a new episode.

        Raises:
          UnusablePicture: if the model cannot be shown the screenshot.
        """
        return Context(
            tokens=self.tokens,
            chat=self.chat,
            picture_rule=self.picture_rule,
            rule=self.rule,
            task=task,
            observation=observation,
            terse=self.style.system == "terse",
        )

    def parse(self, said: str) -> Parsed:
        """What a response means: for acting, and for the format reward (`Parsed.ok`)."""
        return parse(self.chat.opener + said, tools=self.style.tools, reasoning_required=self.reasoning_required)

    def room(self, prompt: Prompt) -> int:
        """How many tokens the response to this prompt may have; below 1 the context is full."""
        return min(self.budgets.max_response_tokens, self.budgets.max_context_tokens - len(prompt))

    def _parts(self) -> dict[str, Any]:
        width, height = self.viewport
        template = self.tokens.hf.chat_template or ""
        ids = encode(self.tokens, self.chat.preamble + self.chat.answer + self.chat.opener + self.chat.reply)
        return {
            "layout": LAYOUT,
            "style": self.style.system,
            "system_prompt": self.style.system_prompt(),
            "tools": list(self.tools),
            "feedback": self.style.feedback,
            "changes": self.style.changes,
            "template_sha256": hashlib.sha256(str(template).encode()).hexdigest(),
            "opener": self.chat.opener,
            # The same words under another vocabulary are other ids.
            "preamble_ids_sha256": hashlib.sha256(repr(ids).encode()).hexdigest(),
            "reasoning_required": self.reasoning_required,
            "history": dataclasses.asdict(self.rule),
            "budgets": dataclasses.asdict(self.budgets),
            "viewport": [width, height],
            "image": {
                "format": self.image_format,
                "resized": list(self.picture_rule.resized(height, width)),
                "tokens": self.picture_rule.token_count(height, width),
                "patch": self.picture_rule.patch_size,
            },
            "caps_chars": {"feedback": FEEDBACK_CHARS, "title": TITLE_CHARS, "url": URL_CHARS},
        }
