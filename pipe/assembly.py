"""Putting a pipeline together: from a model, a layout and a batch to its parts, each complete when it is made.

prepare -> Ground -> place_stages -> Placed -> connect -> Connected -> training, evaluation, verifier, state
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from ..comm import Guard
from ..partition.graph.forms import Arguments
from ..schedules import Schedule, Timeline
from ..schedules.timing.records import RankRecord, as_it_ran
from .connecting import Connected, connect
from .evaluation import Evaluation, warn_of_two_axes
from .layout import Layout
from .makers import Makers
from .measure.measurement import Measurement
from .measure.steps import StepReports
from .measure.tracer import Traced
from .modes import EvaluationModes, StagesOf
from .placing import Ground, Placed, place_stages, prepare
from .replan import BatchOrder
from .run.engine import Engine
from .run.worker import EvaluationWorker, TrainingWorker
from .settings import Settings
from .slicing import SlicedLoss
from .stages.build import CutModel
from .state import State
from .training import Training
from .verify.verification import Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One process's pipeline.

    Arguments:
        schedule: as it runs.
        stage_num_parameters: [S].
        engine: that trains.
        traced: what a tracer looks at.
    """

    schedule: Schedule
    parts: CutModel
    stage_num_parameters: tuple[int, ...]
    engine: Engine
    training: Training
    evaluation: Evaluation
    state: State
    measurement: Measurement
    verifier: Verifier
    traced: Traced


def assemble(
    first: Callable[[], Arguments],
    *,
    model: nn.Module | None,
    stages: Sequence[nn.Module] | None,
    layout: Layout,
    settings: Settings,
    guard: Guard,
    verify: bool,
) -> Pipeline:
    """The pipeline for batches whose microbatches are like this one. Collective over the processes.

    Arguments:
        first: gives arguments of a microbatch; what it refuses, all ranks refuse.
        model, stages: one of them.
        verify: whether to keep a copy of the model for `Verifier`.
        guard: is told how to let go of other ranks.
    """
    ground = prepare(first, model=model, stages=stages, layout=layout, settings=settings, guard=guard, verify=verify)
    placed = place_stages(ground)
    connected = connect(ground, placed)
    makers = Makers(
        layout=layout,
        settings=settings,
        parts=placed.parts,
        local_stages=placed.local_stages,
        seeder=ground.seeder,
        guard=guard,
        collectives=ground.collectives,
        recorders=connected.recorders,
        transports=connected.transports,
        update=connected.update,
        sliced_loss=_sliced_loss(ground, placed),
    )
    _tell_of_two_axes(ground, placed)
    stages_of = makers.stages()
    engine = makers.engine(TrainingWorker, placed.train, connected.update.ranks, stages_of)
    training = Training(
        engine,
        connected.update,
        seeder=ground.seeder,
        reader=makers.reader(placed.train, has_loss=ground.has_loss, like=ground.example),
        guard=guard,
        collectives=ground.collectives,
        unchanged=placed.unchanged,
        reports=StepReports(settings.on_step, rank=layout.place.world.rank, device=settings.device),
        clocks=connected.clocks,
        order=None
        if layout.replan is None
        else BatchOrder(connected.update.schedule, layout.replan, collectives=ground.collectives, guard=guard),
    )
    measurement = _measurement(ground, placed, connected, training)
    evaluation = _evaluation(ground, placed, connected, makers=makers, stages_of=stages_of, training=training)
    return Pipeline(
        schedule=connected.update.schedule,
        parts=placed.parts,
        stage_num_parameters=placed.num_parameters,
        engine=engine,
        training=training,
        evaluation=evaluation,
        state=_state(ground, placed, connected, training),
        measurement=measurement,
        verifier=Verifier(
            ground.plain,
            regions=placed.regions,
            has_copy=verify,
            given=model is None,
            training=training,
            evaluation=evaluation,
            update=connected.update,
            ownership=placed.ownership,
            parts=placed.parts,
            place=layout.place,
            seeder=ground.seeder,
            collectives=ground.collectives,
            guard=guard,
            settings=settings,
        ),
        traced=Traced(
            schedule=connected.update.schedule,
            ranks=layout.place.local_ranks,
            num_steps=lambda: training.num_steps,
            snapshots=training.snapshots,
            measurement=measurement,
            clocks=connected.clocks,
            collectives=ground.collectives,
            guard=guard,
            plan=layout.plan,
            flush_first=settings.flush_first,
            cut=_cut(layout, placed),
        ),
    )


def _tell_of_two_axes(ground: Ground, placed: Placed) -> None:
    """In the process of the last stage, of an output that a loss would see a microbatch at a time."""
    inference, num_samples = placed.train.inference, ground.microbatch.num_samples
    might = any(spec.shape.count(num_samples) > 1 for spec in inference.example.specs[-1])
    schedule = ground.layout.schedule
    if might and ground.has_loss and schedule.num_microbatches > 1 and schedule.num_stages - 1 in placed.local_stages:
        found = inference.batch_dimensions(ground.microbatch)
        warn_of_two_axes(found, "a loss of them has no others than these", num_samples=num_samples)


def _cut(layout: Layout, placed: Placed) -> str:
    """A text that is the same, from start to start of a run, where its stages are."""
    rules = [*enumerate(layout.recompute.stages), *layout.recompute.modules.items()]
    recompute = [(where, rule if isinstance(rule, str) else "a policy") for where, rule in rules]
    return repr((placed.parts.names, recompute, layout.sharding, layout.place.mesh.tensor))


def _sliced_loss(ground: Ground, placed: Placed) -> SlicedLoss | None:
    """In the process of the last stage, where microbatches are sliced."""
    loss_fn, last = ground.settings.loss_fn, ground.layout.schedule.num_stages - 1
    if loss_fn is None or not ground.slices or last not in placed.local_stages:
        return None
    return SlicedLoss(loss_fn, partial(placed.parts.output, training=True))


def _evaluation(
    ground: Ground,
    placed: Placed,
    connected: Connected,
    *,
    makers: Makers,
    stages_of: StagesOf,
    training: Training,
) -> Evaluation:
    settings = ground.settings
    modes = EvaluationModes(
        placed.evaluate,
        like=ground.example,
        parts=placed.parts,
        stages=stages_of,
        links=connected.links if ground.layout.place.world.distributed else None,
        sharding=ground.layout.sharding,
        shards=connected.update.shards,
        device=settings.device,
        make_engine=partial(makers.engine, EvaluationWorker),
        make_reader=makers.reader,
    )
    return Evaluation(
        modes,
        seeder=ground.seeder,
        schedule=ground.layout.schedule,
        unchanged=placed.unchanged,
        training=training,
        guard=ground.guard,
        collectives=ground.collectives,
        settings=settings,
        num_replicas=ground.num_replicas,
    )


def _state(ground: Ground, placed: Placed, connected: Connected, training: Training) -> State:
    owners, local_ranks = ground.layout.schedule.owners, ground.layout.place.local_ranks
    return State(
        ownership=placed.ownership,
        update=connected.update,
        training=training,
        collectives=ground.collectives,
        guard=ground.guard,
        first_stages=frozenset(stage for stage, ranks in enumerate(owners) if ranks[0] in local_ranks),
        seed=ground.settings.seed,
    )


def _measurement(ground: Ground, placed: Placed, connected: Connected, training: Training) -> Measurement:
    rank = ground.layout.place.local_ranks[0]
    specs, settings = placed.train.inference.outputs(ground.microbatch)[0], ground.settings
    update = connected.update

    def put_together(records: Sequence[RankRecord]) -> Timeline:
        return update.timeline(records, schedule=as_it_ran(update.schedule, records))

    return Measurement(
        list(connected.recorders.values()),
        schedule=update.schedule,
        assemble=put_together,
        drain=training.drain,
        one_way_seconds=lambda: connected.latency(rank, specs, settings),
        collectives=ground.collectives,
        guard=ground.guard,
        clocks=connected.clocks,
    )
