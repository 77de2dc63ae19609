"""The judge of a run against real HTTP: who decides, what is compared, a judge that is down, a limit, a drift."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest

from owrl_jax.agent.harness import Budgets, Harness
from owrl_jax.agent.policies import ActorPolicy, Reply, Script
from owrl_jax.agent.policy import Sampling
from owrl_jax.config import ConfigError, EndpointSettings, JudgeSettings, RlSettings
from owrl_jax.judge.panel import Tally, judge_of
from owrl_jax.judge.protocol import JudgingStopped
from owrl_jax.obs.metric_names import undocumented
from owrl_jax.pool.journal import Journal
from owrl_jax.pool.rollout import LocalPool, RolloutLimits, WorldPlaces
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.rl.advantage import score
from owrl_jax.types import GroupRequest, StepResult, Task, VerdictValue
from owrl_jax.worlds import WorldServer, make_task

from .fake_endpoint import chat_answer, fake_endpoint
from .harness_world import PICTURES, MemorySandbox, call, tokenizer
from .judge_world import picture

S, F, I = VerdictValue.SUCCESS, VerdictValue.FAILURE, VerdictValue.INVALID  # noqa: E741
YES, NO = chat_answer("Verdict: SUCCESS"), chat_answer("Verdict: NOT SUCCESS")
DOWN = b"503 Busy\r\n\r\n"


class Seen(MemorySandbox):
    """Its pages have pictures that a judge can open."""

    async def reset(self, task: Task) -> StepResult:
        return self._drawn(await super().reset(task), 0)

    async def step(self, calls):
        return self._drawn(await super().step(calls), len(self.ran))

    def _drawn(self, result: StepResult, mark: int) -> StepResult:
        assert result.observation is not None
        return dataclasses.replace(
            result, observation=dataclasses.replace(result.observation, screenshot=picture(mark))
        )


class Source:
    async def acquire(self, *, wait_s=None):
        return Seen()


def settings(url, second="", **fields):
    base = {"kind": "rubric", "coded": False, "concurrency": 2}
    ends = {"endpoint": EndpointSettings(url=url, model="m", attempts=1)}
    if second:
        ends["second"] = EndpointSettings(url=second, model="held-out", attempts=1)
    return JudgeSettings(**{**base, **ends, **fields})


@contextlib.asynccontextmanager
async def playing(folder, judged, tally, *, worlds=None, episodes=2, harness=None, measuring=False):
    """A pool that asks the judge of these settings, with everything kept in a folder."""
    tokens, store = tokenizer("small"), ScreenshotStore(folder / "screenshots")
    script = (
        Reply(reasoning="look", calls=(call("wait", seconds=1),)),
        Reply(reasoning="end", calls=(call("done", response="42"),)),
    )
    panel = judge_of(judged, folder / "judge", store.get)
    assert panel is not None
    async with panel:
        with Journal(folder / "j.jsonl") as journal:
            yield LocalPool(
                harness=harness or Harness(tokens=tokens, picture_rule=PICTURES),
                policy_of=lambda place: ActorPolicy(Script(script), tokens),
                sandboxes=Source(),
                places=WorldPlaces(worlds),
                sampling=Sampling(max_new_tokens=200),
                limits=RolloutLimits(max_episodes=episodes, retry_wait_s=0.001),
                journal=journal,
                screenshots=store,
                judge=panel.call(tally, measuring=measuring),
                version=lambda: 0,
            )


async def wishes(count, n=2, start=0, task=None):
    for number in range(start, start + count):
        shown = task or Task(id=f"t{number}", instruction="go", start_url="http://a.b/")
        yield GroupRequest(task=shown, group_id=f"g{number}", n=n)


async def play(pool, *asked, **fields):
    return [group async for group in pool.run(wishes(*asked, **fields))]


async def test_the_models_word_is_learned_and_a_held_out_judge_sees_a_share(tmp_path):
    tally = Tally()
    async with (
        fake_endpoint(YES, NO) as (first, url),
        fake_endpoint(YES) as (second, other),
        playing(tmp_path, settings(url, other, second_share=1.0), tally, episodes=1) as pool,
    ):
        (group,) = await play(pool, 1, n=4)
    assert [t.verdict.value for t in group.trajectories] == [S, F, F, F]
    kinds = [part["type"] for part in first.requests[0]["messages"][1]["content"]]
    assert kinds.count("image_url") == 3  # two turns, and the page after the last one
    assert len(second.requests) == 4 and second.requests[0]["model"] == "held-out"
    scored = score([group], RlSettings(group_size=4))
    assert [s.reward for s in scored.samples] == [1.0, 0.0, 0.0, 0.0]
    numbers = tally.take()
    assert (numbers["judge/verdicts_success"], numbers["judge/verdicts_failure"]) == (1, 3)
    # Against a held-out judge that says yes four times: one hit, three misses.
    assert numbers["judge/second_agreement_share_per_verdict"] == 0.25
    assert numbers["judge/second_precision_share_per_verdict"] == 1.0
    assert numbers["judge/second_recall_share_per_verdict"] == 0.25
    assert numbers["judge/second_f1_per_verdict"] == pytest.approx(0.4)
    assert undocumented(numbers) == [] and tally.take() == {}
    lines = [json.loads(line) for line in (tmp_path / "judge" / "compared.jsonl").read_text().splitlines()]
    assert [(line["index"], line["value"], line["other_value"]) for line in lines] == [
        (0, "success", "success"), (1, "failure", "success"), (2, "failure", "success"), (3, "failure", "success")
    ]  # fmt: skip


async def test_a_judge_that_is_down_teaches_no_zeros_and_is_taken_up_when_it_is_back(tmp_path):
    tally = Tally()
    async with fake_endpoint(DOWN) as (server, url), playing(tmp_path, settings(url), tally) as pool:
        (group,) = await play(pool, 1)
        assert [t.verdict.value for t in group.trajectories] == [I, I] and group.valid == ()
        scored = score([group], RlSettings(group_size=2))
        assert scored.samples == () and not scored.rewards and scored.dropped
        assert tally.take() == {
            "judge/verdicts_success": 0, "judge/verdicts_failure": 0, "judge/verdicts_invalid": 2
        }  # fmt: skip
        server.answers[:] = [YES]
        (group,) = await play(pool, 1, start=1)
        assert len(group.valid) == 2
        server.answers[:] = [NO, DOWN]  # half of a group: the other half is no contrast to learn from
        (group,) = await play(pool, 1, start=2)
        assert len(group.valid) == 1 and score([group], RlSettings(group_size=2)).samples == ()


async def test_the_limit_ends_the_pool_with_every_finished_episode_in_the_journal(tmp_path):
    async with fake_endpoint(YES) as (server, url):
        judged = settings(url, max_calls=3)
        async with playing(tmp_path, judged, Tally()) as pool:
            with pytest.raises(JudgingStopped, match="limit of 3 calls"):
                await play(pool, 9)
        assert 2 <= len(server.requests) <= 3  # the last one may be cut short by the one that is refused
        with Journal(tmp_path / "j.jsonl", readonly=True) as journal:
            kept = [e.trajectory for e in journal.entries() if e.trajectory is not None]
            assert journal.torn_bytes == 0
        verdicts = [t.verdict and t.verdict.value for t in kept]
        assert len(kept) == sum(pool.live.finished.values()) > 2  # whatever ended, judged or not
        assert set(verdicts) == {S, None} and verdicts.count(S) >= 2
        # More money, the same folder: it goes on, and what was spent stays spent.
        async with playing(tmp_path, dataclasses.replace(judged, max_calls=5), Tally()) as pool:
            assert len((await play(pool, 1, start=20))[0].valid) == 2
            with pytest.raises(JudgingStopped, match="limit of 5 calls"):
                await play(pool, 1, start=21)
        assert len(server.requests) <= 5


@pytest.mark.parametrize(
    ("programs", "measuring", "judge", "value"),
    [("decide", False, "program:starter", F), ("compare", False, "m", S), ("compare", True, "program:starter", F)],
)
async def test_where_a_program_knows_it_decides_or_says_how_good_the_model_is(
    tmp_path, programs, measuring, judge, value
):
    tally = Tally()
    judged = {"programs": programs, "compared_share": 1.0}
    async with (
        WorldServer() as worlds,
        fake_endpoint(YES) as (server, url),
        playing(tmp_path, settings(url, **judged), tally, worlds=worlds, measuring=measuring) as pool,
    ):
        (group,) = await play(pool, 1, n=3, task=make_task("starter", "pair_colour", 1))
    assert len(server.requests) == 3  # nothing was clicked, so the program says failure to what the model calls success
    assert {(t.verdict.judge.split("/")[0], t.verdict.value) for t in group.trajectories} == {(judge, value)}
    assert "judge against program, as the truth" in tally.lines()
    numbers = tally.take()
    assert numbers["judge/agreement_share_per_verdict"] == 0 and numbers["judge/compared_verdicts"] == 3
    assert numbers["judge/precision_share_per_verdict"] == 0 and "judge/recall_share_per_verdict" not in numbers
    assert numbers[f"judge/verdicts_{value.value}"] == 3


async def test_programs_that_decide_cost_no_call_unless_they_are_compared(tmp_path):
    async with (
        WorldServer() as worlds,
        fake_endpoint(YES) as (server, url),
        playing(tmp_path, settings(url), Tally(), worlds=worlds) as pool,
    ):
        await play(pool, 1, task=make_task("starter", "pair_colour", 1))
        assert server.requests == []


async def test_the_alarm_rings_where_the_judge_became_kinder_than_the_held_out_one(tmp_path, caplog):
    tally = Tally()
    async with (
        fake_endpoint(YES) as (_, url),
        fake_endpoint(NO) as (_, other),
        playing(tmp_path, settings(url, other, second_share=1.0, drift_window=8), tally) as pool,
    ):
        await play(pool, 4)
    # Eight episodes, all parted to the same side: p = 2^-8.
    (seen,) = tally.drifts
    assert seen.alarm and seen.p == 2**-8 and seen.gap == 1.0
    assert "ALARM" in caplog.text
    numbers = tally.take()
    assert (numbers["judge/drift"], numbers["judge/drift_gap_share"]) == (1.0, 1.0)


async def test_the_horizon_of_a_group_is_that_of_the_version_it_began_with(tmp_path):
    def harness(version):
        return Harness(tokens=tokenizer("small"), picture_rule=PICTURES, budgets=Budgets(max_steps=1 + version))

    async with fake_endpoint(YES) as (_, url), playing(tmp_path, settings(url), Tally(), harness=harness) as pool:
        (short,) = await play(pool, 1)
        pool._version = lambda: 1
        (long,) = await play(pool, 1, start=1)
    assert {(t.outcome.key, len(t.turns)) for t in short.trajectories} == {("step_budget/max_steps", 1)}
    assert {(t.outcome.key, len(t.turns)) for t in long.trajectories} == {("completed/answered", 2)}


def test_keys_come_from_the_environment_and_are_shown_nowhere(tmp_path):
    asked = JudgeSettings(
        kind="rubric", endpoint=EndpointSettings(url="http://127.0.0.1:9/v1", model="m", key_env="JUDGE_KEY")
    )
    with pytest.raises(ConfigError, match=r"judge\.endpoint\.key_env names JUDGE_KEY, and there is no such"):
        judge_of(asked, tmp_path, {}.__getitem__, environment={})
    panel = judge_of(asked, tmp_path, {}.__getitem__, environment={"JUDGE_KEY": "sk-12"})
    assert panel is not None and "sk-12" not in repr(panel._chats[0].endpoint)
    assert judge_of(JudgeSettings(), tmp_path, {}.__getitem__) is None
    with pytest.raises(ConfigError) as caught:
        EndpointSettings(url="http://a/v1", model="m", key_env="sk-live-12")
    assert "never the key" in str(caught.value) and "sk-live" not in str(caught.value)
