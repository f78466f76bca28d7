"""Which gradients exist, by the graphs of shape inference: as in one process, inputs that the loss does not depend on
get none.

    certain   a path of torch's own operations leads from the loss to the input: its gradient always exists
    flagged   all others (an output that a loss may ignore, code that reads values or draws numbers, the user's autograd
              functions): the message has a flag for each gradient, and zeros for one that does not exist

A flag is read on the host, which synchronizes a CUDA device: so there are flags only where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...comm import TensorSpec
from ...partition.model.fakes import original_of
from ...partition.model.forms import Tensors
from ...partition.model.units import ValueRef

Gradients = Sequence[torch.Tensor | None]  # None: there is none

OutputSpecs = Sequence[Sequence[TensorSpec]]  # of the outputs of each stage

# Autograd functions that return every gradient; others may return None for an input.
_FAITHFUL = ("torch.distributed.", "stagewright.")


class StageRun(NamedTuple):
    """One stage's run in shape inference; `is_typical`: every run seems to make this graph."""

    refs: Sequence[ValueRef]
    leaves: Tensors
    outputs: Tensors
    is_typical: bool


def certain_gradients(runs: Sequence[StageRun], *, loss_slot: int | None) -> tuple[tuple[bool, ...], ...]:
    """Inputs whose gradients always exist, by stage and input. `runs`: [S]. `loss_slot`: the output of the last stage
    that is the loss; None: the loss depends on at least one, any of them."""
    certain: list[tuple[bool, ...]] = []
    wanted: set[tuple[int, int]] = set()  # (stage, slot) of outputs that certainly get a gradient
    for s, run in reversed(list(enumerate(runs))):
        if s == len(runs) - 1:
            ends = [x for i, x in enumerate(run.outputs) if x.requires_grad and loss_slot in (None, i)]
            reached = [_reached([x], run.leaves) for x in ends]
            found = set.intersection(*reached) if reached else set()
        else:
            found = _reached([x for i, x in enumerate(run.outputs) if (s, i) in wanted], run.leaves)
        own = tuple(run.is_typical and i in found for i in range(len(run.leaves)))
        wanted |= {(ref.producer, ref.slot) for ref, yes in zip(run.refs, own, strict=True) if yes}
        certain.append(own)
    return tuple(reversed(certain))


def _reached(outputs: Sequence[torch.Tensor], leaves: Tensors) -> set[int]:
    """Numbers of the leaves that certainly get a gradient if all of these outputs do."""
    number = {id(leaf): i for i, leaf in enumerate(leaves) if leaf.requires_grad}
    found = {number[id(x)] for x in outputs if id(x) in number}
    for node in _nodes(outputs, _gives_all) if number else ():
        variable = getattr(node, "variable", None)  # a leaf, where a path ends
        if id(variable) in number:
            found.add(number[id(variable)])
        if len(found) == len(number):
            break
    return found


def _nodes(outputs: Sequence[torch.Tensor], goes_on: Callable[[Any], bool]) -> Iterator[Any]:
    """Nodes of the graph behind these outputs, but none behind one where it does not go on."""
    pending: list[Any] = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = {None, *pending}
    while pending:
        yield (node := pending.pop())
        fresh = [ahead for ahead, _ in node.next_functions if ahead not in seen] if goes_on(node) else []
        seen.update(fresh)
        pending += fresh


def _gives_all(node: object) -> bool:
    function = getattr(node, "_forward_cls", None)
    return function is None or function.__module__.startswith(_FAITHFUL)


def flag_spec(certain: Sequence[bool]) -> list[TensorSpec]:
    return [] if all(certain) else [TensorSpec((len(certain),), (1,), torch.uint8, False)]


def pack(gradients: Gradients, specs: Sequence[TensorSpec], device: torch.device) -> Tensors:
    """A message of these layouts: flags, where it has them, and every gradient, or zeros."""
    if specs[0].dtype is not torch.uint8:  # no flags
        return tuple([gradient for gradient in gradients if gradient is not None])
    flags = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8, device=device)

    def zeros(spec: TensorSpec) -> torch.Tensor:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device).zero_()

    return (flags, *(zeros(spec) if g is None else g for g, spec in zip(gradients, specs[1:], strict=True)))


def unpack(message: Tensors) -> Gradients:
    if message[0].dtype is not torch.uint8:  # which no gradient is
        return message
    flags, *whole = message
    return tuple(gradient if flag else None for flag, gradient in zip(flags.tolist(), whole, strict=True))


def float16_gradients(outputs: Sequence[torch.Tensor], names: Mapping[int, str]) -> str | None:
    for node in _nodes(outputs, lambda node: True):
        if any(spec.dtype is torch.float16 for spec in getattr(node, "_input_metadata", ())):
            return _near(node, names)
    return None


def _near(node: Any, names: Mapping[int, str]) -> str:
    pending = [node]
    for each in pending:  # grows
        variable = getattr(each, "variable", None)
        name = names.get(id(original_of(variable))) if variable is not None else None
        if name is not None:
            return f"with parameter {name!r}"
        pending += [ahead for ahead, _ in each.next_functions if ahead is not None and ahead not in pending]
    return f"in an operation without parameters ({node.name().removesuffix('0').removesuffix('Backward')})"
