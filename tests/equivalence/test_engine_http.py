"""The real engine behind HTTP gives what it gives in its own process: raw route, chat, streams, and the command.

A small random Qwen3-VL; the stand-in of `tests/unit/test_engine_server.py` covers what does not need a model.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys

import httpx
import jax
import openai
import pytest

from owrl_jax.agent.policy import Leaf, Picture, Sampling
from owrl_jax.engine.chat_prompt import ChatPrompts
from owrl_jax.engine.engine import Engine
from owrl_jax.engine.http_policy import HttpPolicy
from owrl_jax.engine.request import Request
from owrl_jax.engine.settings import EngineSettings
from owrl_jax.models import hf
from owrl_jax.models.processor import ImageProcessor
from owrl_jax.models.qwen3_vl.config import NANO
from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.qwen3_vl.table import build_tree, leaves
from tests.unit.engine_world import png, serving
from tests.unit.harness_world import tokenizer

PROCESSOR = ImageProcessor(min_area=32 * 32, max_area=128 * 128)
SETTINGS = EngineSettings(
    max_context=512,
    decode_rows=(1, 4),
    decode_steps=4,
    chunk_tokens=(128,),
    segments=4,
    patch_buckets=(64,),
    vision_rows=64,
)


def tiny_model():
    """A configuration for the small tokenizer's vocabulary, and parameters loud enough to prefer something."""
    special = tokenizer("small").special
    config = dataclasses.replace(
        NANO,
        text=dataclasses.replace(NANO.text, layers=2),
        image_token=special.image_pad,
        video_token=special.video_pad,
        vision_start=special.vision_start,
        vision_end=special.vision_end,
    )
    params = Qwen3VL(config).init(jax.random.key(0))
    scaled = {row.name: leaf * 4 if row.init == "normal" else leaf for row, leaf in leaves(config, params)}
    return config, build_tree(config, lambda row: scaled[row.name])


@pytest.fixture(scope="module")
def engine():
    config, params = tiny_model()
    with Engine(config, processor=PROCESSOR, special=tokenizer("small").special, settings=SETTINGS) as engine:
        engine.publish(5, params)
        yield engine


def leaf_with(*pictures: bytes, words: str) -> Leaf:
    prompt = ChatPrompts(tokenizer("small"), PROCESSOR).build([{"role": "user", "content": content(words, *pictures)}])
    shown = tuple(Picture(screenshot=s, grid=(4, 4), tokens=4) for s in prompt.pictures)
    return Leaf(ids=prompt.ids, pictures=shown)


def content(words: str, *pictures: bytes):
    return [{"type": "text", "text": words}, *({"type": "image", "data": data} for data in pictures)]


async def test_the_raw_route_gives_what_the_engine_gives(engine):
    leaves_ = [leaf_with(*[png(mark=m)] * n, words=f"look {m}") for m, n in enumerate((0, 1, 2, 1, 0, 1))]
    samplings = [
        Sampling(max_new_tokens=6 + n, temperature=(0.0, 1.0, 0.7)[n % 3], top_p=(1.0, 0.9)[n % 2], seed=n)
        for n in range(len(leaves_))
    ]
    trunk = tuple(tokenizer("small").encode_template("<|im_start|>system\nBe.<|im_end|>\n").ids.tolist())
    here = [await engine.generate(trunk, leaf, s) for leaf, s in zip(leaves_, samplings, strict=True)]
    async with serving(engine, tokenizer("small"), processor=PROCESSOR) as (_, url):
        policy = HttpPolicy(url)
        there = await asyncio.gather(
            *(policy.generate(trunk, leaf, s) for leaf, s in zip(leaves_, samplings, strict=True))
        )
        await policy.close()
    for one, other in zip(here, there, strict=True):
        assert one.ids == other.ids and one.versions == other.versions == (5,) * len(one.ids)
        assert one.finish == other.finish
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)  # other company in the batch, other roundings
    alone = [await engine.generate(trunk, leaves_[1], samplings[1]) for _ in range(2)]
    assert alone[0] == alone[1] and len({g.ids for g in here}) > 3


@contextlib.asynccontextmanager
async def stock_client(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def test_chat_is_the_template_and_the_engine(engine):
    tokens = tokenizer("small")
    picture = png(mark=7)
    url_part = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(picture).decode()}"},
    }
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, url_part]}],
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 3,
    }
    text = (
        "<|im_start|>user\nWhat is this?<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokens.expand_images(tokens.encode_template(text), [4]).ids.tolist()
    sampling = Sampling(max_new_tokens=12, temperature=0)
    wanted = engine.submit(Request(ids=tuple(ids), pictures=(picture,), sampling=sampling)).result(60)
    ended = wanted.ids[-1] in (tokens.special.im_end, tokens.special.endoftext)
    said = wanted.ids[:-1] if ended else wanted.ids
    async with serving(engine, tokens, processor=PROCESSOR) as (_, url), stock_client(url) as client:
        whole = await client.chat.completions.create(**asked)
        chunks = [c async for c in await client.chat.completions.create(**asked, stream=True)]
        blind = await client.chat.completions.create(**{**asked, "messages": [{"role": "user", "content": "What?"}]})
    choice = whole.choices[0]
    assert choice.message.content == tokens.decode(said) and choice.finish_reason == ("stop" if ended else "length")
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    entries = choice.logprobs.content
    assert [e.logprob for e in entries] == pytest.approx(wanted.logprobs[: len(said)], abs=1e-5)
    for entry in entries:  # greedy: the likeliest is the one that was taken
        tops = [t.logprob for t in entry.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        assert entry.top_logprobs[0].bytes == entry.bytes and tops[0] == pytest.approx(entry.logprob, abs=1e-5)
    assert whole.usage.prompt_tokens == len(ids) and whole.usage.completion_tokens == len(wanted.ids)
    assert blind.choices[0].message.content != choice.message.content
    assert whole.system_fingerprint == "version-5"


async def test_a_bad_picture_fails_alone(engine):
    torn = png(64, 64, mark=3)[:-2000]  # its head is whole, so only decoding finds out
    bad = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(torn).decode()}"}}

    async def ask(client, content):
        messages = [{"role": "user", "content": content}]
        return await client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0)

    async with serving(engine, tokenizer("small"), processor=PROCESSOR) as (_, url), stock_client(url) as client:
        good, failed, again = await asyncio.gather(
            ask(client, "Hi."), ask(client, [bad]), ask(client, "Hi."), return_exceptions=True
        )
    assert isinstance(failed, openai.BadRequestError) and failed.code == "invalid_image"
    assert good.choices[0].message.content == again.choices[0].message.content


async def test_many_clients_at_once_are_answered_or_told_to_come_back(engine):
    async def ask(client, number):
        messages = [{"role": "user", "content": f"number {number}"}]
        return await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=1 + number % 5, stream=number % 2 == 0
        )

    async with serving(engine, tokenizer("small"), processor=PROCESSOR, max_open=24) as (service, url):
        async with stock_client(url) as client:
            answers = await asyncio.gather(*(ask(client, n) for n in range(40)), return_exceptions=True)
            refused = [a for a in answers if isinstance(a, openai.RateLimitError)]
            for answer in answers:
                if isinstance(answer, openai.AsyncStream):
                    finishes = [c.choices[0].finish_reason async for c in answer]
                    assert finishes[-1] in ("stop", "length")
                elif not isinstance(answer, openai.RateLimitError):
                    assert answer.choices[0].finish_reason in ("stop", "length")
        assert all(r.response.headers["retry-after"] for r in refused)
        counts = service.answers
        assert counts["chat", "200"] + counts["chat", "429"] == 40 and counts["chat", "200"] >= 24
        assert service.open == 0
        assert engine.stats().running_now == 0


@pytest.mark.slow
def test_the_command(tmp_path):
    """From a folder to an answer and a clean end."""
    config, params = tiny_model()
    tokenizer("small").hf.save_pretrained(tmp_path / "tokenizer")
    hf.export(params, config, tmp_path / "tiny", dtype="float32", tokenizer_from=tmp_path / "tokenizer")
    command = [sys.executable, "-m", "owrl_jax.cli", "serve", str(tmp_path / "tiny"), "--port", "0"]
    options = ["--max-context", "256", "--rows", "1", "--chunk-tokens", "64", "--max-picture-tokens", "16"]
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(jax.config.jax_compilation_cache_dir or tmp_path)
    options += ["--compile-cache", cache]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("owrl serve: http://127.0.0.1:"), line + process.stderr.read()
            assert line.strip().endswith("(no token), model tiny")
            url = line.split()[2]
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                done = client.chat.completions.create(
                    model=client.models.list().data[0].id,
                    messages=[{"role": "user", "content": "Hello"}],
                    max_tokens=3,
                )
            assert done.usage.completion_tokens >= 1
            health = httpx.get(url.removesuffix("/v1") + "/health").json()
            assert health == {"status": "ok", "model": "tiny", "version": 0, "open": 0}
            assert '"id": "tiny"' in json.dumps(httpx.get(f"{url}/models").json())
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
