"""One of several processes that train together, over loopback. For test_processes.

    python -m tests.equivalence.process_run PORT PROCESSES NUMBER FOLDER

Process 0 alone has the samples. Writes into FOLDER, as NUMBER.json, what this process saw; process 0 writes params.npz.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.qwen3_vl.table import leaves
from owrl_jax.models.run import Run
from owrl_jax.rl import hosts
from owrl_jax.rl.optimizer import OptimizerSettings
from owrl_jax.rl.packing import PackSettings
from owrl_jax.rl.update import Learner
from owrl_jax.sharding import TRAIN_RULES, MeshConfig, Sharder, make_mesh
from tests.unit.learner_world import config, group, picture

UPDATES = 2
RATE = OptimizerSettings(learning_rate=2e-3)
SETTINGS = PackSettings(tokens=128, rows=4, patches=192, responses=64, buckets=(1.0,), shards=4)


def samples():
    """What process 0 knows: several groups, retries and turns without a picture among them."""
    return [one for seed in range(1, 7) for one in group(seed, share_picture=seed % 2 == 0)]


def main(port: str, processes: str, number: str, folder: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(number))
    shard = Sharder(mesh=make_mesh(MeshConfig(replica=2, fsdp=2)), rules=TRAIN_RULES)
    learner = Learner(Qwen3VL(config(), Run(shard=shard)), RATE)
    state = learner.init(learner.model.init(jax.random.key(0)))
    known = hosts.shared_samples(samples() if jax.process_index() == 0 else None)
    asked: set[str] = set()

    def pictures(sha: str):
        asked.add(sha)
        return picture(sha)

    metrics = []
    for _ in range(UPDATES):
        batches = hosts.stream(known, config(), pictures=pictures, settings=SETTINGS, shard=shard)
        state, numbers = learner.update(state, batches)
        metrics.append(numbers)
    # A process with other settings must be noticed before anything is computed.
    own = dataclasses.replace(SETTINGS, tokens=SETTINGS.tokens + 32 * jax.process_index())
    try:
        next(hosts.stream(known, config(), pictures=pictures, settings=own, shard=shard))
        disagreed = ""
    except hosts.HostsDisagree as error:
        disagreed = str(error)
    whole = multihost_utils.process_allgather(state.params, tiled=True)
    if jax.process_index() == 0:
        np.savez(Path(folder) / "params.npz", **{row.name: np.asarray(leaf) for row, leaf in leaves(config(), whole)})
    seen = {
        "devices": jax.device_count(),
        "own_devices": jax.local_device_count(),
        "samples": [sample.name for sample in known],
        "asked": sorted(asked),
        "metrics": metrics,
        "disagreed": disagreed,
    }
    (Path(folder) / f"{number}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
