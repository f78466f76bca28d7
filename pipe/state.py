"""The state of a run: parameters and buffers, optimizers, weight versions, checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..comm import Collectives, Guard
from .checkpoint.files import OwnCheckpoints
from .checkpoint.load import Answer, load, refuse_differing
from .checkpoint.persist import Processes, SaveResult, persist
from .checkpoint.snapshot import HasState, Snapshot, take_snapshot
from .stages.ownership import Ownership
from .training import Training
from .update.interface import StageState, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Tensors that this process holds, under the model's original names.

    Arguments:
        training: drained before anything is read or replaced; it counts the steps.
        written_stages: stages whose first rank is in this process, which writes them.
    """

    ownership: Ownership
    update: Update
    training: Training
    collectives: Collectives
    guard: Guard
    written_stages: Sequence[int]
    device: torch.device
    own_checkpoints: OwnCheckpoints = field(default_factory=OwnCheckpoints)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of the local stages, in order, each copy's own; of a stage as they were returned."""
        return [optimizer for one in self.update.stages for optimizer in one.optimizers.optimizers]

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """See PipelineModule.full_state_dict."""
        self.training.drain()
        with self.guard.together():
            return self.ownership.full_state_dict(self.collectives)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """See PipelineModule.load_state_dict."""
        self.update.refuse_changes("load_state_dict")
        self.ownership.load_state_dict(state)
        self.update.take_state(self.ownership.own_parts(state))

    def snapshot(self, loader: HasState | None) -> Snapshot:
        """State of this process between two steps, as references; `to_host` copies. A stream is drained before."""
        self._refuse_parts("save")
        self.training.drain()
        return take_snapshot(
            step=self.training.num_steps,
            ownership=self.ownership,
            stages=self._first(),
            written_stages=self.written_stages,
            schedule=self.update.schedule,
            loader=None if loader is None else loader.state_dict(),
            loss_scales=self.update.loss_scales,
        )

    def persist(
        self, folder: str | os.PathLike[str], snapshot: Snapshot, *, processes: Processes | None = None
    ) -> SaveResult:
        """Bring a snapshot to the disk; beside training with `processes` of its own. Collective over the processes."""
        return persist(folder, snapshot, processes=processes or self.collectives, own=self.own_checkpoints)

    def save(self, folder: str | os.PathLike[str], loader: HasState | None) -> SaveResult:
        """See PipelineModule.save."""
        self._refuse_divided()
        self.training.drain()
        with self.guard.together():
            result = self.persist(folder, self.snapshot(loader))
        if result.is_mistake:
            raise ValueError(result.problem)
        if result.problem and self.collectives.rank == 0:
            warnings.warn(result.problem, stacklevel=3)
        return result

    def load(self, folder: str | os.PathLike[str], loader: HasState | None) -> None:
        """See PipelineModule.load."""
        self._refuse_divided()
        self._refuse_parts("load")
        if not self.update.is_lost:
            self.training.drain()
        self.training.num_steps = load(
            folder,
            ownership=self.ownership,
            stages=self.update.stages,
            schedule=self.update.schedule,
            device=self.device,
            loader=loader,
            loss_scales=self.update.loss_scales,
            own=self.own_checkpoints,
            agree=self._agree,
        )
        self.update.restart()

    def _refuse_parts(self, what: str) -> None:
        if any(not self.ownership.share(name).is_whole for name in self.ownership.stages):
            raise ValueError(
                f"{what}: checkpoints hold whole tensors, and a tensor group has divided some: expected "
                f"full_state_dict() and load_state_dict(), or a mesh without a tensor axis"
            )

    def _agree(self, answer: Answer) -> None:
        """ValueError on every rank unless all have read the same checkpoint; one that is alone knows why not."""
        with self.guard.together():
            answers = self.collectives.gather(answer, what=f"loading the checkpoint {answer.place}")
        if len(answers) > 1:
            refuse_differing(answers)

    def held_bytes(self) -> int:
        """See PipelineModule.held_bytes."""
        tensors = list(self.ownership.state_dict().values())
        tensors += [p.grad for _, p in self.ownership.named_parameters() if p.grad is not None]
        for _, optimizers, versions in self.update.stages:
            tensors += versions.tensors() if versions is not None else ()
            tensors += optimizers.tensors()
        dense = [part for x in tensors for part in ((x._indices(), x._values()) if x.is_sparse else (x,))]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in dense}
        return sum(storages.values())

    def _refuse_divided(self) -> None:
        divided = next((one.stage for one in self.update.stages if one.optimizers.parts), None)
        if divided is not None:
            raise ValueError(
                f"the optimizer's state of stage {divided} is divided over its ranks, which checkpoints do not join "
                f"yet: expected data_parallel='replicate', or full_state_dict() and load_state_dict() for weights alone"
            )

    def _first(self) -> dict[int, StageState]:
        """By stage, that of its first local rank: the others are equal."""
        found: dict[int, StageState] = {}
        for one in self.update.stages:
            found.setdefault(one.stage, one)
        return found
