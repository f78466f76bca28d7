"""The order of each builder, drawn: small ones here, larger ones in data/golden, and those of the docstrings.

pytest tests/schedules/test_golden.py --update-golden     writes data/golden anew; review it as a diff
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from textwrap import dedent

import pytest
from support.inside import derive_versions, ir, paci, pair_up, pipedream, two_bw, unit_time_cells
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


# --- the same order, small enough to follow by eye ---

DRAWN = {
    ("gpipe", 3, 4, 1): """
        rank 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        rank 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        rank 2 | .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
    """,
    ("zb-h1", 3, 4, 1): """
        rank 0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """,
    ("1f1b", 3, 5, 1): """
        rank 0 | F0 F1 F2 .  .  B0 F3 B1 F4 B2 .  B3 .  B4
        rank 1 | .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 .  B4 .
        rank 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 .  .
    """,
    ("1f1b", 3, 2, 1): """
        rank 0 | F0 F1 .  .  .  B0 .  B1
        rank 1 | .  F0 F1 .  B0 .  B1 .
        rank 2 | .  .  F0 B0 F1 B1 .  .
    """,
    ("interleaved", 2, 4, 2): """
        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        rank 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .
    """,
    # The third microbatch of a remainder goes with the group before it.
    ("interleaved", 2, 3, 2): """
        rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2 2B0 .   2B1 .   2B2 0B0 0B1 0B2
        rank 1 | .   1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2 .
    """,
    ("looped-bfs", 2, 2, 3): """
        rank 0 | 0F0 0F1 2F0 2F1 4F0 4F1 .   .   4B0 4B1 2B0 2B1 0B0 0B1
        rank 1 | .   1F0 1F1 3F0 3F1 5F0 5F1 5B0 5B1 3B0 3B1 1B0 1B1 .
    """,
}


@pytest.mark.parametrize(("name", "P", "M", "V"), DRAWN)
def test_small_orders(name: str, P: int, M: int, V: int) -> None:
    assert made(name, P, M, V).grid() == dedent(DRAWN[name, P, M, V]).strip()


@pytest.mark.parametrize(
    ("warmup", "program"),
    [
        (0, "0F0 0B0 0F1 0B1 0F2 0B2"),
        (1, "0F0 0F1 0B0 0F2 0B1 0B2"),
        (2, "0F0 0F1 0F2 0B0 0B1 0B2"),
        (3, "0F0 0F1 0F2 0B0 0B1 0B2"),
        (9, "0F0 0F1 0F2 0B0 0B1 0B2"),
    ],
)
def test_pair_up(warmup: int, program: str) -> None:
    """One forward comes between the warm-up and the first backward, as long as one is left."""
    forwards, backwards = ([ir.Action(0, op, k) for k in range(3)] for op in (Op.F, Op.B))
    assert " ".join(map(str, pair_up(forwards, backwards, warmup=warmup))) == program


# Of each microbatch by rank, the version that the picture says.
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
    assert picture is not None
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
    cells = unit_time_cells(made("1f1b", 2, 3, 1))
    assert [row.split() for row in rows] == [[str(cell or ".") for cell in row] for row in cells]
