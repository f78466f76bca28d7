"""Plans of version 1, which kept seconds, messages and sums of each stage in the stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ...schedules.timing.costs import Costs
from ...schedules.timing.links import Links, PlaceNetwork, Sum, Way
from ..stage_cost import message_overheads
from ..strict import Fields

_TRAFFIC = ("message_bytes", "latency", "seconds_per_byte", "sum_seconds", "optimizer_seconds", "gather_seconds")
_LATER = ("message_seconds", "sum_busy")  # older files lack them

Traffic = Sequence[Mapping[str, float]]


def read_traffic(stages: Sequence[Fields]) -> Traffic:
    """[S] messages and parts of updates; empty of a plan that keeps none."""
    found = [each for stage in stages if (each := stage.optional_object("traffic")) is not None]
    if found and len(found) < len(stages):
        raise ValueError(f"traffic of {len(found)} of {len(stages)} stages: expected that of all, or of none")
    traffic = []
    for each in found:
        figures = {name: each.number(name) for name in _TRAFFIC}
        traffic.append(figures | {name: each.number(name, default=0.0) for name in _LATER})
        each.done()
    return traffic


def read_costs(plan: Fields, stages: Sequence[Fields], traffic: Traffic, *, num_microbatches: int | None) -> Costs:
    """Costs of a plan and its stages."""
    forward, backward = ([each.number(f"{name}_seconds") for each in stages] for name in ("forward", "backward"))
    halves = [each.optional_number("input_grad_seconds") for each in stages]
    input_grad = [whole / 2 if half is None else half for half, whole in zip(halves, backward, strict=True)]
    weight_grad = [whole - half for whole, half in zip(backward, input_grad, strict=True)]
    forward_ratios, backward_ratios = (
        [each.items(f"{name}_ratios", default=[]) for each in stages] for name in ("forward", "backward")
    )

    def rows(seconds: Sequence[float], ratios: Sequence[Sequence[object]]) -> list[float | list[float]]:
        """[S], by microbatch where replicas differ: `k % replicas` runs microbatch k."""
        indices = range(num_microbatches or 1)
        return [
            [each * float(str(own[k % len(own)])) for k in indices] if own else each
            for each, own in zip(seconds, ratios, strict=True)
        ]

    is_split = any(half is not None for half in halves)
    updates = [each.number("update_seconds", default=0.0) for each in stages]
    busy = [each["message_seconds"] for each in traffic] or [0.0] * len(stages)
    return Costs(
        forward=rows(forward, forward_ratios),
        backward=rows(backward, backward_ratios),
        input_grad=rows(input_grad, backward_ratios) if is_split else None,
        weight_grad=rows(weight_grad, backward_ratios) if is_split else None,
        update=[each["optimizer_seconds"] for each in traffic] or updates,
        overhead=[each.number("action_seconds", default=0.0) for each in stages],
        message_overhead=message_overheads(busy[:-1]),
        around=plan.number("around_seconds", default=0.0),
        norm=plan.optional_number("norm_seconds"),
        tied=tuple(plan.items("tied", default=[])),  # type: ignore[arg-type]
        sum_busy=[each["sum_busy"] for each in traffic] or 0.0,
    )


def links_of(traffic: Traffic, positions: Sequence[int]) -> Links | None:
    """Links of one rank a place; None of a plan that keeps no traffic.

    Arguments:
        positions: [S] place of each stage.
    """
    if not traffic:
        return None
    routes = {
        (min(pair), max(pair)): Way(latency=each["latency"], seconds_per_byte=each["seconds_per_byte"])
        for pair, each in zip(pairwise(positions), traffic[:-1], strict=False)  # a plan refuses other numbers
        if pair[0] != pair[1]
    }
    return Links(
        network=PlaceNetwork(places=tuple((p,) for p in range(max(positions) + 1)), routes=routes),
        activation_bytes=[each["message_bytes"] for each in traffic[:-1]],
        sums=tuple(
            Sum(stage=stage, seconds=each["sum_seconds"], gather=each["gather_seconds"], ways=None)
            for stage, each in enumerate(traffic)
            if each["sum_seconds"] > 0
        ),
    )
