"""`stagewright fleet`: assigns jobs to kinds of devices over time, by policies. Simulated.

stagewright fleet fleet.json                            every policy, compared with one that ignores kinds
stagewright fleet fleet.json --policies max-min cost

fleet.json has "kinds" (name, devices, price an hour, speed, memory, link) and "jobs" (name, samples, devices, weight,
arrival and deadline in seconds; and "throughputs" by kind, or "profile" files with "batch", which the planner plans).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ...cli.options import plain_help, read, read_file
from ...cli.tables import console, table
from ...partition import Cluster, DeviceKind, Level, Profile, plan
from ...partition.quantities import bandwidth, size
from ...partition.strict import Fields, parse_object, read_text
from ...schedules.wording import duration
from ..fleet.policies import POLICIES, FleetJob, FleetRun, run_fleet


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Simulate a fleet of jobs on kinds of devices, by policies that know each job's throughput on each kind."""

    fleet: Annotated[Path, tyro.conf.Positional]  # A JSON file of kinds and jobs.
    # Some of max-min, finish-time, makespan, cost, deadline, equal (default: all that fit the jobs).
    policies: tuple[str, ...] = ()
    round: float = 360.0  # Seconds of a round.
    restart: float = 0.0  # Seconds that a job loses when its devices change.
    json: bool = False  # Print one JSON object and no table.


def run(argv: Sequence[str]) -> int:
    options = read(FleetOptions, argv, "fleet")
    kinds, jobs = read_fleet(options.fleet)
    fitting = [each for each in POLICIES if each != "deadline" or any(job.deadline is not None for job in jobs)]
    counts, prices = [kind["devices"] for kind in kinds], [kind["price"] / 3600 for kind in kinds]
    found: dict[str, FleetRun] = {}
    for policy in options.policies or fitting:
        for is_agnostic in (False, True):
            found[policy + ", kinds alike" * is_agnostic] = run_fleet(
                jobs,
                counts,
                policy,
                prices=prices,
                round_seconds=options.round,
                restart_seconds=options.restart,
                is_agnostic=is_agnostic,
            )
    if options.json:
        summary = {
            name: asdict(each)
            | {"makespan": each.makespan, "mean_completion": each.mean_completion, "missed": each.missed}
            for name, each in found.items()
        }
        print(json.dumps({"simulated": True, "policies": summary}, indent=1))
        return 0
    names = ("makespan", "mean completion", "cost", "deadlines missed")
    shown = table(f"{len(jobs)} jobs on {sum(counts)} devices, simulated", ["policy"], names)
    for name, each in found.items():
        cost = f"{each.cost:.2f}" if any(prices) else "-"
        shown.add_row(name, duration(each.makespan), duration(each.mean_completion), cost, str(len(each.missed)))
    console().print(shown)
    return 0


def read_fleet(path: Path) -> tuple[list[dict[str, Any]], list[FleetJob]]:
    """Kinds and jobs of a file. Raises ValueError that names file, job and field."""
    content = parse_object(read_file(path, read_text), source=str(path))
    kinds = []
    for each in content.objects("kinds"):
        memory, link = each.optional_text("memory"), each.optional_text("link")
        kinds.append(
            {
                "name": each.text("name"),
                "devices": each.count("devices"),
                "price": each.number("price", default=0.0),
                "speed": each.number("speed", positive=True, default=1.0),
                "memory": None if memory is None else size(each.at("memory"), memory),
                "link": 1e15 if link is None else bandwidth(each.at("link"), link),
            }
        )
        each.done()
    jobs = [_job(each, kinds, path.parent) for each in content.objects("jobs")]
    content.done()
    if not kinds or not jobs:
        raise ValueError(f"{path}: {len(kinds)} kinds and {len(jobs)} jobs: expected at least one of each")
    return kinds, jobs


def _job(record: Fields, kinds: Sequence[dict[str, Any]], folder: Path) -> FleetJob:
    devices, own = record.count("devices", default=1), record.optional_object("throughputs")
    if own is not None:
        rates = [own.number(kind["name"], default=0.0) for kind in kinds]
        own.done()
    else:
        files, batch = record.items("profile"), record.count("batch")
        profiles = [read_file(folder / str(file), Profile.load) for file in files]
        rates = [_planned(profiles, kind, devices, batch) for kind in kinds]
    given = {
        "name": record.text("name"),
        "samples": record.number("samples", positive=True),
        "weight": record.number("weight", positive=True, default=1.0),
        "arrival": record.number("arrival", default=0.0),
        "deadline": record.optional_number("deadline"),
    }
    record.done()
    return FleetJob(throughputs=tuple(rates), devices=devices, **given)  # type: ignore[arg-type]


def _planned(profiles: Sequence[Profile], kind: dict[str, Any], devices: int, batch: int) -> float:
    cluster = Cluster(
        levels=(Level(name="link", size=devices, bandwidth=kind["link"]),),
        kinds=(DeviceKind(name=kind["name"], speed=kind["speed"], memory_bytes=kind["memory"]),),
    )
    try:
        found = plan(profiles, cluster, global_batch=batch, num_runners_up=0)
    except ValueError as error:
        if "nothing fits" not in str(error):
            raise
        return 0.0
    assert found.simulated_step_time is not None
    return batch / found.simulated_step_time
