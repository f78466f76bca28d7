"""Shards in a tensor or expert group: each member's part of each weight, and full tensors from all members' parts.

    weight [8, 4] cut by columns    member 0: rows 0..4    member 1: rows 4..8
    a norm's weight [4]             member 0: all of it    member 1: all of it, equal to member 0's

Whole tensors are equal on all members of a tensor group, and count once; those of an expert group are replicas'.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from unittest.mock import patch
from uuid import uuid4

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ...comm import Collectives
from ...partition.deferred.recording import as_recipes
from ..context import Run
from ..guards.rounding import SUMS, by_type
from ..shards.cutting import cut_by_styles
from ..shards.shard import Shard
from ..shards.style import style_of, uncut
from ..shards.tensor_group import TensorGroup

NO_STYLES: Mapping[str, ParallelStyle] = MappingProxyType({})
_COMPARISONS = 2  # update groups whose gradients are compared


class MemberShards:
    """Parts of a model's divided parameters by name; all others are whole on every member."""

    def __init__(
        self,
        collectives: Collectives,
        # Name -> [T] shards of the members, of a tensor group or, those in `experts`, of an expert group.
        by_member: Mapping[str, Sequence[Shard]],
        originals: Mapping[str, torch.Tensor],  # full tensors of this process's model, by name, until they are spread
        experts: Collection[str] = (),
    ) -> None:
        self._collectives = collectives
        self._by_member = by_member
        self._originals = dict(originals)
        self._experts = frozenset(experts)
        # Number by names of gradients; None: while none are made.
        self._comparisons = Counter[tuple[str, ...]]() if len(collectives.tensor_members) > 1 else None
        self._undo: Callable[[], None] | None = None

    def add_up(self, tensor: torch.Tensor) -> None:
        self._collectives.tensor_sum(tensor, what="adding up the norm of a tensor group's gradients")

    def compare_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Compare the gradients of whole tensors, in the first batches. Collective over the tensor group. Where a
        module computes with a part of the activations, its gradient is a part of a sum that is not made. Raises
        ValueError, on all members, for one that is not the same on all of them."""
        names = tuple(gradients)
        if self._comparisons is None or self._comparisons[names] == _COMPARISONS:
            return
        self._comparisons[names] += 1
        whole = {name: gradient for name, gradient in gradients.items() if name not in self._by_member}
        rows = [_figures(gradient).to(self._collectives.device) for gradient in whole.values()]
        if not rows:
            return
        mine = torch.stack(rows)
        members, name_of = self._collectives.tensor_members, self._collectives.name_of
        what = "comparing the gradients of a tensor group"
        first, *others = self._collectives.tensors_among(members, mine, what=what)
        for member, theirs in zip(members[1:], others, strict=True):
            for (name, gradient), one, other in zip(whole.items(), first.tolist(), theirs.tolist(), strict=True):
                if _differs(one, other, gradient):
                    raise ValueError(
                        f"the gradient of {name!r}, which the members of a tensor group hold whole, has norm "
                        f"{one[1]:.6g} on {name_of(members[0])} and {other[1]:.6g} on {name_of(member)}: its module "
                        f"computes with a part of the activations, and the parts are not added up. Expected "
                        f"'sequence' or SummedGradients() for it in tensor_parallel=, or a place that is not between "
                        f"a 'column' and its 'row'"
                    )

    def compared_by_verify(self) -> AbstractContextManager[object]:
        """Context without `compare_gradients`: verify names the module where gradients differ."""
        return patch.object(self, "_comparisons", None)

    @contextmanager
    def undone_on_error(self) -> Iterator[MemberShards]:
        """Context in which an error restores the user's undivided model."""
        try:
            yield self
        except BaseException:
            if self._undo is not None:
                self._undo()
            raise
        self._undo = None
        self._originals.clear()

    def is_divided(self, name: str) -> bool:
        return name in self._by_member

    def counts(self, name: str) -> bool:
        """Whether this member's part is counted in sums over the group; whole tensors count on the first member."""
        is_divided = name in self._by_member and name not in self._experts
        return is_divided or self._collectives.is_first_member

    def is_of_experts(self, name: str) -> bool:
        return name in self._experts

    def shard(self, name: str, local: torch.Tensor) -> Shard:
        shards = self._by_member.get(name)
        if shards is None:
            return Shard.whole(tuple(local.shape))
        together = self._collectives
        members = together.expert_members if name in self._experts else together.tensor_members
        return shards[members.index(together.rank)]

    def gather(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The full tensor from the members' parts. Collective over the group."""
        shards = self._by_member.get(name)
        if shards is None:
            return local
        full = local.new_empty(shards[0].full)
        collectives, what = self._collectives, f"gathering the parts of {name!r}"
        if name in self._experts:  # of which a member may have nothing
            parts = collectives.gather_among(collectives.expert_members, local.cpu(), what=what)
        else:
            parts = collectives.tensors_among(collectives.tensor_members, local, what=what)
        for shard, part in zip(shards, parts, strict=True):
            shard.put(part, full)
        return full

    def own_part(self, name: str, local: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """This process's part of `value`, if that is a full tensor; else `value`."""
        shard = self.shard(name, local)
        is_full = tuple(value.shape) == shard.full and shard.full != shard.local
        return shard.take(value) if is_full else value

    def is_whole_here(self, name: str) -> bool:
        """Whether this process had the whole tensor; with a deferred model each member makes only its part."""
        return name not in self._by_member or name in self._originals

    def original(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The full tensor of this process's model, within `undone_on_error`."""
        return self._originals.get(name, local)


def divide_over_group(
    run: Run, styles: Mapping[str, ParallelStyle], experts: Mapping[str, ParallelStyle] = NO_STYLES
) -> MemberShards:
    """Cut a model's modules for the tensor and the expert group of this process. Collective over both. `styles`,
    `experts`: by module name, for either. Raises ValueError for modules that can't be cut so, and where members have
    models of other shapes."""
    root, collectives = run.root, run.collectives
    axes = ((collectives.tensor_members, styles), (collectives.expert_members, experts))
    if not any(len(members) > 1 and own for members, own in axes):
        return MemberShards(collectives, {}, {})
    _refuse_hooks(root)
    parameters = dict(root.named_parameters(remove_duplicate=False))
    with as_recipes(root.parameters()):
        full = {name: parameter.data for name, parameter in parameters.items()}

    def undo() -> None:
        uncut(root)
        with as_recipes(root.parameters()):
            for name, parameter in parameters.items():
                parameter.data = full[name]

    try:
        is_meta = any(x.is_meta for x in full.values())
        of_tensors, of_experts = (
            _divide(run, members, own, parameters, is_meta=is_meta) if len(members) > 1 and own else {}
            for members, own in axes
        )
    except BaseException:
        undo()
        raise
    by_member = {**of_tensors, **of_experts}
    originals = {name: x for name, x in full.items() if name in by_member and not x.is_meta}
    found = MemberShards(collectives, by_member, originals, of_experts)
    found._undo = undo
    return found


def _divide(
    run: Run,
    members: tuple[int, ...],
    styles: Mapping[str, ParallelStyle],
    parameters: Mapping[str, nn.Parameter],
    *,
    is_meta: bool,
) -> dict[str, Sequence[Shard]]:
    root, collectives = run.root, run.collectives
    # DTensor caches by mesh, with that mesh's groups: for an equal mesh those of another, maybe closed, pipeline.
    unique, process_group = f"tensor_{uuid4().hex}", collectives.group_of(members)
    mesh = DeviceMesh.from_group(process_group, run.options.device.type, mesh_dim_names=(unique,))
    group = TensorGroup(
        process_group,
        index=members.index(collectives.rank),
        count=len(members),
        on_region=run.seeder.region,
        exchanges=run.exchanges,
    )
    with as_recipes(root.parameters()):
        shards = cut_by_styles(root, styles, group, mesh=mesh)
    by_id = {id(parameters[name]): shard for name, shard in shards.items()}
    own = {name: by_id[id(parameter)] for name, parameter in parameters.items() if id(parameter) in by_id}
    gathered = collectives.gather_among(members, (own, is_meta), what="comparing the parts of a group")
    first, first_is_meta = gathered[0]
    for member, (theirs, its_is_meta) in zip(members, gathered, strict=True):
        differing = [name for name in first if name not in theirs or theirs[name].full != first[name].full]
        differing = differing if its_is_meta == first_is_meta else [*first]
        if differing or first.keys() != theirs.keys():
            name = (differing or sorted(first.keys() ^ theirs.keys()))[0]
            raise ValueError(
                f"{collectives.name_of(member)} has divided {name!r} unlike {collectives.name_of(members[0])}: "
                f"expected the same model and tensor_parallel= in every process"
            )
    return {name: [theirs[name] for theirs, _ in gathered] for name in own}


def _figures(gradient: torch.Tensor | None) -> torch.Tensor:
    """[3] whether there is a gradient, its norm, its sum: float64."""
    if gradient is None:
        return torch.zeros(3, dtype=torch.float64)
    values = gradient.detach().to_dense().double() if gradient.is_sparse else gradient.detach().double()
    return torch.stack([values.new_ones(()), values.norm(), values.sum()])


def _differs(one: Sequence[float], other: Sequence[float], gradient: torch.Tensor | None) -> bool:
    """Whether figures differ by more than rounding; non-finite ones are not compared."""
    if one[0] != other[0]:
        return True
    if gradient is None or not all(map(math.isfinite, (*one, *other))):
        return False
    allowed = by_type(SUMS, gradient.dtype) * max(one[1], other[1])
    return abs(one[1] - other[1]) > allowed or abs(one[2] - other[2]) > allowed * math.sqrt(gradient.numel())


def refuse_divided(root: nn.Module) -> None:
    name = next((name for name, module in root.named_modules() if style_of(module) is not None), None)
    if name is not None:
        raise ValueError(
            f"module {name!r} is divided over a group already, by a PipelineModule before this one: expected a "
            f"new model, into which load_state_dict() puts that one's full_state_dict()"
        )


def _refuse_hooks(root: nn.Module) -> None:
    for name, parameter in root.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter {name!r} has a hook, which would see a part of a gradient under tensor_parallel= or "
                f"experts: expected none, or a mesh without a tensor or expert axis"
            )
