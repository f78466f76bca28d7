"""Moves: activations that leave their rank for its host while they wait for their backward. Nobody else says which.

    F3 . . OFFLOAD3 . . . . . RELOAD3 . B3

A move stands in its rank's program where it is begun. It goes on beside compute, over the rank's link to its host, one
direction each. Moves of one direction go in the order in which they are begun, and a way back begins no earlier than
the way out is through. The backward waits for its activations.
"""

from __future__ import annotations

from collections.abc import Mapping

from .ir import BACKWARD_OPS, MOVE_OPS, Action, Op, Schedule, ScheduleError

Places = Mapping[Action, tuple[int, int]]  # action -> (rank, position in its program)


def find_moves(schedule: Schedule) -> dict[tuple[int, int], int]:
    """The rank whose activations leave it, by (stage, microbatch), in the order of ranks and programs.

    Raises ScheduleError for a move that lacks its other half, that stands on the wrong rank or side of what it needs,
    and for moves in a program without backward, without a flush or of slices. O(actions).
    """
    if not schedule.moves_activations:
        return {}
    if not schedule.has_epilogue:
        kind = "whose batches overlap" if schedule.has_backward else "without a backward"
        raise ScheduleError(
            f"schedule {schedule.name!r}, {kind}, moves activations: expected OFFLOAD and RELOAD in flush schedules of "
            f"one batch alone"
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
        if action.op is Op.OFFLOAD:
            _check_order(action, places)
            moves[action.stage, action.index] = rank
    return moves


def _places(schedule: Schedule) -> dict[Action, tuple[int, int]]:
    """Each action with its rank and position; a move that stands twice is refused."""
    places: dict[Action, tuple[int, int]] = {}
    for rank, program in enumerate(schedule.programs):
        for position, action in enumerate(program):
            known = places.setdefault(action, (rank, position))
            if action.op not in MOVE_OPS:
                continue
            if known != (rank, position):
                raise ScheduleError(
                    f"{action} stands twice: on rank {known[0]}, position {known[1]}, and on rank {rank}, position "
                    f"{position}; expected each move once"
                )
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


def _check_half(action: Action, places: Places) -> None:
    is_out = action.op is Op.OFFLOAD
    other = action._replace(op=Op.RELOAD if is_out else Op.OFFLOAD)
    if other not in places:
        rank, position = places[action]
        what = "never comes back" if is_out else "brings back what never left"
        raise ScheduleError(f"{action} on rank {rank}, position {position}, {what}: expected {other} as well")


def _check_order(out: Action, places: Places) -> None:
    reload, forward = out._replace(op=Op.RELOAD), out._replace(op=Op.F)
    input_grad = out._replace(op=Op.I)
    backward = input_grad if input_grad in places else out._replace(op=Op.B)
    _check_before(places, (forward, out), "leaves before it is made")
    _check_before(places, (out, reload), "comes back before it has left")
    _check_before(places, (reload, backward), f"comes too late for {backward}, which needs it while it is away")


def _check_before(places: Places, pair: tuple[Action, Action], fault: str) -> None:
    first, then = (places.get(action) for action in pair)
    if first is None or then is None or first < then:  # where a forward or backward lacks, others say so
        return
    late = pair[0] if pair[1].op in BACKWARD_OPS else pair[1]
    rank, position = places[late]
    raise ScheduleError(f"{late} on rank {rank}, position {position}, {fault}: expected {pair[0]} before {pair[1]}")
