"""Trace files of torch.profiler whose slices name a pipeline's actions, as a schedule and measured steps of it: one
Exhibit.

Format: "Trace Event Format" (Duffy et al., the Catapult project), in Kineto's variant with keys of its own
(`distributedInfo`, `baseTimeNanoseconds`). Only complete slices (X) are read.

A slice may contain more than compute: torch's `PP:1F0` waits for its input before it computes, and `Forward 0` also
sends its output. On the CPU an action begins when its input arrives, or, if that is not seen, with its first operation
other than communication, and ends where a send begins. On a GPU it lasts from its first kernel to its last
(`gpu_user_annotation`). Names of actions:

    PP:1F0, 1F0            torch.distributed.pipelining, all schedules but GPipe and 1F1B; and this package
    PP:(0F1;1B0)OVERLAP_F_B    likewise, of two actions in sequence
    Forward 0              torch's ScheduleGPipe: only the microbatch; each rank has one stage

torch's Schedule1F1B (2.13) names nothing.

Processes stamp with their host's wall clock, and those are assumed to agree. If a consumer runs before its input was
made they do not, and a note reports by how much.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..schedules import Action, Op, Schedule, ScheduleError, Span, Timeline, check
from ..schedules.dependencies import Dependencies
from ..schedules.ir import fitting_owners
from ..schedules.timing.records import RankRecord, assemble_timeline
from ..schedules.timing.timeline import MeasuredStep
from ..schedules.traces.clocks import early_messages
from .exhibit import Exhibit

_NS = 1e-9
_NS_PER_US = 1000
_APART = 1e-5  # [s]: smaller differences between clocks are not reported
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_RANK = re.compile(r'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d+)')
_ON_GPU, _OPERATION = "gpu_user_annotation", "cpu_op"
_AUTOGRAD = "autograd::engine"
_ACTION = re.compile(r"(?:PP:)?(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"PP:\((\d+[FBIW]\d+);(\d+[FBIW]\d+)\)OVERLAP_F_B")
_RECEIVE = re.compile(r"PP:(\d+)RECV_([FB])(\d+)")
_OF_ONE_STAGE = re.compile(r"(Forward|Backward) (\d+)")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_COMMUNICATION = ("c10d::", "gloo:", "nccl:", "ncclx:", "record_param_comms", "PP:")
_ARRIVAL = "gloo:recv"  # lasts from the posting of a receive until its message is there
_THE_ONE_STAGE = -1  # of a rank, whose actions do not name it


class _Event(NamedTuple):
    """One slice from `start` to `end` [ns of the file's clock]; `thread`: numbers of process and thread."""

    name: str
    category: str
    thread: tuple[object, object]
    start: int
    end: int


class TracedAction(NamedTuple):
    """An action that ran."""

    what: Action
    begun: int  # of its slice [ns]
    computed: int  # when it began to compute [ns]
    end: int  # likewise [ns]
    arrived: int | None = None  # when its input arrived [ns]; None if that is not seen


class TracedProcess(NamedTuple):
    """One process."""

    path: Path
    rank: int | None  # as in its file, or None
    world_size: int | None  # likewise
    host: str  # its name, or empty
    ran: tuple[TracedAction, ...]  # actions in the order of their starts
    steps: tuple[tuple[int, int, int], ...]  # (number, start, end) [ns] of the steps that the profiler marks


_Step = dict[int, list[TracedAction]]  # by rank


def is_trace(text: str) -> bool:
    """Whether a text is a trace file: an object with `traceEvents`, or a list of events.

    >>> is_trace('{"traceEvents": [{"ph": "X"'), is_trace('[{"ph": "X"}'), is_trace('{"ranks": []}')
    (True, True, False)
    """
    start = text.lstrip()
    return start.startswith("[") or (start.startswith("{") and _EVENTS.search(text) is not None)


def rank_in(text: str) -> int | None:
    """The rank in a trace file, found without parsing all of it.

    >>> rank_in('{"distributedInfo": {"backend": "gloo", "rank": 3, "world_size": 4}, "traceEvents": []}')
    3
    """
    match = _RANK.search(text) if is_trace(text) else None
    return None if match is None else int(match[1])


def read_text(path: Path) -> str:
    """The text of a file, unpacked if gzipped; OSError and ValueError name the file."""
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text at byte {error.start}: expected a text file") from None
    except (EOFError, OSError, zlib.error):
        raise ValueError(f"{path}: a gzip file that cannot be unpacked: expected a whole one") from None


def exhibit_of_traces(paths: Sequence[Path], *, name: str) -> Exhibit:
    """The measured steps in the trace files of all ranks; processes without any action are ignored.

    Raises ValueError for files that are not traces, without slices or names of pipeline actions, or with one rank
    twice.
    """
    notes: list[str] = []
    processes = [process for path in paths for process in _processes_of(path, notes)]
    if not processes:
        raise ValueError(f"{', '.join(map(str, paths))}: no slice with a start and a length: nothing to show")
    acting = [each for each in processes if each.ran]
    if not acting:
        raise ValueError(
            f"{name}: no slice has the name of a pipeline's action (torch's Schedule1F1B gives none): expected names "
            f'such as PP:1F0, from record_function("PP:1F0") around each action. As it is, open '
            f"https://ui.perfetto.dev and drop {', '.join(map(str, paths))} there"
        )
    by_rank = _by_rank(acting, name)
    size = max([each.world_size or 0 for each in acting] + [max(by_rank) + 1])
    absent = [rank for rank in range(size) if rank not in by_rank]
    notes += [f"{name}: rank {r} of {size} left no trace: its row is empty" for r in absent]
    hosts = sorted({each.host for each in acting} - {""})
    if len(hosts) > 1:
        notes.append(f"{name}: the clocks of {', '.join(hosts)} are assumed to agree")
    measured = []
    for number, step in _whole_steps(_steps(by_rank), name, notes).items():
        timeline, of_step = _assemble(step, size, absent, name)
        measured.append(MeasuredStep(number, timeline))
        notes += [note for note in of_step if note not in notes]
    return Exhibit(name=name, measured=tuple(measured), notes=tuple(notes))


def _processes_of(path: Path, notes: list[str]) -> Iterator[TracedProcess]:
    """Processes of a file: one, if it has a rank; else one per pid. ValueError if it is not a trace."""
    text = read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}: expected a whole JSON file") from None
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise ValueError(f"{path}: expected a trace: an object with a list of traceEvents, or a list of events")
    about: Mapping[str, Any] = data if isinstance(data, dict) else {}
    distributed = about.get("distributedInfo")
    ranks = distributed if isinstance(distributed, Mapping) else {}
    rank, size = (n if type(n := ranks.get(key)) is int and n >= 0 else None for key in ("rank", "world_size"))
    base = about.get("baseTimeNanoseconds", 0)
    zero = int(base) if isinstance(base, int | float) and math.isfinite(base) else 0
    read = [_slice(event, zero) for event in events if not isinstance(event, dict) or event.get("ph") == "X"]
    slices = sorted((each for each in read if each is not None), key=lambda each: (each.start, -each.end))
    if len(slices) < len(read):
        lost = f"{len(read) - len(slices)} of {len(events)} events have no time or no length"
        notes.append(f"{path}: {lost}: unreadable events are left out")
    by_pid: dict[object, list[_Event]] = {}
    for each in slices:
        by_pid.setdefault(each.thread[0] if rank is None else None, []).append(each)
    for own in by_pid.values():
        marked = [(each, match) for each in own if (match := _STEP.fullmatch(each.name))]
        steps = {int(match[1]): (each.start, each.end) for each, match in marked}
        yield TracedProcess(
            path=path,
            rank=rank,
            world_size=size,
            host=str(about.get("host_name", "")),
            ran=tuple(sorted(_ran(own), key=lambda each: (each.computed, each.end))),
            steps=tuple((number, start, end) for number, (start, end) in sorted(steps.items())),
        )


def _slice(event: Any, zero: int) -> _Event | None:
    """A complete slice; None without a time or length. `zero`: of the file's clock [ns]."""
    if not isinstance(event, dict):
        return None
    start, length = _ns(event.get("ts")), _ns(event.get("dur", 0))
    if start is None or length is None or length < 0:
        return None
    pid, thread = (value if isinstance(value := event.get(key), int) else str(value) for key in ("pid", "tid"))
    name, category = (str(event.get(key, "")) for key in ("name", "cat"))
    return _Event(name, category, (pid, thread), zero + start, zero + start + length)


def _ns(value: object) -> int | None:
    """Whole nanoseconds of microseconds, also given as text; None for anything else."""
    try:
        number = float(value) * _NS_PER_US  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return round(number) if math.isfinite(number) else None


def _ran(slices: Sequence[_Event]) -> Iterator[TracedAction]:
    """Every slice that is an action, and is not inside another one of the same name."""
    acting = [(each, actions) for each in slices if (actions := actions_of(each.name))]
    if any(each.category == _ON_GPU for each, _ in acting):
        acting = [(each, actions) for each, actions in acting if each.category == _ON_GPU]
    operations = _Operations(slices)
    arrivals = _arrivals(slices, operations)
    until: dict[Action, int] = {}
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
            inside = [at for at in operations.arrivals(each.thread, begun, end) if at <= end]
            arrived = earlier.pop(0) if earlier else max(inside, default=None)
            computed, done = begun, end
            if on_cpu:
                computed = operations.first(each.thread, begun, end) if arrived is None else max(begun, arrived)
                done = operations.sending(each.thread, begun, end)
            yield TracedAction(what, begun, min(computed, done), done, arrived)
            begun = end


class _Operations:
    def __init__(self, slices: Sequence[_Event]) -> None:
        self._starts: dict[object, list[int]] = {}
        self._sends: dict[object, list[int]] = {}
        self._backward: dict[object, list[tuple[int, int]]] = {}
        self._arrived: dict[object, list[tuple[int, int]]] = {}
        for each in slices:
            if each.name == _ARRIVAL:
                self._arrived.setdefault(each.thread, []).append((each.start, each.end))
            elif each.category == _OPERATION and each.name.startswith(_COMMUNICATION):
                self._sends.setdefault(each.thread, []).append(each.start)
            elif each.category == _OPERATION:
                self._starts.setdefault(each.thread, []).append(each.start)
                if each.name.startswith(_AUTOGRAD):
                    self._backward.setdefault(each.thread, []).append((each.start, each.end))

    def first(self, thread: object, start: int, end: int) -> int:
        """Start of the first operation between two times [ns]; the end without one, and the start if none were
        recorded at all."""
        starts = self._starts.get(thread)
        if starts is None:
            return start
        at = bisect_left(starts, start)
        return starts[at] if at < len(starts) and starts[at] < end else end

    def sending(self, thread: object, start: int, end: int) -> int:
        """Start of the first communication after the last operation between two times [ns]; the end without any."""
        starts, sends = self._starts.get(thread, []), self._sends.get(thread, [])
        last = bisect_left(starts, end) - 1
        if last < 0 or starts[last] < start:
            return end
        at = bisect_left(sends, starts[last])
        return sends[at] if at < len(sends) and sends[at] < end else end

    def arrivals(self, thread: object, start: int, end: int) -> list[int]:
        arrived = self._arrived.get(thread, [])
        return [there for _, there in arrived[bisect_left(arrived, (start,)) : bisect_right(arrived, (end,))]]

    def turn(self, each: _Event, first: Op) -> int:
        """The end of the first of two actions in a slice: a backward ends with autograd, a forward where autograd
        begins."""
        inside = [(s, e) for s, e in self._backward.get(each.thread, []) if each.start <= s and e <= each.end]
        if not inside:
            return (each.start + each.end) // 2
        return min(s for s, _ in inside) if first is Op.F else max(e for _, e in inside)


def _arrivals(slices: Sequence[_Event], operations: _Operations) -> Mapping[Action, list[int]]:
    found: dict[Action, list[int]] = {}
    for each in slices:
        match = _RECEIVE.fullmatch(each.name)
        if match and (ends := operations.arrivals(each.thread, each.start, each.end)):
            found.setdefault(Action(int(match[1]), Op(match[2]), int(match[3])), []).append(max(ends))
    return found


def actions_of(name: str) -> tuple[Action, ...]:
    """The actions of a slice, in order; empty for other slices.

    >>> actions_of("PP:1F0")
    (1F0,)
    """
    if match := _ACTION.fullmatch(name):
        return (Action(int(match[1]), Op(match[2]), int(match[3])),)
    if match := _OVERLAP.fullmatch(name):
        return tuple(map(Action.parse, match.groups()))
    if match := _OF_ONE_STAGE.fullmatch(name):
        return (Action(_THE_ONE_STAGE, Op.F if match[1] == "Forward" else Op.B, int(match[2])),)
    return ()


def _by_rank(acting: Sequence[TracedProcess], name: str) -> dict[int, TracedProcess]:
    """Processes by rank; numbered in order if one lacks its rank."""
    if any(each.rank is None for each in acting):
        acting = [each._replace(rank=number) for number, each in enumerate(acting)]
    ranks = Counter(each.rank for each in acting)
    twice = [each for each in acting if ranks[each.rank] > 1]
    if twice:
        files = ", ".join(sorted({str(each.path) for each in twice}))
        raise ValueError(f"{name}: {files} are all of rank {twice[0].rank}: expected one file per rank")
    return {each.rank: each for each in sorted(acting, key=lambda each: each.rank or 0) if each.rank is not None}


def _steps(by_rank: Mapping[int, TracedProcess]) -> dict[int, _Step]:
    """Actions by step and rank. A step is marked by the profiler; else it is the n-th occurrence of each action."""
    steps: dict[int, _Step] = {}
    marked = all(each.steps for each in by_rank.values())
    for rank, process in by_rank.items():
        times: Counter[Action] = Counter()
        for ran in process.ran:
            if marked:
                inside = [number for number, start, end in process.steps if start <= ran.begun <= end]
                if not inside:
                    continue
                number = inside[-1]  # of two that touch, the one that begins
            else:
                number = times[ran.what]
                times[ran.what] += 1
            what = ran.what._replace(stage=rank) if ran.what.stage == _THE_ONE_STAGE else ran.what
            steps.setdefault(number, {}).setdefault(rank, []).append(ran._replace(what=what))
    return dict(sorted(steps.items()))


def _whole_steps(steps: Mapping[int, _Step], name: str, notes: list[str]) -> dict[int, _Step]:
    """Steps with the largest number of recorded actions."""
    sizes = {number: sum(map(len, step.values())) for number, step in steps.items()}
    most = max(sizes.values())
    kept = {number: step for number, step in steps.items() if sizes[number] == most}
    if len(kept) < len(steps):
        left = ", ".join(str(number) for number in steps if number not in kept)
        notes.append(f"{name}: step {left} was not recorded as a whole: left out")
    return kept


def _assemble(step: _Step, size: int, absent: Sequence[int], name: str) -> tuple[Timeline, list[str]]:
    notes: list[str] = []
    step = _over_replicas(step)
    programs: list[tuple[Action, ...]] = [() for _ in range(size)]
    placement: list[set[int]] = [set() for _ in range(size)]
    for rank, done in step.items():
        programs[rank] = tuple(each.what for each in done if each.what.op is not Op.U)  # those follow the program
        placement[rank] = {each.what.stage for each in done}
    seen = set().union(*placement)
    unseen = [stage for stage in range(max(seen)) if stage not in seen]
    if unseen and not absent:
        programs, placement = [*programs, ()], [*placement, set()]
        absent = [size]
        notes.append(f"{name}: stage {', '.join(map(str, unseen))} is in no trace: it is an empty row")
    for number, stage in enumerate(unseen):
        placement[absent[number % len(absent)]].add(stage)
    actions = [action for program in programs for action in program]
    schedule = Schedule(
        name=name,
        placement=tuple(tuple(sorted(stages)) for stages in placement),
        programs=tuple(programs),
        num_microbatches=1 + max((action.index for action in actions), default=0),
    )
    schedule = replace(schedule, owners=fitting_owners(schedule) or ())
    if not absent:
        try:
            check(schedule)
        except ScheduleError as error:
            notes.append(f"{name}: what was traced is no whole batch: {str(error).splitlines()[0]}")
    needs = Dependencies(schedule)
    records = [_record(needs, step.get(rank, ())) for rank in range(len(programs))]
    timeline = assemble_timeline(schedule, [None if rank in absent else each for rank, each in enumerate(records)])
    apart = max((seconds for _, seconds, _ in early_messages(timeline)), default=0.0)
    if apart > _APART:
        notes.append(
            f"{name}: an input was used {apart * 1e6:,.0f} us before it was made: the ranks' clocks differ by that much"
        )
    return timeline, notes


def _over_replicas(step: _Step) -> _Step:
    """If D ranks ran the same actions on data of their own, microbatch k of the d-th is the batch's k * D + d."""
    ranks_of: dict[Action, list[int]] = {}
    for rank, done in sorted(step.items()):
        for each in done:
            if each.what.op is not Op.U:  # every replica updates
                ranks_of.setdefault(each.what, []).append(rank)
    most = max(map(len, ranks_of.values()), default=1)
    if most == 1:
        return step

    def renumbered(rank: int, what: Action) -> Action:
        return what._replace(index=what.index * most + ranks_of[what].index(rank)) if what in ranks_of else what

    return {rank: [each._replace(what=renumbered(rank, each.what)) for each in done] for rank, done in step.items()}


def _record(needs: Dependencies, done: Sequence[TracedAction]) -> RankRecord:
    """One rank's step. An action with an input message begins when it computes; the rest of its slice is waiting."""
    spans, arrivals = [], []
    previous = -1e300
    for ran in done:
        message = next((each.message for each in needs.arrivals(ran.what)), None)
        start = (ran.begun if message is None else ran.computed) * _NS
        start, end = max(start, previous), max(ran.end * _NS, previous)
        spans.append(Span(ran.what, start, end))
        previous = end
        if message is not None and ran.arrived is not None:
            arrivals.append(Span(message, ran.begun * _NS, min(ran.arrived * _NS, start)))
    return RankRecord(compute=tuple(spans), arrivals=tuple(arrivals))
