"""Profiles: JSON, and what is refused."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings

from stagewright.partition import Node, Profile

from .small import profiles


def node(name: str, **figures: float) -> Node:
    return Node(name=name, **{"forward_seconds": 1.0, "backward_seconds": 2.0, **figures})


@settings(max_examples=50, deadline=None, derandomize=True)
@given(profiles())
def test_json_there_and_back(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile


def test_load_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"model\.json, line 1, column 2: .*expected one JSON object"):
        Profile.load(path)


def change(**fields: object) -> str:
    return json.dumps({**json.loads(Profile(nodes=(node("a"), node("b"))).to_json()), **fields})


def bad_node(**fields: object) -> str:
    record = json.loads(Profile(nodes=(node("a"),)).to_json())
    record["nodes"][0].update(fields)
    record["nodes"][0] = {key: value for key, value in record["nodes"][0].items() if value is not ...}
    return json.dumps(record)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"p\.json: \[\]: expected a JSON object"),
        (change(version=2), r"p\.json: version: 2: expected 1"),
        (change(colour=3), r"p\.json: unknown field colour: expected only version, "),
        (change(origin="guessed"), r"p\.json: origin: 'guessed': expected one of measured, published, formula"),
        (change(edges=[["a"]]), r"p\.json: edges\[0\]: \['a'\]: expected \[producer, consumer\]"),
        (change(edges=[["a", "z"]]), r"p\.json: edge a -> z: node 'z' is not in the profile"),
        (change(edges=[["a", "b"], ["b", "a"]]), r"p\.json: the edges form a cycle: a -> b -> a|b -> a -> b"),
        (change(edges=[]), r"p\.json: the profile falls into parts: no edge leads from 'a' .* to 'b'"),
        (change(nodes=[]), r"p\.json: profile without nodes"),
        (bad_node(forward_seconds=-1), r"p\.json: nodes\[0\]: forward_seconds: -1: expected a finite number"),
        (bad_node(backward_seconds=...), r"p\.json: nodes\[0\]: backward_seconds: missing"),
        (bad_node(stash_bytes="4 GB"), r"p\.json: nodes\[0\]: stash_bytes: '4 GB': expected a finite number"),
        (bad_node(parameter_bytes=math.inf), r"parameter_bytes: inf: expected a finite number"),
        (bad_node(flops=1), r"p\.json: nodes\[0\]: unknown field flops"),
    ],
)
def test_bad_json(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Profile.from_json(text, source="p.json")


def test_bad_profiles() -> None:
    with pytest.raises(ValueError, match="node 'a' stands twice"):
        Profile(nodes=(node("a"), node("a")))
    with pytest.raises(ValueError, match="node a: stash_bytes: -1: expected a finite number of at least 0"):
        node("a", stash_bytes=-1)
    with pytest.raises(ValueError, match="expected text that is not empty"):
        node("")


def test_cycle_is_printed_in_the_direction_of_its_edges() -> None:
    edges = (("a", "b"), ("b", "c"), ("c", "d"), ("d", "b"))
    with pytest.raises(ValueError, match="the edges form a cycle: ") as error:
        Profile(nodes=tuple(node(name) for name in "abcd"), edges=edges)
    walk = str(error.value).split(": ")[1].split(" -> ")
    assert len(walk) == 4
    assert walk[0] == walk[-1]
    assert all(pair in edges for pair in pairwise(walk))


def test_a_chain_where_no_edges_are_given() -> None:
    profile = Profile(nodes=(node("a"), node("b"), node("c")))
    assert profile.links == ((0, 1), (1, 2))
    assert profile.order() == (0, 1, 2)
