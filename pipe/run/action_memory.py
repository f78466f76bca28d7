"""Memory of single actions: what each leaves behind and takes for itself, seen while one step runs.

level |        ______            kept:  the level behind a forward, less that in front of it: what its backward needs
      |     __|      |__                (and its outputs, until they are sent)
      | ___|   F        |____    taken: the highest level within, above both
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import Protocol, cast

import torch

from ...partition.graph.forms import Tensors
from ...partition.profiler.memory import LiveBytes, bytes_of
from ...schedules import Action, Message, MessageKind, Op
from ...schedules.ir import BACKWARD_OPS
from .engine import Engine
from .worker import Worker


class _Level(Protocol):
    """Bytes of tensors there are now, and the most since `mark`, above what was there at the start."""

    def now(self) -> int: ...
    def mark(self) -> None: ...
    def most(self) -> int: ...


class _CpuLevel:
    def __init__(self, live: LiveBytes) -> None:
        self._live = live

    def now(self) -> int:
        self._live.settle()
        return self._live.level

    def mark(self) -> None:
        self._live.most = self.now()

    def most(self) -> int:
        return self._live.most


class _CudaLevel:
    def __init__(self, device: torch.device) -> None:
        self._device, self._start = device, torch.cuda.memory_allocated(device)

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._start

    def mark(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def most(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._start


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

    Attributes:
        peak_bytes: the most that the process held at once, with what it held at the start [bytes].
    """

    def __init__(self, level: _Level, *, held: int) -> None:
        self.peak_bytes = held
        self._held, self._level = held, level
        self._stages: dict[int, _Seen] = {}

    def run(self, worker: Worker, action: Action) -> None:
        """Carry out an action, watched."""
        self.note_peak()
        self._level.mark()
        before = self._level.now()
        worker.run(action)
        after, most = self._level.now(), self._level.most()
        seen = self._stages.setdefault(action.stage, _Seen())
        if action.op is Op.F:
            seen.kept.append(after - before)
            seen.forward.append(most - max(before, after))
        elif action.op in BACKWARD_OPS:
            seen.backward.append(most - before)

    def put(self, message: Message, tensors: Tensors) -> None:
        """A message arrived."""
        if message.kind is MessageKind.ACT:
            self._stages.setdefault(message.dst, _Seen()).received[message] = bytes_of(tensors)

    def taken(self, message: Message, tensors: Tensors) -> None:
        """A message is sent."""
        if message.kind is MessageKind.ACT:
            seen = self._stages.setdefault(message.src, _Seen())
            seen.sent = max(seen.sent, bytes_of(tensors))

    def note_peak(self) -> None:
        """Take the highest level so far into account."""
        self.peak_bytes = max(self.peak_bytes, self._held + self._level.most())

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


class _WatchedWorker:
    """A worker whose actions and messages are watched."""

    def __init__(self, worker: Worker, memory: ActionMemory) -> None:
        self._worker, self._memory = worker, memory

    def __getattr__(self, name: str) -> object:
        return getattr(self._worker, name)

    def run(self, action: Action) -> None:
        self._memory.run(self._worker, action)

    def put(self, message: Message, tensors: Tensors) -> None:
        self._memory.put(message, tensors)
        self._worker.put(message, tensors)

    def take(self, message: Message) -> Tensors:
        tensors = self._worker.take(message)
        self._memory.taken(message, tensors)
        return tensors


@contextmanager
def watching(
    engine: Engine, *, held: int, gradients: Sequence[torch.Tensor], device: torch.device
) -> Iterator[ActionMemory]:
    """Within: the actions of an engine are watched. On the CPU that makes each operation slower.

    Arguments:
        held: by the process, as of now [bytes].
        gradients: that are there, and may go within.
    """
    ranks = engine.ranks
    live = None if device.type == "cuda" else LiveBytes(gradients)
    memory = ActionMemory(_CudaLevel(device) if live is None else _CpuLevel(live), held=held)
    engine.ranks = [replace(each, worker=cast(Worker, _WatchedWorker(each.worker, memory))) for each in ranks]
    try:
        if live is None:
            yield memory
        else:
            with live:
                yield memory
        memory.note_peak()
    finally:
        engine.ranks = ranks
