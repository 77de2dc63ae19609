"""Learning from pixels on data that nobody here made: a tiny Qwen3-VL from random weights on PyPI's `easy-vqa`.

4,000 pictures of 64 x 64 pixels, each with one shape (3 kinds) in one colour (8), 38,575 questions about them with 13
answers, and 1,000 pictures with 9,673 questions to test on (MIT licence). Each question is an episode of one turn; the
questions of one picture are siblings and share it in the tree. From there on everything is the real pipeline: data set
in ArrayRecord, grain, packing, learner, checkpoints, `owrl sft`.

    python -m tests.e2e.easy_vqa FOLDER [--seconds 500]     # trains in pieces, goes on where it stopped, then tests
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from owrl_jax.config import (
    CheckpointSettings,
    DtypeSettings,
    LoggingSettings,
    MeshSettings,
    ModelSettings,
    RunConfig,
    SftSettings,
)
from owrl_jax.data.dataset import Dataset, write_dataset
from owrl_jax.models.processor import ImageProcessor
from owrl_jax.models.qwen3_vl.config import ModelConfig, TextConfig, VisionConfig
from owrl_jax.models.tokenizer import Tokens, train_small_tokenizer
from owrl_jax.outcome import Outcome, Reason
from owrl_jax.types import Task, Trajectory, Turn, Verdict, VerdictValue

AREA = (16384, 16384)  # 64 x 64 is shown as 128 x 128: 64 patches, 16 tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Questions of one split: (question, answer, picture), and the files of the pictures."""

    questions: tuple[tuple[str, str, int], ...]
    files: dict[int, Path]


def read(split: str) -> Split:
    """Through the package's own functions."""
    import easy_vqa

    texts, answers, pictures = getattr(easy_vqa, f"get_{split}_questions")()
    files = getattr(easy_vqa, f"get_{split}_image_paths")()
    return Split(
        questions=tuple(zip(texts, answers, pictures, strict=True)), files={k: Path(v) for k, v in files.items()}
    )


def small_model(tokens: Tokens) -> ModelConfig:
    """Three decoder layers, four blocks of vision tower with two DeepStack taps; under a million parameters."""
    special = tokens.special
    highest = int(max(tokens.control_ids.max(), len(tokens.hf) - 1))
    return ModelConfig(
        text=TextConfig(
            vocab=-(-(highest + 1) // 64) * 64, model=96, layers=3, heads=3, kv_heads=1, head_dim=32, mlp=256,
            mrope_section=(6, 5, 5), init_std=0.08,
        ),
        vision=VisionConfig(depth=4, model=96, heads=3, mlp=256, out=96, taps=(1, 2), positions=8, init_std=0.08),
        image_token=special.image_pad, video_token=special.video_pad,
        vision_start=special.vision_start, vision_end=special.vision_end,
    )  # fmt: skip


def start(folder: Path) -> Path:
    """A Hugging Face folder with random weights and a tokenizer made from the training questions."""
    import jax

    from owrl_jax.models.hf import export
    from owrl_jax.models.qwen3_vl.model import Qwen3VL

    model = folder / "start"
    if not model.exists():
        tokens = train_small_tokenizer([f"{q} {a}\n" for q, a, _ in read("train").questions], 512, folder / "tokenizer")
        (folder / "tokenizer" / "preprocessor_config.json").write_text(json.dumps(ImageProcessor().to_hf()))
        config = small_model(tokens)
        export(
            Qwen3VL(config).init(jax.random.key(0)), config, model, dtype="float32",
            tokenizer_from=folder / "tokenizer",
        )  # fmt: skip
    return model


def episodes(split: Split, tokens: Tokens, pictures: int | None = None) -> tuple[list[Trajectory], dict[str, bytes]]:
    """Every question as an episode of one turn, and the pictures by hash."""
    special, processor = tokens.special, dataclasses.replace(ImageProcessor(), min_area=AREA[0], max_area=AREA[1])
    data = {number: file.read_bytes() for number, file in sorted(split.files.items())[:pictures]}
    names = {number: hashlib.sha256(content).hexdigest() for number, content in data.items()}
    rows, cols = processor.resized(64, 64)
    grid = (rows // 16, cols // 16)
    shown = (special.vision_start, *(special.image_pad,) * (grid[0] * grid[1] // 4), special.vision_end)
    outcome = Outcome(reason=Reason.COMPLETED, detail="answered")
    right = Verdict(value=VerdictValue.SUCCESS, judge="easy-vqa")
    found = []
    for number, (question, answer, picture) in enumerate(split.questions):
        if picture not in data:
            continue
        response = (*tokens.encode_text(answer).tolist(), special.im_end)
        turn = Turn(
            trunk_ids=(special.im_start,), leaf_ids=(*shown, *tokens.encode_text(question + "\n").tolist()),
            response_ids=response, logprobs=(0.0,) * len(response), versions=(0,) * len(response),
            screenshot=names[picture], grid=grid,
        )  # fmt: skip
        task = Task(id=f"q{number}", instruction=question, start_url="about:blank", site="easy-vqa")
        found.append(
            Trajectory(
                task=task,
                group_id=f"picture{picture:04d}",
                index=number,
                protocol="easy-vqa",
                turns=(turn,),
                outcome=outcome,
                answer=answer,
                verdict=right,
            )
        )
    return found, {names[number]: content for number, content in data.items()}


def data(folder: Path, tokens: Tokens) -> dict[str, Path]:
    """Both splits as data sets."""
    found = {}
    for split in ("train", "test"):
        found[split] = folder / split
        if not found[split].exists():
            trajectories, pictures = episodes(read(split), tokens)
            write_dataset(found[split], trajectories, pictures.__getitem__, source={"package": "easy-vqa"})
    return found


def config_of(folder: Path, *, epochs: int) -> RunConfig:
    """The run: one device, float32, everything trained."""
    return RunConfig(
        name="run",
        out_dir=str(folder),
        model=ModelSettings(weights=str(folder / "start"), image_area=AREA, remat="none"),
        mesh=MeshSettings(fsdp=1),
        dtypes=DtypeSettings(compute="float32"),
        checkpoint=CheckpointSettings(every=100, keep=2),
        logging=LoggingSettings(every=10),
        sft=SftSettings(
            data=str(folder / "train"), epochs=epochs, groups_per_update=32, learning_rate=1e-3, warmup_share=0.05,
            freeze=(), row_tokens=512, rows_per_device=8,
        ),
    )  # fmt: skip


def run(
    folder: Path, *, epochs: int, seconds: float | None = None, say: Callable[[str], None] = print
) -> dict[str, float] | None:
    """Trains until the epochs are done or the time is over; then tests on all held-out questions.

    Returns:
      the result, or None if there is more to train.
    """
    from owrl_jax.build import build
    from owrl_jax.rl.imitation import Reproduced, Scorer, chance, demonstrations
    from owrl_jax.rl.packing import pack
    from owrl_jax.sft import NothingTrained, learner_of, pictures_of, shapes_of, train
    from owrl_jax.shutdown import Shutdown

    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    start(folder)
    config = config_of(folder, epochs=epochs)
    parts = build(config)
    folders = data(folder, parts.tokens)
    test = Dataset(folders["test"])
    trajectories = [t for number in range(len(test)) for t in test[number]]
    samples = demonstrations(trajectories)
    learner = learner_of(parts.model, config.sft, 1)
    pictures, shapes = pictures_of(test, parts.processor), shapes_of(trajectories[:1000], parts.model, config.sft)
    scorer = Scorer(learner)

    def score(params, some) -> Reproduced:
        return scorer(params, pack(some, parts.model.config, pictures=pictures, settings=shapes))

    shutdown, spent = Shutdown(), folder / "seconds.json"
    before = json.loads(spent.read_text()) if spent.exists() else 0.0
    if seconds is not None:
        timer = threading.Timer(max(1.0, seconds - (time.monotonic() - began)), shutdown.request)
        timer.daemon = True
        timer.start()
    curve = (folder / "curve.jsonl").open("a")

    def watch(done, state, numbers):
        if done % 100 == 0:
            share = score(learner.policy(state), samples[:1000]).share
            row = {
                "update": done, "seconds": before + time.monotonic() - began, "held_out_1000": share,
                "loss": numbers["sft/loss_nats_per_token"], "tokens_per_s": numbers["sft/tokens_per_s"],
            }  # fmt: skip
            curve.write(json.dumps(row) + "\n")
            curve.flush()
            say(json.dumps(row))

    try:
        trained = train(config, parts=parts, shutdown=shutdown, on_update=watch)
        spent.write_text(json.dumps(before + time.monotonic() - began))
        if not trained.finished:
            return None
        params = learner.policy(trained.state)
    except NothingTrained:  # it was finished before, and only the test was missing
        from owrl_jax.models.hf import load

        params = load(parts.folder.export)[1]
    result = score(params, samples)
    return {
        "exact_share": result.share, "questions": result.turns, "chance": chance(samples),
        "seconds": json.loads(spent.read_text()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--epochs", type=int, default=15)
    given = parser.parse_args()
    print(run(given.folder, epochs=given.epochs, seconds=given.seconds))


if __name__ == "__main__":
    main()
