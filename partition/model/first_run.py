"""The first run of a stage: only it shows what a stage returns and whether it changes its inputs in place.

On fake tensors in shape inference, on real ones in the profiler.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .forms import Form, Tensors
from .made_up import call_for_shapes
from .memory import memory_of, noting_writes
from .units import MODEL_INPUT, Linked, StageModule, StageUnits, ValueRef, flatten


def take(refs: Sequence[ValueRef], inputs: Sequence[torch.Tensor], results: Sequence[Tensors]) -> Tensors:
    return tuple(inputs[r.slot] if r.producer == MODEL_INPUT else results[r.producer][r.slot] for r in refs)


def fresh_leaves(tensors: Sequence[torch.Tensor]) -> Tensors:
    return tuple(x.detach().requires_grad_(x.requires_grad) for x in tensors)


def first_run(piece: StageUnits, linked: Linked, arguments: Tensors) -> tuple[StageModule, Tensors, frozenset[int]]:
    """Run a stage that nothing is known of: the stage, complete, its outputs, and the inputs that it changes in place.
    The arguments keep their values. OutputError for outputs that are no tensors, and whatever the module raises."""
    module, inputs = linked
    value, changed = run_and_watch(module, arguments)
    form: Form | None = None
    if piece.is_flat:
        assert isinstance(value, tuple)
        flat: Tensors = value
    else:
        form, flat = flatten(value, end=piece.end)
    buffers = {memory_of(buffer) for buffer in module.buffers()} - {None}
    stage = StageModule(
        name=piece.name,
        end=piece.end,
        module=module,
        inputs=inputs,
        num_outputs=len(flat),
        form=form,
        clone_inputs=bool(changed),
        clone_outputs=frozenset(i for i, x in enumerate(flat) if memory_of(x) in buffers),
    )
    return stage, flat, changed


def run_and_watch(module: nn.Module, arguments: Tensors) -> tuple[object, frozenset[int]]:
    """The value a module returns, and which arguments (leaves) it changes in place; it then ran again on copies."""
    values = [None if isinstance(x, FakeTensor) else x.detach().clone() for x in arguments]  # fakes have none
    try:
        with noting_writes() as written:
            value = call_for_shapes(module, arguments, call=module.forward)
    except RuntimeError as error:
        if "in-place" not in str(error):  # what autograd says of a leaf that is changed
            raise
    else:
        if written.isdisjoint(map(memory_of, arguments)):
            return value, frozenset()
    with torch.no_grad():
        for x, before in zip(arguments, values, strict=True):
            if before is not None:
                x.detach().copy_(before)
    copies = [x.clone() for x in arguments]
    with noting_writes() as written:
        value = call_for_shapes(module, copies, call=module.forward)
    return value, frozenset(i for i, x in enumerate(copies) if memory_of(x) in written)
