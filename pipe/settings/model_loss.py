"""The loss of a model that returns its own: means over microbatches, weighted so that they make the batch's mean.

    loss = sum_k w_k loss_k / sum_k w_k          w_k: number of items that loss_k is a mean over

A mean over tokens has as many items as there are labels. A causal language model shifts labels by one, and has none for
the first label of a sequence. Equal weights would be wrong if microbatches differ in padding.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ...partition.model.batch_dims import parameter_names
from ...partition.model.forms import Arguments, Form
from ...partition.model.model_loss import MODEL, mean_of_model, own_loss
from ..guards.rounding import SLICED_LOSSES, by_type
from .given import signature_of

IGNORED = -100  # a label that cross entropy leaves out
SAMPLES, LABELS, SHIFTED_LABELS = "samples", "labels", "shifted_labels"
SHIFTED = "shift_labels"  # keyword of models of transformers for labels that are shifted already

LossWeight = str | Callable[..., Any]
LossValue = tuple[torch.Tensor, torch.Tensor | None]  # (mean, None) or (sum, count)

# Names that transformers lists its models under, by how their loss counts.
_SHIFTING = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",)
_COUNTING = (
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
)


def read_loss_option(
    loss_fn: Callable[[Any, Any], Any] | str | None, loss_weight: object, model: nn.Module | None
) -> Callable[[Any, Any], Any] | None:
    """The loss that `loss_fn=` names. Raises ValueError for another word, and for a weight without "model"."""
    if isinstance(loss_fn, str):
        if loss_fn != MODEL:
            raise ValueError(
                f"loss_fn={loss_fn!r}: expected a function of (output, target), or {MODEL!r} for a model that returns "
                f"its own loss"
            )
        return ModelLoss(model, loss_weight)
    if loss_weight is not None:
        raise ValueError(
            f"loss_weight={loss_weight!r} without loss_fn={MODEL!r}: expected it for a model that returns its own "
            f"loss; a loss_fn returns (sum, count) instead"
        )
    return loss_fn


class Empty(torch.autograd.Function):
    """(loss, *inputs) -> 0: the loss of no items. A gradient of 0 times the infinity inside 0/0 would be nan, so the
    loss gets none, and the stage's inputs get zeros."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *(
            torch.zeros_like(x) if needs else None for x, needs in zip(ctx.saved_tensors, needed, strict=True)
        )


class ModelLoss:
    """Loss of a model that returns its own, loss_fn="model": (output, weight) -> (weight * loss, weight).

    Arguments:
        model: the model, whose class and forward determine how its labels count.
        weight: number of items that the loss is a mean over, as in `Inputs.loss_weight`.

    Raises ValueError for another weight.
    """

    def __init__(self, model: nn.Module | None, weight: object) -> None:
        words = (SAMPLES, LABELS, SHIFTED_LABELS)
        if weight is not None and weight not in words and not callable(weight):
            raise ValueError(
                f"loss_weight={weight!r}: expected one of {', '.join(map(repr, words))}, or a function of the model's "
                f"arguments that returns over how many items the model's loss is a mean"
            )
        self._names = parameter_names(signature_of(model))
        self._weight = _known_weight(model) if weight is None else weight

    def __call__(self, output: object, weight: torch.Tensor) -> LossValue:
        """(weight * loss, weight); a microbatch of weight 0, whose mean is nan, counts as 0 with its gradients."""
        loss = mean_of_model(output)
        if self.is_empty(weight):
            return Empty.apply(loss), weight  # type: ignore[no-untyped-call]
        return torch.where(weight > 0, loss, torch.zeros_like(loss)) * weight, weight

    def is_empty(self, weight: torch.Tensor) -> bool:
        """Whether a microbatch has no items. On a GPU counts of labels are not waited for: cross entropy copes."""
        known = callable(self._weight) or weight.device.type == "cpu"
        return known and not isinstance(weight, FakeTensor) and not weight

    @property
    def shifts(self) -> bool:
        """Whether the model shifts its labels by one within what it is given."""
        return self._weight == SHIFTED_LABELS

    def find_slot(self, form: Form) -> int | None:
        """Number of the loss among the flat tensors of the model's output; None if it is not found."""
        marks = [torch.empty(()) for _ in range(form.num_tensors)]
        try:
            found = own_loss(form.assemble(marks))
        except ValueError:
            return None
        return next(i for i, mark in enumerate(marks) if mark is found)

    def of_parts(self, form: Form, both: Sequence[Arguments], group: Summing) -> LossOfParts | None:
        """The loss of a whole microbatch and of this member's part of it; None for an output without."""
        slot = self.find_slot(form)
        return None if slot is None else LossOfParts(slot=slot, weights=self.weigh(both), group=group)

    def reads(self, name: str) -> bool:
        """Whether the weight may depend on the values of this argument."""
        if callable(self._weight):
            return True
        return self._weight != SAMPLES and name in ("labels", SHIFTED, self._position_of_labels())

    def weigh(self, microbatches: Sequence[Arguments]) -> list[torch.Tensor]:
        """Weight of each microbatch. Raises ValueError if it is unknown what to count, or a count is not a number."""
        first = microbatches[0]
        if "num_items_in_batch" in first.form.assemble(first.tensors)[1]:
            raise ValueError(
                "num_items_in_batch= would divide the loss of every microbatch: expected none, since the mean over "
                "the batch is computed from the microbatches' means and their numbers of labels"
            )
        return [self._weigh(each) for each in microbatches]

    def _weigh(self, microbatch: Arguments) -> torch.Tensor:
        device = microbatch.tensors[0].device
        count: Any
        if callable(self._weight):
            count = microbatch.call(self._weight)
            if isinstance(count, torch.Tensor) and count.dim():
                raise ValueError(f"loss_weight returned a tensor of shape {tuple(count.shape)}: expected a number")
        else:
            count = self._counted(microbatch)
        try:
            return torch.as_tensor(count, dtype=torch.float64, device=device)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"loss_weight returned {count!r}: expected a number, or a scalar tensor") from None

    def _counted(self, microbatch: Arguments) -> Any:
        labels = self._labels(microbatch)
        weight = self._weight
        if weight == SHIFTED_LABELS and SHIFTED in microbatch.names:
            return (microbatch.tensors[microbatch.names.index(SHIFTED)] != IGNORED).sum()
        if labels is None and weight in (LABELS, SHIFTED_LABELS):
            raise ValueError(
                f"loss_weight={weight!r} and no labels= of integers among the arguments {', '.join(microbatch.names)}: "
                f"expected them, or loss_weight= a function of the model's arguments that counts"
            )
        if weight == SAMPLES or labels is None:
            return microbatch.num_samples
        counts = labels != IGNORED
        if labels.dim() < 2:
            return counts.sum()
        if weight is None:
            raise ValueError(
                f"labels have {labels.dim()} dimensions, and it is not known over which ones this model's loss is a "
                f"mean: expected example_inputs=stagewright.Inputs(loss_weight={LABELS!r}) (each label but {IGNORED}), "
                f"{SHIFTED_LABELS!r} (those but the first of each sequence, for a causal language model), {SAMPLES!r}, "
                f"or a function of the model's arguments that counts"
            )
        return (counts[:, 1:] if weight == SHIFTED_LABELS else counts).sum()

    def _labels(self, microbatch: Arguments) -> torch.Tensor | None:
        for name, x in zip(microbatch.names, microbatch.tensors, strict=True):
            if name in ("labels", self._position_of_labels()) and not (x.is_floating_point() or x.is_complex()):
                return x
        return None

    def _position_of_labels(self) -> str | None:
        return f"input {self._names.index('labels')}" if "labels" in self._names else None


class Summing(Protocol):
    count: int

    def sum(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOfParts:
    """The loss that a model returns, number `slot` of its outputs: a mean over `weights` items, of a whole microbatch
    and of this member's part of its tokens."""

    slot: int
    weights: Sequence[torch.Tensor]
    group: Summing

    def check(self, whole: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        """ValueError unless the members' losses add up to that of the whole. Collective over the group."""
        losses = [each[self.slot].double() for each in (whole, own)]
        sums = [torch.where(n > 0, loss, 0.0) * n for loss, n in zip(losses, self.weights, strict=True)]
        loss, count = sums[0], self.weights[0]
        found, items = self.group.sum(torch.stack([sums[1], self.weights[1]]))
        tolerance = by_type(SLICED_LOSSES, whole[self.slot].dtype)
        if count != items or not abs(float(loss - found)) <= tolerance * max(abs(float(loss)), 1e-12):
            raise ValueError(
                f"the model's loss is {float(loss / count):.9g}, a mean over {count:g} items, for whole sequences, and "
                f"{float(found / items):.9g} over {items:g} for their {self.group.count} parts: expected a mean over "
                f"tokens, as Inputs(loss_weight=) counts them, which has no other terms"
            )


def more_keywords(loss_fn: object, context: int) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Keywords that a model is passed in addition, by the size of its context groups."""
    return with_shifted_labels if context > 1 and isinstance(loss_fn, ModelLoss) and loss_fn.shifts else dict


def with_shifted_labels(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keywords of a model that shifts labels, with shifted labels of whole sequences, of which parts are cut."""
    labels = kwargs.get("labels")
    if not isinstance(labels, torch.Tensor) or SHIFTED in kwargs:
        return kwargs
    return {**kwargs, SHIFTED: nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()}


def _known_weight(model: nn.Module | None) -> str | None:
    """Items that the loss of a transformers model is a mean over; None if that is not known."""
    owner = next((kind for kind in type(model).__mro__ if "forward" in vars(kind)), type(model))
    if not owner.__module__.startswith("transformers."):
        return None
    lists = importlib.import_module("transformers.models.auto.modeling_auto")
    shifts, counts = (
        any(owner.__name__ in pytree.tree_leaves(list(getattr(lists, each, {}).values())) for each in kinds)
        for kinds in (_SHIFTING, _COUNTING)
    )
    if shifts == counts:
        return None
    return SHIFTED_LABELS if shifts else LABELS
