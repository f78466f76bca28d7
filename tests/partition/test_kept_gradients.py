"""Bytes of live tensors, counted between operations, and the first gradients that W keeps.

Such a gradient is as autograd's: its own memory, no view, of the type that is wanted of gradients.
"""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.inside import LiveBytes, SplitBackward, WeightGradients
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


def gradients(model: nn.Module, x: Tensor, *, halves: bool) -> Sequence[Tensor]:
    model.zero_grad()
    split, weights = SplitBackward(), WeightGradients()
    with split.forward():
        y = model(x)
    with split.backward(weights if halves else None):
        y.square().sum().backward()
    weights.add()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_as_autograds(grad_dtype: torch.dtype | None, times: int) -> None:
    """Sums over a batch and transposes are views of what was computed, which cannot be detached in place. Parts of a
    gradient, of a layer that is called several times, have its type before they are added."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(torch.bfloat16)
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    if grad_dtype is not None and hasattr(layer.weight, "grad_dtype"):  # torch >= 2.10
        layer.weight.grad_dtype = layer.bias.grad_dtype = grad_dtype
    model, x = nn.Sequential(*[layer] * times), torch.randn(5, 4, dtype=torch.bfloat16)
    expected = gradients(model, x, halves=False)
    for found, other in zip(gradients(model, x, halves=True), expected, strict=True):
        found.detach_()
        assert found.dtype == other.dtype
        assert found.stride() == other.stride()
        assert torch.equal(found, other)


def test_of_distributed_weights() -> None:
    """A tensor that consists of others has no memory of its own to ask for."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        class Distributed(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:
                return F.linear(DTensor.from_local(input, mesh, [Replicate()]), self.weight, self.bias).to_local()  # type: ignore[attr-defined]

        model, x = Distributed(4, 3), torch.randn(5, 4)
        for name, parameter in list(model.named_parameters()):
            setattr(model, name, nn.Parameter(DTensor.from_local(parameter.detach(), mesh, [Shard(0)])))
        expected = gradients(model, x, halves=False)
        for found, other in zip(gradients(model, x, halves=True), expected, strict=True):
            assert torch.equal(found.to_local(), other.to_local())
    finally:
        dist.destroy_process_group()


MEGABYTE = 1 << 20


def test_what_is_let_go_of_makes_room_and_views_are_no_new_bytes() -> None:
    with LiveBytes() as live:
        kept = torch.empty(MEGABYTE, dtype=torch.uint8)
        for _ in range(3):
            kept + kept  # one at a time
    live.settle()
    assert (live.level, live.most) == (MEGABYTE, 2 * MEGABYTE)
    assert kept[:1].numel() == 1
    before = torch.zeros(MEGABYTE, dtype=torch.uint8)
    with LiveBytes() as live:
        before.add_(1)
        view = before[1:].view(-1)
    assert (live.most, view.numel()) == (0, MEGABYTE - 1)


@pytest.mark.thorough
def test_a_step_whose_old_gradients_make_room() -> None:
    """Gradients of 4 layers of 1,000 x 1,000 weights go, activations come, new gradients come: [500, 1000] each."""
    layers = [nn.Linear(1000, 1000, bias=False) for _ in range(4)]
    model, x = nn.Sequential(*layers), torch.zeros(500, 1000)
    model(x).sum().backward()
    with LiveBytes(p.grad for p in model.parameters() if p.grad is not None) as live:
        for p in model.parameters():
            p.grad = None
        model(x).sum().backward()
    live.settle()
    assert live.level == 0
    assert live.most <= 2_000_100  # the last weight's gradient beside one gradient of an activation
    for p in model.parameters():
        p.grad = None
    with LiveBytes() as live:
        model(x).sum().backward()
    assert 16_000_000 <= live.most <= 20_000_100
