"""The problem that all searchers share: actions to put in order, with costs and memory limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from ..ir import Op
from ..placement import StagePlacement
from ..timing.costs import COST_OF_OP

Objective = Literal["makespan", "span"]
Table = tuple[tuple[float, ...], ...]  # [S][M]

OBJECTIVES: tuple[Objective, ...] = ("makespan", "span")
SPLIT_OPS = (Op.F, Op.I, Op.W)


class MemoryLimitError(ValueError):
    """A memory limit that no schedule can meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One flush batch over a chain of stages, each on one rank: F, I and W of each (stage, microbatch) are to be put in
    order on the ranks.

        F(s, k) waits for F(s-1, k);   I(s, k) for I(s+1, k) and F(s, k);   W(s, k) for I(s, k)

    Raises ValueError for tables that do not fit together, costs below 0, forwards of 0, ScheduleError for a placement
    that does not hold each stage once.
    """

    placement: StagePlacement  # [P] tuples: the stages of each rank, each on exactly one
    num_microbatches: int  # M
    # [S][M] of F, I and W, and of an I and its W run as one action (B), whose result leaves at its end
    seconds: Mapping[Op, Table]
    # [S] seconds from the end of F(s) until its result is at stage s+1; 0 on one rank, and at the end
    forward_delay: tuple[float, ...]
    gradient_delay: tuple[float, ...]  # [S] seconds from the end of I(s) until its result is at stage s-1; likewise
    held: Table  # [S][M] memory that a forward takes as it starts
    # [S][M] the part of it that stays from the end of the I until the end of the W; equal to `held` if all is freed at
    # W
    kept: Table
    # [P] most that each rank may hold at once, in the unit of `held`; None: no limit
    memory_limit: tuple[float, ...] | None = None
    update: tuple[float, ...] = ()  # [S] seconds of the optimizer step of a stage, after its rank's last action
    norm: float | None = None  # seconds for which all ranks synchronise before the updates; None: they do not
    # "makespan", until the last end of any rank; "span", the longest time between a rank's first start and its last
    # end. Each action starts as soon as it can, as in `simulate`.
    objective: Objective = "makespan"

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", StagePlacement(self.placement))
        if not self.update:
            object.__setattr__(self, "update", (0.0,) * self.num_stages)
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective={self.objective!r}: expected one of {', '.join(OBJECTIVES)}")
        self._check_tables()
        if self.memory_limit is not None and len(self.memory_limit) != self.num_ranks:
            raise ValueError(
                f"memory_limit has {len(self.memory_limit)} numbers for {self.num_ranks} ranks: "
                f"expected one number, or one per rank"
            )

    def _check_tables(self) -> None:
        S, M = self.num_stages, self.num_microbatches
        tables = {COST_OF_OP[op]: table for op, table in self.seconds.items()} | {"held": self.held, "kept": self.kept}
        columns = {name: getattr(self, name) for name in ("forward_delay", "gradient_delay", "update")}
        for name, table in tables.items():
            if len(table) != S or any(len(row) != M for row in table):
                raise ValueError(f"{name}: expected {S} rows of {M} numbers, one per stage and microbatch")
        for name, column in columns.items():
            if len(column) != S:
                raise ValueError(f"{name} has {len(column)} numbers for {S} stages: expected one per stage")
        for name, numbers in ({name: [*chain(*table)] for name, table in tables.items()} | columns).items():
            wrong = next((n for n in numbers if not (n >= 0 and math.isfinite(n))), None)
            if wrong is not None:
                raise ValueError(f"{name}={wrong!r}: expected finite numbers, at least 0")
        for name in ("forward", "input_grad", "weight_grad"):
            least, most = min(map(min, tables[name])), max(map(max, tables[name]))
            if not most > 0 or (name == "forward" and not least > 0):
                raise ValueError(f"{name}={least!r}: expected more than 0 seconds")
        for stage, (held, kept) in enumerate(zip(self.held, self.kept, strict=True)):
            if any(k > h for h, k in zip(held, kept, strict=True)):
                raise ValueError(f"stage {stage} keeps more for its weight gradients than its forwards hold")

    @property
    def rank_of(self) -> tuple[int, ...]:
        """[S] the rank of each stage."""
        return self.placement.rank_of

    @property
    def num_ranks(self) -> int:
        return len(self.placement)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @property
    def work(self) -> tuple[float, ...]:
        """[P] seconds of F, I and W of each rank."""
        return tuple(
            math.fsum(n for s in own for op in SPLIT_OPS for n in self.seconds[op][s]) for own in self.placement
        )

    @property
    def same_microbatches(self) -> bool:
        """Whether all microbatches have equal costs and memory."""
        tables = (*self.seconds.values(), self.held, self.kept)
        return all(row.count(row[0]) == len(row) for table in tables for row in table)

    @property
    def smallest_memory(self) -> tuple[float, ...]:
        """[P] the least that each rank must hold: its part of the largest microbatch, one microbatch at a time.

        All forwards of a microbatch on a rank precede the first of their backwards, since the chain turns at its end.
        """
        return tuple(
            max(math.fsum(self.held[s][k] for s in own) for k in range(self.num_microbatches)) for own in self.placement
        )

    @property
    def limits(self) -> tuple[float, ...]:
        """[P] the most that each rank may hold, with a margin for rounding; infinite without a limit."""
        if self.memory_limit is None:
            return (math.inf,) * self.num_ranks
        return tuple(map(with_rounding, self.memory_limit))

    def check_memory(self) -> None:
        """Raise MemoryLimitError, with the smallest possible limit, if there is no schedule."""
        limits = self.memory_limit
        if limits is None:
            return
        for rank, (limit, needed) in enumerate(zip(limits, self.smallest_memory, strict=True)):
            if not fits(needed, limit):
                least = max(self.smallest_memory)
                raise MemoryLimitError(
                    f"memory_limit={limit:g} on rank {rank}: no schedule can meet it, since one microbatch alone takes "
                    f"{needed:g} there; expected at least {least:g}"
                )


def fits(amount: float, limit: float) -> bool:
    """Whether an amount of memory is within a limit, up to rounding."""
    return amount <= with_rounding(limit)


def with_rounding(limit: float) -> float:
    return limit + 1e-9 * (abs(limit) + 1.0)
