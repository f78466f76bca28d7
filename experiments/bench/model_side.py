"""A whole model, cut in some way and trained over the processes of the bench; and the plan that measuring leads to."""

from __future__ import annotations

from typing import Any

import torch

from ...comm import join_world
from ...partition.plans.plan import Plan
from ...pipe import PipelineModule
from ...pipe.assembly import Settings
from ...pipe.batch.results import StepResult
from .whole_models import WholeProblem

_TIMEOUT = 120.0  # [s]


class ModelSide:
    """PipelineModule over a whole model.

    Arguments:
        cut: a plan, or a schedule with split points, as PipelineModule takes it.
    """

    def __init__(self, problem: WholeProblem, **cut: Any) -> None:
        self.pipe = PipelineModule(
            problem.make_model(),
            loss_fn=problem.loss_fn,
            optimizer=problem.optimizer,
            example_inputs=(problem.inputs,),
            timeout=_TIMEOUT,
            **cut,
        )
        self.loss: float | None = None
        self.result: StepResult | None = None
        self._batch = (problem.inputs, problem.target)
        self._has_optimizer = problem.optimizer is not None
        self._parameters = self.pipe.parameters()

    def step(self) -> None:
        """One batch, to its end on this rank."""
        if self._has_optimizer:
            self.result = self.pipe.train_step(*self._batch)
        else:
            self.result = self.pipe.forward_backward(*self._batch)
            for parameter in self._parameters:
                parameter.grad = None
        self.loss = self.result.loss


def plan_by_measuring(problem: WholeProblem, *, num_microbatches: int, **restrictions: Any) -> Plan:
    """What schedule="auto" decides on, for a given M and within `restrictions` of the planner's search.

    Collective over the processes; the same plan on each.
    """
    from ...pipe.auto import AutoLayout  # the profiler and the planner, which other jobs need not load

    device = torch.device("cpu")
    world = join_world(device=device, timeout=_TIMEOUT)
    settings = Settings(
        loss_fn=problem.loss_fn,
        optimizer=problem.optimizer,
        lr_scheduler=None,
        max_grad_norm=None,
        seed=0,
        device=device,
        timeout=_TIMEOUT,
    )
    layout = AutoLayout(problem.make_model(), world, settings, num_ranks=world.size, num_microbatches=num_microbatches)
    return layout.plan((problem.inputs, problem.target), **restrictions)
