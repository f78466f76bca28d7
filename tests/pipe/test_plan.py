"""PipelineModule(plan=...): cuts, ranks, replicas and recomputation as planned, and replan="batch", an order of its
own for each batch of unequal microbatches: against one process in float64.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import uneven
from support.alone import near, train_alone, train_piped
from support.failing import refusal
from support.grids import nightly
from support.inside import AutoLayout, BatchOrders, Given, find_traces, peak_held, read_traces
from support.parts import Parts
from support.plain import batch
from support.pool import CaseError, Pool
from support.records import records
from support.unequal import BATCHES, alone, assert_alone, make_batch, make_pipe
from torch import Tensor, nn

from stagewright.partition import Node, Profile
from stagewright.pipe import PipelineModule, StepRecord
from stagewright.schedules import check

WIDTH = 5


def tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Towers(Parts, left=tower, right=tower, head=lambda: nn.Linear(2 * WIDTH, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x), self.right(x)], dim=1))


def made(kind: str = "chain") -> nn.Module:
    torch.manual_seed(1)
    chain = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
    return (Towers() if kind == "towers" else chain).double()


X, Y = batch(0, WIDTH, samples=11)
stage = partial(uneven.stage, tensor=1)
plan_of = partial(uneven.plan_of, num_microbatches=5)
V_PLACES = [((2, 3), "none"), ((0, 1), "full"), ((0, 1), "none"), ((2, 3), "layer")]
PLANS = {
    "3-1": ("chain", plan_of(stage("0 1 2", 0, 1, 2), stage("3", 3))),
    "1-3": ("chain", plan_of(stage("0", 0), stage("1 2 3", 1, 2, 3), num_microbatches=2)),
    "2-1-1": ("chain", plan_of(stage("0 1", 0, 1), stage("2", 2), stage("3", 3))),
    "optimizer sharded": ("chain", plan_of(stage("0 1 2", 0, 1, 2, optimizer_shards=2), stage("3", 3))),
    "backwards": ("chain", plan_of(stage("0", 3), stage("1 2", 1, 2), stage("3", 0))),
    "idle rank": ("chain", plan_of(stage("0 1", 0), stage("2 3", 2), num_devices=4)),
    "chunks": (
        "chain",
        plan_of(*[stage(f"{i}", i % 2) for i in range(4)], num_chunks=2, schedule="interleaved", num_microbatches=4),
    ),
    "an order of its own, unequal chunks": (
        "chain",
        plan_of(
            *[stage(f"{i}", rank) for i, rank in enumerate((2, 0, 2, 1))],
            num_chunks=2,
            schedule="auto",
            num_microbatches=2,
            order=("0F0 0F1 2F0 2F1 2B0 0I0 2B1 0B1 0W0", "1F0 1F1 1B0 1B1", "3F0 3B0 3F1 3B1"),
        ),
    ),
    "a V over replicas": (
        "chain",
        plan_of(
            *[stage(f"{i}", *ranks, recompute=how) for i, (ranks, how) in enumerate(V_PLACES)],
            num_chunks=2,
            schedule="zb-v",
            num_microbatches=8,
        ),
    ),
    "recompute": ("chain", plan_of(stage("0 1", 0, recompute="full"), stage("2 3", 1))),
    "recompute by unit": (
        "chain",
        plan_of(stage("0 1", 0, 1, recompute="selective"), stage("2 3", 2, recompute="layer")),
    ),
    "recompute of a record": (
        "towers",
        plan_of(stage("left.0 right.0", 0, recompute="selective"), stage("left.2 right.2 head", 1, recompute="layer")),
    ),
    "recompute by count": (
        "towers",
        plan_of(
            stage("left.0 left.2 right.0", 0, recompute="layer:2"), stage("right.2 head", 1, recompute="selective:1")
        ),
    ),
    "graph": ("towers", plan_of(stage("left.0 right.0", 0, 1), stage("left.2 right.2 head", 2))),
}


def run(name: str) -> list[Any]:
    kind, plan = PLANS[name]
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "optimizer": partial(torch.optim.SGD, lr=0.05), "timeout": 120.0}
    found = train_piped(PipelineModule(made(kind), schedule=plan, **options), [(X, Y)] * 2)
    return [found.losses, found.state]


def run_alone(name: str) -> list[Any]:
    losses, _, state = train_alone(made(PLANS[name][0]), [(X, Y)] * 2, partial(torch.optim.SGD, lr=0.05))
    return [losses, state]


@pytest.mark.thorough(but=["3-1"])
@pytest.mark.parametrize("name", PLANS)
def test_in_one_process(name: str) -> None:
    near(run(name), run_alone(name))


# In one process all of them run every day.
FEWER = ("2-1-1", "optimizer sharded", "backwards", "idle rank", "chunks", "recompute of a record")


@pytest.mark.thorough(but=["optimizer sharded"])
@pytest.mark.parametrize("name", [name if name in FEWER else nightly(name) for name in PLANS])
def test_over_processes(gloo: Pool, name: str) -> None:
    wanted = run_alone(name)
    for found in gloo.run(run, ranks=PLANS[name][1].num_devices, args=(name,)):
        near(found, wanted)


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "nodes", "again"),
    [
        (lambda: nn.Sequential(*[Counted(WIDTH, WIDTH) for _ in range(4)]), ("0 1 2", "3"), [1, 1, 0, 0]),
        (Towers, ("left.0 left.2 right.0", "right.2 head"), [1, 1, 0, 0, 0]),
    ],
)
def test_as_many_units_run_again_as_planned(make: Any, nodes: tuple[str, str], again: list[int]) -> None:
    """A unit of a graph has several modules: a linear, and those around it without parameters."""
    model = make()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Counted
    plan = plan_of(stage(nodes[0], 0, recompute="layer:2"), stage(nodes[1], 1))
    pipe = PipelineModule(model.double(), schedule=plan, loss_fn=F.mse_loss, example_inputs=(X,))
    counted = [module for module in model.modules() if isinstance(module, Counted)]
    before = [module.calls for module in counted]
    pipe.forward_backward(X, Y)
    assert [module.calls - old for module, old in zip(counted, before, strict=True)] == [5 + 5 * each for each in again]
    pipe.close()


def test_the_stages_are_the_planned_ones(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLANS["3-1"][1].to_json())
    pipe = PipelineModule(made(), schedule=path, loss_fn=F.mse_loss, example_inputs=(X,))
    assert pipe.stage_names == ("0 .. 2", "3")
    assert pipe.schedule.owners == ((0, 1, 2), (3,))
    assert pipe.plan == PLANS["3-1"][1]


GOOD = plan_of(stage("0 1", 0), stage("2 3", 1))
BAD = {
    "unknown node": (
        {"plan": plan_of(stage("0 1", 0), stage("2 3 4", 1))},
        r"for another model \(5 nodes, the model has 4\): its node '4' is not in the model",
    ),
    "missing node": (
        {"plan": plan_of(stage("0 1", 0), stage("2", 1))},
        r"the model's '3' is in no stage of it\. Expected a plan that was made from a profile of this model",
    ),
    "other sizes": (
        {"plan": replace(GOOD, stages=(stage("0 1", 0, parameter_bytes=100.0), GOOD.stages[1]))},
        r"stage 0 \(0 \.\. 1\) has 100 bytes of parameters in the plan and 480 in the model",
    ),
    "out of order": (
        {"plan": plan_of(stage("0 2", 0), stage("1 3", 1))},
        r"puts '1' on stage 1 and '2', which follows it, on stage 0: expected stages of an nn.Sequential in order",
    ),
    "tensor sizes": (
        {"plan": plan_of(stage("0 1", 0, 2, tensor=2), stage("2 3", 1))},
        r"splits tensors over the ranks \(0, 2\): expected groups of 2 in a row, such as \(0, 1\)",
    ),
    "tensor group": (
        {"plan": plan_of(stage("0 1", 0, 3, tensor=2), stage("2 3", 1, 2, tensor=2))},
        r"splits tensors over the ranks \(0, 3\): expected groups of 2 in a row .*, such as \(0, 1\)",
    ),
    "tensor alone": (
        {"plan": plan_of(stage("0 1", 0, 1, tensor=2), stage("2 3", 2, 3, tensor=2))},
        r"splits tensors over 2 ranks, which are processes: expected 4 of them \(torchrun --nproc-per-node 4\)",
    ),
    "unequal replicas": (
        {"plan": plan_of(stage("0 1", 0, 1), stage("2 3", 2), schedule="gpipe")},
        r"stages on 2-1 ranks under schedule 'gpipe': expected as many ranks for each stage",
    ),
    "microbatches": ({"plan": GOOD, "num_microbatches": 3}, r"num_microbatches=3 for a plan of 5: expected 5"),
    "open": ({"plan": replace(GOOD, num_microbatches=None)}, r"expected num_microbatches= as well"),
    "mesh beside it": (
        {"plan": GOOD, "mesh": {"pipe": 2}},
        r"mesh=\{'pipe': 2\} together with a plan of 1-1 on 2 devices: expected only one of them",
    ),
    "recompute beside it": ({"plan": GOOD, "recompute": "full"}, r"recompute= together with a plan"),
    "no file": ({"plan": "nowhere.json"}, r"nowhere\.json"),
    "the order of a graph": (
        {"model": made("towers"), "plan": plan_of(stage("left.0 right.2", 0), stage("left.2 right.0 head", 1))},
        r"needs 'right.0' of the later stage 1",
    ),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_plans(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineModule(**records(**{"model": made(), "loss_fn": F.mse_loss, "example_inputs": (X,), **options}))


def _for_another_number_of_ranks() -> str:
    return refusal(lambda: PipelineModule(made(), schedule=GOOD, loss_fn=F.mse_loss))


def test_a_plan_for_another_number_of_ranks(gloo: Pool) -> None:
    for answer in gloo.run(_for_another_number_of_ranks, ranks=3):
        assert answer.startswith("the plan is for 2 ranks and the process group has 3: expected a plan for 3")


Programs = tuple[tuple[str, ...], ...]


@contextmanager
def measured() -> Iterator[None]:
    """Profiles by formula, so that each run has the same plan: 1 ms and 1 kB a token, and attention."""

    def profile(auto: AutoLayout, first: Given, seconds: float) -> Profile:
        del seconds
        tokens, length = first.arguments.tensors[0].numel(), first.arguments.tensors[0].shape[1]
        seconds = 1e-3 * tokens * (1 + 0.02 * length)
        nodes = [
            Node(
                name=str(number),
                forward_seconds=seconds,
                backward_seconds=2 * seconds,
                input_grad_seconds=seconds,
                weight_grad_seconds=seconds,
                stash_bytes=1e3 * tokens,
                activation_bytes=64.0 * tokens,
                parameter_bytes=8.0 * sum(p.numel() for p in unit.parameters()),
            )
            for number, unit in enumerate(auto._model.children())
        ]
        return Profile(nodes=tuple(nodes), microbatch_size=first.arguments.num_samples)

    with mock.patch.object(AutoLayout, "_profile", profile):
        yield


def make(**options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"schedule": "auto", "replan": "batch", "mesh": {"pipe": 2}, "num_microbatches": None}
    return make_pipe(**(settings | options))


def programs(pipe_or_timeline: Any) -> Programs:
    return tuple(tuple(map(str, program)) for program in pipe_or_timeline.schedule.programs)


def run_replanned(options: dict[str, Any]) -> tuple[list[float | None], dict[str, Tensor], list[Programs]]:
    with measured():
        pipe = make(**options)
        results = [pipe.train_step(microbatches=batch) for batch in BATCHES]
        orders = [programs(result.timeline()) for result in results]  # the oldest is asked for last of all
        state = pipe.full_state_dict()
        pipe.close()
    return [result.loss for result in results], state, orders


def test_each_batch_runs_in_an_order_of_its_own_with_the_numbers_of_one_process(tmp_path: Path) -> None:
    records: list[StepRecord] = []
    with measured():
        pipe = make(on_step=records.append)
        results, seen = [], []
        with mock.patch.object(BatchOrders, "find", autospec=True, side_effect=BatchOrders.find) as find:
            pipe.build(microbatches=BATCHES[0])
            tracer = pipe.tracer(tmp_path, every=1)
            for batch in [*BATCHES, BATCHES[0]]:
                results.append(pipe.train_step(microbatches=batch))
                seen.append(tracer.step())
            tracer.close()
            problems = [call.args[1] for call in find.call_args_list]
    losses, state = alone(4)
    assert [result.loss for result in results] == pytest.approx(losses, rel=1e-13)
    for name, value in state.items():
        torch.testing.assert_close(pipe.full_state_dict()[name], value, rtol=0, atol=1e-12)
    timelines = [result.timeline() for result in results]
    orders = [programs(timeline) for timeline in timelines]
    assert orders[0] == orders[3]
    assert len(set(orders)) == 3
    assert programs(pipe) not in orders
    assert len(problems) == 3  # what came before is known
    for problem, timeline in zip(problems, timelines, strict=False):
        check(timeline.schedule)
        assert problem.memory_limit is not None
        for limit, program in zip(problem.memory_limit, timeline.schedule.programs, strict=True):
            held = peak_held(program, problem.held)
            assert held <= limit * (1 + 1e-9)
        ran = [[str(span.what) for span in rank.compute if span.what.op.value != "U"] for rank in timeline.ranks]
        assert ran == [list(map(str, program)) for program in timeline.schedule.programs]
    assert [record.replan_seconds > 0 for record in records] == [True] * 4
    (step,) = read_traces(find_traces([tmp_path])).steps
    assert step.number == 3
    assert programs(step.timeline) == orders[3]
    pipe.close()


@pytest.mark.thorough
def test_ranks_run_the_same_orders(gloo: Pool) -> None:
    one, other = gloo.run(run_replanned, ranks=2, args=({"mesh": {"pipe": 2}},))
    assert one[2] == other[2]
    assert len(set(one[2])) == 3
    for losses, state, _ in (one, other):
        assert_alone((losses, state), atol=1e-12)


def _other_lengths() -> None:
    rank = dist.get_rank()
    with measured():
        pipe = make()
        pipe.train_step(microbatches=BATCHES[0])
        pipe.train_step(microbatches=make_batch(0, (3, 9, 4, 7 + rank)))


@pytest.mark.thorough
def test_ranks_that_pass_other_lengths_are_told(gloo: Pool) -> None:
    with pytest.raises(CaseError, match=r"rank 1 passed microbatches of 1 x 3, 2 x 9, 1 x 4, 2 x 8 elements to step 1"):
        gloo.run(_other_lengths, ranks=2)


@pytest.mark.thorough
def test_a_microbatch_that_no_device_has_room_for_and_the_batch_behind_it() -> None:
    with measured(), mock.patch("stagewright.pipe.auto.layout.device_memory", return_value=80e3):
        pipe = make()
        pipe.train_step(microbatches=BATCHES[0])
        long = make_batch(0, (3, 9, 4, 40))
        message = r"no schedule for the batch of step 1: memory_limit=.*one microbatch alone"
        with pytest.raises(ValueError, match=message):
            pipe.train_step(microbatches=long)
        pipe.train_step(microbatches=BATCHES[1])
        assert pipe.num_steps == 2
        pipe.close()


def test_batches_that_do_not_go_together() -> None:
    with measured():
        pipe = make()
        with pytest.raises(ValueError, match=r"with a first batch that is not cut: expected train_step\(microbatches"):
            pipe.train_step(torch.zeros(4, 4, dtype=torch.long), torch.zeros(4, 4, dtype=torch.long))
        pipe.train_step(microbatches=BATCHES[0])
        pipe.train_step(torch.zeros(6, 4, dtype=torch.long), torch.zeros(6, 4, dtype=torch.long))  # cut as ever
        pipe.close()
