"""Changes of what recorded code reads are seen, and nothing else is taken for one."""

import copy
import functools
import gc
import os
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.inside import Arguments, Guards, RecordingWarning, record, roles_of
from support.inside import GuardsChanges as Changes
from torch import Tensor, nn

SETTINGS = types.ModuleType("settings")
FACTOR, G, OTHER = {"now": 1.0}, 1.0, 0


def helper(x: Tensor) -> Tensor:
    return x * FACTOR["now"] * G * SETTINGS.RATE  # type: ignore[attr-defined]


def outer() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None], list[float]]:
    k, box = 1.0, [1.0]

    def scaled(x: Tensor) -> Tensor:
        return x * k * box[0]

    def put(value: float) -> None:
        nonlocal k
        k = value

    return scaled, put, box


CLOSED, SET_K, BOX = outer()


class Slotted:
    __slots__ = ("value",)


class Config:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Lazy:
    def __init__(self) -> None:
        self.__dict__["store"] = {"w": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["store"][name]


class Amount:
    def __init__(self) -> None:
        self.amount = 1.0

    def __get__(self, owner: object, kind: type) -> float:
        return self.amount


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count, self.log, self.gain = nn.Linear(4, 4), 0, [0], 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.log.append(self.count)
        return self.linear(x)


class Net(nn.Module):
    scale, amount = 1.0, Amount()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(Unit() for _ in range(3))
        self.options: Any = {"alpha": 1.0, "deep": {"beta": 1.0}}
        self.cfg: Any = Config(sub=Config(x=1.0))
        self.cfg.me = self.cfg
        self.array, self.names, self.history = np.ones(4), {"p", "q"}, [1.0]
        self.slotted: Any = Slotted()
        self.slotted.value = 1.0
        self.space, self.lazy = types.SimpleNamespace(z=1.0), Lazy()
        self.kept = Config(x=1.0)
        self.weak = weakref.ref(self.kept)
        self.part = functools.partial(torch.mul, other=1.0)
        self.act, self.epoch, self.stats, self._rate, self.nan = torch.tanh, 0, {"n": 0}, 1.0, float("nan")
        self.register_buffer("buffer", torch.ones(4))

    @property
    def rate(self) -> float:
        return self._rate

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.options["alpha"] * self.options["deep"]["beta"] * self.scale * self.cfg.sub.x
        x = x * self.cfg.me.sub.x * float(self.array[0]) * (2 if "x" in self.names else 1) * sum(self.history)
        x = x * self.slotted.value * self.space.z * self.lazy.w * self.rate * self.amount * self.weak().x
        x = CLOSED(helper(self.part(x))) * float(os.environ["GUARDS_TEST"]) * self.buffer * (1 if self.nan else 0)
        if getattr(self, "extra", None):
            x = x * self.extra
        if self.training and any(p.requires_grad for p in self.blocks[1].parameters()):
            x = x + 1
        for block in self.blocks:
            x = self.act(block(x)) * block.gain
        return x


def set_global(name: str, value: object) -> Callable[[Any], object]:
    return lambda _: globals().__setitem__(name, value)


def global_hook(_: object) -> None:
    torch.nn.modules.module._global_forward_hooks[-1] = lambda *_: None


CHANGES: dict[str, Callable[[Any], object]] = {
    "entry of a dict": lambda m: m.options.update(alpha=0.3),
    "dict in a dict": lambda m: m.options["deep"].update(beta=0.3),
    "attribute of the class": lambda m: setattr(Net, "scale", 0.3),
    "attribute of a child": lambda m: setattr(m.blocks[1], "gain", 0.3),
    "entry of a global": lambda m: FACTOR.update(now=0.3),
    "global": set_global("G", 3.0),
    "module of settings": lambda m: setattr(SETTINGS, "RATE", 2.0),
    "number in a closure": lambda m: SET_K(2.0),
    "list in a closure": lambda m: BOX.insert(0, 3.0),
    "module that is appended": lambda m: m.blocks.append(Unit()),
    "hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "array": lambda m: m.array.__setitem__(0, 2.0),
    "set": lambda m: m.names.add("x"),
    "list": lambda m: m.history.append(1.0),
    "object that holds itself": lambda m: setattr(m.cfg.sub, "x", 2.0),
    "requires_grad": lambda m: m.blocks[1].linear.weight.requires_grad_(False),
    "slot": lambda m: setattr(m.slotted, "value", 2.0),
    "behind a weak reference": lambda m: setattr(m.kept, "x", 2.0),
    "SimpleNamespace": lambda m: setattr(m.space, "z", 2.0),
    "partial": lambda m: m.part.keywords.update(other=2.0),
    "behind __getattr__": lambda m: m.lazy.store.update(w=2.0),
    "behind a property": lambda m: setattr(m, "_rate", 2.0),
    "descriptor": lambda m: setattr(vars(Net)["amount"], "amount", 2.0),
    "another function": set_global("helper", lambda x: x * 2),
    "function in an attribute": lambda m: setattr(m, "act", torch.relu),
    "attribute that was absent": lambda m: setattr(m, "extra", 2.0),
    "attribute in front of the class's": lambda m: vars(m).update(scale=2.0),
    "method of the class": lambda m: setattr(Net, "forward", lambda self, x: x),
    "method of the object": lambda m: setattr(m, "forward", lambda x: x),
    "os.environ": lambda m: os.environ.update(GUARDS_TEST="2.0"),
    "default type": lambda m: torch.set_default_dtype(torch.float64),
    "buffer of another type": lambda m: setattr(m, "buffer", torch.zeros(4, dtype=torch.float64)),
    "eval()": lambda m: m.eval(),
    "code of a function": lambda m: setattr(helper, "__code__", (lambda x: x * 7).__code__),
    "class of a unit": lambda m: setattr(m.blocks[0], "__class__", type("Other", (Unit,), {})),
    "global hook": global_hook,
}


def nobody_reads(model: Any) -> None:
    model.epoch += 1
    model.new = 3
    model.stats.update(n=5)
    Net.seen = 1  # type: ignore[attr-defined]


def equal_values(model: Any) -> None:
    model.options, model._rate = copy.deepcopy(model.options), float("1.0")
    model.names = {"q", "p"}


HARMLESS: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "counters of units": lambda m: m.blocks[0](torch.ones(4)),
    "what nobody reads": nobody_reads,
    "a global that nobody reads": set_global("OTHER", 5),
    "equal values": equal_values,
    "weights": lambda m: m.requires_grad_() and m.first.weight.data.mul_(2.0),
    "gradients": lambda m: m(torch.ones(4)).sum().backward(),
    "values of a buffer": lambda m: m.buffer.mul_(2.0),
    "another buffer": lambda m: setattr(m, "buffer", torch.zeros(4)),
    "weights on another device": lambda m: m.first.to("meta"),
    "state dict": lambda m: m.load_state_dict({k: v + 0 for k, v in m.state_dict().items()}),
}


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    SETTINGS.RATE = 1.0  # type: ignore[attr-defined]
    monkeypatch.setenv("GUARDS_TEST", "1.0")
    for place, name in ((Net, "scale"), (Net, "forward"), (helper, "__code__"), (vars(Net)["amount"], "amount")):
        monkeypatch.setattr(place, name, getattr(place, name))
    for name in ("G", "OTHER", "helper"):
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setitem(FACTOR, "now", 1.0)
    yield
    SET_K(1.0)
    del BOX[:-1]
    torch.set_default_dtype(torch.float32)
    torch.nn.modules.module._global_forward_hooks.clear()


def guards_of(model: nn.Module, *, training: bool = True) -> Guards:
    example = Arguments.of((torch.ones(2, 4),))
    made = record(model, roles_of(model), example, device=torch.device("cpu"), training=True)
    return Guards(made.reads, training=training)


@pytest.mark.thorough(but=["attribute of the class"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_seen(change: Callable[[Any], object]) -> None:
    model = Net()
    guards = guards_of(model)
    guards.tell()  # nothing
    assert guards.differing() == []
    change(model)
    assert guards.differing()


@pytest.mark.thorough(but=["a global that nobody reads", "equal values"])
@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_what_was_not_read_is_no_change(change: Callable[[Any], object]) -> None:
    model = Net()
    guards = guards_of(model)
    change(model)
    assert guards.differing() == []
    assert guards.differing() == []


def test_paths_say_what_has_changed_and_evaluation_has_its_own() -> None:
    model = Net()
    guards = guards_of(model)
    model.options["deep"]["beta"], model.cfg.sub.x = 0.3, 2.0
    assert sorted(guards.differing()) == ["model.cfg.sub.x", "model.options['deep']['beta']"]
    model = Net()
    guards = guards_of(model, training=False)
    model.eval()
    assert guards.differing() == []
    model.scale = 2.0
    assert guards.differing() == ["model.scale"]


def test_what_cannot_be_compared_or_changes_each_time_is_named_once() -> None:
    class Opaque(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.handle.fileno()
            return super().forward(x)

    model = Opaque()
    message = r"reads model.handle \(TextIOWrapper\), which cannot be compared"
    with open(os.devnull) as model.handle, pytest.warns(RecordingWarning, match=message):  # type: ignore[assignment]
        guards_of(model).tell()
    changes = Changes()
    for inputs, paths in (("a", ["model.step"]), ("b", ["model.step"]), ("a", []), *[("a", ["model.step"])] * 4):
        changes.note(inputs, paths)
    with pytest.warns(RecordingWarning, match="model.step has changed before each of 5 batches"):
        changes.note("a", ["model.step", "model.other"])
    changes.note("a", ["model.step"])


class FromAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.layers[0](x)]
        return self.layers[1](kept.pop())


class FromAnObject(FromAList):
    """The model has one of this class, too, so that reads of it are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config(value=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](Config(value=self.layers[0](x)).value)


@pytest.mark.thorough(but=["FromAnObject"])
@pytest.mark.parametrize("make", [FromAList, FromAnObject])
def test_a_record_holds_no_parameters(make: Callable[[], FromAList]) -> None:
    """A process lets those of other processes' stages go."""
    model = make()
    watched = weakref.ref(model.layers[0].weight)
    example = Arguments.of((torch.zeros(3, 2),))
    found = record(model, roles_of(model), example, device=torch.device("cpu"), training=True)
    guards = Guards(found.reads, training=True)
    model.layers[0].weight = nn.Parameter(torch.zeros(2, 2))
    gc.collect()
    assert watched() is None
    assert not guards.differing()
