"""Compression as it is added to a run: transports and sums that pack, codecs that are chosen, and what is owed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch

from ...comm import Collectives, LinkCodecs, LinkName, PackingTransport, TensorSpec
from ...comm.buckets import BucketSum
from ...comm.codecs import exact_type, num_bytes, orthonormal, product, start_matrix, unpack, wire_specs
from ..addition import Addition
from ..context import Run
from ..run.engine import Engine
from ..run.ranks import RankLinks
from ..run.training import Training
from ..settings.arguments import AUTO
from ..stage.shapes import Inferred
from ..stage.wiring import Mode
from ..trace.measurement import Measurement
from .choice import decides, take_codecs


class Built(Protocol):
    """The parts of `build.Pipeline` that compression connects to."""

    @property
    def engine(self) -> Engine: ...
    @property
    def training(self) -> Training: ...
    @property
    def measurement(self) -> Measurement: ...


class Compression(Addition):
    """Packed links of a run, for stages that are wired so.

    Raises ValueError for a boundary that does not exist, that packs nothing, or that packs twice.
    """

    def __init__(self, run: Run, mode: Mode, inferred: Inferred) -> None:
        self._run, self._mode, self._inferred = run, mode, inferred
        self.codecs = LinkCodecs()
        self.sums = PackedSums(self.codecs)
        compress = run.options.compress
        if isinstance(compress, Mapping) and AUTO not in compress:  # else it is measured first
            take_codecs(self.codecs, compress, mode, inferred)

    @property
    def sent(self) -> Mapping[LinkName, tuple[int, int]]:  # type: ignore[override]
        return self.codecs.sent

    def connected(self, pipeline: Built, links: RankLinks) -> None:
        """From here on what the training engine sends goes packed; under "auto" once its first steps are measured."""
        engine, compress = pipeline.engine, self._run.options.compress
        engine.ranks = [
            replace(local, transport=PackingTransport(local.transport, self.codecs)) for local in engine.ranks
        ]
        if compress is not None and AUTO in compress:
            training, costs = pipeline.training, pipeline.measurement.costs
            decides(self._run, self._mode, self._inferred, links, training, codecs=self.codecs, costs=costs)

    def exact(self) -> AbstractContextManager[None]:
        return self.codecs.paused()

    def loaded(self) -> None:
        self.codecs.memory.clear()

    def lost(self) -> str | None:
        if not self.codecs.remember:
            return None
        return "it has nothing of what compress= had left out and owed its links, which begin anew"


class PackedSums:
    """Sums of gradients over data groups, where they have a codec."""

    def __init__(self, codecs: LinkCodecs) -> None:
        self._codecs = codecs

    @property
    def is_on(self) -> bool:
        return self._codecs.data is not None and not self._codecs.is_paused

    def begin(
        self, named: Mapping[str, torch.Tensor], collectives: Collectives, *, ranks: Sequence[int], what: str
    ) -> Callable[[], list[torch.Tensor]]:
        return begin_packed_sum(self._codecs, named, collectives, ranks=ranks, what=what)


def begin_packed_sum(
    codecs: LinkCodecs, named: Mapping[str, torch.Tensor], collectives: Collectives, *, ranks: Sequence[int], what: str
) -> Callable[[], list[torch.Tensor]]:
    """Begin to sum these tensors over ranks, packed; the answer waits, and returns the sums, the same on all.

    "lowrank": M of each rank, and what it owes, as in PowerSGD: P = sum of M Q, orthonormal; then Q = sum of M^T P, and
    the sum is P Q^T, of which each owes what its mean lacks. Else all get what each has packed. Others go as they are.
    """
    codec, count = codecs.data, len(ranks)
    assert codec is not None
    whole = [x.detach().flatten(1) if x.dim() > 1 else x.detach() for x in named.values()]
    specs = [TensorSpec.of(x)._replace(requires_grad=True) for x in whole]
    keys = ["data" + name if len(wire_specs(codec, x)) > 1 else "" for name, x in zip(named, specs, strict=True)]
    memory, num_whole = codecs.memory, 2 * (count - 1) * num_bytes(specs) // count

    def begin(tensors: Sequence[torch.Tensor], replaced: int) -> Callable[[], list[torch.Tensor]]:
        total = BucketSum(tensors, collectives, what=what, ranks=ranks)
        total.leave_all(tensors)
        codecs.count("data", 2 * (count - 1) * total.num_bytes // count, replaced)
        return total.wait

    if codec.kind == "lowrank":
        exact = {i: whole[i].to(exact_type(whole[i].dtype)) for i, key in enumerate(keys) if key}
        owed = {i: x + memory.get(keys[i], 0.0) for i, x in exact.items()}
        starts = {i: memory.get("start" + keys[i], start_matrix(x, int(codec.level))) for i, x in owed.items()}
        first = begin([product(owed[i], starts[i]) if i in owed else x for i, x in enumerate(whole)], num_whole)

        def finish() -> list[torch.Tensor]:
            sums = first()
            lefts = {i: orthonormal(sums[i]) for i in owed}
            rights = begin([product(x.T, lefts[i]) for i, x in owed.items()], 0)()
            for (i, x), right in zip(owed.items(), rights, strict=True):
                sums[i] = product(lefts[i], right.T)
                memory[keys[i]] = (x - sums[i] / count).nan_to_num_(0.0, 0.0, 0.0)
                memory["start" + keys[i]] = orthonormal(right)
            return [total.to(x.dtype).view_as(x) for total, x in zip(sums, named.values(), strict=True)]

        return finish
    packed: list[torch.Tensor] = []
    for key, x in zip(keys, whole, strict=True):
        packed += codecs.pack(codec, x, key) if key else [x.contiguous()]
    mine = torch.cat([x.view(-1).view(torch.uint8) for x in packed])
    wait = collectives.exchange([[mine]] * count, [len(mine)] * count, what=what, ranks=ranks)
    codecs.count("data", (count - 1) * len(mine), num_whole)

    def add() -> list[torch.Tensor]:
        sums = [torch.zeros_like(x) for x in named.values()]
        for bytes_of_one in wait():
            parts = torch.split(bytes_of_one if len(bytes_of_one) else mine, [x.nbytes for x in packed])
            rest = iter([part.clone().view(x.dtype) for part, x in zip(parts, packed, strict=True)])
            for total, spec in zip(sums, specs, strict=True):
                found = tuple(next(rest) for _ in wire_specs(codec, spec))
                total += (found[0] if len(found) == 1 else unpack(codec, found, spec)).view_as(total)
        return sums

    return add
