"""Looped BFS (Lamy-Poirier, 2023, breadth-first pipeline parallelism): GPipe over V chunks per rank."""

from __future__ import annotations

from ..families import Family
from ..ir import Action, Op, Schedule
from .interleaved import looped_seconds
from .placements import cyclic_placement


def looped_bfs(*, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """All microbatches through a chunk before the next chunk; then backward, the last chunk first.

        rank 0 | 0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1       P=2, V=2, M=2, unit time
        rank 1 | .   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 .

    One gather and one reduction of a chunk's weights a batch; every rank holds M*V chunk activations.
    """
    programs = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        program = [Action(stage, Op.F, k) for stage in stages for k in range(num_microbatches)]
        program += [Action(stage, Op.B, k) for stage in reversed(stages) for k in range(num_microbatches)]
        programs.append(tuple(program))
    return Schedule(
        name="looped-bfs",
        placement=cyclic_placement(num_ranks=num_ranks, num_chunks=num_chunks),
        programs=tuple(programs),
        num_microbatches=num_microbatches,
    )


LOOPED_BFS = Family(
    name="looped-bfs",
    build=looped_bfs,
    options=("num_chunks",),
    aliases=("loopedbfs", "scheduleloopedbfs"),
    batch_seconds=looped_seconds,
    peak_activations=lambda equal: (equal.num_microbatches * equal.num_chunks,) * equal.num_ranks,
)
