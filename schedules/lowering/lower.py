"""Lowering: from a compute order to one with communication.

Two passes over the compute order of each rank. The first finds the messages of each directed link, in the order in
which the sender makes them. The second places each send right after the step that makes it, and posts each receive
(without
waiting: a step waits for its inputs) as early as

    at most `Sharing.receives_ahead` receives of a link are posted and not yet consumed,

allows, so that receive buffers do not grow with M; and earlier where ranks would otherwise deadlock over a transport
that blocks a send until it is received (see `progress`). A link is first in, first out: receives are posted in the
order of the sends, and for one that is consumed late, later ones pass only by being posted before them.

    rank 1 of a 1F1B:  1RECV_F0 1RECV_F1 1F0 1RECV_F2 1B0 1SEND_B0 1F1 1RECV_F3 1B1 1SEND_B1 ...

Collectives, such as all-reduces of shared gradients after a stage's last backward, are placed by `collectives`.

A program with updates (U) also has a `GroupStep` after the last backward of each update group, where the losses of the
group arrive and shared gradients leave; the update waits for its inputs from there. Where each rank updates a shard,
the shards leave after the update, and another step waits for those of the other ranks (UNSHARD).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..collectives import place_collectives
from ..dependencies import Dependencies
from ..ir import COMPUTE_OPS, Action, Collective, Op, Schedule
from ..messages import NOTHING_SHARED, STAGE_KINDS, Message, MessageKind, Sharing, Transfer
from ..program import GroupStep, Lowered, RankProgram, Step, Work
from ..progress import post_in_time
from ..versions import Versions, derive_versions


def lower(
    schedule: Schedule, *, sharing: Sharing = NOTHING_SHARED, calls: Sequence[Sequence[int]] | None = None
) -> Lowered:
    """Insert sends and receives. `sharing`: other communication, and how far ahead receives are posted. `calls`: per
    rank, the call in which each action runs, ascending. A receive is then posted no earlier than in the call in which
    its message is sent, since its shapes are not known before. O(actions + messages)."""
    exchange = _Exchange(schedule, sharing, calls)
    programs = tuple(_lower_rank(rank, exchange) for rank in range(schedule.num_ranks))
    return Lowered(schedule=schedule, programs=programs if calls is not None else post_in_time(programs))


class _Exchange:
    def __init__(self, schedule: Schedule, sharing: Sharing, calls: Sequence[Sequence[int]] | None) -> None:
        ranks = range(schedule.num_ranks)
        self.schedule, self.sharing = schedule, sharing
        # Per rank, each step of work with the position of the action that it goes with.
        self.work_at: list[list[tuple[Work, int]]]
        if schedule.is_asynchronous:
            size, versions, partners = schedule.group_size, derive_versions(schedule), map(sharing.part_partners, ranks)
            self.work_at = [
                _with_group_steps(program, size, sharing, versions, is_sharded=bool(others))
                for program, others in zip(schedule.programs, partners, strict=True)
            ]
        else:
            placed = place_collectives(schedule, sharing.collectives)
            self.work_at = list(map(_with_collectives, schedule.programs, placed))
        self.work = [[step for step, _ in work] for work in self.work_at]
        self._updates: list[dict[int, Action]] = [
            {a.index: a for a in reversed(program) if a.op is Op.U} for program in schedule.programs
        ]  # by rank and update group: its first update
        self._last_updates = [{a.index: a for a in program if a.op is Op.U} for program in schedule.programs]
        self.on_link: dict[tuple[int, int], list[Message]] = {}  # (sender, receiver) -> in the order sent
        self.outputs: list[dict[Work, list[tuple[Message, int]]]] = [{} for _ in ranks]
        self.inputs: list[dict[Work, list[Message]]] = [{} for _ in ranks]
        self.finally_needs: list[list[Message]] = [[] for _ in ranks]
        self.shared: list[dict[Message, tuple[Work, ...]]] = [{} for _ in ranks]
        self._find()
        # Per rank, the call of each step of work; and the call in which each message is sent.
        after = schedule.num_batches  # at the end of a program: with the drain
        self.calls = (
            None
            if calls is None
            else [[[*calls[r], after][position] for _, position in self.work_at[r]] for r in ranks]
        )
        self.sent_in: dict[Message, int] = {}
        for rank, own in enumerate(self.calls or ()):
            for step, call in zip(self.work[rank], own, strict=True):
                self.sent_in.update(dict.fromkeys((m for m, _ in self.outputs[rank].get(step, ())), call))

    def sender(self, message: Message) -> int:
        return self.schedule.owner(message.src, message.index) if message.kind in STAGE_KINDS else message.src

    def _add(self, message: Message, made_by: Work, sender: int, consumed_by: Work | None, receiver: int) -> None:
        self.outputs[sender].setdefault(made_by, []).append((message, receiver))
        self.on_link.setdefault((sender, receiver), []).append(message)
        if consumed_by is None:
            self.finally_needs[receiver].append(message)
        else:
            self.inputs[receiver].setdefault(consumed_by, []).append(message)

    def _find(self) -> None:
        needs = Dependencies(self.schedule)
        for rank, work in enumerate(self.work):
            loss_after = _last_forwards(self.schedule, rank) if self.sharing.loss else {}
            for step in work:
                if isinstance(step, GroupStep):
                    self._share_gradients(rank, step)
                    continue
                if isinstance(step, Collective):
                    continue  # no messages: its ranks share a process group
                for message, _, _, user, receiver in needs.departures(step):
                    self._add(message, step, rank, user, receiver)
                    for end, actions in ((rank, needs.makers(message)), (receiver, needs.users(message))):
                        if len(actions) > 1:
                            self.shared[end][message] = tuple(actions)
                if step.op is Op.U and self._last_updates[rank][step.index] == step:
                    for peer in self.sharing.part_partners(rank):
                        message = Message(MessageKind.WEIGHTS, rank, peer, step.index)
                        self._add(message, step, rank, GroupStep(Op.UNSHARD, step.index), peer)
                if step in loss_after:
                    self._share_loss(rank, step, loss_after[step])

    def _share_loss(self, rank: int, made_by: Work, group: int) -> None:
        for receiver in range(self.schedule.num_ranks):
            if receiver == rank:
                continue
            message = Message(MessageKind.LOSS, rank, receiver, group)
            streams = self.schedule.is_asynchronous
            self._add(message, made_by, rank, GroupStep(Op.REDUCE_GRAD, group) if streams else None, receiver)

    def _share_gradients(self, rank: int, step: GroupStep) -> None:
        group = step.index
        if step.op is Op.REDUCE_GRAD:
            for peer in self.sharing.partners(rank):
                wants_now = self.sharing.norm and rank in self.sharing.counts_for(peer)
                consumer: Work = GroupStep(Op.GRAD_NORM, group) if wants_now else self._updates[peer][group]
                self._add(Message(MessageKind.SUM, rank, peer, group), step, rank, consumer, peer)
        elif step.op is Op.UNSHARD:
            return  # it sends nothing
        elif rank > 0:
            self._add(Message(MessageKind.NORM, rank, 0, group), step, rank, step, 0)
        else:
            for peer in range(1, self.schedule.num_ranks):
                message = Message(MessageKind.TOTAL, 0, peer, group)
                self._add(message, step, 0, self._updates[peer][group], peer)


def _with_group_steps(
    program: tuple[Action, ...], size: int, sharing: Sharing, versions: Versions, *, is_sharded: bool
) -> list[tuple[Work, int]]:
    """The work of one rank of an asynchronous schedule, each step with the position of the action that it belongs to.

    REDUCE_GRAD and GRAD_NORM come after the last backward of their group (of `size` microbatches) on the rank, or with
    its update, if the rank has no backward in it. UNSHARD comes before the first action that uses a version which the
    update, or a later one, has made, or at the end. `is_sharded`: whether the rank sends its updated shards.
    """
    last: dict[int, int] = {}  # update group -> position of its last backward
    for position, action in enumerate(program):
        if action.op in COMPUTE_OPS and action.op is not Op.F:
            last[action.index // size] = position
    ops = (Op.REDUCE_GRAD, Op.GRAD_NORM) if sharing.norm else (Op.REDUCE_GRAD,)
    work: list[tuple[Work, int]] = []
    finished: set[int] = set()
    to_unshard = dict.fromkeys(action.index for action in program if action.op is Op.U) if is_sharded else {}
    for position, action in enumerate(program):
        group = action.index if action.op is Op.U else action.index // size
        if action.op is Op.U and group not in finished:
            finished.add(group)
            work += [(GroupStep(op, group), position) for op in ops]
        elif to_unshard and action.op is not Op.U:
            for one in [one for one in to_unshard if one < versions.read_by(action)]:
                del to_unshard[one]
                work.append((GroupStep(Op.UNSHARD, one), position))
        work.append((action, position))
        if last.get(group) == position:
            finished.add(group)
            work += [(GroupStep(op, group), position) for op in ops]
    return [*work, *((GroupStep(Op.UNSHARD, one), len(program)) for one in to_unshard)]


def _with_collectives(program: tuple[Action, ...], placed: Sequence[tuple[int, Collective]]) -> list[tuple[Work, int]]:
    work: list[tuple[Work, int]] = []
    done = 0
    for position, collective in placed:
        work += [(action, at) for at, action in enumerate(program[done:position], start=done)]
        work.append((collective, position))
        done = position
    return work + [(action, at) for at, action in enumerate(program[done:], start=done)]


def _last_forwards(schedule: Schedule, rank: int) -> dict[Action, int]:
    last = schedule.num_stages - 1
    forwards = (a for a in schedule.programs[rank] if a.op is Op.F and a.stage == last)
    by_group = {action.index // schedule.group_size: action for action in forwards}
    return {action: group for group, action in by_group.items()}


def _lower_rank(rank: int, exchange: _Exchange) -> RankProgram:
    work = exchange.work[rank]
    inputs = exchange.inputs[rank]
    outputs = exchange.outputs[rank]
    consumed_at = {m: i for i, step in enumerate(work) for m in inputs.get(step, ())}
    consumed_at.update({m: len(work) for m in exchange.finally_needs[rank]})
    ahead = exchange.sharing.receives_ahead
    by_peer = {
        peer: _Incoming(peer, ms, consumed_at=consumed_at, ahead=ahead, sent_in=exchange.sent_in)
        for (peer, to), ms in exchange.on_link.items()
        if to == rank
    }
    incoming = list(by_peer.values())
    steps: list[Step] = []
    cuts: list[int] = []
    for at, step in enumerate(work):
        call = None if exchange.calls is None else exchange.calls[rank][at]
        while call is not None and len(cuts) <= call:
            cuts.append(len(steps))
        for link in incoming:
            steps += link.post(at, call)
        steps.append(step)
        for message in inputs.get(step, ()):
            by_peer[exchange.sender(message)].outstanding -= 1
        for message, peer in outputs.get(step, ()):
            steps.append(Transfer(message, peer, True))
    for link in incoming:
        steps += link.post(len(work), None)
    return RankProgram(
        rank=rank,
        steps=tuple(steps),
        inputs={step: tuple(messages) for step, messages in inputs.items()},
        proves=_proofs(exchange, rank),
        shared=exchange.shared[rank],
        finally_needs=tuple(exchange.finally_needs[rank]),
        cuts=tuple(cuts),
    )


class _Incoming:
    """The receiving side of one link: messages in the sender's order, and the position at which each is consumed."""

    def __init__(
        self,
        peer: int,
        messages: list[Message],
        *,
        consumed_at: dict[Message, int],
        ahead: int,
        sent_in: dict[Message, int],
    ) -> None:
        self.peer, self._messages, self._ahead, self._sent_in = peer, messages, ahead, sent_in
        self.outstanding = self._next = 0
        # Message j must be posted by the earliest position at which it or a later one is consumed.
        deadline = [consumed_at[message] for message in messages]
        for j in range(len(deadline) - 2, -1, -1):
            deadline[j] = min(deadline[j], deadline[j + 1])
        self._deadline = deadline

    def post(self, at: int, call: int | None) -> list[Transfer]:
        """Receives to post before the step at position `at` of the work: due there, or within the limit, and sent by
        call `call` (None: any)."""
        posted = []
        while self._next < len(self._messages):
            message = self._messages[self._next]
            if self._deadline[self._next] > at and self.outstanding >= self._ahead:
                break
            if call is not None and self._sent_in[message] > call:
                break
            posted.append(Transfer(message, self.peer, False))
            self._next += 1
            self.outstanding += 1
        return posted


def _proofs(exchange: _Exchange, rank: int) -> dict[Message, tuple[Message, ...]]:
    """By message that arrives at `rank`, its own messages that the arrival proves received.

    A send is proved received by the first message that the peer sends back after the step which consumed it.
    """
    proofs: dict[Message, list[Message]] = {}
    for (sender, peer), messages in exchange.on_link.items():
        if sender != rank or (peer, rank) not in exchange.on_link:
            continue
        place = {step: i for i, step in enumerate(exchange.work[peer])}
        consumed_at = {m: place[a] for a, ms in exchange.inputs[peer].items() for m in ms}
        made_at = {m: place[a] for a, ms in exchange.outputs[peer].items() for m, _ in ms}
        answers = exchange.on_link[peer, rank]
        at = 0
        pending = sorted(((consumed_at[m], m) for m in messages if m in consumed_at), key=lambda pair: pair[0])
        for consumed, message in pending:
            while at < len(answers) and made_at[answers[at]] < consumed:
                at += 1
            if at == len(answers):
                break
            proofs.setdefault(answers[at], []).append(message)
    return {answer: tuple(messages) for answer, messages in proofs.items()}
