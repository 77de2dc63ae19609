"""A remote endpoint that answers JSON with JSON, and everything that comes of it being a network away.

Attempts with pauses that grow, honouring Retry-After; a deadline over all of them; money reserved before each attempt
(`spend.py`) and settled after; typed failures instead of exceptions of the transport. Policies and judges that live
elsewhere share this one file. The key is taken from an argument, never from the environment; proxies of the environment
are not used either.

What a body means is the caller's business, except for chat completions, which have one more method.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import httpx

from owrl_jax.agent.policy import FailureKind, PolicyFailed
from owrl_jax.agent.prompt import PICTURE
from owrl_jax.agent.spend import Price, SpendingLimit, SpendLedger
from owrl_jax.types import Screenshot

_T = TypeVar("_T")
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
# What a provider's own tokenizer may make of our prompt: the reservation must not be too small.
TOKEN_MARGIN = 1.5


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


class Refused(PolicyFailed):
    """The endpoint will never answer this request. `response` is what it said."""

    def __init__(self, message: str, response: httpx.Response) -> None:
        super().__init__(FailureKind.REJECTED, message)
        self.response = response


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """One chat completion: the first choice as it came, and the tokens that were counted (None where they were not)."""

    choice: dict[str, Any]
    tokens_in: int | None = None
    tokens_out: int | None = None
    model: str = ""


class EndpointClient:
    """Asks an endpoint.

    Args:
      endpoint: where and how.
      ledger: the account; None where calls cost nothing.
      transport: of httpx, for tests.

    Attributes:
      retries: attempts after the first ones, so far.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        ledger: SpendLedger | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.endpoint, self._ledger = endpoint, ledger
        self.retries = 0
        self._http = httpx.AsyncClient(
            base_url=endpoint.base_url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {},
            timeout=httpx.Timeout(endpoint.attempt_s, connect=min(10.0, endpoint.attempt_s)),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
            trust_env=False,
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def chat(self, body: dict[str, Any], *, most_usd: float = 0.0) -> ChatAnswer:
        """One chat completion. Raises as `post`, and `REJECTED` for an answer that a filter withheld."""
        answer = await self.post("chat/completions", body, self._read_chat, most_usd=most_usd)
        if answer.choice.get("finish_reason") == "content_filter":
            why = f"{self.endpoint.model}: the answer was withheld by a filter"
            raise PolicyFailed(FailureKind.REJECTED, why)
        return answer

    async def post(
        self,
        path: str,
        body: dict[str, Any] | bytes,
        read: Callable[[httpx.Response], tuple[_T, float | None]],
        *,
        most_usd: float = 0.0,
    ) -> _T:
        """The answer to one request.

        Args:
          path: behind the base address.
          body: JSON, as an object or encoded.
          read: takes the answer (status 200) apart: its value, and what it cost, None if that is not known. An answer
            that makes no sense is a ValueError, LookupError, TypeError or AttributeError there, and is asked for again.
          most_usd: the most that one attempt can cost.
        Raises:
          Refused: if no attempt will help.
          PolicyFailed: unavailable (all attempts used up) or budget.
        """
        endpoint = self.endpoint
        limit = asyncio.timeout(endpoint.deadline_s)
        fault = "no attempt was finished"
        try:
            async with limit:
                pause = endpoint.first_pause_s
                for attempt in range(endpoint.attempts):
                    if attempt:
                        self.retries += 1
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, endpoint.longest_pause_s)
                    try:
                        return await self._ask(path, body, read, most_usd)
                    except _Again as again:
                        fault = str(again)
                        pause = min(max(pause, again.wait_s), endpoint.longest_pause_s)
        except TimeoutError:
            if not limit.expired():
                raise
            fault = f"not within {endpoint.deadline_s:g} s; last: {fault}"
        raise PolicyFailed(FailureKind.UNAVAILABLE, f"{endpoint.model} gave no answer: {fault}")

    async def _ask(
        self,
        path: str,
        body: dict[str, Any] | bytes,
        read: Callable[[httpx.Response], tuple[_T, float | None]],
        most_usd: float,
    ) -> _T:
        """One attempt, accounted for.

        Raises:
          _Again: if another attempt may help.
          PolicyFailed: if none will.
        """
        call = self._reserve(most_usd)
        sent: dict[str, Any] = {"json": body}
        if isinstance(body, bytes):
            sent = {"content": body, "headers": {"Content-Type": "application/json"}}
        try:
            response = await self._http.post(path, **sent)
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
            raise Refused(f"{self.endpoint.model} refused the request: {why}", response)
        try:
            value, usd = read(response)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _Again(f"the answer makes no sense ({type(error).__name__}: {error})") from error
        if call is not None and self._ledger is not None and usd is not None:  # without a count the reservation stands
            self._ledger.settle(call, usd)
        return value

    def _read_chat(self, response: httpx.Response) -> tuple[ChatAnswer, float | None]:
        answer = response.json()
        choice = answer["choices"][0]
        usage = answer.get("usage") or {}
        if not isinstance(choice["message"], dict):
            raise TypeError("message is no object")
        if not usage:
            return ChatAnswer(choice=choice, model=str(answer.get("model") or "")), None
        tokens_in, tokens_out = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        made = ChatAnswer(
            choice=choice, tokens_in=tokens_in, tokens_out=tokens_out, model=str(answer.get("model") or "")
        )
        return made, self.endpoint.price.usd(tokens_in, tokens_out)

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


def chat_content(text: str, pictures: Sequence[Screenshot]) -> str | list[dict[str, Any]]:
    """Words with `PICTURE` where a picture stands, as the content of a chat message with pictures in data URLs."""
    if not pictures:
        return text
    parts: list[dict[str, Any]] = []
    left = iter(pictures)
    for number, words in enumerate(text.split(PICTURE)):
        if number:
            shot = next(left)
            data = base64.b64encode(shot.data).decode()
            parts.append({"type": "image_url", "image_url": {"url": f"data:image/{shot.format};base64,{data}"}})
        if words:
            parts.append({"type": "text", "text": words})
    return parts


def _reason(response: httpx.Response) -> str:
    return " ".join(response.text.split())[:200]


def _retry_after(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0
