"""The engine gives what the full forward pass gives, whatever the company, the chunks, the caches and the pressure."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from owrl_jax.agent.policy import FailureKind, Leaf, Picture, PolicyFailed, Sampling
from owrl_jax.engine import errors
from owrl_jax.engine.engine import Engine
from owrl_jax.types import Screenshot
from tests.equivalence.engine_world import (
    CONFIG,
    END,
    IMAGE,
    PROCESSOR,
    SETTINGS,
    SPECIAL,
    VIDEO,
    assert_greedy,
    assert_logprobs,
    full_logits,
    params,
    png,
    request,
)  # fmt: skip

WEIGHTS, OTHERS = params(0), params(1)


def make(**changes) -> Engine:
    return Engine(CONFIG, processor=PROCESSOR, special=SPECIAL, settings=dataclasses.replace(SETTINGS, **changes))


@pytest.fixture(scope="module")
def shared():
    with make() as engine:
        yield engine


@pytest.fixture
def engine(shared):
    """One engine for all tests, with caches emptied by a new version of the same weights."""
    shared.publish(shared.version + 1, WEIGHTS)
    yield shared
    deadline = time.monotonic() + 20
    while (shared._scheduler.sessions() or shared.stats().waiting_now) and time.monotonic() < deadline:
        time.sleep(0.01)  # some may still be on their way in
    shared._scheduler.check()
    assert not shared._scheduler.running and shared.stats().waiting_now == 0
    assert shared.stats().recompiles == 0 and shared.stats().device_failures == 0


def ask(engine: Engine, *requests, timeout: float = 120):
    futures = [engine.submit(r) for r in requests]
    return [f.result(timeout) for f in futures]


MIX = [
    request(1, 30),
    request(2, 5, png(1), 11),
    request(3, 9, png(2, 32, 64), 3, png(1), 20),
    request(4, png(3), png(1, 64, 96), 17, png(4), 2),
    request(5, 90),
    request(6, 1),
    request(7, 40, png(5, 64, 96), 30, new=50),
]


def test_greedy_equals_the_full_forward_pass_alone_and_in_company(engine):
    alone = [ask(engine, r)[0] for r in MIX[:4]]
    engine.publish(engine.version + 1, WEIGHTS)
    together = ask(engine, *MIX)
    for asked, got in zip(MIX, together, strict=True):
        assert_greedy(WEIGHTS, asked, got)
        assert got.finish == "length" and len(got.ids) == asked.sampling.max_new_tokens
    assert [g.ids for g in alone] == [g.ids for g in together[:4]]
    assert len({i for g in together for i in g.ids}) > 20  # not one token over and over


def test_cached_equals_uncached(engine):
    before = engine.stats()
    first = ask(engine, *MIX[1:4])
    again = ask(engine, *MIX[1:4])
    assert [g.ids for g in first] == [g.ids for g in again]
    for asked, got in zip(MIX[1:4], again, strict=True):
        assert_greedy(WEIGHTS, asked, got)
        assert got.cached_tokens >= (len(asked.ids) - 1) // SETTINGS.page_tokens * SETTINGS.page_tokens
    after = engine.stats()
    # A prefix that ends inside a picture needs the picture's embedding still, and nobody's tower ran twice for it.
    assert after.pictures_encoded - before.pictures_encoded <= 6


def test_siblings_pay_for_their_prompt_once(engine):
    before = engine.stats()
    same = [dataclasses.replace(MIX[3], sampling=Sampling(max_new_tokens=8, temperature=1.0, seed=s)) for s in range(4)]
    got = ask(engine, *same)
    after = engine.stats()
    asked = after.prompt_tokens_asked - before.prompt_tokens_asked
    computed = after.prompt_tokens_computed - before.prompt_tokens_computed
    prompt, page = len(MIX[3].ids), SETTINGS.page_tokens
    assert asked == 4 * prompt
    assert computed <= prompt + 3 * 2 * page
    assert len({g.ids for g in got}) > 1
    for request_, answer in zip(same, got, strict=True):
        assert_logprobs(full_logits(WEIGHTS, request_, answer.ids), answer)


def test_a_sample_depends_on_its_seed_and_on_nothing_else(engine):
    drawn = [request(i, 20, png(i % 3), 8, new=20, temperature=0.9) for i in range(6)]
    alone = [ask(engine, r)[0] for r in drawn]
    together = ask(engine, *drawn, *MIX)
    for asked, one, other in zip(drawn, alone, together, strict=False):
        assert one.ids == other.ids
        assert_logprobs(full_logits(WEIGHTS, asked, other.ids), other, temperature=0.9)
        assert not {IMAGE, VIDEO} & set(other.ids)
    other_seed = request(0, 20, png(0), 8, sampling=Sampling(max_new_tokens=20, temperature=0.9, seed=77))
    assert ask(engine, other_seed)[0].ids != alone[0].ids


def test_under_pressure_sessions_are_preempted_and_nothing_changes(engine):
    """64 pages of 8 tokens: four sessions of up to 190 tokens do not fit."""
    before = engine.stats()
    heavy = [request(20 + i, 60, png(i % 2), 20, new=100) for i in range(8)]
    got = ask(engine, *heavy)
    for asked, answer in zip(heavy, got, strict=True):
        assert_greedy(WEIGHTS, asked, answer)
    after = engine.stats()
    assert after.preemptions > before.preemptions and after.pages_evicted > before.pages_evicted
    assert sum(g.preemptions for g in got) > 0


def test_a_stop_id_ends_a_response_and_belongs_to_it(engine):
    free = ask(engine, MIX[0])[0]
    stop = free.ids[5]
    stopped = ask(engine, dataclasses.replace(MIX[0], stop=(stop,)))[0]
    first = free.ids.index(stop)
    assert stopped.ids == free.ids[: first + 1] and stopped.finish == "stop"


def test_new_weights_show_at_once_and_no_cache_survives(engine):
    """The same text and picture, first the tower perturbed, then the decoder."""
    asked = MIX[2]
    (old,) = ask(engine, asked)
    for part in ("vision", "layers"):
        changed = dict(WEIGHTS) | {part: jax.tree.map(lambda x: x * 1.5, WEIGHTS[part])}
        engine.publish(engine.version + 1, changed)
        (new,) = ask(engine, asked)
        assert new.cached_tokens == 0 and new.logprobs != old.logprobs
        assert set(new.versions) == {engine.version}
        assert_greedy(changed, asked, new)


def test_weights_may_change_in_the_middle_of_a_response(engine):
    """Tokens are stamped; those before the swap are the old weights', and the response goes on."""
    seen, swapped = threading.Event(), threading.Event()

    def watch(tokens):
        if not seen.is_set():
            seen.set()
        else:
            swapped.wait(5)

    asked = request(40, 20, new=60, on_token=watch)
    future = engine.submit(asked)
    seen.wait(60)
    old = engine.version
    publisher = threading.Thread(target=engine.publish, args=(old + 1, OTHERS))
    publisher.start()
    time.sleep(0.2)
    swapped.set()
    got = future.result(60)
    publisher.join()
    assert set(got.versions) == {old, old + 1} and list(got.versions) == sorted(got.versions)
    n = got.versions.count(old)
    logits = full_logits(WEIGHTS, asked, got.ids)[:n]
    np.testing.assert_array_equal(logits[:, :100].argmax(-1) == np.array(got.ids[:n]), np.array(got.ids[:n]) < 100)
    (fresh,) = ask(engine, dataclasses.replace(asked, on_token=None))
    assert fresh.cached_tokens == 0
    assert_greedy(OTHERS, dataclasses.replace(asked, on_token=None), fresh)


def test_two_hundred_steps_compile_nothing(engine):
    steps, i = engine.stats().steps, 0
    while engine.stats().steps < steps + 200:
        ask(
            engine,
            *(dataclasses.replace(r, sampling=Sampling(max_new_tokens=30, temperature=0.7, seed=i)) for r in MIX),
        )
        i += 1
    assert engine.stats().recompiles == 0


def test_five_hundred_at_once_end_with_an_answer_or_a_reason(engine):
    jobs = [engine.submit(request(i, 3 + i % 5, new=2)) for i in range(450)]
    poisoned = [
        engine.submit(request(1, 5, stop=tuple(range(20)))),
        engine.submit(dataclasses.replace(MIX[1], pictures=(b"no picture",))),
        engine.submit(dataclasses.replace(MIX[1], pictures=())),
        engine.submit(request(2, 400)),
        engine.submit(dataclasses.replace(MIX[0], ids=(5, 4000))),
    ]
    late = [engine.submit(request(i, 20, new=100, deadline_s=1e-4)) for i in range(45)]
    _, hanging = concurrent.futures.wait([*jobs, *poisoned, *late], timeout=120)
    assert not hanging
    assert all(len(j.result().ids) == 2 for j in jobs)
    kinds = [type(p.exception()) for p in poisoned]
    assert kinds == [errors.BadRequest, errors.BadPicture, errors.BadRequest, errors.PromptTooLong, errors.BadRequest]
    assert all(type(f.exception()) is errors.DeadlineExceeded for f in late)


def test_a_full_queue_refuses_and_says_so(engine):
    hold = threading.Event()
    first = engine.submit(request(1, 5, new=8, on_token=lambda _: hold.wait(30) and None))
    time.sleep(0.2)
    jobs = [engine.submit(request(2, 4, new=1)) for _ in range(SETTINGS.max_queue + 20)]
    refused = [j for j in jobs if j.done() and isinstance(j.exception(), errors.Overloaded)]
    hold.set()
    assert 1 <= len(refused) <= 30 and "try again" in str(refused[0].exception())
    for job in refused:
        jobs.remove(job)
    keep, give_up = jobs[:60], jobs[60:]
    for job in give_up:
        job.cancel()
    assert len(first.result(60).ids) == 8
    assert all(len(j.result(60).ids) == 1 for j in keep)


def test_abandoned_requests_leave_at_once(engine):
    begun, left = threading.Event(), threading.Event()

    def hold(_):  # the engine's own thread waits here, so that the request cannot end before it is left
        begun.set()
        assert left.wait(30)

    running = engine.submit(request(1, 20, new=150, on_token=hold))
    assert begun.wait(60)
    assert running.cancel()
    left.set()

    def clean():
        stats = engine.stats()
        return not engine._scheduler.sessions() and stats.pages_used_now == stats.pages_cached_now

    deadline = time.monotonic() + 10
    while not clean() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert clean()


def test_what_a_callback_raises_is_its_requests_alone(engine):
    def broken(_):
        raise RuntimeError("client went away")

    bad, good = engine.submit(request(1, 9, on_token=broken)), engine.submit(MIX[0])
    with pytest.raises(RuntimeError, match="went away"):
        bad.result(60)
    assert_greedy(WEIGHTS, MIX[0], good.result(60))


def test_streamed_tokens_are_the_answer_with_alternatives(engine):
    seen = []
    (got,) = ask(engine, dataclasses.replace(MIX[1], on_token=seen.append, top_logprobs=3))
    assert [t for run in seen for t in run] == list(got.tokens)
    reference = log_softmax_of(MIX[1], got)
    for n, token in enumerate(got.tokens):
        assert [i for i, _ in token.top] == np.argsort(-reference[n])[:3].tolist()
        np.testing.assert_allclose([p for _, p in token.top], np.sort(reference[n])[::-1][:3], atol=1e-5)


def log_softmax_of(asked, got):
    return np.asarray(jax.nn.log_softmax(jnp.asarray(full_logits(WEIGHTS, asked, got.ids))))


def test_training_requests_with_truncated_sampling_are_refused(engine):
    for truncated in ({"top_p": 0.9}, {"top_k": 5}):
        sampling = Sampling(max_new_tokens=4, **truncated)
        with pytest.raises(errors.TruncatedTraining, match="whole distribution"):
            engine.submit(request(1, 9, sampling=sampling, training=True)).result(60)
        assert len(ask(engine, request(1, 9, sampling=sampling))[0].ids) == 4


def test_the_policy_face(engine):
    data = png(9)
    patches = PROCESSOR.process(data)
    leaf = Leaf(
        ids=(102, *[IMAGE] * patches.tokens, 103, 7),
        pictures=(
            Picture(screenshot=Screenshot(data=data, width=64, height=64), grid=patches.grid, tokens=patches.tokens),
        ),
    )
    trunk = tuple(range(1, 30))

    async def play():
        got = await engine.generate(trunk, leaf, Sampling(max_new_tokens=6, temperature=0))
        with pytest.raises(PolicyFailed) as failed:
            await engine.generate((4000,), leaf, Sampling(max_new_tokens=6))
        task = asyncio.create_task(engine.generate(trunk, leaf, Sampling(max_new_tokens=150)))
        await asyncio.sleep(0)  # it has begun, and cannot have ended
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return got, failed.value

    got, failed = asyncio.run(play())
    assert failed.kind == FailureKind.REJECTED and "bad_request" in str(failed)
    (again,) = ask(
        engine,
        dataclasses.replace(
            request(0, 1),
            ids=(*trunk, *leaf.ids),
            pictures=(data,),
            stop=(END,),
            sampling=Sampling(max_new_tokens=6, temperature=0),
        ),
    )
    assert again.ids == got.ids and got.versions == again.versions


def test_weights_that_are_nan_fail_with_a_reason_and_are_forgotten(engine):
    engine.publish(engine.version + 1, jax.tree.map(lambda x: x * jnp.nan, WEIGHTS))
    for job in [engine.submit(r) for r in MIX[:3]]:
        with pytest.raises(errors.NotFinite, match="NaN"):
            job.result(60)
    engine.publish(engine.version + 1, WEIGHTS)
    for asked, got in zip(MIX, ask(engine, *MIX), strict=True):
        assert_greedy(WEIGHTS, asked, got)


def test_one_prompt_whose_logits_are_nan_fails_alone_in_the_middle_of_others(engine):
    """A word whose embedding is NaN: who says it fails, the others never see it, whatever they share with it."""
    rare = 115  # prompts draw from 1..98
    table = WEIGHTS["embed"]["table"].at[rare].set(jnp.nan)
    engine.publish(engine.version + 1, WEIGHTS | {"embed": WEIGHTS["embed"] | {"table": table}})
    bad = [dataclasses.replace(r, ids=(*r.ids, rare)) for r in MIX[:3]]
    mixed = [*MIX[:3], *bad, *MIX[3:], *bad]
    for asked, job in [(r, engine.submit(r)) for r in mixed]:
        if rare in asked.ids:
            with pytest.raises(errors.NotFinite, match="NaN"):
                job.result(60)
        else:
            assert rare not in job.result(60).ids
            assert_greedy(WEIGHTS, asked, job.result(60))


def test_numbers_that_no_array_holds_are_refused(engine):
    huge = Sampling(max_new_tokens=4, temperature=1.0, top_k=2**31)
    with pytest.raises(errors.BadRequest, match="top_k"):
        engine.submit(request(1, 4, sampling=huge)).result(60)


def test_versions_do_not_go_back_and_strange_trees_are_refused(engine):
    with pytest.raises(ValueError, match="older"):
        engine.publish(engine.version - 1, WEIGHTS)
    with pytest.raises(ValueError, match="another family"):
        engine.publish(engine.version + 1, {k: v for k, v in WEIGHTS.items() if k != "vision"})
    with pytest.raises(ValueError, match="shape"):
        engine.publish(engine.version + 1, dict(WEIGHTS) | {"norm": {"scale": jnp.ones(3)}})


def test_shared_weights_other_chunks_and_restarts():
    """Another engine altogether: the learner's own arrays, whole prompts in one chunk, answers begun anew."""
    with make(weights="shared", chunk_tokens=(160,), decode_rows=(2,), decode_steps=7, on_publish="restart") as engine:
        with pytest.raises(errors.NoWeights):
            engine.submit(MIX[0]).result(5)
        engine.publish(5, WEIGHTS)
        held, given = jax.tree.leaves(engine._device.params), jax.tree.leaves(dict(WEIGHTS))
        assert [a.unsafe_buffer_pointer() for a in held] == [b.unsafe_buffer_pointer() for b in given]
        for asked, got in zip(MIX[:4], ask(engine, *MIX[:4]), strict=True):
            assert_greedy(WEIGHTS, asked, got)
        started, decode = threading.Event(), engine._device.decode

        def slowly(*args):
            started.set()
            time.sleep(0.05)
            return decode(*args)

        engine._device.decode = slowly  # so that the swap finds the answer half made
        job = engine.submit(request(50, 20, new=100))
        assert started.wait(60)
        engine.publish(6, OTHERS)
        got = job.result(60)
        assert set(got.versions) == {6}
        assert_greedy(OTHERS, request(50, 20, new=100), got)
    with pytest.raises(errors.Closed):
        engine.submit(MIX[0]).result(5)


def test_int8_keys_change_logprobs_a_little():
    """Every chunking reads the same rounded values; the distance to full precision is bounded."""
    with make(kv="int8", chunk_tokens=(16,), decode_rows=(4,)) as engine:
        engine.publish(0, WEIGHTS)
        cold, warm = ask(engine, *MIX[1:4]), ask(engine, *MIX[1:4])
        for asked, one, other in zip(MIX[1:4], cold, warm, strict=True):
            assert one.ids == other.ids
            # Who shared a chunk decides the last bit of a key, and now and then that bit decides its rounding.
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-3)
            assert_logprobs(full_logits(WEIGHTS, asked, one.ids), one, tolerance=0.2)
            exact = log_softmax_of(asked, one)[np.arange(len(one.ids)), list(one.ids)]
            assert np.abs(exact - np.asarray(one.logprobs)).max() > 1e-5  # it is int8, not a copy
