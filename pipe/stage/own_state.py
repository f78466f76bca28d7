"""A model's state as its `state_dict()` gives it: its hooks and `get_extra_state` may rename, add, drop and nest. Here
parameters and buffers have the names under which modules hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...comm import Collectives

_Kind = tuple[tuple[int, ...], torch.dtype]  # of a tensor: shape and type

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


class TensorKinds:
    """Types and shapes of all tensors, by name, as they were when the stages were built, or last followed. A forward
    may change them: `module.to(dtype)`, a buffer that grows."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._known = {name: _kind_of(x) for name, x in tensors.items()}
        self.changes = 0  # how often any was followed

    def follow(
        self,
        own: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        collectives: Collectives,
        is_divided: Callable[[str], bool],
    ) -> Sequence[str]:
        """Names of the tensors that changed; those of `tensors` that are not `own` follow. Collective over the
        processes. Raises ValueError, on all, where processes that hold a tensor differ."""
        here = {name: _kind_of(x) for name, x in own.items()}
        changed = [name for name, kind in here.items() if kind != self._known[name]]
        said = collectives.gather(changed, what="telling which tensors have another type or shape")
        if not (names := list(dict.fromkeys(name for each in said for name in each))):
            return names
        everyone = collectives.gather(
            {name: here[name] for name in names if name in here}, what="telling other types and shapes of tensors"
        )
        found = {name: {at: each[name] for at, each in enumerate(everyone) if name in each} for name in names}
        problems = (self._problem(name, kinds, is_divided(name)) for name, kinds in found.items())
        text = next(filter(None, problems), "")
        collectives.alike(None, what="agreeing on types and shapes of tensors", problem=text)
        self.changes += 1
        for name, kinds in found.items():
            shape, dtype = here.get(name) or next(iter(kinds.values()))
            if name not in here:
                shape = tuple(tensors[name].shape) if is_divided(name) else shape
                with torch._C.DisableTorchFunctionSubclass():
                    tensors[name].data = torch.empty(shape, dtype=dtype, device="meta")
            self._known[name] = shape, dtype
        return names

    def _problem(self, name: str, found: Mapping[int, _Kind], is_divided: bool) -> str:
        first, kind = next(iter(found.items()))
        for process, other in found.items():
            if other[1] != kind[1] or (other[0] != kind[0] and not is_divided):
                return (
                    f"{name!r} was {_text(self._known[name])} when the stages were built, and is {_text(kind)} on "
                    f"process {first} and {_text(other)} on process {process}: expected a forward that changes it on "
                    f"all processes that hold it alike, or on none"
                )
        return ""


def _kind_of(x: torch.Tensor) -> _Kind:
    return tuple(x.shape), x.dtype


def _text(kind: _Kind) -> str:
    return f"{str(kind[1]).removeprefix('torch.')} of shape {kind[0]}"
