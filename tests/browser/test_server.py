"""The sandbox behind HTTP: a real server process, real Chromium, a client whose network is bad on purpose."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
import uuid
from pathlib import Path

import httpx
import psutil
import pytest

from owrl_jax.bench._browser_pages import COUNT, Answer, PageServer
from owrl_jax.browser.client import ClientDeadlines, RemoteHost
from owrl_jax.browser.server import ServerConfig
from owrl_jax.outcome import Outcome, Reason
from owrl_jax.serving import is_loopback, read_or_make_token
from tests.browser.pool_world import click, ending, eventually, kill, observed, picture, task

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]


class Server:
    """`owrl browser serve` as its own process."""

    def __init__(self, process: asyncio.subprocess.Process, line: str, log: Path) -> None:
        match = re.search(r"(http://\S+:\d+)", line)
        assert match, line
        self.process, self.line, self.url, self.log = process, line, match[1], log
        self.family = psutil.Process(process.pid)

    def gone(self) -> bool:
        return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in self.children)

    def remember(self) -> None:
        self.children = self.family.children(recursive=True)


@contextlib.asynccontextmanager
async def serving(site_port: int, tmp_path: Path, *options: str):
    log = tmp_path / "server.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "import sys; from owrl_jax.browser.cli import main; sys.exit(main(sys.argv[1:]))",
            *("serve", "--port", "0", "--allow", f"127.0.0.1:{site_port}", "--max-episodes", "2", *options),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        assert line, log.read_text()
        yield Server(process, line, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
async def site():
    async with PageServer() as server:
        server.answers["/counter"] = Answer(
            body=b"<title>counter</title><body style='margin:0'><button style='position:absolute;left:145px;top:20px;"
            b"width:110px;height:40px' onclick=\"fetch('/clicked').then(r=>r.text())\">count</button>"
        )
        server.answers["/clicked"] = Answer(body=b"ok", kind="text/plain")
        yield server


class BadNetwork(httpx.AsyncBaseTransport):
    """Delivers requests, then loses, damages or repeats what comes back, as its script says; afterwards it is well."""

    def __init__(self, *faults: str, path: str = "/step") -> None:
        self.faults, self.path = list(faults), path
        self.inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        fault = self.faults.pop(0) if self.faults and request.url.path.endswith(self.path) else ""
        if fault == "refused":
            raise httpx.ConnectError("refused", request=request)
        if fault == "twice":
            first = asyncio.ensure_future(self.inner.handle_async_request(_copy(request)))
            response = await self.inner.handle_async_request(request)
            await (await first).aread()
            return response
        response = await self.inner.handle_async_request(request)
        if fault == "lost answer":
            await response.aread()
            raise httpx.ReadError("connection reset", request=request)
        if fault == "garbage":
            await response.aread()
            return httpx.Response(200, content=b"<html>proxy says hello")
        if fault == "502":
            await response.aread()
            return httpx.Response(502, content=b"bad gateway")
        return response

    async def aclose(self) -> None:
        await self.inner.aclose()


def _copy(request: httpx.Request) -> httpx.Request:
    return httpx.Request(request.method, request.url, headers=request.headers, content=request.content)


async def test_an_episode_over_the_wire_and_a_clean_end(site, tmp_path):
    async with serving(site.port, tmp_path) as server, RemoteHost(server.url) as host:
        sandbox = host.sandbox()
        first = await sandbox.reset(task(f"{site.url}/light"))
        assert observed(first).active_tab.title == "light 0"
        shot = observed(first).screenshot
        assert shot is not None and (shot.width, shot.height) == (1280, 1000) and shot.data[:4] == b"\x89PNG"
        after = await sandbox.step([click(COUNT)])
        assert [r.status.value for r in after.results] == ["ok"] and picture(after) != picture(first)
        health = await host.health()
        assert health["status"] == "ok" and health["episodes"] == 1 and health["defunct"] == 0
        async with httpx.AsyncClient() as web:
            text = (await web.get(server.url + "/metrics")).text
        assert "owrl_browser_leases_live 1" in text and "owrl_browser_steps_total 1" in text
        sandbox.finish(Outcome(reason=Reason.STEP_BUDGET, detail="max_steps"))
        await sandbox.close()
        await sandbox.close()
        async with httpx.AsyncClient() as web:
            text = (await web.get(server.url + "/metrics")).text
        assert 'owrl_browser_episodes_ended_total{outcome="step_budget/max_steps"} 1' in text
        server.remember()
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(server.process.wait(), 30) == 0
        await eventually(server.gone)
        assert "leases acquired, 1 released" in server.log.read_text()


async def test_a_step_is_done_once_whatever_the_network_does(site, tmp_path):
    async with serving(site.port, tmp_path) as server:
        for fault in ("lost answer", "garbage", "502", "refused", "twice"):
            async with RemoteHost(server.url, transport=BadNetwork(fault)) as host:
                before = site.hits["/clicked"]
                sandbox = host.sandbox()
                observed(await sandbox.reset(task(f"{site.url}/counter")))
                observed(await sandbox.step([click(COUNT)]))
                assert site.hits["/clicked"] == before + 1, fault
                observed(await sandbox.step([click(COUNT)]))
                assert site.hits["/clicked"] == before + 2
                assert host.retries == (0 if fault == "twice" else 1), fault
                await sandbox.close()
        opened, acquired = site.hits["/counter"], 6
        async with RemoteHost(server.url, transport=BadNetwork("lost answer", "garbage", path="/episodes")) as host:
            sandbox = host.sandbox()
            observed(await sandbox.reset(task(f"{site.url}/counter")))
            assert site.hits["/counter"] == opened + 1 and (await host.health())["leases"]["acquired"] == acquired
            await sandbox.close()


async def test_a_dead_server_is_an_outcome_not_an_exception(site, tmp_path):
    async with serving(site.port, tmp_path) as server:
        deadlines = ClientDeadlines(unreachable_s=1.0, close_s=2.0)
        async with RemoteHost(server.url, deadlines=deadlines) as host:
            sandbox = host.sandbox()
            observed(await sandbox.reset(task(f"{site.url}/light")))
            server.remember()
            kill(server.process.pid)
            await server.process.wait()
            began = time.monotonic()
            result = await sandbox.step([click(COUNT)])
            assert ending(result).key == "sandbox_error/transport" and ending(result).retryable
            assert [r.status.value for r in result.results] == ["skipped"]
            await sandbox.close()
            assert time.monotonic() - began < 10
            again = host.sandbox()
            assert ending(await again.reset(task(f"{site.url}/light"))).key == "sandbox_error/transport"
            await again.close()
        await eventually(server.gone, 8)


async def test_a_silent_server_is_given_up_at_the_deadline():
    """A peer that accepts and says nothing."""

    async def silence(reader, writer):
        await reader.read()
        writer.close()

    peer = await asyncio.start_server(silence, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{peer.sockets[0].getsockname()[1]}"
    deadlines = ClientDeadlines(open_s=1.5, attempt_s=0.5, close_s=0.5)
    async with RemoteHost(url, deadlines=deadlines) as host:
        sandbox = host.sandbox()
        began = time.monotonic()
        outcome = ending(await sandbox.reset(task("http://127.0.0.1/")))
        assert outcome.key == "sandbox_error/transport" and 1.0 < time.monotonic() - began < 4
        await sandbox.close()
        assert time.monotonic() - began < 5
    peer.close()


async def test_full_is_said_at_once_and_waiting_helps(site, tmp_path):
    async with serving(site.port, tmp_path, "--max-episodes", "1") as server, RemoteHost(server.url) as host:
        holder = host.sandbox()
        observed(await holder.reset(task(f"{site.url}/light")))
        async with httpx.AsyncClient(base_url=server.url) as web:
            body = {"episode": uuid.uuid4().hex, "task": {"id": "t", "instruction": "x", "start_url": site.url}}
            answer = await web.post("/episodes", json=body)
        assert answer.status_code == 503 and answer.json()["outcome"]["detail"] == "no_capacity"
        assert float(answer.headers["retry-after"]) > 0
        waiter = host.sandbox()
        waiting = asyncio.create_task(waiter.reset(task(f"{site.url}/light")))
        await asyncio.sleep(0.3)
        await holder.close()
        observed(await asyncio.wait_for(waiting, 30))
        await waiter.close()


async def test_a_client_that_dies_gives_its_place_back(site, tmp_path):
    options = ("--max-episodes", "1", "--lease-ttl-s", "2")
    async with serving(site.port, tmp_path, *options) as server, RemoteHost(server.url) as host:
        lively = host.sandbox()
        observed(await lively.reset(task(f"{site.url}/light")))
        await asyncio.sleep(3.0)  # longer than the lease: only the heartbeat keeps it
        observed(await lively.step([click(COUNT)]))
        assert lively._heart is not None
        lively._heart.cancel()  # what SIGKILL to the client would do
        other = host.sandbox()
        observed(await asyncio.wait_for(other.reset(task(f"{site.url}/light")), 20))
        assert ending(await lively.step([click(COUNT)])).key == "sandbox_error/lease_lost"
        await other.close()
        await lively.close()


async def test_the_door(site, tmp_path):
    """Token, forged requests, sizes, nonsense: each refused in its own way, and nothing is opened."""
    secret = tmp_path / "secret"
    async with serving(site.port, tmp_path, "--token-file", str(secret)) as server:
        token = secret.read_text().strip()
        assert oct(secret.stat().st_mode & 0o777) == "0o600" and len(token) >= 32
        assert token not in server.line and token not in " ".join(psutil.Process(server.process.pid).cmdline())
        good = {"authorization": f"Bearer {token}"}
        body = {"episode": "a" * 12, "task": {"id": "t", "instruction": "x", "start_url": site.url}}
        async with httpx.AsyncClient(base_url=server.url) as web:

            async def status(**arguments):
                answer = await web.post("/episodes", **{"json": body, "headers": good, **arguments})
                assert "error" in answer.json()
                return answer.status_code

            assert await status(headers={}) == 401
            assert await status(headers={"authorization": f"Bearer {token}x"}) == 401
            assert await status(headers={"authorization": "Bearer \xff".encode("latin-1")}) == 401
            assert await status(headers={**good, "origin": "http://evil.example"}) == 403
            assert await status(json=None, content=b"{}", headers={**good, "content-type": "text/plain"}) == 415
            assert await status(json={**body, "pad": "x" * (2 << 20)}) == 413
            assert await status(json=None, content=b"{", headers={**good, "content-type": "application/json"}) == 400
            assert await status(json={**body, "episode": "../../x"}) == 400
            assert (
                await status(json={"episode": "a" * 12, "task": {"id": "t", "instruction": " ", "start_url": "x"}})
                == 400
            )
            assert (await web.get("/metrics")).status_code == 401
            assert (await web.get("/health")).json() == {"status": "ok"}, "no details without a token"
            assert (await web.get("/health", headers=good)).json()["leases"]["acquired"] == 0
            assert (await web.get("/nowhere", headers=good)).status_code == 404
            assert (await web.get("/episodes", headers=good)).status_code == 405
        wrong = RemoteHost(server.url, token="not the token of this server")
        outcome = ending(await wrong.sandbox().reset(task(site.url)))
        assert outcome.key == "sandbox_error/transport" and not outcome.retryable and "token" in outcome.message
        await wrong.close()
        async with RemoteHost(server.url, token=token) as host:
            sandbox = host.sandbox()
            observed(await sandbox.reset(task(f"{site.url}/light")))
            await sandbox.close()


@pytest.mark.parametrize("polite", [True, False])
async def test_sigterm_lets_episodes_finish_or_ends_them(site, tmp_path, polite):
    async with serving(site.port, tmp_path, "--drain-s", "20" if polite else "1") as server:
        async with RemoteHost(server.url, deadlines=ClientDeadlines(unreachable_s=1.0)) as host:
            sandbox = host.sandbox()
            observed(await sandbox.reset(task(f"{site.url}/light")))
            server.remember()
            server.process.terminate()
            await asyncio.sleep(0.3)
            assert (await host.health())["status"] == "draining"
            late = host.sandbox()
            assert ending(await late.reset(task(f"{site.url}/light"))).key == "cancelled/shutdown"
            if polite:
                observed(await sandbox.step([click(COUNT)]))
                await sandbox.close()
            else:
                await asyncio.sleep(1.2)
                outcome = ending(await sandbox.step([click(COUNT)]))
                assert outcome.key in ("cancelled/shutdown", "sandbox_error/transport")
        assert await asyncio.wait_for(server.process.wait(), 25) == 0
        await eventually(server.gone)


async def test_a_second_signal_does_not_wait(site, tmp_path):
    async with serving(site.port, tmp_path, "--drain-s", "60") as server, RemoteHost(server.url) as host:
        observed(await host.sandbox().reset(task(f"{site.url}/light")))
        for number in (signal.SIGTERM, signal.SIGINT):
            server.process.send_signal(number)
            await asyncio.sleep(0.2)
        assert await asyncio.wait_for(server.process.wait(), 20) == 0


@pytest.mark.parametrize("case", ["port taken", "bad allow", "open token file"])
async def test_a_server_that_cannot_start_says_why(site, tmp_path, case):
    options = {
        "port taken": ["--port", str(site.port)],
        "bad allow": ["--allow", "nonsense"],
        "open token file": ["--token-file", str(tmp_path / "token")],
    }[case]
    (tmp_path / "token").write_text("a" * 40)
    os.chmod(tmp_path / "token", 0o644)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys; from owrl_jax.browser.cli import main; sys.exit(main(sys.argv[1:]))",
        *("serve", "--port", "0", *options),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    expected = {"port taken": "cannot listen", "bad allow": "host:port", "open token file": "chmod 600"}[case]
    assert process.returncode == 2 and expected in errors.decode() and "Traceback" not in errors.decode()


def test_beyond_loopback_a_token_is_needed(tmp_path):
    assert [is_loopback(h) for h in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(h) for h in ("0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.evil.example")] == [
        False
    ] * 5
    with pytest.raises(ValueError, match="needs a token"):
        ServerConfig(host="0.0.0.0")
    with pytest.raises(ValueError, match="at least 16"):
        ServerConfig(token="short")
    made = read_or_make_token(tmp_path / "deep" / "token")
    assert read_or_make_token(tmp_path / "deep" / "token") == made
    (tmp_path / "deep" / "token").write_text("two words of many characters")
    with pytest.raises(ValueError, match="one word"):
        read_or_make_token(tmp_path / "deep" / "token")
