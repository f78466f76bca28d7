"""Schedules as text: the CSV of torch.distributed.pipelining, JSON, and grids for people."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

from .check import check
from .ir import COMPUTE_OPS, MOVE_OPS, Action, Edge, Op, Schedule, ScheduleError, fitting_owners
from .timing.costs import UNIT_COSTS
from .timing.simulate import simulate

_JSON_VERSION = 1
_JSON_KEYS = frozenset(
    ("version", "name", "num_microbatches", "num_batches", "weight_rule", "placement", "edges", "programs")
)
# Files that were written before there were such have none.
_OPTIONAL_KEYS = frozenset({"update_every", "owners", "num_slices", "without_backward"})
# What torch's tables hold besides compute; lowering inserts its own.
_COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B)\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")  # torch's cell of a forward and a backward that may run at once


def read_schedule(path: Path) -> Schedule:
    """The checked schedule of a file: JSON where the text begins as an object, else CSV, whatever its name ends in.

    Raises ValueError for a file that cannot be read, ScheduleError for a schedule that is faulty; both name the file.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # with a byte order mark, as spreadsheets write it, or not
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"schedule file {str(path)!r} cannot be read: {error}") from None
    try:
        schedule = from_json(text) if text.lstrip().startswith("{") else from_csv(text, name=repr(path.stem)[1:-1])
        check(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    return schedule


def unit_time_cells(schedule: Schedule) -> list[list[Action | None]]:
    """[P][T]: what each rank does in each unit of time when every compute action takes one; None: idle.

    An action that takes no time of its own (U) shares no cell and is left out.
    """
    timeline = simulate(schedule, UNIT_COSTS)
    length = round(timeline.end)
    rows: list[list[Action | None]] = []
    for trace in timeline.ranks:
        row: list[Action | None] = [None] * length
        for what, start, _ in trace.compute:
            if what.op in COMPUTE_OPS:
                row[round(start)] = what
        rows.append(row)
    return rows


def to_csv(schedule: Schedule, *, overlap: Literal["none", "pairs"] = "none") -> str:
    """See `Schedule.to_csv`."""
    if overlap not in ("none", "pairs"):
        raise ValueError(f"overlap={overlap!r}: expected 'none' or 'pairs'")
    move = next((action for program in schedule.programs for action in program if action.op in MOVE_OPS), None)
    if move is not None:
        raise ScheduleError(
            f"schedule {schedule.name!r} moves activations ({move}, ...), which a CSV table cannot say: use to_json"
        )
    updates = any(action.op is Op.U for program in schedule.programs for action in program)
    replicas = any(len(ranks) > 1 for ranks in schedule.owners)
    if schedule.without_backward:
        raise ScheduleError(
            f"schedule {schedule.name!r} has stages without a backward, {schedule.without_backward}, which a CSV table "
            f"cannot say; use to_json"
        )
    if updates or replicas or max(schedule.num_batches, schedule.num_slices) > 1 or schedule.weight_rule != "flush":
        raise ScheduleError(
            f"schedule {schedule.name!r} has replicas, slices, several batches or updates, which a CSV table cannot "
            f"say: expected a flush schedule with one owner a stage; use to_json"
        )
    table = unit_time_cells(schedule)
    rows = [["" if cell is None else str(cell) for cell in row] for row in table]
    if overlap == "pairs":
        for row, cells in zip(rows, table, strict=True):
            for at, (one, then) in enumerate(pairwise(cells)):
                if one and then and one.op is Op.F and then.op is Op.B and one.stage != then.stage:
                    row[at : at + 2] = f"({one};{then})OVERLAP_F_B", ""
    return "".join(",".join(row) + "\n" for row in rows)


def from_csv(text: str, *, name: str = "csv", owners: Sequence[Sequence[int]] = ()) -> Schedule:
    """See `Schedule.from_csv`."""
    rows = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    programs = tuple(_read_row(number, line) for number, line in rows)
    if not any(programs):
        raise ScheduleError("the table has no action: expected a row a rank with cells such as 0F0")
    schedule = Schedule(
        name=name,
        placement=tuple(tuple(sorted({a.stage for a in actions})) for actions in programs),
        programs=programs,
        num_microbatches=1 + max(a.index for actions in programs for a in actions),
        owners=tuple(map(tuple, owners)),
    )
    fitting = fitting_owners(schedule)
    if not owners and fitting != schedule.owners:
        _refuse_undeclared_owners([row for row, _ in rows], programs, fitting)
    return schedule


def _refuse_undeclared_owners(
    rows: Sequence[int], programs: Sequence[Sequence[Action]], fitting: tuple[tuple[int, ...], ...] | None
) -> None:
    row_of: dict[int, int] = {}
    for row, actions in zip(rows, programs, strict=True):
        for action in actions:
            if row_of.setdefault(action.stage, row) != row:
                declared = (
                    ""
                    if fitting is None
                    else f', or declared owners: Schedule.from_csv(text, owners={fitting}), "owners" in JSON'
                )
                raise ScheduleError(
                    f"row {row}: {action} is of stage {action.stage}, which row {row_of[action.stage]} "
                    f"has too; expected one row for each stage{declared}"
                )


def _read_row(row: int, line: str) -> tuple[Action, ...]:
    program: list[Action] = []
    for column, cell in enumerate(line.split(","), start=1):
        if not cell.strip() or _COMMUNICATION.fullmatch(cell.strip()):
            continue
        overlapped = _OVERLAPPED.fullmatch(cell.strip())  # here its parts run one after the other
        try:
            actions = [Action.parse(part) for part in (overlapped[1].split(";") if overlapped else [cell])]
        except ValueError as error:
            raise ScheduleError(f"row {row}, column {column}: {error}") from None
        program += actions
        if moving := [action for action in actions if action.op in MOVE_OPS]:
            raise ScheduleError(
                f"row {row}, column {column}: {moving[0]} moves activations, which a CSV table cannot say: "
                f"expected F B I W, or a schedule as JSON"
            )
    return tuple(program)


def to_json(schedule: Schedule) -> str:
    return json.dumps(
        {
            "version": _JSON_VERSION,
            "name": schedule.name,
            "num_microbatches": schedule.num_microbatches,
            "num_slices": schedule.num_slices,
            "num_batches": schedule.num_batches,
            "weight_rule": schedule.weight_rule,
            "update_every": schedule.update_every,
            "placement": [list(stages) for stages in schedule.placement],
            "owners": [list(ranks) for ranks in schedule.owners],
            "without_backward": list(schedule.without_backward),
            "edges": [[e.src, e.dst, e.grad] for e in schedule.stage_edges],
            "programs": [" ".join(map(str, program)) for program in schedule.programs],
        },
        indent=1,
        default=int,  # numpy's
    )


def from_json(text: str) -> Schedule:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads
        raise ScheduleError(f"not JSON: {error}") from None
    if not isinstance(data, dict) or set(data) - _OPTIONAL_KEYS != _JSON_KEYS:
        found = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ScheduleError(f"a schedule has the keys {sorted(_JSON_KEYS)}, found {found}")
    if data["version"] != _JSON_VERSION:
        raise ScheduleError(f"version {data['version']!r}: expected {_JSON_VERSION}")
    return Schedule(
        name=str(data["name"]),
        placement=_read_numbers(data["placement"], "placement"),
        owners=_read_numbers(data.get("owners", []), "owners"),
        programs=tuple(_read_program(*pair) for pair in enumerate(_list(data["programs"], "programs"))),
        num_microbatches=_whole(data["num_microbatches"], "num_microbatches"),
        num_slices=_whole(data.get("num_slices", 1), "num_slices"),
        num_batches=_whole(data["num_batches"], "num_batches"),
        weight_rule=str(data["weight_rule"]),
        update_every=None if data.get("update_every") is None else _whole(data["update_every"], "update_every"),
        without_backward=tuple(
            _whole(stage, "without_backward") for stage in _list(data.get("without_backward", []), "without_backward")
        ),
        edges=tuple(_read_edge(edge) for edge in _list(data["edges"], "edges")),
    )


def _read_numbers(value: object, key: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(_whole(number, key) for number in _list(each, key)) for each in _list(value, key))


def _read_program(rank: int, program: object) -> tuple[Action, ...]:
    try:
        return tuple(Action.parse(word) for word in str(program).split())
    except ValueError as error:
        raise ScheduleError(f"program of rank {rank}: {error}") from None


def _read_edge(edge: object) -> Edge:
    match edge:
        case [src, dst, bool() as grad]:
            return Edge(_whole(src, "edges"), _whole(dst, "edges"), grad)
    raise ScheduleError(f"edges: expected [src, dst, true or false] each, found {edge!r}")


def _list(value: object, key: str) -> list[object]:
    if not isinstance(value, list):
        raise ScheduleError(f"{key}: expected a list, found {value!r:.60}")
    return value


def _whole(value: object, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ScheduleError(f"{key}: expected a whole number, found {value!r:.60}")
    return value


def to_grid(schedule: Schedule) -> str:
    """See `Schedule.grid`."""
    rows = unit_time_cells(schedule)
    several = any(len(stages) > 1 for stages in schedule.placement)
    texts = [["." if c is None else str(c) if several else f"{c.op.value}{c.index}" for c in row] for row in rows]
    moves = [_move_cells(program, row, several=several) for program, row in zip(schedule.programs, rows, strict=True)]
    width = max((len(cell) for row in (*texts, *moves) for cell in row), default=1)
    label = len(str(len(rows) - 1))
    lines = []
    for rank, (row, below) in enumerate(zip(texts, moves, strict=True)):
        lines.append(f"rank {rank:>{label}} | " + " ".join(cell.ljust(width) for cell in row).rstrip())
        if any(below):
            lines.append(f"{'':{label + 5}} | " + " ".join(cell.ljust(width) for cell in below).rstrip())
    return "\n".join(lines)


_MARKS = {Op.OFFLOAD: ">", Op.RELOAD: "<"}


def _move_cells(program: Sequence[Action], row: Sequence[Action | None], *, several: bool) -> list[str]:
    """Moves of a rank, each under the action in front of which it is begun; at the end in a cell more."""
    column = {action: at for at, action in enumerate(row) if action is not None}
    cells: list[list[str]] = [[] for _ in range(len(row) + 1)]
    at = len(row)
    for action in reversed(program):
        if action.op in MOVE_OPS:
            stage = f"{action.stage}" if several else ""
            cells[at].insert(0, f"{stage}{_MARKS[action.op]}{action.index}")
        else:
            at = column.get(action, at)
    return [",".join(cell) for cell in cells]
