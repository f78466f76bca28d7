"""Options of a schedule, for every command that builds one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro

from ...schedules import FAMILIES, Costs, Schedule, build, check, family
from ...schedules.custom.user_schedules import FORMS, is_own
from ..options import plain_help, read_schedule

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

    ranks: int | None = None
    """P, pipeline ranks."""
    microbatches: int | None = None
    """M, microbatches of a batch."""
    chunks: int | None = None
    """V, stages per rank (default: 2 for a schedule that interleaves, else 1)."""
    slices: int | None = None
    """n, slices of a microbatch along the sequence (default: 2 for a schedule that slices, else 1)."""
    warmup: Literal["plain", "eager"] | None = None
    """2bw: forwards ahead of the backwards. eager hides latency, for more activations (default: plain)."""
    update_every: int | None = None
    """pipedream, paci: microbatches from update to update (default: 1, or one per replica; paci: all of a batch)."""
    vertical_sync: bool = False
    """pipedream: all stages use the weight version that the first one saw."""
    replicas: tuple[int, ...] | None = None
    """pipedream, 2bw, paci: ranks of each stage, --ranks in all (default: one each)."""
    batches: int | None = None
    """pipedream, 2bw, paci: batches that the program spans (default: enough for a steady state)."""
    group_size: int | None = None
    """gis: microbatches that pass a chunk before the next chunk's turn, P/2 for half the memory (default: P)."""
    forward: tuple[float, ...] | None = None
    """F [s] (default: 1, the unit of all times shown)."""
    backward: tuple[float, ...] | None = None
    """B [s] (default: twice the forward)."""
    input_grad: tuple[float, ...] | None = None
    """I [s], if the backward is split."""
    weight_grad: tuple[float, ...] | None = None
    """W [s], if the backward is split."""
    latency: float = 0.0
    """Seconds of a message between ranks."""
    reduce_grad: tuple[float, ...] = (0.0,)
    """All-reduce of a stage's gradients over its replicas [s], after the stage's last backward; compute overlaps it."""
    sum_busy: tuple[float, ...] = (0.0,)
    """Share of those seconds in which the ranks can't compute, 0 to 1."""
    index_factors: tuple[float, ...] | None = None
    """Factor of these seconds for each microbatch, one number per microbatch (default: all equal)."""

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
            raise ValueError(f"{', '.join(surplus)} beside {name}: expected the file alone, which says it all")
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
