"""What the tests of pool, server and recorder share: a pool on real Chromium, and a look at what it left behind."""

import asyncio
import contextlib
import os
import signal
import time
import uuid

import psutil

from owrl_jax.browser.config import EngineConfig, SandboxConfig
from owrl_jax.browser.process import TAG_FLAG
from owrl_jax.browser.safety import Safety
from owrl_jax.outcome import Outcome
from owrl_jax.pool import SandboxPoolConfig
from owrl_jax.pool.local import browser_pool
from owrl_jax.pool.pressure import PressureConfig
from owrl_jax.types import Observation, StepResult, Task, ToolCall

# Tests share two cores with much else: admission by processor load would make them wait for strangers.
NO_CPU_LIMIT = PressureConfig(cpu_high=1.0, cpu_low=1.0)


def call(name: str, **arguments) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def click(point: tuple[int, int], size: tuple[int, int] = (1280, 1000)) -> ToolCall:
    """A click at a place given in CSS pixels."""
    return call("click", point_2d=[point[0] * 1000 / size[0], point[1] * 1000 / size[1]])


def task(url: str, name: str = "t") -> Task:
    return Task(id=name, instruction="look around", start_url=url)


def fresh_tag() -> str:
    return f"owrl-test-{uuid.uuid4().hex[:12]}"


def local_sandbox(*ports: int, **settings) -> SandboxConfig:
    """A sandbox that may visit these loopback ports and nothing else on this machine."""
    return SandboxConfig(safety=Safety.for_local_worlds({("127.0.0.1", port) for port in ports}), **settings)


@contextlib.asynccontextmanager
async def pool_on(*ports: int, sandbox=None, engine=None, record_dir=None, **config):
    """A pool for these loopback ports; afterwards the ledger is in balance and no process of it is left."""
    tag = engine.tag if engine else fresh_tag()
    settings = {"max_episodes": 2, "launch_jitter_s": 0.0, "tick_s": 0.1, "pressure": NO_CPU_LIMIT}
    pool = browser_pool(
        SandboxPoolConfig(**{**settings, **config}),
        engine=engine or EngineConfig(tag=tag),
        sandbox=sandbox or local_sandbox(*ports),
        record_dir=record_dir,
    )
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
    audit = pool.audit()
    assert audit.balanced and audit.live == 0, audit
    assert sum(pool.outcomes().values()) == audit.released, "one outcome per episode"
    assert tagged(tag) == [], "browsers were left behind"
    assert defunct() == [], "children were not reaped"


def tagged(tag: str) -> list[psutil.Process]:
    """Living browser processes that carry a tag."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and f"{TAG_FLAG}={tag}" in (process.info["cmdline"] or ()):
            found.append(process)
    return found


def defunct() -> list[psutil.Process]:
    """Children of this process that have ended and were not reaped."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def kill(pid: int | None, number: int = signal.SIGKILL) -> None:
    assert pid is not None and pid > 1
    os.kill(pid, number)


def freeze(pgid: int | None) -> None:
    """Stops every process of a browser, as an overloaded host or a debugger would."""
    assert pgid is not None and pgid > 1
    os.killpg(pgid, signal.SIGSTOP)


def ending(result: StepResult) -> Outcome:
    assert result.outcome is not None
    return result.outcome


def observed(result: StepResult) -> Observation:
    """The observation of a step that must have gone well."""
    assert result.outcome is None, result.outcome
    assert result.observation is not None
    return result.observation


def picture(result: StepResult) -> str:
    """The hash of the screenshot of a step that must have gone well."""
    shot = observed(result).screenshot
    assert shot is not None
    return shot.sha256


async def eventually(condition, seconds: float = 5.0) -> None:
    """Waits until `condition()` is true; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        await asyncio.sleep(0.02)
