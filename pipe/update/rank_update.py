"""Update groups under way on one rank, as its worker meets them; of a flush and of evaluation, losses are all there is.

last forward of a group that runs here -> summary -> LOSS to every rank -> the same total on every rank
"""

from __future__ import annotations

import torch

from ...comm import TensorSpec
from ...partition.graph.forms import Tensors
from ...schedules import Collective, Message, Schedule
from ...schedules.program import GroupStep
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
from ..stages.stage import LossValue
from .loss_scale import LossScale
from .shards import Shards


class RankUpdate:
    """Update groups of one rank: its own losses by microbatch, and their summaries by rank of the last stage.

    Attributes:
        batches: under way, by number: microbatches number * M, number * M + 1, ...
        loss_scale: None: losses are not scaled, and must be finite.
        shards: what this rank has of the parameters that it divides with others.
    """

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        loss_scale: LossScale | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.loss_scale = loss_scale
        self.shards = Shards() if shards is None else shards
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

    def version(self, stage: int, index: int) -> int:
        """Weight version of microbatch `index` on a stage."""
        return 0

    def scale_of(self, group: int) -> float:
        """The factor of the losses of an update group."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def begin(self, collective: Collective) -> None:
        """The program has come to what ranks of several processes do together: it goes on beside compute."""
        self.shards.begin(collective)

    def settle(self) -> None:
        """Block until what was begun is through: the program is."""
        if self.shards.apart:
            self.shards.settle()

    def finish(self, step: GroupStep) -> None:
        """The backwards of an update group are through on this rank."""
        raise AssertionError(f"{step} in a program without updates")

    def step(self, stage: int, index: int) -> None:
        """The optimizer step of a stage for update group `index`."""
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
        """Gradient of the group's loss with respect to that of microbatch `index`."""
        number, k = divmod(index, self._batch_indices)
        batch = self.batches[number]
        value, count = self._own[index // self._group_size][k]
        # Of (sum, count) losses the count of the whole group is known at its end only: until then, 1 / samples.
        weight = batch.parts[k].weight if count is None else 1.0 / batch.group_items(k // self._group_size)
        return torch.full_like(value, weight * self.scale_of(index // self._group_size))

    def specs(self, message: Message) -> list[TensorSpec]:
        """Layouts of the tensors of a message about an update group."""
        return [TensorSpec((SUMMARY_SIZE,), (1,), torch.float64, False)]

    def put(self, message: Message, tensors: Tensors) -> None:
        """Such a message arrived. Raises ValueError where its rank, of the same pipeline, has passed another batch."""
        batch = self.batches[message.index * self._group_size // self._batch_indices]
        self._compare_batches(batch, message.src, tensors[0])
        self._summaries.setdefault(message.index, {})[message.src] = tensors[0]

    def take(self, message: Message) -> Tensors:
        """Such a message to send."""
        return (self._summaries[message.index][self._rank],)

    def total(self, group: int) -> tuple[GroupLoss, float]:
        """The loss of a group, and what its gradients must be multiplied with.

        Raises NonFiniteLossError, but where losses are scaled: gradients then tell; and ValueError for counts that
        cannot be divided by.
        """
        number, within = divmod(group * self._group_size, self._batch_indices)
        batch = self.batches[number]
        summaries = self._summaries[group]
        combined = combine_summaries([summaries[rank] for rank in sorted(summaries)])
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
        """The losses of a group are no longer needed."""
        self._own.pop(group, None)
        self._summaries.pop(group, None)

    def drop(self) -> None:
        """Forget all that is under way."""
        self.batches.clear()
        self._own.clear()
        self._summaries.clear()
