"""The whole tree, and what holds between its sections."""

from __future__ import annotations

import dataclasses

from owrl_jax.config.checks import at_least_one, need
from owrl_jax.config.judging import JudgeSettings
from owrl_jax.config.settings import (
    AgentSettings,
    BrowserSettings,
    CheckpointSettings,
    DataSettings,
    DtypeSettings,
    EvalSettings,
    LoggingSettings,
    MeshSettings,
    ModelSettings,
    RolloutSettings,
)
from owrl_jax.config.training import HorizonSettings, RlSettings, SftSettings, Stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that is chosen for a run.

    Attributes:
      name: of the run; its files go to `out_dir`/`name`.
      out_dir: folder of all runs.
      seed: of parameters, sampling and task order.
      iterations: rounds of rollout and update.
      curriculum: stages that take the place of `agent.max_steps` and `rl.learning_rate` in training; evaluation keeps
        `agent.max_steps`, so that its numbers stay comparable. Without stages, those two hold throughout.
    """

    name: str = "run"
    out_dir: str = "runs"
    seed: int = 0
    iterations: int = 90
    curriculum: tuple[Stage, ...] = ()
    horizon: HorizonSettings = dataclasses.field(default_factory=HorizonSettings)
    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    mesh: MeshSettings = dataclasses.field(default_factory=MeshSettings)
    dtypes: DtypeSettings = dataclasses.field(default_factory=DtypeSettings)
    browser: BrowserSettings = dataclasses.field(default_factory=BrowserSettings)
    agent: AgentSettings = dataclasses.field(default_factory=AgentSettings)
    rollout: RolloutSettings = dataclasses.field(default_factory=RolloutSettings)
    rl: RlSettings = dataclasses.field(default_factory=RlSettings)
    sft: SftSettings = dataclasses.field(default_factory=SftSettings)
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    eval: EvalSettings = dataclasses.field(default_factory=EvalSettings)
    judge: JudgeSettings = dataclasses.field(default_factory=JudgeSettings)
    checkpoint: CheckpointSettings = dataclasses.field(default_factory=CheckpointSettings)
    logging: LoggingSettings = dataclasses.field(default_factory=LoggingSettings)

    def __post_init__(self) -> None:
        need(bool(self.name) and "/" not in self.name, "name", self.name, "a plain name: it becomes a folder")
        need(0 <= self.seed < 2**32, "seed", self.seed, "between 0 and 2**32 - 1")
        at_least_one(self, "iterations")
        need(
            not (self.curriculum and self.horizon.most), "horizon.most", self.horizon.most,
            "0 where a curriculum sets the horizon",
        )  # fmt: skip

    def stage_of(self, iteration: int) -> Stage:
        """The stage that an iteration (counted from 0) belongs to: a function of its number and of nothing else."""
        if not self.curriculum:
            return Stage(
                iterations=self.iterations, max_steps=self.agent.max_steps, learning_rate=self.rl.learning_rate
            )
        end = 0
        for stage in self.curriculum:
            end += stage.iterations
            if iteration < end:
                return stage
        return self.curriculum[-1]
