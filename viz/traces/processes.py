"""Processes of trace files: what each one computed and when, as far as the names of its slices say it.

A slice may hold more than compute: torch's `PP:1F0` waits for its input before it computes, and `Forward 0` sends its
output, too. On the CPU an action begins when its input is there, or, where that is not seen, with its first operation
that is no communication, and ends where a send begins. On a GPU it lasts from its first kernel to its last
(`gpu_user_annotation`). Names of actions:

    PP:1F0, 1F0            torch.distributed.pipelining, all schedules but GPipe and 1F1B; and this package
    PP:(0F1;1B0)OVERLAP_F_B    likewise, of two actions one behind the other
    Forward 0              torch's ScheduleGPipe: the microbatch alone; a rank has one stage

torch's Schedule1F1B (2.13) names nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...schedules import Action, Op
from .events import Event, TraceFile

_ON_GPU, _OPERATION = "gpu_user_annotation", "cpu_op"
_RANK = re.compile(r"\brank[ _:]?(\d+)\b", re.IGNORECASE)
_AUTOGRAD = "autograd::engine"
_ACTION = re.compile(r"(?:PP:)?(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"PP:\((\d+[FBIW]\d+);(\d+[FBIW]\d+)\)OVERLAP_F_B")
_RECEIVE = re.compile(r"PP:(\d+)RECV_([FB])(\d+)")
_OF_ONE_STAGE = re.compile(r"(Forward|Backward) (\d+)")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_COMMUNICATION = ("c10d::", "gloo:", "nccl:", "ncclx:", "record_param_comms", "PP:")
_ARRIVALS = ("gloo:recv",)


class Named(NamedTuple):
    """An action as its name has it; stage None: the one stage of its rank."""

    stage: int | None
    op: Op
    index: int  # type: ignore[assignment]  # hides tuple.index


class Ran(NamedTuple):
    """An action that ran.

    begun: of its slice; computed: when it began to compute; end: likewise [ns].
    arrived: when its input was there [ns]; None where that is not seen.
    """

    what: Named
    begun: int
    computed: int
    end: int
    arrived: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process.

    Arguments:
        rank: as the file or its name says; None where neither does.
        slices: in the order of their starts.
        ran: actions in the order of their starts.
        steps: (number, start, end) [ns] of the steps that the profiler marks.
    """

    name: str
    rank: int | None
    file: TraceFile
    slices: tuple[Event, ...]
    ran: tuple[Ran, ...]
    steps: tuple[tuple[int, int, int], ...]


def processes_of(files: Sequence[TraceFile]) -> list[Process]:
    """Processes of all files. A file that says its rank is of one process; else each pid is one."""
    found = []
    for file in files:
        if file.rank is not None:
            found.append(_process(f"rank {file.rank}", file.rank, file, file.slices))
            continue
        by_pid: dict[object, list[Event]] = {}
        for each in file.slices:
            by_pid.setdefault(each.pid, []).append(each)
        for pid, slices in by_pid.items():
            name = file.process_names.get(pid, f"process {pid}")
            match = _RANK.search(name)
            found.append(_process(name, int(match[1]) if match else None, file, tuple(slices)))
    return found


def _process(name: str, rank: int | None, file: TraceFile, slices: tuple[Event, ...]) -> Process:
    marked = [(each, _step_of(each.name)) for each in slices]
    steps = {number: (each.start, each.end) for each, number in marked if number is not None}
    return Process(
        name=name,
        rank=rank,
        file=file,
        slices=slices,
        ran=tuple(sorted(_ran(slices), key=lambda each: (each.computed, each.end))),
        steps=tuple((number, start, end) for number, (start, end) in sorted(steps.items())),
    )


def _ran(slices: Sequence[Event]) -> Iterator[Ran]:
    """Every slice that is an action, and is not in another one of the same name."""
    acting = [(each, actions) for each in slices if (actions := actions_of(each.name, each.args))]
    if any(each.category == _ON_GPU for each, _ in acting):
        acting = [(each, actions) for each, actions in acting if each.category == _ON_GPU]
    operations = _Operations(slices)
    arrivals = _arrivals(slices)
    until: dict[Named, int] = {}
    for each, actions in acting:
        if each.start < until.get(actions[0], -(1 << 62)):
            continue
        until[actions[0]] = each.end
        on_cpu = each.category != _ON_GPU
        begun = each.start
        for position, what in enumerate(actions):
            is_last = position == len(actions) - 1
            end = each.end if is_last else operations.turn(each, what.op)
            earlier = arrivals.get(what)
            arrived = earlier.pop(0) if earlier else operations.arrival(each.tid, begun, end)
            computed, done = begun, end
            if on_cpu:
                computed = operations.first(each.tid, begun, end) if arrived is None else max(begun, arrived)
                done = operations.sending(each.tid, begun, end)
            yield Ran(what, begun, min(computed, done), done, arrived)
            begun = end


class _Operations:
    """Operations of a process on the CPU, by thread."""

    def __init__(self, slices: Sequence[Event]) -> None:
        self._starts: dict[object, list[int]] = {}
        self._sends: dict[object, list[int]] = {}
        self._backward: dict[object, list[tuple[int, int]]] = {}
        self._arrived: dict[object, list[tuple[int, int]]] = {}
        for each in slices:
            if _is_arrival(each.name):
                self._arrived.setdefault(each.tid, []).append((each.start, each.end))
            elif each.category == _OPERATION and _is_communication(each.name):
                self._sends.setdefault(each.tid, []).append(each.start)
            elif each.category == _OPERATION:
                self._starts.setdefault(each.tid, []).append(each.start)
                if each.name.startswith(_AUTOGRAD):
                    self._backward.setdefault(each.tid, []).append((each.start, each.end))

    def first(self, tid: object, start: int, end: int) -> int:
        """Start of the first operation between two times [ns]; the end where there is none, and the start where none
        were recorded at all."""
        starts = self._starts.get(tid)
        if starts is None:
            return start
        at = bisect_left(starts, start)
        return starts[at] if at < len(starts) and starts[at] < end else end

    def sending(self, tid: object, start: int, end: int) -> int:
        """Start of the first communication behind the last operation between two times [ns]; the end without any."""
        starts, sends = self._starts.get(tid, []), self._sends.get(tid, [])
        last = bisect_left(starts, end) - 1
        if last < 0 or starts[last] < start:
            return end
        at = bisect_left(sends, starts[last])
        return sends[at] if at < len(sends) and sends[at] < end else end

    def arrival(self, tid: object, start: int, end: int) -> int | None:
        """When the last receive was there that was posted between two times [ns]."""
        arrived = self._arrived.get(tid, [])
        low, high = bisect_left(arrived, (start,)), bisect_right(arrived, (end,))
        return max((there for _, there in arrived[low:high] if there <= end), default=None)

    def turn(self, each: Event, first: Op) -> int:
        """Where the first of two actions in a slice ends: a backward where autograd ends, a forward where it begins."""
        inside = [(s, e) for s, e in self._backward.get(each.tid, []) if each.start <= s and e <= each.end]
        if not inside:
            return (each.start + each.end) // 2
        return min(s for s, _ in inside) if first is Op.F else max(e for _, e in inside)


def _arrivals(slices: Sequence[Event]) -> Mapping[Named, list[int]]:
    """When the inputs of actions were there [ns], step by step, of torch's runtime over gloo: a receive that is posted
    in RECV."""
    found: dict[Named, list[int]] = {}
    posted = [(each, what) for each in slices if (what := received_by(each.name)) is not None]
    receives = [(each.start, each.end, each.tid) for each in slices if _is_arrival(each.name)]
    for each, what in posted:
        low, high = bisect_left(receives, (each.start,)), bisect_right(receives, (each.end,))
        ends = [end for _, end, tid in receives[low:high] if tid == each.tid]
        if ends:
            found.setdefault(what, []).append(max(ends))
    return found


def actions_of(name: str, args: Mapping[str, Any]) -> tuple[Named, ...]:
    """The actions of a slice, in order; none where it is something else.

    >>> actions_of("PP:1F0", {})
    (Named(stage=1, op=<Op.F: 'F'>, index=0),)
    """
    given = args.get("action")
    if isinstance(given, str):
        try:
            return (Named(*Action.parse(given)),)
        except ValueError:
            return ()
    if match := _ACTION.fullmatch(name):
        return (Named(int(match[1]), Op(match[2]), int(match[3])),)
    if match := _OVERLAP.fullmatch(name):
        return tuple(Named(*Action.parse(each)) for each in match.groups())
    if match := _OF_ONE_STAGE.fullmatch(name):
        return (Named(None, Op.F if match[1] == "Forward" else Op.B, int(match[2])),)
    return ()


def received_by(name: str) -> Named | None:
    """The action whose input a slice of torch's runtime begins to receive.

    >>> received_by("PP:1RECV_F0")
    Named(stage=1, op=<Op.F: 'F'>, index=0)
    """
    match = _RECEIVE.fullmatch(name)
    return None if match is None else Named(int(match[1]), Op(match[2]), int(match[3]))


def _step_of(name: str) -> int | None:
    """Number of a step that torch.profiler marks."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def _is_communication(name: str) -> bool:
    """Whether a slice sends or receives, or marks that."""
    return name.startswith(_COMMUNICATION)


def _is_arrival(name: str) -> bool:
    """Whether a slice lasts from the posting of a receive until its message is there."""
    return name in _ARRIVALS
