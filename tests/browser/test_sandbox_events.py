"""What pages do uninvited: dialogs, tabs, downloads, frames, roots, files, answers that are no pages."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from owrl_jax.outcome import Owner, Reason
from tests.browser.pages import Response, after, attachment, endless_download, redirect
from tests.browser.sandbox_world import FIRST_OR_CHROMIUM, MOMENT_S, box, call, click, world_of

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FIRST_OR_CHROMIUM)
async def world(request):
    async with world_of(request.param) as made:
        yield made


def button(y: int, script: str, name: str = "go") -> str:
    return f"<button style='{box(100, y)}' onclick=\"{script}\">{name}</button>"


async def test_dialogs_are_answered_at_once_and_told(world):
    """T32, scenario 12."""
    world.server.page("/alert-on-load", "<script>alert('Welcome to the shop')</script><h1>shop</h1>")
    world.server.page(
        "/dialogs",
        button(100, "alert('one');alert('two')")
        + button(200, "document.title=confirm('Sure?')")
        + button(300, "document.title=prompt('Name?','Ann')")
        + button(400, "setTimeout(()=>alert('later'),0)"),
    )
    async with world.episode("/alert-on-load") as e:
        assert e.result.outcome is None and e.seconds < MOMENT_S
        await e.one("goto_url", url=world.server.url("/dialogs"))
        said = await e.click(110, 110)
        assert 'alert dialog: "one"' in said and '"two"' in said and e.seconds < MOMENT_S
        said = await e.click(110, 210)
        assert 'confirm dialog: "Sure?"' in said and e.observation.active_tab.title == "true"
        said = await e.click(110, 310)
        assert 'prompt dialog: "Name?"' in said and e.observation.active_tab.title == "Ann"
        said = await e.click(110, 410)
        assert '"later"' in said and e.seconds < MOMENT_S
        facts = [event for event in e.result.results[0].facts["events"] if event["event"] == "dialog"]
        assert facts[0]["type"] == "alert" and facts[0]["text"] == "later"
        await e.click(900, 900)
        assert "dialog" not in e.result.results[0].feedback, "nothing is told twice"


async def test_dialogs_can_be_dismissed_by_policy(world):
    world.server.page("/confirm", button(100, "document.title=confirm('Sure?')"))
    async with world.episode("/confirm", accept_dialogs=False) as e:
        assert "dismissed" in await e.click(110, 110) and e.observation.active_tab.title == "false"


@pytest.mark.parametrize("script", ["for(;;)alert('again')", "setInterval(()=>alert('again'),0)"])
async def test_dialogs_without_end_are_the_doing_of_the_page(world, script):
    world.server.page("/endless-dialogs", button(100, script))
    async with world.episode("/endless-dialogs") as e:
        await e.do(click(110, 110), call("scroll"))
        assert e.result.outcome.detail == "page_hostile" and e.result.outcome.owner is Owner.SITE
        assert e.seconds < 12.5
    async with world.episode(world.server.page("/fine", "<h1>a page that is fine</h1>")) as e:
        assert e.result.outcome is None, "the next episode is fine"


async def test_beforeunload_never_keeps_us_on_the_page(world):
    """T33."""
    world.server.page("/next", "<h1>next</h1>", title="Next")
    world.server.page("/dirty", f"<input style='{box(100, 100)}'><script>onbeforeunload=e=>e.preventDefault()</script>")
    for leave in ("goto", "back", "close"):
        async with world.episode("/next") as e:
            await e.one("goto_url", url=world.server.url("/dirty"))
            await e.do(click(110, 110), call("write", message="dirty"))
            if leave == "goto":
                said = await e.one("goto_url", url=world.server.url("/next"))
                assert "leave" in said
            elif leave == "back":
                await e.one("go_back")
            if leave != "close":
                assert e.ok and e.observation.active_tab.title == "Next"
            assert e.result.outcome is None and e.seconds < MOMENT_S


async def test_new_tabs_of_the_acted_page_are_followed(world):
    """T34, scenario 13."""
    world.server.page("/new", "<h1>new</h1>" + button(100, "window.close()", "close me"), title="New")
    world.server.page(
        "/opener",
        f"<a target=_blank href=/new style='{box(100, 100)}'>blank</a>"
        + button(200, "window.open('/new');window.open('/new')")
        + button(300, "let w=window.open('/new');setTimeout(()=>w.close(),0)")
        + button(
            400, "window.open('','_blank').document.write('<title>Written</title><h1>written by the opener</h1>')"
        ),
        title="Opener",
    )
    async with world.episode("/opener") as e:
        said = await e.click(110, 110)
        assert "new tab" in said and "tab 1" in said and e.observation.active_tab.title == "New"
        assert e.seconds < MOMENT_S
        said = await e.click(110, 110)
        assert "closed itself" in said and e.observation.active_tab.title == "Opener" and len(e.observation.tabs) == 1
        said = await e.click(110, 210)
        assert "2 tabs" in said and len(e.observation.tabs) == 3 and e.observation.active_tab.index == 2
        await e.do(call("close_tab"))
        await e.do(call("close_tab"))
        assert e.observation.active_tab.title == "Opener"
        await e.click(110, 310)
        assert e.result.outcome is None and e.seconds < MOMENT_S
        await e.one("switch_tab", tab_index=0)
        await e.click(110, 410)
        assert e.observation.active_tab.title == "Written", e.result.results[0].feedback


@pytest.mark.parametrize(
    "door",
    [
        f"<a target=_blank href=/new style='{box(100, 100)}'>go</a>",
        f"<a target=_blank rel=opener href=/new style='{box(100, 100)}'>go</a>",
        f"<button style='{box(100, 100)}' onclick=\"window.open('/new')\">go</button>",
        f"<form action=/new target=_blank><button style='{box(100, 100)}'>go</button></form>",
    ],
    ids=["link", "opener", "script", "form"],
)
async def test_a_tab_that_is_slow_to_open_is_waited_for(world, door, monkeypatch):
    """A busy machine takes longer to make a tab than a page takes to be quiet; the page says at once that it asked."""
    world.server.page("/new", "<h1>new</h1>", title="New")
    world.server.page("/door", door)
    async with world.episode("/door") as e:
        stage = e.sandbox.stage
        let_in = stage._let_in

        async def late(page, opener):
            await asyncio.sleep(0.7)
            await let_in(page, opener)

        monkeypatch.setattr(stage, "_let_in", late)
        said = await e.click(110, 110)
        assert "new tab" in said and e.observation.active_tab.title == "New", (said, e.observation.settle)


async def test_calls_after_a_new_tab_are_skipped(world):
    world.server.page("/new", "<h1>new</h1>", title="New")
    world.server.page("/opener2", f"<a target=_blank href=/new style='{box(100, 100)}'>blank</a>")
    async with world.episode("/opener2") as e:
        await e.do(click(110, 110), click(110, 110))
        assert e.result.results[1].feedback.startswith("Skipped:") and len(e.observation.tabs) == 2


async def test_tab_storms_are_capped(world):
    world.server.page("/new", "<h1>new</h1>", title="New")
    world.server.page("/storm", button(100, "for(let i=0;i<12;i++)window.open('/new?'+i)"))
    world.server.page("/storm2", button(100, "setInterval(()=>window.open('/new'),1)"))
    async with world.episode("/storm", max_popups=3) as e:
        said = await e.click(110, 110)
        assert len(e.observation.tabs) <= 4 and "closed at once" in said and e.seconds < 2 * MOMENT_S
    async with world.episode("/storm2", max_popups=3) as e:
        for _ in range(3):
            await e.click(110, 110)
            if e.result.outcome:
                break
            assert len(e.observation.tabs) <= 10
        assert e.result.outcome is None or e.result.outcome.owner is Owner.SITE


async def test_downloads_are_saved_named_and_told(world, tmp_path):
    """Scenario 14."""
    world.server.route("/file", attachment("../../x<y>.txt", b"hello"))
    world.server.route("/file2", attachment("report.pdf", b"%PDF-1.4", "application/pdf"))
    world.server.page(
        "/downloads", f"<a href=/file style='{box(100, 100)}'>file</a><h1>still here</h1>", title="Downloads"
    )
    async with world.episode("/downloads", download_dir=tmp_path) as e:
        said = await e.click(110, 110)
        assert "download" in said and e.observation.active_tab.title == "Downloads" and e.seconds < MOMENT_S
        said += await e.one("wait", seconds=1)
        said = await e.one("goto_url", url=world.server.url("/file2"))
        assert not e.ok and "download" in said and e.result.outcome is None
        await e.one("wait", seconds=1)
        assert e.observation.active_tab.title == "Downloads"
        files = {p.name: p for p in tmp_path.rglob("*") if p.is_file()}
        assert len(files) == 2 and "report.pdf" in files, said
        (other,) = set(files) - {"report.pdf"}
        assert other.endswith("x_y_.txt") and not other.startswith(".") and files[other].read_bytes() == b"hello"
        assert all(tmp_path in p.parents for p in files.values())


async def test_downloads_are_capped_and_can_be_discarded(world, tmp_path):
    world.server.route("/endless", endless_download)
    world.server.page("/downloads2", f"<a href=/endless style='{box(100, 100)}'>file</a><h1>here</h1>")
    async with world.episode("/downloads2", download_dir=tmp_path, max_download_bytes=100_000) as e:
        lines = [await e.click(110, 110)]
        for _ in range(4):
            lines.append(await e.one("wait", seconds=1))
        assert any("failed" in line or "thrown away" in line for line in lines), lines
        assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    async with world.episode("/downloads2") as e:
        said = await e.click(110, 110) + await e.one("wait", seconds=1)
        assert "refused" in said and e.result.outcome is None


async def test_frames_of_other_origins_can_be_clicked_and_typed_in(world):
    """T38, scenario 1: three levels, two ports, two host names (two sites, hence two processes)."""
    inner = f"<body style='margin:0'><input id=f placeholder=Inner style='{box(10, 10)}'><button style='{box(10, 60)}' "
    inner += "onclick=\"this.textContent='pressed'\">press</button>"
    world.other.page("/inner", inner)
    for name, host in (("same", "127.0.0.1"), ("site", "localhost")):
        world.other.page(
            f"/middle-{name}",
            f"<body style='margin:0'><iframe src='{world.other.url('/inner')}' "
            f"style='{box(20, 20, 400, 200)};border:0'>",
        )
        world.server.page(
            f"/outer-{name}",
            f"<iframe src='{world.other.url(f'/middle-{name}', host)}' "
            f"style='{box(100, 100, 500, 300)};border:0'></iframe>",
        )
        async with world.episode(f"/outer-{name}") as e:
            said = await e.click(150, 150)
            assert '<input> "Inner"' in said and "focus" in said, said
            said = await e.one("write", message="into the frame")
            assert e.ok and '"into the frame"' in said and "but" not in said, said
            said = await e.one("write", message="again")
            assert e.ok and "but" not in said, said
            said = await e.click(150, 200)
            assert '<button> "press"' in said
            frame = next(f for f in e.page.frames if f.url.endswith("/inner"))
            assert await frame.evaluate("[f.value, document.querySelector('button').textContent]") == [
                "again",
                "pressed",
            ]
            assert e.seconds < MOMENT_S


@pytest.mark.parametrize("mode", ["open", "closed"])
async def test_shadow_roots_can_be_clicked_and_typed_in(world, mode):
    """Scenario 2, C25."""
    world.server.page(
        f"/shadow-{mode}",
        f"<x-form style='{box(100, 100, 400, 200)};display:block'></x-form>"
        "<script>customElements.define('x-form',class extends "
        f"HTMLElement{{constructor(){{super();const r=this.attachShadow({{mode:'{mode}'}});r.innerHTML='<input "
        'aria-label=Deep style="width:200px;height:30px"><button style="display:block;height:40px">Send it</button>'
        "<p id=o></p>';r.querySelector('button').onclick=()=>{r.querySelector('#o').textContent="
        "'got '+r.querySelector('input').value;document.title=r.querySelector('input').value}}})</script>",
    )
    async with world.episode(f"/shadow-{mode}") as e:
        said = await e.click(150, 115)
        assert '<input> "Deep"' in said, said
        said = await e.one("write", message="deep text")
        assert e.ok and "but" not in said
        said = await e.click(130, 155)
        assert "Send it" in said and e.observation.active_tab.title == "deep text"
        if mode == "open":
            assert "got deep text" in e.observation.changes
        await e.click(900, 900)
        assert not e.result.results[0].facts.get("mismatch") and e.seconds < MOMENT_S


async def test_answers_that_are_no_pages(world):
    """C23: each is feedback, none is a fault of the environment."""

    async def no_content(request):
        return Response(status=204)

    async def unauthorized(request):
        return Response("<h1>who are you</h1>", status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})

    world.server.route("/204", no_content)
    world.server.route("/401", unauthorized)
    world.server.route("/loop", redirect("/loop"))
    world.server.route("/chain3", redirect("/chain2"))
    world.server.route("/chain2", redirect("/plain"))
    world.server.route("/broken.pdf", after(0, b"%PDF-1.4 nothing", "application/pdf"))
    world.server.page(
        "/plain", "<h1>plain page</h1>" + f"<a href=/204 style='{box(100, 100)}'>no content</a>", title="Plain"
    )
    async with world.episode("/plain") as e:
        said = await e.click(110, 110)
        assert "without a new page" in said and e.observation.active_tab.title == "Plain" and e.seconds < MOMENT_S
        said = await e.one("goto_url", url=world.server.url("/204"))
        assert not e.ok and e.observation.active_tab.title == "Plain" and e.seconds < MOMENT_S
        said = await e.one("goto_url", url=world.server.url("/loop"))
        assert not e.ok and "REDIRECTS" in said and e.result.outcome is None
        await e.one("goto_url", url=world.server.url("/chain3"))
        assert e.ok and e.url.endswith("/plain")
        said = await e.one("goto_url", url=world.server.url("/broken.pdf"))
        assert e.result.outcome is None and e.observation.screenshot is not None and e.seconds < 2 * MOMENT_S
        await e.one("goto_url", url=world.server.url("/plain"))
        assert e.ok and e.observation.active_tab.title == "Plain"
        await e.one("goto_url", url=world.server.url("/401"))
        assert e.result.outcome is None or e.result.outcome.key == "blocked/forbidden"
        assert e.seconds < MOMENT_S


async def test_file_choosers_stay_shut(world):
    world.server.page("/upload", f"<input type=file style='{box(100, 100)}'>" + button(300, "document.title='alive'"))
    async with world.episode("/upload") as e:
        said = await e.click(130, 115)
        assert "file" in said and "upload" in said and e.seconds < MOMENT_S
        await e.click(110, 310)
        assert e.observation.active_tab.title == "alive"


@pytest.mark.parametrize("rows", [500, 20000])
async def test_changes_list_at_most_five_and_cost_little_on_a_large_page(world, rows):
    world.server.page(
        "/many",
        button(
            100,
            "for(let i=0;i<9;i++)"
            "document.body.append(Object.assign(document.createElement('button'),{textContent:'n'+i}))",
        )
        + "<div id=h style='position:absolute;top:1200px'></div>"
        f"<script>h.innerHTML='<p>row</p>'.repeat({rows})</script>",
    )
    async with world.episode("/many") as e:
        await e.click(110, 110)
        changes = e.observation.changes
        listed = changes.count('button "n') == 5 and "and 4 more" in changes
        # The look has a deadline of its own: on a huge page and a busy machine it may say nothing, but nothing wrong.
        assert listed or (rows > 500 and not changes)
        assert e.seconds < MOMENT_S
        assert e.result.outcome is None


async def test_the_episode_ends_where_a_wall_is(world):
    """Scenario 19 from the sandbox's side: the classifier itself has its own tests."""
    world.server.page("/plain", "<h1>plain page</h1>" + f"<a href=/429 style='{box(100, 100)}'>shop</a>", title="Plain")
    world.server.page("/429", "<h1>Too many requests</h1>", status=429)
    async with world.episode("/plain") as e:
        await e.click(110, 110)
        assert e.result.outcome.reason is Reason.BLOCKED and e.result.outcome.owner is Owner.SITE
        assert e.result.results[0].feedback.startswith("Succeed:") and e.observation is not None
