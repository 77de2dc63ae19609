"""What the sandbox tests share: an engine and a page server per module, and an episode that speaks in CSS pixels."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import PIL.Image
import pytest

from owrl_jax.browser.config import EngineConfig, SandboxConfig
from owrl_jax.browser.engine import BrowserEngine
from owrl_jax.browser.safety import Safety
from owrl_jax.browser.sandbox import Sandbox
from owrl_jax.types import CallStatus, Observation, StepResult, Task, ToolCall
from tests.browser.pages import PageServer

# The machine that runs the tests may be busy: limits of time are classes (a moment, a cap, a deadline).
MOMENT_S = 4.5  # less than the 5 s that a page may hold us in all
ENGINES = {
    "frames-on-request": EngineConfig(browser="headless_shell", begin_frame=True),
    "headless-shell": EngineConfig(browser="headless_shell", begin_frame=False),
    "chromium": EngineConfig(browser="chromium"),
}


# Parameters of modules. The engine that a pool takes by itself runs in every suite, the other with the slow tests;
# `test_sandbox_tools` and `test_ssrf` run in both, always.
FIRST_OR_CHROMIUM = ["frames-on-request", pytest.param("chromium", marks=pytest.mark.slow)]
FIRST_OR_PLAIN = ["frames-on-request", pytest.param("headless-shell", marks=pytest.mark.slow)]


class Episode:
    """A sandbox in an episode, with the last result at hand."""

    def __init__(self, sandbox: Sandbox, first: StepResult, seconds: float) -> None:
        self.sandbox = sandbox
        self.result = first
        self.seconds = seconds

    async def do(self, *calls: ToolCall) -> StepResult:
        """One turn."""
        start = time.monotonic()
        self.result = await self.sandbox.step(calls)
        self.seconds = time.monotonic() - start
        assert len(self.result.results) == len(calls), "exactly one line for each call"
        assert all(r.feedback.startswith(("Succeed:", "Failed:", "Skipped:")) for r in self.result.results)
        return self.result

    async def one(self, name: str, **arguments: Any) -> str:
        """One call; gives its feedback."""
        return (await self.do(ToolCall(name=name, arguments=arguments))).results[0].feedback

    async def click(self, x: float, y: float, **arguments: Any) -> str:
        """A click at a CSS pixel of a 1280x1000 page."""
        return await self.one("click", point_2d=self.grid(x, y), **arguments)

    @staticmethod
    def grid(x: float, y: float) -> list[float]:
        return [x * 1000 / 1280, y]

    @property
    def observation(self) -> Observation:
        assert self.result.observation is not None, self.result.outcome
        return self.result.observation

    @property
    def url(self) -> str:
        return self.observation.active_tab.url

    @property
    def ok(self) -> bool:
        return all(r.status is CallStatus.OK for r in self.result.results)

    @property
    def page(self) -> Any:
        """The Playwright page in front, for looking behind the scenes."""
        assert self.sandbox.stage is not None
        return self.sandbox.stage.active.page

    async def js(self, expression: str) -> Any:
        """What the page itself says; a look at the truth that does not go through the code under test."""
        return await self.page.evaluate(expression)

    def pixel(self, x: int, y: int) -> tuple[int, int, int]:
        """Colour of the last picture at a pixel."""
        return image(self.observation).getpixel((x, y))  # type: ignore[return-value]


class World:
    """An engine and two servers (two origins)."""

    def __init__(self, engine: BrowserEngine, server: PageServer, other: PageServer) -> None:
        self.engine = engine
        self.server = server
        self.other = other

    def config(self, **settings: Any) -> SandboxConfig:
        ports = (self.server.port, self.other.port)
        safety = settings.pop("safety", None) or Safety.for_local_worlds(
            {(host, port) for port in ports for host in ("127.0.0.1", "localhost")}
        )
        return SandboxConfig(safety=safety, **settings)

    @contextlib.asynccontextmanager
    async def episode(self, path: str, **settings: Any) -> AsyncIterator[Episode]:
        """An episode that begins at a path of the server, or at a full address."""
        url = path if "://" in path else self.server.url(path)
        sandbox = Sandbox(self.engine, self.config(**settings))
        start = time.monotonic()
        try:
            first = await sandbox.reset(Task(id="t", instruction="look around", start_url=url))
            yield Episode(sandbox, first, time.monotonic() - start)
        finally:
            await sandbox.close()


@contextlib.asynccontextmanager
async def world_of(kind: str) -> AsyncIterator[World]:
    """A world with one of the `ENGINES`."""
    engine = BrowserEngine(ENGINES[kind])
    async with PageServer() as server, PageServer() as other:
        await engine.start()
        try:
            yield World(engine, server, other)
        finally:
            await engine.close()


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def click(x: float, y: float, **arguments: Any) -> ToolCall:
    return call("click", point_2d=Episode.grid(x, y), **arguments)


def image(observation: Observation) -> PIL.Image.Image:
    import io

    assert observation.screenshot is not None
    return PIL.Image.open(io.BytesIO(observation.screenshot.data)).convert("RGB")


def box(x: int, y: int, width: int = 200, height: int = 40) -> str:
    """A style that puts an element at a place."""
    return f"position:absolute;left:{x}px;top:{y}px;width:{width}px;height:{height}px"
