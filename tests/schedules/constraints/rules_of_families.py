"""The built-in families, said in rules: what a user would write in place of a builder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from support.inside import B, Constraints, F, I, InOrder, Rule, U, W, in_order, in_turns, microbatch_groups

from stagewright.schedules import Op, Schedule


def one_and_one(orders: Callable[[Op], InOrder], warmup: Callable[[int], int]) -> list[Rule]:
    """1F1B."""
    return [in_turns(orders(F), orders(B), ahead=warmup)]


def split(orders: Callable[[Op], InOrder], warmup: Callable[[int], int], put_off: Callable[[int], int]) -> list[Rule]:
    """The same with I, and each W right after the I that comes so many later."""
    return [in_turns(orders(F), orders(I), ahead=warmup), in_turns(orders(I), orders(W), ahead=put_off)]


def in_rules(table: Schedule) -> Constraints:
    """The rules of a family, for the sizes of its table."""
    P, M, S, n = table.num_ranks, table.num_microbatches, table.num_stages, table.num_slices
    V = S // P
    total = M * n * V
    options: dict[str, Any] = {"num_ranks": P, "num_microbatches": M, "num_slices": n}
    if V > 1:
        options |= {"placement": "cyclic", "num_chunks": V}

    def orders(op: Op) -> InOrder:
        """Microbatch by microbatch; a backward takes the slices of each from the last to the first."""
        return in_order(op, key=lambda s, k: k if op is F else (k // n, -k))

    def looping(at_least: int) -> tuple[Callable[[Op], InOrder], int]:
        """By group, in it by chunk, in it as above."""
        sizes = microbatch_groups(at_least=at_least, num_microbatches=M)
        group = [number for number, size in enumerate(sizes) for _ in range(size)]

        def looped(op: Op) -> InOrder:
            sign = 1 if op is F else -1
            return in_order(op, key=lambda s, k: (group[k // n], sign * s, k // n, sign * k))

        return looped, (V - 1) * sizes[0] * n

    def capped(warmup: Callable[[int], int]) -> tuple[Callable[[int], int], Callable[[int], int]]:
        """A warm-up of at most all forwards, and how many W each rank puts off to hold what rank 0 does."""
        return lambda r: min(warmup(r), total), lambda r: min(warmup(0), total) - min(warmup(r), total)

    def slot(op: Op, s: int, m: int) -> int:
        """Chimera: even microbatches go down the ranks and odd ones up, in slots that never meet."""
        first = 2 * P * (m // P) + 2 * (m % P // 2)
        return first + (s if op is F else 2 * P - 1 - s)

    if table.name in ("chimera", "hanayo"):
        options |= {"placement": table.placement, "num_chunks": None, "owners": table.owners}
    if table.name == "hanayo":
        options["prefer"] = lambda action: (action.op is F, -action.stage if action.op is F else action.stage)

    by_group, first_group = looping(-(-P // n))
    plain = lambda r: P - 1 - r  # noqa: E731
    double = lambda r: 2 * (P - 1 - r)  # noqa: E731
    by_chunk = lambda op: in_order(op, key=lambda s, m: (s if op is F else -s, m))  # noqa: E731
    rules: Mapping[str, Callable[[], list[Rule]]] = {
        "gpipe": lambda: [orders(F), orders(B), lambda s, k: F(s, M - 1).before(B(s, k))],
        "terapipe": lambda: [orders(F), orders(B), lambda s, k: F(s, M * n - 1).before(B(s, k))],
        "looped-bfs": lambda: [by_chunk(F), by_chunk(B), lambda s, m: F(S - P + s % P, M - 1).before(B(s, m))],
        "chimera": lambda: [in_order(F, B, key=slot)],
        "hanayo": lambda: [lambda s, m: F(s, m).after(B(s, m - 2 * P))],
        "1f1b": lambda: one_and_one(orders, plain),
        "eager-1f1b": lambda: one_and_one(orders, double),
        "interleaved": lambda: one_and_one(by_group, lambda r: first_group + double(r)),
        "seq1f1b": lambda: one_and_one(orders, lambda r: plain(r) + n - 1),
        "slimpipe": lambda: one_and_one(by_group, lambda r: first_group + double(r) + n - 1),
        "zb-h1": lambda: split(orders, *capped(plain)),
        "zb-h2": lambda: split(orders, *capped(double)),
        "interleaved-zb": lambda: split(by_group, lambda r: first_group + plain(r), lambda r: r),
        "gis": lambda: split(by_group, lambda r: first_group + plain(r), lambda r: 0),
        "seq-zb-h1": lambda: split(orders, lambda r: min(plain(r) + n - 1, total), lambda r: r),
        "pipedream": lambda: [*one_and_one(orders, plain), lambda s, m: U(s, m).right_after(B(s, m))],
        "2bw": lambda: [*one_and_one(orders, plain), lambda s, m: U(s, m).right_after(B(s, m * M + M - 1))],
    }
    return Constraints(
        **options,
        rules=rules[table.name](),
        split_backward=any(action.op is W for action in table.programs[0]),
        num_batches=table.num_batches,
        weight_rule=table.weight_rule,
        update_every=table.update_every,
        name=table.name,
    )


IN_RULES = (
    "gpipe",
    "terapipe",
    "looped-bfs",
    "1f1b",
    "eager-1f1b",
    "interleaved",
    "seq1f1b",
    "slimpipe",
    "zb-h1",
    "zb-h2",
    "interleaved-zb",
    "gis",
    "seq-zb-h1",
    "chimera",
    "hanayo",
    "pipedream",
    "2bw",
)
