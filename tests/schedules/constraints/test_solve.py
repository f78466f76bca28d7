"""Rules completed to orders: against trying all orders, and each family that is a rule, regenerated from its rules."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import (
    B,
    Constraints,
    ContradictionError,
    F,
    I,
    InOrder,
    Relation,
    Rule,
    U,
    W,
    in_flight,
    in_order,
    only_if,
)

from stagewright.schedules import FAMILIES, Action, Costs, Op, Schedule, ScheduleError, build, check, simulate


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


IN_RULES = ("gpipe", "terapipe", "looped-bfs", "1f1b", "eager-1f1b", "seq1f1b", "chimera", "hanayo", "pipedream", "2bw")


P, M = 2, 2


def keeps(program: tuple[Action, ...], relations: list[Relation], limit: int) -> bool:
    """Whether one rank's program does."""
    at = {action: n for n, action in enumerate(program)}
    held = most = 0
    for action in program:
        held += action.op is F
        most = max(most, held)
        held -= action.op is B
    return most <= limit and all(at[first] < at[then] for first, then in relations if first in at)


def all_orders(relations: list[Relation], limits: list[int]) -> Iterator[Schedule]:
    own = [[op(rank, k) for op in (F, B) for k in range(M)] for rank in range(P)]
    kept = [[p for p in itertools.permutations(own[r]) if keeps(p, relations, limits[r])] for r in range(P)]
    for programs in itertools.product(*kept):
        schedule = Schedule(name="any", placement=tuple((r,) for r in range(P)), programs=programs, num_microbatches=M)
        try:
            check(schedule)
        except ScheduleError:
            continue
        yield schedule


@st.composite
def relations_of_a_rank(draw: st.DrawFn) -> Relation:
    rank = draw(st.integers(0, P - 1))
    own = [op(rank, k) for op in (F, B) for k in range(M)]
    first, then = draw(st.permutations(own))[:2]
    return Relation(first, then)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    relations=st.lists(relations_of_a_rank(), max_size=4, unique=True),
    limits=st.lists(st.integers(1, M), min_size=P, max_size=P),
)
def test_an_order_is_found_where_there_is_one_and_the_rules_named_where_not(
    relations: list[Relation], limits: list[int]
) -> None:
    rules = [*relations, in_flight(at_most=lambda rank: limits[rank])]
    constraints = Constraints(num_ranks=P, num_microbatches=M, rules=rules)
    try:
        solved = constraints.solve()
    except ContradictionError as error:
        raised = error
    else:
        check(solved)
        assert all(keeps(*each, limit) for *each, limit in zip(solved.programs, [relations] * P, limits, strict=True))
        assert solved == constraints.solve()
        return
    named = [int(name.split("]")[0].removeprefix("rules[")) for name in raised.rules]
    for lacking in [None, *named]:  # they contradict each other, and without any one of them there is an order
        some = [relation for n, relation in enumerate(relations) if n in named and n != lacking]
        keeps_limits = len(relations) in named and lacking != len(relations)
        found = next(all_orders(some, limits if keeps_limits else [M] * P), None)
        assert (found is None) == (lacking is None), raised


def test_all_that_is_free_is_chosen_and_a_start_that_cannot_end_taken_back() -> None:
    for costs in (Costs(forward=1.0, backward=2.0), Costs(forward=1.0, backward=1.0, latency=0.5)):
        free = Constraints(num_ranks=4, num_microbatches=8).solve(costs)
        assert (
            simulate(free, costs).makespan <= simulate(build("1f1b", num_ranks=4, num_microbatches=8), costs).makespan
        )
    # A rank that takes the first forwards it can has no room for the chunk that would free some: a search finds it.
    constraints = Constraints(
        num_ranks=2,
        num_microbatches=4,
        placement="cyclic",
        rules=[in_flight(at_most=2)],
        prefer=lambda action: (action.op is not F, action.stage),
    )
    assert check(constraints.solve()).peak_activations == (2, 2)


def test_contradictions_name_the_rules_and_the_actions_also_across_ranks() -> None:
    rules = {
        "all forwards first": lambda s, m: F(s, 2).before(B(s, m)),
        "in order": in_order(F),
        "depth first": lambda s, m: B(s, 0).before(F(s, 1)),
    }
    with pytest.raises(ContradictionError) as raised:
        Constraints(num_ranks=2, num_microbatches=3, rules=rules).solve()
    assert raised.value.rules == ("all forwards first", "in order", "depth first")
    facts = str(raised.value).split("they clash at\n")[1].splitlines()
    assert facts == [
        "  0B0 before 0F1 ('depth first')",
        "  0F1 before 0F2 ('in order')",
        "  0F2 before 0B0 ('all forwards first')",
    ]
    with pytest.raises(ContradictionError, match=r"'in_flight' cannot be kept|rule 'rules\[0\], in_flight' cannot be"):
        Constraints(num_ranks=1, placement=[[0, 1]], num_microbatches=1, rules=[in_flight(at_most=1)]).solve()
    with pytest.raises(
        ContradictionError, match=r"(?s)rule 'W before I' cannot be kept.*0W0 before 0I0 \('W before I'\)"
    ):
        Constraints(
            num_ranks=2,
            num_microbatches=2,
            split_backward=True,
            rules={"W before I": lambda s, m: W(s, m).before(I(s, m))},
        ).solve()
    rules = {"stage 1 waits": F(0, 2).before(F(1, 0))}
    with pytest.raises(
        ScheduleError, match=r"'stage 1 waits' wants 0F2 before 1F0, on the ranks 0 and 1, but no messa"
    ):
        Constraints(num_ranks=2, num_microbatches=3, rules=rules).solve()
    implied = {"in order": in_order(F), "stage 1 waits": F(0, 1).before(F(1, 2))}
    assert Constraints(num_ranks=2, num_microbatches=3, rules=implied).solve().programs[1][0] == F(1, 0)


def test_a_filter_is_asked_as_the_order_grows() -> None:
    few = only_if(lambda action, so_far: action.op is not F or so_far.in_flight < 2)
    assert check(Constraints(num_ranks=4, num_microbatches=6, rules=[few]).solve()).peak_activations == (2, 2, 2, 1)
    alternating = only_if(lambda action, so_far: not so_far.program or so_far.program[-1].op is not action.op)
    program = Constraints(num_ranks=1, num_microbatches=3, rules=[alternating]).solve().programs[0]
    assert [action.op for action in program] == [F, B] * 3
    with pytest.raises(
        ScheduleError,
        match=r"(?s)nothing may run next, after 8 of 12.*rank 0, after 0F2 0B0 0B2: 0F1 may not begin: 'odd ones",
    ):
        Constraints(
            num_ranks=2, num_microbatches=3, rules={"odd ones out": only_if(lambda action, so_far: action.index != 1)}
        ).solve()


def nothing(s: int, m: int) -> None:
    return None


def failing(s: int, m: int) -> Relation:
    return F(s, m).before(B(s, m // (m - 1)))


BAD: dict[str, tuple[object, str]] = {
    "no list": (in_order(F), r"rules=InOrder.*: expected a list of rules, or a dict"),
    "no function": (["1F1B"], r"rules\[0\] is '1F1B': expected a function of stage and microbatch"),
    "an op": ([F], r"rules\[0\] is <Op\.F: 'F'>: expected a function"),
    "one argument": ([lambda s: None], r"rule 'rules\[0\], a lambda' takes \(s\): expected a function of two numbers"),
    "nothing": ([nothing], r"rule 'nothing' returns no relation for any of the 2 stages and 3 microbatches"),
    "no relation": (
        [lambda s, m: Action(s, Op.F, m)],
        r"returns 0F0 for stage 0, microbatch 0: expected a relation such as",
    ),
    "less than": ([lambda s, m: F(s, m) < B(s, m)], r"returns False .*for `<` write before\(\)"),
    "no action": ([lambda s, m: F(s, m).before(3)], r"relates 3: expected actions"),
    "stages out of reach": (
        [lambda s, m: F(s + 5, m).before(B(s, m))],
        r"matches no two actions: in '5F0 before 0B0', 5F0 does not exist.*stages 0\.\.1 and microbatches 0\.\.2",
    ),
    "microbatches out of reach": ([lambda s, m: F(s, m + 99).before(B(s, m))], r"0F99 does not exist"),
    "an op that is not there": ([lambda s, m: W(s, m).after(I(s, m))], r"speaks of 0I0.*split_backward=True"),
    "orders of it": ([in_order(W)], r"speaks of 0W0, which the schedule does not have: its backward is whole"),
    "itself": ([lambda s, m: F(s, m).before(F(s, m))], r"puts 0F0 before itself"),
    "failing": ([failing], r"rule 'failing' fails at stage 0, microbatch 1: ZeroDivisionError"),
    "halves": ([lambda s, m: F(s, m / 2).before(B(s, m))], r"F\(0, 0\.0\): expected whole numbers"),
    "a limit": ([in_flight(at_most=lambda rank: rank)], r"'rules\[0\], in_flight' on rank 0 \(0\): expected a whole"),
    "keys that do not compare": (
        [in_order(F, key=lambda s, m: m if m else "a")],
        r"'rules\[0\], in_order\(F\)' fails: TypeError: '<' not supported",
    ),
    "keys that fail": ([in_order(F, key=lambda s, m: 1 // m)], r"in_order\(F\)' fails at 0F0: ZeroDivisionError"),
    "a filter's answer": ([only_if(lambda action, so_far: None)], r"returns None for 0F0: expected True or False"),
    "a filter that fails": ([only_if(lambda action, so_far: so_far.alive)], r"fails at 0F0: AttributeError"),
}


@pytest.mark.parametrize(("rules", "message"), BAD.values(), ids=BAD.keys())
def test_bad_rules(rules: object, message: str) -> None:
    constraints = Constraints(num_ranks=2, num_microbatches=3, rules=rules)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        constraints.solve()


def test_without_a_key_each_stage_is_in_order_by_itself() -> None:
    rules = [in_order(F), in_order(B), in_flight(at_most=3)]
    solved = Constraints(num_ranks=2, num_microbatches=4, placement="v", rules=rules).solve()
    for program in solved.programs:
        for stage in {action.stage for action in program}:
            for op in (F, B):
                own = [action.index for action in program if action.op is op and action.stage == stage]
                assert own == sorted(own)
    sliced = Constraints(num_ranks=2, num_microbatches=2, num_slices=3, rules=[in_order(F), in_order(B)]).solve()
    assert [action.index for action in sliced.programs[0] if action.op is B] == [2, 1, 0, 5, 4, 3]


def test_bad_words() -> None:
    for make, message in (
        (lambda: in_order("F"), r"in_order\('F',\): expected ops, such as in_order\(F\)"),
        (lambda: in_order(F, key=3), r"in_order\(key=3\): expected a function of stage and microbatch"),
        (lambda: in_flight(at_most=0), r"in_flight\(at_most=0\): expected a whole number, at least 1"),
        (lambda: only_if(True), r"only_if\(True\): expected a function of an action"),
        (lambda: Constraints(num_ranks=2, num_microbatches=0).solve(), r"num_microbatches=0: expected a whole number"),
        (lambda: Constraints(num_microbatches=2).solve(), r"num_ranks=None: expected a whole number"),
        (lambda: Constraints(num_ranks=2, num_microbatches=2, placement="w").solve(), "placement='w': expected one of"),
        (lambda: Constraints(num_ranks=3, num_microbatches=2, placement=[[0], [1]]).solve(), r"expected 2"),
        (lambda: Constraints(num_ranks=2, num_microbatches=2, prefer=3).solve(), r"prefer=3: expected a function"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


# (P, M, V): multiples of P and remainders, fewer than P, one of each.
SIZES = [(4, 8, 2), (4, 6, 2), (4, 4, 3), (3, 7, 2), (4, 3, 2), (6, 2, 2), (2, 5, 3), (1, 3, 2), (3, 1, 2)]


@pytest.mark.thorough(but=["1f1b", "chimera", "2bw"])
@pytest.mark.parametrize("name", IN_RULES)
def test_a_family_follows_from_its_rules(name: str) -> None:
    for P, M, V in SIZES:
        if (name == "2bw" and M < P - 1) or (name == "chimera" and P % 2) or (name == "hanayo" and V % 2):
            continue
        options = {"num_chunks": V} if FAMILIES[name].takes_chunks and name != "seq1f1b" else {}
        options |= {"num_batches": 3} if FAMILIES[name].rule.is_asynchronous else {}
        table = build(name, num_ranks=P, num_microbatches=M, **options)
        solved = in_rules(table).solve(Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0))
        assert solved.programs == table.programs, (name, P, M, V)
        assert solved == table, (name, P, M, V)
