"""Waits of actions for other ranks, and causes of idle time: each gap of a timeline is divided among its causes.

    rank 0 |   0F3   |                     made and arrived are those of the latest input
    rank 1 | 1F2 |....|~~~~|????| 1F3 |    late peer until `made`, transfer until it arrived, then unexplained

Simulated links that block hold a rank until its own message has left: also transfer. A rank that waits for its batch
waits for data before everything else; before the step so does a rank that reads none, until the first rank acts.
Reloaded activations are made when both ranks have begun the reload, and arrive when it ends. The gap before an
optimizer step is drain while another rank still computes, update after that.
"""

from __future__ import annotations

from ..dependencies import Delivery, Dependencies
from ..ir import Action, Op
from ..messages import Message
from .timeline import Idle, RankTrace, Span, Timeline

Waited = tuple[Delivery, float | None, Span[Message] | None]


def waits(timeline: Timeline, needs: Dependencies | None = None) -> dict[Action, list[Waited]]:
    """Messages that each action waited for from other ranks, in the order of ranks and programs.

    Each delivery has the end of its maker, None if a window of a stream does not contain it, and its span on the comm
    lane, None if it took no time or its arrival was not seen.
    """
    needs = Dependencies(timeline.schedule) if needs is None else needs
    made_at = {what: end for rank in timeline.ranks for what, _, end in rank.compute}
    ways = {span.what: span for rank in timeline.ranks for span in rank.comm}
    return {
        what: [(each, made_at.get(each.maker), ways.get(each.message)) for each in needs.arrivals(what)]
        for rank in timeline.ranks
        for what, _, _ in rank.compute
    }


def find_gaps(timeline: Timeline) -> tuple[dict[Action, Idle], ...]:
    """Per rank, the gap before each action that has one, simulated or measured."""
    needs, is_flush = Dependencies(timeline.schedule), timeline.schedule.has_epilogue
    waited = waits(timeline, needs)
    moves = {span.what: span for rank in timeline.ranks for span in rank.moves}
    sent_until = {} if timeline.measured else {what: end for rank in timeline.ranks for what, _, end in rank.comm}
    computed = (span.end for rank in timeline.ranks for span in rank.compute if span.what.op is not Op.U)
    last = max(computed, default=0.0)

    def before_update(previous: float, start: float) -> Idle:
        """In a flush schedule the global norm waits for ranks that still compute."""
        drain = max(0.0, min(last, start) - previous) if is_flush else 0.0
        return Idle(drain=drain, update=start - previous - drain)

    def before_compute(action: Action, before: Action, previous: float, start: float) -> Idle:
        """The gap from `previous`, the end of `before` on the rank, to `start`, when `action` begins [s]."""
        made = arrival = previous
        for _, end, way in waited[action]:
            # A window of a stream lacks the makers of its first messages, but has their spans.
            sent, here = (previous, previous) if way is None else (way.start, way.end)
            made, arrival = max(made, sent if end is None else end), max(arrival, here)
        for move in needs.of(action) if moves else ():  # reloaded activations
            if move in moves:
                made, arrival = max(made, moves[move].start), max(arrival, moves[move].end)
        for delivery in needs.departures(before):
            arrival = max(arrival, sent_until.get(delivery.message, previous))
        made, arrival = min(made, start), min(max(arrival, made), start)
        return Idle(late_peer=made - previous, transfer=arrival - made, unexplained=start - arrival)

    begun = [rank.data[0][0] for rank in timeline.ranks if rank.compute and rank.data]
    data_since = min([timeline.first_action, *begun])  # a gather of weights before that is a part of the warm-up

    def gaps_of(rank: RankTrace) -> dict[Action, Idle]:
        gaps: dict[Action, Idle] = {}
        for_data = rank.data or ((data_since, timeline.first_action),)
        previous = timeline.start
        for at, (action, start, end) in enumerate(rank.compute):
            if start > previous:
                data = sum(max(0.0, min(to, start) - max(since, previous)) for since, to in for_data)
                previous += data
                if at == 0:
                    gap = Idle(warm_up=start - previous)
                elif action.op is Op.U:
                    gap = before_update(previous, start)
                else:
                    gap = before_compute(action, rank.compute[at - 1].what, previous, start)
                gaps[action] = gap._replace(data=data)
            previous = end
        return gaps

    return tuple(map(gaps_of, timeline.ranks))


def attribute_idle(timeline: Timeline) -> tuple[Idle, ...]:
    """The idle seconds of each rank by cause; they add up to makespan - busy (0 for a missing rank).

    Imbalance is the part of waiting for late peers that no order could avoid, since another rank has more work.
    """
    largest = max((rank.busy for rank in timeline.ranks), default=0.0)
    return tuple(
        Idle()
        if number in timeline.missing
        else _sum_up(timeline, rank, list(gaps.values()), surplus=largest - rank.busy)
        for number, (rank, gaps) in enumerate(zip(timeline.ranks, find_gaps(timeline), strict=True))
    )


def _sum_up(timeline: Timeline, rank: RankTrace, gaps: list[Idle], *, surplus: float) -> Idle:
    if not rank.compute:
        return Idle(drain=timeline.makespan)
    late = sum(gap.late_peer for gap in gaps)
    imbalance = min(late, max(surplus, 0.0))
    updates = sum(end - start for what, start, end in rank.compute if what.op is Op.U)
    return Idle(
        data=sum(gap.data for gap in gaps),
        warm_up=sum(gap.warm_up for gap in gaps),
        drain=timeline.end - rank.compute[-1].end + sum(gap.drain for gap in gaps),
        late_peer=late - imbalance,
        transfer=sum(gap.transfer for gap in gaps),
        imbalance=imbalance,
        update=updates + sum(gap.update for gap in gaps),
        unexplained=sum(gap.unexplained for gap in gaps),
    )
