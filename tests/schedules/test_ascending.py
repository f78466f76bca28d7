"""Why results do not depend on the schedule: each stage runs its microbatches in ascending order (and their slices, the
backwards from the last to the first).

Gradients then add up, and running statistics move, in the order of one process that runs the microbatches one after
the other: difference 0. Here for all builders over the whole grid; pipe/test_numerics.py computes a sample of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from support.inside import MOVE_OPS
from support.sizes import fitting

from stagewright.schedules import FAMILIES, Action, Op, build, lower

from .builders import ASYNC, FLUSH

RANKS = (1, 2, 3, 4, 6, pytest.param(8, marks=pytest.mark.nightly))
MICROBATCHES = (1, 2, 3, 5, 8, 13)


def out_of_order(programs: Iterable[Sequence[object]], num_slices: int = 1) -> list[str]:
    """Actions that come behind one of their stage and kind with the same or a higher microbatch, by rank; or, of slices
    of one microbatch, with the same or a higher one in forwards, the same or a lower one in the others."""
    found = []
    for rank, program in enumerate(programs):
        last: dict[tuple[int, Op], tuple[int, int]] = {}
        for action in program:
            if isinstance(action, Action):
                microbatch, part = divmod(action.index, num_slices)
                at = microbatch, part if action.op is Op.F else num_slices - 1 - part
                if at <= last.get((action.stage, action.op), (-1, 0)):
                    found.append(f"rank {rank}: {action}")
                last[action.stage, action.op] = at
    return found


@pytest.mark.thorough(but=["1f1b-1"])
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", FLUSH)
def test_under_every_flush_schedule(name: str, num_ranks: int) -> None:
    chunks = (1, 2, 3) if FAMILIES[name].takes_chunks else (None,)
    for P, M in dict.fromkeys(fitting(name, num_ranks, number) for number in MICROBATCHES):
        for num_chunks in chunks:
            schedule = build(name, num_ranks=P, num_microbatches=M, num_chunks=num_chunks)
            case = f"M={M}, V={num_chunks}"
            assert not out_of_order(schedule.compute_programs, schedule.num_slices), case
            # What is executed: sends and receives stand between the actions, in their order.
            steps = ([s for s in p.steps if getattr(s, "op", None) not in MOVE_OPS] for p in lower(schedule).programs)
            assert not out_of_order(steps, schedule.num_slices), case


@pytest.mark.thorough(but=["2bw-1"])
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", ASYNC)
def test_under_every_asynchronous_schedule(name: str, num_ranks: int) -> None:
    for num_microbatches in MICROBATCHES:
        if name == "2bw" and num_microbatches < num_ranks - 1:
            continue  # refused
        schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        assert not out_of_order(schedule.programs), num_microbatches
