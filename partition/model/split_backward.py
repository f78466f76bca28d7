"""The backward in two halves: I, the gradients of inputs, then W, those of weights.

    forward   x ----> [linear] --> [gelu] --> [linear] --> y      linears are called through functions of their own
    I         gx <--- [linear] <-- [gelu] <-- [linear] <-- gy     which give the gradient of x at once,
    W             w1 += gy1' x1                w2 += gy2' x2      and put that of w aside: (x, gy)

I is one walk through the graph and frees it; what W needs stays, and nothing else. `weight_ops` lists the operations
that have such a function. What has none, such as a norm, makes the gradients of its weights in I, and so does

    a weight that is no leaf                       made by a parametrization, a cast, an index
    a weight with a hook on its gradient           which must see the gradient as a whole
    what torch.autograd.grad asks for              there and then
    compiled, scripted or vmapped code             whose operations are not seen

A whole backward through the same graph makes all gradients at once, as without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .memory import parts_of
from .weight_ops import INSTEAD, Compute, Instead


class _PutAside(NamedTuple):
    """Gradients that one operation has put aside, and of which version its tensors were then."""

    weights: Sequence[torch.Tensor]
    compute: Compute
    tensors: Sequence[torch.Tensor]
    versions: list[int]

    def gradients(self) -> Sequence[torch.Tensor]:
        """One a weight. Raises RuntimeError, as autograd does, for a tensor that was changed in place."""
        if [tensor._version for tensor in self.tensors] != self.versions:
            for tensor, version in zip(self.tensors, self.versions, strict=True):
                if tensor._version == version:
                    continue
                shapes = " and ".join(str(tuple(weight.shape)) for weight in self.weights)
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, and was at version "
                    f"{version} when the gradient of the weight of shape {shapes} was put aside. Expected values that "
                    f"nothing changes in place between a forward and the end of its backward (I, then W)"
                )
        return self.compute(*self.tensors)


class WeightGradients:
    """Gradients of weights that the backward of one microbatch put aside, in the order in which it came to them."""

    def __init__(self) -> None:
        self._owed: list[_PutAside] = []

    def put(self, weights: Sequence[torch.Tensor], compute: Compute, *tensors: torch.Tensor) -> None:
        """`compute(*tensors)` is a part of the gradient of each of the weights."""
        # Without the graph, but of the same version.
        kept = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
        self._owed.append(_PutAside(weights, compute, kept, [tensor._version for tensor in kept]))

    @property
    def weights(self) -> Collection[torch.Tensor]:
        return list({id(weight): weight for owed in self._owed for weight in owed.weights}.values())

    @property
    def num_bytes(self) -> int:
        tensors = [part for owed in self._owed for tensor in owed.tensors for part in parts_of(tensor)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def add(self) -> None:
        """W: add the gradients to `.grad`, and forget them; as in autograd, parts of one gradient are summed first."""
        owed, self._owed = self._owed, []
        parts = [id(weight) for each in owed for weight in each.weights]
        left = Counter(parts)
        has_sums = len(left) < len(parts)
        if has_sums:
            owed.reverse()  # parts add up in the order of the backward; else the last, still in the cache, is first
        sums: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            while owed:
                each = owed.pop()  # what it held is free when it is done
                for weight, gradient in zip(each.weights, each.gradients(), strict=True):
                    if not has_sums:
                        _accumulate(weight, gradient, of=each.tensors)
                        continue
                    key, dtype = id(weight), _type_of_gradients(weight)
                    if dtype != weight.dtype:  # as autograd does: each part, so that the sum is exact
                        gradient = gradient.to(dtype)
                    sums[key] = sums[key] + gradient if key in sums else gradient
                    left[key] -= 1
                    if not left[key]:
                        _accumulate(weight, sums.pop(key), of=each.tensors)


class SplitBackward:
    """Splits the backwards of forwards that run within `forward()`."""

    def __init__(self) -> None:
        self._mode = _Mode(self)
        self._aside: WeightGradients | None = None
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within: a forward whose backward can be split."""
        try:
            with self._mode:
                yield
        finally:
            self._casts.clear()

    @contextmanager
    def backward(self, aside: WeightGradients | None) -> Iterator[None]:
        """Within: the backward of such a forward puts gradients of weights aside (I); None: it is whole. A part of the
        forward that runs again in it, under torch.utils.checkpoint, does as it did before."""
        before, self._aside = self._aside, aside
        try:
            with self._mode:
                yield
        finally:
            self._aside = before
            self._casts.clear()

    def put(self, weight: torch.Tensor | None, ctx: Any, number: int) -> Callable[..., None] | None:
        """`WeightGradients.put`, if the gradient of a weight is to be put aside now. `ctx`: of the operation that takes
        it, as tensor input `number`."""
        aside = self._aside
        if aside is None or not isinstance(weight, torch.nn.Parameter) or torch.is_grad_enabled():
            return None  # other leaves are inputs of the stage
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            return None
        if torch.autograd.Variable._execution_engine.is_checkpoint_valid():  # all are made: not in autograd.grad
            return aside.put
        try:
            return aside.put if torch._C._will_engine_execute_node(ctx.next_functions[number][0]) else None
        except RuntimeError:  # torch.autograd.grad asks for it
            return None

    def cast(self, x: torch.Tensor, dtype: torch.dtype, *, tracked: bool) -> torch.Tensor:
        """Cast a product's operand as autocast does. Casts of trained leaves are kept, as autocast keeps them."""
        if x.dtype == dtype or not x.is_floating_point() or x.dtype == torch.float64:
            return x
        known = self._casts.get(id(x))
        if known is not None:
            return known[1]
        if tracked:
            value = x.to(dtype)
        else:
            with torch.no_grad():
                value = x.to(dtype)
        if x.is_leaf and x.requires_grad and torch.is_autocast_cache_enabled():
            self._casts[id(x)] = x, value
        return value


class _Mode(TorchFunctionMode):
    """Sees each operation of a forward, and calls another in its place where there is one."""

    def __init__(self, split: SplitBackward) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = _KNOWN.get(func)
        if known is None:
            return func(*args, **kwargs)
        if not isinstance(known, Instead):
            with self:
                return known(*args, **kwargs)
        if torch.is_grad_enabled() and _are_plain(types) and not _is_transformed() and known.fits(args, kwargs):
            result = known.call(self._split, *args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)


def _are_plain(types: Collection[type]) -> bool:
    """Whether no tensor has a rule of its own for what torch's functions do with it."""
    if not types:
        return True
    rule = torch._C._disabled_torch_function_impl  # that of parameters and DTensors: none
    return all(each is torch.Tensor or getattr(each, "__torch_function__", None) is rule for each in types)


def _is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work, which takes no autograd function of ours."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _without_check(function: Any) -> Callable[..., Any]:
    """A Python function of torch's that just runs, and does not hand itself to a mode."""
    never = {name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_function")}
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **never},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# Within these the mode stays on: they run backwards, in which forwards run again, or take weights.
_STRAIGHT = {
    function: _without_check(function)
    for function in (
        torch.autograd.backward,
        torch.autograd.grad,
        torch.Tensor.backward,
        F.multi_head_attention_forward,
    )
}


_KNOWN: dict[Any, Instead | Callable[..., Any]] = {**INSTEAD, **_STRAIGHT}


def _accumulate(weight: torch.Tensor, gradient: torch.Tensor, *, of: Sequence[torch.Tensor]) -> None:
    """Add a gradient that was made of the tensors `of`. The first one is kept where autograd keeps it: in memory of its
    own, laid out as the weight."""
    known = weight.grad
    if known is None and _is_kept(gradient, weight, of):
        weight.grad = gradient.detach()  # no view of a tensor, as sums and transposes are, which detach_() refuses
    elif known is None or known.is_sparse or gradient.is_sparse or weight._backward_hooks:
        torch.autograd.backward([weight], [gradient])  # layout, type, hooks, sparse with dense: as autograd does it
    else:
        known += gradient


def _is_kept(gradient: torch.Tensor, weight: torch.Tensor, of: Sequence[torch.Tensor]) -> bool:
    hooks = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
    is_plain = type(gradient) is torch.Tensor and gradient.layout == torch.strided  # a DTensor's memory is elsewhere
    if hooks or not is_plain or gradient.dtype != _type_of_gradients(weight):
        return False
    storage, others = gradient.untyped_storage(), [part for tensor in of for part in parts_of(tensor)]
    is_own = storage.data_ptr() not in {other.untyped_storage().data_ptr() for other in others}
    return is_own and storage.nbytes() == gradient.nbytes and gradient.stride() == weight.stride()


def _type_of_gradients(weight: torch.Tensor) -> torch.dtype:
    return getattr(weight, "grad_dtype", None) or weight.dtype  # torch < 2.10 has no type for gradients alone
