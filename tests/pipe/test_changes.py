"""Values that code between the modules reads may change between two batches: they count from the next one on."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.failing import refusal
from support.inside import GuardsChanges as Changes
from support.parts import Does, Parts
from support.pool import Pool
from support.small import WIDTH, X, Y, layers, make, stream
from torch import Tensor, nn


class Block(Parts, linear=lambda: nn.Linear(WIDTH, WIDTH), gain=1.0, count=0):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.linear(x)


class Scale(nn.Module):
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Net(nn.Module):
    """Reads attributes between its blocks: all that one may read so is in test_fuzz.py."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.options, self.weight = (
            nn.ModuleList(Block() for _ in range(4)),
            {"alpha": 1.0},
            torch.ones(()),
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * block.gain
        return x * self.options["alpha"] * float(self.weight * 1.0)


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "module": (lambda m: m.blocks.append(Block()), "module 'blocks.4' runs now and did not when the stages were built"),
    "module without parameters": (lambda m: m.blocks.append(Scale()), "module 'blocks.4' runs now and did not"),
    "one less": (lambda m: m.blocks.pop(3), "module 'blocks.3' does not run now and did when"),
    "hook": (
        lambda m: m.register_full_backward_hook(lambda *_: None),
        r"the model has hooks \(backward hooks\): .* expected",
    ),
}


@pytest.mark.thorough(but=["one less", "hook"])
@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_stage_could_run_is_refused(change: Callable[[Any], object], message: str) -> None:
    model = Net()
    pipe = make(model=model)
    pipe.train_step(X, Y)
    pipe.eval_step(X, Y)
    change(model)
    for call in (pipe.eval_step, pipe.train_step):
        with pytest.raises(ValueError, match=f"(?i){message}"):
            call(X, Y)


def test_values_and_methods_of_the_class_count_from_the_next_batch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    pipe = make(model=model, optimizer=None)
    for change in (
        lambda: None,
        lambda: model.weight.fill_(0.3),
        lambda: monkeypatch.setattr(
            Net, "forward", lambda own, x: own.blocks[3](own.blocks[2](own.blocks[1](own.blocks[0](x))))
        ),
    ):
        change()
        assert pipe.forward_backward(X, Y).loss == pytest.approx(F.mse_loss(model(X), Y).item(), rel=1e-5)


@pytest.mark.parametrize("stages", [False, True])
def test_a_module_that_is_added_to_a_chain_is_refused(stages: bool) -> None:
    chains = [nn.Sequential(Block(), Block()) for _ in range(2)]
    whole = nn.Sequential(*chains[0], *chains[1])
    pipe = make(stages=chains) if stages else make(model=whole)
    pipe.train_step(X, Y)
    chain: Any = chains[1] if stages else whole
    name = "1.2" if stages else "4"
    chain.append(Block())
    for call in (pipe.eval_step, pipe.train_step):
        with pytest.raises(ValueError, match=f"module '{name}' was added to an nn.Sequential whose children run in"):
            call(X, Y)
    del chain[-1]
    pipe.train_step(X, Y)


def test_a_module_within_a_unit_may_be_added() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(4)])
    pipe = make(model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    pipe.train_step(X, Y)
    model[2].append(nn.Tanh())
    assert pipe.train_step(X, Y).loss == pytest.approx(F.mse_loss(model(X), Y).item(), abs=1e-6)


def test_an_attribute_that_takes_turns_is_recorded_once_for_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    model, values = Net(), []
    pipe = make(model=model)
    monkeypatch.setattr(Changes, "note", lambda self, inputs, paths: values.extend(paths))
    for alpha in (0.5, 1.0, 0.5, 1.0, 0.5):
        model.options["alpha"] = alpha
        pipe.train_step(X, Y)
    assert values == ["model.options['alpha']"]


HOOKS = {
    "register_module_forward_hook": lambda module, args, output: output * 1.25,
    "register_module_forward_pre_hook": lambda module, args: (args[0] * 1.25,),
}


@pytest.mark.thorough(but=["register_module_forward_hook-False"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_all_modules_are_those_of_plain_pytorch(kind: str, late: bool) -> None:
    """Around the modules that run as they are, and the model itself; not around what stages are made of."""
    model = Net().double()
    pipe = make(model=model, example_inputs=(X.double(),)) if late else None
    if pipe is not None:
        pipe.eval_step(X.double(), Y.double())
    handle = getattr(torch.nn.modules.module, kind)(HOOKS[kind])
    try:
        pipe = pipe or make(model=model, example_inputs=(X.double(),))
        expected = F.mse_loss(model(X.double()), Y.double()).item()
        assert pipe.eval_step(X.double(), Y.double()).loss == pytest.approx(expected, rel=1e-12)
        assert pipe.train_step(X.double(), Y.double()).loss == pytest.approx(expected, rel=1e-12)
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_on_all_modules_that_a_chain_would_miss_is_refused(kind: str) -> None:
    """One that spares the chain itself, or only looks, is none."""
    model, seen = nn.Sequential(*[Block() for _ in range(4)]), []
    pipe = make(model=model)
    pipe.train_step(X, Y)
    register = getattr(torch.nn.modules.module, kind)
    for hook, is_refused in (
        (HOOKS[kind], True),
        (lambda module, *args: seen.append(type(module)), False),
        (lambda module, *args: None if module is model else HOOKS[kind](module, *args), False),
    ):
        handle = register(hook)
        try:
            expected = F.mse_loss(model(X), Y).item()
            seen.clear()
            with pytest.raises(ValueError, match="a hook on all modules") if is_refused else nullcontext():
                assert pipe.train_step(X, Y).loss == pytest.approx(expected, rel=1e-5)
            assert set(seen) <= {Block, nn.Linear}
        finally:
            handle.remove()


def test_a_hook_that_changes_gradients_of_all_modules_is_refused() -> None:
    """Recorded code has no backward of its own."""
    pipe = make(model=Net())
    pipe.train_step(X, Y)
    handle = torch.nn.modules.module.register_module_full_backward_hook(
        lambda m, given, out: tuple(g * 2 for g in given)
    )
    try:
        with pytest.raises(ValueError, match=r"a hook on all modules \(backward hook\) changes gradients of the model"):
            pipe.train_step(X, Y)
    finally:
        handle.remove()
    pipe.train_step(X, Y)


class Counts(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.options["calls"] = calls = self.options.get("calls", 0) + 1
        return super().forward(x) / calls


def test_a_counter_in_a_dict_of_the_model_is_not_frozen() -> None:
    model = Counts()
    model.options["calls"] = 0
    with pytest.raises(ValueError, match=r"attribute \"options\['calls'\]\" of the model is changed by its own"):
        make(model=model)


class PlainNet(Parts, one=lambda: nn.Linear(WIDTH, WIDTH), two=lambda: nn.Linear(WIDTH, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu()) * 0.5


ANY: dict[str, tuple[Callable[[Any], object], str]] = {
    "a parameter": (
        lambda m: setattr(next(m.children()), "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH))),
        r"weight' is another object than when the stages were built: expected the same parameters and submodules",
    ),
    "a submodule": (
        lambda m: setattr(m, next(iter(m._modules)), nn.Linear(WIDTH, WIDTH)),
        r"is another object than when the stages were built",
    ),
}


@pytest.mark.thorough(but=["layers-1f1b-a parameter"])
@pytest.mark.parametrize(("change", "message"), ANY.values(), ids=ANY)
@pytest.mark.parametrize(("kind", "schedule"), [(PlainNet, "1f1b"), (layers, "1f1b"), (layers, "2bw")])
def test_another_object_than_what_was_built_is_refused(change: Any, message: str, kind: Any, schedule: str) -> None:
    model = kind()
    pipe = make(model=model, schedule=schedule)
    pipe.train_step(X, Y)
    pipe.eval_step(X, Y)
    change(model)
    with pytest.raises(ValueError, match=message):
        pipe.train_step(X, Y)


def test_unfreezing_is_refused_by_name() -> None:
    for begin in (make, stream):
        model = layers()
        model[0].requires_grad_(False)
        pipe = begin(model=model)
        pipe.train_step(X, Y)
        pipe.flush()
        model[0].requires_grad_(True)
        pipe.eval_step(X, Y)
        message = r"parameter '0.weight' requires a gradient and did not when the stages were"
        with pytest.raises(ValueError, match=message):
            pipe.train_step(X, Y)


def _change_a_rate(who: list[int], data: int) -> str:
    torch.manual_seed(0)
    pipe = make(mesh={"pipe": 2, "data": data}, model=layers(), optimizer=torch.optim.AdamW)
    pipe.train_step(X, Y)
    if pipe.rank in who:
        for optimizer in pipe.optimizers:
            optimizer.param_groups[0]["lr"] *= 0.5
    with pipe:
        return refusal(lambda: (pipe.train_step(X, Y), pipe.train_step(X, Y)))


@pytest.mark.thorough
def test_learning_rates_that_differ_between_copies_are_refused(gloo: Pool) -> None:
    assert gloo.run(_change_a_rate, ranks=4, args=([0, 1, 2, 3], 2)) == [""] * 4
    assert gloo.run(_change_a_rate, ranks=2, args=([0], 1)) == [""] * 2  # stages of their own may have their own rates
    answers = gloo.run(_change_a_rate, ranks=4, args=([0, 2], 2))
    assert all("their optimizers have different options for '0.weight', '0.bias'" in answer for answer in answers[:2])
    assert all("their optimizers have different options for '3.weight', '3.bias'" in answer for answer in answers[2:])


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


CASES: dict[str, dict[str, Any]] = {
    "all frozen": {"model": lambda: frozen(layers())},
    "no parameters": {"model": lambda: nn.Sequential(nn.Tanh(), nn.ReLU())},
    "detached": {"model": lambda: nn.Sequential(*layers(), Does(Tensor.detach))},
    "2bw": {"model": lambda: frozen(layers()), "schedule": "2bw"},
    "full": {"model": lambda: frozen(layers()), "recompute": "full"},
    "no optimizer": {"model": lambda: frozen(layers()), "optimizer": None},
    "a loss that learns no more": {"model": lambda: frozen(layers()), "loss_fn": frozen(nn.HuberLoss())},
}


@pytest.mark.parametrize("case", CASES)
def test_a_batch_that_trains_nothing_is_refused(case: str) -> None:
    options = CASES[case]
    pipe = make(**options | {"model": options["model"]()})
    train = pipe.train_step if options.get("optimizer", 0) is not None else pipe.forward_backward
    with pytest.raises(ValueError, match=r"nothing to train: .* plain PyTorch would raise in loss.backward\(\)"):
        train(X, Y)
    assert pipe.eval_step(X, Y).loss is not None


def test_what_is_frozen_later_is_refused_too() -> None:
    model = layers()
    pipe = make(model=model)
    pipe.train_step(X, Y)
    frozen(model)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        pipe.train_step(X, Y)
    model.requires_grad_(True)
    pipe.train_step(X, Y)


def test_a_frozen_first_stage_and_a_loss_that_alone_learns_are_fine() -> None:
    model = layers()
    frozen(model[:3])
    make(model=model).train_step(X, Y)
    scale = torch.ones(WIDTH, requires_grad=True)
    pipe = make(model=frozen(layers()), optimizer=None, loss_fn=lambda output, y: F.mse_loss(output * scale, y))
    pipe.forward_backward(X, Y)
    assert scale.grad.abs().sum() > 0


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"schedule": "2bw"}], ids=str)
def test_a_count_that_wants_a_gradient_is_refused(options: dict[str, Any]) -> None:
    def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        weight = output.detach().sigmoid() if is_detached else output.sigmoid()
        return (weight * (output - target) ** 2).sum(), weight.sum()

    is_detached = False
    with pytest.raises(ValueError, match=r"count that requires a gradient, .* count.detach\(\)"):
        make(loss_fn=weighted, **options).train_step(X, Y)
    is_detached = True
    make(loss_fn=weighted, **options).train_step(X, Y)
