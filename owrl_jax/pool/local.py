"""The pool of this machine's real browsers: `pool/sandboxes.py` with Chromium, the sandbox and a recorder plugged in.

    async with browser_pool(SandboxPoolConfig(max_episodes=8)) as pool: ...

Only wiring stands here: how an engine is made, how a sandbox is opened on it, how a browser is asked whether it still
answers, the one egress proxy that all browsers of the pool share, and that orphans of ours from a killed worker are
swept before the first launch (by our own tag, and only those whose parent is gone). Episodes on top of it come with the
episode loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from pathlib import Path
from typing import Any

from owrl_jax.browser.config import EngineConfig, SandboxConfig
from owrl_jax.browser.egress import EgressProxy
from owrl_jax.browser.engine import BrowserEngine, BrowserMissing
from owrl_jax.browser.process import sweep
from owrl_jax.browser.safety import Safety
from owrl_jax.pool.sandboxes import SandboxPool, SandboxPoolConfig

_log = logging.getLogger(__name__)

_PROBE_S = 2.0


def browser_pool(
    config: SandboxPoolConfig | None = None,
    *,
    engine: EngineConfig | None = None,
    sandbox: SandboxConfig | None = None,
    record_dir: Path | None = None,
    **pool_arguments: Any,
) -> SandboxPool:
    """A pool of sandboxes on browsers of this machine (or on the endpoint that `engine` names); not started yet.

    Args:
      config: sizes, limits and deadlines of the pool.
      engine: which browser, and how it is started.
      sandbox: how each sandbox behaves.
      record_dir: if given, every episode is recorded into a fresh folder below it (`browser/record.py`).
      pool_arguments: further arguments of `SandboxPool` (`load`, `cores`).
    """
    engine = engine or EngineConfig()
    sandbox = sandbox or SandboxConfig()
    return _BrowserPool(config or SandboxPoolConfig(), engine, sandbox, record_dir, **pool_arguments)


def open_sandbox(engine: BrowserEngine, config: SandboxConfig, record_dir: Path | None) -> Any:
    """A sandbox on a running browser, recorded into a fresh folder below `record_dir` if that is given."""
    from owrl_jax.browser.record import RecordingSandbox
    from owrl_jax.browser.sandbox import Sandbox

    if record_dir is None:
        return Sandbox(engine, config)
    folder = record_dir / uuid.uuid4().hex
    return RecordingSandbox(
        Sandbox(engine, dataclasses.replace(config, record_har=folder / "traffic.har")), folder, config=config
    )


async def answers(engine: BrowserEngine) -> bool:
    """Whether the browser process itself still answers a CDP request within two seconds."""
    async with asyncio.timeout(_PROBE_S):
        await engine.session.send("Browser.getVersion")
    return True


class _BrowserPool(SandboxPool):
    def __init__(
        self,
        config: SandboxPoolConfig,
        engine: EngineConfig,
        sandbox: SandboxConfig,
        record_dir: Path | None,
        **arguments: Any,
    ) -> None:
        if config.contexts_per_browser > 1 and engine.begin_frame is None:
            # Frames of two pages that overlap in one process crash its compositor, and its pages with it.
            engine = dataclasses.replace(engine, begin_frame=False)
        self._engine_config = engine
        # One proxy for all: the manners towards a host (pace, cool-down) are those of the whole machine.
        shared = engine.egress and engine.endpoint is None
        safety = sandbox.safety or Safety()
        self._egress = EgressProxy(governor=safety.hosts, on_event=safety.on_event) if shared else None
        super().__init__(
            config,
            make_engine=lambda: BrowserEngine(engine, egress=self._egress),
            open_sandbox=lambda running: open_sandbox(running, sandbox, record_dir),
            probe=answers,
            missing=lambda error: isinstance(error, BrowserMissing),
            **arguments,
        )

    async def start(self, *, wait_ready: bool = False) -> None:
        if not self.started:
            tag = self._engine_config.tag
            killed = await asyncio.to_thread(sweep, tag)
            if killed:
                _log.warning("ended %d browsers that a killed worker had left behind (tag %s)", len(killed), tag)
            if self._egress is not None:
                await self._egress.start()
        await super().start(wait_ready=wait_ready)

    async def _close(self) -> None:
        await super()._close()
        if self._egress is not None:
            await self._egress.stop()
