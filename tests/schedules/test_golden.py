"""The order of each builder, drawn: small ones here, larger ones in data/golden, and those of the docstrings.

pytest tests/schedules/test_golden.py --update-golden     writes data/golden anew; review it as a diff

The CSV of torch.distributed.pipelining, both ways, through torch's own classes (mock stages, no processes).
"""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.inside import ir, paci, pipedream, two_bw
from support.sizes import fitting

from stagewright.schedules import FAMILIES, Costs, Family, Op, Schedule, build, check, lower, lower_bound, simulate

GOLDEN = Path(__file__).parents[1] / "data" / "golden"

# (P, M, V): a multiple of P, remainders, fewer than P, one of each.
SIZES = [(4, 8, 2), (4, 6, 2), (4, 4, 3), (3, 7, 2), (4, 3, 2), (2, 5, 3), (1, 3, 2), (3, 1, 1)]


def made(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    chunks = num_chunks if FAMILIES[name].takes_chunks else None
    return build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=chunks)


# (P, M, options) of schedules whose batches overlap.
STREAMS: dict[str, list[tuple[int, int, dict[str, object]]]] = {
    "pipedream": [
        (4, 4, {}),
        (3, 2, {}),
        (3, 4, {"update_every": 2}),
        (3, 2, {"vertical_sync": True}),
        (3, 4, {"replicas": (2, 1)}),
        (1, 2, {}),
    ],
    "2bw": [
        (4, 4, {}),
        (4, 3, {}),
        (3, 5, {"warmup": "eager"}),
        (3, 4, {"warmup": (4, 2, 0)}),
        (3, 4, {"replicas": (2, 1)}),
        (1, 2, {}),
    ],
    "paci": [
        (4, 4, {}),
        (3, 2, {}),
        (3, 4, {"update_every": 1}),
        (4, 4, {"update_every": 2, "replicas": (2, 1, 1)}),
        (1, 2, {}),
    ],
}


def drawn(name: str) -> str:
    """All cases of a builder: what was asked, what comes of it at F=1 and B=2, and the order."""
    return drawn_streams(name) if name in STREAMS else drawn_flushes(name)


def drawn_streams(name: str) -> str:
    """Four batches each, with the programs, since updates have no cell in a grid."""
    blocks = []
    for P, M, options in STREAMS[name]:
        schedule = build(name, num_ranks=P, num_microbatches=M, num_batches=4, **options)
        report = check(schedule)
        timeline = simulate(schedule, Costs(forward=1.0, backward=2.0))
        peaks, versions, staleness = (
            " ".join(map(str, numbers)) for numbers in (report.peak_activations, report.peak_versions, report.staleness)
        )
        asked = "".join(f" {option}={value}" for option, value in options.items())
        blocks.append(
            f"{name}  P={P} M={M}{asked}, 4 batches\n"
            f"F=1 B=2: makespan {timeline.makespan:g}, a batch every {timeline.batch_seconds:g}, "
            f"bubble {timeline.bubble:.4f}; peak activations {peaks}, versions {versions}, staleness {staleness}\n"
            f"{schedule.grid()}\n"
            + "".join(f"rank {rank}: {' '.join(map(str, program))}\n" for rank, program in enumerate(schedule.programs))
        )
    return "\n".join(blocks)


def drawn_flushes(name: str) -> str:
    chunks = FAMILIES[name].takes_chunks
    sizes = dict.fromkeys((*fitting(name, P, M), V if chunks else 1) for P, M, V in SIZES)
    blocks = []
    for P, M, V in sizes:
        schedule = made(name, P, M, V)
        costs = Costs(forward=1.0, backward=2.0)
        timeline = simulate(schedule, costs)
        peaks = " ".join(map(str, check(schedule).peak_activations))
        blocks.append(
            f"{name}  P={P} M={M}{f' V={V}' if chunks else ''}\n"
            f"F=1 B=2: makespan {timeline.makespan:g}, lower bound {lower_bound(schedule, costs):g}, "
            f"makespan bubble {timeline.makespan_bubble:.4f}, span bubble {timeline.span_bubble:.4f}, "
            f"peak activations {peaks}\n{schedule.grid()}\n"
        )
    return "\n".join(blocks)


@pytest.mark.thorough(but=["paci", "dualpipe"])
@pytest.mark.parametrize("name", FAMILIES)
def test_golden(name: str, update_golden: bool) -> None:
    path = GOLDEN / f"{name}.txt"
    if update_golden:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawn(name), encoding="utf-8")
    assert path.exists(), f"no {path}: run pytest tests/schedules/test_golden.py --update-golden and review it"
    assert drawn(name) == path.read_text(encoding="utf-8")


def test_golden_holds_nothing_else() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(FAMILIES)


@pytest.mark.parametrize(
    ("documented", "schedule"),
    [
        (pipedream, build("pipedream", num_ranks=3, num_microbatches=4)),
        (two_bw, build("2bw", num_ranks=2, num_microbatches=2)),
        (paci, build("paci", num_ranks=3, num_microbatches=2)),
    ],
    ids=["pipedream", "2bw", "paci"],
)
def test_pictures_of_streams(documented: object, schedule: Schedule) -> None:
    """The beginning of each rank's row; an update stands between the cells, without its number."""
    rows = re.findall(r"rank (\d) \| (.*?) \.\.\.", inspect.getdoc(documented) or "")
    assert len(rows) == schedule.num_ranks
    cells = [row.split("| ")[1].split() for row in schedule.grid().splitlines()]
    for rank, row in enumerate(row for _, row in rows):
        words = row.split()
        actions = [word for word in words if word != "."]
        expected = [f"{op.value}{'' if op is Op.U else k}" for _, op, k in schedule.programs[rank]]
        assert actions == expected[: len(actions)]
        shown = [word for word in words if word != "U"]
        assert shown == cells[rank][: len(shown)]


def pictured(family: Family) -> tuple[str, Schedule] | None:
    """The grid in the docstring of a flush builder, and the schedule of the sizes that stand beside it."""
    lines = [line.strip() for line in (inspect.getdoc(family.build) or "").splitlines()]
    rows = [line for line in lines if re.match(r"rank \d+ \|", line)]
    sizes = {name: int(number) for row in rows for name, number in re.findall(r"\b([PVM])=(\d+)", row)}
    if not rows or family.name in STREAMS:
        return None
    grid = "\n".join(re.split(r"  +(?=[a-zP])", row)[0] for row in rows)
    return grid, made(family.name, sizes["P"], sizes["M"], sizes.get("V", family.num_chunks))


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if pictured(f)], ids=lambda family: family.name)
def test_pictures_in_docstrings(family: Family) -> None:
    """The text left of two or more spaces and a word, if any, in lines that begin with `rank`."""
    picture = pictured(family)
    grid, schedule = picture
    assert grid == schedule.grid()


def test_pictures_of_builders_are_their_orders() -> None:
    assert sum(pictured(family) is not None for family in FAMILIES.values()) >= 9
    rows = [
        line.split("| ")[1].split("    ")[0]
        for line in (ir.__doc__ or "").splitlines()
        if "rank" in line and "|" in line
    ]
    cells = made("1f1b", 2, 3, 1).unit_time_cells()
    assert [row.split() for row in rows] == [[str(cell or ".") for cell in row] for row in cells]


# (P, V, M): torch needs M to be a multiple of the rounds of M // P for interleaved, and M >= P for 1F1B.
INTERLEAVED = [(2, 2, 4), (4, 2, 8), (4, 3, 10), (4, 2, 3), (3, 1, 6), (1, 3, 4)]
PLAIN = [(1, 1), (2, 5), (4, 4), (4, 8)]


@pytest.fixture(scope="module")
def torch_schedules() -> Any:
    from torch.distributed.pipelining import schedules

    return schedules


def mock_stages(P: int, V: int) -> list[Any]:
    return [
        SimpleNamespace(
            num_stages=P * V,
            group_size=P,
            group_rank=0,
            stage_index=chunk * P,
            is_first=chunk == 0,
            is_last=chunk * P == P * V - 1,
            has_backward=True,
            stage_index_to_group_rank={},
            submod=None,
        )
        for chunk in range(V)
    ]


def multi(torch_schedules: Any, kind: str, P: int, V: int, M: int) -> Any:
    return getattr(torch_schedules, kind)(mock_stages(P, V), M)


def orders(programs: Iterable[Iterable[Any]]) -> list[list[str]]:
    """Compute actions as text, without idle cells and gradient reductions; overlapped ones one after the other."""
    flat = [
        [p for a in program if a is not None for p in getattr(a, "sub_actions", None) or [a]] for program in programs
    ]
    return [[str(a) for a in program if str(a) and "REDUCE_GRAD" not in str(a)] for program in flat]


@pytest.mark.parametrize(("P", "M"), PLAIN)
def test_the_order_of_1f1b_is_torchs(torch_schedules: Any, P: int, M: int) -> None:
    """Torch 2.13 writes the last rank's forwards as 1..M in its table (and runs 0..M-1): there only the ops count."""
    theirs = torch_schedules.Schedule1F1B(mock_stages(P, 1)[0], M)._get_pipeline_order()
    ours = build("1f1b", num_ranks=P, num_microbatches=M).programs
    assert orders(theirs[rank] for rank in range(P - 1)) == orders(ours[:-1])
    assert "".join(a.computation_type.value for a in theirs[P - 1] if a and a.is_compute_op) == "FB" * M
    assert "".join(action.op for action in ours[-1]) == "FB" * M


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *(("ScheduleGPipe", (P, 1, M)) for P, M in PLAIN),
        *(("ScheduleInterleaved1F1B", sizes) for sizes in INTERLEAVED),
        *(("ScheduleInterleavedZeroBubble", sizes) for sizes in (*INTERLEAVED, (4, 1, 2))),
        *(("ScheduleZBVZeroBubble", (P, 2, M)) for P, M in [(1, 3), (2, 4), (4, 8), (4, 5), (3, 2)]),
        *(("ScheduleDualPipeV", (P, 2, M)) for P, M in [(2, 4), (4, 9), (3, 6)]),
    ],
)
def test_the_order_is_torchs(torch_schedules: Any, kind: str, sizes: tuple[int, int, int]) -> None:
    """Fewer microbatches than a full warm-up included."""
    P, V, M = sizes
    if kind == "ScheduleGPipe":
        theirs = torch_schedules.ScheduleGPipe(mock_stages(P, 1)[0], M)._get_pipeline_order()
    else:
        theirs = multi(torch_schedules, kind, P, V, M).pipeline_order
    ours = build(kind, num_ranks=P, num_microbatches=M, num_chunks=V)
    assert orders(theirs[rank] for rank in range(P)) == orders(ours.programs)


@pytest.mark.thorough(but=["compute_only-ScheduleDualPipeV-sizes11"])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *(("ScheduleInterleaved1F1B", sizes) for sizes in INTERLEAVED),
        ("ScheduleLoopedBFS", (2, 2, 3)),
        ("ScheduleInterleavedZeroBubble", (2, 2, 4)),
        ("ScheduleInterleavedZeroBubble", (4, 1, 8)),
        ("ScheduleZBVZeroBubble", (4, 2, 8)),
        *(("ScheduleDualPipeV", sizes) for sizes in [(1, 2, 2), (2, 2, 4), (3, 2, 8), (4, 2, 9)]),
    ],
)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_torchs_tables_are_read_and_checked(
    torch_schedules: Any, kind: str, sizes: tuple[int, int, int], form: str, tmp_path: Path
) -> None:
    P, V, M = sizes
    theirs = multi(torch_schedules, kind, P, V, M)
    theirs._dump_csv(tmp_path / "table.csv", format=form)
    schedule = Schedule.from_csv((tmp_path / "table.csv").read_text())
    assert check(schedule).num_actions == sum(map(len, orders(theirs.pipeline_order.values())))
    assert orders(schedule.programs) == orders(theirs.pipeline_order[rank] for rank in range(P))
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (P, P * V, M)


def test_torchs_grid_of_a_plain_schedule_is_read(torch_schedules: Any) -> None:
    """It ends each row with a reduction of gradients, which is left out."""
    order = torch_schedules.ScheduleGPipe(mock_stages(3, 1)[0], 5)._get_pipeline_order()
    text = "".join(",".join("" if a is None else str(a) for a in order[rank]) + "\n" for rank in range(3))
    assert "REDUCE_GRAD" in text
    assert Schedule.from_csv(text, name="gpipe") == build("gpipe", num_ranks=3, num_microbatches=5)


@pytest.mark.thorough(but=["pairs-dualpipe-v-sizes10"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpipe", (3, 1, 5)),
        ("1f1b", (4, 1, 8)),
        ("1f1b", (4, 1, 2)),  # fewer microbatches than ranks: torch's own builder refuses, its runtime does not
        ("interleaved", (2, 2, 5)),  # a remainder, likewise
        ("interleaved", (4, 3, 11)),
        ("looped-bfs", (2, 3, 4)),
        ("zb-2p", (3, 1, 7)),
        ("gis", (4, 2, 6)),
        ("interleaved-zb", (4, 2, 3)),
        ("zb-v", (3, 2, 5)),
        ("dualpipe-v", (1, 2, 3)),
        ("dualpipe-v", (4, 2, 9)),
    ],
)
@pytest.mark.parametrize("overlap", ["none", "pairs"])
def test_our_tables_are_read_and_lowered_by_torchs_runtime(
    torch_schedules: Any, name: str, sizes: tuple[int, int, int], overlap: Any, tmp_path: Path
) -> None:
    P, V, M = sizes
    ours = build(name, num_ranks=P, num_microbatches=M, num_chunks=V)
    path = tmp_path / "table.csv"
    path.write_text(ours.to_csv(overlap=overlap))
    assert Schedule.from_csv(path.read_text()).programs == ours.programs
    theirs = torch_schedules._PipelineScheduleRuntime(mock_stages(P, V), M)
    theirs._load_csv(str(path))  # checks, places, and adds communication (or raises where it can't go on)
    assert orders(theirs.pipeline_order[rank] for rank in range(P)) == orders(ours.programs)
    placed = {stage: rank for rank, stages in enumerate(ours.placement) for stage in stages}
    assert theirs.stage_index_to_group_rank == placed
    lowered = theirs.pipeline_order_with_comms
    sent = {str(a) for actions in lowered.values() for a in actions if "SEND" in str(a)}
    assert sent == {str(step) for program in lower(ours).programs for step in program.steps if "SEND" in str(step)}


@pytest.mark.parametrize(("P", "M"), [(2, 4), (4, 9)])
def test_overlapped_pairs_are_those_of_torchs_dualpipe_v(torch_schedules: Any, P: int, M: int, tmp_path: Path) -> None:
    """But one: torch leaves the first pair of the last rank apart."""
    theirs = multi(torch_schedules, "ScheduleDualPipeV", P, 2, M).pipeline_order
    table = build("dualpipe-v", num_ranks=P, num_microbatches=M).to_csv(overlap="pairs")
    ours = [[cell for cell in row.split(",") if cell] for row in table.splitlines()]
    *others, (_, last) = enumerate(ours)
    assert all(row == [str(a) for a in theirs[rank] if a is not None] for rank, row in others)
    apart = f"({P - 1}F{P};{P}B0)OVERLAP_F_B"
    at = last.index(apart)
    assert [*last[:at], f"{P - 1}F{P}", f"{P}B0", *last[at + 1 :]] == [str(a) for a in theirs[P - 1] if a is not None]
