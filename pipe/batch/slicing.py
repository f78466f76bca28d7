"""Parts of the sequence in a run: cutting microbatches, and checking that a model and its loss give the same results
in parts.

    microbatch   tokens [B, T], target [B, T]
    slice q      tokens [B, start : end], target [B, start : end]; likewise the part of a member of a context group

Whether tokens depend on each other outside attention can't be read from a module. So it is tried: each stage runs once
on a whole microbatch and once slice by slice, or on the members' parts, on random numbers and with random weights; and
the loss on outputs of the first batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...comm import TensorSpec
from ...partition.model.batch_dims import TARGET, BatchDims, key_of, keys_of, parameter_names
from ...partition.model.forms import Arguments, Tensors
from ...partition.model.units import MODEL_INPUT, StageModule
from ...partition.model.untouched import untouched
from ..context import Run
from ..guards.rounding import SLICED_LOSSES, SLICED_OUTPUTS, by_type
from ..settings.given import Given, signature_of
from ..settings.model_loss import LossOfParts, LossValue
from ..settings.options import Options
from ..shards.tensor_group import TensorGroup
from ..stage.context_parts import over_context
from ..stage.shapes import Inferred, InferredStages, Signature
from ..stage.slices import over_slices
from ..stage.tokens import Slice, TokenBlocks, Tokens, TokenSpan
from .agreement import UNKNOWN, agreed, checksum
from .batches import read_loss
from .token_sums import TokenSums


def _spans(lengths: Sequence[int] | None, total: int, num_slices: int) -> list[TokenSpan]:
    if total < num_slices:
        raise ValueError(
            f"a sequence of {total} tokens for num_slices={num_slices}: expected at least one token per slice"
        )
    if lengths is None:
        least, longer = divmod(total, num_slices)
        lengths = [least + (q < longer) for q in range(num_slices)]
    elif sum(lengths) != total:
        raise ValueError(
            f"lengths={list(lengths)} make {sum(lengths)} tokens, and the sequences of this batch have "
            f"{total}: expected lengths that add up to {total}, or none, for slices as equal as can be"
        )
    return [TokenSpan(start, end, total) for start, end in pairwise([0, *accumulate(lengths)])]


def cut_in_slices(options: Options, given: Given, num_slices: int) -> list[Slice]:
    return _cut(options, given, lambda total: _spans(options.slices.lengths, total, num_slices), option="dims")


def part_of_group(options: Options, given: Given, *, index: int, count: int) -> Slice:
    """Part of a microbatch that member `index` of a context group of `count` computes. Raises ValueError for inputs
    whose dimension of the sequence is not clear, and for a length that the members do not divide."""
    own = partial(TokenBlocks.of, index=index, count=count)
    (part,) = _cut(options, given, lambda total: [own(total)], option="sequence_dims")
    return part


def _cut(options: Options, given: Given, spans_of: Callable[[int], Sequence[Tokens]], *, option: str) -> list[Slice]:
    """Parts of a microbatch; `option` names the dimension of the sequence."""
    arguments, named = given.arguments, options.sequence_dims
    names = parameter_names(signature_of(options.model))
    keys = [next((key for key in keys_of(path, names) if key in named), None) for path in arguments.form.paths]
    dims = _dims(arguments, keys, named, option)
    total = next((x.shape[d] for x, d in zip(arguments.tensors, dims, strict=True) if d is not None), None)
    if total is None:
        raise ValueError(
            "no input has a sequence: expected one with it in dimension 1, or named by stagewright.Slices(dims=) or "
            "Inputs(sequence_dims=)"
        )
    for key, name, x, dim in zip(keys, arguments.names, arguments.tensors, dims, strict=True):
        if dim is not None and (x.shape[dim] != total or (key is None and total in x.shape[2:])):
            raise ValueError(_unclear(name, x, f"{option}={{{key_of(name)}", total))
    leaves, spec = pytree.tree_flatten(given.target)
    target_dims = [_target_dim(leaf, named, total, option) for leaf in leaves]
    slices = []
    for span in spans_of(total):
        tensors = tuple(span.part(x, dim) for x, dim in zip(arguments.tensors, dims, strict=True))
        pairs = zip(leaves, target_dims, strict=True)
        target = [span.part(leaf, dim) if isinstance(leaf, torch.Tensor) else leaf for leaf, dim in pairs]
        own = Arguments(arguments.form, tensors, arguments.dims)
        slices.append((replace(given, arguments=own, target=pytree.tree_unflatten(target, spec)), span))
    return slices


def _dims(arguments: Arguments, keys: Sequence[str | int | None], named: BatchDims, option: str) -> list[int | None]:
    found: list[int | None] = []
    for key, name, x, batch in zip(keys, arguments.names, arguments.tensors, arguments.dims, strict=True):
        if key is not None:
            found.append(_checked(f"{option}[{key!r}]", name, x, named[key], batch))
        elif x.dim() == 0:
            found.append(None)
        elif x.dim() == 1 or batch != 0:
            raise ValueError(_unclear(name, x, f"{option}={{{key_of(name)}"))
        else:
            found.append(1)
    return found


def _target_dim(leaf: object, named: BatchDims, total: int, option: str) -> int | None:
    if not isinstance(leaf, torch.Tensor) or not leaf.dim():
        return None
    at = named.get(TARGET)
    if at is not None and at >= leaf.dim():
        return None  # such as weights of samples beside tokens
    if TARGET in named:
        dim = _checked(f"{option}[{TARGET!r}]", "the target", leaf, at, None)
        if dim is None or leaf.shape[dim] == total:
            return dim
        raise ValueError(_unclear("the target", leaf, f"{option}={{{TARGET!r}", total))
    if leaf.dim() < 2 or leaf.shape[1] != total or total in leaf.shape[2:]:
        raise ValueError(_unclear("the target", leaf, f"{option}={{{TARGET!r}", total))
    return 1


def _checked(option: str, name: str, x: torch.Tensor, dim: int | None, batch: int | None) -> int | None:
    if dim is None:
        return None
    if not -x.dim() <= dim < x.dim() or dim % x.dim() == batch:
        raise ValueError(
            f"{option}={dim} and {name} has shape {tuple(x.shape)}: expected a dimension below {x.dim()} other than "
            f"that of the batch, or None where all parts share it"
        )
    return dim % x.dim()


def _unclear(name: str, x: torch.Tensor, key: str, total: int | None = None) -> str:
    of = "" if total is None else f" of {total} tokens"
    return (
        f"{name} has shape {tuple(x.shape)}, and which dimension is the sequence{of} is not clear: expected it in "
        f"dimension 1, and nowhere else; or {key}: its dimension, or None where all parts share it}}"
    )


_Within = Callable[[Any], AbstractContextManager[None]]  # of a stage's run on some tokens


def try_parts(run: Run, inference: InferredStages, whole: Given, slices: Sequence[Slice]) -> None:
    """ValueError for a stage of this process that gives other results for parts than for a whole microbatch: for its
    slices, or, on all processes, for those of the members of a context group."""
    group, collectives, place = run.context_group, run.collectives, run.layout.place
    if group is None:
        expected = (
            "Expected a model whose tokens depend on each other in F.scaled_dot_product_attention(..., "
            "is_causal=True) alone, with positions from stagewright.positions(num_tokens) within a module's forward, "
            "or from an input of the model (docs/guides/schedules.md); or a schedule without slices"
        )
        _check_stages(
            run, inference, whole, slices, begin=lambda: partial(over_slices, {}, drops=False), expected=expected
        )
        return

    def tried() -> None:
        mine, what = checksum(whole.arguments.tensors), "comparing the first batch of a context group"
        given = collectives.gather(mine, what=what, ranks=place.ranks_along("context", place.local_ranks[0]))
        if len({*given} - {UNKNOWN}) > 1:
            raise ValueError(
                "the members of a context group passed different batches, and each computes its own tokens of one: "
                "expected the same batch on each, as from pipe.loader(dataset, batch_size=...)"
            )
        check_parts(run, inference, whole, slices[0], group)

    agreed(tried, collectives, run.guard, what="trying the parts of a context group")


def check_parts(run: Run, inference: InferredStages, whole: Given, own: Slice, group: TensorGroup) -> None:
    """ValueError for a stage that gives other results on the members of a context group than in one process. Collective
    over the group, whose members have the same weights."""
    expected = (
        "Expected a model whose tokens depend on each other in F.scaled_dot_product_attention alone, causal, full or "
        "with a mask of keys, with positions from stagewright.positions(num_tokens) within a module's forward, or from "
        'an input of the model (docs/guides/parallelism.md); or "context": 1'
    )
    alone = TensorGroup(None, index=0, count=1)

    def within(span: TokenBlocks) -> AbstractContextManager[None]:
        return over_context(alone if span.length == span.total else group, span, drops=False)

    model_loss, form = run.options.model_loss, inference.output_form
    loss = None if model_loss is None else model_loss.of_parts(form, [whole.arguments, own[0].arguments], group)
    _check_stages(run, inference, whole, [own], begin=lambda: within, expected=expected, loss=loss)


def _check_stages(
    run: Run,
    inference: InferredStages,
    whole: Given,
    slices: Sequence[Slice],
    *,
    begin: Callable[[], _Within],
    expected: str,
    loss: LossOfParts | None = None,
) -> None:
    device = run.options.device
    arguments = [whole.arguments, *(part.arguments for part, _ in slices)]
    inferred = [inference.of(Signature.of(each)) for each in arguments]
    spans, failed = [span for _, span in slices], list[ValueError]()
    for s in run.local_stages:  # all of them, where other members run in the same collectives
        module = inference.stages[s].module
        with untouched(run.root, device=device), _other_weights(module), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of a checkpoint that has no gradients to make
            try:
                own_loss = loss if s == len(inference.stages) - 1 else None
                _check_stage(
                    run, s, inferred, _inputs(s, inferred, arguments, spans), spans, within=begin(), loss=own_loss
                )
            except ValueError as error:
                failed.append(ValueError(f"{error}. {expected}"))
            except (RuntimeError, IndexError) as error:
                where = f"stage {s} ({inference.stages[s].name})"
                failed.append(
                    ValueError(f"{where} fails where it runs over parts of the sequence: {error}. {expected}")
                )
                failed[-1].__cause__ = error
    if failed:
        raise failed[0]


def _inputs(
    s: int, inferred: Sequence[Inferred], arguments: Sequence[Arguments], spans: Sequence[Tokens]
) -> list[list[torch.Tensor]]:
    columns = []
    for ref in inferred[0].stages[s].inputs:
        if ref.producer == MODEL_INPUT:
            columns.append([each.tensors[ref.slot] for each in arguments])
            continue
        specs = [each.specs[ref.producer][ref.slot] for each in inferred]
        dim = sequence_dim(specs, spans, f"output {ref.slot} of stage {ref.producer}")
        whole = _random(specs[0], arguments[0].tensors[0].device)
        columns.append([whole, *(span.part(whole, dim) for span in spans)])
    return [list(row) for row in zip(*columns, strict=True)]


_ALONE = "; losses that modules make are of each token, as of LinearCrossEntropy(..., reduction='none')"


def _check_stage(
    run: Run,
    s: int,
    inferred: Sequence[Inferred],
    inputs: Sequence[Sequence[torch.Tensor]],
    spans: Sequence[Tokens],
    *,
    within: _Within,
    loss: LossOfParts | None,
) -> None:
    stages = [each.stages[s] for each in inferred]
    total = spans[0].total
    (whole, seen), *parts = _run(run, stages, inputs, [TokenBlocks(((0, total),), total), *spans], within)
    if loss is not None:  # first, since members add theirs up
        loss.check(whole, parts[0][0])
    for slot, expected in enumerate(whole):
        if loss is not None and slot == loss.slot:
            continue
        specs = [each.specs[s][slot] for each in inferred]
        what = f"output {slot} of stage {s} ({stages[0].name})"
        dim = sequence_dim(specs, spans, what)
        for span, (part, own) in zip(spans, parts, strict=True):
            if difference := _difference(span.part(expected, dim), part[slot]):
                blocks = " and ".join(f"{start} to {end}" for start, end in span.blocks)
                raise ValueError(
                    f"{what} differs over parts of the sequence{own.first_unlike(seen, span)}: for tokens {blocks} of "
                    f"{total} by {difference} from that of the whole (tried on random numbers, with random weights and "
                    f"without dropout{'' if expected.dim() else _ALONE})"
                )


def _run(
    run: Run,
    stages: Sequence[StageModule],
    inputs: Sequence[Sequence[torch.Tensor]],
    spans: Sequence[Tokens],
    within: _Within,
) -> list[tuple[Tensors, TokenSums]]:
    found = []
    for stage, own, span in zip(stages, inputs, spans, strict=True):
        torch.manual_seed(0)
        sums = TokenSums(run.root, span.length)
        with within(span), sums.noted():
            found.append((stage.detached(stage.run(tuple(own))), sums))
    return found


def _difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    """The largest one, for people; empty where it is rounding."""
    if not expected.is_floating_point():
        return "" if torch.equal(expected, found) else "other integers"
    one, other = expected.double(), found.double()
    size = max(float(one.square().mean().sqrt()), 1e-30)  # root mean square
    difference = float((one - other).abs().max())
    is_rounding = difference <= by_type(SLICED_OUTPUTS, expected.dtype) * size
    return "" if is_rounding else f"{difference:.2g} in numbers of size {size:.2g}"


def sequence_dim(specs: Sequence[TensorSpec], spans: Sequence[Tokens], what: str) -> int | None:
    """The dimension in which a tensor of the whole and those of its slices differ; None: their shapes are equal.
    `specs`: of the whole, then of each slice. Raises ValueError where several differ, or other sizes than the
    tokens."""
    whole, *others = (spec.shape for spec in specs)
    dims = {d for shape in others for d, (one, other) in enumerate(zip(whole, shape, strict=False)) if one != other}
    if all(len(shape) == len(whole) for shape in others) and len(dims) <= 1:
        dim = next(iter(dims), None)
        lengths = [span.length for span in spans]
        if dim is None or (whole[dim], [shape[dim] for shape in others]) == (spans[0].total, lengths):
            return dim
    raise ValueError(
        f"{what} has shape {whole} for {spans[0].total} tokens and {others[0]} for {spans[0].length}: expected the "
        f"sequence in one dimension, separate from all else"
    )


def _random(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    if spec.dtype.is_floating_point:
        return torch.randn(spec.shape, dtype=torch.float32, device=device).to(spec.dtype)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


@contextmanager
def _other_weights(module: nn.Module) -> Iterator[None]:
    """Context with noise on the parameters, since a branch whose weights are still zero hides its effect."""
    kept = [(p, p.data) for p in module.parameters() if p.is_floating_point() and p.dim()]
    torch.manual_seed(0)  # the same noise on all members of a context group
    try:
        for parameter, data in kept:
            deviation = data.shape[-1] ** -0.5 if data.dim() > 1 else 0.1
            parameter.data = data + deviation * torch.randn_like(data)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def _in_order(span: Tokens, parts: torch.Tensor, dim: int) -> torch.Tensor:
    return span.in_order(parts, dim) if isinstance(span, TokenBlocks) else parts


class SlicedLoss:
    """Checks that the losses of an expected microbatch's parts add up to its own, once all have been seen."""

    def __init__(
        self,
        loss_fn: Callable[[object, object], object],
        output: Callable[[Tensors], object],
        group: TensorGroup | None,
    ) -> None:
        self._group = group  # of members that see one part each
        self._loss_fn = loss_fn
        self._output = output
        self._whole: Given | None = None
        self._slices: Sequence[Slice] = ()
        self._specs: list[Sequence[TensorSpec]] = []  # by output of the model: of the whole, then of each slice
        self._outputs: dict[int, Tensors] = {}  # by number of the slice

    def expect(self, whole: Given, slices: Sequence[Slice], inference: InferredStages) -> None:
        self._whole, self._slices = whole, slices
        arguments = [whole.arguments, *(part.arguments for part, _ in slices)]
        self._specs = list(zip(*(inference.of(Signature.of(each)).specs[-1] for each in arguments), strict=True))

    def saw(self, flat: Tensors, target: object) -> None:
        """Record a slice's outputs. Raises ValueError, with the last slice, where the loss differs from the whole's."""
        if self._whole is None:
            return
        for q, (part, _) in enumerate(self._slices):
            if part.target is target and q not in self._outputs:
                self._outputs[q] = tuple(x.detach().clone() for x in flat)
                self._add_others(q)
                break
        if len(self._outputs) == len(self._slices):
            whole, self._whole = self._whole, None
            self._check(whole)
            self._outputs.clear()

    def _add_others(self, own: int) -> None:
        """The outputs of the other members of a context group, which make their losses meanwhile."""
        if self._group is None:
            return
        found: list[list[torch.Tensor]] = [[] for _ in self._slices]
        for x, dim in zip(self._outputs[own], self._dims(), strict=True):
            whole = x if dim is None else _in_order(self._slices[own][1], self._group.all(x, dim), dim)
            for parts, (_, span) in zip(found, self._slices, strict=True):
                parts.append(span.part(whole, dim))
        self._outputs = {q: tuple(parts) for q, parts in enumerate(found)}

    def _dims(self) -> list[int | None]:
        spans = [span for _, span in self._slices]
        return [sequence_dim(specs, spans, f"output {slot} of the model") for slot, specs in enumerate(self._specs)]

    def _check(self, whole: Given) -> None:
        spans = [span for _, span in self._slices]
        flat = []
        for slot, dim in enumerate(self._dims()):
            parts = [self._outputs[q][slot] for q in range(len(spans))]
            flat.append(parts[0] if dim is None else _in_order(spans[0], torch.cat(parts, dim), dim))
        targets = [whole.target, *(part.target for part, _ in self._slices)]
        columns = [tuple(flat), *(self._outputs[q] for q in range(len(spans)))]
        kept = [self._loss_fn] if isinstance(self._loss_fn, nn.Module) else []
        with torch.no_grad(), untouched(*kept, device=flat[0].device):
            try:
                losses = [self._loss(*each, torch.float64) for each in zip(columns, targets, strict=True)]
            except (RuntimeError, TypeError, ValueError):  # a loss that does not support float64
                losses = [self._loss(*each, None) for each in zip(columns, targets, strict=True)]
        tolerance = by_type(SLICED_LOSSES, losses[0][0].dtype)
        (expected, count), *others = losses
        if count is None:
            found = sum(float(loss) * s.length / s.total for (loss, _), s in zip(others, spans, strict=True))
            pairs = [(float(expected), found)]
        else:
            counts = [float(c) for _, c in others if c is not None]
            pairs = [(float(expected), sum(float(loss) for loss, _ in others)), (float(count), sum(counts))]
        for one, other in pairs:
            if math.isfinite(one) and not abs(one - other) <= tolerance * max(abs(one), 1e-12):  # a slice may be nan
                raise ValueError(
                    f"loss_fn makes {one:.9g} of whole sequences and {other:.9g} of their {len(spans)} parts: "
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
