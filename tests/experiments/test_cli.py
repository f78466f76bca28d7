"""The command line: what is printed, for people and for programs, and how mistakes are answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stagewright.experiments.cli import COMMANDS, main
from stagewright.schedules import Schedule


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("stagewright: error: ")
    assert "Traceback" not in captured.err
    return captured.err


def test_the_help_has_a_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, "--help")
    assert text == answer(capsys)
    for name, command in COMMANDS.items():
        assert f"  {name:<8}  {command.summary}\n" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_help_and_refuses_an_unknown_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: stagewright {name}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main([name, "--no-such-option"])
    assert stop.value.code == 2


def test_an_unknown_command_is_answered_with_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    text = mistake(capsys, "simulte")
    assert "unknown command 'simulte'; did you mean simulate" in text
    assert all(name in text for name in COMMANDS)


def test_a_schedule_is_printed_as_a_grid(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "schedule", "1f1b", "--ranks", "2", "--microbatches", "3") == (
        "rank 0 | F0 F1 .  B0 F2 B1 .  B2\n"
        "rank 1 | .  F0 B0 F1 B1 F2 B2 .\n"
    )  # fmt: skip


def test_a_schedule_is_exported_and_read_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("schedule", "interleaved", "--ranks", "2", "--microbatches", "4", "--chunks", "3")
    table = answer(capsys, *words, "--format", "csv")
    whole = Schedule.from_json(answer(capsys, *words, "--format", "json"))
    assert Schedule.from_csv(table).programs == whole.programs
    (tmp_path / "mine.csv").write_text(table)
    built = simulated(capsys, "interleaved", "--ranks", "2", "--microbatches", "4", "--chunks", "3")
    read = simulated(capsys, "--csv", str(tmp_path / "mine.csv"))
    assert {**read, "schedule": "interleaved"} == built


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    found = json.loads(answer(capsys, "simulate", *words, "--json"))
    assert isinstance(found, dict)
    return found


def test_a_simulation_answers_with_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(
        capsys,
        *("interleaved", "--ranks", "4", "--microbatches", "8", "--chunks", "2"),
        *("--forward", "1", "--backward", "2"),
    )
    expected = {
        "makespan": 57.0,  # (M*V + P - 1) * (F + B)
        "makespan_bubble": 1 - 48 / 57,
        "bubble": 1 - 48 / 57,
        "ideal_makespan": 48.0,
        "lower_bound": 57.0,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert found["schedule"] == "interleaved"
    assert found["peak_activations"] == [11, 9, 7, 5]  # (V-1)P + 2(P-1-r) + 1
    assert "span_bubble" in found


def test_latency_and_costs_by_stage_reach_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("gpipe", "--ranks", "2", "--microbatches", "1")
    assert simulated(capsys, *words, "--forward", "1", "2", "--backward", "3", "4")["makespan"] == 10.0
    assert simulated(capsys, *words, "--latency", "0.25")["makespan"] == 6.5


def test_the_table_for_people_names_bubbles_and_causes(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, "simulate", "1f1b", "--ranks", "2", "--microbatches", "4")
    assert "1f1b: 2 ranks, 1 chunks a rank, 4 microbatches (simulated)" in text
    for words in ("makespan bubble", "span bubble", "lower bound", "ideal makespan", "activations"):
        assert words in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("schedule", "1f2b", "--ranks", "2", "--microbatches", "3"), "did you mean '1f1b'?"),
        (("schedule", "1f1b", "--ranks", "0", "--microbatches", "3"), "at least 1"),
        (("schedule", "1f1b", "--ranks", "2", "--microbatches", "3", "--chunks", "2"), "interleave"),
        (("simulate", "1f1b", "--ranks", "2"), "--microbatches"),
        (("simulate", "1f1b", "--ranks", "2", "--microbatches", "3", "--forward", "-1"), "forward=-1.0"),
        (
            ("simulate", "1f1b", "--ranks", "2", "--microbatches", "3", "--forward", "1", "1", "1"),
            "3 numbers",
        ),
        (("simulate", "1f1b", "--ranks", "2", "--microbatches", "3", "--input-grad", "1"), "both or neither"),
        (("simulate", "--csv", "nowhere.csv"), "cannot read the schedule 'nowhere.csv'"),
        (("timeline", "nowhere"), "no run folder nowhere"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in mistake(capsys, *words)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("0F0,0B0\n1F0,1Q0\n", "row 2, column 2: cannot read the action '1Q0'"),
        ("0F0,0B0\n1F0\n", "missing: 1B0"),
        ("0B0,0F0\n1F0,1B0\n", "deadlock"),
    ],
)
def test_a_faulty_table_is_refused_with_its_name_and_place(
    table: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(table)
    assert message in mistake(capsys, "simulate", "--csv", str(path))


def test_a_table_and_the_options_must_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n")
    text = mistake(capsys, "simulate", "--csv", str(path), "--ranks", "3")
    assert "--ranks 3 but" in text


@pytest.mark.parametrize("command", ["schedule", "simulate"])
def test_the_planning_commands_load_neither_torch_nor_scipy(command: str) -> None:
    program = (
        "import sys; from stagewright.experiments.cli import main\n"
        f"main([{command!r}, 'interleaved', '--ranks', '4', '--microbatches', '8'])\n"
        "print(sorted({'torch', 'scipy', 'networkx', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "[]\n"


@pytest.mark.slow
def test_the_planning_commands_answer_in_half_a_second() -> None:
    command = [sys.executable, "-m", "stagewright", "simulate", "interleaved"]
    command += ["--ranks", "4", "--microbatches", "8", "--chunks", "2", "--json"]
    times = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run(command, capture_output=True, timeout=60, check=True)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.5


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [
        sys.executable,
        "-m",
        "stagewright",
        "schedule",
        "gpipe",
        "--ranks",
        "64",
        "--microbatches",
        "64",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141
