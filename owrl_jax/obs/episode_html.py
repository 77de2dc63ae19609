"""One episode as one HTML page that needs nothing else: pictures with click marks, reasoning, calls, feedback, times.

Everything a page, a model or a task said is escaped, and the document's own policy forbids scripts and every request,
so that an episode of a hostile site can be opened and passed on. Same episode, same bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence

from owrl_jax.agent.episode import SeenTurn
from owrl_jax.obs.episode_parts import Decode, details, escape, facts, shot_box, static, turn_section
from owrl_jax.types import Observation, Screenshot, ToolCall, Trajectory, Verdict

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def episode_html(
    trajectory: Trajectory,
    seen: Sequence[SeenTurn],
    *,
    decode: Decode | None = None,
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
    turns = "".join(
        turn_section(
            number,
            one.turn,
            shot=_shot(one.observation.screenshot, one.turn.calls),
            head=_tabs(one.observation),
            said=one.said,
            parsed=one.parsed,
            decode=decode,
        )
        for number, one in enumerate(seen)
    )
    end = ""
    if last is not None:
        body = f"<h2>After the last turn</h2>{_tabs(last)}"
        end = f'<section class="turn">{_shot(last.screenshot, ())}<div>{body}</div></section>'
    parts = ""
    if protocol_parts is not None:
        text = json.dumps(protocol_parts, indent=1, ensure_ascii=False, sort_keys=True)
        parts = details(f"protocol {trajectory.protocol}", text)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(task.id)}</title><style>{static('episode.css')}</style></head><body>"
        f"<h1>{escape(task.instruction)}</h1>{facts(trajectory, verdict)}{parts}{turns}{end}</body></html>\n"
    )


def _tabs(observation: Observation) -> str:
    lines = [f"{'▸ ' if tab.active else ''}{tab.index} {tab.url} — {tab.title}" for tab in observation.tabs]
    return f'<div class="tabs">{"<br>".join(map(escape, lines))}</div>'


def _shot(shot: Screenshot | None, calls: Sequence[ToolCall]) -> str:
    if shot is None:
        return shot_box("", calls)
    data = base64.b64encode(shot.data).decode()
    kind = shot.format if shot.format in ("png", "jpeg", "webp") else "png"
    return shot_box(
        f'<img alt="screenshot" width="{shot.width}" height="{shot.height}" src="data:image/{kind};base64,{data}">',
        calls,
    )
