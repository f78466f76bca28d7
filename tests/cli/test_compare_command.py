"""`stagewright compare`: what it tells of two runs, plans or schedules, and how mistakes are answered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import Cli
from support.inside import (
    CostOptions,
    Request,
    compare_exhibits,
    comparison_table,
    read_exhibits,
)
from support.run_folder import write_run

from stagewright.partition import Cluster, Node, Profile, plan
from stagewright.schedules import Costs, Op, RankTrace, StageBytes, StepSamples, Timeline, build, simulate
from stagewright.viz import Exhibit, MeasuredStep


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
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    fast = timeline(measured=True)
    write_run("fast", timeline(), fast, layers=4, schedule="1f1b")
    write_run("slow", timeline(), slowed(fast, 1), layers=8, schedule="1f1b")
    return tmp_path


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


def test_the_table_reads_the_same(runs: Path, cli: Cli) -> None:
    lines = cli.text("compare fast slow").splitlines()
    assert lines[0].startswith("A  fast (measured")
    assert lines[1].startswith("B  slow (measured")
    text = "\n".join(lines)
    assert "most of all for compute (+" in text
    assert "  rank 1 takes 2.00 times as long" in text
    assert "  --layers  4  8" in text
    assert not any(line != line.rstrip() for line in lines)


def test_a_run_alone_is_compared_with_its_prediction(runs: Path, cli: Cli) -> None:
    found = cli.json("compare slow")
    assert (found["before"]["caption"], found["after"]["caption"][:8]) == ("simulated", "measured")
    assert found["configuration"] == {}
    assert found["stragglers"][0]["name"] == "rank 1"


def test_plans_say_their_cut_and_memory(runs: Path, cli: Cli) -> None:
    nodes = tuple(
        Node(name=n, forward_seconds=1.0, backward_seconds=2.0, activation_bytes=8.0, parameter_bytes=100.0)
        for n in "abcd"
    )
    profile = Profile(nodes=nodes, microbatch_size=1)
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


@pytest.mark.thorough(but=["words0-3 inputs: expected two to compare, or a run alone"])
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


@pytest.mark.thorough(but=["seconds0-chimera"])
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
