"""The chaos matrix: {launch, first goto, mid-step, screenshot, release} x {hang, exception, kill, 5xx, garbage}.

One table: for every cell what the episode must end in (or that it must go on), whose doing it is, whether a fresh
attempt may help, and how long it may take. Faults are made by real means where there are any: programs in place of
the browser, a page server that misbehaves, signals to the browser's processes, a proxy that damages answers. Where
there are none, one method of the sandbox is replaced for one call; those cells say `seam`. HTTP has no part in a
local capture or release, so their 5xx and garbage cells run through the HTTP server and client of the remote sandbox,
where they do exist.

After every cell: the lease is back, the next episode on the same pool works (where a browser can start at all), and no
process is left.
"""

import asyncio
import contextlib
import dataclasses
import os
import time
from pathlib import Path

import httpx
import pytest

from owrl_jax.bench._browser_pages import COUNT, LINK, Answer, PageServer
from owrl_jax.browser.client import RemoteHost
from owrl_jax.browser.config import Deadlines, EngineConfig
from owrl_jax.browser.episodes import EpisodeService
from owrl_jax.browser.server import ServerConfig, build_app
from owrl_jax.outcome import Outcome, Owner, Reason
from owrl_jax.pool import LeasedSandbox, NoSandbox, SandboxPool
from owrl_jax.types import StepResult
from tests.browser.pool_world import click, eventually, freeze, fresh_tag, kill, local_sandbox, observed, pool_on, task

pytestmark = pytest.mark.browser

FAST = Deadlines(cdp_s=2.0, call_s=3.0, step_s=6.0, navigation_s=2.0, reset_s=6.0, close_s=2.0)
CLOSED_PORT = 1027  # nobody listens there; refused at once
ENDED = Outcome(reason=Reason.STEP_BUDGET, detail="max_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One fault and what must come of it. `key` is `reason/detail`; None means that the episode goes on."""

    phase: str
    fault: str
    key: str | None
    owner: Owner | None
    retry: bool | None
    seconds: float
    note: str = ""

    def __str__(self) -> str:
        return f"{self.phase}-{self.fault}"


SB, SITE = Owner.SANDBOX, Owner.SITE


def cell(
    phase: str, fault: str, key: str | None, owner: Owner | None, retry: bool | None, seconds: float, note: str = ""
):
    return Cell(phase=phase, fault=fault, key=key, owner=owner, retry=retry, seconds=seconds, note=note)


# fmt: off
MATRIX = (
    cell("launch", "hang", "init_error/launch_failed", SB, True, 8, "a program that never opens its port"),
    cell("launch", "exception", "init_error/browser_missing", SB, False, 3, "a file that is no program"),
    cell("launch", "kill", "init_error/launch_failed", SB, True, 5, "a program that kills itself"),
    cell("launch", "5xx", "init_error/launch_failed", SB, True, 5, "a browser service that answers 503"),
    cell("launch", "garbage", "init_error/launch_failed", SB, True, 8, "a port on which nonsense is spoken"),

    cell("goto", "hang", "environment_error/nav_timeout", SITE, True, 8, "a site that never answers"),
    cell("goto", "exception", "environment_error/nav_refused", SITE, True, 8, "nobody listens"),
    cell("goto", "kill", "sandbox_error/browser_gone", SB, True, 6, "SIGKILL to the browser while it loads"),
    cell("goto", "5xx", "environment_error/http_5xx", SITE, True, 8, "503 for every try"),
    cell("goto", "garbage", "environment_error/bad_response", SITE, True, 8, "bytes that are not HTTP"),

    cell("step", "hang", "sandbox_error/step_deadline", SB, True, 16, "SIGSTOP to the whole browser"),
    cell("step", "exception", "sandbox_error/unknown", SB, True, 3, "seam: the sandbox raises what nobody mapped"),
    cell("step", "kill", "sandbox_error/browser_gone", SB, True, 4, "SIGKILL to the browser while a page loads"),
    cell("step", "5xx", "environment_error/http_5xx", SITE, True, 6, "a link to a page of status 500"),
    cell("step", "garbage", None, None, None, 6, "a link to nonsense: said in the feedback"),

    cell("capture", "hang", None, None, None, 8, "seam: the first way hangs; the next one takes the picture"),
    cell("capture", "exception", None, None, None, 4, "seam: the first way fails; the next one takes the picture"),
    cell("capture", "kill", "sandbox_error/browser_gone", SB, True, 6, "SIGKILL just before the picture"),
    cell("capture", "5xx", None, None, None, 6, "remote: 502 for the picture, asked for again"),
    cell("capture", "garbage", None, None, None, 6, "remote: other bytes than named, asked for again"),

    cell("release", "hang", ENDED.key, Owner.POLICY, False, 12, "SIGSTOP: the context cannot close"),
    cell("release", "exception", ENDED.key, Owner.POLICY, False, 4, "seam: closing raises; the browser drains"),
    cell("release", "kill", ENDED.key, Owner.POLICY, False, 5, "SIGKILL just before"),
    cell("release", "5xx", ENDED.key, Owner.POLICY, False, 5, "remote: 502 for DELETE, asked for again"),
    cell("release", "garbage", ENDED.key, Owner.POLICY, False, 5, "remote: nonsense for DELETE, asked for again"),
)
# fmt: on


def test_the_matrix_is_complete():
    phases, faults = ("launch", "goto", "step", "capture", "release"), ("hang", "exception", "kill", "5xx", "garbage")
    assert {(c.phase, c.fault) for c in MATRIX} == {(p, f) for p in phases for f in faults} and len(MATRIX) == 25


@pytest.fixture
async def site():
    async with PageServer() as server:
        server.answers["/500"] = Answer(status=500, body=b"<title>broken</title><h1>Internal error</h1>" * 40)
        server.answers["/503"] = Answer(status=503, body=b"<title>down</title><h1>Service unavailable</h1>")
        server.answers["/garbage"] = Answer(raw=b"\x00\x01 this is not HTTP \xff\r\n\r\n")
        for name in ("500", "garbage", "hang"):
            server.answers[f"/to-{name}"] = Answer(
                body=f"<title>door</title><body style='margin:0'><a href='/{name}' style='position:absolute;left:285px;"
                f"top:20px;width:110px;height:40px'>go</a><p style='margin-top:90px'>{'text ' * 60}".encode()
            )
        yield server


@pytest.mark.parametrize("case", MATRIX, ids=str)
async def test_cell(case: Cell, site: PageServer, tmp_path: Path, monkeypatch):
    began = time.monotonic()
    run = {"launch": launch, "goto": goto, "step": step, "capture": capture, "release": release}[case.phase]
    outcome = await run(case, site, tmp_path, monkeypatch)
    seconds = time.monotonic() - began
    if case.key is None:
        assert outcome is None, outcome
    else:
        assert outcome is not None and outcome.key == case.key, outcome
        assert (outcome.owner, outcome.retryable) == (case.owner, case.retry)
    assert seconds < case.seconds + 4.0, f"{seconds:.1f} s with starting and ending the pool"


# How each row is made. Every function returns the outcome of the one episode, or None if it went on.


@contextlib.asynccontextmanager
async def chaos_pool(site: PageServer, **options):
    sandbox = local_sandbox(site.port, CLOSED_PORT, deadlines=FAST, start_attempts=1)
    async with pool_on(site.port, sandbox=sandbox, max_episodes=1, release_deadline_s=3.0, **options) as pool:
        yield pool


async def works(pool: SandboxPool, site: PageServer) -> None:
    """The next episode on the same pool is fine."""
    async with pool.episode(wait_s=20) as sandbox:
        observed(await sandbox.reset(task(f"{site.url}/light")))


def pid_of(pool: SandboxPool, sandbox: LeasedSandbox) -> int:
    pid = pool.engines()[sandbox.lease.generation].pid
    assert pid is not None
    return pid


async def launch(case: Cell, site: PageServer, tmp_path: Path, monkeypatch) -> Outcome:
    tag = fresh_tag()
    program = tmp_path / "headless_shell"
    say_version = 'case "$*" in *--version*) echo "HeadlessChrome 150.0.1"; exit 0;; esac\n'
    find_profile = 'for a; do case "$a" in --user-data-dir=*) p="${a#*=}";; esac; done; mkdir -p "$p"\n'
    body = {
        "hang": say_version + "exec sleep 60",
        "exception": None,
        "kill": say_version + "kill -9 $$",
        "garbage": say_version
        + find_profile
        + f'printf "{site.port}\\n/garbage\\n" > "$p/DevToolsActivePort"\nexec sleep 60',
    }
    config = EngineConfig(browser=str(program), tag=tag, launch_s=3.0)
    if case.fault == "5xx":
        site.answers["/json/version/"] = site.answers["/json/version"] = Answer(status=503, body=b"busy")
        config = EngineConfig(endpoint=site.url, tag=tag, launch_s=3.0)
    else:
        text = body[case.fault]
        program.write_text("garbage" if text is None else "#!/bin/sh\n" + text + "\n")
        os.chmod(program, 0o755)
    async with chaos_pool(site, engine=config, launch_attempts=1) as pool:
        with pytest.raises(NoSandbox) as refused:
            await pool.acquire(wait_s=20)
        return refused.value.outcome


async def goto(case: Cell, site: PageServer, tmp_path: Path, monkeypatch) -> Outcome | None:
    url = {
        "hang": f"{site.url}/hang",
        "exception": f"http://127.0.0.1:{CLOSED_PORT}/",
        "kill": f"{site.url}/hang",
        "5xx": f"{site.url}/503",
        "garbage": f"{site.url}/garbage",
    }[case.fault]
    async with chaos_pool(site) as pool:
        async with pool.episode() as sandbox:
            opening = asyncio.create_task(sandbox.reset(task(url)))
            if case.fault == "kill":
                while not site.hits["/hang"]:  # noqa: ASYNC110 - the server has no event for it
                    await asyncio.sleep(0.02)
                kill(pid_of(pool, sandbox))
            outcome = (await opening).outcome
        await works(pool, site)
    return outcome


async def step(case: Cell, site: PageServer, tmp_path: Path, monkeypatch) -> Outcome | None:
    async with chaos_pool(site) as pool:
        async with pool.episode() as sandbox:
            door = {"5xx": "/to-500", "garbage": "/to-garbage", "kill": "/to-hang"}.get(case.fault, "/light")
            observed(await sandbox.reset(task(site.url + door)))
            calls = [click(LINK if door.startswith("/to") else COUNT)]
            if case.fault == "hang":
                freeze(pool.engines()[sandbox.lease.generation].pgid)
            elif case.fault == "exception":
                monkeypatch.setattr(sandbox.inner, "step", _raise)
            running = asyncio.create_task(sandbox.step(calls))
            if case.fault == "kill":
                while not site.hits["/hang"]:  # noqa: ASYNC110 - the server has no event for it
                    await asyncio.sleep(0.02)
                kill(pid_of(pool, sandbox))
            result = await running
            assert len(result.results) == 1, "one result per call, whatever happened"
            outcome = result.outcome
            if case.fault == "garbage":
                assert "could not be opened" in result.results[0].feedback, result.results[0].feedback
            if outcome is None:  # and the agent can go on
                observed(await sandbox.step([click(COUNT)]))
        await works(pool, site)
    return outcome


async def capture(case: Cell, site: PageServer, tmp_path: Path, monkeypatch) -> Outcome | None:
    if case.fault in ("5xx", "garbage"):
        return await remote(case, site, "/screenshots/")
    from owrl_jax.browser.faults import DeadlineExceeded
    from owrl_jax.browser.tabs import Tab

    async with chaos_pool(site) as pool:
        async with pool.episode() as sandbox:
            observed(await sandbox.reset(task(f"{site.url}/light")))
            send, spent = Tab.send, []

            async def first_picture(tab, method, params=None, timeout_s=None):
                wanted = method == "Page.captureScreenshot" or "screenshot" in (params or {})
                if wanted and not spent:
                    spent.append(1)
                    if case.fault == "hang":
                        await asyncio.sleep(timeout_s or FAST.cdp_s)
                        raise DeadlineExceeded(method, timeout_s or FAST.cdp_s)
                    if case.fault == "exception":
                        raise RuntimeError("no picture")
                    kill(pid_of(pool, sandbox))
                return await send(tab, method, params, timeout_s)

            monkeypatch.setattr(Tab, "send", first_picture)
            result = await sandbox.step([click(COUNT)])
            assert spent, "the seam was used"
            if case.key is None:
                shot = observed(result).screenshot
                assert shot is not None and not shot.stale, "a fresh picture, by another way"
            outcome = result.outcome
        monkeypatch.undo()
        await works(pool, site)
    return outcome


async def release(case: Cell, site: PageServer, tmp_path: Path, monkeypatch) -> Outcome | None:
    if case.fault in ("5xx", "garbage"):
        return await remote(case, site, "DELETE")
    async with chaos_pool(site) as pool:
        sandbox = await pool.acquire()
        observed(await sandbox.reset(task(f"{site.url}/light")))
        sandbox.finish(ENDED)
        if case.fault == "hang":
            freeze(pool.engines()[sandbox.lease.generation].pgid)
        elif case.fault == "kill":
            kill(pid_of(pool, sandbox))
        else:
            close = sandbox.inner.close

            async def close_and_raise():
                await close()
                raise RuntimeError("closing failed")

            monkeypatch.setattr(sandbox.inner, "close", close_and_raise)
        generation = sandbox.lease.generation
        await sandbox.close()
        assert sandbox.released and pool.audit().live == 0
        await works(pool, site)
        await eventually(lambda: generation not in pool.engines(), 10)  # the browser that failed is not used again
        return sandbox.outcome


async def _raise(calls):
    raise RuntimeError("nobody mapped this")


class Damaging(httpx.AsyncBaseTransport):
    """The server's own app in this process; the first answer to `what` is replaced on its way."""

    def __init__(self, app, fault: str, what: str) -> None:
        self.inner, self.fault, self.what, self.spent = httpx.ASGITransport(app), fault, what, False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self.inner.handle_async_request(request)
        if self.spent or (self.what not in request.url.path and self.what != request.method):
            return response
        await response.aread()
        self.spent = True
        return httpx.Response(502 if self.fault == "5xx" else 200, content=b"\x00 nonsense")


async def remote(case: Cell, site: PageServer, what: str) -> Outcome | None:
    async with chaos_pool(site) as pool:
        service = EpisodeService(pool)
        app = build_app(service, ServerConfig(), health=dict, metrics=str)
        network = Damaging(app, case.fault, what)
        async with RemoteHost("http://127.0.0.1", transport=network) as host:
            sandbox = host.sandbox()
            observed(await sandbox.reset(task(f"{site.url}/light")))
            result: StepResult = await sandbox.step([click(COUNT)])
            observed(result)
            sandbox.finish(ENDED)
            await sandbox.close()
            assert network.spent and host.retries == 1
            assert pool.audit().live == 0 and pool.outcomes() == {ENDED.key: 1}
            return sandbox.outcome if what == "DELETE" else result.outcome
