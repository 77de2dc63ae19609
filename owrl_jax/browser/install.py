"""Getting a browser onto this machine, and saying what is missing: `owrl browser install` and `owrl browser doctor`.

Tried in order, each under a deadline, until one leaves a browser that runs: Playwright's own build (no rights
needed), then the distribution's package where this user may install packages. When nothing works, the end is one
sentence that says what to do. Nothing is downloaded by any other command, and a browser that already runs is left
alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from owrl_jax.browser.config import EngineConfig
from owrl_jax.browser.engine import BrowserBinary, BrowserEngine, BrowserMissing, find_browser

_MANAGERS: tuple[tuple[str, tuple[tuple[str, ...], ...], tuple[str, ...]], ...] = (
    # command, preparation, packages best first
    ("apt-get", (("apt-get", "update"),), ("chromium-headless-shell", "chromium")),
    ("dnf", (), ("chromium-headless", "chromium")),
    ("apk", (), ("chromium",)),
)
_INSTALL_WORDS = {"apt-get": ("install", "-y", "--no-install-recommends"), "dnf": ("install", "-y"), "apk": ("add",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One way to get a browser: what it is called, and the commands in order. `optional` ones may fail."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    optional: int = 0  # so many commands at the front may fail (an index that cannot be refreshed)


def attempts(*, python: str, may_install_packages: bool, which: Callable[[str], str | None]) -> tuple[Attempt, ...]:
    """The ways that exist on a machine, best first."""
    ways = [
        Attempt(
            name="Playwright's own build",
            commands=((python, "-m", "playwright", "install", "--only-shell", "chromium"),),
        )
    ]
    for manager, preparation, packages in _MANAGERS:
        if may_install_packages and which(manager):
            for package in packages:
                command = (manager, *_INSTALL_WORDS[manager], package)
                ways.append(
                    Attempt(
                        name=f"the package {package} ({manager})",
                        commands=(*preparation, command),
                        optional=len(preparation),
                    )
                )
            break
    return tuple(ways)


def install(
    *,
    say: Callable[[str], None],
    deadline_s: float = 600.0,
    force: bool = False,
    python: str = sys.executable,
    may_install_packages: bool | None = None,
    find: Callable[[], BrowserBinary] = find_browser,
) -> int:
    """Makes sure that a browser is there. Returns 0 if one runs afterwards, else 1.

    Args:
      say: where progress goes, one line at a time.
      deadline_s: for each command.
      force: install even if a browser already runs.
      python: the interpreter that has playwright.
      may_install_packages: None asks whether this user is root.
      find: how a usable browser is looked for.
    """
    if not force:
        try:
            found = find()
        except BrowserMissing:
            pass
        else:
            say(f"{found.kind} {found.version} is there already: {found.path}")
            return 0
    root = os.geteuid() == 0 if may_install_packages is None else may_install_packages
    for way in attempts(python=python, may_install_packages=root, which=shutil.which):
        say(f"trying {way.name}: {' '.join(way.commands[-1])}")
        problem = _run(way, deadline_s)
        try:
            found = find()
        except BrowserMissing as missing:
            say(f"  no: {problem or missing}")
            continue
        say(f"  {found.kind} {found.version}: {found.path}")
        return 0
    say(
        "No browser could be installed. Install chromium-headless-shell or chromium with this system's package manager "
        "(as root, if this user may not), or copy a Chromium here and name its path with --browser."
    )
    return 1


async def doctor(config: EngineConfig) -> list[tuple[bool, str]]:
    """Checks this machine as a browser host: a pair (fine, sentence) per finding."""
    findings: list[tuple[bool, str]] = []
    try:
        binary = await asyncio.to_thread(find_browser, config.browser)
    except BrowserMissing as missing:
        return [(False, str(missing))]
    findings.append((True, f"{binary.kind} {binary.version} at {binary.path}"))
    engine = BrowserEngine(config)
    began = time.monotonic()
    try:
        await engine.start()
        launch_ms = (time.monotonic() - began) * 1e3
        handle = await engine.open_context(viewport={"width": 640, "height": 480})
        await handle.new_page(width=640, height=480)
        findings.append(
            (True, f"it starts in {launch_ms:.0f} ms and opens a page; {engine.rss_mib():.0f} MiB resident")
        )
    except Exception as error:  # noqa: BLE001 - the finding is the error
        findings.append((False, f"it does not start: {type(error).__name__}: {error}"))
    finally:
        await engine.close()
    return findings + _host_findings()


def _host_findings() -> list[tuple[bool, str]]:
    import psutil

    findings = []
    free_mib = psutil.virtual_memory().available / 2**20
    findings.append((free_mib > 500, f"{free_mib:.0f} MiB of memory free; a light page takes 30, a real one about 300"))
    if Path("/dev/shm").is_dir():
        shm_mib = shutil.disk_usage("/dev/shm").total / 2**20
        advice = "" if shm_mib >= 256 else "; heavy pages crash below 256 (docker run --shm-size=1g)"
        findings.append((shm_mib >= 256, f"/dev/shm holds {shm_mib:.0f} MiB{advice}"))
    if os.geteuid() == 0:
        findings.append((True, "this is root: Chromium runs without its own sandbox; a user account is safer"))
    return findings


def _run(way: Attempt, deadline_s: float) -> str:
    """Runs the commands of one way; returns what went wrong, or an empty string."""
    for number, command in enumerate(way.commands):
        problem = _run_one(command, deadline_s)
        if problem and number >= way.optional:
            return problem
    return ""


def _run_one(command: Sequence[str], deadline_s: float) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"not finished within {deadline_s:g} s"
    except OSError as error:
        return f"{command[0]} could not be run: {error.strerror or error}"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return f"exit code {done.returncode}: {lines[-1][:200] if lines else 'it printed nothing'}"
