"""Options of a schedule, for every command that builds one, or searches for the best one (`auto`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import tyro

from ...schedules import FAMILIES, Costs, Schedule, build, check, family
from ...schedules.custom.user_schedules import FORMS, is_own
from ...schedules.wording import duration
from ..options import plain_help, read_schedule
from ..progress import Progress

if TYPE_CHECKING:
    from ...schedules.search.incumbent import Progress as SearchProgress
    from ...schedules.search.synthesize import Synthesis, Tried

NAMES = ", ".join(FAMILIES)
NAME_HELP = tyro.conf.arg(
    help=f"{NAMES}; auto, which is searched for; or a schedule of your own: {FORMS}.",
    metavar="NAME|FILE",
    help_behavior_hint="",
)


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """A schedule as `build` takes it (None: not given) and its costs in seconds of ONE stage action, one number or one
    per stage."""

    ranks: int | None = None  # P, pipeline ranks.
    microbatches: int | None = None  # M, microbatches of a batch.
    chunks: int | None = None  # V, stages per rank (default: 2 for a schedule that interleaves, else 1).
    # n, slices of a microbatch along the sequence (default: 2 for a schedule that slices, else 1).
    slices: int | None = None
    # 2bw: forwards ahead of the backwards. eager hides latency, for more activations (default: plain).
    warmup: Literal["plain", "eager"] | None = None
    # pipedream, paci: microbatches from update to update (default: 1, or one per replica; paci: all of a batch).
    update_every: int | None = None
    vertical_sync: bool = False  # pipedream: all stages use the weight version that the first one saw.
    # pipedream, 2bw, paci: ranks of each stage, --ranks in all (default: one each).
    replicas: tuple[int, ...] | None = None
    # pipedream, 2bw, paci: batches that the program spans (default: enough for a steady state).
    batches: int | None = None
    # gis: microbatches that pass a chunk before the next chunk's turn, P/2 for half the memory (default: P).
    group_size: int | None = None
    forward: tuple[float, ...] | None = None  # F [s] (default: 1, the unit of all times shown).
    backward: tuple[float, ...] | None = None  # B [s] (default: twice the forward).
    input_grad: tuple[float, ...] | None = None  # I [s], if the backward is split.
    weight_grad: tuple[float, ...] | None = None  # W [s], if the backward is split.
    latency: float = 0.0  # Seconds of a message between ranks.
    # All-reduce of a stage's gradients over its replicas [s], after the stage's last backward; compute overlaps it.
    reduce_grad: tuple[float, ...] = (0.0,)
    sum_busy: tuple[float, ...] = (0.0,)  # Share of those seconds in which the ranks can't compute, 0 to 1.
    # Factor of these seconds for each microbatch, one number per microbatch (default: all equal).
    index_factors: tuple[float, ...] | None = None

    def given(self) -> dict[str, object]:
        """The schedule's own options that were given, under `build`'s names."""
        options: dict[str, object] = {
            "warmup": self.warmup,
            "update_every": self.update_every,
            "vertical_sync": self.vertical_sync or None,
            "replicas": self.replicas,
            "num_batches": self.batches,
            "group_size": self.group_size,
        }
        return {name: value for name, value in options.items() if value is not None}

    def make(self, name: str, *, command: str, costs: Costs | None = None) -> Schedule:
        """The checked schedule of this name or file.

        Arguments:
            command: without "stagewright", for the error that asks for sizes.
            costs: for a schedule that depends on them.

        Raises ValueError for missing sizes, and for options that contradict the file.
        """
        if is_own(name):
            return self.read_file(name)
        if self.ranks is None or self.microbatches is None:
            raise ValueError(
                f"{name} needs --ranks and --microbatches: expected `stagewright {command} --ranks 4 --microbatches "
                f"8`, or a file ({FORMS})"
            )
        options = self.given()
        if costs is not None and "costs" in family(name).options:
            options["costs"] = costs
        schedule = build(
            name,
            num_ranks=self.ranks,
            num_microbatches=self.microbatches,
            num_chunks=self.chunks,
            num_slices=self.slices,
            **options,
        )
        check(schedule)
        return schedule

    def read_file(self, name: str) -> Schedule:
        """The checked schedule of a file of any suffix. Raises ValueError for options that contradict it."""
        surplus = [f"--{option.removeprefix('num_').replace('_', '-')}" for option in self.given()]
        if surplus:
            raise ValueError(f"{', '.join(surplus)} with {name}: expected the file alone, which has all of it")
        sizes = {
            "num_ranks": self.ranks,
            "num_microbatches": self.microbatches,
            "num_chunks": self.chunks,
            "num_slices": self.slices,
        }
        return read_schedule(name, sizes)

    def costs(self) -> Costs:
        return Costs(
            forward=1.0 if self.forward is None else one_or_several(self.forward),
            backward=None if self.backward is None else one_or_several(self.backward),
            input_grad=None if self.input_grad is None else one_or_several(self.input_grad),
            weight_grad=None if self.weight_grad is None else one_or_several(self.weight_grad),
            latency=self.latency,
            reduce_grad=one_or_several(self.reduce_grad),
            sum_busy=one_or_several(self.sum_busy),
            index_factors=self.index_factors,
        )

    def made_for(self) -> Costs | None:
        """These costs; None if they are the defaults."""
        costs = self.costs()
        return None if costs == CostOptions().costs() else costs


def one_or_several(numbers: tuple[float, ...]) -> float | tuple[float, ...]:
    return numbers[0] if len(numbers) == 1 else numbers


# --- schedules that are searched for ---

AUTO = "auto"
_ROWS = 12  # of the table of gap against time
_SECONDS = 10.0


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisOptions(CostOptions):
    """A schedule that is built by name, or found by search."""

    # auto, zb-1p, zb-2p, zb-v: most stage activations on a rank at once; for auto one number or one per rank (default:
    # no limit, P, 2P, 2P).
    memory: tuple[float, ...] | None = None
    # auto: share of an activation kept between I and W, one number or one per stage (default: 1, all of it).
    kept_share: tuple[float, ...] | None = None
    # auto: plain (stage r on rank r, default), cyclic (--chunks stages per rank, in turn), v (two per rank, there and
    # back), or any: the best of the three, with costs and --memory of the model in P stages (or, given more numbers, in
    # as many pieces).
    placement: str | None = None
    # auto: makespan, if updates synchronise all ranks (default); span, from start to end of one rank.
    objective: Literal["makespan", "span"] | None = None
    seconds: float | None = None  # auto: the longest time it searches [s] (default: 10).
    seed: int | None = None  # auto: seed of its random choices (default: 0).

    def given(self) -> dict[str, object]:
        limit = {} if self.memory is None else {"memory_limit": one_or_several(self.memory)}
        return CostOptions.given(self) | limit

    def check_named(self, name: str) -> None:
        """Raise ValueError for search options given with a named schedule."""
        options = ("kept_share", "placement", "objective", "seconds", "seed")
        surplus = [f"--{each.replace('_', '-')}" for each in options if getattr(self, each) is not None]
        if surplus:
            raise ValueError(
                f"{', '.join(surplus)} with {name}: expected `stagewright schedule auto`, which takes them"
            )

    def search(self, command: str) -> Synthesis:
        """Search for a schedule of these costs, memory and placement, with progress on standard error.

        Raises ValueError for missing sizes and for options that a search does not take.
        """
        from ...schedules.search.synthesize import synthesize

        surplus = [
            f"--{each.removeprefix('num_').replace('_', '-')}" for each in self.given() if each != "memory_limit"
        ]
        surplus += ["--slices"] if self.slices is not None else []
        surplus += ["--reduce-grad"] if any(self.reduce_grad) else []
        surplus += ["--sum-busy"] if any(self.sum_busy) else []
        if surplus:
            raise ValueError(f"{', '.join(surplus)} with auto: expected sizes, costs, --memory and --placement")
        if self.ranks is None or self.microbatches is None:
            raise ValueError(
                f"auto needs --ranks and --microbatches: expected `stagewright {command} --ranks 4 --microbatches 8`"
            )
        if self.chunks not in (None, 1) and self.placement is None:
            raise ValueError(f"--chunks {self.chunks} with auto: expected --placement cyclic, v or any, too")
        seconds = _SECONDS if self.seconds is None else self.seconds
        with Progress(stream=sys.stderr, seconds=seconds) as progress:
            return synthesize(
                num_ranks=self.ranks,
                num_microbatches=self.microbatches,
                costs=self.costs(),
                memory_limit=None if self.memory is None else one_or_several(self.memory),
                placement=self.placement or "plain",
                num_chunks=self.chunks,
                objective=self.objective or "makespan",
                kept_share=1.0 if self.kept_share is None else one_or_several(self.kept_share),
                seconds=seconds,
                seed=self.seed or 0,
                on_progress=partial(show_progress, progress),
            )


def made_or_found(name: str, options: CostOptions, *, command: str) -> tuple[Schedule, Costs, Synthesis | None]:
    """The checked schedule of this name or file, or for "auto" the best one found, with its costs.

    `command`: without "stagewright", for the error that asks for sizes.
    """
    if name.lower() != AUTO:
        if isinstance(options, SynthesisOptions):
            options.check_named(name)
        return options.make(name, command=command, costs=options.made_for()), options.costs(), None
    if not isinstance(options, SynthesisOptions):
        options = SynthesisOptions(**{each.name: getattr(options, each.name) for each in fields(CostOptions)})
    found = options.search(command)
    check(found.schedule)
    return found.schedule, found.costs, found


def synthesis_data(found: Synthesis) -> dict[str, Any]:
    """Results of a search other than its schedule, for JSON."""
    return {
        "objective": found.problem.objective,
        "value": found.value,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "stopped": found.stopped,
        "seconds": found.seconds,
        "evaluations": found.evaluations,
        "memory_limit": found.problem.memory_limit,
        "smallest_memory": found.problem.smallest_memory,
        "placements": [
            {name: getattr(each, name) for name in ("placement", "lower_bound", "value")} for each in found.placements
        ],
        "history": [
            {name: getattr(each, name) for name in ("seconds", "evaluations", "value", "gap", "source")}
            for each in found.history
        ],
    }


def synthesis_table(found: Synthesis) -> str:
    """The gap over time as text, below the figures of the schedule."""
    what = found.problem.objective
    lines = [
        f"  {found.summary()}",
        f"  least {what} under this memory limit, whatever the order: {duration(found.lower_bound)}",
        *([] if len(found.placements) == 1 else [f"  placements: {'; '.join(map(_tried, found.placements))}"]),
        "",
        f"  {'after':>10}  {'orders':>9}  {what:>12}  {'gap':>8}  found by",
    ]
    shown = found.history
    if len(shown) > _ROWS:  # the first, the last, and those between at equal steps
        step = (len(shown) - 1) / (_ROWS - 1)
        shown = tuple(shown[round(at * step)] for at in range(_ROWS))
    for each in shown:
        spent = f"{duration(each.seconds):>10}  {each.evaluations:>9,}"
        lines.append(f"  {spent}  {duration(each.value):>12}  {each.gap:>8.2%}  {each.source}")
    return "\n".join(lines)


def _tried(each: Tried) -> str:
    least = f"least {duration(each.lower_bound)}"
    return f"{each.placement} {least}" if each.value is None else f"{each.placement} {duration(each.value)} ({least})"


def show_progress(progress: Progress, found: SearchProgress) -> None:
    text = f"{duration(found.value)}, at most {found.gap:.2%} above the best possible ({found.source})"
    if progress.has_bar:
        progress.show(text)
    else:
        progress.note_at_times(f"{duration(found.seconds)}: {text}")
