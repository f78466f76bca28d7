"""The record that all searchers share: what is to be put in order, what it takes, and what must not be exceeded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from ..ir import Op, ScheduleError, chain
from ..placement import Placement, read_placement
from ..timing.costs import Costs
from ..timing.links import Links

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

    Arguments:
        placement: [P] tuples: the stages of each rank, each on exactly one.
        num_microbatches: M.
        forward, input_grad, weight_grad: [S][M] seconds of each action.
        backward: [S][M] seconds of an I and its W run as one action (B): what is sent on leaves at its end.
        forward_delay: [S] seconds from the end of F(s) until its result is at stage s+1; 0 on one rank, and at the end.
        gradient_delay: [S] seconds from the end of I(s) until its result is at stage s-1; likewise.
        held: [S][M] memory that a forward takes as it starts.
        kept: [S][M] what of that stays when the I has ended, until the end of the W; the same as `held` where all is
            freed at W.
        memory_limit: [P] most that each rank may hold at once, in the unit of `held`; None: no limit.
        update: [S] seconds of the optimizer step of a stage, behind its rank's last action.
        norm: seconds for which all ranks come together in front of the updates; None: they do not.
        objective: "makespan", until the last end of any rank; "span", the most that lies between a rank's first start
            and its last end. Each action starts as soon as it can, as in `simulate`.

    Raises ValueError for tables that do not fit together, costs below 0, forwards of 0, ScheduleError for a placement
    that does not hold each stage once.
    """

    placement: Placement
    num_microbatches: int
    forward: Table
    input_grad: Table
    weight_grad: Table
    backward: Table
    forward_delay: tuple[float, ...]
    gradient_delay: tuple[float, ...]
    held: Table
    kept: Table
    memory_limit: tuple[float, ...] | None = None
    update: tuple[float, ...] = ()
    norm: float | None = None
    objective: Objective = "makespan"
    rank_of: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank_of", _ranks_of_stages(self.placement))
        if not self.update:
            object.__setattr__(self, "update", (0.0,) * self.num_stages)
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective={self.objective!r}: expected one of {', '.join(OBJECTIVES)}")
        self._check_tables()
        if self.memory_limit is not None and len(self.memory_limit) != self.num_ranks:
            raise ValueError(
                f"memory_limit has {len(self.memory_limit)} numbers for {self.num_ranks} ranks: "
                f"expected one number, or one a rank"
            )

    def _check_tables(self) -> None:
        S, M = self.num_stages, self.num_microbatches
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in {"forward", "input_grad", "weight_grad", "backward", "held", "kept"}:
                if len(value) != S or any(len(row) != M for row in value):
                    raise ValueError(f"{each.name}: expected {S} rows of {M} numbers, one a stage and microbatch")
                numbers = [number for row in value for number in row]
            elif each.name in {"forward_delay", "gradient_delay", "update"}:
                if len(value) != S:
                    raise ValueError(f"{each.name} has {len(value)} numbers for {S} stages: expected one a stage")
                numbers = list(value)
            else:
                continue
            wrong = next((n for n in numbers if not (n >= 0 and math.isfinite(n))), None)
            if wrong is not None:
                raise ValueError(f"{each.name}={wrong!r}: expected finite numbers, at least 0")
        for name in ("forward", "input_grad", "weight_grad"):
            rows = getattr(self, name)
            if not max(map(max, rows)) > 0 or (name == "forward" and not min(map(min, rows)) > 0):
                raise ValueError(f"{name}={min(map(min, rows))!r}: expected more than 0 seconds")
        for stage, (held, kept) in enumerate(zip(self.held, self.kept, strict=True)):
            if any(k > h for h, k in zip(held, kept, strict=True)):
                raise ValueError(f"stage {stage} keeps more for its weight gradients than its forwards hold")

    @property
    def num_ranks(self) -> int:
        """P."""
        return len(self.placement)

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.rank_of)

    def seconds(self, op: Op) -> Table:
        """[S][M] seconds of F, I, W or B."""
        return {Op.F: self.forward, Op.I: self.input_grad, Op.W: self.weight_grad, Op.B: self.backward}[op]

    @property
    def work(self) -> tuple[float, ...]:
        """[P] seconds of F, I and W of each rank."""
        return tuple(
            math.fsum(n for s in own for op in SPLIT_OPS for n in self.seconds(op)[s]) for own in self.placement
        )

    @property
    def same_microbatches(self) -> bool:
        """Whether all microbatches are alike, so that none gains by going before another."""
        tables = (self.forward, self.input_grad, self.weight_grad, self.backward, self.held, self.kept)
        return all(row.count(row[0]) == len(row) for table in tables for row in table)

    @property
    def smallest_memory(self) -> tuple[float, ...]:
        """[P] what each rank must hold at least: its part of the largest microbatch, one after the other.

        Where a rank has several stages, its forwards of one microbatch all come before the first of their backwards,
        since the chain turns at its end.
        """
        return tuple(
            max(math.fsum(self.held[s][k] for s in own) for k in range(self.num_microbatches)) for own in self.placement
        )

    def check_memory(self) -> None:
        """Raises MemoryLimitError, with the smallest limit that can be met, where there is no schedule."""
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


def _ranks_of_stages(placement: Placement) -> tuple[int, ...]:
    rank_of = {stage: rank for rank, own in enumerate(placement) for stage in own}
    stages = sorted(stage for own in placement for stage in own)
    if not placement or not all(placement) or stages != list(range(len(stages))):
        raise ScheduleError(
            f"placement={placement!r:.80}: expected stages from 0 without a gap, each on one rank, at least one a rank"
        )
    return tuple(rank_of[stage] for stage in stages)


def fits(amount: float, limit: float) -> bool:
    """Whether an amount of memory is within a limit, but for rounding."""
    return amount <= limit + 1e-9 * (abs(limit) + 1.0)


def pose(
    *,
    num_ranks: int | None = None,
    num_microbatches: int,
    costs: Costs,
    memory_limit: float | Sequence[float] | None = None,
    placement: str | Sequence[Sequence[int]] = "plain",
    num_chunks: int | None = None,
    objective: Objective = "makespan",
    activations: float | Sequence[float | Sequence[float]] = 1.0,
    kept_share: float | Sequence[float] = 1.0,
    links: Links | None = None,
    needs_room: bool = True,
) -> Problem:
    """The problem behind the arguments of `synthesize`.

    Arguments:
        num_ranks: P; may be left out where `placement` lists the stages of each rank.
        costs: of one stage action each [s].
        memory_limit: of each rank, one number or one a rank, in the unit of `activations`.
        placement: a name (see `placement`) or the stages of each rank.
        num_chunks: V, for "cyclic" (2 by default).
        activations: what a forward of a stage takes, one number or one a stage: 1, so that limits count stage
            activations, or bytes. A stage may have a row in place of its number, one number a microbatch.
        kept_share: part of that which stays between I and W (0 to 1), one number or one a stage.
        links: their latency and transfer seconds come on top of the latency in `costs`; messages that queue for a link
            are not looked at.
        needs_room: whether a limit that no order meets by itself is an error.

    Raises ValueError for whatever does not fit.
    """
    if not isinstance(num_microbatches, int) or isinstance(num_microbatches, bool) or num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches!r}: expected a whole number, at least 1")
    placed = read_placement(placement, num_ranks, num_chunks)
    S, M = sum(map(len, placed)), num_microbatches
    table = costs.table(num_stages=S, num_indices=M)
    if any(seconds > 0 for seconds in table.tied.values()):
        raise ValueError("costs with tied sums: expected costs without tied=, which no order of F, I and W changes")

    def seconds(op: Op) -> Table:
        return tuple(row * (M // len(row)) for row in table.rows[op])

    delay = _Delays(_ranks_of_stages(placed), table.latency, links)
    held = _rows("activations", activations, S, M)
    share = _numbers("kept_share", kept_share, S, "stage")
    if not all(0 <= part <= 1 for part in share):
        raise ValueError(f"kept_share={kept_share!r:.60}: expected numbers from 0 to 1")
    problem = Problem(
        placement=placed,
        num_microbatches=M,
        forward=seconds(Op.F),
        input_grad=seconds(Op.I),
        weight_grad=seconds(Op.W),
        backward=seconds(Op.B),
        forward_delay=tuple(delay(s, s + 1) for s in range(S)),
        gradient_delay=tuple(delay(s, s - 1) for s in range(S)),
        held=held,
        kept=tuple(tuple(h * part for h in row) for row, part in zip(held, share, strict=True)),
        memory_limit=None if memory_limit is None else _numbers("memory_limit", memory_limit, len(placed), "rank"),
        update=table.update,
        norm=table.norm,
        objective=objective,
    )
    if needs_room:
        problem.check_memory()
    return problem


def _numbers(name: str, value: float | Sequence[float], number: int, each: str) -> tuple[float, ...]:
    given = (value,) * number if isinstance(value, int | float) else tuple(value)
    if len(given) != number or not all(isinstance(n, int | float) and n >= 0 and math.isfinite(n) for n in given):
        raise ValueError(f"{name}={value!r:.60}: expected a finite number of at least 0, or {number}, one a {each}")
    return tuple(map(float, given))


def _rows(name: str, value: float | Sequence[float | Sequence[float]], S: int, M: int) -> Table:
    """[S][M] of one number, one a stage, or a row a stage."""
    each = [value] * S if isinstance(value, int | float) else list(value)
    if len(each) != S:
        raise ValueError(f"{name}={value!r:.60}: expected a finite number of at least 0, or {S}, one a stage")
    return tuple(_numbers(f"{name} of stage {s}", row, M, "microbatch") for s, row in enumerate(each))


class _Delays:
    """Seconds from stage to stage where they stand on two ranks: the sender's latency, and what a free link takes."""

    def __init__(self, rank_of: tuple[int, ...], latency: Sequence[float], links: Links | None) -> None:
        self.rank_of, self.latency, self.links = rank_of, latency, links
        self.edges = {(edge.src, edge.dst): at for at, edge in enumerate(chain(len(rank_of)))}

    def __call__(self, src: int, dst: int) -> float:
        if not 0 <= dst < len(self.rank_of) or self.rank_of[src] == self.rank_of[dst]:
            return 0.0
        delay = self.latency[src]
        if self.links is None:
            return delay
        way = self.links.way(self.rank_of[src], self.rank_of[dst])
        return delay + way.latency + self._bytes(src, dst) * way.seconds_per_byte

    def _bytes(self, src: int, dst: int) -> float:
        assert self.links is not None
        back = self.links.activation_bytes if self.links.gradient_bytes is None else self.links.gradient_bytes
        size = self.links.activation_bytes if src < dst else back
        return float(size) if isinstance(size, int | float) else size[self.edges[min(src, dst), max(src, dst)]]
