"""Actions of traced processes, put together as a schedule and measured steps of it: one Exhibit.

Ranks' clocks: processes stamp with their host's wall clock, and those are taken to agree. Where a consumer runs before
its input was made they do not, and a note says by how much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ...schedules import Action, Message, MessageKind, Op, Schedule, ScheduleError, Span, Timeline, check
from ...schedules.ir import fitting_owners
from ...schedules.needs import Needs
from ...schedules.timing.records import RankRecord, assemble_timeline
from ..exhibit import Exhibit, MeasuredStep
from .events import read_trace
from .processes import Named, Process, Ran, processes_of

_NS = 1e-9
_APART = 1e-5  # [s]: clocks that differ by less are not spoken of


class _Done(NamedTuple):
    """An action of one step, with its slice."""

    action: Action
    ran: Ran


_Step = dict[int, list[_Done]]  # by rank


def exhibit_of_traces(paths: Sequence[Path], *, name: str) -> Exhibit:
    """The measured steps that the trace files of all ranks hold; processes without any action are no part of them.

    Raises ValueError for files that are no traces, hold no slice, or none with the name of a pipeline's action, or are
    of one rank twice.
    """
    files = [read_trace(path) for path in paths]
    notes = [note for file in files for note in file.notes]
    processes = processes_of(files)
    if not any(each.slices for each in processes):
        raise ValueError(f"{', '.join(map(str, paths))}: no slice with a start and a length: nothing to show")
    acting = [each for each in processes if each.ran]
    if not acting:
        raise ValueError(
            f"{name}: no slice has the name of a pipeline's action (torch's Schedule1F1B gives none): expected names "
            f"such as PP:1F0; https://ui.perfetto.dev draws a trace without them"
        )
    by_rank = _by_rank(acting, name)
    size = max([each.file.world_size or 0 for each in acting] + [max(by_rank) + 1])
    absent = [rank for rank in range(size) if rank not in by_rank]
    notes += [f"{name}: rank {r} of {size} left no trace: its row is empty" for r in absent]
    hosts = sorted({each.file.host for each in acting} - {""})
    if len(hosts) > 1:
        notes.append(f"{name}: the clocks of {', '.join(hosts)} are taken to agree")
    measured = []
    for number, step in _whole_steps(_steps(by_rank), name, notes).items():
        timeline, said = _assemble(step, size, absent, name)
        measured.append(MeasuredStep(number, timeline))
        notes += [note for note in said if note not in notes]
    return Exhibit(name=name, measured=tuple(measured), notes=tuple(notes))


def _by_rank(acting: Sequence[Process], name: str) -> dict[int, Process]:
    """Processes by rank; where none says its own, in the order in which they stand."""
    if any(each.rank is None for each in acting):
        acting = [replace(each, rank=number) for number, each in enumerate(acting)]
    ranks = Counter(each.rank for each in acting)
    twice = [each for each in acting if ranks[each.rank] > 1]
    if twice:
        files = ", ".join(sorted({str(each.file.path) for each in twice}))
        raise ValueError(f"{name}: {files} are all of rank {twice[0].rank}: expected one file a rank")
    return {each.rank: each for each in sorted(acting, key=lambda each: each.rank or 0) if each.rank is not None}


def _steps(by_rank: Mapping[int, Process]) -> dict[int, _Step]:
    """Actions by step and rank. A step is what the profiler marks; else the n-th time of each action."""
    steps: dict[int, _Step] = {}
    marked = all(each.steps for each in by_rank.values())
    for rank, process in by_rank.items():
        times: Counter[Named] = Counter()
        for ran in process.ran:
            if marked:
                inside = [number for number, start, end in process.steps if start <= ran.begun <= end]
                if not inside:
                    continue
                number = inside[-1]  # of two that touch, the one that begins
            else:
                number = times[ran.what]
                times[ran.what] += 1
            stage, op, index = ran.what
            done = _Done(Action(rank if stage is None else stage, op, index), ran)
            steps.setdefault(number, {}).setdefault(rank, []).append(done)
    return dict(sorted(steps.items()))


def _whole_steps(steps: Mapping[int, _Step], name: str, notes: list[str]) -> dict[int, _Step]:
    """Steps of which as much was recorded as of any."""
    sizes = {number: sum(map(len, step.values())) for number, step in steps.items()}
    most = max(sizes.values())
    kept = {number: step for number, step in steps.items() if sizes[number] == most}
    if len(kept) < len(steps):
        left = ", ".join(str(number) for number in steps if number not in kept)
        notes.append(f"{name}: step {left} was not recorded as a whole: left out")
    return kept


def _assemble(step: _Step, size: int, absent: Sequence[int], name: str) -> tuple[Timeline, list[str]]:
    """The timeline of one step, and what is to be said of it."""
    notes: list[str] = []
    step = _over_replicas(step)
    programs: list[tuple[Action, ...]] = [() for _ in range(size)]
    placement: list[set[int]] = [set() for _ in range(size)]
    for rank, done in step.items():
        programs[rank] = tuple(each.action for each in done if each.action.op is not Op.U)  # those follow the program
        placement[rank] = {each.action.stage for each in done}
    seen = set().union(*placement)
    unseen = [stage for stage in range(max(seen)) if stage not in seen]
    if unseen and not absent:
        programs, placement = [*programs, ()], [*placement, set()]
        absent = [size]
        notes.append(f"{name}: stage {', '.join(map(str, unseen))} is in no trace: an empty row stands for it")
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
    records = [_record(schedule, step.get(rank, ())) for rank in range(len(programs))]
    timeline = assemble_timeline(schedule, [None if rank in absent else each for rank, each in enumerate(records)])
    apart = _clocks_apart(timeline)
    if apart > _APART:
        notes.append(
            f"{name}: an input was used {apart * 1e6:,.0f} us before it was made: the ranks' clocks differ by that much"
        )
    return timeline, notes


def _over_replicas(step: _Step) -> _Step:
    """Where D ranks ran the same actions on data of their own, microbatch k of the d-th is the batch's k * D + d."""
    ranks_of: dict[Action, list[int]] = {}
    for rank, done in sorted(step.items()):
        for each in done:
            if each.action.op is not Op.U:  # every replica updates
                ranks_of.setdefault(each.action, []).append(rank)
    most = max(map(len, ranks_of.values()), default=1)
    if most == 1:
        return step

    def renumbered(rank: int, each: _Done) -> _Done:
        if each.action not in ranks_of:
            return each
        index = each.action.index * most + ranks_of[each.action].index(rank)
        return each._replace(action=each.action._replace(index=index))

    return {rank: [renumbered(rank, each) for each in done] for rank, done in step.items()}


def _record(schedule: Schedule, done: Sequence[_Done]) -> RankRecord:
    """One rank's step. An action that takes a message begins when it computes; what else its slice holds is waiting."""
    spans, arrivals = [], []
    behind = -1e300
    for action, ran in done:
        message = _message(schedule, action)
        start = (ran.begun if message is None else ran.computed) * _NS
        start, end = max(start, behind), max(ran.end * _NS, behind)
        spans.append(Span(action, start, end))
        behind = end
        if message is not None and ran.arrived is not None:
            arrivals.append((message, ran.begun * _NS, min(ran.arrived * _NS, start)))
    return RankRecord(compute=tuple(spans), arrivals=tuple(arrivals))


def _message(schedule: Schedule, action: Action) -> Message | None:
    """The message that an action of a plain chain of stages takes from another rank."""
    stage, op, index = action
    src = stage - 1 if op is Op.F else stage + 1
    if op in (Op.W, Op.U) or not 0 <= src < schedule.num_stages:
        return None
    if schedule.owner(src, index) == schedule.owner(stage, index):
        return None
    return Message(MessageKind.ACT if op is Op.F else MessageKind.GRAD, src, stage, index)


def _clocks_apart(timeline: Timeline) -> float:
    """Most by which an action ends behind the start of one that uses it, on another rank [s]."""
    needs = Needs(timeline.schedule)
    ends = {what: end for trace in timeline.ranks for what, _, end in trace.compute}
    return max(
        (
            ends[delivery.maker] - start
            for trace in timeline.ranks
            for what, start, _ in trace.compute
            for delivery in needs.arrivals(what)
            if delivery.maker in ends
        ),
        default=0.0,
    )
