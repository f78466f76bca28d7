"""Parts of a model, each run alone and as a plain copy on the same inputs: forwards and backwards are compared.

Cut units, one at a time, if no copy of the model fits:

    inputs     those of the unit's first call in the pipeline, with its random numbers and autocast
    plain      a copy of the unit, with its weights; gone before the next unit has one
    its own    the unit as its stage runs it: compiled, split into I and W, recomputed
    compared   outputs, gradients of inputs and of weights, buffers

This finds changes of a unit's own numbers (a backward split wrongly, compiled code that computes something else, a
second run unlike the first). It does not find wrong weights to begin with, state that units share, or faults between
units: messages, recorded code, the order, the loss, sums over microbatches.

Regions, which a tensor group divides:

    region     the least part of the model that takes and gives whole tensors: a column and its row in their module
    inputs     those of the first microbatch that the region sees in the pipeline; dropout is off
    compared   outputs, gradients of inputs and of weights

All members of a group do the same in the same order, so that the sums among them match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from ...partition.deferred.recipes import device_where_built
from ...partition.model.calls import Calls
from ...partition.model.copies import Copies
from ...partition.model.source_line import first_line
from ...partition.model.untouched import untouched
from ...partition.profiler.memory import bytes_of
from ..context import Run
from ..settings.precision import Autocast
from ..shards.attention import Experts, Heads
from ..shards.shard import Shard
from ..shards.style import style_of
from ..shards.styles import Local, Row, Samples
from ..shards.styles import Sequence as Positions
from ..shards.tensor_option import describe
from ..stage.build import CutModel
from ..stage.nested import mapped
from ..stage.own_state import tensors_of
from ..stage.reruns import KeptInputs
from ..stage.stage import Stage
from .compare import Noise, changed_by_rounding, differs, graph_of, precision_of, rounded, size
from .plain import PlainModule

_T = TypeVar("_T")
_SECONDS = 5.0  # to measure what rounding alone changes in a unit, while other ranks wait


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedRegion:
    """Modules called one after the other, by name; `plain` are copies of before the cut, `cuts` is text."""

    modules: Mapping[str, nn.Module]
    plain: Mapping[str, nn.Module]
    cuts: str

    @property
    def name(self) -> str:
        names = list(self.modules)
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


class Regions:
    """A model's regions; make it before the model is cut. `styles`: by module name, in the model's order."""

    def __init__(self, model: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
        empty: dict[int, Any] = {}  # parameters of the copies, by id of the model's: they get values when compared
        for p in model.parameters():
            values = torch.empty(0, dtype=p.dtype, device=device_where_built(p))
            empty[id(p)] = nn.Parameter(values, requires_grad=p.requires_grad)
        plain = Copies(model, memo=empty).of(model)
        self._regions = [
            DividedRegion(
                modules={name: model.get_submodule(name) for name in names},
                plain={name: plain.get_submodule(name) for name in names},
                cuts=", ".join(
                    f"{name!r} by {describe(style)!r}"
                    for name, style in styles.items()
                    if not isinstance(style, Local) and any(f"{name}.".startswith(f"{part}.") for part in names)
                ),
            )
            for names in _parts(model, styles)
        ]
        self._calls: dict[str, tuple[Any, Any]] = {}  # by region, the inputs of its first call

    def seen(self) -> AbstractContextManager[None]:
        """Context in which the inputs of each region's first call are kept."""
        begins = {region.name: next(iter(region.modules.values())) for region in self._regions}
        return first_calls(begins, self._calls, lambda given: given)

    def first_difference(
        self,
        *,
        shard: Callable[[str, Tensor], Shard],
        full: Callable[[str, Tensor], Tensor],
        together: Callable[[object], Sequence[object]],
    ) -> str | None:
        """Error of the innermost region that differs; `shard` and `full` are of a parameter's part. Collective over the
        group.

        A region whose inputs are not whole tensors, since the user's styles divide what is around it, is left out.
        """
        verdict = None
        for region in sorted(self._regions, key=lambda each: -each.name.count(".")):  # the innermost first
            here = region.name in self._calls and not any(
                p.is_meta for module in region.modules.values() for p in module.parameters()
            )
            seen = together(_checksum(self._calls[region.name]) if here else None)
            if not here or any(other != seen[0] for other in seen):
                continue
            found = self._compare(region, shard, full)
            verdict = verdict or found
        self._calls.clear()
        return verdict

    def _compare(
        self, region: DividedRegion, shard: Callable[[str, Tensor], Shard], full: Callable[[str, Tensor], Tensor]
    ) -> str | None:
        for (name, plain), module in zip(region.plain.items(), region.modules.values(), strict=True):
            held = dict(module.named_parameters())
            for key, empty in plain.named_parameters():
                empty.data = full(f"{name}.{key}", held[key].detach()).detach().clone()
            for key, buffer in plain.named_buffers():
                buffer.data = module.get_buffer(key).data.clone()
        given = self._calls[region.name]
        weights = [(empty, empty.data) for plain in region.plain.values() for empty in plain.parameters()]
        found = ran(region.modules, given)

        def plainly(rounding: float = 0.0, number: int = 0) -> PartRun:
            for empty, whole in weights:
                empty.data = rounded(whole, rounding, number)
            expected = ran(region.plain, given)
            for key, gradient in expected.by_name.items():  # the part that is here
                own = found.by_name.get(key)
                if gradient is not None and own is not None:
                    expected.by_name[key] = shard(key, own).take(gradient)
            return expected

        try:
            apart = departure(plainly(), found, plainly)
        finally:
            for empty, whole in weights:
                empty.data, empty.grad = whole.new_empty(0), None
        return apart and (
            f"verify: module {region.name!r}, parts of which the tensor group divides ({region.cuts}): {apart}. Likely "
            f"cause: one of these styles leaves out a sum over the tensor group. Expected the plain module's results: "
            f"other styles for the modules in it, or 'auto'"
        )


@contextmanager
def first_calls(modules: Mapping[str, nn.Module], calls: dict[str, _T], kept: Callable[[Any], _T]) -> Iterator[None]:
    """Context in which `calls` gets `kept` of copied (args, kwargs) of each module's first call."""

    def look(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        is_real = torch.is_grad_enabled() and not any(  # the run that the backward follows: no look at shapes
            x.is_meta or isinstance(x, FakeTensor) for x in tensors_within((args, kwargs))
        )
        if is_real and name not in calls:
            calls[name] = kept(mapped((args, kwargs), _fresh))

    def call(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        look(name, modules[name], args, kwargs)
        return forward(*args, **kwargs)

    calls.clear()
    with ExitStack() as stack:
        for name, module in modules.items():
            if getattr(module, "_compiled_call_impl", None) is None:
                hook = module.register_forward_pre_hook(partial(look, name), with_kwargs=True, prepend=True)
                stack.callback(hook.remove)
            else:  # compiled in place, with its hooks
                stack.enter_context(Calls({module: partial(call, name)}).through())
        yield


def _parts(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> list[tuple[str, ...]]:
    found: dict[tuple[str, ...], None] = {}
    for name, style in styles.items():
        if isinstance(style, Local) or not name:
            continue
        whole = isinstance(style, Positions | Heads | Experts) or getattr(style, "gather_output", False)
        whole = whole and getattr(style, "split_input", True)
        parent = name.rpartition(".")[0]
        above = model.get_submodule(parent)
        if whole or isinstance(model.get_submodule(name), nn.Embedding):
            found[name,] = None
        elif isinstance(above, nn.Sequential):
            children = [f"{parent}.{child}" if parent else child for child, _ in above.named_children()]
            begin = children.index(name)
            if not any(name in part for part in found):
                rows = (
                    at
                    for at in range(begin, len(children))
                    if isinstance(end := styles.get(children[at]), Row | RowwiseParallel)
                    or (isinstance(end, Samples) and end.gather_output)
                )
                found[tuple(children[begin : next(rows, len(children) - 1) + 1])] = None
        elif parent:
            found[parent,] = None
    return list(found)


class PartRun(NamedTuple):
    """Outputs, gradients of inputs and of weights, buffers; tolerance and rounding of the shortest type computed in."""

    outs: list[Tensor]
    gradients: list[Tensor | None]
    by_name: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    tolerance: float
    rounding: float


def ran(modules: Mapping[str, nn.Module], given: tuple[Any, Any], *, trains: bool = False) -> PartRun:
    """Outputs and gradients of modules one after the other, in evaluation mode unless it `trains`; keeps `.grad`."""
    modes = [(module, module.training) for each in modules.values() for module in each.modules()]
    kept = [(p, p.grad) for each in modules.values() for p in each.parameters()]
    with torch.enable_grad():
        for module in modules.values() if not trains else ():
            module.eval()
        for parameter, _ in kept:
            parameter.grad = None
        try:
            args, kwargs = mapped(given, _fresh)
            leaves = [x for x in tensors_within((args, kwargs)) if x.requires_grad]
            args, kwargs = mapped((args, kwargs), torch.clone)  # which modules may change in place
            value: Any = None
            for number, module in enumerate(modules.values()):
                value = module(*args, **kwargs) if number == 0 else module(value)
            outs = tensors_within(value)
            graded = [x for x in outs if x.requires_grad]
            nodes = graph_of(graded)
            types = precision_of(nodes)
            with Autocast.now(outs[0].device.type).off() if outs else nullcontext():
                torch.autograd.backward(graded, [cotangent(x) for x in graded])
            weights = {f"{name}.{key}": p.grad for name, each in modules.items() for key, p in each.named_parameters()}
            buffers = {key: x for name, each in modules.items() for key, x in buffers_of(name, each).items()}
            own = [x.detach() for x in outs], [x.grad for x in leaves]
            return PartRun(*own, weights, buffers, *types)
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient
            for module, training in modes:
                module.training = training


def departure(expected: PartRun, found: PartRun, again: Callable[[float, int], PartRun]) -> str | None:
    """Text for the first of outputs, then backwards of gradients, then buffers, that differs; `again` runs the plain
    modules with weights that are `rounded` by a share, in a numbered sample."""
    weights = [(f"the gradient of {key!r}", x, found.by_name.get(key)) for key, x in reversed(expected.by_name.items())]
    outputs = [("its output", *pair) for pair in zip(expected.outs, found.outs, strict=False)]
    inputs = [("a gradient of its inputs", *pair) for pair in zip(expected.gradients, found.gradients, strict=False)]
    states = [(f"its buffer {key!r}", x, found.buffers.get(key)) for key, x in expected.buffers.items()]
    measured = changed_by_rounding(
        expected.by_name, lambda number: again(expected.rounding * bool(number), number).by_name, seconds=_SECONDS
    )
    most = expected.tolerance * max((size(one) for _, one, _ in weights if one is not None), default=0.0)
    noise = {f"the gradient of {key!r}": Noise(partial(measured, key), most) for key in expected.by_name}
    for pairs in (outputs, inputs, weights, states):
        floor = 1e-3 * max((size(one) for _, one, _ in pairs if one is not None), default=0.0)
        for what, one, other in pairs:
            if one is None or other is None:
                how = None if one is other or pairs is not weights else "is there in one of the two"
            else:
                how = differs(one, other, tolerance=expected.tolerance, floor=floor, noise=noise.get(what))
            if how:
                return f"{what} {how}"
    return None


def _checksum(value: object) -> list[object]:
    return [
        (tuple(x.shape), float(x.sum()), float(x.abs().sum()))
        for x in (each.detach().double().nan_to_num() for each in tensors_within(value))
    ]


def buffers_of(name: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{name}.{key}": buffer.detach().clone() for key, buffer in module.named_buffers()}


def tensors_within(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    mapped(dict(value) if isinstance(value, Mapping) else value, note, objects=False)
    return found


def _fresh(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def cotangent(x: Tensor) -> Tensor:
    """Numbers that are the same on each member; no gradient is zero by chance."""
    generator = torch.Generator().manual_seed(x.numel())
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype).to(x.device)


class _Call(NamedTuple):
    given: tuple[Any, Any]
    random: Sequence[Any]
    autocast: Autocast


@dataclass(slots=True, kw_only=True)
class UnitsFound:
    """Findings of one process: the first error, names of gradients that agree, units not compared and why."""

    verdict: str | None = None
    gradients: set[str] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    copy_bytes: int = 0


class UnitsBeside:
    """The cut units of this process's stages. `stages`: by local rank and number."""

    def __init__(self, run: Run, parts: CutModel, stages: Mapping[int, Mapping[int, Stage]]) -> None:
        self._run, self._root, self._seeder = run, parts.root, run.seeder
        self._modules = parts.train.stages
        own = {s: stage for of_rank in stages.values() for s, stage in of_rank.items()}
        self._stages = {unit: stage for s, stage in own.items() for unit in self._modules[s].units}
        self._units = {name: unit for name, unit in parts.root.named_modules() if unit in self._stages}
        self._calls: dict[str, _Call] = {}

    def seen(self) -> AbstractContextManager[None]:
        kind = self._seeder.device.type
        return first_calls(self._units, self._calls, lambda x: _Call(x, self._seeder.state(), Autocast.now(kind)))

    def compare(self, *, step: int) -> UnitsFound:
        """Compares each unit with a copy, up to the first that differs; drops gradients."""
        found = UnitsFound()
        self._drop_gradients()
        for name, unit in self._units.items():
            found.verdict = found.verdict or self._compare(name, unit, found, step)
        self._calls.clear()
        return found

    def _drop_gradients(self) -> None:
        for parameter in self._root.parameters():
            parameter.grad = None

    def _compare(self, name: str, unit: nn.Module, found: UnitsFound, step: int) -> str | None:
        call, stage = self._calls.pop(name, None), self._stages[unit]
        if any(style_of(part) is not None for part in unit.modules()):
            return None  # `Regions` compares what is divided
        if call is None:
            found.left_out[name] = "it got no values with gradients"
            return None
        try:
            expected = self._plainly((name, unit), call, step)
        except Exception as error:
            found.left_out[name] = first_line(error)
            return None
        own = self._as_it_runs(name, unit, call, step)
        found.copy_bytes = max(found.copy_bytes, bytes_of([*unit.parameters(), *unit.buffers()]))
        known = {id(p): key for key, p in self._root.named_parameters()}  # one name for a tied one
        found.gradients |= {
            known[id(p)] for key, p in unit.named_parameters() if own.by_name[f"{name}.{key}"] is not None
        }
        apart = departure(expected, own, partial(self._plainly, (name, unit), call, step))
        return apart and (
            f"verify: unit {name!r} (stage {stage.index}: {stage.name}), run alone: {apart}. Likely cause: what its "
            f"stage does to it (compile=, recompute=, a backward in two halves), or a result that is not the same "
            f"twice. Expected the results of a copy of it on the same inputs; verify=False trains in spite of it"
        )

    @contextmanager
    def _as_called(self, module: nn.Module, call: _Call, step: int) -> Iterator[None]:
        """Context with the generators and autocast of the call; afterwards the module is restored."""
        with untouched(module, device=self._seeder.device), call.autocast.again():
            self._seeder.begin(step=step, microbatch=0)
            try:
                self._seeder.resume(call.random)
                yield
            finally:
                self._seeder.end()

    def _plainly(
        self, named: tuple[str, nn.Module], call: _Call, step: int, rounding: float = 0.0, number: int = 0
    ) -> PartRun:
        name, unit = named
        own = {id(x) for x in (*unit.parameters(), *unit.buffers())}
        others = [x for x in (*self._root.parameters(), *self._root.buffers()) if id(x) not in own]
        plain = PlainModule(unit, None, given=False, others=others)
        weights = {key: x.detach().clone() for key, x in tensors_of(unit).items()}
        plain.load(weights, self._seeder.device, rounding=rounding, number=number)
        with self._as_called(plain.root, call, step):
            found = ran({name: plain.root}, call.given, trains=True)
        plain.unload()
        return found

    def _as_it_runs(self, name: str, unit: nn.Module, call: _Call, step: int) -> PartRun:
        stage, given, module = self._stages[unit], KeptInputs(*call.given), nn.Module()

        def forward(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self._seeder.resume(call.random)  # also where it runs again
            args, kwargs = given.with_tensors(flat)
            return tuple(tensors_within(unit(*args, **kwargs)))

        module.forward = forward
        whole = self._modules[stage.index]
        alone = replace(whole, module=module, form=None, clone_inputs=True, clone_outputs=frozenset())
        is_split = stage.index in self._run.layout.schedule.split_stages
        wants, trial = [x.requires_grad for x in given.tensors], stage.trial(stage.reruns, has_loss=False)
        with self._as_called(unit, call, step):
            outs, _ = trial.forward(0, alone, given.tensors, wants, None, backwards=1 + is_split)
            cotangents = [cotangent(x) if x.is_floating_point() or x.is_complex() else None for x in outs]
            with call.autocast.off():
                by_input = trial.backward(0, cotangents, [True] * len(outs), autocast=call.autocast, is_half=is_split)
                if is_split:
                    trial.weight_grad(0)
            buffers = buffers_of(name, unit)
        weights = {f"{name}.{key}": p.grad for key, p in unit.named_parameters()}
        self._drop_gradients()
        wanted = [x for x, want in zip(by_input, wants, strict=True) if want]
        return PartRun(list(outs), wanted, weights, buffers, 0.0, 0.0)
