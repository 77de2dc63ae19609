"""Episodes of a journal for other programs: JSON lines, parquet, OpenAI messages.

    jsonl     an episode a line: task, ending, verdict, reward, and its turns in words
    parquet   a turn a row, ids and log-probs included
    openai    a conversation a line, in the form of chat completions

Words come from the ids that were sampled and seen, through the run's tokenizer. Messages are cut at genuine control
tokens, which no page and no response can spell, so a hostile page cannot speak as somebody else in an export either.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from owrl_jax.agent.parser import END_OF_TURN
from owrl_jax.obs.episode_parts import reading
from owrl_jax.obs.run_data import EpisodeRow, Run
from owrl_jax.pool.store import MissingScreenshot
from owrl_jax.types import Trajectory, Turn

Format = Literal["jsonl", "parquet", "openai"]
_START, _VISION_START, _VISION_END = "<|im_start|>", "<|vision_start|>", "<|vision_end|>"
_ROWS_AT_ONCE = 256


class CannotExport(ValueError):
    """Something that this form needs is not there; the message says what."""


def episode_record(run: Run, row: EpisodeRow, *, ids: bool = False) -> dict[str, Any]:
    """An episode as one JSON object; with `ids`, each turn also has its ids and log-probs."""
    one = run.trajectory(row)
    verdict = one.verdict
    return {
        **_about(row),
        "rubric": list(one.task.rubric),
        "answer": one.answer,
        "message": one.outcome.message,
        "judge": row.judge,
        "rationale": "" if verdict is None else verdict.rationale,
        "final_screenshot": one.final_screenshot,
        "timings_ms": one.timings_ms,
        "turns": [_turn_record(run, number, turn, ids=ids) for number, turn in enumerate(one.turns)],
    }


def _about(row: EpisodeRow) -> dict[str, Any]:
    return {
        "group": row.group,
        "index": row.index,
        "attempt": row.attempt,
        "member": row.member,
        "iteration": row.iteration,
        "version": row.version,
        "task": row.task,
        "instruction": row.instruction,
        "site": row.site,
        "level": row.level,
        "split": row.split,
        "protocol": row.protocol,
        "outcome": row.outcome,
        "owner": row.owner.value,
        "verdict": row.verdict,
        "reward": row.reward,
        "advantage": row.advantage,
    }


def _turn_record(run: Run, number: int, turn: Turn, *, ids: bool) -> dict[str, Any]:
    said = None if run.decode is None else run.decode(turn.response_ids).removesuffix(END_OF_TURN)
    parsed = None if said is None else reading(turn, said)
    found = {
        "turn": number,
        "said": said,
        "reasoning": None if parsed is None else parsed.reasoning,
        "parsed": turn.parsed,
        "calls": [{"name": call.name, "arguments": call.arguments} for call in turn.calls],
        "results": [{"name": r.name, "status": r.status.value, "feedback": r.feedback} for r in turn.results],
        "screenshot": turn.screenshot,
        "response_tokens": len(turn.response_ids),
        "timings_ms": turn.timings_ms,
    }
    if ids:
        found |= {
            "trunk_ids": list(turn.trunk_ids),
            "leaf_ids": list(turn.leaf_ids),
            "response_ids": list(turn.response_ids),
            "logprobs": list(turn.logprobs),
            "versions": list(turn.versions),
        }
    return found


# --- OpenAI messages -------------------------------------------------------------------------------------------------


def conversations(
    run: Run, row: EpisodeRow, *, per: Literal["episode", "turn"], inline: bool = False
) -> Iterator[dict[str, Any]]:
    """The conversations of an episode.

    Args:
      run: the run; needs its tokenizer.
      row: the episode.
      per: `episode` gives one conversation in which every user message has its picture; `turn` gives one for each
        turn, exactly as the policy saw it: the past without pictures, and this turn's response at the end.
      inline: pictures as data URLs; by default as paths relative to the run folder.

    Raises:
      CannotExport: without a tokenizer, or where ids are no chat.
    """
    one = run.trajectory(row)
    about = {"id": f"{row.group}/{row.index}/{row.attempt}", **_about(row)}
    whole: list[dict[str, Any]] = []
    trunk: tuple[int, ...] = ()
    for number, turn in enumerate(one.turns):
        trunk += turn.trunk_ids
        messages = _messages(run, one, number, (*trunk, *turn.leaf_ids), turn, inline=inline)
        if per == "turn":
            yield {**about, "turn": number, "messages": messages}
        else:
            whole += messages if number == 0 else messages[-2:]
    if per == "episode" and whole:
        yield {**about, "messages": whole}


def _messages(
    run: Run, one: Trajectory, number: int, prompt: Sequence[int], turn: Turn, *, inline: bool
) -> list[dict[str, Any]]:
    """The messages of a prompt and its response."""
    if run.decode is None:
        raise CannotExport("messages need the run's tokenizer: give --tokenizer FOLDER")
    start, vision_start, vision_end = (_control(run, mark) for mark in (_START, _VISION_START, _VISION_END))
    end = _control(run, END_OF_TURN)
    if not prompt or prompt[0] != start:
        raise CannotExport(f"turn {number} of {one.group_id}/{one.index} is no chat: it does not begin with {_START}")
    messages: list[dict[str, Any]] = []
    cuts = [i for i, token in enumerate(prompt) if token == start]
    for begin, stop in zip(cuts, [*cuts[1:], len(prompt)], strict=True):
        body = list(prompt[begin + 1 : stop])
        if stop == len(prompt):
            body += turn.response_ids
        body = body[: body.index(end)] if end in body else body
        parts: list[dict[str, Any]] = []
        while body:
            at = body.index(vision_start) if vision_start in body else len(body)
            if at:
                parts.append({"type": "text", "text": run.decode(body[:at])})
            if at < len(body):
                at = body.index(vision_end, at)
                parts.append({"type": "image_url", "image_url": {"url": ""}})
            body = body[at + 1 :]
        role, _, text = parts[0]["text"].partition("\n")
        parts[0]["text"] = text
        messages.append({"role": role, "content": parts})
    # The newest picture is the turn's own; older ones, under other history rules, are those of the turns before.
    shown = [part for message in messages for part in message["content"] if part["type"] == "image_url"]
    names = _last_distinct([t.screenshot for t in one.turns[: number + 1] if t.screenshot], len(shown))
    for part, name in zip(shown, names, strict=True):
        part["image_url"]["url"] = _address(run, name, inline=inline)
    for message in messages:
        parts = [part for part in message["content"] if part.get("text") != ""]
        texts = all(part["type"] == "text" for part in parts)
        message["content"] = "".join(part["text"] for part in parts) if texts else parts
    return messages


def _last_distinct(names: Sequence[str], n: int) -> list[str]:
    """The newest n pictures in order; one that was shown again after an unreadable response counts once."""
    kept: list[str] = []
    for name in reversed(names):
        if len(kept) < n and not (kept and kept[-1] == name):
            kept.append(name)
    if len(kept) < n:
        raise CannotExport(f"a prompt shows {n} pictures, but its turns name only {len(kept)}")
    return kept[::-1]


def _control(run: Run, mark: str) -> int:
    found = run.control_ids.get(mark)
    if found is None:
        raise CannotExport(f"the tokenizer has no {mark}, so messages cannot be told apart")
    return found


def _address(run: Run, name: str, *, inline: bool) -> str:
    try:
        if run.pictures is None:
            raise CannotExport("the run has no screenshots/")
        path = run.pictures.path(name)
        if not inline:
            return path.relative_to(run.folder).as_posix()
        return f"data:image/{path.suffix[1:]};base64,{base64.b64encode(run.pictures.get(name)).decode()}"
    except MissingScreenshot as error:
        raise CannotExport(str(error)) from None


# --- Writing ---------------------------------------------------------------------------------------------------------


def write_jsonl(lines: Iterable[dict[str, Any]], out: Path) -> int:
    """Writes objects as lines; gives their number."""
    n = 0
    with out.open("w", encoding="utf-8", errors="replace") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            n += 1
    return n


def write_parquet(run: Run, rows: Iterable[EpisodeRow], out: Path) -> int:
    """Writes a row for each turn; gives their number. Needs pyarrow (the extra `learner` brings it).

    Calls and times are JSON text, since every tool has arguments of its own.
    """
    import pyarrow
    from pyarrow import parquet

    text, number, flag = pyarrow.string(), pyarrow.int32(), pyarrow.bool_()
    real, ids = pyarrow.float64(), pyarrow.list_(pyarrow.int32())
    schema = pyarrow.schema(
        [
            *((name, text) for name in ("group", "task", "instruction", "site", "split", "protocol", "outcome")),
            *((name, text) for name in ("owner", "verdict", "said", "reasoning", "calls", "screenshot", "timings_ms")),
            *((name, number) for name in ("index", "attempt", "iteration", "version", "turn", "response_tokens")),
            *((name, flag) for name in ("member", "parsed")),
            *((name, real) for name in ("level", "reward", "advantage")),
            *((name, pyarrow.list_(text)) for name in ("statuses", "feedback")),
            *((name, ids) for name in ("trunk_ids", "leaf_ids", "response_ids", "versions")),
            ("logprobs", pyarrow.list_(pyarrow.float32())),
        ]
    )

    def records() -> Iterator[dict[str, Any]]:
        for row in rows:
            about = _about(row)
            for turn in episode_record(run, row, ids=True)["turns"]:
                results = turn.pop("results")
                yield {
                    **about,
                    **turn,
                    "calls": json.dumps(turn["calls"], ensure_ascii=False),
                    "timings_ms": json.dumps(turn["timings_ms"]),
                    "statuses": [result["status"] for result in results],
                    "feedback": [result["feedback"] for result in results],
                }

    n = 0
    with parquet.ParquetWriter(out, schema, compression="zstd") as writer:
        batch: list[dict[str, Any]] = []
        for record in records():
            batch.append(record)
            if len(batch) == _ROWS_AT_ONCE:
                writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
                n, batch = n + len(batch), []
        if batch or not n:
            writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
    return n + len(batch)
