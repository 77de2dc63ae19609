"""`owrl judge RUN`: a run judged again against a judge on loopback, stopped, gone on with, compared."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from owrl_jax import rejudge
from owrl_jax.outcome import Outcome, Reason
from owrl_jax.pool.journal import Journal
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.types import Verdict, VerdictValue

from .fake_endpoint import chat_answer, fake_endpoint
from .judge_world import picture, trajectory

S, F, I = VerdictValue.SUCCESS, VerdictValue.FAILURE, VerdictValue.INVALID  # noqa: E741


def write_run(folder, verdicts, judge="program:shop/price"):
    """A run of as many completed episodes, and one that crashed."""
    store = ScreenshotStore(folder / "screenshots")
    for mark in range(10):
        store.put(picture(mark))
    with Journal(folder / "journal.jsonl") as journal:
        for n, value in enumerate(verdicts):
            said = None if value is None else Verdict(value=value, judge=judge)
            one = dataclasses.replace(trajectory(answer=f"answer {n}"), index=n, verdict=said)
            journal.add_trajectory(one, attempt=0)
        crashed = Outcome(reason=Reason.SANDBOX_ERROR, detail="renderer_crash")
        journal.add_trajectory(dataclasses.replace(trajectory(outcome=crashed), index=99), attempt=0)


async def judge_run(folder, url, **fields):
    base = {"coded": False, "attempts": 1, "concurrency": 1}
    options = rejudge.Options(run=folder, endpoint=url, model="m", **{**base, **fields})
    return await rejudge.rejudge(options)


async def test_agreement_with_the_program_and_going_on(tmp_path, capsys):
    write_run(tmp_path, [S, S, F, F, F])

    def reply(request: dict) -> bytes:  # of the episode that is asked about: their order is nobody's promise
        said = ("SUCCESS", "NOT SUCCESS", "SUCCESS", "failure", None)
        word = said[int(re.search(r"answer (\d)", json.dumps(request))[1])]
        return b"500 Oops\r\n\r\n" if word is None else chat_answer(f"Verdict: {word}")

    async with fake_endpoint(reply) as (server, url):
        assert await judge_run(tmp_path, url) == 0
        out = capsys.readouterr().out
        assert len(server.requests) == 5
        assert "6 of 6 judged: failure 2, invalid 2, success 2" in out
        assert "against program, as the truth" in out and re.search(r"accuracy +50\.0 %", out)
        assert re.search(r"precision +50\.0 %", out) and re.search(r"invalid +20\.0 %", out)
        assert "1 judge_unavailable" in out and "1 outcome" in out and "drift" not in out
        server.answers[:] = [chat_answer("Verdict: failure")]
        assert await judge_run(tmp_path, url) == 0
        assert len(server.requests) == 6  # the one that had no answer; the crashed one costs no call
        out = capsys.readouterr().out
        assert re.search(r"accuracy +60\.0 %", out) and "invalid          1 outcome" in out
    assert len((tmp_path / "judge" / "replies.jsonl").read_bytes().splitlines()) == 6
    with Journal(tmp_path / "journal.jsonl", readonly=True) as journal:
        assert journal.entry(journal.offsets[0]).trajectory.verdict.value is S  # the journal stays as it is


async def test_the_alarm_rings_where_a_training_judge_is_too_kind(tmp_path, capsys):
    write_run(tmp_path, [S] * 12, judge="m/rubric-training")
    async with fake_endpoint(chat_answer("Verdict: NOT SUCCESS")) as (_, url):
        assert await judge_run(tmp_path, url) == 1
    assert "ALARM" in capsys.readouterr().out


async def test_the_limit_stops_it_and_more_money_goes_on(tmp_path, capsys):
    write_run(tmp_path, [S, S, S])
    async with fake_endpoint(chat_answer("success")) as (server, url):
        assert await judge_run(tmp_path, url, max_calls=2, last=4) == 3
        assert "limit of 2 calls" in capsys.readouterr().err and len(server.requests) == 2
        assert await judge_run(tmp_path, url, max_calls=10) == 0
        assert len(server.requests) == 3


def test_a_folder_that_is_no_run(tmp_path, capsys):
    assert rejudge.main([str(tmp_path), "--endpoint", "http://127.0.0.1:9/v1", "--model", "m"]) == 2
    assert "no journal" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        rejudge.main(["--help"])
