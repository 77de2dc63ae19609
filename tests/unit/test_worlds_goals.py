"""What counts as the right answer and the right final state: cases worked by hand."""

from __future__ import annotations

import pytest

from owrl_jax.types import VerdictValue
from owrl_jax.worlds.goals import GONE, All, Anything, Goal, Like, Number, Text, YesNo, verdict

PRICE = Number(value=41.5, given=("Lumo 300 lamp",))
NAME = Text(spellings=("Norvik Arc lamp",), others=("Aldea Arc lamp", "Norvik Arc chair"))
TIME = Text(spellings=("09:15", "9:15"), others=("19:15", "09:45"))


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        (PRICE, "41.50", True),
        (PRICE, "It costs $41.50.", True),
        (PRICE, "The Lumo 300 lamp is $41.50", True),
        (PRICE, "41.5 dollars", True),
        (PRICE, "$41.49", False),
        (PRICE, "$415.0", False),
        (PRICE, "$41.50 or $42", False),
        (PRICE, "It is not $41.50.", False),
        (PRICE, "I could not find it.", False),
        (PRICE, "", False),
        (Number(value=1234), "1,234", True),
        (Number(value=1234), "1234 km", True),
        (Number(value=1234), "1.234", False),
        (Number(value=0), "There are none: 0", True),
        (Number(value=3), "13", False),
        (Number(value=3), "3rd", False),
        (NAME, "norvik arc LAMP", True),
        (NAME, "The Norvik Arc lamp, I think.", True),
        (NAME, "Aldea Arc lamp", False),
        (NAME, "Norvik Arc lamp or Aldea Arc lamp", False),
        (NAME, "It isn't the Norvik Arc lamp", False),
        (NAME, "Norvik Arc lampshade", False),
        (NAME, "Norvik lamp", False),
        (Text(spellings=("Café Zoë",)), "cafe zoe", True),
        (TIME, "9:15", True),
        (TIME, "At 09:15.", True),
        (TIME, "19:15", False),
        (TIME, "09:15:30", False),
        (TIME, "09:15 or 09:45", False),
        (YesNo(yes=True), "Yes.", True),
        (YesNo(yes=True), "yes, they do", True),
        (YesNo(yes=True), "No", False),
        (YesNo(yes=True), "It is not yes", False),
        (YesNo(yes=False), "No, they do not.", True),
        (YesNo(yes=False), "yes and no", False),
        (YesNo(yes=False), "Maybe", False),
        (All(parts=(NAME, PRICE)), "Norvik Arc lamp, $41.50", True),
        (All(parts=(NAME, PRICE)), "Norvik Arc lamp, $41", False),
        (All(parts=(NAME, PRICE)), "$41.50", False),
    ],
)
def test_answers(answer, said: str, right: bool) -> None:
    assert (answer.problem(said) is None) == right, answer.problem(said)


START = {"cart/a": 1, "cart/b": 2, "note": {"text": ""}}


@pytest.mark.parametrize(
    ("changes", "final", "right"),
    [
        ({"cart/a": 3}, {**START, "cart/a": 3}, True),
        ({"cart/a": 3}, {**START, "cart/a": 3, "cart/b": 1}, False),
        ({"cart/a": 3}, {**START, "cart/a": 3, "cart/c": 1}, False),
        ({"cart/a": 3}, {"cart/a": 3, "note": {"text": ""}}, False),
        ({"cart/a": GONE}, {k: v for k, v in START.items() if k != "cart/a"}, True),
        ({"cart/a": GONE}, START, False),
        ({"cart/a": 1}, {**START, "cart/a": True}, False),
        ({"note": {"text": Like("See you at nine.")}}, {**START, "note": {"text": "see you at nine"}}, True),
        ({"note": {"text": Like("See you at nine.")}}, {**START, "note": {"text": "see you at ten"}}, False),
        ({"note": {"text": Anything()}}, {**START, "note": {"text": "whatever"}}, True),
        ({"note": {"text": Anything()}}, {**START, "note": {"text": "whatever", "more": 1}}, False),
    ],
)
def test_final_states(changes, final, right: bool) -> None:
    goal = Goal(changes=changes)
    got = verdict(goal, initial=START, final=final, seen=set(), said="Done.", judge="test")
    assert (got.value is VerdictValue.SUCCESS) == right, got.reasons
    assert bool(got.reasons) != right


def test_alternatives_facts_and_done() -> None:
    goal = Goal(changes={"x": 1}, alternatives=({"y": 1},), facts=("page:7",))

    def value(final, seen=("page:7",), said: str | None = "Done.", blocked=""):
        return verdict(goal, initial={}, final=final, seen=set(seen), said=said, judge="test", blocked=blocked).value

    assert value({"x": 1}) is VerdictValue.SUCCESS
    assert value({"y": 1}) is VerdictValue.SUCCESS
    assert value({"x": 1, "y": 1}) is VerdictValue.FAILURE
    assert value({"x": 1}, seen=()) is VerdictValue.FAILURE
    assert value({"x": 1}, said=None) is VerdictValue.FAILURE
    assert value({}, blocked="captcha wall") is VerdictValue.INVALID
    assert value({"x": 1}, blocked="captcha wall") is VerdictValue.SUCCESS
    with pytest.raises(ValueError, match="doing nothing"):
        Goal()
