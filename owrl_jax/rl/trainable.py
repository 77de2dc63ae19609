"""What of the model is trained: everything, some parts, or low-rank adapters beside all matrices.

The parameter table decides. Frozen parameters have neither gradients nor moments, and a frozen vision tower is not run
backward. Adapters (LoRA) of a matrix W [in, out] are A [in, rank] and B [rank, out]; the model computes with
W + alpha/rank · A·B, B begins at zero, and `merged` gives exactly those weights to the rollouts and to an export.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from owrl_jax.config import RlSettings
from owrl_jax.models.qwen3_vl.config import ModelConfig
from owrl_jax.models.qwen3_vl.table import Row, build_tree, leaves, table
from owrl_jax.models.run import Params
from owrl_jax.rl.optimizer import Leaves

Part = Literal["vision", "projector", "language"]
ADAPTER = "lora."


def part_of(row: Row) -> Part:
    """Which part of the model a parameter belongs to; the projector is the merger and its DeepStack companions."""
    if row.path[0] != "vision":
        return "language"
    return "projector" if row.path[1] in ("merger", "deepstack") else "vision"


def module_of(name: str) -> str:
    """The module under which a parameter's gradient norm is logged."""
    parts = name.removeprefix(ADAPTER).split(".")
    if parts[0] != "vision":
        return parts[0]
    return "vision.blocks" if parts[1].startswith("stage") else f"vision.{parts[1]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainable:
    """What is trained.

    Attributes:
      freeze: parts that stay as they are.
      lora_rank: above 0, matrices stay and adapters of this rank are trained in the parts that are not frozen.
      lora_alpha: adapters are scaled by alpha / rank.
    """

    freeze: tuple[Part, ...] = ()
    lora_rank: int = 0
    lora_alpha: float = 16.0

    def __post_init__(self) -> None:
        unknown = set(self.freeze) - {"vision", "projector", "language"}
        if unknown:
            raise ValueError(f"freeze names {sorted(unknown)}; the parts are vision, projector and language")
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank={self.lora_rank} must be 0 (none) or more")

    @classmethod
    def of(cls, rl: RlSettings) -> Trainable:
        """The part of the settings that says what is trained."""
        return cls(freeze=rl.freeze, lora_rank=rl.lora_rank, lora_alpha=rl.lora_alpha)

    def rows(self, config: ModelConfig) -> dict[str, Row]:
        """The parameters that are trained themselves, by name.

        Raises:
          ValueError: if that is none and there are no adapters either.
        """
        chosen = {row.name: row for row in table(config) if part_of(row) not in self.freeze}
        if not chosen:
            raise ValueError(f"freeze={self.freeze} leaves nothing of this model to train")
        return {} if self.lora_rank else chosen

    def adapters(self, config: ModelConfig) -> dict[str, Adapter]:
        """Adapters by the name of the matrix that they belong to."""
        if not self.lora_rank:
            return {}
        chosen = [row for row in table(config) if part_of(row) not in self.freeze]
        found = {row.name: _adapter(row, self.lora_rank) for row in chosen if _adapts(row)}
        if not found:
            raise ValueError(f"freeze={self.freeze} leaves no matrix for adapters")
        return found

    def decayed(self, config: ModelConfig) -> frozenset[str]:
        """Names of the trained arrays that weight decay applies to: matrices and tables, adapters included."""
        names = {name for name, row in self.rows(config).items() if row.init == "normal"}
        return frozenset(names | {f"{ADAPTER}{n}.{side}" for n in self.adapters(config) for side in "ab"})

    def split(self, config: ModelConfig, params: Params, adapters: Leaves | None) -> tuple[Leaves, Leaves]:
        """Trained and frozen arrays, by name; adapters stand beside the parameters as `lora.<name>.a` and `.b`."""
        trained = self.rows(config)
        by_name = {row.name: leaf for row, leaf in leaves(config, params)}
        moving = {name: leaf for name, leaf in by_name.items() if name in trained} | dict(adapters or {})
        return moving, {name: leaf for name, leaf in by_name.items() if name not in trained}

    def join(self, config: ModelConfig, moving: Leaves, frozen: Leaves) -> tuple[Params, Leaves | None]:
        """The inverse of `split`."""
        by_name = moving | frozen
        adapters = {name: leaf for name, leaf in moving.items() if name.startswith(ADAPTER)}
        return build_tree(config, lambda row: by_name[row.name]), adapters or None

    def start(self, config: ModelConfig, key: jax.Array) -> Leaves | None:
        """New adapters: A normal with variance 1 / in, B zero, so that the model is what it was. None without LoRA."""
        made: Leaves = {}
        for number, (name, adapter) in enumerate(sorted(self.adapters(config).items())):
            noise = jax.random.normal(jax.random.fold_in(key, number), adapter.a, jnp.float32)
            made[f"{ADAPTER}{name}.a"] = noise / math.sqrt(adapter.a[-2])
            made[f"{ADAPTER}{name}.b"] = jnp.zeros(adapter.b, jnp.float32)
        return made or None

    def merged(self, config: ModelConfig, params: Params, adapters: Leaves | None) -> Params:
        """The parameters that the model computes with."""
        if adapters is None:
            return params
        known = self.adapters(config)
        scale = self.lora_alpha / self.lora_rank

        def whole(row: Row, leaf: Any) -> Any:
            if row.name not in known:
                return leaf
            low = adapters[f"{ADAPTER}{row.name}.a"] @ adapters[f"{ADAPTER}{row.name}.b"]
            return leaf + (scale * low).reshape(row.full_shape).astype(leaf.dtype)

        by_name = {row.name: whole(row, leaf) for row, leaf in leaves(config, params)}
        return build_tree(config, lambda row: by_name[row.name])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """Shapes of the two sides: [layers, experts, in, rank] and [layers, experts, rank, out], leading ones if any."""

    a: tuple[int, ...]
    b: tuple[int, ...]


def _adapts(row: Row) -> bool:
    """Whether a parameter is a linear map inside the layers; routers and the output map stay as they are."""
    return row.unit in ("token", "patch", "image_token") and row.path[-1] != "router" and row.path[1] != "patch"


def _adapter(row: Row, rank: int) -> Adapter:
    lead = row.full_shape[: len(row.full_shape) - len(row.shape)]
    if row.expert:  # [experts, in, out…], as it lies in the file
        lead, inputs = (*lead, row.shape[0]), row.shape[1]
        outputs = int(np.prod(row.shape[2:]))
    else:
        outputs, inputs = row.layout.hf_shape  # torch keeps [out, in]
    return Adapter(a=(*lead, inputs, rank), b=(*lead, rank, outputs))
