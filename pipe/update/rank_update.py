"""Updates of a rank within a program, for its worker: losses, sums of gradients, collectives.

last forward of a group that runs here -> summary -> LOSS to every rank -> the same total on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from ...comm import TensorSpec
from ...partition.model.forms import Tensors
from ...partition.profiler.clock import Stamp
from ...schedules import Action, Collective, Message, Op, Schedule
from ...schedules.program import GroupStep
from ..batch.agreement import UNKNOWN, Identity
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
from ..guards.contexts import NOTHING
from ..settings.model_loss import LossValue
from .gradients import LossScale
from .shards import Shards
from .shared_sums import SharedSum


class UpdateGate:
    """Entered before any code of a pipeline writes weights or optimizer state; open at first."""

    def __init__(self) -> None:
        self._waits: list[Callable[[], None]] = []

    def hold(self, wait: Callable[[], None]) -> None:
        self._waits.append(wait)

    def enter(self) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()


class RankUpdate:
    """Update groups of one rank: its own losses by microbatch, and their summaries by rank of the last stage. Under a
    flush, also sums of gradients that other processes hold.

    Each data replica weighs its samples as if the others had the same number. They exchange their numbers when a batch
    begins, for the first sum; for the first backward where replicas make gradients of each other's experts. Counts of
    (sum, count) losses are known later.

    Arguments:
        sums: none where ranks that share gradients do not add them up now.
        option_numbers: of the optimizers of this process, see `SharedSum.begin`.
        replicas: ranks that run the same on other batches; none where all ranks pass the same batch.
        are_mixed: whether these make gradients of each other's weights, of experts.
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
        are_mixed: bool = False,
    ) -> None:
        self.are_mixed = are_mixed
        self.loss_scale = loss_scale  # None: losses are not scaled, and must be finite
        self.shards = shards
        self.sums = sums or {}
        self.replicas = replicas
        self.sum_after: Mapping[Action, Collective] = {}  # by the last backward of a stage, the sum that follows it
        self._read_options = option_numbers
        self._begun: dict[Collective, list[Stamp]] = {}  # when the rest began, and when all was complete
        # Of this batch: samples of all replicas, until they are known; then the factor and options of the first sum.
        self._samples: tuple[torch.Tensor, Callable[[], None]] | None = None
        self._factor = self._loss_factor = 1.0
        self._numbers: Mapping[int, int] | None = None
        self.batches: dict[int, Batch] = {}  # in flight, by number: from microbatch number * M on
        self._rank = rank
        self._batch_indices = schedule.batch_indices
        self._group_size = schedule.group_size
        self.losses: dict[int, dict[int, LossValue]] = {}
        self._summaries: dict[int, dict[int, torch.Tensor]] = {}
        last, size = schedule.num_stages - 1, schedule.group_size
        self._last_owners = schedule.owners[last]
        self._num_own = [  # microbatches of each group of a batch whose last forward runs here
            sum(schedule.owner(last, k) == rank for k in range(begin, begin + size))
            for begin in range(0, schedule.batch_indices, size)
        ]

    def enter(self, batch: Batch) -> None:
        """Begin the only batch, whose program counts from microbatch 0."""
        self.drop()
        self.batches[0] = batch
        self._factor, self._loss_factor, self._numbers = 1.0, 1.0, None
        if self.replicas and (self.sums or self.are_mixed):
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
        """Begin a collective that overlaps with compute: gather or free weights, or sum gradients whose backwards are
        done on this rank."""
        if collective.op is not Op.REDUCE_GRAD:
            self.shards.begin(collective)
            return
        if not self.sums[collective]:
            return
        self._count_samples()
        if self._numbers is None:
            self._numbers = self._read_options()
        stamp = self.shards.recorder.clock.stamp
        stamps = self._begun[collective] = [stamp()]
        for each in self.sums[collective]:
            each.begin(self._factor, self._numbers, on_through=lambda: stamps.append(stamp()))

    def overlapping(self, action: Action) -> AbstractContextManager[None]:
        """Context of a backward that overlaps with its sum, see `SharedSum.overlapping`."""
        sums = self.sums.get(self.sum_after[action], ()) if action in self.sum_after else ()
        if len(sums) != 1:  # the order of two would be that of the gradients
            return NOTHING
        self._count_samples()
        return sums[0].overlapping(self._factor)

    def settle(self) -> None:
        """Block, at the end of a program, until everything begun is complete."""
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
            factor = self.batches[0].num_items / float(samples)
            self._factor, self._loss_factor = (1.0, factor) if self.are_mixed else (factor, 1.0)

    def finish(self, step: GroupStep) -> None:
        raise AssertionError(f"{step} in a program without updates")

    def step(self, stage: int, index: int) -> None:
        raise AssertionError(f"an update of stage {stage} in a program without updates")

    def note_loss(self, index: int, loss: LossValue) -> None:
        """Note the loss of microbatch `index`; the last one of a group that runs here makes their summary."""
        number, k = divmod(index, self._batch_indices)
        group, within = index // self._group_size, k // self._group_size
        losses = self.losses.setdefault(group, {})
        losses[k] = loss
        if len(losses) == self._num_own[within]:
            summary = summarize_losses(losses, self.batches[number], group=within)
            self._summaries.setdefault(group, {})[self._rank] = summary

    def loss_gradient(self, index: int) -> torch.Tensor:
        number, k = divmod(index, self._batch_indices)
        batch = self.batches[number]
        if self.are_mixed:
            self._count_samples()
        value, count = self.losses[index // self._group_size][k]
        # The count of a whole group of (sum, count) losses is known only at its end: until then, 1 / samples.
        weight = batch.parts[k].weight if count is None else 1.0 / batch.group_items(k // self._group_size)
        return torch.full_like(value, weight * self._loss_factor * self.scale_of(index // self._group_size))

    def specs(self, message: Message) -> list[TensorSpec]:
        return [TensorSpec((SUMMARY_SIZE,), (1,), torch.float64, False)]

    def put(self, message: Message, tensors: Tensors) -> None:
        """Take a message. Raises ValueError where its rank, of the same pipeline, has passed another batch."""
        batch = self.batches[message.index * self._group_size // self._batch_indices]
        self._compare_batches(batch, message.src, tensors[0])
        self._summaries.setdefault(message.index, {})[message.src] = tensors[0]

    def take(self, message: Message) -> Tensors:
        return (self._summaries[message.index][self._rank],)

    def total(self, group: int, *, among: Collection[int] | None = None) -> tuple[GroupLoss, float]:
        """The loss of a group, and the factor for its gradients. `among`: the ranks whose losses the gradients are of;
        None: all. Raises NonFiniteLossError, unless losses are scaled (then gradients are checked), and ValueError for
        counts that can't be a divisor."""
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
        """(updates that were made, advice) for the error of a loss of this group that is not finite."""
        return NO_UPDATE, LOWER_OR_CLIP

    def _compare_batches(self, batch: Batch, rank: int, summary: torch.Tensor) -> None:
        """Compare the call of a rank of the last stage with this rank's, and its batch within a data replica."""
        own, (replica, num_replicas) = batch.identity, batch.replica
        if own.number == UNKNOWN:  # in one process, which need not synchronize its device
            return
        its = Identity(*summary[-len(own) :].tolist())
        if self._last_owners.index(rank) % num_replicas != replica:
            its = Identity(*its[:2])
        own.refuse_other(its, step=batch.step, name=f"rank {self._rank}", its_name=f"rank {rank}")

    def forget(self, group: int) -> None:
        self.losses.pop(group, None)
        self._summaries.pop(group, None)

    def drop(self) -> None:
        self.batches.clear()
        self.losses.clear()
        self._summaries.clear()
        self._begun.clear()
        self._samples = None
        for sums in self.sums.values():
            for each in sums:
                each.drop()
