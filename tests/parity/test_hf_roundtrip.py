"""Weights in and out against what `transformers` writes and strictly loads."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from owrl_jax.models import hf
from owrl_jax.models.qwen3_vl.config import read_config
from owrl_jax.models.qwen3_vl.table import leaves, table
from owrl_jax.sharding import TRAIN_RULES, MeshConfig, Sharder, make_mesh
from tests.parity import tiny_models as tiny

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, tuple[dict[str, np.ndarray], pathlib.Path]]:
    """Per kind: the model's parameters by name as `transformers` saved them, and the folder."""
    from safetensors.numpy import load_file

    made = {}
    for kind in tiny.KINDS:
        folder = tiny.save(tiny.tiny_hf_model(kind, seed=3), tmp_path_factory.mktemp(kind))
        made[kind] = load_file(folder / "model.safetensors"), folder
    return made


def _files(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, read by the safetensors library."""
    import ml_dtypes  # noqa: F401  numpy learns bfloat16
    from safetensors.numpy import load_file

    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not set(part) & set(tensors)
        tensors |= part
    return tensors


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _equal_trees(a, b) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        _same(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def _strict(folder: pathlib.Path):
    """The exported model as `transformers` loads it, with nothing missing, unexpected or newly initialised."""
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_leaves_hold_the_values_of_their_tensors(checkpoints, kind):
    """Spot checks by hand, one per layout: our index of a value, and where torch keeps it."""
    values, folder = checkpoints[kind]
    config, params = hf.load(folder)
    prefix = "model." if kind == "text" else "model.language_model."
    split = 0 if kind == "text" else 3
    assert _same(np.asarray(params["embed"]["table"]), values[f"{prefix}embed_tokens.weight"])
    q = values[f"{prefix}layers.{split + 1}.self_attn.q_proj.weight"]  # [heads · head_dim, model]
    assert params["layers"]["attn"]["q"][1, 7, 2, 5] == q[2 * 32 + 5, 7]
    o = values[f"{prefix}layers.{split}.self_attn.o_proj.weight"]  # [model, heads · head_dim]
    assert params["layers"]["attn"]["o"][0, 3, 30, 11] == o[11, 3 * 32 + 30]
    if kind != "text":
        v = values["model.language_model.layers.2.self_attn.v_proj.weight"]
        assert params["deep"]["attn"]["v"][2, 40, 1, 31] == v[32 + 31, 40]
        qkv = values["model.visual.blocks.2.attn.qkv.weight"]  # [3 · heads · head_dim, model]; stages: 0 | 1 2 | 3 | 4
        assert params["vision"]["stage1"]["attn"]["qkv"]["kernel"][1, 9, 1, 1, 6] == qkv[32 + 16 + 6, 9]
        bias = values["model.visual.blocks.2.attn.qkv.bias"]
        assert params["vision"]["stage1"]["attn"]["qkv"]["bias"][1, 2, 0, 3] == bias[64 + 3]
        conv = values["model.visual.patch_embed.proj.weight"]  # [out, channel, time, row, column]
        assert params["vision"]["patch"]["kernel"][1, 2 * 256 + 5 * 16 + 9, 4] == conv[4, 2, 1, 5, 9]
        fc1 = values["model.visual.deepstack_merger_list.2.linear_fc1.weight"]
        assert params["vision"]["deepstack"]["fc1"]["kernel"][2, 100, 3] == fc1[3, 100]
    if kind == "moe":
        fused = values["model.language_model.layers.4.mlp.experts.gate_up_proj"]  # [expert, gate then up, model]
        assert fused.shape == (8, 80, 64), "transformers 5 saves output-major"
        assert params["layers"]["mlp"]["gate_up"][1, 5, 50, 0, 12] == fused[5, 12, 50]
        assert params["layers"]["mlp"]["gate_up"][1, 5, 50, 1, 12] == fused[5, 40 + 12, 50]
        down = values["model.language_model.layers.0.mlp.experts.down_proj"]
        assert params["deep"]["mlp"]["down"][0, 7, 33, 60] == down[7, 60, 33]
    if kind in ("untied", "moe"):
        assert params["head"]["kernel"][13, 400] == values["lm_head.weight"][400, 13]
    assert ("head" in params) == (kind in ("untied", "moe")) and config.text.tied == (kind in ("tied", "text"))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_export_equals_the_source_and_loads_strictly(checkpoints, kind, tmp_path):
    """float32: key, shape, dtype and value sets equal the source (T52), several shards, and our own reading of it."""
    values, folder = checkpoints[kind]
    config, params = hf.load(folder)
    out = tmp_path / "out"
    written = hf.export(params, config, out, dtype="float32", expert_layout="output_major", max_shard_bytes=600_000)
    assert {path.name for path in written} >= {"config.json", "generation_config.json", "model.safetensors.index.json"}
    exported = _files(out)
    assert set(exported) == set(values)
    assert all(_same(exported[name], values[name]) for name in values)

    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(values)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in values.values())
    assert len(set(index["weight_map"].values())) > 1
    assert read_config(out) == config
    reference = tiny.tiny_hf_model(kind, seed=3).state_dict()
    loaded = _strict(out).state_dict()
    assert set(loaded) == set(reference)
    assert all(torch.equal(loaded[name], reference[name]) for name in reference)
    assert _equal_trees(hf.load(out)[1], params)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_bfloat16_round_trip_is_bit_exact(checkpoints, kind, tmp_path):
    """Rounding is torch's; after it nothing changes any more. Experts go out in the layout of the released files."""
    _, folder = checkpoints[kind]
    config, params = hf.load(folder)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    out, again = tmp_path / "out", tmp_path / "again"
    hf.export(params, config, out)
    _, back = hf.load(out)
    assert _equal_trees(back, rounded)
    hf.export(back, config, again)
    assert all(_same(value, _files(again)[name]) for name, value in _files(out).items())
    if kind == "moe":
        assert _files(out)["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 64, 80)
    reference = tiny.tiny_hf_model(kind, seed=3).to(torch.bfloat16).state_dict()
    loaded = _strict(out).state_dict()
    assert all(torch.equal(loaded[name], reference[name]) for name in reference)
    assert jax.tree.leaves(hf.load(out, dtype=jnp.float32)[1])[0].dtype == jnp.float32


@pytest.mark.parametrize(
    "kind, mesh", [("moe", MeshConfig(fsdp=2, tensor=2, expert=2)), ("text", MeshConfig(replica=2, fsdp=4))]
)
def test_sharded_load_and_export(checkpoints, kind, mesh, tmp_path):
    """Eight devices hold the same values as one, each only its part, and export the same files."""
    values, folder = checkpoints[kind]
    sharder = Sharder(make_mesh(mesh), TRAIN_RULES)
    config, params = hf.load(folder, sharder=sharder)
    assert _equal_trees(params, hf.load(folder)[1])
    for row, leaf in leaves(config, params):
        assert leaf.sharding == sharder.sharding(row.full_axes, row.full_shape), row.name
    assert any(leaf.addressable_shards[0].data.size < leaf.size for leaf in jax.tree.leaves(params))
    hf.export(params, config, tmp_path / "out", dtype="float32", expert_layout="output_major")
    exported = _files(tmp_path / "out")
    assert set(exported) == set(values) and all(_same(exported[name], values[name]) for name in values)


def _rename(name: str, rules: dict[str, str]) -> str:
    for old, new in rules.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


PREFIXES = {
    "model. and visual.": ("untied", {"model.visual.": "visual.", "model.language_model.": "model."}),
    "language_model.model.": (
        "untied",
        {
            "model.visual.": "visual.",
            "model.language_model.": "language_model.model.",
            "lm_head": "language_model.lm_head",
        },
    ),
    "headless": ("tied", {"model.": ""}),
    "headless text": ("text", {"model.": ""}),
}


@pytest.mark.parametrize("kind, rules", PREFIXES.values(), ids=PREFIXES.keys())
def test_prefixes_of_other_versions(checkpoints, kind, rules, tmp_path):
    from safetensors.numpy import save_file

    values, folder = checkpoints[kind]
    renamed = {_rename(name, rules): value for name, value in values.items()}
    assert set(renamed) != set(values)
    renamed["model.language_model.rotary_emb.inv_freq"] = np.ones(16, np.float32)  # stored by old versions
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert _equal_trees(hf.load(tmp_path)[1], hf.load(folder)[1])


@pytest.mark.parametrize("form", ["input_major", "per_expert"])
@pytest.mark.parametrize("mlp", [40, 32, 64], ids=["plain", "2I=D", "I=D"])
def test_expert_layouts(form, mlp, tmp_path):
    """Each form gives the same tree, where shapes alone do not tell the two fused forms apart as well."""
    from safetensors.numpy import load_file, save_file

    folder = tiny.save(tiny.tiny_hf_model("moe", seed=5, text_config={"moe_intermediate_size": mlp}), tmp_path / "a")
    values = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if ".experts." not in name:
            values[name] = value
        elif form == "input_major":
            values[name] = np.ascontiguousarray(value.swapaxes(1, 2))
        else:
            stem = name.rsplit(".", 1)[0]
            for expert, matrix in enumerate(value):
                parts = {"down": matrix} if "down" in name else {"gate": matrix[:mlp], "up": matrix[mlp:]}
                for part, weight in parts.items():
                    values[f"{stem}.{expert}.{part}_proj.weight"] = np.ascontiguousarray(weight)
    other = tmp_path / "b"
    other.mkdir()
    save_file(values, other / "model.safetensors")
    (other / "config.json").write_text((folder / "config.json").read_text())
    config, params = hf.load(folder)
    assert _equal_trees(hf.load(other)[1], params)
    if form == "per_expert":
        sharder = Sharder(make_mesh(MeshConfig(fsdp=2, tensor=2, expert=2)), TRAIN_RULES)
        assert _equal_trees(hf.load(other, sharder=sharder)[1], params)
    hf.export(params, config, tmp_path / "c", dtype="float32")
    reference = tiny.tiny_hf_model("moe", seed=5, text_config={"moe_intermediate_size": mlp}).state_dict()
    loaded = _strict(tmp_path / "c").state_dict()
    assert all(torch.equal(loaded[name], reference[name]) for name in reference)
    assert _equal_trees(hf.load(tmp_path / "c")[1], params)


def test_copies_tokenizer_and_processor_files(checkpoints, tmp_path):
    """Copied byte for byte; what is made without a source folder, `transformers` reads."""
    import transformers

    from owrl_jax.models.tokenizer import default_chat_template, train_small_tokenizer

    _, folder = checkpoints["tied"]
    config, params = hf.load(folder)
    source = tmp_path / "source"
    source.mkdir()
    train_small_tokenizer(["a few words to learn from, and a few more words"] * 4, 400, source)
    (source / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true}')
    out = tmp_path / "out"
    written = hf.export(params, config, out, tokenizer_from=source)
    assert written == sorted(out.iterdir())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(out))
    assert tokenizer.chat_template == default_chat_template()
    assert transformers.GenerationConfig.from_pretrained(out).temperature == 0.7
    image = transformers.AutoImageProcessor.from_pretrained(str(out), use_fast=False)
    assert (image.patch_size, image.merge_size, image.temporal_patch_size) == (16, 2, 2)


def test_presets_count_as_transformers_counts():
    """Parameter counts of the published sizes, from models without storage."""
    from owrl_jax.models.qwen3_vl.config import PRESETS, to_hf
    from owrl_jax.models.qwen3_vl.table import parameter_count

    for name, config in PRESETS.items():
        model = tiny.hf_model_of(to_hf(config), device="meta")
        assert parameter_count(config) == sum(p.numel() for p in model.parameters()), name


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_table_names_every_tensor_once(checkpoints, kind):
    values, folder = checkpoints[kind]
    names = [name for row in table(read_config(folder)) for name in row.hf_names()]
    assert len(names) == len(set(names)) and set(names) == set(values)


def test_tied_head_that_is_stored_again(checkpoints, tmp_path):
    """Accepted if equal; if not, the tie flag is wrong, and the message says so (F11)."""
    from safetensors.numpy import save_file

    values, folder = checkpoints["tied"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    head = values["model.language_model.embed_tokens.weight"].copy()
    save_file(values | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert _equal_trees(hf.load(tmp_path)[1], hf.load(folder)[1])
    head[-1, -1] += 1
    save_file(values | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(hf.LoadError, match=r"lm_head.weight.*differs from the embedding.*tie_word_embeddings=true"):
        hf.load(tmp_path)


def test_untied_without_a_head(checkpoints, tmp_path):
    from safetensors.numpy import save_file

    values, folder = checkpoints["untied"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file({k: v for k, v in values.items() if k != "lm_head.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(hf.LoadError, match=r"1 missing:\s+'lm_head.weight'[\s\S]*not tied"):
        hf.load(tmp_path)
    config = read_config(folder)
    tied = dataclasses.replace(config, text=dataclasses.replace(config.text, tied=True))
    assert "head" not in hf.load(tmp_path, config=tied)[1]
