"""Demonstrations: which are chosen; the data set on disk; the pipeline's order and its position."""

import itertools
import json
import random

import pytest

from owrl_jax.data.dataset import DataError, Dataset, write_dataset
from owrl_jax.data.demonstrations import MixedProtocols, SelectionSettings, select
from owrl_jax.data.pipeline import Pipeline, PipelineSettings
from owrl_jax.demonstrate import main
from owrl_jax.outcome import Reason
from owrl_jax.pool.journal import Journal
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.types import Screenshot
from tests.unit.data_world import PICTURES, trajectory


def test_the_shortest_success_of_each_task_is_chosen_whatever_the_order():
    attempts = [
        trajectory(1, task="a", turns=3),
        trajectory(2, task="a", turns=2, tokens=5),
        trajectory(3, task="a", turns=2, tokens=4),  # as few turns, fewer tokens
        trajectory(4, task="a", turns=1, success=False),
        trajectory(5, task="b", turns=1, reason=(Reason.SANDBOX_ERROR, "renderer_crash")),
        trajectory(6, task="c", turns=1, parsed=False),
        trajectory(7, task="d", turns=4),
    ]
    dropped = {"failure": 1, "invalid": 1, "longer_success": 2, "malformed_turn": 1}
    for seed in range(3):
        random.Random(seed).shuffle(attempts)
        found = select(attempts)
        assert [t.group_id for t in found.chosen] == ["g3", "g7"] and found.dropped == dropped
    assert len(found.chosen) + sum(dropped.values()) == len(attempts)
    assert [t.group_id for t in select(attempts, SelectionSettings(whole=False)).chosen] == ["g3", "g6", "g7"]
    assert [t.group_id for t in select(attempts, SelectionSettings(per_task=2)).chosen] == ["g3", "g2", "g7"]


def test_a_site_has_at_most_its_share_and_a_seed_chooses_which():
    many = [trajectory(n, site="big" if n < 20 else f"small{n}") for n in range(25)]
    chosen = {}
    for seed in range(4):
        found = select(many, SelectionSettings(per_site=3, seed=seed))
        sites = [t.task.site for t in found.chosen]
        assert sites.count("big") == 3 and len(sites) == 8 and found.dropped == {"site_cap": 17}
        chosen[seed] = tuple(t.group_id for t in found.chosen)
    assert len(set(chosen.values())) > 1
    assert chosen[0] == tuple(t.group_id for t in select(many[::-1], SelectionSettings(per_site=3)).chosen)


def test_protocols_are_never_mixed():
    with pytest.raises(MixedProtocols, match="2 protocols"):
        select([trajectory(1), trajectory(2, protocol="q")])
    select([trajectory(1), trajectory(2, protocol="q", success=False)])  # what is not chosen does not matter


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "demos"
    some = [trajectory(n) for n in range(10)]
    write_dataset(folder, some, PICTURES.__getitem__)
    return folder, some


def test_what_is_written_is_read(demos):
    folder, some = demos
    dataset = Dataset(folder)
    assert [t for number in range(len(dataset)) for t in dataset[number]] == some
    dataset.check()
    for name in dataset.facts.screenshots:
        assert dataset.screenshot(name) == PICTURES[name]
    assert (dataset.facts.trajectories, dataset.facts.turns, dataset.facts.response_tokens) == (10, 20, 40)
    with pytest.raises(DataError, match="has no screenshot"):
        dataset.screenshot("0" * 64)


def test_siblings_stand_in_one_record(tmp_path):
    import dataclasses

    pair = [trajectory(1), dataclasses.replace(trajectory(2), group_id="g1", index=1)]
    write_dataset(tmp_path / "d", [pair[0], trajectory(3), pair[1]], PICTURES.__getitem__)
    dataset = Dataset(tmp_path / "d")
    assert len(dataset) == 2 and list(dataset[0]) == pair


def test_an_unfinished_changed_or_wrong_data_set_is_refused(demos, tmp_path):
    with pytest.raises(DataError, match="no finished data set"):
        Dataset(tmp_path)
    with pytest.raises(DataError, match="no trajectory"):
        write_dataset(tmp_path / "none", [], PICTURES.__getitem__)
    with pytest.raises(DataError, match="do not have that hash"):
        write_dataset(tmp_path / "wrong", [trajectory(1)], lambda name: b"other")
    with pytest.raises(DataError, match="protocols"):
        write_dataset(tmp_path / "mixed", [trajectory(1), trajectory(2, protocol="q")], PICTURES.__getitem__)
    assert list(tmp_path.iterdir()) == []  # a failed one leaves nothing
    with pytest.raises(DataError, match="exists"):
        write_dataset(demos[0], [trajectory(1)], PICTURES.__getitem__)
    write_dataset(tmp_path / "d", [trajectory(1)], PICTURES.__getitem__)
    facts = json.loads((tmp_path / "d" / "dataset.json").read_text())
    (tmp_path / "d" / "dataset.json").write_text(json.dumps(facts | {"fingerprint": "0" * 64}))
    with pytest.raises(DataError, match="not those it was built with"):
        Dataset(tmp_path / "d").check()


def names(some):
    return [t.group_id for t in some]


def test_every_epoch_has_everything_once_in_another_order(demos):
    flow = Pipeline(Dataset(demos[0]), PipelineSettings(groups=5), names)
    epochs = [list(itertools.chain(*itertools.islice(flow, 2))) for _ in range(3)]
    assert all(sorted(epoch) == sorted(names(demos[1])) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = Pipeline(Dataset(demos[0]), PipelineSettings(groups=5, ahead=0), names)
    assert [list(itertools.chain(*itertools.islice(again, 2))) for _ in range(3)] == epochs
    other = Pipeline(Dataset(demos[0]), PipelineSettings(groups=5, seed=1), names)
    assert list(itertools.chain(*itertools.islice(other, 2))) != epochs[0]


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 4, 7])
def test_a_position_is_resumed_exactly(demos, stop, ahead):
    settings = PipelineSettings(groups=3, ahead=ahead)
    whole = list(itertools.islice(Pipeline(Dataset(demos[0]), settings, names), 12))
    first = Pipeline(Dataset(demos[0]), settings, names)
    head = list(itertools.islice(first, stop))
    state = json.loads(json.dumps(first.state()))
    second = Pipeline(Dataset(demos[0]), settings, names)
    second.restore(state)
    assert head + list(itertools.islice(second, 12 - stop)) == whole


def test_a_position_in_other_data_or_of_other_settings_is_refused(demos, tmp_path):
    state = Pipeline(Dataset(demos[0]), PipelineSettings(groups=2), names).state()
    write_dataset(tmp_path / "other", [trajectory(n) for n in range(9)], PICTURES.__getitem__)
    with pytest.raises(DataError, match="fingerprint"):
        Pipeline(Dataset(tmp_path / "other"), PipelineSettings(groups=2), names).restore(state)
    with pytest.raises(DataError, match="groups=2"):
        Pipeline(Dataset(demos[0]), PipelineSettings(groups=3), names).restore(state)
    with pytest.raises(DataError, match="larger than"):
        Pipeline(Dataset(demos[0]), PipelineSettings(groups=11), names)


def test_the_command_builds_from_a_run(tmp_path, capsys):
    run = tmp_path / "run"
    store = ScreenshotStore(run / "screenshots")
    for data in PICTURES.values():
        store.put(Screenshot(data=data, width=32, height=32))
    some = [trajectory(1, task="a"), trajectory(2, task="a", turns=1), trajectory(3, success=False)]
    with Journal(run / "journal.jsonl") as journal:
        for one in some:
            journal.add_trajectory(one, attempt=0)
    assert main(["build", str(run), str(tmp_path / "demos")]) == 0
    assert "1 trajectories of 1 tasks" in capsys.readouterr().out
    assert list(Dataset(tmp_path / "demos")[0]) == [some[1]]
    assert main(["show", str(tmp_path / "demos"), "--check"]) == 0
    assert main(["build", str(run), str(tmp_path / "demos")]) == 1  # it is there
    assert main(["build", str(tmp_path / "nothing"), str(tmp_path / "x")]) == 1
    assert "no journal" in capsys.readouterr().err
    assert main(["frobnicate"]) == 2
