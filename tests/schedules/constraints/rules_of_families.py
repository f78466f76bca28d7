"""The built-in families, said in rules: what a user would write in place of a builder."""

from __future__ import annotations

from collections.abc import Callable

from stagewright.schedules import Schedule
from stagewright.schedules.builders.interleaved import microbatch_groups
from stagewright.schedules.constraints import B, Constraints, F, I, U, W, in_order, in_turns

BOTH_IN_ORDER = {"forwards in order": in_order(F), "backwards in order": in_order(B)}
SPLIT_IN_ORDER = {"F in order": in_order(F), "I in order": in_order(I), "W in order": in_order(W)}


def gpipe(table: Schedule) -> Constraints:
    M = table.num_microbatches
    return Constraints(
        num_ranks=table.num_ranks,
        num_microbatches=M,
        rules={**BOTH_IN_ORDER, "all forwards first": lambda s, m: F(s, M - 1).before(B(s, m))},
    )


def one_f_one_b(table: Schedule) -> Constraints:
    P, M = table.num_ranks, table.num_microbatches
    return Constraints(
        num_ranks=P,
        num_microbatches=M,
        rules={
            **BOTH_IN_ORDER,
            "a backward right after the forward P - 1 - s later": lambda s, m: B(s, m).right_after(F(s, m + P - 1 - s)),
            "the last ones behind all forwards": lambda s, m: B(s, m).after(F(s, min(m + P - 1 - s, M - 1))),
        },
    )


def interleaved(table: Schedule) -> Constraints:
    P, M, V = table.num_ranks, table.num_microbatches, table.num_stages // table.num_ranks
    sizes = microbatch_groups(num_ranks=P, num_microbatches=M)
    group = [number for number, size in enumerate(sizes) for _ in range(size)]
    one_forward_one_backward = in_turns(
        in_order(F, key=lambda s, m: (group[m], s, m)),
        in_order(B, key=lambda s, m: (group[m], -s, m)),
        ahead=lambda rank: (V - 1) * sizes[0] + 2 * (P - 1 - rank),
    )
    return Constraints(
        num_ranks=P, num_chunks=V, placement="cyclic", num_microbatches=M, rules=[one_forward_one_backward]
    )


def looped_bfs(table: Schedule) -> Constraints:
    P, M, S = table.num_ranks, table.num_microbatches, table.num_stages
    return Constraints(
        num_ranks=P,
        num_chunks=S // P,
        placement="cyclic",
        num_microbatches=M,
        rules={
            "chunk by chunk": in_order(F, key=lambda s, m: (s, m)),
            "backwards, the last chunk first": in_order(B, key=lambda s, m: (-s, m)),
            "all forwards first": lambda s, m: F(S - P + s % P, M - 1).before(B(s, m)),
        },
    )


def zb_h1(table: Schedule) -> Constraints:
    P, M = table.num_ranks, table.num_microbatches

    def warmup(s: int) -> int:
        return min(P - 1 - s, M)

    def owed(s: int) -> int:
        return P - 1 - warmup(s)

    return Constraints(
        num_ranks=P,
        num_microbatches=M,
        split_backward=True,
        rules={
            **SPLIT_IN_ORDER,
            "one forward, one backward": lambda s, m: I(s, m).right_after(F(s, m + warmup(s))),
            "behind all forwards of the warm-up": lambda s, m: I(s, m).after(F(s, min(m + warmup(s), M - 1))),
            "W right after the I that is as many later as are put off": lambda s, m: W(s, m).right_after(
                I(s, m + owed(s))
            ),
            "the last ones behind all I": lambda s, m: W(s, m).after(I(s, min(m + owed(s), M - 1))),
        },
    )


def pipedream(table: Schedule) -> Constraints:
    P = table.num_ranks
    return Constraints(
        num_ranks=P,
        num_microbatches=table.num_microbatches,
        num_batches=table.num_batches,
        weight_rule="stashing",
        update_every=1,
        rules={
            **BOTH_IN_ORDER,
            "1F1B": lambda s, m: B(s, m).right_after(F(s, m + P - 1 - s)),
            "the last ones behind all forwards": lambda s, m: B(s, m).after(
                F(s, min(m + P - 1 - s, table.total_microbatches - 1))
            ),
            "updates at once": lambda s, m: U(s, m).right_after(B(s, m)),
        },
    )


def two_bw(table: Schedule) -> Constraints:
    P, M = table.num_ranks, table.num_microbatches
    return Constraints(
        num_ranks=P,
        num_microbatches=M,
        num_batches=table.num_batches,
        weight_rule="2bw",
        rules={
            **BOTH_IN_ORDER,
            "1F1B": lambda s, m: B(s, m).right_after(F(s, m + P - 1 - s)),
            "the last ones behind all forwards": lambda s, m: B(s, m).after(
                F(s, min(m + P - 1 - s, table.total_microbatches - 1))
            ),
            "an update a batch": lambda s, m: U(s, m).right_after(B(s, m * M + M - 1)),
        },
    )


IN_RULES: dict[str, Callable[[Schedule], Constraints]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "pipedream": pipedream,
    "2bw": two_bw,
}
