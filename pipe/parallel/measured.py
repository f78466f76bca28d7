"""The profile of a model that is cut for a tensor group, from one member of it alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ...partition.graph.forms import Arguments
from ...partition.profile import Profile
from ...partition.profiler import profile_model
from ...partition.profiler.traffic import Traffic
from .cutting import cut_by_styles
from .tensor_group import TensorGroup
from .tensor_option import TensorParallelLike, read_tensor_parallel


def profile_cut(
    model: nn.Module,
    example_inputs: Sequence[object] | Mapping[str, object] | Arguments,
    *,
    tensor: int,
    tensor_parallel: TensorParallelLike = "auto",
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Profile:
    """Measure a copy of the model as one of `tensor` ranks holds it; what travels between them is counted, not sent.

    Arguments:
        tensor: 1: the model itself.
        tensor_parallel: as PipelineModule takes it.
        progress: told which module is cut how, and what is being done.
        options: of `profile_model`.

    Raises ValueError as both do.
    """
    if tensor == 1:
        return profile_model(model, example_inputs, progress=progress, **options)
    styles = read_tensor_parallel(tensor_parallel, model, count=tensor)
    if progress is not None:
        progress(f"one of {tensor} tensor ranks\n{styles.table(model)}")
    traffic, part = Traffic(), copy.deepcopy(model)
    group = TensorGroup(None, index=0, count=tensor, on_bytes=traffic.tell)
    cut_by_styles(part, styles.styles, group)
    return profile_model(part, example_inputs, tensor=tensor, traffic=traffic, progress=progress, **options)
