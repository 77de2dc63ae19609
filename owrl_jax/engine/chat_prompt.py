"""Chat messages to one prompt: ids with every picture's run of placeholders, and the pictures.

The model's own chat template writes the prompt, and what clients say is data: every text is guarded before the template
sees it (`Tokens.guard`), so no message, tool description or argument can spell a control token or claim a picture. One
exception: in assistant messages the four tags of the response format stay tags, because that is how a client hands
back what the model itself has said.

Used by the HTTP server, and by judges that sit on the engine in the same process. Nothing here needs jax.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

from owrl_jax.agent.chat import ChatTokens, guard_response, guard_words
from owrl_jax.agent.parser import THINK
from owrl_jax.models.processor import BadImage, ImageProcessor
from owrl_jax.types import Screenshot

FORMATS = ("PNG", "JPEG", "WEBP")


class BadMessages(ValueError):
    """Messages that cannot become a prompt. `where` is the path of the culprit, empty for the whole."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureLimits:
    """What clients may send.

    Attributes:
      count: pictures of one request.
      data_bytes: of one picture's file.
      pixels: of one picture, width times height.
    """

    count: int = 32
    data_bytes: int = 16 << 20
    pixels: int = 16 << 20

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} must be 0 or more, got {getattr(self, field.name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A prompt as the engine takes it.

    Attributes:
      ids: placeholders expanded.
      pictures: of their runs, in order.
      thinking: whether the prompt ends inside an open reasoning block, so that the answer begins with reasoning.
    """

    ids: tuple[int, ...]
    pictures: tuple[Screenshot, ...] = ()
    thinking: bool = False


class ChatPrompts:
    """Makes prompts for one model.

    Args:
      tokens: its tokenizer and chat template.
      processor: sizes of its pictures; None for a model that sees nothing.
      limits: of pictures.
    """

    def __init__(
        self, tokens: ChatTokens, processor: ImageProcessor | None, limits: PictureLimits | None = None
    ) -> None:
        self.tokens, self.processor, self.limits = tokens, processor, limits or PictureLimits()

    def build(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """The prompt of a conversation, up to and with the opening of the answer.

        Args:
          messages: `{role, content}` with role system, user, assistant or tool; content a text or a list of
            `{"type": "text", "text": …}` and `{"type": "image", "data": bytes}`. Assistants may have `tool_calls`
            (`{"name", "arguments"}`, arguments a text or an object) and `reasoning_content`.
          tools: function schemas for the template to list.
          options: further options of the template, `enable_thinking` for instance.
        Raises:
          BadMessages: naming what is wrong.
        """
        from jinja2.exceptions import TemplateError

        pictures: list[Screenshot] = []
        safe = [self._message(m, f"messages[{n}]", pictures) for n, m in enumerate(messages)]
        given = {"tools": [self._data(tool) for tool in tools] or None, **(options or {})}
        try:
            text = self.tokens.render_chat(safe, add_generation_prompt=True, **given)
        except TemplateError as error:
            raise BadMessages(f"the model's chat template refuses these messages: {error}") from error
        unexpanded = self.tokens.encode_template(text)
        try:
            counts = [self._tokens_of(shot) for shot in pictures]
            ids = self.tokens.expand_images(unexpanded, counts).ids.tolist()
        except ValueError as error:
            raise BadMessages(str(error)) from error
        return ChatPrompt(ids=tuple(ids), pictures=tuple(pictures), thinking=text.rstrip().endswith(THINK))

    def _message(self, message: Mapping[str, Any], where: str, pictures: list[Screenshot]) -> dict[str, Any]:
        role, content = message["role"], message.get("content")
        said = guard_response if role == "assistant" else guard_words
        made: dict[str, Any] = {"role": role, "content": ""}
        if isinstance(content, str):
            made["content"] = said(self.tokens, content)
        elif content:
            parts = []
            for number, part in enumerate(content):
                if part["type"] == "text":
                    parts.append({"type": "text", "text": said(self.tokens, part["text"])})
                    continue
                if len(pictures) >= self.limits.count:
                    raise BadMessages(f"at most {self.limits.count} pictures are taken in one request", where)
                pictures.append(self.picture(part["data"], f"{where}.content[{number}]"))
                parts.append({"type": "image"})
            made["content"] = parts
        if message.get("reasoning_content"):
            made["reasoning_content"] = guard_words(self.tokens, message["reasoning_content"])
        if message.get("tool_calls"):
            made["tool_calls"] = [
                {"function": {"name": self._data(c["name"]), "arguments": self._data(c["arguments"])}}
                for c in message["tool_calls"]
            ]
        return made

    def _data(self, value: Any) -> Any:
        """Plain data with every text guarded, keys of objects too."""
        if isinstance(value, str):
            return self.tokens.guard(value)
        if isinstance(value, Mapping):
            return {self._data(key): self._data(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._data(item) for item in value]
        return value

    def picture(self, data: bytes, where: str = "") -> Screenshot:
        """A picture by its file's bytes: format and size from its head, the rest decoded later by the engine.

        Raises:
          BadMessages: if it is none, or too large.
        """
        try:
            shot = read_picture(data, self.limits)
            self._tokens_of(shot)
        except ValueError as error:
            raise BadMessages(str(error), where) from error
        return shot

    def _tokens_of(self, shot: Screenshot) -> int:
        if self.processor is None:
            raise BadMessages("this model sees no pictures: send text alone")
        return self.processor.token_count(shot.height, shot.width)


def read_picture(data: bytes, limits: PictureLimits) -> Screenshot:
    """The picture that a file's bytes hold, looked at no further than its head.

    Raises:
      ValueError: if it is none, or exceeds the limits.
    """
    from PIL import Image, UnidentifiedImageError

    if len(data) > limits.data_bytes:
        raise ValueError(f"a picture may have {limits.data_bytes} bytes, this one has {len(data)}")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            (width, height), kind = picture.size, str(picture.format).lower()
    except (UnidentifiedImageError, OSError, SyntaxError, EOFError, ValueError, Image.DecompressionBombError) as error:
        why = "it is no PNG, JPEG or WebP" if isinstance(error, UnidentifiedImageError) else str(error)
        raise BadImage("undecodable", f"a picture cannot be read: {why}") from error
    if width * height > limits.pixels:
        raise BadImage("too_large", f"a picture may have {limits.pixels} pixels, this one is {width}x{height}")
    return Screenshot(data=data, width=width, height=height, format=kind)
