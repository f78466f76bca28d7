"""Actions and schedules as text: CSV, JSON and grids; what a Schedule refuses to be."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.inside import COMPUTE_OPS, chain, read_schedule

from stagewright.schedules import Action, Edge, Op, Schedule, ScheduleError, build, check

from .random_schedules import by_hand, schedules, steady

ACTIONS = st.builds(Action, st.integers(0, 10**6), st.sampled_from(sorted({*COMPUTE_OPS, Op.U})), st.integers(0, 10**6))


@steady
@given(ACTIONS)
def test_actions_print_and_parse(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert repr(action) == str(action)


@pytest.mark.parametrize(
    "text", ["", "F0", "0F", "0X1", "0f1", "-1F0", "0F-1", "0F1.5", "0F0 0F1", "0SEND_F1", "(0F0;1B0)OVERLAP_F_B"]
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read the action .* expected <stage><op><microbatch> such as 3F12"):
        Action.parse(text)


def schedule(placement: tuple[tuple[int, ...], ...], **fields: object) -> Schedule:
    given: dict[str, object] = {"programs": ((),) * len(placement), "num_microbatches": 1, **fields}
    return Schedule(name="x", placement=placement, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedule(()), "0 ranks are placed and 0 have a program: .* at least one rank"),
        (lambda: schedule(((0,), (1,)), programs=((),)), "2 ranks are placed and 1 have a program"),
        (lambda: schedule(((0,),), num_microbatches=0), "num_microbatches=0, num_batches=1: expected at least 1"),
        (lambda: schedule(((), ())), "hold no stage: expected at least one"),
        (lambda: schedule(((0,), (2,))), "2 stages, numbered 0 to 2, and none holds stage 1"),
        (lambda: schedule(((0, -1),)), "2 stages, numbered -1 to 0, and none holds stage 1"),
        (lambda: schedule(((0,), (0,)), owners=((0,),)), r"stage 0 .* the ranks \(0,\), and it is placed on \(0, 1\)"),
        (lambda: schedule(((0,),), owners=((0,), (0,))), "owners of 2 stages for 1"),
        (lambda: schedule(((0,), (1, 10**9))), "numbered 0 to 1000000000, and none holds stage 2"),
        (lambda: schedule(((0, 0),)), "stage 0 is twice on rank 0"),
        (lambda: schedule(((0, 1),), edges=(Edge(1, 0),)), "edge 1 -> 0: expected stages in ascending order below 2"),
        (lambda: schedule(((0, 1),), edges=(Edge(0, 1), Edge(0, 1, False))), "edge 0 -> 1 occurs twice"),
    ],
)
def test_parts_that_do_not_fit(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ScheduleError, match=message):
        make()


def test_owners_and_edges_unless_given() -> None:
    """Stage 1 stands on ranks 1 and 2: its microbatches alternate, from 0 in each batch."""
    made = schedule(((0,), (1,), (1,)), num_microbatches=3, num_batches=2)
    assert (made.num_ranks, made.num_stages, made.total_indices) == (3, 2, 6)
    assert made.owners == ((0,), (1, 2))
    assert [made.owner(1, k) for k in range(6)] == [1, 2, 1, 1, 2, 1]
    assert [made.owner(0, k) for k in range(6)] == [0] * 6
    turned = replace(made, owners=((0,), (2, 1)))
    assert [turned.owner(1, k) for k in range(6)] == [2, 1, 2, 2, 1, 2]
    assert turned != made == replace(turned, owners=())
    made = build("interleaved", num_ranks=2, num_microbatches=2, num_chunks=2)
    assert made.stage_edges == chain(4) == (Edge(0, 1), Edge(1, 2), Edge(2, 3))
    skipped = made.with_edges([Edge(0, 1), Edge(0, 3, False)])
    assert skipped.stage_edges == (Edge(0, 1), Edge(0, 3, False))
    assert skipped.programs == made.programs


CSV = """\
0F0,0F1,,0B0,0F2,0B1,,0B2
,1F0,1B0,1F1,1B1,1F2,1B2,
"""


def test_csv() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=3)
    assert schedule.to_csv() == CSV
    again = Schedule.from_csv(CSV, name="1f1b")
    assert again == schedule


@pytest.mark.thorough
@steady
@given(schedules(replicas=False))
def test_csv_round_trip(schedule: Schedule) -> None:
    """All but the name, the edges, and an idle rank's place at the end of the table."""
    assume(all(schedule.programs) and len(schedule.to_csv().splitlines()[0]) > 3)
    again = Schedule.from_csv(schedule.to_csv())
    assert again.programs == schedule.programs
    assert again.placement == schedule.placement
    assert again.num_microbatches == schedule.num_microbatches
    check(again.with_edges(schedule.stage_edges))


def test_cells_that_are_not_one_action() -> None:
    together = CSV.replace("0F2,0B1", "(0F2; 0B1)OVERLAP_F_B,")
    assert Schedule.from_csv(together, name="1f1b") == build("1f1b", num_ranks=2, num_microbatches=3)
    with pytest.raises(ValueError, match="overlap='all': expected 'none' or 'pairs'"):
        Schedule.from_csv(CSV).to_csv(overlap="all")  # type: ignore[arg-type]
    made = by_hand("0F0 0B0", "", "1F0 1B0", microbatches=1, placement=[[0], [], [1]])
    assert made.to_csv() == "0F0,,,0B0\n,,,\n,1F0,1B0,\n"
    assert Schedule.from_csv(made.to_csv(), name="by hand") == made
    # The text that torch writes with format="compute_comms".
    lowered = """\
    0UNSHARD,0F0,0SEND_F0, 0RECV_B0 ,0B0,0REDUCE_GRAD,0RESHARD

    1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD0
    """
    schedule = Schedule.from_csv(lowered)
    assert [" ".join(map(str, program)) for program in schedule.programs] == ["0F0 0B0", "1F0 1B0"]
    check(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CSV.replace("0B1", "0X1"), r"row 1, column 6: cannot read the action '0X1': expected <stage><op><microbatch>"),
        ("\n\n" + CSV.replace("1F0", "one"), r"row 4, column 2: cannot read the action 'one'"),
        (CSV.replace("1F2", "0F2"), r"row 2: 0F2 is of stage 0, which row 1 has too; expected one row for each stage"),
        (CSV.replace("0B1", "(0F9;0X1)OVERLAP_F_B"), "row 1, column 6: cannot read the action '0X1'"),
        ("0SEND_F\n", "row 1, column 1: cannot read the action '0SEND_F'"),
        ("0SEND_F0\n", "the table has no action"),
    ],
)
def test_unreadable_csv(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


@pytest.mark.parametrize(
    "schedule",
    [
        by_hand("0F0 0F1 0B0 0B1", "1F0 1B0", "1F1 1B1", microbatches=2, placement=[[0], [1], [1]]),
        by_hand("0F0 0B0 0U0 0F1 0B1 0U1", microbatches=1, batches=2),
        by_hand("0F0 0B0 0U0", microbatches=1),
        by_hand("0F0 0B0", microbatches=1, rule="2bw"),
        build("pipedream", num_ranks=2, num_microbatches=2),
    ],
    ids=["replicas", "batches", "updates", "rule", "pipedream"],
)
def test_what_a_table_cannot_say(schedule: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"a CSV table cannot say: .*; use to_json"):
        schedule.to_csv()


# Stage 0 stands on ranks 0 and 1, and its microbatch 0 on rank 1.
CROSSED = """\
0F1,1F0,1B0,0B1
0F0,1F1,1B1,0B0
"""


def test_a_table_with_declared_owners() -> None:
    """Undeclared they are an error that says what to type; so they are where a Schedule or JSON lacks them."""
    wanted = r"owners=\(\(1, 0\), \(0, 1\)\)"
    with pytest.raises(
        ScheduleError, match=rf"row 2: 0F0 is of stage 0, which row 1 has too; .*from_csv\(text, {wanted}"
    ):
        Schedule.from_csv(CROSSED)
    crossed = Schedule.from_csv(CROSSED, owners=((1, 0), (0, 1)))
    check(crossed)
    assert [crossed.owner(stage, k) for stage in (0, 1) for k in (0, 1)] == [1, 0, 0, 1]
    data = json.loads(crossed.to_json())
    assert data.pop("owners") == [[1, 0], [0, 1]]
    message = rf"0F1 on rank 0, position 0: microbatch 1 of stage 0 belongs to rank 1, .*{wanted} fit these programs"
    for undeclared in (Schedule.from_json(json.dumps(data)), replace(crossed, owners=())):
        with pytest.raises(ScheduleError, match=message):
            check(undeclared)
    plain = Schedule.from_csv("0F0,0B0\n0F1,0B1\n")  # as microbatches go round anyway
    assert check(plain).num_actions == 4
    assert plain.owners == ((0, 1),)
    # Rank 0 runs two microbatches in a row.
    text = "0F0,0F1,0B0,0B1\n0F2,0B2\n"
    with pytest.raises(ScheduleError, match=r"row 2: 0F2 is of stage 0, .*; expected one row for each stage$"):
        Schedule.from_csv(text)
    with pytest.raises(ScheduleError, match="no order of its ranks fits these programs"):
        check(Schedule.from_csv(text, owners=((1, 0),)))


@pytest.mark.thorough
@steady
@given(schedules(), st.integers(1, 3), st.sampled_from(["flush", "2bw", "stashing"]), st.data())
def test_json_round_trip(schedule: Schedule, batches: int, rule: str, data: st.DataObject) -> None:
    M = schedule.num_microbatches
    every = data.draw(st.none() | st.sampled_from([k for k in range(1, M + 1) if M % k == 0]))
    schedule = replace(schedule, num_batches=batches, weight_rule=rule, update_every=every)
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_json_is_readable_also_of_before_update_groups() -> None:
    """Written before there were any: the key is missing."""
    data = json.loads(build("2bw", num_ranks=2, num_microbatches=4).to_json())
    del data["update_every"]
    made = Schedule.from_json(json.dumps(data))
    assert (made.update_every, made.group_size, made.groups_per_batch) == (None, 4, 1)
    check(made)
    schedule = build("1f1b", num_ranks=2, num_microbatches=1).with_edges([Edge(0, 1, False)])
    assert json.loads(schedule.to_json()) == {
        "version": 1,
        "name": "1f1b",
        "num_microbatches": 1,
        "num_slices": 1,
        "num_batches": 1,
        "weight_rule": "flush",
        "update_every": None,
        "placement": [[0], [1]],
        "owners": [[0], [1]],
        "without_backward": [],
        "edges": [[0, 1, False]],
        "programs": ["0F0 0B0", "1F0 1B0"],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2: expected 1"),
        ({"programs": ["0F0", "1X0"]}, "program of rank 1: cannot read the action '1X0'"),
        ({"programs": "0F0"}, "programs: expected a list, found '0F0'"),
        ({"placement": [0, 1]}, "placement: expected a list, found 0"),
        ({"placement": [[0], ["1"]]}, "placement: expected a whole number, found '1'"),
        ({"num_microbatches": 2.5}, r"num_microbatches: expected a whole number, found 2\.5"),
        ({"owners": [[0]]}, "owners of 1 stages for 2: expected the ranks of each stage"),
        ({"owners": [[0], "1"]}, "owners: expected a list, found '1'"),
        ({"edges": [[0, 1]]}, r"edges: expected \[src, dst, true or false\] each, found \[0, 1\]"),
        ({"update_every": "1"}, "update_every: expected a whole number, found '1'"),
        ({"update_every": 2}, "update_every=2 for 1 microbatches per batch: expected a number that divides 1"),
        ({"microbatches": 4}, r"a schedule has the keys \['edges', .* found \['edges', 'microbatches'"),
    ],
)
def test_unreadable_json(change: dict[str, object], message: str) -> None:
    data = json.loads(build("gpipe", num_ranks=2, num_microbatches=1).to_json())
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_json(json.dumps({**data, **change}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0", "not JSON: "),
        ("9" * 5_000, "not JSON: .* 5000 digits"),
        ("[" * 100_000, "not JSON: .*recursion"),
        ("{}", r"has the keys .* found \[\]"),
    ],
)
def test_no_schedule_at_all(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_json(text)


def test_cells_are_as_wide_as_the_widest() -> None:
    grid = build("gpipe", num_ranks=2, num_microbatches=11).grid()
    assert grid.splitlines()[1] == (
        "rank 1 | .   F0  F1  F2  F3  F4  F5  F6  F7  F8  F9  F10 B0  B1  B2  B3  B4  B5  B6  B7  B8  B9  B10 ."
    )


@pytest.mark.parametrize("name", ["mine.csv", "mine.json", "mine"])
def test_a_file_is_read_by_what_it_holds(name: str, tmp_path: Path) -> None:
    schedule, path = build("1f1b", num_ranks=2, num_microbatches=3), tmp_path / name
    path.write_text(schedule.to_json())
    assert read_schedule(path) == schedule
    path.write_text(schedule.to_csv())
    assert read_schedule(path) == replace(schedule, name="mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0Q0\n", r"mine\.csv: row 1, column 2: cannot read the action '0Q0'"),
        ("0F0,0B0\n1F0\n", r"mine\.csv: missing: 1B0"),
        ("{", r"mine\.csv: not JSON"),
        ("", r"mine\.csv: the table has no action"),
    ],
)
def test_a_faulty_file_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message):
        read_schedule(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"schedule file '.*none' cannot be read: .*No such file"):
        read_schedule(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"schedule file '.*binary' cannot be read: .*codec can't decode"):
        read_schedule(tmp_path / "binary")
