"""The staleness rule by hand: who is admitted when, what waits, what is discarded, when an iteration gives up."""

import asyncio

import pytest

from owrl_jax.outcome import Outcome, Reason
from owrl_jax.rl.feed import GroupFeed, NothingToLearn
from owrl_jax.types import Group, GroupRequest, Task, Trajectory


def feed(judge=lambda group: "", **fields):
    return GroupFeed(
        draw=lambda n: Task(id=f"t{n % 5}", instruction="go", start_url="http://a.b/"),
        judge=judge,
        oldest=lambda group: 0,
        **({"batch": 3, "size": 2} | fields),
    )


def ended(request, *, valid=True):
    outcome = (
        Outcome(reason=Reason.COMPLETED, detail="answered")
        if valid
        else Outcome(reason=Reason.SANDBOX_ERROR, detail="browser_gone")
    )
    members = tuple(
        Trajectory(task=request.task, group_id=request.group_id, index=i, protocol="p", turns=(), outcome=outcome)
        for i in range(request.n)
    )
    return Group(request=request, trajectories=members)


class Wishes:
    """A pool with room for all: takes wishes as soon as they are granted."""

    def __init__(self, feed):
        self._feed, self._queue = feed, asyncio.Queue()
        self._task = asyncio.create_task(self._pump())

    async def _pump(self):
        async for request in self._feed.requests():
            self._queue.put_nowait(request)

    async def now(self):
        for _ in range(20):
            await asyncio.sleep(0)
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]


async def test_on_policy_plays_its_batch_and_one_more_for_each_that_teaches_nothing():
    bad = {"g0000001", "g0000003"}
    f = feed(judge=lambda g: "zero_variance" if g.request.group_id in bad else "")
    wishes = Wishes(f)
    first = await wishes.now()
    assert [r.group_id for r in first] == ["g0000000", "g0000001", "g0000002"] and f.running == 3
    f.take(ended(first[0]))
    assert await wishes.now() == []  # accepted + running is still 3
    f.take(ended(first[1]))
    (fourth,) = await wishes.now()
    f.take(ended(first[2]))
    f.take(ended(fourth))
    (fifth,) = await wishes.now()
    waiting = asyncio.ensure_future(f.next_batch())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    f.take(ended(fifth))
    batch = await waiting
    assert [g.request.group_id for g in batch] == ["g0000000", "g0000002", "g0000004"]
    assert await wishes.now() == []  # nothing runs while the learner works
    assert f.advance(1) == {"zero_variance": 2}
    assert len(await wishes.now()) == 3
    f.close()


async def test_off_policy_plays_ahead_by_the_staleness_and_keeps_what_is_left_over():
    f = feed(max_staleness=2)
    wishes = Wishes(f)
    first = await wishes.now()
    assert len(first) == 9  # (2 + 0 + 1) * 3
    for request in first[:7]:
        f.take(ended(request))
    batch = await f.next_batch()
    assert len(batch) == 3 and len(f.waiting) == 4 and await wishes.now() == []
    f.advance(1)
    assert len(await wishes.now()) == 3
    assert [g.request.group_id for g in await f.next_batch()] == [r.group_id for r in first[3:6]]
    f.close()


async def test_what_is_too_stale_is_discarded_and_played_again():
    versions = {}
    f = GroupFeed(
        draw=lambda n: Task(id=f"t{n}", instruction="go", start_url="http://a.b/"),
        judge=lambda g: "", oldest=lambda g: versions[g.request.group_id], batch=2, size=2, max_staleness=1, version=5,
    )  # fmt: skip
    wishes = Wishes(f)
    first = await wishes.now()
    assert len(first) == 4
    for request, version in zip(first, (3, 5, 4, 5), strict=True):
        versions[request.group_id] = version
        f.take(ended(request))
    batch = await f.next_batch()  # version 3 is two behind
    assert [versions[g.request.group_id] for g in batch] == [4, 5]
    (replacement,) = await wishes.now()
    versions[replacement.group_id] = 5
    f.take(ended(replacement))
    assert f.advance(6) == {"stale": 1}
    assert [versions[g.request.group_id] for g in await f.next_batch()] == [5, 5]
    f.close()


async def test_an_iteration_that_finds_nothing_says_why_and_one_that_finds_little_takes_it():
    f = feed(judge=lambda g: "zero_variance", cap=2.0)
    wishes = Wishes(f)
    played = 0
    while got := await wishes.now():
        for request in got:
            played += 1
            f.take(ended(request))
    assert played == 6
    with pytest.raises(NothingToLearn, match=r"none of 6 groups taught anything.*zero_variance"):
        await f.next_batch()

    f = feed(judge=lambda g: "" if g.request.group_id == "g0000004" else "zero_variance", cap=2.0)
    wishes = Wishes(f)
    while got := await wishes.now():
        for request in got:
            f.take(ended(request))
    assert [g.request.group_id for g in await f.next_batch()] == ["g0000004"]


async def test_a_poisoned_task_is_quarantined():
    f = feed(judge=lambda g: "" if g.valid else "all_invalid", batch=4, cap=50.0)
    wishes = Wishes(f)
    seen = []
    for _ in range(12):
        for request in await wishes.now():
            seen.append(request.task.id)
            f.take(ended(request, valid=request.task.id != "t2"))
        f.advance(f.version + 1)
        f.waiting.clear()
    assert f.quarantined == {"t2"} and seen.count("t2") == 2 and seen.count("t1") > 5
    assert f.state()["quarantined"] == ["t2"]
    f.close()


async def test_an_outage_that_a_restart_has_ended_bars_no_task():
    f = feed(judge=lambda g: "" if g.valid else "all_invalid")
    lost = GroupRequest(task=Task(id="t0", instruction="go", start_url="http://a.b/"), group_id="g", n=2)
    for _ in range(3):
        f.take(ended(lost, valid=False), played=False)
    assert f.quarantined == set() and f.waiting == []


async def test_what_an_earlier_process_chose_counts_as_taken():
    # It was killed with the batches of iterations 0 and 1 chosen and no checkpoint: they are trained on again first.
    f = feed(chosen=2)
    wishes = Wishes(f)
    assert await wishes.now() == []
    f.advance(1)
    assert await wishes.now() == []  # the second of those batches: nobody plays while its parameters change
    f.advance(2)
    assert len(await wishes.now()) == 3
    f.close()
    ahead = feed(chosen=2, max_staleness=1)
    wishes = Wishes(ahead)
    assert await wishes.now() == []
    ahead.advance(1)
    assert len(await wishes.now()) == 3  # for iteration 2, one version ahead
    ahead.close()


async def test_closing_ends_the_wishes():
    f = feed()
    got = [r async for r in _closing_after(f, 2)]
    assert len(got) == 2


async def _closing_after(f, count):
    async for request in f.requests():
        yield request
        count -= 1
        if count == 0:
            f.close()
