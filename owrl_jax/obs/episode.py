"""`owrl episode`: one episode in a real browser, told on the screen and, with `--view`, as a page to look at.

    owrl episode --world shop --policy oracle --view out.html
    owrl episode --world starter --task count_colour --seed 3 --policy random
    owrl episode --world shop --policy endpoint --endpoint http://127.0.0.1:8000/v1 --model name
    owrl episode --world shop --policy replay --file saved.json
    owrl episode --explain > docs/harness.md

Exit codes: 0 the task was fulfilled (or, without a program that could tell, the policy called done), 1 it was not, 2 a
wrong call.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from owrl_jax.agent.episode import Episode, SeenTurn
from owrl_jax.agent.harness import Budgets, Harness
from owrl_jax.agent.policies import ActorPolicy, OracleActor, RandomActor, ReplayedPolicy, Script
from owrl_jax.agent.policy import Policy, Sampling
from owrl_jax.agent.prompt import PromptStyle
from owrl_jax.types import Task, Trajectory, Verdict, VerdictValue, decode, encode


class WrongCall(ValueError):
    """The arguments do not go together; the message says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `owrl episode`."""

    world: str | None = None
    """A local world; `owrl worlds list` has their names."""
    task: str | None = None
    """A template of the world; left out, its easiest one."""
    seed: int = 0
    """Which instance of the template."""
    url: str | None = None
    """Instead of a world: a live page to begin at, together with --instruction."""
    instruction: str | None = None
    """What to do there."""
    policy: Literal["oracle", "random", "script", "replay", "endpoint"] = "oracle"
    """Who acts."""
    file: Path | None = None
    """For script: a text file, responses separated by lines of three dashes. For replay: what --save wrote."""
    endpoint: str | None = None
    """For endpoint: the base address of an OpenAI-compatible server, up to and with /v1."""
    model: str | None = None
    """For endpoint: the model's name there."""
    key_file: Path | None = None
    """For endpoint: a file that holds the key and nothing else."""
    max_usd: float = 1.0
    """For endpoint: what the episode may cost; needs the two prices to mean anything."""
    usd_per_million_in: float = 0.0
    """For endpoint: price of prompt tokens."""
    usd_per_million_out: float = 0.0
    """For endpoint: price of response tokens."""
    spend_file: Path = Path("spend.jsonl")
    """For endpoint: the account, kept over episodes."""
    tokenizer: Path | None = None
    """Folder of a model whose vocabulary and chat template to use; left out, a small one made on the spot."""
    prompt: Literal["full", "compact", "terse"] = "full"
    """Which system prompt."""
    max_steps: int = 30
    """Turns before the episode ends."""
    temperature: float = 0.8
    """Of an endpoint."""
    browser: str | None = None
    """Path of the browser, or headless_shell or chromium; left out, the best there is."""
    view: Path | None = None
    """Write the episode as an HTML page."""
    save: Path | None = None
    """Write the trajectory as JSON."""
    explain: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the message layout with an example, and do nothing else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """What came of it."""

    trajectory: Trajectory
    seen: tuple[SeenTurn, ...]
    verdict: Verdict | None
    page: str  # HTML

    @property
    def fulfilled(self) -> bool:
        """Whether the program says so, or, without one, whether `done` was called."""
        if self.verdict is not None:
            return self.verdict.value is VerdictValue.SUCCESS
        return self.trajectory.outcome.key == "completed/answered"


def main(argv: list[str]) -> int:
    """`owrl episode`."""
    options = tyro.cli(Options, args=argv, prog="owrl episode", description=__doc__)
    from owrl_jax.browser import BrowserMissing
    from owrl_jax.browser.process import LaunchError

    if options.explain:
        from owrl_jax.obs.explain import explain

        sys.stdout.write(explain(_tokenizer(options)))
        return 0
    try:
        played = asyncio.run(play(options))
    except (WrongCall, BrowserMissing, LaunchError) as error:
        print(f"owrl episode: {error}", file=sys.stderr)  # noqa: T201 - a command talks to its user
        return 2
    _tell(played)
    if options.view is not None:
        options.view.write_text(played.page, encoding="utf-8")
    if options.save is not None:
        options.save.write_bytes(encode(played.trajectory))
    return 0 if played.fulfilled else 1


async def play(options: Options) -> Played:
    """Plays the episode that the options describe.

    Raises:
      WrongCall: if they do not go together.
      BrowserMissing, LaunchError: if there is no browser.
    """
    from owrl_jax.browser import BrowserEngine, EngineConfig, SandboxConfig
    from owrl_jax.browser.safety import Safety
    from owrl_jax.browser.sandbox import Sandbox
    from owrl_jax.models.processor import ImageProcessor
    from owrl_jax.obs.episode_html import episode_html

    async with _place(options) as (task, visit, exceptions):
        width, height = task.metadata.get("viewport", (1280, 1000))
        tokens = _tokenizer(options)
        processor = ImageProcessor() if options.tokenizer is None else ImageProcessor.load(options.tokenizer)
        harness = Harness(
            tokens=tokens,
            picture_rule=processor,
            style=PromptStyle(system=options.prompt),
            budgets=Budgets(max_steps=options.max_steps, max_response_tokens=4096),
            viewport=(width, height),
        )
        config = SandboxConfig(
            viewport=(width, height),
            dpr=float(task.metadata.get("dpr", 1)),
            safety=Safety.for_local_worlds(exceptions) if exceptions else None,
        )
        engine = BrowserEngine(EngineConfig(browser=options.browser))
        await engine.start()
        seen: list[SeenTurn] = []
        try:
            async with _policy(options, task, visit, tokens) as policy:

                async def opened() -> Sandbox:
                    return Sandbox(engine, config)

                episode = Episode(
                    task,
                    harness=harness,
                    policy=policy,
                    open_sandbox=opened,
                    sampling=Sampling(max_new_tokens=4096, temperature=options.temperature, seed=options.seed),
                    instruction=(lambda: visit.instruction) if visit is not None else None,
                    on_turn=seen.append,
                )
                trajectory = await episode.run()
        finally:
            await asyncio.shield(engine.close())
        verdict = visit.verdict(trajectory.answer) if visit is not None else None
        trajectory = dataclasses.replace(trajectory, verdict=verdict)
        page = episode_html(
            trajectory,
            seen,
            decode=tokens.decode,
            last=episode.observation if trajectory.turns else None,
            protocol_parts=harness.protocol_parts,
        )
        return Played(trajectory=trajectory, seen=tuple(seen), verdict=verdict, page=page)


@contextlib.asynccontextmanager
async def _place(options: Options) -> AsyncIterator[tuple[Task, Any, frozenset[tuple[str, int]]]]:
    """The task, its visit to a local world (None on the live web), and what the safety rules must let through."""
    if options.world is None:
        if options.url is None or options.instruction is None:
            raise WrongCall("give --world NAME, or --url ADDRESS together with --instruction TEXT")
        if options.policy == "oracle":
            raise WrongCall("only local worlds have an oracle: give --world, or another --policy")
        yield Task(id="live", instruction=options.instruction, start_url=options.url), None, frozenset()
        return
    from owrl_jax.worlds import WorldServer, make_task, templates

    try:
        template = options.task or templates(options.world)[0]
        task = make_task(options.world, template, options.seed)
    except (KeyError, ValueError) as error:
        raise WrongCall(str(error.args[0])) from None
    async with WorldServer() as worlds:
        visit = await worlds.open(task)
        yield visit.task, visit, worlds.exceptions


@contextlib.asynccontextmanager
async def _policy(options: Options, task: Task, visit: Any, tokens: Any) -> AsyncIterator[Policy]:
    match options.policy:
        case "oracle":
            yield ActorPolicy(OracleActor(_solver(visit), _probe()), tokens)
        case "random":
            yield ActorPolicy(RandomActor(options.seed), tokens)
        case "script":
            replies = [part.strip("\n") for part in _read(options).split("\n---\n")]
            yield ActorPolicy(Script(replies), tokens)
        case "replay":
            yield ReplayedPolicy(decode(_read(options), Trajectory))
        case "endpoint":
            from owrl_jax.agent.openai_client import Endpoint, OpenAIPolicy
            from owrl_jax.agent.spend import Price, SpendLedger

            if options.endpoint is None or options.model is None:
                raise WrongCall("--policy endpoint needs --endpoint ADDRESS and --model NAME")
            price = Price(
                usd_per_million_in=options.usd_per_million_in, usd_per_million_out=options.usd_per_million_out
            )
            key = options.key_file.read_text(encoding="utf-8").strip() if options.key_file else ""
            endpoint = Endpoint(base_url=options.endpoint, model=options.model, api_key=key, price=price)
            policy = OpenAIPolicy(endpoint, tokens, ledger=SpendLedger(options.spend_file, limit_usd=options.max_usd))
            try:
                yield policy
            finally:
                await policy.close()


def _solver(visit: Any) -> Any:
    from owrl_jax.worlds import Oracle
    from owrl_jax.worlds.miniwob import MiniWobEpisode
    from owrl_jax.worlds.miniwob_oracle import SOLVERS, MiniWobOracle

    if not isinstance(visit.episode, MiniWobEpisode):
        return Oracle(visit.episode.case.moves)
    name = visit.episode.name
    if name not in SOLVERS:
        raise WrongCall(f"there is no oracle for the MiniWoB++ task {name}; there are ones for {', '.join(SOLVERS)}")
    return MiniWobOracle(name)


def _probe() -> Any:
    from owrl_jax.worlds import PageProbe

    return PageProbe


def _tokenizer(options: Options) -> Any:
    if options.tokenizer is None:
        from owrl_jax.obs.explain import small_tokenizer

        return small_tokenizer()
    from owrl_jax.models.tokenizer import load_tokenizer

    return load_tokenizer(options.tokenizer)


def _read(options: Options) -> str:
    if options.file is None or not options.file.is_file():
        raise WrongCall(f"--policy {options.policy} needs --file PATH of an existing file, got {options.file}")
    return options.file.read_text(encoding="utf-8")


def _tell(played: Played) -> None:
    lines = [f"task      {played.trajectory.task.instruction}"]
    for number, one in enumerate(played.seen):
        thought = one.parsed.reasoning if one.parsed is not None and one.parsed.ok else one.said
        lines.append(f"turn {number:<4} {' '.join(thought.split())[:200]}")
        lines += [f"          {result.feedback}" for result in one.turn.results]
        if one.parsed is not None and not one.parsed.ok:
            lines.append(f"          {one.parsed.feedback}")
    outcome = played.trajectory.outcome
    lines.append(f"outcome   {outcome.key}{f': {outcome.message}' if outcome.message else ''}")
    if played.verdict is not None:
        lines.append(f"verdict   {played.verdict.value.value}: {played.verdict.rationale}")
    spent = played.trajectory.timings_ms
    whole = ", ".join(f"{name} {ms:.0f}" for name, ms in spent.items() if "." not in name)
    lines.append(f"time      {whole} ms")
    print("\n".join(lines))  # noqa: T201 - a command talks to its user
