"""recompute= of single modules: changes in place that are refused, and mistakes in the option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.layers import D
from support.reruns import X, Y, equals_one_process, made, pipeline
from torch import Tensor, nn

from stagewright.partition import Cluster, Node, Profile
from stagewright.partition import plan as make_plan
from stagewright.pipe import PipelineModule

# --- changes in place that only later forwards make ---


class Later(nn.Module):
    """From the third real forward on it changes its input, or the result of its product."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.seen = what, 0
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += type(x) is Tensor and torch.is_grad_enabled()
        h = self.linear(x)
        if self.seen > 2:
            (x if self.what == "input" else h).mul_(2.0)
        return h.sin() + x


def test_later_changes_of_an_input_are_refused() -> None:
    model = made(lambda: nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), Later("input")))
    pipe = pipeline(model, {"2": "full"}, cut=["1"])
    message = r"module '2' changes an input in place, and did not in its first forward: .*Expected"
    with pytest.raises(ValueError, match=message):
        pipe.forward_backward(X, Y)


def test_an_input_that_is_changed_behind_the_module_is_refused() -> None:
    """Plain PyTorch takes it, since nothing of the module needs its input again; a second run does."""

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x + 1.0)

    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.adds = nn.Linear(D, D), Adds()

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            y = self.adds(h)
            h += 1.0
            return y + h

    make = lambda: nn.Sequential(Changes(), nn.Linear(D, D))  # noqa: E731
    equals_one_process(make, "layer")
    pipe = pipeline(made(make), {"*.adds": "full"})
    with pytest.raises(ValueError, match=r"an input of a module that runs again .*changed in place.*inplace=False"):
        pipe.forward_backward(X, Y)


# --- mistakes ---


class Unused(nn.Module):
    """A weight that is used without its module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.parts = nn.ModuleList([nn.Linear(D, D)])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.parts[0](x), self.linear.weight)


MISTAKES: dict[str, tuple[Any, str]] = {
    "unknown word": (
        "half",
        r"recompute='half': expected one of 'none', 'full', 'layer', 'selective', .* 'selective:3', or a policy",
    ),
    "unknown word of a stage": (["full", "blocks"], r"recompute='blocks': expected one of 'none', 'full', 'layer'"),
    "no count": (
        "layer:0",
        r"recompute='layer:0': expected one of 'none', .* or a count such as 'layer:3' or 'selective:3'",
    ),
    "more than there are": (
        "layer:2",
        r"'layer:2' of stage 0 .* 1 units that can run again: expected at most 'layer:1'",
    ),
    "a number": (2, r"recompute=2: expected one of 'none'"),
    "one stage of two": (["layer"], r"recompute= has 1 entries for 2 stages"),
    "unknown word of a module": ({"0": "layer"}, r"recompute=\{'0': 'layer'\}: expected 'full' or 'selective'"),
    "no name": ({0: "full"}, r"recompute=\{0: \.\.\.\}: expected names of modules"),
    "no match": ({"*.parst.*": "full"}, r"'\*.parst.\*'.* matches no module: .* such as '\*.parts.\*'"),
    "a part is a level": ({"*linear": "full"}, r"matches no module: .* '\*' stands for one part between dots"),
    "a list": ({"*.parts": "full"}, r"matches '0.parts', a ModuleList, which nothing calls: expected .* '0.parts.\*'"),
    "not called": ({"*.linear": "full"}, r"'\*.linear'.* matches '0.linear', '1.linear', which no stage calls"),
    "two patterns": (
        {"*": "full", "1": "selective"},
        r"has '\*' and '1' for module '1', 'full' and 'selective': expected",
    ),
}


@pytest.mark.parametrize(("recompute", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes(recompute: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline(nn.Sequential(Unused(), Unused()).double(), recompute)


def test_a_plan_has_its_own_recomputation() -> None:
    profile = Profile(nodes=[Node(name="0", forward_seconds=1.0, backward_seconds=2.0)])
    plan = make_plan(profile, Cluster.from_levels([(1, 1e9)]), global_batch=1)
    with pytest.raises(ValueError, match=r"recompute= together with a plan"):
        PipelineModule(nn.Sequential(nn.Linear(D, D)), schedule=plan, recompute={"*": "full"}, loss_fn=F.mse_loss)
