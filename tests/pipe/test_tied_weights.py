"""Weights that stand on several stages, any of them, against one process, float64.

layer   0    1    2    3    4    5
        a    b    c    b    a    a      a: shared by three; b: shared by two in the middle; c: by none
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.alone import near, train_alone, train_piped
from support.inside import GPT, GPTConfig, profile_model
from support.models import token_loss
from support.plain import batch
from support.pool import Pool
from support.records import records
from torch import Tensor, nn

from stagewright.comm import Collectives
from stagewright.partition import Cluster, Plan, plan
from stagewright.pipe import PipelineModule

WIDTH, MICROBATCHES, STEPS = 5, 4, 4
TIED = {3: 1, 4: 0, 5: 0}  # layer -> the one whose weight it has


def make_model(*, frozen: str = "") -> nn.Sequential:
    torch.manual_seed(2)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    for layer, first in TIED.items():
        layers[layer].weight = layers[first].weight
    model = nn.Sequential(*[nn.Sequential(layer, nn.Tanh()) for layer in layers]).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
    return model


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"mesh": {"pipe": 3}},
    "six stages": {"mesh": {"pipe": 6}},
    "interleaved": {"schedule": "interleaved", "num_chunks": 3, "mesh": {"pipe": 2}},
    "replicas": {"schedule": "interleaved", "num_chunks": 2, "mesh": {"pipe": 3, "data": 2}, "num_microbatches": 2},
    "2bw": {"schedule": "2bw", "mesh": {"pipe": 3}},
}


@pytest.mark.thorough(but=["1f1b-"])
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        *((name, "") for name in LAYOUTS),
        ("replicas", "0.0.weight"),
        ("2bw", "0.0.weight"),
        ("interleaved", "1.0.weight"),
    ],
)
def test_as_in_one_process(name: str, frozen: str) -> None:
    """Weight decay would move a frozen weight, and a sum over stages would count a gradient twice."""
    settings: dict[str, Any] = {"num_microbatches": MICROBATCHES, "max_grad_norm": 0.05, "loss_fn": F.mse_loss}
    settings |= {"optimizer": optimizer_of, "example_inputs": batch(0, WIDTH)[:1]} | LAYOUTS[name]
    batches, delay = [batch(step, WIDTH) for step in range(STEPS)], int(name == "2bw")
    found = train_piped(PipelineModule(make_model(frozen=frozen), **records(**settings)), batches)
    wanted = train_alone(make_model(frozen=frozen), batches, optimizer_of, delay=delay, clip=0.05)
    near([found.state, found.norms[-1]], [wanted.state, wanted.norms[-1]])


BANDWIDTH, BATCH = 1e3, 4


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=600, length=8, layers=4, width=128, heads=2, tied=True))


def planned(ranks: int, **options: Any) -> Plan:
    """By a profile that was measured, but for seconds, which no plan here may depend on."""
    measured = profile_model(model(), (torch.randint(600, (1, 8)),), repetitions=1, seconds=0.1)
    nodes = tuple(replace(node, forward_seconds=1.0, backward_seconds=2.0) for node in measured.nodes)
    options |= {"global_batch": BATCH, "microbatch_sizes": (1,), "optimizer_sharding": ("none",)}
    return plan(replace(measured, nodes=nodes), Cluster.from_levels([(ranks, BANDWIDTH)]), **options)


def run(found: Plan) -> tuple[list[int], dict[int, float]]:
    """One step on this rank: bytes of gradients in each sum over ranks, weights that its stages hold [bytes]."""
    pipe = PipelineModule(
        model(), schedule=found, loss_fn=token_loss, optimizer=torch.optim.SGD, example_inputs=(inputs(),)
    )
    sums, plain = [], Collectives.begin_all_reduce

    def counted(self: Collectives, tensor: Tensor, **more: Any) -> Callable[[], None]:
        if tensor.dtype == torch.float32:  # others are flags
            sums.append(tensor.nbytes)
        return plain(self, tensor, **more)

    with mock.patch.object(Collectives, "begin_all_reduce", counted):
        pipe.train_step(inputs(), inputs())
    with pipe.watch_memory() as memory:
        pipe.train_step(inputs(), inputs())
    held = {stage: each.weights for stage, each in enumerate(pipe.stage_bytes(memory))}
    pipe.close()
    return sums, held


def inputs() -> Tensor:
    return torch.arange(BATCH * 8).view(BATCH, 8) % 600


@pytest.mark.thorough
def test_the_tied_weight_is_held_and_summed_as_planned(gloo: Pool) -> None:
    """By two stages, and where both ends are on one rank, which has it once, by none."""
    shared = 600 * 128 * 4
    found = planned(2, pipeline_sizes=(2,), data_sizes=(1,), schedules="1f1b")
    ((stages, seconds),) = found.costs.tied
    assert (stages, seconds * BANDWIDTH) == ((0, 1), pytest.approx(shared))
    for sums, held in gloo.run(run, ranks=2, args=(found,)):
        assert sums == [shared]
        for number, stage in enumerate(found.stages):
            assert stage.held is not None
            assert held[number] == stage.held.weights == stage.parameter_bytes
    found = planned(2, pipeline_sizes=(2,), data_sizes=(1,), schedules="zb-v", chunk_sizes=(2,))
    assert (found.schedule, found.costs.tied) == ("zb-v", ())
    whole = sum(p.numel() * 4 for p in model().parameters())
    assert sum(stage.held.weights for stage in found.stages if stage.held is not None) == whole
    assert [sums for sums, _ in gloo.run(run, ranks=2, args=(found,))] == [[], []]


def of_layers(change: Callable[[nn.Sequential], object]) -> PipelineModule:
    model = make_model()
    for layer in model[3:]:
        layer[0] = nn.Linear(WIDTH, WIDTH).double()  # none is tied
    change(model)
    return PipelineModule(
        model, loss_fn=F.mse_loss, optimizer=optimizer_of, mesh={"pipe": 2}, example_inputs=(batch(0, WIDTH)[0],)
    )


def weight(model: nn.Sequential, layer: int) -> Any:
    return model[layer][0].weight


SHARING: dict[str, Callable[[nn.Sequential], object]] = {
    "whole": lambda model: setattr(model[5][0], "weight", nn.Parameter(weight(model, 0).data)),
    "transposed": lambda model: setattr(model[5][0], "weight", nn.Parameter(weight(model, 0).data.T)),
    "a part": lambda model: setattr(model[5][0], "bias", nn.Parameter(weight(model, 0).data[1])),
    "one frozen": lambda model: setattr(
        model[5][0], "weight", nn.Parameter(weight(model, 0).data, requires_grad=False)
    ),
    "a buffer": lambda model: model[5].register_buffer("mask", weight(model, 0).data),
}


def flat(model: nn.Sequential) -> None:
    parameters, begin = [*model.parameters()], 0
    memory = torch.cat([p.data.flatten() for p in parameters])
    for p in parameters:
        p.data = memory[begin : begin + p.numel()].view_as(p)
        begin += p.numel()


def frozen_tables(model: nn.Sequential) -> None:
    table = torch.randn(4, WIDTH)
    for layer in model:
        layer.register_buffer("table", table[1:])


def columns(model: nn.Sequential) -> None:
    """Of one matrix: their ranges in its memory overlap, their elements do not."""
    wide = torch.randn(WIDTH, 2 * WIDTH, dtype=torch.float64)
    for half, layer in enumerate((0, 5)):
        model[layer][0].weight = nn.Parameter(wide[:, half * WIDTH : (half + 1) * WIDTH])


def two_types(model: nn.Sequential) -> None:
    """One after the other in one memory, of elements of different sizes: element numbers overlap, bytes do not."""
    weight = model[5][0].weight
    memory = torch.zeros(2 * weight.nbytes, dtype=torch.uint8)
    model[0].register_buffer("low", memory[: weight.nbytes].view(torch.float32))
    model[5][0].weight = nn.Parameter(memory[weight.nbytes :].view(torch.float64).view_as(weight))


def _shared_over_processes() -> None:
    for change in SHARING.values():
        message = r"'0\.0\.weight' and '5\..*', on different stages, are two tensors over the"
        with pytest.raises(ValueError, match=message):
            of_layers(change)
    for change in (flat, frozen_tables, columns, two_types):
        of_layers(change).train_step(*batch(0, WIDTH))


def test_two_tensors_over_one_memory_on_two_stages_are_refused_over_processes(gloo: Pool) -> None:
    """Each had a memory of its own: weights drifted apart in silence, `verify=True` included."""
    gloo.run(_shared_over_processes, ranks=2)


@pytest.mark.parametrize("sharing", [*SHARING.values(), flat, frozen_tables])
def test_in_one_process_they_share_it_as_ever(sharing: Any) -> None:
    of_layers(sharing).train_step(*batch(0, WIDTH))
