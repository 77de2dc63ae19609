"""A browser that nobody waits for any more leaves nothing behind, at whatever moment the waiting ended."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time

import pytest

from owrl_jax.browser import process as processes
from owrl_jax.browser.cli import main
from owrl_jax.browser.config import EngineConfig
from owrl_jax.browser.engine import BrowserEngine
from owrl_jax.browser.process import BrowserProcess
from tests.browser.pool_world import eventually, fresh_tag, tagged

pytestmark = pytest.mark.browser


@pytest.fixture
def homes(tmp_path, monkeypatch):
    """The folder in which browsers get their homes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("slow", ["before it is spawned", "after it is spawned", "before it is ready"])
async def test_a_launch_that_is_cancelled_leaves_no_browser(homes, monkeypatch, slow):
    tag, spawned, real = fresh_tag(), [], processes._spawn

    def spawn(*args):
        if slow == "before it is spawned":
            time.sleep(0.4)
        made = real(*args)
        spawned.append(made)
        if slow == "after it is spawned":
            time.sleep(0.4)
        return made

    monkeypatch.setattr(processes, "_spawn", spawn)
    engine = BrowserEngine(EngineConfig(tag=tag, egress=False))
    launching = asyncio.ensure_future(engine.start())
    if slow == "before it is spawned":
        await asyncio.sleep(0.2)
        assert not spawned
    else:
        await eventually(lambda: spawned)
    if slow == "before it is ready":
        await asyncio.sleep(0.02)
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching
    await eventually(lambda: spawned and not spawned[0].alive and not tagged(tag) and not list(homes.iterdir()), 10)


async def test_a_launch_whose_loop_ends_leaves_no_browser(homes, monkeypatch):
    """A program that is interrupted while a browser starts: the loop is gone before the thread is done."""
    tag, spawned, real = fresh_tag(), [], processes._spawn

    def spawn(*args):
        time.sleep(0.4)
        spawned.append(real(*args))
        return spawned[-1]

    monkeypatch.setattr(processes, "_spawn", spawn)

    async def program() -> None:
        path = BrowserEngine(EngineConfig(tag=tag, egress=False))
        launching = asyncio.ensure_future(path.start())
        await asyncio.sleep(0.1)
        assert not launching.done()

    await asyncio.to_thread(asyncio.run, program())
    await eventually(lambda: spawned and not spawned[0].alive and not tagged(tag) and not list(homes.iterdir()), 10)


async def test_a_launch_that_fails_says_why_and_leaves_no_folder(homes):
    with pytest.raises(processes.LaunchError, match="could not be started"):
        await BrowserProcess.launch(str(homes / "no-browser"), (), tag=fresh_tag(), timeout_s=5)
    with pytest.raises(processes.LaunchError, match="ended at once with code 1"):
        await BrowserProcess.launch("/bin/false", (), tag=fresh_tag(), timeout_s=5)
    assert os.listdir(homes) == []


def test_the_doctor_says_whether_browsers_run_here(capsys):
    code = main(["doctor"])
    said = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok  ", "NO  ")) for line in said)
    assert code == (0 if all(line.startswith("ok") for line in said) else 1)
    # Of this machine, whose browser runs all the other tests, these are surely fine; memory may be short.
    assert re.match(r"ok  (headless_shell|chromium) \d+\.\S+ at /", said[0])
    assert re.match(r"ok  it starts in \d+ ms and opens a page; \d+ MiB resident", said[1])
    assert any("MiB of memory free" in line for line in said[2:])


@pytest.mark.parametrize("broken", ["not there", "no browser", "ends at once"])
def test_the_doctor_says_what_is_wrong_with_a_browser(broken, homes, tmp_path_factory, capsys):
    path = tmp_path_factory.mktemp("bin") / "browser"
    if broken != "not there":
        says_version = 'case "$*" in *version*) echo HeadlessChrome 150.0.1; exit 0;; esac;'
        path.write_text(
            f"#!/bin/sh\n{says_version if broken == 'ends at once' else ''} echo out of order >&2; exit 3\n"
        )
        path.chmod(0o755)
    assert main(["doctor", "--browser", str(path)]) == 1
    (wrong,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NO") and "MiB" not in line]
    assert str(path) in wrong or ("ended at once with code 3" in wrong and "out of order" in wrong)
    assert os.listdir(homes) == []
