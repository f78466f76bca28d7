"""Timelines as torch.profiler writes traces, a file a rank: for TensorBoard, Holistic Trace Analysis, chrome://tracing.

    out.rank0.pt.trace.json   ProfilerStep#7 |---------------------------------|
                              PP:0F0         |-----|    |-----| PP:0B0            names of torch.distributed.pipelining
                                                └ fwdbwd ┘

All files count from one zero. Compute slices carry `stream` and `device`, by which Holistic Trace Analysis tells busy
from idle time, as it does of kernels; messages carry none, since a rank computes meanwhile.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...schedules import Action, Op, Span, Timeline
from ...schedules.ir import BACKWARD_OPS
from ...schedules.timing.attribution import Gap, find_gaps
from ..lanes import assign_lanes
from ..slice_words import Event, SliceWords

_SCHEMA = 1
KINETO_SUFFIXES = (".pt.trace.json", ".pt.trace.json.gz")
_TICKS_PER_US = 8  # such a number times 1000 is exact in a double, and so are whole nanoseconds
_COMPUTE, _RECEIVE, _TOGETHER = 1, 100, 200  # first thread of each kind of lane
_ANNOTATION = "user_annotation"
_STREAM = 7  # a number above 0, as those of compute kernels


def write_kineto(timeline: Timeline, path: str | Path, *, step: int = 0) -> list[Path]:
    """Write a file for each rank that left a trace; returns their paths, by rank.

    The same timeline always gives the same bytes. O(actions + messages).

    Arguments:
        path: ends in .pt.trace.json, or .pt.trace.json.gz to be packed; `rankN` is put in front of that.
        step: number of the ProfilerStep.

    Raises ValueError for another end.
    """
    path = Path(path)
    suffix = next((each for each in KINETO_SUFFIXES if path.name.endswith(each)), None)
    if suffix is None:
        raise ValueError(f"{path}: expected a name that ends in {' or '.join(KINETO_SUFFIXES)}")
    stem = path.name.removesuffix(suffix)
    writer = _Writer(timeline, step)
    written = []
    for rank in range(len(timeline.ranks)):
        if rank in timeline.missing:
            continue
        to = path.with_name(f"{stem}.rank{rank}{suffix}")
        text = writer.text(rank, to.name)
        to.write_bytes(gzip.compress(text.encode(), mtime=0) if suffix.endswith(".gz") else text.encode())
        written.append(to)
    return written


class _Writer:
    """Files of one timeline."""

    def __init__(self, timeline: Timeline, step: int) -> None:
        self._timeline, self._step = timeline, step
        self._words, self._gaps = SliceWords(timeline), find_gaps(timeline)

    def text(self, rank: int, name: str) -> str:
        """The file of a rank."""
        timeline = self._timeline
        about = {
            "schemaVersion": _SCHEMA,
            "deviceProperties": [],
            "distributedInfo": {"backend": "unknown", "rank": rank, "world_size": len(timeline.ranks)},
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": 0,
            "stagewright": {"schedule": timeline.schedule.name, "measured": timeline.measured},
        }
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in self._events(rank))
        head = json.dumps(about)[1:-1]
        return f'{{{head},\n"traceEvents":[\n{lines}\n],\n"traceName":{json.dumps(name)}}}\n'

    def _events(self, rank: int) -> Iterator[Event]:
        trace, gaps, words = self._timeline.ranks[rank], self._gaps[rank], self._words
        lanes = [(_COMPUTE, "compute")]
        slices = [self._step_slice(rank)]
        slices += [self._compute(rank, span, gaps.get(span.what)) for span in trace.compute]
        beside = [
            (_RECEIVE, "receive", [(s.start, s.end, words.of_message(s.what)) for s in trace.comm]),
            (_TOGETHER, "together", [(s.start, s.end, words.of_collective(s.what)) for s in trace.collectives]),
        ]
        for first, kind, events in beside:
            numbers = assign_lanes([(self._ticks(start), self._ticks(end)) for start, end, _ in events])
            for (start, end, what), lane in zip(events, numbers, strict=True):
                slices.append({**self._slice(rank, first + lane, start, end), **what, "cat": _ANNOTATION})
            lanes += [(first + lane, f"{kind} {lane + 1}" if lane else kind) for lane in sorted(set(numbers))]
        yield from _metadata(rank, lanes)
        yield from slices
        yield from self._forward_to_backward(rank, trace.compute)

    def _step_slice(self, rank: int) -> Event:
        where = self._slice(rank, _COMPUTE, self._timeline.start, self._timeline.end)
        return {**where, "name": f"ProfilerStep#{self._step}", "cat": _ANNOTATION, "args": {}}

    def _compute(self, rank: int, span: Span[Action], gap: Gap | None) -> Event:
        what = self._words.of_action(rank, span.what, gap)
        args = {**what["args"], "device": rank, "stream": _STREAM}
        where = self._slice(rank, _COMPUTE, span.start, span.end)
        return {**where, "name": f"PP:{span.what}", "cat": _ANNOTATION, "args": args}

    def _forward_to_backward(self, rank: int, compute: Sequence[Span[Action]]) -> Iterator[Event]:
        """Flows from the start of a forward to that of its backward, as torch has them of operations."""
        forwards = {(s.what.stage, s.what.index): s for s in compute if s.what.op is Op.F}
        number = 0
        for span in compute:
            forward = forwards.get((span.what.stage, span.what.index))
            if span.what.op not in BACKWARD_OPS or forward is None:
                continue
            number += 1
            for phase, at in (("s", forward.start), ("f", span.start)):
                where = {"pid": rank, "tid": _COMPUTE, "ts": self._ticks(at) / _TICKS_PER_US}
                bound = {"bp": "e"} if phase == "f" else {}
                yield {"ph": phase, "id": number, **where, "cat": "fwdbwd", "name": "fwdbwd", **bound}

    def _slice(self, rank: int, tid: int, start: float, end: float) -> Event:
        begun, through = self._ticks(start), self._ticks(end)
        times = {"ts": begun / _TICKS_PER_US, "dur": (through - begun) / _TICKS_PER_US}
        return {"ph": "X", "pid": rank, "tid": tid, **times}

    def _ticks(self, seconds: float) -> int:
        return round((seconds - self._timeline.start) * 1e6 * _TICKS_PER_US)


def _metadata(rank: int, lanes: Sequence[tuple[int, str]]) -> Iterator[Event]:
    def record(kind: str, tid: int, **args: object) -> Event:
        return {"ph": "M", "pid": rank, "tid": tid, "ts": 0, "name": kind, "args": args}

    yield record("process_name", 0, name=f"rank {rank}")
    yield record("process_labels", 0, labels="CPU")
    yield record("process_sort_index", 0, sort_index=rank)
    for tid, name in lanes:
        yield record("thread_name", tid, name=name)
        yield record("thread_sort_index", tid, sort_index=tid)
