"""This process's ranks: their links, stages, engines and readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...comm import InProcessTransport, Mailbox, PartsTransport, TensorSpec, Transport, link_lanes, staged
from ...comm.links import ping_pong, waking_seconds
from ...comm.process_group import Link, ProcessGroupTransport
from ...partition.model.forms import Arguments, Tensors
from ...partition.profiler.clock import clock_for
from ...partition.profiler.memory import keep_freed_memory
from ...schedules.messages import Transfer
from ...schedules.program import RankProgram
from ..batch.batches import read_loss, share_of_sum
from ..batch.reader import BatchReader
from ..context import Run
from ..settings.model_loss import Empty, LossValue, ModelLoss
from ..settings.precision import compiled_units, refuse_backward
from ..shards.tensor_option import LEAST_BYTES
from ..stage.loss import LeftBehind, UntrainedLeaves, untrained
from ..stage.reruns import CheckpointedModules
from ..stage.stage import LossOf, Stage
from ..stage.wiring import Mode
from ..trace.recorder import RankRecorder
from ..update.interface import Update
from ..update.rank_update import RankUpdate
from .engine import Engine, LocalRank
from .worker import EvaluationWorker, OverlappingWorker, TrainingWorker

if TYPE_CHECKING:
    from ..batch.slicing import SlicedLoss


_OVERLAPPING = 4  # batches in a measured timeline, where they overlap

StagesOf = dict[int, dict[int, Stage]]  # by local rank and number


def links_of(programs: Iterable[RankProgram]) -> frozenset[Link]:
    transfers = ((p.rank, step) for p in programs for step in p.steps if isinstance(step, Transfer))
    return frozenset((rank, step.peer) if step.is_send else (step.peer, rank) for rank, step in transfers)


class RankLinks:
    """Links of this process's ranks to others, and what records their use. Collective over the processes."""

    def __init__(self, run: Run, between: frozenset[Link], *, peers_in_parts: frozenset[int]) -> None:
        place, options = run.layout.place, run.options
        clock = clock_for(options.device)
        window = _OVERLAPPING if run.layout.schedule.num_batches > 1 else 1
        takes_turns = len(place.local_ranks) > 1
        self.recorders = {
            rank: RankRecorder(clock, window=window, takes_turns=takes_turns) for rank in place.local_ranks
        }
        self.between, self._are_replicas = between, any({0, 1} <= set(o) for o in run.layout.schedule.owners)
        self.transports: dict[int, Transport] = {}
        if not place.world.distributed:
            mailbox = Mailbox()
            self.transports |= {rank: InProcessTransport(rank, mailbox) for rank in place.local_ranks}
        else:
            lanes = link_lanes(sorted(between), run.collectives.groups)
            (rank,) = place.local_ranks
            if peers_in_parts:
                least_bytes = LEAST_BYTES if options.mesh.sends == "auto" else 0
                over: ProcessGroupTransport = PartsTransport(
                    rank, lanes, run.collectives, peers=peers_in_parts, least_bytes=least_bytes, timeout=options.timeout
                )
            else:
                over = ProcessGroupTransport(rank, lanes, device=run.collectives.groups.wire, timeout=options.timeout)
            self.transports[rank] = staged(over, run.collectives.groups)
        for transport in self.transports.values():
            run.guard.on_failure(transport.abort)
        if place.world.distributed:
            run.exchanges.recorder = self.recorders[place.local_ranks[0]]
        self._options = options

    def latency(self, specs: Sequence[TensorSpec]) -> float:
        """Seconds of an activation from stage 0 to its consumer on the next rank, which sleeps until it arrives.
        Measured between ranks 0 and 1, for rank 0; 0 on the others, and where both are replicas of a stage: their
        batches may differ in size."""
        transport = next(iter(self.transports.values()))
        apart = self.between >= {(0, 1), (1, 0)} and not self._are_replicas
        if isinstance(transport, InProcessTransport) or not apart or not specs:
            return 0.0
        device, timeout = self._options.device, self._options.timeout
        hot, cold = (ping_pong(transport, specs, device=device, timeout=timeout, cold=cold) for cold in (False, True))
        # both ends are in the overhead of actions
        return hot.latency + waking_seconds(hot, cold) if transport.rank == 0 else 0.0


class Ranks:
    """Makes stages, engines and readers, once the model is cut and the ranks are connected. `stages`: by local rank and
    number; in one process each replica of a stage has its own."""

    def __init__(self, links: RankLinks, update: Update) -> None:
        self._run, self.parts = run, parts = update.run, update.ownership.model
        self.links = links
        self.update = update
        loss_fn, schedule = run.options.loss_fn, run.layout.schedule
        self._sliced_loss: SlicedLoss | None = None
        context = run.context_group
        in_parts = schedule.num_slices > 1 or context is not None
        if (
            loss_fn is not None
            and run.options.model_loss is None
            and in_parts
            and schedule.num_stages - 1 in run.local_stages
        ):
            from ..batch.slicing import SlicedLoss

            self._sliced_loss = SlicedLoss(loss_fn, partial(parts.output, training=True), context)
        self.stages = self._make_stages()

    def _make_stages(self) -> StagesOf:
        layout, parts, compile = self._run.layout, self.parts, self._run.options.compile
        schedule, loss_of = layout.schedule, self._loss_of()
        if schedule.moves_activations and compile is not None:
            raise ValueError(
                f"compile= with the schedule {schedule.name!r}, whose activations leave their rank while they wait: a "
                f"compiled graph hides them; expected compile=None, or a schedule without moves"
            )

        splits_any = any(each.may_split for each in self._run.added)
        split = frozenset(range(schedule.num_stages)) if splits_any else schedule.split_stages
        for s, one in enumerate(parts.train.stages):  # of all ranks, so that all raise the error
            name = f"stage {s} ({parts.names[s]})"
            refuse_backward(compile, one.module, schedule, stage=name, is_split=s in split)

        def make(rank: int, s: int) -> Stage:
            stage = parts.train.stages[s]
            rules = parts.recomputed.of_stage(s, stage)
            return Stage(
                index=s,
                name=parts.names[s],
                module=stage.module,
                loss_of=loss_of if s == schedule.num_stages - 1 else None,
                runs_again=layout.recompute.stages[s] == "full",
                reruns=CheckpointedModules(rules, self._run.seeder),
                compiled=compiled_units(compile, stage.units, rules),
                weights=self.update.versions_of(rank, s),
            )

        return {rank: {s: make(rank, s) for s in schedule.placement[rank]} for rank in layout.place.local_ranks}

    def engine(
        self, kind: type[TrainingWorker | EvaluationWorker], mode: Mode, updates: Mapping[int, RankUpdate]
    ) -> Engine:
        if self._run.options.device.type == "cpu" and not self._run.spares_memory:
            keep_freed_memory()
        if kind is TrainingWorker and mode.schedule.overlapped and self._may_overlap:
            kind = OverlappingWorker
        ranks = []
        for rank, transport in self.links.transports.items():
            worker = kind(self._run, rank, mode, stages=self.stages[rank], updates=updates[rank])
            ranks.append(LocalRank(worker=worker, transport=transport, recorder=self.links.recorders[rank]))
        return Engine(self._run, ranks)

    @property
    def _may_overlap(self) -> bool:
        """Only experts' exchanges give way, on the CPU, and not under recomputation, which changes settings of the
        process meanwhile."""
        layout, device = self._run.layout, self._run.options.device
        return layout.place.mesh.expert > 1 and device.type == "cpu" and not layout.recompute.runs_again

    def reader(self, mode: Mode, *, has_loss: bool, like: Arguments) -> BatchReader:
        trains = mode.schedule.has_backward
        sliced = self._sliced_loss if has_loss and trains else None
        slices_agree = None if sliced is None else partial(sliced.expect, inference=mode.inference)
        return BatchReader(self._run, mode, example=like, has_loss=has_loss, slices_agree=slices_agree)

    def _loss_of(self) -> LossOf | None:
        parts, update, options = self.parts, self.update, self._run.options
        loss_fn = options.loss_fn
        if loss_fn is None:
            return None

        def is_trained(leaf: torch.Tensor) -> bool:
            if update.schedule.is_asynchronous:  # a stage computes with versions: gradients of others are lost
                return False
            return options.optimizer is None or any(one.holds(leaf) for one in update.stages)

        sliced = self._sliced_loss
        leaves = UntrainedLeaves(parts.train.stages[-1].module, is_trained)
        wants_gradient = any(spec.requires_grad for spec in parts.train.example.specs[-1])

        share = share_of_sum(loss_fn, self._run.layout.schedule.group_size)
        left = LeftBehind(parts.train.example.left, self._run.root)

        def loss_of(flat: Tensors, target: object, training: bool, inputs: Tensors) -> LossValue:
            if sliced is not None and training:
                sliced.saw(flat, target)
            self._run.seeder.enter_loss()
            ends = leaves.before(flat, inputs)
            with left.refused():
                loss = read_loss(loss_fn(parts.output(flat, training=training), target), share)
            leaves.check(loss[0], ends)
            if training and isinstance(loss_fn, ModelLoss) and loss[1] is not None and loss_fn.is_empty(loss[1]):
                loss = Empty.apply(loss[0], *inputs), loss[1]  # type: ignore[no-untyped-call]
            if training and torch.is_grad_enabled() and not (wants_gradient or loss[0].requires_grad):
                raise untrained()
            return loss

        return loss_of
