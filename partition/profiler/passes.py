"""Runs of a model unit by unit: once to learn what flows, then again and again against the clock.

A pass goes through the units as a pipeline of one unit a stage would; between two such passes the whole model runs as
one, and units whose backward is split, so that all meet the same machine, and the units find the caches as a whole
step leaves them:

    F0 F1 F2 F3 B3 B2 B1 B0 | F0..F3 B3..B0 in one | F0 F1 F2 F3 I3 W3 I2 W2 I1 W1 I0 W0 | F0 F1 ...

Of equal units only the first runs, except where the whole runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...schedules.actions import Op
from ..model.calls import Calls
from ..model.fingerprint import tensor_form
from ..model.forms import Arguments, Form, Tensors
from ..model.keep_less import without_activations
from ..model.source_line import first_line, users_line
from ..model.split_backward import SplitBackward, WeightGradients
from ..model.units import ModelUnits, StageModule, Unit, first_run, fresh_leaves, take
from ..model.untouched import untouched
from ..plans.sizes import Size, fitted
from ..profile import Profile
from .clock import Clock, Stamp
from .memory import Stash, bytes_of
from .optimizers import HOOKS

NOT_BY_SAMPLES = (nn.modules.batchnorm._NormBase, nn.RNNBase)  # cannot run on a part of the samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A unit as one walk through the model showed it."""

    unit: Unit
    stage: StageModule  # runs the unit alone
    like: int  # the number of the first unit that is equal; its own where it is the first
    output_bytes: int
    stash_bytes: int
    inputs: Tensors  # detached, with the flags of whether they want a gradient; kept of the first of equal units only
    gradients: Tensors  # of those outputs that have one
    finish: Callable[[Tensors], Tensors] | None  # the loss, on the last unit

    def forward(self, autocast: AbstractContextManager[Any]) -> tuple[Tensors, Tensors]:
        """Runs F; returns (leaves, outputs that want a gradient)."""
        leaves = fresh_leaves(self.inputs)
        with autocast:
            outputs = self.stage.run(leaves)
            if self.finish is not None:
                outputs = self.finish(outputs)
        return leaves, tuple(output for output in outputs if output.requires_grad)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.stage.module.parameters() if parameter.requires_grad]


class Traffic:
    """Sums over the ranks that a cut weight lies on, since they were last taken: how many, and bytes of each rank."""

    def __init__(self) -> None:
        self._sums = 0.0
        self._bytes = 0.0

    def tell(self, kind: str, num_bytes: int) -> None:
        """One more: a "sum" of tensors of so many bytes, or a "gather" whose result has so many, half a sum's way."""
        self._sums += 1.0 if kind == "sum" else 0.5
        self._bytes += num_bytes if kind == "sum" else num_bytes / 2

    def take(self) -> tuple[float, float]:
        found = self._sums, self._bytes
        self._sums = self._bytes = 0.0
        return found


class Passes:
    """A model's units, run in passes; the stash leaves `apart` out: parameters and buffers.

    Raises ValueError for inputs that do not fit the model.
    """

    def __init__(
        self,
        units: ModelUnits,
        arguments: Arguments,
        *,
        loss: Callable[[Any], Tensors] | None,
        apart: Sequence[torch.Tensor],
        autocast: torch.dtype | None,
        clock: Clock,
    ) -> None:
        self._form, self._inputs, self.num_samples = arguments.form, arguments.tensors, arguments.num_samples
        self._loss, self._apart = loss, apart
        self._autocast_dtype = autocast
        self._clock = clock
        self.samples = self._learn(units, apart)
        self.firsts = [i for i, sample in enumerate(self.samples) if sample.like == i]
        # Samples [s], one a pass: of the first of equal units, and of the whole.
        self.times: dict[int, dict[Op, list[float]]] = {i: defaultdict(list) for i in self.firsts}
        self.step: dict[Op, list[float]] = defaultdict(list)
        self.split_forward: dict[int, list[float]] = defaultdict(list)  # forwards whose backward can be split
        found = {i: without_activations(self.samples[i].stage.units) for i in self.firsts}
        self._less = {i: Calls(through) for i, through in found.items() if through}
        # By the first of equal units that can keep less: bytes, and samples without and with that [s].
        self.saved = {i: saved for i in self.firsts if (saved := self._saved(i)) > 0}
        self.beside: dict[int, tuple[list[float], list[float]]] = {i: ([], []) for i in self.saved}

    def forward(self, index: int) -> tuple[Tensors, Tensors]:
        """(leaves, outputs that want a gradient) of a unit that is the first of its equals."""
        return self.samples[index].forward(self._autocast())

    def kv_share(self) -> float:
        """`Profile.kv_share`: the largest of any unit."""
        shares = [0.0]
        for index in self.firsts:
            with AttentionCalls() as calls:
                self.forward(index)
            shares.append(calls.kept_bytes / max(1, self.samples[index].stash_bytes))
        return max(shares)

    def traffic(self, index: int, told: Traffic) -> dict[str, Any]:
        """Figures of a `Node` about sums over the tensor ranks, of a unit that is the first of its equals."""
        told.take()
        leaves, outputs = self.forward(index)
        num_forward, forward_bytes = told.take()
        if outputs:
            torch.autograd.backward(outputs, self.samples[index].gradients)
        del leaves
        num_backward, backward_bytes = told.take()
        return {
            "forward_sums": num_forward,
            "forward_sum_bytes": forward_bytes,
            "backward_sums": num_backward,
            "backward_sum_bytes": backward_bytes,
        }

    def by_samples(self, index: int) -> bool:
        """Whether a unit is one module that treats each sample independently, samples first: tried on the first
        half."""
        sample, half = self.samples[index], self.num_samples // 2
        equal = [each.stage.units for each in self.samples if each.like == index]
        if {*map(len, equal)} != {1} or len({*equal}) < len(equal):  # of several modules, or one that runs again
            return False
        if any(isinstance(each, NOT_BY_SAMPLES) for each in equal[0][0].modules()):
            return False
        try:
            with torch.no_grad(), self._autocast():
                whole, part = (sample.stage.run(tuple(x[:n] for x in sample.inputs)) for n in (self.num_samples, half))
                torch.testing.assert_close(part, tuple(x[:half] for x in whole), rtol=1e-4, atol=1e-5)
                return half > 0 and {len(x) for x in (*sample.inputs, *whole)} == {self.num_samples}
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            return False

    def _saved(self, index: int) -> int:
        """Bytes that a unit keeps less without results of GELUs."""
        kept = []
        for calls in (Calls({}), self._less[index]) if index in self._less else ():
            stash = Stash([*self._apart, *self.samples[index].inputs])
            with stash.counting() as saved, calls.through():
                self.forward(index)
            kept.append(saved())
        return kept[0] - kept[1] if kept else 0

    def run_less(self, *, keep: bool) -> None:
        """F and B of those units that can keep less, without and with that, by turns."""
        for index, samples in self.beside.items():
            for calls, seconds in zip((Calls({}), self._less[index]), samples, strict=True):
                begin = self._clock.stamp()
                with calls.through():
                    leaves, outputs = self.forward(index)
                if outputs:
                    torch.autograd.backward(outputs, self.samples[index].gradients)
                end = self._clock.stamp()
                del leaves, outputs
                self._clock.settle()
                if keep:
                    seconds.append(self._clock.between(begin, end))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._inputs[0].device.type, dtype=self._autocast_dtype)

    def _finish(self, form: Form) -> Callable[[Tensors], Tensors] | None:
        loss = self._loss
        return None if loss is None else lambda flat: loss(form.assemble(flat))

    def _learn(self, units: ModelUnits, apart: Sequence[torch.Tensor]) -> list[Sample]:
        cut = units.by_unit({unit.name: i for i, unit in enumerate(units.units)})
        stash = Stash([*apart, *self._inputs])
        values: list[Tensors] = []
        samples: list[Sample] = []
        firsts: dict[object, int] = {}
        stage = finish = None
        for index, (unit, piece) in enumerate(zip(units.units, cut.pieces, strict=True)):
            linked = piece.link(stage, index=index, inputs=self._form)
            inputs = take(linked[1], self._inputs, values)
            with stash.counting() as saved, self._autocast():
                with _explained(unit, inputs):
                    stage, outputs, _ = first_run(piece, linked, inputs)
                if index == len(cut.pieces) - 1:
                    finish = self._finish(cut.form_of_output(stage))
                results = outputs if finish is None else finish(outputs)
            like = firsts.setdefault((piece.form(), tuple(map(tensor_form, inputs)), finish is None), index)
            is_first = like == index
            samples.append(
                Sample(
                    unit=unit,
                    stage=stage,
                    like=like,
                    output_bytes=bytes_of(outputs),
                    stash_bytes=saved(),
                    inputs=fresh_leaves(inputs) if is_first else (),
                    gradients=tuple(_gradient(x) for x in results if x.requires_grad) if is_first else (),
                    finish=finish,
                )
            )
            values.append(fresh_leaves(outputs))
        return samples

    def run_units(self, *, keep: bool) -> None:
        """F of the first of equal units in order, B in the other direction; `keep`: whether the times count."""
        stamp = self._clock.stamp
        marks: dict[int, list[Stamp]] = {}
        live: list[tuple[int, Tensors]] = []
        for index in self.firsts:
            begin = stamp()
            _, outputs = self.forward(index)
            marks[index] = [begin, stamp()]
            live.append((index, outputs))
        while live:
            index, outputs = live.pop()
            begin = stamp()
            if outputs:
                torch.autograd.backward(outputs, self.samples[index].gradients)
            marks[index] += [begin, stamp()]
            del outputs
        self._clock.settle()
        for index, (a, b, c, d) in marks.items() if keep else ():
            self.times[index][Op.F].append(self._clock.between(a, b))
            self.times[index][Op.B].append(self._clock.between(c, d))

    def run_split(self, *, keep: bool) -> None:
        """The same with I, then W, in the place of B; of units that have only one of them F alone."""
        stamp = self._clock.stamp
        forwards: dict[int, tuple[Stamp, Stamp]] = {}
        marks: dict[int, tuple[Stamp, Stamp, Stamp]] = {}
        split = SplitBackward()
        live: list[tuple[int, Tensors, Tensors]] = []
        for index in self.firsts:
            begin = stamp()
            with split.forward():
                live.append((index, *self.forward(index)))
            forwards[index] = begin, stamp()
        while live:
            index, leaves, outputs = live.pop()
            sample = self.samples[index]
            if not (outputs and any(x.requires_grad for x in leaves) and sample.parameters):
                continue
            weights = WeightGradients()
            begin = stamp()
            with split.backward(weights):
                torch.autograd.backward(outputs, sample.gradients)
            middle = stamp()
            weights.add()
            marks[index] = (begin, middle, stamp())
            del leaves, outputs
        self._clock.settle()
        if not keep:
            return
        for index, span in forwards.items():
            self.split_forward[index].append(self._clock.between(*span))
        for index, (a, b, c) in marks.items():
            self.times[index][Op.I].append(self._clock.between(a, b))
            self.times[index][Op.W].append(self._clock.between(b, c))

    def run_whole(self, *, keep: bool) -> None:
        """F and B of all units as one graph."""
        begin = self._clock.stamp()
        values: list[Tensors] = []
        with self._autocast():
            for sample in self.samples:
                values.append(sample.stage.run(take(sample.stage.inputs, self._inputs, values)))
            finish = self.samples[-1].finish
            outputs = values[-1] if finish is None else finish(values[-1])
        middle = self._clock.stamp()
        wanted = [x for x in outputs if x.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, self.samples[self.samples[-1].like].gradients)
        end = self._clock.stamp()
        self._clock.settle()
        if keep:
            self.step[Op.F].append(self._clock.between(begin, middle))
            self.step[Op.B].append(self._clock.between(middle, end))


@contextmanager
def _explained(unit: Unit, inputs: Tensors) -> Iterator[None]:
    """Within: an error is raised as a ValueError with the unit, what it was given and the user's source line."""
    try:
        yield
    except (RuntimeError, TypeError, IndexError, AssertionError) as error:
        given = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in inputs)
        raise ValueError(
            f"{unit.name} ({unit.description}) cannot take ({given}){users_line(error)}: {first_line(error)}. "
            f"Expected example_inputs of one microbatch, batch first, that fit the model"
        ) from error


def _gradient(output: torch.Tensor) -> torch.Tensor:
    """A gradient for an output: a loss counts once; otherwise small numbers, no zeros, the same each time."""
    dense = torch.empty_like(output)
    return dense.fill_(1.0 if output.dim() == 0 else 1e-3)


@contextmanager
def profiled(*roots: nn.Module, device: torch.device) -> Iterator[None]:
    """Within: every trainable parameter has a zero gradient to add to and no hook; the model may be run forth and back.

    Afterwards gradients, and all that `untouched` keeps, are what they were.
    """
    gradients = [(parameter, parameter.grad) for root in roots for parameter in root.parameters()]
    # Emptied in place: autograd holds the tables themselves.
    tables_of_hooks = [table for p, _ in gradients for name in HOOKS if (table := getattr(p, name, None))]
    hooks = [(table, dict(table)) for table in tables_of_hooks]
    with untouched(*roots, device=device):
        try:
            zeros: dict[object, torch.Tensor] = {}  # those that share memory, as of layers built without, share it too
            for parameter, _ in gradients:
                key = parameter.data_ptr() or id(parameter), parameter.shape
                if parameter.requires_grad and key not in zeros:
                    zeros[key] = torch.zeros_like(parameter)
                parameter.grad = zeros.get(key)
            for table, _ in hooks:
                table.clear()
            yield
        finally:
            for table, entries in hooks:
                table.update(entries)
            for parameter, gradient in gradients:
                parameter.grad = gradient


_attention = F.scaled_dot_product_attention


class AttentionCalls(TorchFunctionMode):
    """Within: adds up `kept_bytes` of keys, values, their gradients and causal masks of 4 bytes."""

    kept_bytes = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.multi_head_attention_forward:  # calls attention on its own, where modes do not look
            with patch.object(F, "scaled_dot_product_attention", self._attend):
                return func(*args, **given)
        return self._attend(*args, **given) if func is _attention else func(*args, **given)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any, **options: Any) -> Any:
        kept = sum(x.numel() * x.element_size() for x in (key, value))
        self.kept_bytes += 2 * kept + 4 * query.shape[-2] * key.shape[-2] // 2
        return _attention(query, key, value, *given, **options)


def slice_shares(
    arguments: Arguments, target: Any, dim: int, whole: float | None, again: Callable[..., Profile]
) -> dict[str, Any]:
    """Figures of a `Profile`: from the seconds of whole sequences [s], and profiles of shorter arguments and `target`.

    A sequence is as long as the first of the arguments that has the dimension; all tensors that are as long are cut.
    ValueError where none is, or below 4 tokens.
    """
    total = next((x.shape[dim] for x in arguments.tensors if 0 <= dim < x.dim()), 0)
    if total < 4:
        raise ValueError(
            f"sequence_dim={dim} with example_inputs={arguments}: expected a dimension of 4 tokens or more, such as 1"
        )
    known = {Size(1, total): whole or 0.0}
    for tokens in (total // 2, total // 4):

        def first(x: Any, tokens: int = tokens) -> Any:
            is_cut = isinstance(x, torch.Tensor) and x.dim() > dim and x.shape[dim] == total
            return x.narrow(dim, 0, tokens) if is_cut else x

        shorter = again(arguments.map(first), target=pytree.tree_map(first, target))
        known[Size(1, tokens)] = shorter.step_seconds or 0.0
    law = fitted(known)
    fixed, all_of_it = law(Size(1, 0)), law(Size(1, total))
    pairs = (law(Size(1, 2 * total)) - fixed) / 2 - (all_of_it - fixed)
    pairs = min(max(pairs, 0.0), all_of_it)  # a law is never 0: where all grows with pairs, `fixed` is too much
    rest = min(fixed, all_of_it - pairs)
    return {"sequence_tokens": total, "pair_share": pairs / all_of_it, "slice_share": rest / all_of_it}
