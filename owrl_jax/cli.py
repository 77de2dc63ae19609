"""The `owrl` command: a table of commands, each imported only when it is asked for.

To add a command, add one line to `COMMANDS`. Its target is `module:function` with `function(argv: list[str]) -> int`;
it parses its own arguments with tyro and returns the exit code. Only commands that work stand in the table, so
`owrl --help` promises nothing that is not there.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from owrl_jax import __version__


@dataclass(frozen=True, kw_only=True)
class Command:
    """One word after `owrl`: what it does in one line, and where its function is."""

    name: str
    help: str
    target: str

    def run(self, argv: Sequence[str]) -> int:
        """Import the target and call it.

        Raises:
          ModuleNotFoundError: if the command needs a package that is not installed; `main` says which extra has it.
        """
        module, _, function = self.target.partition(":")
        return getattr(importlib.import_module(module), function)(list(argv))


def _command(name: str, target: str, help: str) -> Command:
    return Command(name=name, target=target, help=help)


COMMANDS: tuple[Command, ...] = (
    _command("doctor", "owrl_jax.doctor:main", "check this machine and say what to do about each finding"),
    _command("config", "owrl_jax.cli:config", "print, check, save and hash the resolved configuration of a run"),
    _command("browser", "owrl_jax.browser.cli:main", "get a browser, check it, serve sandboxes, replay an episode"),
    _command("worlds", "owrl_jax.worlds.cli:main", "local web sites with checked goals: list, serve, play, rate"),
    _command("episode", "owrl_jax.obs.episode:main", "one episode in a real browser, and a page to look at it"),
    _command(
        "ckpt", "owrl_jax.checkpoint.cli:main", "checkpoints: list, verify by a real restore, export for transformers"
    ),
    _command("data", "owrl_jax.demonstrate:main", "from a run to a data set of demonstrations; what is in one"),
    _command(
        "plan", "owrl_jax.plan.cli:main", "whether an update fits on devices that are not here, and how fast it is"
    ),
    _command("train", "owrl_jax.train:main", "train by online reinforcement learning; the same command resumes"),
    _command("eval", "owrl_jax.evaluate:main", "measure a model on held-out tasks, or compare two on the same ones"),
    _command("sft", "owrl_jax.sft:main", "train a policy on demonstrations"),
    _command("serve", "owrl_jax.engine.serve:main", "a checkpoint behind an OpenAI-compatible API"),
    _command("judge", "owrl_jax.rejudge:main", "judge the episodes of a run again, and compare with its own verdicts"),
    _command("report", "owrl_jax.obs.report:main", "a run as one HTML page: curves, tables, every click"),
    _command("journal", "owrl_jax.obs.journal_cli:main", "episodes of a run: list, show, export to other programs"),
    _command("bench", "owrl_jax.bench:main", "measure one part against its floor and against a peer"),
    _command("quickstart", "owrl_jax.quickstart:main", "the main job on this machine, from nothing to an agent"),
    _command("test", "owrl_jax.cli:test", "the test suite (in a checkout: ./owrl test)"),
)


def usage(commands: Sequence[Command] = COMMANDS) -> str:
    """The text of `owrl --help`."""
    width = max(len(c.name) for c in commands)
    lines = "\n".join(f"  {c.name:<{width}}  {c.help}" for c in commands)
    return (
        "usage: owrl COMMAND [arguments]      owrl COMMAND --help      owrl --version\n\n"
        "Online reinforcement learning of visual web agents, in JAX.\n\n" + lines
    )


def main(argv: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run `owrl`. Returns the exit code: 2 for a wrong call, 1 for a missing package, else the command's own."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(commands))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"owrl {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    by_name = {command.name: command for command in commands}
    if name not in by_name:
        near = difflib.get_close_matches(name, by_name, n=1)
        hint = f" Did you mean 'owrl {near[0]}'?" if near else ""
        print(f"owrl: there is no command {name!r}.{hint} `owrl --help` lists them all.", file=sys.stderr)
        return 2
    try:
        return by_name[name].run(rest)
    except ModuleNotFoundError as error:
        from owrl_jax.doctor import extra_of

        extra = extra_of(error.name or "")
        if extra is None:
            raise
        package = "owrl-jax" if extra == "core" else f"owrl-jax[{extra}]"
        print(
            f"owrl {name}: the package {error.name!r} is not installed. Install what has it (pip install '{package}'), "
            "or use ./owrl in a checkout, which installs what a command needs.",
            file=sys.stderr,
        )
        return 1


def config(argv: list[str]) -> int:
    """Print a resolved configuration with its hash, and save it if asked. Exit code 2 if it cannot be used."""
    import tyro
    from rich.console import Console
    from rich.tree import Tree

    from owrl_jax.config import ConfigError, config_hash, preset_files, resolve, split_overrides, to_dict, to_json

    def show(preset: str = "", /, json: bool = False, save: Path | None = None) -> int:
        """Print the resolved configuration of a run and its hash.

        Any setting can be given as --section.key VALUE, for instance --rl.learning_rate 5e-7 or --seed 3.

        Args:
            preset: name of a preset in configs/, or path of a Python file; without one, the defaults.
            json: print JSON instead of a tree.
            save: write the JSON to this file as well.
        """
        run = resolve(preset or None, overrides)
        if save is not None:
            save.write_text(to_json(run), encoding="utf-8")
        if json:
            sys.stdout.write(to_json(run))
            return 0
        tree = Tree(run.name)
        for key, value in to_dict(run).items():
            if isinstance(value, dict):
                branch = tree.add(f"[bold]{key}")
                for leaf, setting in value.items():
                    branch.add(f"{leaf} = {setting!r}", highlight=True)
            else:
                tree.add(f"{key} = {value!r}", highlight=True)
        out = Console(soft_wrap=True)
        out.print(tree)
        out.print(f"sha256 {config_hash(run)}", highlight=False)
        return 0

    try:
        overrides, rest = split_overrides(argv)
        return tyro.cli(show, args=rest, prog="owrl config")
    except ConfigError as error:
        print(f"owrl config: {error}\nPresets: {', '.join(preset_files()) or 'none'}.", file=sys.stderr)
    except OSError as error:
        print(f"owrl config: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


def test(argv: list[str]) -> int:
    """Point to ./owrl test: the suite belongs to a checkout and needs packages that only the script installs."""
    print(
        "owrl test: the tests are not part of the installed package. In a checkout, run ./owrl test.", file=sys.stderr
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
