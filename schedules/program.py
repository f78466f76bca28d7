"""Programs of ranks, communication included: made by lowering, carried out by an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .ir import Action, Collective, Op, Schedule
from .messages import Message, Transfer


class GroupStep(NamedTuple):
    """A step of a rank that goes with an update group.

    REDUCE_GRAD: the losses of the group are here; gradients that other ranks add up with their own leave.
    GRAD_NORM: they have arrived and are added; the squared norm of this rank's part is next.
    UNSHARD: parts of weights have arrived from the ranks that updated them, in front of the first use of the version.
    """

    op: Op
    index: int  # type: ignore[assignment]  # hides tuple.index

    def __str__(self) -> str:
        return f"{self.op.value}{self.index}"


Work = Action | GroupStep | Collective
Step = Work | Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """Program of one rank, communication included.

    Arguments:
        rank: which.
        steps: actions, collectives, sends and postings in order.
        inputs: by action (or group step), the messages that must have arrived before it starts.
        proves: by received message, the sends of this rank that its arrival proves received.
        shared: by message that several actions of the rank make or use: these, in its order. One that is sent is held
            from the first on, one that was received up to the last.
        finally_needs: messages consumed at the very end (losses).
        cuts: where each call begins in `steps`, for a program that was lowered call by call.

    Attributes:
        fused: each I with its W right behind it: nobody waits for what is between, and they run as one backward.
    """

    rank: int
    steps: tuple[Step, ...]
    inputs: dict[Work, tuple[Message, ...]]
    proves: dict[Message, tuple[Message, ...]]
    shared: dict[Message, tuple[Work, ...]] = field(default_factory=dict)
    finally_needs: tuple[Message, ...] = ()
    cuts: tuple[int, ...] = ()
    fused: frozenset[Action] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fused", frozenset(_fused(self.steps)))


def _fused(steps: Sequence[Step]) -> Iterator[Action]:
    """Each I with its W behind it, and no more between them than receives that are posted:

    1I3 1SEND_B3 1W3    the gradient leaves, and W fills the time that it takes: two
    0I3 0W3             nobody waits for a gradient: one
    """
    before: Action | None = None
    for step in steps:
        if isinstance(step, Transfer) and not step.is_send:
            continue
        if isinstance(step, Action):
            if step.op is Op.W and before == step._replace(op=Op.I):
                yield before
            before = step
        else:
            before = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A schedule with its communication, a program a rank."""

    schedule: Schedule
    programs: tuple[RankProgram, ...]
