"""Fake tensors in the place of a module's parameters and buffers, and which buffers a forward writes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

_STATISTICS = ("running_mean", "running_var")
_ORIGINAL = "_stands_in_for"


def original_of(fake: torch.Tensor) -> torch.Tensor | None:
    """The parameter or buffer in whose place a fake stands; None for any other tensor."""
    original: torch.Tensor | None = getattr(fake, _ORIGINAL, None)
    return original


@contextmanager
def stand_ins(module: nn.Module, device: torch.device) -> Iterator[set[int]]:
    """Within a fake mode: fake tensors stand in for every parameter and buffer.

    Yields a set that holds, afterwards, the ids of the real tensors that the forward would have written to.
    """
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (table, name, value)
        for part in module.modules()
        for table in (part._parameters, part._buffers)
        for name, value in table.items()
        if value is not None
    ]
    fakes = _fakes_of([value for _, _, value in places], device)
    recurrent = [(part, part._flat_weights) for part in module.modules() if isinstance(part, nn.RNNBase)]
    for table, name, value in places:
        table[name] = fakes[id(value)]
    for rnn, _ in recurrent:  # it keeps its parameters in a list of its own too
        rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]
    written: set[int] = set()
    statistics = _WatchStatistics()
    # It sees each operation, and takes a sixth of its time. What wants a gradient is never a statistic.
    has_statistics = any(not fake.requires_grad for fake in fakes.values())
    try:
        with statistics if has_statistics else nullcontext():
            yield written
    finally:
        for table, name, value in places:
            fake = fakes[id(value)]
            if table.get(name) is not fake or fake._version or id(fake) in statistics.written:
                written.add(id(value))
            table[name] = value
        for rnn, flat in recurrent:
            rnn._flat_weights = flat


def _fakes_of(values: Sequence[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    """A fake for each tensor, by the tensor's id.

    Made around the mode, which gives the same at ten times the cost: a model has as many parameters as operations.
    """
    originals = {id(value): value for value in values}
    with unset_fake_temporarily() as mode:
        assert mode is not None, "outside of a fake mode"
        fakes: dict[int, torch.Tensor] = {
            key: FakeTensor(
                mode, torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta"), device
            )
            for key, value in originals.items()
        }
    for key, fake in fakes.items():
        value = originals[key]
        if isinstance(value, nn.Parameter):
            fake.requires_grad_(value.requires_grad)
            fake._is_param = True  # what nn.Parameter() makes of a tensor of another class
        setattr(fake, _ORIGINAL, value)
    return fakes


class _WatchStatistics(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within: statistics that a normalisation updates are noted by id, since it counts no version of them."""

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if names := _names_of_normalisation(func):
            given = dict(zip(names, args, strict=False)) | kwargs
            if given.get("training", given.get("train", False)):
                self.written |= {id(given[name]) for name in _STATISTICS if given.get(name) is not None}
        return func(*args, **kwargs)


@cache  # asked at each operation of each stage
def _names_of_normalisation(func: Any) -> tuple[str, ...]:
    """Names of the arguments of an operation that may update statistics; none of any other."""
    names = tuple(formal.name for formal in func._schema.arguments) if isinstance(func, torch._ops.OpOverload) else ()
    return names if any(name in names for name in _STATISTICS) else ()
