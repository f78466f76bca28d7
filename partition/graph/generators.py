"""Global random generators that user code may draw from: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def torch_generators(device: torch.device) -> list[torch.Generator]:
    """The CPU's, and that of a CUDA device."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


@contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Within: numbers may be drawn; afterwards all generators are where they were."""
    kept = [(generator, generator.get_state()) for generator in torch_generators(device)]
    python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        for generator, state in kept:
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(of_numpy)
