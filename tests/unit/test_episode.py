"""The episode loop: one outcome whatever happens, turns kept, budgets, cancelling at every await, the time ledger."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest

from owrl_jax.agent.episode import Episode
from owrl_jax.agent.harness import Budgets, Harness
from owrl_jax.agent.history import HistoryRule
from owrl_jax.agent.parser import write
from owrl_jax.agent.policies import ActorPolicy, OracleActor, RandomActor, ReplayedPolicy, Reply, Script
from owrl_jax.agent.policy import FailureKind, Generation, PolicyFailed, Sampling
from owrl_jax.agent.prompt import PromptStyle
from owrl_jax.outcome import Outcome, Owner, Phase, Reason
from owrl_jax.types import CallStatus, Observation, StepResult, Tab, Trajectory, decode, encode

from .harness_world import PICTURES, MemorySandbox, call, page, shot, task, tokenizer

BACK = Reply(reasoning="I go back.", calls=(call("go_back"),))
DONE = Reply(reasoning="I have it.", calls=(call("done", response="42"),))
STYLE = PromptStyle(system="compact", tools=("click", "write", "done", "go_back"))


def harness(rule: HistoryRule | None = None, **budgets) -> Harness:
    tokens = tokenizer("small")
    return Harness(
        tokens=tokens, picture_rule=PICTURES, style=STYLE, rule=rule, budgets=Budgets(**budgets), viewport=(96, 64)
    )


def episode(replies, sandbox=None, *, setup=None, policy=None, **fields) -> tuple[Episode, MemorySandbox]:
    setup = setup or harness()
    sandbox = sandbox or MemorySandbox()

    async def opened():
        await sandbox._pass("open")
        return sandbox

    policy = policy or ActorPolicy(Script(replies), setup.tokens)
    return Episode(task(), harness=setup, policy=policy, open_sandbox=opened, **fields), sandbox


def sound(played: Episode, sandbox: MemorySandbox) -> Trajectory:
    """What holds for every episode, however it ended."""
    assert played.trajectory is not None and played.trajectory.outcome is played.outcome
    assert sandbox.closed == 1 and sandbox.finished == [played.outcome]
    assert decode(encode(played.trajectory), Trajectory) == played.trajectory
    return played.trajectory


async def test_an_episode_from_start_to_finish():
    seen = []
    setup = harness()
    played, sandbox = episode([BACK, DONE], setup=setup, on_turn=seen.append, group_id="g", index=3)
    trajectory = await played.run()
    assert sound(played, sandbox) is trajectory
    assert trajectory.outcome.key == "completed/answered" and trajectory.answer == "42" and trajectory.valid
    assert (trajectory.group_id, trajectory.index, trajectory.protocol) == ("g", 3, setup.protocol)
    assert sandbox.ran == [(call("go_back"),), (call("done", response="42"),)]
    first, second = trajectory.turns
    assert setup.tokens.decode(first.response_ids) == write("I go back.", BACK.calls) + "<|im_end|>"
    assert first.logprobs == (0.0,) * len(first.response_ids) and set(first.versions) == {-1}
    assert first.screenshot == shot().sha256 and second.screenshot == shot(mark=1).sha256 and first.grid == (4, 6)
    assert "Succeed: go_back." in setup.tokens.decode(second.trunk_ids)
    assert [turn.said for turn in seen] == [setup.tokens.decode(t.response_ids[:-1]) for t in trajectory.turns]
    assert seen[0].observation.active_tab.title == "start" and seen[1].result.answer == "42"


async def test_the_recorded_ids_are_the_prompts_that_were_sampled_from():
    """T12: the trunks' pieces, put together, and the leaf are what the policy was given at each turn."""
    setup, given = harness(), []

    class Watching(ActorPolicy):
        async def generate(self, trunk, leaf, sampling):
            given.append(trunk + leaf.ids)
            return await super().generate(trunk, leaf, sampling)

    policy = Watching(Script([BACK, "no sense", BACK, DONE]), setup.tokens)
    trajectory = await episode([], policy=policy, setup=setup)[0].run()
    trunk: tuple[int, ...] = ()
    for turn, prompt in zip(trajectory.turns, given, strict=True):
        trunk += turn.trunk_ids
        assert trunk + turn.leaf_ids == prompt


async def test_calls_after_done_never_reach_the_sandbox():
    played, sandbox = episode([Reply(reasoning="r", calls=(call("go_back"), *DONE.calls, call("click")))])
    trajectory = await played.run()
    assert sandbox.ran == [(call("go_back"), *DONE.calls)]
    assert [r.status for r in trajectory.turns[0].results] == [CallStatus.OK, CallStatus.OK, CallStatus.SKIPPED]
    assert len(trajectory.turns[0].calls) == len(trajectory.turns[0].results) == 3


async def test_a_refused_call_is_told_and_the_episode_goes_on():
    bad = Reply(reasoning="r", calls=(call("click", point_2d=[1]), call("go_back")))
    played, _ = episode([bad, DONE])
    trajectory = await played.run()
    text = harness().tokens.decode(trajectory.turns[1].trunk_ids)
    assert "Failed: point_2d must be two numbers" in text and "Skipped: not run." in text
    assert trajectory.turns[0].parsed and trajectory.outcome.key == "completed/answered"


# --- What cannot be parsed -----------------------------------------------------------------------------------------


async def test_an_unparsable_turn_shows_the_page_again_without_stepping():
    played, sandbox = episode(["I think I am done.", DONE])
    trajectory = await played.run()
    first, second = trajectory.turns
    assert not first.parsed and first.calls == first.results == () and len(sandbox.ran) == 1
    text = harness().tokens.decode(second.trunk_ids)
    assert text.count("<observation>") == 1 and "Your reasoning was not closed" in text
    assert "- Tab 0 (active): http://a.b/ - start" in text
    assert second.screenshot == first.screenshot
    assert second.leaf_ids.count(tokenizer("small").special.image_pad) == 6


async def test_three_unparsable_turns_in_a_row_end_it():
    played, sandbox = episode(["a", "b", "c", DONE])
    trajectory = await played.run()
    assert trajectory.outcome.key == "format_error/consecutive_parse_failures"
    assert trajectory.outcome.owner is Owner.POLICY and "not closed" in trajectory.outcome.message
    assert len(trajectory.turns) == 3 and sandbox.ran == []
    sound(played, sandbox)


async def test_a_parsed_turn_resets_the_count():
    played, _ = episode(["a", "b", BACK, "c", "d", DONE])
    assert (await played.run()).outcome.key == "completed/answered"


# --- Budgets -------------------------------------------------------------------------------------------------------


async def test_the_horizon():
    played, sandbox = episode([BACK] * 9, setup=harness(max_steps=4))
    trajectory = await played.run()
    assert trajectory.outcome.key == "step_budget/max_steps" and len(trajectory.turns) == 4
    sound(played, sandbox)


async def test_a_response_that_is_cut_is_neither_read_nor_run():
    setup = harness(max_response_tokens=5)
    played, sandbox = episode([DONE], setup=setup)
    trajectory = await played.run()
    assert trajectory.outcome.key == "generation_limit/response_cap" and sandbox.ran == []
    assert len(trajectory.turns[0].response_ids) == 5 and not trajectory.turns[0].parsed
    # R6: no end of turn is put behind what the policy did not write
    assert trajectory.turns[0].response_ids[-1] != setup.tokens.special.im_end


async def test_responses_are_cut_to_what_fits_and_overflow_keeps_the_finished_turns():
    caps = []

    class Watching(ActorPolicy):
        async def generate(self, trunk, leaf, sampling):
            caps.append((len(trunk) + len(leaf.ids), sampling.max_new_tokens))
            return await super().generate(trunk, leaf, sampling)

    roomy = harness()
    lengths = [
        sum(map(len, (t.trunk_ids, t.leaf_ids))) for t in (await episode([BACK, DONE], setup=roomy)[0].run()).turns
    ]
    context = lengths[0] + 150
    setup = harness(max_context_tokens=context, max_response_tokens=120)
    policy = Watching(Script([BACK] * 9), setup.tokens)
    played, sandbox = episode([], policy=policy, setup=setup)
    trajectory = await played.run()
    assert trajectory.outcome.key == "generation_limit/context_overflow" and trajectory.outcome.owner is Owner.POLICY
    assert caps[0][1] == 120 and all(prompt + cap <= context for prompt, cap in caps)
    assert len(trajectory.turns) >= 1 and trajectory.turns[0].results
    sound(played, sandbox)


async def test_a_first_prompt_that_does_not_fit_is_an_outcome_too():
    """R4: no turn at all, and still an ending that can be counted."""
    played, sandbox = episode([DONE], setup=harness(max_context_tokens=50, max_response_tokens=10))
    trajectory = await played.run()
    assert trajectory.outcome.key == "generation_limit/context_overflow" and trajectory.turns == ()
    sound(played, sandbox)


# --- Faults of others ----------------------------------------------------------------------------------------------


class Failing:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def generate(self, trunk, leaf, sampling) -> Generation:
        await asyncio.sleep(0)
        raise self.error


@pytest.mark.parametrize(
    ("error", "key", "owner", "retryable"),
    [
        (PolicyFailed(FailureKind.UNAVAILABLE, "down"), "sandbox_error/policy_unavailable", Owner.SANDBOX, True),
        (PolicyFailed(FailureKind.REJECTED, "no"), "sandbox_error/policy_unavailable", Owner.SANDBOX, False),
        (PolicyFailed(FailureKind.BUDGET, "broke"), "cancelled/budget", Owner.OPERATOR, False),
        (PolicyFailed(FailureKind.EXHAUSTED, "end"), "cancelled/operator", Owner.OPERATOR, False),
        (ZeroDivisionError("bug"), "sandbox_error/unknown", Owner.ENV, True),
        (TimeoutError("of its own"), "sandbox_error/unknown", Owner.ENV, True),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_a_policy_that_fails_is_not_learned_from(error, key, owner, retryable):
    played, sandbox = episode([], policy=Failing(error))
    trajectory = await played.run()
    ended = trajectory.outcome
    assert (ended.key, ended.owner, ended.retryable, ended.phase) == (key, owner, retryable, Phase.GENERATE)
    assert not trajectory.valid
    sound(played, sandbox)


async def test_a_policy_that_is_silent_is_unavailable():
    class Silent:
        async def generate(self, trunk, leaf, sampling):
            await asyncio.Event().wait()

    played, sandbox = episode([], policy=Silent(), generate_s=0.01)
    assert (await played.run()).outcome.key == "sandbox_error/policy_unavailable"
    sound(played, sandbox)


async def test_a_placeholder_in_a_response_is_the_engines_fault():
    setup = harness()
    ids = (setup.tokens.special.image_pad, setup.tokens.special.im_end)

    class Blind:
        async def generate(self, trunk, leaf, sampling):
            return Generation(ids=ids, logprobs=(0.0, 0.0), versions=(1, 1))

    played, _ = episode([], policy=Blind(), setup=setup)
    assert (await played.run()).outcome.key == "sandbox_error/policy_unavailable"


CRASH = Outcome(reason=Reason.SANDBOX_ERROR, detail="renderer_crash")
BLOCK = Outcome(reason=Reason.BLOCKED, detail="captcha")


@pytest.mark.parametrize(
    ("last", "key"),
    [
        (StepResult(results=(), observation=None, outcome=CRASH), "sandbox_error/renderer_crash"),
        (StepResult(results=(), observation=page(), outcome=BLOCK), "blocked/captcha"),
        (StepResult(results=(), observation=None), "sandbox_error/unknown"),
    ],
    ids=["crash", "block", "nothing"],
)
async def test_the_sandbox_ends_it(last, key):
    played, sandbox = episode([BACK] * 9, MemorySandbox(last=last, steps=2))
    trajectory = await played.run()
    assert trajectory.outcome.key == key and len(trajectory.turns) == 2 and not trajectory.valid
    sound(played, sandbox)


@pytest.mark.parametrize("phase", ["reset", "step", "close"])
async def test_an_exception_of_the_sandbox_is_caught(phase, caplog):
    def gate(at):
        if at == phase:
            raise OSError("broken")

    played, sandbox = episode([BACK, DONE], MemorySandbox(gate))
    trajectory = await played.run()
    assert trajectory.outcome.key == ("completed/answered" if phase == "close" else "sandbox_error/unknown")
    assert len(sandbox.finished) == 1 and "broken" in caplog.text


async def test_no_sandbox_to_be_had():
    class NoSandbox(Exception):
        outcome = Outcome(reason=Reason.INIT_ERROR, detail="no_capacity", phase=Phase.QUEUE)

    async def opened():
        raise NoSandbox

    setup = harness()
    played = Episode(task(), harness=setup, policy=ActorPolicy(Script([]), setup.tokens), open_sandbox=opened)
    assert (await played.run()).outcome == NoSandbox.outcome


async def test_a_screenshot_that_cannot_be_shown():
    class Thin(MemorySandbox):
        async def reset(self, task):
            tab = Tab(index=0, url="u", title="t", active=True)
            seen = Observation(screenshot=shot(2, 900), screen_size=(2, 900), tabs=(tab,))
            return StepResult(results=(), observation=seen)

    played, sandbox = episode([DONE], Thin())
    assert (await played.run()).outcome.key == "sandbox_error/capture_failed"
    sound(played, sandbox)


# --- Cancelling ----------------------------------------------------------------------------------------------------


class Pausing(ActorPolicy):
    async def generate(self, trunk, leaf, sampling):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return await super().generate(trunk, leaf, sampling)


def slow_episode() -> tuple[Episode, MemorySandbox]:
    setup = harness()
    return episode([], setup=setup, policy=Pausing(Script([BACK, "x", BACK, DONE]), setup.tokens))


async def waits() -> int:
    """How many turns of the event loop a whole episode of four turns takes."""
    played, _ = slow_episode()
    running = asyncio.create_task(played.run())
    for n in itertools.count():
        if running.done():
            return n
        await asyncio.sleep(0)
    raise AssertionError


@pytest.mark.parametrize("asked", [True, False], ids=["asked of the episode", "task cancelled"])
async def test_cancelled_at_any_await_there_is_one_outcome_and_the_sandbox_is_closed(asked):
    """T24: at every single point, asked twice."""
    total = await waits()
    assert total > 20
    endings = set()
    for at in range(total):
        played, sandbox = slow_episode()
        running = asyncio.create_task(played.run())
        for _ in range(at):
            await asyncio.sleep(0)
        for _ in range(2):
            if asked:
                played.cancel("surplus")
            else:
                running.cancel()
        try:
            trajectory = await running
        except asyncio.CancelledError:
            trajectory = played.trajectory
            if trajectory is None:
                assert not asked and at == 0  # cancelled before it began
                continue
        for _ in range(4):  # the closing goes on by itself
            await asyncio.sleep(0)
        endings.add(trajectory.outcome.key)
        assert trajectory is played.trajectory and trajectory.outcome is played.outcome
        assert sandbox.finished in ([], [played.outcome])
        assert sandbox.closed == len(sandbox.finished)  # once opened, closed; never opened, never closed
        if trajectory.outcome.reason is Reason.CANCELLED:
            assert len(trajectory.turns) <= len(sandbox.ran) + 1
    assert endings == {"cancelled/surplus" if asked else "cancelled/operator", "completed/answered"}


async def test_a_policy_that_swallows_the_cancellation_does_not_keep_the_episode_alive():
    class Deaf(Pausing):
        async def generate(self, trunk, leaf, sampling):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(9)
            return await ActorPolicy.generate(self, trunk, leaf, sampling)

    setup = harness()
    played, sandbox = episode([], setup=setup, policy=Deaf(Script([BACK] * 9), setup.tokens))
    running = asyncio.create_task(played.run())
    await asyncio.sleep(0.05)
    played.cancel("surplus")
    assert (await asyncio.wait_for(running, 5)).outcome.key == "cancelled/surplus"
    sound(played, sandbox)


async def test_turns_finished_before_a_cancel_are_kept():
    reached = asyncio.Event()

    def gate(phase):
        if phase == "step" and len(sandbox.ran) == 2:
            reached.set()
            return asyncio.sleep(9)
        return None

    played, sandbox = episode([BACK] * 5, sandbox := MemorySandbox(gate))
    running = asyncio.create_task(played.run())
    await reached.wait()
    played.cancel("shutdown")
    trajectory = await running
    assert trajectory.outcome.key == "cancelled/shutdown" and trajectory.outcome.phase is Phase.STEP
    assert len(trajectory.turns) == 2
    with pytest.raises(ValueError, match="does not belong"):
        played.cancel("whim")


async def test_the_deadline_of_an_episode():
    def gate(phase):
        return asyncio.sleep(9) if phase == "step" and sandbox.ran else None

    played, sandbox = episode([BACK] * 5, sandbox := MemorySandbox(gate), deadline_s=0.2)
    trajectory = await played.run()
    assert trajectory.outcome.key == "cancelled/deadline" and len(trajectory.turns) == 1
    sound(played, sandbox)


async def test_an_episode_is_played_once():
    played, _ = episode([DONE])
    await played.run()
    with pytest.raises(RuntimeError, match="once"):
        await played.run()


# --- The ledger ----------------------------------------------------------------------------------------------------


async def test_every_millisecond_belongs_to_one_phase():
    """With a clock that ticks once per look, the phases and `other` add up to the whole, and nothing counts twice."""
    ticks = itertools.count()
    played, _ = episode([BACK, DONE], clock=lambda: float(next(ticks)))
    trajectory = await played.run()
    spent = trajectory.timings_ms
    phases = ("queue", "reset", "prompt", "generate", "parse", "step", "release")
    assert set(phases) | {"other", "total"} == {name for name in spent if "." not in name}
    assert sum(spent[p] for p in (*phases, "other")) == spent["total"]
    assert {n: ms for n, ms in spent.items() if "." in n} == {
        "reset.open": 2.0,
        "reset.capture": 1.0,
        "step.act": 6.0,
        "step.settle": 8.0,
        "step.capture": 10.0,
    }
    assert trajectory.turns[0].timings_ms["step.settle"] == 4.0
    assert set(trajectory.turns[1].timings_ms) >= {"prompt", "generate", "parse", "step"}


# --- Policies ------------------------------------------------------------------------------------------------------


async def test_a_random_policy_makes_valid_calls_and_repeats_itself():
    setup = Harness(tokens=tokenizer("small"), picture_rule=PICTURES, viewport=(96, 64), budgets=Budgets(max_steps=40))
    runs = []
    for _ in range(2):
        played, sandbox = episode([], setup=setup, policy=ActorPolicy(RandomActor(seed=7), setup.tokens))
        trajectory = await played.run()
        assert all(
            r.status is CallStatus.OK for t in trajectory.turns for r in t.results if t.calls[0].name != "goto_url"
        )
        runs.append(sandbox.ran)
    assert runs[0] == runs[1] and len(runs[0]) > 1


async def test_a_replayed_policy_gives_the_same_episode():
    setup = harness()
    original = await episode([BACK, "x", DONE], setup=setup)[0].run()
    again = await episode([], setup=setup, policy=ReplayedPolicy(original))[0].run()
    assert [t.response_ids for t in again.turns] == [t.response_ids for t in original.turns]
    assert [t.leaf_ids for t in again.turns] == [t.leaf_ids for t in original.turns]
    assert again.outcome.key == original.outcome.key


async def test_an_oracle_speaks_through_the_same_parser_and_sees_what_came_of_its_calls():
    seen = []

    class Solver:
        async def act(self, probe, last):
            seen.append((probe, last and [r.feedback for r in last.results]))
            return ("I go back.", [call("go_back")]) if last is None else ("Done.", list(DONE.calls))

    setup = harness()
    sandbox = MemorySandbox()
    actor = OracleActor(Solver(), lambda given: ("probe of", given))
    played, _ = episode([], sandbox, setup=setup, policy=ActorPolicy(actor, setup.tokens))
    assert (await played.run()).answer == "42"
    assert seen == [(("probe of", sandbox), None), (("probe of", sandbox), ["Succeed: go_back."])]


async def test_seeds_differ_by_member_and_turn_and_repeat():
    async def seeds(**fields):
        found = []

        class Watching(ActorPolicy):
            async def generate(self, trunk, leaf, sampling):
                found.append(sampling.seed)
                return await super().generate(trunk, leaf, sampling)

        setup = harness()
        policy = Watching(Script([BACK, BACK, DONE]), setup.tokens)
        await episode([], setup=setup, policy=policy, **fields)[0].run()
        return found

    one, same, sibling = await seeds(index=0), await seeds(index=0), await seeds(index=1)
    other = await seeds(index=0, sampling=Sampling(max_new_tokens=9, seed=5))
    assert one == same and len({*one, *sibling, *other}) == 9


async def test_the_task_may_be_told_by_the_page():
    played, _ = episode([DONE], instruction=lambda: "Click the button named OK.")
    trajectory = await played.run()
    assert trajectory.task.instruction == "Click the button named OK."
    assert "Click the button named OK." in harness().tokens.decode(trajectory.turns[0].trunk_ids)


@pytest.mark.parametrize("rule", [HistoryRule(screenshots=2), HistoryRule(reasoning="hide_thinking")], ids=str)
async def test_plain_rules_put_the_whole_prompt_into_the_leaf(rule):
    setup = harness(rule)
    trajectory = await episode([BACK, BACK, DONE], setup=setup)[0].run()
    assert all(turn.trunk_ids == () for turn in trajectory.turns)
    assert setup.tokens.decode(trajectory.turns[2].leaf_ids).count("<observation>") == 3
