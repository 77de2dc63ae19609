"""Pieces of pages about episodes: turns with marked pictures, calls, feedback, times. The look is `episode.css`.

Everything that a page, a model or a task said goes through `escape`; nothing else here writes words of theirs.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources

from owrl_jax.agent.parser import Parsed, parse
from owrl_jax.geometry import GRID
from owrl_jax.outcome import Outcome
from owrl_jax.types import CallStatus, ToolCall, Trajectory, Turn, Verdict

Decode = Callable[[Sequence[int]], str]
_POINTS = ("point_2d", "start_point_2d", "end_point_2d")
_PADS = re.compile(r"(?:<\|image_pad\|>){2,}")


def static(name: str) -> str:
    """The text of a style sheet or script of this package."""
    return resources.files("owrl_jax.obs").joinpath(name).read_text(encoding="utf-8")


def escape(value: object) -> str:
    """Words of anybody as the text of an element or a quoted attribute."""
    # Control characters are no HTML, and a lone surrogate is no text at all.
    text = str(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return html.escape("".join(c if c in "\n\t" or c.isprintable() else "�" for c in text), quote=True)


def details(summary: str, text: str) -> str:
    """Words that are folded away; empty if there are none."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>" if text else ""


def facts(trajectory: Trajectory, verdict: Verdict | None, further: Sequence[tuple[str, str]] = ()) -> str:
    """What the record says, as a table; `further` rows stand at the end."""
    outcome: Outcome = trajectory.outcome
    rows = [
        ("task", f"{trajectory.task.id} ({trajectory.task.split})"),
        ("started at", trajectory.task.start_url),
        ("outcome", f"{outcome.key}, owned by {outcome.owner.value}, in {outcome.phase.value}"),
        ("message", outcome.message),
        ("answer", trajectory.answer if trajectory.answer is not None else "none"),
        ("verdict", "none" if verdict is None else f"{verdict.value.value} by {verdict.judge}: {verdict.rationale}"),
        ("reasons", "" if verdict is None else "; ".join(verdict.reasons)),
        ("member", f"{trajectory.index} of group {trajectory.group_id}"),
        ("protocol", trajectory.protocol),
        ("turns", f"{len(trajectory.turns)}, {sum(len(t.response_ids) for t in trajectory.turns)} sampled tokens"),
        *further,
    ]
    table = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows if value)
    return (
        f'<table class="facts">{table}</table>{details("traceback", outcome.traceback or "")}'
        f"{times(trajectory.timings_ms)}"
    )


def times(timings_ms: Mapping[str, float]) -> str:
    """Wall time by phase with bars, folded away."""
    longest = max(timings_ms.values(), default=0.0) or 1.0
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{ms:.0f} ms</td>'
        f'<td><span class="bar" style="width:{200 * ms / longest:.0f}px"></span></td></tr>'
        for name, ms in timings_ms.items()
    )
    return f"<details><summary>time</summary><table>{rows}</table></details>" if rows else ""


def reading(turn: Turn, said: str) -> Parsed | None:
    """What a recorded response was read as; None if it was cut off, so that nobody read it."""
    found = parse(said)
    if turn.parsed and not found.ok:  # a protocol in which reasoning is not asked for
        found = parse(said, reasoning_required=False)
    return found if turn.parsed or not found.ok else None


def turn_section(
    number: int,
    turn: Turn,
    *,
    shot: str,
    head: str = "",
    said: str | None = None,
    parsed: Parsed | None = None,
    decode: Decode | None = None,
) -> str:
    """One turn: the picture on one side, on the other what was thought, called, answered.

    Args:
      number: from 0.
      turn: the record.
      shot: HTML of its picture (`shot_box`).
      head: HTML between title and response.
      said: the response in words; None if there is no tokenizer to tell.
      parsed: what it was read as; None if it was cut off.
      decode: the tokenizer's, to show what the model read; None leaves that out.
    """
    body = [f"<h2>Turn {number}</h2>", head]
    if said is None:
        ids = " ".join(map(str, turn.response_ids[:200])) + (" …" if len(turn.response_ids) > 200 else "")
        body.append(f'<pre class="said">{len(turn.response_ids)} ids, and no tokenizer to read them: {ids}</pre>')
    elif parsed is None:
        body.append(f'<pre class="problem">cut off:\n{escape(said)}</pre>')
    elif not parsed.ok:
        body.append(f'<pre class="said">{escape(said)}</pre><pre class="problem">{escape(parsed.feedback)}</pre>')
    else:
        body.append(f'<pre class="said">{escape(parsed.reasoning)}</pre>')
    for n, call in enumerate(turn.calls):
        result = turn.results[n] if n < len(turn.results) else None
        status = (result.status if result else CallStatus.SKIPPED).value
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        line = f"\n→ {escape(result.feedback)}" if result else ""
        body.append(f'<pre class="call {status}">{n + 1} {escape(call.name)} {escape(arguments)}{line}</pre>')
    notes = parsed.notes if parsed is not None else ()
    body += [f"<pre>Note: {escape(note)}</pre>" for note in notes]
    counts = f"{len(turn.trunk_ids)} new trunk, {len(turn.leaf_ids)} leaf, {len(turn.response_ids)} response"
    if decode is not None:
        text = short_pads(decode([*turn.trunk_ids, *turn.leaf_ids]))
        body.append(details(f"what the model read ({counts} tokens)", text))
    else:
        body.append(f'<p class="counts">{counts} tokens</p>')
    body.append(times(turn.timings_ms))
    return f'<section class="turn">{shot}<div>{"".join(body)}</div></section>'


def short_pads(text: str) -> str:
    """Runs of image placeholders as one with their number."""
    return _PADS.sub(lambda pads: f"<|image_pad|> × {pads[0].count('|>')}", text)


def shot_box(picture: str, calls: Sequence[ToolCall]) -> str:
    """A picture (HTML of an `img`) with a mark for each point of the calls; empty says that there is none."""
    if not picture:
        return '<div class="shot"><div class="none">no screenshot</div></div>'
    return f'<div class="shot">{picture}{"".join(marks(calls))}</div>'


def marks(calls: Sequence[ToolCall]) -> list[str]:
    """One mark for each point that can be drawn; what the model wrote there may be anything."""
    found = []
    for number, call in enumerate(calls, 1):
        for name in _POINTS:
            point = call.arguments.get(name)
            if not isinstance(point, list | tuple) or len(point) != 2:
                continue
            if all(isinstance(v, int | float) and 0 <= v <= GRID for v in point):
                x, y = (100 * float(v) / GRID for v in point)
                found.append(f'<span class="mark" style="left:{x:.2f}%;top:{y:.2f}%">{number}</span>')
    return found
