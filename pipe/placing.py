"""Stages in their places: the model divided over the tensor group, cut, wired, and agreed on by all processes.

options, model, batch -> prepare -> Ground -> place_stages -> Placed: stages with the weights of their first owners
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from ..comm import Collectives, Guard
from ..partition.graph.forms import Arguments
from ..partition.graph.recorded.words import modules
from ..partition.graph.untouched import untouched
from .batch.agreement import SamePrograms, agreed, check_agreement, describe
from .batch.given import Given
from .batch.sequence import Slice
from .layout import Layout
from .modes import Mode, wire
from .parallel.member_shards import MemberShards, divide_over_group, refuse_divided
from .parallel.tensor_option import read_tensor_parallel
from .settings import Settings
from .slicing import check_stages
from .stages.build import CutModel, cut_model
from .stages.ownership import Ownership
from .stages.randomness import Seeder
from .stages.shapes import Signature
from .stages.unchanged import Unchanged
from .stages.wiring import OutputSpecs, same_outputs
from .verify.plain import PlainModule
from .verify.regions import Regions

_log = logging.getLogger("stagewright")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Everything that stands before the model is cut.

    Arguments:
        model, stages: one of them.
        root: all modules of the model or stages.
        example: arguments of one microbatch, or of a slice of it, as stages run them.
        microbatch: their shapes and types.
        whole, slices: a microbatch and its slices, where there are any.
        plain: a copy of the model to compare with, in the process of the last stage.
        same_programs: compares what all processes run; None: there is one.
        verify: whether to keep what `Verifier` needs.
    """

    model: nn.Module | None
    stages: Sequence[nn.Module] | None
    root: nn.Module
    layout: Layout
    settings: Settings
    guard: Guard
    verify: bool
    example: Arguments
    microbatch: Signature
    whole: Given
    slices: Sequence[Slice]
    seeder: Seeder
    collectives: Collectives
    plain: PlainModule | None
    same_programs: SamePrograms | None

    @property
    def has_loss(self) -> bool:
        """Whether there is a loss_fn."""
        return self.settings.loss_fn is not None

    @property
    def num_replicas(self) -> int:
        """D."""
        return self.layout.place.replica[1]

    def cut(self) -> CutModel:
        """The model as it is now, cut."""
        layout, settings = self.layout, self.settings
        with untouched(settings.loss_fn, device=settings.device):  # a loss may know lists that forwards fill
            return cut_model(
                self.model,
                self.stages,
                example=self.example,
                num_stages=layout.schedule.num_stages,
                split_points=layout.split_points,
                plan=layout.plan,
                loss_fn=settings.loss_fn,
                loss_slot=None if settings.model_loss is None else settings.model_loss.find_slot,
                recompute=layout.recompute,
                seeder=self.seeder,
                agree=self.same_programs,
                device=settings.device,
            )


def prepare(
    first: Callable[[], Arguments],
    *,
    model: nn.Module | None,
    stages: Sequence[nn.Module] | None,
    layout: Layout,
    settings: Settings,
    guard: Guard,
    verify: bool,
) -> Ground:
    """Seeds, a copy to compare with, and groups of processes. Collective over the processes.

    Arguments:
        first: gives arguments of a microbatch.

    Raises ValueError for a model that another pipeline has divided.
    """
    schedule, place = layout.schedule, layout.place
    collectives = Collectives(
        place, device=settings.device, timeout=settings.timeout, others_failed=guard.others_failed
    )
    guard.on_failure(collectives.abort)
    example = agreed(first, collectives, guard, what="the first batch")
    whole, slices = Given(arguments=example), []
    if schedule.num_slices > 1:
        slices = settings.sequence.cut(whole, schedule.num_slices)
        example = slices[0].given.arguments
    root = nn.ModuleList(stages) if model is None else model
    refuse_divided(root)
    judge = place.process_of(schedule.owners[-1][0], tensor=0)
    plain = PlainModule(root, settings.loss_fn, given=model is None) if verify and judge == place.world.rank else None
    return Ground(
        model=model,
        stages=stages,
        root=root,
        layout=layout,
        settings=settings,
        guard=guard,
        verify=verify,
        example=example,
        microbatch=Signature.of(example),
        whole=whole,
        slices=slices,
        seeder=Seeder(settings.seed, settings.device, runs_again=layout.recompute.runs_again, member=place.tensor[0]),
        collectives=collectives,
        plain=plain,
        same_programs=None if collectives.alone else SamePrograms(collectives, guard, Signature.of(example)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The cut model, and this process's stages of it.

    Arguments:
        train, evaluate: how the stages run in each mode.
        local_stages: those of this process, ascending, on its device.
        num_parameters: [S] elements of each stage's parameters, those of all members of a tensor group.
        peers_in_parts: ranks to and from which tensors travel in parts of 1/T.
        regions: for `Verifier`, where a tensor group divides modules.
    """

    parts: CutModel
    train: Mode
    evaluate: Mode
    local_stages: Sequence[int]
    num_parameters: tuple[int, ...]
    ownership: Ownership
    unchanged: Unchanged
    peers_in_parts: frozenset[int]
    regions: Regions | None


def place_stages(ground: Ground) -> Placed:
    """Divide, cut, wire, agree, and spread the weights of first owners. Collective over the processes.

    Raises ValueError, on every rank alike, for what does not fit together; the user's model is whole again then.
    """
    layout, settings, collectives = ground.layout, ground.settings, ground.collectives
    schedule, place, root = layout.schedule, layout.place, ground.root
    same = ground.same_programs
    by_name = same is not None and same(
        lambda: modules(root), lambda: sorted(modules(root))
    )  # a ModuleDict of a set has another order in each process
    peers = layout.tensor.peers_in_parts(place, collectives)
    whole = agreed(
        lambda: _whole_outputs(ground) if peers else (None, None),  # before the model is divided
        *(collectives, ground.guard),
        what="cutting the model",
    )
    tensor = read_tensor_parallel(layout.tensor.parallel, root, count=place.tensor[1])
    if tensor.styles and place.world.rank == 0:
        _log.info("over %d tensor ranks:\n%s", tensor.count, tensor.table(root))
    regions = Regions(root, tensor.styles) if ground.verify and tensor.styles else None
    group = divide_over_group(root, tensor.styles, collectives, device=settings.device, on_region=ground.seeder.region)
    with group.undone_on_error():
        parts, train, evaluate = agreed(
            partial(_cut_and_wire, ground, whole), collectives, ground.guard, what="cutting the model"
        )
        _agree(ground, parts, tensor=f"{tensor}, sends {layout.tensor.sends}" if tensor.styles else "none")
        num_parameters = _count_parameters(parts, group)
        local_stages = sorted({s for rank in place.local_ranks for s in schedule.placement[rank]})
        ownership = Ownership(parts, owners=schedule.owners, local_stages=local_stages, group=group, by_name=by_name)
        unchanged = Unchanged(
            parts,
            is_compiled=settings.compile is not None,
            learns_beside=ground.has_loss and settings.optimizer is None,
        )
        for index in local_stages:
            parts.train.stages[index].module.to(settings.device)
            parts.evaluate.stages[index].module.to(settings.device)
        if ground.slices:
            check_stages(parts, local_stages, ground.whole, ground.slices, device=settings.device)
        ownership.spread_from_first_owners(collectives)
    if same is not None:
        same.settled()
    return Placed(
        parts=parts,
        train=train,
        evaluate=evaluate,
        local_stages=local_stages,
        num_parameters=num_parameters,
        ownership=ownership,
        unchanged=unchanged,
        peers_in_parts=peers,
        regions=regions,
    )


def _cut_and_wire(ground: Ground, whole: Sequence[OutputSpecs | None]) -> tuple[CutModel, Mode, Mode]:
    """The divided model's stages, to train and to evaluate.

    Arguments:
        whole: outputs in both modes, before it was divided.
    """
    schedule, microbatch, parts = ground.layout.schedule, ground.microbatch, ground.cut()
    modes = ((schedule, parts.train, whole[0]), (schedule.forward_only(), parts.evaluate, whole[1]))
    train, evaluate = (
        wire(order, stages, microbatch, alike=same_outputs(before, stages.outputs(microbatch)))
        for order, stages, before in modes
    )
    return parts, train, evaluate


def _whole_outputs(ground: Ground) -> tuple[OutputSpecs | None, OutputSpecs | None]:
    """Of the model's stages as it is now, to train and to evaluate."""
    try:
        parts = ground.cut()
    except ValueError:  # sizes in the model are those of a member already
        return None, None
    return parts.train.outputs(ground.microbatch), parts.evaluate.outputs(ground.microbatch)


def _count_parameters(parts: CutModel, group: MemberShards) -> tuple[int, ...]:
    full = {id(p): group.full_numel(name, p) for name, p in parts.root.named_parameters()}
    return tuple(sum(full.get(id(p), p.numel()) for p in each.module.parameters()) for each in parts.train.stages)


def _agree(ground: Ground, parts: CutModel, *, tensor: str) -> None:
    settings = ground.settings
    mine = describe(
        ground.layout.schedule,
        parts.names,
        seed=settings.seed,
        slice_lengths=settings.sequence.lengths,
        max_grad_norm=settings.max_grad_norm,
        delay_correction=settings.delay_correction,
        flush_first=settings.flush_first,
        grad_scaler=None if settings.grad_scaler is None else settings.grad_scaler.state_dict(),
        loss_fn=_kind_of_loss(settings),
        verify=ground.verify,
        tensor=tensor,
    )
    place, common = ground.layout.place, f", microbatches of {ground.microbatch}"
    check_agreement(mine, ground.collectives, ground.guard, rank=place.world.rank, replica=(place.replica[0], common))


def _kind_of_loss(settings: Settings) -> str:
    if settings.loss_fn is None:
        return "none"
    return "given" if settings.model_loss is None else "model"
