"""The command line: what is printed, for people and for programs, and how mistakes are answered."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import Cli
from support.inside import COMMANDS, RunFile, duration, main, steps_that_follow

import stagewright
from stagewright.schedules import FAMILIES, Costs, Op, Schedule, Spread, build, simulate, simulate_spread, synthesize


def exit_status(*words: str) -> object:
    """By return or, where the parser of options ends it, by SystemExit."""
    try:
        return main(words)
    except SystemExit as stop:
        return stop.code


def test_the_help_has_a_line_for_each_command(cli: Cli) -> None:
    text = cli.text("--help")
    assert (text, cli.told) == (cli.text(), "")
    for name, command in COMMANDS.items():
        assert f"  {name:<{max(map(len, COMMANDS))}}  {command.summary}\n" in text


@pytest.mark.thorough(but=["fleet"])
@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_help_and_refuses_an_unknown_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(name, "--help") == 0
    text = capsys.readouterr().out
    assert f"usage: stagewright {name}" in text
    assert "None" not in text  # the default that is meant stands in the text
    if name in ("schedule", "simulate", "train"):
        assert set(FAMILIES) <= set(re.split(r"[\s│,.;]+", text))
    assert exit_status(name, "--no-such-option") == 2


def test_an_unknown_command_is_answered_with_near_ones(cli: Cli) -> None:
    text = cli.refused("simulte")
    assert "unknown command 'simulte'; did you mean simulate" in text
    assert all(name in text for name in COMMANDS)


ROOT = Path(stagewright.__file__).parent
HINT = re.compile(r"stagewright (\w+)((?:[^`;.,()]|\.\w)*)")


def texts_of(path: Path) -> Iterator[str]:
    """Each text that code may print; "..." where a value stands."""
    tree = ast.parse(path.read_text())
    whole = [each for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for each in node.values]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(each.value if isinstance(each, ast.Constant) else "..." for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in whole:
            yield node.value


@pytest.mark.thorough
def test_each_command_that_a_text_names_exists_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    packages = ("cli", "comm", "experiments", "integrations", "partition", "pipe", "schedules", "viz")
    paths = [path for name in packages for path in (ROOT / name).rglob("*.py")]
    named = {found.groups() for path in paths for text in texts_of(path) for found in HINT.finditer(text)}
    hinted = {(command, rest) for command, rest in named if command in COMMANDS or "--" in rest}
    hinted -= {("COMMAND", " --help")}
    assert len(hinted) > 30
    for command, rest in hinted:
        help_of = ["experiment", "run"] if command == "experiment" else [command]
        help_of += ["--check", "run"] if "--check" in rest.split() else []
        assert exit_status(*help_of, "--help") == 0, (command, rest)
        known = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)) | {"--check"}
        assert set(re.findall(r"--[a-z][a-z-]*", rest)) <= known, (command, rest)


@pytest.mark.thorough(but=["schedule-zb-h1"])
@pytest.mark.parametrize("name", [*FAMILIES, "auto"])
@pytest.mark.parametrize("command", ["schedule", "simulate", "timeline", "compare", "compare gpipe"])
def test_what_an_error_says_to_type_works(name: str, command: str, here: Path, cli: Cli) -> None:
    hinted = re.findall(r"`stagewright ([^`]*)`", cli.refused(*command.split(), name))
    assert len(hinted) == 1
    assert main(hinted[0].split()) == 0


def test_a_search_is_simulated_drawn_and_compared(here: Path, cli: Cli) -> None:
    words = ["--ranks", "4", "--microbatches", "8"]
    best = synthesize(num_ranks=4, num_microbatches=8, costs=Costs()).value
    assert cli.json("simulate auto", *words)["makespan"] == best
    assert cli.json("timeline auto", *words)["exhibits"][0]["simulated"]["makespan"] == best
    found = cli.json("compare 1f1b auto", *words)["makespan"]
    assert (found["before"], found["after"]) == (33.0, best)
    assert max(cli.json("simulate auto", *words, "--memory 4")["peak_activations"]) == 4


def test_a_schedule_is_exported_and_read_again(cli: Cli, tmp_path: Path) -> None:
    words = ("schedule", "interleaved", "--ranks", "2", "--microbatches", "4", "--chunks", "3")
    table = cli.text(*words, "--format csv")
    whole = Schedule.from_json(cli.text(*words, "--format json"))
    assert Schedule.from_csv(table).programs == whole.programs
    (tmp_path / "mine.csv").write_text(table)
    built = cli.json("simulate interleaved --ranks 2 --microbatches 4 --chunks 3")
    read = cli.json("simulate --csv", str(tmp_path / "mine.csv"))
    assert {**read, "schedule": "interleaved"} == built


def test_a_simulation_with_durations_that_vary_has_a_range(
    cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["simulate", "1f1b", "--ranks", "2", "--microbatches", "4"]
    spread = Spread.of_half_ranges([0.1, 0.1])
    (tmp_path / "noise.json").write_text(spread.to_json())
    schedule, costs = build("1f1b", num_ranks=2, num_microbatches=4), Costs(forward=1.0)
    taken = simulate_spread(schedule, costs, spread)
    run = RunFile(schedule=schedule, simulated=simulate(schedule, costs), costs=costs, spread=spread, sampled=taken)
    run.write(tmp_path)
    for given in ("0.1", str(tmp_path / "noise.json"), str(tmp_path), str(tmp_path / "timeline.json")):
        answer = cli.json(*words, "--spread", given)
        assert (answer["predicted_seconds"], tuple(answer["predicted_range"])) == (taken.median, taken.range())
        assert answer["makespan"] == 15.0
    assert main([*words, "--spread", "0.1"]) == 0
    low, high = taken.range()
    median, low, high = map(duration, (taken.median, low, high))
    assert f"{median:>10}   median of steps that vary; 90%: {low} .. {high}" in capsys.readouterr().out
    assert "half ranges [-0.1, -0.1]: expected finite numbers of at least 0" in cli.refused(*words, "--spread -0.1")
    assert "--spread abc: expected a number such as 0.1, a Spread's JSON file, or a run" in cli.refused(
        *words, "--spread abc"
    )


def test_a_simulation_of_steps_that_follow_a_run(cli: Cli, tmp_path: Path) -> None:
    words = ["simulate", "1f1b", "--ranks", "2", "--microbatches", "4", "--following", "50"]
    spread = Spread(actions={}, steps=[{op: [[1.0 + 0.01 * n] * 4] * 2 for op in (Op.F, Op.B)} for n in range(20)])
    (tmp_path / "noise.json").write_text(spread.to_json())
    answer = cli.json(*words, "--spread", str(tmp_path / "noise.json"))
    schedule, costs = build("1f1b", num_ranks=2, num_microbatches=4), Costs(forward=1.0)
    steps = steps_that_follow(spread, schedule, 50)
    assert tuple(answer["predicted_range"]) == simulate_spread(schedule, costs, steps).range()
    for given, why in [
        ([], "--following 50: expected --spread and a run"),
        (["--spread", "0.1"], "--following 50: --spread 0.1 knows nothing of how steps differ"),
    ]:
        assert why in cli.refused(*words, *given)


def test_latency_and_costs_by_stage_reach_the_simulator(cli: Cli) -> None:
    words = ("gpipe", "--ranks", "2", "--microbatches", "1")
    assert cli.json("simulate", *words, "--forward 1 2 --backward 3 4")["makespan"] == 10.0
    assert cli.json("simulate", *words, "--latency 0.25")["makespan"] == 6.5
    replicas = ("1f1b", "--ranks", "3", "--microbatches", "2", "--replicas", "1", "2")
    assert cli.json("simulate", *replicas, "--reduce-grad 0 20")["makespan"] == 25.0  # behind 1B1, at 5


OPTIONS: list[tuple[tuple[str, ...], dict[str, object]]] = [
    (("--ranks", "4", "--microbatches", "4"), {}),
    (("--ranks", "4", "--microbatches", "4", "--batches", "5"), {"num_batches": 5}),
    (("--ranks", "3", "--microbatches", "4", "--replicas", "2", "1"), {"replicas": (2, 1)}),
]


@pytest.mark.thorough(but=["pipedream-words8-options8"])
@pytest.mark.parametrize(
    ("name", "words", "options"),
    [
        *((name, *case) for name in ("2bw", "pipedream") for case in OPTIONS),
        ("2bw", ("--ranks", "3", "--microbatches", "5", "--warmup", "eager"), {"warmup": "eager"}),
        ("2bw", ("--ranks", "3", "--microbatches", "5", "--warmup", "plain"), {"warmup": "plain"}),
        ("pipedream", ("--ranks", "2", "--microbatches", "4", "--update-every", "2"), {"update_every": 2}),
        ("pipedream", ("--ranks", "3", "--microbatches", "4", "--vertical-sync"), {"vertical_sync": True}),
    ],
)
def test_options_reach_the_builder(name: str, words: tuple[str, ...], options: dict[str, object], cli: Cli) -> None:
    """The same ones for both commands; JSON says everything, so that a file can be simulated, too."""
    sizes = {"num_ranks": int(words[1]), "num_microbatches": int(words[3])}
    expected = build(name, **sizes, **options)  # type: ignore[arg-type]
    assert Schedule.from_json(cli.text("schedule", name, *words, "--format json")) == expected
    assert (cli.text("schedule", name, *words), cli.told) == (f"{expected.grid()}\n", "")
    assert cli.json("simulate", name, *words)["num_batches"] == expected.num_batches


def test_a_simulated_flush_has_none(cli: Cli) -> None:
    found = cli.json("simulate 1f1b --ranks 2 --microbatches 4")
    assert (found["streams"], found["num_batches"]) == (False, 1)
    assert found["batch_seconds"] == found["makespan"]
    assert (found["peak_versions"], found["staleness"]) == ([1, 1], [0, 0])
    text = cli.text("simulate 1f1b --ranks 2 --microbatches 4")
    assert not any(words in text for words in ("versions", "staleness", "steady"))


def test_the_table_of_a_stream(cli: Cli) -> None:
    words = ("simulate", "2bw", "--ranks", "2", "--microbatches", "2")
    lines = cli.text(*words).splitlines()
    assert lines[0] == "2bw: 2 ranks, 1 chunk per rank, 2 microbatches a batch, 8 batches (simulated)"
    assert lines[4].split() == [
        "batch",
        "seconds",
        *["6.00", "s"],
        *["from", "batch", "to", "batch", "of", "the", "steady", "state"],
    ]
    assert lines[5].split() == ["bubble", "0.00%", "of", "the", "steady", "state"]
    assert "held  versions  staleness  largest idle cause" in lines[8]
    assert lines[9].split() == ["0", "48.0", "s", "3.00", "s", "2", "2", "1", "late", "peer", "(3.00", "s)"]
    assert "1 s is one forward of a stage" in lines[-1]
    assert "1 s is" not in cli.text(*words, "--forward 1")
    assert "of all: give more --batches for a steady state" in cli.text(*words, "--batches 2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("simulate", "--csv", "mine.csv", "--warmup", "plain"), "--warmup with mine.csv: expected the file alone"),
        (
            ("simulate", "--csv", "mine.csv", "--replicas", "1", "1", "--batches", "2"),
            "--replicas, --batches with mine.csv",
        ),
        (("schedule", "1f2b", "--ranks", "2", "--microbatches", "3"), "did you mean '1f1b'?"),
        (("simulate", "1f1b", "--ranks", "2"), "--microbatches"),
        (("simulate", "--csv", "nowhere.csv"), "schedule file 'nowhere.csv' cannot be read: "),
        (("simulate",), "expected a schedule's name or its file, once"),
        (("simulate", "1f1b", "--ranks", "two"), "--ranks two: expected a whole number, such as --ranks 4"),
        (("simulate", "1f1b", "--ranks=2.5"), "--ranks 2.5: expected a whole number, such as --ranks 4"),
        (("simulate", "1f1b", "--latency"), "--latency: expected a number, such as --latency 0.5"),
        (("simulate", "1f1b", "--csv", "mine.csv"), "expected a schedule's name or its file, once"),
        (("schedule", "mine.py:order"), "--schedule mine.py:order: there is no file mine.py"),
        (("schedule", "math:pi"), "--schedule math:pi: pi is a float: expected a function"),
        (("schedule", "os:getcwd"), "--schedule os:getcwd returned str: expected a Schedule"),
        (("timeline", "nowhere"), "nowhere: no such file, run folder or schedule: expected a run (folder or name), a"),
    ],
)
def test_mistakes_are_answered_in_one_line(words: tuple[str, ...], message: str, cli: Cli) -> None:
    assert message in cli.refused(*words)


@pytest.mark.thorough
def test_schedules_are_made_for_the_costs_and_memory_that_are_given(
    cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where none are given, the order is the family's own."""

    def made(*words: str) -> Schedule:
        main(["schedule", *words, "--ranks", "3", "--microbatches", "6", "--format", "json"])
        return Schedule.from_json(capsys.readouterr().out)

    sizes = {"num_ranks": 3, "num_microbatches": 6}
    costs = Costs(forward=10, input_grad=11, weight_grad=7, latency=1)
    words = ["--forward", "10", "--input-grad", "11", "--weight-grad", "7", "--latency", "1"]
    for name in ("zb-2p", "zb-v"):
        assert made(name) == build(name, **sizes)
        assert made(name, *words) == build(name, **sizes, costs=costs) != build(name, **sizes)
    assert made("zb-2p", "--memory", "4") == build("zb-2p", **sizes, memory_limit=4)
    assert made("gis", "--group-size", "2") == build("gis", **sizes, group_size=2)
    text = cli.refused("schedule zb-1p --ranks 3 --microbatches 6 --memory 0.5")
    assert "one microbatch alone is 1 stage activation on a rank; expected at least 1" in text


@pytest.mark.thorough
@pytest.mark.parametrize("words", ["simulate interleaved --chunks 2 --json", "schedule 2bw"])
def test_the_planning_commands_start_fast(words: str) -> None:
    """They load tyro and what it needs, no torch, scipy or matplotlib. 350 modules today, and a small one a family: a
    quarter of a second."""
    program = (
        "import sys; from stagewright.cli.main import main\n"
        f"main([*{words.split()}, '--ranks', '4', '--microbatches', '8'])\n"
        "outside = {name.split('.')[0] for name in sys.modules} - sys.stdlib_module_names - {'stagewright'}\n"
        "families = [name for name in sys.modules if name.startswith('stagewright.schedules.families.')]\n"
        "print(len(sys.modules) - len(families), *sorted(outside), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=400, check=True)
    number, *outside = done.stderr.split()
    installer = {name for name in outside if name.startswith(("__editable__", "_distutils_hack"))}
    assert set(outside) - installer <= {"tyro", "docstring_parser", "typeguard", "typing_extensions", "__main__"}
    assert int(number) < 360


@pytest.mark.thorough
@pytest.mark.parametrize("words", ["schedule gpipe --ranks 64 --microbatches 64", "--help"])
def test_a_reader_that_goes_away_is_no_error(words: str) -> None:
    command = [sys.executable, "-m", "stagewright", *words.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ))
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=400) == 141


ORDER = """
from stagewright.schedules import Schedule, build

def order(num_ranks=2, num_microbatches=3):
    return Schedule.from_csv(build("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches).to_csv())

def deadlock():
    return Schedule.from_csv("0B0,0F0\\n1F0,1B0\\n")

def few(action, so_far):
    return action.op != "F" or so_far.in_flight < 2
"""


@pytest.mark.thorough
def test_a_schedule_of_ones_own_is_checked_shown_simulated_and_drawn(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    expected = build("gpipe", num_ranks=2, num_microbatches=3)
    (tmp_path / "own_order.py").write_text(ORDER)
    (tmp_path / "mine.csv").write_text(expected.to_csv())
    (tmp_path / "mine.json").write_text(expected.to_json())
    for name in ("mine.csv", "mine.json", "own_order.py:order"):
        words = ("schedule", str(tmp_path / name), "--forward", "2", "-o", str(tmp_path / "drawn.png"))
        text = cli.text(*words)
        assert text.startswith(f"{expected.grid()}\n\nchecked: ")
        assert "makespan             24.0 s" in text  # (M + P - 1) (F + B), with B twice the F
        assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "drawn.png").unlink()
        found = cli.json("simulate", str(tmp_path / name), "--forward 2")
        assert (found["makespan"], found["num_microbatches"]) == (24.0, 3)
    found = cli.json("simulate", str(tmp_path / "own_order.py:order"), "--microbatches 5")
    assert found["num_microbatches"] == 5
    assert "--chunks 2 but" in cli.refused("schedule", str(tmp_path / "own_order.py:order"), "--chunks 2")
    text = cli.text("schedule", str(tmp_path / "own_order.py:few"), "--ranks 2 --microbatches 3")
    assert text.startswith(build("1f1b", num_ranks=2, num_microbatches=3).grid())
    drawn = tmp_path / "few.html"
    words = ("--ranks", "2", "--microbatches", "3", "-o", str(drawn))
    assert "few, simulated" in cli.text("timeline", str(tmp_path / "own_order.py:few"), *words)
    assert drawn.stat().st_size > 0
    assert "expected --ranks and --microbatches" in cli.refused("schedule", str(tmp_path / "own_order.py:few"))
    assert "own_order.py:deadlock: deadlock" in cli.refused("schedule", str(tmp_path / "own_order.py:deadlock"))


def test_names_that_a_terminal_would_carry_out_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = build("1f1b", num_ranks=2, num_microbatches=4)
    named = tmp_path / "a\x1b[2J.csv"
    named.write_text(table.to_csv())
    (tmp_path / "b\x1b[2J.csv").write_text("no action")
    (tmp_path / "inside.json").write_text(table.to_json().replace('"1f1b"', '"c\\u001b[2J"'))
    statuses = [main(["schedule", str(path)]) for path in sorted(tmp_path.iterdir())]
    said = capsys.readouterr()
    assert statuses == [0, 2, 2]
    assert "a\\x1b[2J: 2 ranks" in said.out
    assert "b\\x1b[2J.csv: row 1, column 1" in said.err
    assert r"name='c\x1b[2J': expected printable text in one line" in said.err
    assert "\x1b[2J" not in said.out + said.err
