"""Guards on real pages: the facts come from Chromium through `DESCRIBE_JS`, the expected verdicts from the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from owrl_jax.browser.elements import DESCRIBE_JS, ElementFacts
from owrl_jax.browser.guards import Guards
from tests.browser.egress_world import within
from tests.browser.guard_pages import ALLOWED, GUARDED

ENGINES = [p for p in ("/usr/bin/chromium-headless-shell", "/usr/bin/chromium") if Path(p).exists()]
pytestmark = pytest.mark.skipif(not ENGINES, reason="no Chromium installed")

FIND = "document.getElementById('t') || document.getElementById('h').shadowRoot.getElementById('t')"


def check(guards: Guards, name: str, facts: ElementFacts | None):
    if name.startswith("write "):
        return guards.check_write(facts, "some text") if name != "write a review opens" else guards.check_click(facts)
    if "Enter in" in name:
        return guards.check_key("Control+Enter" if name.startswith("Control") else "Enter", facts)
    return guards.check_click(facts)


async def collect(table) -> dict[str, ElementFacts | None]:
    from playwright.async_api import async_playwright

    found = {}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=ENGINES[0], args=["--no-sandbox"])
        page = await browser.new_page()
        current = {}
        await page.route("**/*", lambda route: route.fulfill(**current, content_type="text/html"))
        for name, (path, body, *_) in table.items():
            current["body"] = f"<!doctype html><meta charset=utf-8><title>t</title><body>{body}"
            await page.goto(f"http://site.test{path}")
            found[name] = ElementFacts.read(await page.evaluate(f"({DESCRIBE_JS})({FIND})"))
        await browser.close()
    return found


@within(120)
async def test_guards_stop_the_last_step_and_nothing_else():
    facts = await collect(GUARDED | ALLOWED)
    wrong = []
    for name, (_, _, expected) in GUARDED.items():
        refusal = check(Guards(), name, facts[name])
        if refusal is None or refusal.detail != expected:
            wrong.append(f"{name}: {refusal}, expected {expected}; {facts[name]}")
            continue
        assert refusal.host == "site.test" and "\n" not in refusal.message and len(refusal.message) < 250
        # The switch of that guard alone lets it through (or hands it to another guard that has its own reason).
        off = check(Guards(**{expected.removesuffix("_guard"): False}), name, facts[name])
        assert off is None or off.detail != expected, name
        # A world that is excepted by host and port is not guarded at all; another port is.
        assert check(Guards(exceptions=frozenset({("site.test", 80)})), name, facts[name]) is None
        assert check(Guards(exceptions=frozenset({("site.test", 81)})), name, facts[name]) is not None
    for name in ALLOWED:
        refusal = check(Guards(), name, facts[name])
        if refusal is not None:
            wrong.append(f"{name}: {refusal.detail} ({refusal.message}); {facts[name]}")
    assert not wrong, "\n".join(wrong)


@within(120)
async def test_a_frame_is_judged_by_its_own_address_and_blank_ones_by_the_page_around():
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=ENGINES[0], args=["--no-sandbox"])
        page = await browser.new_page()
        pages = {
            "world.test": "<iframe src='http://other.test/'></iframe><iframe srcdoc='<button id=t>Pay now</button>'>"
        }
        await page.route(
            "**/*",
            lambda route: route.fulfill(
                content_type="text/html",
                body=next((b for h, b in pages.items() if h in route.request.url), "<button id=t>Pay now"),
            ),
        )
        await page.goto("http://world.test/")
        guards = Guards(exceptions=frozenset({("world.test", 80)}))
        verdicts = {}
        for frame in page.frames[1:]:
            facts = ElementFacts.read(await frame.evaluate(f"({DESCRIBE_JS})(document.getElementById('t'))"))
            verdicts[frame.url] = guards.check_click(facts)
        assert verdicts["http://other.test/"].detail == "purchase_guard"
        assert verdicts["about:srcdoc"] is None
        await browser.close()
