"""Moves: activations that leave their rank while they wait for their backward. Nobody else says what goes where.

    owner     F3 . . OFFLOAD3 . . . . . RELOAD3 . B3        to the rank's host and back
    owner     F3 . . LEND3    . . . . . RELOAD3 . B3        to a partner rank and back
    partner   . . HOLD3       . . . . . RETURN3 . .

A move stands in its rank's program where it is begun. It goes on beside compute: over the rank's link to its host, one
direction each, or over the link to the partner, once both ranks have begun it. Moves of one link go in the order in
which they are begun, and a way back begins no earlier than the way out is through. What waits for them: the backward,
for its activations; the partner's RETURN, for what it is to send; and HOLD, for the forward, which says how much comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .ir import BACKWARD_OPS, MOVE_OPS, Action, Op, Schedule, ScheduleError


class Move(NamedTuple):
    """The way out and back of the activations of one stage and microbatch; partner: None where it is the host."""

    stage: int
    index: int  # type: ignore[assignment]  # hides tuple.index
    owner: int
    partner: int | None

    @property
    def out(self) -> Action:
        """Where the owner begins the way out."""
        return Action(self.stage, Op.OFFLOAD if self.partner is None else Op.LEND, self.index)

    @property
    def reload(self) -> Action:
        """Where the owner begins the way back."""
        return Action(self.stage, Op.RELOAD, self.index)

    @property
    def hold(self) -> Action:
        """Where the partner begins the way out."""
        return Action(self.stage, Op.HOLD, self.index)

    @property
    def returning(self) -> Action:
        """Where the partner begins the way back."""
        return Action(self.stage, Op.RETURN, self.index)


Places = Mapping[Action, tuple[int, int]]  # action -> (rank, position in its program)


def find_moves(schedule: Schedule) -> dict[tuple[int, int], Move]:
    """By (stage, microbatch), in the order of ranks and programs.

    Raises ScheduleError for a move that lacks its other half, that stands on the wrong rank or side of what it needs,
    and for moves in a program without backward, without a flush or of slices. O(actions).
    """
    if not schedule.moves_activations:
        return {}
    if not schedule.has_epilogue:
        kind = "whose batches overlap" if schedule.has_backward else "without a backward"
        raise ScheduleError(
            f"schedule {schedule.name!r}, {kind}, moves activations: expected OFFLOAD, LEND, RELOAD, HOLD and RETURN "
            f"in flush schedules of one batch alone"
        )
    if schedule.num_slices > 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} of {schedule.num_slices} slices a microbatch moves activations: expected "
            f"whole microbatches, since later slices need the keys and values of those before them"
        )
    places = _places(schedule)
    moves = {}
    for action, (rank, _) in places.items():
        if action.op in MOVE_OPS:
            _check_half(action, places)
        if action.op is Op.OFFLOAD or action.op is Op.LEND:
            partner = None if action.op is Op.OFFLOAD else places[action._replace(op=Op.HOLD)][0]
            move = Move(action.stage, action.index, rank, partner)
            _check_order(move, places)
            moves[action.stage, action.index] = move
    return moves


def _places(schedule: Schedule) -> dict[Action, tuple[int, int]]:
    """Each action with its rank and position; a move that stands twice is refused."""
    places: dict[Action, tuple[int, int]] = {}
    for rank, program in enumerate(schedule.programs):
        for position, action in enumerate(program):
            known = places.setdefault(action, (rank, position))
            if known != (rank, position) and action.op in MOVE_OPS:
                word = "is held twice" if action.op is Op.HOLD else "stands twice"
                raise ScheduleError(
                    f"{action} {word}: on rank {known[0]}, position {known[1]}, and on rank {rank}, position "
                    f"{position}; expected each move once"
                )
            if action.op not in MOVE_OPS or action.op is Op.HOLD or action.op is Op.RETURN:
                continue
            if not 0 <= action.stage < schedule.num_stages:
                raise ScheduleError(
                    f"{action} on rank {rank}, position {position}: expected a stage below {schedule.num_stages}"
                )
            if schedule.owner(action.stage, action.index) != rank:
                raise ScheduleError(
                    f"{action} on rank {rank}, position {position}: microbatch {action.index} of stage {action.stage} "
                    f"belongs to rank {schedule.owner(action.stage, action.index)}"
                )
    return places


# The other half of each move: one of these must stand there, too.
_HALVES: Mapping[Op, tuple[tuple[Op, ...], str]] = {
    Op.OFFLOAD: ((Op.RELOAD,), "never comes back"),
    Op.LEND: ((Op.HOLD,), "is held by no rank"),
    Op.RELOAD: ((Op.OFFLOAD, Op.LEND), "brings back what never left"),
    Op.HOLD: ((Op.LEND,), "holds what nobody lends"),
    Op.RETURN: ((Op.HOLD,), "gives back what nobody holds"),
}


def _check_half(action: Action, places: Places) -> None:
    ops, what = _HALVES[action.op]
    if not any(action._replace(op=op) in places for op in ops):
        rank, position = places[action]
        wanted = " or ".join(str(action._replace(op=op)) for op in ops)
        raise ScheduleError(f"{action} on rank {rank}, position {position}, {what}: expected {wanted} as well")


def _check_order(move: Move, places: Places) -> None:
    stage, index, owner, partner = move
    if partner is None:
        if Action(stage, Op.LEND, index) in places:
            raise ScheduleError(f"microbatch {index} of stage {stage} leaves twice: expected OFFLOAD or LEND, not both")
    else:
        if partner == owner:
            raise ScheduleError(
                f"{move.out} lends to rank {owner} itself, which holds it ({move.hold}): expected another rank"
            )
        if move.returning not in places:
            raise ScheduleError(
                f"{move.hold} on rank {partner} is never returned: expected {move.returning} on rank {partner}"
            )
        if places[move.returning][0] != partner:
            raise ScheduleError(
                f"{move.returning} on rank {places[move.returning][0]}: expected it on rank {partner}, which holds it"
            )
        _check_before(places, (move.hold, move.returning), "gives back what has not come")
        if move.reload not in places:
            raise ScheduleError(f"{move.out} on rank {owner} never comes back: expected {move.reload} as well")
    input_grad = Action(stage, Op.I, index)
    backward = input_grad if input_grad in places else Action(stage, Op.B, index)
    _check_before(places, (Action(stage, Op.F, index), move.out), "leaves before it is made")
    _check_before(places, (move.out, move.reload), "comes back before it has left")
    _check_before(places, (move.reload, backward), f"comes too late for {backward}, which needs it while it is away")


def _check_before(places: Places, pair: tuple[Action, Action], fault: str) -> None:
    first, then = (places.get(action) for action in pair)
    if first is None or then is None or first < then:  # where a forward or backward lacks, others say so
        return
    late = pair[0] if pair[1].op in BACKWARD_OPS else pair[1]
    rank, position = places[late]
    raise ScheduleError(f"{late} on rank {rank}, position {position}, {fault}: expected {pair[0]} before {pair[1]}")
