"""Memory of a run: what stages hold, and what single actions leave and take, measured while one step runs.

with watch(pipeline, device) as watched: a step        stage_bytes(pipeline, watched) -> [S] StageBytes

level |        ______            kept:  the level after a forward, less that before it: what its backward needs
      |     __|      |__                (and its outputs, until they are sent)
      | ___|   F        |____    taken: the highest level within, above both
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median, median_low
from typing import Any
from unittest.mock import patch

import torch

from ...comm import TensorSpec
from ...partition.model.forms import Tensors
from ...partition.profiler.memory import LiveBytes, bytes_of
from ...schedules import Action, MemoryPart, Message, MessageKind, Op, StageBytes
from ...schedules.ir import BACKWARD_OPS
from ..build import Pipeline

Specs = Sequence[TensorSpec]


@dataclass(slots=True)
class _Seen:
    """Memory of one stage, in bytes."""

    kept: list[int] = field(default_factory=list)  # by forward: rise of the level
    forward: list[int] = field(default_factory=list)  # highest level within, above those before and after
    backward: list[int] = field(default_factory=list)  # highest level within, above the one before
    received: dict[Message, int] = field(default_factory=dict)  # activations
    sent: int = 0  # activations, of the largest message


class ActionMemory:
    """Bytes that the actions of this process take, while they are watched; made by `PipelineModule.watch_memory`.

    Arguments:
        live: counts them; None: CUDA's allocator does.
        held: at the start [bytes].

    Attributes:
        peak_bytes: the most that the process held at once, including `held` [bytes].
        mark: context of each action and the update.
        moments: on the CPU, for each action and update: parts at its highest level, and its rise [bytes].
    """

    def __init__(self, pipeline: Pipeline, device: torch.device, live: LiveBytes | None, *, held: int) -> None:
        self.peak_bytes = self._held = held
        self.moments: list[tuple[Action, dict[tuple[int, MemoryPart], int], int]] = []
        self._pipeline, self._device, self._live = pipeline, device, live
        self._stages: dict[int, _Seen] = {}
        self.mark: Callable[[], AbstractContextManager[None]] = nullcontext
        self.for_update = 0  # bytes that optimizers needed for themselves, one after the other
        self.update = Action(min(pipeline.state.run.local_stages, default=0), Op.U, 0)

    def _level(self) -> int:
        if self._live is None:
            return torch.cuda.memory_allocated(self._device) - self._held
        self._live.settle()
        return self._live.level

    def _most(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._held if self._live is None else self._live.most

    def run(self, run: Callable[[Action], Any], action: Action) -> Any:
        self.note_peak()
        before = self._level()
        if self._live is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._live.most, self._live.at_most = before, self._live.alive.copy()
            self._label(self.update.stage, MemoryPart.MESSAGES)  # made between two actions
        with self.mark():
            result = run(action)
        after, most = self._level(), self._most()
        if self._live is not None:
            self.moments.append((action, self._parts(self._live, action), most - before))
        seen = self._stages.setdefault(action.stage, _Seen())
        if action.op is Op.F:
            seen.kept.append(after - before)
            seen.forward.append(most - max(before, after))
        elif action.op in BACKWARD_OPS:
            seen.backward.append(most - before)
        elif action.op is Op.U:
            self.for_update = max(self.for_update, most - max(before, after))
        return result

    def put(self, put: Callable[[Message, Tensors], None], message: Message, tensors: Tensors) -> None:
        if message.kind is MessageKind.ACT:
            self._stages.setdefault(message.dst, _Seen()).received[message] = bytes_of(tensors)
            self._give((message.dst, MemoryPart.ACTIVATIONS), tensors)
        put(message, tensors)

    def take(self, take: Callable[[Message, Specs], Tensors], message: Message, specs: Specs) -> Tensors:
        tensors = take(message, specs)
        if message.kind is MessageKind.ACT:
            seen = self._stages.setdefault(message.src, _Seen())
            seen.sent = max(seen.sent, bytes_of(tensors))
        return tensors

    def _give(self, label: tuple[int, MemoryPart], tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if self._live is not None and tensor.layout == torch.strided:
                self._live.alive.get(tensor.untyped_storage()._cdata, [None] * 3)[2] = label

    def _label(self, stage: int, part: MemoryPart) -> None:
        for seen in () if self._live is None else self._live.alive.values():
            seen[2] = (stage, part) if seen[2] is None else seen[2]

    def _parts(self, live: LiveBytes, action: Action) -> dict[tuple[int, MemoryPart], int]:
        for stage, part, tensor in self._pipeline.state.at_rest():
            self._give((stage, part), [tensor])
        # What it leaves; all else that it made is freed.
        self._label(action.stage, MemoryPart.MESSAGES if action.op is Op.B else MemoryPart.ACTIVATIONS)
        parts: dict[tuple[int, MemoryPart], int] = defaultdict(int)
        for _, size, label in live.at_most.values():
            if label != "":
                parts[label or (action.stage, MemoryPart.WORKSPACE)] += size
        return parts

    def note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._held + self._most())

    def figures(self, stage: int) -> Mapping[str, float]:
        """Figures of StageBytes that running the stage shows; none if it ran no forward."""
        seen = self._stages.get(stage)
        if seen is None or not seen.kept:
            return {}
        # One message from each producer a microbatch.
        producers: dict[int, int] = {}
        for message, size in seen.received.items():
            producers[message.src] = max(size, producers.get(message.src, 0))
        workspace = max(0, *seen.forward)
        return {
            "activations": max(0.0, median(seen.kept) - seen.sent + sum(producers.values())),
            "workspace": workspace,
            # The first backward of a step makes the gradients, too.
            "again": max(0, median_low(seen.backward) - workspace) if seen.backward else 0,
            "output": seen.sent,
        }


@contextmanager
def watch(pipeline: Pipeline, device: torch.device) -> Iterator[ActionMemory]:
    """Context in which a pipeline's actions are watched, which slows each operation on the CPU."""
    if any(local.worker.overlaps for local in pipeline.engine.ranks):
        raise ValueError(
            "watch_memory() of a schedule that runs forwards and backwards together, whose bytes can't be told apart: "
            "expected the same schedule without `overlapped`, as in dataclasses.replace(schedule, overlapped=())"
        )
    is_cuda, state = device.type == "cuda", pipeline.state
    held = torch.cuda.memory_allocated(device) if is_cuda else state.held_bytes()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)  # earlier peaks do not count
    live = None if is_cuda else LiveBytes(tensor for *_, tensor in state.at_rest())
    memory, step = ActionMemory(pipeline, device, live, held=held), state.update.step
    with ExitStack() as stack:
        stack.enter_context(patch.object(state.update, "step", lambda: memory.run(lambda _: step(), memory.update)))
        for worker in (local.worker for local in pipeline.engine.ranks):
            for name in ("run", "put", "take"):
                watched = partial(getattr(memory, name), getattr(worker, name))
                stack.enter_context(patch.object(worker, name, watched))
        if live is not None:
            stack.enter_context(live)
        yield memory
    memory.note_peak()


def parts_at_peak(watched: ActionMemory, found: Sequence[tuple[int, int]]) -> dict[tuple[int, MemoryPart], int]:
    """Bytes in this process at its peak, by stage and part [bytes].

    Activations are what actions leave and what came for a forward; workspace is what an action makes and frees, also
    within operations, as `cpu_peaks` has `found` it.
    """
    for (action, parts, rose), (most, _) in zip(watched.moments, found, strict=True):
        parts[action.stage, MemoryPart.WORKSPACE] += max(0, most - rose)
    return max((parts for _, parts, _ in watched.moments), key=lambda parts: sum(parts.values()))


def stage_bytes(pipeline: Pipeline, watched: ActionMemory) -> tuple[StageBytes, ...]:
    state, schedule = pipeline.state, pipeline.schedule
    local = {stage: {**_held(pipeline, stage), **watched.figures(stage)} for stage in state.run.local_stages}
    most = max((held["weights"] for held in local.values()), default=0) or 1
    for held in local.values():  # measured for the stage with the most weights
        held["update"] = watched.for_update * held["weights"] / most
    with state.run.guard.together():
        everyone = state.run.collectives.gather(local, what="gathering the bytes of stages")
    merged: dict[int, dict[str, float]] = {stage: {} for stage in range(schedule.num_stages)}
    for one in everyone:
        for stage, figures in one.items():
            for name, size in figures.items():
                merged[stage][name] = max(size, merged[stage].get(name, 0.0))
    return tuple(StageBytes(**merged[stage]) for stage in range(schedule.num_stages))


def _held(pipeline: Pipeline, stage: int) -> dict[str, float]:
    """Bytes that a stage of this process holds at rest; the optimizer's are those that exist by now."""
    module = pipeline.parts.train.stages[stage].module
    parameters = list(module.parameters())
    optimizers = [one for one in pipeline.state.update.stages if one.stage == stage]
    return {
        "weights": bytes_of(parameters),
        "gradients": bytes_of(p for p in parameters if p.requires_grad),
        "optimizer": max((bytes_of(each.tensors()) for each in optimizers), default=0),
        "buffers": bytes_of(module.buffers()),
        "summing": pipeline.state.update.summing_bytes(stage, [p for p in parameters if p.requires_grad]),
    }
