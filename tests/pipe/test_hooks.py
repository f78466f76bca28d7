"""Hooks of modules, tensors and Parameters run as in plain PyTorch, or are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import same_gradients
from support.parts import GIVEN, Parts
from support.plain import linear
from support.small import WIDTH, X, Y, layers, make, sgd, stream
from torch import Tensor, nn

STREAMS = ["2bw", "pipedream"]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_hooks_of_parameters_run_once_a_microbatch_under_a_flush(kind: str, recompute: str) -> None:
    seen: list[object] = []
    model = layers()
    for parameter in (model[0].weight, model[5].bias):
        getattr(parameter, kind)(lambda x: seen.append(x.shape))
    make(model=model, recompute=recompute).train_step(X, Y)
    assert seen.count((WIDTH, WIDTH)) == seen.count((WIDTH,)) == 4


def halved_rate(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Half of it for weights, which `halve` does to their gradients."""
    rates = [0.05 if p.dim() == 2 else 0.1 for p in parameters]
    return torch.optim.SGD([{"params": [p], "lr": rate} for p, rate in zip(parameters, rates, strict=True)])


def weights_after(schedule: str, *, hooks: bool, optimizer: Any, before: bool = True, **options: Any) -> Any:
    """Weights after 7 batches, and the calls of hooks: on all weights from the build on, or only in batches 2 to 4."""
    torch.manual_seed(0)
    model, calls, handles = layers(), 0, []

    def halve(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gradient / 2

    def register() -> None:
        handles.extend(layer.weight.register_hook(halve) for layer in model if hooks)

    if before:
        register()
    pipe = stream(schedule, model=model, optimizer=optimizer, **options)
    for step in range(7):
        if step == 2 and not before:
            register()
        if step == 5 and not before:
            pipe.flush()
            for handle in handles:
                handle.remove()
        pipe.train_step(X, Y)
    pipe.flush()
    pipe.close()
    return [p.detach().clone() for p in model.parameters()], calls


@pytest.mark.thorough(but=["2bw-none"])
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}], ids=["none", "full"])
@pytest.mark.parametrize("schedule", STREAMS)
def test_hooks_of_parameters_change_the_gradients_of_every_version(schedule: str, options: dict[str, Any]) -> None:
    found, calls = weights_after(schedule, hooks=True, optimizer=sgd, **options)
    expected, none = weights_after(schedule, hooks=False, optimizer=halved_rate, **options)
    assert (calls, none) == (6 * 4 * 7, 0)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.thorough(but=["2bw"])
@pytest.mark.parametrize("schedule", STREAMS)
def test_hooks_come_and_go(schedule: str) -> None:
    """Registered while batches are under way, they count from then on; removed, not any more."""
    found, calls = weights_after(schedule, hooks=True, optimizer=sgd, before=False)
    assert 6 * 4 * 3 <= calls <= 6 * 4 * 5
    never, _ = weights_after(schedule, hooks=False, optimizer=sgd)
    assert not any(torch.equal(one, other) for one, other in zip(found, never, strict=True) if one.dim() == 2)


@pytest.mark.parametrize("schedule", STREAMS)
def test_a_hook_behind_the_accumulation_is_refused_in_a_stream(schedule: str) -> None:
    model = layers()
    pipe = stream(schedule, model=model)
    pipe.train_step(X, Y)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ValueError, match=r"parameter '0.weight' has a hook after the accumulation .* '" + schedule):
        pipe.train_step(X, Y)


def nothing(*_: object) -> None:
    """A hook."""


KINDS: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda m: m.register_forward_hook(nothing),
    "forward pre": lambda m: m.register_forward_pre_hook(nothing),
    "backward": lambda m: m.register_full_backward_hook(nothing),
    "backward pre": lambda m: m.register_full_backward_pre_hook(nothing),
}


@pytest.mark.parametrize("register", KINDS.values(), ids=KINDS)
def test_hooks_of_the_chain_itself_are_refused(register: Callable[[nn.Module], object]) -> None:
    """Its children run in its place: they were skipped without a word."""
    model = layers()
    pipe = make(model=model)
    pipe.train_step(X, Y)
    handle: Any = register(model)
    message = r"the model is an nn.Sequential with a hook, which would never run, .* expected the hook on a child"
    for call in (pipe.train_step, pipe.eval_step):
        with pytest.raises(ValueError, match=message):
            call(X, Y)
    with pytest.raises(ValueError, match=message):
        make(model=model)
    handle.remove()
    pipe.train_step(X, Y)


def test_hooks_of_stages_run() -> None:
    calls: list[str] = []
    stages = [layers(2), layers(2)]
    stages[0].register_forward_hook(lambda *_: calls.append("0"))
    pipe = make(stages=stages)
    pipe.train_step(X, Y)
    assert calls == ["0"] * 4
    stages[1].register_forward_hook(lambda *_: calls.append("1"))
    with pytest.raises(ValueError, match=r"module '1' is an nn.Sequential with a hook"):
        pipe.train_step(X, Y)


def test_a_forward_that_stands_on_the_object_is_run() -> None:
    """As wrappers put it there; the children alone would be another model."""
    model = layers(2)
    model.forward = lambda x: model[1](model[0](x)) * 2  # type: ignore[method-assign]
    twin = layers(2)
    twin.load_state_dict(model.state_dict())
    loss = make(model=model, optimizer=None).forward_backward(X, Y).loss
    assert loss == pytest.approx(F.mse_loss(twin(X) * 2, Y).item(), abs=1e-6)


class Registers(Parts, before=GIVEN, layers=lambda: nn.ModuleList(layers(2) for _ in range(2)), last=linear):
    """Does something to its own parts in its forward; the second one is a unit with parts."""

    def forward(self, x: Tensor) -> Tensor:
        handle = self.before(self)
        for layer in self.layers:
            x = layer(x)
        x = self.last(x)
        if handle is not None:
            handle.remove()
        return x


class Inside(Parts, first=linear, inner=GIVEN, last=linear):
    """The same below the model, where it can run whole."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def double(*given: Any) -> Any:
    return given[-1] * 2


def adds_in_place(module: nn.Module, args: Any, output: Tensor) -> None:
    output.add_(1)


def forgotten(model: Registers) -> None:
    model.total = linear().weight * 0
    model.total.register_hook(double).remove()


CHANGES_WHAT_FLOWS = r"registers a hook that changes what flows through a forward of a Linear .* Expected that before"
IN_FORWARD: dict[str, tuple[Callable[[Registers], Any], str]] = {
    "unit": (lambda m: m.last.register_forward_hook(double), CHANGES_WHAT_FLOWS),
    "within a unit": (lambda m: m.layers[1][0].register_forward_hook(adds_in_place), CHANGES_WHAT_FLOWS),
    "before": (lambda m: m.last.register_forward_pre_hook(lambda _, args: double(*args)), CHANGES_WHAT_FLOWS),
    "backward": (
        lambda m: m.last.register_full_backward_pre_hook(lambda _, given: (double(*given),)),
        "changes backward pre hooks of a Linear",
    ),
    "all": (lambda _: nn.modules.module.register_module_forward_hook(nothing), "registers a hook on all modules"),
    "parameter": (lambda m: m.last.weight.register_hook(double), "puts a hook on a parameter"),
    "frozen": (lambda m: setattr(m.last.weight, "requires_grad", False), "sets an attribute of a parameter"),
    "tensor": (forgotten, "removes a hook from a tensor"),
    "part": (lambda m: m.layers[1]._modules.update({"0": m.last}), "changes modules of a Sequential"),
    "method": (lambda m: vars(m.last).update(forward=double), "changes forward of a Linear"),
}


@pytest.mark.parametrize(("before", "said"), IN_FORWARD.values(), ids=IN_FORWARD)
def test_what_a_forward_does_to_its_parts_is_refused_where_no_stage_would_do_it(before: Any, said: str) -> None:
    """It acted while the forward was recorded, and never again."""
    tables = vars(nn.modules.module)["_global_forward_hooks"]
    with pytest.raises(ValueError, match=said):
        make(model=Registers(before), optimizer=None).forward_backward(X, Y)
    tables.clear()


@pytest.mark.parametrize("kind", ["unit", "within a unit", "before", "backward"])
def test_below_the_model_such_a_forward_runs_as_it_is(kind: str) -> None:
    model, twin = (Inside(Registers(IN_FORWARD[kind][0])).double() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    F.mse_loss(twin(X.double()), Y.double()).backward()
    make(model=model, optimizer=None, example_inputs=(X.double(),)).forward_backward(X.double(), Y.double())
    same_gradients(model, twin)


def test_a_hook_that_a_forward_registers_may_look() -> None:
    torch.manual_seed(0)
    seen: list[Tensor] = []
    model = Registers(lambda m: m.layers[0][1].register_forward_hook(lambda _, args, output: seen.append(output)))
    plain = Registers(nothing)
    plain.load_state_dict(model.state_dict())
    loss = make(model=model, optimizer=None).forward_backward(X, Y).loss
    assert loss == pytest.approx(F.mse_loss(plain(X), Y).item(), abs=1e-6)
