"""Data dependencies of a schedule (`needs`), and the messages that carry results from rank to rank.

A move of activations begins at its place in the program of its rank and overlaps with compute, on one direction of the
rank's link to its host. Moves in one direction run in the order in which they begin; a reload begins no earlier than
its offload ends.

Where maker and user are on different ranks, a message carries the result: one to each rank, for all its stages that use
the output (kept there for later ones), and one back with the sum of their gradients.

    rank 0  0F0 ──> 1F0 3F0 5F0  rank 1              0B0 <── (5B0 + 3B0 + 1B0)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from .ir import BACKWARD_OPS, MOVE_OPS, Action, Edge, Op, Schedule, ScheduleError
from .messages import Message, MessageKind
from .needs import Needs

_FORWARD_OPS = frozenset({Op.F})
_KIND_OF_OP = {Op.F: MessageKind.ACT, **dict.fromkeys(BACKWARD_OPS, MessageKind.GRAD)}


class Wire(NamedTuple):
    """Outputs of a stage for those of its consumers that share the same ranks, or the sum of their gradients back.

    One message per microbatch, whether it crosses ranks or not.
    """

    kind: MessageKind
    # src, dst: as in its messages, which are named after the first of the consumers
    src: int
    dst: int
    consumers: tuple[int, ...]  # ascending

    @property
    def producer(self) -> int:
        """The stage whose outputs, or whose gradients, it carries."""
        return self.src if self.kind is MessageKind.ACT else self.dst

    @property
    def makers(self) -> tuple[int, ...]:
        """The stages that compute it: one, or several whose gradients are summed."""
        return (self.src,) if self.kind is MessageKind.ACT else self.consumers

    @property
    def users(self) -> tuple[int, ...]:
        return self.consumers if self.kind is MessageKind.ACT else (self.dst,)

    def message(self, index: int) -> Message:
        return Message(self.kind, self.src, self.dst, index)

    @property
    def ops(self) -> frozenset[Op]:
        """Ops that make it and, on the other stage, use it."""
        return _FORWARD_OPS if self.kind is MessageKind.ACT else BACKWARD_OPS


class Delivery(NamedTuple):
    """`message` carries the result of `maker` on rank `sender` to `user` on rank `receiver`."""

    message: Message
    maker: Action
    sender: int
    user: Action
    receiver: int


class Dependencies(Needs):
    """The data dependencies of one schedule; each answer takes O(in-degree) or O(out-degree).

    Attributes:
        wires: activations, and gradients where edges and schedule have them, in the order of the edges.
        moves: ranks of activations that leave them, by (stage, microbatch).
    """

    moves: dict[tuple[int, int], int]

    def __init__(self, schedule: Schedule) -> None:
        moves = find_moves(schedule)
        super().__init__(
            schedule.programs,
            schedule.stage_edges,
            num_slices=schedule.num_slices,
            moves=moves,
            together=schedule.together,
        )
        self._begins_with = {backward: forward for forward, backward in self.together.items()}
        self.wires = tuple(_wires(schedule))
        self._owner = schedule.owner
        self._programs = schedule.programs
        # The wires that bring something to, and take something from, each (forward or backward, stage).
        self._to: defaultdict[tuple[MessageKind, int], list[Wire]] = defaultdict(list)
        self._from: defaultdict[tuple[MessageKind, int], list[Wire]] = defaultdict(list)
        for wire in self.wires:
            for stage in wire.users:
                self._to[wire.kind, stage].append(wire)
            for stage in wire.makers:
                self._from[wire.kind, stage].append(wire)
        self._wire_of = {(w.kind, w.src, w.dst): w for w in self.wires}

    def rank(self, action: Action) -> int:
        return self._owner(action.stage, action.index)

    def wire(self, message: Message) -> Wire:
        return self._wire_of[message[:3]]

    def makers(self, message: Message) -> list[Action]:
        """The actions that contribute to a message of a microbatch, in the order of their rank."""
        return self._makers(self.wire(message), message.index)

    def users(self, message: Message) -> list[Action]:
        return self._users(self.wire(message), message.index)

    def maker(self, message: Message) -> Action:
        """The action after which a message is complete."""
        return self.makers(message)[-1]

    def arrivals(self, action: Action) -> Iterator[Delivery]:
        """Deliveries from other ranks that `action` is the first to use, in the order of `of`; those of a backward that
        begins together with a forward are the forward's."""
        also = self.together.get(action)
        users = () if action in self._begins_with else (action,) if also is None else (action, also)
        for user in users:
            stage, op, index = user
            receiver = self._owner(stage, index)
            for wire in self._to[_KIND_OF_OP[op], stage] if op in _KIND_OF_OP else ():
                sender = self._owner(wire.src, index)
                if sender != receiver and self._users(wire, index)[0] == user:
                    yield Delivery(wire.message(index), self._makers(wire, index)[-1], sender, action, receiver)

    def departures(self, action: Action) -> Iterator[Delivery]:
        """Deliveries to other ranks that `action` completes, in the order of the edges."""
        stage, op, index = action
        sender = self._owner(stage, index)
        for wire in self._from[_KIND_OF_OP[op], stage] if op in _KIND_OF_OP else ():
            receiver = self._owner(wire.dst, index)
            if sender != receiver and self._makers(wire, index)[-1] == action:
                user = self._users(wire, index)[0]
                yield Delivery(wire.message(index), action, sender, self._begins_with.get(user, user), receiver)

    def _makers(self, wire: Wire, index: int) -> list[Action]:
        if wire.kind is MessageKind.ACT:
            return [Action(wire.src, Op.F, index)]
        return self._in_order([self.backward(stage, index) for stage in wire.consumers])

    def _users(self, wire: Wire, index: int) -> list[Action]:
        if wire.kind is MessageKind.GRAD:
            return [self.backward(wire.dst, index)]
        return self._in_order([Action(stage, Op.F, index) for stage in wire.consumers])

    def _in_order(self, actions: list[Action]) -> list[Action]:
        return actions if len(actions) == 1 else sorted(actions, key=lambda action: self._position.get(action, 0))

    @cached_property
    def _position(self) -> dict[Action, int]:
        return {a: i for program in self._programs for i, a in enumerate(program) if a.op in _KIND_OF_OP}


def _wires(schedule: Schedule) -> Iterator[Wire]:
    """Wires in the order of the edges, each at the position of its first consumer."""
    together: dict[tuple[int, tuple[int, ...]], list[Edge]] = {}  # (producer, the consumers' ranks)
    for edge in schedule.stage_edges:
        together.setdefault((edge.src, schedule.owners[edge.dst]), []).append(edge)
    for (src, _), edges in together.items():
        taking = tuple(sorted(edge.dst for edge in edges))
        yield Wire(MessageKind.ACT, src, taking[0], taking)
        giving = tuple(sorted(edge.dst for edge in edges if edge.grad))
        if giving and schedule.has_backward:
            yield Wire(MessageKind.GRAD, giving[0], src, giving)


Places = Mapping[Action, tuple[int, int]]  # action -> (rank, position in its program)


def find_moves(schedule: Schedule) -> dict[tuple[int, int], int]:
    """The rank whose activations are offloaded, by (stage, microbatch), in the order of ranks and programs.

    Raises ScheduleError for an offload without a reload or the reverse, for a move on the wrong rank or in the wrong
    order, and for moves in a program without backward, without a flush or of slices. O(actions).
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
            f"schedule {schedule.name!r} of {schedule.num_slices} slices per microbatch moves activations: expected "
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
    places: dict[Action, tuple[int, int]] = {}
    for rank, program in enumerate(schedule.programs):
        for position, action in enumerate(program):
            known = places.setdefault(action, (rank, position))
            if action.op not in MOVE_OPS:
                continue
            if known != (rank, position):
                raise ScheduleError(
                    f"{action} occurs twice: on rank {known[0]}, position {known[1]}, and on rank {rank}, position "
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
    if first is None or then is None or first < then:  # a missing forward or backward is reported elsewhere
        return
    late = pair[0] if pair[1].op in BACKWARD_OPS else pair[1]
    rank, position = places[late]
    raise ScheduleError(f"{late} on rank {rank}, position {position}, {fault}: expected {pair[0]} before {pair[1]}")
