"""The `owrl` command, the report of a benchmark, and `owrl config`."""

import importlib
import json
import math
import subprocess
import sys
import types

import pytest

import owrl_jax.bench as bench
from owrl_jax import __version__
from owrl_jax.bench.report import BenchResult, Goal, Row, format_json, format_text, machine_facts
from owrl_jax.cli import COMMANDS, Command, main
from owrl_jax.config import RlSettings, RunConfig, config_hash, from_json, load_preset

MACHINE = {"cpus": 2, "model": "a processor", "mem_gib": 23.4}


def test_help_names_every_command_once_with_its_line(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for command in COMMANDS:
        assert [line for line in lines if line.split()[:1] == [command.name]] == [
            f"  {command.name:<10}  {command.help}"
        ]


def test_every_command_in_the_table_exists():
    for command in COMMANDS:
        module, _, function = command.target.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), command


@pytest.mark.parametrize(
    ("word", "hint"),
    [("dcotor", "Did you mean 'owrl doctor'?"), ("benhc", "Did you mean 'owrl bench'?"), ("zzz", "`owrl --help`")],
)
def test_an_unknown_command_names_the_nearest(capsys, word, hint):
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert repr(word) in error
    assert hint in error


def test_exit_codes(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"owrl {__version__}\n"
    assert main([]) == 2
    assert main(["quickstart", "--rl.epochs", "0"]) == 2
    assert "rl.epochs=0" in capsys.readouterr().err
    assert main(["test"]) == 2
    assert "./owrl test" in capsys.readouterr().err


def test_the_console_script_passes_the_exit_code_on():
    done = subprocess.run([sys.executable, "-m", "owrl_jax.cli", "test"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


def test_arguments_reach_the_command_and_its_exit_code_comes_back(monkeypatch):
    seen = []
    module = types.ModuleType("a_command")
    module.run = lambda argv: seen.append(argv) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_command", module)
    commands = (Command(name="act", help="", target="a_command:run"),)
    assert main(["act", "--x", "a b"], commands) == 7
    assert seen == [["--x", "a b"]]


def test_a_missing_package_names_the_extra(monkeypatch, capsys, tmp_path):
    (tmp_path / "needs_playwright.py").write_text("import playwright.async_api")
    (tmp_path / "needs_unknown.py").write_text("import no_such_package_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "playwright", None)
    assert main(["act"], (Command(name="act", help="", target="needs_playwright:run"),)) == 1
    assert "owrl-jax[host]" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match="no_such_package_anywhere"):
        main(["act"], (Command(name="act", help="", target="needs_unknown:run"),))


# --- owrl config -----------------------------------------------------------------------------------------------


def test_config_prints_saves_and_hashes(capsys, tmp_path):
    file = tmp_path / "run.json"
    assert main(["config", "tiny_cpu", "--rl.epochs", "3", "--seed=7", "--save", str(file)]) == 0
    out = capsys.readouterr().out
    saved = from_json(file.read_bytes())
    assert (saved.rl.epochs, saved.seed, saved.name) == (3, 7, "tiny_cpu")
    assert out.splitlines()[-1] == f"sha256 {config_hash(saved)}"
    assert "epochs = 3" in out
    assert main(["config", "tiny_cpu", "--json"]) == 0
    assert from_json(capsys.readouterr().out) == load_preset("tiny_cpu")
    assert main(["config", "--json"]) == 0
    assert from_json(capsys.readouterr().out) == RunConfig(rl=RlSettings())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tinycpu"], "did you mean tiny_cpu?"),
        (["--rl.epoch", "1"], "did you mean rl.epochs?"),
        (["--rl.epochs"], "--rl.epochs needs a value"),
        (["--save", "/no/such/folder/x.json"], "cannot write /no/such/folder/x.json"),
    ],
)
def test_config_says_what_is_wrong(capsys, arguments, message):
    assert main(["config", *arguments]) == 2
    assert message in capsys.readouterr().err


# --- owrl bench ------------------------------------------------------------------------------------------------


def result(**changes) -> BenchResult:
    rows = (
        Row(name="step_p50_ms/click", ours=71.0, floor=52.1, peer=6105.0, extra={"ours_min": 70.0, "ours_max": 75.5}),
        Row(name="memory_mib/idle", ours=None, floor=30.0),
    )
    goals = (
        Goal(name="step_vs_peer", value=86.0, goal=10.0, better="higher", unit="x"),
        Goal(name="memory", value=50.0, goal=40.0, better="lower", unit="MiB"),
    )
    return BenchResult(**{"bench": "probe", "settings": {"quick": True}, "rows": rows, "goals": goals, **changes})


def test_json_is_one_line_of_the_agreed_form():
    line = format_json(result(), MACHINE, 41.23)
    assert "\n" not in line
    read = json.loads(line)
    assert list(read) == ["bench", "commit", "machine", "seconds", "settings", "rows", "goals"]
    assert (read["bench"], read["machine"], read["seconds"]) == ("probe", MACHINE, 41.2)
    assert read["rows"][0] == {
        "name": "step_p50_ms/click", "ours": 71.0, "floor": 52.1, "peer": 6105.0, "ours_min": 70.0, "ours_max": 75.5,
    }  # fmt: skip
    assert read["rows"][1] == {"name": "memory_mib/idle", "floor": 30.0}
    assert read["goals"][0] == {"name": "step_vs_peer", "value": 86.0, "goal": 10.0, "better": "higher", "unit": "x"}


def test_text_shows_every_number_and_whether_goals_are_met():
    lines = format_text(result(), MACHINE, 41.23).splitlines()
    click = next(line for line in lines if line.startswith("step_p50_ms/click"))
    assert click.split() == ["step_p50_ms/click", "71", "52.1", "6,105", "70", "75.5"]
    assert next(line for line in lines if line.startswith("step_vs_peer")).split()[-1] == "yes"
    assert next(line for line in lines if line.startswith("memory ")).split()[-1] == "no"
    assert "quick=True" in "\n".join(lines)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Row(name="x", ours=math.nan),
        lambda: Row(name="x", ours=1.0, extra={"peer": 2.0}),
        lambda: Row(name="x", ours=1.0, extra={"ours_max": math.inf}),
        lambda: Goal(name="x", value=1.0, goal=1.0, better="more", unit=""),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_measurement_is_refused(make):
    with pytest.raises(ValueError, match="x"):
        make()


def test_machine_facts_are_of_this_machine():
    facts = machine_facts()
    assert facts["cpus"] >= 1
    assert facts["mem_gib"] > 0.1
    assert facts["model"]


def test_bench_runs_what_is_asked_for(monkeypatch, capsys):
    asked = {}
    module = types.ModuleType("owrl_jax.bench.probe")

    def run(*, repeat: int, quick: bool) -> BenchResult:
        asked.update(repeat=repeat, quick=quick)
        return result()

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "owrl_jax.bench.probe", module)
    monkeypatch.setattr(bench, "available", lambda: {"probe": "Measures nothing."})
    assert main(["bench", "probe", "--json", "--repeat", "3", "--quick"]) == 0
    assert asked == {"repeat": 3, "quick": True}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bench"] == "probe"
    assert main(["bench", "prob"]) == 2
    assert "Did you mean 'probe'?" in capsys.readouterr().err
    assert main(["bench", "probe", "--repeat", "0"]) == 2


def test_benchmarks_are_found_by_their_files(tmp_path):
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "report.py").write_text('"""Prints."""')
    (tmp_path / "model.py").write_text('"""Tokens a second.\n\nMore."""\nimport no_such_package_anywhere\n')
    assert bench.available(tmp_path) == {"model": "Tokens a second."}
