"""The suite: parts of memory against the allocator, its figures as JSON, table and picture, and one real run.

Findings of the experiments of the catalog, where a simulation says it; the rate of a link where seconds disagree.

The convergence experiment: what its runs say, and short ones of them.
"""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.commands import Cli
from support.inside import (
    Case,
    How,
    Setting,
    auto,
    batch,
    bench_command,
    bubbles,
    derive_versions,
    draw,
    label,
    links,
    load_corpus,
    loss,
    outcomes,
    ranges,
    reference,
    seconds_of,
    suite,
)
from support.inside import JobsFigureFigure as Figure
from support.pool import Pool
from support.small import X, Y, make

from stagewright.schedules import Costs, build, simulate


def trained_once() -> list[Figure]:
    case = Case.of({"model": "moe", "microbatches": 2, "samples": 8})
    with mock.patch.multiple(auto, PROFILE_SECONDS=0.05, SEARCH_SECONDS=0.05):
        return list(suite.trained(case, 2))


@pytest.mark.thorough
def test_a_real_run_of_a_stage_a_rank(gloo: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts add up where whole numbers say, by `index_add`: an index was taken for one of the values, and refused."""
    figures, _ = gloo.run(trained_once, ranks=2)
    (model,) = suite.told(figures)
    assert json.loads(json.dumps(model)) == model
    assert (model["model"], model["unit"], len(model["stages"])) == ("moe", "tokens/s", 2)
    assert min(model["throughput"], model["planned throughput"]) > 0
    assert 0 < model["share of activations"] < 1
    for number, stage in enumerate(model["stages"]):
        shares = ("compute", "links", "parts / peak")
        assert set(stage) == {"stage", "peak", "planned peak", *shares, *suite.PARTS}
        assert stage["stage"] == number
        assert 0 < stage["compute"] <= 1
        assert 0 <= stage["links"] <= 1
        assert sum(stage[name] for name in suite.PARTS) == pytest.approx(stage["peak"], rel=0.05)
        assert min(stage[name] for name in ("weights", "activations", "workspace")) > 0
        assert stage["optimizer"] == pytest.approx(2 * stage["weights"], rel=0.001)  # and the numbers of steps
    assert suite.draw([*figures, *made_up("lstm")], tmp_path)[0][1] == "suite.png"
    assert (tmp_path / "suite.png").stat().st_size > 10_000
    bench_command.show_suite(suite.told([*figures, *made_up("lstm")]), tmp_path / "suite.png")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert [line.split()[:2] for line in lines[1:5]][::2] == [["moe", "0"], ["lstm", "0"]]


def made_up(model: str) -> list[Figure]:
    case = Case.of({"model": model})
    shares = [("compute", 1.0), ("links", 1.0)]
    sizes = [(name, 123.4e6) for name in (*suite.PARTS, "peak")]
    speeds = [
        Figure(case=case, name="throughput", value=123456.0, unit="tokens/s", how=how)
        for how in (How.MEASURED, How.SIMULATED)
    ]
    share = Figure(case=case, name="share of activations", value=0.5, unit="fraction", how=How.MEASURED)
    stages = [
        Figure(case=case.also(stage=stage), name=name, value=value, unit="", how=How.MEASURED)
        for stage in range(2)
        for name, value in (*shares, *sizes)
    ]
    return [*speeds, share, *stages]


def test_what_a_link_does_counts_for_both_of_its_ends() -> None:
    """P=2, M=2, F=1, B=2, half a second a message: the one waits 2 + 2 times, the steady ones hidden behind it."""
    timeline = simulate(build("gpipe", num_ranks=2, num_microbatches=2), Costs(forward=1.0, backward=2.0, latency=0.5))
    first, last = (suite.on_links(timeline, rank) for rank in range(2))
    assert first == last == pytest.approx(4 * 0.5 / timeline.batch_seconds)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--models", "gpt,lstn"], "--models: unknown model 'lstn'; did you mean lstm?\nmodels: gpt, lstm, cnn, unet,"),
        (["--ranks", "0"], "ranks: 0: expected a whole number of at least 1"),
    ],
)
def test_a_users_mistake(argv: list[str], message: str, cli: Cli, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in cli.refused("bench suite", *argv)
    assert not list(tmp_path.iterdir())


def value(figures: list[Figure], name: str, how: How = How.SIMULATED) -> float:
    (found,) = [figure.value for figure in figures if (figure.name, figure.how) == (name, how)]
    return found


@pytest.mark.parametrize(
    ("schedule", "bubble"),
    [("1f1b", 3 / 7), ("interleaved", 3 / 11), ("zb-h1", 1 / 5), ("2bw", 0.0)],  # P = M = 4, V = 2, I = W = F
)
def test_bubbles_are_those_of_the_closed_forms(schedule: str, bubble: float) -> None:
    figures = list(bubbles.simulated(Case.of({"schedule": schedule, "ranks": 4, "rounds": 1}), 1))
    assert value(figures, "bubble") == pytest.approx(bubble)
    assert value(figures, "bubble", How.CLOSED_FORM) == pytest.approx(bubble)
    assert {figure.case.count("microbatches") for figure in figures} == {4}


def emulated(schedule: str) -> list[Figure]:
    return list(bubbles.emulated(Case.of({"schedule": schedule, "ranks": 2, "rounds": 1}), 2))


@pytest.mark.thorough
def test_emulated_on_ranks(gloo: Pool) -> None:
    """On a busy machine a batch may only take longer; a rank that loses its core within an action waits less."""
    figures = [figure for name in ("1f1b", "2bw") for figure in gloo.run(emulated, ranks=2, args=(name,))[0]]
    assert [figure.repetition for figure in figures if figure.name == "bubble"] == [0, 1, 0, 1]
    first, *_ = (figure.value for figure in figures if figure.name == "bubble")
    assert 0 < first < 1
    assert all(figure.value > 0.99 for figure in figures if figure.name == "batch, emulated / simulated")


@pytest.mark.thorough
def test_steps_are_counted_within_a_range_that_earlier_ones_told() -> None:
    """Figures come out, of ranks in one process; how many steps lie within is a question of the machine."""
    pipe = make()
    case = Case.of({"schedule": "1f1b", "ranks": 2, "steps": 12})
    figures = list(ranges.figures_of(case, pipe, lambda: pipe.train_step(X, Y), How.MEASURED, repetitions=2))
    shares = [figure.value for figure in figures if figure.name == ranges.WITHIN]
    assert len(shares) == 2
    assert all(0 <= share <= 1 for share in shares)
    short = Case.of({"schedule": "1f1b", "ranks": 2, "steps": 9})
    with pytest.raises(ValueError, match="steps: expected at least 10"):
        list(ranges.figures_of(short, pipe, lambda: pipe.train_step(X, Y), How.MEASURED, repetitions=1))


RATE, LATENCY = 125e6, 0.001


def found(monkeypatch: pytest.MonkeyPatch, late: dict[int, float]) -> float:
    """Bytes per second that are found where messages of some sizes take longer than the link does."""

    def exchange(message: torch.Tensor, sender: int, receiver: int) -> float:
        return LATENCY + len(message) / RATE + late.get(len(message), 0.0)

    monkeypatch.setattr(links, "exchange", exchange)
    monkeypatch.setattr(links, "_pass", lambda message, sender, receiver: None)
    return links._rate(0, 1)


def test_a_delay_of_one_message_makes_no_faster_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest but one came late, so that the longest takes little longer: their difference says 1.9 of the rate."""
    assert found(monkeypatch, {}) == pytest.approx(RATE)
    late = {1 << 25: 0.1, 1 << 26: 0.25}
    assert 0.95 * RATE < found(monkeypatch, late) <= RATE


TINY = {"total_updates": 8, "evaluate_every": 4, "windows": 128, "layers": 2, "width": 16, "length": 16, "sequences": 4}


def figures(case: dict[str, object], losses: dict[float, list[float]]) -> list[Figure]:
    """Runs of one method: by rate the final losses of seeds 0, 1, ..., each with a curve of two points."""
    made = []
    for rate, by_seed in losses.items():
        for seed, value in enumerate(by_seed):
            at = Case.of({**case, "rate": rate})
            kind = {"unit": "nats", "how": How.MEASURED, "repetition": seed}
            for updates, part in ((50, 2.0), (100, 1.2), (150, 1.0)):
                one = at.also(updates=updates)
                made.append(Figure(case=one, name="validation loss", value=part * value, **kind))  # type: ignore[arg-type]
            made.append(Figure(case=at, name="final loss", value=value, **kind))  # type: ignore[arg-type]
    return made


FLUSH = {"schedule": "1f1b", "optimizer": "muon"}
LATE = {"schedule": "2bw", "optimizer": "muon", "correction": "error-feedback", "factor": 2.0}
FOUND = [
    *figures({"schedule": "1f1b", "optimizer": "adamw"}, {0.001: [2.2], 0.002: [2.1], 0.004: [2.4]}),
    *figures(FLUSH, {0.002: [1.9], 0.004: [1.7, 1.8, 1.6], 0.008: [1.75]}),
    *figures(LATE, {0.002: [1.8], 0.004: [1.76, 1.78, 1.7]}),
    *(
        Figure(case=Case.of({**case, "rate": 0.004}), name="throughput", value=value, unit="tokens/s", how=How.MEASURED)
        for case, value in ((FLUSH, 1000.0), ({**LATE, "factor": 1.0}, 1500.0))
    ),
]


def test_methods_are_judged_at_their_best_rates(tmp_path: Path) -> None:
    adamw, flush, late = outcomes(FOUND)
    assert reference([adamw, flush, late]) is flush
    assert (flush.best_rate, flush.best, flush.is_bracketed) == (0.004, [1.7, 1.8, 1.6], True)
    assert (late.best_rate, late.is_bracketed) == (0.004, False)
    assert label(late.method) == "2bw, Muon, feedback x 2"
    pictures = [tmp_path / name for _, name in draw(FOUND, tmp_path)]
    assert [path.name for path in pictures] == ["convergence.png"]
    assert all(path.stat().st_size > 10_000 for path in pictures)


def test_updates_with_a_flush_take_the_time_of_one() -> None:
    method, flush = Case.of({**LATE, "flush_first": 10}), Case.of({**LATE, "schedule": "1f1b"})
    assert seconds_of(FOUND, method) is None  # nobody timed 1f1b with this correction
    timed = Figure(case=flush, name="throughput", value=500.0, unit="tokens/s", how=How.MEASURED)
    seconds, setting = seconds_of([*FOUND, timed], method), Setting.of(method.values)
    assert seconds(30) == pytest.approx((10 / 500 + 20 / 1500) * setting.sequences * setting.length)


def test_schedules_that_update_behind_each_microbatch_see_the_same_batches() -> None:
    flush, stream = Setting(schedule="1f1b"), Setting(schedule="pipedream", ranks=4)
    corpus = load_corpus()
    whole = batch(stream, corpus, 1)
    assert len(whole.tokens) == 160
    for at, part in enumerate(whole.tokens.split(16)):
        assert torch.equal(part, batch(flush, corpus, 10 + at).tokens)
    assert stream.make_schedule().weight_rule == "stashing"
    cut = Setting(schedule="pipedream", ranks=4, update_every=8)  # in as many microbatches as the flush schedule's
    assert torch.equal(batch(cut, corpus, 3).tokens, batch(flush, corpus, 3).tokens)
    assert derive_versions(cut.make_schedule()).staleness == (1, 1, 1, 0)
    assert derive_versions(stream.make_schedule()).staleness == (3, 2, 1, 0)


def _raced(values: dict[str, object]) -> list[tuple[str, bool]]:
    return [(found.name, found.value > 0) for found in loss(Case.of(values), 1)]


@pytest.mark.thorough
def test_runs_on_processes_tell_their_seconds(gloo: Pool) -> None:
    values = {**TINY, "schedule": "2bw", "optimizer": "nadam", "evaluate_every": 1000}
    told = [("validation loss", True), ("final loss", True), ("training time", True)]
    assert gloo.run(_raced, ranks=2, args=(values,)) == [told, told]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "3bw"}, "schedule='3bw': expected 1f1b, 2bw"),
        ({"schedule": "2bw", "optimizer": "lion"}, "optimizer='lion': expected adamw, nadam, muon"),
        ({"schedule": "pipedream", "total_updates": 25}, "total_updates=25, evaluate_every=50: expected multiples of"),
        ({"schedule": "2bw", "lr": 1.0}, "lr: expected some of schedule"),
        ({"schedule": "pipedream", "flush_first": 25}, "flush_first=25: expected a multiple of 10, the updates of one"),
        ({"schedule": "2bw", "flush_first": 501}, "flush_first=501: expected a multiple of 1, .* total_updates=500"),
    ],
)
def test_a_setting_that_cannot_be_meant(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(loss(Case.of(values), 1))
