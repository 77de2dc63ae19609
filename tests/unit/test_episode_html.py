"""The page of an episode, and the printed explanation of the harness."""

from __future__ import annotations

import html.parser
import re

import pytest

from owrl_jax.agent.episode import Episode
from owrl_jax.agent.harness import Harness
from owrl_jax.agent.parser import write
from owrl_jax.agent.policies import ActorPolicy, Script
from owrl_jax.obs.episode_html import episode_html
from owrl_jax.obs.explain import explain, small_tokenizer
from owrl_jax.types import StepResult, Verdict, VerdictValue

from .harness_world import PICTURES, MemorySandbox, call, page, task, tokenizer

EVIL = "</pre><script>alert(1)</script><img src=http://evil/x onerror=alert(1)>\"'&amp;"


class Page(html.parser.HTMLParser):
    """Every tag with its attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words += data


async def played(replies, **fields) -> str:
    harness = Harness(tokens=tokenizer("small"), picture_rule=PICTURES, viewport=(96, 64))
    seen = []

    class Hostile(MemorySandbox):
        async def reset(self, task):
            return StepResult(results=(), observation=page(EVIL, f"http://a/{EVIL}"))

    async def opened():
        return Hostile()

    policy = ActorPolicy(Script(replies), harness.tokens)
    episode = Episode(task(EVIL), harness=harness, policy=policy, open_sandbox=opened, on_turn=seen.append)
    trajectory = await episode.run()
    verdict = Verdict(value=VerdictValue.FAILURE, judge="j", rationale=EVIL)
    options = {"decode": harness.tokens.decode, "last": page(EVIL), "protocol_parts": harness.protocol_parts}
    text = episode_html(trajectory, seen, verdict=verdict, **options)
    assert text == episode_html(trajectory, seen, verdict=verdict, **options)
    return text


STORY = [
    write(EVIL, [call("click", point_2d=[250, 500]), call("drag", start_point_2d=[0, 0], end_point_2d=[1000, 1000])]),
    EVIL,
    write(
        "x", [call("write", message=EVIL), call("click", point_2d=["left:0", None]), call("click", point_2d=[-5, 1e9])]
    ),
    write("x", [call("done", response=EVIL)]),
]


async def test_nothing_that_was_said_becomes_markup():
    parsed = Page(await played(STORY))
    structure = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "table", "tr", "td"}
    content = {"details", "summary", "pre", "section", "div", "span", "img", "p", "br"}
    assert {tag for tag, _ in parsed.tags} <= structure | content
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    sources = [attributes["src"] for tag, attributes in parsed.tags if tag == "img"]
    assert len(sources) == 5 and all(source.startswith("data:image/png;base64,") for source in sources)
    policies = [a["content"] for tag, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    # The words are there to be read, as they were said.
    assert parsed.words.count("alert(1)") > 5 and "Your reasoning was not closed" in parsed.words
    assert "failure by j" in parsed.words and "completed/answered" in parsed.words


async def test_marks_stand_where_the_calls_pointed():
    parsed = Page(await played(STORY))
    marks = [attributes["style"] for _, attributes in parsed.tags if attributes.get("class") == "mark"]
    assert marks == ["left:25.00%;top:50.00%", "left:0.00%;top:0.00%", "left:100.00%;top:100.00%"]


async def test_a_run_of_placeholders_is_told_as_its_length():
    text = await played(STORY)
    assert "&lt;|image_pad|&gt; × 6" in text and "&lt;|image_pad|&gt;&lt;|image_pad|&gt;" not in text


@pytest.fixture(scope="module")
def small():
    return small_tokenizer()


def test_the_page_about_the_harness_is_what_the_command_prints(repo_root, small):
    shown = (repo_root / "docs" / "harness.md").read_text(encoding="utf-8")
    assert shown == explain(small), "print it again: owrl episode --explain > docs/harness.md"


def test_the_worked_example_adds_up(repo_root, small):
    """The ids of the page, read back from it: trunk 1 repeats what leaf 0 and response 0 said, without the picture."""
    shown = (repo_root / "docs" / "harness.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```text\n(.*?)```", shown, re.DOTALL)
    rows = [
        [int(i) for line in re.findall(r"^    ([\d ]+)$", block, re.MULTILINE) for i in line.split()]
        for block in blocks
    ]
    counts = [int(n) for n in re.findall(r"\((\d+) ids\)", shown)]
    assert [len(row) for row in rows] == counts and len(rows) == 5
    tokens = small
    trunk_0, leaf_0, response, extension, leaf_1 = rows
    end = leaf_0.index(tokens.special.vision_end)
    closing = leaf_0[end + 2 :]  # behind the picture and its line break
    assert extension[: len(closing)] == closing
    assert extension[len(closing) : len(closing) + len(response)] == response
    assert tokens.special.image_pad not in trunk_0 + extension
    assert leaf_0.count(tokens.special.image_pad) == leaf_1.count(tokens.special.image_pad) == 6  # 96 x 64 / 32 / 32
