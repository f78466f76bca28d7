"""A list of edits of a model: made by name, shown, taken back, saved, and then applied together.

edits = edit(model)
edits["blocks.*"].checkpoint()          nothing happens yet
edits["blocks.*.mlp"].shard({"up": "column", "down": "row"})
print(edits); edits.undo(); edits.save("edits.json")
PipelineModule(edits, ...)              or edits.build() for a plain model
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...comm.mesh import World
from ...partition.deferred.recording import as_recipes
from ...partition.model.copies import Copies
from ...partition.model.untouched import untouched
from ...partition.strict import count as count_of
from ...partition.strict import number
from ...schedules.wording import count
from ..context import Layout
from ..guards.randomness import Seeder
from ..settings.recompute import Recompute, RecomputedModules
from ..shards.style import match
from ..stage.reruns import CheckpointedModules
from .beside import Edited, explain, found_again, tensors_of, verify
from .kinds import KINDS, Edit

MakeLayout = Callable[[World], Layout]
_FORMAT = "stagewright-edits-1"


class Edits:
    """Edits of a model, in order; the model is unchanged until `build`, or PipelineModule(edits).

    `edits["blocks.*"]` selects modules by name or pattern, and its methods add edits of them; iterate over them, or
    print them as a table.

    Attributes:
        model: the model to edit.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._edits: list[Edit] = []
        self._is_built = False
        self._shown = ""  # when all names existed

    def __getitem__(self, pattern: str) -> At:
        """Modules by name or pattern. Raises ValueError, with near matches, if there is none."""
        if not isinstance(pattern, str):
            raise ValueError(f"edits[{pattern!r:.60}]: expected a name or a pattern of names, as in 'blocks.*'")
        self.find(pattern)
        return At(self, pattern)

    def __iter__(self) -> Iterator[Edit]:
        return iter(self._edits)

    def __len__(self) -> int:
        return len(self._edits)

    def __str__(self) -> str:
        if self._is_built:
            return self._shown
        rows = [
            (each.pattern or "the model", each.call, count(len(self.find(each.pattern)), "module")) for each in self
        ]
        first, second = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        lines = (f"{name:<{first}}  {what:<{second}}  {number}" for name, what, number in rows)
        return "\n".join([f"{type(self.model).__name__}, {count(len(rows), 'edit')}", *lines])

    def undo(self) -> Edit:
        """Removes the last edit and returns it. Raises ValueError if there is none, or all are applied."""
        self.refuse_applied()
        if not self._edits:
            raise ValueError("undo: expected an edit before")
        return self._edits.pop()

    def add(self, edit: Edit) -> None:
        """Adds an edit. Raises ValueError if it cannot be made, or excludes an earlier one."""
        self.refuse_applied()
        for name, module in self.find(edit.pattern).items():
            is_whole = module is self.model and edit.word in ("checkpoint", "compile", "cut", "replace")
            if is_whole or (_is_around(edit) and type(module).forward is nn.Module.forward):
                what = "the whole model" if is_whole else f"{name!r}, a {type(module).__name__}, which nothing calls"
                raise ValueError(f"{edit.word} of {what}: expected a module in it")
            others = [other for other, each in self._named() if each is module and other != name]
            if others:
                raise ValueError(f"{edit}: {name!r} is {others[0]!r}, too (shared): expected a module with one name")
            KINDS[edit.word].check(name, module, self.model, **edit.given)
            for other in self:
                meets = [n for n, m in self.find(other.pattern).items() if _exclude(edit, module, other, m)]
                if meets:
                    raise ValueError(
                        f"{edit} excludes {other} at {meets[0] or 'the model'!r}: expected only one of them there "
                        f"(edits.undo() takes the last one back)"
                    )
        self._edits.append(edit)

    def verify(self, example: Any, *, mesh: DeviceMesh | None = None, seed: int = 0) -> list[str]:
        """Runs copies of the model with more and more of the edits, and compares them with the untouched model.

        Compared are outputs, every gradient, gradients of inputs, buffers, and which parameters are one. Removes edits
        with a gate that make a forward and backward slower.

        Arguments:
            example: a tuple of arguments of the model, or a dict of keywords.
            mesh: torch's mesh of a tensor group, all of whose members call this; without it `shard` is not run.
            seed: of random numbers.

        Returns texts about edits that were not run or were removed, and tensors that were not compared. Raises
        VerificationError, a ValueError, for the first edit whose numbers differ.
        """
        self.refuse_applied()
        without = [] if mesh is not None else [each for each in self if each.word == "shard"]
        run = [each for each in self if each not in without]
        with untouched(self.model, device=None, buffers=False):
            slower, lost = verify(run, partial(self._copy, mesh), example, seed=seed)
        back = [each for each, _ in slower]
        self._edits = [each for each in self if each not in back]
        return [
            *(f"not run: {each}: expected verify(..., mesh=), of the tensor group" for each in without),
            *(
                f"taken back: {each}: {times:.2f} times as long as without; gate=False keeps it"
                for each, times in slower
            ),
            *(f"not compared: {each}: {name!r}, which it takes away" for each, name in lost),
        ]

    def memory(self, example: Any, *, limit: str, in_flight: int = 1, state: float = 2.0) -> str:
        """Table of the memory that each further edit saves, and of the largest microbatch that fits with it.

        Measured on copies of the model with the example and half of it, in one process; `shard` and `cut` are left out.

        Arguments:
            example: a tuple of arguments, or a dict of keywords, of one microbatch with at least 2 samples.
            limit: a device's memory, such as "16GiB".
            in_flight: microbatches whose activations are held at once; under 1F1B, on the first rank, the number of
                stages.
            state: bytes of the optimizer's state per byte of weights; Adam's 2.

        Returns the table as text. Raises ValueError for other values.
        """
        count_of("in_flight", in_flight)
        number("state", state)
        edits = [each for each in self if each.word not in ("shard", "cut")]
        with untouched(self.model, device=None, buffers=False):
            return explain(edits, partial(self._copy, None), example, limit=limit, in_flight=in_flight, state=state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the list as JSON, for `load` on a model with the same names. Raises ValueError for edits with code."""
        record = []
        for each in self:
            record.append({"at": each.pattern, "do": each.word, **each.given})
            try:
                json.dumps(record[-1])
            except TypeError:
                raise ValueError(f"{each} is code, which no file can hold: expected it in the script") from None
        Path(path).write_text(json.dumps({"format": _FORMAT, "edits": record}, indent=1) + "\n", encoding="utf-8")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Adds the edits of a file. Raises ValueError for another file, and for names that the model does not have."""
        before, where = list(self._edits), " holds no edits"
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if {**content, "edits": []} != {"format": _FORMAT, "edits": []} or not isinstance(content["edits"], list):
                raise KeyError(*content)
            for number, record in enumerate(content["edits"]):
                where = f": edit {number}, {record!r:.60}"
                if record["do"] not in [*KINDS]:
                    raise ValueError(f"do={record['do']!r}: expected one of {', '.join(map(repr, KINDS))}")
                given = {name: value for name, value in record.items() if name not in ("at", "do")}
                getattr(self[record["at"]], record["do"])(**given)
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            self._edits = before
            raise ValueError(f"{path}{where} ({error!r:.100}): expected what edits.save wrote") from None
        except ValueError as error:
            self._edits = before
            raise ValueError(f"{path}: {error}") from None

    def build(self, mesh: DeviceMesh | None = None) -> nn.Module:
        """The model with all edits applied, for one process.

        Modules are edited in place, and edits can then not be added or undone. A failed edit restores everything.

        Arguments:
            mesh: torch's mesh of a tensor group, for `shard`.

        Returns the model. Raises ValueError for `shard` without a mesh.
        """
        shards = [each for each in self if each.word == "shard"]
        if shards and mesh is None:
            raise ValueError(f"{shards[0]}: expected build(mesh=), of the tensor group, or PipelineModule(edits)")
        with self.applied(cuts=False) as options:
            # As a pipeline's stages do it: with the same random numbers, and buffers that change once.
            rules = RecomputedModules(Recompute(stages=(), modules=options.get("recompute", {})), self.model).rules
        CheckpointedModules(rules, Seeder(0, torch.device("cpu"))).begin()  # devices are seen when it runs
        if shards and mesh is not None:
            _parallelize(self.model, options["tensor_parallel"], mesh)
        return self.model

    @contextmanager
    def applied(self, meant: Sequence[Edit] | None = None, *, cuts: bool = True) -> Iterator[dict[str, Any]]:
        """Context in which the model has all edits but those that are options of PipelineModule, which it gives.

        After an error everything is restored. `meant` is the list as it must still be; `cuts` is whether the model will
        be cut, so that no edit may wrap the whole of it.
        """
        self.refuse_applied()
        if around := [each for each in self if cuts and each.pattern == "" and _is_around(each)]:
            raise ValueError(
                f"{around[0]}, around the whole model, which a pipeline cuts: expected modules in it, such as "
                f"edits['*'], or edits.build() for a plain model"
            )
        if meant is not None and meant != self._edits:
            raise ValueError("these edits differ from those of this pipeline: expected a new PipelineModule(edits)")
        put_back = _remember(self.model)
        found = [(each, self.find(each.pattern)) for each in self]
        self._shown, self._is_built = str(self), True
        now = {module: module for module in self.model.modules()}  # what is where each was
        try:
            changed: list[tuple[Edit, str, nn.Module]] = []
            for each, modules in found:
                for name in self._names_now(each, modules, now):
                    module = self.model.get_submodule(name)
                    KINDS[each.word].apply(name, module, self.model, **each.given)
                    if (made := self.model.get_submodule(name)) is not module:
                        now.update({old: made for old, one in now.items() if one is module})
                    if each.word in ("keep_less", "compile"):
                        changed += [(each, name, x) for x in module.modules() if x is module or "forward" in vars(x)]
            present = set(self.model.modules())
            for each, name, part in changed:
                if part not in present:
                    raise ValueError(f"{each}: a later replace takes {name!r} away: expected the replace first")
            yield self._options(found, now)
        except BaseException:
            put_back()
            self._is_built = False
            raise

    def _options(
        self, meant: Sequence[tuple[Edit, Mapping[str, nn.Module]]], now: Mapping[nn.Module, nn.Module]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each, modules in meant:
            make = KINDS[each.word].option
            for name in self._names_now(each, modules, now) if make is not None else ():
                key, value = make(name, **each.given)  # type: ignore[misc]
                found[key] = [*found.get(key, []), *value] if isinstance(value, list) else found.get(key, {}) | value
        return found

    def _names_now(self, each: Edit, modules: Mapping[str, nn.Module], now: Mapping[Any, nn.Module]) -> list[str]:
        """Names of an edit's modules, which other edits may have wrapped, replaced or moved into another."""
        there = dict(self._named())
        names = {module: name for name, module in there.items()}
        found = []
        for name, module in modules.items():
            inside = dict(module.named_modules())
            parts = [(f".{x}" * bool(x), inside.get(x)) for x in each.given.get("plan", [""])]
            places = [names[one] for one in (now[module], module) if one in names] + [name]
            known = [at for at in places if all(f"{at}{x}".strip(".") in there for x, _ in parts)]
            if not known:
                raise ValueError(f"{each}: {name!r} was removed by an earlier replace: expected only one of them")
            # Where its own parts are: a module around it may have others of their names.
            others = [sum(there[f"{at}{x}".strip(".")] not in (y, now.get(y)) for x, y in parts) for at in known]
            found.append(known[others.index(min(others))])
        return found

    def in_group(self, make_layout: MakeLayout | None) -> MakeLayout | None:
        """The same; its layouts raise ValueError without the tensor group that `shard` needs."""
        shards = [each for each in self if each.word == "shard"]
        if make_layout is None or not shards:
            return make_layout

        def make(world: World) -> Layout:
            layout = make_layout(world)
            if max(layout.place.mesh.tensor_sizes) == 1:
                raise ValueError(f"{shards[0]} without a tensor group: expected mesh=Mesh(tensor=2), or no shard")
            return layout

        return make

    def find(self, pattern: str) -> Mapping[str, nn.Module]:
        """Modules by name. Raises ValueError, with near matches, if there is none."""
        return {"": self.model} if pattern == "" else match(pattern, self.model, option=f"edits[{pattern!r}]")

    def _copy(self, mesh: DeviceMesh | None, edits: Sequence[Edit]) -> Edited:
        self.refuse_applied()
        copies = Copies(self.model)
        other = Edits(copies.of(self.model))
        if (place := copies.shared(other.model)) is not None:
            raise ValueError(
                f"edits are tried on a copy of the model, and {place} of it still uses the model's own modules or "
                f"tensors: expected a model that copy.deepcopy copies as a whole"
            )
        copies.memo |= {id(each): each for each in copies.memo.values()}
        before = tensors_of(other.model)

        def own(make: Callable[[nn.Module], nn.Module], module: nn.Module) -> nn.Module:
            made = make(module)  # an existing module stays the user's
            copied: nn.Module = Copies(made, memo=copies.memo).of(made)
            return copied

        for each in edits:
            given = {key: partial(own, value) if key == "make" else value for key, value in each.given.items()}
            other._edits.append(Edit(each.pattern, each.word, given))
        return found_again(other.build(mesh), before)

    def refuse_applied(self) -> None:
        if self._is_built:
            raise ValueError("these edits are applied: expected edit(model) of a model that is not built yet")

    def _named(self) -> Collection[tuple[str, nn.Module]]:
        return list(self.model.named_modules(remove_duplicate=False))


def _is_around(edit: Edit) -> bool:
    """Whether it changes a call of its module, and not only modules in it."""
    return edit.word in ("compile", "dtype") or edit.given.get("what") == "gelu"


def _exclude(edit: Edit, module: nn.Module, other: Edit, others: nn.Module) -> bool:
    """Whether one edit excludes the other: the same twice, a type of a part before its whole, or by their kinds."""
    if edit.word == other.word == "dtype":
        return others in set(module.modules())
    if edit.word == other.word:
        return module is others and edit.given.get("what") == other.given.get("what")
    meet = module in set(others.modules()) or others in set(module.modules())
    return meet and (other.word in KINDS[edit.word].excludes or edit.word in KINDS[other.word].excludes)


def _remember(model: nn.Module) -> Callable[[], None]:
    """A function that restores all attributes of modules, and tables that others refer to."""
    held = [(vars(module), dict(vars(module))) for module in model.modules()]
    tables = [(each, dict(each)) for _, own in held for each in own.values() if isinstance(each, dict)]
    with as_recipes(model.parameters()):
        values = [(x, x.data) for p in model.parameters() for x in (p, p.grad) if x is not None]

    def put_back() -> None:
        for now, before in (*held, *tables):
            now.clear()
            now.update(before)
        with as_recipes(value for _, value in values):
            for x, value in values:
                x.data = value

    return put_back


class At:
    """Modules of one pattern; each method adds an edit of them and returns this object."""

    def __init__(self, edits: Edits, pattern: str) -> None:
        self._edits = edits
        self._pattern = pattern

    def _add(self, word: str, **given: Any) -> At:
        self._edits.add(Edit(self._pattern, word, given))
        return self

    def checkpoint(self, keep: Sequence[Any] = ()) -> At:
        """Recomputes the modules in the backward.

        Arguments:
            keep: operators whose results are kept, such as "aten.mm.default", by name or torch's own.
        """
        is_list = isinstance(keep, Sequence) and not isinstance(keep, str)
        return self._add("checkpoint", keep=tuple(map(str, keep)) if is_list else keep)

    def replace(self, make: Callable[[nn.Module], nn.Module]) -> At:
        """Replaces a module by make(module); its hooks, and parameters and buffers of the same names, are taken over.

        Arguments:
            make: module -> new module, which may hold the old one.
        """
        return self._add("replace", make=make)

    def shard(self, plan: Mapping[str, Any]) -> At:
        """Divides modules in it among a tensor group.

        Arguments:
            plan: style by name below the module, as in {"up": "column", "down": "row"}.
        """
        return self._add("shard", plan=dict(plan) if isinstance(plan, Mapping) else plan)

    def compile(self, backend: str | Callable[..., Any] = "inductor", *, gate: bool = True) -> At:
        """Compiles it with torch.compile.

        Arguments:
            backend: of torch.compile.
            gate: whether `verify` removes the edit if it makes the model slower.
        """
        return self._add("compile", backend=backend, gate=gate)

    def cut(self) -> At:
        """Begins a stage of the pipeline with this module."""
        return self._add("cut")

    def dtype(self, dtype: torch.dtype | str) -> At:
        """Computes in another type, weights included; inputs are cast to it, and outputs back.

        Arguments:
            dtype: a floating-point type or its name, such as "bfloat16".
        """
        return self._add("dtype", dtype=str(dtype).removeprefix("torch."))

    def keep_less(self, what: str) -> At:
        """Keeps less for the backward, and computes it again.

        Arguments:
            what: "gelu", "layernorm" or "attention" in the module.
        """
        return self._add("keep_less", what=what)


def edit(model: nn.Module) -> Edits:
    """An empty list of edits of a model.

    Arguments:
        model: the module to edit, which is unchanged until the edits are applied.

    Raises ValueError for an object that is not a module, and for a model with lazy parameters.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"edit({model!r:.60}): expected a torch.nn.Module")
    if lazy := [name for name, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)]:
        raise ValueError(f"edit: {lazy[0]!r} has no shape yet: expected a model that has run once")
    return Edits(model)


def _parallelize(model: nn.Module, plan: Mapping[str, Any], mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    words = {"column": ColwiseParallel, "row": RowwiseParallel}
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in words:
            raise ValueError(f"shard as {style!r}: expected PipelineModule(edits), or one of torch's ParallelStyle")
        for module in match(pattern, model, option="shard").values():
            parallelize_module(module, mesh, words[style]() if isinstance(style, str) else style)
