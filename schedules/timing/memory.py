"""Memory over time: the bytes that each rank of a timeline holds, by use.

    weights       all versions of its stages, from the start
    gradients     of a stage, from the end of its first backward to the end of its update (in a stream always)
    optimizer, buffers    from the start
    activations   of a microbatch, from the start of F to the end of B or W, except while offloaded; those that B
                  recomputes or needs beyond the workspace, while it runs
    workspace     while an action of the stage runs, or its update
    messages      receives from their posting, sends until they are known to be received, as in the lowered program;
                  all-reduces of gradients while they run

Plans count their peaks in `partition/memory.py`, which defines what a stage holds; these are the same figures over
time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING

from ..dependencies import Dependencies
from ..ir import BACKWARD_OPS, LAST_USES, MOVE_OPS, Action, Op
from ..liveness import message_changes
from ..lowering.lower import lower
from ..messages import STAGE_KINDS, Message, Sharing, receives_ahead
from ..program import RankProgram
from .timeline import Span, Timeline

if TYPE_CHECKING:
    import numpy as np


class MemoryPart(StrEnum):
    """Use of bytes."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    BUFFERS = "buffers"
    ACTIVATIONS = "activations"
    WORKSPACE = "workspace"
    MESSAGES = "messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Bytes of one stage on one of its ranks.

    Arguments:
        weights: one version of them.
        gradients: one set of them.
        optimizer: state; a rank's shard, if it is sharded over replicas.
        buffers: of the model.
        activations: kept of one microbatch from F to B.
        again: beyond the workspace during a backward, such as recomputed activations.
        workspace: of an action while it runs.
        output: of a message to another stage, and of the gradient back.
        summing: held while gradients are summed, or weights gathered, over several ranks.
        update: of the optimizer while it steps.

    Raises ValueError for anything but finite numbers of at least 0.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0
    activations: float = 0.0
    again: float = 0.0
    workspace: float = 0.0
    output: float = 0.0
    summing: float = 0.0
    update: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (isinstance(value, int | float) and 0 <= value < float("inf")):
                raise ValueError(f"bytes of a stage: {each.name}={value!r}: expected a finite number, at least 0")
            object.__setattr__(self, each.name, float(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Bytes on one rank over time: a step curve.

    Arguments:
        times: ascending [s]; two equal ones enclose an instantaneous value.
        parts: [len(times)] bytes of each part from this time to the next. Parts that are always 0 are left out.
    """

    times: tuple[float, ...]
    parts: Mapping[MemoryPart, tuple[float, ...]]

    @property
    def total(self) -> tuple[float, ...]:
        """[len(times)] bytes of all parts together."""
        return tuple(map(sum, zip(*self.parts.values(), strict=True))) if self.parts else (0.0,) * len(self.times)

    @property
    def peak(self) -> float:
        """The most bytes at once."""
        return max(self.total, default=0.0)


def memory_curves(timeline: Timeline, stages: Sequence[StageBytes]) -> tuple[MemoryCurve, ...]:
    """[P] the memory of each rank of a timeline, simulated or measured.

    Arguments:
        stages: [S] in order.

    Raises ValueError for another number of stages than the schedule has. O(actions + messages).
    """
    schedule = timeline.schedule
    if len(stages) != schedule.num_stages:
        raise ValueError(f"bytes of {len(stages)} stages for a schedule of {schedule.num_stages}: expected as many")
    needs = Dependencies(schedule)
    versions = timeline.peak_versions if schedule.is_asynchronous else (1,) * schedule.num_ranks
    ahead = receives_ahead(max(stage.output for stage in stages), schedule)
    if schedule.is_asynchronous:  # receives of a batch are posted no earlier than with it
        ahead = min(ahead, schedule.num_microbatches * max(map(len, schedule.placement)))
    return tuple(
        _Rank(timeline, program, stages, needs, num_versions=max(1, kept)).curve()
        for program, kept in zip(lower(schedule, sharing=Sharing(receives_ahead=ahead)).programs, versions, strict=True)
    )


_PARTS = tuple(MemoryPart)


class _Rank:
    def __init__(
        self,
        timeline: Timeline,
        program: RankProgram,
        stages: Sequence[StageBytes],
        needs: Dependencies,
        *,
        num_versions: int,
    ) -> None:
        self._timeline, self._program, self._stages, self._needs = timeline, program, stages, needs
        self._trace = timeline.ranks[program.rank]
        self._streams = timeline.schedule.is_asynchronous
        self._own = timeline.schedule.placement[program.rank]
        self._graded = set(self._own) if self._streams else set[int]()
        self._changes: list[tuple[float, tuple[float, ...]]] = []
        self._num_versions = num_versions

    def curve(self) -> MemoryCurve:
        import numpy as np  # simulating and printing schedules do not need it

        self._begin()
        self._move(Op.OFFLOAD)  # of equal times, memory is freed first
        self._run()
        self._sum()
        self._move(Op.RELOAD)
        times = np.array([time for time, _ in self._changes])
        order = np.argsort(times, kind="stable")
        values = np.maximum(np.cumsum(np.array([change for _, change in self._changes])[order], axis=0), 0.0)
        kept = _corners(times[order], values)
        times, values = times[order][kept], values[kept]
        columns = zip(_PARTS, values.T, strict=True)
        parts = {part: tuple(column.tolist()) for part, column in columns if column.any()}
        return MemoryCurve(times=tuple(times.tolist()), parts=parts)

    def _change(self, time: float, changes: Mapping[MemoryPart, float]) -> None:
        if any(changes.values()) or not self._changes:
            self._changes.append((time, tuple(changes.get(part, 0.0) for part in _PARTS)))

    def _begin(self) -> None:
        """Memory from the start, with the activations of forwards before a window of a stream."""
        actions = self._trace.actions
        begun = {(stage, index) for stage, op, index in actions if op is Op.F}
        before = [a.stage for a in actions if a.op in LAST_USES and (a.stage, a.index) not in begun]
        own = [self._stages[stage] for stage in self._own]
        self._change(
            self._timeline.start,
            {
                MemoryPart.WEIGHTS: sum(each.weights for each in own) * self._num_versions,
                MemoryPart.GRADIENTS: sum(self._stages[stage].gradients for stage in self._graded),
                MemoryPart.OPTIMIZER: sum(each.optimizer for each in own),
                MemoryPart.BUFFERS: sum(each.buffers for each in own),
                MemoryPart.ACTIVATIONS: sum(self._stages[stage].activations for stage in before),
            },
        )

    def _run(self) -> None:
        spans = {span.what: span for span in self._trace.compute}
        self._with_backward = {what.stage for what in spans if what.op is not Op.F}
        now, level = self._timeline.start, 0.0  # level: bytes of messages before the first action
        is_before = True  # the first action: receives are posted at once; of a window, everything until then
        for step, added, removed in message_changes(self._program):
            come, gone = self._size(added), self._size(removed)
            span = spans.pop(step, None) if isinstance(step, Action) else None
            if is_before:
                if span is None:
                    level += come - gone
                    continue
                self._change(now, {MemoryPart.MESSAGES: level})
                is_before = False
            if span is not None:
                self._change(span.start, {MemoryPart.MESSAGES: come})
                self._act(span)
                now = span.end
            elif isinstance(step, Action) and step.op not in MOVE_OPS:
                break  # after the window
            else:
                self._change(now, {MemoryPart.MESSAGES: come})
            self._change(now, {MemoryPart.MESSAGES: -gone})
        for span in spans.values():  # the updates after a flush
            self._act(span)

    def _size(self, messages: Collection[Message]) -> float:
        stages = [self._needs.wire(message).producer for message in messages if message.kind in STAGE_KINDS]
        return sum(self._stages[stage].output for stage in stages)

    def _act(self, span: Span[Action]) -> None:
        (stage, op, _), start, end = span
        own = self._stages[stage]
        if op is Op.U:
            self._change(start, {MemoryPart.WORKSPACE: own.update})
            self._change(end, {MemoryPart.WORKSPACE: -own.update})
            if stage in self._graded and not self._streams:
                self._graded.remove(stage)
                self._change(end, {MemoryPart.GRADIENTS: -own.gradients})
            return
        again = own.again if op in BACKWARD_OPS else 0.0
        kept = own.activations if op is Op.F else 0.0
        self._change(start, {MemoryPart.WORKSPACE: own.workspace, MemoryPart.ACTIVATIONS: kept + again})
        over = {MemoryPart.WORKSPACE: -own.workspace, MemoryPart.ACTIVATIONS: -again}
        if op in LAST_USES or stage not in self._with_backward:
            over[MemoryPart.ACTIVATIONS] -= own.activations
        if op in LAST_USES and stage not in self._graded:
            self._graded.add(stage)
            over[MemoryPart.GRADIENTS] = own.gradients
        self._change(end, over)

    def _sum(self) -> None:
        for collective, begun, ended in self._trace.collectives:
            size = max((self._stages[s].summing for s in collective.stages if s in self._own), default=0.0)
            self._change(begun, {MemoryPart.MESSAGES: size})
            self._change(ended, {MemoryPart.MESSAGES: -size})

    def _move(self, op: Op) -> None:
        for (stage, its, _), begun, ended in self._trace.moves:
            size, is_out = self._stages[stage].activations, op is Op.OFFLOAD
            if its is op:
                self._change(ended if is_out else begun, {MemoryPart.ACTIVATIONS: -size if is_out else size})


def _corners(times: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Indices of the points that a step curve needs: at each time the last one, and the highest if it is above its
    neighbours."""
    import numpy as np

    total = values.sum(axis=1)
    kept: list[int] = []
    starts = np.flatnonzero(np.r_[True, times[1:] != times[:-1]])
    for first, after in zip(starts.tolist(), [*starts[1:].tolist(), len(times)], strict=True):
        last = after - 1
        high = first + int(total[first:after].argmax())
        before = total[kept[-1]] if kept else 0.0
        if total[high] > max(before, total[last]):
            kept.append(high)
        if high != last or not kept or (values[last] != values[kept[-1]]).any():
            kept.append(last)
    return np.array(kept)
