"""The scheduler's rules, and that nothing is ever lost: no device, tokens out of a hat."""

from __future__ import annotations

import random

import numpy as np
import pytest

from owrl_jax.agent.policy import Sampling
from owrl_jax.engine.request import Request, Token
from owrl_jax.engine.scheduler import Scheduler
from owrl_jax.engine.session import ImageRun, Plan, Session, State
from owrl_jax.engine.settings import EngineSettings
from owrl_jax.models.processor import Patches

SETTINGS = EngineSettings(
    max_context=64, page_tokens=4, pages=24, decode_rows=(2, 4), decode_steps=4, chunk_tokens=(16,), segments=3,
    patch_buckets=(24,), vision_rows=8, key_block=16,
)  # fmt: skip


STEM = [7] * 20


def session(number: int, ids, *, new: int = 8, image: tuple[int, int, bytes] | None = None) -> Session:
    ids = tuple(int(i) for i in ids)
    runs = ()
    if image is not None:
        start, length, digest = image
        patches = Patches(patches=np.zeros((4 * length, 768), np.uint8), grid=(2, 2 * length), tokens=length)
        runs = (ImageRun(start=start, end=start + length, digest=digest, patches=patches),)
    return Session(
        number=number,
        request=Request(ids=ids, sampling=Sampling(max_new_tokens=new)),
        positions=np.broadcast_to(np.arange(len(ids), dtype=np.int32), (3, len(ids))),
        next_position=len(ids),
        images=runs,
        limit=min(new, 64 - len(ids)),
        stop=(),
        deadline=float("inf"),
        arrived=0.0,
    )


def token(i: int) -> Token:
    return Token(id=i, logprob=0.0, version=0)


def run(scheduler: Scheduler, plan: Plan, rng: random.Random | None = None) -> None:
    """What the engine does with a plan, the device left out."""
    pick = (rng or random.Random(0)).randint
    for s in plan.decode:
        n = min(plan.steps, s.remaining)
        n = pick(1, n) if rng and rng.random() < 0.2 else n
        scheduler.commit_token(s, [token(pick(0, 3)) for _ in range(n)], 0.0)
        if s.remaining == 0:
            scheduler.finish(s)
    for segment in plan.prefill:
        scheduler.commit_prefill(segment)
        if segment.final:
            scheduler.commit_token(segment.session, [token(pick(0, 3))], 0.0)
            if segment.session.remaining == 0:
                scheduler.finish(segment.session)


def drain(scheduler: Scheduler, limit: int = 2000) -> int:
    for step in range(limit):
        if not scheduler.sessions():
            return step
        run(scheduler, scheduler.plan(0.0))
        scheduler.check()
    raise AssertionError("the scheduler makes no progress")


def test_ten_thousand_random_operations_lose_nothing():
    rng, scheduler, number = random.Random(0), Scheduler(SETTINGS), 0
    everyone: list[Session] = []
    for operation in range(10_000):
        event = rng.random()
        if event < 0.25 and len(scheduler.waiting) < 12:
            ids = [rng.randint(0, 2) for _ in range(rng.choice((1, 5, 9, 23, 60)))]
            ids = [*STEM[: rng.choice((0, 8, 20))], *ids][:60]
            image = None
            if len(ids) > 8 and rng.random() < 0.5:
                image = (rng.randint(0, len(ids) - 7), rng.choice((2, 5, 6)), rng.choice((b"a", b"b", b"c")))
            everyone.append(session(number, ids, new=rng.choice((1, 3, 30)), image=image))
            scheduler.add(everyone[-1])
            number += 1
        elif event < 0.3 and scheduler.sessions():
            scheduler.remove(rng.choice(scheduler.sessions()))
        elif event < 0.305:
            scheduler.flush(restart=rng.random() < 0.5)
        else:
            run(scheduler, scheduler.plan(0.0), rng)
        if operation % 7 == 0:
            scheduler.check()
    drain(scheduler)
    assert all(s.state == State.DONE for s in everyone) and len(everyone) > 1000
    assert scheduler.counts.preemptions > 50 and scheduler.counts.pages_evicted > 50
    assert scheduler.counts.prompt_tokens_cached > 1000
    scheduler.flush(restart=False)
    assert scheduler.pool.used == 0 and scheduler.vision.free == SETTINGS.vision_rows


def test_a_plan_never_exceeds_its_budgets():
    rng, scheduler = random.Random(3), Scheduler(SETTINGS)
    for number in range(60):
        ids = [rng.randint(0, 9) for _ in range(rng.randint(1, 60))]
        scheduler.add(session(number, ids, new=rng.randint(1, 20)))
    while scheduler.sessions():
        plan = scheduler.plan(0.0)
        assert sum(s.end - s.start for s in plan.prefill) <= 16 and len(plan.prefill) <= 3
        assert sum(-(-s.start // 4) * 4 for s in plan.prefill) <= SETTINGS.past_slots
        assert len(plan.decode) <= 4 and len({s.row for s in plan.decode}) == len(plan.decode)
        rows = max((s.row for s in plan.decode if s.row is not None), default=0) + 1
        assert rows <= (2 if len(plan.decode) <= 2 else 4)  # few sessions use the small program
        for s in plan.decode:
            assert len(s.pages) * 4 >= s.computed + min(plan.steps, s.remaining)
        run(scheduler, plan)


def test_every_decoding_session_is_in_every_step_and_long_prompts_share_with_short_ones():
    scheduler = Scheduler(SETTINGS)
    first = session(0, range(4), new=40)
    scheduler.add(first)
    run(scheduler, scheduler.plan(0.0))
    scheduler.add(session(1, range(100, 156), new=4))  # four chunks
    scheduler.add(session(2, range(200, 203), new=4))
    plan = scheduler.plan(0.0)
    assert plan.decode == (first,) and plan.steps == 1  # short calls while prompts wait
    assert [s.session.number for s in plan.prefill] == [1, 2]
    assert plan.prefill[0].end - plan.prefill[0].start >= 8 and plan.prefill[1].final
    run(scheduler, plan)
    for _ in range(5):
        plan = scheduler.plan(0.0)
        assert first in plan.decode
        run(scheduler, plan)
    assert all(s.state != State.PREFILL for s in scheduler.running)


def test_a_stream_of_short_prompts_does_not_starve_a_long_one():
    scheduler, steps = Scheduler(SETTINGS), 0
    long = session(0, range(1000, 1060), new=1)
    scheduler.add(long)
    while long.state != State.DONE:
        scheduler.add(session(1 + 2 * steps, [steps, 1], new=1))
        scheduler.add(session(2 + 2 * steps, [steps, 2, 3], new=1))
        run(scheduler, scheduler.plan(0.0))
        steps += 1
    assert steps <= 1 + 60 // 8


def test_equal_prompts_of_one_step_wait_for_the_first():
    scheduler = Scheduler(SETTINGS)
    for number in range(3):
        scheduler.add(session(number, range(30), new=2))
    computed = []
    while scheduler.sessions():
        plan = scheduler.plan(0.0)
        computed += [(s.session.number, s.start, s.end) for s in plan.prefill]
        run(scheduler, plan)
    assert sum(end - start for _, start, end in computed) == 30 + 2 * 2  # page 0 … 27 once, the tail by everyone
    assert {(n, s) for n, s, _ in computed if n} == {(1, 28), (2, 28)}


def test_the_oldest_takes_from_the_youngest_and_not_the_other_way_round():
    scheduler = Scheduler(SETTINGS)
    for number in range(4):
        scheduler.add(session(number, range(100 * number, 100 * number + 20), new=40))
    order = []
    while scheduler.sessions():
        before = {s: s.preemptions for s in scheduler.sessions()}
        plan = scheduler.plan(0.0)
        order += [s.number for s, n in before.items() if s.preemptions > n]
        run(scheduler, plan)
        scheduler.check()
    assert order and 0 not in order


def test_an_image_that_has_no_room_yet_lets_the_text_before_it_be_computed():
    scheduler = Scheduler(SETTINGS)
    scheduler.add(session(0, range(40), new=1, image=(2, 6, b"a")))  # six of eight rows
    scheduler.add(session(1, range(100, 130), new=1, image=(3, 6, b"b")))
    plan = scheduler.plan(0.0)
    assert [run_.digest for run_, _ in plan.encode] == [b"a"]
    assert [(s.session.number, s.end) for s in plan.prefill] == [(0, 8), (1, 3)]
    drain(scheduler)


def test_a_swap_of_weights_in_the_middle():
    for restart in (False, True):
        scheduler = Scheduler(SETTINGS)
        answering, prompting = session(0, range(9), new=30), session(1, range(20, 60), new=3)
        scheduler.add(answering)
        run(scheduler, scheduler.plan(0.0))
        scheduler.add(prompting)
        run(scheduler, scheduler.plan(0.0))
        had = len(answering.answer)
        assert had and prompting.computed
        scheduler.flush(restart=restart)
        scheduler.check()
        assert prompting.computed == 0 and prompting.state == State.WAITING
        assert (len(answering.answer), answering.state) == ((0, State.WAITING) if restart else (had, State.DECODE))
        assert not restart or answering.tokens == list(range(9))
        drain(scheduler)
        assert len(answering.answer) == 30
        # What was half made under the old weights is in no cache.
        assert restart or scheduler.tree.match(answering.keys, 36) == []


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_prefix_cache_can_be_off(prefix_cache):
    import dataclasses

    scheduler = Scheduler(dataclasses.replace(SETTINGS, prefix_cache=prefix_cache))
    for number in range(2):
        scheduler.add(session(number, range(33), new=1))
        drain(scheduler)
    assert scheduler.counts.prompt_tokens_cached == (32 if prefix_cache else 0)
    assert scheduler.counts.prompt_tokens_computed == 66 - scheduler.counts.prompt_tokens_cached
