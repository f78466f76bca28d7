"""Layout of a run, which schedule runs where: from the options of PipelineModule, or from a plan.

options  name or Schedule, mesh, split points, recompute -+
                                                           +-> Layout -> assembly
plan     stages by node, ranks, schedule, recompute ------+
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..comm import Mesh, MeshPlace, World, read_mesh
from ..partition.plans.plan import Plan
from ..schedules import Schedule, build, canonical_name
from ..schedules.builders.replicas import replicate
from ..schedules.text import read_schedule
from .model_options import refuse_beside
from .parallel.sends import NO_TENSOR_AXIS, TensorAxis
from .parallel.sharding import Sharding, check_data_parallel, sharding_of, sharding_of_plan
from .stages.recompute import Recompute, RecomputeLike, read_recompute

AUTO = "auto"
DEFAULT_SCHEDULE = "1f1b"

ScheduleLike = str | os.PathLike[str] | Schedule
PlanLike = Plan | str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A schedule, and how the model is cut for it.

    Arguments:
        schedule: over all replicas.
        split_points: of the user; None: even weights, or the plan's nodes.
        plan: where it came from, if from one.
        recompute: what is computed again in the backward.
        sharding: what the ranks that hold a stage divide among themselves.
        place: where this process stands, and which of the schedule's ranks it runs.
        tensor: options of the tensor axis.

    Raises ValueError for a tensor group that divides nothing.
    """

    schedule: Schedule
    split_points: Sequence[str] | None
    plan: Plan | None
    recompute: Recompute
    sharding: Sharding
    place: MeshPlace
    tensor: TensorAxis = NO_TENSOR_AXIS

    def __post_init__(self) -> None:
        self.tensor.check(self.place)


def choose_layout(
    *,
    schedule: ScheduleLike | None,
    plan: PlanLike | None,
    mesh: Mapping[str, int] | str | None,
    num_microbatches: int | None,
    num_chunks: int | None,
    num_slices: int | None,
    split_points: Sequence[str] | None,
    stages: Sequence[object] | None,
    recompute: RecomputeLike,
    data_parallel: str,
    mesh_order: Sequence[str] | None = None,
    tensor: TensorAxis = NO_TENSOR_AXIS,
) -> Callable[[World], Layout] | None:
    """Maker of the layout from options of PipelineModule; None: under schedule="auto" the first batch decides.

    Raises ValueError for options that exclude each other.
    """
    sizes = mesh_sizes(mesh)
    decided: dict[str, object] = {"num_chunks": num_chunks, "num_slices": num_slices, "split_points": split_points}
    decided["stages"] = stages
    check_data_parallel(data_parallel)
    decided |= {"recompute": None if recompute == "none" else recompute}
    decided |= {"data_parallel": None if data_parallel == "replicate" else data_parallel}
    if plan is not None:
        refuse_beside("plan=", {**decided, "schedule": schedule, "mesh": sizes, "mesh_order": mesh_order})
        return partial(layout_of_plan, read_plan(plan), num_microbatches=num_microbatches, tensor=tensor)
    if schedule == AUTO:
        members = (sizes or {}).get("tensor", 1)
        refuse_beside('schedule="auto"', {**decided, "mesh_order": mesh_order})
        if members != 1:
            raise ValueError(
                f'mesh={{"tensor": {members}}} beside schedule="auto", which measures whole modules: expected '
                f'"tensor": 1, or a schedule by name'
            )
        return None
    return layout_of_options(
        DEFAULT_SCHEDULE if schedule is None else schedule,
        mesh=sizes,
        mesh_order=mesh_order,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        num_slices=num_slices,
        split_points=split_points,
        recompute=recompute,
        data_parallel=data_parallel,
        tensor=tensor,
    )


def mesh_sizes(mesh: Mapping[str, int] | str | None) -> Mapping[str, int] | None:
    """Sizes by axis; None where the number of processes decides. ValueError for another word than "auto"."""
    if isinstance(mesh, str) and mesh != AUTO:
        raise ValueError(f'mesh={mesh!r}: expected "auto", or sizes by axis, as in mesh={{"pipe": 2}}')
    return None if isinstance(mesh, str) else mesh


def layout_of_plan(
    plan: Plan, world: World, *, num_microbatches: int | None, tensor: TensorAxis = NO_TENSOR_AXIS
) -> Layout:
    """Layout that a plan asks for. All ranks pass the same batch, whatever replicas there are.

    Arguments:
        tensor: options of the tensor axis; where the plan splits tensors, "auto" says how, unless they do.

    Raises ValueError for a plan for another number of processes, and for what the runtime does not do.
    """
    if world.distributed and plan.num_devices != world.size:
        raise ValueError(
            f"the plan is for {plan.num_devices} ranks and the process group has {world.size}: expected a plan for "
            f"{world.size} (stagewright plan --cluster ...), or start {plan.num_devices} processes "
            f"(torchrun --nproc-per-node {plan.num_devices})"
        )
    schedule = plan.build_schedule(num_microbatches=num_microbatches)
    if plan.tensor > 1 and not world.distributed:
        raise ValueError(
            f"the plan splits tensors over {plan.tensor} ranks, which are processes: expected {plan.num_devices} of "
            f"them (torchrun --nproc-per-node {plan.num_devices}), or a plan with tensor=1"
        )
    if plan.tensor > 1 and tensor.parallel is None:
        tensor = replace(tensor, parallel=AUTO)
    idle = [rank for rank, stages in enumerate(schedule.placement) if not stages]
    if idle and schedule.is_asynchronous:
        raise ValueError(
            f"the plan leaves rank {idle[0]} idle under the asynchronous schedule {schedule.name!r}: expected a plan "
            f"that uses all {plan.num_devices} ranks, or a flush schedule such as '1f1b'"
        )
    return Layout(
        schedule=schedule,
        split_points=None,
        plan=plan,
        recompute=Recompute(stages=tuple(stage.recompute for stage in plan.stages)),
        sharding=sharding_of_plan([stage.optimizer_shards for stage in plan.stages], world),
        # Replicas share one batch: no axis of data.
        place=MeshPlace(world=world, mesh=Mesh(pipe=schedule.num_ranks, tensor=plan.tensor)),
        tensor=tensor,
    )


def layout_of_options(
    schedule: ScheduleLike,
    *,
    mesh: Mapping[str, int] | None,
    mesh_order: Sequence[str] | None,
    num_microbatches: int | None,
    num_chunks: int | None,
    num_slices: int | None,
    split_points: Sequence[str] | None,
    recompute: RecomputeLike,
    data_parallel: str,
    tensor: TensorAxis,
) -> Callable[[World], Layout]:
    """Layout of a schedule of one pipeline, with as many replicas side by side as the mesh has, for a world.

    Over several processes each replica passes a batch of its own; in one process the one batch is shared out.
    A name or a file that does not exist is refused at once, before anybody looks for other ranks.
    """
    whole = _whole_schedule(schedule)
    if whole is None:
        canonical_name(str(schedule))

    def make(world: World) -> Layout:
        axes = read_mesh(mesh, world, wanted=None if whole is None else whole.num_ranks, order=mesh_order)
        one = _build_schedule(
            str(schedule),
            whole,
            num_ranks=axes.pipe,
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
            num_slices=num_slices,
        )
        replicated = replicate(one, axes.data)
        return Layout(
            schedule=replicated,
            split_points=split_points,
            plan=None,
            recompute=read_recompute(recompute, one.num_stages),
            sharding=sharding_of(data_parallel, replicated, world),
            place=MeshPlace(world=world, mesh=axes),
            tensor=tensor,
        )

    return make


def read_plan(plan: PlanLike) -> Plan:
    """A plan that was given whole, or from a file."""
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | os.PathLike):
        raise ValueError(f"plan={plan!r:.60}: expected a Plan, or the name of a .json file")
    try:
        return Plan.load(Path(plan))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"plan file {str(plan)!r} cannot be read: {error}") from None


def _whole_schedule(schedule: ScheduleLike) -> Schedule | None:
    """A schedule that was given whole: itself, or from a file. None: it is a name."""
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str | os.PathLike):
        raise ValueError(f"schedule={schedule!r}: expected a name, a Schedule, or a .csv or .json file")
    path = Path(schedule)
    if isinstance(schedule, str) and path.suffix not in (".csv", ".json"):
        return None
    return read_schedule(path)


def _build_schedule(
    name: str,
    whole: Schedule | None,
    *,
    num_ranks: int,
    num_microbatches: int | None,
    num_chunks: int | None,
    num_slices: int | None,
) -> Schedule:
    """The schedule of one pipeline; sizes beside a schedule that already has them must agree."""
    if whole is None:
        return build(
            name,
            num_ranks=num_ranks,
            num_microbatches=2 * num_ranks if num_microbatches is None else num_microbatches,
            num_chunks=num_chunks,
            num_slices=num_slices,
        )
    if num_slices is not None and num_slices != whole.num_slices:
        raise ValueError(
            f"num_slices={num_slices} for a schedule of {whole.num_slices} slices a microbatch: expected "
            f"{whole.num_slices}, or leave it out"
        )
    if num_microbatches is not None and num_microbatches != whole.num_microbatches:
        raise ValueError(
            f"num_microbatches={num_microbatches} for a schedule of {whole.num_microbatches}: "
            f"expected {whole.num_microbatches}, or leave it out"
        )
    chunks = max(len(stages) for stages in whole.placement)
    if num_chunks is not None and num_chunks != chunks:
        raise ValueError(f"num_chunks={num_chunks} for a schedule with {chunks} stages a rank: expected {chunks}")
    return whole
