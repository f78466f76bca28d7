"""Plans of tensor parallelism that models of transformers bring along: `config.base_model_tp_plan`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ..patterns import matches
from .attention import Experts
from .style import Style, StyleError
from .styles import Column, Row, Sequence, SummedGradients
from .tensor_group import TensorGroup, enter, leave

_GROUPS = ("moe_tp_experts", "local_params")  # of modules whose own parameters the plan names one by one
_MODULES = {
    "colwise": Column,
    "colwise_rep": lambda: Column(gather_output=True),
    "colwise_gather_output": lambda: Column(gather_output=True),
    "rowwise": Row,
    "rowwise_rep": lambda: Row(split_input=True),
    "rowwise_split_input": lambda: Row(split_input=True),
    "packed_colwise": lambda: Column(blocks=2),
    "embedding_rowwise": Row,
    "embedding_colwise": Column,
    "sequence_parallel": Sequence,
    "replicated_with_grad_allreduce": SummedGradients,
}
_WHOLE = ("replicate",)
_NOT_RUN = ("packed_rowwise", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts", "ep_router", "gather")
_PARAMETERS = {"colwise": (-2, 1), "packed_colwise": (-2, 2), "rowwise": (-1, 1)}  # dimension, blocks


class Summed(Style):
    """A module whose outputs are one summand each: their sum goes on."""

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        """The plain forward, summed."""
        return leave(plain.forward(module, *args, **kwargs), group)


class SharedKey(Style):
    """The projection to [latent | rotary key] of latent attention: the key goes to each member's heads as it is.

    Arguments:
        width: of the rotary key, the last of the outputs.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def describe(self) -> str:
        """The style in words."""
        return "whole, shared key"

    def forward(self, module: nn.Module, plain: type[nn.Module], group: TensorGroup, *args: Any, **kwargs: Any) -> Any:
        """The plain forward; the gradient of the key is the sum of all members'."""
        out: torch.Tensor = plain.forward(module, *args, **kwargs)
        latent, key = out[..., : -self.width], out[..., -self.width :]
        return torch.cat([latent, enter(key, group)], dim=-1)


def published_plans(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
    """(name, module, its plan by pattern below it) of each model in this one that brings a plan along."""
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():
        prefix, config = getattr(module, "base_model_prefix", None), getattr(module, "config", None)
        plan = getattr(config, "base_model_tp_plan", None)
        if not isinstance(prefix, str) or not plan:
            continue
        base = getattr(module, prefix, module) if prefix else module
        if isinstance(base, nn.Module) and base not in seen:
            seen.add(base)
            yield (f"{name}.{prefix}" if base is not module else name).strip("."), base, dict(plan)


def styles_of_plan(where: str, base: nn.Module, plan: dict[str, str]) -> dict[str, ParallelStyle]:
    """Styles by module name below `base`. An entry that matches nothing is for other sizes of the model.

    Raises StyleError for a word that is not known, and for one that is not run, if it would be needed.
    """
    named = {name: module for name, module in base.named_modules() if name}
    parameters = {name for name, _ in base.named_parameters()}
    found: dict[str, ParallelStyle] = {}
    cut: dict[str, dict[str, tuple[int, int]]] = {}  # of modules that hold parameters of experts
    for pattern, word in plan.items():
        known = (*_MODULES, *_WHOLE, *_NOT_RUN, *_GROUPS, "all_reduce", "mla_kv_a_proj")
        at = f"{where or 'the model'}: base_model_tp_plan[{pattern!r}] = {word!r}"
        if word not in known:
            raise StyleError(f"{at}: expected one of {', '.join(known)}, or tensor_parallel={{...}} of your own")
        modules = [name for name in named if matches(pattern, name)]
        single = [name for name in parameters if matches(pattern, name)]
        if not modules and not single:
            continue
        if word in _NOT_RUN or (single and word not in (*_PARAMETERS, *_WHOLE)):
            raise StyleError(f"{at} is not run: expected tensor_parallel={{...}} of your own for this model")
        for name in single if word in _PARAMETERS else ():
            owner, _, key = name.rpartition(".")
            cut.setdefault(owner, {})[key] = _PARAMETERS[word]
        style: ParallelStyle | None = None
        if word in _MODULES:
            style = _MODULES[word]()  # type: ignore[operator]
        elif word == "all_reduce":
            style = Summed()
        elif word == "mla_kv_a_proj":
            style = SharedKey(_rotary_width(at, base))
        found.update({name: style for name in modules if style is not None})
    for owner, tensors in cut.items():
        words = {word for pattern, word in plan.items() if matches(pattern, owner)}
        if "moe_tp_experts" not in words:
            raise StyleError(
                f"{where}: base_model_tp_plan cuts {', '.join(tensors)} of {owner!r}, which is no 'moe_tp_experts': "
                f"expected tensor_parallel={{...}} of your own for this model"
            )
        equal = (style for style in found.values() if isinstance(style, Experts) and style.parameters == tensors)
        found[owner] = next(equal, Experts(tensors))
    return found


def _rotary_width(at: str, base: nn.Module) -> int:
    width = getattr(getattr(base, "config", None), "qk_rope_head_dim", None)
    if not isinstance(width, int):
        raise StyleError(f"{at}: expected a config with qk_rope_head_dim")
    return width
