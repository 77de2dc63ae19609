"""No page and no spelling reaches a private address: a secret server on loopback must count zero hits.

Every way a page can cause a request is tried in real Chromium, in both engines, through the egress proxy alone: no
in-page guard, no route handler, service workers allowed. Each case also proves that it was really tried, by the refusal
that the proxy recorded or by the page's own report; a case that never fires proves nothing.

One browser serves all cases of an engine. Each case has a context and a gate of its own, and so its own events: what an
earlier one left behind cannot speak for it. Popups of refused pages have been seen not to close in the headless shell;
no closing is waited for longer than `CLOSE_S`, and what is left ends with the browser, which is killed if need be.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from owrl_jax.browser.egress import EGRESS_FLAGS, EgressEvent, EgressProxy
from owrl_jax.browser.policy import UrlPolicy
from owrl_jax.browser.reach import Reach
from tests.browser.egress_world import PUBLIC, Secret, World, within

ENGINES = [p for p in ("/usr/bin/chromium-headless-shell", "/usr/bin/chromium") if Path(p).exists()]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not ENGINES, reason="no Chromium installed"),
    pytest.mark.asyncio(loop_scope="module"),
]
CLOSE_S = 5.0


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES, ids=lambda p: Path(p).name)
async def rig(request) -> AsyncIterator[Rig]:
    async with Rig(request.param) as rig:
        yield rig


class Rig:
    """One browser, one proxy, one attacker's world, one secret."""

    def __init__(self, engine: str):
        self.engine = engine
        self.tag = f"--owrl-tag=ssrf-{uuid.uuid4().hex[:12]}"

    async def __aenter__(self) -> Rig:
        from playwright.async_api import async_playwright

        self.secret = await Secret().start()
        self.world = await World().start()
        self.world.names["attack.test"] = [PUBLIC]
        self.world.names["secret.test"] = ["127.0.0.1"]  # a public name for a private address
        self.world.names["secret6.test"] = ["::1"]
        self.world.names["both.test"] = [PUBLIC, "127.0.0.1"]
        reach = Reach(resolve=self.world.resolve, dial=self.world.dial, dns_ttl_s=0)
        self.proxy = await EgressProxy(reach=reach).__aenter__()
        self._playwright = await async_playwright().start()
        flags = ["--no-sandbox", self.tag, *EGRESS_FLAGS, *self.proxy.launch_flags()]
        # What would stop some of these requests before they reach the proxy is switched off: the proxy is under test.
        flags += ["--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests"]
        self.browser = await self._playwright.chromium.launch(executable_path=self.engine, args=flags)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await _bounded(self.browser.close())
        for process in psutil.process_iter(["cmdline"]):
            if self.tag in (process.info["cmdline"] or ()):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        await _bounded(self._playwright.stop())
        await self.proxy.stop()
        await self.world.stop()
        await self.secret.stop()
        assert self.secret.hits == []

    @contextlib.asynccontextmanager
    async def attack(self, policy: UrlPolicy | None = None, **options: Any) -> AsyncIterator[Attack]:
        """A fresh context behind a fresh gate. At the end the secret must not have been reached."""
        gate = self.proxy.open(episode=uuid.uuid4().hex[:8], policy=policy or UrlPolicy())
        context = await self.browser.new_context(
            proxy=gate.playwright_proxy(), service_workers="allow", ignore_https_errors=True, **options
        )
        try:
            page = await context.new_page()
            await gate.sign_in(context, page, timeout_s=20)
            yield Attack(self, gate, context, page)
            assert self.secret.hits == []
        finally:
            await _bounded(context.close())
            await gate.close()


class Attack:
    """One case: its page, and what the proxy recorded of it."""

    def __init__(self, rig: Rig, gate: Any, context: Any, page: Any) -> None:
        self.rig, self.gate, self.context, self.page = rig, gate, context, page
        self.events: list[EgressEvent] = []
        gate.subscribe(self.events.append)

    def refused(self) -> list[EgressEvent]:
        return [e for e in self.events if e.verdict == "refused" and e.port == self.rig.secret.port]

    async def until_refused(self, seconds: float = 20.0) -> bool:
        for _ in range(int(seconds / 0.02)):
            if self.refused():
                return True
            await asyncio.sleep(0.02)
        return False

    async def goto(self, url: str, page: Any = None) -> str:
        """The text that the page shows afterwards, or Chromium's error."""
        from playwright.async_api import Error

        page = page or self.page
        try:
            await page.goto(url, wait_until="load", timeout=20_000)
            return await page.content()
        except Error as error:
            return str(error)


async def _bounded(closing: Any) -> None:
    """Waits for something to close, but not for ever; what does not is told and left to the browser's end."""
    task = asyncio.ensure_future(closing)
    done, _ = await asyncio.wait([task], timeout=CLOSE_S)
    if not done:
        task.cancel()
        print("did not close in time:", closing)
    elif task.exception() is not None:
        print("closing failed:", task.exception())


SPELLINGS = [
    "127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001", "0", "0.0.0.0",
    "127.0.0.1.", "%31%32%37.0.0.1", "①②⑦.⓪.⓪.①", "127。0。0。1", "１２７.0.0.1", "user:pw@127.0.0.1",
    "127.255.255.254", "localhost", "LOCALHOST.", "a.localhost", "[::1]", "[::]", "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]", "[0:0:0:0:0:0:0:1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "secret.test", "secret6.test",
    "both.test",
]  # fmt: skip

# name -> page of the attacker; {s} is http://<private host>:<port>, {w} the same for WebSockets, {hp} host:port.
PAGES = {
    "meta refresh": "<meta http-equiv=refresh content='0;url={s}/m'>",
    "location": "<script>location = '{s}/l'</script>",
    "iframe": "<iframe src='{s}/f'></iframe>",
    "srcdoc iframe": "<iframe srcdoc=\"<img src='{s}/sd'>\"></iframe>",
    "image": "<img src='{s}/i'>",
    "script": "<script src='{s}/s'></script>",
    "stylesheet": "<link rel=stylesheet href='{s}/c'>",
    "css url": "<style>body{{background:url({s}/bg)}}</style>x",
    "font": "<style>@font-face{{font-family:q;src:url({s}/q.woff)}}p{{font-family:q}}</style><p>text",
    "object": "<object data='{s}/o'></object><embed src='{s}/e'>",
    "video": "<video src='{s}/v' autoplay></video><audio src='{s}/a' autoplay></audio>",
    "fetch": "<script>fetch('{s}/x', {{mode:'no-cors'}})</script>",
    "xhr": "<script>x=new XMLHttpRequest();x.open('GET','{s}/x');x.send()</script>",
    "websocket": "<script>new WebSocket('{w}/ws')</script>",
    "eventsource": "<script>new EventSource('{s}/es')</script>",
    "beacon": "<script>navigator.sendBeacon('{s}/b', 'x')</script>",
    "form post": "<form id=f method=post action='{s}/p'><input name=a value=b></form><script>f.submit()</script>",
    "popup": "<script>window.open('{s}/pop')</script>",
    "prefetch": "<link rel=prefetch href='{s}/pf'><link rel=preload as=image href='{s}/pl'>",
    "module import": "<script type=module>import('{s}/mod.js')</script>",
    "worker fetch": '<script>new Worker(\'data:text/javascript,fetch("{s}/wk",{{mode:"no-cors"}})\')</script>',
    "data iframe": "<iframe src=\"data:text/html,<img src='{s}/di'>\"></iframe>",
    "ping": "<a id=a href='#x' ping='{s}/ping'>x</a><script>a.click()</script>",
    "csp report": "<img src='http://attack.test/none'>",  # sent with a report-uri, see below
}
# Chromium may leave these alone by itself; they must still never arrive.
MAY_STAY_SILENT = {"ping", "csp report", "prefetch"}


@within(240)
async def test_no_spelling_of_an_address_reaches_the_secret(rig):
    port = rig.secret.port
    async with rig.attack() as attack:
        for spelling in SPELLINGS:
            attack.events.clear()
            text = await attack.goto(f"http://{spelling}:{port}/direct")
            assert "SECRET" not in text, spelling
            assert attack.refused() or "ERR_" in text, f"{spelling} was not tried: {text[:200]}"
            if not spelling.startswith("["):
                assert "Blocked by policy" in text, f"{spelling}: {text[:200]}"


@within(240)
async def test_no_redirect_reaches_the_secret(rig):
    # From a public page, to a name and to a literal address.
    port = rig.secret.port
    async with rig.attack() as attack:
        for status in (301, 302, 303, 307, 308):
            for target in (f"secret.test:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
                attack.events.clear()
                rig.world.page(f"http://attack.test/r{status}", "", status, Location=f"http://{target}/r")
                text = await attack.goto(f"http://attack.test/r{status}")
                assert "SECRET" not in text and "Blocked by policy" in text, (status, target, text[:200])
                assert attack.refused(), (status, target)


@pytest.mark.parametrize("name", PAGES)
@within(120)
async def test_nothing_that_a_page_loads_or_opens_reaches_the_secret(rig, name):
    hp = f"secret.test:{rig.secret.port}"
    async with rig.attack() as attack:
        fields = {"Content_Security_Policy": f"img-src 'none'; report-uri http://{hp}/csp"} if "csp" in name else {}
        rig.world.page("http://attack.test/p", PAGES[name].format(s=f"http://{hp}", w=f"ws://{hp}", hp=hp), **fields)
        await attack.goto("http://attack.test/p")
        tried = await attack.until_refused(0.5 if name in MAY_STAY_SILENT else 20.0)
        assert tried or name in MAY_STAY_SILENT, f"{name} never asked the proxy"


@within(120)
async def test_tls_does_not_reach_the_secret(rig):
    # TLS and secure WebSockets are tunnels.
    port = rig.secret.port
    async with rig.attack() as attack:
        for url in (f"https://127.0.0.1:{port}/", f"https://secret.test:{port}/"):
            attack.events.clear()
            assert "ERR_TUNNEL_CONNECTION_FAILED" in await attack.goto(url)
            assert attack.refused() and attack.gate.refusal_for(url).detail == "private_address"
            await attack.page.wait_for_timeout(100)
        attack.events.clear()
        rig.world.page("http://attack.test/wss", f"<script>new WebSocket('wss://127.0.0.1:{port}/')</script>")
        await attack.goto("http://attack.test/wss")
        assert await attack.until_refused()


@pytest.mark.parametrize("name", ["rebind.test", "flip.test"])
@within(120)
async def test_rebinding_does_not_reach_the_secret(rig, name):
    # Public when the page is loaded, private when its script asks again. Two names, two manners.
    world, port = rig.world, rig.secret.port
    answers = iter([[PUBLIC]])
    world.names["rebind.test"] = lambda: next(answers, ["127.0.0.1"])
    flips = iter([[PUBLIC], ["127.0.0.1", PUBLIC], ["::ffff:127.0.0.1"], ["169.254.169.254"], ["0.0.0.0"]] * 9)
    world.names["flip.test"] = lambda: next(flips)
    async with rig.attack() as attack:
        script = f"Promise.allSettled([1,2,3].map(i => fetch('http://{name}:{port}/' + i, {{mode:'no-cors'}})))"
        world.page(f"http://{name}/", f"<title>page</title><script>{script}</script>")
        assert "<title>page" in await attack.goto(f"http://{name}/")
        assert await attack.until_refused(), name


@within(120)
async def test_ways_around_the_proxy_do_not_reach_the_secret(rig):
    # ICE over UDP and TCP, WebTransport, name prefetch need no proxy at all. Nothing may arrive.
    port = rig.secret.port
    rig.world.page(
        "http://attack.test/udp",
        f"""<link rel=dns-prefetch href=//secret.test><link rel=preconnect href=http://127.0.0.1:{port}>
        <script>
        const ice = ['stun:127.0.0.1:{port}', 'stun:[::1]:{port}'].map(urls => ({{urls}}));
        for (const t of ['udp', 'tcp'])
          ice.push({{urls: 'turn:127.0.0.1:{port}?transport=' + t, username: 'a', credential: 'b'}});
        const pc = new RTCPeerConnection({{iceServers: ice}});
        pc.createDataChannel('x');
        pc.createOffer().then(o => pc.setLocalDescription(o));
        pc.onicegatheringstatechange = () => {{ document.title = pc.iceGatheringState }};
        try {{ new WebTransport('https://127.0.0.1:{port}/') }} catch (e) {{}}
        </script>""",
    )
    async with rig.attack() as attack:
        await attack.goto("http://attack.test/udp")
        await attack.page.wait_for_timeout(1500)
        # Contexts made without the gate reach nothing at all: the browser's own proxy setting turns them away.
        bare = await rig.browser.new_context()
        before = rig.proxy.unauthenticated
        assert "SECRET" not in await attack.goto(f"http://127.0.0.1:{port}/bare", await bare.new_page())
        assert rig.proxy.unauthenticated > before
        await _bounded(bare.close())


@within(120)
async def test_a_service_worker_does_not_reach_the_secret(rig):
    # Service workers need a secure context, which a plain-http page only is on localhost: that host is excepted here.
    world = rig.world
    policy = UrlPolicy(exceptions=frozenset({("localhost", world.port)}))
    async with rig.attack(policy) as attack:
        target = f"http://127.0.0.1:{rig.secret.port}"
        world.page(
            "http://localhost/sw.js", f"fetch('{target}/sw', {{mode:'no-cors'}})", Content_Type="text/javascript"
        )
        world.page("http://localhost/", "<script>navigator.serviceWorker.register('/sw.js')</script><title>sw</title>")
        assert "<title>sw" in await attack.goto(f"http://localhost:{world.port}/")
        assert await attack.until_refused()
