"""What the tests of the harness share: tokenizers, pages that are not there, and a sandbox in memory."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Callable, Sequence

from owrl_jax.agent.prompt import PromptStyle
from owrl_jax.agent.tools import CheckedCall, check_call
from owrl_jax.models.processor import ImageProcessor
from owrl_jax.models.tokenizer import Tokens, default_chat_template, train_small_tokenizer
from owrl_jax.outcome import Outcome
from owrl_jax.types import CallResult, CallStatus, Observation, Screenshot, StepResult, Tab, Task, ToolCall

from .qwen_vocabulary import qwen_tokens

PICTURES = ImageProcessor(min_area=32 * 32, max_area=512 * 512)
LAYOUT = (
    "<tool_response>\nSucceed: clicked.\n\n<observation>\nscreen size: 320 x 256\ncurrent tab: 0\ntabs:\n"
    "- Tab 0 (active): http://a.b/ - A!\nscreenshot:\n\n</observation>\n</tool_response>\n"
)


@functools.cache
def tokenizer(name: str) -> Tokens:
    """`qwen`: Qwen3's vocabulary and its own chat template. `qwen_ours`: with the package's. `small`: a trained BPE."""
    if name == "small":
        corpus = [PromptStyle().system_prompt(), LAYOUT * 3, "<think>\nI see\n</think>\n\n", '{"name": "click"}'] * 3
        return train_small_tokenizer(corpus, 700, tempfile.mkdtemp())
    tokens = qwen_tokens()
    if name == "qwen_ours":
        tokens.hf.chat_template = default_chat_template()
    return tokens


def task(instruction: str = "Find the price.", **fields: object) -> Task:
    return Task(id="t", instruction=instruction, start_url="http://a.b/", **fields)  # type: ignore[arg-type]


def shot(width: int = 96, height: int = 64, mark: int = 0) -> Screenshot:
    return Screenshot(data=b"png %d" % mark, width=width, height=height)


def page(title: str = "A", url: str = "http://a.b/", *, picture: Screenshot | None = None, changes: str = ""):
    return Observation(
        screenshot=picture or shot(),
        screen_size=(96, 64),
        tabs=(Tab(index=0, url=url, title=title, active=True),),
        changes=changes,
    )


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


class MemorySandbox:
    """The sandbox protocol without a browser: every call is checked as the real one does, nothing is clicked.

    `gate`, if given, is awaited in every phase by name, so that a test can stop the episode there.
    """

    def __init__(self, gate: Callable[[str], object] | None = None, last: StepResult | None = None, steps: int = 99):
        self.gate, self.last, self.steps = gate, last, steps
        self.ran: list[tuple[ToolCall, ...]] = []
        self.finished: list[Outcome] = []
        self.closed = 0

    async def _pass(self, phase: str) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if self.gate is not None:
            result = self.gate(phase)
            if asyncio.iscoroutine(result):
                await result

    async def reset(self, task: Task) -> StepResult:
        await self._pass("reset")
        return StepResult(results=(), observation=page("start"), timings_ms={"open": 2.0, "capture": 1.0})

    async def step(self, calls: Sequence[ToolCall]) -> StepResult:
        await self._pass("step")
        self.ran.append(tuple(calls))
        if self.last is not None and len(self.ran) >= self.steps:
            return self.last
        results, answer, stopped = [], None, False
        for one in calls:
            checked = check_call(one)
            if stopped:
                results.append(CallResult(name=one.name, status=CallStatus.SKIPPED, feedback="Skipped: not run."))
            elif isinstance(checked, CheckedCall):
                results.append(CallResult(name=one.name, status=CallStatus.OK, feedback=f"Succeed: {one.name}."))
                answer = checked.arguments["response"] if one.name == "done" else None
            else:
                results.append(
                    CallResult(name=one.name, status=CallStatus.FAILED, feedback=f"Failed: {checked.message}")
                )
                stopped = True
        here = page(f"page {len(self.ran)}", picture=shot(mark=len(self.ran)))
        timings = {"act": 3.0, "settle": 4.0, "capture": 5.0}
        return StepResult(results=tuple(results), observation=here, answer=answer, timings_ms=timings)

    def finish(self, outcome: Outcome) -> Outcome:
        self.finished.append(outcome)
        return outcome

    async def close(self) -> None:
        await self._pass("close")
        self.closed += 1
