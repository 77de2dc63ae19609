"""`owrl browser …`: install a browser, check the machine, serve sandboxes over HTTP, replay a recording.

Each subcommand parses its own arguments and is imported when it is asked for; `serve` lives in `pool/serve.py`, since
it needs the pool. Exit codes: 0 fine, 1 the answer is no (nothing installed, a finding, a difference), 2 a wrong
call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import sys
from pathlib import Path

import tyro

# name -> (help, "module:function"); targets take the remaining arguments and return an exit code.
SUBCOMMANDS = {
    "install": ("get a browser onto this machine, if there is none", "owrl_jax.browser.cli:install"),
    "doctor": ("check that browsers run here, and say what to do", "owrl_jax.browser.cli:doctor"),
    "serve": ("the sandbox behind HTTP, for episodes that run elsewhere", "owrl_jax.pool.serve:main"),
    "replay": ("run a recorded episode again and name the first step that differs", "owrl_jax.browser.cli:replay"),
}


def main(argv: list[str]) -> int:
    """Runs one subcommand."""
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, SUBCOMMANDS))
        lines = "\n".join(f"  {name:<{width}}  {help}" for name, (help, _) in SUBCOMMANDS.items())
        _say(f"usage: owrl browser COMMAND [arguments]      owrl browser COMMAND --help\n\n{lines}")
        return 0 if argv else 2
    if argv[0] not in SUBCOMMANDS:
        _complain(f"owrl browser: there is no command {argv[0]!r}; there are {', '.join(SUBCOMMANDS)}")
        return 2
    module, _, function = SUBCOMMANDS[argv[0]][1].partition(":")
    return getattr(importlib.import_module(module), function)(argv[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstallOptions:
    """The arguments of `owrl browser install`."""

    force: bool = False
    """Install even if a browser already runs."""
    deadline_s: float = 600.0
    """Time for each command, in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The arguments of `owrl browser doctor`."""

    browser: str | None = None
    """Path of the browser, or `headless_shell` or `chromium`; left out, the best there is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """The arguments of `owrl browser replay`."""

    folder: tyro.conf.Positional[Path]
    """Folder of the recording."""
    browser: str | None = None
    """Path of the browser, or `headless_shell` or `chromium`; left out, the best there is."""
    picture_tolerance: float = 0.002
    """Share of a screenshot's pixels that may differ; 0 asks for the same bytes."""
    live: bool = False
    """Use the network instead of the recorded traffic."""


def install(argv: list[str]) -> int:
    """`owrl browser install`."""
    from owrl_jax.browser.install import install as run

    options = tyro.cli(InstallOptions, args=argv, prog="owrl browser install")
    return run(say=_say, force=options.force, deadline_s=options.deadline_s)


def doctor(argv: list[str]) -> int:
    """`owrl browser doctor`."""
    from owrl_jax.browser.config import EngineConfig
    from owrl_jax.browser.install import doctor as run

    options = tyro.cli(DoctorOptions, args=argv, prog="owrl browser doctor")
    findings = asyncio.run(run(EngineConfig(browser=options.browser)))
    for fine, text in findings:
        _say(f"{'ok ' if fine else 'NO '} {text}")
    return 0 if all(fine for fine, _ in findings) else 1


def replay(argv: list[str]) -> int:
    """`owrl browser replay DIR`."""
    from owrl_jax.browser.config import EngineConfig
    from owrl_jax.browser.engine import BrowserMissing
    from owrl_jax.browser.process import LaunchError
    from owrl_jax.browser.replay import BadRecording, load
    from owrl_jax.browser.replay import replay as run

    options = tyro.cli(ReplayOptions, args=argv, prog="owrl browser replay")
    try:
        report = asyncio.run(
            run(
                load(options.folder),
                engine=EngineConfig(browser=options.browser),
                picture_tolerance=options.picture_tolerance,
                live=options.live,
            )
        )
    except (BadRecording, BrowserMissing, LaunchError) as error:
        _complain(f"owrl browser replay: {error}")
        return 2
    if report.difference is None:
        _say(f"{report.agreed} of {report.steps} steps agree")
        return 0
    d = report.difference
    _say(f"step {d.step} differs in {d.what} ({report.agreed} of {report.steps} agree)")
    _say(f"  recorded  {d.recorded}\n  replayed  {d.replayed}")
    return 1


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command talks to its user


def _complain(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - a command talks to its user
