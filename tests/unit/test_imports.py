"""Who may import whom: the floors of docs/architecture.md, CPU hosts without jax, a package that imports nothing."""

import ast
import graphlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "owrl_jax"

# The floors, lowest first; rooms of one group may see each other, the groups of a floor may not.
FLOORS: tuple[tuple[frozenset[str], ...], ...] = (
    (frozenset({"types", "outcome", "geometry", "config", "serving", "shutdown"}),),
    (frozenset({"models", "sharding"}), frozenset({"agent", "browser", "worlds"})),
    (frozenset({"engine", "rl", "judge", "data"}),),
    (frozenset({"pool", "checkpoint", "obs"}),),
    (
        frozenset({"build", "train", "dry_run", "sft", "demonstrate", "evaluate", "rejudge", "quickstart"})
        | {"cli", "doctor", "bench", "plan"},
    ),
)
PLACE = {
    room: (floor, group) for floor, groups in enumerate(FLOORS) for group, rooms in enumerate(groups) for room in rooms
}


def room_of(module: str) -> str:
    """`owrl_jax.browser.policy` lies in `browser`; the package itself in ``."""
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path, package: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it, relative imports resolved."""
    name = package.name
    parts = path.relative_to(package.parent).with_suffix("").parts
    here = parts[:-1]  # the package that a relative import of level 1 means
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join((*here[: len(here) - node.level + 1], *([base] if base else [])))
            # `from owrl_jax import types` names a room in its list, not in its path
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == name else {base}
    return {module for module in found if module.split(".")[0] == name}


def edges(package: Path) -> dict[tuple[str, str], list[str]]:
    """(importing room, imported room) -> the files that do it."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        source = path.relative_to(package).with_suffix("").parts[0]
        source = "" if source == "__init__" else source
        for module in imports_of(path, package):
            target = room_of(module)
            if target != source and not target.startswith("__"):
                found.setdefault((source, target), []).append(str(path.relative_to(package)))
    return found


def violations(package: Path) -> list[str]:
    """One line for each import that the floors forbid, and for each room that stands on no floor."""
    bad = []
    for (source, target), files in edges(package).items():
        if source == "":
            bad.append(f"{package.name}/__init__.py imports {target}; it must import nothing")
        elif source not in PLACE or (target and target not in PLACE):
            bad.append(f"{source} -> {target} ({files[0]}): give the new room a floor in docs/architecture.md and here")
        elif target and not (PLACE[target][0] < PLACE[source][0] or PLACE[target] == PLACE[source]):
            bad.append(f"{source} -> {target} in {', '.join(files)}")
    return bad


def test_imports_point_down_the_floors():
    assert violations(PACKAGE) == []


def files_and_imports(package: Path) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports when it is itself imported (not later, inside a function)."""
    files = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for module, path in files.items():
        graph[module] = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names} & files.keys()
            elif isinstance(node, ast.ImportFrom) and not node.level:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & files.keys()
                graph[module] |= submodules or {str(node.module)} & files.keys()
    return graph


def test_no_module_imports_itself_in_a_circle():
    graph = files_and_imports(PACKAGE)
    assert graph["owrl_jax.types"] == {"owrl_jax.outcome"}
    assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("path", "code", "expected"),
    [
        ("agent/loop.py", "from owrl_jax.pool.leases import Lease", "agent -> pool in agent/loop.py"),
        ("agent/loop.py", "from ..models import run", "agent -> models in agent/loop.py"),
        ("models/x.py", "def f():\n    import owrl_jax.browser.policy", "models -> browser in models/x.py"),
        ("types.py", "from owrl_jax import cli", "types -> cli in types.py"),
        ("__init__.py", "from owrl_jax import types", "owrl_jax/__init__.py imports types; it must import nothing"),
        ("utils/x.py", "import owrl_jax.types", "utils -> types (utils/x.py): give the new room a floor"),
        ("browser/x.py", "from owrl_jax.agent import tools\nfrom . import y\nimport jax", None),
        ("cli.py", "from owrl_jax import __version__\nfrom owrl_jax.pool import SandboxPool", None),
    ],
)
def test_the_scan_finds_what_is_forbidden_and_nothing_else(tmp_path, path, code, expected):
    package = tmp_path / "owrl_jax"
    file = package / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    found = violations(package)
    assert found == [] if expected is None else (len(found) == 1 and found[0].startswith(expected)), found


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_cpu_host_needs_no_jax():
    """Every module that a CPU host may load imports where jax and flax do not exist."""
    out = run_python(
        """
        import importlib, importlib.machinery, importlib.util, pkgutil, sys

        usual = importlib.machinery.PathFinder
        blocked = ("jax", "jaxlib", "flax", "optax", "orbax", "torch")

        class CpuHost(usual):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                return None if name.partition(".")[0] in blocked else super().find_spec(name, path, target)

        sys.meta_path[:] = [CpuHost if finder is usual else finder for finder in sys.meta_path]
        for name in blocked:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:
                continue
            raise SystemExit(f"{name} can still be imported")
        names = [f"owrl_jax.{m}" for m in ("types", "outcome", "geometry", "config", "serving", "cli", "doctor")]
        names += [f"owrl_jax.engine.{m}" for m in ("client", "http_policy", "server", "serve")] + ["owrl_jax.rejudge"]
        for room in ("agent", "browser", "worlds", "judge", "pool"):
            if importlib.util.find_spec(f"owrl_jax.{room}") is None:
                continue
            package = importlib.import_module(f"owrl_jax.{room}")
            names += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
        for name in names:
            importlib.import_module(name)
        print(len(names))
        """
    )
    assert int(out) > 20


def test_importing_the_package_imports_nothing_heavy():
    out = run_python(
        """
        import sys
        before = set(sys.modules)
        import owrl_jax
        print(sorted(m for m in set(sys.modules) - before))
        """
    )
    assert ast.literal_eval(out) == ["owrl_jax"]


def test_the_command_table_loads_no_command():
    out = run_python(
        "import sys, owrl_jax.cli; print([m for m in sys.modules if m.startswith('owrl_jax')], 'tyro' in sys.modules)"
    )
    assert out.strip() == "['owrl_jax', 'owrl_jax.cli'] False"
