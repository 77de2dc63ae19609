"""./owrl, in copies of the tree in which interpreters, uv and owrl are shell scripts that log what they were asked.

The script is run for real, by the system's sh; only what it would download or start is replaced. Nothing here knows how
the script remembers what it has installed.
"""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# An interpreter: says who it is, makes environments, and has a pip that finds torch if a file `torch` lies beside it.
PYTHON = """#!/bin/sh
here=$(dirname "$0")
case "$1 $2" in
    "-c ") exit 0 ;;
    "-c "*) [ "$3" = "{version}" ] || exit 1; echo "$0" ;;
    "-m venv")
        mkdir -p "$3/bin"
        for tool in python uv owrl ruff pyright; do cp "$TOOLS/$tool" "$3/bin/$tool"; done
        echo "venv by $0" >>"$LOG" ;;
    "-m pip")
        case "$*" in
            *--dry-run*) [ -e "$here/torch" ] ;;
            *) echo "pip $*" >>"$LOG"; [ ! -e "$TOOLS/fail" ] ;;
        esac ;;
    "-m pytest") shift 2; printf 'pytest' >>"$LOG"; printf ' <%s>' "$@" >>"$LOG"; echo >>"$LOG"; exit 5 ;;
    *) exit 99 ;;
esac
"""
TOOL = """#!/bin/sh
printf '%s' "{name}" >>"$LOG"
if [ $# -gt 0 ]; then printf ' <%s>' "$@" >>"$LOG"; fi
echo >>"$LOG"
[ ! -e "$TOOLS/fail-{name}" ] || exit 1
exit {code}
"""


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


class Tree:
    """A copy of what the script needs, with a space in its path, and a PATH on which only our own interpreters lie."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a tree"
        self.tools = folder / "tools"
        self.path = folder / "path"
        self.log = folder / "log"
        self.home = folder / "home"
        for folder_ in (self.root, self.tools, self.path, self.home):
            folder_.mkdir()
        for name in ("owrl", "pyproject.toml", ".ci/requirements"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            (self.root / name).parent.mkdir(exist_ok=True)
            copy(ROOT / name, self.root / name)
        for name, code in {"uv": 0, "owrl": 7, "ruff": 0, "pyright": 0}.items():
            write_program(self.tools / name, TOOL.format(name=name, code=code))
        write_program(self.tools / "python", PYTHON.format(version="none"))
        for tool in ("sh", "cat", "chmod", "cksum", "cp", "dirname", "grep", "mkdir", "readlink", "rm", "sed", "tr"):
            (self.path / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
        write_program(self.path / "chromium", "#!/bin/sh\n")

    def interpreter(self, version: str, *, torch: bool = False) -> Path:
        """Puts a Python on PATH, in a folder of its own."""
        path = self.path.parent / f"python-{version}" / f"python{version}"
        write_program(path, PYTHON.format(version=version))
        if torch:
            (path.parent / "torch").touch()
        return path

    def run(
        self, *arguments: str, command: Path | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs ./owrl."""
        folders = [self.path, *sorted(self.path.parent.glob("python-*"))]
        environment = {
            "PATH": os.pathsep.join(map(str, folders)),
            "HOME": str(self.home),
            "LOG": str(self.log),
            "TOOLS": str(self.tools),
        }
        return subprocess.run(
            [str(command or self.root / "owrl"), *arguments],
            capture_output=True, text=True, env=environment, cwd=cwd or self.home, timeout=60, check=False,
        )  # fmt: skip

    def took(self) -> list[str]:
        """What has been asked of the tools since the last call of this method."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines

    def installs(self) -> list[str]:
        """The sets of packages that uv was asked for since the last call."""
        return [line.split(".ci/requirements/")[1].split(".txt")[0] for line in self.took() if line.startswith("uv")]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_first_use_sets_up_and_hands_over_and_the_second_only_hands_over(tree):
    python = tree.interpreter("3.12")
    done = tree.run("config", "tiny cpu", "--x", "")
    assert done.returncode == 7, done.stderr  # that of the owrl program
    venv, uv, owrl = tree.took()
    assert venv == f"venv by {python}"
    assert uv.startswith("uv <pip> <install>")
    assert "<--no-deps> <-r> <.ci/requirements/host.txt> <-e> <.>" in uv  # nothing that is not pinned
    assert owrl == "owrl <config> <tiny cpu> <--x> <>"
    assert "making" in done.stderr
    assert "installing" in done.stderr
    again = tree.run("config")
    assert (again.returncode, again.stderr, tree.took()) == (7, "", ["owrl <config>"])


def test_it_may_be_called_through_links_and_from_anywhere(tree, tmp_path):
    tree.interpreter("3.11")
    (tmp_path / "first").symlink_to(tree.root / "owrl")
    (tmp_path / "second").symlink_to("first")
    assert tree.run("doctor", command=tmp_path / "second", cwd=tmp_path).returncode == 7
    assert (tree.root / ".venv").is_dir()
    assert not (tmp_path / ".venv").exists()


def test_each_command_gets_the_packages_it_needs_and_a_bigger_set_serves_a_smaller_need(tree):
    tree.interpreter("3.11")
    tree.run("config")
    tree.run("browser")
    tree.run("doctor")
    tree.run("bench", "model")
    assert tree.installs() == ["host", "run"]
    tree.run("test")
    tree.run("doctor")
    tree.run("config")
    tree.run("test")
    assert tree.installs() == ["test"]


@pytest.mark.parametrize("changed", ["pyproject.toml", ".ci/requirements/host.txt"])
def test_a_change_of_the_requirements_installs_again(tree, changed):
    tree.interpreter("3.11")
    tree.run("config")
    tree.took()
    with (tree.root / changed).open("a") as file:
        file.write("\n# changed\n")
    tree.run("config")
    assert tree.installs() == ["host"]
    tree.run("config")
    assert tree.installs() == []


def test_a_failed_installation_says_what_to_do_and_is_taken_up_by_the_next_run(tree):
    tree.interpreter("3.11")
    (tree.tools / "fail-uv").touch()
    done = tree.run("config")
    assert done.returncode == 1
    assert "run this again" in done.stderr
    assert not any(line.startswith("owrl") for line in tree.took())
    (tree.tools / "fail-uv").unlink()
    assert tree.run("config").returncode == 7
    assert tree.installs() == ["host"]


def test_the_newest_python_that_works_is_taken(tree):
    tree.interpreter("3.11")
    newest = tree.interpreter("3.12")
    write_program(
        tree.path / "python3.13", "#!/bin/sh\necho 'no such version' >&2\nexit 127\n"
    )  # a shim with nothing behind
    tree.run("config")
    assert f"venv by {newest}" in tree.took()


def test_a_python_of_a_version_manager_is_found_behind_its_broken_shim(tree):
    write_program(tree.path / "python3.12", "#!/bin/sh\nexit 127\n")
    hidden = tree.home / ".pyenv" / "versions" / "3.12.1" / "bin" / "python"
    write_program(hidden, PYTHON.format(version="3.12"))
    tree.run("config")
    assert f"venv by {hidden}" in tree.took()


def test_a_python_with_a_cpu_torch_at_hand_comes_before_newer_ones(tree):
    tree.interpreter("3.13")
    with_torch = tree.interpreter("3.11", torch=True)
    tree.run("config")
    assert f"venv by {with_torch}" in tree.took()


def test_without_any_python_it_says_what_to_install(tree):
    done = tree.run("config")
    assert done.returncode == 1
    assert "found no Python" in done.stderr
    assert "apt-get install python3" in done.stderr
    assert not (tree.root / ".venv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["test", "--python", "3.9"], "Python '3.9' is not supported"),
        (["test", "--python=3"], "Python '3' is not supported"),
        (["test", "--python"], "--python needs a version"),
        (["test", "--python", "3.12"], "found no Python 3.12"),
    ],
)
def test_a_python_that_cannot_be_had_is_refused(tree, arguments, message):
    tree.interpreter("3.11")
    done = tree.run(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert tree.took() == []


def test_another_python_has_an_environment_of_its_own(tree):
    tree.interpreter("3.11")
    older = tree.interpreter("3.12")
    tree.run("test", "--python", "3.12", "--no-torch", "tests/unit", "-q")
    assert tree.took()[0] == f"venv by {older}"
    assert (tree.root / ".venv-3.12").is_dir()
    assert not (tree.root / ".venv").exists()


def test_pytest_gets_the_arguments_and_gives_the_exit_code(tree):
    tree.interpreter("3.11")
    done = tree.run("test", "tests/unit", "-k", "a and b")
    assert done.returncode == 5
    assert tree.took()[-1] == "pytest <tests/unit> <-k> <a and b>"
    assert "are left out" in done.stderr  # no torch at hand
    done = tree.run("test", "--no-torch", "-x")
    assert tree.took()[-1] == "pytest <--no-torch> <-x>"
    assert "left out" not in done.stderr


def test_torch_is_installed_once_and_only_if_a_cpu_build_is_at_hand(tree):
    tree.interpreter("3.11")
    tree.run("test")
    assert not [line for line in tree.took() if line.startswith("pip")]
    (tree.root / ".venv" / "bin" / "torch").touch()
    (tree.tools / "fail").touch()
    failed = tree.run("test")
    assert failed.returncode == 1
    assert "--no-torch" in failed.stderr
    (tree.tools / "fail").unlink()
    assert tree.run("test").returncode == 5
    assert [line for line in tree.took() if line.startswith("pip") and " torch==" in line]
    record = tree.root / ".venv/lib/python3.11/site-packages" / "torch-2.13.0.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    record.touch()
    tree.run("test")
    assert not [line for line in tree.took() if line.startswith("pip")]


def test_lint_runs_all_three_checks_and_fails_if_one_does(tree):
    tree.interpreter("3.11")
    assert tree.run("test", "--lint").returncode == 0
    checks = [line.split("> <")[0] for line in tree.took() if line.split()[0] in ("ruff", "pyright")]
    assert [check.split(">")[0] for check in checks] == ["ruff <check", "ruff <format", "pyright <--pythonpath"]
    for tool in ("ruff", "pyright"):
        (tree.tools / f"fail-{tool}").touch()
        shutil.copy2(tree.tools / tool, tree.root / ".venv" / "bin" / tool)
        assert tree.run("test", "--lint").returncode == 1
        assert sum(line.split()[0] in ("ruff", "pyright") for line in tree.took()) == 3
        (tree.tools / f"fail-{tool}").unlink()
    assert "no further arguments" in tree.run("test", "--lint", "tests").stderr


def test_without_a_browser_it_says_how_to_get_one_and_runs_the_rest(tree):
    tree.interpreter("3.11")
    assert "Chromium" not in tree.run("test").stderr
    (tree.path / "chromium").unlink()
    done = tree.run("test")
    assert "found no Chromium" in done.stderr
    assert done.returncode == 5


def test_an_environment_that_was_moved_or_no_longer_starts_is_made_again(tree, tmp_path):
    tree.interpreter("3.11")
    tree.run("config")
    tree.took()
    tree.root = tree.root.rename(tmp_path / "moved here")
    assert "another folder" in tree.run("config").stderr
    assert tree.took()[0].startswith("venv by")
    write_program(tree.root / ".venv" / "bin" / "python", "#!/no/such/interpreter\n")
    assert "no longer starts" in tree.run("config").stderr
    assert tree.took()[0].startswith("venv by")
    assert tree.run("config").stderr == ""


def test_help_of_the_tests_costs_nothing(tree):
    done = tree.run("test", "--help")
    assert done.returncode == 0
    assert "--lint" in done.stdout
    assert tree.took() == []


@pytest.mark.parametrize("script", ["owrl", ".ci/run", ".ci/requirements/compile"])
def test_scripts_are_executable_and_parse(script):
    path = ROOT / script
    assert os.access(path, os.X_OK)
    shell = path.read_text().splitlines()[0].split()[0].rsplit("/", 1)[-1].replace("env", "bash")
    subprocess.run([shell, "-n", str(path)], check=True)
