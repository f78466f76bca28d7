"""Copies of modules: what they call and change is theirs, however they know of it; else the place is named."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.inside import Copies
from torch import Tensor, nn

KNOWN: dict[str, nn.Module] = {}


class Layer(nn.Module):
    """Counts its runs, and keeps the last result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.inner(x)
        return self.last


def closure(layer: Any) -> None:
    old = layer.forward
    layer.forward = lambda x: old(x) * 2


def closure_in_a_partial(layer: Any) -> None:
    old = layer.forward
    layer.forward = functools.partial(lambda module, x: old(x) + module.inner.weight, layer)


def decorated(layer: Any) -> None:
    @functools.wraps(layer.forward)
    def forward(x: Tensor) -> Any:
        return forward.__wrapped__(x)  # type: ignore[attr-defined]

    layer.forward = forward


def default(layer: Any) -> None:
    def forward(x: Tensor, parts: Any = (layer.inner,), *, scale: Tensor = layer.inner.weight) -> Any:
        return parts[0](x) * scale

    layer.forward = forward


def global_name(layer: Any) -> None:
    KNOWN["layer"] = layer
    exec(
        "def helper(x): return layer.inner(x)\ndef forward(x): return [helper(each) for each in (x,)][0]",
        KNOWN,  # type: ignore[arg-type]
    )
    layer.forward = KNOWN.pop("forward")
    layer.forward.__module__ = __name__


def holder(layer: Any) -> None:
    class Holder:
        def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
            self.call = call

        def __call__(self, x: Tensor) -> Tensor:
            return self.call(x)

    layer.forward = Holder(lambda x: layer.inner(x) * 2)


def weak(layer: Any) -> None:
    layer.me, old = weakref.ref(layer), weakref.ref(layer)
    layer.forward = lambda x: layer.me().inner(old().inner.weight + x)


def hook(layer: Any) -> None:
    layer.inner.register_forward_hook(lambda module, args, output: output * layer.inner.running_mean.sum())


def compiled(layer: Any) -> None:
    layer.forward = torch.compile(layer.forward, backend="eager")


def called_compiled(layer: Any) -> None:
    layer.compile(backend="eager")


@pytest.mark.parametrize(
    "around",
    [closure, closure_in_a_partial, decorated, default, global_name, holder, weak, hook, compiled, called_compiled],
)
def test_a_copy_runs_and_changes_what_is_its_own(around: Callable[[Any], None]) -> None:
    layer, x = Layer(), torch.randn(4, 2)
    around(layer)
    model = nn.Sequential(layer, nn.Linear(2, 2))
    copies = Copies(model)
    other = copies.of(model)
    assert copies.shared(other) is None
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3)
    ours, theirs = other(x), model(x)
    assert not torch.equal(ours, theirs)
    for p in model.parameters():
        p.data.mul_(3)
    model.load_state_dict({key: torch.zeros_like(b) for key, b in model.named_buffers()}, strict=False)
    assert (int(layer.inner.num_batches_tracked), int(other[0].inner.num_batches_tracked)) == (0, 1)
    layer.inner.reset_running_stats()
    assert torch.equal(ours, model(x))
    ours.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert other[0].inner.weight.grad is not None


def test_two_functions_share_a_variable_in_the_copy_too() -> None:
    def pair(part: nn.Module) -> tuple[Callable[..., None], Callable[..., nn.Module]]:
        def put(other: nn.Module) -> None:
            nonlocal part
            part = other

        return put, lambda: part

    model: Any = nn.Linear(2, 2)
    model.put, model.get = pair(model)
    other = Copies(model).of(model)
    assert other.get() is other
    other.put(other.bias)
    assert other.get() is other.bias
    assert model.get() is model


def test_what_reaches_nothing_is_left_alone() -> None:
    teacher, model = nn.Linear(2, 2), nn.Linear(2, 2)
    loss = lambda output: teacher(output).sum()  # noqa: E731
    copies = Copies(model)
    assert copies.instead(loss) is loss
    assert copies.instead(teacher) is teacher
    model.last = model(torch.ones(1, 2))  # type: ignore[assignment]  # computed, which deepcopy alone refuses
    assert torch.equal(Copies(model).of(model).last, model.last)


class Trainer:
    """Holds the model beside what cannot be copied."""

    def __init__(self, model: nn.Module) -> None:
        self.parts, self.lock, self.share = {"model": [model]}, threading.Lock(), 2.0

    def loss(self, x: Tensor) -> Tensor:
        return self.share * self.parts["model"][0](x).sum()


def test_what_holds_the_model_beside_much_else_is_copied_as_little_as_can_be() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    trainer = Trainer(model)
    copies = Copies(model)
    other = copies.of(model)
    for loss in (trainer.loss, lambda x: 1.0 * trainer.loss(x), functools.partial(Trainer.loss, trainer)):
        ours = copies.instead(loss)
        assert copies.shared(other, ours) is None
        ours(x).backward()
        assert model.weight.grad is None
        assert torch.equal(other.weight.grad, torch.full((2, 2), 2.0))
        other.weight.grad = None
    assert trainer.parts["model"] == [model]


class Itself(nn.Linear):
    def __deepcopy__(self, memo: object) -> nn.Module:
        return self


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + SHARED.bias


SHARED = nn.Linear(2, 2)


def test_what_a_copy_shares_is_named() -> None:
    parent: Any = nn.Sequential(nn.Linear(2, 2))
    parent[0].parents = [weakref.ref(parent)]
    method: Any = nn.Linear(2, 2)
    method.detached = method.weight.detach
    of_globals = nn.Sequential(SHARED, Reads(2, 2))
    for model, place in (
        (parent, "'parents' of module '0'"),
        (method, "'detached' of module ''"),
        (of_globals, "'forward' of module '1'"),
        (nn.Sequential(Itself(2, 2)), "module '0'"),
    ):
        copies = Copies(model)
        assert copies.shared(copies.of(model)) == place
