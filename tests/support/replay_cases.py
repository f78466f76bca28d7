"""Random schedules of all families and random orders, with unequal costs and links: for what plays a schedule again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from stagewright.schedules import FAMILIES, Action, AllReduce, Costs, Edge, Link, Links, Op, Schedule, build
from support.inside import chain, defer_updates, replicate

from .random_moves import with_random_moves

KNOBS = ("F", "B", "I", "W", "U", "latency", "bandwidth")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule, what it is simulated under, and what the page changes."""

    schedule: Schedule
    costs: Costs
    links: Links | None
    changed: dict[str, float]

    @property
    def varied(self) -> tuple[Costs, Links | None]:
        """Costs and links as the page's changes leave them."""
        table, by = self.costs.table_for(self.schedule), self.changed
        by_op = {
            op: [[each * by[op.value] for each in row] if len(row) > 1 else row[0] * by[op.value] for row in rows]
            for op, rows in table.rows.items()
        }
        costs = Costs(
            forward=by_op[Op.F],
            backward=by_op[Op.B],
            input_grad=by_op[Op.I],
            weight_grad=by_op[Op.W],
            latency=[each * by["latency"] + by["more_latency"] for each in table.latency],
            update=[u * by["U"] + by["more_update"] for u in table.update],
            reduce_grad=[r / by["bandwidth"] for r in table.reduce_grad],
            tied=tuple((stages, seconds / by["bandwidth"]) for stages, seconds in table.tied.items()),
            norm=None if table.norm is None else table.norm * by["U"],
            sum_busy=table.sum_busy,
            around=table.around,
        )
        costs = replace(costs, offload=self.costs.offload, reload=self.costs.reload)  # no link between ranks
        if self.links is None:
            return costs, None
        assert isinstance(self.links.network, dict)
        network = {
            pair: replace(
                way, latency=way.latency * by["latency"], seconds_per_byte=way.seconds_per_byte / by["bandwidth"]
            )
            for pair, way in self.links.network.items()
        }
        sums = tuple(
            replace(each, seconds=each.seconds / by["bandwidth"], gather=each.gather / by["bandwidth"])
            for each in self.links.sums
        )
        return costs, replace(self.links, network=network, sums=sums)


def cases(count: int, *, seed: int = 0) -> Iterator[Case]:
    random = Random(seed)
    names = [*FAMILIES]
    for number in range(count):
        schedule = _random_order(random) if number % 5 == 4 else _of_family(random, names[number % len(names)])
        if schedule.has_epilogue and schedule.num_slices == 1 and random.random() < 0.3:
            schedule = with_random_moves(random, schedule)
        links = _links(random, schedule) if random.random() < 0.7 else None
        changed = {knob: random.choice([1.0, random.uniform(0.25, 4.0)]) for knob in KNOBS}
        changed["more_latency"] = random.choice([0.0, random.uniform(0.0, 2.0)])
        changed["more_update"] = random.choice([0.0, random.uniform(0.0, 2.0)])
        yield Case(schedule=schedule, costs=_costs(random, schedule), links=links, changed=changed)


def _of_family(random: Random, name: str) -> Schedule:
    family = FAMILIES[name]
    for _ in range(100):
        ranks, microbatches = random.randint(1, 6), random.randint(1, 12)
        options: dict[str, object] = {}
        if family.takes_chunks:
            options["num_chunks"] = random.randint(1, 3)
        if family.takes_replicas and random.random() < 0.5:
            counts = [random.randint(1, 3) for _ in range(random.randint(1, 3))]
            ranks, options["replicas"] = sum(counts), counts
        if "update_every" in family.options and random.random() < 0.5:
            options["update_every"] = random.randint(1, 4)
        if "vertical_sync" in family.options:
            options["vertical_sync"] = random.random() < 0.5
        if "num_batches" in family.options:
            options["num_batches"] = random.randint(1, 5)
        try:
            schedule = build(name, num_ranks=ranks, num_microbatches=microbatches, **options)  # type: ignore[arg-type]
        except ValueError:
            continue  # sizes that do not fit
        if schedule.rule.updates_may_wait and schedule.is_asynchronous and random.random() < 0.5:
            schedule = defer_updates(schedule)
        if "replicas" not in options and random.random() < 0.3:
            schedule = replicate(schedule, random.randint(1, 3))
        return schedule
    raise AssertionError(f"no sizes fit {name}")


def _random_order(random: Random) -> Schedule:
    """Any placement with replicas, skips, edges without gradient, split backwards, in any order that the data allow."""
    num_ranks, num_stages, microbatches = random.randint(1, 5), random.randint(1, 6), random.randint(1, 5)
    most = random.choice([1, min(3, num_ranks)])  # replicas
    owners = [sorted(random.sample(range(num_ranks), random.randint(1, most))) for _ in range(num_stages)]
    pairs = {(edge.src, edge.dst) for edge in chain(num_stages)}
    pairs |= {(a, b) for a in range(num_stages) for b in range(a + 1, num_stages) if random.random() < 0.4}
    edges = tuple(Edge(src, dst, random.random() < 0.8) for src, dst in sorted(pairs))
    trains = random.random() < 0.9
    gradients = [[random.choice([Op.B, Op.I]) for _ in range(num_stages)] for _ in range(microbatches)]
    return random_order(random, owners, edges, gradients, num_ranks=num_ranks, trains=trains)


def random_order(
    random: Random,
    owners: list[list[int]],
    edges: Sequence[Edge],
    gradients: list[list[Op]],
    *,
    num_ranks: int,
    trains: bool = True,
) -> Schedule:
    """A linear order of all actions, drawn from what may run next; `gradients` [microbatch][stage] are B, or I for
    I and W; without `trains` there are forwards alone."""
    num_stages, microbatches = len(owners), len(gradients)
    waiting: dict[Action, set[Action]] = {}
    for k in range(microbatches):
        gradient = {s: Action(s, gradients[k][s], k) for s in range(num_stages)}
        for stage in range(num_stages):
            forward = Action(stage, Op.F, k)
            waiting[forward] = {Action(e.src, Op.F, k) for e in edges if e.dst == stage}
            if trains:
                waiting[gradient[stage]] = {forward} | {gradient[e.dst] for e in edges if e.src == stage and e.grad}
                if gradient[stage].op is Op.I:
                    waiting[Action(stage, Op.W, k)] = {gradient[stage]}
    programs: list[list[Action]] = [[] for _ in range(num_ranks)]
    while waiting:
        action = random.choice(sorted(each for each, needs in waiting.items() if not needs))
        programs[owners[action.stage][action.index % len(owners[action.stage])]].append(action)
        del waiting[action]
        for needs in waiting.values():
            needs.discard(action)
    return Schedule(
        name="random",
        placement=tuple(tuple(s for s in range(num_stages) if rank in owners[s]) for rank in range(num_ranks)),
        programs=tuple(map(tuple, programs)),
        num_microbatches=microbatches,
        edges=tuple(edges),
    )


def _seconds(random: Random, count: int, *, most: float = 4.0) -> list[float]:
    """Unequal ones, few different ones (so that actions end at the same time), all equal, or zeros."""
    match random.randrange(4):
        case 0:
            return [random.uniform(0.0, most) for _ in range(count)]
        case 1:
            return [random.randint(0, 4) / 4 for _ in range(count)]
        case 2:
            return [random.uniform(0.0, most)] * count
        case _:
            return [0.0 if random.random() < 0.5 else random.uniform(0.0, most) for _ in range(count)]


def _costs(random: Random, schedule: Schedule) -> Costs:
    S = schedule.num_stages
    tied = ()
    if S > 1 and random.random() < 0.3:
        tied = ((tuple(sorted(random.sample(range(S), 2))), random.uniform(0.1, 2.0)),)
    M = schedule.batch_indices
    forward: list[float | list[float]] = [*_seconds(random, S)]
    if random.random() < 0.2:
        forward[random.randrange(S)] = _seconds(random, M)
    return Costs(
        forward=forward,
        backward=_seconds(random, S),
        input_grad=_seconds(random, S),
        weight_grad=_seconds(random, S),
        latency=random.choice([0.0, _seconds(random, S, most=1.0)]),
        update=random.choice([0.0, _seconds(random, S, most=2.0)]),
        reduce_grad=random.choice([0.0, _seconds(random, S, most=2.0)]),
        tied=tied,
        norm=random.choice([None, 0.0, random.uniform(0.0, 1.0)]),
        around=0.375,
        index_factors=_seconds(random, M) if random.random() < 0.2 else None,
        offload=random.choice([0.0, _seconds(random, S, most=2.0)]),
        reload=random.choice([0.0, _seconds(random, S, most=2.0)]),
        sum_busy=random.choice([0.0, 1.0, *([random.random() for _ in range(S)] for _ in range(3))]),
    )


def _links(random: Random, schedule: Schedule) -> Links:
    """A way for each pair of ranks, often over cards that several share; sums of some stages, some of them sharded."""
    ranks, edges = range(schedule.num_ranks), len(schedule.stage_edges)
    cards = random.choice([1, 2, 5])
    each_pair = [(src, dst) for src in ranks for dst in ranks if src != dst]
    ways = {
        pair: Link(
            latency=random.choice([0.0, random.uniform(0.0, 1.0)]),
            seconds_per_byte=random.uniform(0.0, 2.0),
            sending=random.choice([None, pair[0] % cards]),
            receiving=random.choice([None, pair[1] % cards]),
        )
        for pair in each_pair
    }
    sums = []
    for stage in range(schedule.num_stages):
        if random.random() < 0.4:
            around = tuple(random.sample(each_pair, min(len(each_pair), random.randint(0, 3))))
            gather = random.choice([0.0, random.uniform(0.1, 1.0)])
            # In any order a rank may wait for one that gathers later: only schedules of families are sharded so.
            may_unshard = gather > 0 and schedule.has_epilogue and schedule.name != "random"
            unshards = may_unshard and random.random() < 0.5
            seconds = random.uniform(0.0, random.choice([2.0, 10.0]))
            sums.append(AllReduce(stage=stage, seconds=seconds, ways=around, gather=gather, unshards=unshards))
    return Links(
        network=ways,
        activation_bytes=_seconds(random, edges),
        gradient_bytes=random.choice([None, _seconds(random, edges)]),
        sums=tuple(sums),
    )
