"""Looking at the page: one picture and the facts that belong to it, taken from one state of one document.

A page does not hold still while it is looked at. So its signature (tab, document, address, number of changes) is taken
before and after the picture, and if they differ the look is repeated, up to three times; the action never is. A page
that never rests is looked at once more and then taken as it is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
from typing import Any

from owrl_jax.browser import changes, faults
from owrl_jax.browser.changes import Snapshot
from owrl_jax.browser.config import SandboxConfig
from owrl_jax.browser.settle import settle
from owrl_jax.browser.stage import Stage
from owrl_jax.browser.tabs import Tab
from owrl_jax.types import Observation, Screenshot, Settle

_log = logging.getLogger(__name__)

RECAPTURES = 3
_OTHER_TAB_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """One look at a page.

    Attributes:
      observation: what the policy gets.
      snapshot: what was in view, to compare the next look with.
      css_width: width of the page in CSS pixels.
      probe: facts of the page.
      recaptures: how often the look was repeated.
    """

    observation: Observation
    snapshot: Snapshot | None
    css_width: float
    probe: dict[str, Any]
    recaptures: int


async def snapshot(tab: Tab) -> Snapshot:
    """What is in view of a tab now."""
    document = _document(tab)
    raw = await tab.world.call("snapshot", changes.BUDGET_MS, changes.LIMIT)
    return Snapshot.read(raw, document)


async def look(stage: Stage, config: SandboxConfig, *, before: Snapshot | None, settled: Settle | None) -> Look:
    """Takes an observation of the active tab.

    Args:
      stage: where.
      config: for limits.
      before: what was in view at the last observation.
      settled: how the page came to rest, for the record.

    Raises:
      Fault: if the page cannot be looked at.
    """
    problem: Exception | None = None
    for attempt in range(RECAPTURES + 1):
        tab = stage.active
        if tab.navigating:
            return await _glance(stage, config, tab, settled)
        try:
            taken = await _once(stage, tab)
        except Exception as error:
            if tab.crashed or not (faults.is_stale_context(error) or faults.is_gone(error)):
                raise
            if faults.is_gone(error) and stage.active is tab:
                raise
            problem = error
            await settle(stage.active, config.settle, grace_s=0.0, until=time.monotonic() + 2.0)
            continue
        shot, snap, probe, torn = taken
        if torn and attempt < (1 if tab.document.restless else RECAPTURES):
            if tab.navigating:
                await settle(stage.active, config.settle, grace_s=0.0, until=time.monotonic() + 2.0)
            continue
        await _titles(stage, tab)
        document = hashlib.sha256("\n".join((snap.document, tab.url, tab.title, snap.hash)).encode("utf-8", "replace"))
        observation = Observation(
            screenshot=shot,
            screen_size=(shot.width, shot.height),
            tabs=stage.views(),
            changes=changes.summary(before, snap),
            settle=settled,
            signature=document.hexdigest()[:16],
        )
        return Look(
            observation=observation, snapshot=snap, css_width=float(probe["width"]), probe=probe, recaptures=attempt
        )
    # It never held still long enough to be asked anything: a picture is better than nothing.
    _log.info("only a picture of %s: %s", stage.active.url[:200], problem or "it kept changing")
    return await _glance(stage, config, stage.active, settled)


async def _once(stage: Stage, tab: Tab) -> tuple[Screenshot, Snapshot, dict[str, Any], bool]:
    document = _document(tab), tab.url
    if not stage.camera.begin_frame:
        await tab.world.frames()
    probe = await tab.world.call("probe")
    snap = await snapshot(tab)
    shot = await stage.camera.take(tab)
    after = await tab.world.call("probe")
    tab.title = after["title"]
    torn = (_document(tab), tab.url) != document or tab is not stage.active
    if not torn and after["mutations"] != probe["mutations"]:
        torn = (await snapshot(tab)).hash != snap.hash
    return shot, snap, after, torn or after["title"] != probe["title"]


async def _glance(stage: Stage, config: SandboxConfig, tab: Tab, settled: Settle | None) -> Look:
    """A picture alone: until the next document has come, the browser passes a page on its way no questions."""
    shot = await stage.camera.take(tab)
    observation = Observation(
        screenshot=shot,
        screen_size=(shot.width, shot.height),
        tabs=stage.views(),
        settle=settled,
        signature="navigating",
    )
    return Look(observation=observation, snapshot=None, css_width=float(config.viewport[0]), probe={}, recaptures=0)


async def _titles(stage: Stage, front: Tab) -> None:
    """Titles of the tabs in the background; one that does not answer keeps the title it had."""

    async def ask(tab: Tab) -> None:
        try:
            tab.title = (await tab.world.call("probe", timeout_s=_OTHER_TAB_S))["title"]
        except Exception as error:
            if not isinstance(error, faults.DeadlineExceeded) and not (
                faults.is_gone(error) or faults.is_stale_context(error)
            ):
                raise

    others = [tab for tab in stage.open_tabs if tab is not front and tab.usable and not tab.navigating]
    if others:
        await asyncio.gather(*(ask(tab) for tab in others))


def _document(tab: Tab) -> str:
    return f"{id(tab):x}/{tab.document.loader_id}"
