"""From a configuration to the parts of a run, and the folder that it lives in. No loop here.

folder  runs/NAME/
  config.json         the resolved configuration
  tokenizer/          vocabulary, chat template, processor: what turns the ids of the journal back into words
  journal.jsonl       every finished episode; which iteration trained on which
  screenshots/        pictures by content hash
  judge/run/          what the run's own judge replied, was compared with, and cost
  metrics.jsonl       numbers by iteration
  evals.jsonl         evaluations
  checkpoints/        parameters, optimiser, and where the loop stands
  export/             Hugging Face format
  report.html
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from owrl_jax.agent.harness import Harness
from owrl_jax.agent.policy import Sampling
from owrl_jax.agent.prompt import PromptStyle
from owrl_jax.agent.tools import TOOL_NAMES
from owrl_jax.browser.config import Deadlines, EngineConfig, SandboxConfig
from owrl_jax.browser.safety import Safety
from owrl_jax.config import ConfigError, RunConfig, from_json, same_run, to_json
from owrl_jax.data.tasks import TaskSource, task_words
from owrl_jax.engine.engine import Engine
from owrl_jax.engine.settings import EngineSettings
from owrl_jax.judge.panel import Panel, judge_of
from owrl_jax.models.hf import load
from owrl_jax.models.processor import ImageProcessor, Patches
from owrl_jax.models.qwen3_vl.config import ModelConfig, preset, read_config
from owrl_jax.models.qwen3_vl.model import Qwen3VL
from owrl_jax.models.run import Params, Run
from owrl_jax.models.tokenizer import Tokens, load_tokenizer, train_small_tokenizer
from owrl_jax.pool.rollout import RolloutLimits, WorldPlaces
from owrl_jax.pool.sandboxes import SandboxPool, SandboxPoolConfig
from owrl_jax.pool.store import ScreenshotStore
from owrl_jax.rl.packing import Pictures
from owrl_jax.sharding import TRAIN_RULES, MeshConfig, Sharder, make_mesh
from owrl_jax.worlds.server import WorldServer

SMALL_VOCABULARY = 768
"""Of the tokenizer that is made where there are no weights."""


class RunFolder:
    """The folder of a run.

    Args:
      config: of the run; its name and `out_dir` say where.

    Raises:
      ConfigError: if the folder is of another configuration.
    """

    def __init__(self, config: RunConfig, *, extend: bool = False) -> None:
        self.path = Path(config.out_dir) / config.name
        self.path.mkdir(parents=True, exist_ok=True)
        known = self.path / "config.json"
        if known.exists():
            before = from_json(known.read_bytes())
            if not same_run(config, before):
                raise ConfigError(
                    f"{self.path} is a run with other settings (see its config.json): give the run another name, or "
                    "the settings that it has"
                )
        text = to_json(config)
        if not known.exists() or known.read_text(encoding="utf-8") != text:
            draft = known.with_suffix(".draft")
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, known)

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def screenshots(self) -> Path:
        return self.path / "screenshots"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def judge(self) -> Path:
        return self.path / "judge" / "run"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        return self.path / "export"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What every loop is made of.

    Attributes:
      config: of the run.
      folder: of the run.
      tokens, processor: of the model.
      harness: of all episodes.
      model: for training; the engine runs the same configuration in its own way.
    """

    config: RunConfig
    folder: RunFolder
    tokens: Tokens
    processor: ImageProcessor
    harness: Harness
    model: Qwen3VL
    _harnesses: dict[int, Harness] = dataclasses.field(default_factory=dict, repr=False)

    def start_params(self) -> Params:
        """The parameters that training starts from: of `model.weights`, or random ones of the run's seed."""
        weights, dtype = self.config.model.weights, jnp.dtype(self.config.dtypes.params)
        if weights is None:
            return self.model.init(jax.random.key(self.config.seed), dtype)
        return load(weights, sharder=self.model.run.shard, dtype=dtype, config=self.model.config)[1]

    def harness_of(self, steps: int) -> Harness:
        """The run's harness, but for the turns that an episode may take."""
        if steps == self.harness.budgets.max_steps:
            return self.harness
        if steps not in self._harnesses:
            self._harnesses[steps] = _harness(self.config, self.tokens, self.processor, steps)
        return self._harnesses[steps]

    def judge(self, store: ScreenshotStore) -> Panel | None:
        """Whom the run asks for verdicts; None where programs judge alone.

        Raises:
          ConfigError: if a key is not where the settings say.
        """
        return judge_of(self.config.judge, self.folder.judge, store.get, seed=self.config.seed)

    def engine(self, **fields: Any) -> Engine:
        """An engine for this model, not started. `fields` replace settings that follow from the run's configuration."""
        return Engine(
            self.model.config,
            processor=self.processor,
            special=self.tokens.special,
            settings=dataclasses.replace(engine_settings(self.config, self.processor), **fields),
            run=dataclasses.replace(self.model.run, remat="none"),
        )

    def episodes(self) -> int:
        """Episodes at one time."""
        return episodes(self.config)

    def limits(self) -> RolloutLimits:
        """Of the pool."""
        browser = self.config.browser
        return RolloutLimits(max_episodes=self.episodes(), retries=browser.retries, episode_s=browser.episode_s)

    def sampling(self, seed: int, temperature: float | None = None) -> Sampling:
        """How responses are drawn; the harness cuts the length and seeds each turn."""
        rollout = self.config.rollout
        return Sampling(
            max_new_tokens=self.config.agent.max_response_tokens,
            temperature=rollout.temperature if temperature is None else temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            seed=seed,
        )

    def pictures(self, store: ScreenshotStore) -> Pictures:
        """Patches of screenshots by content hash, the last few hundred kept."""

        @functools.lru_cache(maxsize=512)
        def patches(name: str) -> Patches:
            return self.processor.process(store.get(name))

        return patches


def build(config: RunConfig) -> Parts:
    """The parts of a run. Makes its folder, loads or makes the tokenizer; parameters are not touched yet.

    Raises:
      ConfigError: if settings do not go together, or the folder is of another run.
    """
    weights = config.model.weights
    if weights is not None and not Path(weights).is_dir():
        raise ConfigError(
            f"model.weights={weights!r} is no folder here: make it with owrl sft, or name another; --dry-run says what "
            "else is missing"
        )
    folder = RunFolder(config)
    _keep_compiled()
    agent = config.agent
    if config.model.weights is None:
        tokens = _small_tokenizer(folder.tokenizer, _style(config), config)
        model_config = _with_ids(preset(config.model.size), tokens)
        processor = image_processor(ImageProcessor(), config)
    else:
        tokens = load_tokenizer(config.model.weights)
        model_config = read_config(Path(config.model.weights))
        processor = image_processor(ImageProcessor.load(config.model.weights), config)
        if not (folder.tokenizer / "tokenizer.json").exists():
            tokens.hf.save_pretrained(folder.tokenizer)
    (folder.tokenizer / "preprocessor_config.json").write_text(
        json.dumps(processor.to_hf(), indent=2), encoding="utf-8"
    )
    harness = _harness(config, tokens, processor, agent.max_steps)
    run = Run(compute=jnp.dtype(config.dtypes.compute), remat=config.model.remat, shard=_sharder(config))
    return Parts(
        config=config,
        folder=folder,
        tokens=tokens,
        processor=processor,
        harness=harness,
        model=Qwen3VL(model_config, run),
    )


def episodes(config: RunConfig) -> int:
    """Episodes at one time: as configured, or what the memory and the cores of this machine allow."""
    limit = config.browser.max_episodes
    if limit is not None:
        return limit
    free_mib = psutil.virtual_memory().available / 2**20
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return SandboxPoolConfig().resolve(cores=cores, memory_mib=free_mib).max_episodes


def engine_settings(config: RunConfig, processor: ImageProcessor) -> EngineSettings:
    """The sizes of a run's engine: a row for each episode, room for the longest context and for its viewport."""
    rows = episodes(config)
    width, height = config.browser.viewport
    rows_px, cols_px = processor.resized(height, width)
    patches = rows_px * cols_px // processor.patch_size**2
    return EngineSettings(
        max_context=-(-config.agent.max_context_tokens // 16) * 16,
        decode_rows=tuple(sorted({1, max(1, rows // 4), rows})),
        patch_buckets=(patches, 4 * patches) if rows > 1 else (patches,),
    )


def _style(config: RunConfig) -> PromptStyle:
    agent = config.agent
    return PromptStyle(system=agent.prompt, tools=agent.tools or TOOL_NAMES, feedback=agent.feedback)


def _harness(config: RunConfig, tokens: Tokens, processor: ImageProcessor, max_steps: int) -> Harness:
    agent = dataclasses.replace(config.agent, max_steps=max_steps)
    return Harness.from_settings(tokens, processor, agent, config.browser, style=_style(config))


def _keep_compiled() -> None:
    """Compiled programs are kept on disk, so that a run that is resumed does not compile again what it had."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "owrl_jax" / "jax"
        jax.config.update("jax_compilation_cache_dir", str(cache))


@asynccontextmanager
async def stage(config: RunConfig, limits: RolloutLimits) -> AsyncIterator[tuple[SandboxPool, WorldPlaces]]:
    """Where episodes happen: sandboxes on this machine's browsers, and the local worlds."""
    from owrl_jax.pool.local import browser_pool

    browser = config.browser
    async with WorldServer() as worlds:
        deadlines = dataclasses.replace(
            Deadlines(),
            call_s=min(Deadlines().call_s, browser.step_s),
            cdp_s=min(Deadlines().cdp_s, browser.step_s),
            step_s=browser.step_s,
            episode_s=browser.episode_s,
        )
        sandbox = SandboxConfig(
            viewport=browser.viewport,
            image_format=browser.image_format,
            deadlines=deadlines,
            safety=Safety.for_local_worlds(worlds.exceptions),
        )
        pool = browser_pool(
            SandboxPoolConfig(max_episodes=limits.max_episodes),
            engine=EngineConfig(browser=browser.executable),
            sandbox=sandbox,
        )
        async with pool:
            yield pool, WorldPlaces(worlds)


def _small_tokenizer(folder: Path, style: PromptStyle, config: RunConfig) -> Tokens:
    """The tokenizer of a run without weights, made from the words of harness and tasks and kept in the run's folder."""
    if (folder / "tokenizer.json").exists():
        return load_tokenizer(folder)
    words = [style.system_prompt(), json.dumps(style.schemas()), _EXAMPLE, " ".join(map(str, range(1001)))]
    words += [text for task in TaskSource.of(config.data, seed=0).some(_TASKS_READ) for text in task_words(task)]
    return train_small_tokenizer(words * 2, SMALL_VOCABULARY, folder)


_TASKS_READ = 200
"""Of each kind, for their words: an agent that spells yellow in six letters learns six times as slowly to say it."""

_EXAMPLE = (
    '<tool_response>\nSucceed: clicked <button> "Next".\n\n<observation>\nscreen size: 128 x 128\ncurrent tab: 0\ntabs:'
    "\n- Tab 0 (active): http://starter.localhost:8000/quad - quad\nscreenshot:\n\n</observation>\n</tool_response>\n"
    "<user_request>\nclick the blue box\n</user_request>\n<think>\nThe red disc is there. Done.\n</think>\n\n"
    '<tool_call>\n{"name": "click", "arguments": {"point_2d": [250, 750]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "done", "arguments": {"response": "Done."}}\n</tool_call>\n'
) * 4


def _with_ids(config: ModelConfig, tokens: Tokens) -> ModelConfig:
    """A size without weights, for the vocabulary that was made."""
    special, highest = tokens.special, int(max(tokens.control_ids.max(), len(tokens.hf) - 1))
    return dataclasses.replace(
        config,
        text=dataclasses.replace(config.text, vocab=-(-(highest + 1) // 64) * 64),
        image_token=special.image_pad,
        video_token=special.video_pad,
        vision_start=special.vision_start,
        vision_end=special.vision_end,
    )


def image_processor(processor: ImageProcessor, config: RunConfig) -> ImageProcessor:
    """The model's image processor with the run's own limits of a picture's area."""
    if config.model.image_area is None:
        return processor
    low, high = config.model.image_area
    return dataclasses.replace(processor, min_area=low, max_area=high)


def _sharder(config: RunConfig) -> Sharder | None:
    """The mesh of training; None on one device, where there is nothing to spread."""
    mesh = MeshConfig(**dataclasses.asdict(config.mesh))
    devices = jax.devices()
    fixed = math.prod(size for size in dataclasses.asdict(mesh).values() if size != -1)
    wanted = len(devices) if -1 in dataclasses.asdict(mesh).values() else fixed
    if wanted == 1:
        return None
    if wanted > len(devices):
        raise ConfigError(f"mesh={config.mesh} needs {wanted} devices, and there are {len(devices)}")
    return Sharder(make_mesh(mesh, devices[:wanted]), TRAIN_RULES)
