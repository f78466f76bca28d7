"""Lowering: from a compute order to one with communication.

Two passes over the compute order of each rank. The first finds the messages of each directed link, in
the order in which the sender makes them. The second puts each send right behind the action that makes it,
and each receive (the posting of it, not the waiting: an action waits for what it needs) as early as

    at most `receives_ahead` receives of a link are posted and not yet consumed,

allows, so that receive buffers do not grow with M. A link is first in, first out: receives are posted in the
order of the sends, and one that is consumed late lets later ones pass only by being posted before them.

    rank 1 of a 1F1B:  1RECV_F0 1RECV_F1 1F0 1RECV_F2 1B0 1SEND_B0 1F1 1RECV_F3 1B1 1SEND_B1 ...
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from .ir import BACKWARD_OPS, Action, Edge, Op, Schedule


class MessageKind(StrEnum):
    """What a message carries."""

    ACT = "act"  # outputs of a stage, to a consumer stage
    GRAD = "grad"  # gradients of those outputs, back to the producer
    LOSS = "loss"  # the losses of one batch, from the last stage to a rank


class Message(NamedTuple):
    """`src` and `dst` are stages (for LOSS, `dst` is a rank and `index` the batch); `index`: microbatch."""

    kind: MessageKind
    src: int
    dst: int
    index: int  # type: ignore[assignment]  # hides tuple.index

    def __str__(self) -> str:
        if self.kind is MessageKind.LOSS:
            return f"loss of batch {self.index} from stage {self.src} to rank {self.dst}"
        name = "activations" if self.kind is MessageKind.ACT else "gradients"
        return f"{name} of microbatch {self.index} from stage {self.src} to stage {self.dst}"


def message_for(action: Action, need: Action) -> Message:
    """What brings the result of `need` to `action` when they stand on different ranks."""
    kind = MessageKind.ACT if need.op is Op.F else MessageKind.GRAD
    return Message(kind, need.stage, action.stage, action.index)


class Transfer(NamedTuple):
    """A send, or the posting of a receive, with the rank on the other side."""

    message: Message
    peer: int
    is_send: bool

    def __str__(self) -> str:
        kind, src, dst, index = self.message
        if kind is MessageKind.LOSS:
            return f"{'SEND' if self.is_send else 'RECV'}_LOSS{index}"
        letter = "F" if kind is MessageKind.ACT else "B"
        return f"{src if self.is_send else dst}{'SEND' if self.is_send else 'RECV'}_{letter}{index}"


Step = Action | Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """What one rank does, communication included.

    Arguments:
        rank: which.
        steps: actions, sends and postings in order.
        inputs: by action, the messages that must have arrived before it starts.
        proves: by received message, the sends of this rank that its arrival proves received.
        peak_receives: the most posted and unconsumed receives at once, over all links of the rank.
        finally_needs: messages consumed at the very end (losses).
    """

    rank: int
    steps: tuple[Step, ...]
    inputs: dict[Action, tuple[Message, ...]]
    proves: dict[Message, tuple[Message, ...]]
    peak_receives: int
    finally_needs: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A schedule with its communication, a program a rank."""

    schedule: Schedule
    programs: tuple[RankProgram, ...]


def lower(schedule: Schedule, *, share_loss: bool = False, receives_ahead: int = 2) -> Lowered:
    """Insert sends and receives.

    Arguments:
        receives_ahead: most receives of a link that are posted and not yet consumed, unless the order forces more.
        share_loss: also send the losses of each batch from the last stage to every rank.

    O(actions + messages).
    """
    links = _find_links(schedule, share_loss=share_loss)
    return Lowered(
        schedule=schedule,
        programs=tuple(_lower_rank(schedule, rank, links, receives_ahead) for rank in range(schedule.num_ranks)),
    )


class _Links:
    """The messages of all links, and who makes and consumes each."""

    def __init__(self, num_ranks: int) -> None:
        self.on_link: dict[tuple[int, int], list[Message]] = {}  # (sender, receiver) -> in the order sent
        self.outputs: list[dict[Action, list[tuple[Message, int]]]] = [{} for _ in range(num_ranks)]
        self.inputs: list[dict[Action, list[Message]]] = [{} for _ in range(num_ranks)]
        self.finally_needs: list[list[Message]] = [[] for _ in range(num_ranks)]


def _find_links(schedule: Schedule, *, share_loss: bool) -> _Links:
    links = _Links(schedule.num_ranks)
    out_edges: list[list[Edge]] = [[] for _ in range(schedule.num_stages)]
    in_edges: list[list[Edge]] = [[] for _ in range(schedule.num_stages)]
    for edge in schedule.stage_edges:
        out_edges[edge.src].append(edge)
        in_edges[edge.dst].append(edge)
    split = {(a.stage, a.index) for program in schedule.programs for a in program if a.op is Op.I}
    owner = schedule.owner
    last = schedule.num_stages - 1

    def add(message: Message, made_by: Action, sender: int, consumed_by: Action, receiver: int) -> None:
        links.outputs[sender].setdefault(made_by, []).append((message, receiver))
        links.on_link.setdefault((sender, receiver), []).append(message)
        links.inputs[receiver].setdefault(consumed_by, []).append(message)

    for rank, program in enumerate(schedule.programs):
        final_forward = _last_forwards(program, last, schedule.num_microbatches) if share_loss else {}
        for action in program:
            stage, op, index = action
            if op is Op.F:
                for edge in out_edges[stage]:
                    receiver = owner(edge.dst, index)
                    if receiver != rank:
                        message = Message(MessageKind.ACT, stage, edge.dst, index)
                        add(message, action, rank, Action(edge.dst, Op.F, index), receiver)
                batch = final_forward.get(action)
                if batch is not None:
                    _share_loss(links, schedule, action, rank, batch)
            elif op in BACKWARD_OPS:
                for edge in in_edges[stage]:
                    if not edge.grad:
                        continue
                    receiver = owner(edge.src, index)
                    if receiver != rank:
                        message = Message(MessageKind.GRAD, stage, edge.src, index)
                        consumer = Action(edge.src, Op.I if (edge.src, index) in split else Op.B, index)
                        add(message, action, rank, consumer, receiver)
    return links


def _last_forwards(program: tuple[Action, ...], last_stage: int, num_microbatches: int) -> dict[Action, int]:
    """The last forward of the last stage in each batch on this rank -> batch."""
    found = {}
    for action in program:
        if action.op is Op.F and action.stage == last_stage:
            found[action.index // num_microbatches] = action
    return {action: batch for batch, action in found.items()}


def _share_loss(links: _Links, schedule: Schedule, action: Action, rank: int, batch: int) -> None:
    for receiver in range(schedule.num_ranks):
        if receiver != rank:
            message = Message(MessageKind.LOSS, action.stage, receiver, batch)
            links.outputs[rank].setdefault(action, []).append((message, receiver))
            links.on_link.setdefault((rank, receiver), []).append(message)
            links.finally_needs[receiver].append(message)


def _lower_rank(schedule: Schedule, rank: int, links: _Links, receives_ahead: int) -> RankProgram:
    program = schedule.programs[rank]
    inputs = links.inputs[rank]
    outputs = links.outputs[rank]
    consumed_at = {m: i for i, action in enumerate(program) for m in inputs.get(action, ())}
    consumed_at.update({m: len(program) for m in links.finally_needs[rank]})
    incoming = [
        _Incoming(peer, ms, consumed_at, receives_ahead) for (peer, to), ms in links.on_link.items() if to == rank
    ]
    by_peer = {link.peer: link for link in incoming}
    steps: list[Step] = []
    sent: dict[int, list[tuple[int, Message]]] = {}  # peer -> (position of the making action, message)
    peak = 0
    for at, action in enumerate(program):
        for link in incoming:
            steps += link.post(at)
        peak = max(peak, sum(link.outstanding for link in incoming))
        steps.append(action)
        for message in inputs.get(action, ()):
            by_peer[schedule.owner(message.src, message.index)].outstanding -= 1
        for message, peer in outputs.get(action, ()):
            steps.append(Transfer(message, peer, True))
            sent.setdefault(peer, []).append((at, message))
    for link in incoming:
        steps += link.post(len(program))
    return RankProgram(
        rank=rank,
        steps=tuple(steps),
        inputs={action: tuple(messages) for action, messages in inputs.items()},
        proves=_proofs(schedule, links, rank),
        peak_receives=peak,
        finally_needs=tuple(links.finally_needs[rank]),
    )


class _Incoming:
    """The posting side of one link: messages in the sender's order, and where each is consumed."""

    def __init__(self, peer: int, messages: list[Message], consumed_at: dict[Message, int], ahead: int) -> None:
        self.peer = peer
        self.outstanding = 0
        self._messages = messages
        self._ahead = ahead
        self._next = 0
        # The earliest place at which message j or a later one is consumed: it must be posted by then.
        deadline = [consumed_at[m] for m in messages]
        for j in range(len(deadline) - 2, -1, -1):
            deadline[j] = min(deadline[j], deadline[j + 1])
        self._deadline = deadline

    def post(self, at: int) -> list[Transfer]:
        """The receives to post before position `at`."""
        posted = []
        while self._next < len(self._messages) and (self.outstanding < self._ahead or self._deadline[self._next] <= at):
            posted.append(Transfer(self._messages[self._next], self.peer, False))
            self._next += 1
            self.outstanding += 1
        return posted


def _proofs(schedule: Schedule, links: _Links, rank: int) -> dict[Message, tuple[Message, ...]]:
    """What each arrival at `rank` proves: the peer sent it after consuming these messages of ours.

    A send is proved received by the first message that the peer sends back after the action which consumed it.
    """
    proofs: dict[Message, list[Message]] = {}
    for (sender, peer), messages in links.on_link.items():
        if sender != rank or (peer, rank) not in links.on_link:
            continue
        place = {action: i for i, action in enumerate(schedule.programs[peer])}
        consumed_at = {m: place[a] for a, ms in links.inputs[peer].items() for m in ms}
        made_at = {m: place[a] for a, ms in links.outputs[peer].items() for m, _ in ms}
        answers = links.on_link[peer, rank]
        at = 0
        pending = sorted(((consumed_at[m], m) for m in messages if m in consumed_at), key=lambda pair: pair[0])
        for consumed, message in pending:
            while at < len(answers) and made_at[answers[at]] < consumed:
                at += 1
            if at == len(answers):
                break
            proofs.setdefault(answers[at], []).append(message)
    return {answer: tuple(messages) for answer, messages in proofs.items()}
