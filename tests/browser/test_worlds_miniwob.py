"""MiniWoB++ in real Chromium: loads, reports its instruction, can be solved with our tools, and is the same twice."""

from __future__ import annotations

import asyncio

import pytest

from owrl_jax.worlds import make_task, miniwob
from owrl_jax.worlds.miniwob_oracle import SOLVERS
from owrl_jax.worlds.trial import Trial

pytestmark = pytest.mark.browser

_DOCUMENT = "() => (document.querySelector('#wrap') || document.body).outerHTML"


def _trial() -> Trial:
    return Trial(miniwob.VIEWPORT, dpr=miniwob.DPR)


async def _look(trial: Trial, name: str, seed: int) -> tuple[str, str]:
    """Instruction and document of one visit; without the settling of a reset, since there are many."""
    visit = await trial.worlds.open(make_task("miniwob", name, seed))
    page = trial.sandbox.stage.active.page  # type: ignore[union-attr]
    await page.goto(visit.start_url, wait_until="load")
    for _ in range(500):
        if visit.episode.instruction:
            break
        await asyncio.sleep(0.01)
    assert visit.episode.instruction != "", name
    assert "[object" not in visit.instruction, name
    return visit.instruction, await page.evaluate(_DOCUMENT)


async def test_solved_with_our_tools() -> None:
    async with _trial() as trial:
        for name in ("click-button", "enter-text", "click-checkboxes", "choose-list", "login-user"):
            result = await trial.run(make_task("miniwob", name, 1))
            assert result.solved, (name, result.why, result.turns)


async def test_a_wrong_click_fails_and_a_second_try_does_not_help() -> None:
    from owrl_jax.types import ToolCall

    async with _trial() as trial:
        visit = await trial.worlds.open(make_task("miniwob", "click-test-2", 0))
        await trial.sandbox.reset(visit.task)
        page = trial.sandbox.stage.active.page  # type: ignore[union-attr]
        middle = """(text) => {
          const b = [...document.querySelectorAll('#area button')].find((b) => b.textContent === text);
          const box = b.getBoundingClientRect();
          return [(box.left + box.width / 2) / innerWidth * 1000, (box.top + box.height / 2) / innerHeight * 1000];
        }"""
        wrong, right = await page.evaluate(middle, "TWO"), await page.evaluate(middle, "ONE")
        for point in (wrong, right):
            await trial.sandbox.step([ToolCall(name="click", arguments={"point_2d": point})])
        verdict = visit.verdict("Done.")
        assert verdict.value.value == "failure"
        assert "raw reward -1" in verdict.rationale


async def test_zoomed_for_a_large_viewport() -> None:
    async with Trial((640, 840)) as trial:
        for name in ("click-button", "enter-text", "click-tab"):
            result = await trial.run(miniwob.make_task(name, 2, zoom=4))
            assert result.solved, (name, result.why)


async def test_the_sandbox_opens_tasks_that_look_like_something_else() -> None:
    """Login forms and the like are no walls here."""
    async with _trial() as trial:
        for name in ("login-user-popup", "social-media", "buy-ticket"):
            visit = await trial.worlds.open(make_task("miniwob", name, 3))
            result = await trial.sandbox.reset(visit.task)
            assert result.outcome is None, (name, result.outcome)
            assert visit.instruction == visit.episode.instruction != ""


@pytest.mark.slow
async def test_every_task_loads_and_the_steady_ones_are_the_same_twice() -> None:
    async with _trial() as trial:
        first = await trial.worlds.open(make_task("miniwob", "click-test", 0))
        await trial.sandbox.reset(first.task)
        async with trial.sandbox.stage.camera.running():  # type: ignore[union-attr]  # pages need frames to start
            differ = {name for name in miniwob.tasks() if await _look(trial, name, 3) != await _look(trial, name, 3)}
    assert differ <= miniwob.NON_DETERMINISTIC
    assert len(miniwob.tasks()) - len(miniwob.NON_DETERMINISTIC) >= 100


@pytest.mark.slow
async def test_every_solver_solves() -> None:
    async with _trial() as trial:
        results = {name: await trial.run(make_task("miniwob", name, 3)) for name in SOLVERS}
    assert not {k: (r.why, r.turns) for k, r in results.items() if not r.solved}
