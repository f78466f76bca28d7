"""Timelines: the times of everything that happened, one record for simulated and measured runs.

    rank 0 |1F0|1F1|....|1B0|      compute lane: spans of F B I W U
           |  >>>>                 comm lane: spans of messages, from ready at the sender to arrived here
           |              ====     collectives: all-reduces of gradients, from when this rank began them to their end
           |      <<<<             moves: activations offloaded or reloaded, from begin to end
           |   ==       ==         exchanges: all-to-alls and gathers within F and B, from begin to end

All times are in seconds from one origin that the ranks share.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from ..ir import COMPUTE_OPS, Action, Collective, Op, Schedule
from ..liveness import peak_activations
from ..messages import Message, MessageKind
from ..versions import derive_versions
from ..wording import duration

_JSON_VERSION = 1


What = TypeVar("What", Action, Message, Collective)
Of = TypeVar("Of")


class Span(NamedTuple, Generic[Of]):
    """One action (compute), message or collective (communication), or cause of idle time, from `start` to `end` [s]."""

    what: Of
    start: float
    end: float


class ExpertRows(NamedTuple):
    """Rows of tokens that divided experts computed in an action, all its layers together."""

    own: int  # on this rank
    busiest: int  # in each layer on the member of its group with the most
    mean: float  # of the members

    def __str__(self) -> str:
        return f"{self.own:,} rows, the busiest member {self.busiest / (self.mean or 1):.2f} times the mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One rank: spans in ascending order of start; compute spans do not overlap.

    comm holds the messages that this rank received, moves the OFFLOAD and RELOAD of its program, exchanges what its
    actions sent within the groups of their stages; measured runs alone have data, the waits for a batch, and rows, of
    actions with experts.
    """

    compute: tuple[Span[Action], ...]
    comm: tuple[Span[Message], ...] = ()
    collectives: tuple[Span[Collective], ...] = ()
    moves: tuple[Span[Action], ...] = ()
    data: tuple[tuple[float, float], ...] = ()
    exchanges: tuple[Span[Collective], ...] = ()
    rows: tuple[tuple[Action, ExpertRows], ...] = ()

    @property
    def busy(self) -> float:
        """Seconds of F, B, I and W (an update is not pipeline work)."""
        return sum(span.end - span.start for span in self.compute if span.what.op in COMPUTE_OPS)

    @property
    def transfers(self) -> tuple[Span[Collective] | Span[Action], ...]:
        """Collectives, those within actions, then moves."""
        return (*self.collectives, *self.exchanges, *self.moves)

    @property
    def actions(self) -> tuple[Action, ...]:
        """Actions of the compute lane in the order in which the rank ran them."""
        return tuple(span.what for span in self.compute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A run of `schedule`, simulated or measured.

    Arguments:
        schedule: that ran.
        ranks: [P] traces.
        measured: False for a simulation.
        clock_error: [P] most that a rank's times may be wrong relative to rank 0's [s]; empty: one clock stamped all.
        around: seconds of the step outside of the ranks' lanes, before the first span and after the last.
        missing: ranks without a record; their traces are empty, and figures ignore them.

    Raises ValueError for invalid errors or seconds around the step, and for a missing rank that has a trace.
    """

    schedule: Schedule
    ranks: tuple[RankTrace, ...]
    measured: bool = False
    clock_error: tuple[float, ...] = ()
    around: float = 0.0
    missing: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        errors = self.clock_error
        if errors and (len(errors) != len(self.ranks) or not all(e >= 0 and math.isfinite(e) for e in errors)):
            raise ValueError(f"clock_error={errors!r:.80}: expected finite seconds, one per rank of {len(self.ranks)}")
        if not (self.around >= 0 and math.isfinite(self.around)):
            raise ValueError(f"around={self.around!r}: expected a finite number of seconds, at least 0")
        for rank in self.missing:
            if not (0 <= rank < len(self.ranks)) or self.ranks[rank] != RankTrace(compute=()):
                raise ValueError(
                    f"missing={self.missing!r:.80}: expected ranks below {len(self.ranks)} without a trace"
                )

    def __repr__(self) -> str:
        kind = "measured" if self.measured else "simulated"
        return f"<Timeline {kind}: {self.schedule!r}, makespan {duration(self.makespan)}, bubble {self.bubble:.1%}>"

    @property
    def start(self) -> float:
        """The first start of any rank, or of what it waits for before that: its batch, or its weights [s]."""
        waits = [rank.data[0][0] for rank in self.ranks if rank.compute and rank.data]
        waits += [each.start for rank in self.ranks for each in rank.collectives if each.what.op is Op.UNSHARD]
        return min([self.first_action, *waits])

    @property
    def first_action(self) -> float:
        """The first start of any rank [s]."""
        return min((rank.compute[0].start for rank in self.ranks if rank.compute), default=0.0)

    @property
    def end(self) -> float:
        """The last end of any rank [s], including updates and collectives."""
        ends = [rank.compute[-1].end for rank in self.ranks if rank.compute]
        ends += [span.end for rank in self.ranks for span in rank.collectives]
        return max(ends, default=0.0)

    @property
    def makespan(self) -> float:
        """From the first start to the last end of any rank, including the wait for data at the beginning [s]."""
        return self.end - self.start

    @property
    def span(self) -> float:
        """The largest (last end - first start) of any one rank [s]."""
        return max((r.compute[-1].end - r.compute[0].start for r in self.ranks if r.compute), default=0.0)

    @property
    def makespan_bubble(self) -> float:
        """1 - busy / (P * makespan): the bubble if the optimizer step synchronises the ranks.

        For an asynchronous schedule this, like every bubble, is that of one batch of the steady state.
        """
        return self._idle_fraction(self.makespan)

    @property
    def span_bubble(self) -> float:
        """The same with the longest rank's own span: the bubble if steps may overlap."""
        return self._idle_fraction(self.span)

    @property
    def bubble(self) -> float:
        """The makespan bubble of a flush batch; of an asynchronous schedule, that of the steady state."""
        return self.makespan_bubble

    @property
    def batch_seconds(self) -> float:
        """Seconds from one batch to the next: the makespan of a flush batch or the period of a steady state, plus
        `around`."""
        steady = self._steady_state()
        return (self.makespan if steady is None else steady[1]) + self.around

    def _idle_fraction(self, length: float) -> float:
        busy, length = self._steady_state() or (sum(rank.busy for rank in self.ranks), length)
        known = len(self.ranks) - len(self.missing)
        return 1.0 - busy / (known * length) if length > 0 else 0.0

    def _steady_state(self) -> tuple[float, float] | None:
        """Compute of all ranks in a batch of an asynchronous schedule, and the time from batch to batch [s].

        Of the later half of the batches (of all in a measured run); None if fewer than two began.
        """
        if not self.schedule.is_asynchronous:
            return None
        size = self.schedule.batch_indices
        began: list[dict[int, int]] = []  # per rank: batch -> position of its first forward
        for trace in self.ranks:
            first: dict[int, int] = {}
            for position, (what, _, _) in enumerate(trace.compute):
                if what.op is Op.F:
                    first.setdefault(what.index // size, position)
            began.append(first)
        working = [rank for rank, first in enumerate(began) if first]  # a replica may have nothing to do
        if not working:
            return None
        shared = sorted(set.intersection(*(set(began[rank]) for rank in working)))
        if not self.measured:
            shared = shared[len(shared) // 2 :]
        if len(shared) < 2:
            return None
        low, high = shared[0], shared[-1]
        busy = period = 0.0
        for rank in working:
            window = self.ranks[rank].compute[began[rank][low] : began[rank][high]]
            busy += RankTrace(compute=window).busy
            length = self.ranks[rank].compute[began[rank][high]].start - window[0].start
            period = max(period, length)
        return busy / (high - low), period / (high - low)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """Per rank, the most stage activations alive at once (from F to the end of B, or of W).

        An offloaded activation counts until its offload ends, and again from the begin of its reload.
        """
        programs = zip(self.ranks, self.schedule.programs, strict=True)
        return tuple(
            peak_activations(in_time(rank, program) if rank.moves else rank.actions) for rank, program in programs
        )

    @property
    def peak_versions(self) -> tuple[int, ...]:
        """Per rank, the most weight versions of one stage kept at once."""
        return derive_versions(self.schedule).peak_live

    @property
    def busiest_member(self) -> float | None:
        """Rows of the busiest members of expert groups over the mean, all layers and microbatches together; None where
        no rows were counted."""
        rows = [each for rank in self.ranks for _, each in rank.rows]
        mean = sum(each.mean for each in rows)
        return sum(each.busiest for each in rows) / mean if mean else None

    @property
    def staleness(self) -> tuple[int, ...]:
        """Per rank, the most updates between the weights of a gradient and those it is applied to."""
        return derive_versions(self.schedule).staleness

    def shifted(self, offset: float) -> Timeline:
        """The same run with all times moved by `offset` [s]."""

        def move(spans: tuple[Span[What], ...]) -> tuple[Span[What], ...]:
            return tuple(Span(what, start + offset, end + offset) for what, start, end in spans)

        ranks = tuple(
            replace(
                r,
                compute=move(r.compute),
                comm=move(r.comm),
                collectives=move(r.collectives),
                moves=move(r.moves),
                exchanges=move(r.exchanges),
                data=tuple((start + offset, end + offset) for start, end in r.data),
            )
            for r in self.ranks
        )
        return replace(self, ranks=ranks)

    def to_json(self) -> str:
        """One JSON object: the schedule, and the spans as [what, start, end] in seconds."""
        ranks = [
            {
                "compute": [[str(what), start, end] for what, start, end in rank.compute],
                "comm": [[list(what), start, end] for what, start, end in rank.comm],
                "collectives": [[str(what), start, end] for what, start, end in rank.collectives],
                **({"moves": [[str(what), start, end] for what, start, end in rank.moves]} if rank.moves else {}),
                **({"exchanges": [[str(w), s, e] for w, s, e in rank.exchanges]} if rank.exchanges else {}),
                **({"rows": [[str(what), *rows] for what, rows in rank.rows]} if rank.rows else {}),
                **({"data": [list(wait) for wait in rank.data]} if rank.data else {}),
            }
            for rank in self.ranks
        ]
        schedule = self.schedule.to_data()
        data = {"version": _JSON_VERSION, "measured": self.measured, "schedule": schedule, "ranks": ranks}
        data |= {"clock_error": list(self.clock_error)} if self.clock_error else {}
        data |= {"around": self.around} if self.around else {}
        data |= {"missing": list(self.missing)} if self.missing else {}
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read `to_json`'s form; ValueError says what is missing or unreadable."""
        try:
            data = json.loads(text)
            if data["version"] != _JSON_VERSION:
                raise ValueError(f"version {data['version']!r}, expected {_JSON_VERSION}")
            ranks = tuple(
                RankTrace(
                    compute=tuple(_span(Action.parse(what), *times) for what, *times in rank["compute"]),
                    comm=tuple(_span(_message(*what), *times) for what, *times in rank["comm"]),
                    collectives=tuple(
                        _span(Collective.parse(what), *times) for what, *times in rank.get("collectives", ())
                    ),
                    moves=tuple(_span(Action.parse(what), *times) for what, *times in rank.get("moves", ())),
                    data=tuple((float(start), float(end)) for start, end in rank.get("data", ())),
                    exchanges=tuple(_span(Collective.parse(w), *times) for w, *times in rank.get("exchanges", ())),
                    rows=tuple((Action.parse(what), ExpertRows(*rows)) for what, *rows in rank.get("rows", ())),
                )
                for rank in data["ranks"]
            )
            schedule = Schedule.from_data(data["schedule"])
            if len(ranks) != schedule.num_ranks:
                raise ValueError(f"{len(ranks)} ranks for a schedule of {schedule.num_ranks}")
            return cls(
                schedule=schedule,
                ranks=ranks,
                measured=bool(data["measured"]),
                clock_error=tuple(map(float, data.get("clock_error", ()))),
                around=float(data.get("around", 0.0)),
                missing=tuple(map(int, data.get("missing", ()))),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a timeline: {error!r}; expected the JSON that Timeline.to_json writes") from error


def in_time(rank: RankTrace, program: Sequence[Action]) -> list[Action]:
    """The program of a rank as far as it ran, with each OFFLOAD where it ended, not where it began."""
    spans = {span.what: span for span in (*rank.compute, *rank.moves)}
    order: list[Action] = []
    leaving: list[Action] = []
    for action in (action for action in program if action in spans):
        if action.op is Op.OFFLOAD:
            leaving.append(action)
            continue
        start = spans[action].start
        order += [each for each in leaving if spans[each].end <= start]
        leaving = [each for each in leaving if spans[each].end > start]
        order.append(action)
    return [*order, *leaving]


def _span(what: What, start: float, end: float) -> Span[What]:
    return Span(what, float(start), float(end))


def _message(kind: str, src: int, dst: int, index: int) -> Message:
    return Message(MessageKind(kind), int(src), int(dst), int(index))


class Idle(NamedTuple):
    """Seconds in which a rank did not compute, by cause; they add up to makespan - busy.

    data: waiting for a batch (measured runs only). warm_up: before its first action. drain: after its last one.
    late_peer: an input was not made yet, beyond the imbalance. transfer: an input was in transit.
    imbalance: waiting that no order could avoid, since another rank has more work of its own.
    update: optimizer steps. unexplained: inputs had arrived and nothing ran (measured runs only).
    """

    data: float = 0.0
    warm_up: float = 0.0
    drain: float = 0.0
    late_peer: float = 0.0
    transfer: float = 0.0
    imbalance: float = 0.0
    update: float = 0.0
    unexplained: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self)

    @property
    def cause(self) -> str:
        """The cause with the most seconds."""
        return self._fields[self.index(max(self))]


class MeasuredStep(NamedTuple):
    """One traced step of a run (for a stream, the window of batches that ends with it)."""

    number: int
    timeline: Timeline

    @property
    def caption(self) -> str:
        """Its number, and the largest error of the clocks of its ranks."""
        errors = self.timeline.clock_error
        return f"measured, step {self.number}" + (f", clocks ±{duration(max(errors))}" if errors else "")
