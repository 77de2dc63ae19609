"""Groups of episodes: each wish ends in one group, faults are played again and never count, limits hold."""

import asyncio
import itertools

import pytest

from owrl_jax.agent.harness import Harness
from owrl_jax.agent.policies import ActorPolicy, Reply, Script
from owrl_jax.agent.policy import FailureKind, PolicyFailed, Sampling
from owrl_jax.browser.source import NoSandbox
from owrl_jax.outcome import Outcome, Phase, Reason
from owrl_jax.pool.journal import Journal
from owrl_jax.pool.rollout import LocalPool, RolloutLimits, WorldPlaces
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.types import GroupRequest, StepResult, Task, Verdict, VerdictValue
from owrl_jax.worlds import WorldServer, make_task

from .harness_world import PICTURES, MemorySandbox, call, tokenizer

SCRIPT = (
    Reply(reasoning="look", calls=(call("wait", seconds=1),)),
    Reply(reasoning="end", calls=(call("done", response="42"),)),
)
FAULT = Outcome(reason=Reason.SANDBOX_ERROR, detail="renderer_crash")


class Source:
    """Hands out memory sandboxes; `faults` says which attempt, in order of asking, breaks and how."""

    def __init__(self, faults=None, gate=None):
        self.faults, self.gate = faults or (lambda n: None), gate
        self.asked = itertools.count()
        self.open = self.most = 0
        self.sandboxes = []

    async def acquire(self, *, wait_s=None):
        fault = self.faults(next(self.asked))
        if isinstance(fault, Exception):
            raise fault
        source = self

        class Counted(MemorySandbox):
            async def close(self):
                await super().close()
                source.open -= 1

        self.open += 1
        self.most = max(self.most, self.open)
        last = StepResult(results=(), observation=None, outcome=fault) if fault else None
        sandbox = Counted(gate=self.gate, last=last, steps=1)
        self.sandboxes.append(sandbox)
        return sandbox


def harness():
    return Harness(tokens=tokenizer("small"), picture_rule=PICTURES)


def pool(source, tmp_path=None, *, script=SCRIPT, limits=None, **fields):
    tokens = tokenizer("small")
    if tmp_path is not None:
        fields |= {"journal": Journal(tmp_path / "j.jsonl"), "screenshots": ScreenshotStore(tmp_path / "shots")}
    return LocalPool(
        harness=harness(),
        policy_of=lambda place: ActorPolicy(Script(script), tokens),
        sandboxes=source,
        places=WorldPlaces(),
        sampling=Sampling(max_new_tokens=200),
        limits=limits or RolloutLimits(max_episodes=3, retry_wait_s=0.001),
        **fields,
    )


async def wishes(count, n=2, note=None):
    for number in range(count):
        if note is not None:
            note.append(number)
        yield GroupRequest(
            task=Task(id=f"t{number}", instruction="go", start_url="http://a.b/"), group_id=f"g{number}", n=n
        )


async def test_every_wish_ends_in_one_group_and_all_of_it_is_in_the_journal(tmp_path):
    source = Source()
    playing = pool(source, tmp_path, version=lambda: 5)
    groups = [group async for group in playing.run(wishes(7))]
    assert sorted(g.request.group_id for g in groups) == [f"g{n}" for n in range(7)]
    assert all(len(g.valid) == 2 and [t.index for t in g.trajectories] == [0, 1] for g in groups)
    assert source.most <= 3 and source.open == 0
    assert playing.live.running == 0 and playing.live.finished == {"completed/answered": 14}
    with Journal(tmp_path / "j.jsonl", readonly=True) as journal:
        assert len(journal) == 14 and len(journal.group_ids) == 7 and journal.version_of("g3") == 5
        for group in groups:
            assert journal.group(group.request.group_id) == group
    store = ScreenshotStore(tmp_path / "shots")
    for group in groups:
        for trajectory in group.trajectories:
            assert trajectory.answer == "42" and trajectory.turns[0].screenshot
            assert all(
                (name or "") in store
                for name in [trajectory.final_screenshot, *(t.screenshot for t in trajectory.turns)]
            )


async def test_faults_are_played_again_and_never_counted():
    # The first attempt of either member breaks, the second is fine.
    source = Source(faults=lambda n: FAULT if n < 2 else None)
    playing = pool(source)
    (group,) = [group async for group in playing.run(wishes(1))]
    assert len(group.valid) == 2 and playing.live.retried == 2
    assert playing.live.finished == {"sandbox_error/renderer_crash": 2, "completed/answered": 2}


async def test_a_poisoned_task_uses_up_its_attempts_and_no_more(tmp_path):
    source = Source(faults=lambda n: FAULT)
    playing = pool(
        source, tmp_path, limits=RolloutLimits(max_episodes=2, retries=3, group_retries=4, retry_wait_s=0.001)
    )
    (group,) = [group async for group in playing.run(wishes(1))]
    assert group.valid == () and len(group.trajectories) == 2
    assert len(source.sandboxes) == 2 + 4  # each member once, and four more attempts between them
    with Journal(tmp_path / "j.jsonl", readonly=True) as journal:
        assert [entry.reason for entry in journal.entries() if entry.kind == "group"] == ["given_up"]
        attempts = [(e.trajectory.index, e.attempt) for e in journal.entries() if e.kind == "trajectory"]
        assert len(attempts) == len(set(attempts)) == 6


@pytest.mark.parametrize(
    ("fault", "again"),
    [
        (NoSandbox(Outcome(reason=Reason.INIT_ERROR, detail="no_capacity", owner="sandbox", phase=Phase.QUEUE)), True),
        (NoSandbox(Outcome(reason=Reason.INIT_ERROR, detail="browser_missing", owner="operator")), False),
        (Outcome(reason=Reason.ENVIRONMENT_ERROR, detail="http_4xx"), False),
        (Outcome(reason=Reason.STEP_BUDGET, detail="loop_truncated"), False),  # the policy's own: final, and valid
    ],
)
async def test_only_what_may_pass_is_tried_again(fault, again):
    source = Source(faults=lambda n: fault)
    (group,) = [g async for g in pool(source, limits=RolloutLimits(retries=1, retry_wait_s=0.001)).run(wishes(1, n=1))]
    assert next(source.asked) == 1 + again
    assert bool(group.valid) == (isinstance(fault, Outcome) and fault.trains)


async def test_an_engine_that_is_down_makes_no_zeros():
    class Down:
        async def generate(self, trunk, leaf, sampling):
            raise PolicyFailed(FailureKind.UNAVAILABLE, "engine is restarting")

    playing = pool(Source())
    playing._policy_of = lambda place: Down()
    (group,) = [g async for g in playing.run(wishes(1))]
    assert group.valid == () and playing.live.finished == {"sandbox_error/policy_unavailable": 6}


async def test_wishes_are_pulled_late_and_groups_are_finished_in_order():
    note, began = [], []
    source = Source(gate=lambda phase: began.append(phase))
    playing = pool(source, limits=RolloutLimits(max_episodes=2))
    pulled_at_first = 0
    async for _ in playing.run(wishes(6, n=2, note=note)):
        pulled_at_first = pulled_at_first or len(note)
    assert pulled_at_first <= 2  # two places: the second wish at most, the moment a sibling of the first is done
    assert note == list(range(6))


async def test_leaving_early_gives_every_sandbox_back():
    source = Source()
    playing = pool(source)
    running = playing.run(wishes(100))
    async for _ in running:
        break
    await running.aclose()
    await asyncio.sleep(0.05)
    assert source.open == 0 and playing.live.running == 0
    assert all(sandbox.closed == 1 for sandbox in source.sandboxes)


async def test_an_error_in_the_wishes_or_the_journal_ends_the_run_with_it(tmp_path):
    async def broken():
        async for request in wishes(1):
            yield request
        raise KeyError("no more tasks like that")

    source = Source()
    with pytest.raises(KeyError, match="no more tasks"):
        async for _ in pool(source).run(broken()):
            pass
    assert source.open == 0

    playing = pool(source, tmp_path)
    playing._journal.add_trajectory = lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space"):
        async for _ in playing.run(wishes(5)):
            pass
    assert source.open == 0


async def test_the_judge_is_told_what_a_program_said_and_has_the_last_word(tmp_path):
    asked = []

    async def judge(trajectory):
        asked.append(trajectory)
        if trajectory.verdict is not None:
            return trajectory.verdict
        assert (trajectory.final_screenshot or "") in ScreenshotStore(
            tmp_path / "shots"
        )  # evidence is there before the question
        return Verdict(value=VerdictValue.INVALID, judge="down")

    (group,) = [g async for g in pool(Source(), tmp_path, judge=judge).run(wishes(1, n=1))]
    assert len(asked) == 1 and group.trajectories[0].verdict.judge == "down" and group.valid == ()

    async with WorldServer() as worlds:
        playing = pool(Source(), judge=judge)
        playing._places = WorldPlaces(worlds)

        async def one():
            yield GroupRequest(task=make_task("starter", "pair_colour", 1), group_id="w", n=1)

        (group,) = [g async for g in playing.run(one())]
        assert len(asked) == 2 and asked[1].verdict.judge == "program:starter/pair_colour"
        assert group.trajectories[0].verdict.value == VerdictValue.FAILURE  # nothing was clicked
        assert "_e/" not in group.trajectories[0].task.start_url and not worlds._visits


async def test_a_check_that_falls_over_cannot_tell_and_ends_nothing(tmp_path):
    class Broken:
        """A place whose program divides by zero."""

        def __init__(self, task):
            self.task, self.instruction = task, task.instruction

        def verdict(self, said):
            raise ZeroDivisionError(said)

    class Places:
        async def open(self, task):
            return Broken(task)

        def close(self, place):
            pass

    playing = pool(Source(), tmp_path)
    playing._places = Places()
    groups = [group async for group in playing.run(wishes(2))]
    assert len(groups) == 2 and all(g.valid == () for g in groups)
    for trajectory in (t for group in groups for t in group.trajectories):
        assert trajectory.outcome.key == "completed/answered" and trajectory.verdict.value == VerdictValue.INVALID
        assert "ZeroDivisionError: 42" in trajectory.verdict.rationale
    with Journal(tmp_path / "j.jsonl", readonly=True) as journal:
        assert len(journal) == 4 and len(journal.group_ids) == 2
