"""Recording and replay: what is written while an episode runs, that nothing secret is, and what a replay finds."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest

from owrl_jax.bench._browser_pages import COUNT, FIELD, FILL, LINK, Answer, PageServer
from owrl_jax.browser.config import EngineConfig
from owrl_jax.browser.replay import BadRecording, changed_share, load, replay
from tests.browser.pool_world import call, click, ending, fresh_tag, observed, pool_on, task

pytestmark = pytest.mark.browser

TURNS = (
    [click(COUNT)],
    [click(FIELD), call("write", message="some words")],
    [click(LINK)],
    [click(FILL)],
    [call("scroll", direction="down", amount=0.5)],
    [call("done", response="the answer")],
)


@pytest.fixture
async def site():
    async with PageServer() as server:
        yield server


async def record(site: PageServer, folder: Path, path: str = "/late?n=0", turns=TURNS) -> Path:
    async with pool_on(site.port, record_dir=folder) as pool, pool.episode() as sandbox:
        observed(await sandbox.reset(task(site.url + path)))
        for calls in turns:
            result = await sandbox.step(calls)
            assert all(r.status.value == "ok" for r in result.results), result.results
    return only(folder)


def only(folder: Path) -> Path:
    (child,) = folder.iterdir()
    return child


def run(recorded: Path, **options):
    return replay(load(recorded), engine=EngineConfig(tag=fresh_tag()), **options)


async def test_a_recording_replays_without_the_network_and_agrees(site, tmp_path):
    recorded = await record(site, tmp_path)
    entries = load(recorded).entries
    assert [e.step for e in entries] == [0, 1, 2, 3, 4, 5, 6] and entries[-1].answer == "the answer"
    assert entries[-1].outcome is not None and entries[-1].outcome.key == "completed/answered"
    before = site.hits.copy()
    report = await run(recorded)
    assert report.difference is None, report.difference
    assert (report.agreed, report.steps) == (7, 7)
    assert site.hits == before, "every request was answered from the recording"


@pytest.mark.parametrize("change", ["feedback", "page", "picture", "missing request"])
async def test_a_replay_names_the_first_step_that_differs(site, tmp_path, change):
    recorded = await record(site, tmp_path, turns=TURNS[:4])
    har_path = recorded / "traffic.har"
    har = har_path.read_text()
    lines = (recorded / "actions.jsonl").read_text().splitlines()
    if change == "feedback":
        entry = json.loads(lines[2])
        entry["results"][1]["feedback"] = "Something else."
        lines[2] = json.dumps(entry)
        expected = (2, "feedback")
    elif change == "page":
        assert "<title>late 1</title>" in har
        har = har.replace("<title>late 1</title>", "<title>another</title>")
        expected = (3, None)
    elif change == "picture":
        assert "background:#ddd" in har
        har = har.replace("background:#ddd", "background:#d00")
        expected = (0, "screenshot")
    else:
        document = json.loads(har)
        rows = document["log"]["entries"]
        document["log"]["entries"] = [r for r in rows if "/late?n=1" not in r["request"]["url"]]
        har = json.dumps(document)
        expected = (3, None)
    har_path.write_text(har)
    (recorded / "actions.jsonl").write_text("\n".join(lines) + "\n")
    report = await run(recorded)
    assert report.difference is not None and report.difference.step == expected[0]
    assert expected[1] in (None, report.difference.what) and report.agreed == expected[0]
    assert report.difference.recorded != report.difference.replayed


async def test_nothing_secret_reaches_the_disk(site, tmp_path):
    """A password typed into its field, the request it is sent with, and the cookie that comes back."""
    secret, cookie = "hunter2-Zyx!", "session-cookie-value-123"
    site.answers["/login"] = Answer(
        headers=(("Set-Cookie", f"sid={cookie}"),),
        body=b"<title>in</title><body style='margin:0'><input id=p type=password style='position:absolute;left:425px;"
        b"top:20px;width:190px;height:40px'><script>p.oninput=()=>fetch('/check',{method:'POST',"
        b"body:'p='+encodeURIComponent(p.value)})</script>",
    )
    site.answers["/check"] = Answer(body=b"no", kind="text/plain")
    async with pool_on(site.port, record_dir=tmp_path) as pool, pool.episode() as sandbox:
        observed(await sandbox.reset(task(site.url + "/login")))
        await sandbox.step([click(FIELD), call("write", message=secret)])
        await sandbox.step([call("wait", seconds=1)])
    (recorded,) = tmp_path.iterdir()
    written = b"\n".join(p.read_bytes() for p in recorded.rglob("*.*") if p.suffix != ".png")
    assert b"/login" in written and b"write" in written
    assert cookie.encode() not in written
    for spelling in (secret, quote(secret), secret[:-1], quote(secret[:-2])):  # the page sends it letter by letter
        assert spelling.encode() not in written, spelling
    assert b"[redacted]" in written


@pytest.mark.parametrize(
    ("field", "way"),
    [
        ("type=password", "one call"),
        ("autocomplete=one-time-code", "a call for each key"),
        ("type=password", "by way of another field"),
    ],
)
async def test_a_secret_that_is_typed_key_by_key_does_not_reach_the_disk(site, tmp_path, field, way):
    secret = "Qz7kwv"
    site.answers["/pin"] = Answer(
        body=f"<title>in</title><body style='margin:0'><input id=u style='position:absolute;left:5px;top:20px;"
        f"width:90px;height:40px'><input id=p {field} style='position:absolute;left:425px;top:20px;width:190px;"
        "height:40px'><script>p.oninput=()=>fetch('/check?p='+p.value,{method:'POST',body:'p='+p.value})"
        "</script>".encode()
    )
    site.answers["/check"] = Answer(body=b"no", kind="text/plain")
    keys = ["Shift+q", *secret[1:]]
    other = click((50, 40))
    turns = {
        "one call": [[click(FIELD), call("press_keys", keys=keys)]],
        "a call for each key": [[click(FIELD), *(call("press_keys", keys=[key]) for key in keys)]],
        "by way of another field": [[other, call("press_keys", keys=["a", "Tab", *keys])]],
    }[way]
    async with pool_on(site.port, record_dir=tmp_path) as pool, pool.episode() as sandbox:
        observed(await sandbox.reset(task(site.url + "/pin")))
        for calls in turns:
            result = await sandbox.step(calls)
            assert [r.status for r in result.results] == ["ok"] * len(calls), result.results
        assert await sandbox.inner.inner.stage.active.page.evaluate("p.value") == secret
        await sandbox.step([call("wait", seconds=1)])
    (recorded,) = tmp_path.iterdir()
    written = b"\n".join(p.read_bytes() for p in recorded.rglob("*.*") if p.suffix != ".png").decode()
    assert "/check" in written and "press_keys" in written
    for spelling in (secret, secret[1:], secret[:-1], json.dumps(keys), ", ".join(secret[1:4]), '"k", "w"', '"k","w"'):
        assert spelling not in written, spelling


async def test_a_full_disk_ends_the_episode_and_keeps_what_was_written(site, tmp_path):
    async with pool_on(site.port, record_dir=tmp_path) as pool, pool.episode() as sandbox:
        observed(await sandbox.reset(task(site.url + "/light")))
        (recorded,) = tmp_path.iterdir()
        kept = (recorded / "actions.jsonl").read_text()
        shutil.move(recorded / "actions.jsonl", recorded / "kept.jsonl")
        os.symlink("/dev/full", recorded / "actions.jsonl")
        result = await sandbox.step([click(COUNT)])
        assert ending(result).key == "sandbox_error/disk_full" and not ending(result).retryable
        assert "No space left" in ending(result).message and len(result.results) == 1
    assert len(kept.splitlines()) == 1 and (recorded / "kept.jsonl").read_text() == kept


async def test_a_recording_is_never_written_over(site, tmp_path):
    from owrl_jax.browser.record import RecordingSandbox
    from tests.browser.pool_world import local_sandbox

    class Nothing:
        async def close(self):
            await asyncio.sleep(0)

    (tmp_path / "meta.json").write_text("mine")
    sandbox = RecordingSandbox(Nothing(), tmp_path, config=local_sandbox(site.port))  # type: ignore[arg-type]
    result = await sandbox.reset(task(site.url))
    assert ending(result).key == "sandbox_error/disk_full" and (tmp_path / "meta.json").read_text() == "mine"
    await sandbox.close()


@pytest.mark.parametrize("broken", ["nothing", "format", "torn line", "no traffic", "garbage line"])
async def test_folders_that_cannot_be_replayed(site, tmp_path, broken):
    recorded = await record(site, tmp_path, "/light", TURNS[:1])
    actions = recorded / "actions.jsonl"
    if broken == "torn line":
        actions.write_text(actions.read_text() + '{"step": 2, "cal')
        assert len(load(recorded).entries) == 2
        return
    if broken == "nothing":
        (recorded / "meta.json").unlink()
    elif broken == "format":
        meta = json.loads((recorded / "meta.json").read_text())
        (recorded / "meta.json").write_text(json.dumps({**meta, "format": 99}))
    elif broken == "garbage line":
        actions.write_text("what?\n" + actions.read_text())
    else:
        (recorded / "traffic.har").unlink()
    with pytest.raises(BadRecording):
        await run(recorded)


def test_the_share_of_changed_pixels():
    import io

    from PIL import Image

    def encoded(image):
        out = io.BytesIO()
        image.save(out, "PNG")
        return out.getvalue()

    base = Image.new("RGB", (100, 50), "white")
    other = base.copy()
    other.paste((0, 0, 0), (0, 0, 10, 10))
    assert changed_share(encoded(base), encoded(other)) == pytest.approx(100 / 5000)
    assert changed_share(encoded(base), encoded(Image.new("RGB", (100, 50), (250, 250, 250)))) == 0.0
    assert changed_share(encoded(base), encoded(Image.new("RGB", (99, 50), "white"))) == 1.0
