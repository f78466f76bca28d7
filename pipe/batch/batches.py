"""Cutting a batch into microbatches, and putting losses together again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from ...comm import Collectives
from ...comm.buckets import BucketSum
from ...partition.model.forms import Tensors
from ..settings.model_loss import LossValue
from ..settings.precision import Autocast
from ..stage.shapes import Inferred, Signature
from ..stage.tokens import TokenBlocks, Tokens
from .agreement import Identity


class BatchPart(NamedTuple):
    """One of the M microbatches of a batch, or a slice of one."""

    inputs: Tensors | None  # the model's; None for a microbatch of another data replica, whose target is None, too
    target: object
    inferred: Inferred  # what all stages run for it, and their outputs' layouts
    size: int  # number of samples; of tokens for a slice
    weight: float  # its share of the samples (or tokens) of its update group
    span: Tokens | None  # tokens of a slice, or of a member of a context group


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch, cut into M microbatches, or into all their slices: then M is M n here.

    Where data replicas have different batches, each rank has its own replica's microbatches, and assumes the same sizes
    for the others; the losses that travel have the real ones.
    """

    parts: list[BatchPart]  # [M]
    has_target: bool
    group_size: int  # microbatches of one update group
    step: int  # number of this batch, for random numbers and reports
    autocast: Autocast  # under which it was passed
    identity: Identity  # compared with that of other ranks
    replica: tuple[int, int] = (0, 1)  # (number, count) of the data replica whose batch it is
    num_slices: int = 1
    signatures: Sequence[Signature] = ()  # shapes and types of this process's own microbatches (or slices)
    wants_grad: bool = False

    @property
    def num_items(self) -> int:
        """N: samples, or tokens of slices, that losses are means over."""
        return sum([part.size for part in self.parts])

    @property
    def num_samples(self) -> int:
        span = self.parts[0].span
        if isinstance(span, TokenBlocks):
            return self.num_items // (span.total // span.length)  # each sample is in the batch of each member
        return self.num_items if span is None else self.num_items // span.total

    def group_items(self, group: int) -> int:
        return sum([part.size for part in self.parts[group * self.group_size : (group + 1) * self.group_size]])


def weigh(sizes: Sequence[int], group_size: int) -> list[float]:
    """n_k / N of each microbatch, N being the samples of its update group."""
    totals = [sum(sizes[begin : begin + group_size]) for begin in range(0, len(sizes), group_size)]
    return [size / totals[k // group_size] for k, size in enumerate(sizes)]


class NonFiniteLossError(FloatingPointError):
    """A microbatch's loss is infinite or not a number; the message names step and microbatch."""


def join_outputs(parts: Sequence[torch.Tensor], dimension: int | None) -> torch.Tensor | list[torch.Tensor]:
    """M outputs -> that of the whole batch, joined along its batch dimension. Without one, or where microbatches differ
    in other dimensions: scalars are stacked to [M], others are returned as a list (a single one as itself)."""
    if dimension is not None and len({(*x.shape[:dimension], *x.shape[dimension + 1 :]) for x in parts}) == 1:
        return torch.cat(list(parts), dim=dimension)
    if len(parts) == 1 and parts[0].dim():
        return parts[0]
    return list(parts) if parts[0].dim() else torch.stack(list(parts))


def share_of_sum(loss_fn: object, group_size: int) -> float | None:
    """Count of each microbatch with which the losses of a group add up, for a loss with reduction="sum"; else None."""
    while isinstance(loss_fn, partial) and "reduction" not in loss_fn.keywords:
        loss_fn = loss_fn.func
    reduction = loss_fn.keywords["reduction"] if isinstance(loss_fn, partial) else getattr(loss_fn, "reduction", None)
    return 1.0 / group_size if reduction == "sum" else None


def read_loss(value: object, share: float | None) -> LossValue:
    """Value of loss_fn as (loss, count); ValueError unless it is a scalar, or (sum, count). `share`: of a loss that
    adds up, see `share_of_sum`."""
    count: object = None if share is None else torch.tensor(share, dtype=torch.float64)
    loss = value
    if isinstance(value, tuple | list):
        if len(value) != 2:
            raise ValueError(f"loss_fn returned {len(value)} values: expected a scalar mean, or (sum, count)")
        loss, count = value
        if isinstance(count, int | float):
            count = torch.tensor(float(count), dtype=torch.float64)
        if not isinstance(count, torch.Tensor) or count.dim() != 0:
            raise ValueError(f"loss_fn returned the count {_shown(count)}: expected a number, or a scalar tensor")
        if count.requires_grad:
            raise ValueError(
                "loss_fn returned (sum, count) with a count that requires a gradient, which would be dropped: the mean "
                "over the batch is made after the backwards. Expected count.detach() where it is a constant; or a "
                "scalar mean of the microbatch, whose gradients are complete"
            )
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise ValueError(
            f"loss_fn returned {_shown(loss)}: expected a scalar tensor; return loss.mean(), or (sum, count); of "
            f"torch's losses reduction='mean' or 'sum'"
        )
    assert count is None or isinstance(count, torch.Tensor)
    return loss, count


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


SUMMARY_SIZE = 7 + len(Identity._fields)


def summarize_losses(losses: Mapping[int, LossValue], batch: Batch, *, group: int) -> torch.Tensor:
    """[13] float64 on the losses' device: what every rank must know of an update group, for any M.

    (total, counts, has counts, first microbatch whose loss is not finite or -1, that loss, samples of these losses,
    samples of the whole group by the weights, the batch's identity), where total is sum_k weights[k] loss_k, or sum_k
    sum_k with counts = sum_k count_k. Does not synchronize a CUDA device. `losses`: by microbatch of the batch; of
    those that ran here. `group`: number of the update group in the batch.

    Raises ValueError where only some losses have a count.
    """
    order = sorted(losses)
    parts, step = batch.parts, batch.step
    values = torch.stack([losses[k][0].to(torch.float64) for k in order])
    with_count = [losses[k][1] is not None for k in order]
    if any(with_count) != all(with_count):
        raise ValueError(
            f"loss_fn returned a count for some microbatches of step {step}, and none for microbatch "
            f"{order[with_count.index(False)]}: expected a scalar mean always, or (sum, count) always"
        )
    if with_count[0]:
        total = values.cumsum(0)[-1]  # in order, as a loop would add them
        counts = torch.stack([c.to(values) for k in order if (c := losses[k][1]) is not None]).cumsum(0)[-1]
    else:
        total = (values * torch.tensor([parts[k].weight for k in order], dtype=torch.float64).to(values)).cumsum(0)[-1]
        counts = torch.zeros_like(total)
    bad = ~values.isfinite()
    first_bad = bad.to(torch.int8).argmax()
    number = torch.tensor([k // batch.num_slices for k in order]).to(first_bad)[first_bad]
    microbatch = torch.where(bad.any(), number, -1)
    known = [sum(parts[k].size for k in order), batch.group_items(group), *batch.identity]
    has_counts, *rest = torch.tensor([with_count[0], *known], dtype=torch.float64).to(values)
    return torch.stack([total, counts, has_counts, microbatch.to(values), values[first_bad], *rest])


def combine_summaries(summaries: Sequence[torch.Tensor]) -> torch.Tensor:
    """The summary of all losses from those of the ranks that have some of them, in the given order."""
    if len(summaries) == 1:
        return summaries[0]
    parts = torch.stack(list(summaries)).cpu()
    bad = [part for part in parts if part[3] >= 0]
    first = min(bad, key=lambda part: float(part[3])) if bad else parts[0]
    samples = parts[:, 5].sum()
    totals = parts[:, 0]
    if not parts[0, 2] and (parts[:, 6] != samples).any():  # replicas with batches of other sizes
        totals = totals * parts[:, 6] / samples
    total, counts = totals.cumsum(0)[-1], parts[:, 1].cumsum(0)[-1]
    return torch.stack([total, counts, parts[0, 2], first[3], first[4], samples, samples, *parts[0, 7:]])


class GroupLoss(NamedTuple):
    """Loss of an update group: the mean, the sum of counts (or None), N."""

    mean: float
    counts: float | None
    num_samples: float

    def scale(self, num_samples: float) -> float:
        return num_samples / (self.num_samples if self.counts is None else self.counts)


NO_UPDATE = "no update was made"
LOWER_OR_CLIP = "lower the learning rate or clip (max_grad_norm=1.0)"


def read_loss_summary(
    summary: torch.Tensor, *, step: int, must_be_finite: bool, outcome: str, advice: str
) -> GroupLoss:
    """Loss of a summary by `summarize_losses`. `outcome`: text on which updates were made, for a loss that is not
    finite. `advice`: what to do then, besides looking at the samples. Raises NonFiniteLossError with step and
    microbatch, and ValueError for counts that can't be a divisor."""
    total, counts, has_counts, first_bad, bad_loss, samples, *_ = summary.tolist()
    if first_bad >= 0 and must_be_finite:
        raise NonFiniteLossError(
            f"the loss of step {step}, microbatch {int(first_bad)} is {bad_loss}: {outcome}. Expected a "
            f"finite number; look at that microbatch's samples, {advice}"
        )
    if not has_counts:
        return GroupLoss(total, None, samples)
    if not 0 < counts < math.inf:
        raise ValueError(f"loss_fn's counts of step {step} add up to {counts}: expected something to average over")
    return GroupLoss(total / counts, counts, samples)


def hand_back(
    batch: Batch, by_rank: Sequence[Mapping[tuple[int, int], torch.Tensor]], scale: float, collectives: Collectives
) -> None:
    """Run the backward of the modules before the pipeline, for a batch that requires gradients.

    Each rank has passed the same batch. Collective over the processes. `by_rank`: of the ranks of this process, by slot
    of the model's inputs and microbatch. `scale`: of all gradients of the batch.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    columns = zip(*(part.inputs for part in batch.parts if part.inputs is not None), strict=True)
    for slot, column in enumerate(columns):
        wanted = [(k, x) for k, x in enumerate(column) if x.requires_grad]
        if not wanted:
            continue
        sums = [x.new_zeros(x.shape) for _, x in wanted]
        is_there = sums[0].new_zeros(1)
        for (k, _), total in zip(wanted, sums, strict=True):
            for gradients in by_rank:
                if (slot, k) in gradients:
                    total += gradients[slot, k]
                    is_there += 1
        all_ranks = BucketSum([is_there, *sums], collectives, what="summing the gradients of the batch")
        all_ranks.leave_all([is_there, *sums])
        is_there, *sums = all_ranks.wait()
        if is_there:
            pairs += [(x, total * scale) for (_, x), total in zip(wanted, sums, strict=True)]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [part for _, part in pairs])


def check_same_batch(batch: Batch, collectives: Collectives, *, device: torch.device, called: int = 0) -> None:
    """ValueError on every member of a tensor or context group unless all are in the same call with the same batch; for
    the pipeline's first batch on every process. Collective over the group, then over all processes. Other batches are
    compared when losses arrive: ranks of the last stage, which do not wait, learn of it later. `called`: see
    `ContextAttention`."""
    step = batch.step
    for members, why in ((collectives.tensor_members, _ONE_RANK), (collectives.context_members, _ONE_SEQUENCE)):
        if len(members) == 1:
            continue
        own = torch.tensor([*batch.identity, called], dtype=torch.float64, device=device)
        gathered = [one.tolist() for one in collectives.tensors_among(members, own, what="comparing batches")]
        first, *others = (Identity(*one[:-1]) for one in gathered)
        names = [collectives.name_of(member) for member in members]
        for name, theirs in zip(names[1:], others, strict=True):
            theirs.refuse_other(first, step=step, name=name, its_name=names[0], why=why)
        if len({one[-1] for one in gathered}) > 1:
            raise ValueError(
                f"before step {step}, {' and '.join(names)} have called attention in different modules, so that keys "
                f"of one went to another: expected a forward whose calls do not depend on the values of its own tokens"
            )
    if batch.identity.number == 1:
        given = collectives.gather((batch.replica[0], batch.identity), what="comparing the first batch")
        named = [(collectives.name_of(process), *one) for process, one in enumerate(given)]
        last = {key: (name, its) for name, replica, its in named for key in (replica, (replica, its.group))}
        for name, replica, its in named if batch.has_target else ():
            for its_name, other in (last[replica], last[replica, its.group]):
                its.refuse_other(other, step=step, name=name, its_name=its_name)


_ONE_RANK = "The members of a tensor group run one rank together."
_ONE_SEQUENCE = "The members of a context group pass the same batch, and take their own tokens of it."
