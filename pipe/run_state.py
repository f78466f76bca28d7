"""Parameters and state of a PipelineModule's run, under the model's original names: read, written, saved, loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from ..comm import World
from ..comm.store_exchange import Exchanges
from .building import Building
from .checkpoint.checkpointer import Checkpointer, CheckpointRecord, Every, check_options
from .checkpoint.persist import SaveResult
from .checkpoint.snapshot import HasState
from .settings import Settings


class RunState:
    """What a run keeps, for `PipelineModule`."""

    world: World
    _building: Building
    _settings: Settings

    def parameters(self) -> list[nn.Parameter]:
        """This process's parameters (all of them where all ranks are in one process)."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This process's parameters with their names."""
        return self._building.built("parameters and state").state.ownership.named_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this process's stages. Under data_parallel="fsdp" collective over the processes."""
        return self._building.built("parameters and state").state.state_dict()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of all stages, on every rank, on the CPU. Collective over the processes."""
        return self._building.built("parameters and state").state.full_state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a full or a local state dict. Raises ValueError for missing or unknown names and for wrong shapes."""
        if not isinstance(state, Mapping):
            raise ValueError(
                f"a state dict of type {type(state).__name__}: expected tensors by name, as state_dict() has"
            )
        self._building.built("parameters and state").state.load_state_dict(state)

    def save(self, folder: str | os.PathLike[str], *, loader: HasState | None = None) -> SaveResult:
        """Write a checkpoint: weights, optimizers, learning-rate schedulers, step. Collective over the processes.

        A disk that is full on any rank is told in a warning and in the result, alike on all ranks: those before are as
        they were, and the run can go on.

        Arguments:
            folder: several checkpoints follow one another in it; the one before the newest is kept.
            loader: from `pipe.loader`, or any other with state_dict() and load_state_dict(): its place is saved, too.

        Raises ValueError, on every rank alike, for a folder that cannot be written or that ranks do not share.
        """
        return self._building.built("parameters and state").state.save(_path(folder), loader)

    def checkpointer(
        self,
        folder: str | os.PathLike[str],
        *,
        every: Every,
        overhead: float = 0.035,
        loader: HasState | None = None,
        on_saved: Callable[[CheckpointRecord], object] | None = None,
    ) -> Checkpointer:
        """Saves as `save` does, beside training: call its `step()` behind each `train_step`.

        A copy is made while the next step's forwards and backwards run, and written while training goes on. Collective.

        Arguments:
            every: steps from one checkpoint to the next; "auto": as few as take the share `overhead` of the time, found
                from what they cost and kept up while that changes.
            on_saved: on_saved(record) in every process for each checkpoint that is done, or that failed (a full disk is
                told, and the next interval tries again).

        Raises ValueError, on every rank alike, for a folder that cannot be written, or that another run writes.
        """
        check_options(every, overhead)
        return Checkpointer(
            _path(folder),
            state=self._building.built("a checkpointer").state,
            exchanges=Exchanges(self.world, what="checkpoints"),
            device=self._settings.device,
            every=every,
            overhead=overhead,
            loader=loader,
            on_saved=on_saved,
            timeout=self._settings.timeout,
        )

    def load(self, folder: str | os.PathLike[str], *, loader: HasState | None = None) -> None:
        """Go on from a checkpoint of the same model, cut in any way. Executes no code from it.

        Collective over the processes: all of them load it, or none.

        Arguments:
            loader: goes on where the saved one stood: with the batch behind the last one that was trained on.

        Raises ValueError for what is no whole checkpoint of this model, and for a loader of other data.
        """
        self._building.built("parameters and state").state.load(_path(folder), loader)


def _path(folder: object) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"folder={folder!r:.60}: expected a path, such as 'checkpoints'")
    return Path(folder)
