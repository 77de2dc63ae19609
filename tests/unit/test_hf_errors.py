"""A checkpoint that is not exactly the model's is refused, naming file, tensor, shapes and what to do.

The damaged checkpoints are made with the safetensors library from a table of names that the parity tests compare with
`transformers`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from owrl_jax.models import hf, tensor_files
from owrl_jax.models.qwen3_vl.config import ConfigError, ModelConfig, MoEConfig, TextConfig, VisionConfig, to_hf
from owrl_jax.models.qwen3_vl.table import build_tree, table

TEXT = TextConfig(
    vocab=64, model=16, layers=3, heads=2, kv_heads=1, head_dim=8, mlp=24, mrope_section=(2, 1, 1), tied=False
)
VISION = VisionConfig(depth=2, model=8, heads=2, mlp=12, out=16, taps=(0,), patch=4, positions=2)
CONFIG = ModelConfig(text=TEXT, vision=VISION, image_token=5)
SPARSE = dataclasses.replace(CONFIG, text=dataclasses.replace(TEXT, moe=MoEConfig(experts=3, top_k=1, mlp=6)))


def tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(row.layout.hf_shape, np.float32) for row in table(config) for name in row.hf_names()
    }


def checkpoint(
    folder: pathlib.Path, config: ModelConfig, values: dict[str, np.ndarray], *, files: int = 1
) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf(config, dtype="float32")))
    if files == 1:
        save_file(values, folder / "model.safetensors")
        return folder
    names = sorted(values)
    where = {}
    for part in range(files):
        file = f"model-{part + 1:05d}-of-{files:05d}.safetensors"
        save_file({name: values[name] for name in names[part::files]}, folder / file)
        where |= dict.fromkeys(names[part::files], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def refusal(source: str | pathlib.Path) -> str:
    """What the loader says; it must say so before it makes a single array."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(hf.LoadError) as error:
        patch.setattr(hf, "_leaf", lambda *args: pytest.fail("a parameter was built from a bad checkpoint"))
        hf.load(source)
    return str(error.value)


Q = "model.language_model.layers.1.self_attn.q_proj.weight"
UP = "model.language_model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("files", [1, 3])
def test_missing_extra_and_misshaped_tensors_in_one_message(tmp_path, files):
    values = tensors(CONFIG)
    values[UP] = values[UP].T.copy()
    del values["model.visual.pos_embed.weight"]
    values["model.visual.adapter.weight"] = np.zeros(3, np.float32)
    message = refusal(checkpoint(tmp_path, CONFIG, values, files=files))
    part = sorted(values).index(UP) % files + 1
    file = tmp_path / ("model.safetensors" if files == 1 else f"model-{part:05d}-of-00003.safetensors")
    assert f"1 mis-shaped:\n  {file}: {UP!r} has shape [16, 24], config.json asks for [24, 16]" in message
    assert "1 missing:\n  'model.visual.pos_embed.weight'" in message
    assert "1 unknown:" in message and "'model.visual.adapter.weight'" in message
    assert "nothing was loaded" in message and "from the same folder" in message


def test_long_lists_are_cut(tmp_path):
    values = {name: value for name, value in tensors(CONFIG).items() if ".mlp." not in name}
    message = refusal(checkpoint(tmp_path, CONFIG, values))  # 3 × 3 in the decoder, 2 × 4 in the tower
    assert "17 missing" in message and "and 12 more" in message and message.count("weight'") <= 5


@pytest.mark.parametrize("text, vision", [({"layers": 5}, {}), ({"layers": 2}, {}), ({}, {"depth": 4})])
def test_configuration_of_another_size(tmp_path, text, vision):
    """One cause, not a list of hundreds of names."""
    wrong = ModelConfig(
        text=dataclasses.replace(TEXT, **text), vision=dataclasses.replace(VISION, **vision), image_token=5
    )
    message = refusal(checkpoint(tmp_path, wrong, tensors(CONFIG)))
    key, said, have = ("num_hidden_layers", text["layers"], 3) if text else ("vision_config.depth", 4, 2)
    assert f"{key}={said}" in message and f"hold {have} of these layers" in message
    assert len(message) < 400


def test_config_of_another_family(tmp_path):
    message = refusal(checkpoint(tmp_path, SPARSE, tensors(CONFIG)))
    assert "mlp.experts.gate_up_proj" in message and "mlp.gate_proj.weight" in message
    plain = ModelConfig(text=TEXT)
    assert "model.visual." in refusal(checkpoint(tmp_path, plain, tensors(CONFIG)))


def test_no_config(tmp_path):
    checkpoint(tmp_path, CONFIG, tensors(CONFIG))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        hf.load(tmp_path)


def test_truncated_at_every_place(tmp_path):
    """Cut in the length field, the header, and the data; and one byte too many."""
    folder = checkpoint(tmp_path, CONFIG, tensors(CONFIG))
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        message = refusal(folder)
        assert str(file) in message and "again" in message, size
        assert size < 8 or "truncated" in message, size
    file.write_bytes(whole + b"\0")
    assert "longer than its header says" in refusal(folder)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": null}',
        b"\xff\xfe",
    ],
)
def test_bad_headers(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(hf.LoadError, match=r"model\.safetensors.*(again|damaged)"):
        tensor_files.read_header(file)


def test_page_instead_of_a_file(tmp_path):
    """A download that saved an error page or a pointer file."""
    folder = checkpoint(tmp_path, CONFIG, tensors(CONFIG))
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "is no safetensors file" in refusal(folder)


def test_index_and_files_disagree(tmp_path):
    folder = checkpoint(tmp_path, CONFIG, tensors(CONFIG), files=3)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    second = folder / "model-00002-of-00003.safetensors"

    bytes_ = second.read_bytes()
    second.unlink()
    message = refusal(folder)
    assert f"{second} is missing" in message and "index.json says it holds" in message
    second.write_bytes(bytes_)

    moved = good["weight_map"] | {Q: "model-00001-of-00003.safetensors"}
    if good["weight_map"][Q] == moved[Q]:
        moved[Q] = second.name
    index.write_text(json.dumps({"weight_map": moved}))
    assert repr(Q) in refusal(folder)

    index.write_text(json.dumps({"weight_map": good["weight_map"] | {"ghost": second.name}}))
    message = refusal(folder)
    assert "'ghost'" in message and str(second) in message

    index.write_text('{"weight_map": 3}')
    assert "index.json is damaged" in refusal(folder)


def test_two_names_for_one_parameter(tmp_path):
    values = tensors(CONFIG)
    values["language_model.lm_head.weight"] = values["lm_head.weight"].copy()
    message = refusal(checkpoint(tmp_path, CONFIG, values))
    assert "'lm_head.weight'" in message and "'language_model.lm_head.weight'" in message


def test_wrong_prefix_is_not_silently_empty(tmp_path):
    values = {f"transformer.{name}": value for name, value in tensors(CONFIG).items()}
    message = refusal(checkpoint(tmp_path, CONFIG, values))
    assert f"{len(values)} missing" in message and f"{len(values)} unknown" in message


def test_quantised_checkpoint(tmp_path):
    values = tensors(CONFIG)
    values[Q] = values[Q].astype(np.int8)
    assert "has dtype I8, not one of" in refusal(checkpoint(tmp_path, CONFIG, values))


def test_layers_of_several_dtypes(tmp_path):
    values = tensors(CONFIG)
    values[Q] = values[Q].astype(ml_dtypes.bfloat16)
    assert "several dtypes" in refusal(checkpoint(tmp_path, CONFIG, values))


def test_per_expert_files(tmp_path):
    """A missing and a surplus expert are named one by one."""
    values = tensors(SPARSE)
    fused = {name: values.pop(name) for name in list(values) if ".experts." in name}
    for name, value in fused.items():
        stem = name.rsplit(".", 1)[0]
        for expert, matrix in enumerate(value):
            parts = {"down": matrix} if "down" in name else {"gate": matrix[:, :6], "up": matrix[:, 6:]}
            for part, weight in parts.items():
                values[f"{stem}.{expert}.{part}_proj.weight"] = weight.T.copy()
    prefix = "model.language_model.layers.1.mlp.experts"
    values[f"{prefix}.3.up_proj.weight"] = values.pop(f"{prefix}.2.up_proj.weight")
    message = refusal(checkpoint(tmp_path, SPARSE, values))
    assert f"1 missing:\n  '{prefix}.2.up_proj.weight'" in message
    assert "1 unknown:" in message and f"'{prefix}.3.up_proj.weight'" in message


def test_sources_that_are_no_folder(tmp_path):
    assert "is not a folder" in refusal(tmp_path / "absent")
    assert "is not a folder" in refusal("./absent/model")
    checkpoint(tmp_path, CONFIG, tensors(CONFIG))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin, convert" in refusal(tmp_path)


def test_hub_without_a_network():
    """The suite runs with HF_HUB_OFFLINE=1, so that this never reaches out."""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    message = refusal("some-owner/some-model-that-is-nowhere")
    assert "Without a network" in message and "some-owner/some-model-that-is-nowhere" in message


class TestExport:
    """What export refuses, and what it leaves behind."""

    @pytest.fixture
    def params(self):
        return build_tree(CONFIG, lambda row: np.ones(row.full_shape, np.float32))

    def test_folder_in_use(self, params, tmp_path):
        (tmp_path / "mine").write_text("keep")
        with pytest.raises(hf.ExportError, match=r"not empty.*overwrite=True"):
            hf.export(params, CONFIG, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]
        hf.export(params, CONFIG, tmp_path / "sub" / "out")
        (tmp_path / "sub" / "out" / "stale").write_text("old")
        hf.export(params, CONFIG, tmp_path / "sub" / "out", overwrite=True)
        assert not (tmp_path / "sub" / "out" / "stale").exists()
        assert [path.name for path in (tmp_path / "sub").iterdir()] == ["out"], "no draft is left"

    def test_interrupted_export_leaves_nothing(self, params, tmp_path, monkeypatch):
        def full(path, entries, arrays):
            next(iter(arrays))
            path.write_bytes(b"half")
            raise OSError("no space left")

        monkeypatch.setattr(hf, "write", full)
        with pytest.raises(OSError, match="no space left"):
            hf.export(params, CONFIG, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_wrong_trees(self, params, tmp_path):
        deeper = dataclasses.replace(CONFIG, text=dataclasses.replace(TEXT, layers=4))
        with pytest.raises(hf.ExportError, match=r"layers\.\S+ has shape \(2, .*asks for \(3, "):
            hf.export(params, deeper, tmp_path / "out")
        with pytest.raises(hf.ExportError, match=r"lacks head\.kernel"):
            hf.export({k: v for k, v in params.items() if k != "head"}, CONFIG, tmp_path / "out")
        with pytest.raises(hf.ExportError, match=r"1 parameters that the model lacks \(lora.a\)"):
            hf.export(params | {"lora": {"a": np.ones(2)}}, CONFIG, tmp_path / "out")
        with pytest.raises(hf.ExportError, match=r"int8.*choose bfloat16"):
            hf.export(params, CONFIG, tmp_path / "out", dtype="int8")
        with pytest.raises(hf.ExportError, match=r"no tokenizer\.json"):
            hf.export(params, CONFIG, tmp_path / "out", tokenizer_from=tmp_path)
        assert not (tmp_path / "out").exists()


def test_library_reads_what_we_write(tmp_path):
    """Our writer against the library's reader, and its writer against our reader, for every dtype."""
    rng = np.random.default_rng(1)
    values = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal(7).astype(ml_dtypes.bfloat16),
        "c": rng.standard_normal((2, 2, 2)).astype(np.float16),
    }
    kinds = {np.dtype(kind): name for name, kind in tensor_files.FLOATS.items()}
    entries = [tensor_files.Entry(name=k, dtype=kinds[v.dtype], shape=v.shape) for k, v in values.items()]
    tensor_files.write(tmp_path / "ours", entries, iter(values.values()))
    save_file(values, tmp_path / "theirs")
    read = load_file(tmp_path / "ours")
    assert set(read) == set(values)
    for name, value in values.items():
        assert read[name].dtype == value.dtype and read[name].tobytes() == value.tobytes()
        stored = tensor_files.read_header(tmp_path / "theirs")[name]
        assert stored.bits().tobytes() == value.tobytes() and stored.shape == value.shape
    with pytest.raises(ValueError, match="a: float16"):
        tensor_files.write(tmp_path / "bad", entries[:1], [values["a"].astype(np.float16)])


def test_shards_respect_their_limit():
    entries = [tensor_files.Entry(name=str(n), dtype="F32", shape=(n,)) for n in (3, 3, 9, 1, 1, 4)]
    files = tensor_files.shards(entries, 24)
    assert [[entry.name for entry in file] for file in files] == [["3", "3"], ["9"], ["1", "1", "4"]]


MEASURE = """
import re, sys, threading, time
import jax, jax.numpy as jnp
from owrl_jax.models import hf
from owrl_jax.sharding import TRAIN_RULES, MeshConfig, Sharder, make_mesh

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

def measured(work):
    peak, done = [resident()], threading.Event()
    start = peak[0]
    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], resident())
    thread = threading.Thread(target=watch)
    thread.start()
    result = work()
    done.set()
    thread.join()
    return peak[0] - start, result

sharder = Sharder(make_mesh(MeshConfig(fsdp=-1)), TRAIN_RULES)
jax.jit(lambda x: x @ x)(jnp.ones((64, 64))).block_until_ready()
peak, (config, params) = measured(lambda: jax.block_until_ready(hf.load(sys.argv[1], sharder=sharder)))
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 2**20
out, _ = measured(lambda: hf.export(params, config, sys.argv[2]))
print(size, peak - size, out)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("devices", [1, 8])
def test_peak_memory(tmp_path, devices):
    """Beside the parameters themselves, loading and exporting hold about one tensor, not one stack of layers.

    Sixteen layers make 790 MiB; the largest tensor has 15 MiB, the largest stack 240. What jax itself grows by
    (programs, allocator) is within the allowance, one stack is not.
    """
    text = TextConfig(
        vocab=4096, model=1536, layers=16, heads=8, kv_heads=2, head_dim=64, mlp=5120, mrope_section=(12, 10, 10)
    )
    config = ModelConfig(text=text)
    names = [(name, row.layout.hf_shape) for row in table(config) for name in row.hf_names()]
    noise = np.random.default_rng(0).standard_normal(1 << 23, np.float32).astype(ml_dtypes.bfloat16)
    entries = [tensor_files.Entry(name=name, dtype="BF16", shape=shape) for name, shape in names]
    folder = tmp_path / "big"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    arrays = (noise[: int(np.prod(shape))].reshape(shape) for _, shape in names)
    tensor_files.write(folder / "model.safetensors", entries, arrays)
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(pathlib.Path(hf.__file__).parents[2]),
    }
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    size, loading, exporting = map(float, run.stdout.split())
    print(f"{devices} devices: parameters {size:.0f} MiB, beyond them {loading:.0f} loading, {exporting:.0f} exporting")
    assert size > 700
    assert loading < 200 and exporting < 200, (loading, exporting)
