"""A small supervised run in a process of its own, which may be told to die at a certain place. For test_resume.

    python -m tests.equivalence.resume_run FOLDER [--die PLACE] [--sigterm-at N] [--until N]

PLACE is one of: collected (an update's samples are there, nothing is trained), mid-epoch (between two updates, beyond
the last save), during-save (files of the state are being written), before-name (all files are written, the folder has
no name yet), before-pointer (the folder is complete, `latest` still names the one before).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

from owrl_jax import sft
from owrl_jax.build import Parts, RunFolder
from owrl_jax.checkpoint import Checkpoints, checkpoints, folders
from owrl_jax.config import CheckpointSettings, DtypeSettings, MeshSettings, ModelSettings, RunConfig, SftSettings
from owrl_jax.data.dataset import write_dataset
from owrl_jax.models.processor import ImageProcessor
from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.shutdown import RESUME_EXIT_CODE
from tests.unit import learner_world
from tests.unit.data_world import PICTURES, trajectory

UPDATES, EVERY = 7, 3


class SmallParts(Parts):
    """Parts without a harness: no episode is played here."""


def config_of(folder: Path) -> RunConfig:
    return RunConfig(
        name="run",
        out_dir=str(folder),
        model=ModelSettings(size="tiny", image_area=(1024, 1024), remat="none"),
        mesh=MeshSettings(fsdp=1),
        dtypes=DtypeSettings(compute="float32"),
        checkpoint=CheckpointSettings(every=EVERY, keep=2),
        sft=SftSettings(
            data=str(folder / "data"), epochs=2, groups_per_update=3, learning_rate=1e-2, freeze=(), row_tokens=64
        ),
    )


def parts_of(config: RunConfig) -> Parts:
    model = Qwen3VL(learner_world.config())
    return Parts(
        config=config, folder=RunFolder(config), tokens=None, harness=None,  # type: ignore[arg-type]
        processor=dataclasses.replace(ImageProcessor(), min_area=1024, max_area=1024), model=model,
    )  # fmt: skip


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_saved(folder: Path) -> None:
    """Dies once the first save, which goes on in the background, is durable."""
    deadline = time.monotonic() + 60
    while Checkpoints(folder / "run" / "checkpoints", write=False).latest() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    die()


def arm(place: str, folder: Path) -> None:
    """Makes the process die at the place, the first time that matters: at the second save, or behind the first."""
    if place == "collected":
        prepare, seen = sft.Pipeline.__next__, []

        def collected(self):  # fmt: skip
            found = prepare(self)
            seen.append(found)
            return die_saved(folder) if len(seen) == EVERY + 2 else found

        sft.Pipeline.__next__ = collected  # type: ignore[method-assign]
    elif place in ("before-name", "before-pointer"):
        name = {"before-name": "seal", "before-pointer": "move_pointer"}[place]
        real, calls = getattr(folders, name), []

        def second(*args, **kwargs):
            calls.append(1)
            return die() if len(calls) == 2 else real(*args, **kwargs)

        setattr(folders, name, second)
    elif place == "during-save":
        begin, calls = checkpoints.Checkpoints._begin, []

        def torn(self, path, flat):
            calls.append(1)
            if len(calls) == 2:
                half = dict(list(flat.items())[: len(flat) // 2])
                begin(self, path, half)
                self._saver.wait_until_finished()
                die()
            begin(self, path, flat)

        checkpoints.Checkpoints._begin = torn  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die", default="")
    parser.add_argument("--sigterm-at", type=int, default=0)
    parser.add_argument("--until", type=int, default=UPDATES)
    given = parser.parse_args()
    config = config_of(given.folder)
    if not Path(config.sft.data).exists():
        write_dataset(config.sft.data, [trajectory(n) for n in range(11)], PICTURES.__getitem__)
    arm(given.die, given.folder)

    def watch(done, state, numbers):
        print("update", done, numbers["sft/loss_nats_per_token"].hex(), flush=True)
        if given.die == "mid-epoch" and done == EVERY + 2:
            die_saved(given.folder)
        if done == given.sigterm_at:
            os.kill(os.getpid(), signal.SIGTERM)

    sft.export = lambda *args, **kwargs: []  # there is no tokenizer to go with it
    try:
        trained = sft.train(config, parts=parts_of(config), until=given.until, on_update=watch)
    except sft.NothingTrained as error:
        print(error, flush=True)
        return 1
    return 0 if trained.finished else RESUME_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
