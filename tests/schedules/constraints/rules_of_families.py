"""The built-in families, said in rules: what a user would write in place of a builder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from support.inside import B, Constraints, F, InOrder, Relation, Rule, U, W, in_order

from stagewright.schedules import Op, Schedule


def one_and_one(orders: Callable[[Op], InOrder], warmup: Callable[[int], int], last: int, n: int = 1) -> list[Rule]:
    """1F1B: F up to that of the warm-up, then in turn with B; `last`: F of a rank; `n`: slices, which B takes from the
    last to the first."""

    def behind_its_forward(s: int, k: int) -> Relation:
        return F(s, min(k + warmup(s), last)).before(B(s, k // n * n + n - 1 - k % n))

    def before_the_next(s: int, k: int) -> Relation:
        return B(s, k // n * n + n - 1 - k % n).before(F(s, k + warmup(s) + 1))

    return [orders(F), orders(B), behind_its_forward, before_the_next]


def in_rules(table: Schedule) -> Constraints:
    """The rules of a family, for the sizes of its table."""
    P, M, S, n = table.num_ranks, table.num_microbatches, table.num_stages, table.num_slices
    V = S // P
    last = table.num_batches * M * n - 1
    options: dict[str, Any] = {"num_ranks": P, "num_microbatches": M, "num_slices": n}
    if V > 1:
        options |= {"placement": "cyclic", "num_chunks": V}

    def orders(op: Op) -> InOrder:
        """Microbatch by microbatch; a backward takes the slices of each from the last to the first."""
        return in_order(op, key=lambda s, k: k if op is F else (k // n, -k))

    def slot(op: Op, s: int, m: int) -> int:
        """Chimera: even microbatches go down the ranks and odd ones up, in slots that never meet."""
        first = 2 * P * (m // P) + 2 * (m % P // 2)
        return first + (s if op is F else 2 * P - 1 - s)

    if table.name in ("chimera", "hanayo"):
        options |= {"placement": table.placement, "num_chunks": None, "owners": table.owners}
    if table.name == "hanayo":
        options["prefer"] = lambda action: (action.op is F, -action.stage if action.op is F else action.stage)

    def updates_at_once(s: int, g: int) -> list[Relation]:
        k = g * M + M - 1
        return [U(s, g).before(F(s, k + P - s)), U(s, g).before(B(s, k + 1))]

    plain = lambda r: P - 1 - r  # noqa: E731
    double = lambda r: 2 * (P - 1 - r)  # noqa: E731
    by_chunk = lambda op: in_order(op, key=lambda s, m: (s if op is F else -s, m))  # noqa: E731
    rules: Mapping[str, Callable[[], list[Rule]]] = {
        "gpipe": lambda: [orders(F), orders(B), lambda s, k: F(s, M - 1).before(B(s, k))],
        "terapipe": lambda: [orders(F), orders(B), lambda s, k: F(s, M * n - 1).before(B(s, k))],
        "looped-bfs": lambda: [by_chunk(F), by_chunk(B), lambda s, m: F(S - P + s % P, M - 1).before(B(s, m))],
        "chimera": lambda: [in_order(F, B, key=slot)],
        "hanayo": lambda: [lambda s, m: F(s, m).after(B(s, m - 2 * P))],
        "1f1b": lambda: one_and_one(orders, plain, last),
        "eager-1f1b": lambda: one_and_one(orders, double, last),
        "seq1f1b": lambda: one_and_one(orders, lambda r: plain(r) + n - 1, last, n),
        "pipedream": lambda: [*one_and_one(orders, plain, last), lambda s, m: U(s, m).before(F(s, m + P - s))],
        "2bw": lambda: [*one_and_one(orders, plain, last), updates_at_once],
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
    "seq1f1b",
    "chimera",
    "hanayo",
    "pipedream",
    "2bw",
)
