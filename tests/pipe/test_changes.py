"""Values that code between the modules reads may change between two batches: they count from the next one on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import GuardsChanges as Changes
from support.parts import Parts
from support.small import WIDTH, X, Y, make
from torch import Tensor, nn


class Block(Parts, linear=lambda: nn.Linear(WIDTH, WIDTH), gain=1.0, count=0):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.linear(x)


class Scale(nn.Module):
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Net(nn.Module):
    """Reads attributes between its blocks: all that one may read so is in test_fuzz.py."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.options, self.weight = (
            nn.ModuleList(Block() for _ in range(4)),
            {"alpha": 1.0},
            torch.ones(()),
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * block.gain
        return x * self.options["alpha"] * float(self.weight * 1.0)


def nothing(*_: object) -> None:
    """A hook."""


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "module": (lambda m: m.blocks.append(Block()), "module 'blocks.4' runs now and did not when the stages were built"),
    "module without parameters": (lambda m: m.blocks.append(Scale()), "module 'blocks.4' runs now and did not"),
    "one less": (lambda m: m.blocks.pop(3), "module 'blocks.3' does not run now and did when"),
    "forward hook": (lambda m: m.register_forward_hook(nothing), r"the model has hooks \(forward hooks\): .* expected"),
    "forward pre hook": (lambda m: m.register_forward_pre_hook(nothing), "the model has hooks"),
    "backward hook": (lambda m: m.register_full_backward_hook(nothing), "the model has hooks"),
    "backward pre hook": (lambda m: m.register_full_backward_pre_hook(nothing), "the model has hooks"),
}


@pytest.mark.thorough(but=["backward hook"])
@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_stage_could_run_is_refused(change: Callable[[Any], object], message: str) -> None:
    model = Net()
    pipe = make(model=model)
    pipe.train_step(X, Y)
    pipe.eval_step(X, Y)
    change(model)
    for call in (pipe.eval_step, pipe.train_step):
        with pytest.raises(ValueError, match=f"(?i){message}"):
            call(X, Y)


def test_values_of_tensors_and_methods_of_the_class_count_from_the_next_batch_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Net()
    pipe = make(model=model, optimizer=None)
    for change in (
        lambda: None,
        lambda: model.weight.fill_(0.3),
        lambda: monkeypatch.setattr(
            Net, "forward", lambda own, x: own.blocks[3](own.blocks[2](own.blocks[1](own.blocks[0](x))))
        ),
    ):
        change()
        assert pipe.forward_backward(X, Y).loss == pytest.approx(F.mse_loss(model(X), Y).item(), rel=1e-5)


@pytest.mark.parametrize("stages", [False, True])
def test_a_module_that_is_added_to_a_chain_is_refused(stages: bool) -> None:
    chains = [nn.Sequential(Block(), Block()) for _ in range(2)]
    whole = nn.Sequential(*chains[0], *chains[1])
    pipe = make(stages=chains) if stages else make(model=whole)
    pipe.train_step(X, Y)
    chain: Any = chains[1] if stages else whole
    name = "1.2" if stages else "4"
    chain.append(Block())
    for call in (pipe.eval_step, pipe.train_step):
        with pytest.raises(ValueError, match=f"module '{name}' was added to an nn.Sequential whose children run in"):
            call(X, Y)
    del chain[-1]
    pipe.train_step(X, Y)


def test_a_module_within_a_unit_may_be_added() -> None:
    """Units run as they are."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(4)])
    pipe = make(model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    pipe.train_step(X, Y)
    model[2].append(nn.Tanh())
    assert pipe.train_step(X, Y).loss == pytest.approx(F.mse_loss(model(X), Y).item(), abs=1e-6)


def test_an_attribute_that_takes_turns_is_recorded_once_for_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    model, values = Net(), []
    pipe = make(model=model)
    monkeypatch.setattr(Changes, "note", lambda self, inputs, paths: values.extend(paths))
    for alpha in (0.5, 1.0, 0.5, 1.0, 0.5):
        model.options["alpha"] = alpha
        pipe.train_step(X, Y)
    assert values == ["model.options['alpha']"]


HOOKS = {
    "register_module_forward_hook": lambda module, args, output: output * 1.25,
    "register_module_forward_pre_hook": lambda module, args: (args[0] * 1.25,),
}


@pytest.mark.thorough(but=["register_module_forward_hook-False"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_all_modules_are_those_of_plain_pytorch(kind: str, late: bool) -> None:
    """Around the modules that run as they are, and the model itself; not around what stages are made of."""
    model = Net().double()
    pipe = make(model=model, example_inputs=(X.double(),)) if late else None
    if pipe is not None:
        pipe.eval_step(X.double(), Y.double())
    handle = getattr(torch.nn.modules.module, kind)(HOOKS[kind])
    try:
        pipe = pipe or make(model=model, example_inputs=(X.double(),))
        expected = F.mse_loss(model(X.double()), Y.double()).item()
        assert pipe.eval_step(X.double(), Y.double()).loss == pytest.approx(expected, rel=1e-12)
        assert pipe.train_step(X.double(), Y.double()).loss == pytest.approx(expected, rel=1e-12)
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_on_all_modules_that_a_chain_would_miss_is_refused(kind: str) -> None:
    """One that spares the chain itself, or only looks, is none."""
    model, seen = nn.Sequential(*[Block() for _ in range(4)]), []
    pipe = make(model=model)
    pipe.train_step(X, Y)
    register = getattr(torch.nn.modules.module, kind)
    for hook, is_refused in (
        (HOOKS[kind], True),
        (lambda module, *args: seen.append(type(module)), False),
        (lambda module, *args: None if module is model else HOOKS[kind](module, *args), False),
    ):
        handle = register(hook)
        try:
            expected = F.mse_loss(model(X), Y).item()
            seen.clear()
            with pytest.raises(ValueError, match="a hook on all modules") if is_refused else nullcontext():
                assert pipe.train_step(X, Y).loss == pytest.approx(expected, rel=1e-5)
            assert set(seen) <= {Block, nn.Linear}
        finally:
            handle.remove()


def test_a_hook_that_changes_gradients_of_all_modules_is_refused() -> None:
    """Recorded code has no backward of its own."""
    pipe = make(model=Net())
    pipe.train_step(X, Y)
    handle = torch.nn.modules.module.register_module_full_backward_hook(
        lambda m, given, out: tuple(g * 2 for g in given)
    )
    try:
        with pytest.raises(ValueError, match=r"a hook on all modules \(backward hook\) changes gradients of the model"):
            pipe.train_step(X, Y)
    finally:
        handle.remove()
    pipe.train_step(X, Y)


class Counts(Net):
    """In a dict, by itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.options["calls"] = calls = self.options.get("calls", 0) + 1
        return super().forward(x) / calls


def test_a_counter_in_a_dict_of_the_model_is_not_frozen() -> None:
    model = Counts()
    model.options["calls"] = 0
    with pytest.raises(ValueError, match=r"attribute \"options\['calls'\]\" of the model is changed by its own"):
        make(model=model)
