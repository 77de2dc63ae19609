"""A run folder of real episodes: oracles and random actors on the starter site in a real Chromium.

`python -m tests.browser.real_run FOLDER` writes one to look at.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

from owrl_jax.agent.episode import Episode, SeenTurn
from owrl_jax.agent.harness import Budgets, Harness
from owrl_jax.agent.policies import ActorPolicy, OracleActor, RandomActor
from owrl_jax.browser import BrowserEngine, SandboxConfig
from owrl_jax.browser.safety import Safety
from owrl_jax.browser.sandbox import Sandbox
from owrl_jax.config import DataSettings, RlSettings, RunConfig, to_json
from owrl_jax.models.processor import ImageProcessor
from owrl_jax.obs.explain import small_tokenizer
from owrl_jax.obs.metrics import Metrics, TimeSplit
from owrl_jax.obs.stats import Evaluation, append_evaluation, attempt_of
from owrl_jax.pool.journal import Journal
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.types import GroupRequest, Trajectory
from owrl_jax.worlds import PageProbe, WorldServer, make_task
from owrl_jax.worlds.trial import oracle_for

TEMPLATES = ("count_colour", "write_pick_send", "word")


async def make_real_run(folder: Path, *, templates: tuple[str, ...] = TEMPLATES, iterations: int = 1) -> Path:
    """Groups of three (two oracles, one that acts at random in four turns), one batch for each iteration."""
    store = ScreenshotStore(folder / "screenshots")  # makes the folder
    config = RunConfig(name="starter", rl=RlSettings(groups=3, group_size=3), data=DataSettings(tasks=("starter",)))
    (folder / "config.json").write_text(to_json(config))
    tokens = small_tokenizer()
    tokens.hf.save_pretrained(str(folder / "tokenizer"))
    engine, split = BrowserEngine(), TimeSplit()
    await engine.start()
    try:
        async with WorldServer() as worlds:

            async def play(template: str, seed: int, group: str, index: int) -> Trajectory:
                visit = await worlds.open(make_task("starter", template, seed))
                width, height = visit.task.metadata["viewport"]
                oracle = index < 2
                harness = Harness(
                    tokens=tokens,
                    picture_rule=ImageProcessor(),
                    budgets=Budgets(max_steps=20 if oracle else 4),
                    viewport=(width, height),
                )
                sandbox = SandboxConfig(viewport=(width, height), safety=Safety.for_local_worlds(worlds.exceptions))

                async def opened() -> Sandbox:
                    return Sandbox(engine, sandbox)

                def seen(one: SeenTurn) -> None:
                    if one.observation.screenshot is not None:
                        store.put(one.observation.screenshot)

                actor = OracleActor(oracle_for(visit), PageProbe) if oracle else RandomActor(seed + index)
                episode = Episode(
                    visit.task,
                    harness=harness,
                    policy=ActorPolicy(actor, tokens),
                    open_sandbox=opened,
                    group_id=group,
                    index=index,
                    instruction=lambda: visit.instruction,
                    on_turn=seen,
                )
                with split.during("browser"):
                    trajectory = await episode.run()
                last = episode.observation
                final = store.put(last.screenshot) if last is not None and last.screenshot is not None else None
                with split.during("judge"):
                    verdict = visit.verdict(trajectory.answer)
                worlds.forget(visit.key)
                return dataclasses.replace(trajectory, verdict=verdict, final_screenshot=final)

            with Journal(folder / "journal.jsonl") as journal, Metrics(folder, stage="rl") as metrics:
                for step in range(iterations):
                    names, played = [], []
                    for template in templates:
                        name = f"{step}-{template}"
                        members = [await play(template, step, name, index) for index in range(3)]
                        offsets = [journal.add_trajectory(one, attempt=0) for one in members]
                        request = GroupRequest(task=members[0].task, group_id=name, n=3)
                        journal.add_group(request, offsets, version=step, reason="complete")
                        names.append(name)
                        played += members
                    journal.add_batch(step, names)
                    good = [attempt_of(one).success for one in played]
                    values = {"reward/mean_per_trajectory": sum(g is True for g in good) / len(good)}
                    metrics.log(step, {"rollout/trajectories_finished": len(played), **values, **split.take()})
                    attempts = tuple(attempt_of(one) for one in played if one.index != 1)
                    attempts = tuple(dataclasses.replace(a, attempt=n) for n, a in enumerate(attempts))
                    append_evaluation(folder, Evaluation(at=step, name="starter", tasks=attempts, stage="rl"))
    finally:
        await engine.close()
    return folder


if __name__ == "__main__":
    asyncio.run(make_real_run(Path(sys.argv[1]), iterations=3))
