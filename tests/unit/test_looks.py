"""What is taken from demonstrations to learn to see by."""

from __future__ import annotations

from owrl_jax.data.looks import looks_of
from owrl_jax.data.tasks import beside
from owrl_jax.outcome import Outcome, Reason
from owrl_jax.types import Task, Trajectory, Turn
from owrl_jax.worlds import registry
from tests.unit.harness_world import tokenizer

TOKENS = tokenizer("small")
PAD = TOKENS.special.image_pad
SHOT = "a" * 64


def demonstration(task: Task, *, grid: tuple[int, int] | None = (4, 4), shot: str = SHOT) -> Trajectory:
    said = tuple(TOKENS.encode_template("<think>\nAny words.\n</think><|im_end|>").ids.tolist())
    turn = Turn(
        trunk_ids=tuple(TOKENS.encode_template("<|im_start|>system\nWords.<|im_end|>\n").ids.tolist()),
        leaf_ids=(5, *(PAD,) * 4, 6) if grid else (5, 6),
        response_ids=said, logprobs=(-0.25,) * len(said), versions=(3,) * len(said),
        screenshot=shot if grid else None, grid=grid,
    )  # fmt: skip
    outcome = Outcome(reason=Reason.COMPLETED, detail="answered")
    return Trajectory(task=task, group_id="g", index=0, protocol="p", turns=(turn, turn), outcome=outcome)


def pair(seed: int, *, skin: str = "dark") -> Task:
    return registry.make_task("starter", "pair_colour", seed, skin=skin)


def test_looks_are_the_requests_that_a_picture_serves_and_the_thoughts_of_their_oracles():
    (left, _), (right, _) = registry.site("starter").build(2).pair
    looks = looks_of([demonstration(pair(17))], TOKENS)  # seeds 16 to 23 share a page, 19 of them is held out
    wordings = {"click the {} one", "{}"}
    found = set()
    for look in looks:
        (turn,) = look.turns
        asked = TOKENS.decode((*turn.trunk_ids, *turn.leaf_ids))
        opening, rest = asked.split("\n", 1)
        assert rest == f"<|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>"
        said = TOKENS.decode(turn.response_ids)
        for colour, side in ((left, "left"), (right, "right")):
            if colour in opening:
                assert opening.removeprefix("<|im_start|>") in {w.format(colour) for w in wordings}
                assert said == f"I see {left} left, {right} right. So {colour} {side}.<|im_end|>"
                found.add(colour)
        assert (turn.screenshot, turn.grid) == (SHOT, (4, 4))
        assert len(turn.logprobs) == len(turn.versions) == len(turn.response_ids)
    assert found == {left, right}
    requests = [look.task.instruction for look in looks]
    assert len(set(requests)) == len(requests) == len({look.group_id for look in looks}) > 1


def test_each_picture_and_request_is_there_once():
    once = looks_of([demonstration(pair(17))], TOKENS)
    assert looks_of([demonstration(pair(17)), demonstration(pair(18))], TOKENS) == once
    two = looks_of([demonstration(pair(17)), demonstration(pair(18, skin="bright"), shot="b" * 64)], TOKENS)
    assert len(two) == 2 * len(once)


def test_what_shows_nothing_is_no_look():
    nothing_said = registry.make_task("starter", "word", 3)
    from_elsewhere = Task(id="t", instruction="hit red", start_url="about:blank")
    assert looks_of([demonstration(nothing_said), demonstration(from_elsewhere)], TOKENS) == []
    assert looks_of([demonstration(pair(17), grid=None)], TOKENS) == []


def test_tasks_beside_share_the_page_and_the_split():
    task = registry.make_task("starter", "colour_shape", 8, skin="dark")
    found = beside(task)
    assert task in found
    assert [t.seed for t in found] == [8, 10, 11, 12, 13, 14, 15]  # every tenth seed, 9 here, is held out
    assert {(t.start_url, t.metadata["skin"], t.split) for t in found} == {(task.start_url, "dark", "train")}
    held_out = registry.make_task("starter", "colour_shape", 9)
    assert beside(held_out) == [held_out]
    (alone,) = beside(registry.make_task("shop", registry.templates("shop")[0], 5))
    assert alone.seed == 5
