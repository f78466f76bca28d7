"""Activations that leave their rank while they wait: results to the last bit, and memory that really goes."""

from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from support.cases import Layout, agree
from support.inside import Activations, LiveBytes, _apart
from support.inside import MovingHost as Host
from support.matrix import make_case
from support.parts import Parts
from support.pipeline import run
from support.random_moves import with_random_moves
from support.records import records
from support.reference import reference
from support.small import layers, make
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import stagewright as sw
from stagewright.schedules import MemoryPart, Schedule, build, simulate, with_offload


def moved(schedule: str, num_ranks: int, num_chunks: int | None = None) -> Schedule:
    """A schedule of 5 microbatches, with moves at random."""
    plain = build(schedule, num_microbatches=5, num_ranks=num_ranks, num_chunks=num_chunks)
    return with_random_moves(Random(schedule), plain, share=0.9)


CASES = [
    ("mlp", moved("1f1b", 3), "none"),
    ("gpt", moved("interleaved", 2, 2), "layer"),
    ("unet", moved("zb-h1", 2), "full"),
    ("tied-gpt", moved("gpipe", 2), "none"),
    ("batchnorm", moved("zb-h1", 2), "none"),
    ("lstm", moved("1f1b", 2), "none"),
]


@pytest.mark.thorough(but=["mlp-schedule0-none", "unet-schedule2-full"])
@pytest.mark.parametrize(("task", "schedule", "recompute"), CASES)
def test_results_equal_the_reference(task: str, schedule: Schedule, recompute: str, tmp_path: Path) -> None:
    path, chunks = tmp_path / "schedule.json", schedule.num_stages // schedule.num_ranks
    path.write_text(schedule.to_json())
    layout = Layout(schedule=str(path), num_ranks=schedule.num_ranks, num_chunks=chunks, recompute=recompute)
    case = make_case(task, layout, 5)
    agree(run(case, layout), reference(case), case)


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


class Checkpointed(Parts, block=block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.block, x, use_reentrant=False)


def watched(schedule: Schedule, model: nn.Module, *, autocast: bool = False, **options: object) -> tuple[object, ...]:
    """The most activations at once in a step [bytes], bytes of the stages, bytes that left by stage, and the pipeline's
    gradients."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    options["mesh"] = {"pipe": schedule.num_ranks}
    with sw.PipelineModule(
        model, **records(schedule=schedule, loss_fn=nn.functional.mse_loss, example_inputs=(x,), **options)
    ) as pipe:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            pipe.forward_backward(x, x)
            with pipe.watch_memory() as memory:
                result = pipe.forward_backward(x, x)
        found = pipe.stage_bytes(memory)
        timeline = result.timeline()
        assert timeline.schedule == schedule
        assert len(timeline.ranks[0].moves) == sum(a.op in ("OFFLOAD", "RELOAD") for a in schedule.programs[0])
        kind = MemoryPart.ACTIVATIONS
        held = [sum(n for (_, part), n in parts.items() if part is kind) for _, parts, _ in memory.moments]
        return max(held), found, pipe.moved_bytes, [p.grad.clone() for p in model.parameters()]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["none", "layer", "full", "checkpoint"])
def test_bytes_are_those_that_were_predicted_and_they_go(how: str) -> None:
    """GPipe of 8 microbatches: all but what runs and what moves waits elsewhere."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*((Checkpointed if how == "checkpoint" else block)() for _ in range(6)))

    recompute = "none" if how == "checkpoint" else how
    plain = build("gpipe", num_ranks=3, num_microbatches=8)
    schedule = with_offload(plain, share=1.0)
    before, stages, _, gradients = watched(plain, model(), recompute=recompute)
    after, _, left, again = watched(schedule, model(), recompute=recompute)
    assert all(map(torch.equal, gradients, again))
    # A block that runs again by itself keeps its output, too, which a stage's bytes count among its messages.
    kept_output = stages[1].output if how == "layer" else 0
    assert left[1] == pytest.approx(stages[1].activations + kept_output, rel=0.02)
    most = [simulate(each, sw.schedules.Costs()).peak_activations for each in (plain, schedule)]
    gone = sum(stage.activations * (one - other) for stage, one, other in zip(stages, *most, strict=True))
    # All ranks stand in this process. In between outputs wait for the rank that takes them.
    assert before - after >= 0.9 * gone - 20 * stages[0].output


def test_autocast() -> None:
    """Weights that were cast for a microbatch are activations of it."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(block() for _ in range(4)))

    plain = build("gpipe", num_ranks=2, num_microbatches=4)
    *_, gradients = watched(plain, model(), autocast=True)
    *_, again = watched(with_offload(plain, share=1.0), model(), autocast=True)
    assert all(map(torch.equal, gradients, again))


def kept(forward: nn.Module, *leaves: Tensor, staying: list[Tensor] | None = None) -> tuple[Activations, Tensor]:
    stays = [*forward.parameters(), *(staying or [])]
    activations = Activations("microbatch 3 of stage 1 (block)", leaves=leaves, staying=stays, device=leaves[0].device)
    with activations.saving():
        output = forward(*leaves)
    activations.made((output,))
    return activations, output


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


class Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 2
        first, second = hidden.chunk(2, dim=-1)
        return first * second.t().contiguous().t() + second * x[..., :4]


def test_views_of_a_storage_are_counted_and_moved_once() -> None:
    x = leaf(6, 8)
    wanted = torch.autograd.grad(Views()(x).sum(), x)[0]
    activations, output = kept(Views(), x)
    transposed = 6 * 4 * 4
    assert activations.num_bytes == 2 * 6 * 8 * 4 + transposed
    host = Host(torch.device("cpu"))
    host.take(activations)
    assert x.numel() == 0
    assert host.num_bytes == 2 * 6 * 8 * 4 + transposed
    host.give_back(activations)
    assert host.num_bytes == 0
    activations.settle()
    output.sum().backward()
    assert torch.equal(x.grad, wanted)


def test_tensors_are_gone_while_they_are_away() -> None:
    with LiveBytes() as live:
        x = leaf(256, 64)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        activations, output = kept(model, x)
        live.settle()
        before, size = live.level, activations.num_bytes
        host = Host(torch.device("cpu"))
        host.take(activations)
        live.settle()
        assert before - live.level == size + 256 * 64 * 4 - 4  # the output's values, too, but one
        host.give_back(activations)
        output.sum().backward()
    assert x.grad is not None


def test_pages_of_the_host_are_no_bytes_of_torch() -> None:
    """Nobody's when they were taken, so that letting go of them makes no room: a peak was 1.7 MB too low."""
    with LiveBytes() as live:
        own = torch.ones(1000, dtype=torch.uint8)
        apart = _apart(1000).copy_(own)
        again = torch.empty(1000, dtype=torch.uint8).copy_(apart)
        del apart
        live.settle()
    assert (live.level, live.most, again.sum()) == (2000, 2000, 1000)


def test_needed_while_away() -> None:
    activations, output = kept(nn.Linear(4, 4), leaf(3, 4))
    Host(torch.device("cpu")).take(activations)
    for needs in (activations.settle, output.sum().backward):
        with pytest.raises(RuntimeError, match=r"3 of stage 1 \(block\) are away and needed: expected RELOAD"):
            needs()


def test_a_saved_tensor_that_is_changed_in_place() -> None:
    hidden: list[Tensor] = []

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden.append(x * 2)
            return hidden[0] * hidden[0]

    activations, output = kept(Keeps(), leaf(3, 4))
    with torch.no_grad():
        hidden[0].add_(1)
    for needs in (output.sum().backward, lambda: Host(torch.device("cpu")).take(activations)):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*stage 1 \(block\), is at version 1"):
            needs()


def test_parts_of_the_batch_and_what_stays_anyway_are_not_moved() -> None:
    batch = torch.randn(8, 4)
    part = batch[2:4].detach().requires_grad_()
    weight = torch.randn(2, 4)
    activations, output = kept(nn.Linear(4, 4), part, staying=[weight])
    with activations.saving():
        output = output * weight
    assert activations.num_bytes == 0
    Host(torch.device("cpu")).take(activations)
    assert part.numel() == 8
    output.sum().backward()


def test_distributed_tensors() -> None:
    """A tensor that consists of others is put together of those that came back."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        class Distributed(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                whole = DTensor.from_local(x * 1, mesh, [Replicate()])
                return (whole * whole).to_local()

        x = leaf(5)
        activations, output = kept(Distributed(), x)
        assert activations.num_bytes >= 20
        activations.come([torch.zeros_like(part) for part in activations.leave()])
        output.sum().backward()
        assert torch.equal(x.grad, torch.zeros(5))  # of what came back
    finally:
        dist.destroy_process_group()


def test_compiled_stages_are_refused() -> None:
    schedule = with_offload(build("gpipe", num_ranks=2, num_microbatches=8), share=1.0)
    with pytest.raises(ValueError, match=r"compile= with the schedule 'gpipe', whose activations leave their rank"):
        make(schedule=schedule, model=layers(2), num_microbatches=8, compile={"backend": "eager"})
