"""Stages, engines and readers of batches of this process's ranks, made from what all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from ..comm import Collectives, Guard, Transport
from ..partition.graph.forms import Arguments, Tensors
from ..partition.graph.units import MODEL_INPUT
from .batch.batches import read_loss, share_of_sum
from .batch.reader import BatchReader, Reads
from .layout import Layout
from .measure.recorder import Recorder
from .modes import Mode, StagesOf
from .run.engine import Engine, LocalRank
from .run.worker import EvaluationWorker, TrainingWorker
from .settings import Settings
from .slicing import SlicedLoss
from .stages.build import CutModel
from .stages.compiled import Compiled, refuse_changes_in_flight, refuse_split
from .stages.loss import LeftBehind, UntrainedLeaves, untrained
from .stages.randomness import Seeder
from .stages.reruns import Reruns
from .stages.stage import LossOf, LossValue, Stage
from .update.interface import Update
from .update.rank_update import RankUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Makers:
    """Makes stages, engines and readers, once the model is cut and the ranks are connected.

    Arguments:
        local_stages: those of this process, ascending.
        recorders, transports: by local rank.
        sliced_loss: on the last stage, of a schedule over slices: whether the loss computes the same of them.
    """

    layout: Layout
    settings: Settings
    parts: CutModel
    local_stages: Sequence[int]
    seeder: Seeder
    guard: Guard
    collectives: Collectives
    recorders: Mapping[int, Recorder]
    transports: Mapping[int, Transport]
    update: Update
    sliced_loss: SlicedLoss | None

    def stages(self) -> StagesOf:
        """By local rank and number; in one process each replica of a stage is one of its own."""
        schedule, loss_of = self.layout.schedule, self._loss_of()
        last = schedule.num_stages - 1

        if schedule.moves_activations and self.settings.compile is not None:
            raise ValueError(
                f"compile= with the schedule {schedule.name!r}, whose activations leave their rank while they wait: a "
                f"compiled graph keeps them out of sight; expected compile=None, or a schedule without moves"
            )

        # An order that is found for a batch may split any backward.
        split = schedule.split_stages if self.layout.replan is None else frozenset(range(schedule.num_stages))

        def make(rank: int, s: int) -> Stage:
            stage = self.parts.train.stages[s]
            name = f"stage {s} ({self.parts.names[s]})"
            if s in split:
                refuse_split(self.settings.compile, stage.module, stage=name, schedule=schedule.name)
            if schedule.rule.changes_in_flight:
                refuse_changes_in_flight(self.settings.compile, stage.module, stage=name, schedule=schedule.name)
            rules = self.parts.recomputed.of_stage(s, stage)
            return Stage(
                index=s,
                name=self.parts.names[s],
                module=stage.module,
                loss_of=loss_of if s == last else None,
                runs_again=self.layout.recompute.stages[s] == "full",
                reruns=Reruns(rules, self.seeder),
                compiled=Compiled(self.settings.compile, stage.units, rules),
                weights=self.update.versions_of(rank, s),
            )

        return {rank: {s: make(rank, s) for s in schedule.placement[rank]} for rank in self.transports}

    def engine(
        self,
        kind: type[TrainingWorker | EvaluationWorker],
        mode: Mode,
        updates: Mapping[int, RankUpdate],
        stages: StagesOf,
    ) -> Engine:
        """The engine of a mode.

        Arguments:
            kind: of its workers.
            updates: by local rank.
        """
        ranks = []
        for rank, transport in self.transports.items():
            worker = kind(
                rank,
                stages=stages[rank],
                modules=mode.inference.stages,
                wiring=mode.wiring,
                schedule=mode.schedule,
                seeder=self.seeder,
                updates=updates[rank],
                device=self.settings.device,
            )
            ranks.append(LocalRank(worker=worker, transport=transport, recorder=self.recorders[rank]))
        return Engine(ranks, timeout=self.settings.timeout, lost_member=self.collectives.lost_member)

    def reader(self, mode: Mode, *, has_loss: bool, like: Arguments) -> BatchReader:
        """The reader of a mode's batches.

        Arguments:
            like: arguments of one microbatch.
        """
        place, model_loss = self.layout.place, self.settings.model_loss
        replica, num_replicas = place.replica
        sliced = self.sliced_loss if mode.schedule.num_slices > 1 and has_loss else None
        return BatchReader(
            mode.schedule,
            inference=mode.inference,
            own=range(replica, mode.schedule.num_microbatches, num_replicas),
            example=like,
            sequence=self.settings.sequence,
            slices_agree=None if sliced is None else partial(sliced.expect, inference=mode.inference),
            has_loss=has_loss,
            model_loss=model_loss if has_loss else None,
            device=self.settings.device,
            reads=self._reads(mode, has_loss=has_loss),
            scales_loss=self.settings.grad_scaler is not None,
            compares=place.world.distributed,
            together=self.guard.together if num_replicas > 1 or model_loss is not None else nullcontext,
        )

    def _reads(self, mode: Mode, *, has_loss: bool) -> Reads:
        """Parts of a batch that the stages of this process take."""
        refs = [ref for s in self.local_stages for ref in mode.inference.stages[s].inputs]
        return Reads(
            inputs=frozenset(ref.slot for ref in refs if ref.producer == MODEL_INPUT),
            target=has_loss and mode.schedule.num_stages - 1 in self.local_stages,
        )

    def _loss_of(self) -> LossOf | None:
        loss_fn, update = self.settings.loss_fn, self.update
        if loss_fn is None:
            return None

        def is_trained(leaf: torch.Tensor) -> bool:
            if update.schedule.is_asynchronous:  # a stage computes with versions: a gradient elsewhere goes nowhere
                return False
            return self.settings.optimizer is None or any(one.optimizers.holds(leaf) for one in update.stages)

        sliced = self.sliced_loss
        leaves = UntrainedLeaves(self.parts.train.stages[-1].module, is_trained)
        wants_gradient = any(spec.requires_grad for spec in self.parts.train.example.specs[-1])

        share = share_of_sum(loss_fn, self.layout.schedule.group_size)
        left = LeftBehind(self.parts.train.example.left, self.parts.model)

        def loss_of(flat: Tensors, target: object, training: bool, inputs: Tensors) -> LossValue:
            if sliced is not None and training:
                sliced.saw(flat, target)
            self.seeder.enter_loss()
            ends = leaves.before(flat, inputs)
            with left.refused():
                loss = read_loss(loss_fn(self.parts.output(flat, training=training), target), share)
            leaves.check(loss[0], ends)
            if training and torch.is_grad_enabled() and not (wants_gradient or loss[0].requires_grad):
                raise untrained()
            return loss

        return loss_of
