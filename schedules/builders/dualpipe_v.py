"""DualPipeV (DeepSeek-AI, 2025): one half of DualPipe, whose stages go down the ranks and up again."""

from __future__ import annotations

from ..families import EqualStages, Family
from ..ir import Schedule
from .dualpipe import Direction, bubble_of_pairs, eight_steps
from .placements import snake_placement


def dualpipe_v(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe's order over a V of 2P stages: rank r holds stage r on the way down and stage 2P-1-r on the way up.

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3       P=2, M=4
        rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

    The weights stand once. The first and the last stage share rank 0, stages P-1 and P the last rank: nothing is sent
    between them. As in `dualpipe`, the two halves of a pair of forward and backward run one after the other.

    With equal stages, free links and W at most F and I the bubble of every rank is the largest of n (F+I-W), 2n (F-W)
    and n (2I-W) - F, with n = P-1 and the costs of ONE chunk, whatever M is. The published (P-1)(F&B + B - 3W) is that
    of pairs run at once, see `dualpipe`. Each rank holds 2P + 1 chunk activations, from F to the end of B or W.

    Raises ValueError for fewer than 2P microbatches.
    """
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"num_microbatches={num_microbatches} for schedule 'dualpipe-v' on {num_ranks} ranks: expected at least "
            f"{2 * num_ranks} (2P), which its warm-up needs"
        )
    placement = snake_placement(num_ranks=num_ranks, num_chunks=2)
    programs = []
    for rank, (down, up) in enumerate(placement):
        ways = Direction(down, lambda n: n), Direction(up, lambda n: n)
        programs.append(eight_steps(ways, position=rank, length=num_ranks, each_way=num_microbatches))
    return Schedule(
        name="dualpipe-v",
        placement=placement,
        programs=tuple(programs),
        num_microbatches=num_microbatches,
    )


def _batch_seconds(equal: EqualStages) -> float | None:
    bubble = bubble_of_pairs(equal, equal.num_ranks - 1)
    return None if bubble is None else 2 * equal.num_microbatches * equal.both + bubble


DUALPIPE_V = Family(
    name="dualpipe-v",
    build=dualpipe_v,
    placement="snake",
    aliases=("dualpipev", "scheduledualpipev"),
    num_chunks=2,
    splits_backward=True,
    full_after=2,
    batch_seconds=_batch_seconds,
    peak_activations=lambda equal: (2 * equal.num_ranks + 1,) * equal.num_ranks,
)
