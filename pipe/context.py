"""Context of a running pipeline: its layout, which schedule runs where, and the context of one process's run.

options  name or Schedule, mesh, split points, recompute -+
                                                           +-> Layout -> build
plan     stages by node, ranks, schedule, recompute ------+
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ..comm import BACKEND, Collectives, Guard, MeshPlace, ProcessMesh, World, read_mesh
from ..partition.deferred.recipes import value_of
from ..partition.plans.plan import Plan
from ..partition.stage_cost import OFFLOAD
from ..schedules import Schedule, build, canonical_name
from ..schedules.custom.user_schedules import find_user_schedule, sizes_of
from ..schedules.transform import on_ranks, replicate
from .addition import Addition
from .guards.randomness import Seeder
from .settings.arguments import AUTO, ScheduleLike
from .settings.excludes import REROUTE, check_options, check_reroute
from .settings.options import Options
from .settings.recompute import Recompute, read_recompute
from .shards.exchanges import Exchanges
from .shards.shard import Sharding, sharding_of, sharding_over
from .shards.tensor_group import TensorGroup
from .telling import tell, tell_of_one_rank

DEFAULT_SCHEDULE = "1f1b"
_SIZES = {"num_microbatches": "{}", "num_chunks": "{} stages per rank", "num_slices": "{} slices per microbatch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A schedule, and how its ranks run it.

    Arguments:
        schedule: over all replicas.
        plan: the plan of the layout, if any: then its nodes determine where the model is cut.
        recompute: what is computed again in the backward.
        sharding: what the ranks that hold a stage divide among themselves.
        place: this process's position on the mesh, and its ranks of the schedule.
        adds: makers of the additions to a run.
    """

    schedule: Schedule
    plan: Plan | None
    recompute: Recompute
    sharding: Sharding
    place: MeshPlace
    adds: tuple[Callable[[Run], Addition], ...] = ()


class Run:
    """Context of one process's pipeline, of a model or of stages. Collective over the processes.

    Attributes:
        root: the module that contains the model or the stages.
        verifies: whether there is a copy of the plain model to verify with, or of a unit at a time (`by_unit`).
        evaluates: whether stages are made for evaluation, too, when they are built; else for the first evaluation.
        added: the additions to the run.
        exchanges: what runs while members of a stage exchange something.
        spares_memory: whether the model was built without memory: then freed memory is returned to the system.
        inside: name of the user's code that runs within a step, and may not call the pipeline, if any.
    """

    def __init__(
        self, layout: Layout, options: Options, guard: Guard, *, verifies: bool = False, evaluates: bool = True
    ) -> None:
        self.layout = layout
        self.options = options
        self.guard = guard
        self.root = options.root
        self.spares_memory = any(value_of(parameter) is not None for parameter in options.root.parameters())
        self.verifies, self.by_unit = verifies, False
        self.evaluates = evaluates
        self.inside: str | None = None
        device, timeout, place = options.device, options.timeout, layout.place
        self.collectives = Collectives(place, device=device, timeout=timeout, guard=guard)
        guard.on_failure(self.collectives.abort)
        self._check_backend()
        runs_again = layout.recompute.runs_again
        self.seeder = Seeder(options.seed, device, runs_again=runs_again, member=place.tensor[0])
        self.exchanges = Exchanges(self.seeder)
        self.added = [make(self) for make in layout.adds]

    def _check_backend(self) -> None:
        """ValueError for what NCCL, or gloo on CUDA, can't do here; a message where processes share a GPU."""
        groups, place, device = self.collectives.groups, self.layout.place, self.options.device
        if groups.is_staged and max(*place.mesh.tensor_sizes, place.mesh.expert) > 1:
            raise ValueError(
                f"a tensor or expert group on {device.type.upper()} over gloo, through the host's memory: expected "
                f"Mesh(tensor=1, expert=1), or one device per process and NCCL"
            )
        if groups.backend == "nccl" and place.world.distributed and self.options.mesh.on_failure == REROUTE:
            raise ValueError(
                f'Mesh(on_failure="reroute") with NCCL, whose groups were never broken: expected {BACKEND}=gloo in '
                f'the environment, or on_failure="stop"'
            )
        if groups.sharing:
            tell(
                f"{place.names_of(groups.sharing)} share one GPU: messages go over gloo, through the host's memory, "
                f"not over NCCL. To give each process its own GPU, leave the model on the CPU and write "
                f'PipelineModule(..., device="cuda")',
                rank=place.world.rank,
            )

    @property
    def has_loss(self) -> bool:
        return self.options.loss_fn is not None

    @property
    def context_group(self) -> TensorGroup | None:
        """The processes with the other tokens of this one's sequences; None: it has them all."""
        index, count = self.layout.place.context
        if count == 1:
            return None
        group = self.collectives.group_of(self.collectives.context_members)
        return TensorGroup(group, index=index, count=count, exchanges=self.exchanges)

    @property
    def num_replicas(self) -> int:
        return self.layout.place.replica[1]

    @property
    def local_stages(self) -> list[int]:
        placement = self.layout.schedule.placement
        return sorted({stage for rank in self.layout.place.local_ranks for stage in placement[rank]})


def choose_layout(options: Options) -> Callable[[World], Layout] | None:
    """Maker of the layout; None: schedule="auto", which the first batch decides. Raises ValueError for options that
    exclude each other."""
    check_options(options)
    schedule = DEFAULT_SCHEDULE if options.schedule is None else options.schedule
    if isinstance(schedule, Plan):
        return partial(layout_of_plan, schedule, num_microbatches=options.num_microbatches)
    return None if schedule == AUTO else layout_of_schedule(schedule, options)


def layout_of_plan(plan: Plan, world: World, *, num_microbatches: int | None) -> Layout:
    """Layout of a plan. All ranks pass the same batch, with any replicas. Raises ValueError for a plan for another
    number of processes, and for what the runtime does not support."""
    if world.distributed and plan.num_devices != world.size:
        raise ValueError(
            f"the plan is for {plan.num_devices} ranks and the process group has {world.size}: expected a plan for "
            f"{world.size} (stagewright plan --cluster ...), or start {plan.num_devices} processes "
            f"(torchrun --nproc-per-node {plan.num_devices})"
        )
    schedule = plan.build_schedule(num_microbatches=num_microbatches)
    is_grouped = plan.context * plan.expert > 1
    if plan.tensor > 1 and not is_grouped and not world.distributed:
        raise ValueError(
            f"the plan splits tensors over {plan.tensor} ranks, which are processes: expected {plan.num_devices} of "
            f"them (torchrun --nproc-per-node {plan.num_devices}), or a plan with tensor=1"
        )
    sizes = tuple(map(len, plan.tensor_groups))
    if over := plan.num_devices - sum(sizes):
        raise ValueError(
            f"the plan splits tensors over groups of {plan.tensor} of its {plan.num_devices} ranks, which leaves "
            f"{over} in no group: expected a number that {plan.tensor} divides (plan(runnable=True) finds only such)"
        )
    is_even = len({*sizes}) == 1
    if not is_even and schedule.is_asynchronous:
        raise ValueError(
            f"the plan splits tensors over {' and '.join(map(str, sorted({*sizes})))} ranks under the asynchronous "
            f"schedule {schedule.name!r}: expected one size for all stages, or a flush schedule such as '1f1b'"
        )
    idle = [rank for rank, stages in enumerate(schedule.placement) if not stages]
    if idle and schedule.is_asynchronous:
        raise ValueError(
            f"the plan leaves rank {idle[0]} idle under the asynchronous schedule {schedule.name!r}: expected a plan "
            f"that uses all {plan.num_devices} ranks (plan(runnable=True)), or a flush schedule such as '1f1b'"
        )
    mesh = ProcessMesh(pipe=len(sizes), tensor=sizes[0] if is_even else sizes)  # it need not know replicas
    if is_grouped:
        schedule, mesh = _on_mesh(plan, schedule, world)
    shards = [s.optimizer_shards * (plan.context if s.optimizer_shards > 1 else 1) for s in plan.stages]  # of all alike
    return Layout(
        schedule=schedule,
        plan=plan,
        # Moves to the host are in the schedule.
        recompute=Recompute(stages=tuple("none" if s.recompute == OFFLOAD else s.recompute for s in plan.stages)),
        sharding=sharding_over(shards, world),
        place=MeshPlace(world=world, mesh=mesh, shares_batch=True),
    )


def _on_mesh(plan: Plan, schedule: Schedule, world: World) -> tuple[Schedule, ProcessMesh]:
    """The schedule and mesh of a plan that divides sequences or experts. The members of a context group are replicas of
    each rank of the plan's schedule; those of an expert group are some of its replicas, on the same part of sequences.
    All run the same actions in one order, so that they meet in attention and in layers of experts. Raises ValueError
    for a plan of other ones."""
    count, experts, replicas, M = plan.context, plan.expert, plan.stages[0].replicas, schedule.num_microbatches
    what, members = ("sequences", count) if count > 1 else ("experts", experts)
    groups = {axis: size for axis, size in {"context": count, "expert": experts}.items() if size > 1}
    if not world.distributed:
        raise ValueError(
            f"the plan divides {what} over {members} ranks, which are processes: expected {plan.num_devices} of "
            f"them (torchrun --nproc-per-node {plan.num_devices}), or a plan with {next(iter(groups))}=1"
        )
    size, width = plan.num_devices, plan.tensor
    is_even = {(stage.replicas, stage.tensor) for stage in plan.stages} == {(replicas, width)}
    is_even = is_even and size == replicas * width * len(plan.firsts) and not M % replicas and not width % count
    is_even = is_even and not replicas % experts
    axes = {"pipe": len(plan.firsts), "data": replicas // experts, "tensor": width // count, **groups}
    blocks = {tuple(range(first, first + replicas)) for first in range(0, size // width, replicas)}
    parts = [*range(0, count * experts, experts)]
    for order in ("pipe data expert context tensor", "data expert pipe context tensor") if is_even else ():
        mesh = ProcessMesh(**axes, order=tuple(order.split()))
        firsts = [mesh.rank_of(first) for first in range(0, size, width)]
        ranks = [first // (count * experts) * experts + first % experts for first in firsts]
        found = on_ranks(schedule, ranks, num_ranks=len(ranks))
        if {*found.owners} == blocks:
            places = [r // experts * count * experts + r % experts + part for r in range(len(ranks)) for part in parts]
            return on_ranks(replicate(found, count), places, num_ranks=len(places)), mesh
    said = " and ".join(f"{axis}={number}" for axis, number in groups.items())
    raise ValueError(
        f"a plan with {said}, {plan.replicas} replicas, tensor={width} and {M} microbatches: expected a "
        f"multiple of {count} for tensor, and as many replicas of each stage, in a row or pipeline by pipeline, whose "
        f"number is a multiple of {experts} and divides the microbatches (plan(runnable=True))"
    )


def layout_of_schedule(schedule: ScheduleLike, options: Options) -> Callable[[World], Layout]:
    """Maker of the layout of a pipeline's schedule, with the mesh's number of replicas, for a world. Over several
    processes each replica passes its own batch; in one process one batch is divided among them. Raises ValueError at
    once, before the rendezvous, for a name or a file that does not exist."""
    sizes, mesh = options.sizes, options.mesh
    own = find_user_schedule(schedule, option="schedule=")
    given = dict(zip(_SIZES, (options.num_microbatches, options.num_chunks, options.slices.num_slices), strict=True))
    whole: Schedule | None = None
    if own is None:
        canonical_name(str(schedule))
    elif not own.takes_ranks:
        whole = own.build(given)

    def make(world: World) -> Layout:
        wanted = None if whole is None else whole.num_ranks
        if own is not None and own.takes_ranks and not own.needs_ranks:
            says_ranks = world.distributed or "pipe" in (sizes or {})
            wanted = wanted if says_ranks else own.build(given).num_ranks
        axes = read_mesh(sizes, world, wanted=wanted, order=mesh.order)
        asked = {size: number for size, number in given.items() if number is not None} | {"num_ranks": axes.pipe}
        if sizes is None and axes.num_processes == 1 and not world.distributed:
            tell_of_one_rank()
        otherwise = {"num_microbatches": 2 * axes.pipe}
        if own is None:
            one = build(str(schedule), **(otherwise | asked))
        else:
            one = own.build(otherwise | asked if own.needs_ranks else asked) if whole is None else whole
            _check_sizes(one, asked)
        replicated, reroutes, members = (
            replicate(one, axes.num_replicas),
            mesh.on_failure == REROUTE,
            max(axes.tensor_sizes),
        )
        if reroutes:
            check_reroute(options, replicated, num_replicas=axes.data, tensor=members)
        layout = Layout(
            schedule=replicated,
            plan=None,
            recompute=read_recompute(options.recompute, one.num_stages),
            sharding=sharding_of(mesh.data_parallel, replicated, world),
            # A rank that takes over a microbatch needs its samples: replicas share one batch, without an axis of data.
            place=MeshPlace.line(world) if reroutes and world.distributed else MeshPlace(world=world, mesh=axes),
        )
        for axis, size in {"context": axes.context, "expert": axes.expert}.items():
            if size > 1 and float in map(type, layout.recompute.stages):
                raise ValueError(
                    f'mesh={{"{axis}": {size}}} with recompute= of a budget, which members would meet in different '
                    f'ways: expected "{axis}": 1, or what to compute again by name'
                )
        if members > 1 and mesh.tensor_parallel is None:
            raise ValueError(
                f"a tensor group of {members} processes without tensor_parallel=: all of them would do the "
                f"same. Expected tensor_parallel='auto', or {{'blocks.*.up': 'column', 'blocks.*.down': 'row'}}"
            )
        return layout

    return make


def _check_sizes(whole: Schedule, asked: Mapping[str, int]) -> None:
    has = sizes_of(whole)
    for size, number in asked.items():
        if number == has[size]:
            continue
        if size == "num_ranks":
            raise ValueError(
                f'mesh={{"pipe": {number}}} for a schedule of {has[size]} ranks: expected mesh={{"pipe": {has[size]}}}'
            )
        raise ValueError(
            f"{size}={number} for a schedule of {_SIZES[size].format(has[size])}: expected {has[size]}, or leave it out"
        )
