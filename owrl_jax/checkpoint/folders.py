"""What a folder of checkpoints looks like, and the order in which it changes; no arrays, no jax.

    FOLDER/latest                     one line: the name of the checkpoint to resume from
    FOLDER/step-00000012/record.json  data cursor, curriculum, journal position, what else the loop wrote
                        /state/       the arrays, as orbax writes them
                        /manifest.json  size and SHA-256 of every file, shape, dtype and fingerprint of every array
    FOLDER/.step-00000012.saving/     a checkpoint that is being written, or that died while it was

A checkpoint is complete when its folder has its final name and every file of its manifest has the size written there.
The name comes last: all bytes are flushed to the disk, then the manifest, then the folder is renamed, and only then
does `latest` move, by a rename of its own. Older checkpoints go after that and never before. So, whenever the machine
stops, `latest` names a complete checkpoint, and what it names is the last one that was durable.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

POINTER = "latest"
MANIFEST = "manifest.json"
RECORD = "record.json"
STATE = "state"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or trusted; the message says which, why, and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """One complete checkpoint on disk.

    Attributes:
      step: the number it was saved under.
      folder: where it lies.
      nbytes: of all its files.
      saved_at: when, in seconds since 1970 (UTC).
      latest: whether a run would resume from it.
    """

    step: int
    folder: Path
    nbytes: int
    saved_at: float
    latest: bool = False


# ------------------------------------------------------------------------------------------------------------ durable


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, whenever the machine stops."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        fsync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def seal(draft: Path, name: str, *, step: int, saved_at: float, arrays: dict[str, Any]) -> Path:
    """Make a written checkpoint complete: flush every byte, write the manifest, give the folder its name.

    Args:
      draft: the folder that holds everything but the manifest.
      name: the final name, beside `draft`.
      step, saved_at: as in `Saved`.
      arrays: facts about each array, for the manifest.
    Returns:
      The folder under its final name.
    """
    files = _files(draft)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(_sha256, files))
        list(pool.map(fsync, files))
    for folder in {path.parent for path in files}:
        fsync(folder)
    manifest = {
        "format": FORMAT,
        "step": step,
        "saved_at": saved_at,
        "files": {
            path.relative_to(draft).as_posix(): [path.stat().st_size, digest]
            for path, digest in zip(files, sums, strict=True)
        },
        "arrays": arrays,
    }
    write_durably(draft / MANIFEST, json.dumps(manifest, indent=1).encode())
    final = draft.parent / name
    os.rename(draft, final)
    fsync(draft.parent)
    return final


def move_pointer(folder: Path, name: str) -> None:
    """From now on a run resumes from the checkpoint of this name."""
    write_durably(folder / POINTER, f"{name}\n".encode())


# --------------------------------------------------------------------------------------------------------------- look


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
      CheckpointError: if there is none, or it is of another format.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} is no complete checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / MANIFEST} cannot be read ({error}): choose an older checkpoint") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{checkpoint} has format {manifest.get('format')}, this version reads {FORMAT}: use the one that saved it"
        )
    return manifest


def _complete(checkpoint: Path) -> Saved | None:
    try:
        manifest = read_manifest(checkpoint)
        sizes = {name: size for name, (size, _) in manifest["files"].items()}
        if any((checkpoint / name).stat().st_size != size for name, size in sizes.items()):
            return None
    except (CheckpointError, OSError):
        return None
    return Saved(step=manifest["step"], folder=checkpoint, nbytes=sum(sizes.values()), saved_at=manifest["saved_at"])


def complete(folder: Path) -> list[Saved]:
    """All complete checkpoints of a folder, oldest first; the one to resume from is marked.

    That is the one which `latest` names. If it is not complete (somebody removed files), the newest complete one takes
    its place, and the log says so.
    """
    if not folder.is_dir():
        return []
    found = [saved for path in folder.iterdir() if _NAME.fullmatch(path.name) and (saved := _complete(path))]
    found.sort(key=lambda saved: (saved.saved_at, saved.folder.name))
    try:
        pointed = (folder / POINTER).read_text(encoding="utf-8").strip()
    except OSError:
        pointed = ""
    names = [saved.folder.name for saved in found]
    if found and pointed not in names:
        log.warning(
            "%s names %r, which is not complete; the newest complete checkpoint is %s",
            folder / POINTER, pointed, names[-1],
        )  # fmt: skip
        pointed = names[-1]
    return [dataclasses.replace(saved, latest=saved.folder.name == pointed) for saved in found]


def incomplete(folder: Path) -> list[Path]:
    """Folders of checkpoints that were never finished, or have lost files."""
    if not folder.is_dir():
        return []
    whole = {saved.folder for saved in complete(folder)}
    return sorted(
        path
        for path in folder.iterdir()
        if path not in whole and (_NAME.fullmatch(path.name) or path.name.startswith(".step-"))
    )


def damage(checkpoint: Path) -> list[str]:
    """Reads every file of a complete checkpoint; returns a sentence for each that is not what was written."""
    manifest = read_manifest(checkpoint)
    found = []
    for name, (size, digest) in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != size:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        elif _sha256(path) != digest:
            found.append(f"{name} has other content than was written")
    return found


# -------------------------------------------------------------------------------------------------------------- change


def free_name(folder: Path, step: int) -> str:
    """A name for a checkpoint of this step that none in the folder has: nothing is ever written over."""
    name = f"step-{step:08d}"
    revision = 1
    while (folder / name).exists():
        name, revision = f"step-{step:08d}.{revision}", revision + 1
    return name


def draft_of(folder: Path, name: str) -> Path:
    """Where a checkpoint is written before it has its name."""
    return folder / f".{name}.saving"


def prune(folder: Path, *, keep: int, keep_every: int | None) -> list[Path]:
    """Remove old checkpoints: all but the newest `keep`, the one to resume from, and every step `keep_every` divides.

    Returns:
      The folders removed.
    """
    found = complete(folder)
    old = found[: max(0, len(found) - keep)]
    removed = []
    for saved in old:
        if saved.latest or (keep_every and saved.step % keep_every == 0):
            continue
        # Under another name first: a checkpoint with half its files gone must not look like one.
        doomed = saved.folder.with_name(f".{saved.folder.name}.removing")
        os.rename(saved.folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        removed.append(saved.folder)
    return removed


def sweep(folder: Path) -> list[Path]:
    """Remove what unfinished saves and removals left. Only the run that owns the folder may call this."""
    left = [path for path in folder.iterdir() if path.name.startswith(".step-")]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return left
