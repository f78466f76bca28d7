"""The reference: one process, the whole model, the same microbatches one after the other.

Written from the specification alone; nothing here imports stagewright.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .cases import Case, Outcome
from .models import TASKS, make_batch, make_model, seeded_units

_WORD = 2**64


def mix(seed: int, step: int, microbatch: int, unit: int) -> int:
    """The seed at the entry of a unit: one splitmix64 finalizer a coordinate, modulo 2^64."""
    state = seed % _WORD
    for coordinate in (step, microbatch, unit):
        state = (state + 0x9E3779B97F4A7C15 * (coordinate + 1)) % _WORD
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % _WORD
        state ^= state >> 31
    return state


class Seeder:
    """Seeds torch's default generator at the entry of each unit, by the order in which the units run."""

    def __init__(self, units: list[nn.Module], *, seed: int) -> None:
        self.seed = seed
        self.step = self.microbatch = self.unit = 0
        for module in dict.fromkeys(units):
            module.register_forward_pre_hook(self._enter)

    def at(self, *, step: int, microbatch: int) -> None:
        self.step, self.microbatch, self.unit = step, microbatch, 0

    def _enter(self, module: nn.Module, args: Any) -> None:
        torch.default_generator.manual_seed(mix(self.seed, self.step, self.microbatch, self.unit))
        self.unit += 1


def cut(value: Any, num_microbatches: int) -> list[Any]:
    if isinstance(value, tuple):
        return list(zip(*(cut(part, num_microbatches) for part in value), strict=True))
    return list(torch.tensor_split(value, num_microbatches))


def accumulate(
    model: nn.Module, inputs: tuple[Tensor, ...], target: Any, *, case: Case, enter: Callable[[int], None]
) -> float:
    """Adds the gradients of one batch to `.grad`, microbatch 0 first, and returns its loss."""
    loss_fn = TASKS[case.task].loss
    num_samples = inputs[0].shape[0]
    micro_inputs = cut(inputs, case.num_microbatches)
    micro_targets = cut(target, case.num_microbatches)

    def run(k: int) -> Any:
        enter(k)
        return loss_fn(model(*micro_inputs[k]), micro_targets[k])

    loss = 0.0
    if case.task == "gpt-masked":
        pieces = [run(k) for k in range(case.num_microbatches)]
        count = sum(int(count) for _, count in pieces)
        for total, _ in pieces:
            _backward(total / count)
            loss += total.item()
        return loss / count
    for k in range(case.num_microbatches):
        piece = run(k) * (micro_inputs[k][0].shape[0] / num_samples)
        _backward(piece)
        loss += piece.item()
    return loss


def _backward(loss: Tensor) -> None:
    if loss.requires_grad:
        loss.backward()


def evaluate(model: nn.Module, inputs: tuple[Tensor, ...], target: Any, case: Case) -> tuple[float, Any]:
    task = TASKS[case.task]
    model.eval()
    with torch.no_grad():
        output = model(*inputs)
        loss = task.loss(output, target)
    model.train()
    return (float(loss[0] / loss[1]) if isinstance(loss, tuple) else float(loss)), output


def reference_model(case: Case) -> nn.Module:
    """The untrained model as one module, with its frozen parameters."""
    model = make_model(case.task, num_stages=case.num_stages)
    for name, parameter in model.named_parameters():
        if case.frozen and name.startswith(case.frozen):
            parameter.requires_grad_(False)
    return model.train()


class Joined(torch.optim.SGD):
    """Divides gradients by the norm of all, which no stage has by itself."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = 1 + torch.stack([gradient.norm() for gradient in gradients]).norm() if gradients else 1.0
        for gradient in gradients:
            gradient.div_(norm)
        super().step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "adamw-foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw-fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "decay": functools.partial(torch.optim.SGD, lr=0.05, weight_decay=0.1),
    "joined": functools.partial(Joined, lr=0.05),
}


def _rates_by_name(named: Sequence[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer | None]:
    """Up to three groups: a rate of its own for the first module, no decay on what has one dimension."""
    first = [p for name, p in named if name.startswith("0.")]
    flat = [p for name, p in named if not name.startswith("0.") and p.ndim < 2]
    others = [p for name, p in named if not name.startswith("0.") and p.ndim >= 2]
    groups = [{"params": first, "lr": 3e-2}, {"params": flat, "weight_decay": 0.0}, {"params": others}]
    return [torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, weight_decay=0.1)]


def _muon(named: Sequence[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer | None]:
    """Two optimizers; Muon computes in bfloat16 within, so nothing may differ in front of it."""
    matrices = [p for _, p in named if p.ndim == 2]
    others = [p for name, p in named if p.ndim != 2 and "bias" not in name]
    biases = [p for name, p in named if p.ndim != 2 and "bias" in name]
    groups = [{"params": biases, "lr": 3e-2}, {"params": others}]
    return [
        torch.optim.Muon(matrices, lr=2e-2) if matrices else None,
        torch.optim.SGD([group for group in groups if group["params"]], lr=5e-2, momentum=0.9)
        if biases or others
        else None,
    ]


def _grouped(named: Sequence[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer | None]:
    """Two optimizers, one of two groups."""
    matrices = [p for _, p in named if p.ndim > 1]
    biases = [p for name, p in named if p.ndim <= 1 and name.endswith("bias")]
    others = [p for name, p in named if p.ndim <= 1 and not name.endswith("bias")]
    groups = [{"params": biases, "lr": 0.02}, {"params": others, "weight_decay": 0.1}]
    groups = [group for group in groups if group["params"]]
    return [
        torch.optim.SGD(matrices, lr=0.05, momentum=0.5) if matrices else None,
        torch.optim.SGD(groups, lr=0.1) if groups else None,
    ]


# Over named parameters, several optimizers.
BY_NAME = {"rates-by-name": _rates_by_name, "muon": _muon, "grouped": _grouped}


def make_optimizers(name: str, named: Sequence[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    if name in BY_NAME:
        return [optimizer for optimizer in BY_NAME[name](named) if optimizer is not None]
    return [OPTIMIZERS[name]([parameter for _, parameter in named])]


def pipeline_optimizer(name: str) -> Any:
    """The same as `optimizer=` of a pipeline."""
    from stagewright import named

    return named(BY_NAME[name]) if name in BY_NAME else OPTIMIZERS[name]


def make_scheduler(decay: bool | str) -> Callable[[torch.optim.Optimizer], Any] | None:
    """None without decay; True halves the rate behind each update."""
    lr = torch.optim.lr_scheduler
    schedulers: dict[bool | str, Callable[[torch.optim.Optimizer], Any] | None] = {
        False: None,
        True: lambda optimizer: lr.StepLR(optimizer, step_size=1, gamma=0.5),
        "lambda": lambda optimizer: lr.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
        "plateau": lambda optimizer: lr.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.1),
        "one-cycle": lambda optimizer: lr.OneCycleLR(optimizer, max_lr=0.05, total_steps=40),
        "cyclic": lambda optimizer: lr.CyclicLR(optimizer, base_lr=1e-3, max_lr=5e-2, step_size_up=3),
        "sequential": lambda optimizer: lr.SequentialLR(
            optimizer, [lr.LinearLR(optimizer, total_iters=2), lr.ExponentialLR(optimizer, 0.5)], milestones=[2]
        ),
    }
    return schedulers[decay]


def step_scheduler(scheduler: Any, loss: float | None) -> None:
    """Behind an update; `loss` is the batch's behind its last one."""
    if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step()
    elif loss is not None:
        scheduler.step(loss)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients under all names of their parameters."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@functools.cache
def reference(case: Case) -> Outcome:
    """The protocol of `cases.py` on one process. Cached: many layouts share a case."""
    model = reference_model(case)
    seeder = Seeder(seeded_units(model), seed=case.seed)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    schedule = make_scheduler(case.decay)
    scheduler = None if schedule is None else schedule(optimizer)
    sizes = case.batch_sizes
    outcome = Outcome()

    def backward(call: int) -> None:
        inputs, target = make_batch(case.task, index=call, size=sizes[call])
        loss = accumulate(model, inputs, target, case=case, enter=lambda k: seeder.at(step=call, microbatch=k))
        outcome.losses.append(loss)

    with torch.random.fork_rng(devices=[]):
        backward(0)
        outcome.first_grads = gradients(model)
        outcome.first_state = copied(model.state_dict())
        for call in range(1, len(sizes) - 1):
            optimizer.zero_grad()
            backward(call)
            norm = None
            if case.max_grad_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm).item()
            outcome.grad_norms.append(norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        inputs, target = make_batch(case.task, index=0, size=sizes[0])
        outcome.eval_loss, outcome.eval_output = evaluate(model, inputs, target, case)
        optimizer.zero_grad()
        backward(len(sizes) - 1)
        outcome.last_grads = gradients(model)
        outcome.state = copied(model.state_dict())
    return outcome
