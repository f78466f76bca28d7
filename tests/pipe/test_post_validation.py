"""post_validation=True: the numbers of a run that waits for the norm, to the last bit, however it guessed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.inside import Engine, Sharing, cut_behind_warm_up
from support.pool import Pool
from support.records import records
from torch import Tensor, nn

from stagewright.pipe import PipelineModule, Synchronous
from stagewright.schedules import FAMILIES, Op, build

WIDTH, SAMPLES, M, STEPS = 8, 12, 4, 14
LIMIT = 2.0
# Which batches make large gradients: alone, in a row, the first and the last; and whose alone.
LARGE = {0: None, 3: None, 4: None, 7: 0, 8: 3, 11: 2, 13: None}


class Layer(nn.Module):
    """A linear layer with dropout and running statistics; column 0 of a batch makes one layer's gradients large."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        flags = x[:, :1]
        h = self.dropout(self.norm(self.linear(x[:, 1:]).tanh()))
        large = torch.where(flags == self.number, 1.0, 0.0)
        h = x[:, 1:] + 0.1 * h + large * 1e3 * (self.bias - self.bias.detach())
        return torch.cat([flags, h], dim=1)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(number) for number in range(8)]).double()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output[:, 1:], target.mul_(2))  # in place: a batch that begins again needs what it was


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    x, y = torch.randn(SAMPLES, WIDTH + 1, generator=made), torch.randn(SAMPLES, WIDTH, generator=made)
    x[:, 0] = -1
    y *= 0.1
    if step in LARGE:
        which = LARGE[step]
        y, x[:, 0] = (y * 1000, -1) if which is None else (y, which)
    return x.double(), y.double() / 2


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.8)


def train(
    post_validation: bool, schedule: str, ranks: int, data: int = 1, *, stop: int = STEPS, limit: float = LIMIT
) -> dict[str, Any]:
    made = model()
    pipe = PipelineModule(
        made,
        schedule=Synchronous(schedule, post_validation=post_validation),
        num_microbatches=M,
        loss_fn=loss_fn,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.002),
        lr_scheduler=decay,
        max_grad_norm=limit,
        mesh={"pipe": ranks, "data": data},
    )
    results = []
    for step in range(stop):
        if step == 4:  # the user's own change of a rate, behind a step that is not confirmed yet
            for optimizer in pipe.optimizers:
                optimizer.param_groups[0]["lr"] *= 0.9
        results.append(pipe.train_step(*batch(step)))
        if step == 9:
            pipe.eval_step(*batch(0))
    state = {name: value.clone() for name, value in pipe.state_dict().items()}  # the last update is not confirmed yet
    own = [pipe_optimizer.state_dict() for pipe_optimizer in pipe.optimizers]
    pipe.close()
    norms = [result.grad_norm for result in results]  # what is known stays known
    return {
        "losses": [result.loss for result in results],
        "norms": norms,
        "state": state,
        "optimizers": own,
        "calls": sum(layer.calls for layer in made if isinstance(layer, Layer)),
    }


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-h2"])
def test_to_the_last_bit_whatever_is_clipped(schedule: str) -> None:
    plain, ahead = train(False, schedule, 4), train(True, schedule, 4)
    calls = plain.pop("calls"), ahead.pop("calls")
    assert_same(ahead, plain)
    clipped = [norm > LIMIT for norm in plain["norms"]]
    assert clipped == [step in LARGE for step in range(STEPS)]
    assert calls[1] > calls[0]  # batches began again


@pytest.mark.thorough
def test_over_processes(gloo: Pool) -> None:
    plain, ahead = (gloo.run(train, ranks=4, args=(is_ahead, "interleaved", 2, 2)) for is_ahead in (False, True))
    for one, other in zip(plain, ahead, strict=True):
        assert other.pop("calls") > one.pop("calls")
        assert_same(other, one)


@pytest.mark.thorough
def test_nothing_is_run_twice_where_nothing_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "take_back", lambda *_: pytest.fail("a batch began again"))
    plain, ahead = (train(ahead, "1f1b", 2, stop=4, limit=1e9) for ahead in (False, True))
    assert_same(ahead, plain)


def test_what_cannot_be_taken_back_is_refused() -> None:
    class Counting(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps = self.steps + 1
            return super().step(closure)

    def pipe(**options: Any) -> PipelineModule:
        settings: dict[str, Any] = {
            "num_microbatches": M,
            "loss_fn": loss_fn,
            "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
            "max_grad_norm": LIMIT,
            "mesh": {"pipe": 2},
            "post_validation": True,
        }
        return PipelineModule(model(), **records(**(settings | options)))

    with pytest.raises(ValueError, match=r"Counting changes its attribute 'steps'.*post_validation=False"):
        pipe(optimizer=lambda p: Counting(p, lr=0.1)).train_step(*batch(1))
    with pytest.raises(ValueError, match=r"Synchronous around the schedule '2bw'"):
        pipe(schedule="2bw").train_step(*batch(1))
    with pytest.raises(ValueError, match="post_validation=1: expected True or False"):
        pipe(post_validation=1)
    with pytest.raises(ValueError, match="post_validation=True without an optimizer"):
        pipe(optimizer=None, max_grad_norm=None)


@pytest.mark.thorough
def test_weights_changed_behind_an_update_that_is_not_confirmed() -> None:
    """Clamping between steps would be taken back with the update; behind flush() it is as without post-validation."""

    def pipe(post_validation: bool) -> PipelineModule:
        return PipelineModule(
            model(),
            num_microbatches=M,
            loss_fn=loss_fn,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            max_grad_norm=LIMIT,
            mesh={"pipe": 2},
            schedule=Synchronous(post_validation=post_validation),
        )

    def clamp(pipe: PipelineModule) -> None:
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.clamp_(-0.1, 0.1)

    states = []
    for post_validation in (False, True):
        trained = pipe(post_validation)
        for step in range(2, 6):
            trained.train_step(*batch(step))
            trained.flush()
            clamp(trained)
        states.append(trained.full_state_dict())
    assert_same(states[1], states[0])
    ahead = pipe(True)
    ahead.train_step(*batch(2))
    clamp(ahead)
    for use in (ahead.full_state_dict, ahead.flush, lambda: ahead.train_step(*batch(3))):
        with pytest.raises(ValueError, match=r"parameter '0\..*' was changed in place.*expected pipe\.flush\(\)"):
            use()


def test_a_step_that_writes_into_its_gradients() -> None:
    class Writing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
            return super().step(closure)

    states = []
    for post_validation in (False, True):
        pipe = PipelineModule(
            model(),
            num_microbatches=M,
            loss_fn=loss_fn,
            optimizer=lambda p: Writing(p, lr=0.1, momentum=0.9),
            max_grad_norm=LIMIT,
            mesh={"pipe": 2},
            schedule=Synchronous(post_validation=post_validation),
        )
        for step in range(1, 9):
            pipe.train_step(*batch(step))
        states.append(pipe.full_state_dict())
    assert_same(states[1], states[0])


@pytest.mark.parametrize("name", [name for name, each in FAMILIES.items() if not each.rule.is_asynchronous])
def test_a_warm_up_holds_forwards_alone_and_waits_for_no_more(name: str) -> None:
    """`cut_behind_warm_up` proves the rest; here that it takes what it can, and what is left on the links."""
    schedule = build(name, num_ranks=2, num_microbatches=4)
    cut = cut_behind_warm_up(schedule, sharing=Sharing(loss=True))
    for rank, (first, rest) in enumerate(zip(cut.first, cut.rest, strict=True)):
        actions = [step for step in first.steps if step in schedule.programs[rank]]
        assert actions
        assert {action.op for action in actions} == {Op.F}
        later = [step for step in rest.steps if step in schedule.programs[rank]]
        assert (*actions, *later) == schedule.programs[rank]
        taken = {message for messages in first.inputs.values() for message in messages}
        assert taken.isdisjoint(transfer.message for transfer, _ in cut.under_way[rank])
