"""`stagewright train`: the example GPT, or a model of the user's, through a pipeline of local processes.

    stagewright train --ranks 2       (no WORLD_SIZE)   -> launcher -> 2 x `python -m stagewright train ...`
    torchrun ... -m stagewright train (WORLD_SIZE set)  -> this process is one rank
    stagewright train --ranks 1                         -> all in this process
    stagewright train --dry-run                         -> shows the run, without running it

The options are checked here, before any process starts; `loop` is the work of a rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict

from ..launcher import launch_command
from ..options import read
from .options import AUTO, TrainOptions, make_schedule, model_config, plan_before, read_plan, resolve, with_recipe
from .run_folder import RunFolder

# Arguments of PipelineModule that its messages name, as they are typed here.
_TYPED = {
    "verify=False": "--no-verify",
    "schedule=": "--schedule",
    "num_microbatches=": "--microbatches",
    "num_chunks=": "--chunks",
    "num_slices=": "--slices",
    'mesh={"pipe": ': "--ranks",
    "tensor_parallel=": "--tensor-parallel",
    "recompute=": "--recompute",
    "max_grad_norm=": "--clip",
    "flush_first=": "--flush-first",
    "loss_fn=": "--loss",
    "optimizer=": "--optimizer",
    "timeout=": "--timeout",
}


def run(argv: Sequence[str]) -> int:
    """Check the options; then show the run, launch it, or run one rank. Messages about arguments of PipelineModule end
    in how `stagewright train` has them."""
    try:
        return _run(argv)
    except ValueError as error:
        text = str(error)
        here = [(word, typed) for word, typed in _TYPED.items() if re.search(rf"(?<!\w){word}", text)]
        typed = ", ".join(f"{typed} for {word.strip()}" for word, typed in here if typed not in text)
        if not typed:
            raise
        raise ValueError(f"{text}\n(stagewright train: {typed})") from error


def _run(argv: Sequence[str]) -> int:
    options = resolve(read(TrainOptions, argv, "train"))
    what = make_schedule(options) if options.plan is None else read_plan(options)
    if options.plan == AUTO and options.resume:
        what = plan_before(options)
    options = with_recipe(options, what)
    if options.dry_run:
        if "WORLD_SIZE" in os.environ:
            raise ValueError("--dry-run needs one process only: type `stagewright train --dry-run` without torchrun")
        from .dry_run import show

        return show(options, what)
    if "WORLD_SIZE" in os.environ or options.num_processes == 1:
        if options.diagnose is not None:
            from .diagnose import diagnose

            assert what is not None  # --plan auto was refused
            return diagnose(options, what)
        from .loop import train

        return train(options, what)
    _check_before_launch(options)
    named = argv if "--name" in argv else [*argv, "--name", str(options.name)]
    # a waiting rank gives up after the time-out: when all stall for longer, none of them will
    return launch_command(["train", *named], num_ranks=options.num_processes, stall=options.timeout + 60.0)


def _check_before_launch(options: TrainOptions) -> None:
    """Raise errors here, once, that would occur on every rank."""
    assert options.name is not None
    if options.resume:
        RunFolder.check_going_on(options.name, asdict(options))
    elif options.diagnose is None:  # which leaves no folder
        RunFolder.check_free(options.name)
    if options.model is None:
        from .corpus import load_corpus

        model_config(options)
        load_corpus(options.text).check_length(options.length)
