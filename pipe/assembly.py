"""Putting a pipeline together: from a model, a layout and a batch to its parts, each complete when it is made.

cut -> wire both modes -> who holds what -> programs -> links -> update -> stages, engines, readers -> the parts
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..comm import (
    Collectives,
    Guard,
    InProcessTransport,
    Mailbox,
    PartsTransport,
    ProcessGroupTransport,
    TensorSpec,
    Transport,
    link_lanes,
)
from ..comm.ping_pong import one_way_seconds
from ..comm.process_group import Link
from ..partition.graph.forms import Arguments
from ..partition.profiler.clock import clock_for
from ..schedules import Schedule
from .batch.agreement import check_agreement, describe
from .evaluation import Evaluation
from .layout import Layout
from .makers import Makers
from .measure.measurement import Measurement
from .measure.recorder import Recorder
from .measure.steps import StepReports
from .modes import EvaluationModes, links_of, wire
from .parallel.group_shares import GroupShares, divide_over_group, refuse_divided
from .parallel.sends import WholeOutputs
from .parallel.sharding import Sharding
from .parallel.tensor_option import read_tensor_parallel
from .run.engine import Engine
from .run.worker import EvaluationWorker, TrainingWorker
from .settings import Settings
from .stages.build import CutModel, cut_model
from .stages.ownership import Ownership
from .stages.randomness import Seeder
from .stages.shapes import Signature
from .stages.unchanged import Unchanged
from .state import State
from .training import Training
from .update.flush import FlushExecution, batch_programs, make_flush_execution
from .update.interface import UpdateParts
from .update.stream_parts import StreamExecution, make_stream_execution
from .verify.plain import PlainModule
from .verify.regions import Regions
from .verify.verification import Verifier

_log = logging.getLogger("stagewright")

_OVERLAPPING = 4  # batches in a measured timeline, where they overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One process's pipeline.

    Arguments:
        schedule: as it runs.
        stage_num_parameters: [S].
        engine: that trains.
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


def assemble(
    arguments: Arguments,
    *,
    model: nn.Module | None,
    stages: Sequence[nn.Module] | None,
    layout: Layout,
    settings: Settings,
    guard: Guard,
    verify: bool,
) -> Pipeline:
    """The pipeline for arguments like these of a batch. Collective over the processes.

    Arguments:
        model, stages: one of them.
        verify: whether to keep a copy of the model for `Verifier`.
        guard: is told how to let go of other ranks.
    """
    schedule, place, device = layout.schedule, layout.place, settings.device
    num_replicas = place.replica[1]
    example = arguments.cut(schedule.num_microbatches // num_replicas)[0]
    microbatch = Signature.of(example)
    seeder = Seeder(settings.seed, device, runs_again=layout.recompute.runs_again, member=place.tensor[0])
    root = nn.ModuleList(stages) if model is None else model
    refuse_divided(root)
    judge = place.process_of(schedule.owners[-1][0], tensor=0)
    plain = PlainModule(root, settings.loss_fn, given=model is None) if verify and judge == place.world.rank else None
    collectives = Collectives(place, device=device, timeout=settings.timeout)
    guard.on_failure(collectives.abort)
    cut = partial(
        cut_model,
        model,
        stages,
        example=example,
        num_stages=schedule.num_stages,
        split_points=layout.split_points,
        plan=layout.plan,
        loss_fn=settings.loss_fn,
        loss_slot=None if settings.model_loss is None else settings.model_loss.find_slot,
        recompute=layout.recompute,
        seeder=seeder,
        device=device,
    )
    peers = layout.tensor.peers_in_parts(place, collectives)
    whole = WholeOutputs(cut, microbatch, is_wanted=bool(peers))
    tensor = read_tensor_parallel(layout.tensor.parallel, root, count=place.tensor[1])
    if tensor.styles and place.world.rank == 0:
        _log.info("over %d tensor ranks:\n%s", tensor.count, tensor.table(root))
    regions = Regions(root, tensor.styles) if verify and tensor.styles else None
    group = divide_over_group(root, tensor.styles, collectives, device=device, on_region=seeder.region)
    with group.undone_on_error():
        parts = cut()
        stage_num_parameters = _count_parameters(parts, group)
        train = wire(schedule, parts.train, microbatch, alike=whole.alike(parts.train, training=True))
        evaluate = wire(
            schedule.forward_only(), parts.evaluate, microbatch, alike=whole.alike(parts.evaluate, training=False)
        )

        local_stages = sorted({s for rank in place.local_ranks for s in schedule.placement[rank]})
        ownership = Ownership(parts, owners=schedule.owners, local_stages=local_stages, group=group)
        unchanged = Unchanged(parts, is_compiled=settings.compile is not None)
        for index in local_stages:
            parts.train.stages[index].module.to(device)
            parts.evaluate.stages[index].module.to(device)
        _check_agreement(
            schedule,
            parts,
            microbatch,
            settings,
            collectives,
            rank=place.world.rank,
            verify=verify,
            tensor=f"{tensor}, sends {layout.tensor.sends}" if tensor.styles else "none",
        )
        ownership.spread_from_first_owners(collectives)

    clock = clock_for(device)
    window = _OVERLAPPING if schedule.num_batches > 1 else 1
    recorders = {rank: Recorder(clock, window=window) for rank in place.local_ranks}
    execution = _execution(
        train.schedule, ownership, collectives, settings, layout.sharding, own_batches=num_replicas > 1
    )
    evaluation_programs = batch_programs(evaluate.schedule, has_loss=settings.loss_fn is not None)
    links = links_of([*execution.programs, *evaluation_programs])
    transports = _make_transports(links, layout, collectives, peers, device=device, timeout=settings.timeout)
    for transport in transports.values():
        guard.on_failure(transport.abort)
    update = execution.make_update(
        UpdateParts(
            model=parts,
            ownership=ownership,
            collectives=collectives,
            recorders=recorders,
            optimizer=settings.optimizer,
            scheduler=settings.lr_scheduler,
            max_grad_norm=settings.max_grad_norm,
            sharding=layout.sharding,
            grad_scaler=settings.grad_scaler,
            device=device,
        )
    )

    makers = Makers(
        layout=layout,
        settings=settings,
        parts=parts,
        local_stages=local_stages,
        seeder=seeder,
        guard=guard,
        collectives=collectives,
        recorders=recorders,
        transports=transports,
        update=update,
    )
    stages_of = makers.stages()
    engine = makers.engine(TrainingWorker, train, update.ranks, stages_of)
    training = Training(
        engine,
        update,
        seeder=seeder,
        reader=makers.reader(train, has_loss=settings.loss_fn is not None, like=example),
        guard=guard,
        collectives=collectives,
        unchanged=unchanged,
        reports=StepReports(settings.on_step, rank=place.world.rank, device=device),
    )
    evaluation = Evaluation(
        EvaluationModes(
            evaluate,
            like=example,
            parts=parts,
            stages=stages_of,
            links=links if place.world.distributed else None,
            sharding=layout.sharding,
            unsharding=update.unsharding,
            device=device,
            make_engine=partial(makers.engine, EvaluationWorker),
            make_reader=makers.reader,
        ),
        seeder=seeder,
        schedule=schedule,
        unchanged=unchanged,
        training=training,
        guard=guard,
        collectives=collectives,
        device=device,
        num_replicas=num_replicas,
        has_loss=settings.loss_fn is not None,
        model_loss=settings.model_loss,
    )
    verifier = Verifier(
        plain,
        regions=regions,
        has_copy=verify,
        given=model is None,
        training=training,
        evaluation=evaluation,
        update=update,
        ownership=ownership,
        parts=parts,
        place=place,
        seeder=seeder,
        collectives=collectives,
        guard=guard,
        settings=settings,
    )
    first_rank = place.local_ranks[0]
    specs = train.inference.outputs(microbatch)[0]
    return Pipeline(
        schedule=update.schedule,
        parts=parts,
        stage_num_parameters=stage_num_parameters,
        engine=engine,
        training=training,
        evaluation=evaluation,
        state=State(
            ownership=ownership,
            update=update,
            training=training,
            collectives=collectives,
            guard=guard,
            first_stages=frozenset(s for s, ranks in enumerate(schedule.owners) if ranks[0] in place.local_ranks),
            seed=settings.seed,
        ),
        measurement=Measurement(
            list(recorders.values()),
            num_stages=schedule.num_stages,
            drain=training.drain,
            one_way_seconds=lambda: _latency(transports[first_rank], first_rank, links, specs, settings),
            collectives=collectives,
            guard=guard,
        ),
        verifier=verifier,
    )


def _count_parameters(parts: CutModel, group: GroupShares) -> tuple[int, ...]:
    """[S] elements of each stage's parameters, those of all members of a tensor group."""
    full = {id(p): group.full_numel(name, p) for name, p in parts.root.named_parameters()}
    return tuple(sum(full.get(id(p), p.numel()) for p in each.module.parameters()) for each in parts.train.stages)


def _check_agreement(
    schedule: Schedule,
    parts: CutModel,
    microbatch: Signature,
    settings: Settings,
    collectives: Collectives,
    *,
    rank: int,
    verify: bool,
    tensor: str,
) -> None:
    mine = describe(
        schedule,
        parts.names,
        microbatch,
        seed=settings.seed,
        max_grad_norm=settings.max_grad_norm,
        grad_scaler=None if settings.grad_scaler is None else settings.grad_scaler.state_dict(),
        loss_fn=_kind_of_loss(settings),
        verify=verify,
        tensor=tensor,
    )
    check_agreement(mine, collectives, rank=rank)


def _kind_of_loss(settings: Settings) -> str:
    if settings.loss_fn is None:
        return "none"
    return "given" if settings.model_loss is None else "model"


def _execution(
    schedule: Schedule,
    ownership: Ownership,
    collectives: Collectives,
    settings: Settings,
    sharding: Sharding,
    *,
    own_batches: bool,
) -> FlushExecution | StreamExecution:
    """Flush or stream: decided here and asked nowhere else."""
    if schedule.is_asynchronous:
        return make_stream_execution(
            schedule,
            ownership,
            collectives,
            sharding=sharding,
            max_grad_norm=settings.max_grad_norm,
            scales_loss=settings.grad_scaler is not None,
        )
    return make_flush_execution(
        schedule,
        ownership,
        collectives,
        sharding=sharding,
        has_loss=settings.loss_fn is not None,
        own_batches=own_batches,
    )


def _make_transports(
    links: frozenset[Link],
    layout: Layout,
    collectives: Collectives,
    peers: frozenset[int],
    *,
    device: torch.device,
    timeout: float,
) -> dict[int, Transport]:
    """By local rank. Collective over the processes."""
    place = layout.place
    if not place.world.distributed:
        mailbox = Mailbox()
        return {rank: InProcessTransport(rank, mailbox) for rank in place.local_ranks}
    lanes = link_lanes(sorted(links), place, collectives.groups)
    (rank,) = place.local_ranks
    whole = ProcessGroupTransport(rank, lanes, device=device, timeout=timeout)
    if not peers:
        return {rank: whole}
    return {rank: PartsTransport(whole, collectives, peers=peers, least_bytes=layout.tensor.least_bytes)}


def _latency(
    transport: Transport, rank: int, links: frozenset[Link], specs: Sequence[TensorSpec], settings: Settings
) -> float:
    """Seconds of an activation from stage 0 to its consumer on the next rank, measured between ranks 0 and 1."""
    if isinstance(transport, InProcessTransport) or not links >= {(0, 1), (1, 0)} or not specs:
        return 0.0
    return one_way_seconds(transport, rank=rank, specs=specs, device=settings.device, timeout=settings.timeout)
