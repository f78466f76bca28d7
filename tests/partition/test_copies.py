"""Copies of a model, and tries that leave the model untouched."""

import copy
import functools
import random
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.inside import Copies, untouched
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

KNOWN: dict[str, nn.Module] = {}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.inner(x)
        return self.last


def closure(layer: Any) -> None:
    old = layer.forward
    layer.forward = lambda x: old(x) * 2


def closure_in_a_partial(layer: Any) -> None:
    old = layer.forward
    layer.forward = functools.partial(lambda module, x: old(x) + module.inner.weight, layer)


def decorated(layer: Any) -> None:
    @functools.wraps(layer.forward)
    def forward(x: Tensor) -> Any:
        return forward.__wrapped__(x)  # type: ignore[attr-defined]

    layer.forward = forward


def default(layer: Any) -> None:
    def forward(x: Tensor, parts: Any = (layer.inner,), *, scale: Tensor = layer.inner.weight) -> Any:
        return parts[0](x) * scale

    layer.forward = forward


def global_name(layer: Any) -> None:
    KNOWN["layer"] = layer
    exec(
        "def helper(x): return layer.inner(x)\ndef forward(x): return [helper(each) for each in (x,)][0]",
        KNOWN,  # type: ignore[arg-type]
    )
    layer.forward = KNOWN.pop("forward")
    layer.forward.__module__ = __name__


def holder(layer: Any) -> None:
    class Holder:
        def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
            self.call = call

        def __call__(self, x: Tensor) -> Tensor:
            return self.call(x)

    layer.forward = Holder(lambda x: layer.inner(x) * 2)


def weak(layer: Any) -> None:
    layer.me, old = weakref.ref(layer), weakref.ref(layer)
    layer.forward = lambda x: layer.me().inner(old().inner.weight + x)


def hook(layer: Any) -> None:
    layer.inner.register_forward_hook(lambda module, args, output: output * layer.inner.running_mean.sum())


def compiled(layer: Any) -> None:
    layer.forward = torch.compile(layer.forward, backend="eager")


def called_compiled(layer: Any) -> None:
    layer.compile(backend="eager")


@pytest.mark.parametrize(
    "around",
    [closure, closure_in_a_partial, decorated, default, global_name, holder, weak, hook, compiled, called_compiled],
)
def test_a_copy_runs_and_changes_what_is_its_own(around: Callable[[Any], None]) -> None:
    layer, x = Layer(), torch.randn(4, 2)
    around(layer)
    model = nn.Sequential(layer, nn.Linear(2, 2))
    copies = Copies(model)
    other = copies.of(model)
    assert copies.shared(other) is None
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(3)
    ours, theirs = other(x), model(x)
    assert not torch.equal(ours, theirs)
    for p in model.parameters():
        p.data.mul_(3)
    model.load_state_dict({key: torch.zeros_like(b) for key, b in model.named_buffers()}, strict=False)
    assert (int(layer.inner.num_batches_tracked), int(other[0].inner.num_batches_tracked)) == (0, 1)
    layer.inner.reset_running_stats()
    assert torch.equal(ours, model(x))
    ours.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert other[0].inner.weight.grad is not None


def test_two_functions_share_a_variable_in_the_copy_too() -> None:
    def pair(part: nn.Module) -> tuple[Callable[..., None], Callable[..., nn.Module]]:
        def put(other: nn.Module) -> None:
            nonlocal part
            part = other

        return put, lambda: part

    model: Any = nn.Linear(2, 2)
    model.put, model.get = pair(model)
    other = Copies(model).of(model)
    assert other.get() is other
    other.put(other.bias)
    assert other.get() is other.bias
    assert model.get() is model


def test_what_reaches_nothing_is_left_alone() -> None:
    teacher, model = nn.Linear(2, 2), nn.Linear(2, 2)
    loss = lambda output: teacher(output).sum()  # noqa: E731
    copies = Copies(model)
    assert copies.instead(loss) is loss
    assert copies.instead(teacher) is teacher
    model.last = model(torch.ones(1, 2))  # type: ignore[assignment]  # computed, which deepcopy alone refuses
    assert torch.equal(Copies(model).of(model).last, model.last)


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.parts, self.lock, self.share = {"model": [model]}, threading.Lock(), 2.0

    def loss(self, x: Tensor) -> Tensor:
        return self.share * self.parts["model"][0](x).sum()


def test_what_holds_the_model_beside_much_else_is_copied_as_little_as_can_be() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    trainer = Trainer(model)
    copies = Copies(model)
    other = copies.of(model)
    for loss in (trainer.loss, lambda x: 1.0 * trainer.loss(x), functools.partial(Trainer.loss, trainer)):
        ours = copies.instead(loss)
        assert copies.shared(other, ours) is None
        ours(x).backward()
        assert model.weight.grad is None
        assert torch.equal(other.weight.grad, torch.full((2, 2), 2.0))
        other.weight.grad = None
    assert trainer.parts["model"] == [model]


class Itself(nn.Linear):
    def __deepcopy__(self, memo: object) -> nn.Module:
        return self


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + SHARED.bias


SHARED = nn.Linear(2, 2)


def test_what_a_copy_shares_is_named() -> None:
    parent: Any = nn.Sequential(nn.Linear(2, 2))
    parent[0].parents = [weakref.ref(parent)]
    method: Any = nn.Linear(2, 2)
    method.detached = method.weight.detach
    of_globals = nn.Sequential(SHARED, Reads(2, 2))
    for model, place in (
        (parent, "'parents' of module '0'"),
        (method, "'detached' of module ''"),
        (of_globals, "'forward' of module '1'"),
        (nn.Sequential(Itself(2, 2)), "module '0'"),
    ):
        copies = Copies(model)
        assert copies.shared(copies.of(model)) == place


CPU = torch.device("cpu")
SHAPES: list[object] = []  # of hooks below
calls = 0


def notes_shapes(module: nn.Module, inputs: object, output: Tensor) -> None:
    global calls  # noqa: PLW0603
    calls += 1
    SHAPES.append(output.shape)


class Meter:
    def __init__(self) -> None:
        self.total, self.history = 0.0, [0.0]

    def hook(self, module: nn.Module, inputs: object) -> None:
        self.total += 1
        self.history.append(self.total)


class Changes(nn.Module):
    """Keeps something of each forward, in every place that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mean", torch.full((2,), torch.nan))
        self.register_buffer("wide", torch.zeros(1).expand(4))
        self.register_buffer("late", None)
        self.count, self.state = 0, {"deep": [{"er": 1}]}
        self.kept = {
            "counter": Counter(a=1),
            "ordered": OrderedDict(b=1, a=2),
            "recent": deque([1, 2], maxlen=2),
            "set": {1},
            "empty": {},
            "array": np.zeros(3),
            "tensor": torch.zeros(2),
        }
        self.meter = Meter()
        self.random = (random.Random(0), np.random.default_rng(0), np.random.RandomState(0), torch.Generator())
        total = 0

        def add(by: int) -> None:
            nonlocal total
            total += by

        self.add, self.total = partial(add, 1), lambda: total

    def forward(self, x: Tensor) -> Tensor:
        kept: Any = self.kept
        self.count += 1
        self.new = x  # no such attribute yet
        self.state["deep"][0]["er"] += 1  # type: ignore[index,operator]
        self.state["deep"] = [*self.state["deep"]]  # type: ignore[misc]
        kept["counter"]["a"] += 1
        kept["ordered"].move_to_end("b")
        kept["recent"].append(3)
        kept["set"].add(2)
        kept["empty"]["first"] = 1
        kept["array"] += 1
        if type(x) is Tensor:
            kept["tensor"] += 1
            self.random[3].manual_seed(7)
        self.mean = self.mean + 1 if self.count % 2 else self.mean.zero_()
        self.late = x
        self.training = False
        self.meter.hook(self, ())
        self.add()
        self.random[0].random(), self.random[1].random(), self.random[2].rand()
        random.random(), np.random.rand(), torch.rand(())
        self.inner = nn.Linear(2, 2)
        return x * self.mean[0]


def seen(module: Changes) -> dict[str, Any]:
    """All that may change, as one value that compares."""
    table = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "random"}
    return copy.deepcopy(
        {
            **{key: value for key, value in table.items() if key not in ("meter", "kept", "add", "total")},
            "names": [*vars(module)],
            "kept": {key: np.asarray(value).tolist() for key, value in module.kept.items() if key != "set"},
            "order": [*module.kept["ordered"]],  # type: ignore[call-overload]
            "set": set(module.kept["set"]),  # type: ignore[call-overload]
            "meter": (module.meter.total, [*module.meter.history]),
            "total": module.total(),
            "buffers": [
                (key, id(x), None if x is None else x.nan_to_num(-1.0).tolist()) for key, x in module._buffers.items()
            ],
            "children": [id(child) for child in module.children()],
            "drawn": [
                module.random[0].getstate(),
                str(module.random[1].bit_generator.state),
                str(module.random[2].get_state()),
                module.random[3].get_state().tolist(),
                random.getstate(),
                str(np.random.get_state()),
                torch.get_rng_state().tolist(),
            ],
            "global": (calls, [*SHAPES]),
        }
    )


@pytest.mark.parametrize("fake", [False, True])
def test_nothing_is_left_of_a_run(fake: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Changes(), nn.BatchNorm1d(2))
    changes = model[0]
    changes.register_forward_hook(notes_shapes)
    model.register_forward_pre_hook(Meter.hook.__get__(meter := Meter()))
    before, statistics, runs = seen(changes), copy.deepcopy(model[1].state_dict()), 0
    for _ in range(2):
        with untouched(model, device=CPU), torch.no_grad():
            x = torch.zeros(2, 2)
            if fake:
                with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    changes(mode.from_tensor(x))
                    assert (changes.count, changes.meter.total) == (1, 1)
            else:
                model(x), model(x)
                assert seen(changes) != before
                assert meter.total == 2
            assert calls > 0
            runs += 1
        assert seen(changes) == before
        assert (meter.total, meter.history) == (0.0, [0.0])
        assert all(torch.equal(x, statistics[name]) for name, x in model[1].state_dict().items())
    assert runs == 2


def test_an_error_leaves_nothing_either_and_a_run_outside_counts() -> None:
    module = Changes()
    before = seen(module)
    with pytest.raises(RuntimeError, match="shape"), untouched(module, device=CPU):
        module(torch.zeros(2, 2)) @ torch.zeros(3, 3)
    assert seen(module) == before
    module(torch.zeros(2, 2))
    assert module.count == 1


def test_what_libraries_keep_is_left_alone() -> None:
    """A queue that another thread empties would be filled again with what it has dealt with."""
    import queue

    module = nn.Linear(2, 2)
    module.events = queue.Queue()  # type: ignore[assignment]
    with untouched(module, device=CPU):
        module.events.put(1)
    assert module.events.get_nowait() == 1
