"""From records to figures: each value beside its target, and whether it was met."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .figure import GIGABYTE, Figure, Judged, Origin, Target, error_of, milliseconds
from .figures_plans import plan_figures
from .races import RACES, Race
from .records import (
    CheckpointTimes,
    HalvesTimes,
    Measurement,
    OverlapTimes,
    RaceTimes,
    ReceiveBytes,
    Record,
    SimulatorSpeed,
    Spread,
)
from .workloads import CHECKPOINTS, HALVES, OVERLAP, WORKLOADS, Case, ModelKind, Workload


def figures_of(case: Case, records: Sequence[Record]) -> list[Figure]:
    """The figures that answer a case."""
    measured = {r.workload: r for r in records if isinstance(r, Measurement)}
    found: list[Figure] = []
    for name in case.workloads:
        if name not in measured:
            continue
        workload, measurement = WORKLOADS[name], measured[name]
        if case.name == "prediction":
            found.append(_prediction(workload, measurement))
            continue
        if workload.model is ModelKind.SLEEP:
            found.append(_over_ideal(case, workload, measurement))
        found.append(_over_torch(case, workload, measurement))
    for record in records:
        if isinstance(record, RaceTimes) and record.race in case.races:
            found += _race(case, RACES[record.race], record)
    if case.name == "receive-bytes":
        found += _receive_bytes([r for r in records if isinstance(r, ReceiveBytes)])
    if case.name == OVERLAP:
        found += [figure for r in records if isinstance(r, OverlapTimes) for figure in _overlap(r)]
    if case.name == CHECKPOINTS:
        found += [figure for r in records if isinstance(r, CheckpointTimes) for figure in _checkpoints(r)]
    if case.name == HALVES:
        found += [figure for r in records if isinstance(r, HalvesTimes) for figure in _halves(r)]
    if case.name == "simulator":
        found += _simulator([r for r in records if isinstance(r, SimulatorSpeed)])
    return found + plan_figures(case, records)


def _origin(workload: Workload) -> Origin:
    return Origin.EMULATED if workload.model is ModelKind.SLEEP else Origin.MEASURED


def _described(workload: Workload) -> str:
    return f"{workload.schedule} {workload.shape}"


def _over_torch(case: Case, workload: Workload, measurement: Measurement) -> Figure:
    targets = {
        "overhead-1f1b": Target(limit=1.1),
        "overhead-interleaved": Target(limit=0.5),
        "gpt": Target(limit=1.0),
    }
    ours, theirs = Spread.of(measurement.ours), Spread.of(measurement.torch)
    return Figure(
        case=case.name,
        workload=_described(workload),
        what="step, ours / torch",
        unit="ratio",
        value=Spread.of_ratios(measurement.ours, measurement.torch),
        target=targets.get(case.name, Target(limit=1.0, judged=Judged.BEST)),
        origin=_origin(workload),
        note=f"{milliseconds(ours)} / {milliseconds(theirs)}",
    )


def _over_ideal(case: Case, workload: Workload, measurement: Measurement) -> Figure:
    ideal = workload.ideal_makespan
    theirs = Spread.of(measurement.torch).median / ideal
    return Figure(
        case=case.name,
        workload=_described(workload),
        what="step, ours / ideal",
        unit="ratio",
        value=Spread.of([seconds / ideal for seconds in measurement.ours]),
        target=Target(limit=1.03 if workload.num_chunks > 1 else 1.02),
        origin=Origin.EMULATED,
        note=f"ideal {ideal * 1e3:.0f} ms; torch / ideal {theirs:.3f}; "
        f"F {median(measurement.forward) * 1e3:.2f}, B {median(measurement.backward) * 1e3:.2f} ms",
    )


def _prediction(workload: Workload, measurement: Measurement) -> Figure:
    sleeps = workload.model is ModelKind.SLEEP
    measured = Spread.of(measurement.makespans)
    return Figure(
        case="prediction",
        workload=_described(workload) + ("" if sleeps else " GPT"),
        what="error of the makespan",
        unit="error",
        value=error_of(measurement.predicted, measurement.makespans),
        target=Target(limit=0.02 if sleeps else 0.03),
        origin=Origin.SIMULATED_OVER_EMULATED if sleeps else Origin.SIMULATED_OVER_MEASURED,
        note=f"{measurement.predicted * 1e3:.2f} / {measured.median * 1e3:.2f} ms, "
        f"latency {measurement.latency * 1e6:.0f} us for {measurement.boundary_bytes} bytes",
    )


def _race(case: Case, race: Race, times: RaceTimes) -> list[Figure]:
    """The first entry's throughput over each other's; how far its predicted period was off."""
    first = race.entries[0]
    origin = _origin(first.workload)
    own = times.seconds[first.label]
    found = []
    for entry in race.entries[1:]:
        theirs = times.seconds[entry.label]
        ideal = "" if entry.ideal is None else f", ideal {entry.ideal:.3f}"
        found.append(
            Figure(
                case=case.name,
                workload=_described(first.workload),
                what=f"throughput / {entry.label}",
                unit="ratio",
                value=Spread.of_ratios(theirs, own),
                target=None if entry.at_least is None else Target(limit=entry.at_least, at_least=True),
                origin=origin,
                note=f"{milliseconds(Spread.of(theirs))} / {milliseconds(Spread.of(own))} a batch{ideal}",
            )
        )
    period = Spread.of(own).median
    sleeps = first.workload.model is ModelKind.SLEEP
    found.append(
        Figure(
            case=case.name,
            workload=_described(first.workload),
            what="error of the period",
            unit="error",
            value=error_of(times.predicted, own),
            target=None,
            origin=Origin.SIMULATED_OVER_EMULATED if sleeps else Origin.SIMULATED_OVER_MEASURED,
            note=f"{times.predicted * 1e3:.2f} / {period * 1e3:.2f} ms, bubble {Spread.of(times.bubbles).median:.1%}",
        )
    )
    return found


def _receive_bytes(records: Sequence[ReceiveBytes]) -> list[Figure]:
    """Per schedule, the peak for the largest M over that for the smallest."""
    found = []
    for schedule in dict.fromkeys(r.schedule for r in records):
        few, *_, many = sorted((r for r in records if r.schedule == schedule), key=lambda r: r.num_microbatches)
        ratio = many.ours / few.ours
        found.append(
            Figure(
                case="receive-bytes",
                workload=f"{schedule} M={few.num_microbatches}, {many.num_microbatches}",
                what="peak bytes, large M / small M",
                unit="ratio",
                value=Spread(median=ratio, low=ratio, high=ratio),
                target=Target(limit=1.0),
                origin=Origin.MEASURED,
                note=f"{many.ours} / {few.ours} bytes; torch holds {many.torch} / {few.torch}",
            )
        )
    return found


def _overlap(times: OverlapTimes) -> list[Figure]:
    """Share of a step that is saved, and how far the simulator was off for both sides."""
    beside, behind = times.seconds["beside"], times.seconds["behind"]
    predicted = times.predicted["beside"] / times.predicted["behind"]
    workload = "interleaved V=2, 2 x 2 ranks, slow wire"
    saved = Figure(
        case=OVERLAP,
        workload=workload,
        what="step, sums beside / behind",
        unit="ratio",
        value=Spread.of_ratios(beside, behind),
        target=Target(limit=1.02 * predicted),
        origin=Origin.EMULATED,
        note=f"{milliseconds(Spread.of(beside))} / {milliseconds(Spread.of(behind))}, simulated {predicted:.3f}",
    )
    errors = [
        Figure(
            case=OVERLAP,
            workload=workload,
            what=f"error of the step, sums {side}",
            unit="error",
            value=error_of(times.predicted[side], seconds),
            target=Target(limit=0.05),
            origin=Origin.SIMULATED_OVER_EMULATED,
            note=f"{times.predicted[side] * 1e3:.2f} / {milliseconds(Spread.of(seconds))}",
        )
        for side, seconds in times.seconds.items()
    ]
    return [saved, *errors]


def _checkpoints(times: CheckpointTimes) -> list[Figure]:
    """Time that a checkpoint adds to its steps, by either way, and the share that an interval of its own keeps to."""
    without, blocking, beside = (times.seconds[side] for side in ("without", "blocking", "beside"))
    workload = f"GPT, AdamW, {times.num_bytes / 1e6:.0f} MB a rank"

    def figure(what: str, unit: str, value: Spread, target: Target, note: str) -> Figure:
        return Figure(
            case=CHECKPOINTS,
            workload=workload,
            what=what,
            unit=unit,
            value=value,
            target=target,
            origin=Origin.MEASURED,
            note=note,
        )

    shown = f"{milliseconds(Spread.of(beside))} / {milliseconds(Spread.of(blocking))}, without one "
    return [
        figure(
            f"{times.steps} steps, checkpoint beside / blocking",
            "ratio",
            Spread.of_ratios(beside, blocking),
            Target(limit=1.0),
            shown + milliseconds(Spread.of(without)),
        ),
        figure(
            "share of the time, interval found for 3.5%",
            "ratio",
            Spread.of(times.shares),
            Target(limit=0.035),
            f"one in {', '.join(map(str, times.every))} steps at the end",
        ),
    ]


def _halves(times: HalvesTimes) -> list[Figure]:
    """I + W over B, of both sides, and our forward over the plain one."""
    limit = 1.05 if times.stage.startswith("GPT") else 1.25

    def figure(what: str, seconds: dict[str, list[float]], side: str, target: Target | None) -> Figure:
        return Figure(
            case=HALVES,
            workload=times.stage,
            what=what,
            unit="ratio",
            value=Spread.of_ratios(seconds[side], seconds["whole"]),
            target=target,
            origin=Origin.MEASURED,
            note=f"over {milliseconds(Spread.of(seconds['whole']))}",
        )

    return [
        figure("(I + W) / B, ours", times.backward, "ours", Target(limit=limit)),
        figure("(I + W) / B, torch", times.backward, "torch", None),
        figure("F / F, ours", times.forward, "ours", None),
    ]


def _simulator(records: Sequence[SimulatorSpeed]) -> list[Figure]:
    if not records:
        return []
    large = f"interleaved P=64 V=4 M=512, {records[0].num_actions:,} actions"

    def figure(workload: str, what: str, unit: str, samples: list[float], target: Target) -> Figure:
        value = Spread.of(samples)
        return Figure(
            case="simulator",
            workload=workload,
            what=what,
            unit=unit,
            value=value,
            target=target,
            origin=Origin.MEASURED,
        )

    return [
        figure(
            "interleaved P=8 V=2 M=512",
            "simulate",
            "actions/s",
            [r.actions_per_second for r in records],
            Target(limit=200_000, at_least=True),
        ),
        figure(
            large,
            "build, check, simulate",
            "s",
            [r.build_check_simulate for r in records],
            Target(limit=5.0),
        ),
        figure(large, "peak memory", "GB", [r.peak_bytes / GIGABYTE for r in records], Target(limit=1.0)),
    ]
