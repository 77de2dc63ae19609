"""Oracles solve tasks in real Chromium with the agent's tools, also with faults; random calls do not."""

from __future__ import annotations

import json
import random

import pytest

from owrl_jax.agent.tools import TOOL_NAMES
from owrl_jax.types import ToolCall, VerdictValue
from owrl_jax.worlds import make_task, named_faults, registry
from owrl_jax.worlds.cli import main
from owrl_jax.worlds.trial import Trial

pytestmark = pytest.mark.browser

# One of each site, with as many kinds of widgets as that gives: facets and sorting, calendar and suggestions, table,
# mail and forms, map. The slow tests play all templates.
SAMPLE = (
    ("shop", "attribute_filter_sort"),
    ("travel", "book_cheapest_nonstop"),
    ("knowledge", "extreme"),
    ("desk", "ticket_from_mail"),
    ("locator", "choose_pin"),
)
STANDARD = (1280, 1000)


async def _all_solved(trial: Trial, tasks) -> None:
    results = [(task.id, await trial.run(task)) for task in tasks]
    assert not [(name, r.why, r.turns[-3:]) for name, r in results if not r.solved]
    for _, result in results:
        assert all(reasoning and calls for reasoning, calls, _ in result.turns)


async def test_a_sample_of_every_site_is_solved() -> None:
    async with Trial(STANDARD) as trial:
        await _all_solved(trial, [make_task(name, kind, 11) for name, kind in SAMPLE])


async def test_the_starter_site_is_solved_at_its_smallest_and_largest() -> None:
    for side in (128, 320):
        async with Trial((side, side)) as trial:
            await _all_solved(trial, [make_task("starter", kind, 3) for kind in registry.templates("starter")[2::4]])


@pytest.mark.parametrize(
    "names",
    [
        ("cookie_banner", "popup", "broken_image", "injection"),
        ("late_ms", "layout_shift", "broken_font"),
        ("slow_ms", "session_expiry", "late_ms"),
    ],
    ids="+".join,
)
async def test_solved_in_spite_of(names: tuple[str, ...]) -> None:
    async with Trial(STANDARD) as trial:
        clean = await trial.run(make_task("travel", "count_flights", 1))
        faulty = await trial.run(make_task("travel", "count_flights", 1, faults=named_faults(names)))
        assert clean.solved, clean.why
        assert faulty.solved, (faulty.why, faulty.turns)
        if "cookie_banner" in names:
            assert len(faulty.turns) == len(clean.turns) + 2, "banner and window each cost a turn"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("captcha_after", "blocked/captcha"),
        ("rate_limit_at", "blocked/rate_limited"),
        ("fail_every", "environment_error/http_5xx"),
    ],
)
async def test_walls_end_the_episode_as_the_sites_doing(name: str, key: str) -> None:
    async with Trial(STANDARD) as trial:
        result = await trial.run(make_task("shop", "price", 1, faults=named_faults((name,))))
    assert result.outcome is not None
    assert result.outcome.key == key
    assert not result.outcome.trains
    assert result.verdict.value is VerdictValue.INVALID


def _random_call(rng: random.Random) -> ToolCall:
    point = [rng.randrange(1001), rng.randrange(1001)]
    words = ("lamp", "Oslo", "yes", "no", "3", "12", "blue")
    arguments = {
        "click": {"point_2d": point},
        "write": {"message": rng.choice(words)},
        "press_keys": {"keys": [rng.choice(("Enter", "Tab", "Escape"))]},
        "scroll": {"direction": rng.choice(("down", "up")), "amount": 0.5},
        "hover": {"point_2d": point},
        "go_back": {},
    }
    name = rng.choice(["click"] * 5 + [n for n in TOOL_NAMES if n in arguments])
    return ToolCall(name=name, arguments=arguments[name])


@pytest.mark.parametrize(
    "name", ["shop", *(pytest.param(n, marks=pytest.mark.slow) for n in ("travel", "knowledge", "desk", "locator"))]
)
async def test_random_calls_solve_nothing_above_level_one(name: str) -> None:
    rng, solved, tried = random.Random(1), [], 0
    async with Trial(STANDARD) as trial:
        for kind in registry.templates(name):
            if not (registry.template(name, kind).held_out and registry.template(name, kind).level >= 2):
                continue
            visit = await trial.worlds.open(make_task(name, kind, 19))
            await trial.sandbox.reset(visit.task)
            for _ in range(3):
                await trial.sandbox.step([_random_call(rng) for _ in range(3)])
            last = await trial.sandbox.step([ToolCall(name="done", arguments={"response": rng.choice(("Yes", "3"))})])
            tried += 1
            if visit.verdict(last.answer).value is VerdictValue.SUCCESS:
                solved.append(visit.task.id)
    assert tried and not solved


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.OWN)
async def test_every_template_is_solved(name: str) -> None:
    async with Trial(registry.site(name).viewport) as trial:
        tasks = [make_task(name, kind, 9) for kind in registry.templates(name)]
        await _all_solved(trial, tasks)


def test_rates_are_measured_bit_by_bit(tmp_path, capsys) -> None:
    """What was measured stays; an interrupted run goes on where it ended."""
    out = tmp_path / "rates.json"
    kinds = registry.templates("starter")
    for done in (1, 2):
        call = ["rate", "--site", "starter", "--seeds", "2", "--minutes", "0.001", "--out", str(out)]
        assert main(call) == 0
        said = capsys.readouterr().out
        assert json.loads(out.read_text()) == {f"starter/{kind}": [2, 2] for kind in kinds[:done]}
        assert f"{len(kinds) - done} templates are left" in said
    assert main(["list", "--site", "starter", "--markdown", "--rates", str(out)]) == 0
    assert capsys.readouterr().out.count("| 2/2 |") == 2
