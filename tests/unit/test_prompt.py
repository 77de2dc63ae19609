"""The words of a prompt: order of lines, caps, what is told of a turn; and the name of it all."""

from __future__ import annotations

import dataclasses
import json

import pytest

from owrl_jax.agent.harness import Budgets, Harness
from owrl_jax.agent.history import HistoryRule
from owrl_jax.agent.prompt import PromptStyle, feedback_lines, first_message, later_message, unguarded
from owrl_jax.agent.protocol import MixedProtocols, differences, protocol_id, require_one_protocol
from owrl_jax.agent.tools import TOOL_NAMES
from owrl_jax.config import AgentSettings, BrowserSettings
from owrl_jax.models.processor import ImageProcessor
from owrl_jax.outcome import Outcome, Reason
from owrl_jax.types import CallResult, CallStatus, Observation, Tab, Trajectory

from .harness_world import PICTURES, page, shot, task, tokenizer

TWO_TABS = Observation(
    screenshot=shot(),
    screen_size=(1280, 1000),
    tabs=(
        Tab(index=0, url="http://shop.example/", title="Shop", active=False),
        Tab(index=1, url="http://shop.example/cart", title="x" * 49 + " yz", active=True),
    ),
)
OBSERVED = (
    "<observation>\nscreen size: 1280 x 1000\ncurrent tab: 1\ntabs:\n"
    "- Tab 0: http://shop.example/ - Shop\n"
    f"- Tab 1 (active): http://shop.example/cart - {'x' * 49}\n"
)


def test_the_first_message_by_hand():
    message = first_message(task("  Find\n it. "), TWO_TABS, unguarded)
    request = "<user_request>\nFind\n it.\n</user_request>\n\n"
    assert message.with_picture == f"{request}{OBSERVED}screenshot:\n\0\n</observation>"
    assert message.without_picture == f"{request}{OBSERVED}</observation>"


def test_later_messages_by_hand():
    """Wrapped whole, so that templates take it for a tool's answer; a line per call, a blank line, the observation."""
    message = later_message(["Succeed: a.", "Failed: b."], TWO_TABS, unguarded)
    assert message.with_picture == (
        f"<tool_response>\nSucceed: a.\nFailed: b.\n\n{OBSERVED}screenshot:\n\0\n</observation>\n</tool_response>"
    )
    bare = later_message([], TWO_TABS, unguarded, picture=False)
    assert bare.with_picture == bare.without_picture == f"<tool_response>\n{OBSERVED}</observation>\n</tool_response>"


def test_what_is_told_of_a_turn():
    results = [
        CallResult(name="click", status=CallStatus.OK, feedback="Succeed: a  b"),
        CallResult(name="write", status=CallStatus.FAILED, feedback="Failed: " + "y" * 600),
    ]
    lines = feedback_lines(results, page(changes='2 appeared: "Cart"'), ["done ends the task"], PromptStyle())
    assert lines[0] == "Succeed: a b"
    assert len(lines[1]) == 512 and "characters cut" in lines[1]
    assert lines[2:] == ("Note: done ends the task", 'Changes: 2 appeared: "Cart"')
    assert len(feedback_lines(results, page(changes="x"), [], PromptStyle(changes=False))) == 2
    assert feedback_lines(results, page(changes="x"), ["n"], PromptStyle(feedback=False)) == ()


def test_tools_on_offer_are_chosen_by_name_and_keep_their_order():
    style = PromptStyle(tools=("click", "write", "done"))
    assert [schema["function"]["name"] for schema in style.schemas()] == ["click", "write", "done"]
    assert [schema["function"]["name"] for schema in PromptStyle().schemas()] == list(TOOL_NAMES)
    for wrong, words in ((("click",), "must include done"), (("fly", "done"), "fly"), (("done", "click"), "order")):
        with pytest.raises(ValueError, match=words):
            PromptStyle(tools=wrong)


def test_a_terse_prompt_by_hand():
    """Tools and their required parameters in a line; an observation is its picture."""
    style = PromptStyle(system="terse", tools=("click", "write", "done"))
    assert style.schemas() == []
    assert style.system_prompt().endswith(" Tools: click(point_2d), write(message), done(response).")
    first = first_message(task("Find it."), TWO_TABS, unguarded, terse=True)
    assert first.without_picture == "<user_request>\nFind it.\n</user_request>\n\n<observation>\n</observation>"
    later = later_message([], TWO_TABS, unguarded, terse=True)
    assert later.without_picture == "<tool_response>\n<observation>\n</observation>\n</tool_response>"
    assert first.shown.startswith("screenshot:\n") and later.shown == first.shown


def test_the_system_prompt_says_what_the_format_needs():
    for kind in ("full", "compact", "terse"):
        text = PromptStyle(system=kind).system_prompt()
        assert "<think>" in text and "</think>" in text and "1000" in text and "done" in text
        assert "\\" not in text.replace("backslashes", "")
    assert len(PromptStyle(system="compact").system_prompt()) < 300
    assert "<tool_call>" in PromptStyle().system_prompt()


# --- The protocol --------------------------------------------------------------------------------------------------


def harness(**fields) -> Harness:
    base = {"tokens": tokenizer("small"), "picture_rule": PICTURES, "viewport": (96, 64)}
    return Harness(**{**base, **fields})


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"style": PromptStyle(system="compact")}, "system_prompt"),
        ({"style": PromptStyle(system="terse")}, "style"),
        ({"style": PromptStyle(tools=("click", "done"))}, "tools"),
        ({"style": PromptStyle(changes=False)}, "changes"),
        ({"rule": HistoryRule(screenshots=2)}, "history"),
        ({"budgets": Budgets(max_steps=30)}, "budgets"),
        ({"viewport": (128, 64)}, "viewport"),
        ({"image_format": "jpeg"}, "image"),
        ({"picture_rule": ImageProcessor(min_area=128 * 128)}, "image"),
        ({"template_options": {"enable_thinking": True}}, "opener"),
        ({"reasoning_required": False}, "reasoning_required"),
        ({"tokens": tokenizer("qwen_ours")}, "preamble_ids_sha256"),
        ({"tokens": tokenizer("qwen")}, "template_sha256"),
    ],
    ids=str,
)
def test_whatever_changes_the_numbers_changes_the_protocol(changed, part):
    usual, other = harness(), harness(**changed)
    assert usual.protocol == harness().protocol != other.protocol
    assert any(line.startswith(f"{part}: ") for line in differences(usual.protocol_parts, other.protocol_parts))
    assert json.loads(json.dumps(usual.protocol_parts)) == usual.protocol_parts


def test_a_protocol_id_does_not_depend_on_the_order_of_its_parts():
    assert protocol_id({"a": 1, "b": [2, "ü"]}) == protocol_id({"b": [2, "ü"], "a": 1}) != protocol_id({"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        protocol_id({"a": float("nan")})


def test_protocols_are_never_mixed():
    def episode(protocol: str) -> Trajectory:
        ended = Outcome(reason=Reason.COMPLETED, detail="answered")
        return Trajectory(task=task(), group_id="g", index=0, protocol=protocol, turns=(), outcome=ended)

    assert require_one_protocol([episode("a"), episode("a")]) == "a"
    with pytest.raises(MixedProtocols, match=r"a \(2\), b \(1\)"):
        require_one_protocol([episode("a"), episode("b"), episode("a")])
    with pytest.raises(MixedProtocols, match="expected c"):
        require_one_protocol([episode("a")], expected="c")
    with pytest.raises(ValueError, match="no trajectories"):
        require_one_protocol([])


def test_a_harness_from_the_settings_of_a_run():
    made = Harness.from_settings(
        tokenizer("small"), PICTURES, AgentSettings(max_steps=7, screenshots=2), BrowserSettings(viewport=(200, 100))
    )
    assert made.budgets == Budgets(max_steps=7) and made.rule == HistoryRule(screenshots=2)
    assert made.viewport == (200, 100)
    # The two records say the same by default: one of them is what a run is configured with.
    usual = AgentSettings()
    assert dataclasses.asdict(Budgets()).items() <= dataclasses.asdict(usual).items()


@pytest.mark.parametrize("bad", [{"max_steps": 0}, {"max_response_tokens": 32768}, {"max_parse_failures": 0}], ids=str)
def test_bad_budgets_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Budgets(**bad)
