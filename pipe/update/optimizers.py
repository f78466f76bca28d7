"""Optimizers: one a stage, over that stage's own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class StageOptimizer:
    """The optimizer of one stage and its learning-rate schedule; nothing where the stage has no parameter to train."""

    def __init__(
        self,
        stage: int,
        parameters: Sequence[tuple[str, nn.Parameter]],
        factory: OptimizerFactory,
        scheduler: SchedulerFactory | None,
    ) -> None:
        self.stage = stage
        self._take: Callable[[str, torch.Tensor | None], None] | None = None  # instead of a step
        self.names = {id(parameter): name for name, parameter in parameters}
        own = [parameter for _, parameter in parameters]
        self.optimizer = factory(own) if own else None
        if parameters and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"optimizer= returned {type(self.optimizer).__name__}: expected a callable that takes a list of "
                f"parameters and returns a torch.optim.Optimizer, such as lambda params: torch.optim.AdamW(params)"
            )
        self.scheduler = scheduler(self.optimizer) if scheduler is not None and self.optimizer is not None else None
        if scheduler is not None and self.optimizer is not None and not callable(getattr(self.scheduler, "step", None)):
            raise ValueError(
                f"lr_scheduler= returned {type(self.scheduler).__name__}: expected a callable that takes an optimizer "
                f"and returns a scheduler, such as lambda optimizer: StepLR(optimizer, step_size=100)"
            )

    def refuse_if_it_cannot_stream(self) -> None:
        """ValueError for an optimizer that steps with anything but gradients and parameters given to it."""
        if self.optimizer is None:
            return
        closure = inspect.signature(type(self.optimizer).step).parameters.get("closure")
        kind = type(self.optimizer).__name__
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"optimizer {kind} evaluates the model again in its step (it needs a closure): expected one that steps "
                f"from gradients alone, such as AdamW, under an asynchronous schedule; or schedule='1f1b' and a loop "
                f"of your own"
            )
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self.names:
                    raise ValueError(
                        f"optimizer {kind} holds a parameter of shape {tuple(parameter.shape)} that it was not given: "
                        f"expected the stage's own parameters, whose versions the pipeline exchanges; or a flush "
                        f"schedule such as schedule='1f1b'"
                    )

    @contextmanager
    def held_back(self, take: Callable[[str, torch.Tensor | None], None]) -> Iterator[None]:
        """Within: `take` gets each parameter's name and gradient instead of a step; weights and rates stay."""
        self._take = take
        try:
            yield
        finally:
            self._take = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it updates this very tensor."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return any(parameter is tensor for group in groups for parameter in group["params"])

    def tensors(self) -> list[torch.Tensor]:
        """The optimizer's state."""
        states = [] if self.optimizer is None else list(self.optimizer.state.values())
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]

    def step(self) -> None:
        """Update, step the learning rate, drop the gradients."""
        if self.optimizer is None:
            return
        if self._take is not None:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self._take(self.names[id(parameter)], parameter.grad)
            self.optimizer.zero_grad(set_to_none=True)
            return
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch.clear_autocast_cache()  # an autocast around the whole loop would go on with casts of the old weights
