"""The state of a run: parameters and buffers, optimizers, weight versions, checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .checkpoint.files import OwnCheckpoints
from .checkpoint.load import load
from .checkpoint.persist import Processes, SaveResult, persist
from .checkpoint.snapshot import Contents, HasState, Snapshot, Writers, take_snapshot
from .training import Training


@dataclass(frozen=True, kw_only=True)
class State(Contents):
    """Tensors that this process holds, under the model's original names.

    Arguments:
        training: drained before anything is read or replaced; it counts the steps.
    """

    training: Training
    own_checkpoints: OwnCheckpoints = field(default_factory=OwnCheckpoints)
    _writers: list[Writers] = field(default_factory=list)  # once they are agreed on

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of the local stages, in order, each copy's own; of a stage as they were returned."""
        return [optimizer for one in self.update.stages for optimizer in one.optimizers]

    def state_dict(self) -> dict[str, torch.Tensor]:
        self.training.settle()
        self.training.unchanged.check_objects()
        self.update.refuse_reading("state_dict")
        if not self.update.shards.apart:
            return self.ownership.state_dict()
        with self.run.guard.together(), self.update.shards.whole_weights():
            return {name: value.detach() for name, value in self.ownership.state_dict().items()}

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        self.training.drain()
        with self.run.guard.together():
            self.training.unchanged.check_objects()
            with self.update.shards.whole_weights():
                return self.ownership.full_state_dict(self.run.collectives)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.training.settle()
        self.training.unchanged.check_objects()
        self.update.refuse_changes("load_state_dict")
        self.update.gate.enter()
        with self.update.shards.whole_weights(replaced=True):
            self.ownership.load_state_dict(state)
        self.update.take_state(self.ownership.own_parts(state))

    def snapshot(self, loader: HasState | None) -> Snapshot:
        """State of this process between two steps, as references; `to_host` copies.

        Collective: a stream is drained before, and the first one agrees on who writes what.
        """
        self.training.drain()
        with self.run.guard.together():
            self.training.unchanged.check_objects()
            if not self._writers:
                self._writers.append(Writers(self))
            place = None if loader is None else loader.state_dict()
            return take_snapshot(self, self._writers[0], step=self.training.num_steps, loader=place)

    def persist(
        self, folder: str | os.PathLike[str], snapshot: Snapshot, *, processes: Processes | None = None
    ) -> SaveResult:
        """Bring a snapshot to the disk; beside training with `processes` of its own. Collective over the processes."""
        return persist(folder, snapshot, processes=processes or self.run.collectives, own=self.own_checkpoints)

    def save(self, folder: str | os.PathLike[str], loader: HasState | None) -> SaveResult:
        snapshot = self.snapshot(loader)
        with self.run.guard.together():
            result = self.persist(folder, snapshot)
        if result.is_mistake:
            raise ValueError(result.problem)
        self._say(result.problem or result.caution)
        return result

    def load(self, folder: str | os.PathLike[str], loader: HasState | None) -> None:
        self.update.gate.enter()
        if not self.update.is_lost:
            self.training.drain()
        with self.run.guard.together():
            self.training.unchanged.check_objects()
        loaded = load(Path(folder), self, loader=loader, own=self.own_checkpoints)
        self.update.restart()
        self.training.restart(loaded.step)
        self._say(f"of the checkpoint {folder}: {'; '.join(loaded.lost)}" if loaded.lost else "")

    def _say(self, text: str) -> None:
        """A warning from rank 0, for the line that called PipelineModule."""
        if text and self.run.collectives.rank == 0:
            warnings.warn(text, stacklevel=4)

    def held_bytes(self) -> int:
        tensors = list(self.ownership.state_dict().values())
        tensors += [p.grad for _, p in self.ownership.named_parameters() if p.grad is not None]
        for one in self.update.stages:
            tensors += one.versions.tensors() if one.versions is not None else ()
            tensors += one.tensors()
        tensors += self.update.shards.tensors()
        dense = [part for x in tensors for part in ((x._indices(), x._values()) if x.is_sparse else (x,))]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in dense}
        return sum(storages.values())
