"""`stagewright plan --calibrate RUNS.csv`: fits the device, or the cluster, to steps that a user measured.

stagewright plan --calibrate runs.csv --profile b1.json b2.json --cluster two.json --out calibrated.json
stagewright plan --calibrate runs.csv --transformer layers=96,hidden=12288,heads=96,vocabulary=51200,length=2048 \\
    --device a100 --cluster 16x8:nvlink=300GB/s,net=25GB/s --out device.json

runs.csv, one line a run:        P,D,T,V,microbatch,M,schedule,recompute,seconds
                                 8,2,8,1,1,64,1f1b,layer,6.31
or the plan of each:             plan,seconds
                                 runs/gpt/plan.json,0.084
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...partition import Cluster, GivenStage, Plan, Profile, ProfileSource, evaluate, plan
from ...partition.analytic import Calibration, DeviceModel, Scales, TransformerSource, calibrate
from ...partition.analytic.calibration import LEAST_PLANS, NO_FIT
from ...partition.analytic.fit import read_number, read_rows
from ...partition.plans.record import PlanStage
from ...schedules.families.registry import FAMILIES, family
from ...schedules.wording import count, duration, wrapped
from ..options import check_out, plain_help, read, read_file, write_out
from ..tables import console
from ..tables import table as new_table
from .plan_source import SourceOptions, read_cluster, read_source

_SIZES = {"P": None, "D": "1", "T": "1", "V": "1", "microbatch": None, "M": None}  # columns with what they are else
_COLUMNS = (*_SIZES, "schedule", "recompute", "seconds")
_FORM = f"plan,seconds or {','.join(_COLUMNS)}"
_COLUMN_OF = {  # by argument of `plan`, `evaluate` and a source
    "pipeline_sizes": "P",
    "data_sizes": "D",
    "tensor_sizes": "T",
    "tensor": "T",
    "chunk_sizes": "V",
    "num_chunks": "V",
    "microbatch_sizes": "microbatch",
    "microbatch_size": "microbatch",
    "num_microbatches": "M / D",
    "schedules": "schedule",
    "schedule": "schedule",
    "recompute": "recompute",
}
_PLANNED = [name for name, each in FAMILIES.items() if each.is_planned]
_FAR = 100  # times as long as predicted: another unit, or another plan
_Source = list[Profile] | ProfileSource


@plain_help
@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions(SourceOptions):
    """Fit the device (of --transformer) or the cluster (of --profile) to steps that you measured, and show how well
    each step is predicted with and without the fit."""

    # CSV file of measured steps, with columns plan,seconds (plan: its file) or
    # P,D,T,V,microbatch,M,schedule,recompute,seconds (M: microbatches of a step, of all D replicas together).
    calibrate: Path
    out: Path | None = None  # Write the fitted device or cluster to this file, as JSON.
    json: bool = False  # Print one JSON object.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A step that was measured, as `evaluate` takes it; `where`: file and line; `is_plan`: whether it names a plan."""

    where: str
    seconds: float
    is_plan: bool
    stages: Sequence[GivenStage | PlanStage]
    sizes: Mapping[str, Any]

    def predicted(self, source: _Source, cluster: Cluster) -> float:
        try:
            found = evaluate(source, cluster, self.stages, **self.sizes)
        except ValueError as error:
            said = f"column plan: {error}" if self.is_plan else in_columns(str(error))
            raise ValueError(f"{self.where}: {said}") from None
        assert found.simulated_step_time is not None
        return found.simulated_step_time


def run(argv: Sequence[str]) -> int:
    options = read(CalibrateOptions, argv, "plan --calibrate RUNS.csv")
    if options.out is not None:
        check_out("--out", options.out, sources=[options.calibrate, *options.files])
    cluster = read_cluster(options)
    source, _ = read_source(options, cluster, _no_model)
    steps = read_file(options.calibrate, lambda path: read_steps(path, source, cluster))
    found = calibrated(steps, source, cluster)
    for step, predicted in zip(steps, found.before, strict=True):
        if not 1 / _FAR < step.seconds / predicted < _FAR:
            raise ValueError(
                f"{step.where}: column seconds: {step.seconds:g}: the plan is predicted to take {duration(predicted)}: "
                f"expected seconds of one step, such as {predicted:.3g}"
            )
    fitted = found.constants.of(cluster) if isinstance(found.constants, Scales) else found.constants
    if options.out is not None:
        write_out(options.out, fitted.to_json())
    if options.json:
        fitted_constants = {name: each._asdict() for name, each in found.fitted.items()}
        print(json.dumps(asdict(found) | {"fitted": fitted_constants, "measured": [step.seconds for step in steps]}))
    else:
        _print(options, steps, found)
    return 0


def _no_model() -> list[Profile]:
    raise ValueError(
        "--model with --calibrate: expected --profile FILE: `stagewright profile --model ... --out FILE` writes it"
    )


def calibrated(steps: Sequence[StepRow], source: _Source, cluster: Cluster) -> Calibration[Any]:
    """The fit: of the device for formulas, of the cluster for profiles."""
    if isinstance(source, TransformerSource):

        def on_device(step: StepRow, device: DeviceModel) -> float:
            return step.predicted(replace(source, device=device), device.reached(cluster))

        return calibrate(on_device, steps, source.device)
    return calibrate(lambda step, scales: step.predicted(source, scales.of(cluster)), steps, Scales())


# --- the file ---


def read_steps(path: Path, source: _Source, cluster: Cluster) -> list[StepRow]:
    """Measured steps of a file; ValueError names file, line and column."""
    rows = read_rows(path, ("seconds",), known=("plan", *_COLUMNS))
    is_plans = "plan" in rows[0][1]
    needed = [] if is_plans else [name for name, otherwise in _SIZES.items() if otherwise is None]
    lacking = [name for name in needed if name not in rows[0][1]]
    if lacking or (is_plans and len(rows[0][1]) > 2):
        raise ValueError(
            f"{path}: columns {','.join(rows[0][1])}: expected {_FORM}: type one of them as the first line"
        )
    found = []
    for where, row in rows:
        seconds = read_number(f"{where}: column seconds", row["seconds"])
        given = _of_plan(where, path.parent / row["plan"]) if is_plans else _of_sizes(where, row, source, cluster)
        found.append(StepRow(where=where, seconds=seconds, is_plan=is_plans, stages=given[0], sizes=given[1]))
    return found


_Given = tuple[Sequence[GivenStage | PlanStage], Mapping[str, Any]]


def _of_plan(where: str, path: Path) -> _Given:
    try:
        found = read_file(path, Plan.load)
    except ValueError as error:
        raise ValueError(f"{where}: column plan: {error}") from None
    if found.num_microbatches is None or found.schedule is None:
        raise ValueError(f"{where}: column plan: {path} is for no schedule: expected a plan of `stagewright plan`")
    names = ("num_microbatches", "schedule", "microbatch_size", "slice_lengths")
    sizes = {name: getattr(found, name) for name in names}
    return found.stages, sizes | ({"schedule": found.build_schedule()} if found.order else {})


def _of_sizes(where: str, row: Mapping[str, str], source: _Source, cluster: Cluster) -> _Given:
    """Stages of equally many layers of a transformer, replicas next to each other; of profiles as `plan` cuts them."""
    P, D, T, V, size, M = (_whole(where, name, row.get(name) or otherwise or "") for name, otherwise in _SIZES.items())
    if M % D:
        raise ValueError(f"{where}: column M: {M}: expected a multiple of D={D}: microbatches of all replicas together")
    if cluster.num_devices < P * D * T:
        devices = f"P D T = {P * D * T} devices, and the cluster has {cluster.num_devices}"
        raise ValueError(f"{where}: columns P, D, T: {devices}: expected a larger --cluster, or --ranks {P * D * T}")
    recompute = row.get("recompute") or "none"
    try:
        schedule = _schedule(row.get("schedule") or ("1f1b" if V == 1 else "interleaved"), V)
        if isinstance(source, TransformerSource):
            stages: Sequence[GivenStage | PlanStage] = _equal_stages(source, (P, D, T, V), schedule, recompute)
        else:
            stages = plan(
                source,
                cluster,
                global_batch=M * size,
                schedules=(schedule,),
                microbatch_sizes=(size,),
                pipeline_sizes=(P,),
                data_sizes=(D,),
                tensor_sizes=(T,),
                chunk_sizes=(V,) if V > 1 else (2,),
                recompute=(recompute,),
                optimizer_sharding=("none",),
                num_runners_up=0,
            ).stages
    except ValueError as error:
        raise ValueError(f"{where}: {in_columns(str(error))}") from None
    return stages, {"num_microbatches": M, "schedule": schedule, "microbatch_size": size}


def _schedule(given: str, num_chunks: int) -> str:
    known = family(given, listed=_PLANNED)
    name = known.name
    if not known.is_planned:
        sliced = "slices have lengths, which a column plan gives" if known.takes_slices else "no plans are made over it"
        raise ValueError(f"schedule={given!r}: {sliced}: expected one of {', '.join(_PLANNED)}")
    if num_chunks < 2 if known.takes_chunks else num_chunks != known.num_chunks:
        least = "at least 2" if known.takes_chunks else known.num_chunks
        raise ValueError(f"num_chunks={num_chunks}: expected {least} for {name}, or another schedule")
    return name


def in_columns(message: str) -> str:
    """The message of `plan` or `evaluate` with each argument replaced by the column that gives it.

    >>> in_columns("tensor_sizes=3: expected some of 1, 2")
    'column T: 3: expected some of 1, 2'
    """
    message = re.sub("^unknown schedule", "column schedule: unknown schedule", message)
    for name, column in _COLUMN_OF.items():
        message = re.sub(rf"^{name}(=|: )", f"column{'s' * (' ' in column)} {column}: ", message)
        message = re.sub(rf"\b{name}=", f"{column}=", message)
    return message


def _whole(where: str, name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{where}: column {name}: {text!r}: expected a whole number of at least 1, such as 8")
    return int(text)


def _equal_stages(
    source: TransformerSource, sizes: tuple[int, int, int, int], schedule: str, recompute: str
) -> list[GivenStage]:
    (P, D, T, V), layers = sizes, source.transformer.layers
    each, rest = divmod(layers, P * V)
    if rest:
        raise ValueError(f"columns P, V: {P * V} stages of {layers} layers: expected a divisor, or a column plan")
    names = ["embedding", *(f"layer{i}" for i in range(layers)), "head"]
    ends = [0, *range(each + 1, layers + 1, each), len(names)]
    ranks = [range(D * T * place, D * T * (place + 1)) for place in range(P)]
    places = family(schedule).rank_of_stages(num_ranks=P, num_chunks=V) if V > 1 else range(P)
    return [GivenStage(names[a:b], ranks[p], T, recompute) for (a, b), p in zip(pairwise(ends), places, strict=True)]


# --- what is printed ---


def _print(options: CalibrateOptions, steps: Sequence[StepRow], found: Calibration[Any]) -> None:
    out = console()
    constants = new_table("", ["constant"], ["before", "fitted", "95% range"])
    for name, each in found.fitted.items():
        constants.add_row(name, f"{each.before:.3g}", f"{each.after:.3g}", f"{each.low:.3g} to {each.high:.3g}")
    rows = new_table("", ["row"], ["measured", "without fit", "off", "fitted", "off", "left out", "off"])
    left_out = found.left_out.get(found.choice, ())
    for i, step in enumerate(steps):
        cells = [step.where.rpartition(", ")[2], duration(step.seconds)]
        for predicted in (found.before, found.after, left_out):
            known = i < len(predicted)
            cells += [duration(predicted[i]), f"{predicted[i] / step.seconds - 1:+.1%}"] if known else ["", ""]
        rows.add_row(*cells)
    for shown in ([constants] if found.fitted else []) + [rows]:
        out.print(shown)
    for line in _said(options, steps, found):
        print(wrapped(line))


def _said(options: CalibrateOptions, steps: Sequence[StepRow], found: Calibration[Any]) -> list[str]:
    if not found.left_out:
        said = "one scale is fitted" if found.fitted else "off by no more than plans of one machine differ"
        return [
            f"{count(len(steps), 'measured step')}: {said}, and nothing is left out to judge it: "
            f"expected steps of at least {LEAST_PLANS} plans, better of 3 or more",
            *_next(options, found),
        ]
    off = {
        kind: sum(abs(each / step.seconds - 1) for each, step in zip(predicted, steps, strict=True)) / len(steps)
        for kind, predicted in found.left_out.items()
    }
    parts = ", ".join(f"{kind} {each:.1%}" for kind, each in off.items())
    return [
        f"each row predicted by those of other plans, off on average: {parts}; taken: {found.choice}",
        *_next(options, found),
    ]


def _next(options: CalibrateOptions, found: Calibration[Any]) -> list[str]:
    if found.choice == NO_FIT:
        said = "no fit is known to predict other rows better: the constants stay as they are"
        return [said if options.out is None else f"{said}, also in {options.out}"]
    option = "--cluster" if isinstance(found.constants, Scales) else "--device"
    if options.out is None:
        return [f"--out FILE.json writes it, for `stagewright plan {option} FILE.json`"]
    return [f"written: `stagewright plan {option} {options.out} ...` plans with it"]
