"""Optimizers over named parameters, several of them a stage, and schedules of their rates, against one plain process.

The replay of support/async_reference.py knows no stages: it makes the same optimizers once, of all named parameters.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.alone import train_piped
from support.async_pipeline import run
from support.async_reference import UNEVEN, AsyncCase, agree
from support.failing import refusal
from support.grids import one_in
from support.inside import SameOptions
from support.pool import Pool
from support.small import X, Y, layers, make, sgd, stream
from torch import nn

import stagewright
from stagewright.comm import PeerLost
from stagewright.pipe import PipelineModule

RULES: dict[str, dict[str, Any]] = {name: {"schedule": name} for name in ("1f1b", "2bw", "pipedream")}
RULES["pipedream-k2"] = {"schedule": "pipedream", "update_every": 2}


def check(**options: Any) -> None:
    settings: dict[str, Any] = {"task": "conv-norm", "num_ranks": 3, "sizes": UNEVEN[:4]}
    case = AsyncCase(**(settings | options))
    agree(run(case), case)


@pytest.mark.thorough(but=["1f1b-('rates-by-name', 'conv-norm')"])
@pytest.mark.parametrize(
    ("rule", "optimizer_and_task"), one_in(2, RULES, [("rates-by-name", "conv-norm"), ("muon", "mlp")])
)
def test_groups_and_several_optimizers(rule: dict[str, Any], optimizer_and_task: tuple[str, str]) -> None:
    optimizer, task = optimizer_and_task
    check(task=task, optimizer=optimizer, decay=True, flushes=(2,), **rule)


@pytest.mark.thorough(but=["no-parameters-1f1b"])
@pytest.mark.parametrize(
    ("options", "schedule"),
    one_in(
        2,
        {
            "replicas": {"replicas": (2, 1), "num_ranks": 3, "decay": True},
            "tied": {"task": "small-tied"},
            "clipped": {"max_grad_norm": 0.05},
            "no-parameters": {"task": "mlp", "num_ranks": 4, "bounds": (1, 3, 6)},  # in one of the stages
        },
        ("2bw", "1f1b"),
    ),
)
def test_groups_with(schedule: str, options: dict[str, Any]) -> None:
    check(schedule=schedule, optimizer="rates-by-name", **options)


@pytest.mark.thorough(but=["1f1b-('cyclic', 'momentum')", "pipedream-('plateau', 'momentum')"])
@pytest.mark.parametrize(
    ("rule", "decay_and_optimizer"),
    one_in(
        2,
        RULES,
        [("plateau", "momentum"), ("one-cycle", "adamw"), ("cyclic", "momentum"), ("sequential", "rates-by-name")],
    ),
)
def test_schedules(rule: dict[str, Any], decay_and_optimizer: tuple[str, str]) -> None:
    """Those of one cycle change momentum and betas, too; a plateau takes the batch's loss."""
    decay, optimizer = decay_and_optimizer
    check(task="mlp", optimizer=optimizer, decay=decay, **rule)


@pytest.mark.parametrize("begin", [make, stream])
@pytest.mark.filterwarnings("default")
def test_a_parameter_that_no_optimizer_holds_stays_and_is_told_once(begin: Any) -> None:
    def weights(parameters: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        return [sgd([p for name, p in parameters if not name.endswith("bias")])]

    model = layers()
    message = r"holds '0.bias', .*'4.bias' and 1 more: train_step does not update them"
    with pytest.warns(UserWarning, match=message) as told:
        pipe = begin(model=model, optimizer=stagewright.named(weights), max_grad_norm=1e-3)
    assert len(told) == 1
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    norms = []
    for _ in range(3):
        norms.append(pipe.train_step(X, Y).grad_norm)
        pipe.flush()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name]) is name.endswith("bias"), name
    # What an earlier batch left on a bias would make the norm grow by half and more.
    assert max(norm for norm in norms if norm) < 1.2 * min(norm for norm in norms if norm)
    pipe.verify(X, Y)


def test_a_stage_without_an_optimizer_of_a_kind() -> None:
    """None in the list; an optimizer of no parameters is refused, and says so."""

    def halves(parameters: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer | None]:
        first = [p for name, p in parameters if name.startswith("0.")]
        others = [p for name, p in parameters if not name.startswith("0.")]
        return [torch.optim.AdamW(first) if first else None, torch.optim.SGD(others, lr=0.1)]

    pipe = make(optimizer=stagewright.named(halves))
    assert [type(optimizer).__name__ for optimizer in pipe.optimizers] == ["AdamW", "SGD", "SGD"]
    pipe.train_step(X, Y)
    message = r"an optimizer of no parameters for stage 1 \(3 .. 5\).* Expected None in its"
    with pytest.raises(ValueError, match=message):
        make(optimizer=stagewright.named(lambda named: sgd([p for n, p in named if n.startswith("0.")])))


def test_a_frozen_stage_calls_no_factory() -> None:
    model = layers()
    model[:3].requires_grad_(False)
    called: list[list[str]] = []

    def factory(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        called.append([name for name, _ in parameters])
        return torch.optim.SGD(parameters, lr=0.1)

    make(model=model, optimizer=stagewright.named(factory)).train_step(X, Y)
    assert called == [["3.weight", "3.bias", "4.weight", "4.bias", "5.weight", "5.bias"]]


class NeedsLoss(torch.optim.SGD):
    """Like LBFGS: its step asks for more than gradients."""

    def step(self, loss: float) -> None:  # type: ignore[override]
        raise AssertionError(loss)


WHOLE = layers()
REFUSED: dict[str, tuple[Any, str]] = {
    "a list with something else": (lambda params: [sgd(params), "sgd"], "returned a list with a str: expected"),
    "a closure": (torch.optim.LBFGS, r"optimizer LBFGS evaluates the model again in its step .* such as AdamW"),
    "a closure of another name": (lambda params: NeedsLoss(params, lr=0.1), r"optimizer NeedsLoss evaluates the model"),
    "held by two optimizers": (
        lambda params: [sgd(params), sgd(params[-1:])],
        r"parameter '2.bias' of stage 0 \(0 .. 2\) is held twice by what optimizer= returned: expected each",
    ),
    "another stage's": (
        lambda params: sgd(list(WHOLE.parameters())),
        r"optimizer SGD holds a parameter of shape \(6, 6\) that it was not given, one of the model's, but not",
    ),
}


@pytest.mark.thorough(but=["a closure of another name-make", "held by two optimizers-make"])
@pytest.mark.parametrize("begin", [make, stream])
@pytest.mark.parametrize(("optimizer", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(begin: Any, optimizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        begin(model=WHOLE, optimizer=optimizer)


class Joined(torch.optim.SGD):
    """SGD whose step is multiplied by a number made of all of its parameters. `kept` may stay from step to step."""

    def __init__(self, parameters: Any, joins: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.joins, self.kept, self.calls = joins, 0.0, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        factor = self.joins(self, held)
        for p in held:
            noise = self.state[p]["noise"] = torch.rand_like(p)
            p.add_(p.grad / p.grad.norm() + 0.0 * noise, alpha=-factor)


def norm(tensors: Any) -> float:
    return float(nn.utils.get_total_norm(list(tensors)))


def lagging(optimizer: Joined, held: list[nn.Parameter]) -> float:
    before, optimizer.kept = optimizer.kept, max(optimizer.kept, norm(p.grad for p in held))
    return before


JOINS: dict[str, Any] = {
    "clip": lambda _, held: min(1.0, 0.01 / norm(p.grad for p in held)),
    "threshold": lambda _, held: min(1.0, 1000.0 / norm(p.grad for p in held)),
    "weights": lambda _, held: norm(held),
    "a step later": lagging,
}


@pytest.mark.thorough(but=["make-threshold"])
@pytest.mark.parametrize("joins", JOINS)
@pytest.mark.parametrize("begin", [make, stream])
def test_a_statistic_over_all_parameters_is_refused(begin: Any, joins: str) -> None:
    """Each stage's optimizer saw its own stage alone, in silence, `verify=True` included."""
    pipe = begin(optimizer=lambda parameters: Joined(parameters, JOINS[joins]))
    with pytest.raises(ValueError, match=r"the step of optimizer Joined computes .* several parameters.* or one stage"):
        pipe.train_step(X, Y)
    make(optimizer=lambda ps: Joined(ps, JOINS[joins]), mesh={"pipe": 1}).train_step(X, Y)
    of_one_each = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(2)])
    with pytest.raises(ValueError, match="the step of optimizer Joined computes something"):
        make(model=of_one_each, optimizer=lambda ps: Joined(ps, JOINS["clip"])).train_step(X, Y)


def test_a_hook_that_clips_each_stage_by_itself_is_refused() -> None:
    def clipping(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, 1.0) and None)
        return optimizer

    with pytest.raises(ValueError, match=r"a hook before the step of optimizer AdamW .* Expected max_grad_norm= or"):
        make(optimizer=clipping).train_step(X, Y)


BY_POSITION: dict[str, Any] = {
    "rates by layer": lambda ps: torch.optim.SGD([{"params": [p], "lr": 0.1 * 0.9**i} for i, p in enumerate(ps)]),
    "rate by count": lambda ps: torch.optim.SGD(ps, lr=1 / len(ps)),
    "the last one apart": lambda ps: [sgd(ps[:-1]), torch.optim.Adam(ps[-1:])],
    "rates by chance": lambda ps: torch.optim.SGD([{"params": [p], "lr": float(torch.rand(()))} for p in ps]),
}


@pytest.mark.thorough(but=["make-rates by layer"])
@pytest.mark.parametrize("position", BY_POSITION)
@pytest.mark.parametrize("begin", [make, stream])
def test_options_by_a_parameters_position_are_refused(begin: Any, position: str) -> None:
    """Each stage's parameters were counted from 0 again, in silence, `verify=True` included."""
    pipe = begin(optimizer=BY_POSITION[position])
    with pytest.raises(ValueError, match=r"optimizer= gives .* other options when called with the parameters of st"):
        pipe.train_step(X, Y)


ALIKE: dict[str, Any] = {
    "how by count": lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=len(ps) > 6),  # of a stage: 6
    "labels": lambda ps: torch.optim.SGD([{"params": [p], "lr": 0.1, "index": i} for i, p in enumerate(ps)]),
    "a rate of its own each time": lambda ps, made=[]: (made.append(1), torch.optim.SGD(ps, lr=0.1 * len(made)))[1],
}


@pytest.mark.parametrize("options", ALIKE)
def test_options_that_decide_no_update_or_are_not_by_position_are_taken(options: str) -> None:
    make(optimizer=ALIKE[options]).train_step(X, Y)


def test_a_rate_that_changes_after_the_pipeline_was_made_is_not_one_by_position() -> None:
    pipes = [make(optimizer=lambda ps: torch.optim.SGD(ps, lr=rate)) for rate in (0.1, 0.01)]  # noqa: B023
    for pipe in pipes:
        pipe.train_step(X, Y)


def test_options_by_shape_or_identity_and_a_warm_up_are_those_of_all_parameters() -> None:
    """All parameters are asked about before any step, and leave no trace."""
    model, made = layers(), []
    known = {id(p) for p in model[4].parameters()}

    def optimizer(ps: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [[p for p in ps if id(p) in known], [p for p in ps if p.ndim == 1 and id(p) not in known]]
        groups.append([p for p in ps if p.ndim == 2 and id(p) not in known])
        made.append(torch.optim.SGD([{"params": g, "lr": (i + 1) / 10} for i, g in enumerate(groups) if g]))
        return made[-1]

    warm = make(model=model, optimizer=optimizer, lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, float))
    warm.train_step(X, Y)
    assert made == list(warm.optimizers)


def test_an_optimizer_that_is_tried_notices_nothing_and_one_that_cannot_is_told_of() -> None:
    """One of its own for each parameter, with noise, a hook and a warm-up from 0; weights are moved as ever."""
    counted: list[int] = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = Joined(parameters, lambda *_: 0.1)
        made.register_step_pre_hook(lambda *_: counted.append(1))
        return made

    warm = make(optimizer=optimizer, lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step))
    pipe = make(optimizer=optimizer)
    before = torch.get_rng_state()
    for each in (warm, pipe):
        each.forward_backward(X, Y)
    assert torch.equal(torch.get_rng_state(), before)
    assert [(one.calls, len(one.state)) for one in pipe.optimizers] == [(0, 0)] * 2  # type: ignore[attr-defined]
    pipe.train_step(X, Y)
    assert len(counted) == 2

    class Large(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            assert self.param_groups[0]["params"][0].shape == (6, 6)

    with pytest.warns(UserWarning, match=r"Large cannot be tried .* set Large\.separable = 'parameters'"):
        make(optimizer=lambda parameters: Large(parameters, lr=0.1)).train_step(X, Y)


def test_a_schedule_that_needs_more_than_the_loss_is_refused() -> None:
    """One of timm was given the loss as its epoch."""
    own = type("Own", (), {"step": lambda self, loss, accuracy: None})()
    of_timm = SimpleNamespace(step=lambda epoch, metric=None: None)
    for each, needs in ((own, "loss, accuracy"), (of_timm, "epoch")):
        message = f"the step of the scheduler {type(each).__name__} needs {needs}: expected one that"
        with pytest.raises(ValueError, match=message):
            make(lr_scheduler=lambda optimizer, each=each: each)


def test_options_of_a_run_before_a_checkpoint_was_loaded_are_forgotten() -> None:
    """Its updates have the same numbers."""
    options = SameOptions(0, num_stages=1)
    for index in range(6):
        options.used(index, {"weight": 1})
    options.received(1, ["weight"], [6.0, 1.0])  # of an update that this rank has not made yet
    options.drop()
    for index in range(2, 8):
        options.used(index, {"weight": 7})
    options.received(1, ["weight"], [7.0, 8.0])
    with pytest.raises(ValueError, match=r"the ranks \[0, 1\] hold copies .* for 'weight'"):
        options.used(8, {"weight": 7})


def _change_a_rate(who: list[int]) -> str:
    """Under 2bw, while batches are under way."""
    schedule = stagewright.schedules.build("2bw", num_ranks=3, num_microbatches=4, replicas=(2, 1))
    pipe: PipelineModule = stream(schedule)
    local = [pipe.rank] if pipe.world.distributed else [0, 1, 2]
    pipe.train_step(X, Y)
    pipe.flush()
    for rank, optimizer in zip(local, pipe.optimizers, strict=True):
        if rank in who:
            optimizer.param_groups[0]["lr"] *= 0.5
    return refusal(lambda: train_piped(pipe, [(X, Y)] * 3), ValueError, PeerLost)


MESSAGE = "the ranks [0, 1] hold copies of the same weights, and their optimizers have different options for '0.weight'"


@pytest.mark.thorough
def test_rates_that_differ_between_copies_of_a_stream_are_refused(gloo: Pool) -> None:
    assert _change_a_rate([]) == _change_a_rate([0, 1]) == _change_a_rate([2]) == ""
    assert _change_a_rate([1]).startswith(MESSAGE)
    assert gloo.run(_change_a_rate, ranks=3, args=([0, 1],)) == [""] * 3
    assert all(MESSAGE in answer for answer in gloo.run(_change_a_rate, ranks=3, args=([0],)))


def test_float16_is_refused_by_name_without_a_loss_scale() -> None:
    with pytest.raises(ValueError, match=r"parameter '0.weight' is torch.float16: expected float32 .*GradScaler"):
        make(model=layers().half(), example_inputs=None)
    loss = nn.Linear(1, 1).half()
    with pytest.raises(ValueError, match=r"parameter 'weight' is torch.float16"):
        make(loss_fn=loss)
    for begin in (make, stream):
        pipe = begin(model=layers(), example_inputs=None)
        for call in (pipe.train_step, pipe.forward_backward):
            text = r"autocast\('cpu', dtype=torch.float16\) around training, .* precision='fp16'"
            with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=text):
                call(X, Y)
        with torch.autocast("cpu", torch.bfloat16):
            pipe.train_step(X, Y)
            pipe.flush()
    make(model=layers().bfloat16(), example_inputs=None).train_step(X.bfloat16(), Y.bfloat16())
    nothing_trains = make(model=layers().half(), example_inputs=None, loss_fn=None, optimizer=None)
    assert nothing_trains.predict(X.half()).dtype is torch.float16  # type: ignore[union-attr]
