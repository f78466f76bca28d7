"""From the arguments of a call to a batch of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from ...partition.graph.forms import Arguments
from ...schedules import Schedule
from ..stages.autocast import Autocast
from ..stages.shapes import InferredStages, Signature
from .batches import Batch, check_inputs, check_like_example, split_target, split_tensor, to_device, weigh
from .checksum import UNKNOWN, checksum, is_shape_alone


class Reads(NamedTuple):
    """Parts of a batch whose values the stages of a process read: slots of the model's inputs, and the target."""

    inputs: frozenset[int]
    target: bool


class BatchReader:
    """Cuts batches for one mode of the pipeline.

    Arguments:
        schedule: of that mode.
        inference: of the stages' outputs.
        own: microbatches that the batch of a call holds: all, or those of this process's data replica.
        input_types: of the model's inputs.
        has_target: whether the last argument is the target.
        reads: the model inputs that stages of this process read, and whether one reads the target; the others may be
            passed as meta tensors (shapes alone).
        compares: whether other ranks must have passed the same batch.
        together: entered around each cut. A batch that is refused is refused on every rank alike, unless each
            replica has its own: then the others, which would go on without this one, are told.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        inference: InferredStages,
        own: range,
        input_types: Sequence[torch.dtype],
        has_target: bool,
        device: torch.device,
        reads: Reads,
        compares: bool,
        together: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._inference = inference
        self._own = own
        self._input_types = input_types
        self._has_target = has_target
        self._device = device
        self.reads = reads
        self._compares = compares
        self._together = together
        self._group_size = schedule.group_size
        # Microbatches of other replicas are taken to be as large as one's own.
        self._like = [k // own.step for k in range(schedule.num_microbatches)]

    def read(self, arguments: Sequence[Any], *, step: int) -> Batch:
        """The batch; ValueError for one that does not fit the pipeline."""
        with self._together():
            own, device, has_target = self._own, self._device, self._has_target
            inputs = arguments[:-1] if has_target else arguments
            num_samples = check_inputs(inputs, len(own))
            check_like_example(inputs, self._input_types, has_target=has_target)
            target = arguments[-1] if has_target else None
            self._refuse_shapes_alone(inputs, target)
            sums = (checksum(inputs), checksum(target)) if self._compares else (UNKNOWN, UNKNOWN)
            columns = [split_tensor(to_device(x, device), len(own)) for x in inputs]
            whole_target = to_device(target, device)
            targets = split_target(whole_target, len(own), num_samples)
            microbatches = [Arguments.of(tensors) for tensors in zip(*columns, strict=True)]
            specs = [self._inference.outputs(Signature.of(each)) for each in microbatches]
            sizes = [len(columns[0][j]) for j in self._like]
            return Batch(
                inputs=[[column[j] if k in own else None for k, j in enumerate(self._like)] for column in columns],
                has_target=has_target,
                targets=[targets[j] if k in own else None for k, j in enumerate(self._like)],
                specs=[specs[j] for j in self._like],
                sizes=sizes,
                group_size=self._group_size,
                weights=weigh(sizes, self._group_size),
                step=step,
                autocast=Autocast.now(device.type),
                replica=(own.start, own.step),
                checksums=sums,
            )

    def _refuse_shapes_alone(self, inputs: Sequence[torch.Tensor], target: object) -> None:
        slots = [slot for slot in sorted(self.reads.inputs) if inputs[slot].is_meta]
        if slots or (self.reads.target and is_shape_alone(target)):
            what = f"input {slots[0]}" if slots else "the target"
            raise ValueError(
                f"{what} is a meta tensor, and a stage of this process reads it: expected its values; shapes alone "
                f"are for ranks whose stages read nothing (pipe.loader(..., same_shapes=True) does it right)"
            )
