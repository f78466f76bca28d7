"""Actions as text, and what a Schedule refuses to be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import COMPUTE_OPS, chain

from stagewright.schedules import Action, Edge, Op, Schedule, ScheduleError, build

from .random_schedules import steady

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
        (lambda: schedule(((0,),), num_batches=0), "num_microbatches=1, num_batches=0: expected at least 1"),
        (lambda: schedule(((), ())), "hold no stage: expected at least one"),
        (lambda: schedule(((0,), (2,))), "2 stages, numbered 0 to 2, and none holds stage 1"),
        (lambda: schedule(((1,), (2,))), "2 stages, numbered 1 to 2, and none holds stage 0"),
        (lambda: schedule(((0, -1),)), "2 stages, numbered -1 to 0, and none holds stage 1"),
        (lambda: schedule(((0,), (0,)), owners=((0,),)), r"stage 0 .* the ranks \(0,\), and it is placed on \(0, 1\)"),
        (lambda: schedule(((0,),), owners=((0,), (0,))), "owners of 2 stages for 1"),
        (lambda: schedule(((0,), (1, 10**9))), "numbered 0 to 1000000000, and none holds stage 2"),
        (lambda: schedule(((0, 0),)), "stage 0 is twice on rank 0"),
        (lambda: schedule(((0, 1),), edges=(Edge(1, 0),)), "edge 1 -> 0: expected stages in ascending order below 2"),
        (lambda: schedule(((0, 1),), edges=(Edge(0, 2),)), "edge 0 -> 2: expected stages in ascending order below 2"),
        (lambda: schedule(((0, 1),), edges=(Edge(0, 1), Edge(0, 1, False))), "edge 0 -> 1 occurs twice"),
    ],
)
def test_parts_that_do_not_fit(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ScheduleError, match=message):
        make()


def test_owners() -> None:
    """Stage 1 stands on ranks 1 and 2: its microbatches alternate, from 0 in each batch."""
    made = schedule(((0,), (1,), (1,)), num_microbatches=3, num_batches=2)
    assert (made.num_ranks, made.num_stages, made.total_indices) == (3, 2, 6)
    assert made.owners == ((0,), (1, 2))
    assert [made.owner(1, k) for k in range(6)] == [1, 2, 1, 1, 2, 1]
    assert [made.owner(0, k) for k in range(6)] == [0] * 6
    turned = replace(made, owners=((0,), (2, 1)))
    assert [turned.owner(1, k) for k in range(6)] == [2, 1, 2, 2, 1, 2]
    assert turned != made == replace(turned, owners=())


def test_edges_are_a_chain_unless_given() -> None:
    made = build("interleaved", num_ranks=2, num_microbatches=2, num_chunks=2)
    assert made.stage_edges == chain(4) == (Edge(0, 1), Edge(1, 2), Edge(2, 3))
    skipped = made.with_edges([Edge(0, 1), Edge(0, 3, False)])
    assert skipped.stage_edges == (Edge(0, 1), Edge(0, 3, False))
    assert skipped.programs == made.programs
