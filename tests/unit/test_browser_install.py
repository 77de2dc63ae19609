"""`owrl browser install` with scripts for commands: what is tried, in which order, and what is said."""

import os
import stat
import time
from pathlib import Path

import pytest

from owrl_jax.browser.cli import main
from owrl_jax.browser.engine import BrowserMissing, find_browser
from owrl_jax.browser.install import install


class Machine:
    """A PATH with nothing on it but scripts of ours. A script that succeeds may leave a browser behind."""

    def __init__(self, folder: Path, monkeypatch):
        self.bin, self.log, self.browser = folder / "bin", folder / "log", folder / "headless_shell"
        self.bin.mkdir()
        self.log.touch()
        monkeypatch.setenv("PATH", str(self.bin))
        self.said: list[str] = []

    def script(self, name, body):
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> "{self.log}"\n{body}\n')
        path.chmod(0o755)
        return str(path)

    def leaves_browser(self):
        """Shell that makes a program which says its version, as Chromium does."""
        return f"printf '#!/bin/sh\\necho HeadlessChrome 150.0.1\\n' > {self.browser}; /bin/chmod 755 {self.browser}"

    def find(self):
        return find_browser(str(self.browser))

    def install(self, **options):
        defaults = {
            "python": str(self.bin / "python"),
            "may_install_packages": True,
            "find": self.find,
            "deadline_s": 20.0,
        }
        return install(say=self.said.append, **{**defaults, **options})

    @property
    def ran(self):
        return [line.split(" ") for line in self.log.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_a_browser_that_runs_is_left_alone(machine):
    machine.browser.write_text("#!/bin/sh\necho HeadlessChrome 150.0.1\n")
    machine.browser.chmod(0o755)
    assert machine.install() == 0
    assert machine.ran == [] and "there already" in machine.said[0] and "150.0.1" in machine.said[0]


def test_playwright_first(machine):
    machine.script("python", machine.leaves_browser())
    machine.script("apt-get", "exit 0")
    assert machine.install() == 0
    assert machine.ran == [["python", "-m", "playwright", "install", "--only-shell", "chromium"]]


def test_a_download_that_succeeds_but_does_not_run_is_no_browser(machine):
    machine.script("python", f"printf '#!/bin/sh\\nexit 127\\n' > {machine.browser}; /bin/chmod 755 {machine.browser}")
    machine.script("apt-get", f'case "$1" in install) {machine.leaves_browser()};; esac')
    assert machine.install() == 0
    assert [r[0] for r in machine.ran] == ["python", "apt-get", "apt-get"]


@pytest.mark.parametrize(
    ("manager", "package"),
    [("apt-get", "chromium"), ("dnf", "chromium"), ("apk", "chromium")],
)
def test_then_the_distribution_best_package_first(machine, manager, package):
    machine.script("python", "echo Download failure >&2; exit 1")
    # The index cannot be refreshed and the lighter package is unknown here; the second one works.
    machine.script(
        manager,
        f'for last; do :; done; [ "$last" = {package} ] || {{ echo "no $last"; exit 100; }}\n'
        + machine.leaves_browser(),
    )
    assert machine.install() == 0
    assert machine.ran[-1][-1] == package
    assert any("Download failure" in line for line in machine.said)


@pytest.mark.parametrize("case", ["no manager", "not root", "all fail"])
def test_when_nothing_works_it_says_what_to_do(machine, case):
    machine.script("python", "exit 1")
    if case != "no manager":
        machine.script("apt-get", "echo E: Unable to locate; exit 100")
    assert machine.install(may_install_packages=case != "not root") == 1
    assert "package manager" in machine.said[-1] and "--browser" in machine.said[-1]
    assert any(r[0] == "apt-get" for r in machine.ran) == (case == "all fail")


def test_a_command_that_hangs_or_is_missing_is_not_waited_for(machine):
    machine.script("python", "exec /bin/sleep 60")
    began = time.monotonic()
    assert machine.install(may_install_packages=False, deadline_s=0.5) == 1
    assert time.monotonic() - began < 5 and any("0.5 s" in line for line in machine.said)
    (machine.bin / "python").unlink()
    assert machine.install(may_install_packages=False) == 1
    assert any("could not be run" in line for line in machine.said)


def test_a_browser_that_is_no_program_is_missing(tmp_path):
    path = tmp_path / "headless_shell"
    path.write_text("garbage")
    os.chmod(path, stat.S_IRWXU)
    with pytest.raises(BrowserMissing, match="owrl browser install"):
        find_browser(str(path))


def test_wrong_calls_name_what_there_is(capsys, tmp_path):
    assert main([]) == 2 and main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main(["fly"]) == 2 and "'fly'" in capsys.readouterr().err
    assert main(["replay", str(tmp_path)]) == 2 and "is not a recording" in capsys.readouterr().err
