"""From the arguments of a call to a batch of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...schedules import Schedule
from ..stages.shapes import InferredStages, signature
from .batches import Batch, check_inputs, check_like_example, split_target, split_tensor, to_device, weigh


class BatchReader:
    """Cuts batches for one mode of the pipeline.

    Arguments:
        schedule: of that mode.
        inference: of the stages' outputs.
        own: microbatches that the batch of a call holds: all, or those of this process's data replica.
        input_types: of the model's inputs.
        has_target: whether the last argument is the target.
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
        together: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._inference = inference
        self._own = own
        self._input_types = input_types
        self._has_target = has_target
        self._device = device
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
            columns = [split_tensor(x.to(device), len(own)) for x in inputs]
            whole_target = to_device(arguments[-1], device) if has_target else None
            targets = split_target(whole_target, len(own), num_samples)
            specs = [self._inference.outputs(signature(microbatch)) for microbatch in zip(*columns, strict=True)]
            sizes = [len(columns[0][j]) for j in self._like]
            return Batch(
                inputs=[[column[j] if k in own else None for k, j in enumerate(self._like)] for column in columns],
                targets=[targets[j] if k in own else None for k, j in enumerate(self._like)],
                specs=[specs[j] for j in self._like],
                sizes=sizes,
                group_size=self._group_size,
                weights=weigh(sizes, self._group_size),
                step=step,
            )
