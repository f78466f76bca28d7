"""Schedules as text: the CSV of torch.distributed.pipelining, JSON, and grids for people."""

from __future__ import annotations

import json

from .costs import UNIT_COSTS
from .ir import COMPUTE_OPS, Action, Edge, Op, Schedule, ScheduleError
from .simulate import simulate

_JSON_VERSION = 1
_LOWERED_OPS = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B, Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})


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
            assert isinstance(what, Action)
            if what.op in COMPUTE_OPS:
                row[round(start)] = what
        rows.append(row)
    return rows


def to_csv(schedule: Schedule) -> str:
    """A row a rank, a column a unit of time, empty where idle; what torch.distributed.pipelining reads too.

    Raises ScheduleError for a schedule that the table cannot say (replicas, several batches, updates).
    """
    if (
        any(len(ranks) > 1 for ranks in schedule.owners)
        or schedule.num_batches > 1
        or schedule.weight_rule != "flush"
    ):
        raise ScheduleError(
            f"schedule {schedule.name!r} has replicas, several batches or updates, which a CSV table cannot say: "
            f"expected a flush schedule with one owner a stage; use to_json"
        )
    rows = unit_time_cells(schedule)
    return "".join(",".join("" if cell is None else str(cell) for cell in row) + "\n" for row in rows)


def from_csv(text: str, *, name: str = "csv") -> Schedule:
    """Read `to_csv`'s form, or torch's; idle cells and communication actions are ignored (lowering makes its own).

    Raises ScheduleError that names row and column (from 1) of a cell that is no action.
    """
    programs: list[tuple[Action, ...]] = []
    rows = [line for line in text.splitlines() if line.strip()]
    for row_number, line in enumerate(rows, start=1):
        program = []
        for column, cell in enumerate(line.split(","), start=1):
            if not cell.strip():
                continue
            try:
                action = Action.parse(cell)
            except ValueError as error:
                raise ScheduleError(f"row {row_number}, column {column}: {error}") from None
            if action.op not in _LOWERED_OPS:
                program.append(action)
        programs.append(tuple(program))
    if not any(programs):
        raise ScheduleError("the table has no action: expected a row a rank with cells such as 0F0")
    owner: dict[int, int] = {}
    for rank, actions in enumerate(programs):
        for action in actions:
            if owner.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"row {rank + 1}: {action} is of stage {action.stage}, which row {owner[action.stage] + 1} "
                    f"has too; expected one row for each stage (a CSV table has no replicas)"
                )
    return Schedule(
        name=name,
        placement=tuple(tuple(sorted({a.stage for a in actions})) for actions in programs),
        programs=tuple(programs),
        num_microbatches=1 + max(a.index for actions in programs for a in actions),
    )


def to_json(schedule: Schedule) -> str:
    """Everything in one object; programs as text, so that people can read it."""
    return json.dumps(
        {
            "version": _JSON_VERSION,
            "name": schedule.name,
            "num_microbatches": schedule.num_microbatches,
            "num_batches": schedule.num_batches,
            "weight_rule": schedule.weight_rule,
            "placement": [list(stages) for stages in schedule.placement],
            "edges": [[e.src, e.dst, e.grad] for e in schedule.stage_edges],
            "programs": [" ".join(map(str, program)) for program in schedule.programs],
        },
        indent=1,
    )


def from_json(text: str) -> Schedule:
    """Read `to_json`'s form; ScheduleError names what is missing, unknown or unreadable."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"not JSON: {error}") from None
    expected = {
        "version",
        "name",
        "num_microbatches",
        "num_batches",
        "weight_rule",
        "placement",
        "edges",
        "programs",
    }
    if not isinstance(data, dict) or set(data) != expected:
        found = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ScheduleError(f"a schedule has the keys {sorted(expected)}, found {found}")
    if data["version"] != _JSON_VERSION:
        raise ScheduleError(f"version {data['version']!r}: expected {_JSON_VERSION}")
    programs = []
    for rank, program in enumerate(data["programs"]):
        try:
            programs.append(tuple(Action.parse(word) for word in program.split()))
        except (ValueError, AttributeError) as error:
            raise ScheduleError(f"program of rank {rank}: {error}") from None
    try:
        return Schedule(
            name=str(data["name"]),
            placement=tuple(tuple(int(s) for s in stages) for stages in data["placement"]),
            programs=tuple(programs),
            num_microbatches=int(data["num_microbatches"]),
            num_batches=int(data["num_batches"]),
            weight_rule=str(data["weight_rule"]),
            edges=tuple(Edge(int(src), int(dst), bool(grad)) for src, dst, grad in data["edges"]),
        )
    except (TypeError, ValueError) as error:
        raise ScheduleError(f"unreadable schedule: {error}") from None


def to_grid(schedule: Schedule) -> str:
    """The order as an aligned grid: a row a rank, a column a unit of time.

    The stage number stands before the op only where a rank has several stages.
    """
    rows = unit_time_cells(schedule)
    several = any(len(stages) > 1 for stages in schedule.placement)
    texts = [
        ["." if c is None else str(c) if several else f"{c.op.value}{c.index}" for c in row] for row in rows
    ]
    width = max((len(cell) for row in texts for cell in row), default=1)
    label = len(str(len(rows) - 1))
    lines = [
        f"rank {rank:>{label}} | " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for rank, row in enumerate(texts)
    ]
    return "\n".join(lines)
