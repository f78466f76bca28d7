"""Gradients of a batch that wants some: what modules in front of the pipeline learn from.

by slot and microbatch, on the ranks whose stages take the batch's tensors -> sums over all ranks -> the user's graph
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...comm import Collectives
from .batches import Batch

BatchGradients = Mapping[tuple[int, int], torch.Tensor]  # by slot of the model's inputs, and microbatch


def hand_back(batch: Batch, by_rank: Sequence[BatchGradients], scale: float, collectives: Collectives) -> None:
    """Run the backward of what has made the batch; each rank has passed the same one. Collective over the processes.

    Arguments:
        by_rank: of the ranks of this process.
        scale: of all gradients of the batch.
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
        if not collectives.alone:
            flat = torch.cat([is_there, *(total.reshape(-1) for total in sums)])
            collectives.all_reduce(flat, what="summing the gradients of the batch")
            is_there, *pieces = torch.split(flat, [1, *(total.numel() for total in sums)])
            sums = [piece.view(total.shape) for piece, total in zip(pieces, sums, strict=True)]
        if is_there:
            pairs += [(x, total * scale) for (_, x), total in zip(wanted, sums, strict=True)]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [part for _, part in pairs])
