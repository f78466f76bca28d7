"""Batch after batch without a flush: an asynchronous schedule fed by train_step.

    step(batch t)   every local rank runs call t of the stream; batches t - 1, t - 2, ... are still under way
    drain()         every local rank runs what is left; the next step begins an empty pipeline again

Calls and drains are collective, like every step: all ranks make them in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...schedules.lowering.stream import Stream
from ...schedules.program import RankProgram
from ..batch.batches import Batch
from ..run.engine import Engine
from ..stages.wiring import Wiring
from .updates import Known, Updates


class Streaming:
    """The stream of one process.

    Arguments:
        engine: with workers that have updates.
        stream: the schedule, call by call.
    """

    def __init__(self, engine: Engine, stream: Stream, wiring: Wiring) -> None:
        self.stream = stream
        self._engine = engine
        self._wiring = wiring
        self._first: int | None = None  # the batch that the stream began with; None: it is empty
        self._last = -1
        self._lost: str | None = None
        self._newest: Known | None = None

    @property
    def in_flight(self) -> bool:
        """Whether batches are under way."""
        return self._first is not None

    @property
    def is_lost(self) -> bool:
        """Whether an error has lost what was under way."""
        return self._lost is not None

    @property
    def updates(self) -> list[Updates]:
        """Of the local ranks."""
        return [local.worker.updates for local in self._engine.ranks if local.worker.updates is not None]

    def prepare(self) -> None:
        """Before a step: parameters that the user changed are taken over when the pipeline is empty.

        Raises ValueError for changes while batches are under way, and for a stream that an error has ended.
        """
        self._require_whole()
        everything = [weights for updates in self.updates for weights in updates.weights.values()]
        changed: dict[str, torch.Tensor] = {}
        for weights in everything:
            name = weights.changed_outside()
            if name is not None:
                self.refuse_changes(f"parameter {name!r} was changed")
                changed.update(zip(weights.names, (own.data for own in weights.own), strict=True))
        for weights in everything if changed else ():  # other ranks of this process may hold copies
            if not changed.keys().isdisjoint(weights.names):
                for name, own in zip(weights.names, weights.own, strict=True):
                    if name in changed and changed[name].data_ptr() != own.data_ptr():
                        own.data.copy_(changed[name])
                weights.adopt()

    def step(self, batch: Batch) -> Known | None:
        """Run one call on each local rank; returns what is newest known of any batch."""
        first = batch.step if self._first is None else self._first
        stream = self.stream

        def version(stage: int, index: int) -> int:
            return stream.version(stage, index, first_batch=first)

        for local in self._engine.ranks:
            if self._first is None:
                local.worker.begin(self._wiring, training=True)
            local.worker.enter(batch.step, batch, version=version)
            local.recorder.begin()
        self._first, self._last = first, batch.step
        self._run({r: stream.call(r, batch.step, first_batch=first) for r in self._ranks})
        return self._newest_known()

    def drain(self) -> None:
        """Run what is under way to its end. Nothing where nothing is."""
        if self._first is None:
            return
        self._require_whole()
        first, last = self._first, self._last
        self._run({r: self.stream.drain(r, last, first_batch=first) for r in self._ranks})
        self._first = None

    def rest(self) -> list[Known]:
        """What became known and was not returned, oldest first; each once."""
        known = list(self._speaker.known)
        for updates in self.updates:
            updates.known.clear()
        if known:
            self._newest = max([known[-1], *([] if self._newest is None else [self._newest])])
        return known

    def restart(self) -> None:
        """The weights were set from outside, with nothing under way: an error before is forgotten."""
        for updates in self.updates:
            updates.drop()
            updates.known.clear()
        self._first, self._lost, self._newest = None, None, None

    def take_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The weights were loaded: the next batch begins with them on every rank of this process."""
        for updates in self.updates:
            for weights in updates.weights.values():
                for own, name in zip(weights.own, weights.names, strict=True):
                    own.data.copy_(state[name])
                weights.adopt()

    def refuse_changes(self, what: str) -> None:
        """ValueError while batches are under way."""
        if self.in_flight:
            raise ValueError(
                f"{what} while batches {self._first} to {self._last} are in the pipeline: expected flush() before it"
            )

    @property
    def _ranks(self) -> list[int]:
        return [local.worker.rank for local in self._engine.ranks]

    @property
    def _speaker(self) -> Updates:
        """The local rank that knows first."""
        return self.updates[-1]

    def _run(self, programs: Mapping[int, RankProgram]) -> None:
        try:
            self._engine.run(programs)
        except BaseException as error:
            self._lost = f"{type(error).__name__}: {error}"
            for local in self._engine.ranks:
                local.worker.begin(self._wiring, training=True)
            for updates in self.updates:
                updates.drop()
            raise

    def _newest_known(self) -> Known | None:
        known = self._speaker.known
        if known:
            self._newest = known.pop()
        for updates in self.updates[:-1]:
            updates.known.clear()  # the same, a little later
        return self._newest

    def _require_whole(self) -> None:
        if self._lost is not None:
            raise ValueError(
                f"the batches in the pipeline were lost with {self._lost}; the stages stand at different updates. "
                f"Expected load(folder) of a checkpoint, or a new PipelineModule"
            )
