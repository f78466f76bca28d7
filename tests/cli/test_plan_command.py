"""`stagewright plan`: what it reads, prints writes and refuses, with `--calibrate RUNS.csv` too."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import Cli
from support.inside import DeviceModel, Transformer, TransformerSource, main

from stagewright.partition import Cluster, GivenStage, Node, Plan, Profile, evaluate, plan
from stagewright.schedules import FAMILIES

PIPEDREAM = Path(__file__).parents[1] / "data" / "pipedream" / "vgg16.txt"
SHAPE = "layers=4,hidden=256,heads=4,vocabulary=1000,length=128"


def written(path: Path, size: int | None, seconds: float = 1.0) -> str:
    nodes = tuple(Node(name=n, forward_seconds=seconds, backward_seconds=2 * seconds) for n in "abcd")
    path.write_text(Profile(nodes=nodes, microbatch_size=size).to_json(), encoding="utf-8")
    return str(path)


@pytest.mark.thorough
def test_a_table_a_file_and_how_long_it_took(cli: Cli, tmp_path: Path) -> None:
    profile, out = written(tmp_path / "a.json", 1), tmp_path / "plan.json"
    printed = cli.text("plan --profile", profile, "--ranks 4 --batch 8 --out", str(out)).replace(
        "\n  ", " "
    )  # however long a path is
    assert printed.startswith("pipe 1 x data 4, 1f1b, microbatch 1\n1 stage with 4 replicas on 4 devices")
    assert printed.count("pipe 1 x data 4, 1f1b, microbatch 1\n") == 1
    assert "runner-up pipe 2 x data 2, interleaved V=2, microbatch 1: " in printed
    assert "configurations: " in printed
    assert "by their bounds none of the rest is faster" in printed
    assert "planned in " in printed
    assert f"seconds and bytes: {profile}, as measured (`stagewright profile`" in printed
    assert "memory of a device: no limit is known (--memory 80GB gives one)" in printed
    assert "links: messages and sums take no time (--cluster says what they take" in printed
    assert Plan.load(out).replicas == (4,)
    printed = cli.text("plan --transformer", SHAPE, "--device v100 --ranks 4 --batch 8").replace(
        "\n  ", " "
    )  # however long a path is
    assert (
        "seconds and bytes: formulas on the device V100-32GB (--device gives another: a name, such as v100, or"
        in printed
    )
    assert "memory of a device: 32.0 GB (--memory gives another)" in printed


def test_a_joint_search(cli: Cli, tmp_path: Path) -> None:
    profile, out = written(tmp_path / "a.json", 1), tmp_path / "plan.json"
    words = ["plan", "--profile", profile, "--cluster", "3:net=1GB/s", "--batch", "8", "--joint", "--seconds", "0.2"]
    found = Plan.from_json(cli.text(*words, "--replicas 1 --pipeline 3 --json"))
    assert (found.schedule, len(found.order)) == ("auto", 3)
    assert "joint search: " in cli.text(*words, "--out", str(out))
    assert "--joint with --replicas 3: expected 1 among them" in cli.refused(*words, "--replicas 3")


@pytest.mark.thorough(but=["0.0-None-"])
@pytest.mark.parametrize(
    ("known", "typed", "said"),
    [
        (None, None, "norm of gradients: ranks wait for none (--clip 1, as `stagewright train` has it)"),
        (None, "1", "norm of gradients: ranks wait 5.00 s for it (--clip 0: none)"),
        (0.5, None, "norm of gradients: ranks wait 5.00 s for it (--clip 0: none)"),
        (0.0, None, ""),
        (0.5, "0", "--clip 0: the update's seconds are with clipping all the same: `stagewright profile --clip 0`"),
        (0.0, "1", "--clip 1: the update's seconds are without clipping all the same: `stagewright profile --clip 1`"),
    ],
)
def test_the_norm_is_that_of_the_profile_or_of_the_option(
    cli: Cli, tmp_path: Path, known: float | None, typed: str | None, said: str
) -> None:
    path, out = Path(written(tmp_path / "a.json", 1)), tmp_path / "plan.json"
    path.write_text(replace(Profile.load(path), max_grad_norm=known).to_json())
    words = ["--cluster", "2:net=1GB/s@2500ms", "--batch", "4", *(["--clip", typed] if typed else [])]
    printed = cli.text("plan --profile", str(path), *words, "--out", str(out))
    assert said in " ".join(printed.split())
    waits = float(typed) if typed else known
    assert Plan.load(out).costs.norm == (5.0 if waits else None)
    assert ("clip" in printed) == bool(said)


def test_json_alone_on_stdout(cli: Cli) -> None:
    words = "--ranks 4 --batch 16 --runnable --schedules 2bw --json"
    found = Plan.from_json(cli.text("plan --pipedream", str(PIPEDREAM), words))
    assert found.schedule == "2bw"
    assert all(stage.optimizer_shards == 1 for stage in found.stages)
    assert "planned in " in cli.told


def test_several_profiles(cli: Cli, tmp_path: Path) -> None:
    files = [written(tmp_path / f"{size}.json", size, seconds) for size, seconds in ((1, 1.0), (2, 1.2))]
    assert cli.json("plan --profile", *files, "--ranks 2 --batch 8")["microbatch_size"] == 2


def test_a_device_of_ones_own(cli: Cli, tmp_path: Path) -> None:
    """Half of the network: sums over nodes take twice as long, and the plan knows it."""
    path, steps = tmp_path / "device.json", []
    for part in (1.0, 0.5):
        device = replace(DeviceModel.preset("A100-80GB"), network_efficiency=part)
        path.write_text(device.to_json(), encoding="utf-8")
        cluster = ["--cluster", "4x1:nvlink=300GB/s,net=12GB/s", "--batch", "8", "--replicas", "4", "--json"]
        found = Plan.from_json(
            cli.text("plan --transformer", SHAPE, "--device", str(path), "--schedules 1f1b", *cluster)
        )
        steps.append(found.links.sums[0].seconds)
    assert steps[1] == pytest.approx(2 * steps[0])
    missing = str(tmp_path / "no.json")
    assert missing in cli.refused("plan --transformer", SHAPE, "--device", missing, "--ranks 2 --batch 8")


@pytest.mark.thorough
def test_a_transformer_on_a_cluster_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(Cluster.parse("2x2:nvlink=300GB/s,net=12GB/s").to_json(), encoding="utf-8")
    arguments = ["--transformer", f"{SHAPE},kv_heads=2", "--device", "v100", "--cluster", str(path), "--batch", "16"]
    assert "on 4 devices" in cli.text("plan", *arguments, "--tensor 1 2 --memory 16GB")
    assert "nothing fits the memory" in cli.refused("plan", *arguments, "--memory 1MB")


@pytest.mark.thorough(
    but=[
        "arguments0-no model: expected one of --profile FILE, --model FUNCTION, --pipedream FILE, or",
        "arguments16---context 4: expected at most the 2 devices",
    ]
)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2"], "no model: expected one of --profile FILE, --model FUNCTION, --pipedream FILE, or"),
        (["--pipedream", "{vgg}", "--transformer", SHAPE, "--ranks", "2"], "--pipedream and --transformer: expected"),
        (["--pipedream", "{vgg}"], "a plan needs devices: expected --cluster"),
        (["--pipedream", "{vgg}", "--ranks", "3", "--cluster", "2:a=1GB/s"], "--ranks 3 with a cluster of 2 devices"),
        (["--pipedream", "{vgg}", "--cluster", "2:a=1GB"], "cluster '2:a=1GB': link 'a': bandwidth: '1GB'"),
        (["--pipedream", "nowhere.txt", "--ranks", "2"], "nowhere.txt: No such file or directory"),
        (["--pipedream", "{vgg}", "--ranks", "2", "--memory", "many"], "--memory 'many': expected a number above 0"),
        (
            ["--pipedream", "{vgg}", "--ranks", "2", "--schedules", "1f2b"],
            "error: --schedules: unknown schedule '1f2b'",
        ),
        (["--transformer", "layers=4,depth=2", "--ranks", "2"], "--transformer: 'depth=2': expected name=value"),
        (["--transformer", "layers=4", "--ranks", "2"], "hidden, heads, vocabulary, length missing"),
        (["--pipedream", "{vgg}", "--ranks", "2", "--chunks", "1"], "--chunks 1: expected at least 2"),
        (["--pipedream", "{vgg}", "--ranks", "2", "--pipeline", "9"], "on 2 devices with --pipeline 9: expected sizes"),
        (["--pipedream", "{vgg}", "--ranks", "2", "--tensor", "2"], "--tensor 2: expected some of 1"),
        (["--pipedream", "{vgg}", "--ranks", "2", "--microbatches", "2"], "--microbatches: no profile of 2 samples"),
        (["--pipedream", "{vgg}", "--ranks", "2", "--out", "/no/x.json"], "--out /no/x.json: cannot write: expected a"),
        (["--transformer", SHAPE, "--ranks", "3", "--context", "3"], "length: 128: expected a multiple of --context 3"),
        (["--transformer", SHAPE, "--ranks", "2", "--context", "4"], "--context 4: expected at most the 2 devices"),
        (
            ["--transformer", SHAPE, "--ranks", "2", "--expert", "0"],
            "--expert 0: expected a whole number of at least 1",
        ),
        (["--pipedream", "{vgg}", "--ranks", "2", "--expert", "2"], "--context 1 --expert 2: expected 1 each, or --tr"),
        (["--profile", "{vgg}", "--ranks", "2"], "; PipeDream's text is read with --pipedream"),
        (["--transformer", SHAPE, "--device", "a1000", "--ranks", "2"], "takes a name or a .json file: unknown device"),
        (["--transformer", SHAPE, "--device", "no.json", "--ranks", "2"], "--device no.json: no such file: expected w"),
        (["--pipedream", "{vgg}", "--device", "v100", "--ranks", "2"], "--device v100 with --pipedream: leave it aw"),
    ],
)
def test_mistakes(arguments: list[str], message: str, cli: Cli) -> None:
    given = [argument.replace("{vgg}", str(PIPEDREAM)) for argument in arguments]
    assert message in cli.refused("plan", *given, "--batch 8")


def test_profiles_and_batches_that_do_not_fit(tmp_path: Path, cli: Cli) -> None:
    one, same, unknown = written(tmp_path / "a", 1), written(tmp_path / "b", 1), written(tmp_path / "c", None)
    for other, message in ((same, "a second profile of microbatches of 1"), (unknown, "microbatch_size: missing")):
        assert message in cli.refused("plan --profile", one, other, "--ranks 2 --batch 4")
    two = tmp_path / "two.json"
    two.write_text(Profile(nodes=Profile.load(one).nodes, microbatch_size=2, dtype="bfloat16").to_json())
    assert f"{one} and {two}: dtype " in cli.refused("plan --profile", one, str(two), "--ranks 2 --batch 4")
    assert "--batch 0: expected a whole number of at least 1" in cli.refused(
        "plan --profile", written(tmp_path / "a", 1), "--ranks 2 --batch 0"
    )
    assert "--batch 3 is no multiple of any microbatch size" in cli.refused(
        "plan --profile", written(tmp_path / "a", 2), "--ranks 2 --batch 3"
    )


@pytest.mark.parametrize("option", ["--profile", "--pipedream", "--cluster"])
def test_a_file_that_is_no_text_is_named(option: str, tmp_path: Path, cli: Cli) -> None:
    path, profile = tmp_path / "x.json", written(tmp_path / "a", 1)
    path.write_bytes(b"\xff\xfe\x00")
    given = [option, str(path), *(["--profile", profile] if option == "--cluster" else ["--ranks", "2"])]
    assert f"{path}: no UTF-8 text at byte 0" in cli.refused("plan", *given, "--batch 4")


WIDE = "layers=4,hidden=1024,heads=8,vocabulary=1000,length=512"
CLUSTER = "2x4:nvlink=300GB/s,net=12GB/s"
COLUMNS = "P,D,T,V,microbatch,M,schedule,recompute,seconds"
FORMULAS = ["--transformer", WIDE, "--device", "A100-80GB", "--cluster", CLUSTER]


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
    words = ["--transformer", WIDE, "--device", str(out), "--cluster", CLUSTER, "--batch", "8", "--seconds", "1"]
    assert main(["plan", *words]) == 0


def profile_file(folder: Path) -> tuple[str, Profile]:
    split = {"forward_seconds": 1e-2, "backward_seconds": 2e-2, "input_grad_seconds": 1e-2, "weight_grad_seconds": 1e-2}
    nodes = [Node(name=n, **split, activation_bytes=1e6) for n in "abcd"]
    profile, path = Profile(nodes=nodes, microbatch_size=2), folder / "profile.json"
    path.write_text(profile.to_json(), encoding="utf-8")
    return str(path), profile


def measured(profile: Profile, cluster: Cluster, found: Plan) -> float:
    schedule = found.build_schedule() if found.order else found.schedule or ""
    again = evaluate(profile, cluster, found.stages, num_microbatches=found.num_microbatches or 0, schedule=schedule)
    assert again.simulated_step_time is not None
    return again.simulated_step_time


@pytest.mark.thorough
@pytest.mark.parametrize("is_plan", [True, False])
def test_a_cluster_is_fitted_to_runs_of_a_profile(is_plan: bool, cli: Cli, tmp_path: Path) -> None:
    """Devices half as fast as the profile's; plans as files, one with an order of its own, or by their sizes, which
    `plan` cuts the same."""
    path, profile = profile_file(tmp_path)
    cluster, rows = Cluster.parse("4:net=1GB/s@1us"), []
    slow = replace(cluster, kinds=(replace(cluster.kinds[0], speed=0.5),))
    for P, D, M in ((2, 1, 4), (4, 1, 8), (2, 2, 8), (1, 4, 8)):
        sizes = {"pipeline_sizes": (P,), "data_sizes": (D,), "schedules": "1f1b", "recompute": ("none",)}
        sizes |= {"schedules": "zb-h1"} if is_plan and D == 2 else {}
        found = plan(profile, cluster, global_batch=2 * M, **sizes)  # type: ignore[arg-type]
        assert bool(found.order) == (found.schedule == "zb-h1")
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
    runs = csv_of(tmp_path / "runs.csv", "P,microbatch,M,seconds", "2,2,4,0.4")
    printed = cli.text("plan --calibrate", runs, "--profile", path, "--ranks 2")
    assert "1 measured step: one scale is fitted, and nothing is left out" in " ".join(printed.split())
    assert "expected steps of at least 2 plans, better of 3 or more" in " ".join(printed.split())
    assert "--out FILE.json writes it" in " ".join(printed.split())


MISTAKES: Sequence[tuple[str, str, str]] = (
    ("P,M,microbatch,second", "1,1,1,1", "runs.csv, line 1: no column 'seconds': expected seconds"),
    ("P,M,microbatch,B,seconds", "1,1,1,1,1", "line 1: column: 'B': expected some of plan,P,D,T,V,microbatch"),
    ("P,microbatch,seconds", "1,1,1", "columns P,microbatch,seconds: expected plan,seconds or P,D,T,V"),
    ("plan,seconds", "a.json,1", "runs.csv, line 2: column plan: "),
    ("P,microbatch,M,seconds", "2,1,x,1", "runs.csv, line 2: column M: 'x': expected a whole number of at least 1"),
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


@pytest.mark.thorough(
    but=[
        "P,M,microbatch,second-1,1,1,1-runs.csv, line 1: no column 'seconds': expected seconds",
        "P,M,microbatch,B,seconds-1,1,1,1,1-line 1: column: 'B': expected some of plan,P,D,T,V,microbatch",
        "P,microbatch,M,seconds-2,1,4,3210-runs.csv, line 2: column seconds: 3210: the plan is predicted to take",
    ]
)
@pytest.mark.parametrize(("columns", "row", "message"), MISTAKES)
def test_mistakes_of_calibration(columns: str, row: str, message: str, cli: Cli, tmp_path: Path) -> None:
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
