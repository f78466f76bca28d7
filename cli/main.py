"""The `stagewright` command: looks at the first word and imports that command's module alone.

Each command is a module with `run(argv) -> int`, so that planning and drawing start without torch.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple


class Command(NamedTuple):
    module: str
    summary: str


COMMANDS: dict[str, Command] = {
    "train": Command("cli.train.command", "train your model, or a small GPT, through a pipeline"),
    "schedule": Command("cli.commands.schedule", "print a schedule as a grid, or export it as CSV or JSON"),
    "simulate": Command("cli.commands.simulate", "simulate a schedule: makespan, bubbles, activations, lower bound"),
    "timeline": Command("cli.commands.timeline", "draw runs, plans and schedules: a page, a picture, for Perfetto"),
    "compare": Command("cli.commands.compare", "what changed between two runs, plans or schedules, and why"),
    "profile": Command("cli.commands.profile", "measure what each part of a model costs, or the links"),
    "plan": Command("cli.commands.plan", "choose schedule, sizes and cuts for a cluster, by simulation"),
    "fleet": Command("experiments.commands.fleet", "many jobs on several kinds of devices, by policies: simulated"),
    "price": Command("experiments.commands.price", "a job on devices whose prices change: simulated"),
    "export": Command("cli.commands.export", "a checkpoint as one file of a plain model's weights, and back"),
    "experiment": Command("experiments.commands.experiment", "run reproducible experiments, and report on them"),
    "bench": Command("experiments.commands.bench", "measure this runtime against torch.distributed.pipelining"),
}

_EXTRA = ("matplotlib", "rich", "tyro")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for a failure, 2 for a user's mistake."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(words)
        finally:  # also where --help has ended the program
            sys.stdout.flush()
    except ValueError as error:
        from ..schedules.wording import printable  # not at the top: most commands don't need it

        print(f"stagewright: error: {printable(str(error))}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        print(f"stagewright: error: no {error.name} here: pip install 'stagewright[cli]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stagewright: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (`| head`) has gone; without this Python would complain at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"stagewright {version('stagewright')}")
        return 0
    status: int = _module(words[0]).run(words[1:])
    return status


def _module(name: str) -> ModuleType:
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=2, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"unknown command {name!r}{hint}\ncommands: {', '.join(COMMANDS)} (`stagewright --help`)")
    return importlib.import_module(f"..{COMMANDS[name].module}", __package__)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: stagewright COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "`stagewright COMMAND --help` lists a command's options."])
