"""From a model to stages: cut it, wire the parts, and find out which tensors each stage holds."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...partition.graph.cut import cut_evenly
from ...partition.graph.export import BatchSizes, OutputForm
from ...partition.graph.trace import MODEL_INPUT, TracedModel, TracedStage, ValueRef
from ...partition.plans.plan import Plan
from .chain import Chain, Unit, sequential_units, stage_units
from .plan_cut import check_parameters, stage_by_node
from .randomness import Seeder
from .stage import Face


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A model cut into stages.

    Arguments:
        root: the user's model (or a ModuleList of the user's stages): its names are the original names.
        names: [S] for people.
        train, evaluate: [S] the stages in both modes.
        train_sizes, evaluate_sizes: the batch sizes for which the stages are right in both modes.
        train_output, evaluate_output: how the model's flat outputs go together in both modes; None for a chain (its
            last stage knows).
    """

    root: nn.Module
    names: tuple[str, ...]
    train: tuple[Face, ...]
    evaluate: tuple[Face, ...]
    train_sizes: BatchSizes
    evaluate_sizes: BatchSizes
    train_output: OutputForm | None = None
    evaluate_output: OutputForm | None = None

    def output(self, flat: Sequence[torch.Tensor], *, training: bool) -> object:
        """The model's output from the flat outputs of the last stage."""
        form = self.train_output if training else self.evaluate_output
        if form is not None:
            return form.assemble(flat)
        last = (self.train if training else self.evaluate)[-1].module
        assert isinstance(last, Chain)
        assert last.out_spec is not None
        return pytree.tree_unflatten(list(flat), last.out_spec)


def is_sequential(model: nn.Module) -> bool:
    """Whether the children run one after the other (an nn.Sequential without a forward of its own)."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def cut_model(
    model: nn.Module | None,
    stages: Sequence[nn.Module] | None,
    *,
    example_inputs: Sequence[torch.Tensor],
    num_stages: int,
    split_points: Sequence[str] | None,
    plan: Plan | None,
    seeder: Seeder,
) -> Parts:
    """Cut a model, or take the user's stages as they are.

    Raises ValueError for a model that cannot be traced or cut into so many stages, for wrong split points, and for a
    plan for another model.
    """
    if split_points is not None and len(split_points) != num_stages - 1:
        raise ValueError(
            f"split_points={list(split_points)} begin {len(split_points) + 1} stages, the schedule has {num_stages}: "
            f"expected {num_stages - 1} names (each begins a stage; the first stage needs none)"
        )
    if stages is not None:
        if len(stages) != num_stages:
            raise ValueError(
                f"stages= has {len(stages)} modules and the schedule has {num_stages} stages (ranks x chunks): "
                f"expected one module a stage"
            )
        return _chain_parts(nn.ModuleList(stages), stage_units(stages), seeder, spread=True)
    assert model is not None
    if is_sequential(model):
        assert isinstance(model, nn.Sequential)
        units = sequential_units(model)
        starts = _chain_starts(units, num_stages, split_points) if plan is None else _planned_starts(units, plan)
        groups = [units[a:b] for a, b in zip(starts, [*starts[1:], len(units)], strict=True)]
        parts = _chain_parts(model, groups, seeder, spread=False)
    else:
        parts = _traced_parts(
            model, example_inputs, num_stages=num_stages, split_points=split_points, plan=plan, seeder=seeder
        )
    if plan is not None:
        check_parameters(plan, [face.module for face in parts.train])
    return parts


def _chain_starts(units: Sequence[Unit], num_stages: int, split_points: Sequence[str] | None) -> tuple[int, ...]:
    if split_points is None:
        seen: set[int] = set()
        weights = []
        for unit in units:
            fresh = [p for p in unit.module.parameters() if id(p) not in seen]
            seen.update(map(id, fresh))
            weights.append(float(sum(p.numel() for p in fresh)))
        return cut_evenly(weights, num_stages=num_stages)
    place = {unit.name: i for i, unit in enumerate(units)}
    starts = [0]
    for point in split_points:
        if point not in place:
            near = difflib.get_close_matches(point, place, n=3, cutoff=0.3) or list(place)[1:4]
            raise ValueError(
                f"split point {point!r} is no child of the nn.Sequential: expected the name of the child that begins "
                f"a stage, such as {', '.join(map(repr, near))}"
            )
        if place[point] <= starts[-1]:
            raise ValueError(
                f"split point {point!r} stands at or before the one in front of it: expected names in order, "
                f"each leaving something to the stage before"
            )
        starts.append(place[point])
    return tuple(starts)


def _planned_starts(units: Sequence[Unit], plan: Plan) -> tuple[int, ...]:
    stage_of = stage_by_node(plan, [unit.name for unit in units])
    stages = [stage_of[unit.name] for unit in units]
    for i, (before, behind) in enumerate(pairwise(stages)):
        if behind not in (before, before + 1):
            raise ValueError(
                f"the plan puts {units[i].name!r} on stage {before} and {units[i + 1].name!r}, which follows it, on "
                f"stage {behind}: expected stages of an nn.Sequential in order"
            )
    return tuple(stages.index(number) for number in range(len(plan.stages)))


def _chain_parts(root: nn.Module, groups: Sequence[Sequence[Unit]], seeder: Seeder, *, spread: bool) -> Parts:
    def faces() -> tuple[Face, ...]:
        # The inputs of later stages become known with the first inference.
        return tuple(Face(module=Chain(units, seeder, spread=spread), inputs=()) for units in groups)

    names = tuple(u[0].name if len(u) == 1 else f"{u[0].name} .. {u[-1].name}" for u in groups)
    return Parts(
        root=root, names=names, train=faces(), evaluate=faces(), train_sizes=BatchSizes(), evaluate_sizes=BatchSizes()
    )


def with_model_inputs(parts: Parts, num_inputs: int) -> None:
    """A chain's first stage takes all the model's inputs."""
    if parts.train_output is None:
        for face in (parts.train[0], parts.evaluate[0]):
            face.inputs = tuple(ValueRef(MODEL_INPUT, slot) for slot in range(num_inputs))


def _traced_parts(
    model: nn.Module,
    example_inputs: Sequence[torch.Tensor],
    *,
    num_stages: int,
    split_points: Sequence[str] | None,
    plan: Plan | None,
    seeder: Seeder,
) -> Parts:
    train = TracedModel(model, example_inputs, enter_unit=seeder.enter)
    if plan is not None:
        stage_of = train.assign_groups(stage_by_node(plan, [group.name for group in train.groups()]))
    elif split_points is None:
        weights, crossing = train.parameter_weights(), train.crossing_bytes()
        stage_of = train.assign(cut_evenly(weights, num_stages=num_stages, crossing_bytes=crossing))
    else:
        stage_of = train.assign(train.starts_at(split_points))
    flags = [(module, module.training) for module in model.modules()]
    model.eval()  # exported modules refuse eval(): the evaluation is traced by itself, over the same parameters
    try:
        evaluation = TracedModel(model, example_inputs, enter_unit=None)
    finally:
        for module, training in flags:
            module.training = training
    same = evaluation.assign_like(train.holders(stage_of), num_stages)
    trained, evaluated = train.split(stage_of, num_stages), evaluation.split(same, num_stages)

    def faces(cut: Sequence[TracedStage]) -> tuple[Face, ...]:
        return tuple(Face(module=s.module, inputs=s.inputs, num_outputs=s.num_outputs) for s in cut)

    return Parts(
        root=model,
        names=tuple(stage.name for stage in trained),
        train=faces(trained),
        evaluate=faces(evaluated),
        train_output=train.output_form,
        evaluate_output=evaluation.output_form,
        train_sizes=train.batch_sizes,
        evaluate_sizes=evaluation.batch_sizes,
    )
