"""The reference: one process, the whole model, the same microbatches one after the other.

Written from the specification alone; nothing here imports stagewright.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    """A tensor, or a tuple of tensors, cut along dimension 0."""
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
    """Loss and output of the model in eval mode; leaves it in training mode."""
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
    freeze(model, case.frozen)
    return model.train()


def freeze(model: nn.Module, prefixes: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith(prefixes) and prefixes:
            parameter.requires_grad_(False)


def make_optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": functools.partial(torch.optim.SGD, lr=0.1),
        "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
        "adamw-foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
        "adamw-fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    }
    return optimizers[name]


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


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
    optimizer = make_optimizer(case.optimizer)(model.parameters())
    scheduler = make_scheduler(optimizer) if case.decay else None
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
