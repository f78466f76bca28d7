"""From a model to stages: cut it, and find out what each stage takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ...partition.graph.chain import given_stages, is_sequential
from ...partition.graph.forms import Arguments
from ...partition.graph.model_units import model_units
from ...partition.graph.units import Agree, Cut, Entering
from ...partition.plans.plan import Plan
from .loss import give_loss, with_loss
from .plan_cut import check_parameters, stage_by_node
from .randomness import Seeder
from .recompute import Recompute, RecomputedModules
from .shapes import InferredStages, LossSlot, Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class CutModel:
    """A model cut into stages.

    Arguments:
        model: the user's (or a ModuleList of the user's stages).
        root: of all names: the model, and beside it, under `loss_fn.`, a loss with tensors of its own.
        names: [S] the units of each stage, for people.
        train, evaluate: the stages in both modes.
        entering: how a copy of the model tells of its units; see `Cut`.
        recomputed: the modules that run again in the backward.
        evaluate_like: the stages in evaluation for other arguments of the model, such as those of `predict`; None: a
            chain takes one kind.
    """

    model: nn.Module
    root: nn.Module
    names: tuple[str, ...]
    train: InferredStages
    evaluate: InferredStages
    entering: Entering
    recomputed: RecomputedModules
    evaluate_like: Callable[[Arguments], InferredStages] | None

    def output(self, flat: Sequence[torch.Tensor], *, training: bool) -> object:
        """The model's output from the flat outputs of the last stage."""
        return (self.train if training else self.evaluate).output_form.assemble(flat)


def cut_model(
    model: nn.Module | None,
    stages: Sequence[nn.Module] | None,
    *,
    example: Arguments,
    num_stages: int,
    split_points: Sequence[str] | None,
    plan: Plan | None,
    loss_fn: object,
    loss_slot: LossSlot | None,
    recompute: Recompute,
    seeder: Seeder,
    agree: Agree | None,
    device: torch.device,
) -> CutModel:
    """Cut a model, or take the user's stages as they are; a loss that is a module goes to the last one.

    Raises ValueError for a model that cannot be recorded or cut into so many stages, for wrong split points,
    for a plan for another model, and for modules to be computed again that no stage runs.
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
        root: nn.Module = nn.ModuleList(stages)
        cut = given_stages(stages, example, device=device, enter_unit=seeder.enter)
    else:
        assert model is not None
        root = model
        cut = _cut(
            model,
            example,
            num_stages=num_stages,
            split_points=split_points,
            plan=plan,
            seeder=seeder,
            agree=agree,
            device=device,
        )
    recomputed = RecomputedModules(recompute, root)
    microbatch = Signature.of(example)
    with recomputed.checked():
        train = InferredStages(
            cut,
            microbatch,
            root=root,
            seeder=seeder,
            device=device,
            training=True,
            loss_slot=loss_slot,
            loss_fn=loss_fn,
        )
    recomputed.refuse_parted(train.stages, cut.together)
    evaluate = InferredStages(
        cut.evaluation(example), microbatch, root=root, seeder=seeder, device=device, training=False, loss_fn=loss_fn
    )
    for mode in (train, evaluate):
        _refuse_shared_writes(root, mode)
    if plan is not None:
        check_parameters(plan, [stage.module for stage in train.stages])
    give_loss(loss_fn, [train.stages[-1], evaluate.stages[-1]])
    return CutModel(
        model=root,
        root=with_loss(root, loss_fn),
        names=tuple(piece.name for piece in cut.pieces),
        train=train,
        evaluate=evaluate,
        entering=cut.entering,
        recomputed=recomputed,
        evaluate_like=None
        if model is None or is_sequential(model)
        else partial(
            _evaluate_like,
            evaluation=cut.evaluation,
            root=root,
            loss_fn=loss_fn,
            seeder=seeder,
            device=device,
        ),
    )


def _evaluate_like(
    example: Arguments,
    *,
    evaluation: Callable[[Arguments], Cut],
    root: nn.Module,
    loss_fn: object,
    seeder: Seeder,
    device: torch.device,
) -> InferredStages:
    """The stages in evaluation mode for other arguments."""
    found = InferredStages(
        evaluation(example), Signature.of(example), root=root, seeder=seeder, device=device, training=False
    )
    _refuse_shared_writes(root, found)
    give_loss(loss_fn, [found.stages[-1]])
    return found


def _cut(
    model: nn.Module,
    example: Arguments,
    *,
    num_stages: int,
    split_points: Sequence[str] | None,
    plan: Plan | None,
    seeder: Seeder,
    agree: Agree | None,
    device: torch.device,
) -> Cut:
    units = model_units(model, example, enter_unit=seeder.enter, agree=agree, device=device)
    if plan is not None:
        return units.by_unit(stage_by_node(plan, [unit.name for unit in units.units]))
    return units.evenly(num_stages) if split_points is None else units.at(split_points)


def _refuse_shared_writes(root: nn.Module, mode: InferredStages) -> None:
    """ValueError for a buffer that a forward changes and that stands on several stages."""
    stages_of: dict[int, list[int]] = {}
    for index, stage in enumerate(mode.stages):
        for buffer in stage.module.buffers():
            stages_of.setdefault(id(buffer), []).append(index)
    written = frozenset().union(*mode.example.written_buffers)
    for name, buffer in root.named_buffers():
        stages = stages_of.get(id(buffer), [])
        if id(buffer) in written and len(stages) > 1:
            raise ValueError(
                f"buffer {name!r} changes in a forward and stands on each of stages {' and '.join(map(str, stages))}: "
                f"expected one stage, since no rank sees what another writes; give each place a module of its own "
                f"(copy.deepcopy), let both stand on one stage (split_points=), or put the module into eval()"
            )
