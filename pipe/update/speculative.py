"""post_validation=True: updates made before the norm of all gradients is known, and taken back where it says otherwise.

    rank 0 | F F B F B B [step] F F [confirm] B F B B        zb-h2 and its like: a rank that is through goes on with the
    rank 1 |   F B F B B [step] F   [confirm] B F B B        next batch, and does not wait for the last one

Clipping and float16's loss scale need something of all ranks: whether the global norm is too large, whether a gradient
overflowed. The sum begins behind a rank's last backward and is waited for behind the warm-up of the next batch. Until
then a rank supposes that nothing is to be clipped or skipped, steps, and keeps what the step changes. Where it was
wrong, all ranks learn it from the same sum: each puts back what it kept, steps with clipped gradients, or not at all,
and begins the batch again (see `lowering.course`). It is the post-validation of Qi et al. (ICLR 2024). There partial
norms go from rank to rank; here it is one sum, since after a wrong guess all ranks begin again.

A batch behind one that was clipped or skipped waits for its norm: such batches come in rows.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...partition.model.forms import copied
from ..batch.batches import Batch, NonFiniteLossError
from ..batch.results import Known, Together
from ..shards.shard import Sharding
from .flush import FlushUpdate
from .gradients import clip_factor, norm_of, norm_part, scale_gradients
from .interface import Programs, TakeBack
from .loss_scale import unscale
from .optimizers import StageOptimizers, parameters_of
from .options import Group, copied_option, differences, options_of, set_options

_Gradients = Sequence[tuple[nn.Parameter, torch.Tensor | None]]


def refuse_sharding(sharding: Sharding) -> None:
    """ValueError where ranks divide optimizer state or weights: what each has updated goes to the others at once."""
    if sharding.is_any:
        raise ValueError(
            "post_validation=True beside data_parallel='zero1' or 'fsdp': the ranks of a stage tell each other their "
            "parts of the new weights right behind the update, which could not be taken back. Expected "
            "data_parallel='replicate', or post_validation=False"
        )


def _buffers_of(root: nn.Module) -> Callable[[], None]:
    """Copies of the buffers of a model's modules, since forwards may change them; the answer puts them back."""
    places = [
        (module, name, buffer, buffer.detach().clone())
        for module in root.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta
    ]

    @torch.no_grad()
    def put_back() -> None:
        for module, name, buffer, before in places:
            buffer.copy_(before)
            module._buffers[name] = buffer  # the same objects

    return put_back


@dataclass(slots=True)
class _Pending:
    """An update that is not confirmed.

    sums: [3] float64: what all ranks' gradients add to the norm, whether one is not a number, overflows.
    kept: from before the step; None: it waits for the norm.
    """

    known: Known
    sums: torch.Tensor
    wait: Callable[[], None]
    gradients: _Gradients
    max_norm: float | None
    kept: _BeforeUpdate | None = None
    result: Known | None = None

    def outcome(self, together: Together = nullcontext) -> Known:
        """The global norm and whether a gradient overflowed; blocks until all ranks have told."""
        if self.result is None:  # else also behind close()
            with together():
                self.wait()
            norm = None if self.max_norm is None else norm_of(self.sums[:2])
            self.result = self.known._replace(grad_norm=norm, skipped=bool(self.sums[2] > 0))
        return self.result

    def factor(self) -> float:
        norm = self.outcome().grad_norm
        return 1.0 if norm is None or self.max_norm is None else clip_factor(norm=norm, max_norm=self.max_norm)


class SpeculativeUpdate(FlushUpdate):
    """The updates of one process under a flush schedule, ahead of the norm of all gradients."""

    def __init__(self, *made_of: Any) -> None:
        super().__init__(*made_of)
        self._pending: _Pending | None = None
        self._waits = False  # for the norm of the next batch before its step
        self._writes_gradients: bool | None = None  # whether a step does; None before the first
        self._confirmed: deque[Known] = deque(maxlen=2)  # the newest: a call confirms two batches at most

    @property
    def is_ahead(self) -> bool:
        return self._pending is not None

    def begin(self, batch: Batch) -> Programs:
        """Refuses what the user has changed behind an update that may be taken back."""
        if self._pending is not None:
            if self.loss_scale is not None and self.loss_scale.changed_outside():
                raise ValueError(
                    "the scale of grad_scaler= was changed behind an update that is not confirmed, and may itself "
                    "change it: expected pipe.flush() before the change, or post_validation=False"
                )
            self._refuse_changed_weights(self._pending)
        return super().begin(batch)

    def passes(self, batch: Batch, programs: Programs, take_back: TakeBack) -> Iterator[tuple[Programs, bool]]:
        """With weights that are not confirmed the warm-up (again, where they were not right), then the rest."""
        if self._pending is None:
            yield programs, False
            return
        begun = self._programs.warm_up
        first = {rank: begun.first[rank] for rank in programs}
        under_way = {rank: begun.under_way[rank] for rank in programs}
        parts = [part._replace(target=copied(part.target)) for part in batch.parts]  # a loss may change them in place
        put_buffers_back = _buffers_of(self.ownership.model.root)
        yield first, True
        try:
            is_right = self._confirm()
        except BaseException as error:
            self.lose(error)
            take_back(under_way)
            raise
        if not is_right:
            put_buffers_back()
            take_back(under_way)
            for recorder in self.recorders.values():
                recorder.begin_again()
            batch.parts[:] = parts
            yield first, True
        yield {rank: begun.rest[rank] for rank in programs}, False

    def step(self) -> Known:
        """Gradients are ready: step, and say what is known."""
        assert self._known is not None
        known = self._known
        pending = self._pending = self._begin(known)
        for parameter in self._parameters:
            parameter.grad = None
        if self._waits:
            self._resolve()
            return self._confirmed[-1]
        pending.kept = _BeforeUpdate(self.stages)
        if self._writes_gradients is not False:
            given = pending.gradients
            pending.gradients = [(p, None if g is None else g.clone()) for p, g in given]
            self._apply(given, known, 1.0, skipped=False)
            self._writes_gradients = not _are_same(given, pending.gradients)
        else:
            self._apply(pending.gradients, known, 1.0, skipped=False)
        pending.kept.updated()
        return known._replace(later=pending.outcome)

    def settle(self) -> None:
        if self._pending is not None:
            self._refuse_changed_weights(self._pending)
            self._confirm()

    def lose(self, error: BaseException) -> None:
        super().lose(error)
        if not isinstance(error, NonFiniteLossError):
            self._forget()

    def waiting(self) -> Sequence[Known]:
        return tuple(self._confirmed)

    def restart(self) -> None:
        super().restart()
        self._forget()

    def _forget(self) -> None:
        self._pending, self._waits = None, False
        self._confirmed.clear()

    def _confirm(self) -> bool:
        recorder = next(iter(self.recorders.values()))
        start = recorder.clock.stamp()
        is_right = self._resolve()
        recorder.norm(start, recorder.clock.stamp())
        return is_right

    def _resolve(self) -> bool:
        """Make the update what it should be, if it is not; returns, the same on every rank, whether the weights were
        right as they stood: else a warm-up that ran with them runs again.

        Raises NonFiniteLossError, on every rank alike, where the loss scale has shrunk to 0.
        """
        pending, self._pending = self._pending, None
        assert pending is not None
        outcome, factor = pending.outcome(), pending.factor()
        is_plain = factor == 1.0 and not outcome.skipped
        self._waits = not is_plain
        is_right = is_plain and pending.kept is not None
        if not is_right and pending.kept is not None:
            self.gate.enter()
            pending.kept.put_back()
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=outcome.skipped)
            self.loss_scale.publish()
        if not is_right:
            held = [parameter.grad for parameter in self._parameters]
            self._apply(pending.gradients, pending.known, factor, skipped=outcome.skipped)
            if pending.kept is not None:
                pending.kept.change_again()
            for parameter, gradient in zip(self._parameters, held, strict=True):
                parameter.grad = gradient
        self._confirmed.append(outcome)
        return is_right

    def _refuse_changed_weights(self, pending: _Pending) -> None:
        changed = None if pending.kept is None else pending.kept.changed_outside()
        if changed is not None:
            name = next((name for name, each in self._named.items() if each is changed), "of an optimizer")
            raise ValueError(
                f"parameter {name!r} was changed in place behind an update that is not confirmed, and may be taken "
                f"back with the change: expected pipe.flush() before the change, or post_validation=False"
            )

    def _begin(self, known: Known) -> _Pending:
        overflowed = torch.zeros((), dtype=torch.float64, device=self.run.options.device)
        if self.loss_scale is not None:
            overflowed += unscale(_grads(self._parameters), self.loss_scale.value, device=self.run.options.device)
        part = torch.zeros(2, dtype=torch.float64, device=self.run.options.device)
        if self._max_grad_norm is not None:
            part = norm_part(_grads(self._counted), device=self.run.options.device)
        sums = torch.cat([part, overflowed[None]])
        return _Pending(
            known=known,
            sums=sums,
            wait=self.run.collectives.begin_all_reduce(sums, what="summing the gradient norm"),
            gradients=[(parameter, parameter.grad) for parameter in self._parameters],
            max_norm=self._max_grad_norm,
        )

    def _apply(self, gradients: _Gradients, known: Known, factor: float, *, skipped: bool) -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if not skipped:
            scale_gradients(_grads(self._parameters), factor)
        self.gate.enter()
        self._step_optimizers(known.loss, skipped)


class _BeforeUpdate:
    """Parameters, optimizer state, options and learning-rate schedules before an update.

    What is changed in options between the update and `put_back`, such as a learning rate by the user, is meant for what
    comes behind: `put_back` says it again behind the update that is made instead.

    Raises ValueError, at `updated`, for an optimizer that keeps numbers of its own outside of its state.
    """

    def __init__(self, stages: Sequence[StageOptimizers]) -> None:
        self._optimizers = [optimizer for one in stages for optimizer in one.optimizers]
        self._schedulers = [scheduler for one in stages for scheduler in one.schedulers]
        self._values = [(p, p.detach().clone()) for one in self._optimizers for p in parameters_of(one)]
        self._states = [
            {p: {key: copied_option(value) for key, value in own.items()} for p, own in optimizer.state.items()}
            for optimizer in self._optimizers
        ]
        self._groups = options_of(self._optimizers)
        self._scheduled = [copy.deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]
        self._others = [_numbers(optimizer) for optimizer in self._optimizers]
        self._versions: list[int] = []
        self._after: list[Group] = []
        self._changed: list[Group] = []

    def updated(self) -> None:
        for optimizer, before in zip(self._optimizers, self._others, strict=True):
            name = next((name for name, value in _numbers(optimizer).items() if before.get(name) != value), None)
            if name is not None:
                raise ValueError(
                    f"optimizer {type(optimizer).__name__} changes its attribute {name!r} in a step, which "
                    f"post_validation=True could not take back: expected an optimizer that keeps what it counts in its "
                    f"state, or post_validation=False"
                )
        self._after = options_of(self._optimizers)
        self._versions = [parameter._version for parameter, _ in self._values]

    def changed_outside(self) -> nn.Parameter | None:
        """A parameter that was changed in place behind the update: `put_back` would lose that."""
        pairs = zip(self._values, self._versions, strict=True)
        return next((parameter for (parameter, _), version in pairs if parameter._version != version), None)

    @torch.no_grad()
    def put_back(self) -> None:
        self._changed = differences(self._after, options_of(self._optimizers))
        for parameter, value in self._values:
            parameter.copy_(value)
        for optimizer, states in zip(self._optimizers, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(states)
        set_options(self._optimizers, self._groups)
        for scheduler, scheduled in zip(self._schedulers, self._scheduled, strict=True):
            scheduler.load_state_dict(scheduled)

    def change_again(self) -> None:
        set_options(self._optimizers, self._changed)


def _numbers(optimizer: torch.optim.Optimizer) -> Mapping[str, object]:
    """Public attributes that a step might count in."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and isinstance(value, bool | int | float | str)
    }


def _grads(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in parameters]


def _are_same(some: _Gradients, others: _Gradients) -> bool:
    return all(
        one is None or (other is not None and (one.is_sparse or torch.equal(one, other)))
        for (_, one), (_, other) in zip(some, others, strict=True)
    )
