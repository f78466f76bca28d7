"""Sums of gradients over data groups that are packed: PowerSGD beside torch's, other codecs beside a plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.inside import begin_packed_sum, orthonormal, pack, start_matrix, unpack
from support.pool import Pool
from support.small import sgd
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import stagewright as sw
from stagewright.comm import Codec, Collectives, LinkCodecs, MeshPlace, ProcessMesh, TensorSpec, World
from stagewright.pipe import PipelineModule

RANK, STEPS = 2, 4
KEPT: list[Any] = []  # torch's futures may drop a group last, on one of its own threads, which cannot end it
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
    KEPT.append(dist.group.WORLD)
    mine, codecs = by_us(replica)
    return by_torch(replica), mine, codecs.sent["data"]


@pytest.mark.thorough
def test_low_rank_is_powersgd(gloo: Pool) -> None:
    """Over steps with error feedback and a warm start; bytes as a ring sends them."""
    for theirs, mine, sent in gloo.run(both_sides, ranks=2):
        for one, other in zip(theirs, mine, strict=True):
            for name in SHAPES:
                torch.testing.assert_close(other[name], one[name], rtol=1e-9, atol=1e-11)
        packed = (8 + 12 + 6 + 9) * RANK + 12
        assert sent == (STEPS * 8 * packed, STEPS * 8 * (96 + 12 + 54))
        assert not torch.allclose(mine[0]["up"], (gradient(0, 0)["up"] + gradient(0, 1)["up"]) / 2, rtol=1e-2)


CODECS = {"int8": Codec("int8"), "topk": Codec("topk", 0.2), "lowrank": Codec("lowrank", 1)}


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12)).double()


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + replica), dtype=torch.float64)
    return x, x.sin()


def summed(codec: Codec, grads: list[Tensor], memory: dict[Any, Tensor]) -> Tensor:
    """The sum of what both replicas send of a parameter; biases are too small for a matrix of rank 1."""
    rows = [each.reshape(len(each), -1) if each.dim() > 1 else each for each in grads]
    if codec.kind != "lowrank":
        found = torch.zeros_like(rows[0])
        for replica, x in enumerate(rows):
            packed, kept = pack(codec, x, memory.get(replica))
            memory |= {} if kept is None else {replica: kept}
            found += unpack(codec, packed, TensorSpec.of(x))
        return found.view_as(grads[0])
    if grads[0].dim() == 1:
        return sum(grads)
    owed = [x + memory.get(replica, 0.0) for replica, x in enumerate(rows)]
    left = orthonormal(sum(x @ memory.get("start", start_matrix(x, 1)) for x in owed))
    right = sum(x.T @ left for x in owed)
    memory |= {"start": orthonormal(right)} | {r: x - left @ right.T / 2 for r, x in enumerate(owed)}
    return left @ right.T


def plain(codec: Codec) -> tuple[list[float], list[Tensor]]:
    one = model()
    optimizer, losses = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9), []
    memories: list[dict[Any, Tensor]] = [{} for _ in one.parameters()]
    for step in range(STEPS):
        grads, total = [], 0.0
        for replica in range(2):
            loss = F.mse_loss(one(batch(step, replica)[0]), batch(step, replica)[1]) / 2
            grads.append(torch.autograd.grad(loss, one.parameters()))
            total += float(loss.detach())
        for p, memory, *both in zip(one.parameters(), memories, *grads, strict=True):
            p.grad = summed(codec, both, memory)
        optimizer.step()
        losses.append(total)
    return losses, [p.detach() for p in one.parameters()]


def trained() -> dict[str, Any]:
    found = {}
    for name, codec in CODECS.items():
        pipe = PipelineModule(
            model(),
            mesh=sw.Mesh(pipe=1, data=2, compress={"data": {name: codec.level} if codec.level else name}),
            num_microbatches=1,
            loss_fn=F.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            verify=True,
        )
        losses = [pipe.train_step(*batch(step, pipe.rank)).loss for step in range(STEPS)]
        found[name] = losses, [*pipe.full_state_dict().values()], pipe.sent_bytes["data"]
        pipe.close()
    return found


def told() -> list[str]:
    said = []
    for mesh, options in (({"data_parallel": "zero1"}, {}), ({"sync": 2}, {}), ({}, {"schedule": "2bw"})):
        try:
            PipelineModule(
                model(),
                mesh=sw.Mesh(pipe=1, data=2, compress={"data": "int8"}, **mesh),
                loss_fn=F.mse_loss,
                optimizer=sgd,
                **options,
            )
        except ValueError as error:
            said.append(str(error))
    return said


def test_replicas_sum_what_is_packed(gloo: Pool) -> None:
    """Beside one process that packs what each of them would; the first batch is verified, exactly."""
    bytes_of = {"int8": 16 * 12 + 8 * 16 + 16 + 8 + 12 * 16 + 8 * 12 + 12 + 8, "lowrank": 8 * (28 + 16 + 28 + 12)}
    bytes_of["topk"] = 12 * sum(round(0.2 * size) for size in (16 * 12, 16, 12 * 16, 12))
    for found in gloo.run(trained, ranks=2):
        for name, codec in CODECS.items():
            losses, weights, sent = found[name]
            expected, its = plain(codec)
            assert losses == pytest.approx(expected, rel=1e-11)
            for mine, other in zip(weights, its, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
            assert sent == (STEPS * bytes_of[name], STEPS * 8 * 412)
    for said in gloo.run(told, ranks=2):
        assert "with 'zero1' or 'fsdp'" in said[0]
        assert "with sync=2, which sums no gradients" in said[1]
        assert "under the asynchronous '2bw'" in said[2]
