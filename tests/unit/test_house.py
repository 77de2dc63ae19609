"""The repository as a whole: what lies in it, what it must not mention, whether requirements and pins fit together."""

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import owrl_jax

ROOT = Path(__file__).resolve().parents[2]
TOP = {
    "owrl_jax", "configs", "launch", "tests", "notebooks", "docs", "pyproject.toml", "README.md", "LICENSE",
    "CONTRIBUTING.md", "owrl", ".ci", ".gitignore",
}  # fmt: skip
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS_OF = {"host": ["host"], "run": ["host", "learner"], "test": ["host", "learner", "dev"]}
PYTHONS = ("3.11.7", "3.12.1", "3.13.0")


def tracked() -> list[str]:
    """Paths that git knows, relative to the root."""
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    return [path for path in done.stdout.split("\0") if path and (ROOT / path).is_file()]


def test_the_top_level_holds_what_it_should():
    assert {path.split("/")[0] for path in tracked()} == TOP


def test_nothing_names_a_package_index_or_somebodys_machine():
    """Spelt in parts, or this file would find itself."""
    hosts = ["pypi" + ".org", "files.python" + "hosted", "registry." + "npmjs", "deb." + "debian.org", "index" + "-url"]
    paths = ["/" + "work/main", "/" + "work/shared", "/" + "root/", "/home/" + "[a-z]", "site" + "-packages/[a-z]"]
    pattern = re.compile("|".join([*map(re.escape, hosts), *paths]))
    found = []
    for path in tracked():
        data = (ROOT / path).read_bytes()
        if b"\0" not in data:
            found += [f"{path}: {match[0]}" for match in pattern.finditer(data.decode("utf-8"))]
    assert found == []


def test_the_version_is_said_once():
    assert "version" in PROJECT["dynamic"]
    assert importlib.metadata.version("owrl-jax") == owrl_jax.__version__
    assert Version(owrl_jax.__version__).release


def test_readme_names_files_and_commands_that_exist():
    first_screen = (ROOT / "README.md").read_text()
    files = re.findall(r"^\d\. `([^`]+)`", first_screen, re.MULTILINE)
    assert len(files) == 5
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert "./owrl test" in first_screen
    assert "./owrl quickstart" in first_screen


# --- Requirements and pins --------------------------------------------------------------------------------------


def pins(name: str) -> list[Requirement]:
    """The lines of one pinned file; each must be `name==version`, with or without a marker."""
    lines = (ROOT / ".ci" / "requirements" / f"{name}.txt").read_text().splitlines()
    return [Requirement(line) for line in lines]


def on(python: str, requirements: list[Requirement]) -> dict[str, Version]:
    """Name to version of what is pinned for one Python on Linux."""
    environment = {
        "python_version": ".".join(python.split(".")[:2]), "python_full_version": python, "sys_platform": "linux",
        "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix", "implementation_name": "cpython",
    }  # fmt: skip
    found: dict[str, Version] = {}
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate(environment):
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", requirement
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice for Python {python}"
            found[name] = Version(specifier.version)
    return found


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", EXTRAS_OF)
def test_pins_meet_the_requirements(name, python):
    pinned = on(python, pins(name))
    wanted = [
        *PROJECT["dependencies"],
        *(r for extra in EXTRAS_OF[name] for r in PROJECT["optional-dependencies"][extra]),
    ]
    minor = ".".join(python.split(".")[:2])
    for line in wanted:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": minor}):
            version = pinned.get(canonicalize_name(requirement.name))
            assert version is not None, f"{line} is not pinned in {name}.txt: run .ci/requirements/compile"
            assert requirement.specifier.contains(version), f"{line}, but {name}.txt pins {version}"


@pytest.mark.parametrize("python", PYTHONS)
def test_a_bigger_set_only_adds_packages(python):
    host, run, test = (on(python, pins(name)) for name in EXTRAS_OF)
    assert host.items() <= run.items() <= test.items()


@pytest.mark.parametrize("python", PYTHONS)
def test_a_cpu_host_gets_no_accelerator_stack_and_nobody_gets_torch(python):
    host, test = on(python, pins("host")), on(python, pins("test"))
    assert not {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint"} & host.keys()
    assert "jax" in test
    assert not [
        package for package in test if package in ("torch", "tensorflow", "triton") or package.startswith("nvidia")
    ]


def test_jax_and_flax_fit_each_other():
    """flax before 0.12.12 subclasses a type that jax 0.11 removed."""
    for python in PYTHONS:
        pinned = on(python, pins("test"))
        assert pinned["jax"] < Version("0.11") or pinned["flax"] >= Version("0.12.12"), python
    assert on("3.12.1", pins("test"))["jax"] >= Version("0.12")


def test_the_core_is_small_and_bounds_are_lower_bounds():
    assert len(PROJECT["dependencies"]) <= 12
    lines = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    for line in lines:
        requirement = Requirement(line)
        own = canonicalize_name(requirement.name) == "owrl-jax"
        assert own or {specifier.operator for specifier in requirement.specifier} == {">="}, line
