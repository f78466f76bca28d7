"""The cost of slices of a sequence: seconds at three lengths, and bytes that attention keeps for later ones.

seconds of the first L of T tokens  =  a + b L + c L^2          a: of any slice; c: of pairs of tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..model.forms import Arguments
from ..plans.sizes import Size, fitted
from ..profile import Profile

_attention = F.scaled_dot_product_attention


class AttentionCalls(TorchFunctionMode):
    """Within: adds up `kept_bytes` of keys, values, their gradients and causal masks of 4 bytes."""

    kept_bytes = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.multi_head_attention_forward:  # calls attention on its own, where modes do not look
            with patch.object(F, "scaled_dot_product_attention", self._attend):
                return func(*args, **given)
        return self._attend(*args, **given) if func is _attention else func(*args, **given)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any, **options: Any) -> Any:
        kept = sum(x.numel() * x.element_size() for x in (key, value))
        self.kept_bytes += 2 * kept + 4 * query.shape[-2] * key.shape[-2] // 2
        return _attention(query, key, value, *given, **options)


def slice_shares(
    arguments: Arguments, target: Any, dim: int, whole: float | None, again: Callable[..., Profile]
) -> dict[str, Any]:
    """Figures of a `Profile`: from the seconds of whole sequences [s], and profiles of shorter arguments and `target`.

    A sequence is as long as the first of the arguments that has the dimension; all tensors that are as long are cut.
    ValueError where none is, or below 4 tokens.
    """
    total = next((x.shape[dim] for x in arguments.tensors if 0 <= dim < x.dim()), 0)
    if total < 4:
        raise ValueError(
            f"sequence_dim={dim} with example_inputs={arguments}: expected a dimension of 4 tokens or more, such as 1"
        )
    known = {Size(1, total): whole or 0.0}
    for tokens in (total // 2, total // 4):

        def first(x: Any, tokens: int = tokens) -> Any:
            is_cut = isinstance(x, torch.Tensor) and x.dim() > dim and x.shape[dim] == total
            return x.narrow(dim, 0, tokens) if is_cut else x

        shorter = again(arguments.map(first), target=pytree.tree_map(first, target))
        known[Size(1, tokens)] = shorter.step_seconds or 0.0
    law = fitted(known)
    fixed, all_of_it = law(Size(1, 0)), law(Size(1, total))
    pairs = (law(Size(1, 2 * total)) - fixed) / 2 - (all_of_it - fixed)
    pairs = min(max(pairs, 0.0), all_of_it)  # a law is never 0: where all grows with pairs, `fixed` is too much
    rest = min(fixed, all_of_it - pairs)
    return {"sequence_tokens": total, "pair_share": pairs / all_of_it, "slice_share": rest / all_of_it}
