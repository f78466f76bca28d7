"""The experiment on two sites: what its closed forms say, and its ways on real ranks."""

from __future__ import annotations

import pytest
from support.inside import BACKWARD, FORWARD, Case, run_of, two_sites

T = FORWARD + BACKWARD


def period(way: str, latency: float, *, num_ranks: int = 4, num_microbatches: int = 16) -> float:
    """Seconds from microbatch to microbatch of a stream's steady state."""
    run = run_of(way, num_ranks=num_ranks, num_microbatches=num_microbatches, latency=latency)
    return run.timeline(latency, local=0.0).batch_seconds / num_microbatches


@pytest.mark.thorough(but=["4-0.0"])
@pytest.mark.parametrize(("num_ranks", "latency"), [(4, 0.0), (4, 0.02), (4, 0.05), (4, 0.1), (8, 0.05)])
def test_streams_take_what_the_loop_over_the_link_says(num_ranks: int, latency: float) -> None:
    assert period("2bw", latency, num_ranks=num_ranks) == pytest.approx(T + latency)
    assert period("pipedream", latency, num_ranks=num_ranks) == pytest.approx(T + latency)
    assert period("2bw eager", latency, num_ranks=num_ranks) == pytest.approx(max(T, (2 * T + 2 * latency) / 3))
    assert period("2bw deep", latency, num_ranks=num_ranks) == pytest.approx(T)
    assert period("2bw light", latency, num_ranks=num_ranks) <= (T + latency) * (1 + 1e-9)


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
