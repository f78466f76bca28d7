"""Files that commands write: what cannot be written is refused before the work, and no input is overwritten.

What commands print for people fits a terminal of 80 columns.
"""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from support.commands import Cli
from support.inside import COMMANDS, main, wrapped
from support.run_folder import write_run

from stagewright.partition import Cluster, Node, Profile, plan
from stagewright.schedules import Costs, build, simulate

FAILING = ("schedule gone.csv", "timeline gone", "compare gone lost", "plan --check gone")


@pytest.mark.thorough(but=["-o x.svg --width bogus---width bogus: expected a number-schedule gone.csv"])
@pytest.mark.parametrize("command", FAILING)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-o x.svg --width bogus", "--width bogus: expected a number"),
        ("-o x.svg --width 1", "--width 1.0: expected 3 to 200 inches"),
        ("-o x.svg --width nan", "--width nan: expected 3 to 200 inches"),
        ("-o x.png --dpi 5000", "--dpi 5000.0: expected 30 to 1200 pixels an inch"),
        ("-o x.pdf --column one --font 1", "--font 1.0: expected 4 to 40 points"),
        ("-o x.svg -o x.doc", "-o x.doc: expected a name that ends in .png, .svg, .pdf"),
        ("-o nowhere/x.svg", "-o nowhere/x.svg: cannot write: expected a file in a folder that exists"),
        ("-o folder.svg", "-o folder.svg: cannot write: a folder: expected a file"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_the_work(
    command: str, options: str, message: str, cli: Cli, here: Path
) -> None:
    """Nothing that these commands read exists: they would say so once they begin."""
    Path("folder.svg").mkdir()
    assert message in cli.refused(f"{command} {options}")


def test_a_checkpoint_is_not_read_for_a_file_that_cannot_be_written(cli: Cli, here: Path) -> None:
    message = "-o nowhere/x.pt: cannot write: expected a file in a folder that exists"
    assert message in cli.refused("export gone -o nowhere/x.pt")


@pytest.mark.parametrize("command", FAILING[:3])
def test_the_look_of_a_picture_needs_one(command: str, cli: Cli, here: Path) -> None:
    message = "--column one without a picture: expected -o with .png or .svg or .pdf, too"
    assert message in cli.refused(f"{command} --column one -o x.html")


@pytest.fixture
def inputs(here: Path) -> Path:
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    Path("own.json").write_text(schedule.to_json())
    Path("link.json").symlink_to("own.json")
    step = simulate(schedule, Costs())
    write_run("gpt", step, step)
    shutil.copytree("runs/gpt", "traces", ignore=shutil.ignore_patterns("manifest.json"))  # as a training loop's tracer
    nodes = [Node(name=n, forward_seconds=1.0, backward_seconds=2.0, activation_bytes=8.0) for n in "abcd"]
    Path("profile.json").write_text(Profile(nodes=nodes, microbatch_size=1).to_json())
    Path("cluster.json").write_text('{"levels": []}')
    Path("runs.csv").write_text("P,microbatch,M,seconds\n2,1,4,0.3\n")
    return here


@pytest.mark.thorough(but=["plan --calibrate runs.csv --profile profile.json --ranks 2 --out runs.csv-runs.csv"])
@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("schedule own.json -o own.json", "own.json"),
        ("schedule own.json -o link.json", "own.json"),
        ("timeline own.json -o ./own.json", "own.json"),
        ("compare gpt own.json -o own.json", "own.json"),
        ("timeline gpt -o runs/gpt/timeline.json", "runs/gpt/timeline.json"),
        ("compare runs/gpt own.json -o runs/gpt/manifest.json", "runs/gpt/manifest.json"),
        ("schedule own.json -o runs/gpt/timeline.json", "runs/gpt/timeline.json"),
        ("timeline traces -o traces/timeline.json", "traces/timeline.json"),
        ("plan --profile profile.json --ranks 2 --batch 4 --out profile.json", "profile.json"),
        ("plan --profile profile.json --cluster cluster.json --batch 4 --out cluster.json", "cluster.json"),
        ("plan --calibrate runs.csv --profile profile.json --ranks 2 --out runs.csv", "runs.csv"),
        ("profile --from-json profile.json --out profile.json", "profile.json"),
        ("profile --links --profiles profile.json --out profile.json", "profile.json"),
    ],
)
def test_no_input_is_overwritten(line: str, path: str, cli: Cli, inputs: Path) -> None:
    before = Path(path).read_bytes()
    assert "expected another" in cli.refused(line)
    assert Path(path).read_bytes() == before


def test_what_was_drawn_is_drawn_again(inputs: Path, cli: Cli) -> None:
    for name in ("own.html", "trace.json", "runs/gpt/mine.json", "runs/gpt/timeline.perfetto.json"):
        for _ in range(2):
            cli.text("timeline gpt -o", name)


COLUMNS = 80


def too_long(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line.rstrip()) > COLUMNS]


@pytest.fixture
def files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    figures = {"forward_seconds": 0.0123, "backward_seconds": 0.0345, "update_seconds": 0.00123}
    sizes = {"parameter_bytes": 123456789.0, "stash_bytes": 2e7, "activation_bytes": 1e6, "workspace_bytes": 4e6}
    nodes = [Node(name=f"model.layers.{i}", spread=0.01 + i / 1000, **figures, **sizes) for i in range(12)]
    profile = Profile(nodes=nodes, step_seconds=0.6, step_spread=0.012, action_seconds=5e-5, around_seconds=1e-3)
    Path("profile.json").write_text(profile.to_json())
    cluster = Cluster.parse("2x4:nvlink=300GB/s,net=12GB/s:80GB")
    Path("cluster.json").write_text(cluster.to_json())
    Path("plan.json").write_text(plan(profile, cluster, global_batch=64).to_json())


@pytest.mark.thorough
@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    "words",
    [
        "--help",
        *(f"{name} --help" for name in COMMANDS),
        "profile --from-json profile.json",
        "plan --profile profile.json --cluster cluster.json --batch 64",
        "plan --transformer layers=24,hidden=1024,heads=16,vocabulary=50000,length=1024 --ranks 8 --batch 64",
        "simulate zb-h1 --ranks 4 --microbatches 8",
        "simulate 2bw --ranks 4 --microbatches 8",
        "simulate interleaved --ranks 4 --microbatches 8 --spread 0.1",
        "simulate auto --ranks 3 --microbatches 4",
        "compare 1f1b interleaved --ranks 4 --microbatches 8",
        "train --dry-run --ranks 2 --layers 2 --width 32 --heads 2 --length 16",
        "experiment list",
    ],
)
def test_lines_fit(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):  # of --help
        main(words.split())
    told = capsys.readouterr()
    assert told.out.strip()
    assert too_long(told.out + told.err) == []


def test_a_word_that_is_longer_stays_whole() -> None:
    path = "/a/" + "long/" * 30
    assert wrapped(f"runs: {path}") == f"runs:\n  {path}"
    assert wrapped("short") == "short"
    assert wrapped("") == ""
