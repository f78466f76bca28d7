"""Where a model or its user reaches around the pipeline: as plain PyTorch does, or refused by name."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.failing import refusal
from support.inside import clip_factor
from support.parts import GIVEN, Backwards, Parts
from support.pool import Pool
from support.small import WIDTH, X, Y, layers, make, stream
from torch import Tensor, nn


class Poisoned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Backwards.apply(super().forward(x), lambda gradient: gradient * math.nan)


@pytest.mark.parametrize("begin", [make, stream])
def test_a_norm_that_is_no_number_makes_every_gradient_one(begin: Callable[..., Any]) -> None:
    """As torch.nn.utils.clip_grad_norm_; the stage behind the poisoned layer has finite gradients."""
    pipe = begin(model=nn.Sequential(Poisoned(WIDTH, WIDTH), *layers(5)), max_grad_norm=1.0)
    pipe.train_step(X, Y)
    pipe.flush()
    assert all(value.isnan().all() for value in pipe.full_state_dict().values())


@pytest.mark.parametrize("norm", [0.0, 0.5, 2.0, math.inf, math.nan])
def test_the_factor_is_torchs(norm: float) -> None:
    parameter = nn.Parameter(torch.zeros(()))
    parameter.grad = torch.tensor(norm)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    torch.testing.assert_close(
        torch.tensor(norm) * clip_factor(norm=norm, max_norm=1.0), parameter.grad, equal_nan=True
    )


class Branches(Parts, one=lambda: nn.Linear(WIDTH, WIDTH), two=lambda: nn.Linear(WIDTH, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())  # type: ignore[no-any-return]


def _ask_for_state(kind: str) -> list[str]:
    """Errors of every way to the state of a model that this process has a part of."""
    torch.manual_seed(0)
    model = layers() if kind == "chain" else Branches()
    pipe = make(model=model)
    pipe.train_step(torch.zeros(8, WIDTH), torch.zeros(8, WIDTH))
    ways: list[Callable[[], object]] = [
        model.state_dict,
        lambda: torch.save(model, io.BytesIO()),
        copy.deepcopy(model).state_dict,
    ]
    errors = [refusal(ask) for ask in ways]
    mine = [child for child in model.children() if not any(p.is_meta for p in child.parameters())]
    for child in mine:
        child.state_dict()
    assert not any(value.is_meta for value in pipe.state_dict().values())
    assert not any(value.is_meta for value in pipe.full_state_dict().values())
    pipe.load_state_dict(pipe.full_state_dict())
    pipe.close()
    return errors


@pytest.mark.thorough(but=["chain"])
@pytest.mark.parametrize("kind", ["chain", "traced"])
def test_state_that_is_elsewhere_is_not_given_as_meta_tensors(gloo: Pool, kind: str) -> None:
    for errors in gloo.run(_ask_for_state, ranks=2, args=(kind,)):
        assert len(errors) == 3
        assert all(r"Expected pipe.full_state_dict() for all weights" in error for error in errors)


class Odd(nn.Module):
    """Outputs of every kind; the parts of a batch see nothing of each other, but for `pairs`."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "first": x,
            "second": x.t(),
            "flat": x.reshape(-1),
            "scalar": x.sum(),
            "table": x.new_ones(2, 3),
            "pairs": x @ x.t(),
        }


class Whole(Parts, inner=GIVEN):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@pytest.mark.thorough(but=["3-False", "1-False"])
@pytest.mark.filterwarnings("ignore:output 5 of the model has the batch on two axes")
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("size", [8, 7, 3, 1])
def test_outputs_are_joined_where_the_batch_is(traced: bool, size: int) -> None:
    chain = nn.Sequential(*layers(3), Odd())
    model = Whole(chain) if traced else chain
    pipe = make(model=model, loss_fn=lambda output, target: output["first"].mean())
    x = torch.randn(size, WIDTH)
    found: Any = pipe.eval_step(x, torch.zeros(size)).output
    with torch.no_grad():
        expected = model(x)
        parts = [model(part) for part in x.tensor_split(min(size, 4))]
    for name in ("first", "second", "flat"):
        torch.testing.assert_close(found[name], expected[name])
    torch.testing.assert_close(found["scalar"], torch.stack([part["scalar"] for part in parts]))
    for name in ("table", "pairs"):  # of one microbatch, what the model returns
        torch.testing.assert_close(found[name], [part[name] for part in parts] if size > 1 else expected[name])


@pytest.mark.thorough(but=["gpipe-2"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "2bw"])
def test_an_evaluation_takes_fewer_samples_than_microbatches(schedule: str, size: int) -> None:
    model = layers()
    pipe = make(model=model, schedule=schedule)
    found = pipe.eval_step(X[:size], Y[:size])
    with torch.no_grad():
        torch.testing.assert_close(found.output, model(X[:size]))
        assert found.loss == pytest.approx(float(nn.functional.mse_loss(model(X[:size]), Y[:size])))
    torch.testing.assert_close(pipe.predict(X[:size]), found.output)
    pipe.train_step(X, Y)


def test_the_first_batch_may_be_an_evaluation_of_one_sample() -> None:
    model = layers()
    pipe = make(model=model, example_inputs=None)
    torch.testing.assert_close(pipe.predict(X[:1]), model(X[:1]).detach())
    with pytest.raises(ValueError, match=r"a batch of 1 samples for 4 microbatches"):
        pipe.train_step(X[:1], Y[:1])
    pipe.train_step(X, Y)


@pytest.mark.parametrize("loss_fn", [None, nn.functional.mse_loss])
def test_predict_wants_inputs_alone(loss_fn: Any) -> None:
    model = layers()
    pipe = make(model=model, loss_fn=loss_fn, optimizer=None)
    torch.testing.assert_close(pipe.predict(X), model(X).detach())
    if loss_fn is None:
        found = pipe.eval_step(X)
        assert found.loss is None
        torch.testing.assert_close(found.output, model(X).detach())
    with pytest.raises(ValueError, match=r"2 inputs for a model that was built for 1: expected 1, and no target"):
        pipe.predict(X, Y)


class Tied(Parts, table=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), inner=lambda: layers(4)):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.table) @ self.table.t()  # type: ignore[no-any-return]


EDITS: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda p: p.mul_(0.5),
    "data": lambda p: p.data.mul_(0.5),
    "new data": lambda p: setattr(p, "data", p.data * 0.5),
    "frozen": lambda p: p.requires_grad_(False),
}


@pytest.mark.thorough(but=["1-table-new data"])
@pytest.mark.parametrize("edit", [*EDITS][:3])
@pytest.mark.parametrize("which", ["all", "table"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_edit_of_a_tied_weight_reaches_all_that_hold_it(edit: str, which: str, num_ranks: int) -> None:
    """2bw over two ranks of one process: the second one holds a copy."""
    torch.manual_seed(0)
    model = Tied()
    pipe = make(model=model, schedule="2bw", mesh={"pipe": num_ranks}, num_microbatches=4)
    pipe.train_step(X, Y)
    pipe.flush()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if which in ("all", name):
                EDITS[edit](parameter)
    edited = model.table.detach().clone()
    fresh = make(model=Tied(), schedule="2bw", mesh={"pipe": num_ranks}, num_microbatches=4)
    fresh.load_state_dict(pipe.state_dict())
    pipe.train_step(X, Y)
    fresh.train_step(X, Y)
    torch.testing.assert_close(pipe.full_state_dict()["table"], edited, atol=0.1, rtol=0)  # a step away, no more
    if which == "all":
        for name, value in fresh.full_state_dict().items():
            assert torch.equal(pipe.full_state_dict()[name], value), name
    versions = [one.versions for one in pipe._building.pipeline.state.update.stages if "table" in one.versions.names]
    held = [one.own[one.names.index("table")] for one in versions]
    assert len(held) == num_ranks
    assert all(torch.equal(own, held[0]) for own in held)


@pytest.mark.thorough(but=["2bw-in place", "2bw-frozen"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_edits_are_refused_under_way_until_a_flush(edit: str, schedule: str) -> None:
    pipe = stream(schedule)
    pipe.train_step(X, Y)
    with torch.no_grad():
        EDITS[edit](pipe.parameters()[3])
    what = "requires_grad of parameter" if edit == "frozen" else "parameter"
    with pytest.raises(ValueError, match=rf"^{what} '1.bias' was changed while batches 0 to 0 .* expected flush\(\)"):
        pipe.train_step(X, Y)
    pipe.flush()
    pipe.train_step(X, Y)


def test_weights_that_are_no_numbers_do_not_look_changed() -> None:
    pipe = stream()
    with torch.no_grad():
        pipe.parameters()[-1].fill_(1e38)
        pipe.parameters()[0].fill_(math.nan)
    with pytest.raises(FloatingPointError):
        pipe.train_step(X, Y)
    other = stream(loss_fn=lambda output, target: torch.nan_to_num(output).sum() * 0)
    with torch.no_grad():
        other.parameters()[0].fill_(math.nan)
    for _ in range(3):
        other.train_step(X, Y)


@pytest.mark.thorough(but=["2bw-none"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_what_is_drained_runs_under_the_autocast_of_its_batch(schedule: str, recompute: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    inside, outside = (stream(schedule, recompute=recompute, mesh={"pipe": 3}) for _ in range(2))
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside.train_step(x, y)
            inside.flush()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outside.train_step(x, y)
        outside.flush()
    for name, value in inside.full_state_dict().items():
        assert torch.equal(outside.full_state_dict()[name], value), name
