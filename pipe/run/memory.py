"""Memory of a run: what stages hold, and what single actions leave behind and take, seen while one step runs.

with watch(pipeline, device) as watched: a step        stage_bytes(pipeline, watched) -> [S] StageBytes

level |        ______            kept:  the level behind a forward, less that in front of it: what its backward needs
      |     __|      |__                (and its outputs, until they are sent)
      | ___|   F        |____    taken: the highest level within, above both
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median, median_low
from unittest.mock import patch

import torch
from torch import nn

from ...partition.model.forms import Tensors
from ...partition.profiler.memory import LiveBytes, bytes_of
from ...schedules import Action, Message, MessageKind, Op, StageBytes
from ...schedules.ir import BACKWARD_OPS
from ..build import Pipeline
from ..update.gradients import buckets_of


@dataclass(slots=True)
class _Seen:
    """Bytes of one stage's actions, and of the messages that bring its inputs and take its outputs."""

    kept: list[int] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    received: dict[Message, int] = field(default_factory=dict)
    sent: int = 0


class ActionMemory:
    """Bytes that the actions of this process take, while it is watched.

    Arguments:
        live: counts them; None: CUDA's allocator does.
        held: at the start [bytes].

    Attributes:
        peak_bytes: the most that the process held at once, with what it held at the start [bytes].
    """

    def __init__(self, device: torch.device, live: LiveBytes | None, *, held: int) -> None:
        self.peak_bytes = self._held = held
        self._device, self._live = device, live
        self._stages: dict[int, _Seen] = {}

    def _level(self) -> int:
        """Above what was held at the start."""
        if self._live is None:
            return torch.cuda.memory_allocated(self._device) - self._held
        self._live.settle()
        return self._live.level

    def _most(self) -> int:
        """The highest level since the last action began."""
        return torch.cuda.max_memory_allocated(self._device) - self._held if self._live is None else self._live.most

    def run(self, run: Callable[[Action], None], action: Action) -> None:
        self.note_peak()
        before = self._level()
        if self._live is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._live.most = before
        run(action)
        after, most = self._level(), self._most()
        seen = self._stages.setdefault(action.stage, _Seen())
        if action.op is Op.F:
            seen.kept.append(after - before)
            seen.forward.append(most - max(before, after))
        elif action.op in BACKWARD_OPS:
            seen.backward.append(most - before)

    def put(self, put: Callable[[Message, Tensors], None], message: Message, tensors: Tensors) -> None:
        if message.kind is MessageKind.ACT:
            self._stages.setdefault(message.dst, _Seen()).received[message] = bytes_of(tensors)
        put(message, tensors)

    def take(self, take: Callable[[Message], Tensors], message: Message) -> Tensors:
        tensors = take(message)
        if message.kind is MessageKind.ACT:
            seen = self._stages.setdefault(message.src, _Seen())
            seen.sent = max(seen.sent, bytes_of(tensors))
        return tensors

    def note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._held + self._most())

    def figures(self, stage: int) -> Mapping[str, float]:
        """Figures of StageBytes that running it shows; of a stage that ran no forward, none."""
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
    """Within: the actions of a pipeline are watched. On the CPU that makes each operation slower."""
    is_cuda = device.type == "cuda"
    held = torch.cuda.memory_allocated(device) if is_cuda else pipeline.state.held_bytes()
    gradients = [p.grad for p in pipeline.parts.root.parameters() if p.grad is not None]  # they may go within
    live = None if is_cuda else LiveBytes(gradients)
    memory = ActionMemory(device, live, held=held)
    with ExitStack() as stack:
        for worker in (local.worker for local in pipeline.engine.ranks):
            for name in ("run", "put", "take"):
                watched = partial(getattr(memory, name), getattr(worker, name))
                stack.enter_context(patch.object(worker, name, watched))
        if live is not None:
            stack.enter_context(live)
        yield memory
    memory.note_peak()


def stage_bytes(pipeline: Pipeline, watched: ActionMemory) -> tuple[StageBytes, ...]:
    """See PipelineModule.stage_bytes."""
    state, schedule = pipeline.state, pipeline.schedule
    local = {stage: {**_held(pipeline, stage), **watched.figures(stage)} for stage in state.run.local_stages}
    with state.run.guard.together():
        everyone = state.run.collectives.gather(local, what="gathering the bytes of stages")
    merged: dict[int, dict[str, float]] = {stage: {} for stage in range(schedule.num_stages)}
    for one in everyone:
        for stage, figures in one.items():
            for name, size in figures.items():
                merged[stage][name] = max(size, merged[stage].get(name, 0.0))
    return tuple(StageBytes(**merged[stage]) for stage in range(schedule.num_stages))


def _held(pipeline: Pipeline, stage: int) -> dict[str, float]:
    """Bytes that a stage of this process holds, whatever runs; of the optimizer those that are there by now."""
    module = pipeline.parts.train.stages[stage].module
    parameters = list(module.parameters())
    optimizers = [one for one in pipeline.state.update.stages if one.stage == stage]
    return {
        "weights": bytes_of(parameters),
        "gradients": bytes_of(p for p in parameters if p.requires_grad),
        "optimizer": max((bytes_of(each.tensors()) for each in optimizers), default=0),
        "buffers": bytes_of(module.buffers()),
        "summing": _summing(pipeline, stage, [p for p in parameters if p.requires_grad]),
    }


def _summing(pipeline: Pipeline, stage: int, parameters: Sequence[nn.Parameter]) -> float:
    """Bytes beside these gradients while the replicas of a stage add them up."""
    replicas = len({*pipeline.schedule.owners[stage]})
    if replicas == 1:
        return 0.0
    parts = [part for one in pipeline.state.update.stages if one.stage == stage for part in one.parts.values()]
    divided = [p for p in parameters if any(part.whole is p for part in parts)]
    whole = [p for p in parameters if not any(part.whole is p for part in parts)]
    if pipeline.schedule.is_asynchronous:  # copies for each of the others, and from each; updated parts
        return (replicas - 1) * (2 * bytes_of(whole) + 3 * bytes_of(divided) / replicas)
    copied = sum(bytes_of(whole[i] for i in bucket) for bucket in buckets_of(whole) if len(bucket) > 1)
    largest = max((bytes_of(divided[i] for i in bucket) for bucket in buckets_of(divided)), default=0)
    return copied + largest + bytes_of(divided) * (1 - 1 / replicas)
