"""From the arguments of a call (`train_step(x, y)`, `train_step(input_ids=..., labels=...)`) to a batch.

train_step(x, y)                 f(x)                 target y: the last positional argument
train_step(x, mask=m, target=y)  f(x, mask=m)         target y: by keyword
train_step(batch)                f(**batch)           a dict whose keys are parameters of f
train_step(x, labels=y)          f(x, labels=y)       no target: f returns its own loss

train_step(microbatches=[(x0, y0), (x1, y1)])         a batch that is cut already: each of them is one of the above
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ...partition.model.batch_dims import (
    TARGET,
    BatchDims,
    key_of,
    keys_of,
    parameter_names,
    refuse_chance,
    refuse_target,
    with_dims,
)
from ...partition.model.chain import is_sequential
from ...partition.model.forms import Arguments, Form, copied, cut_tensor, tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One batch, whole or cut into microbatches."""

    arguments: Arguments  # of the model; of a batch in microbatches, those of the first
    target: object = None  # of the loss: tensors in tuples, lists and dicts; None if there is none
    target_dim: int | None = 0  # dimension of the batch in the target; None: all microbatches share it
    is_listed: bool = False  # whether the target is a list of one target per sample
    # Of a batch that is cut already, whose sizes may differ in any dimension; else empty.
    microbatches: tuple[Given, ...] = ()

    @property
    def parts(self) -> tuple[Given, ...]:
        """The microbatches, or the batch itself if it is whole."""
        return self.microbatches or (self,)

    @property
    def num_samples(self) -> int:
        return sum(part.arguments.num_samples for part in self.parts)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(x for part in self.parts for x in part.arguments.tensors)

    @property
    def targets(self) -> object:
        return tuple(part.target for part in self.microbatches) if self.microbatches else self.target

    def on(self, device: torch.device, *, keeps: bool = False) -> Given:
        """The same on a device, except meta tensors; with `keeps` copied, since the user may overwrite them after the
        call.
        """

        def move(x: torch.Tensor) -> torch.Tensor:
            return x if x.is_meta else x.to(device, copy=keeps or x.is_inference())  # which autograd would refuse

        def moved(part: Given) -> Given:
            target = pytree.tree_map(lambda leaf: move(leaf) if isinstance(leaf, torch.Tensor) else leaf, part.target)
            return replace(part, arguments=part.arguments.map(move), target=target)

        return self._changed(moved)

    def detached(self) -> Given:
        """The same without a graph, for a run besides training."""
        return self._changed(lambda part: replace(part, arguments=part.arguments.map(torch.Tensor.detach)))

    def copied(self) -> Given:
        """The same with its own targets, since a loss may change its target and the batch will run again."""
        return self._changed(lambda part: replace(part, target=copied(part.target)))

    def _changed(self, change: Callable[[Given], Given]) -> Given:
        return _in_microbatches([change(part) for part in self.microbatches]) if self.microbatches else change(self)

    def cut(self, num_parts: int) -> list[Given]:
        """Microbatches: those of a batch that is cut already, or as `Arguments.cut` makes them, with tensors of the
        target.
        """
        if self.microbatches:
            assert len(self.microbatches) == num_parts, "checked when the batch came"
            return list(self.microbatches)
        num_samples, parts = self.arguments.num_samples, self.arguments.cut(num_parts)
        if self.is_listed:
            assert isinstance(self.target, list)
            listed = iter(self.target)
            return [replace(self, arguments=part, target=[*islice(listed, part.num_samples)]) for part in parts]
        leaves, spec = pytree.tree_flatten(self.target)
        columns: list[Sequence[object]] = []
        for leaf in leaves:
            dim = self.target_dim
            if isinstance(leaf, torch.Tensor) and leaf.is_nested and dim is not None and num_parts > 1:
                raise ValueError("a nested tensor in the target: expected a list of one tensor for each sample")
            if isinstance(leaf, np.ndarray) and dim is not None and num_samples in leaf.shape and num_parts > 1:
                raise ValueError(
                    f"a numpy array of shape {leaf.shape} in the target, of which only tensors are cut into "
                    f"microbatches: expected torch.from_numpy(...), or batch_dims={{{TARGET!r}: None}}"
                )
            if dim is None or not isinstance(leaf, torch.Tensor) or not leaf.dim():
                columns.append([leaf] * num_parts)
                continue
            if not -leaf.dim() <= dim < leaf.dim() or leaf.shape[dim] != num_samples:
                shown = leaf.shape[dim] if -leaf.dim() <= dim < leaf.dim() else "no"
                raise ValueError(
                    f"a target of {shown} samples for inputs of {num_samples}: expected the same number in dimension "
                    f"{dim}; or batch_dims={{{TARGET!r}: ...}} with another dimension, or None where all microbatches "
                    f"share it"
                )
            # A loss may change its target in place: autograd would take that for a change of all views of one tensor.
            cut = cut_tensor(leaf, num_parts, dim % leaf.dim())
            columns.append([part if part.requires_grad else part.data for part in cut])
        rows = zip(*columns, strict=True) if columns else [()] * num_parts
        targets = columns[0] if spec.is_leaf() else [pytree.tree_unflatten(row, spec) for row in rows]
        pairs = zip(parts, targets, strict=True)
        return [Given(arguments=part, target=target, target_dim=self.target_dim) for part, target in pairs]


MICROBATCHES = "microbatches"  # the keyword of a batch that is cut already
_LIKE = 0.75  # similarity of a wrong name to the right one from which an error names that
_SURELY = 0.85  # ... from which it is an error even if forward(..., **kwargs) takes it


_Read = Callable[[Sequence[Any], Mapping[str, Any]], Given]


class CallReader:
    """Separates the arguments of a model (None: of a list of stages) from the target, if the loss takes one. `more`:
    keywords with those that follow from them."""

    def __init__(
        self,
        model: nn.Module | None,
        *,
        has_target: bool,
        batch_dims: BatchDims,
        more: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    ) -> None:
        self.signature = signature_of(model)
        self._more = more
        self._model = type(model).__name__
        self._has_target = has_target
        self._batch_dims = batch_dims
        self._names = parameter_names(self.signature)
        self._has_listed: bool | None = None  # whether the newest list of targets had one per sample
        self._num_positional: int | None = None  # of the first call; later calls are brought to its form

    def batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given:
        """Inputs and the target. Raises ValueError for arguments that the model cannot take."""
        given = self._read(args, kwargs, self._batch)
        if type(given.target) is not list or given.microbatches or TARGET in self._batch_dims:
            return given
        return replace(given, is_listed=self._lists_samples(given.target, given.num_samples))

    def _lists_samples(self, target: list[object], num_samples: int) -> bool:
        """Whether a list has one target per sample; if a tensor in it could be cut, too, as in earlier batches."""
        if len(target) != num_samples or all(num_samples not in x.shape[:1] for x in tensors_in(target)):
            self._has_listed = len(target) == num_samples
        elif self._has_listed is None and num_samples > 1:
            raise ValueError(
                f"a list of {num_samples} targets for {num_samples} samples, with tensors of that size in it: expected "
                f"batch_dims={{{TARGET!r}: 0}}, where each tensor has all samples, or microbatches=[(x0, y0), ...], "
                f"where each entry is of one sample"
            )
        return self._has_listed is True

    def _batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given:
        if not self._has_target:
            return self.inputs(args, kwargs)
        args, kwargs = self._spread(args, kwargs) if len(args) == 1 and not kwargs else (tuple(args), dict(kwargs))
        if TARGET in kwargs:
            target = kwargs.pop(TARGET)
        elif args:
            *args, target = args
        elif kwargs:
            raise ValueError(
                f"no target among {', '.join(map(repr, kwargs))}: expected it as target=..., or as the last positional "
                f'argument; or PipelineModule(..., loss_fn="model") for a model that returns its own loss'
            )
        else:
            target = None
        if not args and not kwargs and target is not None:
            raise ValueError(
                f"no input: {type(target).__name__} as the only argument would be the target. Expected inputs and the "
                f"target, as one batch has them: for batch in loader: train_step(*batch)"
            )
        given = self._inputs(args, kwargs)
        return replace(given, target=target, target_dim=self._batch_dims.get(TARGET, 0))

    def refuse_chance(self, model: nn.Module, given: Given, *, num_parts: int, device: torch.device) -> None:
        """Raises ValueError if the dimension along which a whole batch is cut is not clear."""
        whole = given.arguments
        named = [i for i, path in enumerate(whole.form.paths) if {*keys_of(path, self._names)} & {*self._batch_dims}]
        refuse_chance(model, whole, named, num_parts=num_parts, device=device)
        if TARGET not in self._batch_dims and num_parts > 1:
            refuse_target(whole, given.target)

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given:
        return self._read(args, kwargs, self._inputs)

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any], read: _Read) -> Given:
        listed = self._listed(args, kwargs)
        if listed is None:
            return read(args, kwargs)
        return _in_microbatches([self._one(k, each, read) for k, each in enumerate(listed)])

    def _listed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any] | None:
        """Microbatches of a batch that is cut already; None for a whole one. Raises ValueError for an empty list."""
        if len(args) == 1 and not kwargs and isinstance(args[0], Mapping) and set(args[0]) == {MICROBATCHES}:
            args, kwargs = [], args[0]
        if MICROBATCHES not in kwargs or MICROBATCHES in self._names:
            return None
        if args or len(kwargs) > 1:
            others = [f"{len(args)} by position"] * bool(args) + [name for name in kwargs if name != MICROBATCHES]
            raise ValueError(
                f"microbatches= together with {', '.join(others)}: expected it alone, as in "
                f"train_step(microbatches=[(x0, y0), ...])"
            )
        listed = kwargs[MICROBATCHES]
        if not isinstance(listed, list | tuple) or not listed:
            raise ValueError(
                f"microbatches={listed!r:.60}: expected a list of microbatches, each a tuple of what train_step takes, "
                f"or a dict of keywords; train_step(microbatches=[(x0, y0), (x1, y1)])"
            )
        return listed

    def _one(self, number: int, given: Any, read: _Read) -> Given:
        if isinstance(given, torch.Tensor):
            given = (given,)
        if not isinstance(given, list | tuple | Mapping):
            raise ValueError(
                f"microbatch {number} is {type(given).__name__}: expected a tuple of what train_step takes, or a dict "
                f"of keywords"
            )
        try:
            return read((), given) if isinstance(given, Mapping) else read(given, {})
        except ValueError as error:
            raise ValueError(f"microbatch {number}: {error}") from None

    def _inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given:
        if len(args) == 1 and not kwargs:
            args, kwargs = self._spread(args, kwargs)
        args, kwargs = self._bound(tuple(args), kwargs)
        kwargs = self._more(kwargs)
        for name, value in (*((f"input {i}", each) for i, each in enumerate(args)), *kwargs.items()):
            if isinstance(value, PackedSequence):
                raise ValueError(
                    f"{name} is a PackedSequence, from which samples cannot be cut: expected padded sequences and "
                    f"their lengths, to be packed in a module's forward"
                )
        return Given(arguments=with_dims(Arguments.of(args, kwargs), self._batch_dims, self._names))

    def example(self, example: Sequence[Any] | Mapping[str, Any]) -> Given:
        if not isinstance(example, list | tuple | Mapping):
            shown = type(example).__name__
            raise ValueError(
                f"example_inputs= is {shown}: expected a tuple of tensors, or a dict of keywords; "
                f"example_inputs=(batch,)"
            )
        return self.inputs((), example) if isinstance(example, Mapping) else self.inputs(example, {})

    def _spread(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A mapping as the only argument is keywords if one of its keys is a parameter of forward."""
        only = args[0]
        if self.signature is None or not isinstance(only, Mapping) or not all(isinstance(key, str) for key in only):
            return tuple(args), dict(kwargs)
        if any(key in self._names or self._meant(key) for key in only):
            return (), dict(only)
        return tuple(args), dict(kwargs)

    def _meant(self, name: str, *, least: float = _LIKE) -> str | None:
        return next(iter(difflib.get_close_matches(name, self._names, n=1, cutoff=least)), None)

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments, by position or keyword as in the first call. Raises ValueError unless forward takes them."""
        if self.signature is None:
            if kwargs:
                raise ValueError(
                    f"{', '.join(map(repr, kwargs))} by keyword for an nn.Sequential or a list of stages, whose "
                    f"modules pass on positional arguments alone: expected positional arguments"
                    f"{' and target=...' if self._has_target else ''}"
                )
            return args, kwargs
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            if not args and not kwargs:  # has an error of its own
                return args, kwargs
            raise self._unfit(args, kwargs, str(error)) from None
        for name in kwargs:
            meant = None if name in self._names else self._meant(name, least=_SURELY)
            if meant is not None and meant not in bound.arguments:  # forward(..., **kwargs) would take it silently
                raise self._unfit(args, kwargs, f"nothing for {meant!r}")
        if self._num_positional is None:
            self._num_positional = len(args)
        first = self._names[: self._num_positional]
        if len(args) == self._num_positional or any(name not in bound.arguments for name in first):
            return args, kwargs
        plain = {
            name
            for name, each in self.signature.parameters.items()
            if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        }
        given = set(self._names[: len(args)]) | set(first)
        if len(args) > len(self._names) or not given <= plain:
            return args, kwargs
        by_name = {**dict(zip(self._names, args, strict=False)), **kwargs}
        return tuple(by_name.pop(name) for name in first), by_name

    def _unfit(self, args: Sequence[object], kwargs: Mapping[str, object], problem: str) -> ValueError:
        near = [
            f"{name!r} looks like {meant!r}"
            for name in kwargs
            if name not in self._names and (meant := self._meant(name)) is not None
        ]
        words = [*(f"{len(args)} by position" for _ in args[:1]), *map(repr, kwargs)]
        target = "; the last positional argument is the target, unless target=... is given" if self._has_target else ""
        return ValueError(
            f"{self._model}.forward{self.signature} does not take {', '.join(words)} ({problem}"
            f"{'; ' if near else ''}{', '.join(near)}): expected its arguments, in its order or by name{target}"
        )


def _in_microbatches(parts: Sequence[Given]) -> Given:
    return replace(parts[0], microbatches=tuple(parts))


def signature_of(model: nn.Module | None) -> inspect.Signature | None:
    """Signature of a model's forward; None for a chain, whose first module takes the inputs."""
    return None if model is None or is_sequential(model) else inspect.signature(model.forward)


def check_batch(given: Given, num_microbatches: int) -> int:
    """Samples N of a batch. Raises ValueError for another number of microbatches, and as `check_arguments`."""
    if not given.microbatches:
        return check_arguments(given.arguments, num_microbatches)
    if len(given.microbatches) != num_microbatches:
        raise ValueError(
            f"a batch of {len(given.microbatches)} microbatches for a schedule of {num_microbatches}: expected "
            f"{num_microbatches} in every batch, or PipelineModule(..., num_microbatches={len(given.microbatches)})"
        )
    num_samples = 0
    for number, part in enumerate(given.microbatches):
        try:
            num_samples += check_arguments(part.arguments, 1)
        except ValueError as error:
            raise ValueError(f"microbatch {number}: {error}") from None
    return num_samples


def check_arguments(arguments: Arguments, num_microbatches: int) -> int:
    """Samples N of a batch. Raises ValueError for no tensors, uneven sizes, and fewer samples than microbatches."""
    if not arguments.form.spec.num_leaves:
        raise ValueError("no input: expected at least one tensor with the batch in dimension 0, then the target")
    for name, x, dim in zip(arguments.names, arguments.tensors, arguments.dims, strict=True):
        if dim is not None and (x.is_nested or x.layout != torch.strided or x.is_quantized):
            kind = "nested" if x.is_nested else "quantized" if x.is_quantized else "sparse"
            raise ValueError(f"{name} is a {kind} tensor: expected a dense one, which can be cut into microbatches")
    sizes = arguments.sizes
    if not sizes:
        args, kwargs = arguments.form.assemble(arguments.tensors)
        name, value = next(iter([*((f"input {i}", each) for i, each in enumerate(args)), *kwargs.items()]))
        shown = "a tensor without dimensions" if isinstance(value, torch.Tensor) else type(value).__name__
        if isinstance(value, torch.Tensor) and value.dim():
            shown = "shared by all microbatches (batch_dims)"
        raise ValueError(f"{name} is {shown}: expected a tensor with the batch in dimension 0")
    if len(set(sizes)) > 1:
        names = [name for name, dim in zip(arguments.names, arguments.dims, strict=True) if dim is not None]
        usual = max(sizes, key=sizes.count)
        odd = next(name for name, size in zip(names, sizes, strict=True) if size != usual)
        raise ValueError(
            f"inputs have batch sizes {list(sizes)}: expected the same number of samples in dimension 0 of "
            f"{', '.join(names)}; or, where one has its batch elsewhere or all microbatches share it, "
            f"batch_dims={{{key_of(odd)}: its dimension, or None}}"
        )
    if sizes[0] < num_microbatches:
        raise ValueError(
            f"a batch of {sizes[0]} samples for {num_microbatches} microbatches: expected at least one sample each; "
            f"give larger batches (a DataLoader's last is smaller without drop_last=True, and that of pipe.loader "
            f"without remainder='drop') or num_microbatches={max(1, sizes[0])}"
        )
    return sizes[0]


def check_like_example(arguments: Arguments, example: Arguments, *, has_target: bool) -> None:
    """Raises ValueError unless the stages were built for such arguments; values and sizes may differ."""
    if arguments.form != example.form:
        raise ValueError(_difference(arguments, example, has_target=has_target))
    for name, x, like in zip(arguments.names, arguments.tensors, example.tensors, strict=True):
        if x.dtype != like.dtype:
            raise ValueError(f"{name} is {x.dtype} and the stages were built for {like.dtype}: type x.to({like.dtype})")


def _difference(arguments: Arguments, example: Arguments, *, has_target: bool) -> str:
    (args, _), (then, _) = (each.form.assemble(each.tensors) for each in (arguments, example))  # of a chain
    if len(args) != len(then):
        what, expected = (" and a target", "then the target") if has_target else ("", "and no target")
        return f"{len(args)} inputs{what} for a model that was built for {len(then)}: expected {len(then)}, {expected}"
    pairs = ((i, Form.of(one)[0], Form.of(other)[0]) for i, (one, other) in enumerate(zip(args, then, strict=True)))
    said = [f"input {i} is {one} and was {other} (_: a tensor)" for i, one, other in pairs if one != other]
    return (
        f"arguments unlike those that the stages were built for: {', '.join(said)}. Expected the same numbers, strings "
        f"and flags for every batch; give what varies as a tensor"
    )
