"""Evaluation: forwards alone, in evaluation mode."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from ...partition.model.forms import Arguments, Form, Tensors
from ...partition.model.modes import evaluating
from ...schedules.messages import Sharing
from ..batch.agreement import Call, agreed
from ..batch.batches import check_same_batch, join_outputs, share_of_sum
from ..batch.reader import BatchReader
from ..results import EvalResult
from ..settings.given import Given, check_batch, check_like_example
from ..stage.shapes import Signature
from ..stage.tokens import TokenBlocks, Tokens
from ..stage.wiring import Mode
from ..update.flush import batch_programs
from ..update.interface import Programs
from ..update.rank_update import RankUpdate
from .engine import Engine
from .ranks import Ranks, links_of
from .training import Training
from .worker import EvaluationWorker

# What runs batches of one number of microbatches, over the transports and recorders of the ranks that train.
_Forwards = tuple[Mode, BatchReader, Engine, Programs]
_Ran = tuple[Mode, Engine, Sequence[Arguments]]  # a batch that has run forwards, by microbatch


def warn_of_two_axes(dimensions: Sequence[tuple[int, ...]], how: str, *, num_samples: int) -> None:
    """Warn of outputs with the batch on several axes, which combine samples within a microbatch only."""
    numbers = " and ".join(str(number) for number, axes in enumerate(dimensions) if len(axes) > 1)
    if numbers:
        warnings.warn(
            f"output {numbers} of the model has the batch on two axes, as similarities have: those of a microbatch of "
            f"{num_samples} alone; {how}. Expected num_microbatches=1 for all of the batch (docs/guides/models.md)",
            stacklevel=2,
        )


class Evaluation:
    """Runs forwards of batches; one of fewer samples than M makes fewer microbatches. A model that returns its own loss
    is trained with labels and predicts without them, with the same stages."""

    def __init__(self, ranks: Ranks, mode: Mode | None, *, like: Arguments, training: Training) -> None:
        self._run = run = ranks.update.run
        self._ranks = ranks
        self._like = like
        self._modes: dict[Form, tuple[Mode, Arguments]] = {} if mode is None else {like.form: (mode, like)}
        self._forwards: dict[object, _Forwards] = {}
        self._adds_up = share_of_sum(run.options.loss_fn, 1) is not None
        self._training = training
        self._dimensions: dict[Form, Sequence[int | None]] = {}
        self._tried = set[Form]()  # whether a context group evaluates their parts as it would the whole

    def step(self, given: Given, *, at_rest: bool = True) -> EvalResult:
        """The result of a batch; unless `at_rest` without draining a stream first."""
        has_loss = self._run.has_loss
        with self._evaluated(given, "eval_step", has_loss=has_loss, at_rest=at_rest) as ran:
            loss, output = self._result(ran, has_loss=has_loss)
        return EvalResult(loss=loss, output=output)

    def predict(self, given: Given) -> object:
        with self._evaluated(given, "predict", has_loss=False) as ran:
            return self._result(ran, has_loss=False)[1]

    @property
    def is_prepared(self) -> bool:
        return self._like.form in self._modes

    def prepare(self) -> None:
        self._mode_for(self._like, has_loss=self._run.has_loss)

    def takes(self, given: Given) -> bool:
        return given.parts[0].arguments.form == self._like.form

    def columns(self, given: Given) -> list[Tensors]:
        with self._evaluated(given, "verify", has_loss=False) as (_, engine, _):
            return _columns(engine)

    def _join(self, columns: Sequence[Tensors], *, like: Arguments) -> list[torch.Tensor | list[torch.Tensor]]:
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

    def _forwards_for(self, num_microbatches: int, *, has_loss: bool, like: Arguments) -> _Forwards:
        key = num_microbatches, has_loss, like.form
        if key not in self._forwards:
            mode, first = self._mode_for(like, has_loss=has_loss)
            mode, shards = mode.forwards(num_microbatches), self._ranks.update.shards
            collectives = self._run.layout.sharding.collectives()
            sharing = Sharing(loss=has_loss, collectives=collectives, receives_ahead=mode.receives_ahead)
            programs = batch_programs(mode.schedule, sharing)
            updates = {rank: RankUpdate(rank, mode.schedule, shards) for rank in self._ranks.stages}
            reader = self._ranks.reader(mode, has_loss=has_loss, like=first)
            engine = self._ranks.engine(EvaluationWorker, mode, updates)
            self._forwards[key] = mode, reader, engine, {rank: programs[rank] for rank in updates}
        return self._forwards[key]

    def _mode_for(self, like: Arguments, *, has_loss: bool) -> tuple[Mode, Arguments]:
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

    @contextmanager
    def _evaluated(self, given: Given, call: Call, *, has_loss: bool, at_rest: bool = True) -> Iterator[_Ran]:
        """Context in which a batch has run its forwards. Collective."""
        run = self._run
        num_microbatches = self.num_microbatches(given)
        cut = given.on(run.options.device).cut(num_microbatches // run.num_replicas)
        with run.guard.together():
            parts = self._own_parts(cut)
        microbatches = [each.arguments for each, _ in parts]
        mode, reader, engine, programs = self._forwards_for(num_microbatches, has_loss=has_loss, like=microbatches[0])
        batch = self._training.read(reader, given, call)
        with run.guard.together():
            self._training.unchanged.check(training=False)
            check_same_batch(batch, run.collectives, device=run.options.device)
        self._try_parts(mode, cut[0], parts[0])
        if at_rest:
            self._training.drain()
        for local in engine.ranks:
            local.worker.updates.enter(batch)
            local.recorder.begin(counts=False)
        try:
            with evaluating(*self._modules(mode)):
                engine.run(programs)
                self._gather_parts(mode, engine, cut, parts)
            yield mode, engine, microbatches
        finally:
            engine.drop()

    def _own_parts(self, cut: Sequence[Given]) -> list[tuple[Given, Tokens | None]]:
        """This member's tokens of each microbatch; without a context group all of them."""
        index, count = self._run.layout.place.context
        if count == 1:
            return [(each, None) for each in cut]
        from ..batch.slicing import part_of_group

        return [part_of_group(self._run.options, each, index=index, count=count) for each in cut]

    def _try_parts(self, mode: Mode, whole: Given, part: tuple[Given, Tokens | None]) -> None:
        """ValueError for stages that evaluate parts of such arguments otherwise than whole. Collective, once a form."""
        group, form = self._run.context_group, whole.arguments.form
        if group is None or form in self._tried:
            return
        from ..batch.slicing import check_parts

        own, span = part
        assert span is not None
        with self._ranks.update.shards.whole_weights(), evaluating(*self._modules(mode)):
            tried = partial(check_parts, self._run, mode.inference, whole, (own, span), group)
            agreed(tried, self._run.collectives, self._run.guard, what="trying the parts of a context group")
        self._tried.add(form)

    def _gather_parts(
        self, mode: Mode, engine: Engine, cut: Sequence[Given], parts: Sequence[tuple[Given, Tokens | None]]
    ) -> None:
        """Outputs of all tokens in place of those of this member's. Collective over the context group."""
        group = self._run.context_group
        if group is None:
            return
        from ..batch.slicing import sequence_dim

        for outputs in (local.worker.outputs for local in engine.ranks):
            for k, whole, (part, span) in zip(sorted(outputs), cut, parts, strict=False):
                assert isinstance(span, TokenBlocks)
                both = [mode.inference.of(Signature.of(each.arguments)).specs[-1] for each in (whole, part)]
                pairs = zip(outputs[k], zip(*both, strict=True), strict=True)
                dims = [(x, sequence_dim(specs, [span], "an output")) for x, specs in pairs]
                outputs[k] = tuple(x if dim is None else span.in_order(group.all(x, dim), dim) for x, dim in dims)

    def _result(self, ran: _Ran, *, has_loss: bool) -> tuple[float | None, object]:
        mode, engine, microbatches = ran
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
                losses = torch.stack([model_loss(*pair)[0] for pair in pairs])
                added = torch.stack([losses.double().sum(), torch.stack(weights).sum()])
                group = self._run.context_group
                added = added if group is None else group.sum(added)
                whole = added[0] / added[1]
            values[slot] = torch.as_tensor(whole, dtype=kind.dtype, device=kind.device)
        return loss, form.assemble(values)

    def num_microbatches(self, given: Given) -> int:
        """M, or fewer for a batch of fewer samples; the same on every rank. Collective over data replicas."""
        num_replicas = self._run.num_replicas
        most = self._run.layout.schedule.num_microbatches // num_replicas
        check_batch(given, most if given.microbatches else 1)
        fitting = min(given.num_samples, most)
        if num_replicas > len(self._run.collectives.context_members):  # which share a batch, as is checked first
            with self._run.guard.together():
                fitting = min(
                    self._run.collectives.gather(fitting, what="agreeing on the microbatches of eval_step or predict")
                )
        elif (members := self._run.layout.place.mesh.expert) > 1:  # of a plan, which run as many each
            if fitting < members:
                raise ValueError(
                    f"a batch of {fitting} samples over {members} members of an expert group: expected {members}"
                )
            fitting -= fitting % members
        return fitting * num_replicas


def _outputs(engine: Engine) -> dict[int, Tensors]:
    return {k: flat for local in engine.ranks for k, flat in local.worker.outputs.items()}


def _columns(engine: Engine) -> list[Tensors]:
    outputs = _outputs(engine)
    return list(zip(*(outputs[k] for k in sorted(outputs)), strict=True))
