"""Checkpoints in one process: bit for bit, onto other meshes, what is refused, what is kept, what damage looks like."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from owrl_jax.checkpoint import CheckpointError, Checkpoints, abstract, folders, verify
from owrl_jax.checkpoint.arrays import _fingerprint_host, fingerprints, is_key, nbytes
from owrl_jax.checkpoint.cli import main
from owrl_jax.config import CheckpointSettings

RECORD = {"cursor": {"consumed": ["a", "b"]}, "tasks": {"a": [1, 5]}, "journal": 17, "config_sha256": "ab"}


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("fsdp",))


def shardings_of(state, devices: int):
    """Leaves of 16 rows are split over the mesh, all others are whole on every device."""
    mesh = mesh_of(devices)

    def one(leaf):
        split = bool(leaf.ndim) and leaf.shape[0] == 16 and not is_key(leaf)
        return NamedSharding(mesh, PartitionSpec("fsdp") if split else PartitionSpec())

    return jax.tree.map(one, state)


def make_state(devices: int = 8, seed: int = 0):
    params = {
        "table": jax.random.normal(jax.random.key(seed), (16, 24)),
        "half": jax.random.normal(jax.random.key(seed + 1), (16, 8)).astype(jnp.bfloat16),
        "scale": jnp.full((5,), seed, jnp.float32),
    }
    state = {
        "params": params,
        "optimiser": optax.adamw(1e-3).init(params),
        "key": jax.random.key(seed + 7),
        "updates": jnp.int32(40 + seed),
        "mask": jnp.arange(16) % 3 == 0,
        "nothing": jnp.zeros((0, 3)),
    }
    return jax.device_put(state, shardings_of(state, devices))


def plain(tree):
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(plain(left), plain(right), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints, steps 1 and 2, from eight devices. Tests that change files copy the folder."""
    folder = tmp_path_factory.mktemp("checkpoints")
    states = {step: make_state(seed=step) for step in (1, 2)}
    with Checkpoints(folder, CheckpointSettings(keep=3)) as store:
        for step, state in states.items():
            store.save(step, state, RECORD | {"step": step})
    return folder, states


@pytest.mark.parametrize("devices", [8, 4, 1])
def test_a_state_comes_back_bit_for_bit_on_any_number_of_devices(saved, devices):
    folder, states = saved
    target = abstract(jax.eval_shape(lambda: states[2]), shardings_of(states[2], devices))
    state, record = Checkpoints(folder, write=False).restore(target)
    assert_same_bits(state, states[2])
    assert record == RECORD | {"step": 2}
    assert state["params"]["table"].sharding.num_devices == devices
    # Random numbers go on where they were.
    assert jax.random.normal(state["key"], (3,)).tolist() == jax.random.normal(states[2]["key"], (3,)).tolist()


def test_an_older_step_and_a_part_of_a_state_can_be_asked_for(saved):
    folder, states = saved
    one = SingleDeviceSharding(jax.devices()[3])
    store = Checkpoints(folder, write=False)
    part, record = store.restore({"params": abstract(states[1]["params"], one)}, step=1, partial=True)
    assert_same_bits(part["params"], states[1]["params"])
    assert record["step"] == 1 and part["params"]["table"].sharding == one
    on_host, _ = store.restore({"updates": np.zeros((), np.int32)}, step=1, partial=True)
    assert isinstance(on_host["updates"], np.ndarray) and on_host["updates"] == 41
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 9 \(complete: 1, 2\)"):
        store.find(9)


def test_no_sharding_no_restore(saved):
    folder, states = saved
    with pytest.raises(CheckpointError, match=r"no sharding for key, mask, .* and 10 more"):
        Checkpoints(folder, write=False).restore(jax.eval_shape(lambda: states[2]))


def test_every_difference_between_state_and_checkpoint_is_named(saved):
    folder, states = saved
    other = dict(states[2])
    other["params"] = {"table": jnp.zeros((16, 25)), "half": jnp.zeros((16, 8)), "extra": jnp.zeros(3)}
    target = abstract(other, SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(CheckpointError) as error:
        Checkpoints(folder, write=False).restore(target)
    for part in (
        "lacks params.extra", "also has params.scale", "params.half has dtype bfloat16, wanted is float32",
        "params.table has shape [16, 24], wanted is [16, 25]",
    ):  # fmt: skip
        assert part in str(error.value)


def test_the_state_may_change_as_soon_as_save_returns(tmp_path):
    start = {"x": jnp.arange(4096, dtype=jnp.float32)}
    bump = jax.jit(lambda state: {"x": state["x"] + 1}, donate_argnums=0)
    with Checkpoints(tmp_path) as store:
        state = start
        for step in range(3):
            store.save(step, state, {"step": step})
            state = bump(state)
        store.wait()
        for step in range(3):
            target = abstract({"x": jax.ShapeDtypeStruct((4096,), jnp.float32)}, SingleDeviceSharding(jax.devices()[0]))
            back, _ = store.restore(target, step=step)
            assert back["x"].tolist() == (np.arange(4096) + step).tolist()


@pytest.mark.parametrize(
    ("state", "record", "message"),
    [
        ({"n": 3}, {}, r"n is a int \(3\), not an array"),
        ({"x": jnp.ones(2)}, {"t": {1: 2}}, "t would not read back equal"),
        ({"x": jnp.ones(2)}, {"t": float("nan")}, "cannot be saved as JSON"),
        ({"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}}, {}, "both called a.b"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path, state, record, message):
    with Checkpoints(tmp_path) as store, pytest.raises(CheckpointError, match=message):
        store.save(1, state, record)
    assert list(tmp_path.iterdir()) == []


def test_old_checkpoints_go_and_milestones_stay(tmp_path):
    with Checkpoints(tmp_path, CheckpointSettings(keep=2, keep_every=4)) as store:
        for step in range(1, 8):
            store.save(step, {"x": jnp.full((3,), step)}, {})
        store.wait()
        assert [saved.step for saved in store.all()] == [4, 6, 7]
        assert store.latest().step == 7
        # A run that went back to step 4 and saves 5 again resumes from that, not from the larger number.
        store.save(5, {"x": jnp.zeros(3)}, {})
        store.save(5, {"x": jnp.ones(3)}, {})
        store.wait()
        assert [saved.folder.name for saved in store.all()] == ["step-00000004", "step-00000005", "step-00000005.1"]
        target = abstract({"x": jnp.ones(3)})
        assert store.restore(target)[0]["x"].tolist() == [1, 1, 1]


def test_unfinished_saves_are_ignored_and_swept_by_the_next_run(saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "run")
    shutil.copytree(folder / "step-00000002", folder / ".step-00000003.saving")
    lost = shutil.copytree(folder / "step-00000002", folder / "step-00000004")
    next(path for path in lost.rglob("*") if path.is_file() and path.name != "manifest.json").unlink()
    store = Checkpoints(folder, write=False)
    assert [saved.step for saved in store.all()] == [1, 2] and store.latest().step == 2
    assert [path.name for path in folders.incomplete(folder)] == [".step-00000003.saving", "step-00000004"]
    with Checkpoints(folder):
        pass
    assert not (folder / ".step-00000003.saving").exists()


@pytest.mark.parametrize("pointer", ["step-00000009\n", "", None])
def test_a_pointer_that_names_nothing_falls_back_to_the_newest_complete_one(saved, tmp_path, pointer, caplog):
    folder = shutil.copytree(saved[0], tmp_path / "run")
    (folder / "latest").unlink()
    if pointer is not None:
        (folder / "latest").write_text(pointer)
    assert Checkpoints(folder, write=False).latest().step == 2
    assert "newest complete checkpoint is step-00000002" in caplog.text


def test_verify_restores_and_finds_one_flipped_bit(saved, tmp_path, capsys):
    folder = shutil.copytree(saved[0], tmp_path / "run")
    assert verify(folder)[1] == []
    assert main(["verify", str(folder)]) == 0
    victim = max(
        (folder / "step-00000002" / "state").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size
    )
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert [victim.name in problem for problem in verify(folder)[1]] == [True]
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 1
    assert "other content than was written" in capsys.readouterr().out
    assert main(["verify", str(folder), "--step", "1"]) == 0


def test_arrays_that_differ_from_what_lay_on_the_devices_are_found(saved, tmp_path):
    """The files are whole and their checksums right, but they do not hold what the devices held."""
    folder = shutil.copytree(saved[0], tmp_path / "run")
    path = folder / "step-00000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["arrays"]["params.table"]["fingerprint"] ^= 1
    path.write_text(json.dumps(manifest))
    assert verify(folder)[1] == ["params.table has other values than were saved"]
    with pytest.raises(CheckpointError, match=r"params\.table did not come back as saved"):
        Checkpoints(folder, write=False).restore(abstract(saved[1][2]))


def test_verify_finds_values_that_are_not_finite(tmp_path):
    with Checkpoints(tmp_path) as store:
        store.save(0, {"x": jnp.array([1.0, jnp.nan])}, {})
    assert verify(tmp_path)[1] == ["x holds values that are not finite"]


def test_the_fingerprint_sees_bits_and_places_and_not_the_split():
    rng = np.random.default_rng(0)
    for dtype in (np.float32, jnp.bfloat16, np.int8, np.uint32, bool):
        noise = rng.normal(size=(16, 6)) * 3
        array = noise > 0 if dtype is bool else noise.astype(dtype)
        whole = fingerprints({"x": jnp.asarray(array)})["x"]
        split = jax.device_put(jnp.asarray(array), NamedSharding(mesh_of(8), PartitionSpec("fsdp")))
        assert whole == fingerprints({"x": split})["x"] == _fingerprint_host(array) == fingerprints({"x": array})["x"]
        swapped = array.copy()
        swapped[[0, 1]] = swapped[[1, 0]]
        assert fingerprints({"x": jnp.asarray(swapped)})["x"] != whole
    # One array worked out with Python's own integers.
    total = 0
    for place, value in enumerate([2, 3, 2**31]):
        weight = place * 0x9E3779B1 % 2**32
        weight = (weight ^ (weight >> 15)) * 0x85EBCA6B % 2**32 | 1
        total += value * weight
    assert fingerprints({"x": jnp.array([2, 3, 2**31], jnp.uint32)})["x"] == total % 2**32


def test_space_is_counted_before_the_start(tmp_path, monkeypatch):
    state = {"x": jnp.zeros((256, 1024)), "k": jax.random.key(0)}
    assert nbytes(state) == 256 * 1024 * 4 + 8
    usage = shutil.disk_usage(tmp_path)
    with Checkpoints(tmp_path, CheckpointSettings(keep=2)) as store:
        assert store.check_space(state) == nbytes(state)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 * nbytes(state) - 1))
        with pytest.raises(CheckpointError, match=r"3 more checkpoints of 1\.00 MiB .*checkpoint\.keep=2"):
            store.check_space(state)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=nbytes(state) - 1))
        with pytest.raises(CheckpointError, match="free space and save again"):
            store.save(1, state, {})


@pytest.mark.parametrize("seam", ["fsync", "move_pointer"])
def test_a_full_disk_surfaces_and_loses_nothing(tmp_path, monkeypatch, seam):
    state = {"x": jnp.arange(8)}
    store = Checkpoints(tmp_path)
    store.save(1, state, {"step": 1})
    store.wait()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folders, seam, full)
        store.save(2, {"x": jnp.arange(8) * 2}, {"step": 2})
        with pytest.raises(
            CheckpointError, match=r"step 2 was not saved .*No space left.*durable checkpoint is step 1"
        ):
            store.wait()
    assert store.latest().step == 1
    assert store.restore(abstract(state))[1] == {"step": 1}
    store.save(2, {"x": jnp.arange(8) * 2}, {"step": 2})
    store.close()
    state, record = Checkpoints(tmp_path, write=False).restore(abstract(state))
    assert record == {"step": 2} and state["x"].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


def test_orbax_failing_in_the_background_surfaces_once(tmp_path):
    store = Checkpoints(tmp_path)
    store.save(1, {"x": jnp.arange(8)}, {})
    store.wait()
    real = store._saver

    class Full:
        """As orbax's saver, until it is asked how the writing went."""

        save = staticmethod(real.save)

        @staticmethod
        def wait_until_finished():
            real.wait_until_finished()
            raise OSError(122, "Disk quota exceeded")

    store._saver = Full
    store.save(2, {"x": jnp.arange(8)}, {})
    with pytest.raises(CheckpointError, match=r"Disk quota exceeded.*step 1 and is untouched"):
        store.save(3, {"x": jnp.arange(8)}, {})
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".step")]
    store.save(3, {"x": jnp.arange(8)}, {})
    store.close()
    assert [saved.step for saved in store.all()] == [1, 3]


def test_a_folder_that_cannot_be_used_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be used for checkpoints"):
        Checkpoints(tmp_path / "file" / "checkpoints")
    with pytest.raises(CheckpointError, match="opened for reading"):
        Checkpoints(tmp_path, write=False).save(1, {"x": jnp.ones(1)}, {})
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        Checkpoints(tmp_path / "nowhere", write=False).find()


async def test_saving_works_inside_an_event_loop(tmp_path):
    with Checkpoints(tmp_path) as store:
        store.save(1, {"x": jnp.arange(3)}, {"sizes": (1, (2, 3))})
        store.wait()
        state, record = store.restore(abstract({"x": jnp.arange(3)}))
        assert state["x"].tolist() == [0, 1, 2] and record == {"sizes": [1, [2, 3]]}


def test_the_list_names_what_a_run_resumes_from(saved, tmp_path, capsys):
    folder = shutil.copytree(saved[0], tmp_path / "run")
    (folder / ".step-00000003.saving").mkdir()
    assert main(["list", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert "step-00000001" in lines[0] and "resumes" not in lines[0]
    assert "step-00000002  <- a run resumes from here" in lines[1]
    assert "not complete, never used: .step-00000003.saving" in lines[2]
    assert main(["list", str(tmp_path / "none")]) == 1
    assert main(["frobnicate"]) == 2 and main(["--help"]) == 0


def test_export_writes_what_transformers_reads(tmp_path, capsys):
    from owrl_jax.models.hf import load
    from owrl_jax.models.qwen3_vl.config import ModelConfig, TextConfig, to_hf
    from owrl_jax.models.qwen3_vl.model import Qwen3VL

    config = ModelConfig(
        text=TextConfig(vocab=64, model=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=32, mrope_section=(2, 1, 1)),
    )
    params = Qwen3VL(config).init(jax.random.key(0))
    with Checkpoints(tmp_path / "run") as store:
        store.save(3, {"params": params, "optimiser": {"m": jnp.zeros(4)}}, {"model": to_hf(config, dtype="float32")})
    argv = ["export-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "float32"]
    assert main(argv) == 0
    back, again = load(tmp_path / "out")
    assert back == config
    assert_same_bits(again, params)
    assert main(argv) == 1  # the folder is there
    assert "overwrite" in capsys.readouterr().err
