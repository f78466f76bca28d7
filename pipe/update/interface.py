"""From gradients to the next weights: one interface, kept by a flush and by a stream.

                       FlushUpdate, behind the program            StreamUpdate, within it
    begin              the user's gradients are put aside         what the user changed is taken over
    losses known       behind the last message                    REDUCE_GRAD: before the gradients leave
    gradients ready    scaled, all-reduced                        REDUCE_GRAD: scaled, messages SUM
    norm, clip         all-reduced                                GRAD_NORM: messages NORM and TOTAL
    step               every stage's optimizer                    U of each stage
    drain              nothing is under way                       what is left of the program

`Update` is what `Training` does around the engine, once a process; which of the two it is, is chosen once, when the
pipeline is built. `RankUpdate` is what a rank's worker meets within a program; of a flush and of evaluation, losses are
all there is:

    last forward of a group that runs here -> summary -> LOSS to every rank -> the same total on every rank
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ...comm import TensorSpec
from ...partition.model.forms import Tensors
from ...partition.profiler.clock import Stamp
from ...partition.profiler.memory import bytes_of
from ...schedules import Action, Collective, Message, Op, Schedule, Timeline
from ...schedules.messages import Transfer
from ...schedules.program import GroupStep, RankProgram
from ...schedules.timing.records import RankRecord
from ..batch.batches import (
    LOWER_OR_CLIP,
    NO_UPDATE,
    SUMMARY_SIZE,
    Batch,
    GroupLoss,
    combine_summaries,
    read_loss_summary,
    summarize_losses,
)
from ..batch.checksum import UNKNOWN, Identity
from ..batch.results import Known
from ..context import Run
from ..stage.ownership import Ownership
from ..stage.stage import LossValue
from ..stage.weights import WeightVersions
from ..trace.recorder import RankRecorder
from .gradients import buckets_of
from .loss_scale import LossScale
from .optimizers import StageOptimizers, warn_of_unheld
from .shards import Shards
from .shared_sums import SharedSum

Programs = Mapping[int, RankProgram]  # by local rank
TakeBack = Callable[[Mapping[int, Sequence[tuple[Transfer, bool]]]], None]  # see `Engine.take_back`


class UpdateGate:
    """Stands in front of everything in a pipeline that writes weights or optimizer state; open at first."""

    def __init__(self) -> None:
        self._waits: list[Callable[[], None]] = []

    def hold(self, wait: Callable[[], None]) -> None:
        """The next one to pass calls `wait` first, behind those of before."""
        self._waits.append(wait)

    def enter(self) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()


class RankUpdate:
    """Update groups of one rank: its own losses by microbatch, and their summaries by rank of the last stage. Under a
    flush, sums of gradients that other processes hold, too.

    Each data replica weighs its samples as if the others had as many. How many they have they tell each other when the
    batch begins, so that it is known when the first sum does; counts of (sum, count) losses come later.

    Arguments:
        sums: none where ranks that share gradients do not add them up now.
        option_numbers: of the optimizers of this process, see `SharedSum.begin`.
        replicas: ranks that run the same on batches of their own; none where all ranks pass the same batch.

    Attributes:
        batches: under way, by number: microbatches number * M, number * M + 1, ...
        behind: by the last backward of a stage, the sum right behind it.
        loss_scale: None: losses are not scaled, and must be finite.
    """

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        shards: Shards,
        loss_scale: LossScale | None = None,
        *,
        sums: Mapping[Collective, Sequence[SharedSum]] | None = None,
        option_numbers: Callable[[], Mapping[int, int]] = dict,
        replicas: Sequence[int] = (),
    ) -> None:
        self.loss_scale = loss_scale
        self.shards = shards
        self.sums = sums or {}
        self.replicas = replicas
        self.behind: Mapping[Action, Collective] = {}
        self._read_options = option_numbers
        self._begun: dict[Collective, list[Stamp]] = {}  # when the rest began, and when all was through
        # Of this batch: samples of all replicas, until they are known; then what the first sum needs, once.
        self._samples: tuple[torch.Tensor, Callable[[], None]] | None = None
        self._factor = 1.0
        self._numbers: Mapping[int, int] | None = None
        self.batches: dict[int, Batch] = {}
        self._rank = rank
        self._batch_indices = schedule.batch_indices
        self._group_size = schedule.group_size
        self._own: dict[int, dict[int, LossValue]] = {}
        self._summaries: dict[int, dict[int, torch.Tensor]] = {}
        last, size = schedule.num_stages - 1, schedule.group_size
        self._last_owners = schedule.owners[last]
        self._num_own = [  # microbatches of each group of a batch whose last forward runs here
            sum(schedule.owner(last, k) == rank for k in range(begin, begin + size))
            for begin in range(0, schedule.batch_indices, size)
        ]

    def enter(self, batch: Batch) -> None:
        """The one batch, whose program counts from microbatch 0."""
        self.drop()
        self.batches[0] = batch
        self._factor, self._numbers = 1.0, None
        if self.sums and self.replicas:
            number, count = batch.replica
            own = sum(part.size for part in batch.parts[number::count])
            collectives, what = self.shards.collectives, "counting the samples of all data replicas"
            samples = torch.tensor([own], dtype=torch.float64, device=collectives.device)
            self._samples = samples, collectives.begin_all_reduce(samples, what=what, ranks=self.replicas)

    def version(self, stage: int, index: int) -> int:
        return 0

    def scale_of(self, group: int) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def begin(self, collective: Collective) -> None:
        """The program has come to what ranks of several processes do together: it goes on beside compute.

        Weights come and go; or the backwards that make some gradients are through on this rank.
        """
        if collective.op is not Op.REDUCE_GRAD:
            self.shards.begin(collective)
            return
        if not self.sums[collective]:  # others hold them, and agree later
            return
        self._count_samples()
        if self._numbers is None:
            self._numbers = self._read_options()
        stamp = self.shards.recorder.clock.stamp
        stamps = self._begun[collective] = [stamp()]
        for each in self.sums[collective]:
            each.begin(self._factor, self._numbers, on_through=lambda: stamps.append(stamp()))

    def beside(self, action: Action) -> AbstractContextManager[None]:
        """Around a backward: what of the update goes on beside it, see `SharedSum.beside`.

        Where there are two sums, their order would be that of the gradients.
        """
        sums = self.sums.get(self.behind[action], ()) if action in self.behind else ()
        if len(sums) != 1:
            return nullcontext()
        self._count_samples()
        return sums[0].beside(self._factor)

    def settle(self) -> None:
        """Block until what was begun is through: the program is."""
        self._count_samples()
        for collective, stamps in self._begun.items():
            for each in self.sums[collective]:
                each.wait()
            recorder = self.shards.recorder
            end = stamps[-1] if len(stamps) > 1 else recorder.clock.stamp()
            recorder.collective(collective, stamps[0], end)
        if self.shards.apart:
            self.shards.settle()

    def finish_sums(self) -> set[str]:
        present = {name for collective in self._begun for each in self.sums[collective] for name in each.finish()}
        self._begun.clear()
        return present

    def _count_samples(self) -> None:
        if self._samples is not None:
            samples, wait = self._samples
            wait()
            self._samples = None
            self._factor = self.batches[0].num_items / float(samples)

    def finish(self, step: GroupStep) -> None:
        raise AssertionError(f"{step} in a program without updates")

    def step(self, stage: int, index: int) -> None:
        raise AssertionError(f"an update of stage {stage} in a program without updates")

    def note_loss(self, index: int, loss: LossValue) -> None:
        """The loss of microbatch `index`; behind the last one of a group that runs here, they are summed up."""
        number, k = divmod(index, self._batch_indices)
        group, within = index // self._group_size, k // self._group_size
        losses = self._own.setdefault(group, {})
        losses[k] = loss
        if len(losses) == self._num_own[within]:
            summary = summarize_losses(losses, self.batches[number], group=within)
            self._summaries.setdefault(group, {})[self._rank] = summary

    def loss_gradient(self, index: int) -> torch.Tensor:
        number, k = divmod(index, self._batch_indices)
        batch = self.batches[number]
        value, count = self._own[index // self._group_size][k]
        # Of (sum, count) losses the count of the whole group is known at its end only: until then, 1 / samples.
        weight = batch.parts[k].weight if count is None else 1.0 / batch.group_items(k // self._group_size)
        return torch.full_like(value, weight * self.scale_of(index // self._group_size))

    def specs(self, message: Message) -> list[TensorSpec]:
        return [TensorSpec((SUMMARY_SIZE,), (1,), torch.float64, False)]

    def put(self, message: Message, tensors: Tensors) -> None:
        """Such a message arrived. Raises ValueError where its rank, of the same pipeline, has passed another batch."""
        batch = self.batches[message.index * self._group_size // self._batch_indices]
        self._compare_batches(batch, message.src, tensors[0])
        self._summaries.setdefault(message.index, {})[message.src] = tensors[0]

    def take(self, message: Message) -> Tensors:
        return (self._summaries[message.index][self._rank],)

    def total(self, group: int, *, among: Collection[int] | None = None) -> tuple[GroupLoss, float]:
        """The loss of a group, and what its gradients must be multiplied with.

        Arguments:
            among: ranks whose losses alone the gradients are of; None: all.

        Raises NonFiniteLossError, but where losses are scaled: gradients then tell; and ValueError for counts that
        cannot be divided by.
        """
        number, within = divmod(group * self._group_size, self._batch_indices)
        batch = self.batches[number]
        summaries = self._summaries[group]
        combined = combine_summaries([summaries[rank] for rank in sorted(summaries) if among is None or rank in among])
        outcome, advice = self._after_bad_loss(group)
        loss = read_loss_summary(
            combined, step=batch.step, must_be_finite=self.loss_scale is None, outcome=outcome, advice=advice
        )
        return loss, loss.scale(batch.group_items(within // self._group_size))

    def _after_bad_loss(self, group: int) -> tuple[str, str]:
        """Updates that were made where the loss of this group is not finite, and what to do then, for people."""
        return NO_UPDATE, LOWER_OR_CLIP

    def _compare_batches(self, batch: Batch, rank: int, summary: torch.Tensor) -> None:
        """Compare the call of a rank of the last stage with this rank's; data replicas have batches of their own."""
        own, (replica, num_replicas) = batch.identity, batch.replica
        if own.number == UNKNOWN:  # of one process, which need not wait for its device
            return
        its = Identity(*summary[-len(own) :].tolist())
        if self._last_owners.index(rank) % num_replicas != replica:
            its = Identity(*its[:2])
        own.refuse_other(its, step=batch.step, name=f"rank {self._rank}", its_name=f"rank {rank}")

    def forget(self, group: int) -> None:
        self._own.pop(group, None)
        self._summaries.pop(group, None)

    def drop(self) -> None:
        self.batches.clear()
        self._own.clear()
        self._summaries.clear()
        self._begun.clear()
        self._samples = None
        for sums in self.sums.values():
            for each in sums:
                each.drop()


class Update(ABC):
    """The updates of one process, between two batches at rest unless said otherwise.

    Arguments:
        ranks: by local rank, as are `recorders`.
        stages: of all local ranks, in order; none without an optimizer.
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
        stages: Sequence[StageOptimizers],
        shards: Shards,
        *,
        ownership: Ownership,
        recorders: Mapping[int, RankRecorder],
        loss_scale: LossScale | None = None,
    ) -> None:
        self.gate = UpdateGate()
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

    @property
    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps beside weights and optimizers, by key."""
        scale = self.loss_scale  # by age of a weight version: others could have scales of their own, once
        return {} if scale is None else {"loss_scale": {0: list(scale.content())}}

    def go_on(self, kept: Mapping[str, Any]) -> None:
        """Forget what was under way, and go on from what a checkpoint has kept, as far as it has."""
        self.restart()
        if self.loss_scale is not None and "loss_scale" in kept:
            self.loss_scale.load(kept["loss_scale"][0])

    def versions_of(self, rank: int, stage: int) -> WeightVersions | None:
        """Weight versions of a stage on a local rank; None: the module's own Parameters."""
        return None

    def summing_bytes(self, stage: int, parameters: Sequence[nn.Parameter]) -> float:
        """Bytes beside the gradients of these parameters of a stage while its replicas add them up."""
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
        """The programs that `begin` answered, as they are run: one after the other, each with whether it goes on."""
        yield programs, False

    @property
    def is_ahead(self) -> bool:
        """Whether other ranks may still speak against the newest update, which `settle` waits for."""
        return False

    def settle(self) -> None:
        """Make the weights what they should be. Nobody waits for this rank."""
        return

    def prepare(self) -> None:
        """All of `step` that other processes take part in, where it stands apart. Collective over the processes."""
        return

    def take_back(self) -> None:
        """Forget the batch whose gradients were ready, or nearly: it is run again."""
        raise AssertionError("a batch of a stream is not run again")

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

    def set_aside(self) -> Callable[[], None]:
        """Take away the results that `rest` and `step` would return; the answer puts them back."""
        return lambda: None

    # State and measurement

    def refuse_reading(self, what: str) -> None:
        """ValueError while weights that are read would not be of one update."""
        return

    def refuse_changes(self, what: str) -> None:
        """ValueError while batches are under way."""
        return

    def unite(self) -> None:
        """Make the optimizers of all replicas alike, before one of them is saved. Collective over the processes."""
        return

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
