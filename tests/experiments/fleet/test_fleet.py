"""Shares of a fleet beside brute force and the equal split; prices by hand and beside all choices; their commands."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import Cli
from support.inside import Charges, FleetJob, PricedPlan, PriceTrace, Shares, cheapest, replay, run_fleet

from stagewright.partition import Cluster, Node, Profile, plan

POLICIES = ("max-min", "finish-time", "makespan", "cost", "deadline")


def job(name: str, *throughputs: float, **options: Any) -> FleetJob:
    return FleetJob(name=name, throughputs=throughputs, **{"samples": 100.0, **options})


def random_jobs(rng: np.random.Generator, most: int, kinds: int) -> list[FleetJob]:
    return [
        job(
            f"j{m}",
            *rng.uniform(0.5, 10.0, kinds).round(2).tolist(),
            samples=float(rng.integers(50, 500)),
            devices=int(rng.integers(1, 3)),
            weight=float(rng.integers(1, 4)),
            deadline=float(rng.integers(50, 800)),
        )
        for m in range(rng.integers(1, most + 1))
    ]


def check_shares(shares: Any, found: np.ndarray, counts: list[int]) -> None:
    assert (found >= -1e-9).all()
    assert (found.sum(axis=1) <= 1 + 1e-6).all()
    assert ((shares.devices[:, None] * found).sum(axis=0) <= np.array(counts) + 1e-6).all()


@pytest.mark.thorough
def test_no_job_falls_below_an_equal_split() -> None:
    rng = np.random.default_rng(0)
    for _ in range(400):
        kinds = int(rng.integers(1, 4))
        counts = rng.integers(2, 9, kinds).tolist()
        jobs = random_jobs(rng, 6, kinds)
        shares = Shares(jobs, counts, prices=rng.uniform(0.5, 3, kinds).tolist())
        policy = POLICIES[int(rng.integers(4))]
        found = shares.of(policy)
        check_shares(shares, found, counts)
        equal, rate = shares.rate(shares.equal), shares.rate(found)
        if policy == "makespan":
            assert (shares.left / rate).max() <= (shares.left / equal).max() * (1 + 1e-6)
        else:
            assert (rate >= equal * (1 - 1e-6)).all(), policy


def grid(steps: int, kinds: int) -> list[tuple[float, ...]]:
    """All shares of one job in steps."""
    found = itertools.product(range(steps + 1), repeat=kinds)
    return [tuple(x / steps for x in each) for each in found if sum(each) <= steps]


def goal(policy: str, shares: Any, x: np.ndarray) -> float:
    """The figure that the policy makes small."""
    with np.errstate(divide="ignore"):
        rate = shares.rate(x)
        match policy:
            case "max-min":
                return -float((rate / shares.rate(shares.equal)).min())
            case "makespan" | "finish-time":  # of jobs that all begin now
                alone = shares.left / shares.rate(shares.equal) if policy == "finish-time" else 1.0
                return float((shares.left / rate / alone).max())
    least = shares.rate(shares.equal) if policy == "cost" else shares.left / [each.deadline for each in shares.jobs]
    late = float(np.maximum(least - rate - 1e-6 * least, 0).sum())
    return float((shares.prices * shares.devices[:, None] * x).sum()) if late == 0 else np.inf


@pytest.mark.thorough
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_on_a_grid_is_better(policy: str) -> None:
    rng = np.random.default_rng(POLICIES.index(policy))
    cases = 0
    while cases < 40:
        jobs = [replace(each, weight=1.0) for each in random_jobs(rng, 2, 2)]
        counts, prices = rng.integers(2, 4, 2).tolist(), rng.uniform(0.5, 3, 2).tolist()
        shares = Shares(jobs, counts, prices=prices)
        best = np.inf
        for each in itertools.product(grid(8, 2), repeat=len(jobs)):
            x = np.array(each)
            if ((shares.devices[:, None] * x).sum(axis=0) <= shares.counts + 1e-9).all():
                best = min(best, goal(policy, shares, x))
        if not np.isfinite(best):
            continue
        cases += 1
        found = goal(policy, shares, shares.of(policy))
        assert found <= best + 1e-6 * abs(best), (jobs, counts, prices)


def test_rounds_give_what_shares_say() -> None:
    """Two jobs on one device: half of it each; all is charged; a restart takes from its round."""
    two = [job("a", 1.0, samples=3600.0), job("b", 1.0, samples=3600.0)]
    run = run_fleet(two, [1], "max-min", round_seconds=100.0)
    assert sorted(run.completions) == [7100.0, 7200.0]
    assert run.cost == pytest.approx(7200.0)
    slower = run_fleet(two, [1], "max-min", round_seconds=100.0, restart_seconds=10.0)
    assert slower.makespan == pytest.approx(8000.0, rel=0.01)
    late = run_fleet([job("a", 1.0, deadline=50.0), job("b", 1.0)], [1], "deadline", round_seconds=10.0)
    assert late.missed == ("a",)


TRACE = PriceTrace.parse("seconds,kind,price\n0,a,3600\n0,b,7200\n100,a,\n200,a,3600\n300,b,1800\n400,end,\n")
A, B = PricedPlan(name="A", kind="a", devices=2, rate=1.0), PricedPlan(name="B", kind="b", devices=1, rate=2.0)


def test_a_replay_by_hand() -> None:
    """a costs 1 a device and second and is away from 100 to 200; b costs 2, and 0.5 from 300 on."""
    charges = Charges(restart_seconds=10.0, checkpoint_every=30.0, checkpoint_seconds=0.0)
    run = replay([A] * 4, TRACE, 240.0, charges)
    # 90 samples, all in checkpoints; from 210 on the other 150.
    assert (run.seconds, run.cost, run.lost, run.restarts) == (360.0, 2 * (100 + 160), 0.0, 2)
    lost = replay([A] * 4, TRACE, 240.0, Charges(restart_seconds=10.0))
    assert (lost.seconds, lost.samples, lost.lost) == (None, 190.0, 90.0)
    other = replay([A, B, B, B], TRACE, 300.0, charges)
    assert (other.seconds, other.cost, other.used) == (215.0, 2 * 100 + 2 * 100 + 2 * 15, ("A", "B", "B", None))
    assert replay([B] * 4, TRACE, 240.0, charges, deadline=120.0).seconds is None


def test_lines_may_end_as_on_any_machine() -> None:
    for end in ("\r\n", "\r"):
        assert PriceTrace.parse(end.join(["seconds,kind,price", "0,a,3600", "5,end,", ""])).times == (0.0, 5.0)


def test_the_cheapest_knows_what_comes() -> None:
    charges = Charges(restart_seconds=10.0, checkpoint_every=30.0)
    found = cheapest([A, B], TRACE, 160.0, charges)
    assert (found.used, found.cost, found.seconds) == ((None, None, None, "B"), 45.0, 390.0)
    with pytest.raises(ValueError, match=r"5000 samples by 200 s: the most that these plans make is 380: expected"):
        cheapest([A, B], TRACE, 5000.0, charges, deadline=200.0)


def test_the_cheapest_is_that_of_all_choices() -> None:
    """Every choice of a plan for each part; also where only a change of plan, or a wait, makes the samples in time."""
    rng, feasible = np.random.default_rng(5), 0
    for _ in range(40):
        times = (0.0, *np.cumsum(rng.choice([10.0, 50.0, 100.0, 300.0], 4)).tolist())
        table = rng.uniform(0.0, 3.0, (2, 4)) * (rng.random((2, 4)) < 0.8)
        prices = {kind: tuple(each or None for each in row) for kind, row in zip("ab", table.tolist(), strict=True)}
        trace = PriceTrace(times=times, prices=prices)
        every, seconds, restart = rng.choice([0.0, 10.0, 30.0]), rng.choice([0.0, 5.0]), rng.choice([0.0, 5.0, 20.0])
        charges = Charges(restart_seconds=restart, checkpoint_every=every, checkpoint_seconds=seconds)
        given = float(rng.uniform(10, 600)), charges, float(rng.uniform(0.5, 1.0)) * times[-1]
        every_run = (replay(used, trace, *given) for used in itertools.product([None, A, B], repeat=4))
        costs = [run.cost for run in every_run if run.seconds is not None]
        if not costs:
            with pytest.raises(ValueError, match="expected a later deadline"):
                cheapest([A, B], trace, *given)
            continue
        assert cheapest([A, B], trace, *given).cost == pytest.approx(min(costs))
        feasible += 1
    assert feasible > 20


def test_mistakes_are_named() -> None:
    cases: dict[Any, str] = {
        lambda: job("a", 0.0, 0.0): r"job 'a': throughputs \[0\.0, 0\.0\]: expected one above 0",
        lambda: job("a", 1.0, devices=0): r"job 'a': devices: 0: expected a whole number of at least 1",
        lambda: job("a", 1.0, arrival=5.0, deadline=5.0): r"job 'a': deadline 5: expected one after its arrival, 5",
        lambda: Shares([job("a", 1.0)], [1, 1]): r"job 'a': 1 throughputs for 2 kinds of devices: expected one a kind",
        lambda: Shares([job("a", 1.0, devices=3)], [2]): r"job 'a' takes 3 devices of a kind: expected at most 2",
        lambda: Shares([job("a", 1.0)], [1]).of("fair"): r"policy 'fair': expected one of max-min, finish-time",
        lambda: run_fleet([job("a", 1.0)], [1], "deadline"): r"policy 'deadline': no job has one: expected a deadline",
        lambda: run_fleet([], [1], "max-min"): r"a fleet without jobs: expected at least one",
        lambda: run_fleet([job("a", 1.0)], [1], "equal", restart_seconds=360.0): r"restart_seconds=360: expected less",
        lambda: PriceTrace.parse("seconds,kind\n"): r"trace, line 1: .*: expected seconds,kind,price",
        lambda: PriceTrace.parse("seconds,kind,price\n5,a,1\n4,a,1\n"): r"line 3: seconds 4 after 5: expected times",
        lambda: PriceTrace.parse("seconds,kind,price\n5,a,-1\n"): r"line 2: price: -1\.0: expected a finite number",
        lambda: PriceTrace.parse("seconds,kind,price\n5,a,x\n"): r"line 2: price: 'x': expected a number",
        lambda: PriceTrace.parse("seconds,kind,price\n5,a,1\n"): r"trace: 1 moments: expected at least two",
        lambda: cheapest([A, B], TRACE, -5.0, Charges()): r"samples: -5\.0: expected a finite number above 0",
        lambda: PricedPlan(name="A", kind="a", devices=1, rate=0.0): r"plan 'A': rate: 0\.0: expected a finite number",
    }
    for make, told in cases.items():
        with pytest.raises(ValueError, match=told):
            make()


KINDS = [{"name": "fast", "devices": 2, "price": 3.0, "speed": 2.0}, {"name": "slow", "devices": 4, "price": 1.0}]
PRICES = "seconds,kind,price\n0,fast,2.5\n0,slow,0.5\n3600,fast,\n7200,fast,1.2\n14400,end,\n"


def write(folder: Path, name: str, content: Any) -> str:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / name)


def profile() -> Profile:
    nodes = [Node(name=f"n{i}", forward_seconds=0.01, backward_seconds=0.02, parameter_bytes=1e6) for i in range(4)]
    return Profile(nodes=tuple(nodes))


@pytest.mark.thorough
def test_a_fleet_takes_throughputs_from_the_planner(tmp_path: Path, cli: Cli) -> None:
    write(tmp_path, "p.json", profile().to_json())
    jobs = [
        {"name": "planned", "profile": ["p.json"], "batch": 8, "samples": 1e5, "devices": 2, "deadline": 1e5},
        {"name": "given", "throughputs": {"slow": 20.0}, "samples": 1e5},
    ]
    path = write(tmp_path, "fleet.json", {"kinds": KINDS, "jobs": jobs})
    found = cli.json("fleet", path, "--policies max-min deadline")
    assert found["simulated"]
    assert set(found["policies"]) == {
        name + alike for name in ("max-min", "deadline") for alike in ("", ", kinds alike")
    }
    (planned, given) = found["policies"]["max-min"]["jobs"]
    two = plan(profile(), Cluster.from_levels([(2, 1e15)]), global_batch=8).simulated_step_time
    assert planned["throughputs"] == pytest.approx([2 * 8 / two, 8 / two], rel=1e-6)
    assert given["throughputs"] == [0.0, 20.0]
    assert "makespan, kinds alike" in cli.text("fleet", path)


def test_prices_are_replayed(tmp_path: Path, cli: Cli) -> None:
    made = plan(profile(), Cluster.from_levels([(4, 1e15)]), global_batch=8)
    write(tmp_path, "plan.json", made.to_json())
    plans = [
        {"name": "A", "kind": "fast", "devices": 4, "rate": 60},
        {"name": "B", "kind": "slow", "plan": "plan.json", "batch": 8},
    ]
    words = [write(tmp_path, "prices.csv", PRICES), "--plans", write(tmp_path, "plans.json", {"plans": plans})]
    runs = cli.json("price", *words, "--samples 3e5 --restart 60 --checkpoint-every 600")["runs"]
    assert set(runs) == {"A", "B", "least cost"}
    assert runs["least cost"]["cost"] == min(each["cost"] for each in runs.values() if each["seconds"] is not None)
    assert "least cost: " in cli.text("price", *words, "--samples 3e5")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["fleet", "none.json"], "jobs: expected at least one of each"),
        (["fleet", "nowhere.json"], "nowhere.json: No such file or directory: expected a file"),
        (["price", "nowhere.csv", "--plans", "plans.json", "--samples", "10"], "nowhere.csv: No such file"),
        (["price", "prices.csv", "--plans", "lost.json", "--samples", "10"], "lost.plan: No such file"),
        (["fleet", "odd.json"], "odd.json: kinds[0]: unknown field colour"),
        (["price", "prices.csv", "--plans", "other.json", "--samples", "10"], "plan 'C' on 'gpu': expected plans on"),
        (["price", "prices.csv", "--plans", "plans.json", "--samples", "1e12"], "expected a later deadline, or faster"),
    ],
)
def test_mistakes_of_commands_are_named(
    words: list[str], told: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"name": "a", "throughputs": {"slow": 1.0}, "samples": 10}
    write(tmp_path, "fleet.json", {"kinds": KINDS, "jobs": [given]})
    write(tmp_path, "none.json", {"kinds": KINDS, "jobs": []})
    write(tmp_path, "odd.json", {"kinds": [KINDS[0] | {"colour": "red"}], "jobs": [given]})
    write(tmp_path, "prices.csv", PRICES)
    write(tmp_path, "plans.json", {"plans": [{"name": "A", "kind": "fast", "devices": 1, "rate": 1}]})
    write(tmp_path, "other.json", {"plans": [{"name": "C", "kind": "gpu", "devices": 1, "rate": 1}]})
    write(tmp_path, "lost.json", {"plans": [{"name": "D", "kind": "fast", "plan": "lost.plan", "batch": 8}]})
    assert told in cli.refused(*words).replace("\n", " ")
