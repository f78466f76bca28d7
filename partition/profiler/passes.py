"""Runs of a model part by part: once to learn what flows, then again and again against the clock.

A pass goes through the parts as a pipeline of one part a stage would; between two such passes the whole model runs as
one, so that both meet the same machine, and the parts find the caches as a whole step leaves them:

    F0 F1 F2 F3 B3 B2 B1 B0 | F0..F3 B3..B0 in one | F0 F1 ...      then      F0 F1 F2 F3 I3 W3 I2 W2 I1 W1 I0 W0 | ...

Of equal parts only the first runs, but where the whole does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ..graph.split_backward import SplitBackward
from ..graph.trace import MODEL_INPUT, ValueRef
from .fingerprint import tensor_form
from .memory import Stash, bytes_of
from .parts import Part, PartsOfModel, Tensors, sources_of
from .timing import Clock


@dataclass(slots=True, kw_only=True)
class Sample:
    """What one walk through the model taught of a part.

    Arguments:
        like: the number of the first part that is equal; its own where it is the first.
        sources: where its inputs come from.
        output_bytes, stash_bytes: [bytes].
        inputs: detached, with the flags of whether they want a gradient; kept of the first of equal parts only.
        gradients: of those outputs that have one.
    """

    part: Part
    like: int
    sources: tuple[ValueRef, ...]
    output_bytes: int
    stash_bytes: int
    inputs: Tensors = ()
    gradients: Tensors = ()
    finish: Callable[[Tensors], Tensors] | None = None  # the loss, on the last part

    def forward(self, autocast: AbstractContextManager[Any]) -> tuple[Tensors, Tensors]:
        """(leaves, outputs that want a gradient)."""
        leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in self.inputs)
        with autocast:
            outputs = self.part.run(leaves)
            if self.finish is not None:
                outputs = self.finish(outputs)
        return leaves, tuple(output for output in outputs if output.requires_grad)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those that are trained."""
        return [parameter for parameter in self.part.module.parameters() if parameter.requires_grad]


@dataclass(slots=True, kw_only=True)
class Times:
    """Samples [s], one a pass, of one part or of the whole."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    input_grad: list[float] = field(default_factory=list)
    weight_grad: list[float] = field(default_factory=list)


class Passes:
    """A model's parts, run in passes.

    Arguments:
        whole: all parts.
        inputs: of the model, one microbatch.
        loss: the model's output -> (loss,); None: the output gets a gradient as it is.
        apart: tensors that the stash leaves out: parameters and buffers.
        autocast: of a forward; a fresh one at each call.
    """

    def __init__(
        self,
        whole: PartsOfModel,
        inputs: Sequence[torch.Tensor],
        *,
        loss: Callable[[Any], Tensors] | None,
        apart: Sequence[torch.Tensor],
        autocast: torch.dtype | None,
        clock: Clock,
    ) -> None:
        self._whole = whole
        self._inputs = tuple(inputs)
        self._loss = loss
        self._autocast_dtype = autocast
        self._clock = clock
        self.samples = self._learn(apart)
        self.firsts = [i for i, sample in enumerate(self.samples) if sample.like == i]
        self.times = {i: Times() for i in self.firsts}
        self.step = Times()
        self.splits = False

    @property
    def num_samples(self) -> int:
        """Of the microbatch."""
        return self._inputs[0].shape[0]

    def forward(self, index: int) -> tuple[Tensors, Tensors]:
        """(leaves, outputs that want a gradient) of a part that is the first of its equals."""
        return self.samples[index].forward(self._autocast())

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._inputs[0].device.type, dtype=self._autocast_dtype)

    def _finish(self, flat: Tensors) -> Tensors:
        assert self._loss is not None
        return self._loss(self._whole.assemble(flat))

    def _learn(self, apart: Sequence[torch.Tensor]) -> list[Sample]:
        stash = Stash([*apart, *self._inputs])
        values: list[Tensors] = []
        samples: list[Sample] = []
        firsts: dict[object, int] = {}
        for index, part in enumerate(self._whole.parts):
            sources = sources_of(part, index, [len(each) for each in values], len(self._inputs))
            if part.inputs is None and index > 0:
                part.in_spec = self._whole.parts[index - 1].out_spec
            inputs = tuple(
                self._inputs[s.slot] if s.producer == MODEL_INPUT else values[s.producer][s.slot] for s in sources
            )
            leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
            finish = self._finish if self._loss is not None and index == len(self._whole.parts) - 1 else None
            with stash.counting() as saved, self._autocast():
                outputs = part.try_run(leaves)
                results = outputs if finish is None else finish(outputs)
            like = firsts.setdefault((part.form, tuple(map(tensor_form, inputs)), finish is None), index)
            sample = Sample(
                part=part,
                like=like,
                sources=sources,
                output_bytes=bytes_of(outputs),
                stash_bytes=saved(),
                finish=finish,
            )
            if like == index:
                sample.inputs = tuple(x.detach().requires_grad_(x.requires_grad) for x in inputs)
                sample.gradients = tuple(_gradient(x) for x in results if x.requires_grad)
            samples.append(sample)
            values.append(tuple(x.detach().requires_grad_(x.requires_grad) for x in outputs))
        return samples

    def run_parts(self, *, keep: bool) -> None:
        """F of the first of equal parts in order, B in the other direction; `keep`: whether the times count."""
        mark = self._clock.mark
        marks: dict[int, list[Any]] = {}
        live: list[tuple[int, Tensors]] = []
        for index in self.firsts:
            begin = mark()
            _, outputs = self.forward(index)
            marks[index] = [begin, mark()]
            live.append((index, outputs))
        while live:
            index, outputs = live.pop()
            begin = mark()
            if outputs:
                torch.autograd.backward(outputs, self.samples[index].gradients)
            marks[index] += [begin, mark()]
            del outputs
        self._clock.settle()
        for index, (a, b, c, d) in marks.items() if keep else ():
            self.times[index].forward.append(self._clock.seconds(a, b))
            self.times[index].backward.append(self._clock.seconds(c, d))

    def run_split(self, *, keep: bool) -> None:
        """The same with I, then W, in the place of B; parts that have only one of them are left out."""
        self.splits = True
        mark = self._clock.mark
        marks: dict[int, tuple[Any, Any, Any]] = {}
        live = [(index, *self.forward(index)) for index in self.firsts]
        while live:
            index, leaves, outputs = live.pop()
            sample = self.samples[index]
            wanted, parameters = [x for x in leaves if x.requires_grad], sample.parameters
            if not (outputs and wanted and parameters):
                continue
            split = SplitBackward(outputs, sample.gradients, leaves=wanted, parameters=parameters)
            begin = mark()
            split.input_grad()
            middle = mark()
            split.weight_grad()
            marks[index] = (begin, middle, mark())
            del leaves, outputs, wanted, split
        self._clock.settle()
        for index, (a, b, c) in marks.items() if keep else ():
            self.times[index].input_grad.append(self._clock.seconds(a, b))
            self.times[index].weight_grad.append(self._clock.seconds(b, c))

    def run_whole(self, *, keep: bool) -> None:
        """F and B of all parts as one graph."""
        begin = self._clock.mark()
        values: list[Tensors] = []
        with self._autocast():
            for sample in self.samples:
                inputs = [
                    self._inputs[s.slot] if s.producer == MODEL_INPUT else values[s.producer][s.slot]
                    for s in sample.sources
                ]
                values.append(sample.part.run(inputs))
            outputs = values[-1] if self._loss is None else self._finish(values[-1])
        middle = self._clock.mark()
        wanted = [x for x in outputs if x.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, self.samples[self.samples[-1].like].gradients)
        end = self._clock.mark()
        self._clock.settle()
        if keep:
            self.step.forward.append(self._clock.seconds(begin, middle))
            self.step.backward.append(self._clock.seconds(middle, end))


def _gradient(output: torch.Tensor) -> torch.Tensor:
    """What comes back for an output: a loss counts once; otherwise small numbers, no zeros, the same each time."""
    dense = torch.empty_like(output)
    return dense.fill_(1.0 if output.dim() == 0 else 1e-3)
