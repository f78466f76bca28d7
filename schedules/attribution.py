"""Why a rank was idle: each gap of a timeline is put down to its causes."""

from __future__ import annotations

from .ir import Action, Op
from .lower import Message, MessageKind
from .needs import Needs
from .timeline import Idle, RankTrace, Timeline


def attribute_idle(timeline: Timeline) -> tuple[Idle, ...]:
    """The idle seconds of each rank by cause; works alike on simulated and measured timelines.

    A gap before an action is split at two moments: the latest production of an input on another rank
    (before it: late peer), and that input's arrival (before it: transfer; behind it: unexplained).
    """
    made_at = {s.what: s.end for rank in timeline.ranks for s in rank.compute}
    needs = Needs(timeline.schedule)
    largest = max((rank.busy for rank in timeline.ranks), default=0.0)
    return tuple(_attribute(timeline, rank, made_at, needs, largest - rank.busy) for rank in timeline.ranks)


def _attribute(
    timeline: Timeline, rank: RankTrace, made_at: dict[Action | Message, float], needs: Needs, surplus: float
) -> Idle:
    if not rank.compute:
        return Idle(0.0, timeline.makespan, 0.0, 0.0, 0.0, 0.0, 0.0)
    arrived = {message: end for message, _, end in rank.comm}
    own = {span.what for span in rank.compute}
    late = transfer = unexplained = update = 0.0
    previous = rank.compute[0].start
    for action, start, end in rank.compute:
        assert isinstance(action, Action)
        if start > previous:
            made = arrival = previous
            for need in needs.of(action):
                if need in own:
                    continue
                ready = made_at.get(need, previous)
                made = max(made, ready)
                arrival = max(arrival, arrived.get(_message(need, action), ready))
            made, arrival = min(made, start), min(max(arrival, made), start)
            late += made - previous
            transfer += arrival - made
            unexplained += start - arrival
        if action.op is Op.U:
            update += end - start
        previous = end
    imbalance = min(late, max(surplus, 0.0))
    return Idle(
        warm_up=rank.compute[0].start - timeline.start,
        drain=timeline.end - rank.compute[-1].end,
        late_peer=late - imbalance,
        transfer=transfer,
        imbalance=imbalance,
        update=update,
        unexplained=unexplained,
    )


def _message(made_by: Action, consumer: Action) -> Message:
    kind = MessageKind.ACT if made_by.op is Op.F else MessageKind.GRAD
    return Message(kind, made_by.stage, consumer.stage, consumer.index)
