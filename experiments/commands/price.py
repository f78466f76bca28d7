"""`stagewright price`: the cost of a job on devices whose prices change, by plan. Simulated.

stagewright price prices.csv --plans plans.json --samples 1e6 --deadline 86400 --restart 60 --checkpoint-every 600

prices.csv: seconds,kind,price (per device and hour; empty: not available), in order; a row "SECONDS,end," ends it.
plans.json: {"plans": [{"name", "kind", "devices", "rate"}, ...]}, or "plan", a file of `stagewright plan --out`, and
"batch" instead of devices and rate (samples/s).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ...cli.options import plain_help, read, read_file
from ...cli.tables import console, table
from ...partition import Plan
from ...partition.strict import Fields, parse_object, read_text
from ...schedules.wording import duration
from ..fleet.prices import Charges, PricedPlan, PriceTrace, cheapest, replay


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class PriceOptions:
    """Replay a table of prices for each plan of a job, and find the plans of least cost by the deadline."""

    prices: Annotated[Path, tyro.conf.Positional]  # A CSV file: seconds,kind,price.
    plans: Path  # A JSON file of plans.
    samples: float  # Samples to train on.
    deadline: float | None = None  # Seconds from the first time of the table (default: its end).
    restart: float = 0.0  # Seconds from getting devices to the first step.
    # Seconds between two checkpoints (default: none, so that losing the devices loses everything).
    checkpoint_every: float = 0.0
    checkpoint: float = 0.0  # Seconds of a checkpoint.
    json: bool = False  # Print one JSON object and no table.


def run(argv: Sequence[str]) -> int:
    options = read(PriceOptions, argv, "price")
    trace = PriceTrace.parse(read_file(options.prices, read_text), source=str(options.prices))
    content = parse_object(read_file(options.plans, read_text), source=str(options.plans))
    plans = [_plan(each, options.plans.parent) for each in content.objects("plans")]
    content.done()
    unknown = [each for each in plans if each.kind not in trace.prices]
    if unknown or not plans:
        name = f"plan {unknown[0].name!r} on {unknown[0].kind!r}" if unknown else "no plan"
        raise ValueError(
            f"{options.plans}: {name}: expected plans on kinds that have prices: {', '.join(trace.prices)}"
        )
    charges = Charges(
        restart_seconds=options.restart,
        checkpoint_every=options.checkpoint_every,
        checkpoint_seconds=options.checkpoint,
    )
    end = None if options.deadline is None else trace.times[0] + options.deadline
    runs = {each.name: replay([each] * len(trace.lengths), trace, options.samples, charges, end) for each in plans}
    runs["least cost"] = cheapest(plans, trace, options.samples, charges, end)
    if options.json:
        print(json.dumps({"simulated": True, "runs": {name: each._asdict() for name, each in runs.items()}}, indent=1))
        return 0
    names = ("cost", "done after", "samples", "lost", "restarts")
    shown = table(f"{options.samples:g} samples, simulated", ["plan"], names)
    for name, each in runs.items():
        done = "not done" if each.seconds is None else duration(each.seconds)
        shown.add_row(name, f"{each.cost:.2f}", done, f"{each.samples:g}", f"{each.lost:g}", str(each.restarts))
    console().print(shown)
    used = [name or "waits" for name in runs["least cost"].used]
    changes = [i for i, name in enumerate(used) if i == 0 or used[i - 1] != name]
    print("least cost: " + ", ".join(f"{used[i]} from {duration(trace.times[i] - trace.times[0])}" for i in changes))
    return 0


def _plan(record: Fields, folder: Path) -> PricedPlan:
    file = record.optional_text("plan")
    if file is None:
        devices, rate = record.count("devices"), record.number("rate", positive=True)
    else:
        found, batch = read_file(folder / file, Plan.load), record.count("batch")
        if found.simulated_step_time is None:
            raise ValueError(f"{record.at('plan')}: {file!r} has no simulated step: expected one of `stagewright plan`")
        devices, rate = found.num_devices, batch / found.simulated_step_time
    made = PricedPlan(name=record.text("name"), kind=record.text("kind"), devices=devices, rate=rate)
    record.done()
    return made
