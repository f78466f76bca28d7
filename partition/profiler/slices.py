"""What slices of a sequence cost: seconds at three lengths, and bytes of keys and values.

seconds of the first L of T tokens  =  a + b L + c L^2          a: of any slice; c: of pairs of tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..model.forms import Arguments
from ..plans.sizes import Size, fitted

_LEAST_TOKENS = 4
_attention = F.scaled_dot_product_attention


class CausalCalls(TorchFunctionMode):
    """Within: adds up `kept_bytes` of keys and values; ValueError for attention that is not causal."""

    kept_bytes = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {} if kwargs is None else kwargs
        if func is F.multi_head_attention_forward:  # calls attention by itself, where modes do not look
            with patch.object(F, "scaled_dot_product_attention", self._attend):
                return func(*args, **given)
        return self._attend(*args, **given) if func is _attention else func(*args, **given)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any, **options: Any) -> Any:
        named = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), given, strict=False)), **options}
        if named.get("attn_mask") is not None or not named.get("is_causal", False):
            raise ValueError(
                "sequence_dim= with attention that is not causal: expected F.scaled_dot_product_attention(query, key, "
                "value, is_causal=True) without a mask, or sequence_dim=None"
            )
        self.kept_bytes += sum(x.numel() * x.element_size() for x in (key, value))
        return _attention(query, key, value, **named)


def tokens_of(arguments: Arguments, dim: int) -> int:
    """Tokens of a sequence: the size of the first tensor that has the dimension; ValueError where there are few."""
    sizes = [x.shape[dim] for x in arguments.tensors if 0 <= dim < x.dim()]
    if not sizes or sizes[0] < _LEAST_TOKENS:
        raise ValueError(
            f"sequence_dim={dim} with example_inputs={arguments}: expected a dimension of at least {_LEAST_TOKENS} "
            f"tokens, such as 1, or sequence_dim=None"
        )
    return int(sizes[0])


def slice_shares(
    total: int, dim: int, whole: float | None, seconds: Callable[[Callable[[Any], Any]], float]
) -> dict[str, Any]:
    """Figures of a `Profile`: from the seconds of whole sequences [s], and those of what a function cuts from tensors.

    Tensors with as many elements in the dimension as there are tokens are cut.
    """
    known = {Size(1, total): whole or 0.0}
    for tokens in (total // 2, total // 4):

        def first(x: Any, tokens: int = tokens) -> Any:
            is_cut = isinstance(x, torch.Tensor) and x.dim() > dim and x.shape[dim] == total
            return x.narrow(dim, 0, tokens) if is_cut else x

        known[Size(1, tokens)] = seconds(first)
    law = fitted(known)
    fixed, all_of_it = law(Size(1, 0)), law(Size(1, total))
    pairs = max(0.0, (law(Size(1, 2 * total)) - fixed) / 2 - (all_of_it - fixed))
    return {
        "sequence_tokens": total,
        "pair_share": pairs / all_of_it,
        "slice_share": min(fixed, all_of_it - pairs) / all_of_it,
    }
