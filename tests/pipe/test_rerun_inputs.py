"""recompute= of modules that change memory in place, how often the user's code runs, and what is refused; float64."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.grids import one_in
from support.layers import D
from support.parts import GIVEN, Parts
from support.reruns import WORDS, M, X, Y, equals_one_process, made, pipeline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class OfFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty(0).set_(x.untyped_storage(), 0, x.shape, x.stride())  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda h: h[..., :3],
    "unsafe_chunk": lambda h: h.unsafe_chunk(2, -1)[0],
    "unsafe_split": lambda h: h.unsafe_split(3, -1)[0],
    "unsafe_split_with_sizes": lambda h: h.unsafe_split_with_sizes([3, D - 3], -1)[0],
    "_unsafe_view": lambda h: torch.ops.aten._unsafe_view(h, h.shape),
    "data": lambda h: h.data,
    "detach": lambda h: h.detach(),
    "set_": lambda h: h.new_empty(0).set_(h.detach()),
    "as_strided": lambda h: h.data.as_strided(h.shape, h.stride()),
    "storage": lambda h: h.new_empty(0).set_(h.untyped_storage(), 0, h.shape, h.stride()),
    "a function": OfFunction.apply,
}


class Aliased(Parts, alias=GIVEN, inside=True, linear=lambda: nn.Linear(D, D)):
    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        y = (h * 1.5).sin()
        if not self.inside:
            return y, h
        self.alias(h).mul_(2.0)
        return torch.tanh(h + y)


@pytest.mark.thorough(but=["unsafe_split"])
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES.keys())
def test_results_changed_in_place_are_not_kept(alias: Callable[[Tensor], Tensor]) -> None:
    equals_one_process(lambda: nn.Sequential(Aliased(alias), Aliased(alias)), "selective")


class Behind(Parts, inner=lambda: Aliased(nn.Identity(), inside=False)):
    """Doubles what a module that runs again returned, which that one had kept."""

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.inner(x)
        return F.relu(h, inplace=True) + y  # type: ignore[no-any-return]


class Later(Parts, seen=0, linear=lambda: nn.Linear(D, D)):
    def forward(self, x: Tensor) -> Tensor:
        self.seen += type(x) is Tensor and torch.is_grad_enabled()
        h = self.linear(x)
        return (h.mul_(2.0) if self.seen % 16 > 2 else h * 2.0).sin()


class Remembers(Parts, linear=lambda: nn.Linear(D, D), known=lambda: {}):
    """Its first run fills a cache by one product more, ahead of its own."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape not in self.known:
            self.known[x.shape] = torch.full((D, D), 0.1, dtype=x.dtype).mm(torch.eye(D, dtype=x.dtype))
        return self.linear(self.linear(x.flatten(0, 1)).tanh() @ self.known[x.shape]).sin().view_as(x)


class Recurrent(Parts, cell=lambda: nn.GRUCell(D, D), gru=lambda: nn.GRU(D, D, batch_first=True)):
    """GRUCell computes in chunks of its products."""

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, 0]
        return self.gru(torch.stack([h := self.cell(each, h) for each in x.unbind(1)], 1))[0]  # type: ignore[no-any-return]


def linear_and_relu() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True), nn.Linear(D, D), nn.ReLU(inplace=True))


def encoders() -> nn.Module:
    """Attention that looks whether query, key and value are one tensor."""
    layer = partial(nn.TransformerEncoderLayer, D, 2, 2 * D, dropout=0.0, batch_first=True)
    return nn.Sequential(*[layer() for _ in range(4)])


KEPT: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "recurrent": (lambda: nn.Sequential(Recurrent(), Recurrent()), "selective", "1f1b"),
    "behind": (lambda: nn.Sequential(Behind(), Behind()), {"*.inner": "selective"}, "1f1b"),
    "behind, split": (lambda: nn.Sequential(Behind(), Behind()), {"*.inner": "selective"}, "zb-h1"),
    "later": (lambda: nn.Sequential(Later(), Later()), "selective", "1f1b"),
    "remembers": (lambda: nn.Sequential(Remembers(), Remembers()), "selective", "1f1b"),
    "one after the other, split": (linear_and_relu, "selective", "zb-h1"),
    "in a unit, split": (lambda: nn.Sequential(linear_and_relu(), linear_and_relu()), "selective", "zb-h1"),
    "attention to itself, selective": (encoders, "selective", "interleaved"),
    "attention to itself, module": (encoders, {"*.self_attn": "full"}, "interleaved"),
    "attention to itself, selective module": (encoders, {"*.self_attn": "selective"}, "zb-h1"),
}


@pytest.mark.thorough(but=["later", "one after the other, split"])
@pytest.mark.parametrize(("make", "recompute", "schedule"), KEPT.values(), ids=KEPT)
def test_kept_results_equal_one_process(make: Callable[[], Any], recompute: Any, schedule: str) -> None:
    equals_one_process(make, recompute, schedule=schedule, atol=1e-14)


class OfStage(Parts, alias=GIVEN, linear=lambda: nn.Linear(D, D)):
    """Changes its input, and no version tells."""

    def forward(self, x: Tensor) -> Tensor:
        self.alias(x).mul_(1.5)
        return self.linear(x).sin()


@pytest.mark.parametrize("alias", ["unsafe_chunk", "data", "set_"])
def test_a_stage_that_runs_again_and_changes_its_input(alias: str) -> None:
    equals_one_process(lambda: nn.Sequential(OfStage(ALIASES[alias]), OfStage(ALIASES[alias])), "full")


class Mixes(Parts, linear=lambda: nn.Linear(D, D)):
    """Takes the stage's own input where a product takes its weight."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.baddbmm(x, h.bmm(h.transpose(1, 2)).softmax(-1), x)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_inputs_are_no_weights_where_the_backward_is_split(recompute: str) -> None:
    equals_one_process(lambda: nn.Sequential(Mixes(), Mixes()), recompute, schedule="zb-h1", atol=1e-14)


class Changes(Parts, linear=lambda: nn.Linear(D, D)):
    def forward(self, x: Tensor, *others: Any, **more: Any) -> Tensor:
        x[..., :3].mul_(2.0)
        h = self.linear(x).sin()
        for other in (*others, *more.values()):
            for each in (other, *vars(other).values()) if isinstance(other, SimpleNamespace) else [other]:
                for y in each if isinstance(each, list) else each.values() if isinstance(each, dict) else [each]:
                    if isinstance(y, Tensor):
                        h = h * y.exp().mean(-1, keepdim=True)
        return h


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "twice": lambda f, h: f(h, h),
    "keyword": lambda f, h: f(h, again=h),
    "nested": lambda f, h: f(h, [h, h], {"x": h}),
    "view": lambda f, h: f(h, h[:, 1:].mean(1, keepdim=True), h.transpose(0, 1).transpose(0, 1)),
    "overlapping views": lambda f, h: f(h[:, 1:], h[:, :-1]),
    "view of what is not given": lambda f, h: f(h[..., 2:].repeat(1, 1, 2)[..., :D], h),
    "no gradient": lambda f, h: f(h, h.detach()),
    "object": lambda f, h: f(h, SimpleNamespace(x=h, y=[h])),
    "changed in an object": lambda f, h: f(*[box := SimpleNamespace(x=h), box.x][1:], box),
    "empty": lambda f, h: f(h, torch.cat([h, h[..., :0]], -1)),
}


class Calls(Parts, call=GIVEN, linear=lambda: nn.Linear(D, D), inner=Changes):
    def forward(self, x: Tensor) -> Tensor:
        return (
            F.pad(y, (0, 0, 0, x.shape[1] - y.shape[1])) if (y := self.call(self.inner, self.linear(x))).numel() else x
        )


@pytest.mark.thorough(but=["nested-full", "view of what is not given-selective", "no gradient-full"])
@pytest.mark.parametrize(("call", "rule"), one_in(2, CALLS, ["full", "selective"]))
def test_inputs_that_share_memory(call: Callable[[Any, Tensor], Tensor], rule: str) -> None:
    equals_one_process(lambda: nn.Sequential(Calls(call), Calls(call)), {"*.inner": rule})


class Drops(Parts, linear=lambda: nn.Linear(D, D)):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * torch.bernoulli(torch.full_like(x, 0.5))
        return F.dropout(h.sin())


def test_a_policy_may_keep_what_was_drawn() -> None:
    """Numbers drawn after it are those of the first run."""
    gradients = []
    for recompute in ("none", lambda _, operator, *args, **kwargs: operator is torch.ops.aten.bernoulli.default):
        model = made(lambda: nn.Sequential(Drops(), Drops()))
        pipeline(model, recompute).forward_backward(X, Y)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


class ChangesLater(Parts, seen=0, linear=lambda: nn.Linear(D, D)):
    def forward(self, x: Tensor) -> Tensor:
        self.seen += type(x) is Tensor and torch.is_grad_enabled()
        h = self.linear(x)
        if self.seen > 2:
            x.mul_(2.0)
        return h.sin() + x


def test_changes_of_an_input_after_it_was_passed_are_refused() -> None:
    model = made(lambda: nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), ChangesLater()))
    pipe = pipeline(model, {"2": "full"}, cut=["1"])
    message = r"module '2' changes an input in place, and did not in its first forward: .*Expected"
    with pytest.raises(ValueError, match=message):
        pipe.forward_backward(X, Y)

    # Plain PyTorch takes it, since nothing of the module needs its input again; a second run does.
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


class Unused(Parts, linear=lambda: nn.Linear(D, D), parts=lambda: nn.ModuleList([nn.Linear(D, D)])):
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


@pytest.mark.thorough(but=["none", "{'*.inner': 'full'}"])
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
