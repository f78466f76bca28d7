"""`plan`: what may be chosen, checked and handed to the search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product

import numpy as np

from ...schedules.families.registry import family
from ...schedules.kinds import one_of, option
from ...schedules.wording import duration
from ..cluster import Cluster
from ..memory import context_bytes
from ..plans.as_text import CHOSEN
from ..plans.plan import Plan
from ..plans.record import SEARCHES, Searched
from ..profile import Profile
from ..recompute import MemoryRules
from ..solve.antichains import MAX_CUTS
from ..solve.dynamic import SCHEDULES as SCHEDULES_WITH_REPLICAS
from ..solve.orders import canonical_order, node_orders, own_ranks
from ..stage_cost import OFFLOAD
from ..strict import count, number
from ..topology import Topology
from .arguments import (
    CHUNK_SIZES,
    SCHEDULES,
    SHARDING,
    choices,
    counts,
    figure,
    listed,
    refuse_endless,
    refuse_unknown,
    schedules_with_chunks,
    treatments,
)
from .arguments import microbatch_sizes as sizes_to_try
from .arguments import tensor_sizes as tensor_sizes_of
from .cuts import TooLargeError, candidates
from .evaluate import Candidate, Ends, PlanEvaluator
from .joint import JOINT_SECONDS, refuse_joint, verdict, with_joint
from .layouts import uneven_layouts
from .model import Model, alike
from .result import as_plan, distinct, gain, label, with_pairs
from .search import PlanSearch, Progress
from .simulated import MAX_ACTIONS
from .source import ProfileSource, SourceWithAlternatives, as_source
from .space import ALL_SIZES, Configuration, Runs, SearchSpace

CANDIDATES = 8  # of unequal replicas, by each way
MAX_ORDERS = 6  # of unequal nodes, for configurations with equal replicas
ADAM_BYTES = 2.0  # of state a byte of parameters, where a profile does not say

_Found = tuple[PlanSearch, list[Candidate], Profile]  # the search, what it found, the best first, and one profile


def plan(
    source: Profile | Mapping[int, Profile] | Sequence[Profile] | ProfileSource,
    cluster: Cluster,
    *,
    global_batch: int,
    memory_limit: float | None = None,
    schedules: Sequence[str] = SCHEDULES,
    microbatch_sizes: Sequence[int] | None = None,
    pipeline_sizes: Sequence[int] | None = None,
    data_sizes: Sequence[int] | None = None,
    tensor_sizes: Sequence[int] | None = None,
    chunk_sizes: Sequence[int] = CHUNK_SIZES,
    recompute: Sequence[str] | None = None,
    optimizer_sharding: Sequence[str] = SHARDING,
    optimizer_bytes: float | None = None,
    max_grad_norm: float | None = None,
    runnable: bool = False,
    num_runners_up: int = 8,
    max_simulated: int = 64,
    seconds: float | None = None,
    max_cuts: int = MAX_CUTS,
    search: str = "named",
    progress: Progress | None = None,
    on_runners_up: Callable[[Sequence[Plan]], object] | None = None,
) -> Plan:
    """The plan with the least simulated seconds a batch, with the runners-up and what each loses.

    Arguments:
        source: a profile; profiles by microbatch size; profiles of several sizes and of models cut over several ranks,
            as they come; or what makes them for any size (`ProfileSource`). A profile that does not say its
            microbatch size counts as of one sample.
        global_batch: samples of a batch.
        memory_limit: of every device [bytes]; None: the cluster's own, if it has one.
        schedules: to choose from, names or aliases, or one of these; those without a flush ("2bw", "paci", "pipedream")
            change the training. Stages may be on the ranks in turn, or back and forth as under "zb-v", not on two
            ranks each ("chimera"). Those that split the backward are simulated with halves of the profile's, so they
            are not among the default ones; they, and those of several stages a rank, run in orders made for the costs
            of their cuts; "eager-1f1b" holds more than "1f1b" and gains over slow links alone.
            "terapipe" and "seq1f1b" cut sequences into slices (`Model.slicings` says which are tried), on one tensor
            rank, with nothing recomputed; they need a causal model, and a profile that says what a slice costs.
        microbatch_sizes, pipeline_sizes, data_sizes, tensor_sizes: to choose from; None: all that fit together.
        chunk_sizes: V to choose from, 2 or more, under schedules that take any number of stages a rank.
        recompute: what a stage may do about its memory, some of "none", "full", "layer", "selective", "keep_less" and
            "offload" (see `PlanStage`), the last of all, or of the first chunks of a rank's stages, while it
            keeps the rest; of what fits, the simulation decides. With "none", counts such as "layer:3" are
            allowed, too. None: all that the profiles have figures for, and the last where the cluster knows
            `host_bandwidth`.
        optimizer_sharding: "none", "full" or both: dividing the optimizer's state over the replicas. Of both, the one
            that makes the simulated step shorter, stage by stage where memory is short.
        optimizer_bytes: of optimizer state a byte of parameters; None: as the profile says, or 2 (Adam).
        max_grad_norm: to which the run clips gradients: then all ranks wait for the global norm before the updates
            of a batch that is flushed, for as long as a sum over them all takes. 0: they do not; None: as the profile
            says, or not.
        runnable: only what the runtime executes: numbers of tensor ranks that divide the devices, and no idle devices
            without a flush. Otherwise plans may need some of the devices alone.
        num_runners_up: to name in the plan.
        max_simulated: configurations to simulate at most; `Plan.searched` says what the rest may gain at most.
        seconds: to search for, or a little longer, until something is found; likewise. None: until nothing left can
            win. With it the same input may give another plan. Of a joint search as many more, of CPU time; 20 by
            default.
        max_cuts: beyond which a graph is simplified, see `all_cuts`.
        search: "named", among schedules by name; "joint": then for cut, placement and order of a chain at once
            (`synthesize_jointly`), with any number of stages on each of all devices, one replica, no tensor ranks,
            and nothing recomputed. The better of the two is returned; a note says which won, and by how much.
        progress: called with a `Searched` and the best seconds so far.
        on_runners_up: called with those that are named, each as the plan that it would be, the better ones first.

    The best configuration is searched best first by lower bounds; see `search` for what that proves. Those with unequal
    replicas that `solve.dynamic` finds are among them. Ties (to nine digits): fewest devices, then the least tensor,
    pipeline and V, the largest microbatch, the first name of a schedule, the least memory, the earliest cuts. Same
    input, same plan.

    Raises ValueError for options that do not fit, and where nothing fits the memory: what came nearest, how many bytes
    are too many, and what would make it fit.

    >>> from stagewright.partition import Cluster, Node, Profile
    >>> nodes = [Node(name=n, forward_seconds=1, backward_seconds=2, parameter_bytes=1) for n in "abcd"]
    >>> found = plan(Profile(nodes=nodes), Cluster.from_levels([(4, 1e9)]), global_batch=8)
    >>> found.replicas, round(found.simulated_step_time, 6)
    ((4,), 24.0)
    """
    global_batch, given = count("global_batch", global_batch), as_source(source, cluster)
    sizes, named = sizes_to_try(given, global_batch, microbatch_sizes), schedules_with_chunks(schedules, chunk_sizes)
    refuse_endless("global_batch", global_batch, dict(named), cluster.num_devices, largest=sizes[-1])
    allowed, sharding = treatments(recompute, cluster), choices("optimizer_sharding", optimizer_sharding, SHARDING)
    taken, order = figure("seconds", seconds), canonical_order(cluster)
    topology = Topology(cluster.reordered(order), memory_limit=figure("memory_limit", memory_limit))
    joint = (taken or JOINT_SECONDS) if option("search", search, one_of(SEARCHES)) == "joint" else None
    space = partial(
        SearchSpace,
        num_devices=cluster.num_devices,
        global_batch=global_batch,
        schedules=named,
        microbatch_sizes=sizes,
        pipeline_sizes=counts("pipeline_sizes", pipeline_sizes),
        data_sizes=counts("data_sizes", data_sizes),
    )

    def searched(source: ProfileSource, share: float) -> _Found:
        tensors = tensor_sizes_of(source, cluster, tensor_sizes)
        model_of = models_of(source, figure("optimizer_bytes", optimizer_bytes), allowed, sharding, max_cuts)
        models = [model_of(size, tensors[0]) for size in sizes]
        refuse_unknown([model.profile for model in models], () if recompute is None else allowed)
        own = space(tensor_sizes=tensors, max_stages=max(m.max_stages for m in models), slicings=_slicings(model_of))
        one = source.profile(microbatch_size=sizes[0], tensor=1 if 1 in tensors else tensors[0])
        evaluator = PlanEvaluator(topology, model_of, norm=norm_seconds(max_grad_norm, one, topology))
        most = count("max_simulated", max_simulated)
        until = None if taken is None else share * taken
        planner = PlanSearch(evaluator, wanted=num_runners_up + 1, max_simulated=most, seconds=until, progress=progress)
        return planner, distinct(_found(planner, own, order, runnable=runnable, joint=joint)), one

    best, notes, every = _best(given, searched)
    ranked = partial(_ranked, best, order=order, wanted=num_runners_up, joint=joint, notes=notes, searched=every)
    if on_runners_up is not None:
        on_runners_up([ranked(at=at) for at in range(1, min(len(best[1]), num_runners_up + 1))])
    return ranked(at=0)


class _NothingFitsError(ValueError):
    """No configuration, where there are some."""


def _best(
    source: ProfileSource, searched: Callable[[ProfileSource, float], _Found]
) -> tuple[_Found, list[str], Searched]:
    """The best outcome over the source's alternatives, which share the seconds of the search equally; notes of the
    others, and how far all were searched."""
    given = [*source.alternatives()] if isinstance(source, SourceWithAlternatives) else [("", source)]
    every, said = list[tuple[str, _Found]](), dict[str, str]()
    refusal: ValueError | None = None
    for name, each in given:
        try:
            every.append((name, searched(each, 1 / len(given))))
        except ValueError as error:
            said[name] = str(error)
            refusal = error if refusal is None or isinstance(error, _NothingFitsError) else refusal
        else:
            said[name] = f"{duration(_seconds(every[-1]))} a batch"
    if refusal is not None and not every:
        raise refusal
    chosen, best = min(every, key=_seconds)
    notes = [f"with {name}: {result}" for name, result in said.items() if name not in ("", chosen)]
    return best, notes, Searched.of_all([search.searched for _, (search, *_) in every])


def _seconds(outcome: tuple[str, _Found]) -> float:
    return outcome[1][1][0].simulated_seconds


def _slicings(model_of: Callable[[int, int], Model]) -> Callable[[Configuration], Iterator[Configuration]]:
    return lambda whole: model_of(whole.microbatch_size, 1).slicings(whole)


def models_of(
    source: ProfileSource,
    ratio: float | None,
    recompute: tuple[str, ...],
    sharding: tuple[str, ...],
    max_cuts: int,
) -> Callable[[int, int], Model]:
    @cache
    def model_of(microbatch_size: int, tensor: int) -> Model:
        profile = source.profile(microbatch_size=microbatch_size, tensor=tensor)
        known = ADAM_BYTES if profile.optimizer_ratio is None else profile.optimizer_ratio
        rules = MemoryRules(
            optimizer_ratio=known if ratio is None else ratio,
            recompute=tuple(each for each in recompute if each != OFFLOAD and profile.knows(each)) or ("none",),
            sharding=sharding,
            offloads=OFFLOAD in recompute,
        )
        return Model(profile, rules, max_cuts=max_cuts)

    return model_of


def _found(
    search: PlanSearch, space: SearchSpace, order: Sequence[int], *, runnable: bool, joint: float | None
) -> list[Candidate]:
    """Configurations with their cuts, simulated, the best first; ValueError where nothing fits. `joint`: seconds of a
    joint search besides; None: there is none."""
    if joint is not None:
        refuse_joint(space, search.evaluator)
    evaluator, unequal, layouts = search.evaluator, [], []
    first = evaluator.model_of(space.microbatch_sizes[0], space.tensor_sizes[0])
    _refuse_slices(space, first.rules.recompute)
    cluster, names = evaluator.topology.cluster, [name for name, _ in space.schedules]
    runs = Runs(
        num_devices=cluster.num_devices,
        order=order,
        node_size=cluster.levels[0].size,
        runnable=runnable,
        context=first.profile.context,
        expert=first.profile.expert,
    )
    is_open = space.data_sizes is None and space.pipeline_sizes is None
    if is_open and 1 in space.tensor_sizes and first.profile.expert == 1:  # else replicas are multiples of it
        for size, name in product(space.microbatch_sizes, filter(SCHEDULES_WITH_REPLICAS.__contains__, names)):
            model, num_microbatches = evaluator.model_of(size, 1), space.global_batch // size
            sizes: dict[str, int] = {"microbatch_size": size, "num_microbatches": num_microbatches}
            find = partial(_unequal, model, evaluator.topology, schedule=name, runs=runs, **sizes)
            least = search.bounds.of_schedule(name, model, num_microbatches)
            outside = search.bounds.outside_pipeline(name, model)
            unequal.append((least, find))
            layouts.append((least, partial(uneven_layouts, evaluator.topology, model, outside, schedule=name, **sizes)))
    models = ([evaluator.model_of(size, tensor) for tensor in space.tensor_sizes] for size in space.microbatch_sizes)
    if first.profile.expert > 1 or not all(map(alike, models)):
        space = replace(space, mixed_sizes=False)
    every = replace(space, all_layouts=True)

    def is_new(c: Configuration) -> bool:
        plain = replace(c, ranks=None)
        listed = () if c.batch % c.data else (plain, replace(plain, by_replica=True))
        return runs(c) and (not c.is_equal or c.ranks not in [tuple(map(tuple, each.stage_ranks)) for each in listed])

    found = search.run(filter(runs, in_all_orders(space, cluster)), unequal) or search.run(
        filter(runs, in_all_orders(every, cluster)), []
    )
    found = search.with_orders(search.improve_with_layouts(found, layouts, is_new))
    if joint is not None:
        found = with_joint(search, space, found, seconds=joint)
    if not found:
        raise _NothingFitsError(_why_nothing(search, space, runnable=runnable))
    return with_pairs(evaluator, found, runnable=runnable)


def _ranked(
    outcome: _Found,
    *,
    at: int,
    order: Sequence[int],
    wanted: int,
    joint: float | None,
    notes: Sequence[str],
    searched: Searched,
) -> Plan:
    """The plan that was found at place `at`, with the others as its runners-up."""
    search, found, one = outcome
    best, topology, says_size = found[at], search.evaluator.topology, one.microbatch_size is not None
    notes = [f"{CHOSEN}{label(best)}", *gain(found, best), *best.model.notes, *notes]
    if not says_size:
        notes.append("the profile does not say its microbatch size: a sample of the batch is what it ran at once")
    if joint is not None:
        notes.append(verdict(found))
    if search.refused:
        notes.append(f"{len(search.refused)} left out, whose schedule does not run, such as {search.refused[0]}")
    return as_plan(
        [best, *found[:at], *found[at + 1 :]],
        topology,
        order=order,
        bound=search.evaluator.work_of_all(best.configuration) / topology.total_speed,
        says_size=says_size,
        num_runners_up=wanted,
        notes=notes,
        searched=searched,
    )


def norm_seconds(max_grad_norm: float | None, one: Profile, topology: Topology) -> float | None:
    """Seconds of a small sum over all devices, where gradients are clipped, as the profile says unless given [s]."""
    clips_to = one.max_grad_norm if max_grad_norm is None else max_grad_norm
    if clips_to is None or number("max_grad_norm", clips_to) == 0:
        return None
    return topology.small_sum(range(topology.num_devices))


def in_all_orders(space: SearchSpace, cluster: Cluster) -> Iterator[Configuration]:
    """Every configuration, the same with each replica in a row, so that messages stay on its nodes and sums leave
    them (of many devices where it is on one), and along other orders of unequal nodes; of many orders the slow ones
    last."""
    size, inner = cluster.levels[0].size, cluster.num_devices // cluster.levels[-1].size
    is_uniform = len(cluster.used_kinds) == 1 and not cluster.node_links
    given = tuple(range(len(cluster.nodes or ())))
    orders = node_orders(cluster)[0]
    if len(orders) > MAX_ORDERS:
        orders = [given, given[::-1]]
    for configuration in space.configurations():
        yield configuration
        c = configuration
        lies_alike = is_uniform and inner <= c.tensor  # any two groups are as far apart as any others
        is_near = c.num_devices <= ALL_SIZES or size % (c.pipeline * c.tensor) == 0
        if c.num_devices > size and min(c.data, c.pipeline) > 1 and c.sizes is None and is_near and not lies_alike:
            yield replace(c, by_replica=True)
        for order in orders if configuration.sizes is None else ():
            if order != given:
                ranks = tuple(own_ranks(order, size, each) for each in configuration.stage_ranks)
                yield replace(configuration, ranks=ranks)


def _unequal(
    model: Model, topology: Topology, *, schedule: str, microbatch_size: int, num_microbatches: int, runs: Runs
) -> Iterator[tuple[Configuration, Ends]]:
    """The dynamic program's candidates with the memory limit, and without it where recomputation or shards make room.

    One with equal replicas is that of the enumeration, with other cuts.
    """
    has_limit = bool(np.isfinite(topology.memory_bytes).any())
    makes_room = model.rules.offloads or {*model.rules.recompute, *model.rules.sharding} != {"none"}
    for memory_limit in (topology.memory_limit, math.inf) if has_limit and makes_room else (topology.memory_limit,):
        try:
            every, _, _ = candidates(
                model,
                topology.cluster,
                schedule=schedule,
                microbatch_size=microbatch_size,
                num_microbatches=num_microbatches,
                memory_limit=memory_limit,
                wanted=CANDIDATES,
            )
        except TooLargeError:
            return
        for configuration, ends in every:
            has_work = max(configuration.counts) <= configuration.batch
            is_short = 2 * configuration.pipeline * configuration.batch <= MAX_ACTIONS
            if has_work and is_short and runs(configuration):
                plain = replace(configuration, ranks=None)
                same = configuration.is_equal and tuple(map(tuple, plain.stage_ranks)) == configuration.ranks
                yield plain if same else configuration, ends


def _refuse_slices(space: SearchSpace, allowed: Sequence[str]) -> None:
    """ValueError for schedules over slices where nothing that is allowed goes with them."""
    sliced = [name for name, _ in space.schedules if family(name).takes_slices]
    if sliced and ("none" not in allowed or 1 not in space.tensor_sizes):
        raise ValueError(
            f"schedules: {sliced[0]!r} with recompute={', '.join(allowed)} and tensor_sizes="
            f"{listed(space.tensor_sizes)}: expected 'none' and 1 among them, all that slices go with"
        )


def _why_nothing(search: PlanSearch, space: SearchSpace, *, runnable: bool) -> str:
    if search.miss is None:
        sizes = {"pipeline_sizes": space.pipeline_sizes, "data_sizes": space.data_sizes}
        given = [f"{name}={listed(values)}" for name, values in sizes.items() if values is not None]
        asked = f" with {' and '.join(given)}" if given else ""
        refused = f" ({search.refusal})" if search.refusal is not None else ""
        runs = "; or runnable=False, where tensor groups and streams may leave devices over" if runnable else ""
        return (
            f"no configuration of a batch of {space.global_batch} on {space.num_devices} devices{asked}{refused}: "
            f"expected sizes whose product is at most {space.num_devices}, with replicas that divide the microbatches, "
            f"at most {space.max_stages} stages, and enough microbatches for the schedule{runs}"
        )
    c, miss = search.miss
    ranks = c.stage_ranks[miss.stage_group]
    needed, most = math.ceil(miss.limit + miss.too_many), math.floor(miss.limit)
    one, rules = search.evaluator.model(c).profile, search.evaluator.model(c).rules
    shape = c.label(context=one.context, expert=one.expert)
    besides = context_bytes(one.device)
    kept = f" ({besides:,.0f} of them besides tensors, for the device's context)" if besides else ""
    allowed = (("recompute", rules.recompute), ("optimizer sharding", rules.sharding))
    tried = [what for what, names in allowed if set(names) != {"none"}]
    done = f" (allowed: {', '.join(tried)})" if tried else ", with nothing recomputed and no optimizer sharded"
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
    return (
        f"nothing fits the memory: nearest is {shape}, which on {where} needs {needed:,} "
        f"bytes{kept} of {most:,}, {needed - most:,} too many{done}: expected devices with "
        f"that much memory, more devices, a smaller microbatch, or an optimizer with less state"
    )
