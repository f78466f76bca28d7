"""The notation of rules about an order.

F(s, m).before(B(s, m - 2))             a relation of two actions; likewise after
lambda s, m: ...                        a predicate: the relations of stage s and microbatch m, if any
in_order(F, key=lambda s, m: ...)       each rank runs them in ascending order of the key
in_flight(at_most=4)                    stage activations on a rank at once
only_if(lambda action, so_far: ...)     a filter: may this action run next?
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from ..ir import Action, Op, Relation


@dataclass(frozen=True, slots=True, kw_only=True)
class SoFar:
    """State in which a filter is asked about an action; valid during the call.

    Arguments:
        rank: the rank of the action.
        program: the actions that this rank has run.
        in_flight: stage activations that this rank holds.
        begun: the actions that all ranks have begun.
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

    Several ops are ordered together, by `key(op, s, m)`. Without a key, the actions of each stage are ordered by
    microbatch, those of one microbatch in the order in which the ops are named, and stages are independent. Raises
    ValueError for invalid ops or keys.
    """
    if not ops or not all(isinstance(op, Op) for op in ops):
        raise ValueError(f"in_order{ops!r:.60}: expected ops, such as in_order(F) or in_order(F, key=lambda s, m: m)")
    if key is not None and not callable(key):
        raise ValueError(f"in_order(key={key!r:.60}): expected a function of stage and microbatch: lambda s, m: (m, s)")
    return InOrder(ops=ops, key=key)


def in_flight(*, at_most: int | Callable[[int], int]) -> InFlight:
    """The rule of at most so many stage activations on a rank at once, from F to the end of B or W: a number, or a
    function of the rank.

    Raises ValueError for anything else.
    """
    if not callable(at_most):
        check_number(at_most, "in_flight(at_most=", least=1)
    return InFlight(at_most=at_most)


def only_if(allows: Filter) -> OnlyIf:
    """The rule that an action may begin only where `allows(action, so_far)` is true, asked as the order grows.

    Raises ValueError for anything but a function.
    """
    if not callable(allows):
        raise ValueError(
            f"only_if({allows!r:.60}): expected a function of an action and of what has run so far, such as "
            f"lambda action, so_far: so_far.in_flight < 3"
        )
    return OnlyIf(allows=allows)


def check_number(number: object, where: str, *, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(
            f"{where}{number!r:.60}): expected a whole number, at least {least}, or a function of the rank"
        )
    return number
