"""Updates made before the norm of all gradients is known, and taken back where it says otherwise.

    rank 0 | F F B F B B [step] F F [confirm] B F B B        zb-h2 and its like: a rank that is through goes on with the
    rank 1 |   F B F B B [step] F   [confirm] B F B B        next batch, and does not wait for the last one

Clipping and float16's loss scale need something of all ranks: whether the global norm is too large, whether a gradient
overflowed. The sum begins behind a rank's last backward and is waited for behind the warm-up of the next batch. Until
then a rank supposes that nothing is to be clipped or skipped, steps, and keeps what the step changes. Where it was
wrong, all ranks learn it from the same sum: each puts back what it kept, steps with clipped gradients, or not at all,
and begins the batch again (see `lowering.warm_up`). It is the post-validation of Qi et al. (ICLR 2024). There partial
norms go from rank to rank; here it is one sum, since after a wrong guess all ranks begin again.

A batch behind one that was clipped or skipped waits for its norm: such batches come in rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ...comm import Collectives
from ..batch.results import UpdateResult
from ..parallel.sharding import Sharding
from .gate import UpdateGate
from .gradients import clip_factor, norm_of, norm_part, scale_gradients
from .interface import Known, Unconfirmed
from .kept import Kept
from .loss_scale import LossScale, unscale
from .optimizers import StageOptimizers

Step = Callable[[float | None, bool], None]  # (loss, skipped): every optimizer
_Gradients = Sequence[tuple[nn.Parameter, torch.Tensor | None]]


class _Buffer(NamedTuple):
    module: nn.Module
    name: str
    buffer: torch.Tensor
    copy: torch.Tensor


class Buffers:
    """Buffers of a model's modules as they were before a warm-up, since forwards may change them."""

    def __init__(self, root: nn.Module) -> None:
        self._places = [
            _Buffer(module, name, buffer, buffer.detach().clone())
            for module in root.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """They are as they were, and the same objects."""
        for module, name, buffer, copy in self._places:
            buffer.copy_(copy)
            module._buffers[name] = buffer


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
    kept: Kept | None = None
    result: UpdateResult | None = None

    def outcome(self) -> UpdateResult:
        """The global norm and whether a gradient overflowed; blocks until all ranks have told."""
        if self.result is None:
            self.wait()
            norm = None if self.max_norm is None else norm_of(self.sums[:2])
            self.result = UpdateResult(grad_norm=norm, skipped=bool(self.sums[2] > 0))
        return self.result

    def factor(self) -> float:
        """Factor that clipping multiplies gradients with."""
        norm = self.outcome().grad_norm
        return 1.0 if norm is None or self.max_norm is None else clip_factor(norm=norm, max_norm=self.max_norm)


class PostValidation:
    """The updates of one process under a flush schedule.

    Arguments:
        stages: optimizers of this process.
        step: steps all of them.
        parameters: all that get gradients here.
        counted: those whose gradients count in this process's part of the norm.
        max_norm: None: nothing is clipped.
        loss_scale: None: losses are not scaled.
    """

    def __init__(
        self,
        stages: Sequence[StageOptimizers],
        step: Step,
        *,
        parameters: Sequence[nn.Parameter],
        counted: Sequence[nn.Parameter],
        max_norm: float | None,
        loss_scale: LossScale | None,
        gate: UpdateGate,
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._stages = stages
        self._step = step
        self._parameters = parameters
        self._counted = counted
        self._max_norm = max_norm
        self._loss_scale = loss_scale
        self._gate = gate
        self._collectives = collectives
        self._device = device
        self._pending: _Pending | None = None
        self._waits = False  # for the norm of the next batch before its step
        self._writes_gradients: bool | None = None  # whether a step does; None before the first
        self.confirmed: deque[Known] = deque(maxlen=2)  # the newest: a call confirms two batches at most

    @property
    def is_pending(self) -> bool:
        """Whether an update is not confirmed."""
        return self._pending is not None

    def changed_outside(self) -> nn.Parameter | None:
        """A parameter that was changed in place behind an update that is not confirmed."""
        return None if self._pending is None or self._pending.kept is None else self._pending.kept.changed_outside()

    def update(self, known: Known) -> Known | Unconfirmed:
        """Gradients are ready: step, and say what is known."""
        pending = self._pending = self._begin(known)
        for parameter in self._parameters:
            parameter.grad = None
        if self._waits:
            self.confirm()
            return self.confirmed[-1]
        pending.kept = Kept(self._stages)
        if self._writes_gradients is not False:
            given = pending.gradients
            pending.gradients = [(p, None if g is None else g.clone()) for p, g in given]
            self._apply(given, pending.known, 1.0, skipped=False)
            self._writes_gradients = not _are_same(given, pending.gradients)
        else:
            self._apply(pending.gradients, pending.known, 1.0, skipped=False)
        pending.kept.updated()
        return Unconfirmed(known.step, known.loss, pending.outcome, lambda: pending.result is not None)

    def confirm(self) -> bool:
        """Make the update what it should be, if it is not; returns whether the weights were right as they stood.

        Raises NonFiniteLossError, on every rank alike, where the loss scale has shrunk to 0.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return True
        outcome, factor = pending.outcome(), pending.factor()
        is_plain = factor == 1.0 and not outcome.skipped
        self._waits = not is_plain
        is_right = is_plain and pending.kept is not None
        if not is_right and pending.kept is not None:
            self._gate.enter()
            pending.kept.put_back()
        if self._loss_scale is not None:
            self._loss_scale.update(overflowed=outcome.skipped)
            self._loss_scale.publish()
        if not is_right:
            held = [parameter.grad for parameter in self._parameters]
            self._apply(pending.gradients, pending.known, factor, skipped=outcome.skipped)
            if pending.kept is not None:
                pending.kept.change_again()
            for parameter, gradient in zip(self._parameters, held, strict=True):
                parameter.grad = gradient
        self.confirmed.append(pending.known._replace(grad_norm=outcome.grad_norm, skipped=outcome.skipped))
        return is_right

    def forget(self) -> None:
        """Everything was loaded anew."""
        self._pending, self._waits = None, False
        self.confirmed.clear()

    def _begin(self, known: Known) -> _Pending:
        overflowed = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._loss_scale is not None:
            overflowed += unscale(_gradients(self._parameters), self._loss_scale.value, device=self._device)
        part = torch.zeros(2, dtype=torch.float64, device=self._device)
        if self._max_norm is not None:
            part = norm_part(_gradients(self._counted), device=self._device)
        sums = torch.cat([part, overflowed[None]])
        return _Pending(
            known=known,
            sums=sums,
            wait=self._collectives.begin_all_reduce(sums, what="summing the gradient norm"),
            gradients=[(parameter, parameter.grad) for parameter in self._parameters],
            max_norm=self._max_norm,
        )

    def _apply(self, gradients: _Gradients, known: Known, factor: float, *, skipped: bool) -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if not skipped:
            scale_gradients(_gradients(self._parameters), factor)
        self._gate.enter()
        self._step(known.loss, skipped)


def refuse_post_validation(sharding: Sharding) -> None:
    """ValueError where ranks divide optimizer state or weights: what each has updated goes to the others at once."""
    if sharding.is_any:
        raise ValueError(
            "post_validation=True beside data_parallel='zero1' or 'fsdp': the ranks of a stage tell each other their "
            "parts of the new weights right behind the update, which could not be taken back. Expected "
            "data_parallel='replicate', or post_validation=False"
        )


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in parameters]


def _are_same(some: _Gradients, others: _Gradients) -> bool:
    """Whether they hold the same numbers."""
    return all(
        one is None or (other is not None and (one.is_sparse or torch.equal(one, other)))
        for (_, one), (_, other) in zip(some, others, strict=True)
    )
