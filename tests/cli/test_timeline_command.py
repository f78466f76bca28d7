"""`stagewright timeline` and `compare`: what they read, tell and write, and how mistakes are answered."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import Cli
from support.inside import CostOptions, Request, compare_exhibits, comparison_table, main, read_exhibits, shape_notes
from support.run_folder import write_run

from stagewright.partition import Cluster, Node, Profile, plan
from stagewright.schedules import Costs, Op, RankTrace, StageBytes, StepSamples, Timeline, build, simulate
from stagewright.viz import Exhibit, MeasuredStep, write_perfetto

SIZES = CostOptions(ranks=2, microbatches=4, forward=(1.0,), latency=0.25)


def step(*, num_ranks: int = 2, measured: bool = False, latency: float = 0.25) -> Timeline:
    schedule = build("1f1b", num_ranks=num_ranks, num_microbatches=4)
    return replace(simulate(schedule, Costs(latency=latency)), measured=measured)


@pytest.fixture
def files(here: Path) -> Path:
    """One of each kind, in the current folder."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    Path("table.txt").write_text(schedule.to_csv())
    Path("schedule.json").write_text(schedule.to_json())
    Path("simulated.json").write_text(step().to_json())
    Path("measured.json").write_text(step(measured=True).to_json())
    write_run("gpt", step(), step(measured=True, latency=0.5))
    nodes = tuple(Node(name=n, forward_seconds=1.0, backward_seconds=2.0, activation_bytes=8.0) for n in "abcd")
    found = plan(Profile(nodes=nodes, microbatch_size=1), Cluster.parse("2:net=1GB/s"), global_batch=4, runnable=True)
    Path("plan.json").write_text(found.to_json())
    return here


@pytest.mark.parametrize("source", ["table.txt", "schedule.json", "1f1b"])
def test_schedules_are_simulated_with_the_options(files: Path, source: str) -> None:
    sizes = SIZES if source == "1f1b" else replace(SIZES, ranks=None, microbatches=None)
    exhibit = read_exhibits([source], sizes)[0]
    assert exhibit.costs == SIZES.costs()
    assert exhibit.simulated.ranks == step().ranks


@pytest.mark.parametrize("source", ["gpt", "runs/gpt", "runs/gpt/timeline.json"])
def test_a_run_by_name_folder_or_file(files: Path, source: str) -> None:
    exhibit = read_exhibits([source])[0]
    assert exhibit.name == "gpt"
    assert exhibit.simulated == step()
    assert [each.timeline for each in exhibit.measured] == [step(measured=True, latency=0.5)]


def test_timelines_as_they_are(files: Path) -> None:
    assert read_exhibits(["simulated.json"])[0] == Exhibit(name="simulated", simulated=step())
    assert read_exhibits(["measured.json"])[0].measured == (MeasuredStep(0, step(measured=True)),)
    both = Exhibit(name="own", simulated=step(), measured=(MeasuredStep(0, step(measured=True)),))
    write_perfetto([*both.timelines], "own.json")
    assert read_exhibits(["own.json"]) == [both]


@pytest.mark.thorough
def test_memory_is_drawn_below_where_it_is_known(files: Path, cli: Cli) -> None:
    cli.text("timeline plan.json 1f1b --ranks 2 --microbatches 4 --memory -o a.svg")
    drawn = Path("a.svg").read_text()
    assert ">plan, simulated, memory:  at most " in drawn
    assert ">1f1b, simulated, memory:" not in drawn
    assert "note: 1f1b: no memory is drawn: nothing says what its stages hold" in cli.told


def test_a_run_that_is_called_like_a_schedule(files: Path) -> None:
    """Its folder stands first, unless sizes say that the schedule is meant."""
    Path("runs/gpt").rename("runs/1f1b")
    assert read_exhibits(["1f1b"])[0].measured
    assert not read_exhibits(["1f1b"], SIZES)[0].measured


def test_exhibits_of_one_name_are_told_apart(files: Path) -> None:
    names = [each.name for each in read_exhibits(["gpt", "simulated.json", "runs/gpt", "gpt"])]
    assert names == ["gpt", "simulated", "runs/gpt", "gpt (4)"]


@pytest.mark.thorough
def test_the_kind_of_output_follows_the_end_of_its_name(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ["a.png", "b.svg", "c.json", "d.html", "e.pdf"]
    words = [word for name in outputs for word in ("-o", name)]
    assert main(["timeline", "gpt", "plan.json", "1f1b", "--ranks", "2", "--microbatches", "2", *words]) == 0
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    assert ">gpt, simulated:" in Path("b.svg").read_text()
    assert b"/FontFile2" in Path("e.pdf").read_bytes()
    names = json.loads(Path("c.json").read_text())["otherData"]
    assert list(names) == ["gpt simulated", "gpt measured, step 3", "plan simulated", "1f1b simulated"]
    assert "<html" in Path("d.html").read_text()
    assert capsys.readouterr().out.startswith("gpt, simulated: ")


@pytest.mark.thorough
def test_a_run_alone_is_drawn_beside_itself(files: Path, cli: Cli) -> None:
    answer = cli.json("timeline gpt")
    assert answer["written"] == [f"runs/gpt/timeline{end}" for end in (".png", ".perfetto.json", ".html")]
    assert all(Path(path).stat().st_size for path in answer["written"])
    assert answer["exhibits"][0]["measured"]["makespan"] == step(latency=0.5).makespan


def test_other_inputs_are_drawn_here(files: Path) -> None:
    assert main(["timeline", "gpt", "plan.json"]) == 0
    assert {path.name for path in files.glob("timeline*")} == {"timeline.html"}


KINETO = Path(__file__).parents[1] / "data" / "kineto"


def test_trace_files_of_ranks_are_one_run(files: Path) -> None:
    """Next to each other, or in a folder; of two runs, two exhibits."""
    words = [str(path) for name in ("gpipe", "interleaved") for path in sorted(KINETO.glob(f"{name}.rank*"))]
    first, second, plan = read_exhibits([*words, "plan.json"])
    assert (first.name, second.name, plan.name) == ("gpipe", "interleaved", "plan")
    assert [len(each.timelines[0][1].ranks) for each in (first, second)] == [2, 2]
    assert second.notes == ()
    folder = files / "traces"
    folder.mkdir()
    for path in words[2:]:
        (folder / Path(path).name).write_bytes(Path(path).read_bytes())
    assert read_exhibits(["traces"])[0].measured == tuple(
        step._replace(timeline=replace(step.timeline, schedule=replace(step.timeline.schedule, name="traces")))
        for step in second.measured
    )
    one = read_exhibits([words[2]])[0]
    assert one.measured[0].timeline.missing == (1,)
    assert one.notes[0] == "interleaved: rank 1 of 2 left no trace: its row is empty"


def test_shapes_that_differ_are_said() -> None:
    plan_of_4 = Exhibit(name="x", simulated=step(num_ranks=4), measured=(MeasuredStep(3, step(measured=True)),))
    assert shape_notes([plan_of_4]) == [
        "x: simulated has 4 ranks, 4 stages, 4 microbatches and measured, step 3 has 2 ranks, 2 stages, 4 "
        "microbatches: both are drawn, and are not to be compared row by row"
    ]
    assert shape_notes([Exhibit(name="x", simulated=step(), measured=plan_of_4.measured)]) == []


@pytest.mark.thorough(but=["words0-nothing to show: expected a run (folder or name)"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to show: expected a run (folder or name)"),
        (("gpipee",), "did you mean gpipe"),
        (("gtp",), "did you mean gpt"),
        (("1f1b",), "1f1b needs --ranks and --microbatches: expected `stagewright timeline 1f1b"),
        (("empty",), "nothing to show in empty: no simulation: empty has no timeline.json"),
        (("cut.json",), "cut.json, line 1, column 101: "),
        (("profile.json",), "profile.json: an object with nodes, version: expected a run"),
        (("binary.bin",), "binary.bin: no UTF-8 text at byte 0"),
        (("table.txt", "--ranks", "3"), "--ranks 3 but table.txt has 2"),
        (("bad.csv",), "bad.csv: row 1, column 2: cannot read the action '0X0'"),
        (("gpt", "--forward", "2", "--latency", "1"), "--forward, --latency with gpt: expected options for a sched"),
        (("trace.json", "--latency", "1"), "--latency with trace.json: expected options for a schedule"),
        (("plan.json", "--microbatches", "9"), "--microbatches with plan.json"),
        (("own.json",), "own.json: stagewrightTimelines: KeyError('name'): expected what write_perfetto writes"),
    ],
)
def test_mistakes(files: Path, cli: Cli, words: tuple[str, ...], message: str) -> None:
    Path("empty").mkdir()
    Path("cut.json").write_text(step().to_json()[:100])
    Path("profile.json").write_text('{"version": 1, "nodes": []}')
    Path("binary.bin").write_bytes(b"\xff\xfe")
    Path("trace.json").write_text('[{"ph": "X", "name": "0F0", "ts": 1, "dur": 2}]')
    Path("own.json").write_text('{"traceEvents": [], "stagewrightTimelines": [{}]}')
    Path("bad.csv").write_text("0F0,0X0\n")
    assert message in cli.refused("timeline", *words)


def test_a_trace_of_another_tool_is_not_written_over(files: Path, cli: Cli) -> None:
    """Its folder is what is read: the file was lost."""
    Path("traces").mkdir()
    theirs = Path("traces/rank0.pt.trace.json")
    theirs.write_text('{"traceEvents": [{"ph": "X", "name": "PP:0F0", "ts": 1, "dur": 2}]}')
    before = theirs.read_bytes()
    for words in (("traces",), ("measured.json",)):
        assert "a trace of another tool, such as torch.profiler: expected another one, such as traces/" in (
            cli.refused("timeline", *words, "-o", str(theirs))
        )
    assert theirs.read_bytes() == before
    own = ("timeline", "measured.json", "-o", "traces/own.json")
    assert [main([*own]), main([*own])] == [0, 0]


@pytest.mark.thorough
def test_terminal_prints_a_grid_and_writes_only_what_is_asked_for(files: Path, cli: Cli) -> None:
    before = set(files.iterdir())
    printed = cli.text("timeline runs/gpt 1f1b --ranks 3 --microbatches 4 --terminal")
    assert printed.count("rank 0 |F0") == 3  # simulated, measured, and the schedule
    assert "\x1b" not in printed
    assert set(files.iterdir()) == before
    cli.text("timeline measured.json --terminal -o a.svg")
    assert Path("a.svg").is_file()
    assert "--terminal with --json: expected one of them" in cli.refused("timeline measured.json --terminal --json")


def timeline(name: str = "1f1b", *, latency: float = 0.25, update: float = 0.0, measured: bool = False) -> Timeline:
    schedule = build(name, num_ranks=2, num_microbatches=8)
    return replace(simulate(schedule, Costs(latency=latency, update=update)), measured=measured)


def slowed(timeline: Timeline, rank: int) -> Timeline:
    """A rank that takes twice as long for each action, while others do not wait for it (rows are as they are)."""
    now, spans = 0.0, []
    for span in timeline.ranks[rank].compute:
        now = max(now, span.start)
        spans.append(span._replace(start=now, end=now + 2 * (span.end - span.start)))
        now = spans[-1].end
    ranks = tuple(RankTrace(compute=tuple(spans)) if r == rank else t for r, t in enumerate(timeline.ranks))
    return replace(timeline, ranks=ranks, measured=True)


@pytest.fixture
def runs(here: Path) -> Path:
    fast = timeline(measured=True)
    write_run("fast", timeline(), fast, layers=4, schedule="1f1b")
    write_run("slow", timeline(), slowed(fast, 1), layers=8, schedule="1f1b")
    return here


def test_two_runs(runs: Path, cli: Cli) -> None:
    found = cli.json("compare fast runs/slow")
    assert (found["before"]["name"], found["after"]["name"]) == ("fast", "slow")
    assert found["before"]["caption"].startswith("measured, step")
    assert found["step_seconds"]["change"] == found["makespan"]["after"] - found["makespan"]["before"] > 0
    assert sum(each["change"] for each in found["causes"]) == pytest.approx(found["makespan"]["change"])
    assert sum(each["change"] for each in found["critical_path"]) == pytest.approx(found["makespan"]["change"])
    assert found["largest_cause"] == "compute"
    assert [each["name"] for each in found["stragglers"]] == ["rank 1"]
    assert found["stragglers"][0]["ratio"] == pytest.approx(2.0)
    assert found["configuration"] == {"--layers": ["4", "8"]}
    assert found["departures"][0]["rank"] == 1
    lines = cli.text("compare fast slow").splitlines()
    assert [line[:18] for line in lines[:2]] == ["A  fast (measured,", "B  slow (measured,"]
    for words in ("most of all for compute (+", "  rank 1 takes 2.00 times as long", "  --layers  4  8"):
        assert words in "\n".join(lines)
    assert not any(line != line.rstrip() for line in lines)


def test_a_run_alone_is_compared_with_its_prediction(runs: Path, cli: Cli) -> None:
    found = cli.json("compare slow")
    assert (found["before"]["caption"], found["after"]["caption"][:8]) == ("simulated", "measured")
    assert found["configuration"] == {}
    assert found["stragglers"][0]["name"] == "rank 1"


def test_plans_say_their_cut_and_memory(runs: Path, cli: Cli) -> None:
    costs = {"forward_seconds": 1.0, "backward_seconds": 2.0, "activation_bytes": 8.0, "parameter_bytes": 100.0}
    profile = Profile(nodes=[Node(name=name, **costs) for name in "abcd"], microbatch_size=1)
    for size in (2, 4):
        cluster = Cluster.parse(f"{size}:net=1GB/s")
        found = plan(profile, cluster, global_batch=8, pipeline_sizes=(size,), schedules=("1f1b",))
        Path(f"plan{size}.json").write_text(found.to_json())
    told = cli.json("compare plan2.json plan4.json -o both.html")
    assert told["configuration"]["cut"] == ["a .. b | c .. d", "a | b | c | d"]
    assert told["ranks"] == told["departures"] == []
    assert any("2 ranks before and 4 after" in note for note in told["notes"])
    assert max(told["before"]["peak_bytes"]) > max(told["after"]["peak_bytes"]) > 0
    assert told["written"] == ["both.html"]
    assert Path("both.html").stat().st_size > 10_000
    assert "memory, fullest rank" in cli.text("compare plan2.json plan4.json")


def test_an_order_that_holds_more_is_not_just_faster(cli: Cli) -> None:
    """Stages of another size count as parts of the same model."""
    told = cli.text("compare 1f1b zb-h2 --ranks 4 --microbatches 8")
    assert "activations held               1.00         1.75        +0.75    +75.0%" in told
    assert "6.00 s shorter, most of all for late peer (-4.50 s)\n  the fullest rank holds 75% more activations" in told
    found = cli.json("compare gpipe interleaved --ranks 4 --microbatches 8")
    assert [found[side]["activations_held"] for side in ("before", "after")] == [2.0, 11 / 8]


def test_a_prediction_has_one_name_for_each_of_its_figures() -> None:
    """Drawn and compared is the simulated step; predicted is the median of steps that vary."""
    samples = StepSamples(seconds=(40.0, 41.0, 42.0), bubbles=(0.5, 0.5, 0.5))
    varied, other = (
        Exhibit(name="run", simulated=timeline(), sampled=samples),
        Exhibit(name="other", simulated=timeline()),
    )
    found = compare_exhibits([varied, other], ["run", "other"])
    assert (found.before.caption, found.after.caption) == ("simulated", "simulated")
    rows = {line[:24].strip(): line.split() for line in comparison_table(found).splitlines()}
    assert rows["step"][1] != rows["predicted"][1] == "41.0"


def test_a_measured_run_beside_a_schedule(runs: Path, cli: Cli) -> None:
    """Only what both have is compared: here the prediction."""
    found = cli.json("compare fast zb-h1 --ranks 2 --microbatches 8")
    assert [found[side]["caption"] for side in ("before", "after")] == ["simulated", "simulated"]
    assert any("only fast was measured" in note for note in found["notes"])
    assert found["configuration"]["schedule"] == ["1f1b", "zb-h1"]
    assert found["configuration"]["--layers"] == ["4", None]


def test_the_step_in_the_middle_speaks_for_a_run() -> None:
    steps = tuple(
        MeasuredStep(number, timeline(latency=latency, measured=True))
        for number, latency in ((3, 5.0), (23, 0.25), (43, 0.5))
    )
    run = Exhibit(name="run", simulated=timeline(), measured=steps, memory=(StageBytes(weights=5),) * 2)
    found = compare_exhibits([run], ["run"])
    assert found.after.caption == "measured, step 43, the median of 3"
    assert found.after.peaks == (5.0, 5.0)
    watched = compare_exhibits([replace(run, measured_peak=(7.0, 9.0), predicted_peak=(6.0, 6.0))], ["run"])
    assert (watched.before.peaks, watched.after.peaks) == ((6.0, 6.0), (7.0, 9.0))
    assert (watched.before.peaks_are, watched.after.peaks_are) == ("predicted by the plan", "measured")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fast", "slow", "fast"], "3 inputs: expected two to compare, or a run alone"),
        (["fast", "gone"], "gone: no such file, run folder or schedule"),
        (["1f1b", "--ranks", "2", "--microbatches", "4"], "1f1b has no measurement to compare with: expected a second"),
        (["fast", "broken"], "broken/manifest.json is unreadable"),
        (["fast", "slow", "--ranks", "3"], "--ranks with fast, slow"),
    ],
)
def test_mistakes_are_named(runs: Path, cli: Cli, words: list[str], message: str) -> None:
    write_run("broken", timeline(), timeline(measured=True))
    Path("runs/broken/manifest.json").write_text("{")
    assert message in cli.refused("compare", *words)


@pytest.mark.parametrize("name", ["interleaved", "dualpipe-v", "chimera", "zb-v", "hanayo"])
@pytest.mark.parametrize("seconds", [(0.5,), (0.5, 1.0, 0.25, 2.0)])
def test_schedules_that_are_compared_do_equal_work(name: str, seconds: tuple[float, ...]) -> None:
    """Costs are of the model in four stages, whatever the number of stages of either; one alone keeps its own."""
    exhibits = read_exhibits(["1f1b", name], CostOptions(ranks=4, microbatches=8, forward=seconds))
    each = seconds * (4 // len(seconds))
    for exhibit in exhibits:
        assert sum(rank.busy for rank in exhibit.simulated.ranks) == pytest.approx(8 * 3 * sum(each))
    last = exhibits[1].simulated
    V = last.schedule.num_stages // 4
    spans = [span for rank in last.ranks for span in rank.compute if span.what.op is Op.F]
    assert [span.end - span.start for span in spans] == pytest.approx([each[s.what.stage // V] / V for s in spans])
    assert (exhibits[1].notes != ()) == (V > 1)
    alone = read_exhibits([name], CostOptions(ranks=4, microbatches=8))[0].costs
    assert alone == Costs()


def test_stages_that_no_number_divides() -> None:
    """Four stages of 1, 2, 3, 4 as six: each has two thirds of one, or what it shares."""
    costs = Request(num_ranks=4, num_microbatches=1, costs=Costs(forward=[1.0, 2.0, 3.0, 4.0])).pieces()
    assert costs.equal_parts(6).costs.forward == pytest.approx((2 / 3, 1 / 3 + 2 / 3, 4 / 3, 2, 1 + 4 / 3, 8 / 3))
