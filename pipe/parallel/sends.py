"""Sends between stages under a tensor group: whole from each member, or in parts of 1/T that are gathered on arrival.

"auto"    parts where ranks are on different hosts and the members of each on one: the network carries each byte once
"parts"   wherever all members hold the same tensor
"whole"   nowhere
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from ...comm import Collectives, MeshPlace
from ..stages.build import CutModel
from ..stages.shapes import InferredStages, Signature
from ..stages.wiring import OutputSpecs
from .tensor_option import TensorParallelLike

SENDS = ("auto", "parts", "whole")
_LEAST_BYTES = 1 << 16  # of a tensor that "auto" sends in parts: gathering a smaller one takes longer than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorAxis:
    """Options of the tensor axis.

    Arguments:
        parallel: tensor_parallel=, how the members of a group divide modules.
        sends: tensor_sends=.

    Raises ValueError for an unknown word.
    """

    parallel: TensorParallelLike | None = None
    sends: str = "auto"

    def __post_init__(self) -> None:
        if self.sends not in SENDS:
            raise ValueError(f"tensor_sends={self.sends!r}: expected one of {', '.join(map(repr, SENDS))}")

    @property
    def least_bytes(self) -> int:
        """Size of the smallest tensor that goes in parts."""
        return _LEAST_BYTES if self.sends == "auto" else 0

    def check(self, place: MeshPlace) -> None:
        """ValueError for a tensor group that divides nothing."""
        if place.tensor[1] > 1 and self.parallel is None:
            raise ValueError(
                f"a tensor group of {place.tensor[1]} processes without tensor_parallel=: each of them would do the "
                f"same. Expected tensor_parallel='auto', or {{'blocks.*.up': 'column', 'blocks.*.down': 'row'}}"
            )

    def peers_in_parts(self, place: MeshPlace, collectives: Collectives) -> frozenset[int]:
        """Ranks to and from which this process sends in parts, the same for all members of a group. Collective."""
        if place.tensor[1] == 1 or self.sends == "whole":
            return frozenset()
        (own,) = place.local_ranks
        others = [rank for rank in range(place.mesh.num_ranks) if rank != own]
        if self.sends == "parts":
            return frozenset(others)
        hosts = collectives.gather(socket.gethostname(), what="finding the hosts of all ranks")
        by_rank = [{hosts[process] for process in members} for members in zip(*place.planes(), strict=True)]
        return frozenset(
            rank for rank in others if len(by_rank[rank]) == len(by_rank[own]) == 1 and by_rank[rank] != by_rank[own]
        )


NO_TENSOR_AXIS = TensorAxis()


class WholeOutputs:
    """Outputs of a model's stages before it is divided: what is as large afterwards, all members hold alike.

    Arguments:
        cut: cuts the model as it is now.
        is_wanted: without, nothing is held to be alike.
    """

    def __init__(self, cut: Callable[[], CutModel], microbatch: Signature, *, is_wanted: bool) -> None:
        self._microbatch = microbatch
        self._specs: dict[bool, OutputSpecs] = {}
        if is_wanted:
            try:
                found = cut()
            except ValueError:  # sizes in the model are those of a member already
                return
            self._specs = {True: found.train.outputs(microbatch), False: found.evaluate.outputs(microbatch)}

    def alike(self, stages: InferredStages, *, training: bool) -> frozenset[tuple[int, int]]:
        """(stage, slot) of such outputs of the divided model's stages."""
        whole = self._specs.get(training)
        if whole is None:
            return frozenset()
        return frozenset(
            (stage, slot)
            for stage, (own, before) in enumerate(zip(stages.outputs(self._microbatch), whole, strict=True))
            for slot, (one, other) in enumerate(zip(own, before, strict=False))
            if one.shape == other.shape
        )
