"""A model's state as its `state_dict()` gives it: its hooks and `get_extra_state` may rename, add, drop and nest. Here
parameters and buffers have the names under which modules hold them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

EXTRA = "_extra_state"  # as torch ends the key of what `get_extra_state` returns


def tensors_of(root: nn.Module) -> dict[str, torch.Tensor]:
    return {name: table[key] for name, table, key in _entries(root)}


def keys_of(root: nn.Module) -> dict[str, str]:
    """Keys in the model's `state_dict()` of tensors that have another name here."""
    named = tensors_of(root)
    try:
        state = root.state_dict(keep_vars=True)
    except ValueError:  # a hook computes with values of other processes
        return {}
    others: dict[int, list[str]] = {}
    for key, value in state.items():
        if named.get(key) is not value:
            others.setdefault(id(value), []).append(key)
    missing = [(name, others.get(id(x))) for name, x in named.items() if state.get(name) is not x]
    return {name: keys.pop(0) for name, keys in missing if keys}


def extra_states(root: nn.Module, modules: Collection[nn.Module]) -> dict[str, Any]:
    return {
        _joined(path, EXTRA): module.get_extra_state()
        for path, module in root.named_modules()
        if module in modules and type(module).get_extra_state is not nn.Module.get_extra_state
    }


def set_extra_states(root: nn.Module, extra: Mapping[str, Any]) -> None:
    for path, module in root.named_modules():
        if (key := _joined(path, EXTRA)) in extra:
            module.set_extra_state(extra[key])


def state_of(root: nn.Module, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> dict[str, Any]:
    with _placed(root, tensors, extra):
        return dict(root.state_dict(keep_vars=True))


def tensors_from(
    root: nn.Module, state: Mapping[str, Any], like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors as `root.load_state_dict(state)` loads them from a whole state, into `like`; it sets extra states, too.
    Raises ValueError for the state of another model."""
    with _placed(root, like, {}):
        try:
            root.load_state_dict(dict(state))
        except RuntimeError as error:
            raise ValueError(f"state dict: {' '.join(str(error).split())}") from None
        return tensors_of(root)


@contextmanager
def _placed(root: nn.Module, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> Iterator[None]:
    before = [(table, key, table[key]) for _, table, key in _entries(root)]
    asked = [(vars(one), extra[key]) for path, one in root.named_modules() if (key := _joined(path, EXTRA)) in extra]
    try:
        for name, table, key in _entries(root):
            table[key] = tensors[name]
        for attributes, value in asked:
            attributes["get_extra_state"] = lambda value=value: value
        yield
    finally:
        for table, key, tensor in before:
            table[key] = tensor
        for attributes, _ in asked:
            del attributes["get_extra_state"]


def _entries(root: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path, module in root.named_modules(remove_duplicate=False):
        for table, left in ((module._parameters, ()), (module._buffers, module._non_persistent_buffers_set)):
            yield from (
                (_joined(path, key), table, key) for key, x in table.items() if x is not None and key not in left
            )


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
