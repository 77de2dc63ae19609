"""Settling: the picture shows what the action led to, and no page can make us wait beyond its cap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from owrl_jax.browser.config import SettleCaps
from owrl_jax.outcome import Owner
from tests.browser.pages import Response, after, never
from tests.browser.sandbox_world import FIRST_OR_PLAIN, MOMENT_S, box, call, click, world_of

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FIRST_OR_PLAIN)
async def world(request):
    async with world_of(request.param) as made:
        yield made


GREEN = "<title>new</title><body style='margin:0;background:#00ff00'><h1>The new page</h1>"
GREEN_RGB = (0, 255, 0)


async def test_a_link_to_a_page_that_answers_late_shows_the_new_page(world):
    """T20."""
    world.server.page("/link", f"<a href=/late style='{box(100, 100)}'>go</a>")
    world.server.route("/late", after(0.8, GREEN))
    async with world.episode("/link") as e:
        said = await e.click(110, 110)
        assert e.pixel(900, 500) == GREEN_RGB and e.observation.active_tab.title == "new"
        assert "/late" in said and 0.8 <= e.seconds < 0.8 + MOMENT_S


@pytest.mark.parametrize("delay_ms", [0, 50])
async def test_a_navigation_that_starts_after_the_click_is_waited_for(world, delay_ms):
    """Scenario 7: the context of the page goes away while we look."""
    world.server.page(
        "/racy", f"<button style='{box(100, 100)}' onclick=\"setTimeout(()=>location='/late2',{delay_ms})\">go</button>"
    )
    world.server.route("/late2", after(0.3, GREEN))
    async with world.episode("/racy") as e:
        await e.click(110, 110)
        assert e.pixel(900, 500) == GREEN_RGB and e.result.outcome is None and e.seconds < MOMENT_S


async def test_content_fetched_after_load_is_in_the_picture(world):
    """T21, at the start and after a click."""
    world.server.page(
        "/late-content",
        f"<button style='{box(100, 100)}' onclick=load()>again</button>"
        f"<div id=d style='{box(0, 300, 1280, 500)}'></div>"
        "<script>function load(){fetch('/data?'+Math.random()).then(r=>r.text()).then(t=>{d.style.background=t})}"
        "onload=load</script>",
    )
    colours = iter(["#00ff00", "#0000ff"])

    async def data(request):
        await asyncio.sleep(1.0)
        return Response(next(colours), content_type="text/plain")

    world.server.route("/data", data)
    async with world.episode("/late-content") as e:
        assert e.pixel(600, 500) == (0, 255, 0) and 1.0 <= e.seconds < 1.0 + MOMENT_S
        await e.click(110, 110)
        assert e.pixel(600, 500) == (0, 0, 255) and 1.0 <= e.seconds < 1.0 + MOMENT_S


async def stream() -> AsyncIterator[bytes]:
    while True:
        yield b"data: tick\n\n"
        await asyncio.sleep(0.2)


RESTLESS = {
    "poll": "setInterval(()=>fetch('/tick?'+Math.random()),100)",
    "animation": "let n=0;(function f(){x.textContent=n++;requestAnimationFrame(f)})()",
    "style": "let n=0;(function f(){x.style.left=(n++%50)+'px';requestAnimationFrame(f)})()",
    "long poll": "(function f(){fetch('/never').finally(f)})()",
    "event stream": "new EventSource('/stream').onmessage=e=>{x.textContent+='.'}",
    "streamed answer": "fetch('/stream')",
}


@pytest.mark.parametrize("kind", RESTLESS)
async def test_pages_that_never_rest_do_not_hold_us(world, kind):
    """T22, scenario 10."""
    world.server.page(
        "/restless",
        f"<button style='{box(100, 100)}' onclick=\"b.textContent='clicked'\" id=b>b</button>"
        f"<p id=x style='position:relative'>x</p><script>{RESTLESS[kind]}</script>",
    )
    world.server.route("/tick", after(0.0, "ok", "text/plain"))
    world.server.route("/never", never)

    async def endless(request):
        return Response(stream=stream(), content_type="text/event-stream")

    world.server.route("/stream", endless)
    async with world.episode("/restless") as e:
        assert e.result.outcome is None and e.seconds < 2.5 + MOMENT_S
        for _ in range(2):
            await e.click(110, 110)
        assert e.ok and await e.js("b.textContent") == "clicked" and e.observation.settle is not None
        assert e.seconds < MOMENT_S, e.observation.settle


@pytest.mark.parametrize("kind", ["short", "long", "no length", "promise kept"])
async def test_an_answer_that_the_page_never_reads_does_not_hold_us(world, kind):
    """The browser calls such a request finished never, or when the garbage is collected."""

    async def bits():
        yield b"a piece"

    async def answer(request):
        if kind == "no length":
            return Response(stream=bits(), content_type="text/plain")
        return Response("x" * (300_000 if kind == "long" else 2), content_type="text/plain")

    world.server.route("/unread", answer)
    keep = ".then(r=>window.kept=r)" if kind == "promise kept" else ""
    world.server.page(
        "/writes",
        f"<button style='{box(100, 100)}' onclick=\"fetch('/unread'){keep};this.style.background='#00ff00'\">"
        "b</button>",
    )
    async with world.episode("/writes") as e:
        await e.click(110, 110)
        assert e.ok and e.pixel(120, 102)[1] > 200
        assert e.result.timings_ms["settle"] < 1500, e.observation.settle


async def test_an_answer_in_pieces_is_waited_for(world):
    async def pieces():
        yield b"#00"
        for piece in (b"ff", b"00"):
            await asyncio.sleep(0.3)
            yield piece

    async def answer(request):
        return Response(stream=pieces(), content_type="text/plain")

    world.server.route("/pieces", answer)
    world.server.page(
        "/reads",
        f"<button style='{box(100, 100)}' "
        "onclick=\"fetch('/pieces').then(r=>r.text()).then(t=>document.body.style.background=t)\">b</button>",
    )
    async with world.episode("/reads") as e:
        await e.click(110, 110)
        assert e.pixel(900, 500) == GREEN_RGB


async def test_a_long_poll_is_waited_for_once_and_forgiven_when_it_answers(world):
    answers = iter([30.0, 30.0, 1.0, 1.0])

    async def poll(request):
        await asyncio.sleep(next(answers))
        return Response("#00ff00", content_type="text/plain")

    world.server.route("/poll", poll)
    world.server.page(
        "/polls",
        f"<body><a href=/polls style='{box(100, 100)}'>again</a>"
        "<script>fetch('/poll?'+Math.random()).then(r=>r.text()).then(t=>document.body.style.background=t)</script>",
    )
    async with world.episode("/polls") as e:  # not answered: it may be a slow answer or a poll
        assert e.result.timings_ms["open"] > 2000
        await e.click(110, 110)  # a poll, by now
        assert e.result.timings_ms["settle"] < 1500, e.observation.settle
        await e.click(110, 110)  # as far as we know still one, but it answers after a second
        assert e.ok
        await e.one("wait", seconds=1.5)
        assert e.pixel(900, 500) == GREEN_RGB
        await e.click(110, 110)  # and is believed again
        assert e.pixel(900, 500) == GREEN_RGB and e.result.timings_ms["settle"] > 800


async def test_a_page_that_reloads_itself_without_end(world):
    """T25: few looks, one action, no outcome but feedback."""
    world.server.page("/refresh", "<meta http-equiv=refresh content=0><h1>again and again</h1>")
    world.server.page("/to-refresh", f"<a href=/refresh style='{box(100, 100)}'>go</a>")
    async with world.episode("/to-refresh") as e:
        before = len([r for r in world.server.requests if r.path == "/to-refresh"])
        said = await e.click(110, 110)
        assert e.ok and "/refresh" in said
        assert e.result.outcome is None or e.result.outcome.owner is Owner.SITE
        assert len([r for r in world.server.requests if r.path == "/to-refresh"]) == before, "nothing was done twice"
        assert e.seconds < 12


@pytest.mark.parametrize(
    "hanging",
    [
        "<style>@font-face{font-family:F;src:url(/never)}p{font:20px F}</style><p>text in a font that never comes</p>",
        "<img src=/never width=200 height=200>",
        "<link rel=stylesheet href=/never media=print>",
        "<iframe src=/never></iframe>",
    ],
    ids=["font", "image", "style", "frame"],
)
async def test_what_hangs_does_not_hold_the_picture(world, hanging):
    """T28, scenario 11: pictures within a second where nothing else is pending."""
    world.server.route("/never", never)
    world.server.page("/calm", f"<a href=/hanging style='{box(100, 100)}'>go</a>")
    world.server.page("/hanging", f"<body style='background:#00ff00'>{hanging}")
    async with world.episode("/calm") as e:
        await e.click(110, 110)
        assert e.pixel(1200, 900) == GREEN_RGB and not e.observation.screenshot.stale
        assert e.seconds < MOMENT_S
        assert e.result.timings_ms["capture"] < 1000, "the picture itself never waits for fonts"
        await e.one("scroll")
        assert e.seconds < MOMENT_S


async def test_a_page_that_never_answers_is_told_and_can_be_left(world):
    world.server.route("/never", never)
    world.server.page("/calm", f"<a href=/never style='{box(100, 100)}'>go</a>")
    async with world.episode("/calm", settle=SettleCaps(commit_s=2.5)) as e:
        said = await e.click(110, 110)
        assert "still loading" in said and e.result.outcome is None and 2.5 <= e.seconds < 2.5 + MOMENT_S
        assert e.observation.settle.reason == "cap:commit"
        said = await e.one("goto_url", url=world.server.url("/never"))
        assert not e.ok and "no answer" in said and 2.5 <= e.seconds < 5.0 + MOMENT_S
        await e.one("goto_url", url=world.server.url("/calm"))
        assert e.ok and e.seconds < MOMENT_S


async def test_same_document_navigation_is_immediate_and_told(world):
    """Scenario 8."""
    world.server.page(
        "/app",
        f"<button style='{box(100, 100)}' onclick=\"history.pushState(0,'','/app/cart');document.title='Cart'\">"
        "cart</button>",
    )
    async with world.episode("/app") as e:
        said = await e.click(110, 110)
        assert "/app/cart" in said and e.url.endswith("/app/cart") and e.observation.active_tab.title == "Cart"
        assert e.seconds < MOMENT_S


async def test_a_background_tab_does_not_spoil_the_front_one(world):
    world.server.route("/never", never)
    world.server.page("/calm", f"<button style='{box(100, 100)}'>b</button>")
    world.server.page("/busy", "<h1>busy</h1><script>setInterval(()=>fetch('/never'),50);for(;;){}</script>")
    async with world.episode("/calm") as e:
        await e.do(call("new_tab"))
        tab = e.sandbox.stage.active
        busy = asyncio.ensure_future(tab.send("Page.navigate", {"url": world.server.url("/busy")}))
        await asyncio.sleep(0.3)
        await e.one("switch_tab", tab_index=0)
        await e.do(click(110, 110), call("scroll"))
        assert e.ok and e.result.outcome is None and e.seconds < 2 * MOMENT_S
        busy.cancel()


async def test_broken_pages_and_then_recovery(world):
    """Scenario 9."""
    world.server.page("/calm", "<h1>calm</h1>", title="Calm")
    world.server.page("/gone", "<h1>Not here, please look elsewhere</h1>", status=404)
    world.server.page("/broken", "<table><div><b><p>unclosed <a href=/calm>x<td><script>throw 1</script>")
    async with world.episode("/calm") as e:
        said = await e.one("goto_url", url=world.server.url("/gone"))
        assert "404" in said and e.result.outcome is None
        await e.one("goto_url", url=world.server.url("/broken"))
        assert e.ok
        said = await e.one("goto_url", url="http://127.0.0.1:9/")
        assert not e.ok and e.result.outcome is None and e.seconds < MOMENT_S
        said = await e.one("goto_url", url=world.server.url("/calm"))
        assert e.ok and e.observation.active_tab.title == "Calm", said


async def test_frames_that_nobody_waits_for_do_not_spoil_the_next_picture(world):
    """The browser draws one frame at a time, and one that was begun goes on when its drawer is cancelled."""
    world.server.page(
        "/heavy",
        "<body style='margin:0'><canvas id=c width=1280 height=1000></canvas>"
        "<script>const g=c.getContext('2d');let n=0;"
        "(function f(){n++;for(let i=0;i<3000;i++){g.fillStyle=`hsl(${n+i},80%,50%)`;"
        "g.fillRect(i*37%1280,i*91%1000,60,60)}requestAnimationFrame(f)})()</script>",
    )
    async with world.episode("/heavy") as e:
        camera, tab = e.sandbox.stage.camera, e.sandbox.stage.active
        for n in range(24):
            async with camera.running():
                await asyncio.sleep(0.004 * (n % 6))
            assert not (await camera.take(tab)).stale


async def test_image_and_facts_come_from_one_state(world):
    """C12: title, changes and picture never disagree on a page that changes all the time."""
    world.server.page(
        "/torn",
        "<body style='margin:0'><script>let n=0,f=()=>{n=(n+1)%200;document.title='n'+n;"
        "document.body.style.background=`rgb(${n},0,0)`};f();setInterval(f,300)</script>",
    )
    async with world.episode("/torn") as e:
        agree = 0
        for _ in range(6):
            await e.one("wait", seconds=0)
            agree += e.observation.active_tab.title == f"n{e.pixel(600, 500)[0]}"
            assert e.seconds < MOMENT_S
        assert agree >= 5
