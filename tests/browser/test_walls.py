"""Walls and their decoys, rendered by real Chromium and collected by the page script.

Each wall has a decoy nearby that shares its words or its parts; the expected verdict is written beside the page by
hand, in `wall_pages`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from owrl_jax.browser.blocks import classify
from owrl_jax.browser.page_facts import COLLECT_JS, PageFacts
from owrl_jax.outcome import Owner
from tests.browser.egress_world import within
from tests.browser.pages import Response
from tests.browser.sandbox_world import world_of
from tests.browser.wall_pages import DECOYS, WALLS

ENGINES = [p for p in ("/usr/bin/chromium-headless-shell", "/usr/bin/chromium") if Path(p).exists()]
pytestmark = pytest.mark.skipif(not ENGINES, reason="no Chromium installed")


@pytest.mark.parametrize("engine", ENGINES[:1], ids=lambda p: Path(p).name)
@within(120)
async def test_walls_are_named_and_decoys_are_not(engine):
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=engine, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 1000})
        wrong, current = [], {}
        await page.route("**/*", lambda route: route.fulfill(**current, content_type="text/html"))
        for name, (status, title, body, *expected) in (WALLS | DECOYS).items():
            path = "/login" if "login" in name and "overlay" not in name and "link" not in name else "/"
            asked = "http://site.test" + ("/account" if name == "login instead of the page" else path)
            current |= {
                "status": status,
                "body": f"<!doctype html><meta charset=utf-8><title>{title}</title><body>{body}",
            }
            await page.goto(f"http://site.test{path}")
            facts = PageFacts.read(await page.evaluate(COLLECT_JS), status=status, requested_url=asked)
            wall = classify(facts)
            if (wall.detail if wall else None) != (expected[0] if expected else None):
                wrong.append(f"{name}: {wall}, expected {expected or None}; {facts}")
            if wall is not None:
                assert wall.outcome().owner == Owner.SITE and wall.confidence >= 0.8 and wall.evidence
        await browser.close()
    assert not wrong, "\n".join(wrong)


@within(120)
async def test_a_form_to_sign_in_is_no_wall_where_the_operator_excepted_the_host():
    """Local worlds have tasks about signing in, and addresses to match; all other walls stay walls there."""
    sign_in = "<h1>Please log in to continue</h1><form><input name=user><input type=password><button>Go</button></form>"
    captcha = "<p>Verify you are human. Complete the CAPTCHA to continue.</p>"
    async with world_of("frames-on-request") as world:
        for kind in ("/login-user.html", "/account/login"):

            async def redirect(request, kind=kind):
                return Response("", status=302, headers={"Location": kind})

            world.server.route("/task", redirect)
            world.server.page(kind, sign_in)
            async with world.episode("/task") as e:
                assert e.result.outcome is None and e.url.endswith(kind)
                await e.one("goto_url", url=world.server.url("/task"))
                assert e.ok and e.result.outcome is None
        world.server.page("/task", captcha, title="Just a moment...")
        async with world.episode("/task") as e:
            assert e.result.outcome is not None and e.result.outcome.key == "blocked/captcha"


@within(120)
async def test_collecting_is_bounded_on_a_huge_page():
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=ENGINES[0], args=["--no-sandbox"])
        page = await browser.new_page()
        await page.set_content("<body><script>for(let i=0;i<40000;i++){let d=document.createElement('div');"
                               "d.textContent='w'+i;document.body.append(d)}</script>")  # fmt: skip
        data = await page.evaluate(COLLECT_JS)
        # A deadline inside the script, not a timing assertion: it must say that it stopped, and have stopped early.
        assert data["truncated"] and data["elements"] <= 20000 and len(data["text"]) <= 3000
        assert classify(PageFacts.read(data, status=200)) is None
        await browser.close()
