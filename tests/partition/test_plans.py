"""Plans: JSON, the table, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from stagewright.partition import MemoryUse, Plan, PlanStage, RunnerUp
from stagewright.schedules import Costs


def stage(nodes: str, *ranks: int) -> PlanStage:
    return PlanStage(
        nodes=tuple(nodes),
        ranks=ranks,
        step_seconds=0.002,
        memory=MemoryUse(parameters=0.5e9, gradients=0.5e9, optimizer=1e9),
        in_flight=2,
    )


PLAN = Plan(
    stages=(stage("ab", 0, 1, 2), stage("c", 3)),
    num_devices=5,
    costs=Costs(forward=0.001, backward=0.002),
    cost_model="default",
    schedule="1f1b",
    num_microbatches=8,
    bottleneck=0.002,
    bound=0.001,
    simulated_step_time=0.03,
    simulated_bubble=0.25,
    runners_up=(RunnerUp(replicas=(4, 1), num_nodes=(1, 2), bottleneck=0.003, simulated_step_time=0.045),),
    notes=("a note",),
)


def test_json_there_and_back() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN
    bare = replace(PLAN, schedule=None, num_microbatches=None, simulated_step_time=None, simulated_bubble=None)
    assert Plan.from_json(bare.to_json()) == bare
    assert bare.bubble == pytest.approx(1 - 0.006 / 0.008)


def test_explain() -> None:
    assert PLAN.explain().splitlines() == [
        "3-1 on 5 devices: its slowest stage takes 2.00 ms a microbatch; the least",
        "  bottleneck of any plan is at least 1.00 ms",
        "simulated, 1f1b, 8 microbatches: 30.0 ms a batch, bubble 25.0%",
        "stage  ranks       F ms     B ms  step ms  in flight    memory  units",
        "    0  0-2        1.000    2.000    2.000          2   2.00 GB  a .. b",
        "    1  3          1.000    2.000    2.000          2   2.00 GB  c",
        "memory by rank, in MB",
        "ranks    weights    grads   optim.  buffers   activ.  worksp.    comm.    total",
        "0-3      500.000  500.000     1000    0.000    0.000    0.000    0.000     2000",
        "runner-up 4-1: 3.00 ms a microbatch; simulated 45.0 ms a batch, +50.00%",
        "note: a note",
    ]


def test_figures() -> None:
    assert (PLAN.replicas, PLAN.gap) == ((3, 1), 1.0)
    assert PLAN.memory_bytes == {0: 2e9, 1: 2e9, 2: 2e9, 3: 2e9}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": []}, r"q\.json: plan without stages"),
        ({"stages": [{"nodes": ["a"]}]}, r"q\.json: stages\[0\]: ranks: missing"),
        ({"num_devices": 3}, r"q\.json: rank 3 on 3 devices: expected 0 to 2"),
        ({"cost_model": "mine"}, r"q\.json: cost_model: 'mine': expected one of default, pipedream"),
        ({"bottleneck": None}, r"q\.json: bottleneck: None: expected a finite number"),
        ({"schedule": 3}, r"q\.json: schedule: 3: expected text or null"),
        ({"notes": "x"}, r"q\.json: notes: 'x': expected a list"),
        ({"speed": 1}, r"q\.json: unknown field speed"),
        ({"version": 9}, r"q\.json: version: 9: expected 3"),
    ],
)
def test_bad_json(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps({**json.loads(PLAN.to_json()), **fields}), source="q.json")


def test_bad_plans() -> None:
    with pytest.raises(ValueError, match="node 'a' is listed twice in the plan"):
        replace(PLAN, stages=(stage("ab", 0), stage("ca", 1)))
    with pytest.raises(ValueError, match="rank 0 is listed twice in the plan"):
        replace(PLAN, stages=(stage("ab", 0), stage("c", 0)))
    with pytest.raises(ValueError, match="expected at least one of each"):
        stage("", 0)


def test_ranks_of_the_schedule_are_tensor_groups() -> None:
    """2 replicas of 2, and 1 of 2; ranks 6 and 7 are idle."""
    stages = (replace(stage("ab", 2, 3, 4, 5), tensor=2), replace(stage("c", 0, 1), tensor=2))
    schedule = replace(PLAN, stages=stages, num_devices=8, schedule="1f1b", num_microbatches=4).build_schedule()
    assert schedule.owners == ((1, 2), (0,))
    assert schedule.num_ranks == 4
    assert schedule.programs[3] == ()


def test_stages_with_tensor_sizes_of_their_own() -> None:
    """On ranks 3 to 5, on 0 to 1, on 7; ranks 2 and 6 are idle, each a group alone."""
    stages = (replace(stage("a", 3, 4, 5), tensor=3), replace(stage("b", 0, 1), tensor=2), stage("c", 7))
    uneven = replace(PLAN, stages=stages, num_devices=8, schedule="1f1b", num_microbatches=4)
    assert uneven.tensor_groups == ((0, 1), (2,), (3, 4, 5), (6,), (7,))
    schedule = uneven.build_schedule()
    assert (schedule.owners, schedule.num_ranks) == (((2,), (0,), (4,)), 5)
    assert uneven.by_group(dict(enumerate("abcdefgh"))) == ("a", "c", "d", "g", "h")  # type: ignore[arg-type]
    assert Plan.from_json(uneven.to_json()) == uneven
    lines = uneven.explain().splitlines()
    assert "tensors over 3-2-1" in " ".join(lines)
    assert "a, tensor 3" in lines[2] + lines[3] + lines[4]
    with pytest.raises(
        ValueError, match=r"over the ranks \(3, 5, 4\): expected groups of 3 in a row, such as \(3, 4, 5"
    ):
        _ = replace(uneven, stages=(replace(stages[0], ranks=(3, 5, 4)), *stages[1:])).tensor_groups
    with pytest.raises(ValueError, match=r"of another chunk, on .* with tensor=2: expected the same ranks in the same"):
        replace(PLAN, stages=(stages[1], stage("c", 0, 1)), num_chunks=2)
    record = json.loads(uneven.to_json())
    record["stages"][0]["tensor"] = 1.5
    with pytest.raises(ValueError, match=r"q\.json: stages\[0\]: tensor: 1\.5"):
        Plan.from_json(json.dumps(record), source="q.json")


def test_explain_shows_what_is_split_and_the_choice_first() -> None:
    split = replace(stage("ab", 0, 1, 2, 3), tensor=2, optimizer_shards=2, memory=MemoryUse(parameters=5e6))
    lines = replace(PLAN, stages=(split,), notes=("chosen: pipe 1 x data 2", "a note")).explain().splitlines()
    assert lines[0] == "pipe 1 x data 2"
    assert lines[4].endswith("    memory")
    assert lines[5].endswith("   5.00 MB")
    assert lines[6] == "       a .. b, tensor 2, shards 2"
    assert [line for line in lines if line.startswith("note: ")] == ["note: a note"]
    chunks = replace(PLAN, stages=(stage("a", 0), stage("b", 0)), num_chunks=2)
    assert "its slowest rank takes" in " ".join(chunks.explain().split())


def test_explain_folds_long_tables() -> None:
    stages = tuple(replace(stage("x", rank), nodes=(f"n{rank}",), in_flight=rank + 1) for rank in range(25))
    lines = replace(PLAN, stages=stages, num_devices=25).explain().splitlines()
    rows = [line for line in lines if re.search(r" n\d+$", line)]
    assert [int(row.split()[0]) for row in rows] == [*range(8), *range(17, 25)]
    assert "  ... 9 more stages, in the plan's JSON ..." in lines


def test_numbers_beyond_all_floats() -> None:
    record = {**json.loads(PLAN.to_json()), "bound": 10**400}
    with pytest.raises(ValueError, match=r"q\.json: bound: 1000.*\.\.\. \(401 characters\): expected a finite number"):
        Plan.from_json(json.dumps(record), source="q.json")
    with pytest.raises(ValueError, match=r"q\.json: .*expected one JSON object"):
        Plan.from_json('{"bound": 1' + "0" * 5000 + "}", source="q.json")
