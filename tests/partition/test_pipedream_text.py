"""PipeDream's profile text."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.partition import read_pipedream_profile

DATA = Path(__file__).parents[1] / "data" / "pipedream"
GOOD = "{} -- {} -- forward_compute_time={}, backward_compute_time=2.0, activation_size={}, parameter_size=8.000"


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "graph.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_units_tuples_and_what_is_left_out(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        GOOD.format("node1", "Input0", 9.0, 4.0),
        GOOD.format("node2", "LSTM(a -- b)", 1.5, "[6.0; 1.5]"),
        GOOD.format("node3", "__getitem__(0)", 0.0, 6.0),
        GOOD.format("node4", "__getitem__(1)", 0.0, 1.5),
        GOOD.format("node5", "Add", 0.0, 6.0),
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode2 -- node4",
        "\tnode3 -- node5",
    )
    profile = read_pipedream_profile(path)
    assert [node.name for node in profile.nodes] == ["node2", "node3", "node5"]
    assert profile.edges == (("node2", "node3"), ("node3", "node5"))
    first = profile.nodes[0]
    assert (first.description, first.forward_seconds, first.backward_seconds) == ("LSTM(a -- b)", 0.0015, 0.002)
    assert (first.activation_bytes, first.stash_bytes, first.parameter_bytes) == (7.5, 7.5, 8.0)
    assert profile.origin == "published"


def test_a_published_profile() -> None:
    profile = read_pipedream_profile(DATA / "vgg16.txt")
    assert len(profile.nodes) == 40
    assert sum(node.seconds for node in profile.nodes) == pytest.approx(0.672535)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("node2", "line 2: 'node2': expected name -- description -- forward_compute_time="),
        ("\tnode1 -- node2 -- node3", "line 2: .* expected <tab>producer -- consumer"),
        ("\tnode1 -- node9", "line 2: 'node9': expected a node that a line above describes"),
        (GOOD.format("node1", "Add", 1.0, 1.0), "line 2: 'node1': expected a name that no line above has"),
        (GOOD.format("node2", "Add", -1.0, 1.0), "line 2, field forward_compute_time: -1.0: expected a finite number"),
        (GOOD.format("node2", "Add", "fast", 1.0), "line 2, field forward_compute_time: 'fast': expected a number"),
        (GOOD.format("node2", "Add", 1.0, "[1; x]"), r"line 2, field activation_size: '\[1; x\]': expected a number"),
        ("node2 -- Add -- forward_compute_time=1.0", "line 2: .* expected backward_compute_time="),
        ("node2 -- Add -- forward_time=1.0", "line 2: 'forward_time=1.0': expected each of forward_compute_time, "),
        (GOOD.format("node2", "Add", 1.0, 1.0), "the profile falls into parts"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, GOOD.format("node1", "Conv", 1.0, 1.0), line)
    with pytest.raises(ValueError, match=rf"graph\.txt.*{message}"):
        read_pipedream_profile(path)
