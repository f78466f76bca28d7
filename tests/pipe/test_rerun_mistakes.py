"""recompute= of single modules: how often the user's code runs, changes and options that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.layers import D
from support.parts import GIVEN, Parts
from support.reruns import WORDS, M, X, Y, equals_one_process, made, pipeline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright.partition import Cluster, Node, Profile
from stagewright.partition import plan as make_plan
from stagewright.pipe import PipelineModule

# --- changes in place that only later forwards make ---


class Later(Parts, what=GIVEN, seen=0, linear=lambda: nn.Linear(D, D)):
    """From the third real forward on it changes its input, or the result of its product."""

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

    class Changes(Parts, linear=lambda: nn.Linear(D, D), adds=Adds):
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


class Unused(Parts, linear=lambda: nn.Linear(D, D), parts=lambda: nn.ModuleList([nn.Linear(D, D)])):
    """A weight that is used without its module."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.parts[0](x), self.linear.weight)


MISTAKES: dict[str, tuple[Any, str]] = {
    "unknown word": (
        "half",
        r"recompute='half': expected one of 'none', 'full', 'layer', 'selective', .* 'selective:3', or a policy",
    ),
    "unknown word of a stage": (["full", "blocks"], r"recompute='blocks': expected one of 'none', 'full', 'layer'"),
    "no count": ("layer:0", r"'layer:0': expected one of 'none', .* or a count such as 'layer:3' or 'selective:3'"),
    "several kinds at once": ("layer:1+keep_less", r"recompute='layer:1\+keep_less': expected one of 'none'"),
    "what plans alone decide": ("offload", r"recompute='offload': expected one of 'none'"),
    "more than there are": ("layer:2", r"of stage 0 .* 1 units that can run again: expected at most 'layer:1'"),
    "a number": (2, r"recompute=2: expected one of 'none'"),
    "one stage of two": (["layer"], r"recompute= has 1 entries for 2 stages"),
    "unknown word of a module": ({"0": "layer"}, r"recompute=\{'0': 'layer'\}: expected 'full' or 'selective'"),
    "no name": ({0: "full"}, r"recompute=\{0: \.\.\.\}: expected names of modules"),
    "no match": ({"*.parst.*": "full"}, r"'\*.parst.\*'.* matches no module: .* such as '\*.parts.\*'"),
    "a part is a level": ({"*linear": "full"}, r"matches no module: .* '\*' matches one part between dots"),
    "a list": ({"*.parts": "full"}, r"matches '0.parts', a ModuleList, which nothing calls: expected .* '0.parts.\*'"),
    "not called": ({"*.linear": "full"}, r"'\*.linear'.* matches '0.linear', '1.linear', which no stage calls"),
    "two patterns": ({"*": "full", "1": "selective"}, r"'\*' and '1' for module '1', 'full' and 'selective': expected"),
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


class Inner(Parts, linear=lambda: nn.Linear(D, D), runs=0):
    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.sin(self.linear(x)) * x


class Counted(Parts, kind="plain", inner=Inner, last=lambda: nn.Linear(D, D), runs=0):
    """Counts its runs; its inner part may be under a checkpoint of the user's own."""

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.kind == "plain" or not torch.is_grad_enabled():
            return torch.tanh(self.last(self.inner(x)))
        h = checkpoint(self.inner, x, use_reentrant=self.kind == "reentrant")
        return torch.tanh(self.last(h))


class Around(Counted):
    """All of it under a checkpoint of the user's own, as layers of `transformers` are."""

    def __call__(self, x: Tensor) -> Tensor:
        return checkpoint(super().__call__, x, use_reentrant=False)  # type: ignore[no-any-return]


KINDS = ("plain", "reentrant", "not reentrant", "around")


@pytest.mark.thorough(but=["{'*.inner': 'selective'}"])
@pytest.mark.parametrize(
    "recompute",
    [*WORDS, {"*": "full"}, {"*": "full", "*.inner": "selective"}, {"*.inner": "full"}, {"*.inner": "selective"}],
    ids=str,
)
def test_a_module_runs_again_at_most_once(recompute: Any) -> None:
    """Also one with a checkpoint of the user's own inside or around it: one of each kind on both stages."""

    def make() -> nn.Sequential:
        first = nn.Linear(D, D)  # a reentrant checkpoint wants an input with a gradient
        return nn.Sequential(first, *[Around() if kind == "around" else Counted(kind=kind) for kind in 2 * KINDS])

    model, plain = made(make), made(lambda: nn.Sequential(nn.Linear(D, D), *[Counted() for _ in 2 * KINDS]))
    blocks = list(model)[1:]
    pipe = pipeline(model, recompute)
    for block in blocks:
        block.runs = block.inner.runs = 0
    pipe.forward_backward(X, Y)
    for x, y in zip(X.chunk(M), Y.chunk(M), strict=True):
        (F.mse_loss(plain(x), y) / M).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    for kind, block in zip(2 * KINDS, blocks, strict=True):
        outer = kind == "around" or recompute in ("full", "layer", "selective") or "*" in recompute
        inner = outer or kind != "plain" or recompute != "none"
        assert block.runs == (2 * M if outer else M), kind
        assert block.inner.runs == (2 * M if inner else M), kind
    pipe.eval_step(X, Y)  # the first one looks at shapes, too
    for block in blocks:
        block.runs = 0
    pipe.eval_step(X, Y)
    pipe.predict(X)
    assert all(block.runs == 2 * M for block in blocks)


@pytest.mark.parametrize("recompute", ["layer", {"*": "selective"}], ids=str)
def test_hooks_of_a_module_run_once(recompute: Any) -> None:
    model = made(lambda: nn.Sequential(*[Counted() for _ in range(4)]))
    seen: list[str] = []
    model[1].register_forward_hook(lambda *_: seen.append("forward"))
    model[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    pipe = pipeline(model, recompute)
    seen.clear()
    pipe.forward_backward(X, Y)
    assert sorted(seen) == ["backward"] * M + ["forward"] * M
    assert all("forward" not in vars(module) for module in model.modules()), "the user's module was left changed"


def test_an_error_in_a_module_leaves_it_as_it_was() -> None:
    class Fails(nn.Linear):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise RuntimeError("a mistake of the user's")
            return super().forward(x)

    model = nn.Sequential(nn.Linear(D, D), Fails(D, D), nn.Linear(D, D)).double()
    pipe = pipeline(model, "layer")
    model[1].fails = True
    with pytest.raises(RuntimeError, match="a mistake of the user's"):
        pipe.forward_backward(X, Y)
    assert all("forward" not in vars(module) for module in model.modules())
    model[1].fails = False
    pipe.forward_backward(X, Y)
