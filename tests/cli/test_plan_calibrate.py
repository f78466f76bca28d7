"""`stagewright plan --calibrate RUNS.csv`: what it reads, fits, prints and writes, and how mistakes are answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import Cli
from support.inside import DeviceModel, Transformer, TransformerSource, main

from stagewright.partition import Cluster, GivenStage, Node, Plan, Profile, evaluate, plan
from stagewright.schedules import FAMILIES

SHAPE = "layers=4,hidden=1024,heads=8,vocabulary=1000,length=512"
CLUSTER = "2x4:nvlink=300GB/s,net=12GB/s"
COLUMNS = "P,D,T,V,microbatch,M,schedule,recompute,seconds"
FORMULAS = ["--transformer", SHAPE, "--device", "A100-80GB", "--cluster", CLUSTER]


def csv_of(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def equal_plan(device: DeviceModel, sizes: tuple[int, int, int, int, int]) -> float:
    """Seconds of a step of P, D, T, microbatch, M: layers by hand, stages outermost."""
    P, D, T, size, M = sizes
    cluster = device.reached(Cluster.parse(CLUSTER))
    model = Transformer(layers=4, hidden=1024, heads=8, vocabulary=1000, length=512)
    names = {
        1: [["embedding", "layer0", "layer1", "layer2", "layer3", "head"]],
        2: [["embedding", "layer0", "layer1"], ["layer2", "layer3", "head"]],
        4: [["embedding", "layer0"], ["layer1"], ["layer2"], ["layer3", "head"]],
    }[P]
    stages = [GivenStage(own, range(D * T * p, D * T * (p + 1)), T, "layer") for p, own in enumerate(names)]
    source = TransformerSource(transformer=model, device=device, cluster=Cluster.parse(CLUSTER))
    found = evaluate(source, cluster, stages, num_microbatches=M, microbatch_size=size)
    assert found.simulated_step_time is not None
    return found.simulated_step_time


@pytest.mark.thorough
def test_a_device_is_fitted_to_runs_of_any_sizes(cli: Cli, tmp_path: Path) -> None:
    """Runs of a device that reaches half of the products' speed: the file has its matrix_efficiency."""
    true = replace(DeviceModel.preset("A100-80GB"), matrix_efficiency=0.332)
    sizes = [(1, 2, 2, 4, 4), (2, 2, 1, 8, 8), (4, 1, 2, 8, 8), (4, 2, 1, 4, 16)]
    rows = [f"{P},{D},{T},1,{b},{M},1f1b,layer,{equal_plan(true, (P, D, T, b, M))}" for P, D, T, b, M in sizes]
    path, out = csv_of(tmp_path / "runs.csv", "# of last week", COLUMNS, *rows), tmp_path / "device.json"
    found = cli.json("plan --calibrate", path, *FORMULAS, "--out", str(out))
    assert found["choice"] == "one scale"
    assert DeviceModel.load(out).matrix_efficiency == pytest.approx(0.332, rel=0.01)
    assert replace(DeviceModel.load(out), matrix_efficiency=0.664) == DeviceModel.preset("A100-80GB")
    before = [equal_plan(DeviceModel.preset("A100-80GB"), each) for each in sizes]
    assert found["before"] == pytest.approx(before)
    assert found["after"] == pytest.approx(found["measured"], rel=0.01)
    printed = cli.text("plan --calibrate", path, *FORMULAS, "--out", str(out))
    assert "matrix_efficiency" in printed
    assert "line 3" in printed
    assert "off on average: no fit" in printed
    assert "taken: one scale" in printed
    assert "stagewright plan --device" in printed
    words = ["--transformer", SHAPE, "--device", str(out), "--cluster", CLUSTER, "--batch", "8", "--seconds", "1"]
    assert main(["plan", *words]) == 0


def profile_file(folder: Path) -> tuple[str, Profile]:
    nodes = [Node(name=n, forward_seconds=1e-2, backward_seconds=2e-2, activation_bytes=1e6) for n in "abcd"]
    profile, path = Profile(nodes=nodes, microbatch_size=2), folder / "profile.json"
    path.write_text(profile.to_json(), encoding="utf-8")
    return str(path), profile


def measured(profile: Profile, cluster: Cluster, found: Plan) -> float:
    again = evaluate(profile, cluster, found.stages, num_microbatches=found.num_microbatches or 0)
    assert again.simulated_step_time is not None
    return again.simulated_step_time


@pytest.mark.thorough(but=["False"])
@pytest.mark.parametrize("is_plan", [True, False])
def test_a_cluster_is_fitted_to_runs_of_a_profile(is_plan: bool, cli: Cli, tmp_path: Path) -> None:
    """Devices half as fast as the profile's; plans as files, or by their sizes, which `plan` cuts the same."""
    path, profile = profile_file(tmp_path)
    cluster, rows = Cluster.parse("4:net=1GB/s@1us"), []
    slow = replace(cluster, kinds=(replace(cluster.kinds[0], speed=0.5),))
    for P, D, M in ((2, 1, 4), (4, 1, 8), (2, 2, 8), (1, 4, 8)):
        sizes = {"pipeline_sizes": (P,), "data_sizes": (D,), "schedules": "1f1b", "recompute": ("none",)}
        found = plan(profile, cluster, global_batch=2 * M, **sizes)  # type: ignore[arg-type]
        (tmp_path / f"{P}x{D}.json").write_text(found.to_json(), encoding="utf-8")
        seconds = measured(profile, slow, found)
        rows.append(f"{P}x{D}.json,{seconds}" if is_plan else f"{P},{D},2,{M},{seconds}")
    runs = csv_of(tmp_path / "runs.csv", "plan,seconds" if is_plan else "P,D,microbatch,M,seconds", *rows)
    out = tmp_path / "cluster.json"
    given = [runs, "--profile", path, "--cluster", "4:net=1GB/s@1us", "--out", str(out)]
    found_here = cli.json("plan --calibrate", *given)
    assert found_here["choice"] == "one scale"
    fitted = Cluster.load(out)
    assert fitted.kinds[0].speed == pytest.approx(0.5, rel=1e-3)
    assert fitted.levels == cluster.levels
    assert main(["plan", "--profile", path, "--cluster", str(out), "--batch", "8"]) == 0


def test_one_run_is_not_judged(cli: Cli, tmp_path: Path) -> None:
    path, _ = profile_file(tmp_path)
    runs = csv_of(tmp_path / "runs.csv", "P,microbatch,M,seconds", "2,2,4,0.3")
    printed = cli.text("plan --calibrate", runs, "--profile", path, "--ranks 2")
    assert "1 measured step: one scale is fitted, and nothing is left out" in " ".join(printed.split())
    assert "expected steps of at least 2 plans, better of 3 or more" in " ".join(printed.split())
    assert "--out FILE.json writes it" in " ".join(printed.split())


MISTAKES: Sequence[tuple[str, str, str]] = (
    ("P,M,microbatch,second", "1,1,1,1", "runs.csv, line 1: no column 'seconds': expected seconds"),
    ("P,M,microbatch,B,seconds", "1,1,1,1,1", "line 1: column: 'B': expected some of plan,P,D,T,V,microbatch"),
    ("P,microbatch,seconds", "1,1,1", "columns P,microbatch,seconds: expected plan,seconds or P,D,T,V"),
    ("plan,P,seconds", "a.json,1,1", "columns plan,P,seconds: expected plan,seconds or P,D,T,V"),
    ("plan,seconds", "a.json,1", "runs.csv, line 2: column plan: "),
    ("P,microbatch,M,seconds", "2,1,x,1", "runs.csv, line 2: column M: 'x': expected a whole number of at least 1"),
    ("P,microbatch,M,seconds", "2,1,0,1", "runs.csv, line 2: column M: '0': expected a whole number of at least 1"),
    ("P,microbatch,M,seconds", "2,1,4,0", "runs.csv, line 2: column seconds: '0': expected a finite number above 0"),
    ("P,microbatch,M,seconds", "2,1,4,3210", "runs.csv, line 2: column seconds: 3210: the plan is predicted to take"),
    ("P,microbatch,M,seconds", "2,1,4,1,1", "runs.csv, line 2: 5: expected 4 cells, one per column: P,micro"),
    ("P,D,microbatch,M,seconds", "2,4,1,6,1", "runs.csv, line 2: column M: 6: expected a multiple of D=4"),
    ("P,D,microbatch,M,seconds", "4,4,1,8,1", "runs.csv, line 2: columns P, D, T: P D T = 16 devices, and the cluster"),
    ("P,V,microbatch,M,seconds", "2,4,1,8,1", "runs.csv, line 2: columns P, V: 8 stages of 4 layers: expected a divis"),
    (
        "P,microbatch,M,schedule,seconds",
        "2,1,8,dualpip,1",
        "runs.csv, line 2: column schedule: unknown schedule 'dualpip': expected one of "
        f"{', '.join(name for name, each in FAMILIES.items() if each.is_planned)}; did you mean 'dualpipe-v'?",
    ),
    ("P,microbatch,M,schedule,seconds", "2,1,8,zb-v,1", "runs.csv, line 2: column V: 1: expected 2 for zb-v, or"),
    ("P,V,microbatch,M,schedule,seconds", "2,2,1,8,gpipe,1", "runs.csv, line 2: column V: 2: expected 1 for gpipe, or"),
    ("P,microbatch,M,schedule,seconds", "2,1,8,terapipe,1", "line 2: column schedule: 'terapipe': slices have lengths"),
    (  # the place of its stages is unknown: a KeyError
        "P,V,microbatch,M,schedule,seconds",
        "2,2,1,8,dualpipe,1",
        "line 2: column schedule: 'dualpipe': no plans are made over it: expected one of gpipe, 1f1b",
    ),
    (
        "P,D,V,microbatch,M,schedule,seconds",
        "2,2,2,1,6,dualpipe-v,1",
        "line 2: columns M / D: 3 for schedule 'dualpipe-v' on 2 ranks: expected at least 4 (2P)",
    ),
    ("P,V,microbatch,M,schedule,seconds", "2,1,1,8,interleaved,1", "line 2: column V: 1: expected at least 2"),
    ("P,microbatch,M,recompute,seconds", "2,1,8,some,1", "runs.csv, line 2: column recompute: 'some': expected one of"),
    ("P,T,microbatch,M,seconds", "1,3,1,8,1", "runs.csv, line 2: column T: 3: expected a divisor of heads=8"),
)
MISTAKES_WITH_A_PROFILE: Sequence[tuple[str, str, str]] = (
    ("P,microbatch,M,seconds", "2,1,4,1", "line 2: column microbatch: no profile of 1 samples: expected some of 2"),
    ("P,T,microbatch,M,seconds", "2,2,2,4,1", "line 2: column T: 2: expected some of 1: what profiles and cluster"),
    ("P,microbatch,M,recompute,seconds", "2,2,4,x,1", "line 2: column recompute: 'x': expected some of none, full,"),
    ("P,V,microbatch,M,seconds", "4,2,2,8,1", "line 2: no configuration of a batch of 16 on 4 devices with P=4 and"),
)
ARGUMENTS = ("num_chunks", "_sizes", "microbatch_size", "num_microbatches", "tensor:", "recompute=", "schedule=")


@pytest.mark.parametrize(("columns", "row", "message"), MISTAKES)
def test_mistakes(columns: str, row: str, message: str, cli: Cli, tmp_path: Path) -> None:
    runs = csv_of(tmp_path / "runs.csv", columns, row)
    printed = cli.refused("plan --calibrate", runs, *FORMULAS)
    assert message in printed
    assert printed.count("runs.csv") == 1
    assert [each for each in ARGUMENTS if each in printed] == []


@pytest.mark.parametrize(("columns", "row", "message"), MISTAKES_WITH_A_PROFILE)
def test_mistakes_with_a_profile(columns: str, row: str, message: str, cli: Cli, tmp_path: Path) -> None:
    path, _ = profile_file(tmp_path)
    runs = csv_of(tmp_path / "runs.csv", columns, row)
    printed = cli.refused("plan --calibrate", runs, "--profile", path, "--ranks 4")
    assert f"runs.csv, {message}" in printed
    assert [each for each in ARGUMENTS if each in printed] == []


def test_a_plan_for_another_cluster_is_named_by_its_column(cli: Cli, tmp_path: Path) -> None:
    path, profile = profile_file(tmp_path)
    found = plan(profile, Cluster.parse("4:net=1GB/s"), global_batch=8, pipeline_sizes=(4,))
    (tmp_path / "four.json").write_text(found.to_json(), encoding="utf-8")
    runs = csv_of(tmp_path / "runs.csv", "plan,seconds", "four.json,1")
    assert "runs.csv, line 2: column plan: ranks of the stages: [[0], [1], [2], [3]]" in cli.refused(
        "plan --calibrate", runs, "--profile", path, "--ranks 2"
    )


@pytest.mark.parametrize("command", ["plan --calibrate RUNS.csv", "plan --check RUN"])
def test_a_wrong_option_names_the_help_that_lists_the_right_ones(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It named `stagewright plan --help`, which has neither."""
    with pytest.raises(SystemExit):
        main([*command.split(), "--bogus"])
    printed = capsys.readouterr()
    assert f"stagewright {command} --help" in printed.err + printed.out


def test_a_model_is_profiled_first(cli: Cli, tmp_path: Path) -> None:
    runs = csv_of(tmp_path / "runs.csv", "P,microbatch,M,seconds", "2,2,4,0.3")
    words = ["--model", "m.py:make", "--data", "m.py:batches", "--ranks", "2"]
    assert "--model with --calibrate: expected --profile FILE" in cli.refused("plan --calibrate", runs, *words)
    assert "no.csv: No such file or directory" in cli.refused("plan --calibrate", str(tmp_path / "no.csv"), *FORMULAS)
