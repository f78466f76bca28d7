"""Modules of a stage that keep their inputs, and run again in the backward.

    first run    in the forward, as ever; what it makes for the backward is dropped, but for what a policy keeps
    second run   in the backward, as soon as an operation of the module asks for what it needs: with the same inputs,
                 buffers, random numbers, autocast and weights

torch.utils.checkpoint does it (use_reentrant=False). Where one such module is in another, the outer one runs again,
once; of an operation in both the inner one says whether its result is kept. A checkpoint of the user's own in such a
module has nothing left to do; around one, it does all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torchs

from ...partition.graph.source_line import first_line
from .buffers import MovingBuffers
from .calls import Calls
from .randomness import Seeder
from .recompute import NamedRule, Rule
from .rerun_inputs import KeptInputs
from .selective import KeptResults

_aten = torch.ops.aten
# Long to compute and small beside what stands between them. The products inside an attention (bmm, or fused) are not
# among them: their results grow with the square of the length, or are cheap beside it (Korthikanti et al. 2022, 5).
PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.linear.default,
        _aten._scaled_mm.default,
        _aten.convolution.default,
    }
)

_KEEPING = (True, torchs.CheckpointPolicy.MUST_SAVE, torchs.CheckpointPolicy.PREFER_SAVE)


class Reruns(Calls):
    """The modules of one stage on one rank that run again.

    Arguments:
        rules: what each keeps.
        seeder: of the random numbers.
    """

    def __init__(self, rules: Mapping[nn.Module, NamedRule], seeder: Seeder) -> None:
        under_way: list[Rule] = []  # in the first run of a module: its rule, and of those that it called
        through = {}
        for module, named in rules.items():
            selects = any(rules[part].rule != "full" for part in module.modules() if part in rules)
            through[module] = _Rerun(module, named, under_way=under_way, selects=selects, seeder=seeder)
        self._names = [named.name for named in rules.values()]
        super().__init__(through)

    def refuse_changed_inputs(self, error: RuntimeError, *, stage: str) -> None:
        """ValueError where a backward failed, perhaps, since inputs of these modules were changed behind them."""
        if self._names and "modified by an inplace operation" in str(error):
            raise ValueError(
                f"in the backward of {stage}: {first_line(error)}. Where plain PyTorch does not say so, it is an input "
                f"of a module that runs again (recompute= of {', '.join(map(repr, self._names[:3]))}) and was "
                f"changed in place behind it. Expected an operation that is not in-place (inplace=False), or a "
                f"recompute= that leaves the module out, or one for a module around both"
            ) from error


class _Rerun:
    """One module that runs again: called in place of its forward.

    Arguments:
        under_way: shared by the modules of the stage.
        selects: whether it, or one in it, keeps any results.
    """

    def __init__(
        self, module: nn.Module, named: NamedRule, *, under_way: list[Rule], selects: bool, seeder: Seeder
    ) -> None:
        self._name = named.name
        self._rule = named.rule
        self._under_way = under_way
        self._seeder = seeder
        self._buffers = MovingBuffers(module)
        self._changed: dict[tuple[torch.Size, ...], frozenset[int]] = {}  # inputs, by shapes, which decide on kernels
        self._options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        self._selects = selects

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        is_inside = bool(self._under_way)
        if not is_inside and _in_users_checkpoint():
            return forward(*args, **kwargs)
        self._under_way.append(self._rule)
        try:
            return forward(*args, **kwargs) if is_inside else self._checkpointed(forward, args, kwargs)
        finally:
            self._under_way.pop()

    def _keeps(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
        """Whether the result of an operation of the first run is kept."""
        rule = self._under_way[-1]
        if callable(rule):
            return rule(context, operator, *args, **kwargs) in _KEEPING
        return rule == "selective" and operator in PRODUCTS

    def _checkpointed(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = KeptInputs(args, kwargs)
        shapes = tuple(x.shape for x in inputs.tensors)
        # What the module changes in place is kept from before as a copy: all, until the first forward has shown it.
        known = self._changed.get(shapes)
        kept = inputs.copies(range(len(shapes)) if known is None else known)
        results = KeptResults(self._keeps, self._seeder) if self._selects else None
        options = self._options if results is None else self._options | {"context_fn": results.contexts}
        is_first = True
        random, buffers = self._seeder.state(), self._buffers.before_forward()

        def run(*tensors: torch.Tensor) -> Any:
            nonlocal buffers, is_first
            if is_first:  # it takes the arguments themselves, the second run what was kept of them
                is_first = False
                with no_checkpoints_inside():
                    value = forward(*args, **kwargs)
                buffers = self._buffers.after_forward(buffers)
                return value
            again, keywords = inputs.with_tensors(tensors)
            self._seeder.resume(random)
            with no_checkpoints_inside(), self._buffers.put_back(buffers):
                forward(*again, **keywords)
            return None

        value = torchs.checkpoint(run, *kept, **options)
        if results is not None:
            results.returned(value)
        changed = inputs.changed(kept) if known is None else inputs.changed()
        if not changed <= self._changed.setdefault(shapes, changed):
            raise ValueError(
                f"module {self._name!r} changes an input in place, and did not in its first forward: under recompute= "
                f"its value from before is gone. Expected a forward that does so always or never (inplace=False), or a "
                f"recompute= that leaves the module out"
            )
        return value


def _in_users_checkpoint() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "_checkpoint_hook" in hooks[0].__qualname__


@contextmanager
def no_checkpoints_inside() -> Iterator[None]:
    """Within, torch.utils.checkpoint just calls: what runs again as a whole keeps nothing that it could save."""
    names = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")
    before = {name: getattr(torchs, name) for name in names}
    for name, straight in zip(names, (_straight, _Straight), strict=True):
        setattr(torchs, name, straight)
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(torchs, name, own)


def _straight(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _Straight:
    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)
