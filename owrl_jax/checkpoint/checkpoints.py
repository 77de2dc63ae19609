"""Saving and restoring a run's state.

    checkpoints = Checkpoints("runs/x/checkpoints", config.checkpoint)
    checkpoints.check_space(state)                       # before the first hour of work
    checkpoints.save(step, state, record)                # returns once the arrays are copied from the devices
    checkpoints.close()                                  # waits; raises what went wrong in the background

    state, record = checkpoints.restore(abstract(state, shardings))

The state is any tree of arrays; the record is JSON: data cursor, curriculum and per-task statistics, journal position,
resolved configuration and its hash. What always holds:

- `latest` names the last checkpoint that was durable, at every instant (`folders.py` has the order of things).
- A failed save raises from the next call of `save`, `wait` or `close`, loses nothing, and may be repeated.
- Arrays are restored only to shardings that the caller names, whatever mesh they were saved from, and every restored
  array must have the fingerprint that it had where it was saved.

On several processes every one of them calls every method; the folder is one that all can reach, and process 0 does what
is done once. orbax moves the arrays.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from owrl_jax.checkpoint import folders
from owrl_jax.checkpoint.arrays import (
    Flat,
    as_keys,
    describe,
    fingerprints,
    flatten,
    is_key,
    key_data,
    nbytes,
    saved_form,
    unflatten,
)
from owrl_jax.checkpoint.folders import RECORD, STATE, CheckpointError, Saved
from owrl_jax.config import CheckpointSettings

log = logging.getLogger(__name__)

Record = dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in one folder. Not for several threads at once."""

    def __init__(self, folder: str | Path, settings: CheckpointSettings | None = None, *, write: bool = True):
        """Opens a folder.

        Args:
          folder: made if it is not there.
          settings: how many to keep, and how much host memory a save may take.
          write: whether this is the run that owns the folder; it then removes what unfinished saves have left.
        Raises:
          CheckpointError: if the folder cannot be made or written.
        """
        self.folder = Path(folder).expanduser().absolute()
        self.settings = settings or CheckpointSettings()
        self._write = write
        self._saver: Any = None
        self._pending: concurrent.futures.Future[None] | None = None
        self._pending_step: int | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="owrl-checkpoint")
        self._first = jax.process_index() == 0
        if write:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if self._first:
                    folders.sweep(self.folder)
            except OSError as error:
                raise CheckpointError(f"{self.folder} cannot be used for checkpoints: {error}") from error

    # ---------------------------------------------------------------------------------------------------------- save

    def check_space(self, state: Any) -> int:
        """Make sure that the disk holds what the settings keep, before any work is done.

        Returns:
          Bytes of one checkpoint, uncompressed.
        Raises:
          CheckpointError: with the numbers, if it does not.
        """
        one = nbytes(state)
        have = folders.complete(self.folder)
        # While a new one is written, the oldest of `keep` is still there.
        missing = max(1, self.settings.keep + 1 - len(have))
        free = shutil.disk_usage(self.folder).free
        if missing * one > free:
            raise CheckpointError(
                f"{self.folder} has {_size(free)} free, but {missing} more checkpoints of {_size(one)} must fit "
                f"(checkpoint.keep={self.settings.keep}, and one in the making): free space, give another folder, or "
                "keep fewer"
            )
        return one

    def save(self, step: int, state: Any, record: Mapping[str, Any]) -> None:
        """Begin to save; returns as soon as the state may be changed or donated. The record is read before that too.

        Waits for the save before this one, if it is still running.

        Raises:
          CheckpointError: if that one failed, if the disk is too full for this one, or if state or record hold
            something that cannot be saved.
        """
        if not self._write:
            raise CheckpointError(f"{self.folder} was opened for reading: open it with write=True to save")
        if step < 0:
            raise CheckpointError(f"step={step} must be 0 or more")
        self.wait()
        text = _record_json(record)
        flat = flatten(state)
        free, need = shutil.disk_usage(self.folder).free, nbytes(state)
        if need > free:
            raise CheckpointError(
                f"step {step} needs {_size(need)} but {self.folder} has {_size(free)} free: free space and save again"
            )
        name = self._shared_name(step)
        draft = folders.draft_of(self.folder, name)
        facts = describe(flat)
        flat = {key: key_data(leaf) for key, leaf in flat.items()}
        for key, value in fingerprints(flat).items():
            facts[key]["fingerprint"] = value
        began = time.monotonic()
        try:
            if self._first:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir()
                (draft / RECORD).write_bytes(text)
            self._begin(draft / STATE, {key: leaf for key, leaf in flat.items() if leaf.size})
        except (OSError, ValueError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            self._saver = None
            raise _failed(step, error, self.latest()) from error
        log.info("step %d: copied from the devices in %.2f s", step, time.monotonic() - began)
        self._pending_step = step
        self._pending = self._thread.submit(self._finish, step, draft, name, facts, began)

    def _shared_name(self, step: int) -> str:
        name = folders.free_name(self.folder, step)
        if jax.process_count() == 1:
            return name
        from jax.experimental import multihost_utils

        buffer = np.zeros(64, np.uint8)
        buffer[: len(name)] = np.frombuffer(name.encode(), np.uint8)
        return bytes(np.asarray(multihost_utils.broadcast_one_to_all(buffer))).rstrip(b"\0").decode()

    def _begin(self, path: Path, flat: Flat) -> None:
        import orbax.checkpoint as ocp

        if self._saver is None:
            gib = max(1, math.ceil(self.settings.host_gib))
            self._saver = ocp.AsyncCheckpointer(
                ocp.PyTreeCheckpointHandler(save_concurrent_gb=gib, restore_concurrent_gb=gib)
            )
        self._saver.save(path, args=ocp.args.PyTreeSave(flat))

    def _finish(self, step: int, draft: Path, name: str, facts: dict[str, Any], began: float) -> None:
        """The second half of a save, in the background: everything up to the pointer, and only then the old ones."""
        try:
            self._saver.wait_until_finished()
            if not self._first:
                return
            folders.seal(draft, name, step=step, saved_at=time.time(), arrays=facts)
            folders.move_pointer(self.folder, name)
        except Exception:
            # Whatever it was: the draft is worthless now, and its space may be what the next attempt needs.
            if self._first:
                shutil.rmtree(draft, ignore_errors=True)
            raise
        log.info("step %d: durable after %.2f s", step, time.monotonic() - began)
        try:
            folders.prune(self.folder, keep=self.settings.keep, keep_every=self.settings.keep_every)
        except OSError as error:  # the save itself is good
            log.warning("old checkpoints could not be removed: %s", error)

    def wait(self) -> None:
        """Return when nothing is being saved any more.

        Raises:
          CheckpointError: if the save that was running has failed, on any process.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.exception()
        failed = error is not None
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            failed = bool(np.any(multihost_utils.process_allgather(np.asarray(failed))))
        if failed:
            self._saver = None  # orbax keeps the error; the next attempt begins afresh
            cause = error or RuntimeError("another process could not write its part; its log says why")
            raise _failed(self._pending_step, cause, self.latest()) from error

    def close(self) -> None:
        """Wait, and let go of the background thread.

        Raises:
          CheckpointError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._saver is not None:
                self._saver.close()
                self._saver = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------- restore

    def latest(self) -> Saved | None:
        """The checkpoint a run resumes from, or None if there is no complete one."""
        return next((saved for saved in self.all() if saved.latest), None)

    def all(self) -> list[Saved]:
        """All complete checkpoints, oldest first."""
        return folders.complete(self.folder)

    def find(self, step: int | None = None) -> Saved:
        """The checkpoint of a step (the newest of it), or the one to resume from.

        Raises:
          CheckpointError: if there is none, naming those that there are.
        """
        found = self.all()
        fitting = [saved for saved in found if saved.latest or step is not None]
        fitting = [saved for saved in fitting if step is None or saved.step == step]
        if fitting:
            return fitting[-1]
        steps = ", ".join(str(saved.step) for saved in found) or "none"
        wanted = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        raise CheckpointError(f"{self.folder} has {wanted} (complete: {steps})")

    def record(self, step: int | None = None) -> Record:
        """The record alone, without touching the arrays."""
        return json.loads((self.find(step).folder / RECORD).read_text(encoding="utf-8"))

    def restore(self, target: Any, *, step: int | None = None, partial: bool = False) -> tuple[Any, Record]:
        """A saved state, on the shardings that the caller names.

        Args:
          target: the tree that is wanted, of `ShapeDtypeStruct`s with shardings (`abstract` makes it), or of numpy
            arrays for leaves that are to stay on the host.
          step: which one; None is the one to resume from.
          partial: the checkpoint may hold more than `target`, as when only the parameters are wanted.
        Returns:
          the state in the shape of `target`, and the record.
        Raises:
          CheckpointError: if there is no such checkpoint, if a leaf lacks a sharding, if names, shapes or dtypes
            differ (all differences are named), or if an array is not bit for bit what was saved.
        """
        self.wait()
        saved = self.find(step)
        manifest = folders.read_manifest(saved.folder)
        flat = flatten(target)
        _check_target(saved, flat, manifest["arrays"], partial)
        arrays = self._read(saved, flat)
        wrong = [
            name for name, value in fingerprints(arrays).items() if value != manifest["arrays"][name]["fingerprint"]
        ]
        if wrong:
            raise CheckpointError(
                f"{saved.folder}: {_some(wrong)} did not come back as saved; the files are damaged (`owrl ckpt verify` "
                "names them): choose an older step"
            )
        for name, leaf in flat.items():
            if is_key(leaf):
                arrays[name] = as_keys(arrays[name], leaf)
        return unflatten(target, arrays), json.loads((saved.folder / RECORD).read_text(encoding="utf-8"))

    def _read(self, saved: Saved, flat: Flat) -> Flat:
        import orbax.checkpoint as ocp

        items: dict[str, Any] = {}
        how: dict[str, Any] = {}
        arrays: Flat = {}
        for name, leaf in flat.items():
            shape, dtype = saved_form(leaf)
            sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
            if not math.prod(shape):
                empty = np.empty(shape, dtype)
                arrays[name] = empty if sharding is None else jax.device_put(empty, sharding)
                continue
            items[name] = jax.ShapeDtypeStruct(shape, dtype)
            if sharding is None:
                how[name] = ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
            else:  # the saved form of random keys has a trailing axis more, which no sharding of keys splits
                how[name] = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=dtype, strict=True)
        if not items:
            return arrays
        gib = max(1, math.ceil(self.settings.host_gib))
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=gib))
        try:
            args = ocp.args.PyTreeRestore(items, restore_args={name: how[name] for name in items}, partial_restore=True)
            arrays |= reader.restore(saved.folder / STATE, args=args)
        except (ValueError, OSError, KeyError) as error:
            raise CheckpointError(
                f"{saved.folder} cannot be read ({str(error).splitlines()[0]}); `owrl ckpt verify` says what is "
                "damaged: choose an older step"
            ) from error
        finally:
            reader.close()
        return arrays


def _check_target(saved: Saved, flat: Flat, stored: dict[str, Any], partial: bool) -> None:
    bare = [name for name, leaf in flat.items() if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None]
    if bare:
        raise CheckpointError(
            f"the target gives no sharding for {_some(bare)}: name one for every array (`checkpoint.abstract`), for "
            "the mesh that saved it need not be the one that is here"
        )
    problems = []
    missing = sorted(flat.keys() - stored.keys())
    extra = sorted(stored.keys() - flat.keys())
    if missing:
        problems.append(f"it lacks {_some(missing)}")
    if extra and not partial:
        problems.append(f"it also has {_some(extra)}")
    for name in sorted(flat.keys() & stored.keys()):
        want, have = describe({name: flat[name]})[name], stored[name]
        for fact in ("shape", "dtype", "key"):
            if want.get(fact) != have.get(fact):
                problems.append(f"{name} has {fact} {have.get(fact)}, wanted is {want.get(fact)}")
        dtype = saved_form(flat[name])[1]
        if isinstance(flat[name], jax.ShapeDtypeStruct) and jax.dtypes.canonicalize_dtype(dtype) != dtype:
            problems.append(f"{name} is {dtype}, which jax does not hold here: give a numpy array as its target")
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(
            f"{saved.folder} is not a checkpoint of this state: {shown}. Model, optimiser and precision must be those "
            "it was saved with"
        )


def _record_json(record: Mapping[str, Any]) -> bytes:
    """The record as JSON that reads back equal, but for tuples, which come back as lists.

    A number as a key, say, would come back as text, and nobody would notice until the restored run looks it up.
    """
    plain = {key: _lists(value) for key, value in record.items()}
    try:
        text = json.dumps(plain, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the record cannot be saved as JSON ({error}): use plain values in it") from None
    back = json.loads(text)
    changed = [key for key in plain if back.get(key) != plain[key]]
    if changed:
        raise CheckpointError(
            f"the record's {_some(changed)} would not read back equal: in JSON every key is text, and a value is text, "
            "a number, true, false, null, a list or a group of those"
        )
    return text.encode()


def _lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_lists(part) for part in value]
    return {key: _lists(part) for key, part in value.items()} if isinstance(value, dict) else value


def _failed(step: int | None, error: BaseException, latest: Saved | None) -> CheckpointError:
    durable = "there is no earlier one" if latest is None else f"the last durable checkpoint is step {latest.step}"
    reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
    return CheckpointError(f"step {step} was not saved ({reason}); {durable} and is untouched. Free space or mend the "
                           "disk, and save again")  # fmt: skip


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"


def verify(folder: str | Path, step: int | None = None) -> tuple[Saved, list[str]]:
    """Really restore a checkpoint, on this host, whatever mesh saved it.

    Every file is compared with its checksum, then every array is restored and compared with the fingerprint it had on
    the devices, and looked through for values that are not finite.

    Returns:
      the checkpoint, and a sentence for everything that is wrong; none if it can be trusted.
    Raises:
      CheckpointError: if there is no such checkpoint.
    """
    checkpoints = Checkpoints(folder, write=False)
    saved = checkpoints.find(step)
    found = folders.damage(saved.folder)
    if found:
        return saved, found
    arrays = folders.read_manifest(saved.folder)["arrays"]
    for name, fact in arrays.items():  # one by one: a whole state need not fit into this host
        want = np.empty(tuple(fact["shape"]), jax.numpy.dtype(fact["dtype"]))
        try:
            leaf = checkpoints._read(saved, {name: want})[name]
        except CheckpointError as error:
            found.append(f"{name}: {error}")
            continue
        if fingerprints({name: leaf})[name] != fact["fingerprint"]:
            found.append(f"{name} has other values than were saved")
        elif jax.numpy.issubdtype(leaf.dtype, np.inexact) and not np.all(np.isfinite(leaf.astype(np.float32))):
            found.append(f"{name} holds values that are not finite")
    if not found:
        json.loads((saved.folder / RECORD).read_text(encoding="utf-8"))
    return saved, found
