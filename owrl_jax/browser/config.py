"""Settings of browser processes and sandboxes: plain frozen records, validated where they are made.

Deadlines nest: one CDP request < one call < one step < one episode < the lease of the pool. No setting means "forever".
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from owrl_jax.browser.safety import Safety


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long anything may take, in seconds. Every await of the sandbox runs under one of these.

    Attributes:
      cdp_s: one request to the browser.
      call_s: one tool call, its settling included.
      step_s: one step: all calls and the observation. An explicit `wait` adds what it asks for.
      navigation_s: one attempt to open the start page, until its document has arrived.
      reset_s: the whole reset, all attempts together.
      episode_s: from the reset to the end of the episode.
      close_s: giving everything back.
    """

    cdp_s: float = 5.0
    call_s: float = 12.0
    step_s: float = 45.0
    navigation_s: float = 20.0
    reset_s: float = 75.0
    episode_s: float = 600.0
    close_s: float = 8.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"deadline {field.name} must be a positive number of seconds, got {value!r}")
        if not self.cdp_s <= self.call_s <= self.step_s <= self.episode_s:
            raise ValueError(
                "deadlines must nest: cdp_s <= call_s <= step_s <= episode_s, got "
                f"{self.cdp_s:g}, {self.call_s:g}, {self.step_s:g}, {self.episode_s:g}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettleCaps:
    """What a page may keep us waiting for after an action, in seconds. Each is a cap, none is a sleep.

    Attributes:
      grace_s: for the action to ask for a navigation; scripts that navigate a moment after the click need it.
      commit_s: for a requested navigation to deliver its document.
      popup_s: for a tab that the page asked for to be there.
      load_s: for the document to be parsed, after it has arrived.
      fonts_s, images_s: for fonts, and for images that are in view. One that hangs must not hold the picture for a
        second.
      request_s: for one request of the page's own site; an older one is a poll or a stream and is not waited for.
      request_again_s: the same for an address that was not answered in that time before in the episode.
      silent_s: for the next bytes of an answer that has begun; a stream is silent, and so is an answer that the page
        never reads.
      foreign_s: for a script or style sheet of another site, while the page is loading.
      render_s: for the page to show what its last request brought.
      quiet_s: how long the DOM must have been still.
      restless_s: for the DOM to become still; past it the page is one that never rests.
      restless_again_s: the same for a document that never rested before.
      reloads: documents that may arrive in one wait before the page counts as one that reloads itself without end.
      total_s: for everything after a document has arrived.
    """

    grace_s: float = 0.1
    commit_s: float = 9.0
    popup_s: float = 1.5
    load_s: float = 3.0
    fonts_s: float = 0.4
    images_s: float = 0.6
    request_s: float = 2.5
    request_again_s: float = 0.4
    silent_s: float = 0.5
    foreign_s: float = 1.0
    render_s: float = 0.05
    quiet_s: float = 0.08
    restless_s: float = 0.8
    restless_again_s: float = 0.15
    reloads: int = 4
    total_s: float = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How to start, or where to find, a browser.

    Attributes:
      browser: path of the binary, or `headless_shell` or `chromium` to choose the kind; None takes the best there is.
      endpoint: a CDP address (ws:// or http://) of a browser that runs elsewhere; then nothing is launched.
      endpoint_headers: headers for that address, credentials of a browser service among them.
      tag: mark on the command line of our processes, by which a sweep recognises its own orphans.
      begin_frame: draw frames only on request (headless shell alone can); None means where possible.
      egress: send all traffic through an egress proxy that enforces the address rules (launched browsers only).
      extra_args: further command-line arguments.
      launch_s: time to become ready.
    """

    browser: str | None = None
    endpoint: str | None = None
    endpoint_headers: tuple[tuple[str, str], ...] = ()
    tag: str = "owrl"
    begin_frame: bool | None = None
    egress: bool = True
    extra_args: tuple[str, ...] = ()
    launch_s: float = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """How a sandbox behaves.

    Attributes:
      viewport: width and height of the page in CSS pixels.
      dpr: device pixels per CSS pixel; the picture is that much larger, coordinates do not change.
      image_format: `png`, or `jpeg` (a third of the time to make and half the size, lossy).
      jpeg_quality: 1 to 100.
      deadlines, settle: see there.
      start_attempts: tries to open the start page; the last one in a fresh context.
      start_backoff_s: pause before the second try; doubled for each further one.
      accept_dialogs: answer of confirm and prompt dialogs. Alerts and `beforeunload` are accepted anyway.
      max_dialogs: dialogs in one step after which the page counts as hostile.
      max_tabs: open tabs at one time; popups beyond are closed and reported.
      max_popups: popups in one step after which the page counts as hostile.
      download_dir: where downloads go, each episode in a folder of its own; None discards them (they are reported all
        the same).
      max_download_bytes: size at which one is cancelled.
      max_downloads: number per episode.
      max_image_bytes: a larger picture is an error, not an observation.
      user_agent, locale, timezone: of the browser context; None leaves the browser's own.
      record_har: file to record all traffic of the episode to, bodies included.
      replay_har: recording to answer all requests from; what is not in it is aborted.
      safety: what may be visited and done; None is the safe default, `Safety()`.
    """

    viewport: tuple[int, int] = (1280, 1000)
    dpr: float = 1.0
    image_format: str = "png"
    jpeg_quality: int = 80
    deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)
    settle: SettleCaps = dataclasses.field(default_factory=SettleCaps)
    start_attempts: int = 3
    start_backoff_s: float = 1.0
    accept_dialogs: bool = True
    max_dialogs: int = 5
    max_tabs: int = 10
    max_popups: int = 5
    download_dir: Path | None = None
    max_download_bytes: int = 10 * 2**20
    max_downloads: int = 20
    max_image_bytes: int = 32 * 2**20
    user_agent: str | None = None
    locale: str | None = None
    timezone: str | None = None
    record_har: Path | None = None
    replay_har: Path | None = None
    safety: Safety | None = None

    def __post_init__(self) -> None:
        width, height = self.viewport
        if not (100 <= width <= 8192 and 100 <= height <= 8192):
            raise ValueError(f"viewport must be 100 to 8192 pixels a side, got {width}x{height}")
        if not (math.isfinite(self.dpr) and 0.25 <= self.dpr <= 4):
            raise ValueError(f"dpr must be 0.25 to 4, got {self.dpr!r}")
        if self.image_format not in ("png", "jpeg"):
            raise ValueError(f"image_format must be 'png' or 'jpeg', got {self.image_format!r}")
        if not 1 <= self.jpeg_quality <= 100:
            raise ValueError(f"jpeg_quality must be 1 to 100, got {self.jpeg_quality!r}")
        for name in ("start_attempts", "max_dialogs", "max_tabs", "max_popups", "max_download_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if self.record_har is not None and self.replay_har is not None:
            raise ValueError("record_har and replay_har exclude each other: record first, replay later")
