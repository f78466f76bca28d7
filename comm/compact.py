"""Pickles that hold of a tensor what it has: torch's own hold all memory that it is a view of, such as a data set."""

from __future__ import annotations

import io
import pickle
from types import SimpleNamespace
from typing import Any

import torch


class CompactPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided
        if is_plain and value.nbytes < value.untyped_storage().nbytes():
            return value.detach().clone().requires_grad_(value.requires_grad).__reduce_ex__(2)
        return NotImplemented


def compact(value: object) -> bytes:
    file = io.BytesIO()
    CompactPickler(file).dump(value)
    return file.getvalue()


PICKLES: Any = SimpleNamespace(__name__=__name__, Pickler=CompactPickler)  # pickle_module= of torch.save
