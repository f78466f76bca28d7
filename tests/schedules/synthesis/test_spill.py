"""Moves put into an order: what leaves, and when."""

from __future__ import annotations

from support.inside import peaks_in_time, with_moves
from support.posed import pose

from stagewright.schedules import Costs, build, check, simulate


def moved(name: str, P: int, M: int, limit: float, *, way: float = 0.0) -> list[str]:
    """Programs of a named schedule with moves; nothing else in them has changed, nor when it runs."""
    costs = Costs(forward=1.0, backward=1.0, offload=way, reload=way)
    plain = build(name, num_ranks=P, num_microbatches=M)
    timeline = simulate(plain, costs)
    problem = pose(num_ranks=P, num_microbatches=M, costs=costs, memory_limit=limit)
    made = with_moves(timeline, problem, costs)
    check(made)
    assert made.compute_programs == plain.compute_programs
    after = simulate(made, costs)
    assert after.makespan == timeline.makespan
    if made.moves_activations:
        assert after.peak_activations == tuple(peaks_in_time(after, problem))
    return [" ".join(map(str, program)) for program in made.programs]


def test_what_is_needed_last_leaves_and_comes_back_just_in_time() -> None:
    assert moved("gpipe", 1, 3, 2) == ["0F0 0F1 0OFFLOAD1 0F2 0B0 0RELOAD1 0B1 0B2"]


def test_a_way_goes_while_there_is_time_for_it() -> None:
    """A forward long, it begins behind its own forward and is through a forward later; the way back takes room in front
    of B1, so that 2 has to leave, too. Longer ways hide nowhere."""
    assert moved("gpipe", 1, 4, 3, way=1.0) == ["0F0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0F3 0RELOAD1 0B0 0RELOAD2 0B1 0B2 0B3"]
    assert "OFFLOAD" not in moved("gpipe", 1, 4, 3, way=3.0)[0]
