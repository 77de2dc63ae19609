"""The report: what it reads from a run folder, what it shows whole, and that hostile words stay words."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import math
import re

import pytest

from owrl_jax.obs import charts
from owrl_jax.obs.charts import Curve, draw, number, ticks
from owrl_jax.obs.episode_parts import reading
from owrl_jax.obs.report import main, report_html, write_report
from owrl_jax.obs.report_episodes import Limits, Pictures, choose
from owrl_jax.obs.run_data import NoRun, load_run
from owrl_jax.pool.journal import Journal
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.types import GroupRequest

from .run_folder import EVIL, make_episode, make_task, make_turn, tokens, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), iterations=6)


@pytest.fixture(scope="module")
def run(folder):
    return load_run(folder)


@pytest.fixture(scope="module")
def page(run):
    return report_html(run, Limits(episodes=20))


# --- Reading ---------------------------------------------------------------------------------------------------------


def test_rows_carry_what_the_learner_would_see(tmp_path):
    """One group of four by hand: rewards 1, 0, none, -1; advantages over the three valid ones."""
    task = make_task(0)
    with Journal(tmp_path / "journal.jsonl") as journal:
        replaced = journal.add_trajectory(make_episode(None, task, "g", 2, how="fault"), attempt=0)
        hows = ["success", "failure", "invalid", "format"]
        members = [
            journal.add_trajectory(make_episode(None, task, "g", i, how=how), attempt=int(i == 2))
            for i, how in enumerate(hows)
        ]
        journal.add_group(GroupRequest(task=task, group_id="g", n=4), members, version=3, reason="complete")
        journal.add_trajectory(make_episode(None, task, "open", 0), attempt=0)
        journal.add_batch(5, ["g"])
    run = load_run(tmp_path)
    rows = run.episodes
    assert [row.reward for row in rows] == [None, 1.0, 0.0, None, -1.0, 1.0]
    std = math.sqrt(((1 - 0) ** 2 + 0 + (-1 - 0) ** 2) / 2)  # mean 0, sample deviation 1
    assert [row.advantage for row in rows[1:5]] == [
        pytest.approx(1 / std, rel=1e-5),
        pytest.approx(0),
        None,
        pytest.approx(-1 / std, rel=1e-5),
    ]
    assert [row.member for row in rows] == [False, True, True, True, True, False]
    assert [row.iteration for row in rows] == [None, 5, 5, 5, 5, None]
    assert rows[0].offset == replaced and run.trajectory(rows[2]).verdict.value.value == "failure"
    assert run.groups["g"].members == (1, 2, 3, 4) and list(run.groups) == ["g"]
    assert [remark.split(":")[0].split(",")[0] for remark in run.remarks] == [
        "There is no config.json",
        "There is no metrics.jsonl",
        "There is no folder screenshots/",
        f"There is no tokenizer at {tmp_path / 'tokenizer'}",
    ]


def test_a_report_is_written_of_whatever_there_is(tmp_path, folder, capsys):
    for name in ("config.json", "metrics.jsonl", "evals.jsonl", "journal.jsonl"):
        part = tmp_path / name.split(".")[0]
        part.mkdir()
        (part / name).write_bytes((folder / name).read_bytes())
        path, remarks = write_report(part)
        assert path == part / "report.html" and path.read_text().startswith("<!doctype html>")
        assert remarks
        assert [p.name for p in part.iterdir()] == [name, "report.html"] or len(list(part.iterdir())) == 2
    with pytest.raises(NoRun, match="is no run folder"):
        load_run(tmp_path / "nowhere")
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "owrl report:" in capsys.readouterr().err


def test_damage_costs_only_what_is_damaged(tmp_path, folder):
    journal = (folder / "journal.jsonl").read_bytes()
    (tmp_path / "journal.jsonl").write_bytes(journal[:-20])
    (tmp_path / "config.json").write_text('{"rl": {"format_error_reward": "much"}, "name": "kept"}')
    run = load_run(tmp_path)
    assert len(run.episodes) > 40 and run.config["name"] == "kept" and run.settings.format_error_reward == -1.0
    assert any("torn" in remark for remark in run.remarks) and any("rl in config" in remark for remark in run.remarks)
    (tmp_path / "config.json").write_text("[1")
    (tmp_path / "journal.jsonl").write_bytes(b"{}\n" + journal)
    run = load_run(tmp_path)
    assert run.episodes == [] and any("journal cannot be read" in remark for remark in run.remarks)
    assert "journal cannot be read" in report_html(run, Limits())


def test_a_recorded_response_is_read_as_it_was():
    good = make_turn(None, 0, "I look.\n</think>\n\n", ())
    said = '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "done", "arguments": {}}\n</tool_call>'
    assert reading(good, said).reasoning == "I look."
    bad = dataclasses.replace(good, parsed=False)
    assert reading(bad, "no call </think>").feedback.startswith("Failed: Nothing was run.")
    assert reading(bad, said) is None  # well formed and yet not parsed: it was cut off
    assert tokens().decode(good.response_ids).startswith("I look.")


# --- What is shown whole ---------------------------------------------------------------------------------------------


def test_newest_and_first_are_among_the_chosen_and_groups_are_whole(run):
    chosen = choose(run, Limits(episodes=20))
    groups = list(dict.fromkeys(row.group for row in run.episodes))
    shown = list(dict.fromkeys(row.group for row in chosen))
    assert groups[-1] in shown and groups[0] in shown and groups[-2] in shown
    assert len(chosen) <= 20
    for name in shown:
        assert [r.number for r in chosen if r.group == name] == [r.number for r in run.episodes if r.group == name]
    assert choose(run, Limits(episodes=10**6)) == list(run.episodes)
    assert choose(run, Limits(episodes=0)) == []
    asked = choose(run, Limits(episodes=1, groups=(groups[3], "no such group")))
    assert {row.group for row in asked} == {groups[3]}


def test_pictures_are_embedded_once_and_within_the_limit(run):
    names = [t.screenshot for row in run.episodes[:8] for t in run.trajectory(row).turns]
    pictures = Pictures(run, Limits())
    tags = [pictures.tag(name) for name in names]
    assert len(pictures.urls) == len(set(names)) < len(tags)
    size = len(next(iter(pictures.urls.values())))
    small = Pictures(run, Limits(picture_bytes=2 * size + size // 2))
    for name in names:
        small.tag(name)
    assert len(small.urls) == 2 and small.left_out == len(set(names)) - 2 and small.bytes <= 2.5 * size
    small.tag("0" * 64)
    assert small.missing == 1 and small.tag(None) == ""


def test_large_pictures_get_smaller_and_stay_pictures(tmp_path):
    import base64
    import io
    import os

    from PIL import Image

    from owrl_jax.types import Screenshot

    out = io.BytesIO()
    noise = Image.frombytes("RGB", (32, 24), os.urandom(32 * 24 * 3)).resize((640, 480), Image.Resampling.BICUBIC)
    noise.save(out, "PNG")
    shot = Screenshot(data=out.getvalue(), width=640, height=480)
    name = ScreenshotStore(tmp_path / "screenshots").put(shot)
    (tmp_path / "config.json").write_text("{}")
    run = load_run(tmp_path)
    url = {}
    for exact in (False, True):
        pictures = Pictures(run, Limits(exact_pictures=exact))
        pictures.tag(name)
        url[exact] = pictures.urls[name]
    assert base64.b64decode(url[True].partition(",")[2]) == shot.data
    small = base64.b64decode(url[False].partition(",")[2])
    assert url[False].startswith("data:image/webp;") and len(small) < len(shot.data) / 3
    with Image.open(io.BytesIO(small)) as again:
        assert again.size == (640, 480)


# --- The page --------------------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_nothing_that_was_said_becomes_markup(page):
    parsed = Page(page)
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    scripts = [attributes.get("id") for tag, attributes in parsed.tags if tag == "script"]
    assert scripts == ["episodes", "pictures", "charts", None]
    assert not [a for t, a in parsed.tags if t == "img" and set(a) != {"alt", "data-shot"}]
    assert page.count("<template id=") == page.count("</template>")
    assert "window.pwned=1" in page and "<b>boxes" not in page
    policy = next(str(a["content"]) for t, a in parsed.tags if t == "meta" and "src" in str(a.get("content")))
    assert policy.startswith("default-src 'none'; img-src data:;") and "script-src 'sha256-" in policy


def test_data_blocks_are_json_and_end_nowhere_early(page):
    blocks = dict(re.findall(r'<script type="application/json" id="(\w+)">(.*?)</script>', page, re.DOTALL))
    assert set(blocks) == {"episodes", "pictures", "charts"}
    assert not any(sign in block for block in blocks.values() for sign in "<>&\u2028")
    rows = json.loads(blocks["episodes"])
    assert any(row["instruction"] == EVIL for row in rows)
    assert sum(row["full"] for row in rows) == page.count("<template id=")


def test_the_same_folder_gives_the_same_bytes(run, page):
    assert report_html(run, Limits(episodes=20)) == page


def test_counts_on_the_page_are_those_of_the_journal(run, page):
    parts = re.search(r'id="outcomes">(.*?)</section>', page, re.DOTALL)[1]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in re.findall(r"<tr.*?</tr>", parts, re.DOTALL)]
    answered = next(row for row in rows if row and row[0] == "completed/answered")
    assert answered[1] == "policy"
    total = sum(row.outcome == "completed/answered" for row in run.episodes)
    assert answered[-1].startswith(f"{total} (")
    assert sum(int(cell) for cell in answered[2:-1] if cell.isdigit()) == total
    gone = next(row for row in rows if row and row[0] == "sandbox_error/browser_gone")
    assert gone[1] == "sandbox"


def test_sums_over_phases_are_no_phases(run, page):
    shares = re.findall(
        r"<i class=.(?:c\d|idle).></i>(\w+) ([\d.]+)%", re.search(r'id="time">(.*?)</section>', page, re.DOTALL)[1]
    )
    assert {name for name, _ in shares} == {"browser", "engine", "learner", "judge", "idle"}
    assert sum(float(share) for _, share in shares) == pytest.approx(100, abs=0.3)


# --- Curves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0.1, 97, [0, 25, 50, 75, 100]),
        (-0.03, 0.01, [-0.03, -0.02, -0.01, 0, 0.01]),
        (5, 5, [4.5, 4.75, 5, 5.25, 5.5]),
    ],
)
def test_ticks_are_round_and_enclose(low, high, expected):
    assert ticks(low, high, 4) == pytest.approx(expected)


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 1), (3, 40), (0, 1234567), (7, 8)])
def test_whole_ticks_are_whole_and_within(low, high):
    found = ticks(low, high, 5, whole=True)
    assert all(v == int(v) for v in found) and min(found) >= low and max(found) <= max(high, low + 1)


def test_numbers_are_short():
    values = [0, 0.25, 1234.5678, 12345, 4.56e6, 7.2e9, -0.00001234, 1e-3]
    assert [number(v) for v in values] == ["0", "0.25", "1235", "12.35k", "4.56M", "7.2G", "-1.23e-5", "0.001"]


def test_points_stand_where_their_values_say():
    chart = draw([Curve(label="a", x=[0, 10], y=[0.0, 1.0])], x_label="iteration", share=True)
    path = re.search(r'class="line" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', chart.svg)
    x0, y0, x1, y1 = map(float, path.groups())
    assert x0 < x1 and y0 > y1  # up is down in SVG
    assert chart.points[0]["at"] == [x0, x1] and chart.points[0]["y"] == ["0.0%", "100.0%"]
    grid = re.findall(r'y1="([\d.]+)"', chart.svg)
    assert float(grid[0]) == y0 and float(grid[4]) == y1  # the lines of 0 % and 100 %


def test_what_is_not_finite_breaks_the_line_and_nothing_else():
    chart = draw([Curve(label="a", x=range(4), y=[1.0, math.nan, 2.0, math.inf])], x_label="iteration")
    assert "nan" not in chart.svg and "inf" not in chart.svg
    assert chart.points[0]["y"] == ["1", "nan", "2", "inf"]
    assert draw([Curve(label="a", x=[], y=[])], x_label="iteration").points[0]["at"] == []


def test_long_series_are_drawn_as_means(monkeypatch):
    monkeypatch.setattr(charts, "MOST_POINTS", 3)
    chart = draw([Curve(label="a", x=range(7), y=[0, 3, 6, math.nan, 1, 1, 9])], x_label="iteration")
    assert chart.points[0]["y"] == ["3", "1", "9"] and chart.points[0]["label"] == "a (means of 3)"
