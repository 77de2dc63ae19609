"""`owrl report RUN`: a run as one HTML page that needs nothing else, curves to single clicks.

    owrl report runs/tiny                      # writes runs/tiny/report.html
    owrl report runs/tiny --groups g0007 --out /tmp/look.html

The page works from a file: no server, no request (its own policy forbids them), and the only script that may run is
the one written here, named by its hash; a handler or script that a hostile page got past the escaping would not run.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from owrl_jax.obs import metric_names, report_tables, stats
from owrl_jax.obs.charts import Chart, Curve, draw
from owrl_jax.obs.episode_parts import escape, static
from owrl_jax.obs.live import duration
from owrl_jax.obs.metrics import Record, series
from owrl_jax.obs.report_episodes import Limits, Pictures, choose, episode_template, row_data
from owrl_jax.obs.run_data import NoRun, Run, load_run

# Curves that everybody looks for, in this order; all others follow by name, folded away.
_FIRST = (
    "reward/mean_per_trajectory",
    "reward/success_share_per_trajectory",
    "rollout/valid_share_per_trajectory",
    "loss/total",
    "grad/norm",
    "policy/entropy_mean",
    "policy/clip_fraction",
    "policy/kl_behaviour_mean",
    "mismatch/logp_mean",
    "rollout/turns_mean_per_trajectory",
    "rollout/response_tokens_mean_per_turn",
    "rollout/staleness_mean_versions",
    "engine/tokens_per_s",
    "update/useful_token_share",
    "time/iteration_s",
    "perf/trajectories_per_min",
    "sft/loss_nats_per_token",
    "sft/accuracy_share_per_token",
)
_MOST_CURVES = 120


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `owrl report`."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    out: Path | None = None
    """Where to write; left out, report.html in the run folder."""
    episodes: int = 60
    """Episodes that can be looked at turn by turn; all others are listed."""
    groups: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ID")] = ()
    """Groups to have among them in any case."""
    megabytes: float = 40.0
    """Of embedded pictures."""
    exact_pictures: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Embed pictures bit for bit instead of large ones as WebP."""
    tokenizer: Path | None = None
    """Folder of the policy's tokenizer; left out, tokenizer/ of the run."""


def main(argv: list[str]) -> int:
    """`owrl report`. Exit code 2 if there is no run or the page cannot be written."""
    options = tyro.cli(Options, args=argv, prog="owrl report", description=__doc__)
    try:
        limits = Limits(
            episodes=options.episodes,
            picture_bytes=int(options.megabytes * 1e6),
            exact_pictures=options.exact_pictures,
            groups=options.groups,
        )
        path, remarks = write_report(options.run, options.out, limits=limits, tokenizer=options.tokenizer)
    except (NoRun, ValueError, OSError) as error:
        print(f"owrl report: {error}", file=sys.stderr)  # noqa: T201 - a command talks to its user
        return 2
    for remark in remarks:
        print(f"owrl report: {remark}", file=sys.stderr)  # noqa: T201
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")  # noqa: T201
    return 0


def write_report(
    run: str | Path, out: str | Path | None = None, *, limits: Limits | None = None, tokenizer: str | Path | None = None
) -> tuple[Path, list[str]]:
    """Writes the page of a run folder; gives its path, and in words what the folder lacks.

    The page is written beside its place and renamed, so one that is open in a browser is whole at every reload.

    Raises:
      NoRun: if the folder holds nothing of a run.
      OSError: if the page cannot be written.
    """
    loaded = load_run(run, tokenizer=tokenizer)
    path = Path(out) if out is not None else loaded.folder / "report.html"
    text = report_html(loaded, limits or Limits())
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return path, list(loaded.remarks)


def report_html(run: Run, limits: Limits) -> str:
    """The page. The same folder gives the same bytes."""
    charts: list[Chart] = []
    parts = [
        ("evaluation", "Evaluation", _evaluations(run, charts)),
        ("curves", "Curves", _curves(run, charts)),
        ("outcomes", "Outcomes", _outcomes(run)),
        ("time", "Time", _time(run)),
        ("trajectories", "Trajectories", _trajectories(run, limits)),
        ("settings", "Settings", report_tables.settings(run.config) if run.config else ""),
    ]
    parts = [part for part in parts if part[2]]
    script = static("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    name = str(run.config.get("name") or run.folder.resolve().name)
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in parts)
    body = "".join(f'<section class="part" id="{key}"><h2>{title}</h2>{inner}</section>' for key, title, inner in parts)
    remarks = "".join(f"<p>{escape(remark)}</p>" for remark in run.remarks)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)} – report</title><style>{static('episode.css')}{static('report.css')}</style></head>"
        f"<body><header><h1>{escape(name)}</h1><p>{escape(_subtitle(run))}</p></header>"
        f"<nav>{links}</nav>"
        + (f'<div class="remarks">{remarks}</div>' if remarks else "")
        + _tiles(run)
        + '<noscript><p class="remarks">Scripts are off: curves and tables can be read, episodes not.</p></noscript>'
        + body
        + _json("charts", [chart.points for chart in charts])
        + f"<script>{script}</script></body></html>\n"
    )


def _json(name: str, value: Any) -> str:
    """Data for the script. In JSON, `<` can only stand inside strings, where it may be written as an escape."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


# --- Sections --------------------------------------------------------------------------------------------------------


def _subtitle(run: Run) -> str:
    words = []
    times = [row.at for row in run.episodes] or [record.at for record in run.records]
    if times:
        day = datetime.datetime.fromtimestamp(min(times), datetime.UTC)
        words.append(f"{day:%Y-%m-%d %H:%M} UTC, {duration(max(times) - min(times))} from first to last entry")
    protocols = sorted({row.protocol for row in run.episodes if row.protocol})
    if protocols:
        shown = ", ".join(protocol[:12] for protocol in protocols[:3]) + (" …" if len(protocols) > 3 else "")
        words.append(f"protocol {shown}")
    return " · ".join(words)


def _tiles(run: Run) -> str:
    tiles: list[tuple[str, str]] = []
    for name in dict.fromkeys(one.name for one in run.evaluations):
        passes = [one for one in run.evaluations if one.name == name]
        first, last = (stats.success(one.tasks).over_valid for one in (passes[0], passes[-1]))
        if last.n:
            change = f"{first.share:.0%} → {last.share:.0%}" if len(passes) > 1 and first.n else f"{last.share:.0%}"
            tiles.append((change, f"success over valid, {name}"))
    _, rewards = series(run.records, "reward/mean_per_trajectory")
    if rewards:
        tiles.append((f"{rewards[0]:.2g} → {rewards[-1]:.2g}", "mean reward per trajectory"))
    if run.records:
        tiles.append((str(len({(r.stage, r.step) for r in run.records})), "steps logged"))
    if run.episodes:
        tiles.append((str(len(run.episodes)), f"episodes in {len(run.groups)} closed groups"))
        own = sum(row.reward is not None for row in run.episodes)
        tiles.append((f"{own / len(run.episodes):.0%}", "of them say something about the policy"))
    cells = "".join(f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in tiles)
    return f'<div class="tiles">{cells}</div>' if cells else ""


def _figure(charts: list[Chart], title: str, about: str, curves: Sequence[Curve], **options: Any) -> str:
    chart = draw(curves, **options)
    charts.append(chart)
    legend = ""
    if len(curves) > 1:
        legend = "".join(f'<span><i class="c{n % 6}"></i>{escape(c.label)}</span>' for n, c in enumerate(curves))
        legend = f'<div class="legend">{legend}</div>'
    newest = chart.points[0]
    last = f"{newest['x'][-1]}: {newest['y'][-1]}" if newest["x"] else ""
    return (
        f'<figure data-chart="{len(charts) - 1}"><h4>{escape(title)}</h4><p>{escape(about)}</p>{chart.svg}{legend}'
        f'<p class="readout">{escape(last)}</p></figure>'
    )


def _curves(run: Run, charts: list[Chart]) -> str:
    found: dict[str, list[tuple[str, Sequence[float], Sequence[float]]]] = {}
    for stage in dict.fromkeys(record.stage for record in run.records):
        own: list[Record] = [record for record in run.records if record.stage == stage]
        for name in dict.fromkeys(name for record in own for name in record.values):
            found.setdefault(name, []).append((stage, *series(own, name)))
    if not found:
        return ""

    def figure(name: str) -> str:
        lines = [Curve(label=stage or "run", x=x, y=y) for stage, x, y in found[name]]
        ys = [v for line in lines for v in line.y]
        share = any(word in name for word in ("share", "fraction", "success_over")) and all(0 <= v <= 1 for v in ys)
        unit = "update" if name.startswith("sft/") else "iteration"
        return _figure(charts, name, metric_names.meaning(name), lines, x_label=unit, share=share)

    first = [name for name in _FIRST if name in found]
    others = sorted(set(found) - set(first))[:_MOST_CURVES]
    html = f'<div class="charts">{"".join(map(figure, first))}</div>' if first else ""
    if others:
        inner = f'<div class="charts">{"".join(map(figure, others))}</div>'
        opened = "" if first else " open"
        html += f"<details{opened}><summary>{len(others)} more</summary>{inner}</details>"
    return html


def _evaluations(run: Run, charts: list[Chart]) -> str:
    html = ""
    for name in dict.fromkeys(one.name for one in run.evaluations):
        passes = [one for one in run.evaluations if one.name == name]
        first, last = passes[0], passes[-1]
        rates = [stats.success(one.tasks) for one in passes]
        lines = {"over valid": [r.over_valid for r in rates], "over all": [r.over_all for r in rates]}
        curves = [
            Curve(
                label=label,
                x=[one.at for one in passes],
                y=[rate.share for rate in line],
                low=[rate.low for rate in line],
                high=[rate.high for rate in line],
                dots=True,
            )
            for label, line in lines.items()
        ]
        figure = _figure(charts, name, "success with Wilson's 95 % intervals", curves, x_label="iteration", share=True)
        html += f"<h3>{escape(name)}</h3>"
        if last is not first:
            html += report_tables.paired(first, last)
        by_what = "".join(report_tables.breakdown(first, last, by) for by in ("site", "level"))
        html += f'<div class="beside">{figure}<div>{report_tables.evaluation_table(passes)}{by_what}</div></div>'
    return html


def _outcomes(run: Run) -> str:
    if not run.episodes:
        return ""
    said = report_tables.verdicts(run.episodes)
    return (
        '<p class="lead">Every attempt counts here, those that were tried again included. Only endings that are the '
        "policy's own doing reach rewards and statistics.</p>"
        + report_tables.outcomes(run.episodes)
        + (f"<h3>Verdicts</h3>{said}" if said else "")
    )


def _time(run: Run) -> str:
    wall, episodes = report_tables.wall_time(run.records), report_tables.episode_time(run.episodes)
    html = ""
    if wall:
        html += (
            '<p class="lead">Wall time of the run. A moment in which several parts were busy is divided among them; '
            f"“busy” counts each part by itself.</p>{wall}"
        )
    if episodes:
        html += f"<h3>Of an episode</h3>{episodes}"
    return html


def _trajectories(run: Run, limits: Limits) -> str:
    if not run.episodes:
        return ""
    chosen = choose(run, limits)
    full = {row.number for row in chosen}
    pictures = Pictures(run, limits)
    # Newest first, so that a limit on pictures leaves out the oldest.
    templates = "".join(episode_template(run, row, pictures) for row in reversed(chosen))
    rows = [row_data(run, row, full=row.number in full) for row in reversed(run.episodes)]
    notes = f"{len(chosen)} of {len(run.episodes)} episodes can be looked at turn by turn (●)."
    if pictures.left_out:
        notes += f" {pictures.left_out} pictures did not fit into {limits.picture_bytes / 1e6:g} MB (--megabytes)."
    if pictures.missing:
        notes += f" {pictures.missing} pictures are not in the screenshot store."
    if not limits.exact_pictures:
        notes += " Large pictures were recompressed for this page; the originals are in screenshots/."
    selects = "".join(
        f'<select data-field="{field}" aria-label="{label}"><option value="">{label}: all</option></select>'
        for field, label in (
            ("site", "site"),
            ("verdict", "verdict"),
            ("outcome", "ending"),
            ("owner", "whose doing"),
            ("iteration", "iteration"),
            ("level", "level"),
            ("full", "shown whole"),
        )
    )
    heads = ("iteration", "task", "site", "ending", "verdict", "reward", "advantage", "turns", "time", "")
    numeric = {"iteration", "reward", "advantage", "turns", "time", ""}
    columns = "".join(f"<th{' class=n' if head in numeric else ''}>{head}</th>" for head in heads)
    return (
        f'<p class="lead">{escape(notes)} Keys: j and k for the next and the previous one.</p>'
        f'<div class="filters" id="filters"><input type="search" placeholder="words of task, id, group or ending" '
        f'aria-label="search">{selects}<button type="button">clear</button><span class="count" id="count"></span></div>'
        f'<div id="rows"><table class="grid"><thead><tr>{columns}</tr></thead><tbody></tbody></table></div>'
        '<p><button type="button" id="more" hidden>show more</button></p><div id="viewer"></div>'
        f"{templates}"
        f"{_json('episodes', rows)}{_json('pictures', pictures.urls)}"
    )
