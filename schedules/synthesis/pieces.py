"""A chain of pieces of a model, and what stages take that are made of them: neighbours joined, or each one divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from ..timing.costs import COST_OF_OP, Costs, Row

Cut = tuple[int, ...]  # [S + 1] the first piece of each stage, and the number of pieces

_WHOLE = ("norm", "tied", "index_factors")  # of costs, not one a stage
_ONCE = ("latency", "overhead", "message_overhead", "sum_busy")  # an action or a sum, however long
_SECONDS = ("reduce_grad", "update", "offload", "reload")  # that add up, as the ops do


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """N pieces of a model in the order of the chain.

    Arguments:
        costs: of one action of a piece each [s].
        activations: [N] what a forward of a piece takes until the end of its W, or a row by microbatch each.
        kept_share: [N] part of that which stays between I and W.
    """

    costs: Costs
    activations: tuple[float | Row, ...]
    kept_share: tuple[float, ...]

    def stages(self, number: int) -> Pieces | None:
        """The same model in so many stages of equally many pieces, or of equal parts of one; None where neither goes.

        >>> halves = pieces_of(Costs(forward=[2.0, 6.0]), activations=1.0, kept_share=1.0, num_ranks=2).stages(4)
        >>> halves.costs.forward, halves.activations
        ((1.0, 1.0, 3.0, 3.0), (0.5, 0.5, 0.5, 0.5))
        """
        N = len(self.activations)
        if number % N == 0:
            return self.divided(number // N)
        return self.joined(tuple(range(0, N + 1, N // number))) if N % number == 0 else None

    def divided(self, parts: int) -> Pieces:
        """Each piece in so many equal ones; each has the latency, overhead and shares of the whole."""
        N = len(self.activations)
        costs = self._costs(tuple((at // parts,) for at in range(N * parts)), 1.0 / parts)
        held = tuple(_together([_row(each)], 1.0 / parts) for each in self.activations for _ in range(parts))
        return Pieces(
            costs=costs, activations=held, kept_share=tuple(each for each in self.kept_share for _ in range(parts))
        )

    def joined(self, cut: Cut) -> Pieces:
        """Stages of neighbouring pieces: all adds up, but latency, overhead and shares, of which the largest counts.

        Where microbatches are unequal, the share that is kept is a part of their mean.
        """
        groups = tuple(tuple(range(start, end)) for start, end in pairwise(cut))
        held = tuple(_together([_row(self.activations[at]) for at in own], 1.0) for own in groups)
        mean = [math.fsum(row) / len(row) for row in map(_row, self.activations)]
        whole = [math.fsum(mean[at] for at in own) for own in groups]
        kept = [math.fsum(mean[at] * self.kept_share[at] for at in own) for own in groups]
        share = tuple(min(1.0, k / h) if h > 0 else 1.0 for k, h in zip(kept, whole, strict=True))
        return Pieces(costs=self._costs(groups, 1.0), activations=held, kept_share=share)

    def _costs(self, groups: Sequence[Sequence[int]], part: float) -> Costs:
        """Costs of stages that each have a part of all pieces of a group."""
        given = self.costs
        table = replace(given.free_of_overhead, tied=()).table(num_stages=len(self.activations))
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


def pieces_of(
    costs: Costs,
    *,
    activations: float | Sequence[float | Sequence[float]],
    kept_share: float | Sequence[float],
    num_ranks: int,
) -> Pieces:
    """As many pieces as there are numbers where several are given, and a piece a rank where one stands for all.

    Raises ValueError where two of them have several numbers, but not as many.
    """
    numbers = {each.name: getattr(costs, each.name) for each in fields(costs) if each.name not in _WHOLE}
    numbers |= {"activations": activations, "kept_share": kept_share}
    lengths = {name: len(value) for name, value in numbers.items() if isinstance(value, Sequence)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"numbers of {lengths} pieces: expected one number, or equally many of each")
    N = max(lengths.values(), default=num_ranks)

    return Pieces(
        costs=costs,
        activations=tuple(tuple(each) if isinstance(each, Sequence) else each for each in activations)
        if isinstance(activations, Sequence)
        else (activations,) * N,
        kept_share=tuple(kept_share) if isinstance(kept_share, Sequence) else (kept_share,) * N,
    )


def _row(value: float | Row) -> Row:
    return value if isinstance(value, tuple) else (value,)


def _together(rows: Sequence[Row], part: float) -> float | Row:
    """A part of the sum of rows by action index; one number where each has one alone."""
    length = max(map(len, rows))
    row = tuple(part * math.fsum(each[k % len(each)] for each in rows) for k in range(length))
    return row if length > 1 else row[0]
