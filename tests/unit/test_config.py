"""The configuration tree: checks, overrides, JSON, presets, hash."""

import dataclasses
import hashlib
import json
import math
import typing
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from owrl_jax.config import (
    AgentSettings,
    BrowserSettings,
    ConfigError,
    DataSettings,
    EndpointSettings,
    HorizonSettings,
    JudgeSettings,
    MeshSettings,
    ModelSettings,
    RlSettings,
    RolloutSettings,
    RunConfig,
    Stage,
    config_hash,
    from_dict,
    from_json,
    load_preset,
    preset_files,
    resolve,
    same_run,
    split_overrides,
    to_dict,
    to_json,
)

JUDGE = EndpointSettings(url="http://127.0.0.1:1/v1", model="m")


def test_defaults_are_the_papers_first_stage():
    """Table of hyper-parameters of arXiv 2606.02031, stage 1."""
    run = RunConfig()
    assert (run.iterations, run.rl.groups, run.rl.group_size, run.rl.turns_per_update, run.rl.epochs) == (
        90,
        48,
        5,
        256,
        2,
    )
    assert (run.rl.clip_low, run.rl.clip_high, run.rl.learning_rate) == (0.2, 0.28, 1e-6)
    assert (run.rl.adam_b1, run.rl.adam_b2, run.rl.weight_decay, run.rl.max_grad_norm) == (0.9, 0.98, 0.1, 1.0)
    assert (run.agent.max_steps, run.agent.max_context_tokens, run.agent.max_response_tokens) == (15, 32768, 1024)
    assert (run.agent.screenshots, run.agent.max_parse_failures, run.rl.format_error_reward) == (1, 3, -1.0)
    assert (run.rollout.temperature, run.browser.viewport) == (0.8, (1280, 1000))
    assert (run.browser.step_s, run.browser.episode_s) == (45.0, 600.0)


def test_every_record_is_frozen_keyword_only_and_lies_in_the_tree():
    sections: list[Any] = [h for h in typing.get_type_hints(RunConfig).values() if dataclasses.is_dataclass(h)]
    assert len(sections) == 14
    for record in (RunConfig, *sections):
        value = record()
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(record)[0].name, 1)
        with pytest.raises(TypeError):
            record(1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: RlSettings(clip_low=1.5), ("clip_low=1.5", "below 1")),
        (lambda: RlSettings(group_size=1), ("group_size=1", "at least 2")),
        (lambda: RlSettings(learning_rate=math.nan), ("learning_rate=nan", "finite")),
        (lambda: RlSettings(adam_b2=1.0), ("adam_b2=1.0", "below 1")),
        (lambda: RolloutSettings(temperature=0.0), ("temperature=0.0", "positive")),
        (lambda: RolloutSettings(temperature=math.inf), ("temperature=inf", "finite")),
        (lambda: MeshSettings(tensor=-1), ("tensor=-1", "fsdp does already")),
        (lambda: MeshSettings(expert=0), ("expert=0", "at least 1")),
        (lambda: AgentSettings(max_context_tokens=512), ("max_response_tokens=1024", "512")),
        (lambda: BrowserSettings(viewport=(1280, 10)), ("viewport=(1280, 10)", "100")),
        (lambda: BrowserSettings(episode_s=10.0), ("episode_s=10.0", "45")),
        (lambda: BrowserSettings(step_s=math.inf), ("step_s=inf", "finite")),
        (lambda: ModelSettings(weights=""), ("weights=''", "null")),
        (lambda: RunConfig(name="a/b"), ("name='a/b'", "folder")),
        (lambda: RunConfig(seed=-1), ("seed=-1", "2**32")),
        (lambda: JudgeSettings(kind="rubric"), ("endpoint.url=''", "kind is 'rubric'")),
        (lambda: JudgeSettings(second_share=1.5), ("second_share=1.5", "between 0 and 1")),
        (lambda: JudgeSettings(kind="rubric", endpoint=JUDGE, max_usd=3.0), ("usd_per_million_in=0.0", "max_usd=3.0")),
        (lambda: EndpointSettings(url="127.0.0.1:80", model="m"), ("url='127.0.0.1:80'", "http://")),
        (lambda: EndpointSettings(url="http://a/v1"), ("model=''", "http://a/v1")),
        (lambda: HorizonSettings(start=8, most=5), ("most=5", "at least start, 8")),
        (
            lambda: RunConfig(
                curriculum=(Stage(iterations=1, max_steps=1, learning_rate=0.0),), horizon=HorizonSettings(most=9)
            ),
            ("horizon.most=9", "curriculum"),
        ),
        (lambda: Stage(iterations=0, max_steps=1, learning_rate=1e-6), ("iterations=0", "at least 1")),
    ],
)
def test_a_bad_value_is_named_with_what_to_do(make, parts):
    with pytest.raises(ConfigError) as caught:
        make()
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rl": {"clip_lo": 0.1}}, "unknown setting rl.clip_lo; did you mean rl.clip_low?"),
        ({"modle": {}}, "unknown setting modle; did you mean model?"),
        ({"rl": {"zzzzzz": 1}}, "unknown setting rl.zzzzzz; known here: groups"),
        ({"rl": 3}, "rl must be a group of settings, got 3"),
        ({"rl": {"epochs": "two"}}, "rl.epochs='two': Expected `int`, got `str`"),
        ({"rl": {"epochs": 2.5}}, "rl.epochs=2.5"),
        ({"browser": {"viewport": [1, 2, 3]}}, "browser.viewport=[1, 2, 3]"),
        ({"model": {"remat": "some"}}, "model.remat='some'"),
        ({"rl": {"epochs": 0}}, "rl.epochs=0 must be at least 1"),
        ({"seed": True}, "seed=True"),
        (
            {"judge": {"endpoint": {"key": 1}}},
            "unknown setting judge.endpoint.key; did you mean judge.endpoint.key_env",
        ),
        ({"curriculum": [{"iterations": 1, "steps": 2}]}, "unknown setting curriculum[0].steps"),
        ({"curriculum": [{"iterations": 1, "max_steps": 2}]}, "curriculum[0] needs a value for learning_rate"),
        ({"curriculum": 3}, "curriculum=3"),
    ],
)
def test_plain_data_is_checked_with_its_path(data, message):
    with pytest.raises(ConfigError) as caught:
        from_dict(data)
    assert str(caught.value).startswith(message)


def test_a_stage_follows_from_the_number_of_the_iteration():
    stages = [[90, 15, 1e-6], [50, 30, 5e-7]]
    shown = [dict(zip(("iterations", "max_steps", "learning_rate"), stage, strict=True)) for stage in stages]
    run = resolve(None, {"curriculum": json.dumps(shown)})
    assert from_json(to_json(run)) == run and resolve(run, {"seed": "1"}).curriculum == run.curriculum
    at = lambda n: (run.stage_of(n).max_steps, run.stage_of(n).learning_rate)  # noqa: E731
    assert [at(n) for n in (0, 89, 90, 139, 140, 9999)] == [(15, 1e-6)] * 2 + [(30, 5e-7)] * 4
    plain = RunConfig(agent=AgentSettings(max_steps=7), rl=RlSettings(learning_rate=2e-6))
    assert {(s.max_steps, s.learning_rate) for s in map(plain.stage_of, (0, 500))} == {(7, 2e-6)}


def test_a_run_may_become_longer_dearer_and_ask_its_judge_elsewhere_but_not_another_one():
    judge = JudgeSettings(kind="rubric", endpoint=JUDGE, max_calls=10)
    run = RunConfig(judge=judge)

    def changed(**fields):
        return dataclasses.replace(run, judge=dataclasses.replace(judge, **fields), iterations=200)

    for name in ("http://127.0.0.1:2/v1", JUDGE.url):
        assert same_run(changed(max_calls=20, endpoint=dataclasses.replace(JUDGE, url=name, key_env="K")), run)
    assert not same_run(changed(endpoint=dataclasses.replace(JUDGE, model="other")), run)
    assert not same_run(changed(screenshots=1), run) and not same_run(RunConfig(), run)
    assert not same_run(dataclasses.replace(run, seed=1), run)


def test_json_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="not valid JSON"):
        from_json("{")
    with pytest.raises(ConfigError, match="group of settings"):
        from_json("[]")


@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    rate=st.floats(1e-9, 1.0),
    tasks=st.lists(st.text(min_size=1), min_size=1, max_size=3),
    weights=st.none() | st.text(min_size=1),
    side=st.integers(100, 8192),
)
def test_json_round_trip(seed, rate, tasks, weights, side):
    run = RunConfig(
        seed=seed,
        rl=RlSettings(learning_rate=rate),
        data=DataSettings(tasks=tuple(tasks)),
        model=ModelSettings(weights=weights),
        browser=BrowserSettings(viewport=(side, 1000)),
    )
    assert from_json(to_json(run)) == run
    assert config_hash(from_json(to_json(run))) == config_hash(run)


def test_what_is_saved_is_complete():
    saved = json.loads(to_json(RunConfig()))
    assert saved == json.loads(json.dumps(to_dict(RunConfig())))
    assert set(saved["rl"]) == {field.name for field in dataclasses.fields(RlSettings)}


def test_hash_is_sha256_of_canonical_json():
    run = RunConfig(rl=RlSettings(learning_rate=1, groups=2))
    plain = to_dict(run)
    plain["rl"]["learning_rate"] = 1.0
    # every float of this tree prints the same in Python's json, but for its exponents
    canonical = (
        json.dumps(plain, sort_keys=True, separators=(",", ":")).replace("1e-06", "1e-6").replace("1e-05", "0.00001")
    )
    assert config_hash(run) == hashlib.sha256(canonical.encode()).hexdigest()


def test_hash_sees_every_setting_and_only_values():
    changed = [
        {"name": "other"}, {"seed": 1}, {"iterations": 1}, {"model": {"size": "8b"}}, {"mesh": {"tensor": 2}},
        {"dtypes": {"compute": "float32"}}, {"browser": {"max_episodes": 3}}, {"agent": {"max_steps": 30}},
        {"rollout": {"top_k": 20}}, {"rl": {"learning_rate": 5e-7}}, {"data": {"tasks": ["a"]}},
        {"checkpoint": {"keep": 1}}, {"logging": {"every": 2}}, {"sft": {"epochs": 1}}, {"judge": {"coded": False}},
        {"curriculum": [{"iterations": 1, "max_steps": 2, "learning_rate": 1e-6}]},
    ]  # fmt: skip
    hashes = {config_hash(from_dict(data)) for data in ({}, *changed)}
    assert len(hashes) == len(changed) + 1
    assert config_hash(RunConfig(rl=RlSettings(weight_decay=1))) == config_hash(
        RunConfig(rl=RlSettings(weight_decay=1.0))
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"rl.epochs": "3"}, {"rl": {"epochs": 3}}),
        ({"rl.learning_rate": "5e-7"}, {"rl": {"learning_rate": 5e-7}}),
        ({"rl.weight_decay": 0}, {"rl": {"weight_decay": 0.0}}),
        ({"browser.viewport": "[800, 600]"}, {"browser": {"viewport": [800, 600]}}),
        ({"model.weights": "null"}, {"model": {"weights": None}}),
        ({"model.weights": "12"}, {"model": {"weights": "12"}}),
        ({"model.size": "8b"}, {"model": {"size": "8b"}}),
        ({"name": "12"}, {"name": "12"}),
        ({"data.tasks": '["a", "b"]'}, {"data": {"tasks": ["a", "b"]}}),
        ({"data.tasks": "worlds:starter/word"}, {"data": {"tasks": ["worlds:starter/word"]}}),
        ({"data.tasks": "a,b"}, {"data": {"tasks": ["a", "b"]}}),
        ({"browser.max_episodes": "null"}, {"browser": {"max_episodes": None}}),
        ({"rl.epochs": 1, "rl.groups": "4"}, {"rl": {"epochs": 1, "groups": 4}}),
    ],
)
def test_overrides_change_what_they_name_and_nothing_else(overrides, expected):
    base = load_preset("tiny_cpu")
    plain = to_dict(base)
    for key, value in expected.items():
        plain[key] = {**plain[key], **value} if isinstance(value, dict) else value
    assert resolve("tiny_cpu", overrides) == from_dict(plain)
    assert resolve(base, {}) == base


@pytest.mark.parametrize("dotted", ["rl.epochs.x", "rll.epochs", "rl", "epochs"])
def test_an_override_that_names_no_setting_is_refused(dotted):
    with pytest.raises(ConfigError):
        resolve(None, {dotted: "3"})


def test_overrides_are_taken_out_of_a_command_line():
    argv = ["tiny_cpu", "--rl.learning-rate", "5e-7", "--json", "--seed=3", "--save", "x", "--mesh.fsdp", "-1"]
    overrides, rest = split_overrides(argv)
    assert overrides == {"rl.learning_rate": "5e-7", "seed": "3", "mesh.fsdp": "-1"}
    assert rest == ["tiny_cpu", "--json", "--save", "x"]
    with pytest.raises(ConfigError, match=r"--rl\.epochs needs a value"):
        split_overrides(["--rl.epochs"])


def test_every_preset_resolves_and_is_found_by_name_and_by_path():
    presets = preset_files()
    assert "tiny_cpu" in presets
    for name, path in presets.items():
        assert load_preset(name) == load_preset(str(path)) == resolve(name)


@pytest.mark.parametrize(
    ("code", "message"),
    [("x = 1", "no function get_config"), ("def get_config():\n    return 3", "must return a RunConfig, got int")],
)
def test_a_preset_file_that_gives_no_configuration_is_refused(tmp_path, code, message):
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(ConfigError, match=message):
        load_preset(str(file))
    with pytest.raises(ConfigError, match="no preset file"):
        load_preset(str(tmp_path / "other.py"))
    with pytest.raises(ConfigError, match="did you mean tiny_cpu"):
        load_preset("tiny_cpus")
