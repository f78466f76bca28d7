"""Planning past one data centre: devices of two kinds in up to eight regions of the world, on ordinary internet links.

    world (regions, cards, distances) --> Cluster whose outermost level is the slowest card used --> plan
                                                                                                        |
    exact ways between all pairs of nodes: own cards, own distance  <-- regions put into the plan's places

The planner knows one bandwidth and one latency a level, so it plans for the worst card and the mean latency. Its plan
is then simulated on the real links, each message on the cards of its own two nodes. Nothing here is measured: latencies
follow from distances (light in fibre, over paths half as long again, and 2 ms of equipment), cards are made up, from
0.1 to 10 Gbit/s a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise, permutations
from math import acos, cos, inf, lcm, radians, sin

from ...partition.analytic.device_model import DeviceModel
from ...partition.analytic.layers import TransformerSource
from ...partition.analytic.transformer import Transformer
from ...partition.cluster import Cluster, DeviceKind, Level
from ...partition.plans.plan import Plan
from ...partition.plans.to_schedule import schedule_of
from ...partition.profile import Profile
from ...partition.search.plan import plan
from ...schedules import AllReduce, Costs, Link, Links, Op, Schedule, simulate
from ...schedules.transform import defer_updates
from ..jobs.case import Case
from ..jobs.figure import Figure, How

NODE = 8  # devices of a node
GIGABIT = 1e9 / 8  # [bytes/s]
_FIBRE = 2e5  # [km/s] two thirds of light's speed
_DETOUR, _EQUIPMENT = 1.5, 2e-3  # of a path beside the great circle, and [s]
_INNER = Level(name="nvlink", size=NODE, bandwidth=300e9, latency=2e-6)
_LOCAL_BANDWIDTH, _LOCAL_LATENCY = 25e9, 10e-6  # of a device inside a region [bytes/s, s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A place with devices of one kind.

    Arguments:
        latitude, longitude: [degrees].
        kind: of its devices.
        card: of each of its nodes, to other regions [bytes/s].
    """

    name: str
    latitude: float
    longitude: float
    kind: str
    card: float

    def latency(self, other: Region) -> float:
        """One way [s]."""
        a, b = radians(self.latitude), radians(other.latitude)
        turn = radians(self.longitude - other.longitude)
        angle = acos(min(1.0, sin(a) * sin(b) + cos(a) * cos(b) * cos(turn)))
        return _EQUIPMENT + _DETOUR * 6371 * angle / _FIBRE


FAST = DeviceKind(name="fast", speed=1.0, memory_bytes=80e9)
SLOW = DeviceKind(name="slow", speed=0.5, memory_bytes=40e9)
REGIONS = tuple(  # those with the best cards first: with fewer regions the last ones are left out
    Region(name=name, latitude=latitude, longitude=longitude, kind=kind.name, card=card * GIGABIT)
    for name, latitude, longitude, kind, card in [
        ("Virginia", 38.9, -77.4, FAST, 10.0),
        ("Ireland", 53.3, -6.3, FAST, 10.0),
        ("Frankfurt", 50.1, 8.7, SLOW, 10.0),
        ("Oregon", 45.6, -121.2, FAST, 3.0),
        ("Tokyo", 35.7, 139.7, FAST, 1.0),
        ("Singapore", 1.4, 103.8, SLOW, 1.0),
        ("Sao Paulo", -23.5, -46.6, SLOW, 0.3),
        ("Mumbai", 19.1, 72.9, SLOW, 0.1),
    ]
)
MODELS = {  # by devices: a GPT and its batch [sequences of 2,048 tokens]
    64: (Transformer(layers=32, hidden=4096, heads=32, vocabulary=51200, length=2048), 512),
    256: (Transformer(layers=40, hidden=5120, heads=40, vocabulary=51200, length=2048), 1024),
    1024: (Transformer(layers=48, hidden=8192, heads=64, vocabulary=51200, length=2048), 2048),
    4096: (Transformer(layers=96, hidden=12288, heads=96, vocabulary=51200, length=2048), 4096),
}
SCHEDULES = {"flush": ("1f1b", "interleaved"), "any": ("1f1b", "interleaved", "2bw")}


def plan_and_simulate(case: Case, repetitions: int) -> Iterator[Figure]:
    """The best plan of one cluster, simulated on its real links, and the same devices in one data centre.

    Cases have `devices`, `regions` (how many are used, the devices of the others stand idle) and `schedules`.
    """
    del repetitions
    devices, used = case.count("devices"), case.count("regions")
    if devices not in MODELS or not 2 <= used <= len(REGIONS):
        raise ValueError(
            f"case {case}: expected devices of {', '.join(map(str, MODELS))} and 2 to {len(REGIONS)} regions"
        )
    schedules = SCHEDULES[case.text("schedules")]
    near = one_data_centre(devices, schedules)
    regions = REGIONS[:used]
    far = _plan(devices, regions, schedules, apart=True)
    order = places(far, regions, devices)
    seconds = seconds_of(far, order, devices)
    note = f"{far.schedule}, stages on {'-'.join(str(stage.replicas) for stage in far.stages)} groups of {far.tensor}"
    shown = case.also(devices=devices)
    yield Figure(case=shown, name="step", value=seconds, unit="s", how=How.SIMULATED, note=note)
    yield Figure(case=shown, name="step as planned", value=far.simulated_step_time or 0.0, unit="s", how=How.SIMULATED)
    yield Figure(case=shown, name="step in one data centre", value=near, unit="s", how=How.SIMULATED)
    yield Figure(case=shown, name="speed kept", value=near / seconds, unit="fraction", how=How.SIMULATED, note=note)


@cache
def one_data_centre(devices: int, schedules: Sequence[str]) -> float:
    """Seconds of a step with all devices in one place."""
    near = _plan(devices, REGIONS, schedules, apart=False).simulated_step_time
    assert near is not None
    return near


def cluster_of(devices: int, regions: Sequence[Region], *, apart: bool) -> Cluster:
    """Devices of these regions: where they are, or all in one place."""
    nodes = devices // len(REGIONS) // NODE
    local = Level(name="net", size=nodes, bandwidth=_LOCAL_BANDWIDTH, latency=_LOCAL_LATENCY)
    path = path_of(regions)
    outer = Level(
        name="internet" if apart else "net between halls",
        size=len(regions),
        # A device's part of the slowest card among them.
        bandwidth=min(region.card for region in regions) / NODE if apart else _LOCAL_BANDWIDTH,
        latency=sum(a.latency(b) for a, b in pairwise(path)) / (len(path) - 1) if apart else _LOCAL_LATENCY,
    )
    return Cluster(
        kinds=(FAST, SLOW),
        levels=(_INNER, local, outer),
        nodes=tuple(region.kind for region in regions for _ in range(nodes)),
    )


@cache
def path_of(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """The order of regions along which a message travels the least seconds."""
    return min(permutations(regions), key=lambda order: sum(a.latency(b) for a, b in pairwise(order)))


def _plan(devices: int, regions: Sequence[Region], schedules: Sequence[str], *, apart: bool) -> Plan:
    transformer, batch = MODELS[devices]
    cluster = cluster_of(devices, tuple(regions), apart=apart)
    source = TransformerSource(transformer=transformer, device=DeviceModel.preset("A100-80GB"), cluster=cluster)
    return plan(
        source,
        cluster,
        global_batch=batch,
        schedules=schedules,
        tensor_sizes=[NODE],
        microbatch_sizes=[1, 2, 4, 8],
        chunk_sizes=(2,),
        recompute=("none", "selective", "layer"),
        max_simulated=24,
    )


def places(found: Plan, regions: Sequence[Region], devices: int) -> tuple[Region, ...]:
    """The region in each place of the cluster, for the plan: regions with the same kind of device may change places.

    To the planner they are alike. Two are exchanged as long as that makes the simulated step shorter.
    """
    best, seconds = tuple(regions), seconds_of(found, regions, devices)
    while True:
        swaps = [(a, b) for a, b in combinations(range(len(best)), 2) if best[a].kind == best[b].kind]
        tried = [_swapped(best, a, b) for a, b in swaps]
        fastest, order = min(
            ((seconds_of(found, each, devices), at) for at, each in enumerate(tried)), default=(inf, 0)
        )
        if fastest >= seconds * (1 - 1e-9):
            return best
        best, seconds = tried[order], fastest


def _swapped(regions: Sequence[Region], a: int, b: int) -> tuple[Region, ...]:
    moved = list(regions)
    moved[a], moved[b] = moved[b], moved[a]
    return tuple(moved)


def seconds_of(found: Plan, order: Sequence[Region], devices: int) -> float:
    """Seconds of a step of a plan on the real links, its place i being region `order[i]`."""
    schedule = schedule_of(found)
    if schedule.rule.updates_may_wait and any(stage.replicas > 1 for stage in found.stages):
        schedule = defer_updates(schedule)  # as the runtime does, so that sums overlap with compute
    profile = _profile(found, devices)
    nodes = {node.name: node for node in profile.nodes}
    where = [order[rank * found.tensor // (devices // len(REGIONS))] for rank in range(schedule.num_ranks)]
    shared = _shared(found, profile)
    costs = Costs(
        forward=found.seconds(Op.F),
        backward=found.seconds(Op.B),
        update=[sum(nodes[name].update_seconds for name in s.nodes) / s.optimizer_shards for s in found.stages],
        tied=[
            (stages, _sum_seconds(sorted({r for stage in stages for r in schedule.owners[stage]}), where, held))
            for stages, held in shared
        ],
    )
    sums = []
    for number, stage in enumerate(found.stages):
        if stage.replicas > 1:
            ranks = schedule.owners[number]
            held = sum(nodes[name].parameter_bytes for name in stage.nodes)
            held -= sum(tied for stages, tied in shared if number in stages)
            sums.append(_sum(number, ranks, where, held, divided=stage.optimizer_shards > 1))
    links = Links(network=_ways(schedule, where), activation_bytes=activation_bytes(found, devices), sums=tuple(sums))
    return simulate(schedule, costs, links).batch_seconds


def _shared(found: Plan, profile: Profile) -> list[tuple[tuple[int, ...], float]]:
    """Stages that share weights, and bytes of these: summed over all ranks that hold them."""
    groups = []
    for names, held in profile.tied:
        stages = tuple(at for at, stage in enumerate(found.stages) if {*names} & {*stage.nodes})
        if len(stages) > 1:
            groups.append((stages, held))
    return groups


def activation_bytes(found: Plan, devices: int) -> list[float]:
    """Bytes over each cut: of all devices of a group together, that each send a part."""
    nodes = {node.name: node for node in _profile(found, devices).nodes}
    return [nodes[stage.nodes[-1]].activation_bytes for stage in found.stages[:-1]]


def _profile(found: Plan, devices: int) -> Profile:
    assert found.microbatch_size is not None
    return _source(devices).profile(microbatch_size=found.microbatch_size, tensor=found.tensor)


@cache
def _source(devices: int) -> TransformerSource:
    cluster = cluster_of(devices, REGIONS, apart=False)
    return TransformerSource(transformer=MODELS[devices][0], device=DeviceModel.preset("A100-80GB"), cluster=cluster)


def _way(src: int, dst: int, where: Sequence[Region]) -> Link:
    a, b = where[src], where[dst]
    if a is b:  # every device of a node has a card of its own
        return Link(latency=_LOCAL_LATENCY, seconds_per_byte=1 / (NODE * _LOCAL_BANDWIDTH), sending=src, receiving=dst)
    return Link(
        latency=a.latency(b), seconds_per_byte=1 / min(a.card, b.card), sending=("card", src), receiving=("card", dst)
    )


def _ways(schedule: Schedule, where: Sequence[Region]) -> Mapping[tuple[int, int], Link]:
    """Between all ranks that exchange a message or stand beside each other in a sum."""
    pairs = {(a, b) for owners in schedule.owners for a, b in zip(owners, (*owners[1:], owners[0]), strict=True)}
    for src, dst, _ in schedule.stage_edges:
        here, there = schedule.owners[src], schedule.owners[dst]
        for k in range(min(lcm(len(here), len(there)), schedule.total_indices)):
            pairs |= {(here[k % len(here)], there[k % len(there)]), (there[k % len(there)], here[k % len(here)])}
    return {(a, b): _way(a, b, where) for a, b in pairs}


def _sum(stage: int, ranks: Sequence[int], where: Sequence[Region], held: float, *, divided: bool) -> AllReduce:
    seconds = _sum_seconds(ranks, where, held)
    around = tuple(zip(ranks, (*ranks[1:], ranks[0]), strict=True))
    # Where each rank updates a part, half of the rounds bring the weights together behind the update.
    gather = seconds / 2 if divided else 0.0
    return AllReduce(stage=stage, seconds=seconds - gather, gather=gather, ways=around)


def _sum_seconds(ranks: Sequence[int], where: Sequence[Region], held: float) -> float:
    """A sum that scatters within each region, then goes around the regions, then gathers (see `topology`)."""
    members: dict[str, int] = {}
    for rank in ranks:
        members[where[rank].name] = members.get(where[rank].name, 0) + 1
    most, least, count = max(members.values()), min(members.values()), len(members)
    inside = 2 * (most - 1) * (_LOCAL_LATENCY + held / most / _LOCAL_BANDWIDTH)
    present = [region for region in where if region.name in members]
    ring = path_of(tuple(dict.fromkeys(present)))
    across = 0.0
    if count > 1:
        slowest = min(region.card for region in ring)
        # The devices of a node share its card, and each of them has gradients of its own.
        part = held * NODE / least / count / slowest
        across = 2 * (count - 1) * (max(a.latency(b) for a, b in pairwise((*ring, ring[0]))) + part)
    return inside + across
