"""`stagewright plan`: what it reads, prints and writes, and how mistakes are answered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import Cli
from support.inside import DeviceModel

from stagewright.partition import Cluster, Node, Plan, Profile

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


@pytest.mark.thorough
def test_a_joint_search(cli: Cli, tmp_path: Path) -> None:
    profile, out = written(tmp_path / "a.json", 1), tmp_path / "plan.json"
    words = ["plan", "--profile", profile, "--cluster", "3:net=1GB/s", "--batch", "8", "--joint", "--seconds", "0.2"]
    found = Plan.from_json(cli.text(*words, "--replicas 1 --pipeline 3 --json"))
    assert (found.schedule, len(found.order)) == ("auto", 3)
    assert "joint search: " in cli.text(*words, "--out", str(out))
    assert "--joint with --replicas 3: expected 1 among them" in cli.refused(*words, "--replicas 3")


@pytest.mark.thorough(but=["None-1-norm of gradients: ranks wait 5.00 s for it (--clip 0: none)"])
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
    but=["arguments0-no model: expected one of --profile FILE, --model FUNCTION, --pipedream FILE, or"]
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


def test_several_profiles_need_sizes(tmp_path: Path, cli: Cli) -> None:
    one, same, unknown = written(tmp_path / "a", 1), written(tmp_path / "b", 1), written(tmp_path / "c", None)
    for other, message in ((same, "a second profile of microbatches of 1"), (unknown, "microbatch_size: missing")):
        assert message in cli.refused("plan --profile", one, other, "--ranks 2 --batch 4")


def test_a_batch_of_none(tmp_path: Path, cli: Cli) -> None:
    assert "--batch 0: expected a whole number of at least 1" in cli.refused(
        "plan --profile", written(tmp_path / "a", 1), "--ranks 2 --batch 0"
    )
    assert "--batch 3 is no multiple of any microbatch size" in cli.refused(
        "plan --profile", written(tmp_path / "a", 2), "--ranks 2 --batch 3"
    )


def test_profiles_of_two_models_name_the_files(tmp_path: Path, cli: Cli) -> None:
    one, two = written(tmp_path / "one.json", 1), tmp_path / "two.json"
    two.write_text(Profile(nodes=Profile.load(one).nodes, microbatch_size=2, dtype="bfloat16").to_json())
    assert f"{one} and {two}: dtype " in cli.refused("plan --profile", one, str(two), "--ranks 2 --batch 4")


@pytest.mark.parametrize("option", ["--profile", "--pipedream", "--cluster"])
def test_a_file_that_is_no_text_is_named(option: str, tmp_path: Path, cli: Cli) -> None:
    path, profile = tmp_path / "x.json", written(tmp_path / "a", 1)
    path.write_bytes(b"\xff\xfe\x00")
    given = [option, str(path), *(["--profile", profile] if option == "--cluster" else ["--ranks", "2"])]
    assert f"{path}: no UTF-8 text at byte 0" in cli.refused("plan", *given, "--batch 4")
