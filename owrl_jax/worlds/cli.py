"""`owrl worlds list | serve | play | rate`: what sites there are, and trying them by hand or by oracle.

owrl worlds list [--site NAME] [--markdown | --json] [--rates FILE]
owrl worlds serve [--port N]           # prints one start address per site
owrl worlds play --site shop --template price --seed 3
owrl worlds rate --seeds 20 --out rates.json      # oracles through a real browser, for `list --rates`
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import sys
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from owrl_jax.types import VerdictValue
from owrl_jax.worlds import miniwob, registry
from owrl_jax.worlds.faults import Faults, named_faults
from owrl_jax.worlds.server import Visit, WorldServer

_HEADER = """# Local worlds

Made by `owrl worlds list --markdown --rates rates.json`; the oracle rates by
`owrl worlds rate --seeds 20 --out rates.json`.

Six sites of our own, served on loopback, each under a host name of its own, and the MiniWoB++ tasks. State is per
episode; data come from a seed; what counts as success is decided by a program from the final state, the answer and the
pages that were served. Of every template each tenth seed is held out (`held_out_seed`), and whole templates are
(`held_out_template`).
"""


@dataclasses.dataclass
class ListArgs:
    """Which sites and templates there are."""

    site: str = ""
    """Only this site."""
    markdown: bool = False
    """The page docs/worlds.md."""
    json: bool = False
    """One JSON object."""
    rates: Path | None = None
    """Oracle rates, from `owrl worlds rate`."""


@dataclasses.dataclass
class ServeArgs:
    """Serve the sites until interrupted."""

    port: int = 8100
    """0 takes a free one."""
    template: str = ""
    """SITE/TEMPLATE whose first page to offer; by default the first template of each site."""
    seed: int = 0


@dataclasses.dataclass
class PlayArgs:
    """Try a task in your own browser; type the answer when you are done."""

    site: str
    template: str
    seed: int = 0
    skin: str | None = None
    faults: tuple[str, ...] = ()
    """Names of faults, such as popup or late_ms."""
    port: int = 0
    open: bool = True
    """Open the page in the default browser."""


@dataclasses.dataclass
class RateArgs:
    """Let the oracles solve every template in a real browser."""

    seeds: int = 20
    """Seeds 0 to this per template."""
    site: str = ""
    """Only this site."""
    out: Path | None = None
    """Where to write the rates as JSON, after each template. A template that the file has with so many seeds is not
    played again, so an interrupted run can be continued."""
    at_once: int = 2
    """Episodes at one time, each in a browser of its own."""
    minutes: float = 0.0
    """Begin no further template after this time, but at least one; 0 plays them all."""


def main(argv: list[str]) -> int:
    """Runs one of the commands. Returns the exit code."""
    import tyro

    chosen = tyro.cli(
        Annotated[ListArgs, tyro.conf.subcommand("list")]
        | Annotated[ServeArgs, tyro.conf.subcommand("serve")]
        | Annotated[PlayArgs, tyro.conf.subcommand("play")]
        | Annotated[RateArgs, tyro.conf.subcommand("rate")],
        args=argv,
        prog="owrl worlds",
    )
    try:
        match chosen:
            case ListArgs():
                return list_worlds(chosen)
            case ServeArgs():
                return asyncio.run(_serve(chosen))
            case PlayArgs():
                return asyncio.run(_play(chosen))
            case _:
                return asyncio.run(_rate(chosen))
    except (KeyError, ValueError) as error:
        sys.stderr.write(f"owrl worlds: {error.args[0]}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command talks to its user


# ---- list -----------------------------------------------------------------------------------------------------------


def inventory(only: str = "", rates: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sites with their templates, as plain data; `rates` maps `site/template` to [solved, tried]."""
    found: dict[str, Any] = {}
    for name in registry.OWN:
        if only in ("", name):
            site = registry.site(name)
            found[name] = {
                "about": site.about,
                "skins": [s.name for s in site.skins],
                "viewport": list(site.viewport),
                "templates": [
                    {
                        "name": kind,
                        "level": site.templates[kind].level,
                        "held_out": site.templates[kind].held_out,
                        "phrasings": len(site.templates[kind].phrasings),
                        "decoys": len(site.case(kind, 0).all_decoys),
                        "example": registry.make_task(name, kind, 0).instruction,
                        "oracle": (rates or {}).get(f"{name}/{kind}"),
                    }
                    for kind in registry.templates(name)
                ],
            }
    if only and not found and only != miniwob.NAME:
        raise KeyError(f"there is no site {only!r}; there are {', '.join(registry.sites())}")
    return found


def list_worlds(args: ListArgs) -> int:
    """Prints the inventory."""
    rates = json.loads(args.rates.read_text()) if args.rates else None
    found = inventory(args.site, rates)
    with_miniwob = args.site in ("", miniwob.NAME) and miniwob.installed()
    if args.json:
        extra = {miniwob.NAME: {"templates": list(miniwob.tasks())}} if with_miniwob else {}
        _say(json.dumps(found | extra))
        return 0
    if args.markdown:
        _say(_HEADER)
    for name, site in found.items():
        kinds = site["templates"]
        if args.markdown:
            _say(f"## {name}\n\n{site['about'][0].upper()}{site['about'][1:]}. Skins: {', '.join(site['skins'])}.\n")
            _say("| template | level | split | oracle | decoys | for example |")
            _say("| --- | --- | --- | --- | --- | --- |")
            for t in kinds:
                split = "held out" if t["held_out"] else "train"
                _say(
                    f"| {t['name']} | {t['level']:g} | {split} | {_rate_text(t['oracle'])} | {t['decoys']} "
                    f"| {t['example'].replace('|', '/')} |"
                )
            _say("")
        else:
            _say(f"{name}: {site['about']} ({len(kinds)} templates, skins {', '.join(site['skins'])})")
            for t in kinds:
                mark = "held out" if t["held_out"] else ""
                _say(f"  {t['name']:<24} level {t['level']:<4g} {mark:<9} {t['example']}")
    if with_miniwob:
        _print_miniwob(args.markdown)
    return 0


def _rate_text(rate: list[int] | None) -> str:
    return "not measured" if rate is None else f"{rate[0]}/{rate[1]}"


def _print_miniwob(markdown: bool) -> None:
    names = miniwob.tasks()
    if not markdown:
        _say(f"{miniwob.NAME}: {len(names)} tasks of the package miniwob")
        return
    _say(
        f"## {miniwob.NAME}\n\n{len(names)} tasks of the installed package; in brackets those that are not the same on"
    )
    _say("every visit with one seed.\n")
    _say(", ".join(f"({n})" if n in miniwob.NON_DETERMINISTIC else n for n in names) + ".")


# ---- serve and play -------------------------------------------------------------------------------------------------


async def _serve(args: ServeArgs) -> int:
    async with WorldServer(port=args.port) as worlds:
        wanted = [args.template.partition("/")[::2]] if args.template else [(n, "") for n in registry.OWN]
        for name, kind in wanted:
            task = registry.make_task(name, kind or registry.templates(name)[0], args.seed)
            visit = await worlds.open(task)
            _say(f"{name:<10} {visit.start_url}\n           {task.instruction}")
        _say("Interrupt to stop.")
        await asyncio.Event().wait()
    return 0


async def _play(args: PlayArgs) -> int:
    faults = named_faults(args.faults, args.seed) if args.faults else Faults()
    task = registry.make_task(args.site, args.template, args.seed, skin=args.skin, faults=faults)
    async with WorldServer(port=args.port) as worlds:
        visit = await worlds.open(task)
        _say(f"Task:  {visit.instruction}\nOpen:  {visit.start_url}")
        if args.open:
            await asyncio.to_thread(webbrowser.open, visit.start_url)
        print("When you are done, type your answer (or just Enter): ", end="", flush=True)  # noqa: T201 - as above
        return report(visit, await _line())


async def _line() -> str:
    """One line of standard input, without a thread that would outlive an interrupt; empty at its end."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(sys.stdin.fileno(), ready.set)
    except (PermissionError, NotImplementedError):  # a plain file is always ready; some loops watch none
        return (await asyncio.to_thread(sys.stdin.readline)).strip()
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return sys.stdin.readline().strip()


def report(visit: Visit, said: str) -> int:
    """Prints the verdict; exit code 0 for success."""
    verdict = visit.verdict(said or "Done.")
    _say(f"{verdict.value.value}: {verdict.rationale}")
    for reason in verdict.reasons[1:]:
        _say(f"  {reason}")
    return 0 if verdict.value is VerdictValue.SUCCESS else 1


# ---- rate -----------------------------------------------------------------------------------------------------------


async def _rate(args: RateArgs) -> int:
    from owrl_jax.worlds.trial import Result, Trial

    if args.seeds < 1 or args.at_once < 1:
        raise ValueError(f"seeds and at_once are 1 or more, got {args.seeds} and {args.at_once}")
    rates: dict[str, list[int]] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    end = time.monotonic() + 60 * args.minutes if args.minutes else math.inf
    lost = left = begun = 0

    async def some(trial: Trial, name: str, kind: str, seeds: Iterator[int]) -> list[Result]:
        return [await trial.run(registry.make_task(name, kind, seed)) for seed in seeds]

    for name in (args.site,) if args.site else registry.OWN:
        open_kinds = [k for k in registry.templates(name) if rates.get(f"{name}/{k}", [0, 0])[1] < args.seeds]
        if not open_kinds or (begun and time.monotonic() > end):
            left += len(open_kinds)
            continue
        async with contextlib.AsyncExitStack() as stack:
            viewport = registry.site(name).viewport
            trials = [await stack.enter_async_context(Trial(viewport)) for _ in range(args.at_once)]
            for kind in open_kinds:
                if begun and time.monotonic() > end:
                    left += 1
                    continue
                begun += 1
                seeds = iter(range(args.seeds))  # one for all: whoever is free takes the next
                shares = await asyncio.gather(*(some(trial, name, kind, seeds) for trial in trials))
                results = [result for share in shares for result in share]
                solved = sum(r.solved for r in results)
                rates[f"{name}/{kind}"] = [solved, len(results)]
                lost += len(results) - solved
                why = collections.Counter(r.why for r in results if not r.solved)
                _say(" ".join((f"{name}/{kind}: {solved}/{len(results)}", *why)))
                if args.out:
                    args.out.write_text(json.dumps(rates, indent=1))
    if left:
        _say(f"The time is up; {left} templates are left. The same command goes on with them.")
    return 1 if lost else 0
