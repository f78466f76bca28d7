"""Plans as JSON, read strictly."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TypeVar

from ...schedules.timing.costs import Costs
from ...schedules.timing.links import Links, PlaceNetwork, Sum, Way
from ...schedules.timing.memory import StageBytes
from ..memory import MemoryUse
from ..stage_cost import RECOMPUTE
from ..strict import Fields, fail, number, parse_object
from . import version1
from .record import PlanRecord, PlanStage, RunnerUp, positions_of
from .searched import Searched

P = TypeVar("P", bound=PlanRecord)
Bytes = TypeVar("Bytes", MemoryUse, StageBytes)
_JSON_VERSION = 2
_MODELS = ("default", "pipedream")


def to_json(plan: PlanRecord) -> str:
    """One JSON object with a version."""
    own = {
        "costs": json.loads(plan.costs.to_json()),
        "links": None if plan.links is None else _links_as_json(plan.links),
    }
    return json.dumps({"version": _JSON_VERSION, **asdict(plan), **own}, indent=1)


def from_json(kind: type[P], text: str, *, source: str) -> P:
    """Read `to_json`'s form as a record of this kind. ValueError names `source`, the field and what was expected."""
    record = parse_object(text, source=source)
    version = record.version(1, _JSON_VERSION)
    try:
        stages = record.objects("stages")
        num_chunks, schedule = record.count("num_chunks", default=1), record.optional_text("schedule")
        num_microbatches = record.optional_count("num_microbatches")
        positions = positions_of(schedule, num_stages=len(stages), num_chunks=num_chunks)
        if version == 1:
            record.take("allocator", "", default=None)  # nothing that is predicted depends on it
            traffic = version1.read_traffic(stages)
            costs = version1.read_costs(record, stages, traffic, num_microbatches=num_microbatches)
            links = version1.links_of(traffic, positions)
        else:
            costs, links = _costs(record), _links(record.optional_object("links"), num_places=len({*positions}))
        plan = kind(
            stages=tuple(map(_stage, stages)),
            num_devices=record.count("num_devices"),
            num_chunks=num_chunks,
            costs=costs,
            links=links,
            cost_model=record.text("cost_model", choices=_MODELS),
            predicted_step_time=record.number("predicted_step_time"),
            bound=record.number("bound"),
            schedule=schedule,
            order=tuple(str(each) for each in record.items("order", default=[])),
            num_microbatches=num_microbatches,
            microbatch_size=record.optional_count("microbatch_size"),
            simulated_step_time=record.optional_number("simulated_step_time"),
            simulated_bubble=record.optional_number("simulated_bubble"),
            tried_seconds=record.optional_number("tried_seconds"),
            runners_up=tuple(_runner_up(each) for each in record.objects("runners_up")),
            notes=tuple(str(note) for note in record.items("notes")),
            searched=None if (searched := record.optional_object("searched")) is None else _searched(searched),
        )
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(source) else f"{source}: {error}") from None
    record.done()
    return plan


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
        for pair, way in links.network.routes.items()
    ]
    sums = [{"stage": each.stage, "seconds": each.seconds, "gather": each.gather} for each in links.sums]
    return {"routes": routes, "activation_bytes": links.activation_bytes, "sums": sums}


def _links(record: Fields | None, *, num_places: int) -> Links | None:
    """What `_links_as_json` gives; each place of one rank."""
    if record is None:
        return None
    routes: dict[tuple[int, int], Way] = {}
    for route in record.objects("routes"):
        first, second = _whole_numbers(route, "places", least=0, length=2)
        routes[first, second] = Way(latency=route.number("latency"), seconds_per_byte=route.number("seconds_per_byte"))
        route.done()
    sums = []
    for each in record.objects("sums"):
        sums.append(
            Sum(
                stage=each.whole("stage"),
                seconds=each.number("seconds"),
                gather=each.number("gather"),
                ways=None,
            )
        )
        each.done()
    sizes = record.items("activation_bytes")
    record.done()
    return Links(
        network=PlaceNetwork(places=tuple((p,) for p in range(num_places)), routes=routes),
        activation_bytes=tuple(number(f"{record.at('activation_bytes')}[{i}]", size) for i, size in enumerate(sizes)),
        sums=tuple(sums),
    )


def _stage(record: Fields) -> PlanStage:
    memory, held = record.optional_object("memory"), record.optional_object("held")
    stage = PlanStage(
        nodes=tuple(str(node) for node in record.items("nodes")),
        ranks=_whole_numbers(record, "ranks", least=0),
        tensor=record.count("tensor", default=1),
        step_seconds=record.number("step_seconds"),
        spread=record.number("spread", default=0.0),
        parameter_bytes=record.optional_number("parameter_bytes"),
        memory=None if memory is None else _figures(MemoryUse, memory),
        memory_limit=record.optional_number("memory_limit"),
        held=None if held is None else _figures(StageBytes, held),
        in_flight=record.optional_count("in_flight"),
        recompute=record.text("recompute", choices=RECOMPUTE, default="none"),
        optimizer_shards=record.count("optimizer_shards", default=1),
    )
    record.done()
    return stage


def _figures(kind: type[Bytes], record: Fields) -> Bytes:
    """A record of numbers of which each may be left out."""
    values = {each.name: record.number(each.name, default=0.0) for each in fields(kind)}
    record.done()
    return kind(**values)


def _searched(record: Fields) -> Searched:
    counts = {name: record.whole(name) for name in ("considered", "cut", "simulated", "unfit", "too_long")}
    found = Searched(**counts, least_left=record.optional_number("least_left"), least=record.number("least"))
    record.done()
    return found


def _runner_up(record: Fields) -> RunnerUp:
    other = RunnerUp(
        label=record.text("label", default=""),
        replicas=_whole_numbers(record, "replicas", least=1),
        num_nodes=_whole_numbers(record, "num_nodes", least=1),
        predicted_step_time=record.number("predicted_step_time"),
        simulated_step_time=record.optional_number("simulated_step_time"),
        memory_bytes=record.optional_number("memory_bytes"),
    )
    record.done()
    return other


def _whole_numbers(record: Fields, key: str, *, least: int, length: int | None = None) -> tuple[int, ...]:
    values = record.items(key)
    if length is not None and len(values) != length:
        fail(record.at(key), values, f"{length} whole numbers")
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{record.at(key)}[{i}]: {value!r}: expected a whole number of at least {least}")
    return tuple(int(str(value)) for value in values)
