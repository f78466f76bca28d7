"""The question put to `synthesize`: one problem, or one for each placement that it may choose.

A model is a chain of pieces. Stages are made of them: consecutive ones joined, or each one divided.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import cast

import numpy as np

from ..kinds import at_least, option
from ..orders.problem import MemoryLimitError, Objective, Problem, Table
from ..placement import PLACEMENTS, place, read_placement
from ..timing.costs import COST_OF_OP, Costs, Row
from ..timing.links import Links
from .bounds import problem_bound

ANY = "any"
Cut = tuple[int, ...]  # [S + 1] the first piece of each stage, and the number of pieces

_WHOLE = ("norm", "tied", "index_factors")  # costs without a number per stage
_ONCE = ("latency", "overhead", "message_overhead", "sum_busy")  # once per action or sum of any length
_SECONDS = ("reduce_grad", "update", "offload", "reload")  # proportional to the stage, like the ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of `synthesize`, documented there."""

    num_ranks: int | None = None
    num_microbatches: int
    costs: Costs
    memory_limit: float | Sequence[float] | None = None
    placement: str | Sequence[Sequence[int]] = "plain"
    num_chunks: int | None = None
    objective: Objective = "makespan"
    activations: float | Sequence[float | Sequence[float]] = 1.0
    kept_share: float | Sequence[float] = 1.0
    links: Links | None = None

    def problem(self) -> Problem:
        """The problem on a given placement; ValueError for arguments that do not fit.

        Queueing of messages on links is ignored.
        """
        M = option("num_microbatches", self.num_microbatches, at_least(1))
        placed = read_placement(self.placement, self.num_ranks, self.num_chunks)
        S = sum(map(len, placed))
        table = self.costs.table(num_stages=S, num_indices=M)
        if any(seconds > 0 for seconds in table.tied.values()):
            raise ValueError("costs with tied sums: expected costs without tied=, which no order of F, I and W changes")

        rank_of = placed.rank_of

        def delay(src: int, dst: int) -> float:
            """Seconds between stages of two ranks: the sender's latency, and the seconds of a free link."""
            if not 0 <= dst < S or rank_of[src] == rank_of[dst]:
                return 0.0
            return _message_seconds(table.latency[src], self.links, rank_of, src, dst)

        held = _rows("activations", self.activations, S, M)
        share = numbers("kept_share", self.kept_share, S, "stage", is_share=True)
        limit = self.memory_limit
        problem = Problem(
            placement=placed,
            num_microbatches=M,
            seconds={op: tuple(row * (M // len(row)) for row in table.rows[op]) for op in COST_OF_OP},
            forward_delay=tuple(delay(s, s + 1) for s in range(S)),
            gradient_delay=tuple(delay(s, s - 1) for s in range(S)),
            held=held,
            kept=tuple(tuple(h * part for h in row) for row, part in zip(held, share, strict=True)),
            memory_limit=None if limit is None else numbers("memory_limit", limit, len(placed), "rank"),
            update=table.update,
            norm=table.norm,
            objective=self.objective,
        )
        problem.check_memory()
        return problem

    def problems(self) -> list[Posed]:
        """One problem for each possible placement, in the order of PLACEMENTS.

        Raises ValueError for arguments that do not fit, MemoryLimitError if no placement can meet the limit.
        """
        if self.placement != ANY:
            return [self._posed()]
        num_ranks = option("num_ranks", self.num_ranks, at_least(1))
        if self.links is not None:
            _check_links(self.links)
        pieces = self.pieces()
        found, refused = [], list[MemoryLimitError]()
        for name in PLACEMENTS:
            chunks = self.num_chunks if name == "cyclic" else None
            stages = pieces.stages(sum(map(len, place(name, num_ranks=num_ranks, num_chunks=chunks))))
            if stages is None:
                continue
            try:
                found.append(replace(stages, placement=name, num_chunks=chunks)._posed())
            except MemoryLimitError as error:
                refused.append(error)
        if not found:
            if refused:
                raise refused[0]
            raise ValueError(
                f"numbers of {len(pieces._held)} pieces for {num_ranks} ranks: expected {num_ranks}, "
                f"or a multiple of that"
            )
        return found

    def _posed(self) -> Posed:
        problem = self.problem()
        return Posed(request=self, problem=problem, bound=problem_bound(problem))

    # --- pieces of a model, and stages of them ---

    def pieces(self) -> Request:
        """The request with numbers for each of the given pieces, or for one piece per rank.

        Raises ValueError if two of them have different numbers of pieces.
        """
        given = {each.name: getattr(self.costs, each.name) for each in fields(Costs) if each.name not in _WHOLE}
        given |= {"activations": self.activations, "kept_share": self.kept_share}
        lengths = {name: len(value) for name, value in given.items() if isinstance(value, Sequence)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"numbers of {lengths} pieces: expected one number, or equally many of each")
        N = max(lengths.values(), default=self.num_ranks or 1)
        held = self.activations if isinstance(self.activations, Sequence) else (self.activations,) * N
        share = self.kept_share if isinstance(self.kept_share, Sequence) else (self.kept_share,) * N
        rows = tuple(tuple(each) if isinstance(each, Sequence) else each for each in held)
        return replace(self, activations=rows, kept_share=tuple(share))

    @property
    def _held(self) -> tuple[float | Row, ...]:
        return cast(tuple[float | Row, ...], self.activations)

    @property
    def _share(self) -> tuple[float, ...]:
        return cast(tuple[float, ...], self.kept_share)

    def stages(self, number: int) -> Request | None:
        """The same model in so many stages of equally many pieces, or of equal parts of one; None if neither is
        possible.

        >>> halves = Request(num_ranks=2, num_microbatches=1, costs=Costs(forward=[2.0, 6.0])).pieces().stages(4)
        >>> halves.costs.forward, halves.activations
        ((1.0, 1.0, 3.0, 3.0), (0.5, 0.5, 0.5, 0.5))
        """
        N = len(self._held)
        if number % N == 0:
            return self.divided(number // N)
        return self.joined(tuple(range(0, N + 1, N // number))) if N % number == 0 else None

    def equal_parts(self, number: int) -> Request:
        """The same model in so many stages, each of pieces and of equal parts of pieces."""
        N = len(self._held)
        common = math.gcd(N, number)
        return self.divided(number // common).joined(tuple(range(0, N * number // common + 1, N // common)))

    def divided(self, parts: int) -> Request:
        """Each piece in so many equal ones, each with the latency, overhead and shares of the whole."""
        N = len(self._held)
        costs = self._costs(tuple((at // parts,) for at in range(N * parts)), 1.0 / parts)
        held = tuple(_together([_row(each)], 1.0 / parts) for each in self._held for _ in range(parts))
        share = tuple(each for each in self._share for _ in range(parts))
        return replace(self, costs=costs, activations=held, kept_share=share)

    def joined(self, cut: Cut) -> Request:
        """Stages of consecutive pieces: everything adds up except latency, overhead and shares, whose maximum counts.

        With unequal microbatches the kept share is relative to their mean.
        """
        groups = tuple(tuple(range(start, end)) for start, end in pairwise(cut))
        held = tuple(_together([_row(self._held[at]) for at in own], 1.0) for own in groups)
        mean = [math.fsum(row) / len(row) for row in map(_row, self._held)]
        whole = [math.fsum(mean[at] for at in own) for own in groups]
        kept = [math.fsum(mean[at] * self._share[at] for at in own) for own in groups]
        share = tuple(min(1.0, k / h) if h > 0 else 1.0 for k, h in zip(kept, whole, strict=True))
        return replace(self, costs=self._costs(groups, 1.0), activations=held, kept_share=share)

    def _costs(self, groups: Sequence[Sequence[int]], part: float) -> Costs:
        """Costs of stages that each have this part of all pieces of a group."""
        given = self.costs
        table = replace(given.free_of_overhead, tied=()).table(num_stages=len(self._held))
        new: dict[str, object] = {"norm": given.norm, "tied": given.tied}
        for op, name in COST_OF_OP.items():
            if getattr(given, name) is not None:
                new[name] = [_together([table.row(op, at) for at in own], part) for own in groups]
        for name in _SECONDS:
            column = getattr(table, name)
            new[name] = [part * math.fsum(column[at] for at in own) for own in groups]
        for name in _ONCE:
            value = getattr(given, name)
            new[name] = [max(value[at] for at in own) for own in groups] if isinstance(value, Sequence) else value
        return Costs(**new)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Posed:
    """A request on a placement, with a `bound` that none of its schedules can beat [s]."""

    request: Request
    problem: Problem
    bound: float

    @property
    def placement(self) -> str:
        return self.request.placement if isinstance(self.request.placement, str) else "given"


def _check_links(links: Links) -> None:
    """ValueError for numbers that depend on the stages, which are not known yet."""
    for name in ("activation_bytes", "gradient_bytes"):
        if isinstance(getattr(links, name), Sequence):
            raise ValueError(f"{name} with several numbers and placement='any': expected one for all messages")
    if links.sums:
        raise ValueError("links with sums and placement='any': expected a placement, whose stages they are of")


def numbers(
    name: str, value: float | Sequence[float], number: int, each: str, *, is_share: bool = False
) -> tuple[float, ...]:
    given = (value,) * number if isinstance(value, int | float | np.number) else tuple(value)
    most = 1.0 if is_share else sys.float_info.max
    if len(given) != number or not all(isinstance(n, int | float | np.number) and 0 <= n <= most for n in given):
        expected = "a part from 0 to 1" if is_share else "a finite number of at least 0"
        raise ValueError(f"{name}={value!r:.60}: expected {expected}, or {number}, one per {each}")
    return tuple(map(float, given))


def _rows(name: str, value: float | Sequence[float | Sequence[float]], S: int, M: int) -> Table:
    """[S][M] of one number, one per stage, or a row per stage."""
    each = [value] * S if isinstance(value, int | float | np.number) else list(value)
    if len(each) != S:
        raise ValueError(f"{name}={value!r:.60}: expected a finite number of at least 0, or {S}, one per stage")
    return tuple(numbers(f"{name} of stage {s}", row, M, "microbatch") for s, row in enumerate(each))


def _message_seconds(latency: float, links: Links | None, rank_of: Sequence[int], src: int, dst: int) -> float:
    if links is None:
        return latency
    way = links.way(rank_of[src], rank_of[dst])
    back = links.activation_bytes if links.gradient_bytes is None else links.gradient_bytes
    size = links.activation_bytes if src < dst else back  # one number, or one an edge of the chain
    num_bytes = size if isinstance(size, int | float | np.number) else size[min(src, dst)]
    return latency + way.latency + num_bytes * way.seconds_per_byte


def _row(value: float | Row) -> Row:
    return value if isinstance(value, tuple) else (value,)


def _together(rows: Sequence[Row], part: float) -> float | Row:
    """A part of the sum of rows by action index; one number if each row has one."""
    length = max(map(len, rows))
    row = tuple(part * math.fsum(each[k % len(each)] for each in rows) for k in range(length))
    return row if length > 1 else row[0]
