"""Weights in and out: a Hugging Face checkpoint to a (sharded) parameter tree, and back.

`load` first checks names, shapes, sizes and dtypes of everything from the files' headers; only then does it read, one
tensor at a time and of it only what this host's devices keep. A stacked parameter grows on the devices, layer by layer,
so the host never holds more than about one tensor of the files. `export` goes the same way back and puts the finished
folder in place with one rename.

Invariants: `load(export(x)) == x` bit for bit in the exported dtype; a failed load returns nothing; a failed export
leaves nothing. No torch.

Input layouts and names are the matter of `hf_names.py`, the file format of `tensor_files.py`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from owrl_jax.models.hf_files import ExportError, sidecar_files
from owrl_jax.models.hf_names import ExpertLayout, Source, layout_of, plan
from owrl_jax.models.qwen3_vl.config import ModelConfig, read_config, to_hf
from owrl_jax.models.qwen3_vl.table import Layout, Row, build_tree, leaves, table
from owrl_jax.models.tensor_files import FLOATS, INDEX, Entry, LoadError, read_folder, shards, write
from owrl_jax.sharding import Sharder

__all__ = ["ExportError", "LoadError", "export", "load"]

Params = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------- load


def load(
    source: str | pathlib.Path, *, sharder: Sharder | None = None, dtype: Any = None, config: ModelConfig | None = None
) -> tuple[ModelConfig, Params]:
    """A model's configuration and parameters.

    Args:
      source: a folder with `config.json` and safetensors files, or the id of a model on the Hugging Face hub.
      sharder: how the parameters lie on a mesh; None puts them on the first local device.
      dtype: of the parameters; None keeps what the files have.
      config: taken instead of the folder's `config.json`.
    Returns:
      The configuration, and the parameter tree of `table(config)`.
    Raises:
      LoadError: if files, names, shapes or dtypes are not exactly those of the model; says which, and what to do.
      ConfigError: if `config.json` is missing or describes a model that is not implemented.
    """
    folder = local_folder(source)
    config = read_config(folder) if config is None else config
    sources = {row.path: found for row, found in plan(config, read_folder(folder))}
    dtypes = {path: _dtype_of(path, found, dtype) for path, found in sources.items()}
    return config, build_tree(config, lambda row: _leaf(row, sources[row.path], sharder, dtypes[row.path]))


def local_folder(source: str | pathlib.Path) -> pathlib.Path:
    """The folder of a model: `source` itself, or a copy of the hub's model of that name.

    Raises:
      LoadError: if there is neither.
    """
    folder = pathlib.Path(source).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(source, pathlib.Path) or source.count("/") != 1 or source.startswith((".", "~", "/")):
        raise LoadError(f"{source} is not a folder; give one, or a hub id such as Qwen/Qwen3-VL-4B-Instruct")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        files = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
        return pathlib.Path(huggingface_hub.snapshot_download(source, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise LoadError(
            f"{source!r} is neither a folder here nor to be had from the Hugging Face hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Without a network, copy the model's folder to "
            "this machine and give its path"
        ) from error


def _dtype_of(path: tuple[str, ...], sources: tuple[Source, ...], dtype: Any) -> np.dtype:
    have = {tensor.dtype: tensor for source in sources for tensor in source.stored}
    if dtype is not None:
        return np.dtype(dtype)
    if len(have) > 1:
        which = ", ".join(f"{tensor} {name}" for name, tensor in have.items())
        raise LoadError(f"{'.'.join(path)} is stored in several dtypes ({which}): say which you want with dtype=")
    return FLOATS[next(iter(have))]


def _leaf(row: Row, sources: tuple[Source, ...], sharder: Sharder | None, dtype: np.dtype) -> jax.Array:
    """One parameter, on its devices."""
    if sharder is None:
        whole = one = SingleDeviceSharding(jax.local_devices()[0])
    else:
        whole = one = sharder.sharding(row.full_axes, row.full_shape)
        if row.layers:
            one = NamedSharding(sharder.mesh, PartitionSpec(*whole.spec[1:]))
    if not row.layers:
        return _cast(_put(sources[0], row.shape, whole), dtype)
    stack = jnp.zeros(row.full_shape, dtype, device=whole)
    for layer, source in enumerate(sources):
        # Waiting bounds the memory: reading would run ahead of the insertions, and every layer in between is alive.
        stack = jax.block_until_ready(_insert(stack, _put(source, row.shape, one), layer, whole))
    return stack


def _put(source: Source, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """One layer of one parameter, in the files' dtype. Each distinct shard is read once and let go before the next."""
    dtype = FLOATS[source.stored[0].dtype]
    holders: dict[tuple[tuple[int, ...], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    pieces = []
    for bounds, devices in holders.items():
        piece = source.read(tuple(slice(*bound) for bound in bounds)).view(dtype)
        pieces += [jax.device_put(piece, device) for device in devices]
        jax.block_until_ready(pieces)  # the host's copy of this shard can go before the next is read
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


@functools.partial(jax.jit, static_argnums=1)
def _cast(value: jax.Array, dtype: np.dtype) -> jax.Array:
    return value.astype(dtype)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _insert(stack: jax.Array, value: jax.Array, layer: Any, sharding: Sharding) -> jax.Array:
    grown = jax.lax.dynamic_update_index_in_dim(stack, value.astype(stack.dtype), layer, 0)
    return jax.lax.with_sharding_constraint(grown, sharding)


# -------------------------------------------------------------------------------------------------------------- export


def export(
    params: Params,
    config: ModelConfig,
    folder: str | pathlib.Path,
    *,
    dtype: str = "bfloat16",
    tokenizer_from: str | pathlib.Path | None = None,
    overwrite: bool = False,
    expert_layout: ExpertLayout = "input_major",
    max_shard_bytes: int = 5_000_000_000,
) -> list[pathlib.Path]:
    """Write the model as a Hugging Face folder that `transformers` loads strictly.

    On several hosts every host calls it, and the first one writes.

    Args:
      params: the parameter tree, on devices (sharded or not) or on the host.
      config: its configuration.
      folder: where to; must not exist or be empty, unless `overwrite`.
      dtype: "bfloat16", "float16" or "float32".
      tokenizer_from: folder of the model this one came from, whose tokenizer, chat template, processor and generation
        files are copied. Without it, generation and image-processor files are made from `config`, and no tokenizer.
      overwrite: replace the folder.
      expert_layout: "input_major" as the released sparse models; "output_major" as transformers 5 saves them. Sizes
        at which transformers cannot tell them apart (2I = D or I = D) are always written output-major, which it keeps.
      max_shard_bytes: of one weight file.
    Returns:
      The files written, sorted by name.
    Raises:
      ExportError: if the folder is in use, the tree is not that of `config`, or `tokenizer_from` has no tokenizer.
    """
    folder = pathlib.Path(folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not overwrite:
        raise ExportError(f"{folder} exists and is not empty: choose another folder or pass overwrite=True")
    stored = next((name for name, kind in FLOATS.items() if kind.name == dtype), None)
    if stored is None:
        raise ExportError(f"dtype={dtype!r} cannot be exported: choose bfloat16, float16 or float32")
    values = _checked(params, config)
    sidecars = sidecar_files(config, tokenizer_from)

    moe = config.text.moe
    if moe and config.text.model in (moe.mlp, 2 * moe.mlp):
        expert_layout = "output_major"
    layouts = {row.path: layout_of(row, expert_layout) for row in table(config)}
    tensors = [(row, layer, name) for row in table(config) for layer, name in enumerate(row.hf_names())]
    entries = [Entry(name=name, dtype=stored, shape=layouts[row.path].hf_shape) for row, _, name in tensors]
    files = shards(entries, max_shard_bytes)
    arrays = (_fetch(values[row.path], layer, row, layouts[row.path], FLOATS[stored]) for row, layer, _ in tensors)
    if jax.process_index():
        for _ in arrays:  # the first host's gathers need this one's part
            pass
        return []

    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        draft.chmod(0o755)
        _write_weights(draft, files, arrays)
        (draft / "config.json").write_text(_json(to_hf(config, dtype=dtype)), encoding="utf-8")
        for name, content in sidecars.items():
            (draft / name).write_bytes(content)
        _put_in_place(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sorted(folder.iterdir())


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _checked(params: Params, config: ModelConfig) -> dict[tuple[str, ...], Any]:
    """Leaves by path, after comparing the whole tree with the table."""
    try:
        found = {row.path: (row, leaf) for row, leaf in leaves(config, params)}
    except KeyError as error:
        raise ExportError(f"{error.args[0]}: these are not the parameters of this configuration") from None
    paths = {tuple(key.key for key in path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}
    if extra := paths - set(found):
        names = ", ".join(sorted(".".join(path) for path in extra)[:5])
        raise ExportError(f"the tree has {len(extra)} parameters that the model lacks ({names}): merge or remove them")
    for row, leaf in found.values():
        if tuple(leaf.shape) != row.full_shape:
            raise ExportError(f"{row.name} has shape {tuple(leaf.shape)}, its configuration asks for {row.full_shape}")
    return {path: leaf for path, (_, leaf) in found.items()}


def _fetch(leaf: Any, layer: int, row: Row, layout: Layout, dtype: np.dtype) -> np.ndarray:
    """One tensor as the file has it, gathered to this host; cast and rearranged on the devices."""
    one = _as_stored(leaf, layer, bool(row.layers), layout, dtype)
    return np.asarray(one if one.is_fully_addressable else multihost_utils.process_allgather(one, tiled=True))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _as_stored(leaf: Any, layer: Any, stacked: bool, layout: Layout, dtype: np.dtype) -> jax.Array:
    one = jax.lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False) if stacked else leaf
    return layout.to_hf(one.astype(dtype))


def _write_weights(draft: pathlib.Path, files: list[list[Entry]], arrays: Iterator[np.ndarray]) -> None:
    where: dict[str, str] = {}
    for number, entries in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write(draft / name, entries, itertools.islice(arrays, len(entries)))
        where |= {entry.name: name for entry in entries}
    total = sum(entry.nbytes for entries in files for entry in entries)
    (draft / INDEX).write_text(_json({"metadata": {"total_size": total}, "weight_map": where}), encoding="utf-8")


def _put_in_place(draft: pathlib.Path, folder: pathlib.Path) -> None:
    """Give the finished folder its name. A folder that was there is moved aside first and removed last."""
    old = None
    if folder.exists():
        old = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        folder.rename(old)
    draft.rename(folder)
    if old is not None:
        shutil.rmtree(old)
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder.parent, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
