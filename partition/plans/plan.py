"""A plan with what can be done with it; plans as JSON, read strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...schedules.ir import Schedule
from ...schedules.timing.costs import Costs
from ...schedules.timing.links import ON_CARD, AllReduce, Link, Links, PlaceNetwork
from ...schedules.timing.memory import StageBytes
from ...schedules.wording import count, duration
from ..memory import MemoryUse
from ..strict import Fields, number, parse_object, read_text
from .as_schedule import exhibit_of_plan, schedule_of
from .as_text import explain
from .record import PlanRecord, PlanStage, RunnerUp, Searched

_JSON_VERSION = 3
_MODELS = ("default", "pipedream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanRecord):
    """A `PlanRecord` that can be written, read, explained and carried out."""

    exhibit = exhibit_of_plan

    def __repr__(self) -> str:
        name = "" if self.schedule is None else f"{self.schedule}, "
        step = self.simulated_step_time
        time = "" if step is None else f", {duration(step)} a batch"
        return f"<Plan {name}{count(len(self.stages), 'stage')} on {count(self.num_devices, 'device')}{time}>"

    def build_schedule(self, *, num_microbatches: int | None = None) -> Schedule:
        """The schedule that carries the plan out, on its ranks; see `schedule_of`."""
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
    record.version(_JSON_VERSION)
    stages = record.objects("stages")
    num_chunks, schedule = record.count("num_chunks", default=1), record.optional_text("schedule")
    num_microbatches = record.optional_count("num_microbatches")
    read = tuple(map(_stage, stages))
    costs = _costs(record)
    links = _links(record.optional_object("links"), num_places=len({each.ranks for each in read}))
    lengths = tuple(number("slice_lengths", each, positive=True) for each in record.items("slice_lengths", default=[]))
    if links is not None and lengths:
        links = replace(links, index_factors=tuple(tokens / sum(lengths) for tokens in lengths))
    searched = record.optional_object("searched")
    given: Mapping[str, Any] = {
        "stages": read,
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
    return record.made(Plan, given, positive=("context", "expert"), choices={"cost_model": _MODELS})


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
        | {name: value for name in ("blocks", "meets", "buffer") if (value := getattr(way, name))}
        for pair, way in links.network.routes.items()
    ]
    sums = [
        {"stage": each.stage, "seconds": each.seconds, "gather": each.gather}
        | ({"unshards": True} if each.unshards else {})
        | ({"early": each.early} if each.early else {})
        for each in links.sums
    ]
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
            meets=route.truth("meets", default=False),
            buffer=route.number("buffer", default=0.0),
        )
        route.done()
    sums = []
    for each in record.objects("sums"):
        stage, seconds, gather = each.whole("stage"), each.number("seconds"), each.number("gather")
        ahead, early = each.truth("unshards", default=False), each.number("early", default=0.0)
        sums.append(AllReduce(stage=stage, seconds=seconds, gather=gather, ways=None, unshards=ahead, early=early))
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
