"""Types and shapes of tensors, which a forward may change: `module.to(dtype)`, a buffer that grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...comm import Collectives

_Kind = tuple[tuple[int, ...], torch.dtype]


class TensorKinds:
    """Those of all tensors, by name, as they were when the stages were built, or last followed."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._known = {name: _kind(x) for name, x in tensors.items()}
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
        here = {name: _kind(x) for name, x in own.items()}
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


def _kind(x: torch.Tensor) -> _Kind:
    return tuple(x.shape), x.dtype


def _text(kind: _Kind) -> str:
    return f"{str(kind[1]).removeprefix('torch.')} of shape {kind[0]}"
