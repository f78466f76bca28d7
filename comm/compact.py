"""Pickles of what is sent and kept: of a view, its own elements."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


class CompactPickler(pickle.Pickler):
    """A pickler that writes only the elements of a view: torch writes all memory under it, such as a data set."""

    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided
        if is_plain and value.nbytes < value.untyped_storage().nbytes():
            return value.detach().clone().requires_grad_(value.requires_grad).__reduce_ex__(2)
        return NotImplemented


def compact(value: object) -> bytes:
    CompactPickler(file := io.BytesIO()).dump(value)
    return file.getvalue()
