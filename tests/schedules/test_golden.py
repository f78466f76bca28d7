"""The order of each builder, drawn: small ones here, larger ones in data/golden, and those of the docstrings.

pytest tests/schedules/test_golden.py --update-golden     writes data/golden anew; review it as a diff
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from support.inside import derive_versions, ir, paci, pipedream, two_bw
from support.sizes import fitting

from stagewright.schedules import FAMILIES, Costs, Family, Op, Schedule, build, check, lower_bound, simulate

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


@pytest.mark.thorough(but=["dualpipe"])
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


# --- pictures in docstrings ---


# The version of each microbatch by rank, as the picture says.
@pytest.mark.parametrize(
    ("documented", "schedule", "said"),
    [
        (pipedream, build("pipedream", num_ranks=3, num_microbatches=4), {(0, 3): 1, (0, 4): 2, (1, 3): 2, (2, 3): 3}),
        (
            two_bw,
            build("2bw", num_ranks=2, num_microbatches=2),
            {(rank, k): version for rank in (0, 1) for k, version in ((2, 0), (3, 0), (4, 1), (5, 1))},
        ),
        (paci, build("paci", num_ranks=3, num_microbatches=2), {(0, 3): 0, (0, 4): 1, (1, 2): 0, (1, 3): 1, (2, 2): 1}),
    ],
    ids=["pipedream", "2bw", "paci"],
)
def test_pictures_of_streams(documented: object, schedule: Schedule, said: dict[tuple[int, int], int]) -> None:
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
    used = derive_versions(schedule).used
    assert {key: used[key] for key in said} == said


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


def test_most_builders_draw_their_order() -> None:
    assert sum(pictured(family) is not None for family in FAMILIES.values()) >= 9


def test_picture_of_the_module() -> None:
    rows = [
        line.split("| ")[1].split("    ")[0]
        for line in (ir.__doc__ or "").splitlines()
        if "rank" in line and "|" in line
    ]
    cells = made("1f1b", 2, 3, 1).unit_time_cells()
    assert [row.split() for row in rows] == [[str(cell or ".") for cell in row] for row in cells]
