"""Pages in trouble: stuck on their way, running a script without end, crashed. Helped once, then given up on.

Whether a page is to be helped is seen by asking it something. A script without end is stopped, a page whose renderer
died is loaded again at its last address, once per address and episode. What cannot be helped is raised as a typed
fault.
"""

from __future__ import annotations

import contextlib
import time

from owrl_jax.browser import faults, feedback
from owrl_jax.browser.actions import Actor
from owrl_jax.browser.config import SandboxConfig
from owrl_jax.browser.settle import settle
from owrl_jax.browser.stage import Stage
from owrl_jax.browser.tabs import Tab
from owrl_jax.outcome import Reason


class Care:
    """Looks after the tabs of one stage."""

    def __init__(self, stage: Stage, actor: Actor, config: SandboxConfig) -> None:
        self.stage = stage
        self.actor = actor
        self.config = config
        self._crashed: set[str] = set()

    async def arrive(self, tab: Tab) -> None:
        """Before acting in a page that is on its way to another one: waits for that, then gives up on it."""
        await settle(tab, self.config.settle, grace_s=0.0, until=time.monotonic() + self.config.deadlines.cdp_s / 2)
        if tab.navigating:
            await self.stop(tab)

    async def stop(self, tab: Tab) -> None:
        """Stops all loading of a tab."""
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            try:
                await tab.send("Page.stopLoading", timeout_s=1.0)
            except Exception as error:
                # Between two documents there is nothing to stop; a moment later there is.
                if not isinstance(error, faults.DeadlineExceeded) and not faults.is_stale_context(error):
                    raise
            await tab.pulse.wait(0.05)
            if not tab.navigating:
                return

    async def tend(self, tab: Tab, notes: list[str]) -> Tab:
        """A page in trouble: a script without end is stopped, a crashed page is loaded again, once each.

        Raises:
          Fault: if that did not help.
        """
        stage = self.stage
        if not stage.engine.alive:
            raise faults.Fault(Reason.SANDBOX_ERROR, "browser_gone", "the browser ended")
        if stage.hostile:
            raise faults.Fault(Reason.ENVIRONMENT_ERROR, "page_hostile", stage.hostile)
        if tab.closed:
            return stage.active
        if tab.crashed:
            return await self._reload_crashed(tab, notes)
        if await self._answers(tab, 1.0):
            return tab
        with contextlib.suppress(faults.DeadlineExceeded):  # whether it helped is asked next
            await tab.send("Runtime.terminateExecution", timeout_s=2.0)
        if not await self._answers(tab, 2.0):
            raise faults.Fault(
                Reason.ENVIRONMENT_ERROR,
                "page_frozen",
                f"the page does not answer any more: {feedback.address(tab.url)}",
            )
        notes.append("a script of the page ran without end and was stopped")
        return tab

    async def _answers(self, tab: Tab, seconds: float) -> bool:
        try:
            await tab.world.call("probe", timeout_s=seconds)
        except Exception as error:
            if isinstance(error, faults.DeadlineExceeded) or faults.is_stale_context(error) or faults.is_gone(error):
                return False
            raise
        return True

    async def _reload_crashed(self, tab: Tab, notes: list[str]) -> Tab:
        stage, url = self.stage, tab.url
        if url in self._crashed or not url.startswith(("http://", "https://")):
            raise faults.Fault(
                Reason.ENVIRONMENT_ERROR, "page_crash", f"the page crashes its renderer: {feedback.address(url)}"
            )
        self._crashed.add(url)
        fresh = await stage.recover(tab)
        fresh.begin()
        failed = await self.actor.navigate(fresh, url, self.config.settle.commit_s)
        settled = await settle(fresh, self.config.settle, grace_s=0.0)
        if fresh.crashed or settled.frozen:
            raise faults.Fault(
                Reason.ENVIRONMENT_ERROR,
                "page_crash",
                f"the page crashed again when loaded again: {feedback.address(url)}",
            )
        notes.append("the page crashed and was loaded again" + (f", which failed: {failed}" if failed else ""))
        return fresh
