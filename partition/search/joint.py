"""`plan(search="joint")`: cut, placement and order of a chain found together, to be compared with named schedules.

    profile -> Layer each, links, memory; plans with a split backward -> `synthesize_jointly` -> its best few, each a
    configuration with a schedule of its own -> memory and step as of any other configuration

One pipeline over all devices, with nothing recomputed. Weights that several nodes share are counted with each of them
while it searches, and as they are in what it finds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np

from ...schedules.families.registry import family
from ...schedules.ir import Schedule
from ...schedules.messages import receives_ahead
from ...schedules.orders.problem import MemoryLimitError
from ...schedules.search.arranged import Layer
from ...schedules.search.incumbent import Progress
from ...schedules.search.joint import Arrangement, synthesize_jointly
from ...schedules.timing.costs import Costs
from ...schedules.timing.links import Link, Links
from ...schedules.transform import on_ranks
from ...schedules.wording import duration
from ..memory import GRADIENTS_SENT, context_bytes
from ..plans.record import OWN
from ..stage_cost import StageSums
from .arguments import CHUNK_SIZES, PLANNED, listed, schedules_with_chunks
from .evaluate import Candidate, Ends, PlanEvaluator
from .model import Model
from .result import label
from .search import PlanSearch
from .space import Configuration, SearchSpace

JOINT_SECONDS = 20.0
MAX_SIZES = 3  # of microbatches that are searched
MAX_MICROBATCHES = 20_000  # of all devices together: an order is evaluated in less than a tenth of a second
_LEAST_FORWARD = 1e-9  # of all seconds: the search has no stage that takes no time


def refuse_joint(space: SearchSpace, evaluator: PlanEvaluator) -> None:
    """ValueError for what a joint search does not know: graphs, replicas, tensor ranks, devices that differ."""
    model, devices = evaluator.model_of(space.microbatch_sizes[0], space.tensor_sizes[0]), space.num_devices
    asked = {"data_sizes": (space.data_sizes, 1), "tensor_sizes": (space.tensor_sizes, 1)}
    asked |= {"pipeline_sizes": (space.pipeline_sizes, devices)}
    for name, (sizes, needed) in asked.items():
        if sizes is not None and needed not in sizes:
            said = f"expected {needed} among them: a joint search is for one pipeline over all {devices} devices"
            raise ValueError(f"search='joint' with {name}={listed(sizes)}: {said}")
    num_nodes, least = len(model.profile.nodes), space.global_batch // max(space.microbatch_sizes)
    cuts, rules = model.cuts.members.sum(axis=1).tolist(), model.rules.recompute
    parts, sums = len(cuts) - 1, model.stages(range(len(cuts)))
    wrong = {
        f"recompute={', '.join(rules)}: expected 'none' among them, as nothing runs again": "none" not in rules,
        f"a graph of {num_nodes} nodes: expected a chain, of which the first k nodes are the same in any order, or a "
        "plan without search='joint'": len({*cuts}) < len(cuts) or bool(model.cuts.notes),
        f"{devices} devices: expected at most {parts}, the parts of the profile that take time": devices > parts,
        "no node with input_grad_seconds above 0, or none with weight_grad_seconds above 0: expected one of each, or a "
        "plan without search='joint'": not (sums.input_grad.any() and sums.weight_grad.any()),
        f"{least:,} microbatches or more on {devices:,} devices: expected at most {MAX_MICROBATCHES // devices:,}, "
        "as an order of more takes long to evaluate": devices * least > MAX_MICROBATCHES,
        "devices of several kinds: expected one, or a plan without search='joint'": not evaluator.topology.is_uniform,
    }
    if found := next((text for text, is_so in wrong.items() if is_so), None):
        raise ValueError(f"search='joint' with {found}")


def with_joint(
    search: PlanSearch, space: SearchSpace, found: Sequence[Candidate], *, seconds: float
) -> list[Candidate]:
    """The best that joint searches of so many CPU seconds together find, and what was found before, the best first.

    There is one for each of the microbatch sizes that promise most, up to MAX_SIZES: with the least work of a batch,
    and of a third of a microbatch more per device, which passes before all of them are busy. Each starts from what was
    found before and from the best schedules that split the backward, and is as fast as those that fit; the latter are
    looked for in what the first search left of its seconds.
    """
    evaluator, least = search.evaluator, min((each.simulated_seconds for each in found), default=math.inf)

    def report(point: Progress) -> None:
        if search.progress is not None:
            search.progress(search.searched, min(least, point.value))

    joint = list[Candidate]()

    def promise(size: int) -> float:
        return evaluator.model_of(size, 1).seconds * (space.global_batch // size + space.num_devices / 3)

    short = [
        size for size in space.microbatch_sizes if space.num_devices * space.global_batch <= MAX_MICROBATCHES * size
    ]
    sizes = sorted(short, key=promise)[:MAX_SIZES]
    for at, size in enumerate(sizes):
        c = Configuration(
            pipeline=space.num_devices,
            data=1,
            tensor=1,
            schedule=OWN,
            num_chunks=1,
            microbatch_size=size,
            num_microbatches=space.global_batch // size,
        )
        split = [*_starts(evaluator, c, _split(search, space, size, 1 / (len(sizes) - at)))]
        starts = [*split, *_starts(evaluator, c, found)]
        searched = _searched(evaluator, c, starts, seconds / len(sizes), report)
        for cut, schedule in [*split[:1], *((each.cut, each.synthesis.schedule) for each in searched)]:
            candidate = _candidate(evaluator, c, cut, schedule)
            if not any(memory.too_many for memory in candidate.memories):
                joint.append(evaluator.simulate(candidate))
    best = sorted(joint, key=lambda each: each.simulated_seconds)[:1]
    return sorted([*best, *found], key=lambda each: each.simulated_seconds)


def _split(search: PlanSearch, space: SearchSpace, size: int, share: float) -> list[Candidate]:
    """One pipeline over all devices under each schedule that splits the backward, the best first, as far as this share
    of the seconds left goes."""
    left = None if search.deadline is None else share * (search.deadline - time.monotonic())
    if left is not None and left <= 0:
        return []
    splits = [name for name in PLANNED if family(name).splits_backward and family(name).weight_copies == 1]
    sizes = {"microbatch_sizes": (size,), "pipeline_sizes": (space.num_devices,), "data_sizes": (1,)}
    own = replace(space, schedules=schedules_with_chunks(splits, CHUNK_SIZES), tensor_sizes=(1,), **sizes)  # type: ignore[arg-type]
    own_search = PlanSearch(search.evaluator, wanted=1, max_simulated=search.max_simulated, seconds=left)
    return own_search.run(own.configurations(), [])


def _starts(evaluator: PlanEvaluator, c: Configuration, found: Sequence[Candidate]) -> Iterator[tuple[Ends, Schedule]]:
    """Cuts and schedules of those that are one pipeline over all devices, with one copy of the weights, as they are."""
    for each in found:
        own, known = each.configuration, each.configuration.family
        is_alike = (
            replace(c, schedule=own.schedule, num_chunks=own.num_chunks, ranks=own.ranks, own=own.own) == own
        )  # a rank a place
        is_whole = known.weight_copies == 1 and not known.rule.is_asynchronous
        if is_alike and is_whole and {name for held in each.memories for name in held.recompute} == {"none"}:
            made = evaluator.schedules.schedule(own, c.batch)
            yield each.ends, on_ranks(made, [rank for (rank,) in own.stage_ranks], num_ranks=c.pipeline)


def _searched(
    evaluator: PlanEvaluator,
    c: Configuration,
    starts: Sequence[tuple[Ends, Schedule]],
    seconds: float,
    on_progress: Callable[[Progress], None],
) -> Sequence[Arrangement]:
    """The best few; none where nothing fits the memory."""
    model, topology = evaluator.model(c), evaluator.topology
    sums = model.stages(range(len(model.cuts)))
    between = {
        pair: topology.between(*((rank,) for rank in pair), tensor=1) for pair in permutations(range(c.pipeline), 2)
    }
    size = float(sums.after.sum()) / max(1, len(sums.after) - 1)  # of a message
    network = {pair: Link(latency=each.latency, seconds_per_byte=each.seconds_a_byte) for pair, each in between.items()}
    beside = context_bytes(model.profile.device) + _passing_bytes(sums, c.batch)
    limits = [float(each) - beside for each in topology.memory_bytes]
    if min(limits) <= 0:
        return ()
    try:
        return synthesize_jointly(
            _layers(model, topology.fastest, sums),
            num_ranks=c.pipeline,
            num_microbatches=c.batch,
            memory_limit=None if min(limits) == math.inf else limits,
            runtime=Costs(
                overhead=model.profile.action_seconds,
                message_overhead=max((each.busy + size * each.busy_a_byte for each in between.values()), default=0.0),
                norm=evaluator.norm,
            ),
            links=Links(network=network),
            starts=starts,
            seconds=seconds,
            on_progress=on_progress,
        ).found
    except MemoryLimitError:
        return ()


def _layers(model: Model, speed: float, sums: StageSums) -> list[Layer]:
    """The nodes; I and W, which walk the same graph, take no less than B."""
    both = sums.input_grad + sums.weight_grad
    longer = np.maximum(both, sums.backward)
    weight_grad = longer * sums.weight_grad / np.maximum(both, 1e-30)
    forward = np.maximum(sums.forward, _LEAST_FORWARD * max(model.seconds, 1e-30))
    columns = {
        "forward": forward / speed,
        "input_grad": (longer - weight_grad) / speed,
        "weight_grad": weight_grad / speed,
        "backward": sums.backward / speed,
        "activation": sums.stash,
        "update": sums.update / speed,
        "weights": sums.weights * (2.0 + model.rules.optimizer_ratio) + sums.buffers,
        "output": sums.after,
    }
    rows = zip(*(np.maximum(column, 0.0).tolist() for column in columns.values()), strict=True)
    return [Layer(**dict(zip(columns, row, strict=True))) for row in rows]


def _passing_bytes(sums: StageSums, num_microbatches: int) -> float:
    """Bytes that a rank needs at most besides weights and what it keeps of microbatches: workspace and messages."""
    largest = float(max(sums.before.max(), sums.after.max()))
    ahead = min(receives_ahead(largest), num_microbatches)
    return float((sums.workspace + sums.before + sums.after).max()) + largest * (2 * ahead + GRADIENTS_SENT)


def _candidate(evaluator: PlanEvaluator, c: Configuration, cut: Ends, schedule: Schedule) -> Candidate:
    """With the schedule that was found. Its places are its ranks, in the order of their first stages."""
    ranks = [rank for (rank,) in dict.fromkeys(schedule.owners)]
    own = on_ranks(schedule, [ranks.index(r) for r in range(c.pipeline)], num_ranks=c.pipeline)
    num_chunks, S = max(map(len, own.placement)), own.num_stages
    whole = replace(c, num_chunks=num_chunks, ranks=tuple((rank,) for rank in ranks), own=own)
    return evaluator.given(whole, cut, recompute=["none"] * S, shards=[1] * S)


def verdict(found: Sequence[Candidate]) -> str:
    """A sentence about both searches: which one won, and by how much."""
    joint = next((each for each in found if each.configuration.schedule == OWN), None)
    named = next((each for each in found if each.configuration.schedule != OWN), None)
    if joint is None:
        return "joint search: nothing that it found fits the memory"
    if named is None:
        return f"joint search: {duration(joint.simulated_seconds)} a batch; no named schedule fits the memory"
    less = 1.0 - joint.simulated_seconds / named.simulated_seconds if named.simulated_seconds > 0 else 0.0
    return (
        f"joint search: {duration(joint.simulated_seconds)} a batch, {abs(less):.2%} {'less' if less > 0 else 'more'} "
        f"than the best named schedule, {label(named)}, {duration(named.simulated_seconds)}"
    )
