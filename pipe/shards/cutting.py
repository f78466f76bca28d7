"""Cutting a model for a tensor group: styles applied to the user's modules, and the shards of each process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as DTensorShard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from ...partition.deferred.recording import as_recipes
from ...partition.model.chain import is_sequential
from ...partition.model.copies import Copies
from ...partition.model.forms import Arguments
from ...partition.plans.plan import Plan
from ...partition.profile import ON, SAMPLES, Profile
from ...partition.profiler import profile_model
from ...partition.profiler.passes import Traffic
from .shard import Shard
from .style import Style, StyleError, cut_module, style_of
from .styles import Samples
from .tensor_group import TensorGroup
from .tensor_option import TensorParallelLike, TensorStyles, read_tensor_parallel


def cut_by_styles(
    model: nn.Module, styles: Mapping[str, ParallelStyle], group: TensorGroup, *, mesh: DeviceMesh | None = None
) -> dict[str, Shard]:
    """Divide the parameters of a model, which all members hold whole and equal, and the work of its forward.

    Returns the shards of divided parameters, by name; `uncut` restores the modules' classes and attributes. Parameters
    stay the same objects and become plain local tensors; under styles of torch's or the user's, the forward sees them
    as DTensors. `mesh`: of the group; needed for styles that are not ours.

    Raises StyleError, before anything is changed, for modules that one of our styles can't cut.
    """
    for name, style in styles.items():
        if isinstance(style, Style):
            style.check(name, model.get_submodule(name), group.count)
    shards: dict[str, Shard] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        own = style.cut(name, module, group) if isinstance(style, Style) else _foreign(name, module, style, group, mesh)
        shards.update({f"{name}.{key}" if name else key: shard for key, shard in own.items()})
    return shards


class AsDTensors(Style):
    """A module under a style of torch's: its forward sees DTensors, made of the local tensors at each call."""

    def __init__(self, style: ParallelStyle, made: Mapping[str, DTensor]) -> None:
        super().__init__()
        self._style = style
        self._divides_inputs = _divided(getattr(style, "desired_input_layouts", None))
        self._divides_outputs = _divided(getattr(style, "output_layouts", None))
        self._specs = {
            name: (each.device_mesh, each.placements, each.shape, each.stride()) for name, each in made.items()
        }

    def describe(self) -> str:
        return type(self._style).__name__

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        """The plain forward with DTensors as attributes that hide the parameters of their names."""
        for name, (mesh, placements, shape, stride) in self._specs.items():
            local = module._parameters[name]
            assert local is not None
            module.__dict__[name] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=shape, stride=stride
            )
        group.region(self._divides_inputs)
        try:
            return plain.forward(module, *args, **kwargs)
        finally:
            group.region(self._divides_outputs)
            for name in self._specs:
                module.__dict__.pop(name, None)


def _divided(layouts: object) -> bool:
    return any(isinstance(one, DTensorShard) for one in (layouts if isinstance(layouts, tuple | list) else (layouts,)))


def _foreign(
    name: str, module: nn.Module, style: ParallelStyle, group: TensorGroup, mesh: DeviceMesh | None
) -> dict[str, Shard]:
    """Apply a style that is not ours; then plain local tensors on the user's Parameters, and shards."""
    if mesh is None:
        raise StyleError(
            f"module {name!r} has the style {type(style).__name__}, which needs the processes of its group: expected "
            f"'column', 'row', 'sequence' or a style of stagewright's here"
        )
    before = dict(module.named_parameters())
    full = {key: parameter.detach().clone() for key, parameter in before.items()}
    parallelize_module(module, mesh, style, src_data_rank=None)
    shards = {}
    for key in before:
        after = module.get_parameter(key)
        local = after._local_tensor if isinstance(after, DTensor) else after.data
        shard = _shard(f"{name}.{key}", full[key], after, local, group)
        if not shard.is_whole:
            shards[key] = shard
    for inner_name, inner in module.named_modules():
        made = {key: each for key, each in inner._parameters.items() if isinstance(each, DTensor)}
        for key, each in inner._parameters.items():
            if each is not None:
                original = before[f"{inner_name}.{key}" if inner_name else key]
                original.data = (each._local_tensor if isinstance(each, DTensor) else each.data).contiguous()
                inner._parameters[key] = original
        if made:
            cut_module(inner, AsDTensors(style, made), group)
    if style_of(module) is None:
        cut_module(module, AsDTensors(style, {}), group)
    return shards


def _shard(name: str, full: torch.Tensor, after: nn.Parameter, local: torch.Tensor, group: TensorGroup) -> Shard:
    """Shard that a process holds after a foreign style, found by comparison."""
    shard = Shard.whole(tuple(full.shape))
    if isinstance(after, DTensor):
        for placement in after.placements:
            if type(placement) is DTensorShard:
                shard = shard.divided(placement.dim, index=group.index, count=group.count)
            elif not isinstance(placement, Replicate):
                raise StyleError(f"parameter {name!r} becomes {placement}: expected Shard(dim) or Replicate()")
    elif local.dim() == full.dim() and local.shape != full.shape:
        dim = next(dim for dim, size in enumerate(full.shape) if size != local.shape[dim])
        shard = shard.divided(dim, index=group.index, count=group.count)
    if shard.local != tuple(local.shape) or not torch.equal(shard.take(full), local):
        raise StyleError(
            f"parameter {name!r} of shape {tuple(full.shape)} becomes one of {tuple(local.shape)} that is not its part "
            f"{group.index} of {group.count} along a dimension: expected a style that makes DTensors of parameters, or "
            f"one of stagewright's"
        )
    return shard


def styles_of_plan(tensor: TensorStyles, plan: Plan | None, model: nn.Module) -> TensorStyles:
    """The styles of a plan's nodes: nodes by samples, or whole on each member, lose the model's styles. Raises
    StyleError for nodes that are no children of an nn.Sequential, and for modules that can't be cut by samples."""
    styles, order = dict(tensor.styles), [name for name, _ in model.named_modules()]
    for stage in plan.stages if plan is not None else ():
        if stage.tensor != tensor.count or not stage.splits:
            continue
        if not is_sequential(model) or not {*stage.nodes} <= {*order}:
            raise StyleError(
                f"the plan runs {stage.split_summary} of {stage.nodes[0]} .. {stage.nodes[-1]}: expected an "
                f"nn.Sequential with these children, or a plan from profiles without splits by node, for a "
                f"{type(model).__name__}"
            )
        for name, split, before in zip(stage.nodes, stage.splits, ("", *stage.splits), strict=False):
            if split != "divided":
                styles = {key: style for key, style in styles.items() if not f"{key}.".startswith(f"{name}.")}
            if split in SAMPLES:
                gathers = split != ON or name == stage.nodes[-1]
                styles[name] = Samples(split_input=before != ON, gather_output=gathers)
    return replace(tensor, styles={name: styles[name] for name in order if name in styles})


def profile_cut(
    model: nn.Module,
    example_inputs: Sequence[object] | Mapping[str, object] | Arguments,
    *,
    tensor: int,
    tensor_parallel: TensorParallelLike = "auto",
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Profile:
    """Measure a copy of the model as one of `tensor` ranks holds it; messages between them are counted, not sent.

    Arguments:
        tensor: 1: the model itself.
        tensor_parallel: as PipelineModule takes it.
        progress: called with the styles of modules, and with what is being done.
        options: of `profile_model`.

    Raises ValueError as both do.
    """
    if tensor == 1:
        return profile_model(model, example_inputs, progress=progress, **options)
    example = example_inputs if isinstance(example_inputs, Arguments) else Arguments.of_example(example_inputs)
    styles = read_tensor_parallel(tensor_parallel, model, count=tensor, example=example)
    if progress is not None:
        progress(f"one of {tensor} tensor ranks\n{styles.table(model)}")
    traffic, part = Traffic(), Copies(model).of(model)
    group = TensorGroup(None, index=0, count=tensor, on_bytes=traffic.tell)
    with as_recipes(part.parameters()):
        cut_by_styles(part, styles.styles, group)
    return profile_model(part, example_inputs, tensor=tensor, traffic=traffic, progress=progress, **options)
