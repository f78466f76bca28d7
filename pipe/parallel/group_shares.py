"""Shares in a tensor group: which part of each weight a member holds, and full tensors from the parts of all members.

    weight [8, 4] cut by columns    member 0: rows 0..4    member 1: rows 4..8
    a norm's weight [4]             member 0: all of it    member 1: all of it, equal to member 0's

A full tensor is a function of what the members hold; what is whole is equal on all of them, and counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from uuid import uuid4

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ...comm import Collectives
from .cutting import cut_by_styles
from .share import Share
from .tensor_group import TensorGroup


class GroupShares:
    """Parts of a model's parameters by name; whatever has no name here is whole on every member.

    Arguments:
        by_member: name -> [T] shares of the members, for what is divided.
        originals: full tensors of what is divided, as this process was given them, until they are spread.
    """

    def __init__(
        self, collectives: Collectives, by_member: Mapping[str, Sequence[Share]], originals: Mapping[str, torch.Tensor]
    ) -> None:
        self._collectives = collectives
        self._by_member = by_member
        self._originals = dict(originals)
        self._own = collectives.tensor_members.index(collectives.rank)

    def is_divided(self, name: str) -> bool:
        """Whether members hold different parts."""
        return name in self._by_member

    def counts(self, name: str) -> bool:
        """Whether this member's part is counted in sums over the group: of what all of them hold, the first one's."""
        return name in self._by_member or self._collectives.is_first_member

    def share(self, name: str, local: torch.Tensor) -> Share:
        """This process's share of a tensor that it holds as `local`."""
        shares = self._by_member.get(name)
        return Share.whole(tuple(local.shape)) if shares is None else shares[self._own]

    def full_numel(self, name: str, local: torch.Tensor) -> int:
        """Elements of the full tensor."""
        return prod(self.share(name, local).full)

    def gather(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The full tensor from the members' parts. Collective over the tensor group."""
        shares = self._by_member.get(name)
        if shares is None:
            return local
        full = local.new_empty(shares[0].full)
        parts = self._collectives.tensor_gather(local, what=f"gathering the parts of {name!r}")
        for share, part in zip(shares, parts, strict=True):
            share.put(part, full)
        return full

    def own_part(self, name: str, local: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """This process's part of `value`, which is a full tensor or such a part already; of another shape: as it is."""
        share = self.share(name, local)
        is_full = tuple(value.shape) == share.full and share.full != share.local
        return share.take(value) if is_full else value

    def original(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The full tensor as this process was given it, before `forget_originals`."""
        return self._originals.get(name, local)

    def forget_originals(self) -> None:
        """All processes have their parts."""
        self._originals.clear()


def divide_over_group(
    root: nn.Module,
    styles: Mapping[str, ParallelStyle],
    collectives: Collectives,
    *,
    device: torch.device,
    on_region: Callable[[bool], None],
) -> GroupShares:
    """Cut a model's modules for the tensor group of this process. Collective over the tensor group.

    Arguments:
        styles: by module name.
        on_region: told when a forward comes to tensors of which each member has its own part, and back.

    Raises ValueError for modules that cannot be cut so, and where members were given models of other shapes.
    """
    members = collectives.tensor_members
    if len(members) == 1 or not styles:
        return GroupShares(collectives, {}, {})
    _refuse_hooks(root)
    parameters = dict(root.named_parameters(remove_duplicate=False))
    full = {id(parameter): parameter.data for parameter in parameters.values()}
    # DTensor remembers what it did on an equal mesh, with the groups of that one: of another pipeline, maybe closed.
    unique = f"tensor_{uuid4().hex}"
    mesh = DeviceMesh.from_group(collectives.tensor_group, device.type, mesh_dim_names=(unique,))
    group = TensorGroup(
        collectives.tensor_group, index=members.index(collectives.rank), count=len(members), on_region=on_region
    )
    shares = cut_by_styles(root, styles, group, mesh=mesh).shares
    by_id = {id(parameters[name]): share for name, share in shares.items()}
    own = {name: by_id[id(parameter)] for name, parameter in parameters.items() if id(parameter) in by_id}
    everyone = collectives.tensor_gather_objects(own, what="comparing the parts of a tensor group")
    for member, theirs in zip(members, everyone, strict=True):
        differing = [name for name in own if name not in theirs or theirs[name].full != own[name].full]
        if differing or own.keys() != theirs.keys():
            name = (differing or sorted(own.keys() ^ theirs.keys()))[0]
            raise ValueError(
                f"{collectives.name_of(member)} has divided {name!r} otherwise than {collectives.name_of(members[0])}: "
                f"expected the same model and tensor_parallel= in every process"
            )
    return GroupShares(
        collectives,
        {name: [theirs[name] for theirs in everyone] for name in own},
        {name: full[id(parameters[name])] for name in own},
    )


def _refuse_hooks(root: nn.Module) -> None:
    for name, parameter in root.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter {name!r} has a hook, which would see a part of a gradient under tensor_parallel=: expected "
                f"none, or a mesh without a tensor axis"
            )
