"""`stagewright train --plan`: a plan's file, or measured and planned on the spot.

`stagewright plan --check RUN`: what it tells of a run whose inputs were wrong on purpose, and of a real one.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import Cli, Done
from support.inside import (
    Cause,
    RunFile,
    _fits,
    _promised,
    check_run,
    header_line,
    layout_of_plan,
    main,
    sampled,
    step_line,
    trace_path,
)
from support.inside import simulated_simulated as simulated
from support.recorded import records_of
from support.run_folder import header_of

from stagewright.comm import World
from stagewright.partition import Cluster, Node, Plan, PlanStage, Profile, plan
from stagewright.schedules import Costs, build, flushed, simulate

TINY = ("--layers", "2", "--width", "32", "--heads", "2", "--length", "16", "--batch", "8", "--steps", "5")


def nodes_of_the_model() -> tuple[str, ...]:
    import torch
    from support.inside import GPT, Arguments, GPTConfig, model_units

    model = GPT(GPTConfig(layers=2, width=32, heads=2, length=16))
    units = model_units(model, Arguments.of((torch.zeros((2, 16), dtype=torch.int64),)), enter_unit=None)
    return tuple(unit.name for unit in units.units)


def write_plan(folder: Path, nodes: tuple[str, ...], **fields: Any) -> Path:
    def stage(number: int, part: tuple[str, ...]) -> PlanStage:
        return PlanStage(nodes=part, ranks=(number,), step_seconds=0.03)

    half = len(nodes) // 2
    settings: dict[str, Any] = {
        "stages": (stage(0, nodes[:half]), stage(1, nodes[half:])),
        "num_devices": 2,
        "costs": Costs(forward=0.01, backward=0.02),
        "cost_model": "default",
        "schedule": "1f1b",
        "num_microbatches": 4,
        "microbatch_size": 2,
        "bottleneck": 0.03,
        "bound": 0.03,
        "simulated_step_time": 0.15,
        "simulated_bubble": 0.2,
    }
    path = folder / "plan.json"
    path.write_text(Plan(**(settings | fields)).to_json())
    return path


@pytest.mark.thorough
def test_a_plan_from_a_file(command: Callable[..., Done], tmp_path: Path, text: str) -> None:
    path = write_plan(tmp_path, nodes_of_the_model())
    done = command("train", *TINY, "--plan", str(path), "--text", text, "--name", "one", "--json")
    assert done.status == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["schedule"], summary["num_ranks"], summary["planned_step_seconds"]) == ("1f1b", 2, 0.15)
    assert len(summary["peak_tensor_bytes"]) == 2
    assert min(summary["peak_tensor_bytes"]) > 10_000
    assert Plan.load(tmp_path / "runs" / "one" / "plan.json") == Plan.load(path)
    # What it promised beside what came of it: the causes add up to the difference.
    done = command("plan", "--check", "one", "--json")
    assert done.status == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["simulated"], found["step_seconds"]) == (pytest.approx(0.15), summary["step_seconds"])
    assert sum(each["change"] for each in found["causes"]) == pytest.approx(found["step_seconds"] - found["simulated"])
    assert {(each["kind"], *each["at"]) for each in found["inputs"]} >= {(op, s) for op in "FB" for s in (0, 1)}
    assert all(0 < each["measured"] < found["measured"] for each in found["inputs"] if each["kind"] in "FB")


@pytest.mark.thorough
def test_measured_and_planned_on_the_spot(command: Callable[..., Done], tmp_path: Path, text: str) -> None:
    done = command("train", *TINY, "--plan", "auto", "--trials", "1", "--text", text, "--name", "one")
    assert done.status == 0, done.stderr
    assert "plan         step" in done.stdout
    assert "predicted / measured" in " ".join(done.stdout.split())  # lines are wrapped
    plan = Plan.load(tmp_path / "runs" / "one" / "plan.json")
    assert plan.num_devices in (1, 2)  # a busy machine's second rank may not be worth it
    assert any(note.startswith(("tried for ", "not tried: ")) for note in plan.notes)
    summary = json.loads((tmp_path / "runs" / "one" / "summary.json").read_text())
    drawn = sampled(plan)
    assert summary["planned_step_seconds"] == drawn.median != plan.simulated_step_time
    # The same plan runs again from its file.
    again = command("train", *TINY, "--plan", "runs/one/plan.json", "--text", text, "--name", "two", "--json")
    assert json.loads(again.stdout)["num_microbatches"] == plan.num_microbatches


@pytest.mark.thorough
def test_a_plan_is_shown_without_training(tmp_path: Path, cli: Cli) -> None:
    path = write_plan(tmp_path, nodes_of_the_model())
    shown = cli.text("train", *TINY, "--plan", str(path), "--dry-run")
    assert "1-1 on 2 devices, microbatches of 2" in shown
    assert "rank 0 | F0 F1" in shown
    assert Plan.from_json(cli.text("train", *TINY, "--plan", str(path), "--dry-run --json")) == Plan.load(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--plan", "nowhere.json"), "--plan nowhere.json: no such file: expected one that `stagewright plan --out"),
        (("--plan", "auto", "--schedule", "1f1b"), "--schedule 1f1b with --plan auto: leave it away"),
        (("--schedule", "auto"), "--schedule auto: expected --plan auto"),
        (("--plan", "auto", "--dry-run"), "--dry-run measures nothing"),
        (("--plan", "auto", "--trials", "-1"), "--trials -1: expected a number of plans, 0 or more, with --plan aut"),
        (("--trials", "2"), "--trials 2: expected a number of plans, 0 or more, with --plan auto"),
        (("--plan", "PLAN", "--microbatches", "4"), "--microbatches 4 with --plan"),
        (("--plan", "PLAN", "--ranks", "3"), "is for 2 ranks: expected --ranks 2, not 3"),
        (("--plan", "PLAN", "--batch", "12"), "is for 4 microbatches of 2 samples: expected --batch 8, not 12"),
        (("--plan", "PLAN", "--batch", "3"), "--batch 3 for 4 microbatches: one would be empty"),
    ],
)
def test_bad_options(options: tuple[str, ...], message: str, tmp_path: Path, cli: Cli) -> None:
    path = str(write_plan(tmp_path, ("a", "b")))
    words = [path if word == "PLAN" else word for word in options]
    assert message in cli.refused("train", *words)


def test_a_plan_that_lies_on_another_host(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "node1")
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    assert "nowhere.json: no such file on node1, where each host needs a copy: expected" in cli.refused(
        "train --plan nowhere.json"
    )


@pytest.mark.thorough
def test_a_dry_run_refuses_a_plan_for_another_model(tmp_path: Path, cli: Cli) -> None:
    path = write_plan(tmp_path, ("a", "b"))
    nodes = nodes_of_the_model()
    for json_mode in ("", "--json"):
        told = cli.refused("train", *TINY, "--plan", str(path), "--dry-run", json_mode)
        assert "the plan is for another model (2 nodes, the model has" in told
    plan = Plan.load(write_plan(tmp_path, nodes))
    heavy = replace(plan, stages=tuple(replace(stage, parameter_bytes=12.0) for stage in plan.stages))
    path.write_text(heavy.to_json())
    assert "has 12 bytes of parameters in the plan and " in cli.refused(
        "train", *TINY, "--plan", str(path), "--dry-run"
    )


def test_files_that_cannot_be_meant_are_named(tmp_path: Path, cli: Cli) -> None:
    path = write_plan(tmp_path, ("a", "b"), schedule="1f2b")
    assert f"{path}: unknown schedule '1f2b'" in cli.refused("train", *TINY, "--plan", str(path))
    path.write_bytes(b"\xff\xfe")
    assert f"{path}: no UTF-8 text at byte 0" in cli.refused("train", *TINY, "--plan", str(path))


CLUSTER = Cluster.parse("4:net=100MB/s@1ms")


def planned(schedule: str = "1f1b", *, batch: int = 8, context: int = 1, **restrictions: Any) -> Plan:
    seconds = {"forward_seconds": 0.01, "backward_seconds": 0.02, "update_seconds": 0.002}
    nodes = [Node(name=name, activation_bytes=1e6, parameter_bytes=1e6, **seconds) for name in "abcdef"]
    profile = Profile(nodes=nodes, microbatch_size=1, optimizer_ratio=2.0, tensor=context, context=context)
    settings: dict[str, Any] = {"pipeline_sizes": (4,), "data_sizes": (1,), "schedules": (schedule,)}
    return plan(profile, CLUSTER, global_batch=batch, runnable=True, **(settings | restrictions))


def write_run(
    folder: Path,
    carried_out: Plan,
    *,
    costs: Mapping[str, Any] | None = None,
    processes: Mapping[int, Path] | None = None,
    config: Mapping[str, object] | None = None,
    start: str = "a",
    first_step: int = 0,
) -> None:
    """Files of a run whose steps took what the plan says, but for some costs.

    Arguments:
        processes: folders of their own, by rank.
        config: options that the run was started with, beside its sizes.
        start, first_step: of a run that went on, one that has stages of its own.
    """
    world = World(rank=0, size=carried_out.num_devices)
    promised = simulated(carried_out)
    if carried_out.context > 1:
        promised = _promised(carried_out, layout_of_plan(carried_out, world, num_microbatches=None).schedule)
    given = costs or {}
    true = replace(promised.costs, **{name: value(promised.costs) for name, value in given.items()})
    truth = simulate(promised.timeline.schedule, true, promised.links)
    schedule, records = truth.schedule, records_of(truth, true.overhead)  # type: ignore[arg-type]
    for place in {folder, *(processes or {}).values()}:
        place.mkdir(parents=True, exist_ok=True)
    RunFile(schedule=schedule, simulated=truth, costs=true).write(folder)
    for rank, record in enumerate(records):
        place = (processes or {}).get(rank, folder)
        own = {"process": rank, "ranks": (rank,), "num_processes": len(records), "host": place.parts[0]}
        header = header_of(schedule, run=start, started=start, cut=start, first_step=first_step, **own)
        lines = [step_line(start, step, {rank: record}) for step in (first_step + 3, first_step + 23)]
        with trace_path(place, rank).open("ab") as file:
            file.write(header_line(header) + b"".join(lines))
    (folder / "plan.json").write_text(carried_out.to_json())
    options = {"model": None, "layers": 4, "width": 64, "heads": None, "length": 32, **(config or {})}
    (folder / "manifest.json").write_text(json.dumps({"name": folder.name, "config": options}))
    peaks = [1.1 * each for _, each in sorted(carried_out.memory_bytes.items())]
    (folder / "summary.json").write_text(
        json.dumps(
            {
                "step_seconds": truth.batch_seconds + 0.001,
                "peak_tensor_bytes": peaks,
                "peak_memory_bytes": [2e7] * len(peaks),
            }
        )
    )


def slower_backward(costs: Costs) -> list[float]:
    return [1.25 * each if stage == 1 else each for stage, each in enumerate(costs.backward)]  # type: ignore[operator]


@pytest.mark.parametrize("name", ["2bw", "pipedream"])
def test_first_steps_with_a_flush_are_not_held_against_a_plan_without(name: str) -> None:
    schedule = build(name, num_ranks=2, num_microbatches=4)
    assert _fits(replace(schedule, programs=flushed(schedule).programs), schedule)  # the order is the run's own
    assert not _fits(flushed(schedule), schedule)


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_a_slow_backward_is_named_with_the_command_that_measures_it(cli: Cli) -> None:
    write_run(Path("runs/one"), planned(), costs={"backward": slower_backward})
    found = cli.json("plan --check one")
    (again,) = found["measure_again"]
    assert "backward of stage 1 takes 1.25 times as long as planned" in again["why"][0]
    assert again["command"] == (
        "stagewright profile --layers 4 --width 64 --length 32 --microbatch 1 --ranks 4 --out profile.json"
    )
    changes = {each["name"]: each["change"] for each in found["causes"]}
    assert changes["compute"] == pytest.approx(found["measured"] - found["simulated"])
    assert changes["around the step"] == pytest.approx(0.001)
    assert found["step_seconds"] == pytest.approx(found["simulated"] + sum(changes.values()))
    assert all(there == pytest.approx(1.1 * expected) for expected, there in found["tensor_bytes"])
    # The same for people, with a picture.
    printed = cli.text("plan --check runs/one -o check.svg")
    assert "one: 1f1b, 4 stages on 4 ranks, medians of 2 traced steps" in printed
    assert "actions as measured" in printed
    assert "    stagewright profile --layers 4" in printed
    assert "medians of 2 traced steps" in Path("check.svg").read_text()
    assert main(["plan", "--check", "runs/one", "-o", "paper.svg", "--column", "one", "--no-title"]) == 0
    paper = Path("paper.svg").read_text()
    assert 'width="252pt"' in paper  # 3.5 inches
    assert ">simulated<" in paper
    assert "medians of 2 traced steps" not in paper
    assert printed.rstrip().endswith("check.svg")
    picture = Path("check.svg").read_text()
    assert all(cause.value in picture for cause in Cause)
    assert "compute" in picture


def times(factor: float, name: str) -> Any:
    return {name: lambda costs: [factor * each for each in getattr(costs, name)]}


def halves(factor: float) -> Any:
    return lambda costs: [factor * each / 2 for each in costs.backward]


IN_ORDERS = {"pipeline_sizes": (3,), "chunk_sizes": (2,), "batch": 6}
TWO_BY_TWO = {"pipeline_sizes": (2,), "data_sizes": (2,)}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of the plan, and what was wrong
    "F": ({"schedule": "2bw"}, times(2.0, "forward")),
    "W": ({"schedule": "zb-h1"}, {"input_grad": halves(1.0), "weight_grad": halves(2.0)}),
    "overhead": ({"schedule": "interleaved", "chunk_sizes": (3,), **TWO_BY_TWO}, {"overhead": lambda _: 0.002}),
    "update": ({"pipeline_sizes": (1,), "data_sizes": (4,)}, times(9.0, "update")),
    "norm": (TWO_BY_TWO, {"norm": lambda _: 0.05}),
    "held": (
        {"schedule": "interleaved", "batch": 12, "chunk_sizes": (3,), "pipeline_sizes": (1,), "data_sizes": (4,)},
        {"sum_busy": lambda _: 0.9},
    ),
    "message": (TWO_BY_TWO, {"latency": lambda _: 0.02}),
    "B": ({"context": 2, "pipeline_sizes": (2,)}, times(1.5, "backward")),  # of 2 plan ranks, on 4
}


@pytest.mark.thorough(but=["hanayo"])
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("schedule", ["hanayo", "interleaved-zb", "zb-v"])
def test_overhead_of_an_ordered_plan_is_no_other_cause(cli: Cli, schedule: str) -> None:
    """Inputs that were as planned moved the step by 8 to 10 ms of 60: other messages went first, or did not queue."""
    ordered = planned(schedule, **IN_ORDERS)
    assert ordered.order
    write_run(Path("one"), ordered, costs={"overhead": lambda _: 0.002})
    found = cli.json("plan --check one")
    causes = {each["name"]: each["change"] for each in found["causes"] if each["name"] != "around the step"}
    assert causes.pop("between actions") == pytest.approx(found["measured"] - found["simulated"])
    assert list(causes.values()) == pytest.approx([0.0] * len(causes), abs=1e-9)


@pytest.mark.thorough(but=["update"])
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", CASES)
def test_plans_of_every_kind(cli: Cli, kind: str) -> None:
    """Streams, split backwards, chunks, replicas: what was wrong at all stages is the cause, and is what is named."""
    settings, wrong = CASES[kind]
    write_run(Path("one"), planned(**settings), costs=wrong)
    found = cli.json("plan --check one")
    causes = {each["name"]: abs(each["change"]) for each in found["causes"]}
    (cause,) = {each["cause"] for each in found["inputs"] if each["kind"] == kind}
    assert max(causes, key=causes.__getitem__) == cause
    assert sum(seconds for name, seconds in causes.items() if name != cause) < 0.1 * causes[cause]
    named = {each["name"] for each in found["inputs"] if each["kind"] == kind}
    why = [line for each in found["measure_again"] for line in each["why"]]
    assert any(why[0].startswith(name) for name in named), why
    command = found["measure_again"][0]["command"]
    if kind == "norm":
        assert command == "stagewright plan ... --clip 1"  # of a plan that nobody told of clipping
        return
    assert ("--links" in command) == (kind in ("message", "held"))


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_a_plan_that_knows_nothing_of_clipping_is_to_be_made_again(cli: Cli) -> None:
    write_run(Path("one"), planned(**TWO_BY_TWO), costs={"norm": lambda _: 0.05}, config={"clip": 0.5})
    (advice,) = cli.json("plan --check one")["measure_again"]
    assert advice["command"] == "stagewright plan ... --clip 0.5"
    assert advice["why"][0].startswith("norm of all gradients takes 50.0 ms, and the plan knows nothing of that")
    write_run(
        Path("two"), planned(max_grad_norm=0.5, **TWO_BY_TWO), costs={"norm": lambda _: 0.05}, config={"clip": 0.5}
    )
    (advice,) = cli.json("plan --check two")["measure_again"]
    assert advice["command"] is None
    free = planned(max_grad_norm=0.5, **TWO_BY_TWO)
    free = replace(free, costs=replace(free.costs, norm=0.0))  # made without --cluster
    write_run(Path("free"), free, costs={"norm": lambda _: 0.05}, config={"clip": 0.5})
    (advice,) = cli.json("plan --check free")["measure_again"]
    assert advice["command"] == "stagewright profile --links --ranks 4 --out cluster.json"
    write_run(Path("three"), planned(**TWO_BY_TWO), costs=times(3.0, "forward"), config={"clip": 0.5})
    (advice,) = cli.json("plan --check three")["measure_again"]
    assert "--ranks 4 --clip 0.5 --out profile.json" in advice["command"]


@pytest.mark.usefixtures("here")
def test_hosts_whose_folders_are_apart(cli: Cli) -> None:
    write_run(Path("a/one"), planned(), processes={2: Path("b/one"), 3: Path("b/one")})
    assert cli.json("plan --check a/one b/one")["measure_again"] == []
    alone = cli.json("plan --check a/one")
    assert any("nothing was recorded of forward of stage 2" in note for note in alone["notes"])
    assert alone["ranks"][2] == []
    with pytest.raises(
        ValueError, match=r"b/one: what 2 processes left on b; plan and figures are where process 0 ran"
    ):
        check_run(["b/one"])


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_commands_are_for_the_hosts_that_ran(cli: Cli) -> None:
    """Hosts of three ranks and one, whether the other host's folder is there or not."""
    wrong = {"backward": slower_backward, "latency": lambda _: 0.02}
    write_run(Path("a/one"), planned(), costs=wrong, processes={3: Path("b/one")})
    for folders in (["a/one", "b/one"], ["a/one"]):
        commands = [each["command"] for each in cli.json("plan --check", *folders)["measure_again"]]
        assert "torchrun ... -m stagewright profile --links --out cluster.json" in commands
        (profile,) = (command for command in commands if "--links" not in command)
        assert "--ranks 3 " in profile
        assert "(on each host; --links --profiles takes the files" in cli.text("plan --check", *folders)


@pytest.mark.usefixtures("here")
def test_steps_of_before_a_run_went_on_with_another_cut_do_not_count(cli: Cli) -> None:
    """Schedule and ranks may be the same: the header of each start tells its stages."""
    own = planned()
    write_run(Path("one"), own, costs=times(3.0, "forward"))
    logged = [{"step": step, "step_seconds": 1.0 if step < 30 else 0.5 + step / 1000} for step in range(60)]
    Path("one/metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in logged))
    write_run(Path("one"), own, costs={"backward": slower_backward}, start="b", first_step=30)
    found = cli.json("plan --check one")
    assert "2 traced steps of before step 30, where the run went on with other stages: left out" in found["notes"]
    wrong = {each["name"] for each in found["inputs"] if each["ratio"] not in (None, pytest.approx(1.0))}
    assert wrong == {"backward of stage 1"}
    assert found["step_seconds"] == pytest.approx(0.5 + 0.0445)
    assert "medians of 2 traced steps" in cli.text("plan --check one")


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
def test_what_cannot_be_compared_says_what_to_type(cli: Cli) -> None:
    own = planned()
    write_run(Path("runs/one"), own)
    Path("again.json").write_text(replace(own, simulated_step_time=1.0).to_json())
    Path("other.json").write_text(planned(batch=16).to_json())
    stages = (replace(own.stages[0], recompute="full"), *own.stages[1:])
    Path("again-full.json").write_text(replace(own, stages=stages).to_json())
    assert cli.json("plan --check one again.json")["measure_again"] == []
    for words, message in {
        ("one", "other.json"): "other.json is another plan than runs/one/plan.json, which was carried out: num microb",
        ("one", "again-full.json"): "recompute of stage 0: full, not none",
        ("two",): "no run folder two: expected runs/<name>; there are one",
        ("one", "again.json", "other.json"): "1 run and 2 plans: expected a run and at most one plan",
        ("again.json",): "0 runs and 1 plan",
        ("one", "-o", "check.html"): "-o check.html: expected a name that ends in .png, .svg, .pdf",
    }.items():
        assert message in cli.refused("plan --check", *words)
    Path("runs/one/plan.json").unlink()
    assert "has no plan.json: it ran without a plan" in cli.refused("plan --check one")
    assert "expected the plan that the run carried out" in cli.refused("plan --check one other.json")
    assert cli.json("plan --check one again.json")["measure_again"] == []
