"""Measured uneven plans: what each rank's timers and counters said of one iteration.

Mist (EuroSys'25, github.com/Dazz993/Mist, Apache-2.0) measured plans of Aceso (EuroSys'24) on GPUs of several kinds;
its artifact holds the logs. The engine is Aceso's (github.com/microsoft/SuperScaler), from Megatron-LM 2.4. A model is
a list of operations, 13 a layer; a stage is some of them in a row, and may begin or end inside of a layer.

One iteration of a rank, with the columns that time it. Each timer waits for the device at both ends, so nothing
overlaps; in capitals what contains waits for other ranks:

    forward                      fwd, with `data` in it
    message to the next stage    SEND in the warm-up; SENDRECV with the gradient that comes back; BWDRECV in the drain
    backward                     bwd; what a stage receives from the one before it, and sends back, is not listed
    sum over replicas            ALLREDUCE: of one replica a copy of its gradients
    tied embeddings              EMB: the first and the last stage exchange their gradients
    update                       OPT: gradients to float32, their norm over all ranks, Adam, weights to float16
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from ...partition.strict import fail, number
from ..jobs.case import Case

MEASURED = Path(__file__).parent / "data" / "mist_plans.csv"
OPERATIONS = 13  # of a layer
_MIB = 2.0**20
_HEADS = {1024: 16, 2048: 32, 2560: 32, 4096: 32, 5120: 40, 6144: 64, 8192: 64}  # by hidden size, of Mist's models


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Times of one rank in one iteration [s], and its memory at the peak [bytes]; see the module.

    Arguments:
        send: forwards of the warm-up to the next stage.
        peak_allocated, peak_reserved: what tensors took at most, and what the caching allocator held for them.
    """

    number: int
    iteration: float
    forward: float
    backward: float
    send: float
    allreduce: float
    embedding: float
    update: float
    peak_allocated: float
    peak_reserved: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Operations in a row on one or several ranks.

    Arguments:
        first, last: operations, of the model's 13 l + 3.
        recomputed: how many of them run again for the backward.
        tensor, data: T and D of its T D ranks.
    """

    first: int
    last: int
    recomputed: int
    tensor: int
    data: int
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A plan and its iteration.

    Arguments:
        platform: kind of GPU.
        name: when it was made; with `model` and the number of stages it tells plans apart.
        layers, hidden, length: of the GPT; length is of a sequence.
        microbatch_size: sequences of all D replicas of a stage.
    """

    platform: str
    model: str
    name: str
    layers: int
    hidden: int
    length: int
    microbatch_size: int
    num_microbatches: int
    stages: tuple[Stage, ...]

    @property
    def heads(self) -> int:
        """Attention heads; ValueError where the hidden size is none of Mist's models."""
        if self.hidden not in _HEADS:
            fail(f"plan {self.name}: hidden", self.hidden, f"one of {', '.join(map(str, _HEADS))}")
        return _HEADS[self.hidden]

    @property
    def seconds(self) -> float:
        """Seconds of the iteration; ranks differ by less than a thousandth."""
        return max(rank.iteration for stage in self.stages for rank in stage.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Plans of one file.

    Arguments:
        plans: in its order.
        incomplete: names of those of which a rank's row is missing; nothing else is read of them.
    """

    plans: tuple[MeasuredPlan, ...]
    incomplete: tuple[str, ...]


@cache
def measured(path: Path = MEASURED) -> Measurements:
    """The plans of a file of this form; ValueError names file, line, column, value and what was expected."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ValueError(
            f"plans={path}: {why}: expected a CSV file of measured plans, as in --set plans=FILE.csv, or half"
        ) from None
    numbered = [(at, line) for at, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    rows = zip(csv.DictReader(line for _, line in numbered), numbered[1:], strict=False)
    groups: dict[tuple[str, ...], list[_Row]] = {}
    for values, (at, _) in rows:
        row = _Row(values, f"{path}, line {at}")
        groups.setdefault(tuple(row.text(name) for name in ("platform", "model", "plan", "P")), []).append(row)
    if not groups:
        raise ValueError(f"{path}: no rows: expected one for each rank of a plan")
    found = {", ".join(key): _plan(group) for key, group in groups.items()}
    return Measurements(
        plans=tuple(plan for plan in found.values() if plan is not None),
        incomplete=tuple(name for name, plan in found.items() if plan is None),
    )


def path_of(case: Case) -> Path:
    """The file that a case names by `plans`: "half" (the published ones that this project holds), or a path."""
    given = case.text("plans")
    return MEASURED if given == "half" else Path(given)


class _Row:
    """Cells of one line by column."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values, self._where = values, where

    def text(self, name: str) -> str:
        value = self._values.get(name)
        return value if isinstance(value, str) and value else fail(f"{self._where}: {name}", value, "a value")

    def number(self, name: str) -> float:
        text = self.text(name)
        try:
            return number(f"{self._where}: {name}", float(text))
        except ValueError:
            fail(f"{self._where}: {name}", text, "a finite number of at least 0")

    def seconds(self, name: str) -> float:
        return self.number(f"{name}_ms") / 1e3

    def whole(self, name: str, *, least: int = 1) -> int:
        value = self.number(name)
        if value != int(value) or value < least:
            fail(f"{self._where}: {name}", self.text(name), f"a whole number of at least {least}")
        return int(value)


def _plan(rows: list[_Row]) -> MeasuredPlan | None:
    """None where rows are missing."""
    by_stage: dict[int, list[_Row]] = {}
    for row in rows:
        by_stage.setdefault(row.whole("stage", least=0), []).append(row)
    one = rows[0]
    if sorted(by_stage) != list(range(one.whole("P"))):
        return None
    groups = [by_stage[stage] for stage in range(len(by_stage))]
    if any(len(group) != group[0].whole("gpus") for group in groups):
        return None
    ends = list(accumulate(group[0].whole("ops") for group in groups))
    if ends[-1] != OPERATIONS * one.whole("layers") + 3:
        fail(f"plan {one.text('plan')}: ops of all stages", ends[-1], "13 of each layer and 3")
    return MeasuredPlan(
        platform=one.text("platform"),
        model=one.text("model"),
        name=one.text("plan"),
        layers=one.whole("layers"),
        hidden=one.whole("hidden"),
        length=one.whole("seq"),
        microbatch_size=one.whole("mbs"),
        num_microbatches=one.whole("m"),
        stages=tuple(
            Stage(
                first=end - group[0].whole("ops"),
                last=end - 1,
                recomputed=group[0].whole("recompute_ops", least=0),
                tensor=group[0].whole("tp"),
                data=group[0].whole("dp"),
                ranks=tuple(_rank(row) for row in group),
            )
            for end, group in zip(ends, groups, strict=True)
        ),
    )


def _rank(row: _Row) -> Rank:
    return Rank(
        number=row.whole("rank", least=0),
        iteration=row.seconds("time"),
        forward=row.seconds("fwd"),
        backward=row.seconds("bwd"),
        send=row.seconds("send"),
        allreduce=row.seconds("allreduce"),
        embedding=row.seconds("emb"),
        update=row.seconds("opt"),
        peak_allocated=row.number("peak_alloc_mb") * _MIB,
        peak_reserved=row.number("peak_res_mb") * _MIB,
    )
