"""One stage: a piece of the model with its forward, backward and recomputation of each microbatch.

    forward(k):  inputs -> leaves -> module -> outputs (detached copies are sent on; the graph stays here)
    backward(k): gradients of the outputs -> graph -> gradients of the leaves (sent back), and of the weights
                 or in two halves: backward(k, is_half=True) the former, weight_grad(k) the latter

The last stage computes the loss inside its forward. Under recompute="full" a forward keeps its inputs only, and the
backward runs it again with the same random numbers and the same buffers; otherwise `reruns` recomputes modules.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import nn

from ...partition.model.calls import Calls
from ...partition.model.forms import Tensors, tensors_in
from ...partition.model.split_backward import SplitBackward, WeightGradients
from ...partition.model.units import StageModule
from ..guards.contexts import NOTHING, within
from ..settings.model_loss import LossValue
from ..settings.precision import Autocast
from .moving import Activations
from .reruns import CheckpointedModules, KeptInputs, MovingBuffers, Snapshot, no_checkpoints_inside, standing_in
from .weights import WeightVersions

LossOf = Callable[[Tensors, object, bool, Tensors], LossValue]

_SHOWN = 3  # names in a warning

_DECIDES_ALIKE = (
    "Expected a forward that decides by random numbers or values which parameters it uses, not by a counter or an "
    "attribute; or a new PipelineModule after the change (save(folder) before it, load(folder) after it)"
)


class _Live(NamedTuple):
    """State of a microbatch between its forward and its backward."""

    module: StageModule  # that ran it
    leaves: Tensors
    outputs: Tensors | None  # with their graph; None: the forward runs again, with this target and these buffers
    target: object
    version: int
    buffers: Snapshot
    is_split: bool
    moving: Activations | None  # activations that may leave the rank


class Stage:
    """Runs one stage of the model on its rank."""

    def __init__(
        self,
        *,
        index: int,
        name: str,
        module: nn.Module,  # run in training, for the example's inputs: modules for other inputs have the same buffers
        loss_of: LossOf | None,  # on the last stage: (flat outputs, target, training, leaves) -> (loss, count or None)
        runs_again: bool,  # whether the backward runs the whole stage again, rather than `reruns`
        reruns: CheckpointedModules,
        compiled: Calls,
        weights: WeightVersions | None = None,  # the versions of its parameters, under an asynchronous schedule
    ) -> None:
        self.index = index
        self.name = name
        self._runs_again = runs_again
        self.reruns = reruns
        self._compiled = compiled
        self._weights = weights
        self._loss_of = loss_of
        self._live: dict[int, _Live] = {}
        self._owed: dict[int, tuple[int, int, WeightGradients]] = {}  # between I and W: version, group
        self._split = SplitBackward()
        self._looked_at_halves = False
        self._described = f"stage {index} ({name})"
        self._buffers = MovingBuffers(module)
        self._module = module

    def trial(self, reruns: CheckpointedModules, *, has_loss: bool = True) -> Stage:
        """The same stage with these reruns, the module's own Parameters and nothing in flight."""
        found = copy.copy(self)
        found._loss_of = self._loss_of if has_loss else None
        found.reruns, found._weights, found._live, found._owed = reruns, None, {}, {}
        return found

    def forward(
        self,
        key: int,
        module: StageModule,  # for inputs of these shapes
        inputs: Sequence[torch.Tensor],  # by slot, without a graph
        wants_grad: Sequence[bool],  # by slot: which inputs require a gradient
        target: object,  # of this microbatch, for the loss on the last stage
        *,
        version: int = 0,  # of the weights, where there are several
        backwards: int = 1,  # 1; 2: in two halves; 0: none, and nothing is kept for one
        moves: bool = False,  # whether its activations leave the rank while they wait, see `moving`
    ) -> tuple[Tensors, LossValue | None]:
        """Run microbatch `key` for training.

        Returns the detached outputs (none where the loss is computed) and the detached loss.
        """
        leaves = tuple([x.detach().requires_grad_(wants) for x, wants in zip(inputs, wants_grad, strict=True)])
        moving = self._kept_apart(key, leaves, target) if moves else None
        weights, is_split = self._weights, backwards == 2
        runs_again = self._runs_again and backwards > 0
        makes_graph = backwards > 0 and not runs_again
        if weights is not None:
            weights.bind(version)
        self._compiled.begin()
        self.reruns.begin()
        try:  # forward() itself: each call in between costs time, and hooks on all modules are for users' modules
            buffers = self._buffers.before_forward() if runs_again else ()
            targets = KeptInputs((target,), {}) if runs_again and self._loss_of is not None else None
            copies = [] if targets is None else targets.copies(range(len(targets.tensors)))
            with within(
                NOTHING if torch.is_grad_enabled() is makes_graph else torch.set_grad_enabled(makes_graph),
                no_checkpoints_inside() if runs_again else NOTHING,
                self._split.forward() if is_split else NOTHING,
                moving.saving() if moving is not None else NOTHING,
            ):
                value = module.module.forward(*([x.clone() for x in leaves] if module.clone_inputs else leaves))
                outputs, loss = self._with_loss(module.flatten(value), target, leaves)
            if runs_again:
                buffers = self._buffers.after_forward(buffers)
        finally:
            self.reruns.end()
            self._compiled.end()
            if weights is not None:
                weights.release()
        if targets is not None and targets.changed():  # by the loss, which will be computed again
            (target,), _ = targets.with_tensors(copies)
        if not backwards:
            return module.detached(outputs), None
        if moving is not None:
            moving.made(() if runs_again else outputs)
        self._live[key] = _Live(
            module, leaves, None if runs_again else outputs, target, version, buffers, is_split, moving
        )
        if loss is not None:
            mean_or_sum, count = loss
            # A copy: mse_loss's is a view of memory as large as the output.
            return (), (mean_or_sum.detach().clone(), None if count is None else count.detach())
        return module.detached(outputs), None

    def _kept_apart(self, key: int, leaves: Tensors, target: object) -> Activations:
        staying = [*self._module.parameters(), *self._module.buffers(), *tensors_in(target)]
        name = f"microbatch {key} of {self._described}"
        device = next((x.device for x in (*leaves, *staying)), torch.device("cpu"))
        return Activations(name, leaves=leaves, staying=staying, device=device)

    def moving(self, key: int) -> Activations:
        moving = self._live[key].moving
        assert moving is not None
        return moving

    def evaluate_forward(
        self, module: StageModule, inputs: Sequence[torch.Tensor], target: object, *, has_target: bool
    ) -> tuple[Tensors, LossValue | None]:
        """Run a microbatch without a graph, in evaluation mode; with a target the last stage returns a loss, too."""
        with torch.no_grad(), self._compiled.through():
            outputs = module.detached(module.run(tuple(inputs)))
            loss = self._loss_of(outputs, target, False, ()) if has_target and self._loss_of is not None else None
        return outputs, loss

    def backward(
        self,
        key: int,
        # By output slot (None: there is none); on a stage with a loss, its one weight.
        gradients: Sequence[torch.Tensor | None],
        wanted: Sequence[bool],  # by output slot, whether it may get one
        *,
        autocast: Autocast,  # that of the forward, for recomputation
        group: int = 0,  # the update group, where there are several
        is_half: bool = False,  # whether gradients of weights are left to `weight_grad`
    ) -> list[torch.Tensor | None]:
        """Backward of microbatch `key`; parameter gradients add up in `.grad`, or in `weights` by update group.

        Returns the gradient of each input, by slot, or None.
        """
        live = self._live.pop(key)
        aside = WeightGradients() if is_half else None
        if aside is not None:
            self._owed[key] = live.version, group, aside
        if any(wanted) and all(gradient is None for gradient in gradients):
            return [None] * len(live.leaves)
        if self._weights is not None:
            self._weights.begin_backward(live.version, group)
        if live.moving is not None:
            live.moving.settle()
        try:
            outputs = live.outputs if live.outputs is not None else self._recomputed(live, autocast)
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
            if not all(wanted):
                self._refuse_new_gradients(outputs, wanted)
            if pairs:
                graded, seeds = zip(*pairs, strict=True)
                with self._split.backward(aside) if live.is_split else NOTHING:
                    torch.autograd.backward(graded, seeds)
                if aside is not None and not self._looked_at_halves:
                    self._looked_at_halves = True
                    _warn_of_small_half(self._module, aside, stage=self._described)
        except RuntimeError as error:
            self.reruns.refuse_changed_inputs(error, stage=self._described)
            raise
        finally:
            if self._weights is not None:
                self._weights.end_backward(live.version, group)
        return [x.grad for x in live.leaves]

    def weight_grad(self, key: int) -> None:
        version, group, weights = self._owed.pop(key)
        if self._weights is not None:
            self._weights.begin_backward(version, group)
        try:
            weights.add()
        finally:
            if self._weights is not None:
                self._weights.end_backward(version, group)

    def _refuse_new_gradients(self, outputs: Tensors, wanted: Sequence[bool]) -> None:
        slot = next((i for i, o in enumerate(outputs) if o.requires_grad and not wanted[i]), None)
        if slot is not None:
            raise unsent_gradient(slot, self._described)

    def refuse_lost_gradient(self, slot: int) -> NoReturn:
        """ValueError for a missing gradient of an input that was certain to have one when the stages were built."""
        raise ValueError(
            f"input {slot} of {self._described} gets no gradient, and got one when the stages were "
            f"built. {_DECIDES_ALIKE}"
        )

    def drop(self) -> None:
        self._live.clear()
        self._owed.clear()

    def _recomputed(self, live: _Live, autocast: Autocast) -> Tensors:
        with (
            torch.enable_grad(),
            autocast.again(),
            no_checkpoints_inside(),
            standing_in(live.buffers),
            self._compiled.through(),
            self._split.forward() if live.is_split else NOTHING,
        ):
            outputs, _ = self._with_loss(live.module.run(live.leaves), live.target, live.leaves)
        return outputs

    def _with_loss(self, outputs: Tensors, target: object, leaves: Tensors) -> tuple[Tensors, LossValue | None]:
        if self._loss_of is None:
            return outputs, None
        loss = self._loss_of(outputs, target, True, leaves)
        if torch.is_grad_enabled() and not loss[0].requires_grad and any(o.requires_grad for o in outputs):
            raise ValueError(
                "loss_fn returned a loss that does not depend on the model's output: expected one that is computed "
                "from it, without detach(), item() or torch.no_grad()"
            )
        return (loss[0],), loss


def unsent_gradient(slot: int, stage: str, *, of_batch: bool = False) -> ValueError:
    """For an output whose gradient no message carries; `of_batch`: it is the batch that wants it."""
    found = f"output {slot} of {stage} requires a gradient and did not when the stages were built, so that none is sent"
    if of_batch:
        return ValueError(
            f"{found} back to the batch, which wants one: expected example_inputs= or a first batch that want "
            f"gradients, too (x.requires_grad_()), or x.detach() now. Batches after such a one may go without"
        )
    return ValueError(f"{found} back for it: modules before it would not be trained. {_DECIDES_ALIKE}")


def _warn_of_small_half(module: nn.Module, weights: WeightGradients, *, stage: str) -> None:
    """Warn where I makes more of the weights' gradients than W, without biases and norms, which take no time; versions
    are still bound."""
    later = {id(weight) for weight in weights.weights}
    matrices = {name: p for name, p in module.named_parameters() if p.requires_grad and p.dim() > 1}
    left = sum(p.numel() for p in matrices.values() if id(p) in later)
    made = {name: p for name, p in matrices.items() if id(p) not in later and p.grad is not None}
    if sum(p.numel() for p in made.values()) <= left:
        return
    shown = [re.sub(r"^units\.\d+\.", "", name) for name in list(made)[:_SHOWN]]
    names = ", ".join(map(repr, shown)) + (", ..." if len(made) > _SHOWN else "")
    warnings.warn(
        f"the schedule splits the backward of {stage}, but the gradients of {names} come with those of its "
        f"inputs, in I, so that W has little to do and I takes longer than planned. W takes those of linears, "
        f"embeddings, convolutions and matrix products whose weight is a parameter itself, without hooks on it, "
        f"outside of compiled and scripted code. Expected a stage of those, or a schedule with whole backwards, "
        f"such as schedule='1f1b'",
        stacklevel=2,
    )
