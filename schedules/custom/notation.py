"""The words in which rules about an order are written.

F(s, m).before(B(s, m - 2))             a relation of two actions; so is after
lambda s, m: ...                        a predicate: the relations of stage s and microbatch m, if there are any
in_order(F, key=lambda s, m: ...)       each rank runs them in ascending order of the key
in_flight(at_most=4)                    stage activations that a rank holds at once
only_if(lambda action, so_far: ...)     a filter: may this action go next?
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from ..ir import Action, Op, Relation


@dataclass(frozen=True, slots=True, kw_only=True)
class SoFar:
    """State in which an action is asked for; valid during the call.

    Arguments:
        rank: that would run it.
        program: what this rank has run.
        in_flight: stage activations that this rank holds.
        begun: what all ranks have begun.
    """

    rank: int
    program: Sequence[Action]
    in_flight: int
    begun: AbstractSet[Action]


F, B, I, W, U = Op.F, Op.B, Op.I, Op.W, Op.U

Predicate = Callable[[int, int], Relation | Iterable[Relation] | None]
Filter = Callable[[Action, SoFar], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class InOrder:
    ops: tuple[Op, ...]
    key: Callable[..., Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    at_most: int | Callable[[int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlyIf:
    allows: Filter


Rule = Predicate | Relation | InOrder | InFlight | OnlyIf


def in_order(*ops: Op, key: Callable[..., Any] | None = None) -> InOrder:
    """The rule that each rank runs its actions of these ops in ascending order of `key(s, m)`; equal keys in any order.

    Several ops are ordered together, by `key(op, s, m)`; without a key those of one stage by microbatch, of one
    microbatch in the order in which they are named, and stages stand in any order to each other. Raises ValueError for
    what is no op, or no function.
    """
    if not ops or not all(isinstance(op, Op) for op in ops):
        raise ValueError(f"in_order{ops!r:.60}: expected ops, such as in_order(F) or in_order(F, key=lambda s, m: m)")
    if key is not None and not callable(key):
        raise ValueError(f"in_order(key={key!r:.60}): expected a function of stage and microbatch: lambda s, m: (m, s)")
    return InOrder(ops=ops, key=key)


def in_flight(*, at_most: int | Callable[[int], int]) -> InFlight:
    """The rule that a rank holds at most so many stage activations at once, from F to the end of B or W: a number, or a
    function of the rank.

    Raises ValueError for what is neither.
    """
    if not callable(at_most):
        check_number(at_most, "in_flight(at_most=", least=1)
    return InFlight(at_most=at_most)


def only_if(allows: Filter) -> OnlyIf:
    """The rule that an action may begin only where `allows(action, so_far)` is true, asked as the order grows.

    Raises ValueError for what is no function.
    """
    if not callable(allows):
        raise ValueError(
            f"only_if({allows!r:.60}): expected a function of an action and of what has run so far, such as "
            f"lambda action, so_far: so_far.in_flight < 3"
        )
    return OnlyIf(allows=allows)


def check_number(number: object, where: str, *, least: int) -> int:
    """The number; ValueError where it is none, or below `least`."""
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(
            f"{where}{number!r:.60}): expected a whole number, at least {least}, or a function of the rank"
        )
    return number
