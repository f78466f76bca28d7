"""Each node over a tensor group divided, whole or by samples: against all assignments, and what a plan makes of it."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
from support.inside import choose_splits

from stagewright.partition import Cluster, Node, Plan, PlanStage, Profile, plan
from stagewright.schedules import Op

LATENCY, PER_BYTE = 0.3, 0.1


def priced(node: Node) -> Node:
    forward, backward = (
        number * LATENCY + num_bytes * PER_BYTE
        for number, num_bytes in (
            (node.forward_sums, node.forward_sum_bytes),
            (node.backward_sums, node.backward_sum_bytes),
        )
    )
    return replace(
        node, forward_seconds=node.forward_seconds + forward, backward_seconds=node.backward_seconds + backward
    )


def random_profiles(seed: int) -> tuple[Profile, Profile, Profile]:
    """A chain, sometimes with a branch: a microbatch on one rank and over two, and half of it on one; figures differ
    freely, and some nodes hand halves of their features on."""
    rng = random.Random(seed)
    n = rng.randint(2, 5)
    names = [f"n{i}" for i in range(n)]
    edges = list(pairwise(names))
    if n > 3 and rng.random() < 0.4:
        edges.append((names[0], names[rng.randrange(2, n)]))
    whole, cut, half = [], [], []
    for i, name in enumerate(names):
        weights, split = rng.choice((0.0, 4.0, 12.0, 60.0)), rng.choice(("any",) * 5 + ("divided",))
        one = Node(
            name=name,
            forward_seconds=rng.randint(2, 20) / 4,
            backward_seconds=rng.randint(2, 40) / 4,
            activation_bytes=rng.choice((2.0, 8.0, 30.0)),
            parameter_bytes=weights,
            largest_parameter_bytes=weights and weights / rng.choice((1, 2)),
            split=split,
        )
        parts = bool(cut) and cut[-1].activation_bytes < whole[-1].activation_bytes  # of features come in
        is_cut = weights > 0 and split == "any" and rng.random() < 0.7
        on = is_cut and i < n - 1 and not parts and rng.random() < 0.5
        faster = 0.55 if is_cut or parts else 1.0
        sums = {"forward_sums": 1.0, "forward_sum_bytes": one.activation_bytes} if is_cut and not on else {}
        whole.append(one)
        cut.append(
            replace(
                one,
                split="divided",
                forward_seconds=one.forward_seconds * faster,
                backward_seconds=one.backward_seconds * faster,
                parameter_bytes=weights / 2 if is_cut else weights,
                largest_parameter_bytes=0.0,
                activation_bytes=one.activation_bytes / (2 if on else 1),
                **sums,
            )
        )
        share = rng.choice((0.5, 0.6, 1.0))
        half.append(
            replace(
                one, forward_seconds=one.forward_seconds * share, backward_seconds=one.backward_seconds * share,
                activation_bytes=one.activation_bytes / 2,
            )
        )  # fmt: skip
    shared: dict[str, Any] = {"edges": tuple(edges)}
    return (
        Profile(nodes=whole, microbatch_size=2, **shared),
        Profile(nodes=cut, microbatch_size=2, tensor=2, **shared),
        Profile(nodes=half, microbatch_size=1, **shared),
    )


@cache
def seconds(node: Node) -> float:
    return priced(node).seconds


def seconds_of(splits: tuple[str, ...], whole: Profile, cut: Profile, half: Profile) -> float | None:
    """F + B of all nodes, with the seconds of what travels as the runtime does it; None for splits that do not run."""
    place = {node.name: i for i, node in enumerate(whole.nodes)}
    edges = [(place[a], place[b]) for a, b in whole.edges or ()]
    takers = [[b for a, b in edges if a == i] for i in range(len(splits))]
    makers = [[a for a, b in edges if b == i] for i in range(len(splits))]
    has_part = [c.activation_bytes < w.activation_bytes for c, w in zip(cut.nodes, whole.nodes, strict=True)]
    for a, b in edges:
        if has_part[a] and (splits[a] == "divided") != (splits[b] == "divided"):
            return None
    total = 0.0
    for i, split in enumerate(splits):
        one = whole.nodes[i]
        if one.split == "divided" and split != "divided":
            return None
        if split != "samples":
            total += seconds(cut.nodes[i] if split == "divided" else one)
            continue
        part = half.nodes[i]
        total += part.seconds
        goes_on = takers[i] == [i + 1] and makers[i + 1] == [i] and splits[i + 1] == "samples"
        comes_in = len(makers[i]) == 1 and takers[i - 1] == [i] and makers[i] == [i - 1] and splits[i - 1] == "samples"
        if not goes_on:
            total += LATENCY / 2 + PER_BYTE * one.activation_bytes / 2
        if makers[i] and not comes_in:
            total += LATENCY / 2 + PER_BYTE * sum(whole.nodes[m].activation_bytes for m in makers[i]) / 2
        if part.parameter_bytes:
            total += LATENCY * part.parameter_bytes / part.largest_parameter_bytes + PER_BYTE * part.parameter_bytes
    return total


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_no_assignment_takes_less(first: int) -> None:
    seen: set[str] = set()
    for seed in range(first, first + 100):
        profiles = random_profiles(seed)
        found = choose_splits(*profiles, priced)
        every = product(("divided", "whole", "samples"), repeat=len(found))
        least = min(took for splits in every if (took := seconds_of(splits, *profiles)) is not None)
        assert sum(node.seconds for node in found) == pytest.approx(least, rel=1e-12), seed
        words = tuple(node.split.split()[0] for node in found)
        assert seconds_of(words, *profiles) == pytest.approx(least, rel=1e-12), seed
        seen.update(node.split for node in found)
    assert seen == {"divided", "whole", "samples", "samples on"}


# --- a convolutional network, by formula: ms, MB ---

CONVOLUTIONS = {"c1": (20.0, 0.1, 24.0), "c2": (40.0, 1.2, 18.0), "c3": (30.0, 3.5, 6.0)}  # F, weights, activations
LINEARS = {"fc1": (9.0, 150.0, 0.5), "fc2": (4.0, 67.0, 0.5)}
LINKS = "2:link=10GB/s@20us"


def made(name: str, figures: tuple[float, float, float], samples: int, *, tensor: int = 1) -> Node:
    """Costs of 32 samples, or of so many; a linear layer is also as slow as its weights are read."""
    took, weights, out = figures
    read = weights / 50 / tensor * (name in LINEARS)
    sums = 1.0 if tensor > 1 and name in LINEARS else 0.0
    forward = (took * samples / 32 / (tensor if name in LINEARS else 1) + read) * 1e-3
    held = weights * 1e6 / (tensor if name in LINEARS else 1)
    return Node(
        name=name,
        forward_seconds=forward,
        backward_seconds=2 * forward,
        activation_bytes=out * 1e6 * samples / 32,
        stash_bytes=out * 1e6 * samples / 32,
        parameter_bytes=held,
        largest_parameter_bytes=held,
        forward_sums=sums,
        forward_sum_bytes=sums * out * 1e6 * samples / 32,
        backward_sums=sums,
        backward_sum_bytes=sums * out * 1e6 * samples / 32,
        split="any" if tensor == 1 else "divided",
    )


def profiles(layers: dict[str, tuple[float, float, float]], size: int) -> list[Profile]:
    return [
        Profile(nodes=[made(name, own, samples, tensor=t) for name, own in layers.items()], **sizes)  # type: ignore[arg-type]
        for samples in (size // 2, size)
        for t in (1, 2)
        for sizes in [{"microbatch_size": samples, "tensor": t, "optimizer_ratio": 0.0}]
    ]


def with_split(given: list[Profile], split: str) -> list[Profile]:
    return [
        each if each.tensor > 1 else replace(each, nodes=[replace(node, split=split) for node in each.nodes])
        for each in given
    ]


def planned(given: list[Profile], cluster: str = LINKS, **options: Any) -> Plan:
    size = max(each.microbatch_size or 0 for each in given)
    settings = {"global_batch": 8 * size, "microbatch_sizes": (size,), "tensor_sizes": (2,), "schedules": "1f1b"}
    return plan(given, Cluster.parse(cluster), **(settings | options))  # type: ignore[arg-type]


def test_convolutions_by_samples_and_linear_layers_divided() -> None:
    """Simulated seconds of a batch, in one stage and in two: by node at most as long as one split for all."""
    given = profiles(CONVOLUTIONS | LINEARS, 32)
    found = planned(given)
    on, by, cut = "samples on", "samples", "divided"
    assert [stage.splits for stage in found.stages] == [(on, on, by, cut, cut)]
    assert "nodes 3 by samples and 2 divided" in found.explain()
    by_samples = planned(with_split(given, "samples"))
    assert [stage.splits for stage in by_samples.stages] == [(on, on, on, on, by)]
    steps = [each.simulated_step_time or 0.0 for each in (found, planned(with_split(given, "divided")), by_samples)]
    print(f"by layer {steps[0]:.3f} s, divided {steps[1]:.3f} s, by samples {steps[2]:.3f} s a batch")
    assert steps[0] < 0.6 * steps[1] < steps[1]
    assert steps[0] < 0.86 * steps[2]
    for sizes in ((1,), (2,)):
        options = {"cluster": "4:link=10GB/s@20us", "pipeline_sizes": sizes}
        each = [planned(with_split(given, split), **options) for split in ("any", "divided", "samples")]  # type: ignore[arg-type]
        seconds = [one.simulated_step_time or 0.0 for one in each]
        assert seconds[0] <= min(seconds)


def test_memory_counts_whole_weights_and_parts_of_activations() -> None:
    found = planned(profiles(CONVOLUTIONS | LINEARS, 32))
    memory = found.stages[0].memory
    assert memory.parameters == pytest.approx(1e6 * (0.1 + 1.2 + 3.5 + (150 + 67) / 2))
    assert memory.activations == pytest.approx(1e6 * ((24 + 18 + 6) / 2 + 0.5 + 0.5))


def test_a_cut_between_parts_puts_them_together() -> None:
    """What is paid at a cut behind "samples on": half a sum in F of the stage in front, and in B of that behind."""
    given = profiles(CONVOLUTIONS | LINEARS, 32)
    whole = planned(given)
    two = planned(given, "4:link=10GB/s@20us", pipeline_sizes=(2,), data_sizes=(1,))
    assert [stage.splits[-1] for stage in two.stages] == ["samples on", "divided"]
    assert two.stages[0].nodes == ("c1", "c2")
    half_a_sum = 18e6 / 2 / 10e9 + 20e-6  # two ranks: a sum sends all bytes, and waits for latency twice
    for op in (Op.F, Op.B):
        assert sum(two.seconds(op)) == pytest.approx(sum(whole.seconds(op)) + half_a_sum)
    assert two.seconds(Op.F)[0] == pytest.approx(30e-3 + half_a_sum)
    assert two.seconds(Op.B)[0] == pytest.approx(60e-3 + 1.3e6 / 10e9 + 2 * 40e-6)  # two sums of gradients


def test_with_little_memory_weights_are_divided_though_it_takes_longer() -> None:
    given = profiles({"c1": (40.0, 60.0, 24.0), **LINEARS}, 32)
    assert planned(given, "2:link=40GB/s").stages[0].splits[0] == "samples"
    halved = [
        each if each.tensor == 1 else
        replace(each, nodes=[replace(each.nodes[0], parameter_bytes=30e6, largest_parameter_bytes=0), *each.nodes[1:]])
        for each in given
    ]  # fmt: skip
    limit = 2 * (30 + 217 / 2) * 1e6 + 30e6
    tight = planned(halved, "2:link=40GB/s", memory_limit=limit, recompute="none")
    assert tight.stages[0].splits == ()


def test_files() -> None:
    given = profiles(CONVOLUTIONS | LINEARS, 32)
    assert [Profile.from_json(each.to_json()) for each in given] == given
    found = planned(given)
    assert Plan.from_json(found.to_json()) == found
    old = given[0].to_json().replace('"split": "any",', "").replace('"joining_seconds": 0.0', '"spread": 0.0')
    old = old.replace('   "spread": 0.0,\n', "", 3).replace('   "spread": 0.0,\n', "")
    assert {node.split for node in Profile.from_json(old).nodes} == {"divided"}
    lines = [line for line in found.to_json().splitlines() if '"samples' not in line and '"divided"' not in line]
    text = "\n".join(lines).replace('"splits": [\n   ]', '"splits": []')
    assert Plan.from_json(text).stages[0].splits == ()


def test_refused_by_name() -> None:
    given = profiles(CONVOLUTIONS | LINEARS, 32)
    with pytest.raises(ValueError, match="node c1: split: 'rows': expected one of any, divided, whole, samples"):
        replace(given[0].nodes[0], split="rows")
    odd = [replace(each, microbatch_size=3 * (each.microbatch_size or 0) // 16) for each in given]  # 3 and 6 samples
    sizes: dict[str, Any] = {"microbatch_sizes": (3,), "global_batch": 6}
    assert planned(odd, **sizes).stages[0].splits == ()
    with pytest.raises(
        ValueError, match=r"node 'c1': split='samples' over T=2 ranks: .*a profile of 1/T of the microb"
    ):
        planned(with_split(odd, "samples"), **sizes)
    with pytest.raises(ValueError, match="node 'fc2': split='samples on' over T=2 ranks: expected 'any', or what goes"):
        planned(with_split(given, "samples on"))
    stage = {"nodes": ("a", "b"), "ranks": (0, 1), "step_seconds": 1.0}
    for splits, tensor in ((("samples",), 2), (("samples", "any"), 2), (("whole", "whole"), 1)):
        with pytest.raises(ValueError, match=r"splits=\(.*expected one of divided, .* for each of 2 nodes, over 2"):
            PlanStage(splits=splits, tensor=tensor, **stage)  # type: ignore[arg-type]
