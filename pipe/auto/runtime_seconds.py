"""Seconds that the runtime takes on a rank around each action and around each step, independent of the stages.

    per microbatch    two stages under the engine, in this process - the same modules in a plain loop
    per action        a fourth of that: F and B of either stage
    per step          one stage under the engine: the time of a step that does not depend on its microbatches

The modules evict the core's caches, as a stage's compute does, so that the runtime's code and data come from memory.
Two batches of different length separate the time per microbatch from the time per step. Seconds are of this thread's
processor, on which a busy host has little effect. Clipping of gradients is measured with a profile's update.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ...comm import Guard, World
from ...comm.links import CACHE_BYTES
from ...partition.model.forms import Arguments
from ...partition.profiler.optimizers import NamedParameters, OptimizerFactory, make_optimizers, named
from ..build import Pipeline, build
from ..context import Run, choose_layout
from ..settings.given import Given
from ..settings.options import Options
from ..update.gradients import clip_gradients, norm_of, norm_part

_SHORT, _LONG = 4, 16  # microbatches
_SHORT_STEP, _LONG_STEP = 2, 8  # likewise, for what a step takes
_ROUNDS = 15
_ACTIONS = 4  # a microbatch
_WIDTH = 8
_TIMEOUT = 60.0


class _Caches:
    """Evicts a core's caches, as a stage's compute does, and adds up its own time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._values = torch.zeros(CACHE_BYTES // 4)

    def push(self) -> None:
        begun = time.thread_time()
        self._values.add_(1.0)
        self.seconds += time.thread_time() - begun


class _Tiny(nn.Module):
    """A layer that computes next to nothing; caches are cold after it in F, and before it in B."""

    def __init__(self, caches: _Caches) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self._caches = caches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        self._caches.push()
        if found.requires_grad:
            found.register_hook(lambda gradient: self._caches.push())  # type: ignore[no-untyped-call]
        return found


class _Still(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        ...


def measure_runtime_seconds(device: torch.device) -> tuple[float, float]:
    """Seconds of the runtime, without messages through a network; measuring takes about half a second.

    Returns (seconds around each F, B, I and W, seconds of a step besides its actions and the optimizer's step) [s].
    Both are 0 if stages run on another device than the host's processor, which then works ahead of it.
    """
    if device.type != "cpu":
        return 0.0, 0.0
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        caches = _Caches()
        modules = [_Tiny(caches) for _ in range(2)]
        short, long, plain, short_step, long_step = _medians(
            [
                _batch(_SHORT, caches),
                _batch(_LONG, caches),
                partial(_plain, modules, _LONG - _SHORT),
                _step(_SHORT_STEP, caches),
                _step(_LONG_STEP, caches),
            ],
            caches,
        )
    action = (long - short - plain) / (_LONG - _SHORT) / _ACTIONS
    microbatch = (long_step - short_step) / (_LONG_STEP - _SHORT_STEP)
    return max(0.0, action), max(0.0, short_step - _SHORT_STEP * microbatch)


def _medians(runs: Sequence[Callable[[], object]], caches: _Caches) -> list[float]:
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(_ROUNDS):
        for run, seconds in zip(runs, times, strict=True):
            begun, pushed = time.thread_time(), caches.seconds
            run()
            seconds.append(time.thread_time() - begun - (caches.seconds - pushed))
    return list(map(statistics.median, times))


def _batch(num_microbatches: int, caches: _Caches) -> Callable[[], object]:
    return partial(_pipeline(2, num_microbatches, caches).training.accumulate, _given(num_microbatches))


def _step(num_microbatches: int, caches: _Caches) -> Callable[[], object]:
    pipeline = _pipeline(1, num_microbatches, caches, optimizer=lambda parameters: _Still(parameters, lr=1.0))
    return partial(pipeline.training.step, _given(num_microbatches))


def _given(num_microbatches: int) -> Given:
    x = torch.ones(num_microbatches, _WIDTH)
    return Given(arguments=Arguments.of((x,)), target=x)


def _pipeline(
    num_ranks: int, num_microbatches: int, caches: _Caches, optimizer: OptimizerFactory | None = None
) -> Pipeline:
    options = Options(
        stages=[_Tiny(caches) for _ in range(num_ranks)],
        sizes={"pipe": num_ranks},
        num_microbatches=num_microbatches,
        loss_fn=F.mse_loss,
        optimizer=optimizer,
        device=torch.device("cpu"),
        timeout=_TIMEOUT,
    )
    make_layout = choose_layout(options)
    assert make_layout is not None
    run = Run(make_layout(World(rank=0, size=1)), options, Guard(None))
    return build(run, lambda: _given(1).arguments)


def _plain(modules: Sequence[nn.Module], num_microbatches: int) -> None:
    """F and B of each module as a profile times them, one microbatch after the other."""
    x = torch.ones(1, _WIDTH)
    for _ in range(num_microbatches):
        inputs: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        value = x
        for module in modules:
            inputs.append(value.detach().requires_grad_(bool(inputs)))
            value = module(inputs[-1])
            outputs.append(value)
        torch.autograd.backward(F.mse_loss(outputs[-1], x))
        for next_input, output in zip(inputs[:0:-1], outputs[-2::-1], strict=True):
            torch.autograd.backward(output, next_input.grad)


def clipping(factory: OptimizerFactory, max_grad_norm: float | None) -> OptimizerFactory:
    """The same optimizers; a step of the first clips all gradients to this norm before, unless it is None or 0."""
    if not max_grad_norm:
        return factory
    limit = max_grad_norm

    def make(parameters: NamedParameters) -> list[torch.optim.Optimizer]:
        optimizers = make_optimizers(factory, parameters, where="a unit")

        def clip(*_: object) -> None:
            held = [p for each in optimizers for group in each.param_groups for p in group["params"]]
            gradients = [p.grad for p in held]
            clip_gradients(gradients, norm=norm_of(norm_part(gradients, device=held[0].device)), max_norm=limit)

        for optimizer in optimizers[:1]:
            optimizer.register_step_pre_hook(clip)
        return optimizers

    return named(make)
