"""Task sources: repeatable draws, held-out tasks that are never drawn, weights that follow what was observed."""

from collections import Counter

import pytest

from owrl_jax.config import ConfigError, DataSettings
from owrl_jax.data.tasks import TaskSource, kind_of
from owrl_jax.outcome import Outcome, Reason
from owrl_jax.types import Task, Trajectory, Verdict, VerdictValue, encode


def source(*names, seed=3, **fields):
    return TaskSource.of(DataSettings(tasks=names, **fields), seed=seed)


def ended(task, *values):
    outcome = Outcome(reason=Reason.COMPLETED, detail="answered")
    return [
        Trajectory(
            task=task, group_id="g", index=i, protocol="p", turns=(), outcome=outcome,
            verdict=Verdict(value=value, judge="program"),
        )
        for i, value in enumerate(values)
    ]  # fmt: skip


def test_draws_are_repeatable_and_held_out_tasks_are_never_drawn():
    first, again, other = source("worlds:starter"), source("worlds:starter"), source("worlds:starter", seed=4)
    drawn = [first.draw(n) for n in range(600)]
    assert drawn == [again.draw(n) for n in range(600)] and drawn != [other.draw(n) for n in range(600)]
    held_out = first.held_out(60)
    assert held_out == again.held_out(60) == other.held_out(60)
    assert not {t.id for t in held_out} & {t.id for t in drawn} and {t.split for t in drawn} == {"train"}
    assert all(t.seed is not None and t.seed >= 1000 and t.split != "train" for t in held_out)
    kinds = {k.name for k in first.kinds}
    assert set(Counter(kind_of(t) for t in held_out).values()) <= {4, 5} and {kind_of(t) for t in drawn} == kinds
    assert "starter/place" not in kinds  # held out as a whole


def test_names_and_tables(tmp_path):
    (kind,) = source("worlds:starter/word", instances=20).kinds
    assert kind.name == "starter/word" and kind.instances == 18  # every tenth seed is held out
    table = tmp_path / "tasks.jsonl"
    rows = [
        Task(id=f"{site}{n}", instruction="find", start_url=f"https://{site}/", site=site, split=split)
        for site in ("a.org", "b.org")
        for n, split in enumerate(["train", "train", "test"])
    ]
    table.write_bytes(b"\n".join(encode(row) for row in rows) + b"\n\n")
    both = source(str(table), "worlds:starter/word")
    assert [k.name for k in both.kinds] == ["a.org", "b.org", "starter/word"]
    assert {both.draw(n).id for n in range(200)} >= {"a.org0", "a.org1", "b.org0", "b.org1"}
    assert [t.id for t in source(str(table)).held_out(2)] == ["a.org2", "b.org2"]
    with pytest.raises(ConfigError, match="only 2 held-out"):
        source(str(table)).held_out(3)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("worlds:nowhere",), "no site 'nowhere'"),
        (("worlds:starter/nothing",), "nothing"),
        (("worlds:starter/place",), "held out as a whole"),
        (("worlds:starter", "worlds:starter/word"), "starter/word twice"),
        (("tasks.jsonl",), "no table tasks.jsonl"),
    ],
)
def test_wrong_names_are_told(names, message):
    with pytest.raises(ConfigError, match=message):
        source(*names)


def test_a_damaged_table_names_the_line(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"id": "a", "instruction": "b", "start_url": "http://c/"}\n{"id": ""}\n')
    with pytest.raises(ConfigError, match=r"t.jsonl, line 2: .*instruction"):
        source(str(tmp_path / "t.jsonl"))


def test_adaptive_weights_follow_the_success_rates_of_valid_outcomes():
    names = ("worlds:starter/pair_colour", "worlds:starter/word", "worlds:starter/single")
    yes, no, unsure = VerdictValue.SUCCESS, VerdictValue.FAILURE, VerdictValue.INVALID
    adaptive = source(*names, sampling="adaptive")
    assert adaptive.weights() == pytest.approx([1 / 3] * 3)
    for _ in range(100):
        adaptive.observe(ended(adaptive.kinds[0].make(0), yes, yes))  # p = 1: teaches nothing
        adaptive.observe(ended(adaptive.kinds[1].make(0), yes, no, unsure))  # p = 1/2: the judge's doubt is no failure
        adaptive.observe(ended(adaptive.kinds[2].make(0), unsure, unsure))  # nothing is known of it
    floor = 0.1 / 3
    assert adaptive.weights() == pytest.approx([floor, floor + 0.45, floor + 0.45])
    again = source(*names, sampling="adaptive")
    again.restore(adaptive.state())
    assert [again.draw(n) for n in range(50)] == [adaptive.draw(n) for n in range(50)]
    drawn = Counter(kind_of(adaptive.draw(n)) for n in range(1000))
    assert drawn["starter/pair_colour"] < 80
    uniform = source(*names)
    uniform.observe(ended(uniform.kinds[0].make(0), yes, yes))
    assert uniform.weights() == pytest.approx([1 / 3] * 3)
