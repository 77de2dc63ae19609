"""The world server over real sockets: names, cookies, isolation, faults on the wire; and what must not be imported."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import httpx
import pytest

from owrl_jax.types import VerdictValue
from owrl_jax.worlds import WorldServer, make_task, miniwob
from owrl_jax.worlds.faults import Faults


def _client() -> httpx.AsyncClient:
    """Names under .localhost are loopback for browsers; a plain client is told so here."""
    transport = httpx.AsyncHTTPTransport()

    class ToLoopback(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            there = request.url.copy_with(host="127.0.0.1")  # the Host header stays
            moved = httpx.Request(request.method, there, headers=request.headers, stream=request.stream)
            moved.extensions = request.extensions
            return await transport.handle_async_request(moved)

    return httpx.AsyncClient(transport=ToLoopback(), follow_redirects=True, trust_env=False)


async def test_visitors_have_their_own_state_behind_one_address() -> None:
    async with WorldServer() as worlds, _client() as one, _client() as two:
        task = make_task("shop", "wish", 0)
        a, b = await worlds.open(task), await worlds.open(task)
        assert a.start_url != b.start_url
        first, second = await one.get(a.start_url), await two.get(b.start_url)
        assert first.content == second.content, "siblings see the same bytes"
        assert str(first.url) == str(second.url), "and the same address"
        assert a.key not in first.text
        sku = next(iter(a.task.metadata and a.episode.case.goal.changes)).removeprefix("wish/")  # type: ignore[attr-defined]
        page = await one.post(f"{worlds.base_url('shop')}/wish/{sku}")
        assert "Remove from wishlist" in page.text
        assert "Nothing saved yet" in (await two.get(f"{worlds.base_url('shop')}/wishlist")).text
        assert worlds.verdict(a.key, "Done.").value is VerdictValue.SUCCESS
        assert b.verdict("Done.").value is VerdictValue.FAILURE


async def test_strangers_and_wrong_names_get_nothing() -> None:
    async with WorldServer() as worlds, _client() as client:
        visit = await worlds.open(make_task("shop", "price", 0))
        root = worlds.base_url("shop")
        assert (await client.get(root)).status_code == 404
        assert (await client.get(f"{root}/_e/0123456789abcdef")).status_code == 404
        assert (await client.get(f"{worlds.base_url('desk')}/_e/{visit.key}")).status_code == 404
        assert (await client.get(visit.start_url)).status_code == 200
        worlds.forget(visit.key)
        worlds.forget(visit.key)
        assert (await client.get(root)).status_code == 404
        with pytest.raises(KeyError):
            worlds.verdict(visit.key, None)
        with pytest.raises(ValueError, match="local world"):
            await worlds.open(make_task("shop", "price", 0).__class__(id="x", instruction="x", start_url="http://x"))


async def test_only_loopback_is_listened_on_and_the_exception_covers_every_site() -> None:
    from owrl_jax.browser.policy import UrlPolicy

    async with WorldServer() as worlds:
        assert worlds._server is not None
        assert worlds._server.sockets[0].getsockname()[0] == "127.0.0.1"
        policy = UrlPolicy(exceptions=worlds.exceptions)
        assert policy.check(worlds.base_url("shop") + "/cart") is None
        assert policy.check(f"http://shop.localhost:{worlds.port + 1}/") is not None
        assert policy.check(f"http://127.0.0.1:{worlds.port}/") is not None


async def test_faults_reach_the_wire() -> None:
    async with WorldServer() as worlds, _client() as client:
        faults = Faults(slow_ms=150, rate_limit_at=2, retry_after_s=9, broken_font=True)
        visit = await worlds.open(make_task("shop", "price", 0, faults=faults))
        loop = asyncio.get_running_loop()
        began = loop.time()
        await client.get(visit.start_url)
        assert loop.time() - began >= 0.15
        limited = await client.get(worlds.base_url("shop"))
        assert limited.status_code == 429
        assert limited.headers["retry-after"] == "9"
        with pytest.raises(httpx.ReadTimeout):
            await client.get(f"{worlds.base_url('shop')}/_broken.woff2", timeout=0.3)


@pytest.mark.parametrize(
    "garbage", [b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"X" * 70_000, b""]
)
async def test_garbage_closes_the_connection_and_nothing_else(garbage: bytes) -> None:
    async with WorldServer() as worlds, _client() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", worlds.port)
        writer.write(garbage)
        if not garbage:
            writer.close()
        else:
            async with asyncio.timeout(2):
                assert await reader.read() == b""
            writer.close()
        visit = await worlds.open(make_task("shop", "price", 0))
        assert (await client.get(visit.start_url)).status_code == 200


async def test_closing_ends_hanging_answers() -> None:
    worlds = WorldServer()
    await worlds.start()
    async with _client() as client:
        visit = await worlds.open(make_task("shop", "price", 0, faults=Faults(broken_font=True)))
        await client.get(visit.start_url)
        hanging = asyncio.ensure_future(client.get(f"{worlds.base_url('shop')}/_broken.woff2", timeout=30))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(2):
            await worlds.close()
            await worlds.close()
        with pytest.raises(httpx.HTTPError):
            await hanging
    with pytest.raises(RuntimeError, match="not running"):
        _ = worlds.port


async def test_miniwob_pages_are_served_and_nothing_beside_them() -> None:
    async with WorldServer() as worlds, _client() as client:
        visit = await worlds.open(make_task("miniwob", "click-button", 3))
        page = await client.get(visit.start_url)
        root = worlds.base_url("miniwob")
        assert page.status_code == 200
        assert 'Math.seedrandom("3")' in page.text
        assert (await client.get(f"{root}/core/core.js")).status_code == 200
        for path in ("/../__init__.py", "/%2e%2e/__init__.py", "/core/%2e%2e/%2e%2e/environment.py", "/core"):
            assert (await client.get(root + path)).status_code == 404
        assert visit.verdict("Done.").value is VerdictValue.FAILURE
        await client.post(f"{root}/_wob", data={"event": "start", "instruction": "Click it."})
        await client.post(f"{root}/_wob", data={"event": "end", "reward": "-1"})
        await client.post(f"{root}/_wob", data={"event": "end", "reward": "1"})
        assert visit.instruction == "Click it."
        assert visit.verdict(None).value is VerdictValue.FAILURE, "the first ending counts"


def test_miniwob_offers_a_hundred_tasks() -> None:
    steady = [t for t in miniwob.tasks() if t not in miniwob.NON_DETERMINISTIC]
    assert len(steady) >= 100
    assert set(miniwob.tasks()) >= miniwob.NON_DETERMINISTIC
    task = make_task("miniwob", "click-pie", 0)
    assert task.metadata["deterministic"] is False
    with pytest.raises(KeyError, match="worlds list"):
        make_task("miniwob", "click-nothing", 0)


def test_worlds_need_neither_jax_nor_a_browser() -> None:
    code = (
        "import sys\n"
        "for name in ('jax', 'jaxlib', 'flax', 'torch', 'playwright', 'transformers', 'miniwob'):\n"
        "    sys.modules[name] = None\n"
        "from owrl_jax.worlds import registry, cli, trial\n"
        "from owrl_jax.worlds.driver import Driver\n"
        "e = registry.open_episode(registry.make_task('shop', 'wish', 0)); d = Driver(e); d.play(*e.case.moves)\n"
        "assert e.verdict(d.said).value == 'success'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
