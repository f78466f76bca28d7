"""From gradients to the next weights: one interface, kept by a flush and by a stream.

                       FlushUpdate, behind the program            StreamUpdate, within it
    begin              the user's gradients are put aside         what the user changed is taken over
    losses known       behind the last message                    REDUCE_GRAD: before the gradients leave
    gradients ready    scaled, all-reduced                        REDUCE_GRAD: scaled, messages SUM
    norm, clip         all-reduced                                GRAD_NORM: messages NORM and TOTAL
    step               every stage's optimizer                    U of each stage
    drain              nothing is under way                       what is left of the program

`Update` is what `Training` does around the engine, once a process; `RankUpdate` is what a rank's worker meets
within a program. Which of the two it is, is chosen once, when the pipeline is assembled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ...comm import Collectives, TensorSpec
from ...partition.graph.units import Tensors
from ...schedules import Message, Schedule, Timeline
from ...schedules.program import GroupStep, RankProgram
from ..batch.batches import Batch
from ..measure.recorder import RankRecord, Recorder
from ..stages.build import CutModel
from ..stages.ownership import Ownership
from ..stages.stage import LossValue
from ..stages.weights import WeightVersions
from .optimizers import OptimizerFactory, SchedulerFactory, StageOptimizer

Programs = Mapping[int, RankProgram]  # by local rank


class Known(NamedTuple):
    """Result of a batch, once a rank knows it; the norm is the global one before clipping."""

    step: int
    loss: float
    grad_norm: float | None


class StageState(NamedTuple):
    """Optimizer and weight versions of a stage on one local rank."""

    stage: int
    optimizer: StageOptimizer
    versions: WeightVersions | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateParts:
    """Parts that either update is made of.

    Arguments:
        recorders: by local rank.
        optimizer: None: gradients are left to the user.
    """

    model: CutModel
    ownership: Ownership
    collectives: Collectives
    recorders: Mapping[int, Recorder]
    optimizer: OptimizerFactory | None
    scheduler: SchedulerFactory | None
    max_grad_norm: float | None
    device: torch.device


class Execution(Protocol):
    """How the ranks run a schedule, known before any rank has made its update."""

    @property
    def programs(self) -> Sequence[RankProgram]:
        """Every program that will ever run on any rank, up to the numbers of batches in it."""

    def make_update(self, parts: UpdateParts) -> Update:
        """The update of this process. Runs the user's code (optimizers), which may fail on one rank alone: nothing
        that is collective comes behind it."""


class RankUpdate(Protocol):
    """One rank's update groups while programs run."""

    @property
    def batches(self) -> Mapping[int, Batch]:
        """Batches under way, by number: microbatches number * M, number * M + 1, ..."""

    def version(self, stage: int, index: int) -> int:
        """Weight version of microbatch `index` on a stage."""

    def note_loss(self, index: int, loss: LossValue) -> None:
        """The loss of microbatch `index`, whose last forward ran here."""

    def loss_gradient(self, index: int) -> torch.Tensor:
        """Gradient of the update group's loss with respect to that of microbatch `index`."""

    def specs(self, message: Message) -> list[TensorSpec]:
        """Layouts of the tensors of a message about an update group."""

    def put(self, message: Message, tensors: Tensors) -> None:
        """Such a message arrived."""

    def take(self, message: Message) -> Tensors:
        """Such a message to send."""

    def finish(self, step: GroupStep) -> None:
        """The backwards of an update group are through on this rank."""

    def step(self, stage: int, group: int) -> None:
        """The optimizer step of a stage."""


class Update(Protocol):
    """The updates of one process."""

    @property
    def schedule(self) -> Schedule:
        """As it runs."""

    @property
    def ranks(self) -> Mapping[int, RankUpdate]:
        """By local rank."""

    @property
    def stages(self) -> Sequence[StageState]:
        """Stages of all local ranks, in order; without an optimizer none."""

    @property
    def is_lost(self) -> bool:
        """Whether an error has lost batches that were under way, and the weights stand at different updates."""

    def versions_of(self, rank: int, stage: int) -> WeightVersions | None:
        """The weight versions of a stage on a local rank, if it has any."""

    # One batch, in this order

    def begin(self, batch: Batch) -> Programs:
        """A batch comes: what the engine runs for it. Raises ValueError where none may come now."""

    def losses_known(self) -> None:
        """The programs have run. Raises NonFiniteLossError on every rank alike."""

    def gradients_ready(self) -> None:
        """All gradients of the batch are scaled and summed over ranks. Collective over the processes."""

    def step(self) -> Known | None:
        """Clip and update. Returns what is newest known of any batch. Collective over the processes."""

    def abandon(self, error: BaseException) -> None:
        """The batch failed between `begin` and `gradients_ready`."""

    # Gradients without an update

    def refuse_accumulation(self) -> None:
        """ValueError unless gradients may be left to the user."""

    def accumulated(self) -> Known:
        """Result of the batch whose gradients are ready."""

    def clip(self, max_norm: float) -> float:
        """Clip the gradients that the user has; returns the global norm before. Collective over the processes."""

    # Draining

    def drain(self) -> Programs | None:
        """Programs that end all that is under way; None where nothing is. Raises ValueError where it was lost."""

    def rest(self) -> list[Known]:
        """Results that became known and were not returned, oldest first; each once."""

    # State and measurement

    def refuse_changes(self, what: str) -> None:
        """ValueError while batches are under way."""

    def take_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The model's own tensors were loaded, with nothing under way."""

    def restart(self) -> None:
        """Everything was loaded, with nothing under way: an error before is forgotten."""

    def timeline(self, records: Sequence[RankRecord]) -> Timeline:
        """The measured Timeline of all ranks' records."""
