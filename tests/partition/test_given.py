"""Plans that are given: what the planner said of its own, and what nobody planned."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import simulated_simulated as simulated

from stagewright.partition import Cluster, DeviceKind, GivenStage, Level, Node, Plan, Profile, evaluate, partition, plan
from stagewright.schedules import AllReduce, Costs, Link, Links, build, simulate

from .small import chain
from .test_planner_brute_force import CLUSTERS, chains

PROFILE = chain("abcd", stash_bytes=10, parameter_bytes=4, activation_bytes=2)
NODES = PROFILE.nodes


def again(profile: Profile, cluster: Cluster, found: Plan, **options: Any) -> Plan:
    """The plan without a word of what was found about it."""
    assert found.num_microbatches is not None
    assert found.schedule is not None
    options["schedule"] = found.build_schedule() if found.order else found.schedule
    return evaluate(profile, cluster, found.stages, num_microbatches=found.num_microbatches, **options)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(
    profile=chains(),
    cluster=CLUSTERS,
    batch=st.integers(1, 8),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved", "2bw", "pipedream", "zb-h1", "zb-v"]),
    tight=st.floats(0.3, 1.0),
)
def test_a_plan_that_is_given_costs_what_the_planner_said(
    profile: Profile, cluster: Cluster, batch: int, schedule: str, tight: float
) -> None:
    """Unequal replicas, divided optimizers and recomputed stages among them; so do the runners-up.

    So does the file of each, of whose equal replicas the planner simulated one, and `simulated` all.
    """
    others: list[Plan] = []
    options: dict[str, Any] = {"global_batch": batch, "schedules": ("1f1b", schedule), "chunk_sizes": (2,)}
    best = plan(profile, cluster, on_runners_up=others.extend, **options)
    limit = tight * max(best.memory_bytes) + 1e-6
    with suppress(ValueError):  # nothing fits
        others.append(plan(profile, cluster, memory_limit=limit, **options))
    for each in (best, *others):
        whole = simulated(Plan.from_json(each.to_json())).timeline
        assert whole.batch_seconds == pytest.approx(each.simulated_step_time, rel=1e-9)
        same = again(profile, cluster, each)
        assert same.simulated_step_time == pytest.approx(each.simulated_step_time, rel=1e-9)
        assert same.memory_bytes == pytest.approx(each.memory_bytes)
        assert same.bottleneck == pytest.approx(each.bottleneck)
        assert same.bubble == pytest.approx(each.bubble, abs=1e-9)


def test_what_waits_on_the_host_and_what_exceeds_the_memory() -> None:
    kind = DeviceKind(name="card", host_bandwidth=100.0)
    cluster = replace(Cluster.parse("2:net=1GB/s"), kinds=(kind,), nodes=("card",))
    stages = [GivenStage("ab", [0], recompute="offload"), GivenStage("cd", [1], recompute="layer:1")]
    sizes: dict[str, Any] = {"num_microbatches": 8, "schedule": "gpipe"}
    found = evaluate(PROFILE, cluster, stages, memory_limit=1e6, **sizes)
    assert [stage.recompute for stage in found.stages] == ["offload", "layer:1"]
    assert not any("more than there are" in note for note in found.notes)
    plain = evaluate(PROFILE, cluster, [GivenStage("ab", [0]), GivenStage("cd", [1])], **sizes)
    assert found.memory_bytes[0] < plain.memory_bytes[0]
    over = evaluate(PROFILE, cluster, plain.stages, memory_limit=plain.memory_bytes[0] - 1, **sizes)
    assert over.simulated_step_time == plain.simulated_step_time
    assert "on rank 0 it takes 1 bytes more than there are" in over.notes


def test_ranks_of_another_order_take_other_links() -> None:
    """Stages that lie two hosts apart pay for the slow link twice, where neighbours pay once."""
    cluster = Cluster.from_levels([(2, 1000.0), (2, 1.0)])
    one, other = (
        evaluate(PROFILE, cluster, [GivenStage(n, [r]) for n, r in zip("abcd", order, strict=True)], num_microbatches=1)
        for order in ((0, 1, 2, 3), (0, 2, 1, 3))
    )
    assert one.simulated_step_time == pytest.approx(12 + 2 * (2 * 2 / 1000 + 2 / 1))
    assert other.simulated_step_time == pytest.approx(12 + 2 * (3 * 2 / 1))


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        ([("abc", [0])], {}, r"nodes of the stages: \['d'\]: expected each node of the profile once"),
        ([("abcd", [0]), ("d", [1])], {}, r"nodes of the stages: \['d'\]"),
        ([("ac", [0]), ("bd", [1])], {}, "stage 0 ends where the graph has no cut"),
        ([("ab", [0, 1]), ("cd", [1])], {}, "expected some of 0 to 3 a place, each once"),
        ([("ab", [0]), ("c", [1]), ("d", [0])], {}, "3 stages on 2 places"),
        ([("a", [0]), ("b", [0]), ("c", [1]), ("d", [1])], {"schedule": "interleaved"}, r"places \[0, 1, 0, 1"),
        ([("ab", [0, 1, 2], 2), ("cd", [3])], {}, "3 ranks with tensor=2: expected a multiple"),
        ([("ab", [0], 1, "half"), ("cd", [1])], {}, "recompute='half'"),
        ([("ab", [0, 1], 1, "none", 3), ("cd", [2])], {}, "optimizer_shards=3: expected 1, or its 2 replicas"),
        ([("ab", [0]), ("cd", [1])], {"schedule": "chimera"}, "schedule='chimera'"),
        ([("ab", [0]), ("cd", [1])], {"schedule": "zb-v"}, "num_chunks=1 for schedule 'zb-v': it has 2 stages per"),
        ([("ab", [0]), ("cd", [1])], {"num_microbatches": 0}, "num_microbatches"),
        ([("ab", [0]), ("cd", [1])], {"microbatch_size": 2}, "microbatch_size=2: expected one of the profiles' sizes,"),
        ([], {}, "ranks of the stages"),
        ([("ab", [0]), ("cd", [1])], {"schedule": "seq1f1b"}, r"slice_lengths=\(\) under 'seq1f1b'"),
        ([("ab", [0]), ("cd", [1])], {"slice_lengths": (4, 4)}, r"slice_lengths=\(4, 4\) under '1f1b'"),
        ([("ab", [0]), ("cd", [1])], {"slice_lengths": 4}, "slice_lengths: 4: expected a list of whole numbers"),
        ([("ab", [0]), ("cd", [1])], {"schedule": None}, "unknown schedule None: expected one of gpipe"),
        ([("ab", 0), ("cd", [1])], {}, "ranks of stage 0: 0: expected a list of whole numbers"),
        ([("abcd", [0])], {"microbatch_size": 1.0}, "microbatch_size=1.0: expected"),
        ([("a", [0, 1], 2), ("b", [2, 3]), ("c", [0, 1]), ("d", [2, 3])], {}, "stage 2: tensor=1: expected that of"),
        ([("ab", [0], 1, "offload"), ("cd", [1])], {}, "recompute='offload': expected a cluster with"),
        ([("ab", [0], 1, "selective"), ("cd", [1])], {}, "recompute='selective': the profile has no figures"),
    ],
)
def test_mistakes(stages: list[tuple[Any, ...]], options: dict[str, Any], message: str) -> None:
    settings = {"num_microbatches": 4} | options
    with pytest.raises(ValueError, match=message):
        evaluate(PROFILE, Cluster.parse("4:net=1GB/s"), [GivenStage(*each) for each in stages], **settings)


@pytest.mark.parametrize("schedule", ["interleaved", "hanayo", "looped-bfs"])
def test_one_stage_a_place_under_a_schedule_of_several_by_default(schedule: str) -> None:
    stages = [GivenStage("ab", [0]), GivenStage("cd", [1])]
    found = evaluate(PROFILE, Cluster.parse("2:net=1GB/s"), stages, num_microbatches=4, schedule=schedule)
    assert found.build_schedule().num_stages == 2


def test_what_is_no_stage() -> None:
    found = evaluate(PROFILE, Cluster.parse("4:net=1GB/s"), [GivenStage("abcd", [0])], num_microbatches=4)
    for wrong in (found, GivenStage("abcd", [0]), [("abcd", [0])]):
        with pytest.raises(ValueError, match=r"stages: .*expected a GivenStage\(nodes, ranks\) each, or the `stages`"):
            evaluate(PROFILE, Cluster.parse("4:net=1GB/s"), wrong, num_microbatches=4)  # type: ignore[arg-type]


def two_hosts(*, ways: Any = (), **level: Any) -> Cluster:
    """Two of each kind; a message of two bytes takes 2 s between them."""
    levels = (Level(name="in", size=2, bandwidth=1000.0), Level(name="net", size=2, bandwidth=1.0, **level))
    return Cluster(levels=levels, kinds=(DeviceKind(name="A"), DeviceKind(name="B")), nodes=("A", "B"), node_links=ways)


def step(cluster: Cluster, stages: list[GivenStage], number: int = 1, source: Any = PROFILE, **options: Any) -> float:
    found = evaluate(source, cluster, stages, num_microbatches=number, **options)
    same = Plan.from_json(found.to_json())
    assert same == found
    assert simulated(same).timeline.batch_seconds == pytest.approx(found.simulated_step_time)
    assert found.simulated_step_time is not None
    return found.simulated_step_time


HALVES = [GivenStage("ab", [0]), GivenStage("cd", [2])]
QUICK = replace(PROFILE, nodes=[replace(x, forward_seconds=0.25, backward_seconds=1) for x in NODES])


def test_each_kind_of_device_has_a_profile() -> None:
    """No one speed makes F four and B two times as fast."""
    assert step(two_hosts(), HALVES) == 2 * 6 + 2 * 2
    assert step(two_hosts(), HALVES, source={"A": QUICK, "B": PROFILE}) == 2.5 + 6 + 2 * 2
    over_both = [GivenStage("ab", [0, 2]), GivenStage("cd", [1, 3])]
    slower = step(two_hosts(), over_both, 2, source={"A": QUICK, "B": PROFILE})
    assert slower == step(two_hosts(), over_both, 2) == pytest.approx(12 + 2 * 2 / 1000 + 8)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"A": PROFILE}, "profiles of the kinds A: expected one of 'B', too"),
        ({"A": PROFILE, "B": Profile(nodes=NODES[:3])}, "profile of 'B': node 'd' is only in the first"),
        ({"A": PROFILE, "B": replace(PROFILE, microbatch_size=2)}, r"kinds' profiles: \[1, 2\]: expected one of the s"),
        ({"A": PROFILE, "B": PROFILE, "C": PROFILE}, "a profile of 'C': expected those of the cluster's kinds, A, B"),
        (
            {"A": PROFILE, "B": replace(PROFILE, nodes=[replace(x, parameter_bytes=8) for x in NODES])},
            "profile of 'B': node 'a' has 4 and 8 bytes",
        ),
    ],
)
def test_profiles_of_kinds_that_do_not_fit(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(two_hosts(), HALVES, source=source)


def test_what_one_kind_has_not_measured() -> None:
    """An update, and what the runtime takes, are the longest of any kind; I and W of one kind alone are none."""
    rich = replace(
        PROFILE,
        nodes=[replace(x, update_seconds=5, input_grad_seconds=0.1, weight_grad_seconds=0.1) for x in NODES],
        around_seconds=3.0,
    )
    over_both = [GivenStage("ab", [0, 2]), GivenStage("cd", [1, 3])]
    plain = step(two_hosts(), over_both, 2)
    for source in ({"A": PROFILE, "B": rich}, {"A": rich, "B": PROFILE}):
        assert step(two_hosts(), over_both, 2, source=source) == pytest.approx(plain + 10 + 3)
        split = step(two_hosts(), over_both, 2, source=source, schedule="zb-h1")
        assert split == pytest.approx(step(two_hosts(), over_both, 2, schedule="zb-h1") + 10 + 3)


def test_links_of_one_direction_and_of_their_own_are_checked_and_kept() -> None:
    """Activations go from node 0 to node 1, gradients back."""
    assert step(two_hosts(ways=[(0, 1, 0.5, 0.0)]), HALVES) == 12 + 4 + 2
    assert step(two_hosts(ways=[(1, 0, 0.5, 3.0)]), HALVES) == 12 + 2 + 4 + 3
    swapped = [GivenStage("ab", [2]), GivenStage("cd", [0])]
    assert step(two_hosts(ways=[(1, 0, 0.5, 3.0)]), swapped) == 12 + 4 + 3 + 2
    inside = [GivenStage("ab", [0]), GivenStage("cd", [1])]
    assert step(two_hosts(ways=[(0, 0, 2.0, 0.0)]), inside) == 12 + 2 * 1
    sums = [GivenStage("abcd", [0, 2])]
    assert step(two_hosts(ways=[(1, 0, 0.25, 3.0)]), sums, 2) == 12 + 2 * (3 + 16 / 2 / 0.25)
    cluster = two_hosts(ways=[(0, 1, 0.5, 1.0)], devices_per_card=2, sends="blocking")
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert cluster.reordered([1, 0]).node_links == ((1, 0, 0.5, 1.0),)
    for ways in ([(0, 2, 1.0, 0.0)], [(0, 1, 1.0)], [(0, 1, 0.0, 0.0)], [(0, 1, 1.0, 0.0), (0, 1, 0.5, 0.0)]):
        with pytest.raises(ValueError, match=r"node_links|link from"):
            two_hosts(ways=ways)
    with pytest.raises(ValueError, match="link from node 0 to node 1: 2 bytes/s after 0 s: expected no faster one"):
        step(two_hosts(ways=[(0, 1, 2.0, 0.0)]), HALVES)
    for number in (3, 4):
        with pytest.raises(ValueError, match=f"devices_per_card: {number}: expected a divisor of the 2 devices"):
            two_hosts(devices_per_card=number)
    with pytest.raises(ValueError, match="sends: 'later': expected one of beside, blocking, rendezvous"):
        two_hosts(sends="later")


def test_a_card_is_shared_as_if_all_ranks_were_said() -> None:
    both = [GivenStage("ab", [0, 1]), GivenStage("cd", [2, 3])]
    own, shared = two_hosts(), two_hosts(devices_per_card=2)
    assert step(own, both, 2) == pytest.approx(12 + 2 * 2 + 8 / 1000)  # a ring inside moves its 8 bytes once
    assert step(shared, both, 2) == pytest.approx(12 + 2 * 2 + 2 + 8 / 1000)  # the second one's wait for the first's
    assert step(shared, HALVES, 2) == step(own, HALVES, 2)
    divided = replace(PROFILE, tensor=2)  # a part of the message from each tensor rank
    groups = [GivenStage("ab", [0, 1], 2), GivenStage("cd", [2, 3], 2)]
    assert (step(own, groups, source=divided), step(shared, groups, source=divided)) == (12 + 2 * 1, 12 + 2 * 2)
    sums = [GivenStage("abcd", [0, 1, 2, 3])]
    assert step(own, sums, 4) == pytest.approx(12 + 2 * 3 / 4 * 16 / 2)
    assert step(shared, sums, 4) == pytest.approx(12 + 2 * 3 / 4 * 16)  # one ring for both
    across = [GivenStage("ab", [0, 2]), GivenStage("cd", [1, 3])]
    assert step(own, across, 2) == pytest.approx(12 + 2 * 2 / 1000 + 8 / 1)
    assert step(shared, across, 2) == pytest.approx(8 + 2 * 2 / 1000 + 2 * 8)  # the sums of two stages, in turn
    # Unequal replicas on three hosts: messages queue on the hosts' cards as the simulator has them rank by rank.
    level = Level(name="net", size=3, bandwidth=1.0, devices_per_card=2)
    cluster = Cluster(levels=(Level(name="in", size=2, bandwidth=1.0), level))
    stages = [GivenStage("a", [0]), GivenStage("bc", [2, 4]), GivenStage("d", [1])]
    ranks, number = [0, 2, 4, 1], 6
    cards = {r: r // 2 for r in ranks}
    ways = {
        (a, b): Link(seconds_per_byte=1.0, sending=cards[ranks[a]], receiving=cards[ranks[b]])
        for a in range(4)
        for b in range(4)
    }
    schedule = build("1f1b", num_ranks=4, num_microbatches=number, replicas=[1, 2, 1])
    network = Links(network=ways, activation_bytes=2.0, sums=(AllReduce(stage=1, seconds=8.0, ways=((1, 2), (2, 1))),))
    said = simulate(schedule, Costs(forward=[1, 2, 1], backward=[2, 4, 2]), network)
    assert step(cluster, stages, number) == pytest.approx(said.batch_seconds)


def test_a_send_blocks_its_sender() -> None:
    """By hand: 0F0 0-2, sent 4; 0F1 4-6, sent 8; 1F0 4-6, 1B0 6-10, sent 12; 1F1 12-14, 1B1 14-18, sent 20; 0B0 12-16,
    0B1 20-24. Beside compute 1F1 is 10-12, 1B1 12-16, there at 18."""
    assert step(two_hosts(sends="blocking"), HALVES, 2) == 24
    assert step(two_hosts(), HALVES, 2) == 22
    # Both ends, by hand: 0F0 0-2, sent 4; 0F1, 1F0 4-6; 1B0 6-10, both sent by 14; 1F1, 1B1 14-20; 0B0 14-18, sent 22
    assert step(two_hosts(sends="rendezvous", buffer_bytes=0.0), HALVES, 2) == 26
    # Either end holds half a message: 0F0 0-3, left but for that at 4, there at 5; 0F1 4-7; 1F0 5-6, 1B0 6-8, there at
    # 10, when 0F1's leaves, there at 12; 0B0 11-17; 1F1 12-13, 1B1 13-15, there at 17; 0B1 17-23
    early = [GivenStage("abc", [0]), GivenStage("d", [2])]
    for held, seconds in ((0.9, 26), (1.0, 23)):
        assert step(two_hosts(sends="rendezvous", buffer_bytes=held), early, 2) == seconds
    # Two tensor ranks hold as much together, and their halves take 1 s: 0F1 3.5-6.5, its message 8-9; 0B0 8.5-14.5
    groups = [GivenStage("abc", [0, 1], 2), GivenStage("d", [2, 3], 2)]
    for held, seconds in ((0.4, 22), (0.5, 20.5)):
        cluster = two_hosts(sends="rendezvous", buffer_bytes=held)
        assert step(cluster, groups, 2, source=replace(PROFILE, tensor=2)) == seconds
    one = [GivenStage("ab", [0]), GivenStage("cd", [1])]
    assert step(two_hosts(sends="blocking"), one, 3) == pytest.approx(step(two_hosts(), one, 3))


def test_tensor_sizes_and_replicas_of_stages_differ() -> None:
    """The second replica's messages cross the slow link, whatever the first one's do."""
    halved = replace(PROFILE, nodes=[replace(x, forward_seconds=0.5, backward_seconds=1) for x in NODES], tensor=2)
    cluster = Cluster.from_levels([(4, 1000.0), (2, 1.0)])
    stages = [GivenStage("ab", [0, 1, 4, 5], 2), GivenStage("cd", [2, 3])]
    found = step(cluster, stages, 2, source=[PROFILE, halved])
    assert found == pytest.approx(3 + 6 + 2 * 2 + 8 / 1)  # and the sum of the first stage over it
    with pytest.raises(ValueError, match="tensor: 2: expected one of the profiles', 1"):
        step(cluster, stages, 2)


def test_tensor_sums_go_over_their_own_links() -> None:
    """Those within node 0 are slower than those within node 1: 4 bytes a node each way, once round two devices."""
    over = {"forward_sums": 1, "forward_sum_bytes": 4, "backward_sums": 1, "backward_sum_bytes": 4}
    divided = replace(PROFILE, nodes=[replace(x, **over) for x in NODES], tensor=2)
    groups = [GivenStage("abc", [0, 1], 2), GivenStage("d", [2, 3], 2)]
    for inside, each in ((1000.0, 4 / 1000), (2.0, 4 / 2)):
        sums = 2 * 3 * each + 2 * 4 / 1000
        assert step(two_hosts(ways=[(0, 0, inside, 0.0)]), groups, source=divided) == pytest.approx(12 + 2 * 1 + sums)


def test_numbers_may_be_numpys() -> None:
    i, f = np.int64, np.float32
    nodes = [Node(name=n, forward_seconds=f(1), backward_seconds=2, parameter_bytes=i(10)) for n in "ab"]
    profile, cluster = Profile(nodes=nodes, microbatch_size=i(1)), Cluster.from_levels([(i(2), f(1e9))])
    assert Profile.from_json(profile.to_json()) == profile
    plans = (
        plan(profile, cluster, global_batch=i(4), memory_limit=i(1000), microbatch_sizes=(i(1),)),
        partition(profile, cluster, num_microbatches=i(4)),
        evaluate(profile, cluster, [GivenStage("a", np.arange(1)), GivenStage("b", [i(1)])], num_microbatches=i(4)),
    )
    for each in plans:
        assert Plan.from_json(each.to_json()) == each
    for name, options in {"1f1b": {"replicas": (i(1), i(1))}, "2bw": {"num_batches": i(6)}, "zb-v": {}}.items():
        schedule = build(name, num_ranks=i(2), num_microbatches=i(4), **options)
        assert type(schedule).from_json(schedule.to_json()) == schedule
    with pytest.raises(ValueError, match="ranks of stage 0"):
        evaluate(profile, cluster, [GivenStage("ab", [True])], num_microbatches=4)
    with pytest.raises(TypeError, match=r"^partition\(\) got an unexpected option 'micro': expected one of "):
        partition(profile, cluster, micro=4)


def test_bytes_that_are_too_many_by_a_part_of_one_add_up() -> None:
    with pytest.raises(ValueError, match="needs 10 bytes on a device of 9, 1 too many"):
        partition(chain("a", stash_bytes=10), Cluster.from_levels([(1, 1e9)]), memory_limit=9.9999)
