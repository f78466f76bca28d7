"""Modules of a stage that keep their inputs, and run again in the backward.

    first run    in the forward, as ever; what it makes for the backward is dropped, but for what a policy keeps
    second run   in the backward, as soon as an operation of the module asks for what it needs: with the same inputs,
                 buffers, random numbers, autocast and weights

torch.utils.checkpoint does it (use_reentrant=False). Where one such module is in another, the outer one runs again,
once; of an operation in both the inner one says whether its result is kept. A checkpoint of the user's own in such a
module has nothing left to do; around one, it does all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torchs

from ...partition.graph.source_line import first_line
from .buffers import MovingBuffers
from .calls import Calls
from .randomness import Seeder
from .recompute import NamedRule, Rule

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
        self._in_place: dict[tuple[torch.Size, ...], _InPlace] = {}  # by shapes, which decide on kernels
        self._now = _InPlace()
        self._options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        self._without_cache = _no_cache_of_casts if selects else nullcontext
        if selects:
            self._options["context_fn"] = partial(torchs.create_selective_checkpoint_contexts, self._keeps)

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

    def _keeps(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Policy for an operation of the first run."""
        rule = self._under_way[-1]
        if callable(rule):
            is_wanted = rule(context, operator, *args, **kwargs) in _KEEPING
        else:
            is_wanted = rule == "selective" and operator in PRODUCTS
        is_kept = is_wanted and self._now.keeps(operator, context)
        return torchs.CheckpointPolicy.MUST_SAVE if is_kept else torchs.CheckpointPolicy.PREFER_RECOMPUTE

    def _checkpointed(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, form = pytree.tree_flatten((args, kwargs))
        tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        objects: dict[int, object] = {}
        others = [None if i in tensors else _as_it_is(leaf, objects) for i, leaf in enumerate(leaves)]
        shapes = tuple(x.shape for x in tensors.values())
        in_place = self._now = self._in_place.setdefault(shapes, _InPlace())
        in_place.begin(tensors)
        # The inputs of the second run. What the module changes in place is kept from before as a copy.
        kept = [_copy(x) if in_place.changes(i) else x for i, x in tensors.items()]
        given = [(args, kwargs)]
        random, buffers = self._seeder.state(), self._buffers.before_forward()

        def run(*inputs: torch.Tensor) -> Any:
            nonlocal buffers
            if given:  # the first run takes the arguments themselves, the second what was kept of them
                args, kwargs = given.pop()
                with no_checkpoints_inside(), self._without_cache():
                    value = forward(*args, **kwargs)
                buffers = self._buffers.after_forward(buffers)
                return value
            again = list(others)
            for i, x in zip(places, inputs, strict=True):
                again[i] = x
            args, kwargs = pytree.tree_unflatten(again, form)
            self._seeder.resume(random)
            with (
                no_checkpoints_inside(),
                self._without_cache(),
                self._buffers.put_back(buffers),
                self._explained(),
            ):
                forward(*args, **kwargs)
            return None

        places = tuple(tensors)
        value = torchs.checkpoint(run, *kept, **self._options)
        in_place.end(self._name)
        return value

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "selective activation checkpoint has been mutated" not in str(error):
                raise
            raise ValueError(
                f"module {self._name!r} changes a result in place that recompute= had kept for the second run, and did "
                f"not in its first forward: expected an operation that is not in-place (inplace=False), or 'full' for "
                f"this module"
            ) from error


class _InPlace:
    """Things that a module changes in place, its inputs and results that would be kept, as its first forward shows.

    Until that is over each input counts as changed and no result is kept.
    """

    def __init__(self) -> None:
        self._inputs: frozenset[int] | None = None
        self._results: frozenset[tuple[Any, int]] | None = None
        self._before: dict[int, tuple[torch.Tensor, int]] = {}
        self._made: dict[tuple[Any, int], tuple[torch.Tensor, int]] = {}
        self._counts: Counter[Any] = Counter()

    def changes(self, number: int) -> bool:
        """Whether the input changes."""
        return self._inputs is None or number in self._inputs

    def keeps(self, operator: Any, context: Any) -> bool:
        """Whether the result of an operation that just ran stays as it is, and may be kept."""
        key = operator, self._counts[operator]
        self._counts[operator] += 1
        if self._results is not None:
            return key not in self._results
        result = getattr(context, "op_output", None)  # newer releases of torch say it
        if isinstance(result, torch.Tensor):
            self._made[key] = result, result._version
        return False

    def begin(self, inputs: Mapping[int, torch.Tensor]) -> None:
        """A forward begins."""
        self._before = {number: (x, x._version) for number, x in inputs.items()}
        self._made.clear()
        self._counts.clear()

    def end(self, name: str) -> None:
        """A forward is over. Raises ValueError for an input that changes, and did not in the first one."""
        changed = frozenset(number for number, (x, version) in self._before.items() if x._version != version)
        if self._results is None:
            self._results = frozenset(key for key, (x, version) in self._made.items() if x._version != version)
        if self._inputs is None:
            self._inputs = changed
        elif not changed <= self._inputs:
            raise ValueError(
                f"module {name!r} changes an input in place, and did not in its first forward: under recompute= its "
                f"value from before is gone. Expected a forward that does so always or never (inplace=False), or a "
                f"recompute= that leaves the module out"
            )
        self._before.clear()
        self._made.clear()


def _as_it_is(value: object, known: dict[int, object]) -> object:
    """Copy of an object that a forward may change, such as a cache, with the tensors in it as they are."""
    if type(value) in (list, tuple, dict):
        leaves, form = pytree.tree_flatten(value)
        return pytree.tree_unflatten([_as_it_is(leaf, known) for leaf in leaves], form)
    if isinstance(value, torch.Tensor | nn.Module) or callable(value) or not hasattr(value, "__dict__"):
        return value
    if id(value) not in known:
        maker: Any = type(value)
        copy = known[id(value)] = maker.__new__(maker)
        vars(copy).update({key: _as_it_is(each, known) for key, each in vars(value).items()})
        if isinstance(value, dict):
            dict.update(copy, {key: _as_it_is(each, known) for key, each in value.items()})
        elif isinstance(value, list):
            list.extend(copy, [_as_it_is(each, known) for each in value])
    return known[id(value)]


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Not a leaf, which no operation could change in place."""
    return x.detach().requires_grad_(x.requires_grad).clone()


@contextmanager
def _no_cache_of_casts() -> Iterator[None]:
    """Within, weights are cast anew under autocast: a policy wants the same operations in both runs, cached or not."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


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
