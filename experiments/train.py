"""`stagewright train`: a GPT on real text, through a pipeline of local processes.

    stagewright train --ranks 2       (no WORLD_SIZE)   -> launcher -> 2 x `python -m stagewright train ...`
    torchrun ... -m stagewright train (WORLD_SIZE set)  -> this process is one rank
    stagewright train --ranks 1                         -> all in this process
    stagewright train --dry-run                         -> what would run, without running it

What the options ask for is checked here, before any process starts; `training` holds what a rank does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ..schedules import Schedule, build, check
from .run_folder import RunFolder
from .schedule_command import read_schedule
from .schedule_options import NAMES

if TYPE_CHECKING:
    from .gpt import GPTConfig

DEFAULT_RANKS = 2
DEFAULT_MICROBATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Train a GPT over bytes through a pipeline; writes runs/<name>/.

    The defaults train 5.1 million parameters on 698,368 bytes of the Python standard library's source.
    """

    schedule: Annotated[str, tyro.conf.arg(help=f"{NAMES}, or a file (.csv or .json).")] = "interleaved"
    ranks: int | None = None
    """P, pipeline ranks: processes on this machine (default 2; under torchrun, its number of processes)."""
    chunks: int | None = None
    """V, stages a rank (default: 2 for a schedule that interleaves, else 1)."""
    microbatches: int | None = None
    """M, microbatches of a batch (default: 8)."""
    layers: int = 4
    """Transformer blocks."""
    width: int = 320
    """Of the hidden vectors."""
    heads: int | None = None
    """Attention heads a block (default: one for each 64 of the width)."""
    length: int = 128
    """Bytes of one sequence."""
    batch: int = 16
    """Sequences of one batch."""
    steps: int = 341
    """Batches to train on."""
    lr: float = 2e-3
    """Peak learning rate of AdamW: warmed up over the first tenth, then down along a cosine."""
    dropout: float = 0.0
    """Probability."""
    text: tuple[str, ...] = ()
    """Train on these files instead of the standard library's source."""
    seed: int = 0
    """Of initial weights, batches, dropout and the sample."""
    name: str | None = None
    """Of the run and its folder (default: the time of day)."""
    recompute: Literal["none", "full"] = "none"
    """full: keep no activations but the stage inputs; compute the rest again in the backward."""
    timeout: float = 300.0
    """Seconds that a rank waits for another before it gives up and says for what."""
    dry_run: bool = False
    """Show the cut, the grid, predicted bubble and memory, and stop."""
    json: bool = False
    """Print one JSON object (the summary); progress goes to the standard error."""

    def check(self) -> None:
        """ValueError for numbers that cannot be meant."""
        for option, least in (("steps", 1), ("batch", 1), ("length", 1), ("lr", 0.0), ("timeout", 0.0)):
            value = getattr(self, option)
            if value < least or (isinstance(least, float) and value == 0):
                raise ValueError(f"--{option} {value}: expected {'at least 1' if least else 'a number above 0'}")


def run(argv: Sequence[str]) -> int:
    """Check the options; then show, launch, or be one rank."""
    options = resolve(tyro.cli(TrainOptions, args=argv, prog="stagewright train"))
    schedule = make_schedule(options)
    if options.dry_run:
        if "WORLD_SIZE" in os.environ:
            raise ValueError("--dry-run needs one process only: type `stagewright train --dry-run` without torchrun")
        from .dry_run import show

        return show(options, schedule)
    if "WORLD_SIZE" in os.environ or options.ranks == 1:
        from .training import train

        return train(options, schedule)
    _check_before_launch(options)
    return _launch([*argv, "--name", str(options.name)] if "--name" not in argv else argv, options)


def resolve(options: TrainOptions) -> TrainOptions:
    """Fill in the number of ranks and the name; ValueError for what cannot be meant."""
    options.check()
    world = os.environ.get("WORLD_SIZE")
    ranks = options.ranks if options.ranks is not None else int(world or DEFAULT_RANKS)
    if world is not None and int(world) != ranks:
        raise ValueError(
            f"--ranks {ranks} in one of {world} processes (WORLD_SIZE={world}): leave --ranks away under "
            f"torchrun, or start {ranks} processes"
        )
    name = options.name or time.strftime("gpt-%Y%m%d-%H%M%S")
    return replace(options, ranks=ranks, name=name)


def make_schedule(options: TrainOptions) -> Schedule:
    """The schedule that the options mean, checked."""
    assert options.ranks is not None
    if options.schedule.endswith((".csv", ".json")):
        schedule = read_schedule(Path(options.schedule))
        for option in ("chunks", "microbatches"):
            if getattr(options, option) is not None:
                raise ValueError(f"--{option} beside {options.schedule}: the file says it; leave --{option} away")
        if schedule.num_ranks != options.ranks:
            raise ValueError(
                f"{options.schedule} is for {schedule.num_ranks} ranks: "
                f"expected --ranks {schedule.num_ranks}, not {options.ranks}"
            )
    else:
        schedule = build(
            options.schedule,
            num_ranks=options.ranks,
            num_microbatches=DEFAULT_MICROBATCHES if options.microbatches is None else options.microbatches,
            num_chunks=options.chunks,
        )
    check(schedule)
    if options.batch < schedule.num_microbatches:
        raise ValueError(
            f"--batch {options.batch} for {schedule.num_microbatches} microbatches: one would be empty; "
            f"expected --batch {schedule.num_microbatches} or more, or fewer --microbatches"
        )
    return schedule


def model_config(options: TrainOptions) -> GPTConfig:
    """The GPT that the options mean; ValueError for sizes that do not fit."""
    from .gpt import GPTConfig  # torch, which a mistake in the options above need not wait for

    return GPTConfig(
        length=options.length,
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        dropout=options.dropout,
    )


def _check_before_launch(options: TrainOptions) -> None:
    """What would fail on every rank is said once, here."""
    from .corpus import load_corpus

    assert options.name is not None
    RunFolder.check_free(options.name)
    model_config(options)
    load_corpus(options.text).check_length(options.length)


def _launch(argv: Sequence[str], options: TrainOptions) -> int:
    from .launcher import launch

    assert options.ranks is not None
    # -P: the folder that the user stands in may hold modules with any name.
    result = launch([sys.executable, "-P", "-m", "stagewright", "train", *argv], num_ranks=options.ranks)
    if result.report:
        print(result.report, file=sys.stderr)
    return result.status
