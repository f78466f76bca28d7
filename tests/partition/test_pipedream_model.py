"""PipeDream's figures, reproduced, and its profile text."""

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import Cuts, PipeDreamModel, pipedream_cuts

from stagewright.partition import Cluster, Profile, partition, read_pipedream_profile

from .small import profiles

DATA = Path(__file__).parents[1] / "data" / "pipedream"
RUNS = json.loads((DATA / "runs.json").read_text(encoding="utf-8"))["runs"]


@pytest.mark.thorough(but=["vgg16-[[4, 1000000000.0]]-00", "vgg16-[[4, 10000000000.0], [4, 1250000000.0]]-00"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}-{run[1]}-{run[2]:d}{run[3]:d}")
def test_figures_of_the_shipped_optimizer(run: list) -> None:
    model, levels, compressed, straight, _, seconds, _ = run
    plan = partition(
        read_pipedream_profile(DATA / f"{model}.txt"),
        Cluster.from_levels([tuple(level) for level in levels]),
        cost_model="pipedream",
        activation_compression_ratio=1.0 if compressed else None,
        straight=straight,
    )
    assert plan.bottleneck == pytest.approx(seconds, rel=1e-9)
    assert sorted(rank for stage in plan.stages for rank in stage.ranks) == list(range(plan.num_devices))


@pytest.mark.parametrize(
    ("model", "levels", "options", "replicas", "begin"),
    [
        ("vgg16", [(4, 1e9)], {"activation_compression_ratio": 1.0}, (3, 1), 17),
        ("vgg16", [(16, 1.8e9)], {"activation_compression_ratio": 1.0}, (15, 1), 31),
        ("alexnet", [(16, 1e9)], {"activation_compression_ratio": 1.0}, (15, 1), 13),
        ("vgg16", [(4, 1e9)], {"straight": True}, (1, 1, 1, 1), 3),
        ("gnmt", [(12, 1e10)], {}, (1, 1, 1, 1, 1, 1, 1, 1, 3, 1), None),
    ],
)
def test_published_configurations(
    model: str, levels: list, options: dict, replicas: tuple[int, ...], begin: int | None
) -> None:
    profile = read_pipedream_profile(DATA / f"{model}.txt")
    plan = partition(profile, Cluster.from_levels(levels), cost_model="pipedream", **options)
    assert plan.replicas == replicas
    if begin is not None:
        assert len(plan.stages[0].nodes) == begin


def test_a_group_of_machines_belongs_to_one_outer_stage() -> None:
    plan = partition(
        read_pipedream_profile(DATA / "vgg16.txt"),
        Cluster.from_levels([(4, 1e10), (4, 1.25e9)]),
        cost_model="pipedream",
        activation_compression_ratio=1.0,
    )
    assert plan.stages[0].ranks == tuple(range(12))  # 3 groups, 4 replicas in each
    assert {rank for stage in plan.stages[1:] for rank in stage.ranks} == {12, 13, 14, 15}


def slow(cuts: Cuts, levels: list[tuple[int, float]], rho: float | None, straight: bool) -> float:
    """The formula of `pipedream_format.md`, one number at a time."""
    a, last = cuts.crossing, len(cuts) - 1
    compute = {
        (i, j): cuts.seconds[j] - cuts.seconds[i] for i, j in product(range(last + 1), repeat=2) if cuts.inside[i, j]
    }
    below = 1
    for M, B in levels:
        table: dict[tuple[int, int, int], float] = {}
        for (i, j), m in product(sorted(compute, key=lambda ij: ij[1]), range(1, M + 1)):
            W = cuts.parameters[j] - cuts.parameters[i]
            best = (compute[i, j] + 4 * (m - 1) / m * W / B / below) / m if m == 1 or not straight else float("inf")
            for k, q in product(range(i + 1, j), range(1, 2 if straight else m)):
                if (i, k) not in compute or (k, j) not in compute or q >= m:
                    continue
                terms = [
                    table[i, k, m - q],
                    (compute[k, j] + 4 * (q - 1) / q * (cuts.parameters[j] - cuts.parameters[k]) / B) / q,
                ]
                if rho is not None:
                    terms += [2 * a[k] / (B * q * rho), 0 if j == last else 2 * a[j] / (B * q * rho)]
                best = min(best, max(terms))
            table[i, j, m] = best
        compute, below = {ij: table[(*ij, M)] for ij in compute}, M
    return compute[0, last]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    profiles(max_nodes=6),
    st.sampled_from([[(1, 1.0)], [(4, 2.0)], [(2, 3.0), (3, 0.5)], [(3, 3.0), (1, 1.0), (2, 0.5)]]),
    st.sampled_from([None, 1.0, 2.5]),
    st.booleans(),
)
def test_tables_and_backtracking(
    profile: Profile, levels: list[tuple[int, float]], rho: float | None, straight: bool
) -> None:
    cuts = pipedream_cuts(profile)
    model = PipeDreamModel(cuts, levels, compression=rho, straight=straight)
    assert model.seconds == pytest.approx(slow(cuts, levels, rho, straight), rel=1e-12)
    if model.seconds < float("inf"):
        blocks = model.blocks(len(levels) - 1, 0, len(cuts) - 1)
        assert [last for _, last, *_ in blocks[:-1]] == [first for first, *_ in blocks[1:]]
        assert sum(machines for *_, machines, _ in blocks) == levels[-1][0]
        assert model.blocks(len(levels) - 1, 0, len(cuts) - 1) == blocks


def test_what_the_model_does_not_know_is_refused() -> None:
    profile = read_pipedream_profile(DATA / "alexnet.txt")
    cluster = Cluster.from_levels([(4, 1e9)])
    with pytest.raises(ValueError, match=r"memory_limit=1.0 with cost_model='pipedream': expected None"):
        partition(profile, cluster, cost_model="pipedream", memory_limit=1.0)
    with pytest.raises(ValueError, match=r"no plan without replicas for 22 cuts on 32 devices"):
        partition(profile, Cluster.from_levels([(32, 1e9)]), cost_model="pipedream", straight=True)


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
