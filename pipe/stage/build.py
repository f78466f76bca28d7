"""From a model to stages: cut it, and infer the inputs and outputs of each stage."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...partition.model.chain import given_stages, is_sequential
from ...partition.model.fakes import strict_fake_mode
from ...partition.model.forms import Arguments
from ...partition.model.memory import bytes_of, memory_of, overlap
from ...partition.model.model_units import model_units
from ...partition.model.modes import quiet_fakes, uncompiled
from ...partition.model.units import Agree, Cut, Entering
from ...partition.model.untouched import untouched
from ...partition.plans.plan import Plan
from ..context import Run
from ..settings.recompute import RecomputedModules
from .loss import give_loss, with_loss
from .shapes import InferredStages, Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class CutModel:
    """A model cut into stages.

    Arguments:
        root: of all names: the model (or a ModuleList of the user's stages), and, under `loss_fn.`, a loss with its own
            tensors.
        train: the stages in training.
        evaluation: makes them in evaluation, once.
        prepared: those that are made already, in training first.
        entering: how a copy of the model enters its units; see `Cut`.
        recomputed: the modules that run again in the backward.
        evaluate_like: makes the stages in evaluation for other arguments of the model, such as those of `predict`;
            None: for a chain, which takes one kind.
    """

    root: nn.Module
    train: InferredStages
    evaluation: Callable[[], InferredStages]
    prepared: Sequence[InferredStages]
    entering: Entering
    recomputed: RecomputedModules
    evaluate_like: Callable[[Arguments], InferredStages] | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.train.stages)

    def output(self, flat: Sequence[torch.Tensor], *, training: bool) -> object:
        return (self.train if training else self.evaluation()).output_form.assemble(flat)


def cut_model(run: Run, example: Arguments, agree: Agree | None) -> CutModel:
    """Cut a model, or use the user's stages; a loss that is a module is added to the last one. Raises ValueError for a
    model that can't be recorded or cut into the schedule's stages, for wrong split points, for a plan for another
    model, and for modules to recompute that no stage runs."""
    layout, options, root, loss_fn = run.layout, run.options, run.root, run.options.loss_fn
    is_distributed = layout.place.world.distributed
    infer = partial(InferredStages, root=root, seeder=run.seeder, device=options.device, loss_fn=loss_fn)
    with untouched(loss_fn, device=options.device):  # it may hold lists that forwards fill
        cut = _cut(run, example, agree)
        nodes = () if layout.plan is None else [node for stage in layout.plan.stages for node in stage.nodes]
        recomputed = RecomputedModules(layout.recompute, root, begins=nodes)
        with recomputed.checked():
            loss_slot = None if options.model_loss is None else options.model_loss.find_slot
            train = infer(cut, Signature.of(example), training=True, loss_slot=loss_slot)
        recomputed.refuse_parted(train.stages, cut.together)

        def evaluate_like(arguments: Arguments) -> InferredStages:
            with untouched(loss_fn, device=options.device):
                found = infer(cut.evaluation(arguments), Signature.of(arguments), training=False)
            _refuse_shared_writes(root, found, is_distributed=is_distributed)
            _refuse_strangers(run, found)
            give_loss(loss_fn, found.stages[-1])
            return found

        evaluation = cache(lambda: evaluate_like(example))
        held = {id(x) for stage in train.stages for x in (*stage.module.parameters(), *stage.module.buffers())}
        prepared = [train]
        if run.evaluates or not all(id(x) in held for x in (*root.parameters(), *root.buffers())):
            prepared.append(evaluation())  # where training does not show the stages of all tensors
        _refuse_shared_writes(root, train, is_distributed=is_distributed)
        _refuse_strangers(run, train)
        if layout.plan is not None:
            _check_parameters(layout.plan, [stage.module for stage in train.stages])
        give_loss(loss_fn, train.stages[-1])
    return CutModel(
        root=with_loss(root, loss_fn),
        train=train,
        evaluation=evaluation,
        prepared=prepared,
        entering=cut.entering,
        recomputed=recomputed,
        evaluate_like=None if run.options.model is None or is_sequential(run.options.model) else evaluate_like,
    )


def _cut(run: Run, example: Arguments, agree: Agree | None) -> Cut:
    layout, device, enter = run.layout, run.options.device, run.seeder.enter
    num_stages, points, plan = layout.schedule.num_stages, run.options.cut, layout.plan
    if points is not None and len(points) != num_stages - 1:
        raise ValueError(
            f"cut={list(points)} begins {len(points) + 1} stages, the schedule has {num_stages}: "
            f"expected {num_stages - 1} names (each begins a stage; the first stage needs none)"
        )
    if run.options.stages is not None:
        if len(run.options.stages) != num_stages:
            raise ValueError(
                f"a list of {len(run.options.stages)} stages, and the schedule has {num_stages} (ranks x chunks): "
                f"expected one module per stage"
            )
        return given_stages(run.options.stages, example, device=device, enter_unit=enter)
    assert run.options.model is not None
    units = model_units(run.options.model, example, enter_unit=enter, agree=agree, device=device)
    if plan is not None:
        return units.by_unit(_stage_by_node(plan, [unit.name for unit in units.units]))
    return units.evenly(num_stages) if points is None else units.at([*points])


def _stage_by_node(plan: Plan, names: Sequence[str]) -> dict[str, int]:
    """Node -> stage, for the model's cut units `names`; ValueError that names differences in a plan for others."""
    stages = {node: number for number, stage in enumerate(plan.stages) for node in stage.nodes}
    unknown = [node for node in stages if node not in names]
    missing = [name for name in names if name not in stages]
    if unknown or missing:
        story = []
        if unknown:
            near = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.5)
            hint = f" (it has {near[0]!r})" if near else ""
            story.append(f"its node {unknown[0]!r} is not in the model{hint}")
        if missing:
            story.append(f"the model's {missing[0]!r} is in no stage of it")
        raise ValueError(
            f"the plan is for another model ({len(stages)} nodes, the model has {len(names)}): {' and '.join(story)}. "
            f"Expected a plan that was made from a profile of this model (stagewright profile, stagewright plan)"
        )
    return stages


def _check_parameters(plan: Plan, stages: Sequence[nn.Module]) -> None:
    """ValueError unless each stage holds as many bytes of parameters as in the plan; in plans of older profiles tied
    parameters count only with the first stage that holds them. Where the plan splits tensors over up to T ranks, or
    experts, either number of bytes may be that of one rank, or have some parameters whole."""
    most = plan.tensor * plan.expert
    seen: set[int] = set()
    for number, (planned, module) in enumerate(zip(plan.stages, stages, strict=True)):
        own = list(module.parameters())
        held = sum(p.numel() * p.element_size() for p in own)
        fresh = sum(p.numel() * p.element_size() for p in own if id(p) not in seen)
        seen.update(map(id, own))
        known = planned.parameter_bytes
        if known is not None and not any(each / most - 0.5 <= known <= each * most + 0.5 for each in (held, fresh)):
            raise ValueError(
                f"the plan is for another model: stage {number} ({planned.nodes[0]} .. {planned.nodes[-1]}) has "
                f"{known:,.0f} bytes of parameters in the plan and {held:,} in the model. Expected a "
                f"plan made from a profile of a model of these sizes and types"
            )


def _refuse_shared_writes(root: nn.Module, mode: InferredStages, *, is_distributed: bool) -> None:
    stages_of: dict[int, list[int]] = {}
    for index, stage in enumerate(mode.stages):
        for x in (*stage.module.parameters(), *stage.module.buffers()):
            stages_of.setdefault(id(x), []).append(index)
    written = frozenset().union(*mode.example.written_buffers)
    if is_distributed:
        _refuse_one_memory(root, stages_of, written)
    for name, buffer in root.named_buffers():
        stages = stages_of.get(id(buffer), [])
        if id(buffer) in written and len(stages) > 1:
            raise ValueError(
                f"buffer {name!r} changes in a forward and is on each of stages {' and '.join(map(str, stages))}: "
                f"expected one stage, since no rank sees what another writes; use a separate module at each place "
                f"(copy.deepcopy), put both on one stage (cut=), or put the module into eval()"
            )


def _refuse_one_memory(root: nn.Module, stages_of: Mapping[int, list[int]], written: Collection[int]) -> None:
    """ValueError for two tensors over the same memory, in different processes, if one of them changes."""
    changing = {*written, *(id(p) for p in root.parameters() if p.requires_grad)}
    named = [*root.named_parameters(), *root.named_buffers()]
    held = [(name, x) for name, x in named if x.layout == torch.strided and id(x) in stages_of]
    over: dict[object, list[tuple[str, torch.Tensor]]] = {}  # by memory, those that reach the place that is looked at
    for name, x in sorted(held, key=lambda each: bytes_of(each[1])):
        begin, _ = bytes_of(x)
        here = [(other, y) for other, y in over.get(memory_of(x), []) if bytes_of(y)[1] > begin]
        for other, y in here:
            if stages_of[id(y)] != stages_of[id(x)] and {id(x), id(y)} & changing and overlap(x, y):
                raise ValueError(
                    f"{other!r} and {name!r}, on different stages, are two tensors over the same memory, and no "
                    f"process sees what another writes there: expected one nn.Parameter or buffer at both places "
                    f"(head.weight = embed.weight), which counts as one; .clone() for weights of their own; or both on "
                    f"one stage (cut=)"
                )
        over[memory_of(x)] = [*here, (name, x)]


def look_at_loss(run: Run, mode: InferredStages, target: object) -> None:
    """ValueError for a collective in the loss, as far as that runs on fake tensors."""
    loss, device = run.options.loss_fn, run.options.device
    if run.collectives.alone or loss is None or run.options.model_loss is not None:
        return
    joined: set[tuple[int, ...]] = set()
    with suppress(Exception), warnings.catch_warnings(), quiet_fakes(), uncompiled():
        warnings.simplefilter("ignore")  # of the user's code, which will repeat them when it runs
        with untouched(loss, device=device), strict_fake_mode(joined):
            empty, like = partial(torch.empty, device=device), partial(torch.empty_like, device=device)
            specs = mode.example.specs[-1]
            flat = [empty(x.shape, dtype=x.dtype, requires_grad=x.requires_grad) for x in specs]
            loss(mode.output_form.assemble(flat), pytree.tree_map_only(torch.Tensor, like, target))
    mode.joined[-1] |= joined
    _refuse_strangers(run, mode)


def _refuse_strangers(run: Run, mode: InferredStages) -> None:
    """ValueError for a collective of the user's over processes of which some do not run the stage."""
    place, owners = run.layout.place, run.layout.schedule.owners
    for index, groups in enumerate(() if run.collectives.alone else mode.joined):
        own = {process for rank in owners[index] for process in place.mesh.members(rank)}
        if strange := [list(ranks) for ranks in groups if not own.issuperset(ranks)]:
            raise ValueError(
                f"stage {index} ({mode.stages[index].name}), or its loss, calls a collective of processes "
                f"{strange[0]}, and only {sorted(own)} run it: the others would never come. Expected a group= of the "
                f"processes that run the stage, what needs none (GroupNorm for SyncBatchNorm, a loss of this batch "
                f'alone), or mesh={{"pipe": 1, "data": {len(strange[0])}}}'
            )
