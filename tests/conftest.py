"""What every test shares: how jax is set up, run-time checks of array shapes, and which tests need what.

jax reads its settings from the environment when it is first imported, so they are written here, before any test module
is; a run that never imports jax pays nothing, and a Python that a test starts as a subprocess inherits them.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set it up; start pytest without that plugin")

# Eight CPU devices let sharding be tested on a laptop. Products in full float32, since the oracles are. Compiled
# programs are kept in the checkout (ignored by git): the second run of the suite then compiles next to nothing.
DEVICES = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()
for name, value in {
    "JAX_PLATFORMS": "cpu",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}.items():
    os.environ.setdefault(name, value)
# Nothing in the suite may reach for a hub: a model or tokenizer that is not on disk is an error, at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Modules whose array arguments are annotated with shapes; under test every call of them is checked.
SHAPE_CHECKED = ("owrl_jax.models", "owrl_jax.sharding", "owrl_jax.rl")
if importlib.util.find_spec("jaxtyping") and importlib.util.find_spec("beartype"):
    from jaxtyping import install_import_hook

    install_import_hook(list(SHAPE_CHECKED), "beartype.beartype")

_LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-torch", action="store_true", help="run as if PyTorch were not installed")
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow (minutes each)")


class _WithoutTorch(importlib.machinery.PathFinder):
    """Finds everything but PyTorch, for `find_spec` as for `import`."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):  # type: ignore[override]
        return None if fullname.partition(".")[0] == "torch" else super().find_spec(fullname, path, target)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-torch"):
        usual = importlib.machinery.PathFinder
        sys.meta_path[:] = [_WithoutTorch if finder is usual else finder for finder in sys.meta_path]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests unless asked for, and those marked `torch` where there is none; the end says how many."""
    left_out = {}
    if not (config.getoption("--slow") or config.getoption("-m")):
        left_out["slow"] = "slow tests were left out: give --slow to run them."
    if importlib.util.find_spec("torch") is None:
        why = "--no-torch was given" if config.getoption("--no-torch") else "torch is not installed here"
        left_out["torch"] = f"tests that compare with PyTorch were left out: {why}."
    lines = config.stash.setdefault(_LEFT_OUT, [])
    for marker, reason in left_out.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked:
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
            config.hook.pytest_deselected(items=marked)
            lines.append(f"{len(marked)} {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_LEFT_OUT, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the checkout that is under test."""
    return ROOT
