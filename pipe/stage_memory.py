"""Bytes of stages as a run has them: what they hold, and what a watched step has shown of their actions.

with watch(pipeline, device) as watched: a step        stage_bytes(pipeline, watched) -> [S] StageBytes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..partition.profiler.memory import bytes_of
from ..schedules import StageBytes
from .build import Pipeline
from .run.action_memory import ActionMemory, watching
from .update.gradients import buckets_of


@contextmanager
def watch(pipeline: Pipeline, device: torch.device) -> Iterator[ActionMemory]:
    """See PipelineModule.watch_memory."""
    parameters = pipeline.parts.root.parameters()
    gradients = [p.grad for p in parameters if p.grad is not None]
    is_cuda = device.type == "cuda"
    held = torch.cuda.memory_allocated(device) if is_cuda else pipeline.state.held_bytes()
    with watching(pipeline.engine, held=held, gradients=gradients, device=device) as memory:
        yield memory


def stage_bytes(pipeline: Pipeline, watched: ActionMemory) -> tuple[StageBytes, ...]:
    """See PipelineModule.stage_bytes."""
    state, schedule = pipeline.state, pipeline.schedule
    local = {stage: {**_held(pipeline, stage), **watched.figures(stage)} for stage in _local_stages(pipeline)}
    with state.run.guard.together():
        everyone = state.run.collectives.gather(local, what="gathering the bytes of stages")
    merged: dict[int, dict[str, float]] = {stage: {} for stage in range(schedule.num_stages)}
    for one in everyone:
        for stage, figures in one.items():
            for name, size in figures.items():
                merged[stage][name] = max(size, merged[stage].get(name, 0.0))
    return tuple(StageBytes(**merged[stage]) for stage in range(schedule.num_stages))


def _local_stages(pipeline: Pipeline) -> list[int]:
    ranks = [each.worker.rank for each in pipeline.engine.ranks]
    return sorted({stage for rank in ranks for stage in pipeline.schedule.placement[rank]})


def _held(pipeline: Pipeline, stage: int) -> dict[str, float]:
    """Bytes that a stage of this process holds, whatever runs; of the optimizer those that are there by now."""
    module = pipeline.parts.train.stages[stage].module
    parameters = list(module.parameters())
    optimizers = [one.optimizers for one in pipeline.state.update.stages if one.stage == stage]
    return {
        "weights": bytes_of(parameters),
        "gradients": bytes_of(p for p in parameters if p.requires_grad),
        "optimizer": max((bytes_of(each.tensors()) for each in optimizers), default=0),
        "buffers": bytes_of(module.buffers()),
        "summing": _summing(pipeline, stage, [p for p in parameters if p.requires_grad]),
    }


def _summing(pipeline: Pipeline, stage: int, parameters: Sequence[nn.Parameter]) -> float:
    """Bytes beside these gradients while the replicas of a stage add them up."""
    replicas = len(pipeline.schedule.owners[stage])
    if replicas == 1:
        return 0.0
    parts = [
        part for one in pipeline.state.update.stages if one.stage == stage for part in one.optimizers.parts.values()
    ]
    divided = [p for p in parameters if any(part.whole is p for part in parts)]
    whole = [p for p in parameters if not any(part.whole is p for part in parts)]
    if pipeline.schedule.is_asynchronous:  # copies for each of the others, and from each; updated parts
        return (replicas - 1) * (2 * bytes_of(whole) + 3 * bytes_of(divided) / replicas)
    copied = sum(bytes_of(whole[i] for i in bucket) for bucket in buckets_of(whole) if len(bucket) > 1)
    largest = max((bytes_of(divided[i] for i in bucket) for bucket in buckets_of(divided)), default=0)
    return copied + largest + bytes_of(divided) * (1 - 1 / replicas)
