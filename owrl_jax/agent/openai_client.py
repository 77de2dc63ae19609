"""Any OpenAI-compatible endpoint as a policy: a teacher, a baseline, or an engine of somebody else's.

The endpoint gets the conversation in words and pictures and answers in words, which become ids here (`policies.py`), so
that its episodes have the same form as everybody's. It is a network away, so: attempts with pauses that grow, honouring
Retry-After; a deadline over all of them; money reserved before each attempt (`spend.py`); and typed failures instead of
exceptions of the transport. A failure is never the policy's.

Answers with native tool calls or separate reasoning are written in our form. Nothing is sent but what the policy may
see, and the key is taken from an argument, never from the environment.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from typing import Any

import httpx

from owrl_jax.agent.chat import ChatTokens, encode_response
from owrl_jax.agent.parser import CALL, END_CALL, END_THINK, THINK
from owrl_jax.agent.policies import spoken
from owrl_jax.agent.policy import FailureKind, Generation, Leaf, Message, PolicyFailed, Sampling, Scene
from owrl_jax.agent.prompt import PICTURE
from owrl_jax.agent.spend import Price, SpendingLimit, SpendLedger

_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
# What a provider's own tokenizer may make of our prompt: the reservation must not be too small.
_TOKEN_MARGIN = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where and how to ask.

    Attributes:
      base_url: up to and with the version, `https://api.example.com/v1`.
      model: its name there.
      api_key: sent as a bearer token; empty for servers without one.
      native_tools: whether tools are sent in the request and calls come back as data; otherwise the system message
        lists them and the model writes blocks, as ours does.
      max_tokens_field: how the endpoint calls the limit of a response.
      extra: further fields of the request body.
      price: for the ledger.
      attempts, first_pause_s, longest_pause_s: of one response; the pause doubles.
      attempt_s, deadline_s: seconds for one attempt, and for all of them.
    """

    base_url: str
    model: str
    api_key: str = dataclasses.field(default="", repr=False)
    native_tools: bool = True
    max_tokens_field: str = "max_tokens"
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    price: Price = dataclasses.field(default_factory=Price)
    attempts: int = 5
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0
    attempt_s: float = 120.0
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, got {self.base_url!r}")
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {self.attempts}")


class OpenAIPolicy:
    """An endpoint as a policy.

    Args:
      endpoint: where and how to ask.
      tokens: makes ids of the answers.
      ledger: the account; None where calls cost nothing.
      transport: of httpx, for tests.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        tokens: ChatTokens,
        *,
        ledger: SpendLedger | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.endpoint, self._tokens, self._ledger = endpoint, tokens, ledger
        self.retries = 0
        self._http = httpx.AsyncClient(
            base_url=endpoint.base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {},
            timeout=httpx.Timeout(endpoint.attempt_s, connect=min(10.0, endpoint.attempt_s)),
            transport=transport,
            trust_env=False,
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def generate(self, trunk: tuple[int, ...], leaf: Leaf, sampling: Sampling) -> Generation:
        """See `Policy`.

        Raises:
          PolicyFailed: unavailable (all attempts used up), rejected (no attempt will help), or budget.
        """
        if leaf.scene is None:
            raise ValueError("a remote policy needs the scene; the harness puts it on every leaf")
        body = self._body(leaf.scene, sampling)
        most_usd = self.endpoint.price.usd(int(_TOKEN_MARGIN * (len(trunk) + len(leaf.ids))), sampling.max_new_tokens)
        limit = asyncio.timeout(self.endpoint.deadline_s)
        fault = "no attempt was finished"
        try:
            async with limit:
                pause = self.endpoint.first_pause_s
                for attempt in range(self.endpoint.attempts):
                    if attempt:
                        self.retries += 1
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, self.endpoint.longest_pause_s)
                    try:
                        answer = await self._ask(body, most_usd)
                    except _Again as again:
                        fault = str(again)
                        pause = min(max(pause, again.wait_s), self.endpoint.longest_pause_s)
                        continue
                    return self._generation(answer, sampling)
        except TimeoutError:
            if not limit.expired():
                raise
            fault = f"not within {self.endpoint.deadline_s:g} s; last: {fault}"
        raise PolicyFailed(FailureKind.UNAVAILABLE, f"{self.endpoint.model} gave no answer: {fault}")

    async def _ask(self, body: dict[str, Any], most_usd: float) -> dict[str, Any]:
        """One attempt, accounted for.

        Raises:
          _Again: if another attempt may help.
          PolicyFailed: if none will.
        """
        call = self._reserve(most_usd)
        try:
            response = await self._http.post("chat/completions", json=body)
        except httpx.ConnectError as error:
            self._cancel(call)
            raise _Again(f"{type(error).__name__}: {error}") from error
        except httpx.TransportError as error:  # it may have been answered, and billed: the reservation stands
            raise _Again(f"{type(error).__name__}: {error}") from error
        if response.status_code != 200:
            self._cancel(call)
            why = f"HTTP {response.status_code}: {_reason(response)}"
            if response.status_code in _AGAIN:
                raise _Again(why, _retry_after(response))
            raise PolicyFailed(FailureKind.REJECTED, f"{self.endpoint.model} refused the request: {why}")
        try:
            answer = response.json()
            choice = answer["choices"][0]
            usage = answer.get("usage") or {}
            if not isinstance(choice["message"], dict):
                raise TypeError("message is no object")
            spent = (int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _Again(f"the answer makes no sense ({type(error).__name__}: {error})") from error
        if call is not None and self._ledger is not None and usage:  # without a count the reservation stands
            self._ledger.settle(call, self.endpoint.price.usd(*spent))
        if choice.get("finish_reason") == "content_filter":
            raise PolicyFailed(FailureKind.REJECTED, f"{self.endpoint.model}: the answer was withheld by a filter")
        return choice

    def _generation(self, choice: dict[str, Any], sampling: Sampling) -> Generation:
        ids = encode_response(self._tokens, response_text(choice["message"]))
        finished = choice.get("finish_reason") != "length"
        return spoken(ids if finished else ids[:-1], sampling, finished=finished)

    def _body(self, scene: Scene, sampling: Sampling) -> dict[str, Any]:
        messages = [_content(message) for message in scene.messages]
        if not self.endpoint.native_tools:
            listing = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in scene.tools)
            messages[0]["content"] += f"\n\n# Tools\n\n{listing}"
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": messages,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            self.endpoint.max_tokens_field: sampling.max_new_tokens,
        }
        if self.endpoint.native_tools:
            body["tools"] = list(scene.tools)
        return {**body, **self.endpoint.extra}

    def _reserve(self, usd: float) -> str | None:
        if self._ledger is None:
            return None
        try:
            return self._ledger.reserve(usd, self.endpoint.model)
        except SpendingLimit as limit:
            raise PolicyFailed(FailureKind.BUDGET, str(limit)) from limit

    def _cancel(self, call: str | None) -> None:
        if call is not None and self._ledger is not None:
            self._ledger.cancel(call)


class _Again(Exception):
    """No usable answer this time."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


def response_text(message: dict[str, Any]) -> str:
    """An answer in our form: reasoning in its tags, then the text, then native calls as blocks.

    Calls are written as they came, broken JSON included: the parser decides what they mean.
    """
    text = str(message.get("content") or "")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning.strip():
        text = f"{THINK}\n{reasoning.strip()}\n{END_THINK}\n\n{text}"
    calls = [call.get("function") or {} for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    if calls and END_THINK not in text:
        text = f"{THINK}\n{text.strip().removeprefix(THINK).strip()}\n{END_THINK}\n\n"
    for function in calls:
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
        name = json.dumps(function.get("name"), ensure_ascii=False)
        text = f'{text.rstrip(" ")}{CALL}\n{{"name": {name}, "arguments": {arguments.strip() or "{}"}}}\n{END_CALL}\n'
    return text.rstrip("\n")


def _content(message: Message) -> dict[str, Any]:
    if not message.pictures:
        return {"role": message.role, "content": message.text}
    parts: list[dict[str, Any]] = []
    pictures = iter(message.pictures)
    for number, words in enumerate(message.text.split(PICTURE)):
        if number:
            shot = next(pictures).screenshot
            data = base64.b64encode(shot.data).decode()
            parts.append({"type": "image_url", "image_url": {"url": f"data:image/{shot.format};base64,{data}"}})
        if words:
            parts.append({"type": "text", "text": words})
    return {"role": message.role, "content": parts}


def _reason(response: httpx.Response) -> str:
    return " ".join(response.text.split())[:200]


def _retry_after(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0
