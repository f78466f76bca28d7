"""Ranks of this process connected: their programs, the links that these need, and the update behind them.

Ground, Placed -> connect -> Connected
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..comm import (
    HostClocks,
    InProcessTransport,
    Mailbox,
    PartsTransport,
    ProcessGroupTransport,
    TensorSpec,
    Transport,
    link_lanes,
    machine,
)
from ..comm.ping_pong import ping_pong, waking_seconds
from ..comm.process_group import Link
from ..partition.profiler.clock import clock_for
from ..schedules.messages import Sharing
from .measure.recorder import Recorder
from .modes import links_of
from .placing import Ground, Placed
from .settings import Settings
from .update.flush import FlushExecution, batch_programs, make_flush_execution
from .update.interface import Update, UpdateParts
from .update.speculative import speculative
from .update.stream import StreamExecution, make_stream_execution

_OVERLAPPING = 4  # batches in a measured timeline, where they overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """Parts that this process's ranks need beside their stages.

    Arguments:
        recorders, transports: by local rank.
        links: between ranks, of training and of evaluation.
        clocks: of the hosts, by which recorders stamp.
    """

    recorders: Mapping[int, Recorder]
    transports: Mapping[int, Transport]
    links: frozenset[Link]
    update: Update
    clocks: HostClocks

    def latency(self, rank: int, specs: Sequence[TensorSpec], settings: Settings) -> float:
        """Seconds of an activation from stage 0 to its consumer on the next rank, which sleeps until it comes.

        Measured between ranks 0 and 1, known to rank 0; 0 on the others.

        Arguments:
            rank: of this process.
            specs: of the activation.
        """
        transport = self.transports[rank]
        if isinstance(transport, InProcessTransport) or not self.links >= {(0, 1), (1, 0)} or not specs:
            return 0.0
        hot, cold = (
            ping_pong(transport, rank=rank, specs=specs, device=settings.device, timeout=settings.timeout, cold=cold)
            for cold in (False, True)
        )
        # both ends are in the overhead of actions
        return hot.latency + waking_seconds(hot, cold) if rank == 0 else 0.0


def connect(ground: Ground, placed: Placed) -> Connected:
    """Links for the programs of training and evaluation, and the update. Collective over the processes."""
    layout, settings = ground.layout, ground.settings
    clock = clock_for(settings.device)
    window = _OVERLAPPING if layout.schedule.num_batches > 1 else 1
    local = layout.place.local_ranks
    recorders = {rank: Recorder(clock, window=window, takes_turns=len(local) > 1) for rank in local}
    execution = _execution(ground, placed)
    evaluation_programs = batch_programs(placed.evaluate.schedule, Sharing(loss=ground.has_loss))
    links = links_of([*execution.programs, *evaluation_programs])
    transports = _make_transports(links, ground, placed.peers_in_parts)
    for transport in transports.values():
        ground.guard.on_failure(transport.abort)
    update = execution.make_update(
        UpdateParts(
            model=placed.parts,
            ownership=placed.ownership,
            collectives=ground.collectives,
            recorders=recorders,
            optimizer=settings.optimizer,
            scheduler=settings.lr_scheduler,
            correction=settings.delay_correction,
            max_grad_norm=settings.max_grad_norm,
            sharding=layout.sharding,
            grad_scaler=settings.grad_scaler,
            device=settings.device,
        )
    )
    clocks = HostClocks(
        ground.collectives, place=layout.place, now=clock.now, timeout=settings.timeout, machine=machine()
    )
    ground.guard.on_failure(clocks.abort)
    return Connected(recorders=recorders, transports=transports, links=links, update=update, clocks=clocks)


def _execution(ground: Ground, placed: Placed) -> FlushExecution | StreamExecution:
    """Flush or stream: decided here and asked nowhere else."""
    schedule, settings, sharding = placed.train.schedule, ground.settings, ground.layout.sharding
    if schedule.is_asynchronous:
        if settings.post_validation:
            raise ValueError(
                f"post_validation=True under the asynchronous schedule {schedule.name!r}, whose batches overlap as it "
                f"is: expected a flush schedule such as 'zb-h2', or post_validation=False"
            )
        if settings.grad_scaler is not None:
            raise ValueError(
                f"grad_scaler= under the asynchronous schedule {schedule.name!r}: batches are under way with weights "
                f"of several updates, each with a scale of its own. Expected a flush schedule such as "
                f"schedule='1f1b', or torch.autocast to bfloat16, which needs no scale"
            )
        return make_stream_execution(
            schedule,
            placed.ownership,
            ground.collectives,
            sharding=sharding,
            max_grad_norm=settings.max_grad_norm,
            flush_first=settings.flush_first,
        )
    settings.refuse_flush(schedule.name)
    execution = make_flush_execution(
        schedule,
        placed.ownership,
        ground.collectives,
        sharding=sharding,
        has_loss=ground.has_loss,
        num_replicas=ground.num_replicas,
    )
    return speculative(execution, sharding) if settings.post_validation else execution


def _make_transports(links: frozenset[Link], ground: Ground, peers_in_parts: frozenset[int]) -> dict[int, Transport]:
    """By local rank. Collective over the processes."""
    place, collectives = ground.layout.place, ground.collectives
    if not place.world.distributed:
        mailbox = Mailbox()
        return {rank: InProcessTransport(rank, mailbox) for rank in place.local_ranks}
    lanes = link_lanes(sorted(links), place, collectives.groups)
    (rank,) = place.local_ranks
    device, timeout, least_bytes = ground.settings.device, ground.settings.timeout, ground.layout.tensor.least_bytes
    if not peers_in_parts:
        return {rank: ProcessGroupTransport(rank, lanes, device=device, timeout=timeout)}
    return {
        rank: PartsTransport(rank, lanes, collectives, peers=peers_in_parts, least_bytes=least_bytes, timeout=timeout)
    }
