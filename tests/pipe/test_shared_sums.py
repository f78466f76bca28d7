"""Sums of gradients over processes beside the backwards that follow: issued where they stand, exact; and packed ones.

Two data replicas of two ranks with two stages each, whose weights are tied crosswise: rank 0 is through with stage 2
first and rank 1 with stage 3, so that 1+2 and 0+3 are ready in opposite orders. Codecs beside a plain process.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.alone import near, train_alone
from support.failing import refusal
from support.inside import (
    ALONE_BYTES,
    BUCKET_BYTES,
    BucketSum,
    SharedSum,
    buckets,
    buckets_of,
    pack,
    start_matrix,
    unpack,
)
from support.parts import Parts
from support.plain import batch
from support.pool import Pool
from support.records import records
from support.small import sgd
from torch import Tensor, nn

import stagewright as sw
from stagewright.comm import Codec, Collectives, PeerLost, TensorSpec
from stagewright.pipe import NonFiniteLossError, PipelineModule

WIDTH = 5
SIZES = ((6, 6), (7, 4), (3, 9))  # samples by step and replica


def tied_model() -> nn.Sequential:
    """Four stages; stages 0 and 3 share a weight, and stages 1 and 2."""
    torch.manual_seed(0)
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    linears[3].weight, linears[2].weight = linears[0].weight, linears[1].weight
    return nn.Sequential(*(nn.Sequential(linear, nn.Tanh()) for linear in linears)).double()


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor]:
    return batch(10 * step + replica, WIDTH, samples=SIZES[step][replica])


def two_replicas(model: nn.Module) -> PipelineModule:
    options = records(mesh={"pipe": 1, "data": 2}, num_microbatches=2, loss_fn=F.mse_loss, timeout=120.0)
    return PipelineModule(model, schedule="1f1b", **options)


def through_a_bad_batch() -> list[float | None]:
    """A loss that is not finite in replica 1 stops both alike, sums under way or not; the next batch is as without."""
    replica = torch.distributed.get_rank() % 2
    options: dict[str, Any] = {"mesh": {"pipe": 2, "data": 2}, "num_microbatches": 2, "num_chunks": 2, "timeout": 120.0}
    options |= {"schedule": "interleaved", "cut": ["1", "2", "3"], "loss_fn": F.mse_loss, "optimizer": sgd}
    pipe = PipelineModule(tied_model(), **records(**options))
    losses = []
    for step, spoilt in ((0, False), (1, True), (2, False)):
        x, y = batch_of(step, replica)
        if spoilt and replica == 1:
            y = y * float("inf")
        try:
            losses.append(pipe.train_step(x, y).loss)
        except NonFiniteLossError:
            losses.append(None)
            assert all(parameter.grad is None for parameter in pipe.parameters())
    state = pipe.full_state_dict()
    pipe.close()
    return [*losses, *(float(value.sum()) for value in state.values())]


def test_a_batch_that_is_given_up_leaves_no_sum_behind(gloo: Pool) -> None:
    answers = gloo.run(through_a_bad_batch, ranks=4)

    both = (zip(*(batch_of(step, replica) for replica in range(2)), strict=True) for step in (0, 2))
    losses, _, state = train_alone(tied_model(), (map(torch.cat, columns) for columns in both), sgd)
    for answer in answers:
        near(answer, [losses[0], None, losses[1], *(float(value.sum()) for value in state.values())], atol=1e-11)


WIDE = 182  # so that a matrix has a bucket of its own


class Wide(Parts, layer=lambda: nn.Linear(WIDE, WIDE), always=lambda: nn.Linear(WIDE, WIDE)):
    """A layer that leaves its matrix alone where the first sample is below zero; biases share a bucket."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.always(x) + (self.layer(x) if bool(x[0, 0] > 0) else 0.0))


def wide_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Wide(), nn.Tanh(), nn.Linear(WIDE, WIDE)).double()


def wide_batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Above zero, but on replica 1 in steps 1 and 2: in step 2 on none."""
    x, y = batch(10 * step + replica, WIDE, samples=4 + replica)
    x[:, 0] = x[:, 0].abs() * (-1 if (step, replica) in ((1, 1), (2, 0), (2, 1)) else 1)
    return x, y


def wide_sums() -> list[tuple[dict[str, Tensor | None], list[Any]]]:
    """By step this replica's gradients, and sizes of its sums in order, with "begin" where REDUCE_GRAD stands."""
    replica, told = torch.distributed.get_rank(), []
    all_reduce, begin = Collectives.begin_all_reduce, SharedSum.begin

    def sums(self: Any, tensor: Tensor, **options: Any) -> Any:
        if options["what"].startswith("summing"):
            told.append(tensor.numel())
        return all_reduce(self, tensor, **options)

    def begins(self: Any, *given: Any, **options: Any) -> None:
        told.append("begin")
        begin(self, *given, **options)

    found, model = [], wide_model()
    with (
        mock.patch.object(Collectives, "begin_all_reduce", sums),
        mock.patch.object(SharedSum, "begin", begins),
        two_replicas(model) as pipe,
    ):
        for step in range(5):
            model[2].weight.requires_grad_(step < 4)
            pipe.forward_backward(*wide_batch(step, replica))
            found.append(({n: None if p.grad is None else p.grad.clone() for n, p in pipe.named_parameters()}, [*told]))
            told.clear()
            for parameter in pipe.parameters():
                parameter.grad = None
    return found


def test_buckets_leave_within_the_last_backward_in_one_order(gloo: Pool) -> None:
    """Exact whoever has no gradient: then what stands behind it waits for the end, and nobody for anybody. In step 4 a
    weight is frozen."""
    answers = gloo.run(wide_sums, ranks=2)
    for step in range(5):
        model, parts = wide_model(), [wide_batch(step, replica) for replica in range(2)]
        whole = sum(y.numel() for _, y in parts)
        model[2].weight.requires_grad_(step < 4)
        for x, y in parts:
            for some, wanted in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
                (F.mse_loss(model(some), wanted, reduction="sum") / whole).backward()
        matrix, flags = WIDE * WIDE, 3 * 6
        for replica, answer in enumerate(answers):
            gradients, told = answer[step]
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-13)
            assert [each for each in told if each != "begin"] == [matrix, matrix, 3 * WIDE, matrix, flags]
            lacks = step == 2 or (step, replica) == (1, 1)  # the first matrix and its bias
            assert told.index("begin") == (0 if step in (0, 4) else 2 if lacks else 4)


class Twice(Parts, layer=lambda: nn.Linear(WIDE, WIDE)):
    """Adds to its weight's gradient in a backward within the backward, too, if it is asked to."""

    asked = False

    def forward(self, x: Tensor) -> Tensor:
        run = lambda y: torch.utils.checkpoint.checkpoint(self.layer, y, use_reentrant=True)  # noqa: E731
        return run(self.layer(x)) if self.asked else self.layer(x)


def added_twice(late: bool) -> str:
    torch.manual_seed(0)
    model, x = nn.Sequential(Twice()).double(), torch.randn(4, WIDE, dtype=torch.float64)
    with two_replicas(model) as pipe:
        for step in range(3):
            Twice.asked = step > 0 or not late
            try:
                pipe.forward_backward(x, x)
            except (ValueError, PeerLost) as error:  # of whichever finds it first
                return str(error)
            finally:
                Twice.asked = False
    return ""


def test_a_gradient_that_is_made_twice_never_leaves_early(gloo: Pool) -> None:
    assert gloo.run(added_twice, ranks=2, args=(False,)) == ["", ""]
    for error in gloo.run(added_twice, ranks=2, args=(True,)):
        assert "the gradient of '0.layer." in error
        assert "use_reentrant=False" in error


def masked_behind(first: int) -> list[str | dict[str, list[float]]]:
    """Gradients by step; from step `first` on a hook of a module masks its weight's gradient behind a backward."""
    torch.manual_seed(0)
    model, step = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)).double(), 0
    x = torch.randn(4, WIDE, dtype=torch.float64)

    def mask(module: nn.Module, *_: object) -> None:
        weight: Any = module.weight
        if step >= first and weight.grad is not None:
            weight.grad.mul_(torch.arange(WIDE) % 2)

    model[1].register_full_backward_hook(mask)
    found: list[Any] = []
    with two_replicas(model) as pipe:
        for step in range(3):  # noqa: B007 - the hook reads it
            try:
                pipe.forward_backward(x, x)
            except (ValueError, PeerLost) as error:  # of whichever finds it first
                return [*found, str(error)]
            found.append({name: p.grad.flatten().tolist() for name, p in pipe.named_parameters() if p.grad is not None})
            for parameter in pipe.parameters():
                parameter.grad = None
    return found


def test_a_gradient_that_a_hook_changes_behind_its_backward_never_leaves_early(gloo: Pool) -> None:
    """From the first step on it is summed as it then is; later it ends by name, since its sum is under way."""
    for found in gloo.run(masked_behind, ranks=2, args=(0,)):
        assert len(found) == 3
        for gradients in found:
            assert isinstance(gradients, dict)
            assert not any(gradients["1.weight"][0::2])
            assert all(gradients["1.weight"][1::2])
    for found in gloo.run(masked_behind, ranks=2, args=(2,)):
        assert "the gradient of '1.weight' was changed after its backward" in found[-1]


def test_large_gradients_have_a_bucket_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are summed where they are: a copy of all gradients would double their memory while sums are under way."""
    sizes = [10, ALONE_BYTES // 4, 0, 20, ALONE_BYTES // 4 - 1, ALONE_BYTES]
    tensors = [torch.empty(size, device="meta") for size in sizes]
    assert buckets_of(tensors) == [(1,), (5,), (0, 3, 4)]
    doubles = [torch.empty(size, dtype=torch.float64, device="meta") for size in (3, 4)]
    assert buckets_of([*tensors[:1], *doubles]) == [(0,), (1, 2)]
    assert buckets_of(tensors[1:3]) == [(0,)]
    many = [torch.empty(ALONE_BYTES // 8, device="meta")] * (3 * BUCKET_BYTES // ALONE_BYTES)
    assert [len(bucket) for bucket in buckets_of(many)] == [n * BUCKET_BYTES // ALONE_BYTES for n in (2, 1)]
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 16)
    nobody: Any = SimpleNamespace(begin_all_reduce=lambda total, **_: lambda: None)
    small = [torch.full((2,), float(number)) for number in range(4)]
    total = BucketSum(small, nobody, what="two buckets, which are under way together")
    total.leave_all(small)
    near(total.wait(), small)


STEPS = 4
CODECS = {"int8": Codec("int8"), "topk": Codec("topk", 0.2), "lowrank": Codec("lowrank", 2)}


def model() -> nn.Sequential:
    torch.manual_seed(1)
    convolution = nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 3, 3, padding=1), nn.Flatten()
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), *convolution).double()


def packed_batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + replica), dtype=torch.float64)
    return x, x.sin()


def summed(codec: Codec, grads: list[Tensor], memory: dict[Any, Tensor]) -> Tensor:
    """The sum of what both replicas send of a parameter; of matrices of a rank, by PowerSGD. Biases are too small."""
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
    left = torch.linalg.qr(sum(x @ memory.get("start", start_matrix(x, 2)) for x in owed)).Q
    right = sum(x.T @ left for x in owed)
    memory |= {"start": torch.linalg.qr(right).Q} | {r: x - left @ right.T / 2 for r, x in enumerate(owed)}
    return (left @ right.T).view_as(grads[0])


def plain(codec: Codec) -> tuple[list[float], list[Tensor]]:
    one = model()
    optimizer, losses = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9), []
    memories: list[dict[Any, Tensor]] = [{} for _ in one.parameters()]
    for step in range(STEPS):
        grads, total = [], 0.0
        for replica in range(2):
            loss = F.mse_loss(one(packed_batch(step, replica)[0]), packed_batch(step, replica)[1]) / 2
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
        losses = [pipe.train_step(*packed_batch(step, pipe.rank)).loss for step in range(STEPS)]
        found[name] = losses, [*pipe.full_state_dict().values()], pipe.sent_bytes["data"]
        pipe.close()
    return found


def told() -> list[str]:
    def made(mesh: dict[str, Any], options: dict[str, Any]) -> PipelineModule:
        packed = sw.Mesh(pipe=1, data=2, compress={"data": "int8"}, **mesh)
        return PipelineModule(model(), mesh=packed, loss_fn=F.mse_loss, optimizer=sgd, **options)

    cases = ({"data_parallel": "zero1"}, {}), ({"sync": 2}, {}), ({}, {"schedule": "2bw"})
    return [refusal(partial(made, *case)) for case in cases]


def test_replicas_sum_what_is_packed(gloo: Pool) -> None:
    """Beside one process that packs what each of them would; the first batch is verified, exactly."""
    rows = {16: 12, 3: 12}  # of the matrices of both weights; each has a bias
    bytes_of = {"int8": sum(n * m + 8 * n + n + 8 for n, m in rows.items())}
    bytes_of["lowrank"] = 8 * sum(2 * (n + m) + n for n, m in rows.items())
    bytes_of["topk"] = 12 * sum(round(0.2 * size) for n, m in rows.items() for size in (n * m, n))
    for found in gloo.run(trained, ranks=2):
        for name, codec in CODECS.items():
            losses, weights, sent = found[name]
            expected, its = plain(codec)
            assert losses == pytest.approx(expected, rel=1e-11)
            for mine, other in zip(weights, its, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
            assert sent == (STEPS * bytes_of[name], STEPS * 8 * 247)
    for said in gloo.run(told, ranks=2):
        assert "with 'zero1' or 'fsdp'" in said[0]
        assert "with sync=2, which sums no gradients" in said[1]
        assert "under the asynchronous '2bw'" in said[2]
