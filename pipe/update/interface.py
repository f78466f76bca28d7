"""From gradients to the next weights: one interface, implemented by a flush and by a stream.

                       FlushUpdate, after the program             StreamUpdate, within it
    begin              the user's gradients are put aside         the user's changes are adopted
    losses known       after the last message                     REDUCE_GRAD: before the gradients are sent
    gradients ready    scaled, all-reduced                        REDUCE_GRAD: scaled, messages SUM
    norm, clip         all-reduced                                GRAD_NORM: messages NORM and TOTAL
    step               every stage's optimizer                    U of each stage
    drain              nothing is in flight                       the rest of the program

`Training` calls `Update` around the engine, once per process; one of the two is chosen when the pipeline is built. A
rank's worker calls `RankUpdate` within a program.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...comm.buckets import buckets_of
from ...partition.profiler.memory import bytes_of
from ...partition.profiler.optimizers import options_of, updates_of
from ...schedules import Schedule, Timeline
from ...schedules.program import RankProgram
from ...schedules.timing.records import RankRecord
from ..batch.batches import Batch
from ..context import Run
from ..guards.rounding import SUMS, by_type
from ..results import Known
from ..stage.ownership import Ownership
from ..stage.weights import WeightVersions
from ..trace.recorder import RankRecorder
from .gradients import LossScale
from .optimizers import StageOptimizers, shown, warn_of_unheld
from .rank_update import RankUpdate, UpdateGate
from .shards import Shards

Programs = Mapping[int, RankProgram]  # by local rank


class Update(ABC):
    """The updates of one process. Between two batches nothing is in flight, unless documented otherwise.

    Attributes:
        scale: of all gradients of the newest batch, relative to those of its backwards.
    """

    scale = 1.0

    def __init__(
        self,
        schedule: Schedule,
        ranks: Mapping[int, RankUpdate],  # by local rank, as are `recorders`
        stages: Sequence[StageOptimizers],  # of all local ranks, in order; none without an optimizer
        shards: Shards,  # this rank's parts of the parameters that it divides with others
        *,
        ownership: Ownership,
        recorders: Mapping[int, RankRecorder],
        loss_scale: LossScale | None = None,
    ) -> None:
        self.gate = UpdateGate()  # entered before weights or optimizer state are written
        self.ownership = ownership
        self.recorders = recorders
        self.loss_scale = loss_scale
        self.shards = shards
        self.schedule = schedule
        self.ranks = ranks
        self.stages = stages
        self._lost: str | None = None
        warn_of_unheld(stages)

    @property
    def run(self) -> Run:
        return self.ownership.run

    @property
    def is_lost(self) -> bool:
        """Whether an error has lost batches in flight, and the weights are of different updates."""
        return self._lost is not None

    def lose(self, error: BaseException) -> None:
        self._lost = f"{type(error).__name__}: {error}"

    def _require_whole(self) -> None:
        if self._lost is not None:
            raise ValueError(
                f"batches or updates in flight were lost with {self._lost}; the stages' weights are of different "
                f"updates. Expected load(folder) of a checkpoint, or a new PipelineModule"
            )

    @property
    def kept(self) -> dict[str, Any]:
        """The values that a checkpoint keeps besides weights and optimizers, by key."""
        scale = self.loss_scale  # by age of a weight version: earlier releases could have one for each
        return {} if scale is None else {"loss_scale": {0: list(scale.content())}}

    def go_on(self, kept: Mapping[str, Any]) -> None:
        """Drop everything in flight, and continue from the values of a checkpoint, as far as it has them."""
        self.restart()
        if self.loss_scale is not None and "loss_scale" in kept:
            self.loss_scale.load(kept["loss_scale"][0])

    def versions_of(self, rank: int, stage: int) -> WeightVersions | None:
        """Weight versions of a stage on a local rank; None: the module's own Parameters."""
        return None

    def summing_bytes(self, stage: int, parameters: Sequence[nn.Parameter]) -> float:
        """Bytes in addition to the gradients of these parameters of a stage while its replicas add them up."""
        replicas = len({*self.schedule.owners[stage]})
        if replicas == 1:
            return 0.0
        parts = [part for one in self.stages if one.stage == stage for part in one.parts.values()]
        divided = [p for p in parameters if any(part.whole is p for part in parts)]
        whole = [p for p in parameters if not any(part.whole is p for part in parts)]
        if self.schedule.is_asynchronous:  # copies for each of the others, and from each; updated parts
            return (replicas - 1) * (2 * bytes_of(whole) + 3 * bytes_of(divided) / replicas)
        copied = sum(bytes_of(whole[i] for i in bucket) for bucket in buckets_of(whole) if len(bucket) > 1)
        largest = max((bytes_of(divided[i] for i in bucket) for bucket in buckets_of(divided)), default=0)
        return copied + largest + bytes_of(divided) * (1 - 1 / replicas)

    def learning_rates(self) -> list[float]:
        groups = [group for one in self.stages for made in one.optimizers for group in made.param_groups]
        return [float(group["lr"]) for group in groups if group.get("lr") is not None]

    def refuse_shared_statistics(self) -> None:
        """ValueError, before the first batch, for an optimizer whose step needs other stages' parameters."""
        options, untried = self.ownership.run.options, [one for one in self.stages if not one.is_tried]
        if options.optimizer is None or not untried:
            return
        model, asked = self.ownership.parameters(), partial(options_of, options.optimizer, user_code=options.user_code)
        kinds = [kind for one in untried for kind in one.refuse_shared_statistics(model, asked)]
        if not kinds:
            return
        tried = partial(updates_of, options.optimizer, user_code=options.user_code)
        own, whole, later = tried([one.named for one in self.stages]), tried([model]), tried([model], later=True)

        def differ(these: Mapping[int, Tensor], those: Mapping[int, Tensor]) -> set[str]:
            both = [(name, these[id(p)], those[id(p)]) for name, p in model if id(p) in these.keys() & those.keys()]
            return {name for name, a, b in both if (a - b).norm() > by_type(SUMS, a.dtype) * b.norm()}

        other, noisy = differ(own, whole), differ(later, whole)
        if other & noisy:
            warnings.warn(
                f"optimizer {kinds[0]} draws random numbers in its step: other ones than in one process, and equal "
                f"ones on each rank unless their seeds differ. A torch.Generator seeded for each parameter and step "
                f"(stagewright.named) draws the same anywhere",
                stacklevel=2,
            )
        if wrong := [name for name, _ in model if name in other - noisy]:
            raise ValueError(
                f"optimizer {kinds[0]} updates {shown(wrong)} otherwise on its stage than among all of the model's "
                f"parameters: by its place or their number, or with a generator of its own for one after the other. "
                f"Expected updates by a parameter's values, options and name (stagewright.named); or one stage; or "
                f"{kinds[0]}.separable = 'parameters' to take them as they are"
            )

    # One batch, in this order

    def follow(self, schedule: Schedule) -> None:
        """Run the next batch in the order of this flush schedule, with the same actions on the same ranks."""
        raise AssertionError(f"{schedule!r} for a batch of a stream")

    @abstractmethod
    def begin(self, batch: Batch) -> Programs:
        """Begin a batch; returns its programs. Raises ValueError where no batch may begin now."""

    def losses_known(self) -> None:
        """Read the losses, after the programs. Raises NonFiniteLossError on every rank alike."""
        return

    def gradients_ready(self) -> None:
        """Finish scaling and summing the batch's gradients over ranks. Collective over the processes."""
        return

    def prepare(self) -> None:
        """The collective part of `step`, where it is separate. Collective over the processes."""
        return

    def take_back(self) -> None:
        """Drop a batch before its update: it will be run again."""
        raise AssertionError("a batch of a stream is not run again")

    @abstractmethod
    def step(self) -> Known | None:
        """Clip and update. Returns the newest known result of any batch. Collective over the processes."""

    @abstractmethod
    def abandon(self, error: BaseException) -> None:
        """Clean up after an error between `begin` and `gradients_ready`."""

    # Gradients without an update

    def refuse_users_gradients(self, what: str, *, instead: str) -> None:
        """ValueError unless gradients may be left to the user, as `what` does."""
        return

    def accumulated(self) -> Known:
        """Result of the batch whose gradients are ready and left to the user."""
        raise AssertionError("no gradients are left to the user")

    def clip(self, max_norm: float, *, norm_type: float = 2.0, only_finite: bool = False) -> float:
        """Clip the gradients that are left to the user; returns the global norm before. Collective over the processes.
        `only_finite`: whether gradients with a norm that is not finite are not changed."""
        raise AssertionError("no gradients are left to the user")

    # Draining

    def drain(self) -> Programs | None:
        """Programs that finish everything in flight; None where nothing is. Raises ValueError where it was lost."""
        self._require_whole()
        return None

    def rest(self) -> list[Known]:
        """Known results that were not returned yet, oldest first; each once."""
        return []

    def waiting(self) -> Sequence[Known]:
        """The results that `rest` would return, without removing them."""
        return ()

    def set_aside(self) -> Callable[[], None]:
        """Remove the results that `rest` and `step` would return; the returned function restores them."""
        return lambda: None

    # State and measurement

    def refuse_reading(self, what: str) -> None:
        """ValueError while weights are of different updates."""
        return

    def refuse_changes(self, what: str) -> None:
        """ValueError while batches are in flight."""
        return

    def unite(self) -> None:
        """Make the optimizers of all replicas equal, before one of them is saved. Collective over the processes."""
        return

    def take_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Adopt a state that was loaded into the model, with nothing in flight."""
        return

    def restart(self) -> None:
        """Begin again after everything was loaded, also after an error."""
        self._lost = None

    @abstractmethod
    def timeline(self, records: Sequence[RankRecord], *, schedule: Schedule) -> Timeline:
        """The measured Timeline of all ranks' records. `schedule`: that was run."""
