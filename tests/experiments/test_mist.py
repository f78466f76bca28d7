"""Mist's measured plans: the iteration follows from work and links, and from nothing that holds the answer."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.inside import (
    MEASURED,
    OPERATIONS,
    Case,
    DeviceModel,
    How,
    LayerBytes,
    MeasuredPlan,
    Transformer,
    measured,
    memory_of_plans,
    message_behind,
    message_seconds,
    predicted,
    sent,
    simulate_plans,
    transformer_profile,
    warm_up_sends,
)
from support.inside import mist_findings as findings
from support.inside import mist_links_bandwidth as bandwidth
from support.inside import mist_simulated as simulated

PLANS = measured().plans
Row = dict[str, str]


def written(path: Path, change: Callable[[Row], Row | None]) -> Path:
    """A copy of the measured rows, each changed, or left out."""
    lines = [line for line in MEASURED.read_text().splitlines() if not line.startswith("#")]
    rows = [row for row in map(change, csv.DictReader(lines)) if row is not None]
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def test_iterations_are_those_measured() -> None:
    figures = list(simulate_plans(Case.of({"plans": "half"}), 1))
    off = [abs(figure.value - 1) for figure in figures if figure.name == "simulated / measured"]
    assert len(off) == 8
    assert sum(off) / len(off) < 0.01
    assert max(off) < 0.03
    assert sum(figure.how is How.PUBLISHED for figure in figures) == 8
    assert "6_7B on l4 in 7 stages (+2.7%)" in list(findings(figures))[1]


def test_links_count() -> None:
    """Were messages for nothing, plans of many stages would come out 5% and more too short."""
    off = [simulated(plan, 1e12).batch_seconds / plan.seconds - 1 for plan in PLANS if len(plan.stages) > 4]
    assert max(off) < -0.04


def test_nothing_goes_in_that_says_how_long_a_rank_waited(tmp_path: Path) -> None:
    """Waits and the iteration itself scrambled: the same prediction, to the last bit."""

    def scrambled(row: Row) -> Row:
        middle = 0 < int(row["stage"]) < int(row["P"]) - 1
        lone = int(row["stage"]) == int(row["P"]) - 2
        waits = dict.fromkeys(("time_ms", "sendrecv_ms", "bwdrecv_ms"), "123456")
        waits |= {} if lone else {"send_ms": "123456"}
        waits |= {"opt_ms": "123456", "emb_ms": "123456"} if middle else {}
        if not middle and row["stage"] != "0":
            waits |= {"emb_ms": str(float(row["emb_ms"]) + 1000)}  # the last stage waits for the first
        return row | waits

    path = written(tmp_path / "plans.csv", scrambled)
    assert bandwidth("l4", path) == bandwidth("l4")
    for plan, other in zip(PLANS, measured(path).plans, strict=True):
        assert other.seconds == pytest.approx(123.456)
        assert simulated(other, bandwidth("l4")).batch_seconds == simulated(plan, bandwidth("l4")).batch_seconds


def plan_cut_behind(operation: int, *, tensor: tuple[int, int] = (1, 1)) -> MeasuredPlan:
    plan = next(plan for plan in PLANS if len(plan.stages) == 2)
    first, last = plan.stages
    return replace(
        plan,
        stages=(
            replace(first, last=operation, tensor=tensor[0]),
            replace(last, first=operation + 1, tensor=tensor[1]),
        ),
    )


@pytest.mark.parametrize(
    ("operation", "times_wide"),
    [(0, 1), (1, 2), (2, 4), (3, 2 + 32), (7, 2), (8, 1), (10, 5), (11, 5), (12, 2), (13, 1), (14, 2), (26, 1)],
)
def test_bytes_behind_each_operation(operation: int, times_wide: int) -> None:
    """In activations of 2048 x 2048 values of 16 bits; scores are 32 heads of 2048 x 2048."""
    message = message_behind(plan_cut_behind(operation), 0)
    assert message.sent == times_wide * 2 * 2048 * 2048
    assert message.gathered_before == message.gathered_behind == 0


def test_tensor_ranks_send_their_share_and_gather_what_all_need() -> None:
    wide = 2 * 2048 * 2048
    between = message_behind(plan_cut_behind(11, tensor=(2, 2)), 0)
    assert between.sent == 5 * wide / 2
    assert between.gathered_before == between.gathered_behind == wide / 2
    onto_two = message_behind(plan_cut_behind(13, tensor=(1, 2)), 0)
    assert (onto_two.sent, onto_two.gathered_before, onto_two.gathered_behind) == (wide, 0, wide / 2)


def test_where_gpus_reach_each_other_both_messages_of_an_exchange_go_at_once() -> None:
    plan = PLANS[-1]
    with_links = replace(plan, platform="A100-SXM4-40GB")
    assert simulated(with_links, 1e10).batch_seconds < simulated(plan, 1e10).batch_seconds
    assert simulated(with_links, 1e10).batch_seconds == pytest.approx(simulated(plan, 2e10).batch_seconds)


def test_plans_with_missing_ranks_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "plans.csv", lambda row: None if (row["P"], row["rank"]) == ("6", "4") else row)
    figures = list(simulate_plans(Case.of({"plans": str(path)}), 1))
    assert sum(figure.name == "iteration" for figure in figures) == 14
    assert list(findings(figures))[-1].startswith("Left out, since rows of ranks are missing: l4, 6_7B,")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fwd_ms": "soon"}, r"plans.csv, line 2: fwd_ms: 'soon': expected a finite number of at least 0"),
        ({"m": "0"}, r"line 2: m: '0': expected a whole number of at least 1"),
        ({"ops": "7"}, r"ops of all stages: 7: expected 13 of each layer and 3"),
        ({"hidden": ""}, r"line 2: hidden: '': expected a value"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, change: Row, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measured(written(tmp_path / "plans.csv", lambda row: row | change if row["P"] == "1" else row))
    with pytest.raises(ValueError, match=r"nowhere.csv: .*expected a CSV file"):
        measured(tmp_path / "nowhere.csv")


def test_peaks_of_memory_are_those_measured() -> None:
    figures = list(memory_of_plans(Case.of({"plans": "half"}), 1))
    off = [abs(figure.value - 1) for figure in figures if figure.name == "tensors, predicted / measured"]
    assert len(off) == 33
    assert sum(off) / len(off) < 0.015
    assert max(off) < 0.04
    assert next(iter(findings(figures))) == "Peaks of tensors are off by 1.0% on average, 3.5% at most (33 stages)."


@pytest.mark.parametrize("tensor", [1, 2])
def test_operations_of_a_layer_keep_and_hold_what_the_formulas_say_of_it(tensor: int) -> None:
    plan = PLANS[0]
    operations = LayerBytes.of(plan, replace(plan.stages[0], tensor=tensor))
    model = Transformer(layers=1, hidden=plan.hidden, heads=32, vocabulary=512, length=plan.length)
    device = DeviceModel.preset("A100-80GB")
    layer = transformer_profile(model, microbatch_size=1, tensor=tensor, device=device).nodes[1]
    assert sum(operations.kept) == pytest.approx(layer.stash_bytes)
    assert sum(operations.parameters) == pytest.approx(layer.parameter_bytes, rel=1e-3)
    assert sum(operations.saved) < sum(operations.kept)
    assert sum(operations.kept) - operations.saved_by(range(8)) == 2 * 2048 * plan.hidden  # the layer's input


def test_memory_follows_recomputation_and_microbatches_in_flight() -> None:
    plan = next(plan for plan in PLANS if len(plan.stages) == 4)

    def activations(number: int, recomputed: int) -> float:
        stages = [*plan.stages]
        stages[number] = replace(stages[number], recomputed=recomputed)
        return predicted(replace(plan, stages=tuple(stages)), number).activations

    layers = (plan.stages[1].last - plan.stages[1].first + 1) // OPERATIONS
    scores = 32 * 2048 * 2048
    held = activations(1, 0) - activations(1, 2 * layers)  # dropouts of scores and contexts, of 3 microbatches
    assert held == pytest.approx(3 * layers * 3 * scores)
    again = predicted(plan, 1).workspace - predicted(replace(plan, num_microbatches=1), 1).workspace
    assert again == 0
    assert predicted(replace(plan, num_microbatches=1), 1).activations == pytest.approx(
        predicted(plan, 1).activations / 3
    )


def test_behind_the_batch_gradients_are_in_float32() -> None:
    plan = PLANS[0]
    small = replace(plan, length=2, microbatch_size=1)
    use = predicted(small, 0)
    assert use.total == pytest.approx(9 * use.parameters)  # 18 bytes a parameter, of which 2 are weights
    assert use.activations == 0


def test_sends_of_the_warm_up_follow_from_forwards_and_messages() -> None:
    """All stages count, although one of them alone says the bandwidth: the others' sends are mostly waits."""
    ratios = []
    for plan in PLANS:
        forward = [sum(rank.forward for rank in stage.ranks) / len(stage.ranks) for stage in plan.stages]
        seconds = [each / plan.num_microbatches for each in forward]
        said = warm_up_sends(seconds, message_seconds(plan, bandwidth("l4")))
        ratios += [each / sent(stage) for each, stage in zip(said, plan.stages, strict=False)]
    assert len(ratios) == 25
    assert sorted(ratios)[12] == pytest.approx(1.0, abs=0.1)
    assert all(0.7 < ratio < 1.6 for ratio in ratios)


def test_messages_between_nodes_follow_from_the_sends_in_front_of_them() -> None:
    """Sends as messages of 40 ms between the nodes would make them: these are found again, the others stay."""
    plan = PLANS[-1]
    apart = [
        replace(stage, ranks=(replace(stage.ranks[0], number=number + (4 if number > 3 else 0)),))
        for number, stage in enumerate(plan.stages)
    ]
    inside = message_seconds(plan, 1e10)
    truth = [*inside[:3], 0.040, *inside[4:]]
    sends = warm_up_sends([stage.ranks[0].forward / plan.num_microbatches for stage in apart], truth)
    stages = tuple(
        replace(stage, ranks=(replace(stage.ranks[0], send=send),))
        for stage, send in zip(apart, [*sends, 0.0], strict=True)
    )
    two_nodes = replace(plan, stages=stages)
    assert message_seconds(two_nodes, 1e10) == pytest.approx(truth)
    longer = simulated(two_nodes, 1e10).batch_seconds - simulated(plan, 1e10).batch_seconds
    assert 1.0 < longer < 2 * 0.040 * plan.num_microbatches  # the stages at the cut were not the slowest
