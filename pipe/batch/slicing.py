"""Slices of the sequence in a run: whether a model and its loss compute the same in slices.

Nothing says of a module whether its tokens meet anywhere but in causal attention. So it is tried: each stage runs once
on a whole microbatch and once slice by slice, on random numbers and with random weights, and the loss on outputs of the
first batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...comm import TensorSpec
from ...partition.model.forms import Arguments, Tensors
from ...partition.model.units import MODEL_INPUT, StageModule
from ...partition.model.untouched import untouched
from ..context import Run
from ..settings.given import Given
from ..settings.model_loss import LossValue
from ..stage.build import CutModel
from ..stage.shapes import Inferred, InferredStages, Signature
from ..stage.slices import KeptCalls, TokenSpan, attending
from .batches import read_loss
from .sequence import Slice

# Most that numbers of two ways may differ, in units of their root mean square.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_COARSE = 0.25  # of shorter types


def check_stages(run: Run, parts: CutModel, whole: Given, slices: Sequence[Slice]) -> None:
    """ValueError for a stage of this process that computes something else from slices than from a whole microbatch."""
    inference, device = parts.train, run.options.device
    arguments = [whole.arguments, *(part.arguments for part, _ in slices)]
    inferred = [inference.of(Signature.of(each)) for each in arguments]
    spans = [span for _, span in slices]
    for s in run.local_stages:
        module = inference.stages[s].module
        with untouched(parts.root, device=device), _other_weights(module), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of a checkpoint that has no gradients to make
            try:
                _check_stage(s, inferred, _inputs(s, inferred, arguments, spans), spans)
            except (RuntimeError, IndexError) as error:
                raise ValueError(
                    f"stage {s} ({inference.stages[s].name}) fails where it runs over slices of the sequence: {error}. "
                    f"{_EXPECTED}"
                ) from error


_EXPECTED = (
    "Expected a model whose tokens meet in F.scaled_dot_product_attention(..., is_causal=True) alone, each with its "
    "position from stagewright.first_position() within a module's forward, or from an input of the model "
    "(docs/guides/schedules.md); or a schedule without slices"
)


def _inputs(
    s: int, inferred: Sequence[Inferred], arguments: Sequence[Arguments], spans: Sequence[TokenSpan]
) -> list[list[torch.Tensor]]:
    """Inputs of a stage for the whole microbatch, then for each slice."""
    columns = []
    for ref in inferred[0].stages[s].inputs:
        if ref.producer == MODEL_INPUT:
            columns.append([each.tensors[ref.slot] for each in arguments])
            continue
        specs = [each.specs[ref.producer][ref.slot] for each in inferred]
        dim = sequence_dim(specs, spans, f"output {ref.slot} of stage {ref.producer}")
        whole = _made_up(specs[0], arguments[0].tensors[0].device)
        columns.append([whole, *(span.part(whole, dim) for span in spans)])
    return [list(row) for row in zip(*columns, strict=True)]


def _check_stage(
    s: int, inferred: Sequence[Inferred], inputs: Sequence[Sequence[torch.Tensor]], spans: Sequence[TokenSpan]
) -> None:
    """ValueError where slices give other outputs than the whole; `inferred` and `inputs` of it, then of each slice."""
    stages = [each.stages[s] for each in inferred]
    total = spans[0].total
    (whole,) = _run(stages[:1], inputs[:1], [TokenSpan(0, total, total)])
    parts = _run(stages[1:], inputs[1:], spans)
    for slot, expected in enumerate(whole):
        specs = [each.specs[s][slot] for each in inferred]
        what = f"output {slot} of stage {s} ({stages[0].name})"
        dim = sequence_dim(specs, spans, what)
        for span, part in zip(spans, parts, strict=True):
            _compare(span.part(expected, dim), part[slot], span, what)


def _run(
    stages: Sequence[StageModule], inputs: Sequence[Sequence[torch.Tensor]], spans: Sequence[TokenSpan]
) -> list[Tensors]:
    """Outputs by slice, one after the other, without dropout."""
    kept: KeptCalls = {}
    outputs = []
    for stage, own, span in zip(stages, inputs, spans, strict=True):
        torch.manual_seed(0)
        with attending(kept, span, drops=False):
            outputs.append(stage.detached(stage.run(tuple(own))))
    return outputs


def _compare(expected: torch.Tensor, found: torch.Tensor, span: TokenSpan, what: str) -> None:
    if not expected.is_floating_point():
        if torch.equal(expected, found):
            return
        difference, size = 1.0, 1.0
    else:
        one, other = expected.double(), found.double()
        size = max(float(one.square().mean().sqrt()), 1e-30)
        difference = float((one - other).abs().max())
        if difference <= _TOLERANCE.get(expected.dtype, _COARSE) * size:
            return
    raise ValueError(
        f"{what} is another one over slices of the sequence: of tokens {span.start} to {span.end} of {span.total} it "
        f"differs by {difference:.2g} in numbers around {size:.2g} from that of the whole (tried on random numbers, "
        f"with random weights and without dropout). {_EXPECTED}"
    )


def sequence_dim(specs: Sequence[TensorSpec], spans: Sequence[TokenSpan], what: str) -> int | None:
    """The dimension in which a tensor of the whole and those of its slices differ; None: they are of one shape.

    Arguments:
        specs: of the whole, then of each slice.

    Raises ValueError where several differ, or other sizes than the tokens.
    """
    whole, *others = (spec.shape for spec in specs)
    dims = {d for shape in others for d, (one, other) in enumerate(zip(whole, shape, strict=False)) if one != other}
    if all(len(shape) == len(whole) for shape in others) and len(dims) <= 1:
        dim = next(iter(dims), None)
        lengths = [span.end - span.start for span in spans]
        if dim is None or (whole[dim], [shape[dim] for shape in others]) == (spans[0].total, lengths):
            return dim
    raise ValueError(
        f"{what} has shape {whole} for {spans[0].total} tokens and {others[0]} for {spans[0].end}: expected the "
        f"sequence in one dimension, of its own. {_EXPECTED}"
    )


def _made_up(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    if spec.dtype.is_floating_point:
        return torch.randn(spec.shape, dtype=torch.float32, device=device).to(spec.dtype)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


@contextmanager
def _other_weights(module: nn.Module) -> Iterator[None]:
    """Within: parameters with noise, since a branch whose weights are zero yet hides what it does."""
    kept = [(p, p.data) for p in module.parameters() if p.is_floating_point() and p.dim()]
    try:
        for parameter, data in kept:
            deviation = data.shape[-1] ** -0.5 if data.dim() > 1 else 0.1
            parameter.data = data + deviation * torch.randn_like(data)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


class SlicedLoss:
    """Watches the loss of the first microbatch that is expected, until it has come for all slices."""

    def __init__(self, loss_fn: Callable[[object, object], object], output: Callable[[Tensors], object]) -> None:
        self._loss_fn = loss_fn
        self._output = output
        self._whole: Given | None = None
        self._slices: Sequence[Slice] = ()
        self._specs: list[Sequence[TensorSpec]] = []
        self._outputs: dict[int, Tensors] = {}

    def expect(self, whole: Given, slices: Sequence[Slice], inference: InferredStages) -> None:
        self._whole, self._slices = whole, slices
        arguments = [whole.arguments, *(part.arguments for part, _ in slices)]
        self._specs = list(zip(*(inference.of(Signature.of(each)).specs[-1] for each in arguments), strict=True))

    def saw(self, flat: Tensors, target: object) -> None:
        """The loss is computed of a slice. Raises ValueError, with the last one, where it is another one in slices."""
        if self._whole is None:
            return
        for q, (part, _) in enumerate(self._slices):
            if part.target is target and q not in self._outputs:
                self._outputs[q] = tuple(x.detach().clone() for x in flat)
                break
        if len(self._outputs) == len(self._slices):
            whole, self._whole = self._whole, None
            self._check(whole)
            self._outputs.clear()

    def _check(self, whole: Given) -> None:
        spans = [span for _, span in self._slices]
        flat = []
        for slot, specs in enumerate(self._specs):
            dim = sequence_dim(specs, spans, f"output {slot} of the model")
            parts = [self._outputs[q][slot] for q in range(len(spans))]
            flat.append(parts[0] if dim is None else torch.cat(parts, dim))
        targets = [whole.target, *(part.target for part, _ in self._slices)]
        columns = [tuple(flat), *(self._outputs[q] for q in range(len(spans)))]
        kept = [self._loss_fn] if isinstance(self._loss_fn, nn.Module) else []
        with torch.no_grad(), untouched(*kept, device=flat[0].device):
            try:
                losses = [self._loss(*each, torch.float64) for each in zip(columns, targets, strict=True)]
            except (RuntimeError, TypeError, ValueError):  # a loss for one type of outputs alone
                losses = [self._loss(*each, None) for each in zip(columns, targets, strict=True)]
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(losses[0][0].dtype, 1e-2)
        (expected, count), *others = losses
        if count is None:
            found = sum(float(loss) * (s.end - s.start) / s.total for (loss, _), s in zip(others, spans, strict=True))
            pairs = [(float(expected), found)]
        else:
            counts = [float(c) for _, c in others if c is not None]
            pairs = [(float(expected), sum(float(loss) for loss, _ in others)), (float(count), sum(counts))]
        for one, other in pairs:
            if abs(one - other) > tolerance * max(abs(one), 1e-12):
                raise ValueError(
                    f"loss_fn makes {one:.9g} of whole sequences and {other:.9g} of their {len(spans)} slices: "
                    f"expected a mean over all tokens, or (sum, count) where some do not count, of outputs and targets "
                    f"that loss_fn does not shift (shift the targets before: tokens[:, :-1], tokens[:, 1:])"
                )

    def _loss(self, flat: Tensors, target: object, dtype: torch.dtype | None) -> LossValue:
        if dtype is not None:
            flat = tuple(x.to(dtype) if x.is_floating_point() else x for x in flat)
            target = pytree.tree_map(
                lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, target
            )
        return read_loss(self._loss_fn(self._output(flat), target), None)
