"""The report's tables and bars: outcomes by owner and site, wall time, evaluations, settings. Functions to HTML."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from owrl_jax.obs import stats
from owrl_jax.obs.episode_parts import escape
from owrl_jax.obs.live import duration
from owrl_jax.obs.metrics import NO_PHASES, Record
from owrl_jax.obs.run_data import EpisodeRow

MOST_SITES = 10


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], *, text: int = 1, foot: Sequence[str] = ()) -> str:
    """A table; the first `text` columns hold words, the others numbers. Cells are HTML already."""

    def line(cells: Sequence[str], tag: str, kind: str = "") -> str:
        inner = "".join(f"<{tag}{' class=n' if n >= text else ''}>{cell}</{tag}>" for n, cell in enumerate(cells))
        return f"<tr{kind}>{inner}</tr>"

    body = "".join(line(row, "td") for row in rows)
    end = line(foot, "td", ' class="sum"') if foot else ""
    head_row = f"<thead>{line(head, 'th')}</thead>"
    return f'<div class="wide"><table class="grid">{head_row}<tbody>{body}{end}</tbody></table></div>'


def outcomes(episodes: Sequence[EpisodeRow]) -> str:
    """How episodes ended, by whose doing it was and on which site: every attempt counts."""
    sites = [site for site, _ in Counter(row.site for row in episodes).most_common()]
    shown = sites if len(sites) <= MOST_SITES else sites[: MOST_SITES - 1]
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in episodes:
        site = row.site if row.site in shown else ""
        counts[row.outcome, row.owner.value, site] += 1
    columns = [*shown, *([""] if len(shown) < len(sites) else [])]
    totals: Counter[tuple[str, str]] = Counter()
    for (outcome, owner, _), n in counts.items():
        totals[outcome, owner] += n
    rows = []
    for (outcome, owner), total in totals.most_common():
        cells = [_count(counts[outcome, owner, site]) for site in columns]
        rows.append([escape(outcome), escape(owner), *cells, f"{total} ({total / len(episodes):.0%})"])
    sums = [str(sum(counts[o, w, site] for o, w in totals)) for site in columns]
    head = [
        "ending",
        "whose doing",
        *(escape(site) if site else f"{len(sites) - len(shown)} other sites" for site in columns),
    ]
    return grid([*head, "all"], rows, text=2, foot=["all", "", *sums, str(len(episodes))])


def verdicts(episodes: Sequence[EpisodeRow]) -> str:
    """What judges said, by judge; only of endings that are the policy's own."""
    counts: Counter[tuple[str, str]] = Counter((row.judge, row.verdict) for row in episodes if row.verdict)
    judges = sorted({judge for judge, _ in counts})
    rows = []
    for judge in judges:
        said = {word: counts[judge, word] for word in ("success", "failure", "invalid")}
        rate = stats.rate(said["success"], said["success"] + said["failure"])
        rows.append([escape(judge), *(_count(n) for n in said.values()), interval(rate)])
    return grid(["judge", "success", "failure", "invalid", "success over valid"], rows) if rows else ""


def _count(n: int) -> str:
    return str(n) if n else '<span class="muted">·</span>'


def interval(rate: stats.Rate) -> str:
    """A share with its interval."""
    if not rate.n:
        return '<span class="muted">none</span>'
    return f'{rate.share:.1%} <span class="muted">[{rate.low:.0%}, {rate.high:.0%}] of {rate.n}</span>'


# --- Time ------------------------------------------------------------------------------------------------------------


def wall_time(records: Sequence[Record]) -> str:
    """Where the wall time of the run went, from the metrics; empty if it was not measured."""
    wall: dict[str, float] = {}
    busy: dict[str, float] = {}
    for record in records:
        for name, value in record.values.items():
            room, _, rest = name.partition("/")
            if rest.endswith("_s") and name not in NO_PHASES and math.isfinite(value) and room in ("time", "busy"):
                into, phase = (wall if room == "time" else busy), rest.removesuffix("_s")
                into[phase] = into.get(phase, 0.0) + value
    total = sum(wall.values())
    if total <= 0:
        return ""
    names = sorted(wall, key=lambda name: (name == "idle", -wall[name]))
    kinds = {name: "idle" if name == "idle" else f"c{n % 6}" for n, name in enumerate(names)}
    bar = "".join(f'<i class="{kinds[n]}" style="width:{100 * wall[n] / total:.2f}%"></i>' for n in names)
    legend = "".join(
        f'<span><i class="{kinds[n]}"></i>{escape(n)} {wall[n] / total:.1%}, {duration(wall[n])}'
        f"{f' (busy {busy[n] / total:.0%} of the time)' if n in busy else ''}</span>"
        for n in names
    )
    return f'<div class="stack">{bar}</div><div class="legend">{legend}</div>'


def episode_time(episodes: Sequence[EpisodeRow]) -> str:
    """Where the time of episodes went: seconds by phase, over episodes that measured it."""
    phases: dict[str, list[float]] = {}
    measured = [row.timings_ms for row in episodes if row.timings_ms]
    for timings in measured:
        for name, ms in timings.items():
            phases.setdefault(name, []).append(ms / 1e3)
    if not measured:
        return ""
    whole = sum(phases.get("total", [])) or sum(sum(v) for n, v in phases.items() if "." not in n)

    def order(name: str) -> tuple[float, str]:
        """Longest phase first, its parts behind it."""
        return -sum(phases.get(name.partition(".")[0], [0.0])), name

    rows = []
    for name in sorted(phases, key=order):
        values = phases[name]
        shown = f'<span class="muted">– {escape(name.partition(".")[2])}</span>' if "." in name else escape(name)
        per = sum(values) / len(measured)
        p95 = float(np.percentile(values, 95))
        share = f"{sum(values) / whole:.1%}" if whole and name != "total" else ""
        rows.append([shown, *map(_seconds, (per, statistics.median(values), p95)), share])
    return grid(["phase", "mean per episode", "median", "95th percentile", "share"], rows)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"


# --- Evaluations -----------------------------------------------------------------------------------------------------


def evaluation_table(evaluations: Sequence[stats.Evaluation]) -> str:
    """One line for each pass over one task set."""
    rows = []
    tries = max((a.attempt for e in evaluations for a in e.tasks), default=0) + 1
    ks = [k for k in (2, 4, 8, 16) if k <= tries]
    for one in evaluations:
        found = stats.success(one.tasks)
        units = stats.success_over_units(one.tasks)
        over = f"{units.value:.1%} [{units.low:.0%}, {units.high:.0%}] of {units.units}" if units.units else "none"
        at = "before" if one.at < 0 else str(one.at)
        many = [stats.mean_pass_at_k(one.tasks, k) for k in ks]
        shown = [f"{e.value:.1%}" if e.units else "–" for e in many]
        rows.append([at, interval(found.over_all), interval(found.over_valid), over, str(found.invalid), *shown])
    head = ["iteration", "success over all", "over valid", "valid, drawing templates", "invalid"]
    return grid([*head, *(f"pass@{k}" for k in ks)], rows)


def breakdown(first: stats.Evaluation, last: stats.Evaluation, by: Any) -> str:
    """Success over valid attempts by site or level, at the first and at the last pass."""
    then, now = stats.table(first.tasks, by), stats.table(last.tasks, by)
    rows = []
    for name in dict.fromkeys([*then, *now]):
        cells = [interval(part[name].over_valid) if name in part else "–" for part in (then, now)]
        rows.append([escape(name), *(cells if last is not first else cells[:1])])
    heads = [f"at {'start' if e.at < 0 else e.at}" for e in ((first, last) if last is not first else (first,))]
    return grid([by, *heads], rows)


def paired(first: stats.Evaluation, last: stats.Evaluation) -> str:
    """One sentence that compares the first and the last pass, pair by pair."""
    try:
        found = stats.compare(first, last)
    except stats.NotComparable as error:
        return f'<p class="lead">First and last pass are not compared: {escape(error)}.</p>'
    dropped = f", {found.dropped} pairs left out because one side was invalid" if found.dropped else ""
    return (
        f'<p class="lead">From iteration {first.at} to {last.at}, on the same tasks and seeds: '
        f"<b>{escape(found)}</b>{dropped}. The interval draws whole templates; p is McNemar's exact test.</p>"
    )


# --- Settings --------------------------------------------------------------------------------------------------------


def settings(config: Mapping[str, Any]) -> str:
    """All settings by dotted name, with a filter."""
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td><code>{escape(json.dumps(value, ensure_ascii=False))}</code></td>"
        "</tr>"
        for name, value in flat(config)
    )
    return (
        '<div class="filters"><input type="search" id="settings-filter" placeholder="filter settings" '
        'aria-label="filter settings"></div>'
        f'<div class="wide"><table class="grid" id="settings-table">{rows}</table></div>'
    )


def flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Leaves of nested settings by dotted name."""
    found = []
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found += flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found
