"""Pages and browsers that die, hang or never come: a typed ending within its time, and nothing else harmed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import pytest_asyncio

from owrl_jax.browser.config import Deadlines, EngineConfig
from owrl_jax.browser.engine import BrowserEngine, BrowserMissing, find_browser
from owrl_jax.browser.process import LaunchError, child_environment
from owrl_jax.browser.sandbox import Sandbox
from owrl_jax.outcome import Owner, Reason
from owrl_jax.types import CallStatus, Task
from tests.browser.sandbox_world import FIRST_OR_CHROMIUM, MOMENT_S, World, box, call, click, world_of

pytestmark = [pytest.mark.browser]
module_loop = pytest.mark.asyncio(loop_scope="module")
SHORT = Deadlines(cdp_s=1.5, call_s=4.0, step_s=9.0, reset_s=20.0, navigation_s=5.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FIRST_OR_CHROMIUM)
async def world(request):
    async with world_of(request.param) as made:
        made.server.page("/calm", f"<button style='{box(100, 100)}' onclick=\"this.textContent='yes'\">b</button>")
        yield made


@module_loop
@pytest.mark.parametrize(
    "script", ["for(;;){}", "setTimeout(()=>{for(;;){}},20)", "while(1)document.title=Math.random()"]
)
async def test_a_script_without_end_is_stopped_or_ends_the_episode(world: World, script):
    """T31."""
    if "title" in script and world.engine.kind == "chromium":
        pytest.skip("full Chromium is flooded as a whole by this one; the pool retires such a browser")
    world.server.page("/endless", f"<button style='{box(100, 100)}' onclick=\"{script}\">b</button>")
    async with world.episode("/calm") as sibling, world.episode("/endless", deadlines=SHORT) as e:
        await e.do(click(110, 110), call("scroll"))
        outcome = e.result.outcome
        if outcome is None:
            assert "without end" in e.result.results[0].feedback and e.observation.screenshot is not None
        else:
            assert outcome.key in ("environment_error/page_frozen", "sandbox_error/step_deadline")
            assert not outcome.trains
        assert e.seconds < SHORT.step_s + 1
        await sibling.click(110, 110)
        assert await sibling.js("document.querySelector('button').textContent") == "yes"
    async with world.episode("/calm") as e:
        assert e.result.outcome is None and e.seconds < MOMENT_S


@module_loop
async def test_a_start_page_that_never_stops_computing(world: World):
    world.server.page("/endless-load", "<h1>words</h1><script>for(;;){}</script>")
    async with world.episode("/endless-load", deadlines=SHORT, start_attempts=1) as e:
        assert e.seconds < SHORT.reset_s + 1
        assert e.result.outcome is None or e.result.outcome.owner is Owner.SITE


@module_loop
async def test_a_crashed_page_is_loaded_again_once(world: World):
    """T37."""
    loads = world.server.hits["/calm"]
    async with world.episode("/calm") as sibling, world.episode("/calm") as e:
        await crash(e)
        await e.do(click(110, 110))
        assert e.result.outcome is None, e.result.outcome
        lines = " ".join(r.feedback for r in e.result.results)
        assert "crash" in lines and e.url.endswith("/calm") and e.seconds < 12.5
        assert world.server.hits["/calm"] == loads + 3
        await e.click(110, 110)
        assert e.ok and await e.js("document.querySelector('button').textContent") == "yes"
        await crash(e)
        await e.do(click(110, 110))
        ended = e.result.outcome
        assert ended is not None and ended.detail == "page_crash" and ended.owner is Owner.SITE
        await sibling.click(110, 110)
        assert sibling.ok and sibling.result.outcome is None
    async with world.episode("/calm") as e:
        assert e.result.outcome is None


async def crash(e) -> None:
    """Kills the renderer of the page in front, as an out-of-memory killer would."""
    tab = e.sandbox.stage.active
    dying = asyncio.ensure_future(tab.cdp.send("Page.crash"))
    until = time.monotonic() + 5
    while not tab.crashed and time.monotonic() < until:  # noqa: ASYNC110 - a test may look again and again
        await asyncio.sleep(0.02)
    assert tab.crashed
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)


@module_loop
async def test_a_frozen_renderer_ends_its_own_episode_only(world: World):
    """Scenario 16: SIGSTOP."""
    async with world.episode("/calm", deadlines=SHORT) as e:
        before = renderers(world.engine)
        async with world.episode(world.other.page("/own", "<h1>own renderer</h1>"), deadlines=SHORT) as victim:
            frozen = renderers(world.engine) - before
            assert frozen
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            try:
                await victim.do(click(100, 100), call("scroll"))
                assert victim.result.outcome.detail in ("page_frozen", "cdp_timeout", "step_deadline")
                assert not victim.result.outcome.trains
                assert victim.seconds < SHORT.step_s + 1
                await e.click(110, 110)
                assert e.ok and e.seconds < MOMENT_S
            finally:
                for pid in frozen:
                    os.kill(pid, signal.SIGCONT)


def pid_of(engine: BrowserEngine) -> int:
    assert engine.pid is not None
    return engine.pid


def renderers(engine: BrowserEngine) -> set[int]:
    found = set()
    for process in psutil.Process(engine.pid).children(recursive=True):
        try:
            if "--type=renderer" in process.cmdline():
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


@module_loop
async def test_one_navigation_per_episode(world: World):
    """C32."""
    world.server.page("/counted", "<h1>counted page with words</h1>")
    async with world.episode("/counted") as e:
        await e.do(call("scroll"), call("wait", seconds=0))
        assert world.server.hits["/counted"] == 1 and e.sandbox.navigations == 1


@module_loop
@pytest.mark.parametrize(
    ("failures", "status", "outcome", "asked"),
    [
        (1, 503, None, 2),
        (2, 500, None, 3),
        (9, 503, "environment_error/http_5xx", 3),
        (9, 404, "environment_error/http_4xx", 1),
        (9, 403, "blocked/forbidden", 1),
        (9, 429, "blocked/rate_limited", 1),
    ],
)
async def test_the_start_page_is_tried_again_where_that_may_help(world: World, failures, status, outcome, asked):
    from tests.browser.pages import Response

    path = f"/flaky-{status}-{failures}"

    async def flaky(request):
        if world.server.hits[path] <= failures:
            return Response("<h1>This does not work at the moment</h1>", status=status)
        return Response("<h1>Here is the page</h1>")

    world.server.route(path, flaky)
    async with world.episode(path, start_backoff_s=0.05) as e:
        assert (e.result.outcome.key if e.result.outcome else None) == outcome
        assert world.server.hits[path] == asked
        assert e.result.outcome is None or e.result.outcome.owner is Owner.SITE
        assert e.seconds < 2 * MOMENT_S


@module_loop
@pytest.mark.parametrize(
    ("url", "outcome"),
    [
        ("http://127.0.0.1:{closed}/", "environment_error/nav_refused"),
        ("http://no-such-host.invalid/", "environment_error/nav_dns"),
        ("{server}/loop-at-start", "environment_error/redirect_loop"),
        ("{server}/hang-up", "environment_error/nav_aborted"),
        ("{server}/silent", "environment_error/nav_timeout"),
        ("file:///etc/hostname", "init_error/bad_task"),
        ("http://192.168.0.1/", "policy_block/private_address"),
        ("not an address", "init_error/bad_task"),
    ],
)
async def test_start_pages_that_cannot_be_opened(world: World, url, outcome):
    from owrl_jax.browser.safety import Safety
    from tests.browser.pages import never, redirect

    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    hang_up = server.sockets[0].getsockname()[1]
    closed = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    free = closed.sockets[0].getsockname()[1]
    closed.close()
    world.server.route("/loop-at-start", redirect("/loop-at-start"))
    world.server.route("/silent", never)
    url = url.format(closed=free, server=world.server.url("").rstrip("/"))
    if url.endswith("/hang-up"):
        url = f"http://127.0.0.1:{hang_up}/"
    safety = Safety.for_local_worlds(
        {("127.0.0.1", p) for p in (free, hang_up, world.server.port)} | {("no-such-host.invalid", 80)}
    )
    quick = Deadlines(cdp_s=1.5, navigation_s=2.0, reset_s=15.0)
    async with world.episode(url, safety=safety, start_backoff_s=0.05, start_attempts=2, deadlines=quick) as e:
        got = e.result.outcome
        assert got is not None and got.key == outcome, got
        assert not got.trains and e.result.observation is None and e.seconds < quick.reset_s
    server.close()


@module_loop
async def test_close_is_idempotent_and_survives_cancellation(world: World):
    sandbox = Sandbox(world.engine, world.config())
    await sandbox.reset(Task(id="t", instruction="x", start_url=world.server.url("/calm")))
    contexts = len(world.engine.browser.contexts)
    closing = asyncio.ensure_future(sandbox.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await sandbox.close()
    await sandbox.close()
    assert len(world.engine.browser.contexts) == contexts - 1
    with pytest.raises(RuntimeError, match="reset"):
        await sandbox.step([call("scroll")])


@module_loop
async def test_a_cancelled_step_leaves_a_sandbox_that_can_be_closed(world: World):
    async with world.episode("/calm") as e:
        step = asyncio.ensure_future(e.sandbox.step([call("wait", seconds=20)]))
        await asyncio.sleep(0.3)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await e.click(110, 110)
        assert e.ok


@module_loop
async def test_the_same_sandbox_over_a_cdp_endpoint(world: World):
    """A remote browser is driven by the same code; here it runs on this machine and is reached by its address."""
    far = BrowserEngine(EngineConfig(egress=False, begin_frame=False, browser=world.engine.kind))
    await far.start()
    port = (far._process.home / "profile" / "DevToolsActivePort").read_text().split()  # type: ignore[union-attr]
    remote = BrowserEngine(EngineConfig(endpoint=f"ws://127.0.0.1:{port[0]}{port[1]}"))
    try:
        await remote.start()
        assert remote.kind == "remote" and remote.pid is None and remote.alive and not remote.begin_frame
        sandbox = Sandbox(remote, world.config())
        first = await sandbox.reset(Task(id="t", instruction="x", start_url=world.server.url("/calm")))
        assert first.outcome is None and first.observation.screen_size == (1280, 1000)
        result = await sandbox.step([click(110, 110)])
        assert "button" in result.results[0].feedback and 'button "yes"' in result.observation.changes
        await sandbox.close()
        await remote.close()
        assert far.alive, "leaving a remote browser does not end it"
    finally:
        await remote.close()
        await far.close()


@pytest.mark.parametrize("when", ["before", "during", "reset"])
async def test_a_killed_browser_is_a_fault_of_the_sandbox(when):
    """Scenario 16: SIGKILL."""
    async with world_of("frames-on-request") as own:
        own.server.page("/calm", f"<button style='{box(100, 100)}'>b</button>")
        sandbox = Sandbox(own.engine, own.config())
        task = Task(id="t", instruction="x", start_url=own.server.url("/calm"))
        start = time.monotonic()
        if when == "reset":
            os.kill(pid_of(own.engine), signal.SIGKILL)
            await asyncio.sleep(0.2)
            result = await sandbox.reset(task)
        else:
            await sandbox.reset(task)
            start = time.monotonic()
            work = asyncio.ensure_future(sandbox.step([call("wait", seconds=1), call("scroll"), click(110, 110)]))
            await asyncio.sleep(0.5 if when == "during" else 0)
            os.kill(pid_of(own.engine), signal.SIGKILL)
            result = await work
            assert len(result.results) == 3 and result.results[-1].status is not CallStatus.OK
        assert result.outcome.key == "sandbox_error/browser_gone" and result.outcome.owner is Owner.SANDBOX
        assert result.outcome.retryable and time.monotonic() - start < 12 and not own.engine.alive
        await sandbox.close()
        pgid = own.engine.pgid
        await own.engine.close()
        assert not living(pgid)


def living(pgid: int | None) -> list[int]:
    found = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == pgid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except (OSError, psutil.Error):
            continue
    return found


async def test_a_browser_that_stops_answering_ends_the_step_in_time():
    """Scenario 17, the browser itself frozen: every await has a deadline."""
    async with world_of("frames-on-request") as own:
        own.server.page("/calm", "<h1>calm words</h1>")
        async with own.episode("/calm", deadlines=SHORT) as e:
            os.kill(pid_of(own.engine), signal.SIGSTOP)
            try:
                await e.do(click(110, 110), call("scroll"))
            finally:
                os.kill(pid_of(own.engine), signal.SIGCONT)
            assert e.result.outcome.reason in (Reason.SANDBOX_ERROR, Reason.ENVIRONMENT_ERROR)
            assert not e.result.outcome.trains and e.seconds < SHORT.step_s + 1


async def test_a_silent_endpoint_is_given_up_on():
    server = await asyncio.start_server(lambda r, w: asyncio.sleep(60), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    engine = BrowserEngine(EngineConfig(endpoint=f"ws://127.0.0.1:{port}/devtools/browser/x", launch_s=2.0))
    start = time.monotonic()
    with pytest.raises(Exception, match=r"not ready|imeout"):
        await engine.start()
    assert time.monotonic() - start < 8
    server.close()


async def test_a_missing_or_broken_browser_says_what_to_do(tmp_path):
    with pytest.raises(BrowserMissing, match="owrl browser install"):
        find_browser(str(tmp_path / "nothing"))
    broken = tmp_path / "headless_shell"
    broken.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo 'HeadlessShell 1.2.3' && exit 0\necho no display >&2; exit 3\n"
    )
    broken.chmod(0o755)
    engine = BrowserEngine(EngineConfig(browser=str(broken), egress=False))
    with pytest.raises(LaunchError, match="no display"):
        await engine.start()
    await engine.close()
    silent = tmp_path / "silent_headless"
    silent.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo '1.2.3' && exit 0\nsleep 60\n")
    silent.chmod(0o755)
    engine = BrowserEngine(EngineConfig(browser=str(silent), egress=False, launch_s=1.0))
    start = time.monotonic()
    with pytest.raises(LaunchError, match="not ready within"):
        await engine.start()
    assert time.monotonic() - start < 5 and not living(engine.pgid)


async def test_both_kinds_are_found_and_started_in_a_group_of_their_own(tmp_path):
    assert find_browser("headless_shell").kind == "headless_shell" and find_browser("chromium").kind == "chromium"
    assert find_browser().kind == "headless_shell"
    engine = BrowserEngine(EngineConfig(tag="owrl-test-group"))
    await engine.start()
    try:
        assert engine.pgid == engine.pid and os.getpgid(pid_of(engine)) != os.getpgid(0)
        assert engine.rss_mib() > 50 and engine.alive
        assert any("--owrl-tag=owrl-test-group" in a for a in psutil.Process(engine.pid).cmdline())
        members = living(engine.pgid)
        assert len(members) >= 3
    finally:
        await asyncio.gather(engine.close(), engine.close())
    assert not living(engine.pgid) and not engine.alive
    with pytest.raises(RuntimeError, match="once"):
        await engine.start()


async def test_the_environment_of_the_browser_is_explicit(monkeypatch, tmp_path):
    """C7: software GL by name, nothing of ours leaks. A stand-in writes down what it is started with."""
    monkeypatch.setenv("SECRET_TOKEN", "do-not-leak")
    monkeypatch.setenv("LD_PRELOAD", "")
    stand_in, seen = tmp_path / "headless_shell", tmp_path / "environment"
    stand_in.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1.2.3 && exit 0\n/usr/bin/env > {seen}\n')
    stand_in.chmod(0o755)
    with pytest.raises(LaunchError):
        await BrowserEngine(EngineConfig(browser=str(stand_in), egress=False)).start()
    pairs = dict(line.split("=", 1) for line in seen.read_text().splitlines())
    assert "SECRET_TOKEN" not in pairs and "LD_PRELOAD" not in pairs and pairs["LIBGL_ALWAYS_SOFTWARE"] == "1"
    assert set(pairs) - {"PWD", "_", "SHLVL", "OLDPWD"} == set(child_environment(os.environ, tmp_path))


def test_no_browser_survives_its_owner(tmp_path):
    """T30: the owner is killed, and the browser ends by itself."""
    script = textwrap.dedent(
        """
        import asyncio
        from owrl_jax.browser.engine import BrowserEngine
        async def main():
            engine = BrowserEngine()
            await engine.start()
            print(engine.pgid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
        """
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pgid = int(owner.stdout.readline())
    assert living(pgid)
    owner.kill()
    owner.wait()
    until = time.monotonic() + 5
    while living(pgid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not living(pgid)
