"""Evaluation: forwards alone, in evaluation mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from ...partition.model.forms import Arguments, Form, Tensors
from ...partition.model.modes import evaluating
from ...schedules.messages import Sharing
from ..batch.agreement import Call
from ..batch.batches import Batch, check_same_batch, join_outputs, share_of_sum
from ..batch.reader import BatchReader
from ..results import EvalResult
from ..settings.given import Given, check_batch, check_like_example
from ..stage.reruns import MovingBuffers, standing_in
from ..stage.shapes import Signature
from ..stage.wiring import Mode
from ..update.flush import FlushUpdate, batch_programs
from ..update.interface import Programs
from ..update.rank_update import RankUpdate
from .engine import Engine
from .fills import FillWork
from .ranks import RankLinks, Ranks, links_of
from .training import Training
from .worker import EvaluationWorker

# The way of batches of one number of microbatches, over the transports and recorders of the ranks that train.
_Forwards = tuple[Mode, BatchReader, Engine, Programs]
_Begun = tuple[Mode, Engine, Programs, Sequence[Arguments], Batch]  # a batch that is to run forwards


def warn_of_two_axes(dimensions: Sequence[tuple[int, ...]], how: str, *, num_samples: int) -> None:
    """Say of outputs with the batch on several axes that microbatches do not see each other."""
    numbers = " and ".join(str(number) for number, axes in enumerate(dimensions) if len(axes) > 1)
    if numbers:
        warnings.warn(
            f"output {numbers} of the model has the batch on two axes, as similarities have: those of a microbatch of "
            f"{num_samples} alone; {how}. Expected num_microbatches=1 for all of the batch (docs/guides/models.md)",
            stacklevel=2,
        )


class Evaluation:
    """Runs batches forwards; one of fewer samples than M makes fewer microbatches. A model that returns its own loss is
    trained with labels and predicts without: the same stages, run in another way."""

    def __init__(self, ranks: Ranks, mode: Mode | None, *, like: Arguments, training: Training) -> None:
        self._run = run = ranks.update.run
        self._ranks = ranks
        self._like = like
        self._modes: dict[Form, tuple[Mode, Arguments]] = {} if mode is None else {like.form: (mode, like)}
        self._forwards: dict[object, _Forwards] = {}
        self._adds_up = share_of_sum(run.options.loss_fn, 1) is not None
        self._training = training
        self._dimensions: dict[Form, Sequence[int | None]] = {}
        self._beside: RankLinks | None = None  # of evaluations in waits
        self._in_waits: FillWork | None = None  # the newest of them

    def step(self, given: Given, *, at_rest: bool = True) -> EvalResult:
        """The result of a batch; unless `at_rest`, with weights as they are in the midst of training."""
        has_loss = self._run.has_loss
        with self._evaluated(given, "eval_step", has_loss=has_loss, at_rest=at_rest) as begun:
            loss, output = self._result(begun, has_loss=has_loss)
        return EvalResult(loss=loss, output=output)

    def predict(self, given: Given) -> object:
        with self._evaluated(given, "predict", has_loss=False) as begun:
            return self._result(begun, has_loss=False)[1]

    @property
    def is_prepared(self) -> bool:
        """Whether the stages are made for evaluations of the arguments that they were built for."""
        return self._like.form in self._modes

    def prepare(self) -> None:
        """ValueError for stages that cannot be made for evaluation, which the first one would raise."""
        self._mode_for(self._like, has_loss=self._run.has_loss)

    def takes(self, given: Given) -> bool:
        return given.parts[0].arguments.form == self._like.form

    def columns(self, given: Given) -> list[Tensors]:
        """By flat output, those of the microbatches that end in this process."""
        with self._evaluated(given, "verify", has_loss=False) as (_, engine, *_):
            return _columns(engine)

    def _join(self, columns: Sequence[Tensors], *, like: Arguments) -> list[torch.Tensor | list[torch.Tensor]]:
        """Flat outputs of a batch: by output, those of its microbatches in one."""
        if like.form not in self._dimensions:
            mode, _ = self._mode_for(like, has_loss=False)
            with evaluating(*self._modules(mode)):
                found = mode.inference.batch_dimensions(Signature.of(like))
            self._dimensions[like.form] = [one[0] if len(one) == 1 else None for one in found]
            if columns and len(columns[0]) > 1:
                warn_of_two_axes(found, "it comes as the list of their blocks", num_samples=like.num_samples)
        dimensions = self._dimensions[like.form]
        return [join_outputs(parts, dim) for parts, dim in zip(columns, dimensions, strict=True)]

    def _modules(self, mode: Mode) -> list[nn.Module]:
        return [mode.inference.stages[s].module for s in self._run.local_stages]

    def _forwards_for(
        self, num_microbatches: int, *, has_loss: bool, like: Arguments, links: RankLinks | None
    ) -> _Forwards:
        key = num_microbatches, has_loss, like.form, links
        if key not in self._forwards:
            mode, first = self._mode_for(like, has_loss=has_loss)
            mode, shards = mode.forwards(num_microbatches), self._ranks.update.shards
            collectives = self._run.layout.sharding.collectives()
            sharing = Sharing(loss=has_loss, collectives=collectives, receives_ahead=mode.receives_ahead)
            programs = batch_programs(mode.schedule, sharing)
            updates = {rank: RankUpdate(rank, mode.schedule, shards) for rank in self._ranks.stages}
            self._forwards[key] = (
                mode,
                self._ranks.reader(mode, has_loss=has_loss, like=first),
                self._ranks.engine(EvaluationWorker, mode, updates, links=links),
                {rank: programs[rank] for rank in updates},
            )
        return self._forwards[key]

    def _mode_for(self, like: Arguments, *, has_loss: bool) -> tuple[Mode, Arguments]:
        """The mode for arguments of such a form, and the first ones."""
        if like.form in self._modes:
            return self._modes[like.form]
        parts = self._ranks.parts
        if like.form == self._like.form:
            like, inference = self._like, parts.evaluation()
        elif parts.evaluate_like is None:
            check_like_example(like, self._like, has_target=has_loss)
            raise AssertionError("arguments of another form")
        else:
            inference = parts.evaluate_like(like)
        mode = Mode(self._run.layout.schedule.forward_only(), inference, Signature.of(like))
        if self._run.layout.place.world.distributed:
            new = sorted(links_of(batch_programs(mode.schedule, Sharing())) - self._ranks.links.between)
            if new:
                raise ValueError(
                    f"with these arguments values flow from rank {new[0][0]} straight to rank {new[0][1]}, which are "
                    f"not linked: expected arguments like those that the stages were built for"
                )
            lacks = self._ranks.update.ownership.missing([stage.module for stage in inference.stages])
            if lacks is not None:
                raise ValueError(
                    f"with these arguments stage {lacks[1]} computes with {lacks[0]!r}, which another holds: "
                    f"expected arguments like those that the stages were built for"
                )
        for module in self._modules(mode):
            module.to(self._run.options.device)
        self._modes[like.form] = mode, like
        return mode, like

    def in_waits(self, given: Given) -> FillWork:
        """An evaluation with weights and buffers as they are now, as background work in front of the update to come.

        Its messages have links of their own. Collective.
        """
        self._training.fills.require(self._run.options.device)
        self._refuse_waits()
        before, has_loss = self._in_waits, self._run.has_loss
        if before is not None:
            before.finish()  # its messages have the same names
        if self._beside is None:
            self._beside = RankLinks(self._run, self._ranks.links.between, peers_in_parts=frozenset())
            self._training.transports += self._beside.transports.values()
        begun = self._begin(given.kept(), "eval_step", has_loss=has_loss, links=self._beside)
        mode, engine, programs, _, batch = begun
        modules = self._modules(mode)
        buffers = MovingBuffers(*modules).before_forward()
        pieces, stands = engine.in_pieces(programs)
        changes = self._training.fills.changes()

        def run(piece: Callable[[], bool]) -> None:
            if self._training.fills.changes() != changes:
                raise ValueError("a weight was changed behind fill_eval: expected that behind the next train_step")
            with evaluating(*modules), standing_in(buffers), self._run.seeder.call(), batch.autocast.again():
                is_last = piece()
            torch.clear_autocast_cache()  # casts without a graph, which the step around must not use
            if not is_last:
                return
            loss, output = self._result(begun, has_loss=has_loss)
            work.result = EvalResult(loss=loss, output=output)
            for local in engine.ranks:
                local.worker.outputs.clear()

        work = self._in_waits = self._training.fills.add(
            (partial(run, piece) for piece in pieces),
            name=f"the evaluation behind step {self._training.num_steps}",
            like=before,
        )
        work.stands = stands
        self._ranks.update.gate.hold(work.finish)
        return work

    def _refuse_waits(self) -> None:
        """ValueError, on every rank alike, where forwards beside training would be other ones, or stop each other."""
        layout, update = self._run.layout, self._ranks.update
        for is_so, what in (
            (type(update) is not FlushUpdate, "where updates do not stand behind a flush (a stream, sync=)"),
            (self._run.options.optimizer is None, "without optimizer=, where nobody knows when weights change"),
            (max(layout.place.mesh.tensor_sizes) > 1, "beside a tensor group, whose members compute together"),
            (bool(layout.sharding.collectives()), 'beside data_parallel="fsdp", which gathers weights together'),
        ):
            if is_so:
                raise ValueError(f"fill_eval(...) {what}: expected eval_step(...)")

    @contextmanager
    def _evaluated(self, given: Given, call: Call, *, has_loss: bool, at_rest: bool = True) -> Iterator[_Begun]:
        """Within, a batch has run forwards."""
        begun = self._begin(given, call, has_loss=has_loss, at_rest=at_rest)
        mode, engine, programs, *_ = begun
        torch.clear_autocast_cache()  # casts of weights that somebody changed since, within one autocast
        try:
            with evaluating(*self._modules(mode)), self._run.guard.together(), self._run.seeder.call():
                engine.run(programs)
            yield begun
        finally:
            engine.drop()

    def _begin(
        self, given: Given, call: Call, *, has_loss: bool, at_rest: bool = True, links: RankLinks | None = None
    ) -> _Begun:
        """A batch, read and agreed on, and what runs it. Collective."""
        run = self._run
        num_microbatches = self.num_microbatches(given)
        microbatches = [
            each.arguments for each in given.on(run.options.device).cut(num_microbatches // run.num_replicas)
        ]
        mode, reader, engine, programs = self._forwards_for(
            num_microbatches, has_loss=has_loss, like=microbatches[0], links=links
        )
        batch = self._training.read(reader, given, call)
        with run.guard.together():
            self._training.unchanged.check(training=False)
            check_same_batch(batch, run.collectives, device=run.options.device)
        if at_rest:
            self._training.drain()
        for local in engine.ranks:
            local.worker.updates.enter(batch)
            local.recorder.begin(counts=False)
        return mode, engine, programs, microbatches, batch

    def _result(self, begun: _Begun, *, has_loss: bool) -> tuple[float | None, object]:
        """Loss and output of forwards that are through."""
        mode, engine, _, microbatches, _ = begun
        model_loss, num_replicas = self._run.options.model_loss, self._run.num_replicas
        outputs = _outputs(engine)
        loss = None
        if has_loss:
            found, _ = engine.ranks[0].worker.updates.total(0)
            loss = found.mean * found.counts if self._adds_up and found.counts is not None else found.mean
        if not outputs:
            return loss, None
        values = self._join(_columns(engine), like=microbatches[0])
        form = mode.inference.output_form
        slot = None if model_loss is None else model_loss.find_slot(form)
        kind = None if slot is None else outputs[min(outputs)][slot]
        if model_loss is not None and slot is not None and kind is not None and not kind.dim():
            whole: object = loss
            if loss is None:  # the mean of the batch, not each microbatch's
                weights = model_loss.weigh([microbatches[k // num_replicas] for k in sorted(outputs)])
                pairs = zip((form.assemble(outputs[k]) for k in sorted(outputs)), weights, strict=True)
                whole = sum(model_loss(*pair)[0] for pair in pairs) / sum(weights)
            values[slot] = torch.as_tensor(whole, dtype=kind.dtype, device=kind.device)
        return loss, form.assemble(values)

    def num_microbatches(self, given: Given) -> int:
        """M, or fewer for a batch of fewer samples; the same on every rank. Collective over data replicas."""
        num_replicas = self._run.num_replicas
        most = self._run.layout.schedule.num_microbatches // num_replicas
        check_batch(given, most if given.microbatches else 1)
        fitting = min(given.num_samples, most)
        if num_replicas > 1:
            with self._run.guard.together():
                fitting = min(
                    self._run.collectives.gather(fitting, what="agreeing on the microbatches of an evaluation")
                )
        return fitting * num_replicas


def _outputs(engine: Engine) -> dict[int, Tensors]:
    """Flat outputs of the microbatches that end in this process, by number."""
    return {k: flat for local in engine.ranks for k, flat in local.worker.outputs.items()}


def _columns(engine: Engine) -> list[Tensors]:
    outputs = _outputs(engine)
    return list(zip(*(outputs[k] for k in sorted(outputs)), strict=True))
