"""Plans as JSON, read strictly."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import TypeVar

from ...schedules.timing.memory import StageBytes
from ..memory import MemoryUse
from ..stage_cost import RECOMPUTE
from ..strict import Fields, parse_object
from .record import PlanRecord, PlanStage, RunnerUp
from .searched import Searched
from .traffic import StageTraffic

P = TypeVar("P", bound=PlanRecord)
Bytes = TypeVar("Bytes", MemoryUse, StageBytes)
_JSON_VERSION = 1
_MODELS = ("default", "pipedream")


def to_json(plan: PlanRecord) -> str:
    """One JSON object with a version."""
    return json.dumps({"version": _JSON_VERSION, **asdict(plan)}, indent=1)


def from_json(kind: type[P], text: str, *, source: str) -> P:
    """Read `to_json`'s form as a record of this kind. ValueError names `source`, the field and what was expected."""
    record = parse_object(text, source=source)
    record.version(_JSON_VERSION)
    record.take("allocator", "", default=None)  # older plans name one
    try:
        plan = kind(
            stages=tuple(_stage(each) for each in record.objects("stages")),
            num_devices=record.count("num_devices"),
            num_chunks=record.count("num_chunks", default=1),
            cost_model=record.text("cost_model", choices=_MODELS),
            predicted_step_time=record.number("predicted_step_time"),
            bound=record.number("bound"),
            schedule=record.optional_text("schedule"),
            order=tuple(str(each) for each in record.items("order", default=[])),
            num_microbatches=record.optional_count("num_microbatches"),
            microbatch_size=record.optional_count("microbatch_size"),
            around_seconds=record.number("around_seconds", default=0.0),
            norm_seconds=record.optional_number("norm_seconds"),
            tied=tuple(record.items("tied", default=[])),  # type: ignore[arg-type]
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


def _stage(record: Fields) -> PlanStage:
    memory, held = record.optional_object("memory"), record.optional_object("held")
    traffic = record.optional_object("traffic")
    stage = PlanStage(
        nodes=tuple(str(node) for node in record.items("nodes")),
        ranks=_whole_numbers(record, "ranks", least=0),
        tensor=record.count("tensor", default=1),
        forward_seconds=record.number("forward_seconds"),
        backward_seconds=record.number("backward_seconds"),
        update_seconds=record.number("update_seconds", default=0.0),
        step_seconds=record.number("step_seconds"),
        input_grad_seconds=record.optional_number("input_grad_seconds"),
        action_seconds=record.number("action_seconds", default=0.0),
        spread=record.number("spread", default=0.0),
        forward_ratios=tuple(record.items("forward_ratios", default=[])),  # type: ignore[arg-type]
        backward_ratios=tuple(record.items("backward_ratios", default=[])),  # type: ignore[arg-type]
        traffic=None if traffic is None else _traffic(traffic),
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


def _traffic(record: Fields) -> StageTraffic:
    later = ("message_seconds", "sum_busy")
    given = {each.name: record.number(each.name) for each in fields(StageTraffic) if each.name not in later}
    given |= {name: record.number(name, default=0.0) for name in later}
    record.done()
    try:
        return StageTraffic(**given)
    except ValueError as error:
        raise ValueError(f"{record.where}: {error}") from None


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


def _whole_numbers(record: Fields, key: str, *, least: int) -> tuple[int, ...]:
    numbers = record.items(key)
    for i, value in enumerate(numbers):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{record.at(key)}[{i}]: {value!r}: expected a whole number of at least {least}")
    return tuple(int(str(value)) for value in numbers)
