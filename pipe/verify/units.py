"""Cut units, each beside a copy of it alone, one at a time: what `verify` compares where no copy of the model fits.

    inputs     those of the unit's first call in the pipeline, with its random numbers and autocast
    plain      a copy of the unit, with its weights, that just runs; gone before the next unit has one
    its own    the unit as its stage runs it: compiled, split into I and W, run again
    compared   outputs, gradients of inputs and of weights, buffers

It finds what changes a unit's own numbers (a backward split wrongly, compiled code that computes something else, a
second run unlike the first), not wrong weights to begin with, state that units share, or what is between units:
messages, recorded code, the order, the loss, sums over microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ...partition.model.source_line import first_line
from ...partition.model.untouched import untouched
from ...partition.profiler.memory import bytes_of
from ..context import Run
from ..shards.style import style_of
from ..stage.autocast import Autocast
from ..stage.build import CutModel
from ..stage.own_state import tensors_of
from ..stage.reruns import KeptInputs
from ..stage.stage import Stage
from .plain import PlainModule
from .regions import Ran, buffers_of, cotangent, departure, first_calls, ran, tensors_within


class _Call(NamedTuple):
    given: tuple[Any, Any]
    random: Sequence[Any]
    autocast: Autocast


@dataclass(slots=True, kw_only=True)
class UnitsFound:
    """Findings of one process: an error, names of parameters whose gradients agree, why units were not compared, and
    bytes of the largest copy."""

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
        """Within: the first call of each unit is kept."""
        kind = self._seeder.device.type
        return first_calls(self._units, self._calls, lambda x: _Call(x, self._seeder.state(), Autocast.now(kind)))

    def compare(self, *, step: int) -> UnitsFound:
        """Each unit beside its copy, up to the first that departs; gradients are gone. `step`: of random numbers."""
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
            found.left_out[name] = "no values with gradients came to it"
            return None
        try:
            expected = self._plainly(name, unit, call, step)
        except Exception as error:
            found.left_out[name] = first_line(error)
            return None
        own = self._as_it_runs(name, unit, call, step)
        found.copy_bytes = max(found.copy_bytes, bytes_of([*unit.parameters(), *unit.buffers()]))
        known = {id(p): key for key, p in self._root.named_parameters()}  # one name for a tied one
        found.gradients |= {known[id(p)] for key, p in unit.named_parameters() if own[2][f"{name}.{key}"] is not None}
        apart = departure(expected, own)
        return apart and (
            f"verify: unit {name!r} (stage {stage.index}: {stage.name}), run alone: {apart}. Likely cause: what its "
            f"stage does to it (compile=, recompute=, a backward in two halves), or a result that is not the same "
            f"twice. Expected the results of a copy of it on the same inputs; verify=False trains in spite of it"
        )

    @contextmanager
    def _as_called(self, module: nn.Module, call: _Call, step: int) -> Iterator[None]:
        """Within, the generators and autocast are those of the call; behind it the module is as it was."""
        with untouched(module, device=self._seeder.device), call.autocast.again():
            self._seeder.begin(step=step, microbatch=0)
            try:
                self._seeder.resume(call.random)
                yield
            finally:
                self._seeder.end()

    def _plainly(self, name: str, unit: nn.Module, call: _Call, step: int) -> Ran:
        own = {id(x) for x in (*unit.parameters(), *unit.buffers())}
        others = [x for x in (*self._root.parameters(), *self._root.buffers()) if id(x) not in own]
        plain = PlainModule(unit, None, given=False, others=others)
        plain.load({key: x.detach().clone() for key, x in tensors_of(unit).items()}, self._seeder.device)
        with self._as_called(plain.root, call, step):
            found = ran({name: plain.root}, call.given, trains=True)
        plain.unload()
        return found

    def _as_it_runs(self, name: str, unit: nn.Module, call: _Call, step: int) -> Ran:
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
        return list(outs), [x for x, want in zip(by_input, wants, strict=True) if want], weights, buffers, 0.0
