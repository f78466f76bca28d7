"""Schedules as text: the CSV of torch.distributed.pipelining, JSON, and grids for people. `Schedule` has the
methods.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import index
from typing import Any

from .actions import COMPUTE_OPS, MOVE_OPS, Action, Op, ScheduleError
from .needs import Edge

JSON_VERSION = 1
_BY_HAND = [["0F0", "0B0"], ["1F0", "1B0"]]
_JSON_KEYS = frozenset(
    ("version", "name", "num_microbatches", "num_batches", "weight_rule", "placement", "edges", "programs")
)
# Missing from older files.
_OPTIONAL_KEYS = frozenset({"update_every", "owners", "num_slices", "without_backward", "overlapped"})
# Communication in torch's tables; lowering inserts its own.
_COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B)\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")  # torch's cell of a forward and a backward that may run at once


Cells = Sequence[Sequence[Action | None]]  # [P][T]: the action of each rank in each unit of time; None: idle


def unit_time_cells(
    programs: Sequence[Sequence[Action]], needs: Callable[[Action], Iterable[Action]]
) -> list[list[Action | None]]:
    """See `Schedule.unit_time_cells`. `needs`: the actions of other ranks that an action waits for; its own rank's are
    implied by program order."""
    rows: list[list[Action | None]] = [[] for _ in programs]
    waiting = [deque(program) for program in programs]
    free_at = [0] * len(programs)
    ends: dict[Action, int] = {}
    ready = True
    while ready:
        ready = False
        for rank, todo in enumerate(waiting):
            while todo and ends.keys() >= (needed := set(needs(todo[0]))):
                action, ready = todo.popleft(), True
                free_at[rank] = max([free_at[rank], *map(ends.__getitem__, needed)])
                if action.op in COMPUTE_OPS:
                    rows[rank] += [None] * (free_at[rank] - len(rows[rank])) + [action]
                    free_at[rank] += 1
                ends[action] = free_at[rank]
    for rank, todo in enumerate(waiting):
        if todo:
            raise ScheduleError(
                f"rank {rank} never gets what {todo[0]} needs: the schedule deadlocks; check(schedule) prints the cycle"
            )
    length = max(map(len, rows))
    return [row + [None] * (length - len(row)) for row in rows]


def csv_of(cells: Cells, *, pairs: bool, overlapped: Collection[Action] = ()) -> str:
    """See `Schedule.to_csv`. overlapped: the only forwards that are in pairs, if any are."""
    rows = [["" if cell is None else str(cell) for cell in row] for row in cells]
    if pairs:
        for texts, row in zip(rows, cells, strict=True):
            for at, (one, then) in enumerate(pairwise(row)):
                is_pair = one and then and one.op is Op.F and then.op is Op.B and one.stage != then.stage
                if is_pair and (one in overlapped or not overlapped):
                    texts[at : at + 2] = f"({one};{then})OVERLAP_F_B", ""
    return "".join(",".join(row) + "\n" for row in rows)


def read_csv(text: str) -> dict[int, tuple[Action, ...]]:
    """The program of each row, by its number (from 1); see `Schedule.from_csv`."""
    rows = {row: _read_row(row, line) for row, line in enumerate(text.splitlines(), start=1) if line.strip()}
    if not any(rows.values()):
        raise ScheduleError("the table has no action: expected a row per rank with cells such as 0F0")
    return rows


def read_overlapped(text: str) -> tuple[Action, ...]:
    """The forwards of the cells of a table that has been read in which two actions run together."""
    cells = (_OVERLAPPED.fullmatch(cell.strip()) for line in text.splitlines() for cell in line.split(","))
    return tuple(Action.parse(cell[1].split(";")[0]) for cell in cells if cell)


def refuse_undeclared_owners(rows: Mapping[int, Sequence[Action]], fitting: tuple[tuple[int, ...], ...] | None) -> None:
    """Raise ScheduleError that names the second row of a stage, and the owners that would fit."""
    row_of: dict[int, int] = {}
    for row, actions in rows.items():
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
        overlapped = _OVERLAPPED.fullmatch(cell.strip())
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


def read_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads
        raise ScheduleError(f"not JSON: {error}") from None


def read_data(data: object) -> dict[str, Any]:
    """The fields of a schedule, of `Schedule.to_data`'s form."""
    if not isinstance(data, dict) or set(data) - _OPTIONAL_KEYS != _JSON_KEYS:
        found = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ScheduleError(f"a schedule has the keys {sorted(_JSON_KEYS)}, found {found}")
    if data["version"] != JSON_VERSION:
        raise ScheduleError(f"version {data['version']!r}: expected {JSON_VERSION}")
    return {
        "name": str(data["name"]),
        "placement": _read_numbers(data["placement"], "placement"),
        "owners": _read_numbers(data.get("owners", []), "owners"),
        "programs": tuple(_read_program(*pair) for pair in enumerate(_list(data["programs"], "programs"))),
        "num_microbatches": _whole(data["num_microbatches"], "num_microbatches"),
        "num_slices": _whole(data.get("num_slices", 1), "num_slices"),
        "num_batches": _whole(data["num_batches"], "num_batches"),
        "weight_rule": str(data["weight_rule"]),
        "update_every": None if data.get("update_every") is None else _whole(data["update_every"], "update_every"),
        "without_backward": tuple(
            _whole(stage, "without_backward") for stage in _list(data.get("without_backward", []), "without_backward")
        ),
        "edges": tuple(_read_edge(edge) for edge in _list(data["edges"], "edges")),
        "overlapped": _read_program("overlapped", " ".join(map(str, _list(data.get("overlapped", []), "overlapped")))),
    }


def _read_numbers(value: object, key: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(_whole(number, key) for number in _list(each, key)) for each in _list(value, key))


def _read_program(rank: int | str, program: object) -> tuple[Action, ...]:
    try:
        return tuple(Action.parse(word) for word in str(program).split())
    except ValueError as error:
        raise ScheduleError(f"{rank if isinstance(rank, str) else f'program of rank {rank}'}: {error}") from None


def read_programs(programs: Any) -> tuple[tuple[Action, ...], ...]:
    """Programs as they are written by hand: in lists too, an action as "0F2" or (0, "F", 2), a program as "0F0 0B0"."""
    if isinstance(programs, tuple) and all(
        isinstance(program, tuple) and all(type(action) is Action and type(action[1]) is Op for action in program)
        for program in programs
    ):
        return programs
    if isinstance(programs, str | Mapping) or not isinstance(programs, Iterable):
        raise ScheduleError(f"programs={programs!r:.60}: expected one per rank, such as {_BY_HAND}")
    return tuple(_read_actions(rank, program) for rank, program in enumerate(programs))


def _read_actions(rank: int, program: Any) -> tuple[Action, ...]:
    if isinstance(program, str):
        return _read_program(rank, program)
    try:
        return tuple(
            Action.parse(given) if isinstance(given, str) else Action(index(given[0]), Op(given[1]), index(given[2]))
            for given in program
        )
    except (ValueError, TypeError, IndexError) as error:
        raise ScheduleError(
            f"program of rank {rank}: {program!r:.60}: {error}: expected actions, such as "
            f'[Action(0, Op.F, 0), Action(0, Op.B, 0)], ["0F0", "0B0"] or "0F0 0B0"'
        ) from None


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


def grid_of(cells: Cells, programs: Sequence[Sequence[Action]], *, several: bool) -> str:
    """See `Schedule.grid`; `several`: whether the stage is printed before the op."""
    texts = [["." if c is None else str(c) if several else f"{c.op.value}{c.index}" for c in row] for row in cells]
    moves = [_move_cells(program, row, several=several) for program, row in zip(programs, cells, strict=True)]
    width = max((len(cell) for row in (*texts, *moves) for cell in row), default=1)
    label = len(str(len(cells) - 1))
    lines = []
    for rank, (row, below) in enumerate(zip(texts, moves, strict=True)):
        lines.append(f"rank {rank:>{label}} | " + " ".join(cell.ljust(width) for cell in row).rstrip())
        if any(below):
            lines.append(f"{'':{label + 5}} | " + " ".join(cell.ljust(width) for cell in below).rstrip())
    return "\n".join(lines)


_MARKS = {Op.OFFLOAD: ">", Op.RELOAD: "<"}


def _move_cells(program: Sequence[Action], row: Sequence[Action | None], *, several: bool) -> list[str]:
    """Moves of a rank, each below the action before which it begins; those at the end in an extra cell."""
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
