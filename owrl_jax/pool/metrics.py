"""What a browser host tells its operators: one health record and one page of Prometheus text, from the same numbers.

Everything here is read from the pool and the episode service when somebody asks; nothing is counted twice and nothing
is sampled in the background. Page addresses, typed text and cookies never appear: labels are closed vocabularies
(outcome keys, browser states, causes of ending).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from owrl_jax.browser.episodes import EpisodeService
from owrl_jax.pool.sandboxes import SandboxPool

_PREFIX = "owrl_browser_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One metric family: name without prefix, kind (counter or gauge), help, and values by label."""

    name: str
    kind: str
    help: str
    values: tuple[tuple[Mapping[str, str], float], ...]


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
    return render(
        [
            _counter("leases_acquired", "leases given", audit.acquired),
            _counter("leases_released", "leases given back", audit.released),
            _gauge("leases_live", "leases held now", audit.live),
            _gauge("requests_waiting", "requests waiting for a place", reading.queued),
            _gauge("requests_rejected_recently", "requests turned away in the last minute", reading.rejected_recently),
            _gauge("admitting", "1 if another episode is admitted now", float(reading.available)),
            _gauge("cpu_share", "smoothed share of the cores in use", reading.cpu_ema),
            _gauge("memory_share", "share of the memory in use", reading.mem),
            _gauge("rss_mib", "resident memory of all browsers, shared pages counted per process", rss),
            _gauge("defunct_children", "children that ended and were not reaped", defunct_children()),
            _by("browsers", "gauge", "browsers by state", "state", audit.browsers),
            _by("episodes_ended", "counter", "episodes by ending", "outcome", pool.outcomes()),
            _by("browsers_ended", "counter", "browsers ended by cause", "cause", counts.causes),
            _counter("launches", "browser launches tried", counts.launches),
            _counter("launch_failures", "browser launches that failed", counts.launch_failures),
            _counter("episodes_opened", "episodes opened over HTTP", service.counts.opened),
            _counter("duplicate_requests", "requests answered from another one's work", service.counts.duplicates),
            _counter(
                "conflicting_requests",
                "requests refused because their step was done or not due",
                service.counts.conflicts,
            ),
            _counter("calls", "tool calls run over HTTP", service.counts.calls),
            _counter("steps", "steps run over HTTP", steps),
            _counter("step_seconds", "time spent in steps over HTTP", seconds),
        ]
    )


def render(samples: Iterable[Sample]) -> str:
    """Prometheus text format, version 0.0.4."""
    lines = []
    for sample in samples:
        name = _PREFIX + sample.name + ("_total" if sample.kind == "counter" else "")
        lines += [f"# HELP {name} {sample.help}", f"# TYPE {name} {sample.kind}"]
        for labels, value in sample.values:
            inner = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
            lines.append(f"{name}{'{' + inner + '}' if inner else ''} {value:.12g}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _counter(name: str, help: str, value: float) -> Sample:
    return Sample(name=name, kind="counter", help=help, values=(({}, value),))


def _gauge(name: str, help: str, value: float) -> Sample:
    return Sample(name=name, kind="gauge", help=help, values=(({}, value),))


def _by(name: str, kind: str, help: str, label: str, values: Mapping[str, float]) -> Sample:
    return Sample(name=name, kind=kind, help=help, values=tuple(({label: k}, v) for k, v in sorted(values.items())))
