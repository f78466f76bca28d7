"""Holdings of a rank after a step: its own stages' parameters and nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from .cases import Case, Layout
from .models import make_batch
from .pipeline import make_pipeline
from .reference import copied, reference_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Holdings of a rank after a training step. The user's code still holds the model."""

    names: tuple[str, ...]  # of pipe.named_parameters()
    own_bytes: int  # behind pipe.parameters()
    alive_bytes: int  # behind all Parameters that the user's model had at first
    local_state: dict[str, Tensor]
    full_state: dict[str, Tensor]


def take_stock(case: Case, layout: Layout) -> Holdings:
    model = reference_model(case)
    watched = [weakref.ref(parameter) for parameter in model.parameters()]
    pipe = make_pipeline(case, layout, model)
    inputs, target = make_batch(case.task, index=0, size=case.batch_sizes[0])
    pipe.train_step(*inputs, target)
    gc.collect()
    holdings = Holdings(
        names=tuple(name for name, _ in pipe.named_parameters()),
        own_bytes=storage_bytes(pipe.parameters()),
        alive_bytes=storage_bytes(p for p in (look() for look in watched) if p is not None),
        local_state=copied(pipe.state_dict()),
        full_state=copied(pipe.full_state_dict()),
    )
    pipe.close()
    return holdings


def storage_bytes(parameters: Iterable[Tensor]) -> int:
    storages = [p.untyped_storage() for p in parameters if p.device.type != "meta"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
