"""Any OpenAI-compatible endpoint as a policy: a teacher, a baseline, or an engine of somebody else's.

The endpoint gets the conversation in words and pictures and answers in words, which become ids here (`policies.py`), so
that its episodes have the same form as everybody's. Attempts, deadlines and money are the matter of `endpoint.py`; a
failure is never the policy's.

Answers with native tool calls or separate reasoning are written in our form. Nothing is sent but what the policy may
see.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from owrl_jax.agent.chat import ChatTokens, encode_response
from owrl_jax.agent.endpoint import TOKEN_MARGIN, Endpoint, EndpointClient, chat_content
from owrl_jax.agent.parser import CALL, END_CALL, END_THINK, THINK
from owrl_jax.agent.policies import spoken
from owrl_jax.agent.policy import Generation, Leaf, Sampling, Scene
from owrl_jax.agent.spend import SpendLedger

__all__ = ["Endpoint", "OpenAIPolicy", "response_text"]


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
        self.endpoint, self._tokens = endpoint, tokens
        self._client = EndpointClient(endpoint, ledger=ledger, transport=transport)

    @property
    def retries(self) -> int:
        """Attempts after the first ones, so far."""
        return self._client.retries

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def generate(self, trunk: tuple[int, ...], leaf: Leaf, sampling: Sampling) -> Generation:
        """See `Policy`.

        Raises:
          PolicyFailed: unavailable (all attempts used up), rejected (no attempt will help), or budget.
        """
        if leaf.scene is None:
            raise ValueError("a remote policy needs the scene; the harness puts it on every leaf")
        body = self._body(leaf.scene, sampling)
        most_usd = self.endpoint.price.usd(int(TOKEN_MARGIN * (len(trunk) + len(leaf.ids))), sampling.max_new_tokens)
        choice = (await self._client.chat(body, most_usd=most_usd)).choice
        ids = encode_response(self._tokens, response_text(choice["message"]))
        finished = choice.get("finish_reason") != "length"
        return spoken(ids if finished else ids[:-1], sampling, finished=finished)

    def _body(self, scene: Scene, sampling: Sampling) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [
            {"role": m.role, "content": chat_content(m.text, [p.screenshot for p in m.pictures])}
            for m in scene.messages
        ]
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
