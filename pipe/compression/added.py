"""Compression as it is added to a run: transports and sums that pack, codecs that are chosen, and what is owed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch

from ...comm import Collectives, LinkCodecs, LinkName, PackingTransport
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
from .sums import begin_packed_sum


class Built(Protocol):
    """What is connected: see `build.Pipeline`."""

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
