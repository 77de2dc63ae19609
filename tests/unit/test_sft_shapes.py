"""The shapes of imitation's batches fit what an update holds, not what lies side by side in the data."""

import random
from types import SimpleNamespace

import numpy as np

from owrl_jax.config import SftSettings
from owrl_jax.outcome import Outcome, Reason
from owrl_jax.rl.imitation import demonstrations
from owrl_jax.rl.packing import plan_batches
from owrl_jax.sft import measured, shapes_of
from owrl_jax.types import Task, Trajectory
from tests.unit.learner_world import config, leaf_of, turn, words


def look(number: int) -> Trajectory:
    """Eight in a row show the same picture, each with another request and other words."""
    rng = np.random.default_rng(number)
    sha = f"0{number // 8}"
    made = turn((1, 2), leaf_of(sha, words(rng, 2, 2)), (*words(rng, 9, 9), 7), sha)
    outcome = Outcome(reason=Reason.COMPLETED, detail="answered")
    task = Task(id=f"t{number}", instruction="look", start_url="about:blank")
    return Trajectory(task=task, group_id=f"g{number}", index=0, protocol="p", turns=(made,), outcome=outcome)


def test_a_shuffled_update_fills_its_rows():
    groups = [[look(number)] for number in range(640)]
    model = SimpleNamespace(config=config(), run=SimpleNamespace(mesh=None))
    shapes = shapes_of(measured(groups), model, SftSettings(row_tokens=256))
    update = demonstrations([one for (one,) in random.Random(5).sample(groups, 64)])
    plans = plan_batches(update, model.config, shapes)
    needed = sum(len(t.trunk_ids) + len(t.leaf_ids) + len(t.response_ids) for s in update for t in s.turns)
    assert sum(plan.shape[0] for plan in plans) < 1.5 * needed
