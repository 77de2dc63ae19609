"""The OpenAI chat completions format: bodies in, checked; answers and errors out.

`read_chat` turns a body into a `ChatRequest` or an `ApiError` that names the field. A field that would change the
answer and is not implemented is an error, never ignored; fields that only concern the other side's book-keeping are
taken and forgotten. Image addresses must be data URLs: a server that fetched what clients name would be a hole in the
network around it.

Beyond the format: `top_k`, `reasoning_content` in messages both ways, and `chat_template_kwargs.enable_thinking`.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from owrl_jax.agent.policy import Sampling
from owrl_jax.engine.answer import TokenBytes
from owrl_jax.engine.request import Token
from owrl_jax.types import ToolCall

MAX_STOPS, MAX_STOP_CHARS, MAX_TOP_LOGPROBS = 16, 256, 20
MAX_MESSAGES, MAX_TOOLS = 4096, 256
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32}(?:;[a-z0-9=.+-]{1,64})*?;base64,", re.IGNORECASE)
_NO_LOGPROB = -9999.0  # how the format writes minus infinity


class ApiError(Exception):
    """A request that gets no answer, in the format's own terms.

    Attributes:
      status: of HTTP.
      kind: `invalid_request_error`, `authentication_error`, `rate_limit_error` or `server_error`.
      param: path of the field.
      code: short word for programs.
      retry_after_s: when to ask again; None where that will not help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.retry_after_s, self.extra = retry_after_s, extra or {}

    def body(self) -> dict[str, Any]:
        """The error object."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code, **self.extra}
        return {"error": error}


# --- The body as it comes ----------------------------------------------------------------------------------------


class _Url(msgspec.Struct):
    url: str
    detail: str | None = None


class _TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: _Url


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"


class _System(msgspec.Struct, tag_field="role", tag="system"):
    content: str | list[_TextPart]


class _Developer(msgspec.Struct, tag_field="role", tag="developer"):
    content: str | list[_TextPart]


class _User(msgspec.Struct, tag_field="role", tag="user"):
    content: str | list[_TextPart | _ImagePart]


class _Assistant(msgspec.Struct, tag_field="role", tag="assistant"):
    content: str | list[_TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Tool(msgspec.Struct, tag_field="role", tag="tool"):
    content: str | list[_TextPart | _ImagePart]
    tool_call_id: str = ""


class _Schema(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ToolSchema(msgspec.Struct):
    function: _Schema
    type: Literal["function"] = "function"


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    messages: list[_System | _Developer | _User | _Assistant | _Tool]
    tools: list[_ToolSchema] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Taken only at the value that changes nothing.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    # Book-keeping of the other side.
    parallel_tool_calls: bool | None = None
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A checked request.

    Attributes:
      messages: as `ChatPrompts.build` takes them, with the bytes of pictures.
      tools: schemas for the template; `tool_names` are their names.
      options: of the template.
      sampling: with `max_new_tokens` as asked, or the server's default.
      stop: strings that end the answer.
      stream, include_usage: whether and how the answer is streamed.
      logprobs: whether they are wanted; `top_logprobs` how many alternatives beside each.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    options: dict[str, Any]
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names of the tools on offer."""
        return tuple(tool["function"]["name"] for tool in self.tools)


def read_chat(data: bytes, *, model: str, default_max_tokens: int) -> ChatRequest:
    """The request that a body describes.

    Args:
      data: JSON.
      model: the one name that is served.
      default_max_tokens: where the body sets no limit.
    Raises:
      ApiError: 400 or 404, naming the field.
    """
    try:
        body = msgspec.json.decode(data, type=_Body)
    except msgspec.ValidationError as error:
        _, _, path = str(error).partition(" - at `$")
        raise ApiError(400, f"the body is not a chat request: {error}", param=path.strip(".`") or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if body.model != model:
        raise ApiError(
            404, f"there is no model {body.model!r} here; there is {model!r}", param="model", code="model_not_found"
        )
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        raise ApiError(
            400, f"between 1 and {MAX_MESSAGES} messages are taken, got {len(body.messages)}", param="messages"
        )
    _refuse_what_is_missing(body)
    tools = _tools(body)
    top = body.top_logprobs or 0
    if top and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise ApiError(400, f"top_logprobs must lie in 0..{MAX_TOP_LOGPROBS}, got {top}", param="top_logprobs")
    return ChatRequest(
        messages=tuple(_message(m, f"messages[{n}]") for n, m in enumerate(body.messages)),
        tools=tools,
        options=_options(body.chat_template_kwargs or {}),
        sampling=_sampling(body, default_max_tokens),
        stop=_stop(body.stop),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        logprobs=bool(body.logprobs),
        top_logprobs=top,
    )


def _refuse_what_is_missing(body: _Body) -> None:
    checks = (
        ("n", body.n in (None, 1), "one answer per request is given: ask n times, equal prompts are computed once"),
        ("presence_penalty", not body.presence_penalty, "penalties are not implemented"),
        ("frequency_penalty", not body.frequency_penalty, "penalties are not implemented"),
        ("logit_bias", not body.logit_bias, "logit_bias is not implemented"),
        (
            "response_format",
            body.response_format in (None, {"type": "text"}),
            "answers are not constrained to a format: ask for it in words and check what comes",
        ),
        ("modalities", body.modalities in (None, ["text"]), "answers are text"),
        (
            "tool_choice",
            body.tool_choice in (None, "auto", "none"),
            "answers are not constrained, so a call cannot be forced: use auto or none",
        ),
    )
    for name, fine, why in checks:
        if not fine:
            raise ApiError(400, f"{name}: {why}", param=name, code="unsupported_parameter")


def _tools(body: _Body) -> tuple[dict[str, Any], ...]:
    if not body.tools or body.tool_choice == "none":
        return ()
    if len(body.tools) > MAX_TOOLS:
        raise ApiError(400, f"at most {MAX_TOOLS} tools are taken, got {len(body.tools)}", param="tools")
    schemas = []
    for number, tool in enumerate(body.tools):
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", tool.function.name):
            raise ApiError(
                400,
                f"a tool's name has 1 to 64 letters, digits, and _ . -, got {tool.function.name[:80]!r}",
                param=f"tools[{number}].function.name",
            )
        function: dict[str, Any] = {"name": tool.function.name, "description": tool.function.description or ""}
        if tool.function.parameters is not None:
            function["parameters"] = tool.function.parameters
        schemas.append({"type": "function", "function": function})
    return tuple(schemas)


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    for name, value in kwargs.items():
        if name != "enable_thinking" or not isinstance(value, bool):
            why = f"chat_template_kwargs takes enable_thinking, true or false, got {name}={value!r}"[:200]
            raise ApiError(400, why, param="chat_template_kwargs")
    return kwargs


def _sampling(body: _Body, default_max_tokens: int) -> Sampling:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "give max_tokens or max_completion_tokens, not both", param="max_tokens")
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    try:
        return Sampling(
            max_new_tokens=default_max_tokens if limit is None else limit,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or 0,
            seed=secrets.randbits(32) if body.seed is None else body.seed & 0xFFFFFFFF,
        )
    except ValueError as error:
        given = str(error).partition(" ")[0]
        param = {"max_new_tokens": "max_tokens"}.get(given, given)
        raise ApiError(400, str(error).replace("max_new_tokens", "max_tokens"), param=param) from error


def _stop(given: str | list[str] | None) -> tuple[str, ...]:
    words = (given,) if isinstance(given, str) else tuple(given or ())
    if len(words) > MAX_STOPS or any(not 1 <= len(word) <= MAX_STOP_CHARS for word in words):
        raise ApiError(400, f"stop takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters", param="stop")
    return words


def _message(message: Any, where: str) -> dict[str, Any]:
    role = "system" if isinstance(message, _Developer) else type(message).__struct_config__.tag
    content: Any = message.content
    if isinstance(content, list):
        content = [_part(part, f"{where}.content[{n}]") for n, part in enumerate(content)]
    made: dict[str, Any] = {"role": role, "content": content}
    if isinstance(message, _Assistant):
        if message.reasoning_content:
            made["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            made["tool_calls"] = [
                {"name": call.function.name, "arguments": call.function.arguments} for call in message.tool_calls
            ]
    return made


def _part(part: _TextPart | _ImagePart, where: str) -> dict[str, Any]:
    if isinstance(part, _TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image", "data": data_url_bytes(part.image_url.url, f"{where}.image_url.url")}


def data_url_bytes(url: str, where: str = "") -> bytes:
    """The bytes in a data URL of an image.

    Raises:
      ApiError: for any other address, and for broken base64.
    """
    head = _DATA_URL.match(url)
    if head is None:
        raise ApiError(
            400,
            f"a picture must come as data:image/png;base64,… (or jpeg, webp), got {url[:60]!r}: no address is fetched",
            param=where or None,
            code="invalid_image_url",
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, f"the picture's base64 is broken: {error}", param=where or None) from error


# --- Answers -----------------------------------------------------------------------------------------------------


def tool_calls(calls: Iterable[ToolCall], answer_id: str) -> list[dict[str, Any]]:
    """Calls as the format has them; arguments are JSON text."""
    return [
        {
            "id": f"call_{answer_id.removeprefix('chatcmpl-')[:16]}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for number, call in enumerate(calls)
    ]


def logprob_entries(tokens: Sequence[Token], token_bytes: TokenBytes) -> list[dict[str, Any]]:
    """One entry for each token, with its alternatives."""
    return [
        {
            **_logprob(token.id, token.logprob, token_bytes),
            "top_logprobs": [_logprob(id_, value, token_bytes) for id_, value in token.top],
        }
        for token in tokens
    ]


def _logprob(id_: int, value: float, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes(id_)
    return {
        "token": data.decode("utf-8", "replace"),
        "bytes": list(data),
        "logprob": max(value, _NO_LOGPROB),
    }


def usage(prompt: int, answer: int, cached: int) -> dict[str, Any]:
    """Counts of tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
