"""Measurements of others, as files.

Trainings are CSV with the columns of vTrain (Bang et al., MICRO 2024, github.com/VIA-Research/vTrain, data/), a line
each; sums over the devices of a node are CSV with those of NCCL's tests. Lines that begin with "# " are comments, but
that of the columns.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...partition.strict import fail, read_text
from .trainings import MeasuredTraining

_TRAINING = {  # argument of Training: column
    "num_devices": "# GPUs",
    "batch_size": "global batch",
    "microbatch_size": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "length": "sequence length",
    "tensor": "tensor parallelism",
    "data": "data parallelism",
    "pipeline": "pipeline parallelism",
}
_MILLISECONDS = "iteration time (ms)"
_SUM = ("size(B)", "time(ns)")


class MeasuredSum(NamedTuple):
    """A sum over the devices of one node: bytes on each device, and seconds that it took."""

    num_bytes: float
    seconds: float


def read_trainings(path: str | Path, *, network: float, vocabulary: int = 51200) -> tuple[MeasuredTraining, ...]:
    """Trainings of a file, under 1F1B with recompute by layer.

    Arguments:
        network: bandwidth of one device out of its node [bytes/s]; the file does not say it.
        vocabulary: of all of them; likewise.

    Raises ValueError that names the file, the line and the column.
    """
    trainings = []
    for where, row in _rows(path, (*_TRAINING.values(), _MILLISECONDS)):
        sizes = {name: _whole(f"{where}: {column}", row[column]) for name, column in _TRAINING.items()}
        milliseconds = _number(f"{where}: {_MILLISECONDS}", row[_MILLISECONDS])
        replica = sizes["data"] * sizes["microbatch_size"]
        if sizes["batch_size"] % replica:
            fail(
                f"{where}: global batch", sizes["batch_size"], f"a multiple of {replica}, a microbatch of each replica"
            )
        try:
            trainings.append(
                MeasuredTraining(
                    **sizes,
                    chunks=1,
                    num_microbatches=sizes["batch_size"] // replica,
                    vocabulary=vocabulary,
                    network=network,
                    seconds=milliseconds / 1e3,
                )
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return tuple(trainings)


def read_sums(path: str | Path) -> tuple[MeasuredSum, ...]:
    """Sums of a file, smallest first, by their seconds out of place; ValueError as for trainings."""
    size, nanoseconds = _SUM
    found = [
        MeasuredSum(
            num_bytes=_number(f"{where}: {size}", row[size]),
            seconds=_number(f"{where}: {nanoseconds}", row[nanoseconds]) / 1e9,
        )
        for where, row in _rows(path, _SUM)
    ]
    return tuple(sorted(found, key=lambda each: each.num_bytes))


def _rows(path: str | Path, columns: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """[(file and line, cell by column)]; of columns that the file names twice the first."""
    lines = list(enumerate(read_text(path).splitlines(), start=1))
    wanted = set(columns)  # of which "# GPUs" may stand first
    header = next((n for n, line in lines if 2 * len(wanted.intersection(_cells(line))) > len(columns)), 0)
    lines = [(n, line) for n, line in lines if line.strip() and (n == header or not line.startswith("# "))]
    if not lines:
        raise ValueError(f"{path}: empty: expected a line of columns ({', '.join(columns)}), then one a measurement")
    (_, first), *body = lines
    names = _cells(first)
    missing = [column for column in columns if column not in names]
    if missing:
        raise ValueError(f"{path}: no column {', '.join(map(repr, missing))}: expected {', '.join(columns)}")
    rows = []
    for number_, line in body:
        cells = _cells(line)
        where = f"{path}, line {number_}"
        if len(cells) != len(names):
            fail(where, len(cells), f"{len(names)} cells, one a column")
        rows.append((where, {column: cells[names.index(column)] for column in columns}))
    if not rows:
        raise ValueError(f"{path}: no measurement: expected a line each below the columns")
    return rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line]), [])]


def _whole(where: str, text: str) -> int:
    return int(text) if text.isdecimal() and int(text) >= 1 else fail(where, text, "a whole number of at least 1")


def _number(where: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    return found if math.isfinite(found) and found > 0 else fail(where, text, "a finite number above 0")
