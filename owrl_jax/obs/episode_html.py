"""One episode as one HTML page that needs nothing else: pictures with click marks, reasoning, calls, feedback, times.

Everything a page, a model or a task said is escaped, and the document's own policy forbids scripts and every request,
so that an episode of a hostile site can be opened and passed on. Same episode, same bytes.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence

from owrl_jax.agent.episode import SeenTurn
from owrl_jax.geometry import GRID
from owrl_jax.outcome import Outcome
from owrl_jax.types import CallStatus, Observation, Screenshot, ToolCall, Trajectory, Verdict

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --ok: #2a7; --bad: #c43; --mark: #f0f; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1500px; padding: 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 0 0 .4rem; }
.turn { display: grid; grid-template-columns: minmax(240px, 3fr) 4fr; gap: 1rem; border-top: 1px solid var(--line);
  padding: 1rem 0; }
.shot { position: relative; align-self: start; line-height: 0; border: 1px solid var(--line); }
.shot img { width: 100%; height: auto; } .shot .none { line-height: 1.4; padding: 2rem; }
.mark { position: absolute; width: 22px; height: 22px; margin: -13px 0 0 -13px; border: 2px solid var(--mark);
  border-radius: 50%; color: #fff; background: #f0f8; font: bold 12px/22px system-ui; text-align: center; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; padding: .4rem .6rem; background: #8881; }
.tabs { overflow-wrap: anywhere; font-size: .85rem; opacity: .8; }
.ok { border-left: 3px solid var(--ok); } .failed, .problem { border-left: 3px solid var(--bad); }
.skipped { border-left: 3px solid #999; }
table { border-collapse: collapse; font-size: .85rem; } td { padding: .1rem .8rem .1rem 0; vertical-align: top; }
td.n { text-align: right; } details { margin-top: .5rem; font-size: .85rem; }
.bar { display: inline-block; height: .7rem; background: #57c; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_POINTS = ("point_2d", "start_point_2d", "end_point_2d")
_PADS = re.compile(r"(?:<\|image_pad\|>){2,}")


def episode_html(
    trajectory: Trajectory,
    seen: Sequence[SeenTurn],
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
    last: Observation | None = None,
    verdict: Verdict | None = None,
    protocol_parts: Mapping[str, object] | None = None,
) -> str:
    """The page.

    Args:
      trajectory: the record.
      seen: its turns with what was around them (`Episode(on_turn=...)`), in order.
      decode: the tokenizer's, to show what the model read; None leaves that out.
      last: the page after the last turn.
      verdict: what a judge said, if not in the trajectory.
      protocol_parts: what the protocol's name stands for.
    """
    task, verdict = trajectory.task, verdict or trajectory.verdict
    turns = "".join(_turn(number, one, decode) for number, one in enumerate(seen))
    end = ""
    if last is not None:
        body = f"<h2>After the last turn</h2>{_tabs(last)}"
        end = f'<section class="turn">{_shot(last.screenshot, ())}<div>{body}</div></section>'
    parts = ""
    if protocol_parts is not None:
        text = json.dumps(protocol_parts, indent=1, ensure_ascii=False, sort_keys=True)
        parts = f"<details><summary>protocol {_e(trajectory.protocol)}</summary><pre>{_e(text)}</pre></details>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_e(task.id)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{_e(task.instruction)}</h1>{_facts(trajectory, verdict)}{parts}{turns}{end}</body></html>\n"
    )


def _e(value: object) -> str:
    # Control characters are no HTML, and a lone surrogate is no text at all.
    text = str(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return html.escape("".join(c if c in "\n\t" or c.isprintable() else "�" for c in text), quote=True)


def _facts(trajectory: Trajectory, verdict: Verdict | None) -> str:
    outcome: Outcome = trajectory.outcome
    rows = [
        ("task", f"{trajectory.task.id} ({trajectory.task.split})"),
        ("started at", trajectory.task.start_url),
        ("outcome", f"{outcome.key}, owned by {outcome.owner.value}, in {outcome.phase.value}"),
        ("message", outcome.message),
        ("answer", trajectory.answer if trajectory.answer is not None else "none"),
        ("verdict", "none" if verdict is None else f"{verdict.value.value} by {verdict.judge}: {verdict.rationale}"),
        ("member", f"{trajectory.index} of group {trajectory.group_id}"),
        ("protocol", trajectory.protocol),
        ("turns", f"{len(trajectory.turns)}, {sum(len(t.response_ids) for t in trajectory.turns)} sampled tokens"),
    ]
    table = "".join(f"<tr><td>{_e(name)}</td><td>{_e(value)}</td></tr>" for name, value in rows if value)
    trace = (
        f"<details><summary>traceback</summary><pre>{_e(outcome.traceback)}</pre></details>"
        if outcome.traceback
        else ""
    )
    return f"<table>{table}</table>{trace}{_times(trajectory.timings_ms)}"


def _times(timings_ms: Mapping[str, float]) -> str:
    longest = max(timings_ms.values(), default=0.0) or 1.0
    rows = "".join(
        f'<tr><td>{_e(name)}</td><td class="n">{ms:.0f} ms</td>'
        f'<td><span class="bar" style="width:{200 * ms / longest:.0f}px"></span></td></tr>'
        for name, ms in timings_ms.items()
    )
    return f"<details><summary>time</summary><table>{rows}</table></details>" if rows else ""


def _turn(number: int, seen: SeenTurn, decode: Callable[[Sequence[int]], str] | None) -> str:
    turn, parsed = seen.turn, seen.parsed
    body = [f"<h2>Turn {number}</h2>", _tabs(seen.observation)]
    if parsed is None:
        body.append(f'<pre class="problem">cut off:\n{_e(seen.said)}</pre>')
    elif not parsed.ok:
        body.append(f'<pre>{_e(seen.said)}</pre><pre class="problem">{_e(parsed.feedback)}</pre>')
    else:
        body.append(f"<pre>{_e(parsed.reasoning)}</pre>")
    for n, call in enumerate(turn.calls):
        result = turn.results[n] if n < len(turn.results) else None
        status = (result.status if result else CallStatus.SKIPPED).value
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        line = f"\n→ {_e(result.feedback)}" if result else ""
        body.append(f'<pre class="{_e(status)}">{n + 1} {_e(call.name)} {_e(arguments)}{line}</pre>')
    notes = parsed.notes if parsed is not None else ()
    body += [f"<pre>Note: {_e(note)}</pre>" for note in notes]
    counts = f"{len(turn.trunk_ids)} new trunk, {len(turn.leaf_ids)} leaf, {len(turn.response_ids)} response"
    if decode is not None:
        text = decode([*turn.trunk_ids, *turn.leaf_ids])
        text = _PADS.sub(lambda pads: f"<|image_pad|> × {pads[0].count('|>')}", text)
        body.append(f"<details><summary>what the model read ({counts} tokens)</summary><pre>{_e(text)}</pre></details>")
    else:
        body.append(f"<p>{counts} tokens</p>")
    body.append(_times(turn.timings_ms))
    return f'<section class="turn">{_shot(seen.observation.screenshot, turn.calls)}<div>{"".join(body)}</div></section>'


def _tabs(observation: Observation) -> str:
    lines = [f"{'▸ ' if tab.active else ''}{tab.index} {tab.url} — {tab.title}" for tab in observation.tabs]
    return f'<div class="tabs">{"<br>".join(map(_e, lines))}</div>'


def _shot(shot: Screenshot | None, calls: Sequence[ToolCall]) -> str:
    if shot is None:
        return '<div class="shot"><div class="none">no screenshot</div></div>'
    data = base64.b64encode(shot.data).decode()
    kind = shot.format if shot.format in ("png", "jpeg", "webp") else "png"
    picture = (
        f'<img alt="screenshot" width="{shot.width}" height="{shot.height}" src="data:image/{kind};base64,{data}">'
    )
    return f'<div class="shot">{picture}{"".join(_marks(calls))}</div>'


def _marks(calls: Sequence[ToolCall]) -> list[str]:
    """One mark for each point that can be drawn; what the model wrote there may be anything."""
    marks = []
    for number, call in enumerate(calls, 1):
        for name in _POINTS:
            point = call.arguments.get(name)
            if not isinstance(point, list | tuple) or len(point) != 2:
                continue
            if all(isinstance(v, int | float) and 0 <= v <= GRID for v in point):
                x, y = (100 * float(v) / GRID for v in point)
                marks.append(f'<span class="mark" style="left:{x:.2f}%;top:{y:.2f}%">{number}</span>')
    return marks
