"""Pipelines in threads of one process: models are recorded, and random numbers drawn, by one of them at a time."""

from __future__ import annotations

import threading
import types
from collections import UserList
from typing import Any

import pytest
import torch
from support.parts import Parts
from support.small import WIDTH, X, Y, layers, make
from torch import Tensor, nn

from stagewright.pipe import PipelineModule


class Doubled(torch.autograd.Function):
    """Recording listens to these, whoever calls them."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 2


class Noisy(Parts, first=lambda: layers(2), last=lambda: layers(2), drop=lambda: nn.Dropout(0.5)):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(Doubled.apply(torch.tanh(self.first(x)))))


def losses(model: nn.Module, seed: int) -> list[float]:
    pipe: PipelineModule = make(model=model, seed=seed, example_inputs=None)
    return [pipe.train_step(X, Y).loss for _ in range(4)]


@pytest.mark.thorough
def test_pipelines_in_threads_train_as_one_after_the_other() -> None:
    torch.manual_seed(0)
    models = [[Noisy() for _ in range(4)] for _ in range(2)]
    for one, other in zip(*models, strict=True):
        other.load_state_dict(one.state_dict())
    expected = [losses(model, seed) for seed, model in enumerate(models[0])]
    found: dict[int, list[float]] = {}
    stop, mine = threading.Event(), torch.ones(2, WIDTH, requires_grad=True)

    def run(seed: int) -> None:
        found[seed] = losses(models[1][seed], seed)

    def plain() -> None:  # a thread of the user's own, beside
        while not stop.is_set():
            Doubled.apply(mine)

    beside = threading.Thread(target=plain)
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in (beside, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    beside.join()
    assert [found.get(seed) for seed in range(4)] == expected


class Peeking(Parts, first=lambda: layers(2), last=lambda: layers(2)):
    """Its forward keeps what a thread holds that has entered Function.apply now, and goes on when all is over."""

    def forward(self, x: Tensor) -> Tensor:
        apply = torch.autograd.Function.__dict__["apply"].__func__
        ENTERED.append(types.FunctionType(apply.__code__, apply.__globals__, "apply", None, apply.__closure__))
        return self.last(Doubled.apply(self.first(x)))


ENTERED: UserList[Any] = UserList()  # functions of the code that stood in; a plain list would be put back


@pytest.mark.thorough(but=["False"])
@pytest.mark.parametrize("again", [False, True])
def test_a_thread_that_entered_a_custom_function_while_a_model_was_recorded_goes_on_behind_it(again: bool) -> None:
    ENTERED.clear()
    plain = torch.autograd.Function.__dict__["apply"].__func__.__code__
    make(model=Peeking(), example_inputs=None).train_step(X, Y)
    if again:
        make(model=Peeking(), example_inputs=None).train_step(X, Y)
    assert torch.autograd.Function.__dict__["apply"].__func__.__code__ is plain
    x = torch.ones(2, requires_grad=True)
    entered = [apply for apply in ENTERED if apply.__code__ is not plain]
    assert entered
    for apply in entered:
        apply(Doubled, x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2,), 2.0 * len(entered)))
