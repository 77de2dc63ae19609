"""`owrl episode --explain`: the message layout, with one conversation shown in words and in ids.

docs/harness.md is what this prints; a test compares them. The tokenizer is a small one, trained on the spot from the
harness's own words, so that the page is the same on every machine and needs no download; `--tokenizer FOLDER` shows the
same conversation with a real vocabulary.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from typing import Any

from owrl_jax.agent.chat import encode_response
from owrl_jax.agent.harness import Budgets, Harness
from owrl_jax.agent.page_text import FEEDBACK_CHARS, TITLE_CHARS, URL_CHARS
from owrl_jax.agent.parser import PROBLEMS, write
from owrl_jax.agent.prompt import PromptStyle, feedback_lines
from owrl_jax.types import CallResult, CallStatus, Observation, Screenshot, Tab, Task, ToolCall

VOCABULARY = 700
_PAD = "<|image_pad|>"


def small_tokenizer() -> Any:
    """A tokenizer for when there is no model: Qwen's splitting rule and control tokens, merges from our own prompt."""
    from owrl_jax.models.tokenizer import train_small_tokenizer

    words = [PromptStyle().system_prompt(), *PROBLEMS.values(), _STORY]
    with tempfile.TemporaryDirectory() as folder:
        return train_small_tokenizer(words * 2, VOCABULARY, folder)


_STORY = (
    '<tool_response>\nSucceed: clicked <button> "Next".\n\n<observation>\nscreen size: 96 x 64\ncurrent tab: 0\ntabs:\n'
    "- Tab 0 (active): http://starter.localhost/ - Two boxes\nscreenshot:\n\n</observation>\n</tool_response>\n"
    "<user_request>\nclick the blue box\n</user_request>\n<think>\nI see it.\n</think>\n\n"
    '<tool_call>\n{"name": "click", "arguments": {"point_2d": [250, 500]}}\n</tool_call>\n'
)


def _page(title: str, path: str) -> Observation:
    return Observation(
        screenshot=Screenshot(data=b"not looked at", width=96, height=64),
        screen_size=(96, 64),
        tabs=(Tab(index=0, url=f"http://starter.localhost/{path}", title=title, active=True),),
        changes='1 appeared: <p> "Well done"' if path else "",
    )


def explain(tokens: Any) -> str:
    """The page, as Markdown."""
    from owrl_jax.models.processor import ImageProcessor

    style = PromptStyle(system="compact", tools=("click", "done"))
    harness = Harness(
        tokens=tokens, picture_rule=ImageProcessor(min_area=32 * 32), style=style, viewport=(96, 64), budgets=Budgets()
    )
    task = Task(id="example", instruction="click the blue box", start_url="http://starter.localhost/")
    context = harness.context(task, _page("Two boxes", ""))
    first = context.prompt()
    said = write(
        "The blue box is on the left. I click it.", [ToolCall(name="click", arguments={"point_2d": [250, 500]})]
    )
    response = encode_response(tokens, said)
    context.respond(response)
    result = CallResult(name="click", status=CallStatus.OK, feedback='Succeed: clicked <button> "blue" at (250, 500)')
    after = _page("Well done", "end")
    context.observe(feedback_lines([result], after, (), style), after)
    second = context.prompt()

    whole = harness.chat.preamble + harness.chat.user
    skip = len(tokens.encode_template(whole).ids)
    parts = [
        f"trunk 0, from the first user message on (system prompt and tools are the {skip} ids before)",
        "leaf 0",
        "response 0, as it was sampled",
        "trunk 1 begins with all of trunk 0; this is what was appended",
        "leaf 1",
    ]
    rows = [first.trunk[skip:], first.leaf, response, second.extension, second.leaf]
    shown = "\n\n".join(
        f"**{name}** ({len(ids)} ids)\n\n{_table(tokens, ids)}" for name, ids in zip(parts, rows, strict=True)
    )
    problems = "\n".join(f"| `{problem.value}` | {_cell(text)} |" for problem, text in PROBLEMS.items())
    return _PAGE.format(
        shown=shown,
        problems=problems,
        feedback=FEEDBACK_CHARS,
        title=TITLE_CHARS,
        url=URL_CHARS,
        vocabulary=len(tokens.hf),
    )


def _cell(text: str) -> str:
    return text.format(which="Call 1", detail="…").replace("|", "\\|").replace("<", "&lt;")


def _table(tokens: Any, ids: Sequence[int]) -> str:
    """The words of a row of ids, line by line, and the ids under each other."""
    lines: list[list[int]] = [[]]
    for i in ids:
        lines[-1].append(i)
        if tokens.decode([i]).endswith("\n"):
            lines.append([])
    out = []
    for line in filter(None, lines):
        text = re.sub(rf"(?:{re.escape(_PAD)})+", lambda pads: f"{_PAD} × {pads[0].count(_PAD)}", tokens.decode(line))
        out.append(f"{text.rstrip(chr(10))}{'⏎' if text.endswith(chr(10)) else ''}\n    {' '.join(map(str, line))}")
    return "```text\n" + "\n".join(out) + "\n```"


_PAGE = """# The harness: what the policy reads and writes

*This page is printed by `owrl episode --explain`; a test holds it equal. Do not edit it.*

## Messages

| message | content |
|---|---|
| system | the system prompt; the chat template adds the tools |
| first user | `<user_request>` with the task, an empty line, the observation |
| assistant | `<think>` reasoning `</think>`, then one or more `<tool_call>` blocks, each one JSON object |
| later user | inside `<tool_response>`: one feedback line per call, notes, changes, an empty line, the observation |

An observation is, line by line: the size of the screen, the number of the current tab, the list of tabs (address and
title), and, in the newest message only, the label `screenshot:` with the picture. When the next observation comes,
label and picture leave the history; everything else stays, reasoning included (K = 1). Points are on a grid of 0 to
1000.

That is `agent.prompt` `full`, and `compact` with fewer words of instruction. `terse`, for the smallest models and
worlds, names the tools in a line of the system prompt instead of giving their schemas, and an observation is the
picture alone.

Caps in characters: a feedback line {feedback} (70 % head, 30 % tail, a note of how many were cut between), a title
{title}, an address {url}. What pages wrote is made inert twice: tags lose their bracket in the text (`‹/think>`), and
the tokenizer is kept from reading a control token out of it.

## Trunk and leaf

The prompt of turn t is `trunk_t + leaf_t`. The trunk holds no picture and only grows: `trunk_t` is a prefix of
`trunk_(t+1)`. The leaf is read by one turn alone. Together they are, id for id, the model's own chat template over
the same messages. A response stands twice: behind its leaf, where it was sampled and is trained, and in the later
trunks, as history, with the ids it was sampled as.

One conversation of two turns, with a vocabulary of {vocabulary}; under each line its ids:

{shown}

Other history rules (no picture, K > 1, all pictures, hidden reasoning, calls alone, a window of reasoning) are
`HistoryRule`. Those that rewrite the past have `append_only == False`; their trunk is empty and the leaf is the whole
prompt.

## What cannot be read

One parser decides what runs and what the format reward is. Either the whole response can be read and its calls run in
order until one fails, or nothing runs and the policy gets one line, which begins "Failed: Nothing was run." The same
page is then shown again in words, its picture in the newer message only. Three such turns in a row end the episode as
`format_error`.

| problem | what the policy is told |
|---|---|
{problems}

Read in spite of its form, with a note to the policy: `parameters` for `arguments`, arguments as JSON text, further
keys in a call, words after the last call, calls inside reasoning beside calls after it, calls after `done` (never
run). Wrong arguments of a known tool are no matter of format: that call fails when it runs, and those after it are
skipped.

## Endings

| what happened | outcome | owner |
|---|---|---|
| `done` was called | `completed/answered` | policy |
| the turns are used up | `step_budget/max_steps` | policy |
| a response reached its cap | `generation_limit/response_cap` | policy |
| the context is full | `generation_limit/context_overflow` | policy |
| unreadable turns in a row | `format_error/consecutive_parse_failures` | policy |
| no answer from engine or endpoint | `sandbox_error/policy_unavailable` | sandbox |
| a spending limit | `cancelled/budget` | operator |
| cancelled, or over its deadline | `cancelled/…` | operator |
| site, browser, block | as the sandbox says | as it says |

Finished turns are kept whatever the ending; only endings owned by the policy are learned from. A response that was
cut is kept as a turn and not run, and nothing is appended to it.

## Protocol

System prompt, tools, template, vocabulary, history rule, budgets, viewport, picture format and caps have one name, the
protocol id, on every trajectory. `require_one_protocol` refuses to put two of them into one statistic.
"""
