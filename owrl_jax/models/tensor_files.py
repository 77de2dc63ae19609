"""Safetensors files: what they hold, checked before any byte of a tensor is read, and how to write one as a stream.

The format is eight bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, and
the tensors' bytes without gaps. Reading it here, through a memory map per tensor, lets a loader copy exactly the part
that a device needs and lets go of the file's pages at once; the library returns whole tensors and needs a whole file of
them in memory to write one.

Not here: what the names mean (`hf_names.py`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

FLOATS: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "F16": 16}
_BITS |= {"BF16": 16, "F32": 32, "F64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}
_MAX_HEADER = 100_000_000  # the format's own limit


class LoadError(ValueError):
    """A checkpoint that cannot be loaded as it is: which file and tensor, what was expected, what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file: `dtype` as the format names it, `offset` in bytes from the file's start."""

    file: pathlib.Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def bits(self) -> np.ndarray:
        """The values as unsigned integers of the same width, mapped from the file, not read yet.

        numpy copies and transposes integers at full speed; bfloat16 value by value. `.view` gives the values.
        """
        width = FLOATS[self.dtype].itemsize
        return np.memmap(self.file, dtype=f"u{width}", mode="r", offset=self.offset, shape=self.shape)

    def __str__(self) -> str:
        return f"{self.file}: {self.name!r}"


_AGAIN = "download or export it again"


def read_header(path: pathlib.Path) -> dict[str, Stored]:
    """The tensors of one safetensors file.

    Raises:
      LoadError: naming the file, if it is missing, truncated, or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > _MAX_HEADER:
                raise LoadError(f"{path} ({size} bytes) is no safetensors file: {_AGAIN}")
            if 8 + length > size:
                raise LoadError(f"{path} is truncated: its header takes {length} bytes, the file has {size}: {_AGAIN}")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise LoadError(f"{path} does not exist: {_AGAIN}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LoadError(
            f"{path} has no readable header ({error}): it is no safetensors file or damaged; {_AGAIN}"
        ) from None
    if not isinstance(header, dict):
        raise LoadError(f"{path} has no readable header (a {type(header).__name__}): {_AGAIN}")
    header.pop("__metadata__", None)
    found, end = {}, 0
    try:
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        for name, entry in entries:
            shape, (begin, stop) = tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
            if begin != end or (stop - begin) * 8 != math.prod(shape) * _BITS[entry["dtype"]]:
                raise LoadError(
                    f"{path}: {name!r} ({entry['dtype']} {list(shape)}) cannot lie at data bytes {begin} to {stop}: "
                    f"the header is damaged; {_AGAIN}"
                )
            end = stop
            found[name] = Stored(file=path, name=name, dtype=entry["dtype"], shape=shape, offset=8 + length + begin)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, LoadError):
            raise
        raise LoadError(f"{path} has a damaged header ({type(error).__name__}: {error}): {_AGAIN}") from None
    if 8 + length + end != size:
        state = "truncated" if 8 + length + end > size else "longer than its header says"
        raise LoadError(f"{path} is {state}: {8 + length + end} bytes are expected, {size} are there; {_AGAIN}")
    return found


def read_folder(folder: pathlib.Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint: of `model.safetensors` if there is one, else of the files its index names.

    Raises:
      LoadError: naming file and tensor, if a file is missing or damaged, or index and files disagree.
    """
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    index = folder / INDEX
    if not index.exists():
        have = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".safetensors"))
        hint = f"; it has {', '.join(have[:4])}, convert those to safetensors" if have else ""
        raise LoadError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(where.values()))
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{index} is damaged ({type(error).__name__}: {error}): {_AGAIN}") from None
    tensors: dict[str, Stored] = {}
    for file in files:
        if not (folder / file).exists():
            count = sum(other == file for other in where.values())
            raise LoadError(f"{folder / file} is missing; {index.name} says it holds {count} tensors: {_AGAIN}")
        for name, stored in read_header(folder / file).items():
            if where.get(name) != file:
                raise LoadError(f"{stored}: {index.name} says {where.get(name) or 'nothing of it'}; {_AGAIN}")
            tensors[name] = stored
    for name, file in where.items():
        if name not in tensors:
            raise LoadError(f"{folder / file}: {name!r} is missing, though {index.name} says it is there; {_AGAIN}")
    return tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * FLOATS[self.dtype].itemsize


def shards(entries: Iterable[Entry], limit: int) -> list[list[Entry]]:
    """The entries in order, cut into files of at most `limit` bytes each; a larger tensor gets its own file."""
    files: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not files or entry.nbytes > room:
            files.append([])
            room = limit
        files[-1].append(entry)
        room -= entry.nbytes
    return files


def write(path: pathlib.Path, entries: Sequence[Entry], arrays: Iterable[np.ndarray]) -> None:
    """Write one file, taking the arrays one at a time; on return it is on the disk.

    Raises:
      ValueError: if an array is not what its entry says.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    offset = 0
    for entry in entries:
        span = [offset, offset + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry, array in zip(entries, arrays, strict=True):
            if array.shape != entry.shape or array.dtype != FLOATS[entry.dtype]:
                raise ValueError(f"{entry.name}: {array.dtype} {array.shape} is not {entry.dtype} {entry.shape}")
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
