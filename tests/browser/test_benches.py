"""`owrl bench browser`, `episode` and `main` run to their end and say what they promise; no number is judged."""

from __future__ import annotations

import json

import pytest

from owrl_jax.bench import main

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "goals", "rows"),
    [
        ("browser", {"late_pictures_wrong", "step_vs_reference_waits_mean"}, {"step_ms", "start_s_last"}),
        ("main", {"gain", "quickstart"}, {"held_out_success", "minutes", "peak_memory_mib", "share_of_time"}),
        ("episode", {"harness_share_of_episode"}, {"episodes_per_minute", "reset_ms", "share_of_time", "processor"}),
    ],
)
def test_the_quick_form_runs_and_says_that_it_is_one(name, goals, rows, capsys):
    assert main([name, "--quick", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["bench"] == name and result["settings"]["quick"] is True
    assert goals <= {goal["name"] for goal in result["goals"]}
    found = {row["name"].partition("/")[0] for row in result["rows"]}
    assert rows <= found, found
    assert all(row["ours"] >= 0 for row in result["rows"] if not row["name"].startswith("gain_points"))
    if name == "episode":
        shares = {r["name"].rpartition("/")[2]: r["ours"] for r in result["rows"] if "share_of_time/shop" in r["name"]}
        assert 0.9 < shares["harness"] + shares["policy"] + shares["browser"] + shares["queue"] < 1.1
        assert all(r["solved"] == 1 for r in result["rows"] if r["name"].startswith("episodes_per_minute"))
