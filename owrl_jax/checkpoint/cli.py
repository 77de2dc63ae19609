"""`owrl ckpt`: list the checkpoints of a run, verify one by really restoring it, export its model for transformers."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any, TextIO

from owrl_jax.checkpoint.folders import CheckpointError, complete, incomplete, read_manifest

USAGE = """usage: owrl ckpt list FOLDER
       owrl ckpt verify FOLDER [--step N]
       owrl ckpt export-hf FOLDER OUT [--step N] [--tokenizer-from FOLDER] [--dtype bfloat16] [--overwrite]

list       complete checkpoints, and what is left of unfinished ones
verify     read every file, restore every array, compare both with what was saved; exit code 1 if anything differs
export-hf  write the policy's weights as a Hugging Face folder that transformers loads"""


def main(argv: list[str]) -> int:
    """Run one of the three. Exit code 2 for a wrong call, 1 if there is nothing or something is wrong."""
    import tyro

    commands = {"list": show, "verify": check, "export-hf": export}
    if not argv or argv[0] in ("-h", "--help") or argv[0] not in commands:
        asked = bool(argv) and argv[0] in ("-h", "--help")
        _say(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        return tyro.cli(commands[argv[0]], args=argv[1:], prog=f"owrl ckpt {argv[0]}")
    except CheckpointError as error:
        _say(f"owrl ckpt: {error}", file=sys.stderr)
        return 1


def show(folder: Path, /) -> int:
    """List the checkpoints of a run.

    Args:
        folder: the run's folder of checkpoints.
    """
    found = complete(folder)
    for saved in found:
        when = datetime.datetime.fromtimestamp(saved.saved_at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        arrays = len(read_manifest(saved.folder)["arrays"])
        mark = "  <- a run resumes from here" if saved.latest else ""
        size = f"{saved.nbytes / 2**20:10.1f} MiB  {arrays:5d} arrays"
        _say(f"{saved.step:>8}  {when} UTC  {size}  {saved.folder.name}{mark}")
    for path in incomplete(folder):
        _say(f"          not complete, never used: {path.name}")
    if not found:
        _say(f"owrl ckpt: {folder} has no complete checkpoint", file=sys.stderr)
    return 0 if found else 1


def check(folder: Path, /, step: int | None = None) -> int:
    """Verify one checkpoint by really restoring it.

    Args:
        folder: the run's folder of checkpoints.
        step: which one; the one to resume from if not given.
    """
    from owrl_jax.checkpoint.checkpoints import verify

    saved, problems = verify(folder, step)
    for problem in problems:
        _say(f"{saved.folder.name}: {problem}")
    if problems:
        _say(f"{saved.folder} cannot be trusted: {len(problems)} problem(s)", file=sys.stderr)
        return 1
    arrays = len(read_manifest(saved.folder)["arrays"])
    _say(f"{saved.folder.name}: {arrays} arrays restored, {saved.nbytes} bytes read, all as saved")
    return 0


def export(
    folder: Path,
    out: Path,
    /,
    step: int | None = None,
    tokenizer_from: Path | None = None,
    dtype: str = "bfloat16",
    overwrite: bool = False,
) -> int:
    """Write the policy's weights as a Hugging Face folder.

    Args:
        folder: the run's folder of checkpoints.
        out: the folder to write.
        step: which checkpoint; the one to resume from if not given.
        tokenizer_from: folder of the model that training began with, for tokenizer, chat template and processor.
        dtype: of the written tensors.
        overwrite: replace `out` if it is there.
    """
    import jax.numpy as jnp
    import numpy as np

    from owrl_jax.checkpoint.checkpoints import Checkpoints
    from owrl_jax.models.hf import ExportError
    from owrl_jax.models.hf import export as write
    from owrl_jax.models.qwen3_vl.config import from_hf
    from owrl_jax.models.qwen3_vl.table import build_tree
    from owrl_jax.rl.trainable import Trainable

    checkpoints = Checkpoints(folder, write=False)
    saved = checkpoints.find(step)
    record = checkpoints.record(saved.step)
    model: Any = record.get("model")
    if not model:
        raise CheckpointError(
            f"{saved.folder}: the record has no 'model' (a config.json), so its shapes are unknown; it was not "
            "saved by a training command"
        )
    config = from_hf(model)
    stored = read_manifest(saved.folder)["arrays"]

    def empty(name: str) -> np.ndarray:
        if name not in stored:
            raise CheckpointError(f"{saved.folder} has no array {name}: it does not hold the model that it describes")
        return np.empty(tuple(stored[name]["shape"]), jnp.dtype(stored[name]["dtype"]))

    target: dict[str, Any] = {"params": build_tree(config, lambda row: empty(f"params.{row.name}"))}
    adapters = [name.removeprefix("adapters.") for name in stored if name.startswith("adapters.")]
    if adapters:
        target["adapters"] = {name: empty(f"adapters.{name}") for name in adapters}
    state, _ = checkpoints.restore(target, step=saved.step, partial=True)
    params = state["params"]
    if adapters:
        rl = record["config"]["rl"]
        trainable = Trainable(freeze=tuple(rl["freeze"]), lora_rank=rl["lora_rank"], lora_alpha=rl["lora_alpha"])
        params = trainable.merged(config, params, state["adapters"])
    try:
        files = write(params, config, out, dtype=dtype, tokenizer_from=tokenizer_from, overwrite=overwrite)
    except ExportError as error:
        raise CheckpointError(str(error)) from error
    _say(f"{saved.folder.name} -> {out}: {len(files)} files, {sum(path.stat().st_size for path in files)} bytes")
    return 0


def _say(text: str, file: TextIO | None = None) -> None:
    print(text, file=file, flush=True)
