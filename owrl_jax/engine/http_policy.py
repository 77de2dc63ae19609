"""An engine on another machine as a `Policy`: ids out, ids in, over the raw route of `owrl serve`.

What comes back is what the engine in its own process would have given, bit for bit. Pictures travel by hash once the
server has seen them. Attempts, pauses and deadlines are those of `agent/endpoint.py`. CPU hosts import this file, so
nothing here needs jax.
"""

from __future__ import annotations

import collections
from collections.abc import Container
from typing import Any, cast

import httpx
import msgspec

from owrl_jax.agent.endpoint import Endpoint, EndpointClient, Refused
from owrl_jax.agent.policy import Generation, Leaf, Sampling
from owrl_jax.engine import wire

_REMEMBERED = 65536


class HttpPolicy:
    """See the head of the file.

    Args:
      base_url: of the server, up to and with `/v1`.
      token: its secret; empty for a server without one.
      training: whether answers will be trained on.
      attempts, deadline_s: of one answer.
      transport: of httpx, for tests.

    Attributes:
      pictures_sent, pictures_named: how often a picture travelled as bytes, and how often its hash was enough.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str = "",
        training: bool = False,
        attempts: int = 8,
        attempt_s: float = 300.0,
        deadline_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        endpoint = Endpoint(
            base_url=base_url,
            model="the engine",
            api_key=token,
            attempts=attempts,
            attempt_s=attempt_s,
            deadline_s=deadline_s,
            first_pause_s=0.25,
            longest_pause_s=10.0,
        )
        self._client = EndpointClient(endpoint, transport=transport)
        self._training = training
        self._known: collections.OrderedDict[str, None] = collections.OrderedDict()
        self.pictures_sent = self.pictures_named = 0

    @property
    def retries(self) -> int:
        """Attempts after the first ones, so far."""
        return self._client.retries

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def generate(self, trunk: tuple[int, ...], leaf: Leaf, sampling: Sampling) -> Generation:
        """See `Policy`. Cancelling the call hangs up, and the server abandons the request.

        Raises:
          PolicyFailed: unavailable (all attempts used up) or rejected (no attempt will help).
        """
        try:
            answer = await self._post(trunk, leaf, sampling, known=self._known)
        except Refused as refused:
            if _code(refused.response) != wire.UNKNOWN_PICTURES:
                raise
            answer = await self._post(trunk, leaf, sampling, known={})  # it was restarted, or its memory was full
        for picture in leaf.pictures:
            self._known[picture.screenshot.sha256] = None
            self._known.move_to_end(picture.screenshot.sha256)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return Generation(
            ids=answer.ids, logprobs=answer.logprobs, versions=answer.versions, finish=cast(Any, answer.finish)
        )

    async def _post(
        self, trunk: tuple[int, ...], leaf: Leaf, sampling: Sampling, *, known: Container[str]
    ) -> wire.GenerateAnswer:
        pictures, sent = [], set()
        for picture in leaf.pictures:
            sha = picture.screenshot.sha256
            named = sha in known or sha in sent
            pictures.append(wire.WirePicture(sha256=sha, data=None if named else picture.screenshot.data))
            sent.add(sha)
            self.pictures_named += named
            self.pictures_sent += not named
        body = wire.GenerateBody(
            trunk=trunk, leaf=leaf.ids, pictures=tuple(pictures), sampling=sampling, training=self._training
        )
        return await self._client.post("generate", wire.encode(body), _read)


def _read(response: httpx.Response) -> tuple[wire.GenerateAnswer, float]:
    return msgspec.json.decode(response.content, type=wire.GenerateAnswer), 0.0


def _code(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return ""
