"""A run folder made from nothing: invented numbers, groups with every kind of ending, hostile words everywhere.

`python -m tests.unit.run_folder FOLDER` writes one to look at.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from owrl_jax.agent.chat import encode_response
from owrl_jax.agent.parser import write
from owrl_jax.config import RlSettings, RunConfig, to_json
from owrl_jax.obs.explain import small_tokenizer
from owrl_jax.obs.metrics import Metrics
from owrl_jax.obs.stats import Evaluation, append_evaluation, attempt_of
from owrl_jax.outcome import Outcome, Reason
from owrl_jax.pool.journal import Journal
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.types import (
    CallResult,
    CallStatus,
    GroupRequest,
    Screenshot,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    Verdict,
    VerdictValue,
)

EVIL = '</pre></template></script><script>window.pwned=1</script><img src=x onerror="window.pwned=2">\'&amp;\u2028'
COLOURS = ("crimson", "seagreen", "royalblue", "goldenrod")


@functools.cache
def tokens():
    return small_tokenizer()


@functools.cache
def picture(number: int, size: tuple[int, int] = (320, 240)) -> Screenshot:
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    for n, colour in enumerate(COLOURS):
        x = size[0] * (n + 0.5) / len(COLOURS)
        y = size[1] * (0.3 + 0.4 * ((n + number) % 2))
        draw.rectangle((x - 25, y - 25, x + 25, y + 25), fill=colour)
    draw.text((8, 8), f"page {number}", fill="black")
    out = io.BytesIO()
    image.save(out, "PNG")
    return Screenshot(data=out.getvalue(), width=size[0], height=size[1])


def make_task(number: int, words: str = "") -> Task:
    site = ("starter.localhost", "shop.localhost")[number % 2]
    return Task(
        id=f"{site}/box/{number}",
        instruction=words or f"Click the {COLOURS[number % 4]} box, then say how many boxes there are.",
        start_url=f"http://{site}/",
        site=site,
        difficulty=1.0 + number % 3,
        seed=number,
        metadata={"template": f"box{number % 5}"},
    )


def make_turn(store: ScreenshotStore | None, number: int, text: str, calls: tuple[ToolCall, ...], **fields) -> Turn:
    ids = encode_response(tokens(), text)
    shot = picture(number)
    return Turn(
        trunk_ids=tuple(tokens().encode_text("Succeed: clicked.\n").tolist()),
        leaf_ids=tuple(tokens().encode_text("screenshot:\n").tolist()),
        response_ids=ids,
        logprobs=(-0.25,) * len(ids),
        versions=(fields.pop("version", 0),) * len(ids),
        screenshot=store.put(shot) if store else None,
        grid=(16, 20) if store else None,
        calls=calls,
        timings_ms={"prompt": 2.0, "generate": 180.0, "step": 95.0, "step.settle": 60.0},
        **fields,
    )


def make_episode(
    store: ScreenshotStore | None, task: Task, group: str, index: int, *, how: str = "success", version: int = 0
) -> Trajectory:
    """One episode; `how`: success, failure, invalid, format, budget, fault, evil."""
    words = EVIL if how == "evil" else "I see four boxes. The one I want is on the left, so I click it."
    click = ToolCall(name="click", arguments={"point_2d": [125, 300], "note": words} if how == "evil" else
                     {"point_2d": [125, 300]})  # fmt: skip
    ok = CallResult(
        name="click", status=CallStatus.OK, feedback=f"Succeed: clicked <box> {words[:80]}".split("\u2028")[0]
    )
    done = ToolCall(name="done", arguments={"response": words})
    turns = [make_turn(store, index, write(words, [click]), (click,), results=(ok,), version=version)]
    if how == "failure":
        bad = CallResult(name="click", status=CallStatus.FAILED, feedback="Failed: there is nothing at (500, 990).")
        miss = ToolCall(name="click", arguments={"point_2d": [500, 990]})
        turns.append(make_turn(store, index + 1, write("Further down?", [miss]), (miss,), results=(bad,)))
    if how == "format":
        turns += [make_turn(store, index + 1, "click click " + EVIL, (), parsed=False, version=version)] * 3
    endings = {
        "format": Outcome(reason=Reason.FORMAT_ERROR, detail="consecutive_parse_failures"),
        "budget": Outcome(reason=Reason.STEP_BUDGET, detail="max_steps"),
        "fault": Outcome(
            reason=Reason.SANDBOX_ERROR, detail="browser_gone", message="exit code -9", traceback=f"Trace\n{EVIL}"
        ),
    }
    outcome = endings.get(how, Outcome(reason=Reason.COMPLETED, detail="answered"))
    verdict = None
    if how in ("success", "failure", "invalid", "evil"):
        turns.append(make_turn(store, index + 2, write(words, [done]), (done,), version=version))
        value = {"success": "success", "evil": "success"}.get(how, how)
        verdict = Verdict(
            value=VerdictValue(value),
            judge="rubric" if how == "invalid" else "program",
            rationale=EVIL if how == "evil" else f"the box was {'not ' if value == 'failure' else ''}clicked",
            evidence=(store.put(picture(index + 3)),) if store else (),
            prompt_sha256="ab" * 32,
            latency_ms=12.0,
        )
    return Trajectory(
        task=task,
        group_id=group,
        index=index,
        protocol="p1",
        turns=tuple(turns),
        outcome=outcome,
        answer=words if verdict else None,
        verdict=verdict,
        final_screenshot=store.put(picture(index + 3)) if store else None,
        timings_ms={"queue": 5.0, "reset": 300.0, "generate": 180.0 * len(turns), "step": 95.0 * len(turns),
                    "step.settle": 60.0 * len(turns), "total": 500.0 + 275.0 * len(turns)},
    )  # fmt: skip


def write_run(folder: Path, *, iterations: int = 40, groups_per_iteration: int = 2, n: int = 4) -> Path:
    """A whole run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = RunConfig(name="tiny <b>boxes", iterations=iterations, rl=RlSettings(groups=2, group_size=n))
    (folder / "config.json").write_text(to_json(config))
    tokens().hf.save_pretrained(str(folder / "tokenizer"))
    rng = random.Random(0)
    store = ScreenshotStore(folder / "screenshots")
    with Journal(folder / "journal.jsonl") as journal, Metrics(folder, stage="rl") as metrics:
        for step in range(iterations):
            names = []
            skill = 0.2 + 0.7 * step / max(1, iterations - 1)
            for g in range(groups_per_iteration):
                number = step * groups_per_iteration + g
                evil = number == 1
                task = make_task(number, EVIL if evil else "")
                name = f"g{number:04d}" + (EVIL[:60] if evil else "")
                names.append(name)
                if number % 7 == 3:
                    journal.add_trajectory(make_episode(store, task, name, 0, how="fault"), attempt=0)
                members = []
                for index in range(n):
                    lost = rng.choice(["failure", "failure", "budget", "format", "invalid"])
                    how = "evil" if evil and index == 1 else "success" if rng.random() < skill else lost
                    again = int(number % 7 == 3 and index == 0)
                    episode = make_episode(store, task, name, index, how=how, version=step)
                    members.append(journal.add_trajectory(episode, attempt=again))
                journal.add_group(GroupRequest(task=task, group_id=name, n=n), members, version=step, reason="complete")
            if step < iterations - 1:
                journal.add_batch(step, names)
            noise = rng.gauss(0, 0.06)
            metrics.log(
                step,
                {
                    "reward/mean_per_trajectory": skill + noise,
                    "rollout/valid_share_per_trajectory": min(1.0, 0.93 + noise / 3),
                    "loss/total": -0.02 * math.exp(-step / 20) + noise / 20,
                    "policy/entropy_mean": 1.2 * math.exp(-step / 30) + 0.3,
                    "grad/norm": 0.8 + abs(noise) * (20 if step == 25 else 2),
                    "engine/tokens_per_s": 900 + 200 * rng.random(),
                    **split(rng),
                },
            )
    for at in (0, iterations // 2, iterations):
        attempts = []
        for number in range(40):
            how = "success" if rng.random() < 0.25 + 0.5 * at / iterations else "failure"
            how = "fault" if number % 13 == 5 else how
            episode = make_episode(None, dataclasses.replace(make_task(number), split="held_out"), "e", number, how=how)
            attempts.append(attempt_of(episode))
        append_evaluation(folder, Evaluation(at=at, name="held_out", tasks=tuple(attempts), protocol="p1", stage="rl"))
    return folder


def split(rng: random.Random) -> dict[str, float]:
    parts = {"browser": 12 + 3 * rng.random(), "engine": 8.0, "learner": 6.0, "judge": 0.4, "idle": 1.5}
    found = {f"time/{name}_s": s for name, s in parts.items()}
    found |= {"busy/browser_s": 19.0, "busy/engine_s": 15.0, "busy/learner_s": 6.0, "busy/judge_s": 0.4}
    whole = sum(parts.values())
    return {**found, "time/total_s": whole, "time/iteration_s": whole}


if __name__ == "__main__":
    write_run(Path(sys.argv[1]))
