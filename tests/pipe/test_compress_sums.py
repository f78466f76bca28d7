"""Sums of gradients over data groups that are packed: PowerSGD beside torch's, other codecs beside a plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.inside import begin_packed_sum, start_matrix
from support.pool import Pool
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from stagewright.comm import Codec, Collectives, LinkCodecs, MeshPlace, ProcessMesh, World

RANK, STEPS = 2, 4
SHAPES = {"up": (8, 12), "bias": (12,), "cube": (6, 3, 3)}


def gradient(step: int, replica: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + 10 * step + replica)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


class Given(nn.Module):
    """Weights whose gradients are those that it is given."""

    def __init__(self) -> None:
        super().__init__()
        zeros = {name: nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in SHAPES.items()}
        self.weights = nn.ParameterDict(zeros)

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum(((self.weights[name] * each).sum() for name, each in gradients.items()), torch.zeros(()))


def with_our_starts(state, bucket):  # torch reads annotations, and wants no text
    """torch's hook, with the memory that it would have behind an earlier step."""
    if state.iter == state.start_powerSGD_iter and not state.q_memory_dict:
        matrices = [each.view(len(each), -1) for each in bucket.gradients() if each.dim() > 1]
        state.q_memory_dict[0] = torch.cat([start_matrix(each, RANK).reshape(-1) for each in matrices])
        state.p_memory_dict[0] = torch.zeros(sum(RANK * len(each) for each in matrices), dtype=torch.float64)
    return powerSGD_hook(state, bucket)


def by_torch(replica: int) -> list[dict[str, Tensor]]:
    """Means of DistributedDataParallel with its hook, which sums exactly in the first two steps: zeros here."""
    ddp = DistributedDataParallel(Given())
    state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, with_our_starts)
    found = []
    for step in (-2, -1, *range(STEPS)):
        ddp.zero_grad()
        ddp({name: each * (step >= 0) for name, each in gradient(step, replica).items()}).backward()
        found.append({name: p.grad.clone() for name, p in ddp.module.weights.items()})
    return found[2:]


def by_us(replica: int) -> tuple[list[dict[str, Tensor]], LinkCodecs]:
    codecs = LinkCodecs()
    codecs.data = Codec("lowrank", RANK)
    place = MeshPlace(world=World(rank=replica, size=2), mesh=ProcessMesh(pipe=1, data=2))
    together = Collectives(place, device=torch.device("cpu"), timeout=60.0)
    together.subgroup(range(2))
    found = []
    for step in range(STEPS):
        sums = begin_packed_sum(codecs, gradient(step, replica), together, ranks=range(2), what="a sum")()
        found.append({name: each / 2 for name, each in zip(SHAPES, sums, strict=True)})
    together.close()
    return found, codecs


def both_sides() -> tuple[Any, Any, Any]:
    replica = dist.get_rank()
    mine, codecs = by_us(replica)
    return by_torch(replica), mine, codecs.sent["data"]


@pytest.mark.gloo
@pytest.mark.concerns("comm", "pipe/update")
def test_low_rank_is_powersgd(gloo: Pool) -> None:
    """Over steps with error feedback and a warm start; bytes as a ring sends them."""
    for theirs, mine, sent in gloo.run(both_sides, ranks=2):
        for one, other in zip(theirs, mine, strict=True):
            for name in SHAPES:
                torch.testing.assert_close(other[name], one[name], rtol=1e-9, atol=1e-11)
        packed = (8 + 12 + 6 + 9) * RANK + 12
        assert sent == (STEPS * 8 * packed, STEPS * 8 * (96 + 12 + 54))
        assert not torch.allclose(mine[0]["up"], (gradient(0, 0)["up"] + gradient(0, 1)["up"]) / 2, rtol=1e-2)
