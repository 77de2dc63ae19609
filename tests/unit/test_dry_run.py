"""`owrl train --dry-run`: budgets worked out by hand, memory against arrays that are there, judges behind real HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import threading

import jax
import numpy as np
import pytest

from owrl_jax import dry_run, train
from owrl_jax.config import (
    AgentSettings,
    BrowserSettings,
    DtypeSettings,
    EndpointSettings,
    MeshSettings,
    ModelSettings,
    RlSettings,
    RunConfig,
    load_preset,
    resolve,
)
from owrl_jax.engine.settings import EngineSettings
from owrl_jax.engine.step import Programs
from owrl_jax.models.processor import ImageProcessor
from owrl_jax.models.qwen3_vl.config import preset
from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.qwen3_vl.table import build_tree
from owrl_jax.models.run import Run
from owrl_jax.rl.optimizer import OptimizerSettings
from owrl_jax.rl.trainable import Trainable
from owrl_jax.rl.update import Learner
from owrl_jax.sharding import TRAIN_RULES, MeshConfig, Sharder, make_mesh
from owrl_jax.types import Task, encode


@contextlib.contextmanager
def serving(status=200, body=b'{"data": [{"id": "judge-8b"}]}', key=""):
    """A server on loopback that answers GET /v1/models."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            refused = bool(key) and self.headers.get("Authorization") != f"Bearer {key}"
            self.send_response(404 if self.path != "/v1/models" else 401 if refused else status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


# --- Presets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["openwebrl_4b", "openwebrl_8b"])
def test_the_recipe_is_the_papers(name):
    """Table of hyper-parameters of arXiv 2606.02031, both stages; section 7 for imitation; table 8 for the judge."""
    run = load_preset(name)
    assert [(s.iterations, s.max_steps, s.learning_rate) for s in run.curriculum] == [(90, 15, 1e-6), (50, 30, 5e-7)]
    rl = run.rl
    assert (run.iterations, rl.groups, rl.group_size, rl.turns_per_update, rl.epochs) == (140, 48, 5, 256, 2)
    assert (rl.clip_low, rl.clip_high, rl.kl_coef, rl.entropy_coef, rl.format_error_reward) == (0.2, 0.28, 0, 0, -1)
    assert (rl.adam_b1, rl.adam_b2, rl.weight_decay, rl.max_grad_norm) == (0.9, 0.98, 0.1, 1.0)
    assert (run.agent.screenshots, run.agent.max_context_tokens, run.agent.max_response_tokens) == (1, 32768, 1024)
    assert (run.rollout.temperature, run.browser.viewport, run.browser.step_s) == (0.8, (1280, 1000), 45.0)
    sft, judge = run.sft, run.judge
    assert (sft.epochs, sft.learning_rate, sft.warmup_share, sft.freeze) == (3, 1e-5, 0.1, ("vision", "projector"))
    assert (judge.kind, judge.screenshots, judge.temperature, judge.max_tokens) == ("rubric", 3, 0.0, 2048)
    assert (judge.concurrency, judge.endpoint.attempts, judge.endpoint.attempt_s) == (8, 3, 120.0)
    assert run.checkpoint.every == run.eval.every == 5
    assert preset(run.model.size) == preset(name.removeprefix("openwebrl_"))


# --- Arithmetic -------------------------------------------------------------------------------------------------


def test_budgets_by_hand():
    one, two = dry_run.budgets(load_preset("openwebrl_4b"))
    assert (one.iterations, one.episodes, one.most_episodes) == (90, 240, 960)
    # 240 x 15 turns; 3,600 / 256 = 14.06, so 15 updates an epoch; 1,024 and 32,768 tokens a turn
    assert (one.turns, one.updates, one.response_tokens, one.context_tokens) == (3600, 30, 3686400, 117964800)
    assert (two.iterations, two.turns, two.updates) == (50, 7200, 58)
    assert [b.iterations for b in dry_run.budgets(resolve("openwebrl_4b", {"iterations": "60"}))] == [60]
    assert [b.iterations for b in dry_run.budgets(resolve("openwebrl_4b", {"iterations": "200"}))] == [90, 110]
    (plain,) = dry_run.budgets(RunConfig(iterations=7, rl=RlSettings(groups=3, group_size=2, resampling_cap=1.5)))
    assert (plain.iterations, plain.episodes, plain.most_episodes, plain.turns) == (7, 6, 10, 90)


def of(held, word):
    (row,) = [row for row in held if row.what.startswith(word)]
    return row.bytes


@pytest.mark.parametrize("fields", [{}, {"freeze": ("vision",)}, {"lora_rank": 4}], ids=["all", "frozen", "lora"])
def test_the_memory_of_a_device_is_that_of_arrays_that_lie_there(fields):
    config = RunConfig(
        model=ModelSettings(size="nano"),
        mesh=MeshSettings(fsdp=4, tensor=2),
        dtypes=DtypeSettings(compute="float32"),
        browser=BrowserSettings(viewport=(128, 128), max_episodes=4),
        agent=AgentSettings(max_context_tokens=1536, max_response_tokens=96),
        rl=RlSettings(row_tokens=512, **fields),
    )
    model_config = preset("nano")
    held = dry_run.memory(config, model_config, ImageProcessor(), dry_run.plan_mesh(config, None))
    shard = Sharder(make_mesh(MeshConfig(fsdp=4, tensor=2)), TRAIN_RULES)
    learner = Learner(Qwen3VL(model_config, Run(shard=shard)), OptimizerSettings(), trainable=Trainable.of(config.rl))
    zeros = build_tree(model_config, lambda row: np.zeros(row.full_shape, np.float32))
    state = learner.init(jax.device_put(zeros, shard.tree(model_config)))
    lies = lambda tree: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))  # noqa: E731
    assert of(held, "parameters") == lies(state.params) < sum(leaf.nbytes for leaf in jax.tree.leaves(zeros)) / 4
    assert of(held, "adapters") == lies(state.adapters)
    assert of(held, "Adam") == lies(state.moments)
    moving, _ = learner.trainable.split(model_config, state.params, state.adapters)
    assert of(held, "gradients, added") == lies(moving) == of(held, "gradients of a micro-batch")
    assert of(held, "the engine's parameters") == 0  # float32 both: shared
    # Row of 512 tokens, 4 layers of 128 values of 4 bytes.
    assert of(held, "inputs of the layers") == 512 * 4 * 128 * 4
    # 4 episodes of 1,536 tokens at half their length are 192 pages of 16, and a spare one; keys and values of 2 heads
    # of 32 values in 4 layers.
    assert of(held, "key-value pages, 192 x 16") == 2 * 193 * 16 * 2 * 32 * 4 * 4
    there = Programs(model_config, Run(), EngineSettings(max_context=1536, decode_rows=(1, 4)), ())
    assert of(held, "working copies of 4") == sum(
        np.asarray(leaf).nbytes for leaf in jax.tree.leaves((there.rows(), there.flat()))
    )


def test_a_mesh_that_is_not_here_and_one_that_cannot_be():
    config = RunConfig(mesh=MeshSettings(fsdp=16, tensor=4))
    mesh = dry_run.plan_mesh(config, None)
    assert mesh is not None and mesh.size == 64 > jax.device_count()
    assert dry_run.plan_mesh(RunConfig(mesh=MeshSettings(fsdp=1)), None) is None
    assert dry_run.plan_mesh(RunConfig(), 3).shape["fsdp"] == 3  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="needs 64 devices, but there are 8"):
        dry_run.plan_mesh(config, 8)
    held = [dry_run.Held(what="a", bytes=3 * 2**30), dry_run.Held(what="b", bytes=9 * 2**30, where="host")]
    assert dry_run.check_memory(held, mesh, 4.0).status == "ok"
    assert dry_run.check_memory(held, mesh, 2.9).status == "fail"


# --- Questions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "model", "status", "said"),
    [
        ({}, "judge-8b", "ok", "judge-8b at"),
        ({}, "other", "fail", "has no model 'other'; it has judge-8b"),
        ({"key": "right"}, "judge-8b", "ok", "judge-8b at"),
        ({"key": "wrong"}, "judge-8b", "fail", "refuses the key (HTTP 401)"),
        ({"status": 500}, "judge-8b", "warn", "HTTP 500"),
        ({"body": b"<html>"}, "judge-8b", "warn", "something else than a list of models"),
        ({"body": b'{"models": []}'}, "judge-8b", "warn", "something else than a list of models"),
    ],
)
def test_an_endpoint_is_asked_what_it_serves(server, model, status, said):
    with serving(**server) as url:
        endpoint = EndpointSettings(url=url, model=model, key_env="K")
        found = dry_run.probe(endpoint, "judge", "judge.endpoint", {"K": "right"})
    assert (found.status, said in found.found) == (status, True), found
    assert "right" not in found.found + found.advice


def test_an_endpoint_that_is_not_there_or_has_no_key():
    with serving() as url:
        gone = EndpointSettings(url=url, model="m")
    found = dry_run.probe(gone, "judge", "judge.endpoint", {})
    assert found.status == "fail" and "does not answer" in found.found and "--judge.endpoint.url" in found.advice
    keyed = dataclasses.replace(gone, key_env="JUDGE_KEY")
    found = dry_run.probe(keyed, "judge", "judge.second", {})
    assert found.status == "fail" and "judge.second.key_env names JUDGE_KEY" in found.found


def write_tasks(path):
    with path.open("wb") as file:
        for n in range(7):
            split = "train" if n < 5 else "test"
            task = Task(id=f"t{n}", instruction="go", start_url="https://a.example/", site="a.example", split=split)
            file.write(encode(task) + b"\n")


def test_the_preset_of_the_paper_passes_where_tasks_and_judge_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tasks(tmp_path / "tasks.jsonl")
    given = ["openwebrl_4b", "--dry-run", "--data.tasks", '["tasks.jsonl"]', "--eval.tasks", "2", "--device-gib", "180"]
    with serving() as url:
        assert train.main([*given, "--judge.endpoint.url", url]) == 0
    out = capsys.readouterr().out
    assert "5 of 1 kinds to train on" in out and "openwebrl-4b can run here" in out
    # 4.44 billion parameters of 4 bytes over 8 devices
    assert "parameters, float32                                2.068" in out
    assert "no folder runs/openwebrl-4b-sft/export" in out
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.jsonl"]  # nothing was written


def test_what_is_missing_is_said_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tasks(tmp_path / "tasks.jsonl")
    tiny = ["tiny_cpu", "--dry-run"]
    assert train.main([*tiny, "--eval.tasks", "2"]) == 0
    capsys.readouterr()
    bad = ["--data.tasks", '["tasks.jsonl"]', "--mesh.fsdp", "3", "--devices", "4", "--model.size", "5b"]
    assert train.main([*tiny, *bad, "--rl.row_tokens", "1024"]) == 2
    out = capsys.readouterr().out
    for said in (
        "only 2 held-out tasks", "have no program, a.example for one, and no model judges",
        "rl.row_tokens=1024 is less than agent.max_context_tokens=2048", "unknown model size '5b'",
        "needs 3 devices, but there are 4",
    ):  # fmt: skip
        assert said in out, said
    assert train.main(["openwebrl_4b"]) == 2  # without --dry-run: a sentence, and no folder of a run
    assert "is no folder here" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_money_is_worked_out_for_each_verdict():
    config = resolve(
        "teacher_235b", {"iterations": "1", "rl.groups": "10", "rl.group_size": "10", "judge.max_usd": "1"}
    )
    # Three pictures of 1280 x 1000 at a token for 1,024 pixels are 3,750 tokens, with 6,000 of words at $2 a million;
    # 2,048 tokens of reply at $8.
    each = ((6000 + 3750) * 2 + 2048 * 8) / 1e6
    assert dry_run._usd_per_verdict(config) == pytest.approx(each)
    with serving(key="k", body=json.dumps({"data": [{"id": "gpt-4.1"}]}).encode()) as url:
        judge = dataclasses.replace(config.judge, endpoint=dataclasses.replace(config.judge.endpoint, url=url))
        found = dry_run.check_judges(dataclasses.replace(config, judge=judge), {"OPENAI_API_KEY": "k"})
    assert [f.status for f in found] == ["ok", "warn"] and f"${100 * each:.0f} for 100 episodes" in found[1].found
