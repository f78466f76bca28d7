"""Options of `stagewright train`, and the schedule, plan and model sizes that follow from them. No torch."""

from __future__ import annotations

import math
import os
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ...partition.plans.plan import Plan
from ...schedules import FAMILIES, Schedule, build, check
from ...schedules.custom.user_schedules import FORMS, is_own
from ...schedules.wording import count
from ..options import GptOptions, given, is_function, plain_help, read_file, read_schedule, read_tensor_parallel
from .run_folder import LATEST, RUNS

if TYPE_CHECKING:
    from .gpt import GPTConfig

DEFAULT_RANKS = 2
DEFAULT_MICROBATCHES = 8
DEFAULT_BATCH = 16
DEFAULT_SCHEDULE = "interleaved"
DEFAULT_OWN_SCHEDULE = "1f1b"  # a model of the user's may have fewer units than an interleaved schedule has stages
# For the GPT, from docs/results.md: optimizer and correction, and the rate by optimizer.
Correction = Literal["none", "error-feedback"]
FRESH_GRADIENTS: tuple[str, Correction] = ("adamw", "none")
LATE_GRADIENTS: tuple[str, Correction] = ("muon", "error-feedback")
DEFAULT_LR = {"adamw": 2e-3, "muon": 4e-3}
FLUSH_FIRST = 0.3  # of the steps
DEFAULT_CLIP = 1.0
AUTO = "auto"
PLAN = "plan.json"  # in the folder of checkpoints, for a resumed run
_GPT = ("layers", "width", "heads", "length", "dropout", "text")  # options of the example GPT alone


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(GptOptions):
    """Train a model of your own, or the example GPT over bytes, through a pipeline; writes runs/<name>/.

    The defaults train 5.1 million parameters on 698,368 bytes of the Python standard library's source.
    """

    schedule: Annotated[
        str | None,
        tyro.conf.arg(
            help=f"{', '.join(FAMILIES)}, or a file ({FORMS}) (default: {DEFAULT_SCHEDULE}; with --model "
            f"{DEFAULT_OWN_SCHEDULE}).",
            metavar="STR",
            help_behavior_hint="",
        ),
    ] = None
    # A plan's .json file (`stagewright plan --out`), or auto: profile, plan for the ranks at hand, and run that.
    plan: str | None = None
    # Most plans that --plan auto tries for a few steps before choosing one; 0: none (default: 3).
    trials: int | None = None
    # P, pipeline ranks: processes on this machine (default: 2; under torchrun, its number of processes over C T).
    ranks: int | None = None
    context: int = 1  # C, groups of T processes of each rank, which divide the tokens of each sequence.
    tensor: int = 1  # T, processes that divide the matrices of a rank.
    # How modules are divided over them: auto, or a JSON file of {pattern: column, row or sequence}.
    tensor_parallel: str = "auto"
    chunks: int | None = None  # V, stages per rank (default: 2 for a schedule that interleaves, else 1).
    # n, slices of a microbatch along the sequence (default: 2 for a schedule that slices, else 1).
    slices: int | None = None
    microbatches: int | None = None  # M, microbatches of a batch (default: 8).
    batch: int | None = None  # Samples of one batch (default: 16, or those of the batches of --data).
    steps: int = 341  # Batches to train on.
    # adamw; muon: Muon for the matrices of the GPT's blocks, AdamW for the rest; with --model its own
    # optimizer(parameters) (default: muon for the GPT under a schedule without a flush, else AdamW).
    optimizer: str | None = None
    # Peak learning rate: warmed up over the first tenth, then down along a cosine (default: 0.002, with muon 0.004;
    # with --model the optimizer's own).
    lr: float | None = None
    # For late gradients: add to each update --delay-factor x delay times its difference from the previous update
    # (default: error-feedback for the GPT under a schedule without a flush).
    delay_correction: Correction | None = None
    # Factor of --delay-correction; 1 is the derived one (default: 2 under 2bw, else 1).
    delay_factor: float | None = None
    # Number of first batches with a flush after each update, under a schedule without one: there a late gradient costs
    # most (default: three in ten of --steps for the GPT, else none).
    flush_first: int | None = None
    # Clip the global gradient norm to this; 0: no clipping (default: 1, and 0 under pipedream and paci, whose stages
    # update before it is known).
    clip: float | None = None
    dropout: float = 0.0  # Probability of dropping a value.
    text: tuple[str, ...] = ()  # Train on these files instead of the standard library's source.
    seed: int = 0  # Seed of initial weights, batches, dropout and the sample.
    name: str | None = None  # Name of the run and its folder (default: the time).
    # Recomputed in the backward instead of kept: each stage as a whole, each of its parts separately, or in each part
    # all but the results of matrix products.
    recompute: Literal["none", "full", "layer", "selective", "keep_less"] = "none"
    # Run the first batch through the plain model, too, and compare every gradient, if memory allows.
    verify: bool = True
    timeout: float = 300.0  # Seconds that a rank waits for another before it fails with an error.
    # Save a checkpoint every so many steps, during training; auto: as often as --checkpoint-overhead allows (default:
    # none).
    checkpoint_every: int | Literal["auto"] | None = None
    checkpoint_overhead: float = 0.035  # Share of the time that checkpoints may take under --checkpoint-every auto.
    checkpoint_dir: str | None = None  # Folder of the checkpoints (default: runs/<name>/checkpoints).
    # Resume the run --name (default: the newest) from its last checkpoint, or begin it if there is none. For a command
    # that is restarted whenever it ends, as by torchrun --max-restarts.
    resume: bool = False
    # Steps between two that each process traces into runs/<name>/trace.rankN.jsonl; auto: 20 at first, then more and
    # more; 0: only the last step.
    trace_every: int | Literal["auto"] = "auto"
    workers: int = 0  # Processes that read samples of a Dataset of --data ahead, for each rank.
    # data: do not train, but measure how long steps wait for data, why, and what would help.
    diagnose: Literal["data"] | None = None
    diagnose_steps: int = 20  # Steps of each measurement of --diagnose.
    # Bytes of the cache of samples that --diagnose predicts and tries, for all ranks of a host (default: a quarter of
    # its memory).
    diagnose_cache: int | None = None
    dry_run: bool = False  # Show the cut, the grid, the simulated bubble and the predicted memory, without training.
    json: bool = False  # Print one JSON object (the summary); progress goes to standard error.

    def check(self) -> None:
        at_least_one = ("steps", "batch", "length")
        for option, least in (*((name, 1) for name in at_least_one), ("lr", 0.0), ("timeout", 0.0)):
            value = getattr(self, option)
            if value is not None and (value < least or (isinstance(least, float) and value == 0)):
                typed = option.replace("_", "-")
                raise ValueError(f"--{typed} {value}: expected {'at least 1' if least else 'a number above 0'}")
        self._check_checkpoints()
        if self.delay_factor is not None and not (math.isfinite(self.delay_factor) and self.delay_factor >= 0):
            raise ValueError(f"--delay-factor {self.delay_factor}: expected a number from 0 on")
        if self.flush_first is not None and self.flush_first < 0:
            raise ValueError(f"--flush-first {self.flush_first}: expected a number of batches, at least 0")
        if self.clip is not None and not self.clip >= 0:
            raise ValueError(f"--clip {self.clip}: expected a number above 0, or 0 for no clipping")
        if self.schedule == AUTO:
            raise ValueError(f"--schedule {AUTO}: expected --plan {AUTO}, which measures, plans, and runs the plan")
        if self.trials is not None and (self.trials < 0 or self.plan != AUTO):
            raise ValueError(f"--trials {self.trials}: expected a number of plans, 0 or more, with --plan {AUTO}")
        if self.plan is None:
            return
        decided = given(self, ("schedule", "chunks", "recompute", "slices", "context", "tensor"))
        if self.plan != AUTO:
            decided["microbatches"] = self.microbatches
        for option, value in decided.items():
            if value not in (None, "none"):
                raise ValueError(f"--{option} {value} with --plan {self.plan}: leave it away, the plan decides on it")
        if self.plan == AUTO and self.dry_run:
            raise ValueError("--dry-run measures nothing, and --plan auto plans from measurements: leave one away")

    def _check_checkpoints(self) -> None:
        if isinstance(self.checkpoint_every, int) and self.checkpoint_every < 1:
            raise ValueError(f"--checkpoint-every {self.checkpoint_every}: expected at least 1, or {AUTO}")
        if not 0 < self.checkpoint_overhead < 1:
            raise ValueError(f"--checkpoint-overhead {self.checkpoint_overhead}: expected a share above 0 and below 1")
        if self.checkpoint_dir is not None and self.checkpoint_every is None and not self.resume:
            raise ValueError(
                f"--checkpoint-dir {self.checkpoint_dir} without checkpoints: expected --checkpoint-every with it"
            )
        if self.workers < 0 or (self.workers and self.model is None):
            raise ValueError(f"--workers {self.workers}: expected a number from 0 on, with --model and --data")
        self._check_diagnose()
        if isinstance(self.trace_every, int) and self.trace_every < 0:
            raise ValueError(
                f"--trace-every {self.trace_every}: expected at least 1, 0 for the last step only, or {AUTO}"
            )

    def _check_diagnose(self) -> None:
        refused = {"--resume": self.resume, "--dry-run": self.dry_run, f"--plan {AUTO}": self.plan == AUTO}
        refused["--checkpoint-every"] = self.checkpoint_every is not None
        for typed in (typed for typed, is_given in refused.items() if is_given and self.diagnose is not None):
            raise ValueError(f"--diagnose {self.diagnose} with {typed}: leave one away, a diagnosis is no run")
        for name, value in given(self, ("diagnose_steps", "diagnose_cache")).items():
            if self.diagnose is None or not (isinstance(value, int) and value >= 1):
                typed = f"--{name.replace('_', '-')} {value}"
                raise ValueError(f"{typed}: expected at least 1, with --diagnose data")

    @property
    def num_processes(self) -> int:
        """Processes of the run, after `resolve`; a plan counts each as a rank."""
        assert self.ranks is not None
        return self.ranks * self.members

    @property
    def members(self) -> int:
        """Processes of each pipeline rank."""
        return self.context * self.tensor

    @property
    def checkpoints(self) -> Path:
        return RUNS / str(self.name) / "checkpoints" if self.checkpoint_dir is None else Path(self.checkpoint_dir)

    @property
    def batch_size(self) -> int:
        return DEFAULT_BATCH if self.batch is None else self.batch

    @property
    def learning_rate(self) -> float:
        return DEFAULT_LR[self.optimizer_name] if self.lr is None else self.lr

    @property
    def optimizer_name(self) -> str:
        """Optimizer of the GPT after `with_recipe`; before, that of a schedule with a flush."""
        return FRESH_GRADIENTS[0] if self.optimizer is None else self.optimizer


def resolve(options: TrainOptions) -> TrainOptions:
    """Fill in the number of ranks and the name. Raises ValueError for invalid options."""
    options.check()
    options.check_own(given(options, _GPT), optimizers=tuple(DEFAULT_LR))
    world = os.environ.get("WORLD_SIZE")
    planned = None if options.plan in (None, AUTO) else _load(str(options.plan)).num_devices
    typed = " ".join(f"--{name} {size}" for name, size in given(options, ("context", "tensor")).items())
    if world is not None and int(world) % options.members:
        raise ValueError(
            f"{typed} in {count(int(world), 'process')} (WORLD_SIZE={world}): expected a number of "
            f"processes that it divides, such as torchrun --nproc-per-node {2 * options.members}"
        )
    started = None if world is None else int(world) // options.members
    ranks = options.ranks if options.ranks is not None else started or planned or DEFAULT_RANKS
    if started not in (None, ranks):
        processes = ranks * options.members
        raise ValueError(
            f"--ranks {ranks} in one of {count(int(world or 0), 'process')} (WORLD_SIZE={world}): leave --ranks away "
            f"under torchrun, or start {count(processes, 'process')}"
        )
    if options.members > 1 and options.dry_run:
        raise ValueError(
            f"--dry-run is one process, and with {typed} a rank has {options.members}: leave it away; `stagewright "
            f"profile --tensor {options.tensor}` reports which module is divided how, and what one of them holds"
        )
    read_tensor_parallel(options.tensor_parallel)
    called = "gpt" if options.model is None else options.model.rpartition(":")[2]
    name = options.name or (_newest_run() if options.resume else time.strftime(f"{called}-%Y%m%d-%H%M%S"))
    return replace(options, ranks=ranks, name=name)


def with_recipe(options: TrainOptions, what: Schedule | Plan | None) -> TrainOptions:
    """Fill in missing options that train well under the schedule (None: not yet planned): optimizer, correction of late
    gradients, first batches with a flush, clipping.

    Raises ValueError for a correction or a flush of the first batches under a schedule without late gradients.
    """
    schedule = schedule_of(what)
    is_late = schedule is not None and schedule.is_asynchronous
    if not is_late and options.flush_first:
        raise ValueError(
            f"--flush-first {options.flush_first} under {schedule.name if schedule else AUTO}, which flushes after "
            f"every batch: leave it away, or type a schedule without a flush, such as --schedule 2bw"
        )
    if not is_late and options.delay_correction not in (None, "none"):
        raise ValueError(
            f"--delay-correction {options.delay_correction} under {schedule.name if schedule else AUTO}, where no "
            f"gradient is late: leave it away, or type a schedule without a flush, such as --schedule 2bw"
        )
    optimizer, correction = LATE_GRADIENTS if is_late and options.model is None else FRESH_GRADIENTS
    first = round(FLUSH_FIRST * options.steps) if is_late and options.model is None else 0
    may_clip = schedule is None or schedule.rule.why_no_norm is None
    factor = 2.0 if schedule is not None and schedule.weight_rule == "2bw" else 1.0  # trained best: docs/results.md
    return replace(
        options,
        optimizer=options.optimizer or (optimizer if options.model is None else None),
        delay_correction=options.delay_correction or correction,
        delay_factor=options.delay_factor if options.delay_factor is not None else factor,
        flush_first=first if options.flush_first is None else options.flush_first,
        clip=options.clip if options.clip is not None else DEFAULT_CLIP if may_clip else 0.0,
    )


def schedule_of(what: Schedule | Plan | None) -> Schedule | None:
    return what.build_schedule(num_microbatches=_missing(what)) if isinstance(what, Plan) else what


def _missing(plan: Plan) -> int | None:
    return DEFAULT_MICROBATCHES if plan.num_microbatches is None else None


def _newest_run() -> str:
    if "WORLD_SIZE" in os.environ:  # by then another run may be the newest
        raise ValueError("--resume under torchrun: expected --name NAME, which each start of it resumes")
    newest = RUNS / LATEST
    if not newest.is_dir():
        raise ValueError(
            f"--resume: there is no {newest}, the newest run: expected --name NAME (a run that is not there begins)"
        )
    return newest.resolve().name


def read_plan(options: TrainOptions) -> Plan | None:
    """The plan of the file, checked against the options; None: not yet made (auto)."""
    if options.plan == AUTO:
        return None
    plan = _load(str(options.plan))
    if plan.num_devices != options.ranks:
        raise ValueError(
            f"{options.plan} is for {count(plan.num_devices, 'rank')}: expected --ranks {plan.num_devices}, not "
            f"{options.ranks}"
        )
    try:
        schedule = plan.build_schedule(num_microbatches=_missing(plan))
    except ValueError as error:  # such as an unknown schedule
        raise ValueError(f"{options.plan}: {error}") from None
    _check_batch(options, schedule)
    size = options.batch_size if options.model is None else options.batch
    if plan.microbatch_size is not None and size not in (None, plan.microbatch_size * schedule.num_microbatches):
        raise ValueError(
            f"{options.plan} is for {count(schedule.num_microbatches, 'microbatch')} of {plan.microbatch_size} "
            f"samples: expected --batch {schedule.num_microbatches * plan.microbatch_size}, not {size}"
        )
    return plan


def plan_before(options: TrainOptions) -> Plan | None:
    """The plan of the resumed run; None if it is for other ranks, so that a new one is made."""
    path = options.checkpoints / PLAN
    plan = _load(str(path)) if path.is_file() else None
    return plan if plan is not None and plan.num_devices == options.ranks else None


def _load(name: str) -> Plan:
    path = Path(name)
    if not path.is_file():
        where = f" on {platform.node()}, where each host needs a copy" if "WORLD_SIZE" in os.environ else ""
        raise ValueError(
            f"--plan {name}: no such file{where}: expected one that `stagewright plan --out FILE` wrote, or auto"
        )
    return read_file(path, Plan.load)


def make_schedule(options: TrainOptions) -> Schedule:
    assert options.ranks is not None
    name = options.schedule or (DEFAULT_SCHEDULE if options.model is None else DEFAULT_OWN_SCHEDULE)
    if is_own(name):
        for option in () if is_function(name) else ("chunks", "slices", "microbatches"):
            if getattr(options, option) is not None:
                raise ValueError(f"--{option} with {name}: the file has it; leave --{option} away")
        sizes = {"num_ranks": options.ranks, "num_microbatches": options.microbatches, "num_chunks": options.chunks}
        sizes["num_slices"] = options.slices
        schedule = read_schedule(name, sizes, otherwise={"num_microbatches": DEFAULT_MICROBATCHES})
    else:
        schedule = build(
            name,
            num_ranks=options.ranks,
            num_microbatches=DEFAULT_MICROBATCHES if options.microbatches is None else options.microbatches,
            num_chunks=options.chunks,
            num_slices=options.slices,
        )
        check(schedule)
    _check_batch(options, schedule)
    return schedule


def _check_batch(options: TrainOptions, schedule: Schedule) -> None:
    size = options.batch_size if options.model is None else options.batch
    if size is not None and size < schedule.num_microbatches:
        raise ValueError(
            f"--batch {size} for {count(schedule.num_microbatches, 'microbatch')}: one would be empty; "
            f"expected --batch {schedule.num_microbatches} or more, or fewer --microbatches"
        )


def model_config(options: TrainOptions) -> GPTConfig:
    """The GPT of the options. Raises ValueError for sizes that do not fit."""
    from .gpt import GPTConfig  # imports torch, late: errors in the options come first

    return GPTConfig(
        length=options.length, layers=options.layers, width=options.width, heads=options.heads, dropout=options.dropout
    )
