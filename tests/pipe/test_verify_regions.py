"""Modules that a tensor group divides, each beside the plain module: a forgotten all-reduce of gradients is found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.inside import GPT, Column, GPTConfig, Regions, Shard, TensorGroup, cut_by_styles, read_tensor_parallel
from support.parts import Parts
from support.pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel


class ForgetfulColumn(ParallelStyle):
    """Columns as someone writes them for inference: nobody sums the gradient of the input."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters()):
            part = parameter.data.chunk(device_mesh.size())[device_mesh.get_local_rank()]
            module.register_parameter(name, nn.Parameter(part.clone()))
        return module


class ForgetfulPositions(ParallelStyle):
    """A norm of the own positions; nobody sums the gradients of its weights."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        size, rank = device_mesh.size(), device_mesh.get_local_rank()

        class Parts(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.chunk(size, 1)[rank].contiguous()

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                return everyone(gradients[0])

        class All(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return everyone(x)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                return gradients[0].chunk(size, 1)[rank].contiguous()

        def everyone(x: Tensor) -> Tensor:
            parts = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(parts, x.contiguous())
            return torch.cat(parts, 1)

        module.register_forward_pre_hook(lambda _, args: (Parts.apply(args[0]),))
        module.register_forward_hook(lambda _, args, out: All.apply(out))
        return module


class TwiceBias(ParallelStyle):
    """A row whose bias each member adds."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        part = module.weight.data.chunk(device_mesh.size(), 1)[device_mesh.get_local_rank()]
        module.register_parameter("weight", nn.Parameter(part.clone()))

        class AllReduce(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                x = x.clone()
                dist.all_reduce(x)
                return x

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                return gradients[0]

        module.register_forward_hook(lambda _, args, out: AllReduce.apply(out))
        return module


class InFloat32(Parts, weight=lambda: nn.Parameter(torch.ones(24, dtype=torch.float64))):
    """A norm that computes in it whatever it is given: sums of its parts round in another way."""

    def forward(self, x: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), (24,)) * self.weight.float()).type_as(x)


ATTENTION = {"blocks.*.attention.qkv": "column", "blocks.*.attention.out": "row"}
OPTIONS: dict[str, tuple[Any, str | None]] = {
    "right": ("auto", None),
    "torch": (ATTENTION | {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}, None),
    "positions": (ATTENTION | {"blocks.*.norm?": "sequence", "head.linear": Column(gather_output=True)}, None),
    "float32": (ATTENTION | {"blocks.*.norm?": "sequence"}, None),
    "column": (
        ATTENTION
        | {
            "blocks.0.up": ForgetfulColumn(),
            "blocks.[0]*.down": "row",
            "blocks.1.up": "column",
            "blocks.1.down": "row",
        },
        "module 'blocks.0', parts of which the tensor group divides ('blocks.0.attention.qkv' by 'column x3', "
        "'blocks.0.attention.out' by 'row', 'blocks.0.up' by 'ForgetfulColumn', 'blocks.0.down' by 'row'): a gradient "
        "of its inputs differs from the plain module's",
    ),
    "norm": (ATTENTION | {"blocks.1.norm2": ForgetfulPositions()}, "the gradient of 'blocks.1.norm2."),
    "bias": (
        {"blocks.0.up": "column", "blocks.0.down": TwiceBias()},
        "module 'blocks.0', parts of which the tensor group divides ('blocks.0.up' by 'column', 'blocks.0.down' by "
        "'TwiceBias'): its output differs from the plain module's",
    ),
}


def verdict(name: str) -> str | None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=32, length=8, layers=2, width=24, heads=4, dropout=0.1)).double()
    nn.init.ones_(model.blocks[0].down.bias)
    for block in model.blocks if name == "float32" else ():
        block.norm1, block.norm2 = InFloat32(), InFloat32()
    styles = read_tensor_parallel(OPTIONS[name][0], model, count=2).styles
    regions, whole = Regions(model, styles), copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,))
    shards = cut_by_styles(model, styles, TensorGroup.of_mesh(mesh), mesh=mesh)
    with regions.seen():
        model(torch.arange(16).view(2, 8))

    def together(mine: object) -> list[object]:
        found: list[object] = [None, None]
        dist.all_gather_object(found, mine)
        return found

    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    found = regions.first_difference(
        shard=lambda key, held: shards.get(key, Shard.whole(tuple(held.shape))),
        full=lambda key, held: whole.get_parameter(key),
        together=together,
    )
    assert all(p.grad is None and torch.equal(p, before[key]) for key, p in model.named_parameters())
    assert model.training
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIONS)
def test_the_innermost_region_is_named(gloo: Pool, name: str) -> None:
    expected = OPTIONS[name][1]
    for found in gloo.run(verdict, ranks=2, args=(name,)):
        assert (found is None) == (expected is None), found
        assert expected is None or expected in (found or "")
