"""`pipe.verify`: one batch through the plain module and through the pipeline, compared; the same result on every rank.

every rank   evaluates and trains on the batch as usual, but no optimizer steps
the judge    (the process of the last stage) gets all weights before and all gradients after, runs the plain
             module, compares
every rank   gets the verdict; buffers, gradients, versions and the step count are restored
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from ...partition.model.forms import Tensors
from ...partition.model.untouched import StateSnapshot, untouched
from ...partition.profiler.memory import give_back
from ..batch.agreement import is_shape_alone
from ..batch.batches import read_loss, share_of_sum
from ..checkpoint.state import State
from ..run.evaluation import Evaluation
from ..settings.given import Given
from ..telling import tell
from ..update.gradients import added, clip_factor
from .compare import Outcome, changed_by_order, changed_by_rounding, first_difference, one_of_many
from .parts import Regions, UnitsBeside
from .plain import NotVerifiableError, PlainModule, Watch

_LARGE = 2**26
_Moved = tuple[torch.Tensor, torch.Tensor]  # a buffer before and after the batch


class VerificationError(ValueError):
    """Raised if pipeline and plain module disagree, with the first difference and its likely cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of a verification: what was compared, and what it took.

    Arguments:
        num_gradients: number of parameters whose gradients agree.
        seconds: of the whole comparison [s].
        copy_bytes: parameters and buffers of the plain module in the judge's process [bytes]; their gradients and the
            activations of one microbatch of the whole model were held in addition. By unit: of the largest unit.
    """

    num_gradients: int
    seconds: float
    copy_bytes: int


class Verifier:
    """Verifies batches with a copy, or units, in the process that judges; `regions` are what a tensor group divides."""

    def __init__(
        self, state: State, plain: PlainModule | UnitsBeside | None, *, regions: Regions | None, evaluation: Evaluation
    ) -> None:
        self._run = run = state.run
        self._plain = plain if isinstance(plain, PlainModule) else None
        self._units = plain if isinstance(plain, UnitsBeside) else None
        self._regions = regions
        self._training = state.training
        self._evaluation = evaluation
        self._update = state.update
        self._ownership = state.ownership
        self._parts = state.ownership.model
        self._collectives = run.collectives
        self._options = run.options
        self._is_alone = not run.layout.place.world.distributed  # the user's code may change the model between batches
        self._tolerance = 0.0
        self.owes_evaluation = False  # whether a batch is still to be compared in evaluation mode

    def verify(self, given: Given, *, evaluates: bool = True) -> Verification:
        """See PipelineModule.verify. Collective. Without `evaluates` only training is compared (`owes_evaluation`)."""
        found = self._by_unit(self._units, given) if self._units else self._verified(given, evaluates=evaluates)
        if found.copy_bytes > _LARGE:  # less may be used again by steps
            give_back(self._options.device)
        return found

    def _verified(self, given: Given, *, evaluates: bool) -> Verification:
        self._options.require_loss()
        if self._is_alone:
            self._plain = self._copy()
        elif not self._run.verifies:
            raise NotVerifiableError(
                "verify: each process has freed the other stages' weights, so that none can run the plain module. "
                "Expected PipelineModule(..., verify=True), which keeps the model's structure where the last stage is"
            )
        self._refuse_dropout_of_parts()
        started = time.perf_counter()
        has_no_values = self._plain is not None and is_shape_alone((given.inputs, given.targets))
        with self._run.guard.together():
            has_no_values = any(self._collectives.gather(has_no_values, what="asking who has values for verify"))
        if has_no_values:
            raise NotVerifiableError(
                "verify: the process of the last stage runs the plain module, and was passed meta tensors: expected "
                "the values of inputs and target there"
            )
        self._training.drain()
        with self._run.guard.together(), self._update.shards.whole_weights():
            weights = self._ownership.full_state_dict(self._collectives)
        step = self._training.num_steps
        before = self._own_buffers()
        with self._left_as_it_was() as kept:
            has_parts = self._run.layout.place.context[1] > 1  # of outputs, which are compared in training alone
            outputs = self._evaluation.columns(given.copied()) if evaluates and not has_parts else None
            if outputs is not None:
                kept.begin_again()
            with self._seen(), self._run.seeder.drawing_apart() as apart:
                loss, own = self._train(given.copied(), step)
                drew_apart = apart()
            known = [rank.losses.get(0, {}) for rank in self._update.ranks.values()]  # a stream keeps none
            losses = {k: float(loss) / float(count or 1.0) for each in known for k, (loss, count) in each.items()}
            after = self._own_buffers()
        with self._run.guard.together():
            in_region = self._look_at_regions()
            told = self._collectives.gather((drew_apart, losses), what="comparing a batch with the plain model")
            moved = self._gather_moved(before, after)
            gradients = self._gather(own)
            batches = self._gather_batches(given)
            verdict: str | None = None
            if self._plain is not None:
                piped = Outcome(loss=loss, gradients=gradients, buffers={}, outputs=outputs)
                verdict = self._judge_it(
                    self._plain, weights, moved=moved, batches=batches, piped=piped, step=step, told=told
                )
            said = self._collectives.gather((in_region, verdict), what="sharing what verify found")
        verdict = next((one for column in zip(*said, strict=True) for one in column if one is not None), None)
        if verdict is not None:
            raise VerificationError(verdict)
        self.owes_evaluation = not evaluates
        return Verification(
            num_gradients=sum(gradient is not None for gradient in gradients.values()),
            seconds=time.perf_counter() - started,
            copy_bytes=sum(tensor.numel() * tensor.element_size() for tensor in weights.values()),
        )

    def _by_unit(self, units: UnitsBeside, given: Given) -> Verification:
        started = time.perf_counter()
        self._training.drain()
        step = self._training.num_steps
        with self._left_as_it_was():
            with units.seen(), self._seen():
                self._train(given.copied(), step)
            with self._run.guard.together():
                in_region = self._look_at_regions()
                with self._update.shards.whole_weights():
                    own = units.compare(step=step)
                said = self._collectives.gather((in_region, own), what="sharing what verify found")
        regions, found = zip(*said, strict=True)
        if verdict := next(filter(None, [*regions, *(each.verdict for each in found)]), None):
            raise VerificationError(verdict)
        names = {name for each in found for name in each.gradients}
        if left := list({f"{name!r}: {why}": None for each in found for name, why in each.left_out.items()}):
            what = "verify leaves out units" if names else "the first batch is not verified, as no unit can be"
            tell(f"{what} ({len(left)}; {'; '.join(left[:3])})", rank=self._run.layout.place.world.rank)
        copy_bytes = max(each.copy_bytes for each in found)
        return Verification(num_gradients=len(names), seconds=time.perf_counter() - started, copy_bytes=copy_bytes)

    def verify_evaluation(self, given: Given) -> None:
        """Verifies the first evaluation, if no verified batch had one. In one process."""
        self._training.drain()
        plain, weights = self._copy(), self._ownership.full_state_dict(self._collectives)
        parts = given.copied().on(self._options.device).cut(self._evaluation.num_microbatches(given))
        with untouched(self._parts.root, device=self._options.device):
            outputs = self._evaluation.columns(given.copied())
        piped = Outcome(loss=0.0, gradients={}, buffers={}, outputs=outputs)
        with self._loaded(plain, weights, {}) as (watch, _):
            watch.tolerance = self._tolerance
            entering, step = watch.entering(self._parts.entering), self._training.num_steps
            outputs = plain.evaluate(list(enumerate(parts)), self._run.seeder, entering=entering, step=step)
            watch.kept.begin_again()
            verdict = self._difference(replace(piped, outputs=outputs), piped, watch)
        if verdict is not None:
            raise VerificationError(verdict)
        self.owes_evaluation = False

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """Context in which divided modules are recorded; the tensor group then compares no gradients itself."""
        regions = nullcontext() if self._regions is None else self._regions.seen()
        with regions, self._ownership.group.compared_by_verify():
            yield

    def _copy(self) -> PlainModule:
        return PlainModule(self._run.root, self._options.loss_fn, given=self._options.model is None)

    @contextmanager
    def _loaded(
        self, plain: PlainModule, weights: Mapping[str, torch.Tensor], moved: Mapping[str, _Moved]
    ) -> Iterator[tuple[Watch, dict[str, torch.Tensor]]]:
        """Context with weights and buffers in the plain module; gives a Watch and copies of the buffers."""
        plain.load(weights, self._options.device)
        buffers = plain.set_buffers({name: before for name, (before, _) in moved.items()})
        is_divided = self._regions is not None or self._run.layout.place.expert[1] > 1
        plain.follow(is_divided=is_divided, is_new=self._is_alone)
        with untouched(plain.root, plain.loss_fn, device=self._options.device) as kept:  # hooks are the user's modules'
            yield Watch(plain.root, kept), buffers
        plain.unload()

    def _difference(self, plain: Outcome, piped: Outcome, watch: Watch, **more: Any) -> str | None:
        names = self._parts.names
        return first_difference(
            plain,
            piped,
            tolerance=watch.tolerance,
            stage_of={
                name: f"stage {stages[0]}: {names[stages[0]]}" for name, stages in self._ownership.stages.items()
            },
            suspects=watch.suspects(),
            **more,
        )

    def _refuse_dropout_of_parts(self) -> None:
        """Dropout cannot be compared over parts of the sequence: for whole microbatches the masks differ."""
        if self._update.schedule.num_slices == self._run.layout.place.context[1] == 1:
            return
        for name, module in self._parts.root.named_modules():
            probability = getattr(module, "p" if isinstance(module, _DropoutNd) else "dropout", 0.0)
            if module.training and isinstance(probability, float) and probability > 0:
                raise NotVerifiableError(
                    f"verify over parts of the sequence, and {name} ({type(module).__name__}) drops out: whole "
                    f"microbatches draw other masks than their parts. Expected dropout of 0, or verify=False"
                )

    def _look_at_regions(self) -> str | None:
        """Error of a module that this process's tensor group divides. Collective over the group."""
        if self._regions is None:
            return None
        group = self._ownership.group
        members, what = self._collectives.tensor_members, "comparing inputs of divided modules"
        together = partial(self._collectives.gather_among, members, what=what)
        with untouched(self._parts.root, device=self._options.device):
            return self._regions.first_difference(shard=group.shard, full=group.gather, together=together)

    def _judge_it(
        self,
        plain: PlainModule,
        weights: Mapping[str, torch.Tensor],
        *,
        moved: Mapping[str, _Moved],
        batches: Sequence[Given],
        piped: Outcome,
        step: int,
        told: Sequence[tuple[bool, Mapping[int, float]]],  # of each process: whether it drew apart, and losses
    ) -> str | None:
        microbatches = self._microbatches(batches)
        place, last = self._run.layout.place, self._update.schedule.owners[-1]
        parts = self._update.schedule.num_slices * self._run.layout.place.context[1]
        group_size = self._update.schedule.group_size // parts
        with self._loaded(plain, weights, moved) as (watch, buffers):
            loss_fn = plain.loss_fn
            assert callable(loss_fn)
            share = share_of_sum(loss_fn, group_size)
            entering, outputs = watch.entering(self._parts.entering), None
            if piped.outputs is not None:
                evaluated = [(k, one) for k, one in microbatches if last[k % len(last)] in place.local_ranks]  # its own
                outputs = plain.evaluate(evaluated, self._run.seeder, entering=entering, step=step)
                watch.kept.begin_again()
            groups = [microbatches[begin : begin + group_size] for begin in range(0, len(microbatches), group_size)]
            run = partial(
                plain.run,
                loss_of=watch.loss_of(lambda output, target: read_loss(loss_fn(output, target), share)),
                seeder=self._run.seeder,
                entering=entering,
                step=step,
                loss_scale=self._loss_scale(),
                adders=1 if self._is_alone else len(last),
            )
            outcome = replace(run(groups), outputs=outputs)
            losses = {k: (plain.losses[k], x) for _, own in told if parts == 1 for k, x in own.items()}

            def sample(number: int, each: Callable[..., None] | None = None) -> Mapping[str, torch.Tensor | None]:
                own = plain.set_buffers({})
                plain.load(weights, self._options.device, rounding=watch.rounding * bool(number), number=number)
                plain.set_buffers(buffers)
                at = number % group_size  # so many of the first microbatches come last
                again = run([[*group[at:], *group[:at]] for group in groups], each=each)
                plain.set_buffers(own)
                return again.gradients

            moved_on = buffers | {name: after for name, (_, after) in moved.items()}
            piped = replace(piped, buffers={name: x for name, x in moved_on.items() if self._is_compared(name)})
            if any(drew for drew, _ in told):  # masks of divided activations differ: regions were compared without
                outcome, losses = replace(outcome, loss=piped.loss, gradients={}, buffers={}), {}
                piped = replace(piped, gradients={}, buffers={})
            self._tolerance = watch.tolerance
            limit = self._options.timeout / 2  # the other ranks wait meanwhile
            adders = {len(ranks) for ranks in self._update.schedule.owners}
            adders |= {1} if self._is_alone and self._update.schedule.is_asynchronous else set()  # as here
            sums = {name: len(stages) * parts * len(adders) for name, stages in self._ownership.stages.items()}
            more: dict[str, Any] = {"rounding": changed_by_rounding(outcome.gradients, sample, seconds=limit)}
            again, count = partial(sample, 0), len(microbatches)
            many = partial(one_of_many, **more, count=count, losses=losses, sums=sums, again=again)
            return self._difference(outcome, piped, watch, **more, summing=changed_by_order(again, count), closer=many)

    def _microbatches(self, batches: Sequence[Given]) -> list[tuple[int, Given]]:
        """All microbatches by number, in order: microbatch j of data replica q is number j D + q."""
        members, device = self._run.layout.place.context[1], self._options.device
        own = self._update.schedule.num_microbatches // (len(batches) * members)
        found: list[tuple[int, Given]] = []
        loss = self._options.model_loss
        for replica, given in enumerate(batches):
            parts = given.copied().on(device).cut(own)
            if loss is not None:
                weights = loss.weigh([part.arguments for part in parts])
                parts = [replace(part, target=weight) for part, weight in zip(parts, weights, strict=True)]
            found += [(j * len(batches) + replica, part) for j, part in enumerate(parts)]
        return sorted(found, key=lambda one: one[0])

    def _train(self, given: Given, step: int) -> tuple[float, dict[str, torch.Tensor | None]]:
        taken: dict[str, torch.Tensor | None] = {}
        giver: dict[str, int] = {}  # replicas and tied weights in one process have equal gradients: one of them counts

        def take(position: int, name: str, gradient: torch.Tensor | None) -> None:
            if giver.setdefault(name, position) == position:
                taken[name] = added(taken.get(name), gradient)

        if not self._update.schedule.is_asynchronous:
            result = self._training.accumulate(given)
            assert result.loss is not None
            scale = self._loss_scale()
            return result.loss, {
                name: p.grad if p.grad is None or scale == 1.0 else p.grad / scale
                for name, p in self._ownership.named_parameters()
            }
        with ExitStack() as stack:
            for position, one in enumerate(self._update.stages):
                stack.enter_context(one.held_back(partial(take, position)))
            results = [self._training.step(given, is_reported=False), *self._training.flush()]
        result = next(result for result in reversed(results) if result.loss_step == step)
        assert result.loss is not None
        if self._update.shards.parts:
            with self._run.guard.together():
                taken = self._update.shards.whole_gradients(taken)
        limit = self._options.max_grad_norm
        if limit is not None and result.grad_norm is not None:
            factor = clip_factor(norm=result.grad_norm, max_norm=limit)
            taken = {name: None if g is None else g / factor for name, g in taken.items()}
        return result.loss, taken

    def _loss_scale(self) -> float:
        scale = self._update.loss_scale
        return 1.0 if scale is None else scale.value

    def _is_compared(self, name: str) -> bool:
        """Whether every microbatch passes through the buffer; each replica sees only some."""
        owners = self._update.schedule.owners
        stages = self._ownership.stages.get(name, ())  # none: a forward made it, and it is removed again
        return bool(stages) and all(len(owners[stage]) == 1 for stage in stages)

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        return {
            name: buffer.detach().clone()
            for name, buffer in self._parts.root.named_buffers()
            if not buffer.is_meta and self._is_compared(name) and self._ownership.is_local(name)
        }

    def _gather_moved(self, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> dict[str, _Moved]:
        """Buffers of all processes that the batch changed; others, such as large masks, are not sent."""
        own = {name: (x.cpu(), after[name].cpu()) for name, x in before.items() if not torch.equal(x, after[name])}
        everyone = self._collectives.gather(own, what="gathering buffers for verify")
        return {name: pair for moved in everyone for name, pair in moved.items()}

    def _gather(self, own: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """Gradients of all parameters in the judge's process; empty tensors elsewhere."""
        self._ownership.follow_kinds(self._collectives)
        names = [name for name, gradient in own.items() if gradient is not None]
        present = {*chain(*self._collectives.gather(names, what="gathering gradients for verify"))}
        gathered: dict[str, torch.Tensor | None] = {}
        for name, parameter in self._ownership.parameters():
            gathered[name] = None
            if name in present:
                mine = own.get(name)
                tensor = parameter.detach() if mine is None else mine
                tensor = tensor.to_dense() if tensor.is_sparse else tensor
                value = self._ownership.whole(name, tensor, self._collectives, what="gathering the gradient of")
                gathered[name] = value if self._plain is not None else value.new_empty(0)
        return gathered

    def _gather_batches(self, given: Given) -> list[Given]:
        mine, count = self._run.layout.place.data
        if count == 1:
            return [given]
        speaks = self._update.schedule.num_stages - 1 in self._run.local_stages
        own = (mine, [(part.arguments.tensors, part.target) for part in given.parts]) if speaks else None
        spoken = self._collectives.gather(own, what="gathering batches for verify")

        def of(passed: Sequence[tuple[Tensors, object]]) -> Given:
            parts = [
                replace(part, arguments=replace(part.arguments, tensors=tensors), target=target)
                for part, (tensors, target) in zip(given.parts, passed, strict=True)
            ]
            return replace(parts[0], microbatches=tuple(parts) if given.microbatches else ())

        by_replica = {replica: of(passed) for replica, passed in (one for one in spoken if one is not None)}
        return [by_replica[replica] for replica in range(count)]

    @contextmanager
    def _left_as_it_was(self) -> Iterator[StateSnapshot]:
        training, update = self._training, self._update
        gradients = [(parameter, parameter.grad) for _, parameter in self._ownership.named_parameters()]
        versions = [
            (one.versions, one.versions.newest, pytree.tree_map(torch.clone, one.versions.older()))
            for one in update.stages
            if one.versions
        ]
        scale = None if update.loss_scale is None else update.loss_scale.content()
        put_results_back, step = update.set_aside(), training.num_steps
        for parameter, _ in gradients:
            parameter.grad = None
        for weights, newest, _ in versions:  # the plain module has the newest weights alone
            weights.restore(newest, {})
        try:
            roots = self._parts.root, *self._options.user_code
            with untouched(*roots, device=self._options.device) as kept, ExitStack() as exact:
                for each in self._run.added:
                    exact.enter_context(each.exact())
                yield kept
        finally:
            training.restart(step)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            if not update.is_lost:
                for weights, newest, older in versions:
                    weights.restore(newest, older)
                if update.loss_scale is not None and scale is not None:
                    update.loss_scale.load(scale)
                update.restart()
                put_results_back()
