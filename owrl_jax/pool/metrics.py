"""What a browser host tells its operators: one health record and one page of Prometheus text, from the same numbers.

Everything here is read from the pool and the episode service when somebody asks; nothing is counted twice and nothing
is sampled in the background. Page addresses, typed text and cookies never appear: labels are closed vocabularies
(outcome keys, browser states, causes of ending).
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from owrl_jax.browser.episodes import EpisodeService
from owrl_jax.pool.sandboxes import SandboxPool
from owrl_jax.serving import by_label, counter, gauge, prometheus_text

_PREFIX = "owrl_browser_"


def defunct_children() -> int:
    """Children of this process that have ended and were not reaped; always zero unless something is wrong."""
    import psutil

    count = 0
    for child in psutil.Process().children(recursive=True):
        try:
            count += child.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # reaped while we looked
            continue
    return count


def health(pool: SandboxPool, service: EpisodeService, *, started_s: float) -> dict[str, Any]:
    """The record of GET /health. `started_s`: when the server started, on the monotonic clock."""
    from owrl_jax import __version__

    audit = pool.audit()
    return {
        "version": __version__,
        "uptime_s": round(time.monotonic() - started_s, 1),
        "episodes": service.live,
        "sizes": dataclasses.asdict(pool.sizes),
        "pressure": dataclasses.asdict(pool.reading()),
        "leases": {"acquired": audit.acquired, "released": audit.released, "live": audit.live},
        "browsers": audit.browsers,
        "defunct": defunct_children(),
    }


def prometheus(pool: SandboxPool, service: EpisodeService) -> str:
    """The text of GET /metrics."""
    audit, counts, reading = pool.audit(), pool.counts(), pool.reading()
    rss = sum(engine.rss_mib() for engine in pool.engines().values() if engine.alive)
    seconds, steps = service.counts.step_seconds
    return prometheus_text(
        [
            counter("leases_acquired", "leases given", audit.acquired),
            counter("leases_released", "leases given back", audit.released),
            gauge("leases_live", "leases held now", audit.live),
            gauge("requests_waiting", "requests waiting for a place", reading.queued),
            gauge("requests_rejected_recently", "requests turned away in the last minute", reading.rejected_recently),
            gauge("admitting", "1 if another episode is admitted now", float(reading.available)),
            gauge("cpu_share", "smoothed share of the cores in use", reading.cpu_ema),
            gauge("memory_share", "share of the memory in use", reading.mem),
            gauge("rss_mib", "resident memory of all browsers, shared pages counted per process", rss),
            gauge("defunct_children", "children that ended and were not reaped", defunct_children()),
            by_label("browsers", "gauge", "browsers by state", "state", audit.browsers),
            by_label("episodes_ended", "counter", "episodes by ending", "outcome", pool.outcomes()),
            by_label("browsers_ended", "counter", "browsers ended by cause", "cause", counts.causes),
            counter("launches", "browser launches tried", counts.launches),
            counter("launch_failures", "browser launches that failed", counts.launch_failures),
            counter("episodes_opened", "episodes opened over HTTP", service.counts.opened),
            counter("duplicate_requests", "requests answered from another one's work", service.counts.duplicates),
            counter(
                "conflicting_requests",
                "requests refused because their step was done or not due",
                service.counts.conflicts,
            ),
            counter("calls", "tool calls run over HTTP", service.counts.calls),
            counter("steps", "steps run over HTTP", steps),
            counter("step_seconds", "time spent in steps over HTTP", seconds),
        ],
        prefix=_PREFIX,
    )
