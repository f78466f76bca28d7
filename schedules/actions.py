"""The actions of a schedule: one step of one rank, and its notation.

    3F12      stage 3, forward, index 12: a compute action
    3OFFLOAD12                            a move of activations
    0+3REDUCE_GRAD0                       a collective of all ranks of stages 0 and 3

`ir` defines the schedules they make up, and which index is which microbatch.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule that cannot be run; the message names the rank and the action, and says why."""


class Op(StrEnum):
    """Kind of an action: compute (F, B, I, W), update (U), or a move of activations, which begins at its place in the
    program and overlaps with compute. Lowering inserts the others."""

    F = "F"  # forward
    B = "B"  # whole backward
    I = "I"  # input gradient
    W = "W"  # weight gradient
    U = "U"  # optimizer step of a stage: makes its next weight version
    OFFLOAD = "OFFLOAD"  # copies the activations of a microbatch to the host
    RELOAD = "RELOAD"  # copies them back
    REDUCE_GRAD = "REDUCE_GRAD"  # all-reduce of gradients that several ranks share
    GRAD_NORM = "GRAD_NORM"  # the norm of all gradients
    UNSHARD = "UNSHARD"  # all-gather of sharded weights
    RESHARD = "RESHARD"  # each rank keeps only its shard
    EXCHANGE = "EXCHANGE"  # within an action: all-to-alls and gathers of the members of a stage

    def __call__(self, stage: int, index: int) -> Action:
        """Action of a stage: `Op.F(3, 12)` is 3F12. Rules may name neighbours that do not exist, so any whole
        numbers are valid."""
        try:
            return Action(operator.index(stage), self, operator.index(index))
        except TypeError:
            raise ValueError(
                f"{self.value}({stage!r:.40}, {index!r:.40}): expected whole numbers, a stage and a microbatch"
            ) from None


COMPUTE_OPS = frozenset({Op.F, Op.B, Op.I, Op.W})
BACKWARD_OPS = frozenset({Op.B, Op.I})  # they compute the gradient for the previous stage
LAST_USES = frozenset({Op.B, Op.W})  # afterwards activations are freed and the weight gradient is complete
MOVE_OPS = frozenset({Op.OFFLOAD, Op.RELOAD})  # not in the compute lane

_ACTION = re.compile(r"(\d+)([FBIWU]|OFFLOAD|RELOAD)(\d+)")
_COLLECTIVE = re.compile(r"(\d+(?:\+\d+)*)(REDUCE_GRAD|UNSHARD|RESHARD|EXCHANGE)(\d+)")


class Action(NamedTuple):
    """One step of one stage; prints and parses as `3F12`.

    >>> str(Action(3, Op.F, 12)), Action.parse("3F12") == Action(3, Op.F, 12)
    ('3F12', True)
    """

    stage: int
    op: Op
    index: int  # type: ignore[assignment]  # hides tuple.index

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.index}"

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read `3F12`; ValueError for anything else."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"cannot read the action {text.strip()!r}: expected <stage><op><microbatch> such as 3F12, "
                f"with an op of F B I W U, or OFFLOAD RELOAD"
            )
        return cls(int(match[1]), Op(match[2]), int(match[3]))

    def before(self, other: Action) -> Relation:
        """The rule that this action ends before the other begins (see `custom`)."""
        return Relation(self, other)

    def after(self, other: Action) -> Relation:
        """The rule that the other action ends before this one begins."""
        return Relation(other, self)


class Relation(NamedTuple):
    """`first` ends before `then` begins.

    >>> print(Op.B(0, 1).after(Op.F(0, 3)))
    0F3 before 0B1
    """

    first: Action
    then: Action

    def __str__(self) -> str:
        return f"{self.first} before {self.then}"


class Collective(NamedTuple):
    """A step that all ranks of some stages perform together. It begins at its place in the program, and overlaps with
    compute.

    REDUCE_GRAD: all-reduce of the gradients of the parameters that exactly these stages hold: over the replicas of one
    stage, or over the stages that share tied weights.
    UNSHARD: all-gather of the weights of the stage from the shards of its ranks.
    RESHARD: each rank frees all but its own shard, without communication.
    EXCHANGE: in timelines only: what an F or B of the stage sends within its group of experts or of a sequence.

    Prints and parses as `3REDUCE_GRAD0`; `index` is the update group (0 under a flush schedule), that of the action
    for EXCHANGE.

    >>> str(Collective((0, 3), Op.REDUCE_GRAD, 0)), Collective.parse("3REDUCE_GRAD0").stages
    ('0+3REDUCE_GRAD0', (3,))
    """

    stages: tuple[int, ...]
    op: Op
    index: int  # type: ignore[assignment]  # hides tuple.index

    def __str__(self) -> str:
        return f"{'+'.join(map(str, self.stages))}{self.op.value}{self.index}"

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str) -> Collective:
        """Read `0+3REDUCE_GRAD0`; ValueError for anything else."""
        match = _COLLECTIVE.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"cannot read the collective {text.strip()!r}: expected <stages><op><update group> such as "
                f"3REDUCE_GRAD0 or 0+3REDUCE_GRAD0"
            )
        return cls(tuple(map(int, match[1].split("+"))), Op(match[2]), int(match[3]))

    def ranks(self, owners: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The participating ranks, ascending, given the ranks of each stage."""
        return tuple(sorted({rank for stage in self.stages for rank in owners[stage]}))
