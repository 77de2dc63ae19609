"""The egress proxy itself: access, accounts, failure classes, bounds, and a clean end.

Most of it speaks to the proxy over raw sockets, as a hostile local process would; what concerns Chromium (credentials,
loopback, WebSockets, history) is asked of Chromium, and so is the reading of host names.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import random
from pathlib import Path

import pytest

from owrl_jax.browser.addresses import BadHost, host_text
from owrl_jax.browser.audit import AuditLog, read_audit
from owrl_jax.browser.egress import EGRESS_FLAGS, EgressError, EgressLimits, EgressProxy
from owrl_jax.browser.egress_fetch import FetchError
from owrl_jax.browser.policy import UrlPolicy, split_url
from owrl_jax.browser.reach import Reach
from owrl_jax.browser.safety import Safety
from tests.browser.egress_world import OTHER, PUBLIC, World, within

ENGINES = [p for p in ("/usr/bin/chromium-headless-shell", "/usr/bin/chromium") if Path(p).exists()]
needs_chromium = pytest.mark.skipif(not ENGINES, reason="no Chromium installed")


@contextlib.asynccontextmanager
async def rig(policy: UrlPolicy | None = None, limits: EgressLimits | None = None, **reach):
    """A world, a proxy on it, one gate, and the list of its events."""
    world = await World().start()
    world.names["site.test"] = [PUBLIC]
    settings = {"dns_ttl_s": 0.0} | reach
    proxy = EgressProxy(reach=Reach(resolve=world.resolve, dial=world.dial, **settings), limits=limits)
    events = []
    try:
        async with proxy:
            gate = proxy.open(episode="e1", policy=policy or UrlPolicy())
            gate.subscribe(events.append)
            yield world, proxy, gate, events
    finally:
        await world.stop()


def sign(gate) -> str:
    return "Basic " + base64.b64encode(f"{gate.username}:{gate.password}".encode()).decode()


async def connect(proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(proxy.server.rpartition(":")[2]))


async def ask(proxy, head: str, body: bytes = b"", gate=None) -> bytes:
    """One request over a new connection, and everything that comes back until it closes."""
    reader, writer = await connect(proxy)
    signed = f"Proxy-Authorization: {sign(gate)}\r\n" if gate else ""
    writer.write(f"{head}\r\n{signed}\r\n".encode() + body)
    try:
        return await asyncio.wait_for(reader.read(-1), 10)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def settled(condition, seconds: float = 3.0) -> bool:
    for _ in range(int(seconds / 0.01)):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False


@within(120)
async def test_without_the_secret_the_proxy_does_nothing():
    async with rig() as (world, proxy, gate, events):
        other = proxy.open(episode="e2", policy=UrlPolicy())
        wrong = [
            "",
            "Proxy-Authorization: Basic " + base64.b64encode(b"e1:guess").decode(),
            "Proxy-Authorization: Basic " + base64.b64encode(f"e1:{other.password}".encode()).decode(),
            "Proxy-Authorization: Basic " + base64.b64encode(f"nobody:{gate.password}".encode()).decode(),
            "Proxy-Authorization: Basic !!!",
            f"Proxy-Authorization: Bearer {gate.password}",
        ]
        for header in wrong:
            for target in ("GET http://site.test/ HTTP/1.1", "CONNECT site.test:443 HTTP/1.1"):
                answer = await ask(proxy, "\r\n".join([target, header] if header else [target]))
                assert answer.startswith(b"HTTP/1.1 407 "), header
        assert world.dialled == [] and events == [] and proxy.unauthenticated == 12
        # After the episode its secret is worth nothing.
        world.page("http://site.test/", "hello")
        assert b"hello" in await ask(proxy, "GET http://site.test/ HTTP/1.1", gate=gate)
        await gate.close()
        assert (await ask(proxy, "GET http://site.test/ HTTP/1.1", gate=gate)).startswith(b"HTTP/1.1 407 ")
        with pytest.raises(ValueError, match="already has"):
            proxy.open(episode="e2", policy=UrlPolicy())
        with pytest.raises(ValueError, match="without a colon"):
            proxy.open(episode="a:b", policy=UrlPolicy())


@within(120)
async def test_plain_requests_and_tunnels_are_relayed_and_counted(tmp_path):
    async with rig() as (world, proxy, gate, events):
        audit = AuditLog(tmp_path / "audit.jsonl")
        gate.subscribe(audit.on_event)
        world.page("http://site.test/form", "thanks", X_Owrl_Egress="forged", Set_Cookie="a=b")
        head = "POST http://site.test/form?q=1 HTTP/1.1\r\nHost: site.test\r\nContent-Length: 5\r\nCookie: c=d"
        answer = await ask(proxy, head, b"helloGET http://site.test/second HTTP/1.1\r\n\r\n", gate)
        assert answer.startswith(b"HTTP/1.1 200 ") and b"thanks" in answer and b"Set-Cookie: a=b" in answer
        assert b"forged" not in answer and answer.count(b"HTTP/1.1") == 1
        [(method, host, path, headers)] = world.requests  # what followed the body was not a second request
        assert (method, host, path) == ("POST", "site.test", "/form?q=1")
        assert (headers["_body"], headers["cookie"]) == ("hello", "c=d")
        assert "proxy-authorization" not in headers
        # A tunnel carries anything, both ways.
        reader, writer = await connect(proxy)
        writer.write(f"CONNECT site.test:8443 HTTP/1.1\r\nProxy-Authorization: {sign(gate)}\r\n\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"GET /form HTTP/1.1\r\nHost: site.test\r\n\r\n")
        assert b"thanks" in await asyncio.wait_for(reader.read(-1), 5)
        writer.close()
        assert await settled(lambda: sum(e.verdict == "closed" for e in events) == 2)
        assert [(e.verdict, e.port, e.tunnel) for e in events] == [
            ("allowed", 80, False), ("closed", 80, False), ("allowed", 8443, True), ("closed", 8443, True),
        ]  # fmt: skip
        assert events[1].status == 200 and events[1].sent == 5 and events[3].received > 50
        assert gate.sent == events[1].sent + events[3].sent and gate.received >= events[3].received
        audit.close()
        assert [r["host"] for r in read_audit(audit.path)] == ["site.test"] * 4


@within(120)
async def test_refusals_say_why_and_carry_the_gates_own_mark():
    policy = UrlPolicy(deny=frozenset({"evil.test"}))
    async with rig(policy) as (world, proxy, gate, events):
        world.names["evil.test"] = [PUBLIC]
        world.names["inside.test"] = ["10.0.0.5"]
        world.names["mixed.test"] = [PUBLIC, "fe80::1"]
        private = ["inside.test", "mixed.test", "127.0.0.1", "[::1]", "169.254.169.254"]
        cases = {"evil.test": "deny_list"} | dict.fromkeys(private, "private_address")
        for host, detail in cases.items():
            answer = (await ask(proxy, f"GET http://{host}/ HTTP/1.1", gate=gate)).decode()
            assert answer.startswith("HTTP/1.1 403 ") and "Blocked by policy" in answer, host
            headers = dict(line.split(": ", 1) for line in answer.split("\r\n\r\n")[0].split("\r\n")[1:])
            assert gate.is_own_answer({k.lower(): v for k, v in headers.items()})
            assert headers["X-Owrl-Egress"].endswith(f" refused {detail}")
            assert gate.refusal_for(f"http://{host}/x").detail == detail
            assert (await ask(proxy, f"CONNECT {host}:443 HTTP/1.1", gate=gate)).startswith(b"HTTP/1.1 403 ")
        assert not gate.is_own_answer({"x-owrl-egress": "0123456789abcdef refused deny_list"})
        assert world.dialled == [] and {e.verdict for e in events} == {"refused"}
        assert gate.failure_for("evil.test") is None


@within(120)
async def test_failures_upstream_are_told_apart_and_forgotten_on_success():
    async with rig(connect_timeout_s=0.3, dns_timeout_s=0.3, limits=EgressLimits(response_s=0.3)) as (
        world,
        proxy,
        gate,
        events,
    ):

        async def hang(*_):
            await asyncio.Event().wait()

        async def refuse(*_):
            raise ConnectionRefusedError(111, "Connection refused")

        async def raw(data: bytes):
            async def serve(reader, writer):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(data)
                await writer.drain()
                writer.close()

            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            return server, server.sockets[0].getsockname()[1]

        real_dial, real_resolve = world.dial, world.resolve

        async def expect(detail: str, status: int, host: str = "site.test") -> None:
            answer = await ask(proxy, f"GET http://{host}/ HTTP/1.1", gate=gate)
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (detail, answer[:60])
            assert gate.failure_for(f"https://{host}/y").detail == detail and events[-1].detail in (detail, "")

        await expect("nav_dns", 502, "nowhere.test")
        proxy.reach._dial = refuse
        await expect("nav_refused", 502)
        proxy.reach._dial = hang
        await expect("nav_timeout", 504)
        proxy.reach._dial, proxy.reach._resolve = real_dial, hang
        await expect("nav_timeout", 504)
        proxy.reach._resolve = real_resolve
        for data, detail, status in ((b"", "nav_aborted", 502), (b"garbage\r\n\r\n", "bad_response", 502),
                                     (b"HTTP/1.1 101 Switching\r\n\r\n", "bad_response", 502),
                                     (b"HTTP/1.1 407 Auth\r\n\r\n", "bad_response", 502)):  # fmt: skip
            server, port = await raw(data)
            proxy.reach._dial = lambda ip, _, p=port: asyncio.open_connection("127.0.0.1", p)
            await expect(detail, status)
            server.close()

        async def silent(reader, writer):
            with contextlib.suppress(OSError):
                await reader.read(-1)

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        proxy.reach._dial = lambda ip, _: asyncio.open_connection("127.0.0.1", port)
        await expect("nav_timeout", 504)
        server.close()
        # Interim responses are passed on, and a success clears the failure.
        server, port = await raw(
            b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        )
        answer = await ask(proxy, "GET http://site.test/ HTTP/1.1", gate=gate)
        assert b"103 Early Hints" in answer and answer.endswith(b"ok") and gate.failure_for("site.test") is None
        server.close()


@within(120)
async def test_the_second_address_is_tried_and_the_losers_are_closed():
    async with rig(stagger_s=0.05) as (world, proxy, gate, _):
        world.names["dual.test"] = ["2606:2800:220:1::1", PUBLIC, OTHER]
        world.page("http://dual.test/", "reached")
        opened = []
        real = world.dial

        async def dial(ip, port):
            opened.append(ip)
            if ip == PUBLIC:
                await asyncio.sleep(30)  # a black hole
            if ":" in ip:
                raise OSError(101, "Network is unreachable")
            return await real(ip, port)

        proxy.reach._dial = dial
        assert b"reached" in await ask(proxy, "GET http://dual.test/ HTTP/1.1", gate=gate)
        assert opened == [PUBLIC, "2606:2800:220:1::1", OTHER]


@within(120)
async def test_a_slow_reader_holds_its_sender_back():
    sent = 0

    async def flood(reader, writer):
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(OSError):
            while sent < 512 * 1024 * 1024:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536

    async with rig() as (_world, proxy, gate, _):
        server = await asyncio.start_server(flood, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        proxy.reach._dial = lambda ip, _: asyncio.open_connection("127.0.0.1", port, limit=65536)
        reader, writer = await connect(proxy)
        writer.write(f"GET http://site.test/ HTTP/1.1\r\nProxy-Authorization: {sign(gate)}\r\n\r\n".encode())
        await reader.readexactly(10)
        before = -1
        while before != sent:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.2)
        # Kernel buffers of four sockets hold some megabytes; the endless rest was not taken.
        assert 0 < sent < 64 * 1024 * 1024
        writer.transport.abort()
        assert await settled(lambda: not gate._tasks)
        server.close()


@within(120)
async def test_bounds_of_connections_bytes_heads_and_bodies():
    limits = EgressLimits(connections=3, total_bytes=100_000, head_bytes=2000, request_body_bytes=1000)
    async with rig(limits=limits) as (world, proxy, gate, _events):
        world.page("http://site.test/", "x" * 60_000)
        held = []
        for _ in range(3):
            reader, writer = await connect(proxy)
            writer.write(f"CONNECT site.test:1 HTTP/1.1\r\nProxy-Authorization: {sign(gate)}\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
            held.append(writer)
        answer = await ask(proxy, "GET http://site.test/ HTTP/1.1", gate=gate)
        assert b" failed page_hostile" in answer and gate.failure_for("site.test").detail == "page_hostile"
        for writer in held:
            writer.close()
        assert await settled(lambda: not gate._tasks)
        assert len(await ask(proxy, "GET http://site.test/ HTTP/1.1", gate=gate)) > 60_000
        assert len(await ask(proxy, "GET http://site.test/ HTTP/1.1", gate=gate)) < 60_000  # cut in the middle
        assert b" failed page_hostile" in await ask(proxy, "GET http://site.test/ HTTP/1.1", gate=gate)
        assert (await ask(proxy, "GET http://site.test/ HTTP/1.1\r\nX: " + "y" * 3000)).startswith(b"HTTP/1.1 431 ")
        assert (await ask(proxy, "POST http://site.test/ HTTP/1.1\r\nContent-Length: 1001", gate=gate)).startswith(
            b"HTTP/1.1 413 "
        )


@within(120)
async def test_stopping_leaves_no_task_no_connection_and_no_port(caplog):
    before = asyncio.all_tasks()
    async with rig() as (world, proxy, gate, events):
        world.names["hang.test"] = [PUBLIC]
        real = world.dial

        async def dial(ip, port):
            if port == 80:
                await asyncio.Event().wait()
            return await real(ip, port)

        proxy.reach._dial = dial
        waiting = []
        for k in range(12):
            reader, writer = await connect(proxy)
            waiting.append((reader, writer))
            if k % 3 == 0:
                continue  # a spare connection that never asks
            target = "CONNECT site.test:443" if k % 3 == 1 else "GET http://hang.test/"
            writer.write(f"{target} HTTP/1.1\r\nProxy-Authorization: {sign(gate)}\r\n\r\n".encode())
        assert await settled(lambda: sum(e.verdict == "allowed" for e in events) == 4)
        port = int(proxy.server.rpartition(":")[2])
        await asyncio.wait_for(proxy.stop(), 5)
        await proxy.stop()
        for reader, writer in waiting:
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(-1), 2)  # every connection is over
            writer.close()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises(EgressError, match="not running"):
            proxy.server  # noqa: B018
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() - before == set()
    assert "unexpected" not in caplog.text


@within(120)
async def test_hostile_clients_do_not_disturb_the_proxy(caplog):
    rng = random.Random(3)
    async with rig() as (world, proxy, gate, _events):
        world.page("http://site.test/", "fine")
        for _ in range(60):
            _reader, writer = await connect(proxy)
            kind = rng.randrange(4)
            if kind == 0:
                writer.write(bytes(rng.randrange(256) for _ in range(rng.randrange(300))))
            elif kind == 1:
                writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")  # TLS to a plain port
            elif kind == 2:
                head = f"GET http://site.test/ HTTP/1.1\r\nProxy-Authorization: {sign(gate)}\r\n\r\n"
                writer.write(head[: rng.randrange(len(head))].encode())
            else:
                writer.write(f"GET http://site.test/ HTTP/1.1\r\nProxy-Authorization: {sign(gate)}\r\n\r\n".encode())
            await asyncio.sleep(0)
            writer.transport.abort() if rng.random() < 0.5 else writer.close()
        assert b"fine" in await ask(proxy, "GET http://site.test/ HTTP/1.1", gate=gate)
        assert await settled(lambda: not gate._tasks)
        gate.subscribe(lambda event: 1 / 0)  # a broken subscriber disturbs nobody
        assert b"fine" in await ask(proxy, "GET http://site.test/ HTTP/1.1", gate=gate)
    assert "a subscriber failed" in caplog.text and "unexpected" not in caplog.text


@within(120)
async def test_the_sandboxs_own_fetch_obeys_the_same_rules():
    async with rig() as (world, _proxy, gate, _):
        world.page("http://site.test/robots.txt", "User-agent: *\nDisallow: /no")
        world.page("http://site.test/away", "", 302, Location="http://127.0.0.1/secret")
        world.page("http://site.test/loop", "", 302, Location="/loop")
        chunked = b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n"
        world.routes[("site.test", "/chunked")] = (200, {"Transfer-Encoding": "chunked"}, chunked)
        assert await gate.fetch_text("http://site.test/robots.txt") == (200, "User-agent: *\nDisallow: /no")
        assert await gate.fetch_text("http://site.test/robots.txt", max_bytes=4) == (200, "User")
        assert (await gate.fetch_text("http://site.test/loop"))[0] == 302
        for url in ("http://site.test/away", "http://nowhere.test/", "file:///etc/passwd", "http://10.0.0.1/"):
            with pytest.raises(FetchError):
                await gate.fetch_text(url)
        safety = Safety()
        assert (await safety.check_visit("http://site.test/no/1", gate)).detail == "robots"
        assert await safety.check_visit("http://site.test/yes", gate) is None
        assert (await safety.check_visit("http://[::1]/", gate)).detail == "private_address"
        local = Safety.for_local_worlds({("127.0.0.1", 8000)})
        asked = len(world.requests)
        assert await local.check_visit("http://127.0.0.1:8000/", gate) is None and len(world.requests) == asked


async def websocket(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A WebSocket server (RFC 6455) that says hello, once."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    key = next(line.split(": ")[1] for line in head.split("\r\n") if line.lower().startswith("sec-websocket-key"))
    digest = hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
    accept = base64.b64encode(digest).decode()
    fields = ["HTTP/1.1 101 X", "Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Accept: {accept}"]
    writer.write(("\r\n".join(fields) + "\r\n\r\n").encode() + b"\x81\x05hello")
    await writer.drain()
    await reader.read(1)
    writer.close()


@needs_chromium
@pytest.mark.parametrize("engine", ENGINES, ids=lambda p: Path(p).name)
@within(120)
async def test_chromium_signs_in_once_and_goes_through_for_everything(engine, caplog):
    from playwright.async_api import async_playwright

    caplog.set_level("DEBUG", logger="owrl_jax.browser.egress")
    async with (
        rig(UrlPolicy(exceptions=frozenset({("127.0.0.1", 8099)}))) as (world, proxy, gate, events),
        async_playwright() as playwright,
    ):
        world.page("http://site.test/", "<title>home</title>")
        world.page("http://site.test/two", "<title>two</title>")
        sockets = await asyncio.start_server(websocket, "127.0.0.1", 0)
        ws_port = sockets.sockets[0].getsockname()[1]
        real = world.dial

        async def dial(ip, port):
            if (ip, port) == ("127.0.0.1", 8099):
                return await real(PUBLIC, 80)
            return await asyncio.open_connection("127.0.0.1", ws_port) if port == 8081 else await real(ip, port)

        proxy.reach._dial = dial
        flags = ["--no-sandbox", *EGRESS_FLAGS, *proxy.launch_flags()]
        browser = await playwright.chromium.launch(executable_path=engine, args=flags)
        context = await browser.new_context(proxy=gate.playwright_proxy())
        page = await context.new_page()
        await gate.sign_in(context, page)
        assert page.url == "about:blank" and await page.evaluate("history.length") == 1
        caplog.clear()
        await page.goto("http://site.test/")
        await page.goto("http://site.test/two")
        assert await page.title() == "two"
        await page.go_back()
        assert await page.title() == "home"
        opening = "new WebSocket('ws://site.test:8081/w').onmessage = e => r(e.data)"
        assert await page.evaluate(f"new Promise(r => {{ {opening} }})") == "hello"
        # Loopback is no way round the proxy: nobody listens on that port, only our dialler knows where it leads.
        world.page("http://127.0.0.1/", "<title>local</title>")
        await page.goto("http://127.0.0.1:8099/")
        assert await page.title() == "local"
        popup = await context.new_page()
        await popup.goto("http://site.test/two")
        assert await popup.title() == "two"
        # Nothing of this context had to be challenged again. (What chromium itself asks for in the background is.)
        assert not [r for r in caplog.messages if "turned away" in r and ("site.test" in r or "127.0.0.1" in r)]
        reached = {(e.host, e.port) for e in events if e.verdict == "allowed"}
        assert reached >= {("site.test", 80), ("site.test", 8081), ("127.0.0.1", 8099)}
        # Two episodes in one browser: each account has its own hosts.
        second = proxy.open(episode="e2", policy=UrlPolicy())
        seen = []
        second.subscribe(seen.append)
        other = await browser.new_context(proxy=second.playwright_proxy(credentials=True))
        await (await other.new_page()).goto("http://site.test/")
        assert {e.episode for e in seen} == {"e2"} and {e.episode for e in events} == {"e1"}
        # What the site answers and what the proxy answers are told apart.
        response = await page.goto("http://10.0.0.1/")
        assert response.status == 403 and gate.is_own_answer(await response.all_headers())
        response = await page.goto("http://site.test/missing")
        assert response.status == 404 and not gate.is_own_answer(await response.all_headers())
        response = await page.goto("http://nowhere.test/")
        assert response.status == 502 and gate.failure_for("http://nowhere.test/").detail == "nav_dns"
        await browser.close()
        sockets.close()


@needs_chromium
@within(120)
async def test_hosts_are_read_as_chromium_reads_them():
    """Differential test: every URL that Chromium accepts must be the same host and port to us, or be refused by us."""
    from playwright.async_api import async_playwright

    rng = random.Random(11)
    numbers = [
        "127",
        "0",
        "1",
        "0x7f",
        "0177",
        "00",
        "0x",
        "08",
        "256",
        "65536",
        "4294967295",
        "4294967296",
        "１２７",
        "①",
        "²",
        "%31",
        "0x7f.1",
    ]
    words = [
        "a",
        "example",
        "com",
        "xn--bcher-kva",
        "bücher",
        "localhost",
        "LOCAL",
        "ß",
        "İ",
        "-",
        "_",
        "*",
        "~",
        "!",
        "$",
        "'",
        "…",
        "%2e",
        "%00",
        "<",
        ">",
        "^",
        "|",
    ]
    literals = ["::1", "[::1]", "[::ffff:1.2.3.4]", "[1::2::3]", "[fe80::1%25eth0]", "[", "]"]
    marks = ["@", "user@", "u:p@", "\\", "/", "?", "#", ":", ":80", ":443", ":0", ":65535", ":65536", ":8080", ":x"]
    parts = [*numbers, *words, *literals, *marks, "", " ", "\t", "\n", "\u00ad"]
    joiners = [".", ".", ".", "", "。", "．", "｡", "%2E"]
    urls = []
    for _ in range(6000):
        text = rng.choice(["http://", "https://", "HTTP:", "http:/", "http:\\\\", "http:///", "ws://", " http://"])
        for _ in range(rng.randrange(1, 6)):
            text += rng.choice(parts) + rng.choice(joiners)
        urls.append(text.rstrip(".") if rng.random() < 0.5 else text)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=ENGINES[0], args=["--no-sandbox"])
        page = await browser.new_page()
        script = """us => us.map(u => {
            try { const x = new URL(u); return [x.hostname, x.port, x.protocol] } catch { return null } })"""
        theirs = await page.evaluate(script, urls)
        await browser.close()
    wrong, refused, same = [], [], 0
    for url, view in zip(urls, theirs, strict=True):
        # What the browser will not open, and names no resolver knows (empty labels, escaped characters), are no loss.
        if view is None or "%" in view[0] or not view[0].strip(".") or ".." in view[0] or view[0].startswith("."):
            continue
        try:
            _, host, port = split_url(url)
        except BadHost:
            refused.append(url)
            continue
        default = 443 if view[2] == "https:" else 80
        if (host_text(host), port) == (view[0].strip("[]").rstrip("."), int(view[1] or default)):
            same += 1
        else:
            wrong.append(f"{url!r}: ours {host}:{port}, Chromium's {view}")
    assert not wrong, "\n".join(wrong[:40])
    assert same > 800 and len(refused) <= 0.01 * same, (same, refused[:40])
