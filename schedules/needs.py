"""Data dependencies: which actions an action needs, and which messages bring their results. Nobody else derives them.

F(s, k)   the output of every producer of s            (and the weights, see versions)
B(s, k)   the gradient from every consumer of s, and its own F(s, k)
I(s, k)   the same as B
W(s, k)   its own I(s, k)

Where maker and user stand on different ranks, a message brings it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .ir import BACKWARD_OPS, Action, Op, Schedule
from .messages import Message, MessageKind

_FORWARD_OPS = frozenset({Op.F})


class Wire(NamedTuple):
    """Results of stage `src` for stage `dst`, one per microbatch, whether they cross ranks or not."""

    kind: MessageKind
    src: int
    dst: int

    @property
    def ops(self) -> frozenset[Op]:
        """Ops that make it and, on the other stage, use it."""
        return _FORWARD_OPS if self.kind is MessageKind.ACT else BACKWARD_OPS


class Delivery(NamedTuple):
    """`message` brings what `maker` made on rank `sender` to `user` on rank `receiver`."""

    message: Message
    maker: Action
    sender: int
    user: Action
    receiver: int


class Needs:
    """The data dependencies of one schedule; each answer takes O(in-degree) or O(out-degree).

    A stage may split the backward of some microbatches and not of others, so which action makes a gradient
    (B or I) is looked up by microbatch.

    Attributes:
        wires: activations of each edge, and gradients where the edge and the schedule have them, in the order of the
            edges.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.wires: list[Wire] = []
        self._owner = schedule.owner
        stages = range(schedule.num_stages)
        # By stage: those before and after it over activations, and those to and from which gradients travel.
        self._producers: list[list[int]] = [[] for _ in stages]
        self._consumers: list[list[int]] = [[] for _ in stages]
        self._grads_to: list[list[int]] = [[] for _ in stages]
        self._grads_from: list[list[int]] = [[] for _ in stages]
        has_backward = schedule.has_backward
        for src, dst, grad in schedule.stage_edges:
            self.wires.append(Wire(MessageKind.ACT, src, dst))
            self._producers[dst].append(src)
            self._consumers[src].append(dst)
            if grad and has_backward:
                self.wires.append(Wire(MessageKind.GRAD, dst, src))
                self._grads_to[dst].append(src)
                self._grads_from[src].append(dst)
        self._split = {(a.stage, a.index) for program in schedule.programs for a in program if a.op is Op.I}

    def is_split(self, stage: int, index: int) -> bool:
        """Whether I and W stand in place of B."""
        return (stage, index) in self._split

    def backward(self, stage: int, index: int) -> Action:
        """The action that makes the gradient which `stage` sends on."""
        return Action(stage, Op.I if (stage, index) in self._split else Op.B, index)

    def of(self, action: Action) -> list[Action]:
        """The actions whose results `action` needs, in a fixed order."""
        stage, op, index = action
        if op is Op.F:
            return [Action(p, Op.F, index) for p in self._producers[stage]]
        if op in BACKWARD_OPS:
            return [self.backward(c, index) for c in self._grads_from[stage]] + [Action(stage, Op.F, index)]
        if op is Op.W:
            return [Action(stage, Op.I, index)]
        return []

    def maker(self, message: Message) -> Action:
        """The action that makes a message of activations or gradients."""
        if message.kind is MessageKind.ACT:
            return Action(message.src, Op.F, message.index)
        return self.backward(message.src, message.index)

    def arrivals(self, action: Action) -> Iterator[Delivery]:
        """Deliveries from other ranks to `action`, in the order of `of`."""
        stage, op, index = action
        if op is Op.F:
            kind, makers = MessageKind.ACT, self._producers[stage]
        elif op in BACKWARD_OPS:
            kind, makers = MessageKind.GRAD, self._grads_from[stage]
        else:
            return
        receiver = self._owner(stage, index)
        for src in makers:
            sender = self._owner(src, index)
            if sender != receiver:
                message = Message(kind, src, stage, index)
                yield Delivery(message, self.maker(message), sender, action, receiver)

    def departures(self, action: Action) -> Iterator[Delivery]:
        """Deliveries from `action` to other ranks, in the order of the edges."""
        stage, op, index = action
        if op is Op.F:
            kind, users = MessageKind.ACT, self._consumers[stage]
        elif op in BACKWARD_OPS:
            kind, users = MessageKind.GRAD, self._grads_to[stage]
        else:
            return
        sender = self._owner(stage, index)
        for dst in users:
            receiver = self._owner(dst, index)
            if sender != receiver:
                user = Action(dst, Op.F, index) if kind is MessageKind.ACT else self.backward(dst, index)
                yield Delivery(Message(kind, stage, dst, index), action, sender, user, receiver)
