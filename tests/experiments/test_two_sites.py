"""The experiment on two sites: what its closed forms say, and its ways on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.inside import (
    BACKWARD,
    FORWARD,
    Case,
    LocalBackend,
    Nodes,
    deep_warm_up,
    links_of,
    read_figures,
    run_of,
    two_sites,
)
from support.inside import RecordsWork as Work

from stagewright.schedules import check

T = FORWARD + BACKWARD


def period(way: str, latency: float, *, num_ranks: int = 4, num_microbatches: int = 16) -> float:
    """Seconds from microbatch to microbatch of a stream's steady state."""
    run = run_of(way, num_ranks=num_ranks, num_microbatches=num_microbatches, latency=latency)
    return run.timeline(latency, local=0.0).batch_seconds / num_microbatches


@pytest.mark.parametrize(("num_ranks", "latency"), [(4, 0.0), (4, 0.02), (4, 0.05), (4, 0.1), (8, 0.05)])
def test_streams_take_what_the_loop_over_the_link_says(num_ranks: int, latency: float) -> None:
    assert period("2bw", latency, num_ranks=num_ranks) == pytest.approx(T + latency)
    assert period("pipedream", latency, num_ranks=num_ranks) == pytest.approx(T + latency)
    assert period("2bw eager", latency, num_ranks=num_ranks) == pytest.approx(max(T, (2 * T + 2 * latency) / 3))
    assert period("2bw deep", latency, num_ranks=num_ranks) == pytest.approx(T)
    assert period("2bw light", latency, num_ranks=num_ranks) <= (T + latency) * (1 + 1e-9)


def test_deep_warm_up_is_as_deep_as_it_must_be() -> None:
    """One forward less in front of the link, and ranks wait for it."""
    for latency in (0.02, 0.05, 0.1):
        deep = run_of("2bw deep", num_ranks=4, num_microbatches=16, latency=latency)
        less = run_of("2bw deep", num_ranks=4, num_microbatches=16, latency=latency - T / 2)
        assert deep.timeline(latency, local=0.0).batch_seconds == pytest.approx(16 * T)
        assert less.timeline(latency, local=0.0).batch_seconds > 16.1 * T
    assert deep_warm_up(4, 0.02) == [4, 3, 1, 0]


def test_1f1b_with_a_deep_warm_up_is_as_fast_as_gpipe_and_holds_less() -> None:
    sizes = {"num_ranks": 4, "num_microbatches": 32, "latency": 0.05}
    deep, gpipe, plain = (run_of(way, **sizes) for way in ("1f1b deep", "gpipe", "1f1b"))
    check(deep.schedule)
    found, other = deep.timeline(0.05), gpipe.timeline(0.05)
    assert found.makespan == pytest.approx(other.makespan, rel=1e-3)
    assert found.makespan < 0.6 * plain.timeline(0.05).makespan
    assert (max(found.peak_activations), max(other.peak_activations)) == (7, 32)
    assert run_of("1f1b deep", num_ranks=4, num_microbatches=8, latency=0.0).schedule.programs == (
        run_of("1f1b", num_ranks=4, num_microbatches=8, latency=0.0).schedule.programs
    )


def test_less_work_beside_the_link_leaves_the_sum_as_it_is() -> None:
    run = run_of("1f1b light", num_ranks=8, num_microbatches=16, latency=0.02)
    assert sum(run.work) == pytest.approx(8)
    assert run.work[3] == run.work[4] == min(run.work) < 1 < run.work[0] == max(run.work)
    plain = run_of("1f1b", num_ranks=8, num_microbatches=16, latency=0.02)
    assert run.timeline(0.02).makespan < 0.95 * plain.timeline(0.02).makespan
    assert set(run_of("1f1b light", num_ranks=8, num_microbatches=16, latency=0.0).work) == {1.0}


def test_only_what_crosses_takes_long() -> None:
    links = links_of(4, 0.1, local=0.001)
    far = {pair for pair, way in links.network.items() if way.latency == 0.1}
    assert far == {(1, 2), (2, 1), (3, 0), (0, 3)}
    assert len(links.network) == 8


def test_figures_of_a_case() -> None:
    case = Case.of({"way": "gpipe", "ranks": 4, "site_latency": "50ms", "microbatches": 8})
    found = {figure.name: figure.value for figure in two_sites.simulated(case, 1)}
    batch = 11 * T + 2 * 0.05 + 4 * two_sites._LOCAL
    assert found["batch"] == pytest.approx(batch)
    assert found["efficiency"] == pytest.approx(8 * T / batch)
    assert found["speed kept"] == pytest.approx(11 * T / batch, rel=1e-3)
    assert (found["peak activations"], found["weight versions"]) == (8, 1)


@pytest.mark.parametrize(
    ("values", "said"),
    [({"way": "2bw deeper"}, "expected one of gpipe; 1f1b;"), ({"ranks": 5}, "5: expected an even number")],
)
def test_a_case_that_cannot_be_is_named(values: dict[str, str | int], said: str) -> None:
    case = Case.of({"way": "gpipe", "ranks": 4, "site_latency": "50ms", "microbatches": 8, **values})
    with pytest.raises(ValueError, match=said):
        list(two_sites.simulated(case, 1))


def test_a_way_has_its_speed_and_its_price() -> None:
    case = Case.of({"way": "2bw eager", "ranks": 4, "site_latency": "50ms", "microbatches": 8})
    found = {figure.name: figure.value for figure in two_sites.simulated(case, 1)}
    assert round(found["speed kept"], 2) == 0.71
    assert found["peak activations"] == 7


@pytest.mark.nightly
@pytest.mark.gloo
def test_emulated_ways_come_one_after_the_other_over_the_same_groups(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(
        '{"work": "stagewright.experiments.works.two_sites:emulated", "repetitions": 1, "cases": ['
        '{"ranks": 4, "site_latency": "0ms"}]}'
    )
    work = Work(
        module="stagewright.experiments.jobs.worker", arguments=(str(tmp_path), "--ranks"), folder=tmp_path, timeout=200
    )
    outcome = LocalBackend(say=lambda line: None).run(work, Nodes(ranks_per_node=4))
    assert outcome.status == 0, outcome.report
    figures = read_figures(tmp_path / "figures.jsonl")
    slower = [figure for figure in figures if figure.name == "batch, emulated / simulated"]
    assert [figure.case.text("way") for figure in slower] == [
        way for ways in two_sites.EMULATED.values() for way in ways
    ]
    assert all(figure.value > 0.97 for figure in slower)
