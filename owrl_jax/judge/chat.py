"""How a judge asks a model: one question of words and pictures, one reply in words, wherever the model runs.

`EndpointChat` asks any OpenAI-compatible endpoint, `owrl serve` among them; attempts, deadlines and money are those of
`agent/endpoint.py`. `EngineChat` asks an engine in the same process, whose vision cache then serves policy and judge
alike. Both write the question in the same messages.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import hashlib
from typing import Any, Protocol

import httpx

from owrl_jax.agent.endpoint import TOKEN_MARGIN, Endpoint, EndpointClient, chat_content
from owrl_jax.agent.policy import FailureKind, PolicyFailed, Sampling
from owrl_jax.agent.prompt import PICTURE
from owrl_jax.agent.spend import SpendLedger
from owrl_jax.engine.answer import AnswerReader, TokenBytes
from owrl_jax.engine.chat_prompt import BadMessages, ChatPrompts
from owrl_jax.engine.errors import EngineError
from owrl_jax.engine.request import Completion, Request
from owrl_jax.types import Screenshot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What a judge is asked.

    Attributes:
      system: who it is and what the rules are.
      text: the case, `PICTURE` where a picture stands.
      pictures: in order.
    """

    system: str
    text: str
    pictures: tuple[Screenshot, ...] = ()

    def __post_init__(self) -> None:
        if (marks := self.text.count(PICTURE)) != len(self.pictures):
            raise ValueError(f"the question has {marks} places for pictures and {len(self.pictures)} pictures")

    @property
    def sha256(self) -> str:
        """Names the question, pictures included."""
        parts = [self.system, self.text, *(shot.sha256 for shot in self.pictures)]
        return hashlib.sha256("\x1e".join(parts).encode("utf-8", "replace")).hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What came back.

    Attributes:
      text: the words, without reasoning that came apart from them.
      finished: whether the model came to its end.
      model: as the endpoint names what answered.
      tokens_in, tokens_out: as counted there; None if it did not say.
    """

    text: str
    finished: bool = True
    model: str = ""
    tokens_in: int | None = None
    tokens_out: int | None = None


class Chat(Protocol):
    """A model that can be asked."""

    @property
    def name(self) -> str: ...

    async def ask(self, question: Question, sampling: Sampling) -> Reply:
        """Raises `PolicyFailed`: unavailable, rejected, or budget."""
        ...


class EndpointChat:
    """An endpoint.

    Args:
      endpoint: where and how.
      ledger: the account with its limits; None where calls cost nothing.
      transport: of httpx, for tests.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        ledger: SpendLedger | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._client = EndpointClient(endpoint, ledger=ledger, transport=transport)

    @property
    def name(self) -> str:
        """The model's."""
        return self.endpoint.model

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def ask(self, question: Question, sampling: Sampling) -> Reply:
        """See `Chat`."""
        body = {
            "model": self.endpoint.model,
            "messages": [
                {"role": "system", "content": question.system},
                {"role": "user", "content": chat_content(question.text, question.pictures)},
            ],
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            self.endpoint.max_tokens_field: sampling.max_new_tokens,
            **self.endpoint.extra,
        }
        answer = await self._client.chat(body, most_usd=self._most_usd(question, sampling))
        return Reply(
            text=str(answer.choice["message"].get("content") or ""),
            finished=answer.choice.get("finish_reason") != "length",
            model=answer.model or self.endpoint.model,
            tokens_in=answer.tokens_in,
            tokens_out=answer.tokens_out,
        )

    def _most_usd(self, question: Question, sampling: Sampling) -> float:
        # Two characters a token, and 512 pixels: about twice what vocabularies and vision towers of today make of them.
        words = (len(question.system) + len(question.text)) / 2
        pixels = sum(shot.width * shot.height for shot in question.pictures) / 512
        return self.endpoint.price.usd(int(TOKEN_MARGIN * (words + pixels)), sampling.max_new_tokens)


class Submits(Protocol):
    """What is needed of an engine."""

    def submit(self, request: Request) -> concurrent.futures.Future[Completion]: ...


class EngineChat:
    """An engine in this process.

    Args:
      engine: answers.
      prompts: makes its prompts.
      name: of the model.
      options: of its chat template, `{"enable_thinking": False}` for instance.
    """

    def __init__(
        self, engine: Submits, prompts: ChatPrompts, name: str, *, options: dict[str, Any] | None = None
    ) -> None:
        self.name, self._engine, self._prompts, self._options = name, engine, prompts, options or {}
        self._bytes = TokenBytes(prompts.tokens)

    async def ask(self, question: Question, sampling: Sampling) -> Reply:
        """See `Chat`."""
        parts: list[dict[str, Any]] = []
        left = iter(question.pictures)
        for number, words in enumerate(question.text.split(PICTURE)):
            if number:
                parts.append({"type": "image", "data": next(left).data})
            if words:
                parts.append({"type": "text", "text": words})
        messages = [{"role": "system", "content": question.system}, {"role": "user", "content": parts}]
        try:
            prompt = await asyncio.to_thread(self._prompts.build, messages, options=self._options)
            request = Request(ids=prompt.ids, pictures=tuple(p.data for p in prompt.pictures), sampling=sampling)
            done = await asyncio.wrap_future(self._engine.submit(request))
        except BadMessages as error:
            raise PolicyFailed(FailureKind.REJECTED, str(error)) from error
        except EngineError as error:
            raise error.policy_failed() from error
        special = self._prompts.tokens.special
        reader = AnswerReader(self._bytes, end_ids=(special.im_end, special.endoftext), thinking=prompt.thinking)
        text = reader.feed(done.tokens).content + reader.end().content
        return Reply(
            text=text,
            finished=done.finish == "stop",
            model=self.name,
            tokens_in=done.prompt_tokens,
            tokens_out=len(done.tokens),
        )
