"""`stagewright fleet` and `stagewright price`: what they print, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import Cli

from stagewright.partition import Cluster, Node, Profile, plan

KINDS = [{"name": "fast", "devices": 2, "price": 3.0, "speed": 2.0}, {"name": "slow", "devices": 4, "price": 1.0}]
PRICES = "seconds,kind,price\n0,fast,2.5\n0,slow,0.5\n3600,fast,\n7200,fast,1.2\n14400,end,\n"


def write(folder: Path, name: str, content: Any) -> str:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / name)


def profile() -> Profile:
    nodes = [Node(name=f"n{i}", forward_seconds=0.01, backward_seconds=0.02, parameter_bytes=1e6) for i in range(4)]
    return Profile(nodes=tuple(nodes))


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
def test_mistakes_are_named(
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
