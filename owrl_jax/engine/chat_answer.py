"""Chat answers, whole and streamed: one path makes the pieces of both, so they cannot differ.

A stop string ends the work in the engine too, not only the text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from owrl_jax.engine import openai_api as api
from owrl_jax.engine.answer import Piece
from owrl_jax.engine.chat_prompt import ChatPrompt
from owrl_jax.engine.request import Completion, Request, Token
from owrl_jax.engine.service import EngineService


def _job(asked: api.ChatRequest, prompt: ChatPrompt) -> Request:
    return Request(
        ids=prompt.ids,
        pictures=tuple(shot.data for shot in prompt.pictures),
        sampling=asked.sampling,
        top_logprobs=asked.top_logprobs,
    )


async def chat_whole(service: EngineService, asked: api.ChatRequest) -> dict[str, Any]:
    """The body of a whole answer."""
    name = f"chatcmpl-{secrets.token_hex(12)}"
    reasoning = content = ""
    tokens: list[Token] = []
    calls: list[dict[str, Any]] = []
    finish, counts, version = "stop", {}, service.engine.version
    async with contextlib.aclosing(_pieces(service, asked, name)) as pieces:
        async for piece in pieces:
            if isinstance(piece, _Ending):
                calls, finish, counts, version = piece.calls, piece.finish, piece.usage, piece.version
                continue
            reasoning, content = reasoning + piece.reasoning, content + piece.content
            tokens += piece.tokens
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    logprobs = {"content": api.logprob_entries(tokens, service.token_bytes), "refusal": None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs if asked.logprobs else None,
        "finish_reason": finish,
    }
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": service.config.model,
        "system_fingerprint": f"version-{version}",
        "choices": [choice],
        "usage": counts,
    }


async def chat_events(service: EngineService, asked: api.ChatRequest) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer."""
    name, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())

    def event(delta: dict[str, Any] | None, *, finish: str | None = None, tokens=(), counts=None) -> bytes:
        logprobs = None
        if asked.logprobs and tokens:
            logprobs = {"content": api.logprob_entries(tokens, service.token_bytes), "refusal": None}
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {
            "id": name,
            "object": "chat.completion.chunk",
            "created": created,
            "model": service.config.model,
            "system_fingerprint": f"version-{service.engine.version}",
            "choices": [] if delta is None else [choice],
        }
        if asked.include_usage:
            chunk["usage"] = counts
        return event_bytes(chunk)

    opening: dict[str, Any] = {"role": "assistant"}
    async with contextlib.aclosing(_pieces(service, asked, name)) as pieces:
        async for piece in pieces:
            if isinstance(piece, _Ending):
                delta = dict(opening)
                if piece.calls:
                    delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(piece.calls)]
                yield event(delta, finish=piece.finish)
                if asked.include_usage:
                    yield event(None, counts=piece.usage)
                continue
            delta = dict(opening)
            if piece.reasoning:
                delta["reasoning_content"] = piece.reasoning
            if piece.content or not piece.reasoning:
                delta["content"] = piece.content
            if piece.reasoning or piece.content or opening or (asked.logprobs and piece.tokens):
                yield event(delta, tokens=piece.tokens)
                opening = {}
    yield b"data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ending:
    calls: list[dict[str, Any]]
    finish: str
    usage: dict[str, Any]
    version: int


async def _pieces(service: EngineService, asked: api.ChatRequest, name: str) -> AsyncGenerator[Piece | _Ending, None]:
    """An answer in pieces, and its ending. The one path for whole and streamed answers."""
    prompt = await service.chat_prompt(asked)
    reader = service.reader(asked, prompt)
    live = asked.stream or bool(asked.stop)
    completion: Completion | None = None
    async with contextlib.aclosing(service.run(_job(asked, prompt), stream=live)) as parts:
        async for part in parts:
            if isinstance(part, Completion):
                completion = part
                part = () if live else part.tokens
            if piece := reader.feed(part):
                yield piece
            if reader.stopped:
                break
    cut = not reader.stopped and completion is not None and completion.finish == "length"
    if piece := reader.end(whole=not cut):
        yield piece
    service.tokens["answer"] += len(reader.tokens)
    calls = api.tool_calls(reader.calls, name)
    finish = "length" if cut else "tool_calls" if calls else "stop"
    cached = completion.cached_tokens if completion else 0
    version = reader.tokens[-1].version if reader.tokens else service.engine.version
    yield _Ending(
        calls=calls,
        finish=finish,
        usage=api.usage(len(prompt.ids), len(reader.tokens), cached),
        version=version,
    )


def event_bytes(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
