"""The options of a schedule, one list for every command that builds one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro

from ...schedules import FAMILIES, Schedule, build, check

NAMES = ", ".join(FAMILIES)
NAME_HELP = tyro.conf.arg(help=f"Name of the schedule: {NAMES}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Arguments of `build`; None: not given."""

    ranks: int | None = None
    """P, pipeline ranks."""
    microbatches: int | None = None
    """M, microbatches of a batch."""
    chunks: int | None = None
    """V, stages a rank (default: 2 for a schedule that interleaves, else 1)."""
    warmup: Literal["plain", "eager"] | None = None
    """2bw: forwards ahead of the backwards. eager hides latency, for more activations (default: plain)."""
    update_every: int | None = None
    """pipedream: microbatches from update to update (default: 1, or one a replica)."""
    vertical_sync: bool = False
    """pipedream: all stages use the weight version that the first one saw."""
    replicas: tuple[int, ...] | None = None
    """pipedream, 2bw: ranks of each stage, --ranks in all (default: one each)."""
    batches: int | None = None
    """pipedream, 2bw: batches that the program spans (default: enough for a steady state)."""

    def given(self) -> dict[str, object]:
        """The schedule's own options that were given, under `build`'s names."""
        options: dict[str, object] = {
            "warmup": self.warmup,
            "update_every": self.update_every,
            "vertical_sync": self.vertical_sync or None,
            "replicas": self.replicas,
            "num_batches": self.batches,
        }
        return {name: value for name, value in options.items() if value is not None}

    def build(self, name: str, *, ranks: int, microbatches: int) -> Schedule:
        """The checked schedule of this name."""
        schedule = build(name, num_ranks=ranks, num_microbatches=microbatches, num_chunks=self.chunks, **self.given())
        check(schedule)
        return schedule
