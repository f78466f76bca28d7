"""Numbers and texts that a change of shape may not touch, as they were before it.

pytest tests/test_pins.py --update-golden      writes data/pins anew; a difference is a change of behaviour: say which
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sizes import fitting
from torch import nn

from stagewright import PipelineModule
from stagewright.partition import Cluster, Node, Plan, Profile, evaluate, partition, plan
from stagewright.schedules import FAMILIES, Costs, Schedule, build, check, lower_bound, simulate

PINS = Path(__file__).parent / "data" / "pins"
# Families of pictures alone, or that the issue which these pins serve takes away.
SIMULATED = sorted(FAMILIES)


def costs(draw: random.Random, num_stages: int) -> Costs:
    """Random ones, by stage; some with sums, updates, a norm, overheads and microbatches of unequal size."""

    def row(scale: float = 1.0) -> tuple[float, ...]:
        return tuple(draw.randint(1, 12) * scale / 4 for _ in range(num_stages))

    more: dict[str, Any] = {}
    if draw.random() < 0.5:
        more |= {"input_grad": row(), "weight_grad": row()}
    if draw.random() < 0.5:
        more |= {"latency": row(0.3), "message_overhead": row(0.1), "overhead": row(0.05)}
    if draw.random() < 0.5:
        more |= {"reduce_grad": row(2.0), "update": row(), "norm": draw.choice((None, 0.7))}
    return Costs(forward=row(), backward=row(2.0), **more)


def simulated() -> Iterator[tuple[str, Schedule, Costs]]:
    """Two hundred schedules of all families with costs, from fixed seeds."""
    for number in range(200):
        draw = random.Random(number)
        name = SIMULATED[number % len(SIMULATED)]
        P, M = fitting(name, draw.randint(2, 5), draw.randint(2, 9))
        chunks = draw.randint(2, 3) if FAMILIES[name].takes_chunks else None
        try:
            schedule = build(name, num_ranks=P, num_microbatches=M, num_chunks=chunks)
        except ValueError:
            schedule = build(name, num_ranks=P, num_microbatches=M)
        yield f"{number} {name} P={P} M={M}", schedule, costs(draw, schedule.num_stages)


def profile(draw: random.Random, size: int) -> Profile:
    nodes = [
        Node(
            name=f"layer{i}",
            forward_seconds=draw.randint(5, 30) * 1e-4,
            backward_seconds=draw.randint(10, 60) * 1e-4,
            input_grad_seconds=draw.randint(5, 30) * 1e-4,
            weight_grad_seconds=draw.randint(5, 30) * 1e-4,
            activation_bytes=draw.randint(1, 9) * 1e6,
            parameter_bytes=draw.randint(1, 40) * 1e7,
            stash_bytes=draw.randint(2, 30) * 1e7,
            workspace_bytes=draw.randint(1, 9) * 1e6,
            update_seconds=draw.randint(1, 9) * 1e-4,
        )
        for i in range(size)
    ]
    names = [node.name for node in nodes]
    skips = [(names[i], names[i + 3]) for i in range(0, size - 3, 4)]
    edges = (*pairwise(names), *skips)
    return Profile(nodes=tuple(nodes), edges=edges, microbatch_size=1)


CLUSTERS = {
    "two": Cluster.from_levels([(2, 1e9)]),
    "four": Cluster.from_levels([(4, 5e9)]),
    "two nodes": Cluster.from_levels([(2, 2e10), (2, 1e9)]),
    "eight": Cluster.from_levels([(4, 3e10), (2, 2e9)]),
}


def plans() -> Iterator[tuple[str, Plan]]:
    """Ten of plan() and partition(), with unequal replicas, chunks, recompute, sharding, 2BW, limits of memory."""
    for number, (name, options) in enumerate(
        [
            ("two", {"schedules": ["1f1b"]}),
            ("four", {}),
            ("four", {"schedules": ["interleaved"]}),
            ("two nodes", {"memory_limit": 4e9}),
            ("eight", {"schedules": ["1f1b", "zb-v"], "max_grad_norm": 1.0}),
            ("eight", {"schedules": ["2bw"]}),
            ("eight", {"memory_limit": 2.5e9, "recompute": ["full"]}),
        ]
    ):
        found = plan(
            profile(random.Random(number), 10), CLUSTERS[name], global_batch=16, microbatch_sizes=[1], **options
        )
        yield f"plan {number} {name}", found
    made = profile(random.Random(7), 9)
    yield "partition two nodes", partition(made, CLUSTERS["two nodes"], num_microbatches=8, schedule="1f1b")
    yield "partition eight", partition(made, CLUSTERS["eight"], num_microbatches=12, schedule="1f1b")
    yield "partition pipedream", partition(made, CLUSTERS["eight"], cost_model="pipedream")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def trained(name: str) -> list[float]:
    """Losses of three steps and a sum over the weights after them."""
    P, M = fitting(name, 2, 4)
    torch.manual_seed(3)
    model = nn.Sequential(*(Block() for _ in range(12))).double()
    pipe = PipelineModule(
        model,
        mesh={"pipe": P},
        schedule=name,
        num_microbatches=M,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        max_grad_norm=1.0 if name not in ("pipedream", "paci") else None,
        example_inputs=(torch.zeros(M, 4, 6, dtype=torch.float64),),
    )
    losses = {}
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        x, y = (torch.randn(M, 4, 6, generator=draw, dtype=torch.float64) for _ in range(2))
        result = pipe.train_step(x, y)
        losses[result.loss_step] = result.loss
    losses |= {result.loss_step: result.loss for result in pipe.flush()}
    weights = [parameter.detach() for parameter in model.parameters()]
    total = sum(float((p * torch.arange(1, p.numel() + 1).view_as(p).sin()).sum()) for p in weights)
    pipe.close()
    return [*(loss for _, loss in sorted((k, v) for k, v in losses.items() if v is not None)), total]


def held(name: str, found: dict[str, Any], update: bool) -> dict[str, Any]:
    """What stands in the file; with `update` it is written."""
    path = PINS / f"{name}.json"
    if update:
        PINS.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    expected: dict[str, Any] = json.loads(path.read_text())
    return expected


def test_makespans_to_the_last_bit(update_golden: bool) -> None:
    found = {}
    for name, schedule, its in simulated():
        check(schedule)
        timeline = simulate(schedule, its)
        figures = (timeline.makespan, timeline.makespan_bubble, timeline.span_bubble, timeline.bubble)
        found[name] = " ".join(float(figure).hex() for figure in figures)
        if schedule.weight_rule == "flush":
            found[name] += f" {float(lower_bound(schedule, its)).hex()}"
        found[name] += f" {list(timeline.peak_activations)}"
    assert found == held("makespans", found, update_golden)


def counted_anew(name: str, old: Plan) -> Plan:
    """A plan whose backwards are split, with I and W as they are counted since: as profiled, not as halves of B."""
    _, number, cluster = name.split(" ", 2)
    its = replace(profile(random.Random(int(number)), 10), max_grad_norm=1.0)
    assert old.schedule is not None
    assert old.num_microbatches is not None
    sizes = {"schedule": old.schedule, "num_microbatches": old.num_microbatches}
    return evaluate(its, CLUSTERS[cluster], old.stages, **sizes)  # type: ignore[arg-type]


def test_plans_what_they_explain_and_their_files(update_golden: bool) -> None:
    """The files are of version 1, which is read for good, of an older planner: only what is explained, of them and of
    the plans of today, is ever written anew."""
    made, expected = dict(plans()), held("plans", {}, False)
    read = {name: Plan.from_json(json.dumps(expected[name]["json"])) for name in made}
    found = {
        name: {
            "json": expected[name]["json"],
            "read": read[name].explain().splitlines(),
            "explain": one.explain().splitlines(),
        }
        for name, one in made.items()
    }
    assert found == held("plans", found, update_golden)
    for name, one in made.items():
        old = counted_anew(name, read[name]) if read[name].schedule == "zb-v" else read[name]
        assert (one.simulated_step_time or 0.0) <= (old.simulated_step_time or 0.0) * (1 + 1e-9)
        for each in (one, read[name]):
            assert Plan.from_json(each.to_json()) == each


def test_training(update_golden: bool) -> None:
    """To rounding: processors multiply small matrices in other orders."""
    found = {name: trained(name) for name in SIMULATED if not FAMILIES[name].takes_slices}
    expected = held("training", found, update_golden)
    assert found.keys() == expected.keys()
    for name, figures in found.items():
        assert figures == pytest.approx(expected[name], rel=1e-11), name
