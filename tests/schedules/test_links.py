"""Links: messages that queue, network cards, sums; against cases by hand and a slow simulator."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from support.inside import LinkLevel, PlaceNetwork, derive_versions

from stagewright.schedules import (
    Action,
    AllReduce,
    Collective,
    Costs,
    Link,
    Links,
    Message,
    MessageKind,
    Op,
    Schedule,
    Span,
    attribute_idle,
    build,
    ideal_makespan,
    lower_bound,
    simulate,
)

from .random_schedules import by_hand, costs_for, quarters, schedules, steady, with_updates
from .reference import FREE, Run, seconds

ACT, GRAD = MessageKind.ACT, MessageKind.GRAD


@st.composite
def ways(draw: DrawFn) -> Link:
    card = st.none() | st.integers(0, 1)
    return Link(latency=draw(quarters), seconds_per_byte=draw(quarters), sending=draw(card), receiving=draw(card))


@st.composite
def links_for(draw: DrawFn, schedule: Schedule) -> Links:
    """A way for each pair of ranks, sizes for each edge, sums of some stages over any ways."""
    ranks = range(schedule.num_ranks)
    pairs = [(src, dst) for src in ranks for dst in ranks if src != dst]
    sizes = st.lists(quarters, min_size=len(schedule.stage_edges), max_size=len(schedule.stage_edges))
    stages = draw(st.sets(st.sampled_from(range(schedule.num_stages)), max_size=3))
    some_ways = st.lists(st.sampled_from(pairs), max_size=3, unique=True).map(tuple) if pairs else st.just(())
    return Links(
        network={pair: draw(ways()) for pair in pairs},
        activation_bytes=draw(sizes),
        gradient_bytes=draw(sizes),
        sums=tuple(AllReduce(stage=stage, seconds=draw(quarters), ways=draw(some_ways)) for stage in sorted(stages)),
    )


@st.composite
def cases(draw: DrawFn) -> tuple[Schedule, Costs, Links]:
    """Flush schedules of one batch, and of several with updates in them; some over links that are free."""
    batches = draw(st.integers(1, 3))
    schedule = draw(schedules(forward_only=False if batches > 1 else None))
    if batches > 1:
        schedule = with_updates(schedule, batches)
    return (
        schedule,
        draw(costs_for(schedule.num_stages, schedule.num_microbatches)),
        draw(st.just(FREE) | links_for(schedule)),
    )


@pytest.mark.thorough
@steady
@given(cases())
def test_it_equals_the_slow_simulator(case: tuple[Schedule, Costs, Links]) -> None:
    schedule, costs, links = case
    expected = Run(schedule, costs, links)
    timeline = simulate(schedule, costs, None if links is FREE else links)
    assert ideal_makespan(schedule, costs) == max(
        sum(seconds(costs, action) for action in program) for program in schedule.programs
    )
    starts = {
        (rank, what): start
        for rank, trace in enumerate(timeline.ranks)
        for what, start, _ in trace.compute[: len(schedule.programs[rank])]
    }
    assert starts == expected.starts
    messages = {(str(m.kind), m.src, m.dst, m.index): (start, end) for t in timeline.ranks for m, start, end in t.comm}
    if links is not FREE or any(costs.latency):  # else nothing is under way
        for key, times in expected.arrivals.items():
            assert messages.pop(key) == times
    assert not messages
    summed: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for trace in timeline.ranks:
        for (stages, _, group), start, end in trace.collectives:
            summed.setdefault((stages[0], group), []).append((start, end))
    for key, (ready, through) in expected.sums.items():
        spans = summed.pop(key)
        assert len(spans) == len(schedule.owners[key[0]])
        assert max(start for start, _ in spans) == ready  # when the last rank begins it
        assert {end for _, end in spans} == {through}
    assert not summed


@pytest.mark.thorough
@steady
@given(cases(), st.none() | quarters)
def test_updates_wait_for_sums(case: tuple[Schedule, Costs, Links], norm: float | None) -> None:
    schedule, costs, links = case
    if not schedule.has_epilogue:
        return
    costs = replace(costs, norm=norm)
    timeline = simulate(schedule, costs, links)
    expected = Run(schedule, costs, links)
    through = {stage: times[1] for (stage, _), times in expected.sums.items()}
    own = [trace.compute[: len(program)] for trace, program in zip(timeline.ranks, schedule.programs, strict=True)]
    ends = [spans[-1].end if spans else 0.0 for spans in own]
    for rank, trace in enumerate(timeline.ranks):
        at = ends[rank] if norm is None else max([*ends, *through.values()]) + norm
        for what, start, end in trace.compute[len(schedule.programs[rank]) :]:
            assert what.op is Op.U
            assert start == max(at, through.get(what.stage, 0.0))
            at = end
        updated = {what.stage for what, _, _ in trace.compute[len(schedule.programs[rank]) :]}
        assert set(schedule.placement[rank]) & set(through) <= updated


@pytest.mark.thorough
@steady
@given(cases(), st.none() | quarters)
def test_no_order_beats_the_bound(case: tuple[Schedule, Costs, Links], norm: float | None) -> None:
    schedule, costs, links = case
    costs = replace(costs, norm=norm)
    bound = lower_bound(schedule, costs, links)
    assert bound <= simulate(schedule, costs, links).makespan
    assert bound >= lower_bound(schedule, costs, replace(links, sums=())) >= lower_bound(schedule, costs)
    assert lower_bound(schedule, costs) <= simulate(schedule, costs).makespan


def test_messages_of_one_link_queue() -> None:
    """
    rank 0 | F0 F1 F2                 F=1; a message takes 3 and arrives 0.5 later:
    link   |    0  0  0  1  1  1  2   F0's from 1 to 4, F1's from 4 to 7, F2's from 7 to 10
    rank 1 |             F0    F1     at 4.5, 7.5, 10.5
    """
    schedule = build("gpipe", num_ranks=2, num_microbatches=3).forward_only()
    links = Links(network=Link(latency=0.5, seconds_per_byte=0.25), activation_bytes=12.0)
    timeline = simulate(schedule, Costs(forward=1.0), links)
    assert [s.start for s in timeline.ranks[1].compute] == [4.5, 7.5, 10.5]
    assert timeline.ranks[1].comm == tuple(  # from ready to arrived: the queue is seen
        Span(Message(ACT, 0, 1, k), ready, there) for k, ready, there in ((0, 1.0, 4.5), (1, 2.0, 7.5), (2, 3.0, 10.5))
    )
    assert lower_bound(schedule, Costs(forward=1.0), links) == timeline.makespan == 11.5
    assert attribute_idle(timeline)[1].transfer == 2 * (3.0 - 1.0)


def test_the_level_is_the_innermost_that_joins_two_ranks() -> None:
    levels = (
        LinkLevel(num_ranks=2, seconds_per_byte=1.0),
        LinkLevel(num_ranks=4, seconds_per_byte=2.0, ranks_per_card=2),
        LinkLevel(num_ranks=8, seconds_per_byte=3.0, latency=1.0, ranks_per_card=1),
    )
    links = Links(network=levels)
    assert links.way(2, 3) == Link(seconds_per_byte=1.0)
    assert links.way(1, 2) == Link(seconds_per_byte=2.0, sending=(4, 0), receiving=(4, 1))
    assert links.way(7, 0) == Link(seconds_per_byte=3.0, latency=1.0, sending=(8, 7), receiving=(8, 0))
    with pytest.raises(ValueError, match="no way from rank 7 to rank 8"):
        links.way(7, 8)
    assert links.way(5, 4).sending is None


def test_the_bound_takes_the_quickest_way_of_replicas() -> None:
    """Microbatch 0 comes to rank 2 at once, microbatch 1 from another replica 9 later: one forward ends before that."""
    schedule = by_hand("0F0", "0F1", "1F0 1F1", microbatches=2, placement=[[0], [0], [1]])
    links = Links(network={(0, 2): Link(), (1, 2): Link(latency=9.0)})
    assert lower_bound(schedule, Costs(forward=1.0), links) == 11.0
    assert simulate(schedule, Costs(forward=1.0), links).makespan == 11.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(latency=-1.0), "latency=-1.0: expected a finite number, at least 0"),
        (lambda: AllReduce(stage=0, seconds=float("inf")), "seconds=inf: expected a finite number"),
        (lambda: LinkLevel(num_ranks=0), "num_ranks=0: expected a whole number, at least 1"),
        (lambda: LinkLevel(num_ranks=2, ranks_per_card=0), "ranks_per_card=0: expected a whole number, at least 1"),
        (lambda: Links(network=()), r"levels of \[\] ranks: expected at least one"),
        (
            lambda: Links(network=(LinkLevel(num_ranks=2), LinkLevel(num_ranks=3))),
            r"levels of \[2, 3\] ranks: expected at least one, each a multiple of the one before",
        ),
        (lambda: Links(network=Link(), activation_bytes=-1), "activation_bytes=-1: expected a finite number"),
        (lambda: Links(network=Link(), gradient_bytes=[1, "2"]), "gradient_bytes='2': expected a finite number"),
        (
            lambda: Links(network=Link(), sums=(AllReduce(stage=1, seconds=1.0),) * 2),
            r"sums of the stages \[1, 1\]: expected at most one per stage",
        ),
    ],
)
def test_mistakes(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (Links(network=Link(), activation_bytes=[1.0, 2.0]), "activation_bytes has 2 numbers for 1 edges"),
        (Links(network=Link(), activation_bytes=[1.0], gradient_bytes=[]), "gradient_bytes has 0 numbers for 1 edges"),
        (Links(network={(0, 1): Link()}), "no way from rank 1 to rank 0: expected one in the network"),
        (Links(network=Link(), sums=(AllReduce(stage=2, seconds=1.0),)), "an all-reduce of stage 2: expected a stage"),
        (
            Links(network={(0, 1): Link(), (1, 0): Link()}, sums=(AllReduce(stage=0, seconds=1.0, ways=((0, 5),)),)),
            "no way from rank 0 to rank 5",
        ),
        ([], r"links=\[\]: expected Links\(\.\.\.\), or None"),
    ],
)
def test_links_that_do_not_fit(links: Links, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs(), links)


def test_weights_are_gathered_behind_each_update_and_a_stream_waits_for_its_version() -> None:
    """Two replicas of a stage, each with F B of its own microbatch: 3 s, a sum of 1 s, an update of 0.5 s."""
    schedule = build("1f1b", num_ranks=2, num_microbatches=2, replicas=(2,))
    costs = Costs(forward=1.0, backward=2.0, update=0.5)
    around = AllReduce(stage=0, seconds=1.0, gather=2.0, ways=((0, 1), (1, 0)))
    unshard = Collective((0,), Op.UNSHARD, 0)
    behind = simulate(schedule, costs, Links(network=Link(), sums=(around,)))
    assert Span(unshard, 4.5, 6.5) in behind.ranks[0].collectives
    assert behind.makespan == 6.5
    ahead = simulate(schedule, costs, Links(network=Link(), sums=(replace(around, unshards=True),)))
    assert Span(unshard, 0.0, 2.0) in ahead.ranks[0].collectives
    assert ahead.ranks[0].compute[0] == Span(Action(0, Op.F, 0), 2.0, 3.0)
    assert ahead.ranks[0].compute[-1].end == 6.5  # the start of the first forward begins the makespan
    schedule = build("pipedream", num_ranks=2, num_microbatches=2, replicas=(2,))
    costs = Costs(forward=1.0, backward=2.0)
    around = AllReduce(stage=0, seconds=0.0, gather=2.0, ways=((0, 1), (1, 0)))
    timeline = simulate(schedule, costs, Links(network=Link(), sums=(around,)))
    spans = {span.what: span for rank in timeline.ranks for span in rank.compute}
    used = derive_versions(schedule).used
    for (stage, k), version in used.items():
        if version:
            update = max(
                span.end for rank in timeline.ranks for span in rank.compute if span.what == (stage, Op.U, version - 1)
            )
            assert spans[Action(stage, Op.F, k)].start >= update + 2.0
    assert timeline.batch_seconds == 5.0


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 2, 2), (2, 1, 3)])
def test_places_of_a_pipeline_are_ways_with_a_card_a_rank(replicas: tuple[int, ...]) -> None:
    """To the last bit: the ways of all pairs of ranks between two places, and sums that go around them."""
    schedule = build("1f1b", num_ranks=sum(replicas), num_microbatches=7, replicas=replicas)
    costs = Costs(forward=[1.0, 1.3, 0.7], backward=[2.1, 1.9, 2.3], update=0.5)
    routes = {(0, 1): Link(latency=0.3, seconds_per_byte=0.7), (1, 2): Link(latency=0.1, seconds_per_byte=0.9)}
    ways: dict[tuple[int, int], Link] = {}
    for (a, b), way in routes.items():
        for src, dst in [(src, dst) for src in schedule.owners[a] for dst in schedule.owners[b]]:
            ways[src, dst] = replace(way, sending=src, receiving=dst)
            ways[dst, src] = replace(way, sending=dst, receiving=src)
    sums = []
    for stage, ranks in enumerate(schedule.owners):
        around = tuple(zip(ranks, (*ranks[1:], ranks[0]), strict=True))
        ways |= {(src, dst): Link(sending=src, receiving=dst) for src, dst in around}
        sums.append(AllReduce(stage=stage, seconds=1.1, gather=0.4, ways=around))
    pairs = Links(network=ways, activation_bytes=[1.7, 0.6], sums=tuple(sums))
    alone = Links(
        network=PlaceNetwork(places=((0,), (1,), (2,)), routes=routes),
        activation_bytes=[1.7, 0.6],
        sums=tuple(replace(each, ways=None) for each in sums),
    )
    places = alone.on(schedule.owners)
    assert simulate(schedule, costs, places) == simulate(schedule, costs, pairs)
    assert lower_bound(schedule, costs, places) == lower_bound(schedule, costs, pairs)
    with pytest.raises(ValueError, match="no way from rank 0 to rank 0: expected one in the network of the links"):
        places.way(0, 0)
    with pytest.raises(ValueError, match="no way from rank 0 to rank 99: expected one in the network of the links"):
        places.way(0, 99)


@pytest.mark.parametrize(("latency", "seconds", "forward"), [(8.0, 1.0, 1.0), (8.0, 3.0, 1.0), (5.0, 0.5, 4.0)])
def test_messages_wait_for_their_receives(latency: float, seconds: float, forward: float) -> None:
    """Four receives of GPipe's forwards are posted, by hand, and one more after each forward that takes one."""
    size, M = float(1 << 23), 12
    link = Link(latency=latency, seconds_per_byte=seconds / size)
    schedule = build("gpipe", num_ranks=2, num_microbatches=M)
    made, ends, free = simulate(schedule, Costs(forward=forward), Links(network=link, activation_bytes=size)), [], 0.0
    for k in range(M):
        heard = ends[k - 4] + latency if k >= 4 else 0.0
        free = max(free, (k + 1) * forward, heard) + seconds
        ends.append(max([free + latency, *ends[-1:]]) + forward)
    assert [span.end for span in made.ranks[1].compute[:M]] == pytest.approx(ends)
    # All receives of small messages are posted at once; and a link that is busy all the time waits for no word.
    small = simulate(schedule, Costs(forward=forward), Links(network=link, activation_bytes=size / 64))
    assert small.ranks[1].compute[M - 1].end == pytest.approx(M * forward + seconds / 64 + latency + forward)
    quick = replace(link, latency=0.9 * seconds)
    busy = simulate(schedule, Costs(forward=0.1), Links(network=quick, activation_bytes=size))
    assert busy.ranks[1].compute[M - 1].end == pytest.approx(0.1 + M * seconds + 0.9 * seconds + 0.1)


@pytest.mark.parametrize("name", ["interleaved", "1f1b", "zb-h1"])
def test_every_order_ends_whatever_is_posted(name: str) -> None:
    """One link of two ranks carries all chunks and gradients: what an order takes late may not shut out the rest."""
    link = Link(latency=8.0, seconds_per_byte=1e-9)
    schedule = build(name, num_ranks=2, num_microbatches=12)
    waits, free = (
        simulate(schedule, Costs(), Links(network=link, activation_bytes=size, gradient_bytes=size)).makespan
        for size in (1e9, 1e3)
    )
    assert waits >= free
