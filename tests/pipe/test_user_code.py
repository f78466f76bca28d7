"""User code in stages behaves as in plain PyTorch: compared with one plain process in float64."""

import random
import threading
import traceback
import types
from collections import UserList
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import small
from support.alone import near
from support.parts import GIVEN, Parts
from support.plain import MICROBATCHES, STEPS, WIDTH, Make, agree, between_layers, linear, piped, plain
from support.reference import mix
from support.small import X, Y, layers, make
from torch import Tensor, nn

from stagewright.pipe import PipelineModule


class Masked(Parts, sizes=lambda: torch.tensor([2, 4])):
    def forward(self, x: Tensor) -> Tensor:
        positive = x[x > 0]
        top = float(x.detach().abs().max())
        left, right = x.split(self.sizes.tolist(), dim=-1)
        again = torch.from_numpy(x.detach().numpy() * 1.0)
        return torch.cat([right, left], -1) + positive.mean() / (1 + top) + again


READ_VALUES: dict[str, Callable[[], nn.Module]] = {
    "masks": Masked,
    "cumulative statistics": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
}


@pytest.mark.thorough(but=["cumulative statistics-none"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("middle", READ_VALUES.values(), ids=READ_VALUES)
def test_code_that_reads_values(middle: Callable[[], nn.Module], recompute: str) -> None:
    agree(between_layers(middle), recompute=recompute)
    agree(lambda: nn.Sequential(linear(), linear(), middle(), linear()), recompute=recompute)


class Selects(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0]


def test_shapes_that_follow_from_values_are_refused_where_they_travel() -> None:
    with pytest.raises(ValueError, match=r"output 0 of stage 0 .* when shapes were inferred: expected a module whose"):
        piped(lambda: nn.Sequential(linear(), Selects(), linear()))


class Draws(Parts, linear=linear, strength=1.0):
    """Augments with all three generators, as much as `strength` says."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if not self.strength or not self.training:
            return x
        if random.random() < 0.5:
            x = x + random.gauss(0, 1)
        if np.random.rand() < 0.5:
            x = x * np.random.randn()
        return x + self.strength * torch.randn_like(x)


class LayerDrop(Parts, blocks=lambda: nn.ModuleList(linear() for _ in range(4)), dropped=0):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and random.random() < 0.5:
                self.dropped += 1
                continue
            x = torch.tanh(block(x))
        return x


def drawing() -> nn.Sequential:
    return nn.Sequential(linear(), Draws(), LayerDrop(), nn.Dropout(0.3), Draws(), LayerDrop())


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output * (1 + 0.1 * random.random() + 0.1 * np.random.rand()), target + torch.randn(()))


def by_hand(make: Make, loss_fn: Any) -> tuple[Any, list[float]]:
    """One plain process that seeds each child of the model, and the loss, by itself."""
    microbatches = product(range(STEPS), range(MICROBATCHES))

    def loss_of(model: Any, h: Tensor, target: Tensor) -> Any:
        at = next(microbatches)
        for unit, child in enumerate(model):
            seed_all(mix(0, *at, unit))
            h = child(h)
        seed_all(mix(0, *at, -1))
        return loss_fn(h, target)

    return plain(make, loss_of=loss_of)


def seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


ANY_CUT: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": {"pipe": 1}, "cut": None},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved", "num_chunks": 2, "cut": ["1", "2", "5"]},
    "recompute": {"recompute": "full"},
}


@pytest.mark.thorough(but=["gpipe"])
@pytest.mark.parametrize("options", ANY_CUT.values(), ids=ANY_CUT)
def test_random_numbers_of_any_kind_are_the_same_on_any_cut(options: dict[str, Any]) -> None:
    """And the user's own generators stand where they stood."""
    wanted, losses = by_hand(drawing, noisy_loss)
    seed_all(7)
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    def check(model: Any, step: int) -> None:
        if step == 0:
            seed_all(7)
        assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == states

    model, found = piped(drawing, check, loss_fn=noisy_loss, **options)
    check(model, STEPS)
    near([found, model.state_dict()], [losses, wanted.state_dict()])
    assert sum(m.dropped for m in model.modules() if isinstance(m, LayerDrop)) == (
        sum(m.dropped for m in wanted.modules() if isinstance(m, LayerDrop)) * (2 if options.get("recompute") else 1)
    )


class Drawn(Parts, draws=False, seen=lambda: []):
    def forward(self, x: Tensor) -> Tensor:
        if self.draws:
            self.seen.append((torch.is_grad_enabled(), random.random(), np.random.rand()))
        return x + self.seen[-1][1] if self.draws else x


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_unit_that_begins_to_draw_later_is_seeded_from_the_next_batch_on(recompute: str) -> None:
    """In its first batch, too, a second run draws what the first one drew."""
    first: list[Any] = []

    def switch(model: Any, step: int) -> None:
        model[1].draws = step > 0
        if step == 2:
            first.extend(model[1].seen)
            model[1].seen.clear()

    with pytest.warns(UserWarning, match="the model drew from .* random numbers, and did not when its stages were"):
        model, _ = piped(lambda: nn.Sequential(linear(), Drawn(), linear()), switch, recompute=recompute)
    for k in range(MICROBATCHES):
        seed_all(mix(0, 2, k, 1))
        drawn = [draw[1:] for draw in model[1].seen]
        assert drawn.count((random.random(), np.random.rand())) == 1 + (recompute == "full")
    if recompute == "full":
        runs = [{draw[1:] for draw in first if draw[0] is again} for again in (False, True)]
        assert runs[0] == runs[1]
        assert len(runs[0]) == MICROBATCHES


class Sometimes(Parts, linear=linear, decide=GIVEN, uses=False, count=0):
    """All of a stage's parameters are used in some microbatches alone."""

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return torch.tanh(self.linear(x)) if self.decide(self, x) else x


DECISIONS: dict[str, Callable[[Any, Tensor], bool]] = {
    "a value": lambda m, x: bool(x.sum() < 0),
    "rarely, by chance": lambda m, x: random.random() < 0.1,
    "by chance": lambda m, x: random.random() < 0.9,
}


@pytest.mark.thorough(but=["rarely, by chance-none"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("decide", DECISIONS.values(), ids=DECISIONS)
def test_what_is_used_now_and_then_is_trained_then(decide: Callable[[Any, Tensor], bool], recompute: str) -> None:
    """The build's one run must not decide for all whether gradients flow to a stage."""

    def make() -> nn.Sequential:
        return nn.Sequential(Sometimes(decide), linear(), Sometimes(decide), linear())

    wanted, losses = by_hand(make, F.mse_loss)
    model, found = piped(make, recompute=recompute, mesh={"pipe": 3}, cut=["1", "2"])
    near([found, model.state_dict()], [losses, wanted.state_dict()])


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "decide", [lambda m, x: m.uses, lambda m, x: m.count > MICROBATCHES], ids=["an attribute", "a counter"]
)
def test_what_is_used_later_by_an_attribute_is_refused(decide: Callable[[Any, Tensor], bool], recompute: str) -> None:
    """Nothing would carry a gradient to it: it stayed as it was without a word."""

    def use(model: Any, step: int) -> None:
        model[0].uses = step > 0

    with pytest.raises(ValueError, match=r"output 0 of stage 0 \(0\) requires a gradient and did not when the stages"):
        piped(lambda: nn.Sequential(Sometimes(decide), linear()), use, recompute=recompute, cut=["1"])


class Failing(Parts, layer=linear, is_broken=False):
    """Raises an error of its own in the real run, from a function of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.checked(x))

    def checked(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_broken:
            raise KeyError("mine")
        return x


@pytest.mark.parametrize("whole", [False, True])
def test_an_error_of_the_users_code_shows_that_code_and_none_of_ours(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEWRIGHT_TRACEBACK", "full" if whole else "")
    failing = Failing()
    pipe = make(model=nn.Sequential(failing, layers(1)), optimizer=torch.optim.SGD, verify=False)
    batch = X, Y
    pipe.train_step(*batch)
    failing.is_broken = True
    for call, kind in ((pipe.train_step, KeyError), (pipe.eval_step, ValueError)):
        with pytest.raises(kind, match="mine") as raised:  # the second when it is tried on fake tensors
            call(*batch)
        error = raised.value.__cause__ or raised.value
        frames = traceback.extract_tb(error.__traceback__)
        assert [frame.name for frame in frames if frame.filename == __file__][-2:] == ["forward", "checked"]
        ours = [frame.filename for frame in frames if "/pipe/" in frame.filename and frame.filename != __file__]
        assert bool(ours) == whole
        assert whole or "of stagewright are left out above" in error.__notes__[0]
    failing.is_broken = False
    with pytest.raises((RuntimeError, ValueError)) as by_torch:
        pipe.predict(torch.randn(4, 7))  # no frame of the user's is below ours: all of them stay
    files = [frame.filename for frame in traceback.extract_tb(by_torch.value.__traceback__)]
    assert any(file.endswith("pipe/module.py") for file in files)


class Doubled(torch.autograd.Function):
    """Recording listens to these, whoever calls them."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 2


class Noisy(Parts, first=lambda: layers(2), last=lambda: layers(2), drop=lambda: nn.Dropout(0.5)):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(Doubled.apply(torch.tanh(self.first(x)))))


def losses(model: nn.Module, seed: int) -> list[float]:
    pipe: PipelineModule = make(model=model, seed=seed, example_inputs=None)
    return [pipe.train_step(X, Y).loss for _ in range(4)]


@pytest.mark.thorough
def test_pipelines_in_threads_train_as_one_after_the_other() -> None:
    torch.manual_seed(0)
    models = [[Noisy() for _ in range(4)] for _ in range(2)]
    for one, other in zip(*models, strict=True):
        other.load_state_dict(one.state_dict())
    expected = [losses(model, seed) for seed, model in enumerate(models[0])]
    found: dict[int, list[float]] = {}
    stop, mine = threading.Event(), torch.ones(2, small.WIDTH, requires_grad=True)

    def run(seed: int) -> None:
        found[seed] = losses(models[1][seed], seed)

    def plain() -> None:  # a thread of the user's own, beside
        while not stop.is_set():
            Doubled.apply(mine)

    beside = threading.Thread(target=plain)
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in (beside, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    beside.join()
    assert [found.get(seed) for seed in range(4)] == expected


class Peeking(Parts, first=lambda: layers(2), last=lambda: layers(2)):
    """Its forward keeps what a thread holds that has entered Function.apply now, and goes on when all is over."""

    def forward(self, x: Tensor) -> Tensor:
        apply = torch.autograd.Function.__dict__["apply"].__func__
        ENTERED.append(types.FunctionType(apply.__code__, apply.__globals__, "apply", None, apply.__closure__))
        return self.last(Doubled.apply(self.first(x)))


ENTERED: UserList[Any] = UserList()  # functions of the code that stood in; a plain list would be put back


@pytest.mark.parametrize("again", [False, True])
def test_a_thread_that_entered_a_custom_function_while_a_model_was_recorded_goes_on_behind_it(again: bool) -> None:
    ENTERED.clear()
    plain = torch.autograd.Function.__dict__["apply"].__func__.__code__
    make(model=Peeking(), example_inputs=None).train_step(X, Y)
    if again:
        make(model=Peeking(), example_inputs=None).train_step(X, Y)
    assert torch.autograd.Function.__dict__["apply"].__func__.__code__ is plain
    x = torch.ones(2, requires_grad=True)
    entered = [apply for apply in ENTERED if apply.__code__ is not plain]
    assert entered
    for apply in entered:
        apply(Doubled, x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2,), 2.0 * len(entered)))
