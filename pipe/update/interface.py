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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler

from ...comm import Collectives
from ...partition.profiler.optimizers import OptimizerFactory
from ...schedules import Schedule, Timeline
from ...schedules.messages import Transfer
from ...schedules.program import RankProgram
from ...schedules.timing.records import RankRecord
from ..batch.batches import Batch
from ..batch.results import UpdateResult
from ..measure.recorder import Recorder
from ..parallel.sharding import Sharding
from ..stages.build import CutModel
from ..stages.ownership import Ownership
from ..stages.weights import WeightVersions
from .delay_correction import ErrorFeedback
from .loss_scale import LossScale
from .optimizers import SchedulerFactory, StageOptimizers, warn_of_unheld
from .rank_update import RankUpdate
from .shards import Shards

Programs = Mapping[int, RankProgram]  # by local rank
TakeBack = Callable[[Mapping[int, Sequence[tuple[Transfer, bool]]]], None]  # see `Engine.take_back`
Together = Callable[[], AbstractContextManager[None]]  # see `Guard.together`


class Known(NamedTuple):
    """Result of a batch, once a rank knows it; the norm is the global one before clipping.

    skipped: whether its update was left out, since gradients overflowed in float16.
    later: of an update that other ranks may still speak against: waits for what became of it, within a guard.
    """

    step: int
    loss: float
    grad_norm: float | None
    skipped: bool = False
    later: Callable[[Together], UpdateResult] | None = None

    def outcome(self, together: Together) -> UpdateResult:
        """What became of the update."""
        return UpdateResult(self.grad_norm, self.skipped) if self.later is None else self.later(together)


class SetAside(NamedTuple):
    """Results known but not returned, oldest first, and the newest that was returned."""

    waiting: Sequence[Known]
    newest: Known | None


class StageState(NamedTuple):
    """Optimizers and weight versions of a stage on one local rank."""

    stage: int
    optimizers: StageOptimizers
    versions: WeightVersions | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateParts:
    """Parts that either update is made of.

    Arguments:
        recorders: by local rank.
        optimizer: None: gradients are left to the user.
        correction: of gradients that are late; None: there is none.
        sharding: what the ranks that hold a stage divide among themselves.
    """

    model: CutModel
    ownership: Ownership
    collectives: Collectives
    recorders: Mapping[int, Recorder]
    optimizer: OptimizerFactory | None
    scheduler: SchedulerFactory | None
    correction: ErrorFeedback | None
    max_grad_norm: float | None
    sharding: Sharding
    grad_scaler: GradScaler | None
    device: torch.device

    def make_optimizers(
        self,
        stage: int,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        may_hold_others: bool,
        delays: Sequence[float],
    ) -> StageOptimizers:
        """The optimizers of a stage's parameters; see StageOptimizers.

        Arguments:
            delays: [S] of each stage's gradients [updates].
        """
        assert self.optimizer is not None
        feedback = None
        if self.correction is not None:
            feedback = self.correction.factors({name: self.ownership.stages[name] for name, _ in parameters}, delays)
        made = StageOptimizers(
            stage,
            parameters,
            self.optimizer,
            self.scheduler,
            where=f"stage {stage} ({self.model.names[stage]})",
            model={id(parameter) for parameter in self.model.root.parameters()},
            may_hold_others=may_hold_others,
            feedback=feedback,
            fresh=0.0 if self.correction is None else self.correction.fresh,
        )
        made.refuse_to_divide([name for name, _ in parameters if self.ownership.group.is_divided(name)])
        return made


class UpdateGate:
    """Stands in front of everything in a pipeline that writes weights or optimizer state; open at first."""

    def __init__(self) -> None:
        self._wait: Callable[[], None] | None = None

    def hold(self, wait: Callable[[], None]) -> None:
        """The next one to pass calls `wait` first."""
        self._wait = wait

    def enter(self) -> None:
        """Weights are about to be written."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


class Update(ABC):
    """The updates of one process, between two batches at rest unless said otherwise.

    Arguments:
        schedule: as it runs.
        ranks: by local rank.
        stages: of all local ranks, in order; none without an optimizer.
        loss_scale: None without a GradScaler.
        shards: what its rank has of the parameters that it divides with others.

    Attributes:
        gate: entered before weights or optimizer state are written.
        scale: of all gradients of the newest batch, as its backwards made them.
    """

    scale = 1.0

    def __init__(
        self,
        schedule: Schedule,
        ranks: Mapping[int, RankUpdate],
        stages: Sequence[StageState],
        loss_scale: LossScale | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.gate = UpdateGate()
        self.loss_scale = loss_scale
        self.shards = Shards() if shards is None else shards
        self.schedule = schedule
        self.ranks = ranks
        self.stages = stages
        self._lost: str | None = None
        warn_of_unheld(one.optimizers for one in stages)

    @property
    def is_lost(self) -> bool:
        """Whether an error has lost what was under way, and the weights stand at different updates."""
        return self._lost is not None

    def lose(self, error: BaseException) -> None:
        """An error came when some weights were updated, and others may not be."""
        self._lost = f"{type(error).__name__}: {error}"

    def _require_whole(self) -> None:
        if self._lost is not None:
            raise ValueError(
                f"batches or updates under way were lost with {self._lost}; the stages stand at different updates. "
                f"Expected load(folder) of a checkpoint, or a new PipelineModule"
            )

    def versions_of(self, rank: int, stage: int) -> WeightVersions | None:
        """Weight versions of a stage on a local rank; None: the module's own Parameters."""
        return None

    def learning_rates(self) -> list[float]:
        """By parameter group of each local stage, as they stand."""
        groups = [group for one in self.stages for made in one.optimizers.optimizers for group in made.param_groups]
        return [float(group["lr"]) for group in groups if "lr" in group]

    # One batch, in this order

    def follow(self, schedule: Schedule) -> None:
        """The next batch runs in the order of this schedule: the same work on the same ranks, under a flush."""
        raise AssertionError(f"{schedule!r} for a batch of a stream")

    @abstractmethod
    def begin(self, batch: Batch) -> Programs:
        """A batch comes: what the engine runs for it. Raises ValueError where none may come now."""

    def losses_known(self) -> None:
        """The programs have run. Raises NonFiniteLossError on every rank alike."""
        return

    def gradients_ready(self) -> None:
        """All gradients of the batch are scaled and summed over ranks. Collective over the processes."""
        return

    def passes(self, batch: Batch, programs: Programs, take_back: TakeBack) -> Iterator[tuple[Programs, bool]]:
        """What `begin` answered, as it is run: programs one after the other, each with whether it goes on."""
        yield programs, False

    @property
    def is_ahead(self) -> bool:
        """Whether other ranks may still speak against the newest update, which `settle` waits for."""
        return False

    def settle(self) -> None:
        """Make the weights what they should be. Nobody waits for this rank."""
        return

    @abstractmethod
    def step(self) -> Known | None:
        """Clip and update. Returns what is newest known of any batch. Collective over the processes."""

    @abstractmethod
    def abandon(self, error: BaseException) -> None:
        """The batch failed between `begin` and `gradients_ready`."""

    # Gradients without an update

    def refuse_users_gradients(self, what: str, *, instead: str) -> None:
        """ValueError unless gradients may be left to the user, as `what` needs it."""
        return

    def accumulated(self) -> Known:
        """Result of the batch whose gradients are ready and left to the user."""
        raise AssertionError("no gradients are left to the user")

    def clip(self, max_norm: float, *, norm_type: float = 2.0, only_finite: bool = False) -> float:
        """Clip the gradients that the user has; returns the global norm before. Collective over the processes.

        Arguments:
            only_finite: with a norm that is not finite, gradients are left as they are.
        """
        raise AssertionError("no gradients are left to the user")

    # Draining

    def drain(self) -> Programs | None:
        """Programs that end all that is under way; None where nothing is. Raises ValueError where it was lost."""
        self._require_whole()
        return None

    def rest(self) -> list[Known]:
        """Results that became known and were not returned, oldest first; each once."""
        return []

    def waiting(self) -> Sequence[Known]:
        """The results that `rest` would return; they stay."""
        return ()

    def set_aside(self) -> SetAside:
        """Results that `rest` and `step` would return, for `put_back`; none are left."""
        return SetAside([], None)

    def put_back(self, aside: SetAside) -> None:
        """Results are known again that were set aside."""
        return

    # State and measurement

    def refuse_reading(self, what: str) -> None:
        """ValueError while weights that are read would not be of one update."""
        return

    def refuse_changes(self, what: str) -> None:
        """ValueError while batches are under way."""
        return

    def whole_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """Gradients that were held back, by name; of divided parameters those of the parts become whole.

        Collective over the processes.
        """
        return dict(gradients)

    def take_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The model's own tensors were loaded, with nothing under way."""
        return

    def restart(self) -> None:
        """Everything was loaded, with nothing under way: an error before is forgotten."""
        self._lost = None

    @abstractmethod
    def timeline(self, records: Sequence[RankRecord], *, schedule: Schedule) -> Timeline:
        """The measured Timeline of all ranks' records.

        Arguments:
            schedule: that was run.
        """
