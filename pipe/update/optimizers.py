"""Optimizers: one a stage, over that stage's own parameters, and the norm over all stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence

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

    def step(self) -> None:
        """Update, step the learning rate, drop the gradients."""
        if self.optimizer is None:
            return
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch.clear_autocast_cache()  # an autocast around the whole loop would go on with casts of the old weights


def squared_norm(gradients: Iterable[torch.Tensor | None], *, device: torch.device) -> torch.Tensor:
    """Sum of squares of all gradients, float64 scalar on `device`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    present = [gradient for gradient in gradients if gradient is not None]
    for norm in torch._foreach_norm(present) if present else ():
        total += norm.to(torch.float64).square()
    return total


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by `factor`, in place."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def clip_factor(norm: float, max_norm: float) -> float:
    """What torch.nn.utils.clip_grad_norm_ multiplies with."""
    return min(1.0, max_norm / (norm + 1e-6))
