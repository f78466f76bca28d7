"""A plan with what can be done with it; plans as JSON, read strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...schedules.ir import Schedule
from ...schedules.timing.costs import Costs
from ...schedules.timing.links import ON_CARD, AllReduce, Link, Links, PlaceNetwork
from ...schedules.timing.memory import StageBytes
from ...schedules.wording import Displayable, count, duration
from ..memory import MemoryUse
from ..stage_cost import message_overheads
from ..strict import Fields, number, parse_object, read_text
from .as_text import explain
from .record import PlanRecord, PlanStage, RunnerUp, Searched, positions_of
from .shown import exhibit_of_plan
from .to_schedule import schedule_of

_JSON_VERSION = 2
_MODELS = ("default", "pipedream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Displayable, PlanRecord):
    """A `PlanRecord` that can be written, read, explained and carried out."""

    _exhibit = exhibit_of_plan

    def __repr__(self) -> str:
        name = "" if self.schedule is None else f"{self.schedule}, "
        step = self.simulated_step_time
        time = "" if step is None else f", {duration(step)} a batch"
        return f"<Plan {name}{count(len(self.stages), 'stage')} on {count(self.num_devices, 'device')}{time}>"

    def build_schedule(self, *, num_microbatches: int | None = None) -> Schedule:
        """The schedule that carries the plan out, on its ranks; see `to_schedule.schedule_of`."""
        return schedule_of(self, num_microbatches=num_microbatches)

    def explain(self) -> str:
        """A table of the stages, then the runners-up with what each loses, then the notes."""
        return explain(self)

    def to_json(self) -> str:
        """One JSON object with a version; `from_json` reads it."""
        own = {
            "costs": json.loads(self.costs.to_json()),
            "links": None if self.links is None else _links_as_json(self.links),
        }
        return json.dumps({"version": _JSON_VERSION, **asdict(self), **own}, indent=1, default=int)

    @classmethod
    def from_json(cls, text: str, *, source: str = "plan") -> Plan:
        """Read `to_json`'s form. ValueError names `source`, the field and what was expected."""
        try:
            return _read(parse_object(text, source=source))
        except ValueError as error:
            raise ValueError(str(error) if str(error).startswith(source) else f"{source}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a JSON file."""
        return cls.from_json(read_text(path), source=str(path))


def _read(record: Fields) -> Plan:
    version = record.version(1, _JSON_VERSION)
    stages = record.objects("stages")
    num_chunks, schedule = record.count("num_chunks", default=1), record.optional_text("schedule")
    num_microbatches = record.optional_count("num_microbatches")
    positions = positions_of(schedule, num_stages=len(stages), num_chunks=num_chunks)
    if version == 1:
        record.take("allocator", "", default=None)  # nothing that is predicted depends on it
        traffic = _read_traffic(stages)
        costs = _read_costs(record, stages, traffic, num_microbatches=num_microbatches)
        links = _links_of(traffic, positions)
    else:
        costs, links = _costs(record), _links(record.optional_object("links"), num_places=len({*positions}))
    lengths = tuple(number("slice_lengths", each, positive=True) for each in record.items("slice_lengths", default=[]))
    if links is not None and lengths:
        links = replace(links, index_factors=tuple(tokens / sum(lengths) for tokens in lengths))
    searched = record.optional_object("searched")
    given: Mapping[str, Any] = {
        "stages": tuple(map(_stage, stages)),
        "num_chunks": num_chunks,
        "costs": costs,
        "links": links,
        "schedule": schedule,
        "num_microbatches": num_microbatches,
        "slice_lengths": tuple(map(int, lengths)),
        "runners_up": tuple(
            each.made(RunnerUp, positive=("replicas", "num_nodes")) for each in record.objects("runners_up")
        ),
        "searched": None if searched is None else _searched(searched),
    }
    return record.made(Plan, given, choices={"cost_model": _MODELS})


def _costs(record: Fields) -> Costs:
    given = record.take("costs", "an object")
    try:
        return Costs.from_json(json.dumps(given))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{record.at('costs')}: {error}") from None


def _links_as_json(links: Links) -> dict[str, object]:
    assert isinstance(links.network, PlaceNetwork)
    routes = [
        {"places": pair, "latency": way.latency, "seconds_per_byte": way.seconds_per_byte}
        | ({"on_card": True} if way.sending else {})
        | ({"blocks": True} if way.blocks else {})
        for pair, way in links.network.routes.items()
    ]
    sums = [{"stage": each.stage, "seconds": each.seconds, "gather": each.gather} for each in links.sums]
    cards = {"cards": links.network.cards} if links.network.cards else {}
    return {"routes": routes, "activation_bytes": links.activation_bytes, "sums": sums, **cards}


def _links(record: Fields | None, *, num_places: int) -> Links | None:
    """Reads `_links_as_json`'s form; each place of one rank."""
    if record is None:
        return None
    routes: dict[tuple[int, int], Link] = {}
    for route in record.objects("routes"):
        first, second = route.whole_numbers("places", least=0, length=2)
        routes[first, second] = Link(
            latency=route.number("latency"),
            seconds_per_byte=route.number("seconds_per_byte"),
            sending=ON_CARD if route.truth("on_card", default=False) else None,
            blocks=route.truth("blocks", default=False),
        )
        route.done()
    sums = []
    for each in record.objects("sums"):
        stage, seconds, gather = each.whole("stage"), each.number("seconds"), each.number("gather")
        sums.append(AllReduce(stage=stage, seconds=seconds, gather=gather, ways=None))
        each.done()
    sizes = record.items("activation_bytes")
    cards = [Fields({"cards": own}, where=record.where) for own in record.items("cards", default=[])]
    record.done()
    return Links(
        network=PlaceNetwork(
            places=tuple((p,) for p in range(num_places)),
            routes=routes,
            cards=tuple(each.whole_numbers("cards", least=0) for each in cards),
        ),
        activation_bytes=tuple(number(f"{record.at('activation_bytes')}[{i}]", size) for i, size in enumerate(sizes)),
        sums=tuple(sums),
    )


def _stage(record: Fields) -> PlanStage:
    memory, held = record.optional_object("memory"), record.optional_object("held")
    given = {
        "memory": None if memory is None else memory.made(MemoryUse),
        "held": None if held is None else held.made(StageBytes),
    }
    return record.made(PlanStage, given)


def _searched(record: Fields) -> Searched:
    counts = {name: record.whole(name) for name in ("considered", "cut", "simulated", "unfit", "too_long")}
    return record.made(Searched, counts)


# Version 1 kept seconds, messages and sums of each stage in the stage.

_TRAFFIC = ("message_bytes", "latency", "seconds_per_byte", "sum_seconds", "optimizer_seconds", "gather_seconds")
_LATER = ("message_seconds", "sum_busy")  # older files lack them

_Traffic = Sequence[Mapping[str, float]]


def _read_traffic(stages: Sequence[Fields]) -> _Traffic:
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


def _read_costs(plan: Fields, stages: Sequence[Fields], traffic: _Traffic, *, num_microbatches: int | None) -> Costs:
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


def _links_of(traffic: _Traffic, positions: Sequence[int]) -> Links | None:
    """Links of one rank a place; None of a plan that keeps no traffic."""
    if not traffic:
        return None
    routes = {
        (min(pair), max(pair)): Link(latency=each["latency"], seconds_per_byte=each["seconds_per_byte"])
        for pair, each in zip(pairwise(positions), traffic[:-1], strict=False)  # a plan refuses other numbers
        if pair[0] != pair[1]
    }
    return Links(
        network=PlaceNetwork(places=tuple((p,) for p in range(max(positions) + 1)), routes=routes),
        activation_bytes=[each["message_bytes"] for each in traffic[:-1]],
        sums=tuple(
            AllReduce(stage=stage, seconds=each["sum_seconds"], gather=each["gather_seconds"], ways=None)
            for stage, each in enumerate(traffic)
            if each["sum_seconds"] > 0
        ),
    )
