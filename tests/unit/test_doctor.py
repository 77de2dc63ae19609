"""The doctor: its judgement on machines that are not at hand, and its reading of this one."""

import json
import stat
import sys

import pytest

from owrl_jax import doctor
from owrl_jax.cli import main

BROWSER = {"path": "/usr/bin/b", "version": "1.2", "kind": "headless_shell"}
CPU = {"platform": "cpu", "kind": "cpu", "count": 8, "jax": "0.10.2"}


@pytest.mark.parametrize(
    ("finding", "status", "mention"),
    [
        (doctor.check_python((3, 10, 9)), "fail", "3.11"),
        (doctor.check_python((3, 11, 0)), "ok", ""),
        (doctor.check_python((3, 13, 5)), "ok", ""),
        (doctor.check_python((3, 14, 0)), "warn", "3.13"),
        (doctor.check_cores(1), "warn", "timeouts"),
        (doctor.check_cores(2), "ok", ""),
        (doctor.check_memory(16.0, 3.9), "fail", "4 GiB"),
        (doctor.check_memory(16.0, 4.1), "warn", "browsers"),
        (doctor.check_memory(16.0, 9.0), "ok", ""),
        (doctor.check_disk(4.9, "/here"), "fail", "5 GiB"),
        (doctor.check_disk(5.1, "/here"), "warn", "short run"),
        (doctor.check_disk(50.0, "/here"), "ok", ""),
        (doctor.check_shm(64.0), "warn", "--shm-size"),
        (doctor.check_shm(1024.0), "ok", ""),
        (doctor.check_shm(None), "ok", ""),
        (doctor.check_devices(CPU), "ok", ""),
        (doctor.check_devices({"error": "no driver"}), "fail", "JAX_PLATFORMS"),
        (doctor.check_browser(BROWSER), "ok", ""),
        (doctor.check_browser({**BROWSER, "kind": "chromium"}), "warn", "headless-shell"),
        (doctor.check_browser({"error": "none", "advice": "install one"}), "fail", "install one"),
        (doctor.check_fonts(12, True), "ok", ""),
        (doctor.check_fonts(12, False), "warn", "noto-cjk"),
        (doctor.check_fonts(0, False), "fail", "fonts-liberation"),
        (doctor.check_fonts(None, False), "warn", "fontconfig"),
    ],
)
def test_judgement(finding, status, mention):
    assert finding.status == status
    assert mention in finding.advice
    assert finding.found


def test_missing_packages_are_named_with_their_extra():
    findings = doctor.check_packages({"core": ["tyro"], "learner": ["jax", "flax"], "host": []})
    assert [f.status for f in findings] == ["fail", "fail", "ok"]
    assert "jax, flax" in findings[1].found
    assert "owrl-jax[learner]" in findings[1].advice
    assert "'owrl-jax'" in findings[0].advice


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("jax.numpy", "learner"),
        ("PIL", "core"),
        ("playwright.async_api", "host"),
        ("ray", "launch"),
        ("os", None),
        ("", None),
    ],
)
def test_extra_of(module, extra):
    assert doctor.extra_of(module) == extra


def test_a_failing_finding_must_say_what_to_do():
    with pytest.raises(ValueError, match="memory"):
        doctor.Finding(name="memory", status="fail", found="none")


def test_every_module_it_looks_for_is_a_requirement():
    """The import names against pyproject.toml, by the distributions that are installed here."""
    import tomllib
    from importlib.metadata import packages_distributions
    from pathlib import Path

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = {"core": project["dependencies"], **project["optional-dependencies"]}
    distributions = packages_distributions()
    for extra in doctor.REQUIRED:
        names = {canonicalize_name(Requirement(line).name) for line in wanted[extra]}
        for module in doctor.PACKAGES[extra]:
            providers = {canonicalize_name(d) for d in distributions[module.partition(".")[0]]}
            assert providers & names, f"{module} of [{extra}] comes from {providers}, which is not in pyproject.toml"


def facts(monkeypatch, **changes):
    """A machine on which all is well, but for `changes`."""
    machine = {
        "read_missing": lambda: {"core": [], "learner": [], "host": []},
        "read_devices": lambda: CPU,
        "read_cores": lambda: 8,
        "read_memory": lambda: (64.0, 60.0),
        "read_shm": lambda: 1024.0,
        "read_browser": lambda: BROWSER,
        "read_fonts": lambda: (40, True),
        **changes,
    }
    for name, function in machine.items():
        monkeypatch.setattr(doctor, name, function)


def test_exit_code_is_zero_only_if_nothing_fails(monkeypatch, capsys):
    facts(monkeypatch)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100 * 2**30})())
    assert main(["doctor"]) == 0
    assert "The main job can run here." in capsys.readouterr().out

    facts(monkeypatch, read_cores=lambda: 1)  # a warning is no failure
    assert main(["doctor"]) == 0
    assert "warn  cores" in capsys.readouterr().out

    facts(monkeypatch, read_memory=lambda: (2.0, 1.0))
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [f["name"] for f in report["findings"] if f["status"] == "fail"] == ["memory"]


def test_a_check_that_breaks_is_a_finding_and_hides_no_other(monkeypatch):
    def broken():
        raise OSError("the disk of /sys is gone")

    facts(monkeypatch, read_memory=broken)
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["memory"].status == "fail"
    assert "the disk of /sys is gone" in findings["memory"].found
    assert findings["fonts"].status == "ok"
    assert not doctor.healthy(list(findings.values()))


def test_devices_are_asked_in_another_process(monkeypatch):
    monkeypatch.setattr(doctor, "_DEVICES", "import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    assert "does not start" in doctor.read_devices()["error"]
    monkeypatch.setattr(doctor, "_DEVICES", "raise RuntimeError('no driver')")
    assert "RuntimeError: no driver" in doctor.read_devices()["error"]
    monkeypatch.setattr(doctor, "_DEVICES", "import time; time.sleep(60)")
    assert "within 0.2 s" in doctor.read_devices(timeout_s=0.2)["error"]


def test_the_machine_is_read():
    pytest.importorskip("jax", reason="asks jax for its devices")
    assert doctor.read_devices()["count"] == 8  # the suite asks for eight CPU devices, and a subprocess inherits that
    total, available = doctor.read_memory()
    assert 0 < available <= total
    assert doctor.read_cores() >= 1
    assert doctor.read_missing()["core"] == []


@pytest.mark.browser
def test_the_browser_really_opens_a_page():
    report = doctor.read_browser()
    assert "error" not in report
    assert report["version"][0].isdigit()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'missing libx.so' >&2; exit 127", "libx.so"),
        ("echo nothing", "opened no page"),
        ("sleep 30", "within 1 s"),
    ],
)
def test_a_browser_that_does_not_work_is_found_out(tmp_path, script, message):
    """A program that knows its version and opens no page."""
    fake = tmp_path / "headless_shell"
    fake.write_text(f'#!/bin/sh\ncase "$*" in *--version*) echo "Chromium 150.0.1"; exit 0;; esac\n{script}\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    report = doctor.read_browser(str(fake), timeout_s=1.0)
    assert message in report["error"]
    assert doctor.check_browser(report).status == "fail"
    absent = doctor.read_browser(str(tmp_path / "absent"))
    assert "absent" in absent["error"]
    assert absent["advice"]


def test_python_of_this_process_is_supported():
    assert doctor.check_python(sys.version_info[:3]).status in ("ok", "warn")
