"""A model run for its shapes, on fake tensors; it stays as it was."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .forms import Arguments
from .modes import uncompiled
from .stand_ins import stand_ins
from .untouched import Places, untouched


class FakeRun(NamedTuple):
    """Fakes that a model may be called with, the classes of what it reaches; at the end, where it left tensors."""

    given: Arguments
    kinds: set[type]
    left: Places


@contextmanager
def on_fakes(model: nn.Module, example: Arguments, *, device: torch.device, training: bool) -> Iterator[FakeRun]:
    """Within, the model may be called, with arguments like those of the example.

    Arguments:
        training: whether a graph is built.
    """
    with ExitStack() as stack:
        kept = stack.enter_context(untouched(model, device=device))
        left: Places = []
        stack.callback(lambda: left.extend(kept.new_tensors()))
        stack.enter_context(uncompiled())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of the user's code: it will say so when it runs
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.enable_grad() if training else torch.no_grad())
        given = example.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device))
        stack.enter_context(stand_ins(model, device))
        yield FakeRun(given, kept.kinds, left)
