"""User code that runs without a trace: whatever a module or a hook keeps is as it was."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.inside import untouched
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

CPU = torch.device("cpu")
SHAPES: list[object] = []  # of hooks below
calls = 0


def notes_shapes(module: nn.Module, inputs: object, output: Tensor) -> None:
    global calls  # noqa: PLW0603
    calls += 1
    SHAPES.append(output.shape)


class Meter:
    """As in many training scripts."""

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
    assert isinstance(changes, Changes)
    changes.register_forward_hook(notes_shapes)
    model.register_forward_pre_hook(Meter.hook.__get__(meter := Meter()))
    before, statistics, runs = seen(changes), copy.deepcopy(model[1].state_dict()), 0
    for _ in range(2):
        with untouched(model, device=CPU), torch.no_grad():
            x = torch.zeros(2, 2)
            if fake:
                with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    changes(mode.from_tensor(x))
                    assert seen_differs(changes)
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


def seen_differs(module: Changes) -> bool:
    return module.count == 1 and module.meter.total == 1


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
