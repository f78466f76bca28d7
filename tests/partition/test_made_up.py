"""Code that reads values, on fake tensors: what it returns, changes and assigns is told in fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.inside import call_for_shapes, stand_ins
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

CPU = torch.device("cpu")


class Reads(nn.Module):
    """Reads a value, and does something beside."""

    def __init__(self, beside: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.beside = beside
        self.norm, self.lstm, self.weight = nn.BatchNorm1d(4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4))
        self.tries = 0

    def forward(self, x: Tensor) -> Any:
        self.tries += 1
        assert self.tries == 1, "the first try left a trace"
        float(x.detach().sum())
        return self.beside(self, x)


def infer(beside: Callable[[Any, Tensor], Any]) -> tuple[FakeTensor, Any, set[str], bool]:
    """(argument, value, names of written buffers, whether the argument was changed) of a run on fakes."""
    module = Reads(beside)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    with FakeTensorMode(allow_non_fake_inputs=True), stand_ins(module, CPU) as written:
        x = torch.empty(3, 4, requires_grad=True) * 1
        version = x._version
        value = call_for_shapes(module, (x,))
        assert all(isinstance(leaf, FakeTensor) for leaf in torch.utils._pytree.tree_leaves(value))
        changed = x._version != version
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert isinstance(x, FakeTensor)
    names = {name for name, buffer in module.named_buffers() if id(buffer) in written}
    return x, value, names, changed


def test_what_stands_in_is_laid_out_as_the_original_and_wants_a_gradient_where_it_does() -> None:
    module = nn.Linear(4, 3)
    module.weight.data = module.weight.data.t().contiguous().t()
    module.bias.requires_grad_(False)
    module.again, module.steps = module.weight, nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    module.register_buffer("mean", torch.zeros(5, dtype=torch.float64))
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with FakeTensorMode(allow_non_fake_inputs=True), stand_ins(module, CPU):
        fakes = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        assert module.again is module.weight
    assert list(fakes) == list(own) == ["weight", "bias", "steps", "mean"]
    for fake, real in zip(fakes.values(), own.values(), strict=True):
        assert isinstance(fake, FakeTensor)
        assert isinstance(fake, nn.Parameter) == isinstance(real, nn.Parameter)
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (real.shape, real.stride(), real.dtype, CPU)
        assert (fake.requires_grad, fake.is_leaf) == (real.requires_grad, True)
    assert all(each is own[name] for name, each in (*module.named_parameters(), *module.named_buffers()))


def test_what_comes_out_has_the_shapes_strides_and_graphs_of_values() -> None:
    x, value, written, changed = infer(lambda m, x: {"y": m.weight(x).t(), "n": x.detach().nonzero(), "same": x})
    assert (value["y"].shape, value["y"].stride(), value["y"].requires_grad) == ((4, 3), (1, 4), True)
    assert (value["n"].dtype, value["n"].requires_grad) == (torch.int64, False)
    assert value["same"] is x
    assert not written
    assert not changed


def test_a_view_of_what_went_in_shares_its_memory() -> None:
    x, value, _, _ = infer(lambda m, x: (x[1:], m.mask[1:]))
    assert value[0].untyped_storage()._cdata == x.untyped_storage()._cdata
    assert value[0].requires_grad
    assert value[1].shape == (3,)


@pytest.mark.parametrize(
    ("beside", "names"),
    [
        (lambda m, x: m.norm(x), {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}),
        (lambda m, x: m.mean.add_(x.detach().sum(0)) + x, {"mean"}),
        (lambda m, x: setattr(m, "mean", x.detach().sum(0)) or x, {"mean"}),
        (lambda m, x: m.lstm(x[:, None])[0], set()),
    ],
    ids=["batch norm", "in place", "assigned", "lstm"],
)
def test_buffers_that_are_written_are_known(beside: Callable[[Any, Tensor], Any], names: set[str]) -> None:
    _, _, written, changed = infer(beside)
    assert written == names
    assert not changed


def test_an_argument_that_is_changed_counts_that() -> None:
    assert infer(lambda m, x: x.mul_(2))[3]


def test_errors_of_values_are_told_and_parameters_take_no_memory() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        infer(lambda m, x: x @ x)
    sizes = []
    infer(lambda m, x: sizes.append(m.weight.weight.untyped_storage().nbytes()) or m.weight(x))
    assert sizes[-1] == 4


def test_integers_are_ones_where_zeros_are_an_error_and_each_try_begins_anew() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: Tensor, step: Tensor) -> Tensor:
            self.seen.append(int(step.item()))
            return x[:, :: self.seen[-1]]  # a step of 0 is an error

    counts = Counts()
    with FakeTensorMode():
        value = call_for_shapes(counts, (torch.empty(3, 4), torch.empty((), dtype=torch.int64)))
    assert (value.shape, counts.seen) == ((3, 4), [1])


def test_outside_of_a_fake_mode_it_is_a_call() -> None:
    assert call_for_shapes(nn.Identity(), (3,)) == 3
