"""The report in a real Chromium, from a file: no errors, filters that filter, and hostile words that stay words."""

from __future__ import annotations

import contextlib
import re

import pytest

from owrl_jax.browser.engine import find_browser
from owrl_jax.obs.journal_export import conversations
from owrl_jax.obs.report import write_report
from owrl_jax.obs.report_episodes import Limits
from owrl_jax.obs.run_data import load_run
from tests.unit.run_folder import EVIL, write_run

from .real_run import make_real_run

pytestmark = pytest.mark.browser


@contextlib.asynccontextmanager
async def opened(path, anchor=""):
    """The page of a report, and all that the browser complained about."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:  # an ordinary browser: nothing of a sandbox's flags
        browser = await playwright.chromium.launch(executable_path=find_browser().path, args=["--no-sandbox"])
        context = await browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
        page = await context.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append("a dialog"))
        page.on("request", lambda r: None if r.url[:5] in ("file:", "data:") else complaints.append(r.url))
        await page.goto(f"file://{path}{anchor}")
        yield page, complaints
        await browser.close()


async def words(locator) -> str:
    return await locator.text_content() or ""


async def broken_pictures(page) -> int:
    return await page.evaluate(
        """async () => {
            const all = [...document.querySelectorAll('img')];
            for (const i of all) i.closest('details')?.setAttribute('open', '');
            await Promise.all(all.map((i) => i.decode().catch(() => {})));
            return all.filter((i) => !i.naturalWidth).length;
        }"""
    )


async def test_a_hostile_run_can_be_looked_through(tmp_path):
    folder = write_run(tmp_path / "run", iterations=8)
    run = load_run(folder)
    hostile = next(row.group for row in run.episodes if row.instruction == EVIL)
    path, _ = write_report(folder, limits=Limits(episodes=20, groups=(hostile,)))
    async with opened(path) as (page, complaints):
        rows = page.locator("#rows tbody tr")
        assert await rows.count() == len(run.episodes)

        # Each filter leaves what the journal says it should.
        for field, value in (
            ("verdict", "failure"),
            ("site", "shop.localhost"),
            ("outcome", "sandbox_error/browser_gone"),
        ):
            await page.select_option(f"#filters select[data-field={field}]", f"={value}")
            assert await rows.count() == sum(getattr(row, field) == value for row in run.episodes) > 0
            await page.click("#filters button")
        assert await rows.count() == len(run.episodes)
        await page.fill("#filters input", "onerror")
        evil = [row for row in run.episodes if "onerror" in row.instruction]
        assert await rows.count() == len(evil) == 4
        assert await words(rows.first.locator("td.task")) == EVIL

        # The evil group, side by side and alone: its words can be read, and none of them acted.
        await rows.first.click()
        assert await page.locator(".side").count() == 4
        assert await words(page.locator("#viewer h3.ask")) == EVIL
        assert "member 1" in await words(page.locator(".side").nth(1))
        assert "window.pwned=1" in await words(page.locator("#viewer"))
        assert await broken_pictures(page) == 0 and await page.locator("#viewer img").count() >= 8
        await page.locator(".side .head").nth(1).click()
        assert await page.locator(".side").count() == 0 and await page.locator("#viewer .turn").count() == 3
        assert await page.locator("#viewer .verdict.success").count() == 1
        assert re.search(r"#episode-\d+$", page.url)
        await page.keyboard.press("j")
        await page.fill("#filters input", "")
        assert await page.evaluate("window.pwned") is None
        assert await page.evaluate("document.title") == "tiny <b>boxes – report"

        # Curves can be read off, settings be found.
        svg = page.locator("figure[data-chart] svg").first
        await svg.hover(position={"x": 60, "y": 60})
        assert re.fullmatch(
            r"iteration 0: over valid .*%.*, over all .*%.*", await words(page.locator(".readout").first)
        )
        await page.fill("#settings-filter", "rl.learning_rate")
        assert await page.locator("#settings-table tr:visible").count() == 1
        assert complaints == []

        # A handler that got into the page all the same would not run.
        await page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=window.pwned=3>')")
        await page.wait_for_timeout(200)
        assert await page.evaluate("window.pwned") is None


async def test_a_real_run_is_shown_as_it_was(tmp_path):
    folder = await make_real_run(tmp_path / "run", templates=("write_pick_send",))
    path, remarks = write_report(folder)
    assert remarks == []
    run = load_run(folder)
    oracle, _, random = (run.trajectory(row) for row in run.episodes)
    async with opened(path, anchor="#group-0") as (page, complaints):
        assert await page.locator(".side").count() == 3
        assert await page.locator(".side").first.locator(".turn").count() == len(oracle.turns) + 1  # and the end
        assert await page.locator(".side").nth(2).locator(".turn").count() == len(random.turns) + 1
        assert await broken_pictures(page) == 0 and await page.locator("#viewer img").count() > len(oracle.turns)
        # A mark stands on the picture where the call pointed.
        turn = next(n for n, t in enumerate(oracle.turns) if "point_2d" in t.calls[0].arguments)
        x, y = oracle.turns[turn].calls[0].arguments["point_2d"]
        shot = await page.locator(".side").first.locator(".turn").nth(turn).locator(".shot").bounding_box()
        mark = await page.locator(".side").first.locator(".turn").nth(turn).locator(".mark").first.bounding_box()
        assert mark["x"] + mark["width"] / 2 == pytest.approx(shot["x"] + shot["width"] * x / 1000, abs=3)
        assert mark["y"] + mark["height"] / 2 == pytest.approx(shot["y"] + shot["height"] * y / 1000, abs=3)
        told = await words(page.locator(".side").first)
        for one in oracle.turns:
            for result in one.results:
                assert result.feedback in told
        assert oracle.verdict.rationale in told and "browser" in await words(page.locator("#time"))
        assert complaints == []

    # The exported conversation is, turn by turn, what the policy saw: rendered again, it gives the same text.
    from owrl_jax.models.tokenizer import load_tokenizer
    from owrl_jax.obs.episode_parts import short_pads

    tokens = load_tokenizer(folder / "tokenizer")
    trunk: tuple[int, ...] = ()
    for turn, line in zip(oracle.turns, conversations(run, run.episodes[0], per="turn"), strict=True):
        trunk += turn.trunk_ids
        seen = tokens.decode([*trunk, *turn.leaf_ids, *turn.response_ids])
        text = "<|vision_start|><|image_pad|><|vision_end|>"
        plain = [
            {
                **m,
                "content": m["content"]
                if isinstance(m["content"], str)
                else "".join(p.get("text", text) for p in m["content"]),
            }
            for m in line["messages"]
        ]
        again = tokens.render_chat(plain)
        assert again.rstrip("\n") == re.sub(r"<\|image_pad\|> × \d+", "<|image_pad|>", short_pads(seen)).rstrip("\n")
        (shown,) = [
            p for m in line["messages"] if isinstance(m["content"], list) for p in m["content"] if "image_url" in p
        ]
        assert (folder / shown["image_url"]["url"]).stem == turn.screenshot
