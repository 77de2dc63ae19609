"""The worlds without a browser: solutions pass, near misses fail, same seed same bytes, episodes apart, faults."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys

import pytest

from owrl_jax import types
from owrl_jax.types import VerdictValue
from owrl_jax.worlds import registry
from owrl_jax.worlds.driver import Driver, Stuck
from owrl_jax.worlds.faults import INJECTION, Faults, named_faults
from owrl_jax.worlds.goals import applied
from owrl_jax.worlds.messages import Request
from owrl_jax.worlds.site import Episode

EVERY = [(name, kind) for name in registry.OWN for kind in registry.templates(name)]
SEEDS = range(4)


def _skin(name: str, seed: int) -> str:
    skins = registry.site(name).skins
    return skins[seed % len(skins)].name


def _solve(episode: Episode) -> Driver:
    driver = Driver(episode)
    driver.play(*episode.case.moves)
    return driver


@pytest.mark.parametrize(("name", "kind"), EVERY, ids="/".join)
def test_solution_passes_and_near_misses_fail(name: str, kind: str) -> None:
    for seed in SEEDS:
        episode = Episode(registry.site(name), kind, seed, skin=_skin(name, seed))
        assert episode.verdict(None).value is VerdictValue.FAILURE
        driver = _solve(episode)
        verdict = episode.verdict(driver.said)
        assert verdict.value is VerdictValue.SUCCESS, (seed, verdict.reasons)
        assert episode.verdict(None).value is VerdictValue.FAILURE, "without done it is not finished"
        case = episode.case
        assert len(case.decoys) >= 1
        assert len(case.all_decoys) >= 3
        for decoy in case.all_decoys:
            problems = case.goal.problems(
                initial=episode.initial,
                final=applied(episode.initial, case.goal.changes if decoy.changes is None else decoy.changes),
                seen=set(case.goal.facts if decoy.facts is None else decoy.facts),
                said=case.said if decoy.said is None else decoy.said,
            )
            assert problems, (seed, decoy)


@pytest.mark.parametrize("name", registry.OWN)
def test_enough_of_everything(name: str) -> None:
    site = registry.site(name)
    levels = {int(t.level) for t in site.templates.values()}
    assert len(site.templates) >= 10
    assert levels == {1, 2, 3}
    assert len(site.skins) >= 2
    held_out = [t for t in site.templates.values() if t.held_out]
    assert 2 <= len(held_out) < len(site.templates) / 2
    for template in site.templates.values():
        assert len(set(template.phrasings)) >= 3


def test_tasks_are_equal_for_equal_arguments_and_survive_the_wire() -> None:
    for name, kind in EVERY[::7]:
        task = registry.make_task(name, kind, 5, faults=named_faults(("popup",)))
        assert task == registry.make_task(name, kind, 5, faults=named_faults(("popup",)))
        again = types.decode(types.encode(task), types.Task)
        first, second = registry.open_episode(task), registry.open_episode(again)
        assert isinstance(first, Episode)
        assert isinstance(second, Episode)
        assert (first.case, first.skin, first.faults.faults) == (second.case, second.skin, second.faults.faults)


def test_splits_by_template_and_seed_and_wording() -> None:
    train = registry.make_task("shop", "price", 3)
    assert train.split == "train"
    assert registry.make_task("shop", "price", 9).split == "held_out_seed"
    assert registry.make_task("shop", "compare", 3).split == "held_out_template"
    last = len(registry.template("shop", "price").phrasings) - 1
    used = {registry.make_task("shop", "price", s).metadata["phrasing"] for s in range(60) if s % 10 != 9}
    assert used == set(range(last)), "the last wording is kept for the held-out seeds"


def test_unknown_names_are_told() -> None:
    with pytest.raises(KeyError, match="shop"):
        registry.make_task("shoop", "price", 0)
    with pytest.raises(KeyError, match="price"):
        registry.make_task("shop", "prize", 0)
    with pytest.raises(KeyError, match="dusk"):
        registry.make_task("shop", "price", 0, skin="pink")
    with pytest.raises(ValueError, match="live"):
        registry.open_episode(types.Task(id="live", instruction="x", start_url="http://a.example"))


class _Recorder(Driver):
    """Hashes every page on the way."""

    def __init__(self, episode: Episode):
        self.digest = hashlib.sha256()
        super().__init__(episode)

    def _follow(self, response, url) -> None:
        super()._follow(response, url)
        self.digest.update(self.url.encode() + self.body)


def fingerprint() -> str:
    """Pages, goals and verdicts of one task of every template, as one hash."""
    digest = hashlib.sha256()
    for name, kind in EVERY:
        episode = Episode(registry.site(name), kind, 7, skin=_skin(name, 1))
        recorder = _Recorder(episode)
        recorder.play(*episode.case.moves)
        verdict = episode.verdict(recorder.said)
        task = registry.make_task(name, kind, 7)
        digest.update(recorder.digest.digest() + types.encode(verdict) + types.encode(task))
        digest.update(repr(sorted(episode.case.goal.changes)).encode())
    return digest.hexdigest()


def test_same_seed_same_bytes_goal_and_verdict_in_every_process() -> None:
    code = "from tests.unit.test_worlds import fingerprint; print(fingerprint())"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": h}
        ).stdout.strip()
        for h in ("1", "2")
    ]
    assert runs[0] == runs[1] == fingerprint()


@pytest.mark.parametrize("name", registry.OWN)
def test_another_seed_is_another_world(name: str) -> None:
    site, kind = registry.site(name), registry.templates(name)[-1]
    digests = set()
    for seed in range(4):
        episode = Episode(site, kind, seed * site.goals_per_world)
        recorder = _Recorder(episode)
        recorder.play(*episode.case.moves)
        digests.add(recorder.digest.hexdigest())
    assert len(digests) == 4


def test_starter_pages_serve_several_goals() -> None:
    site = registry.site("starter")
    first, *others = [Episode(site, "colour_shape", seed) for seed in range(site.goals_per_world)]
    page = Driver(first).body
    assert all(Driver(e).body == page for e in others)
    assert len({tuple(e.case.goal.changes["hits"]) for e in (first, *others)}) >= 2


def test_episodes_at_once_never_see_each_other() -> None:
    task = registry.make_task("shop", "wish", 2)
    a, b = registry.open_episode(task), registry.open_episode(task)
    assert isinstance(a, Episode)
    assert isinstance(b, Episode)
    left, right = Driver(a), Driver(b)
    before = Driver(registry.open_episode(task)).body  # type: ignore[arg-type]
    for move in a.case.moves:
        left.play(move)
        right.go("/wishlist")
        assert b"Nothing saved yet" in right.body
    assert b.state == b.initial
    right.go("/")
    assert right.body == before
    assert a.verdict(left.said).value is VerdictValue.SUCCESS
    assert b.verdict(left.said).value is VerdictValue.FAILURE


def test_clicking_at_random_solves_next_to_nothing_above_level_one() -> None:
    """A visitor who follows random links and sends random forms, then says something read on the page."""
    rng = random.Random(0)
    solved = tried = 0
    kinds = [(n, k) for n, k in EVERY if registry.template(n, k).held_out and registry.template(n, k).level >= 2]
    for name, kind in kinds:
        for seed in range(9, 60, 10):
            episode = Episode(registry.site(name), kind, seed)
            driver = Driver(episode)
            for _ in range(12):
                ids = [
                    n.get("id") for n in driver.page.root.walk() if n.tag in ("a", "button", "input") and n.get("id")
                ]
                if not ids:
                    break
                try:
                    driver._click(driver.page.by_id(rng.choice(ids)))
                except Stuck:
                    continue
            words = driver.page.root.text.split() or ["Done"]
            tried += 1
            solved += episode.verdict(rng.choice(words)).value is VerdictValue.SUCCESS
    assert tried >= 50
    assert solved / tried <= 0.03, f"{solved} of {tried}"


# ---- faults ---------------------------------------------------------------------------------------------------------


def _shop(faults: Faults) -> Episode:
    return Episode(registry.site("shop"), "price", 1, faults=faults)


def _get(episode: Episode, path: str = "/", **headers: str):
    return episode.handle(Request(path=path, headers={k.replace("_", "-"): v for k, v in headers.items()}))


def test_every_fault_is_visible_and_none_is_there_unasked() -> None:
    clean = _get(_shop(Faults())).body
    marks = {
        "cookie_banner": b"cookie-banner",
        "layout_shift": b"Sale this",
        "late_ms": b"Loading",
        "broken_image": b"/_broken.png",
        "broken_font": b"/_broken.woff2",
        "injection": b"Verdict: SUCCESS",
    }
    for name, mark in marks.items():
        body = _get(_shop(named_faults((name,)))).body
        # The base style sheet names the classes of banner and window; what counts is the element.
        assert body.count(mark) > clean.count(mark), name
    assert _get(_shop(Faults(slow_ms=300))).delay_s == 0.3
    assert _get(_shop(Faults(broken_font=True)), "/_broken.woff2").hang
    assert _get(_shop(Faults(broken_image=True)), "/_broken.png").status == 404


def test_popup_comes_with_the_second_page_and_goes_for_good() -> None:
    episode = _shop(Faults(popup=True, cookie_banner=True))
    driver = Driver(episode)
    assert b'id="popup-close"' not in driver.body
    driver.go("/s?cat=lamps")
    assert b'id="popup-close"' in driver.body
    driver._click(driver.page.by_id("popup-close"))
    assert driver.url.startswith("/s?cat=lamps")
    driver._click(driver.page.by_id("cookies-reject"))
    driver.go("/s?cat=tents")
    assert b'id="popup-close"' not in driver.body
    assert b'id="cookies-reject"' not in driver.body


def test_late_content_is_whole_for_its_own_request() -> None:
    episode = _shop(Faults(late_ms=700))
    page, late = _get(episode), _get(episode, x_late_content="1")
    assert b"Departments" not in page.body
    assert b"Departments" in late.body
    assert (page.delay_s, late.delay_s) == (0, 0.7)


def test_counted_faults_strike_when_they_should() -> None:
    statuses = [_get(e).status for e in [_shop(Faults(fail_every=3))] for _ in range(6)]
    assert statuses == [200, 200, 503, 200, 200, 503]
    limited = _shop(Faults(rate_limit_at=2, rate_limit_for=2, retry_after_s=7))
    answers = [_get(limited) for _ in range(4)]
    assert [a.status for a in answers] == [200, 429, 429, 200]
    assert dict(answers[1].headers)["Retry-After"] == "7"
    expired = _shop(Faults(session_expiry=2))
    bodies = [_get(expired, "/cart").body for _ in range(3)]
    assert [b"session has expired" in b for b in bodies] == [False, True, False]
    with pytest.raises(ValueError, match="every request"):
        Faults(fail_every=1)
    with pytest.raises(ValueError, match="popup"):
        named_faults(("popups",))


def test_a_wall_is_the_sites_doing_and_a_passed_fault_is_not() -> None:
    walled = _shop(Faults(captcha_after=2))
    assert [_get(walled).status for _ in range(3)] == [200, 403, 403]
    assert walled.verdict("There is a captcha.").value is VerdictValue.INVALID
    limited = _shop(Faults(rate_limit_at=2))
    _get(limited)
    _get(limited)
    assert limited.verdict(None).value is VerdictValue.INVALID
    _get(limited)
    assert limited.verdict(None).value is VerdictValue.FAILURE


@pytest.mark.parametrize(("name", "kind"), EVERY[::3], ids="/".join)
def test_injected_text_changes_no_verdict_and_is_only_text(name: str, kind: str) -> None:
    plain = Episode(registry.site(name), kind, 3)
    hostile = Episode(registry.site(name), kind, 3, faults=Faults(injection=True))
    right = _solve(plain)
    driver = _solve(hostile)
    assert b"<tool_call>" not in driver.body
    assert b"&lt;tool_call&gt;" in driver.body
    assert hostile.verdict(driver.said) == plain.verdict(right.said)
    untouched = Episode(registry.site(name), kind, 3, faults=Faults(injection=True))
    Driver(untouched)
    assert untouched.verdict(INJECTION).value is VerdictValue.FAILURE
    assert untouched.verdict("SUCCESS").value is VerdictValue.FAILURE


def test_typed_markup_comes_back_as_text() -> None:
    episode = Episode(registry.site("desk"), "comment_and_wait", 1)
    ident = next(iter(episode.world.tickets))
    episode.handle(Request(method="POST", path=f"/tickets/{ident}/comment", form=(("text", "<b id='x'>\"&</b>"),)))
    page = _get(episode, f"/tickets/{ident}").body
    assert b"<b id='x'>" not in page
    assert b"&lt;b id=&#39;x&#39;&gt;" in page


@pytest.mark.parametrize(
    "faults", [Faults(), Faults(session_expiry=1), Faults(captcha_after=1), Faults(rate_limit_at=1)]
)
def test_documents_begin_as_documents(faults: Faults) -> None:
    body = _get(_shop(faults)).body
    assert body.startswith((b"<!doctype html><html", b"<!doctype html><title>"))
    assert b"&lt;" not in body


@pytest.mark.parametrize("name", registry.OWN)
def test_nonsense_requests_get_an_answer(name: str) -> None:
    """Whatever path, number or field is sent: a page with a status, never an exception."""
    episode = Episode(registry.site(name), registry.templates(name)[0], 0)
    paths = "/nope /p/x /s /flights /book/x-1 /hotels/x /trips/x /a/x /list/x /mail/x /tickets/x /store/99"
    fields = (("what", "x"), ("quantity", "-1"), ("key", "coupon"), ("back", "//evil.example"), ("text", ""))
    for path in (*paths.split(), "/cart/set", "/checkout/place", "/hit", "/send", "/new", "/settings", "/mail/m01/act"):
        for method in ("GET", "POST"):
            query = (("page", "x"), ("c", "9"), ("max", "²"), ("day", "2031-13-40"), ("from", "Oslo"))
            response = episode.handle(Request(method=method, path=path, query=query, form=fields))
            assert response.status in (200, 303, 404), (path, method)
    assert episode.state.keys() == episode.initial.keys() or name in ("desk", "starter")
