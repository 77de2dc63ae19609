"""The episode service: a step acts once, whatever arrives twice, late, out of order or after its client died."""

import asyncio

import pytest

from owrl_jax.browser import wire
from owrl_jax.browser.episodes import EpisodeService, ServiceError, ServiceLimits
from owrl_jax.browser.source import NoSandbox
from owrl_jax.outcome import Outcome, Reason
from owrl_jax.types import CallResult, CallStatus, Observation, Screenshot, StepResult, Tab, Task, ToolCall

TASK = Task(id="t", instruction="look", start_url="http://127.0.0.1/")
CLICK = ToolCall(name="click", arguments={"coordinate": [1, 2]})
CANCELLED = Outcome(reason=Reason.CANCELLED, detail="operator")


class Counting:
    """A source of one sandbox that counts what is asked of it; a step takes until the gate opens."""

    def __init__(self):
        self.opened = self.acted = self.closed = 0
        self.outcome: Outcome | None = None
        self.refuse: Outcome | None = None
        self.released = False
        self.gate, self.reset_gate = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.reset_gate.set()

    async def acquire(self, *, wait_s=None):
        if self.refuse:
            raise NoSandbox(self.refuse)
        self.opened += 1
        return self

    async def reset(self, task) -> StepResult:
        await self.reset_gate.wait()
        return self.seen(b"start")

    async def step(self, calls):
        await self.gate.wait()
        self.acted += 1
        return self.seen(b"after %d" % self.acted)

    def seen(self, picture):
        shot = Screenshot(data=picture, width=3, height=2)
        tab = Tab(index=0, url="http://127.0.0.1/", title="é", active=True)
        return StepResult(
            results=(CallResult(name="click", status=CallStatus.OK, feedback="Clicked."),),
            observation=Observation(screenshot=shot, screen_size=(3, 2), tabs=(tab,), changes="+ a"),
        )

    def heartbeat(self):
        return not self.released

    def finish(self, outcome):
        self.outcome = self.outcome or outcome
        return self.outcome

    async def close(self):
        self.closed += 1
        self.released = True


def opening(episode="episode-1", task=TASK):
    return wire.OpenRequest(episode=episode, task=task)


def step(number, nonce="nonce-aaaa"):
    return wire.StepRequest(step=number, nonce=nonce, calls=(CLICK,))


def named(answer: wire.StepAnswer) -> str:
    assert answer.screenshot is not None
    return answer.screenshot.sha256


async def refused(work, status) -> str:
    """The refusal's ending by its key, empty if it carries none."""
    with pytest.raises(ServiceError) as error:
        await work
    assert error.value.status == status, error.value.message
    return error.value.outcome.key if error.value.outcome else ""


def test_a_result_survives_the_wire_and_its_picture_is_checked():
    result = Counting().seen(b"pixels")
    answer, shot = wire.split(result)
    assert b"pixels" not in wire.encode(answer) and shot is not None
    again = wire.msgspec.json.decode(wire.encode(answer), type=wire.StepAnswer)
    assert wire.join(again, shot.data) == result
    for data in (b"other pixels", None):
        with pytest.raises(ValueError, match="screenshot"):
            wire.join(again, data)


async def test_the_same_request_again_gets_the_same_answer_and_does_not_act():
    source = Counting()
    service = EpisodeService(source)
    first = await service.open(opening())
    assert await service.open(opening()) == first and source.opened == 1
    done = await service.step("episode-1", step(0))
    assert await service.step("episode-1", step(0)) == done
    assert (source.acted, service.counts.duplicates) == (1, 2)


async def test_a_duplicate_that_comes_while_the_first_runs_waits_for_it():
    source = Counting()
    service = EpisodeService(source)
    await service.open(opening())
    source.gate.clear()
    twice = [asyncio.create_task(service.step("episode-1", step(0))) for _ in range(3)]
    await asyncio.sleep(0.01)
    twice[0].cancel()  # the client that asked first hangs up: the step goes on
    await asyncio.sleep(0)
    await refused(service.step("episode-1", step(1, "nonce-bbbb")), 409)
    source.gate.set()
    second, third = await asyncio.gather(*twice[1:])
    assert second == third and source.acted == 1


@pytest.mark.parametrize(
    ("number", "nonce", "status"), [(0, "nonce-bbbb", 409), (2, "nonce-bbbb", 409), (1, "short", 400)]
)
async def test_what_is_not_the_next_step_does_not_act(number, nonce, status):
    source = Counting()
    service = EpisodeService(source)
    await service.open(opening())
    await service.step("episode-1", step(0))
    await refused(service.step("episode-1", step(number, nonce)), status)
    assert source.acted == 1


async def test_old_answers_and_pictures_are_forgotten_not_repeated():
    source = Counting()
    service = EpisodeService(source, limits=ServiceLimits(answers=2, screenshots=2))
    start = await service.open(opening())
    answers = [await service.step("episode-1", step(n)) for n in range(4)]
    await refused(service.step("episode-1", step(0)), 410)
    assert await service.step("episode-1", step(3)) == answers[3]
    assert service.screenshot("episode-1", named(answers[3])).data == b"after 4"
    with pytest.raises(ServiceError, match="newest 2"):
        service.screenshot("episode-1", named(start))
    assert source.acted == 4


async def test_an_ended_episode_leaves_its_ending():
    source = Counting()
    service = EpisodeService(source)
    await service.open(opening())
    budget = Outcome(reason=Reason.STEP_BUDGET, detail="max_steps")
    endings = await asyncio.gather(*(service.close("episode-1", budget) for _ in range(3)))
    assert endings == [budget] * 3 and source.closed == 1
    assert await service.close("episode-1", CANCELLED) == budget
    assert await refused(service.step("episode-1", step(0)), 410) == budget.key
    assert await refused(service.open(opening()), 410) == budget.key
    await refused(service.step("episode-9", step(0)), 404)
    await refused(service.close("episode-9"), 404)


async def test_one_id_is_for_one_task():
    service = EpisodeService(Counting())
    await service.open(opening())
    other = Task(id="u", instruction="look", start_url="http://127.0.0.1/")
    await refused(service.open(opening(task=other)), 409)
    await refused(service.open(opening(episode="../../etc")), 400)


async def test_no_place_now_may_be_a_place_later():
    source = Counting()
    service = EpisodeService(source)
    source.refuse = Outcome(reason=Reason.INIT_ERROR, detail="no_capacity", message="full")
    assert await refused(service.open(opening()), 503) == "init_error/no_capacity"
    source.refuse = None
    assert (await service.open(opening())).screenshot is not None and service.live == 1


async def test_a_client_that_fell_silent_is_buried():
    source = Counting()
    service = EpisodeService(source)
    await service.open(opening())
    service.heartbeat("episode-1")
    source.released, source.outcome = True, Outcome(reason=Reason.SANDBOX_ERROR, detail="lease_lost")
    with pytest.raises(ServiceError, match="lease"):
        service.heartbeat("episode-1")
    service.sweep()
    await asyncio.sleep(0.01)
    assert service.live == 0
    assert await refused(service.step("episode-1", step(0)), 410) == "sandbox_error/lease_lost"


@pytest.mark.parametrize("polite", [True, False])
async def test_draining_lets_the_open_ones_finish_or_ends_them(polite):
    source = Counting()
    service = EpisodeService(source)
    await service.open(opening())
    drain = asyncio.create_task(service.drain(5.0 if polite else 0.05))
    await asyncio.sleep(0.01)
    assert await refused(service.open(opening(episode="episode-2")), 503) == "cancelled/shutdown"
    if polite:
        await service.step("episode-1", step(0))
        assert source.acted == 1
        await service.close("episode-1", CANCELLED)
    await asyncio.wait_for(drain, 2)
    assert source.closed == 1 and service.live == 0
    assert source.outcome is not None and source.outcome.detail == ("operator" if polite else "shutdown")


async def test_closing_while_it_opens_leaves_nothing_open():
    source = Counting()
    service = EpisodeService(source)
    source.reset_gate.clear()
    start = asyncio.create_task(service.open(opening()))
    await asyncio.sleep(0.01)
    assert (await service.close("episode-1")).key == "cancelled/operator"
    assert source.closed == 1
    await refused(start, 410)
