"""Profiles: JSON, and what is refused."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.inside import Arguments, slice_shares

from stagewright.partition import Node, Profile

from .small import profiles


def node(name: str, **figures: float) -> Node:
    return Node(name=name, **{"forward_seconds": 1.0, "backward_seconds": 2.0, **figures})


@pytest.mark.thorough
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


SECONDS = ("forward_seconds", "input_grad_seconds", "weight_grad_seconds", "update_seconds")


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
        (bad_node(backward_seconds=...), r"p\.json: nodes\[0\]: backward_seconds: missing"),
        *(
            (bad_node(**{name: -1}), rf"p\.json: nodes\[0\]: {name}: -1: expected a finite number")
            for name in (*SECONDS, "stash_bytes", "parameter_bytes", "selective_bytes", "workspace_bytes")
        ),
        *(
            (bad_node(stash_bytes=wrong), rf"p\.json: nodes\[0\]: stash_bytes: {wrong!r}: expected a finite number")
            for wrong in ("4 GB", math.inf, math.nan, None)
        ),
        (bad_node(flops=1), r"p\.json: nodes\[0\]: unknown field flops"),
        (bad_node(runs_again="no"), r"p\.json: nodes\[0\]: runs_again: 'no': expected true or false"),
        (bad_node(selective_bytes=1), r"p\.json: nodes\[0\]: node a: selective_seconds: None: expected a number along"),
        (change(microbatch_size=2.5), r"p\.json: microbatch_size: 2\.5: expected a whole number"),
        *(
            (change(**{name: -1}), rf"p\.json: {name}: -1: expected a finite number")
            for name in ("optimizer_ratio", "step_seconds", "step_spread", "action_seconds", "around_seconds")
        ),
    ],
)
def test_bad_json(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Profile.from_json(text, source="p.json")


def test_bad_profiles_and_cycles_in_the_direction_of_their_edges() -> None:
    with pytest.raises(ValueError, match="node 'a' is listed twice"):
        Profile(nodes=(node("a"), node("a")))
    with pytest.raises(ValueError, match="node a: stash_bytes: -1: expected a finite number of at least 0"):
        node("a", stash_bytes=-1)
    with pytest.raises(ValueError, match="expected text that is not empty"):
        node("")
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


MEASURED = Profile(
    nodes=(
        node("a", parameter_bytes=10, stash_bytes=3, workspace_bytes=7, buffer_bytes=1, input_grad_seconds=0.5),
        node("b", parameter_bytes=20, stash_bytes=4, workspace_bytes=2, weight_grad_seconds=0.25, update_seconds=3),
    ),
    microbatch_size=2,
    optimizer_ratio=2.0,
    step_seconds=5.0,
    step_spread=0.1,
    action_seconds=3e-4,
    around_seconds=2e-3,
)


def test_measured_figures_there_and_back_and_from_older_files() -> None:
    assert Profile.from_json(MEASURED.to_json()) == MEASURED
    selective = Profile(
        nodes=(node("a", selective_bytes=5, selective_seconds=0.5), replace(node("b"), runs_again=False))
    )
    assert Profile.from_json(selective.to_json()) == selective
    assert selective.knows("selective")
    assert not selective.knows("keep_less")
    less = Profile(nodes=(node("a", keep_less_bytes=5, keep_less_seconds=0.5), node("b")))
    assert Profile.from_json(less.to_json()) == less
    assert less.knows("keep_less")
    assert not MEASURED.knows("selective")
    # As version 1 was written first; what was not measured is 0 or None.
    figures = '"forward_seconds": 1, "backward_seconds": 2, "activation_bytes": 3, "stash_bytes": 4, "spread": 0.5'
    text = '{"version": 1, "device": "x", "dtype": "float32", "origin": "measured", "edges": [], ' + (
        f'"nodes": [{{"name": "a", "description": "", "parameter_bytes": 5, "buffer_bytes": 6, {figures}}}]}}'
    )
    profile = Profile.from_json(text)
    (only,) = profile.nodes
    assert (only.spread, only.input_grad_seconds, only.update_seconds, only.workspace_bytes) == (0.5, 0, 0, 0)
    assert (only.runs_again, only.selective_bytes, only.selective_seconds) == (True, None, None)
    assert (only.keep_less_bytes, only.keep_less_seconds) == (None, None)
    assert not profile.knows("keep_less")
    assert (profile.microbatch_size, profile.optimizer_ratio, profile.step_seconds) == (None, None, None)
    assert profile.parts_over_step is None
    assert (profile.action_seconds, profile.around_seconds) == (0, 0)


def test_sums_over_the_nodes() -> None:
    assert MEASURED.parts_seconds == 6
    assert MEASURED.parts_over_step == pytest.approx(0.2)
    held = MEASURED.holdings()
    assert (held.parameters, held.gradients, held.optimizer) == (30, 30, 60)
    assert (held.activations, held.workspace, held.buffers) == (7, 7, 1)
    assert held.total == 135


def test_typical_seconds_add_up_to_what_the_whole_took_on_average() -> None:
    nodes = (
        Node(name="a", forward_seconds=1.0, backward_seconds=2.0, selective_bytes=7, selective_seconds=0.5),
        Node(name="b", forward_seconds=2, backward_seconds=3),
    )
    whole = Profile(nodes=nodes, step_seconds=10.0, slowdown=1.2).typical()
    assert whole.parts_seconds == pytest.approx(12.0)
    assert whole.nodes[0].forward_seconds == pytest.approx(1.5)
    assert replace(MEASURED, slowdown=2.0).typical().action_seconds == 3e-4
    assert (whole.nodes[0].selective_bytes, whole.nodes[0].selective_seconds) == (7, pytest.approx(0.75))
    assert (whole.nodes[1].selective_bytes, whole.nodes[1].selective_seconds) == (None, None)
    assert (whole.slowdown, whole.step_seconds, whole.parts_over_step) == (1.0, 12.0, pytest.approx(0.0))
    assert whole.typical().parts_seconds == pytest.approx(12.0)
    assert Profile(nodes=nodes, slowdown=1.5).typical().parts_seconds == pytest.approx(12.0)
    assert Profile.from_json(Profile(nodes=nodes, slowdown=1.5).to_json()).slowdown == 1.5


def test_sizes_of_parameters_are_kept_and_checked() -> None:
    """Without them nothing is known: all count as small."""
    known = node("a", parameter_bytes=10, largest_parameter_bytes=6, small_parameter_bytes=4)
    profile = Profile(nodes=[known])
    assert Profile.from_json(profile.to_json(), source="p.json") == profile
    lacking = json.loads(profile.to_json())
    for figure in ("largest_parameter_bytes", "small_parameter_bytes"):
        del lacking["nodes"][0][figure]
    (old,) = Profile.from_json(json.dumps(lacking), source="p.json").nodes
    assert (old.largest_parameter_bytes, old.small_parameter_bytes) == (0.0, None)
    for figure in ("largest_parameter_bytes", "small_parameter_bytes"):
        with pytest.raises(ValueError, match=rf"node a: {figure}=?:? ?11.*expected at most parameter_bytes=10"):
            replace(known, **{figure: 11})


@pytest.mark.parametrize(("fixed", "tokens", "pairs"), [(2, 3, 5), (0, 0, 10), (0, 10, 0), (10, 0, 0)])
def test_what_a_slice_costs_is_told_apart_by_three_lengths(fixed: float, tokens: float, pairs: float) -> None:
    """Seconds of any slice, of tokens and of pairs of them, 10 together; other tensors stay whole."""

    def again(cut: Arguments, *, target: Any) -> Profile:
        (name, whole), part = target, cut.tensors[1].shape[1] / 60
        assert (name, tuple(whole.shape), tuple(cut.tensors[0].shape)) == ("none", (2, 7), (3,))
        node = Node(name="a", forward_seconds=1, backward_seconds=2)
        return Profile(nodes=(node,), step_seconds=fixed + tokens * part + pairs * part**2)

    given = Arguments.of((torch.zeros(3), torch.zeros(2, 60)))
    found = slice_shares(given, ("none", torch.zeros(2, 7)), 1, 10.0, again)
    assert found.pop("sequence_tokens") == 60
    assert found == pytest.approx({"pair_share": pairs / 10, "slice_share": fixed / 10}, abs=1e-9)
    assert min(found.values()) >= 0.0  # Profile takes no less, and a law's constant is 1e-9 where it should be 0
    with pytest.raises(ValueError, match=r"sequence_dim=2 with .*: expected a dimension of 4 tokens"):
        slice_shares(given, None, 2, 10.0, again)
