"""Bytes that divided optimizers send in a real run, beside those that plans count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from support.inside import Topology
from support.pool import Pool
from torch import Tensor, nn

from stagewright.comm import Collectives
from stagewright.partition import Cluster
from stagewright.pipe import Mesh, PipelineModule

RANKS, WIDTH = 3, 6


def sent(kind: str) -> list[int]:
    """By exchange of one batch, bytes that this rank sends to others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    pipe = PipelineModule(
        model,
        mesh=Mesh(pipe=1, data=RANKS, data_parallel=kind),
        num_microbatches=1,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.Adam,
    )
    found, plain = [], Collectives.exchange

    def counted(self: Collectives, parts: Sequence[Sequence[Tensor]], *args: Any, **more: Any) -> Callable[[], Any]:
        others = [part for rank, part in enumerate(parts) if rank != self.rank]
        found.append(sum(piece.nbytes for part in others for piece in part))
        return plain(self, parts, *args, **more)

    with mock.patch.object(Collectives, "exchange", counted):
        pipe.train_step(torch.ones(3, WIDTH).double(), torch.zeros(3, WIDTH).double())
    pipe.close()
    return found


def test_plans_count_the_bytes_that_are_sent(gloo: Pool) -> None:
    """Gradients and then weights, a third of them from each of three ranks to each of the others."""
    weights, bandwidth = 8 * 2 * (WIDTH * WIDTH + WIDTH), 1e3
    parts = Topology(Cluster.from_levels([(RANKS, bandwidth)])).exchange(range(RANKS))
    for found in gloo.run(sent, ranks=RANKS, args=("zero1",)):
        assert found == [pytest.approx(parts.seconds(weights) * bandwidth)] * 2
