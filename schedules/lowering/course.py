"""Course of a run without a flush: the first batches each by themselves, then a stream.

    flush_first=2    call of batch 0: F0 .. B0 .. U0    of batch 1: all of it    of batch 2, 3, ...: calls of the stream

What a batch meets follows from its number alone, so that a run goes on from any checkpoint as it would have gone on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..ir import Schedule
from ..messages import Sharing
from ..program import RankProgram
from ..transform import flushed
from .stream import Stream, make_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Programs and weight versions of a run's batches.

    Arguments:
        stream: of the batches from `flush_first` on.
        flush_first: batches that begin with the updates of all before, and end with their own.
        alone: what these are calls of; None where there are none.
    """

    stream: Stream
    flush_first: int = 0
    alone: Stream | None = None

    @property
    def schedule(self) -> Schedule:
        """Schedule of the stream."""
        return self.stream.schedule

    @property
    def programs(self) -> Iterator[RankProgram]:
        """One call and the drain, of all ranks, of each kind."""
        for stream in (self.stream, self.alone):
            if stream is not None:
                yield from (*stream.calls, *stream.drains)

    def is_alone(self, batch: int) -> bool:
        """Whether a batch is one of the first ones."""
        return batch < self.flush_first

    def stream_of(self, batch: int) -> Stream:
        """Stream that a batch is a call of."""
        return self.alone if self.alone is not None and self.is_alone(batch) else self.stream

    def call(self, rank: int, batch: int, *, first_batch: int) -> RankProgram:
        """The program of `rank` when batch `batch` comes: one of the first runs to its end, others see `Stream`."""
        if self.alone is not None and self.is_alone(batch):
            return self.alone.whole(rank, batch)
        return self.stream.call(rank, batch, first_batch=first_batch)

    def drain(self, rank: int, last_batch: int, *, first_batch: int) -> RankProgram:
        """The program with which `rank` ends a stream of batches behind the first ones."""
        return self.stream.drain(rank, last_batch, first_batch=first_batch)

    def version(self, stage: int, index: int, *, first_batch: int) -> int:
        """The weight version of microbatch `index` of a stage, in a stream that began with `first_batch`.

        The stream begins with what the first batches have made of the weights, and with no older version: under 2bw,
        too, whose rule names versions by the batch.
        """
        schedule = self.stream.schedule
        batch = index // schedule.num_microbatches
        if self.alone is not None and self.is_alone(batch):
            return self.alone.version(stage, index, first_batch=batch)
        steady = self.stream.version(stage, index, first_batch=first_batch)
        return max(steady, self.flush_first * schedule.groups_per_batch)


def make_course(schedule: Schedule, *, sharing: Sharing, flush_first: int = 0, late: Schedule | None = None) -> Course:
    """Calls of an asynchronous schedule, with their communication; see `make_stream`.

    Arguments:
        late: the same schedule with its updates in other places; it makes the stream.

    Raises ScheduleError for one that does not repeat from batch to batch.
    """
    return Course(
        stream=make_stream(schedule if late is None else late, sharing=sharing),
        flush_first=flush_first,
        alone=make_stream(flushed(schedule), sharing=sharing) if flush_first else None,
    )
