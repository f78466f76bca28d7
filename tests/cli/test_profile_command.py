"""`stagewright profile`: what it prints and writes, and how mistakes are answered."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import Cli, Done
from support.inside import folded, main, measured_links, size, summary

from stagewright.partition import Cluster, Node, Profile

SMALL = ("--layers", "2", "--width", "16", "--length", "8", "--seconds", "0.1")
SIZES = {"activation_bytes": 100, "parameter_bytes": 10, "stash_bytes": 1000}
NODES = [
    Node(name=name, forward_seconds=1, backward_seconds=2, workspace_bytes=5 + at, **SIZES)
    for at, name in enumerate("abcd")
]
CHAIN = Profile(nodes=NODES, optimizer_ratio=2.0)


@pytest.mark.thorough
def test_a_profile_is_printed_written_and_shown_again(
    cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "gpt.json"
    assert main(["profile", *SMALL, "--out", str(path)]) == 0
    printed = capsys.readouterr()
    assert "blocks.0" in printed.out
    assert "x2" in printed.out
    assert "blocks.1 " not in printed.out  # folded into the row of its equal
    assert "the sum of the parts is" in printed.out
    assert "units, " in printed.err
    profile = Profile.load(path)
    assert profile.microbatch_size == 2
    assert profile.optimizer_ratio == pytest.approx(2, abs=0.1)
    assert profile.max_grad_norm == 1.0  # as `stagewright train`
    assert " a batch, clipping to 1 in it" in printed.out
    assert main(["profile", "--from-json", str(path)]) == 0
    again = capsys.readouterr()
    assert again.out.splitlines()[0].rstrip() in printed.out
    assert again.err == ""
    assert Profile.from_json(cli.text("profile --from-json", str(path), "--json")) == profile


@pytest.mark.thorough
def test_one_of_several_tensor_ranks_and_a_plan_over_them(
    cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Links that cost nothing and a batch of one: the plan takes the tensor ranks, where cutting pays at all."""
    files = [tmp_path / f"{tensor}.json" for tensor in (1, 2)]
    words = tmp_path / "words.json"
    words.write_text('{"blocks.*.up": "column", "blocks.*.down": "row"}', encoding="utf-8")
    for path, tensor in zip(files, ("1", "2"), strict=True):
        options = ["--microbatch", "1", "--tensor", tensor, "--tensor-parallel", str(words), "--out", str(path)]
        assert main(["profile", *SMALL, *options]) == 0
    assert "one of 2 tensor ranks" in (printed := capsys.readouterr().out)
    assert "sums         4 a microbatch over the 2 tensor ranks" in printed
    one, half = (by_name["blocks.0"] for by_name in ({n.name: n for n in Profile.load(f).nodes} for f in files))
    assert 0.5 < half.parameter_bytes / one.parameter_bytes < 0.75  # the attention stays whole
    arguments = ["plan", "--profile", *map(str, files), "--ranks", "2", "--batch", "1", "--json"]
    assert [stage["tensor"] for stage in cli.json(*arguments, "--tensor 2")["stages"]] == [2]
    assert "has 2 heads, over 3 tensor ranks" in cli.refused("profile", *SMALL, "--heads 2 --tensor 3")
    assert "--tensor-parallel no.json: No such file" in cli.refused(
        "profile", *SMALL, "--tensor 2 --tensor-parallel no.json"
    )


def test_pipedreams_text_is_converted(cli: Cli, tmp_path: Path) -> None:
    text = tmp_path / "graph.txt"
    figures = "forward_compute_time=1.5, backward_compute_time=3.0, activation_size=64.0, parameter_size=8.0"
    text.write_text(f"node1 -- Linear() -- {figures}\nnode2 -- ReLU() -- {figures}\n\tnode1 -- node2\n")
    assert "2 parts" in cli.text("profile --pipedream", str(text), "--out", str(tmp_path / "p.json"))
    profile = Profile.load(tmp_path / "p.json")
    assert profile.origin == "published"
    assert profile.parts_seconds == pytest.approx(9e-3)


def test_nodes_that_were_timed_as_one_make_a_row() -> None:
    def make(name: str, seconds: float) -> Node:
        return Node(name=name, forward_seconds=seconds, backward_seconds=1, spread=0.1)

    rows = folded([make("a", 1), make("b", 2), make("c", 1)])
    assert [(node.name, count) for node, count in rows] == [("a", 2), ("b", 1)]
    assert len(folded(CHAIN.nodes)) == 4  # not measured here: equal figures mean nothing


def test_the_summary_tells_recomputation_and_a_busy_machine() -> None:
    text = "\n".join(summary(CHAIN))
    assert "F 4.00 s, B 8.00 s" in text
    assert "4.00 s more a microbatch (F again, 33% of F + B)" in text
    assert "whole step" not in text

    def text(spread: float) -> str:
        return "\n".join(summary(replace(CHAIN, step_seconds=10.0, step_spread=spread)))

    assert "whole step   10.0 s (spread 5.0%) for F + B at once; the sum of the parts is +20.0% from it" in text(0.05)
    assert "busy" not in text(0.05)
    assert "busy" in text(0.3)


@pytest.mark.thorough
def test_links_between_local_processes(command: Callable[..., Done], tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    done = command("profile", "--links", "--ranks", "2", "--out", str(path))
    assert done.status == 0, done.stderr
    assert "host" in done.stdout
    (level,) = Cluster.load(path).levels
    assert (level.name, level.size) == ("host", 2)
    assert level.bandwidth > 1e6
    (kind,) = Cluster.load(path).kinds
    assert kind.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2  # two ranks share the host
    assert f"memory of a rank: {size(kind.memory_bytes)} of the host" in done.stdout


@pytest.mark.thorough
def test_a_profile_of_two_ranks_at_once(command: Callable[..., Done], tmp_path: Path) -> None:
    """One profile comes of both, with the seconds that a run will see."""
    path = tmp_path / "gpt.json"
    done = command(
        "profile", *SMALL, "--layers", "1", "--ranks", "2", "--no-update", "--clip", "0.25", "--out", str(path)
    )
    assert done.status == 0, done.stderr
    assert done.stdout.count("whole step") == 1
    assert "clipping" not in done.stdout  # no update was measured
    profile = Profile.load(path)
    assert (profile.slowdown, profile.max_grad_norm) == (1.0, 0.25)
    assert profile.action_seconds > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--microbatch", "0"), "--microbatch 0: expected at least 1"),
        (("--seconds", "0"), "--seconds 0.0: expected a number above 0"),
        (("--clip", "-1"), "--clip -1.0: expected a number above 0, or 0 for no clipping"),
        (("--ranks", "2", "--from-json", "x.json"), "--ranks 2 with an existing profile"),
        (("--ranks", "0"), "--ranks 0: expected at least 1"),
        (("--profiles", "x.json"), "--profiles without --links: expected --links"),
        (("--links", "--profiles", "no/such.json"), "no/such.json: No such file"),
        (("--links", "--ranks", "1"), "--ranks 1 with --links: expected at least 2"),
        (("--links", "--from-json", "x.json"), "--links and --from-json: expected one of them"),
        (("--from-json", "no/such.json"), "no/such.json: No such file"),
        (("--width", "30", "--heads", "4"), "width=30 with heads=4"),
    ],
)
def test_mistakes(cli: Cli, words: tuple[str, ...], message: str) -> None:
    assert message in cli.refused("profile", *words)


def test_profiles_of_hosts_are_read_on_the_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need not lie on the disks of other hosts; there a missing file ended the ranks, and the first one waited."""
    from stagewright.comm import World

    def no_file() -> None:
        raise ValueError("hosts.json: No such file")

    heard: list[str] = []

    class Together:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def gather(self, mine: str, *, what: str) -> list[str]:
            heard.append(mine)
            return ["hosts.json: No such file", ""]

        def close(self) -> None:
            pass

    monkeypatch.setattr("stagewright.comm.Collectives", Together)
    for rank, said in ((0, "hosts.json: No such file"), (1, "")):
        monkeypatch.setattr("stagewright.comm.join_world", lambda rank=rank, **_: World(rank=rank, size=2))
        with pytest.raises(ValueError, match=r"hosts\.json: No such file"):
            measured_links("cpu", 1.0, check=no_file)
        assert heard.pop() == said


def test_more_ranks_than_the_job_has(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for words in (["--links"], []):
        assert "--ranks 3 in one of 2 processes: leave --ranks away under torchrun" in cli.refused(
            "profile --ranks 3", *words
        )
