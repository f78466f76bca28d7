"""`stagewright schedule auto`: what it prints, in all its forms, and what it refuses."""

import io
import json
import re
from pathlib import Path

import pytest
from support.commands import Cli
from support.inside import CliProgressProgress, show_progress
from support.inside import SearchProgress as Progress

from stagewright.schedules import Schedule, check

SMALL = ["schedule", "auto", "--ranks", "4", "--microbatches", "8", "--seconds", "2"]
COSTS = ["--forward", "10", "--input-grad", "11", "--weight-grad", "7", "--memory", "4", "--objective", "span"]


def test_for_people_and_as_one_json_object(cli: Cli) -> None:
    """The grid, the figures, the bound and when each improvement was found; progress stays off standard output."""
    out = cli.text(*SMALL, *COSTS)
    assert out.startswith("rank 0 | F0 F1 F2 F3 ")
    assert "checked: complete, in an order that ends" in out
    assert "optimal: it equals the lower bound" in out
    assert "least span under this memory limit, whatever the order: 266" in out
    assert "       after     orders          span       gap  found by" in out
    assert "266 s, at most 0.00% above the best possible" in cli.told
    answer = cli.json(*SMALL, *COSTS)
    assert set(answer) == {"schedule", "figures", "search", "written"}
    assert answer["search"]["value"] == answer["search"]["lower_bound"] == 266
    assert answer["search"]["gap"] == 0
    assert answer["search"]["stopped"] == "optimal"
    assert answer["search"]["history"][-1]["value"] == 266
    assert answer["figures"]["peak_activations"] == [4, 4, 4, 4]
    check(Schedule.from_json(json.dumps(answer["schedule"])))


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["csv", "json"])
def test_a_file_that_reads_again(form: str, cli: Cli, tmp_path: Path) -> None:
    picture = tmp_path / "auto.png"
    text = cli.text(*SMALL, "--placement v --microbatches 6 --format", form, "-o", str(picture))
    schedule = Schedule.from_csv(text) if form == "csv" else Schedule.from_json(text)
    assert schedule.placement == ((0, 7), (1, 6), (2, 5), (3, 4))
    check(schedule)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_any_placement(cli: Cli) -> None:
    """Costs of the plain stage; the figures are those of the chunks that won, and the others stand beside them."""
    argv = ["schedule", "auto", "--ranks", "2", "--microbatches", "4", "--placement", "any", "--seconds", "60"]
    answer = cli.json(*argv, "--forward 2 --input-grad 2 --weight-grad 2")
    tried = {each["placement"]: each for each in answer["search"]["placements"]}
    assert set(tried) == {"plain", "cyclic", "v"}
    assert answer["figures"]["makespan"] == answer["search"]["value"] == 25
    assert tried["plain"]["lower_bound"] == 26
    assert "placements: " in cli.text(*argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--memory", "0.5"], "memory_limit=0.5 on rank 0: no schedule can meet it.* expected at least 1"),
        (["--chunks", "2"], "--chunks 2 with auto: expected --placement cyclic, v or any"),
        (["--warmup", "eager", "--slices", "2"], "--warmup, --slices with auto: expected sizes, costs"),
        (["--memory", "4", "4"], "memory_limit=.* expected a finite number of at least 0, or 4, one per rank"),
        (["--json", "--format", "csv"], "--json with --format csv: expected one of the two"),
    ],
)
def test_refused(argv: list[str], message: str, cli: Cli) -> None:
    assert re.search(message, cli.refused(*SMALL, *argv))


def test_sizes_are_needed_and_options_of_the_search_are_its_own(cli: Cli) -> None:
    assert "auto needs --ranks and --microbatches" in cli.refused("schedule auto --ranks 4")
    assert "--objective, --seed with 1f1b: expected `stagewright schedule auto`" in cli.refused(
        "schedule 1f1b --ranks 2 --microbatches 4 --objective span --seed 0"
    )


def test_json_of_a_named_schedule(cli: Cli) -> None:
    answer = cli.json("schedule 1f1b --ranks 2 --microbatches 4")
    assert set(answer) == {"schedule", "figures", "written"}
    assert answer["figures"]["makespan"] == 15


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_and_lines_elsewhere() -> None:
    better = Progress(seconds=0.5, evaluations=3, value=27.0, gap=0.0125, source="1f1b")
    for stream, wanted in (
        (Terminal(), "━"),
        (io.StringIO(), "500 ms: 27.0 s, at most 1.25% above the best possible (1f1b)\n"),
    ):
        with CliProgressProgress(stream=stream, seconds=2.0) as progress:
            show_progress(progress, better)
            show_progress(progress, better)  # the second one within a second is not shown
        assert wanted in stream.getvalue()
        if not stream.isatty():
            assert stream.getvalue() == wanted
