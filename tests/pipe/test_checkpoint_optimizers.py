"""Optimizers in checkpoints: groups, several a stage and their schedules go on exactly, on any cut, or are refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small
from support.alone import near, train_alone
from support.inside import LAST_UPDATE
from support.plain import batch as plain_batch
from support.records import records
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim import lr_scheduler as lr

import stagewright
from stagewright.pipe import PipelineModule

Named = list[tuple[str, nn.Parameter]]
batch = partial(plain_batch, out=2)


def make(
    schedule: str, ranks: int, optimizer: Any, scheduler: Any = None, *, chunks: int | None = None, **options: Any
) -> PipelineModule:
    torch.manual_seed(3)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]
    model = nn.Sequential(*layers, nn.LayerNorm(6), nn.Linear(6, 2)).double()
    options |= {"schedule": schedule, "num_chunks": chunks, "mesh": {"pipe": ranks}, "example_inputs": batch(0)[:1]}
    return small.make(model=model, optimizer=optimizer, lr_scheduler=scheduler, timeout=120.0, **options)


def train(pipe: PipelineModule, steps: range) -> list[float | None]:
    results = [pipe.train_step(*batch(step)) for step in steps]
    told = {result.loss_step: result.loss for result in (*results, *pipe.flush())}
    return [told[step] for step in steps]


@stagewright.named
def groups(parameters: Named) -> list[Optimizer | None]:
    """Muon for the matrices but the first and last; a group of AdamW for the first one, which one stage alone has."""
    inner = [p for name, p in parameters if p.ndim == 2 and name not in ("0.weight", "9.weight")]
    first, last = ([p for name, p in parameters if name == wanted] for wanted in ("0.weight", "9.weight"))
    flat = {"params": [p for _, p in parameters if p.ndim < 2], "weight_decay": 0.0, "betas": (0.8, 0.9)}
    rest = [{"params": first, "lr": 3e-2}, flat, {"params": last, "lr": 2e-2}]
    return [Muon(inner, lr=1e-2) if inner else None, AdamW([group for group in rest if group["params"]], lr=1e-2)]


def peaks(optimizer: Optimizer) -> list[float]:
    return [3 * group["lr"] for group in optimizer.param_groups]


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 0.8**step),
    "step": lambda o: lr.StepLR(o, step_size=2, gamma=0.5),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, factor=0.5, patience=1, threshold=0.2, min_lr=0.0),
    "one-cycle": lambda o: lr.OneCycleLR(o, max_lr=peaks(o), total_steps=40, cycle_momentum=isinstance(o, AdamW)),
    "cyclic": lambda o: lr.CyclicLR(
        o, base_lr=[p / 9 for p in peaks(o)], max_lr=peaks(o), step_size_up=3, cycle_momentum=isinstance(o, AdamW)
    ),
    "sequential": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, total_iters=2), lr.CosineAnnealingLR(o, 10)], milestones=[2]
    ),
    "chained": lambda o: lr.ChainedScheduler([lr.LinearLR(o, total_iters=4), lr.LambdaLR(o, lambda s: 0.9**s)], o),
}


CUTS = [("1f1b", 2, None), ("interleaved", 2, 2), ("gpipe", 1, None), ("gpipe", 5, None)]


@pytest.mark.thorough(but=["cyclic", "chained"])
@pytest.mark.parametrize(("number", "name"), list(enumerate(SCHEDULES)), ids=SCHEDULES.keys())
def test_groups_and_their_schedules_go_on_on_any_cut(number: int, name: str, tmp_path: Path) -> None:
    """To the last bit: each group's figures are found by the names in it, though stages have other groups."""
    scheduler = SCHEDULES[name]
    pipe = make("1f1b", 2, groups, scheduler)
    train(pipe, range(3))
    pipe.save(tmp_path)
    expected = train(pipe, range(3, 7))
    for schedule, ranks, chunks in CUTS[number % 2 :: 2]:
        other = make(schedule, ranks, groups, scheduler, chunks=chunks)
        train(other, range(2))  # whatever stands there is replaced
        other.load(tmp_path)
        assert train(other, range(3, 7)) == expected, (schedule, ranks)
        back = tmp_path / f"{schedule}-{ranks}"
        other.save(back)
        again = make("1f1b", 2, groups, scheduler)
        again.load(back)
        assert train(again, range(7, 9)) == train(other, range(7, 9))


@pytest.mark.thorough(but=["None"])
@pytest.mark.parametrize("correction", [None, "error-feedback"])
def test_groups_of_a_stream_go_on(correction: str | None, tmp_path: Path) -> None:
    pipe = make("2bw", 3, groups, SCHEDULES["plateau"], correction=correction)
    train(pipe, range(3))
    pipe.save(tmp_path)
    expected = train(pipe, range(3, 6))
    other = make("2bw", 2, groups, SCHEDULES["plateau"], correction=correction)
    other.load(tmp_path)
    assert train(other, range(3, 6)) == expected


def test_delay_correction_that_was_not_saved_is_told_of(tmp_path: Path) -> None:
    plain, corrected = make("2bw", 2, groups), make("2bw", 2, groups, correction="error-feedback")
    train(plain, range(3))
    plain.save(tmp_path)
    with pytest.warns(UserWarning, match="no last update of '0.bias', '0.weight', '2.bias' and 9 more"):
        corrected.load(tmp_path)
    assert not any(LAST_UPDATE in state for one in corrected.optimizers for state in one.state.values())
    train(corrected, range(3, 5))
    corrected.save(tmp_path)
    with pytest.warns(UserWarning, match="has the last update of .* nothing is corrected there now"):
        plain.load(tmp_path)
    assert not any(LAST_UPDATE in state for one in plain.optimizers for state in one.state.values())


adamw = partial(AdamW, lr=1e-2)


@stagewright.named
def decayed(parameters: Named) -> Optimizer:
    matrices, rest = ([p for _, p in parameters if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    return AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


OTHERS: dict[str, tuple[Any, Any, Any, Any, str]] = {
    "optimizer": (
        adamw, None, partial(SGD, lr=0.1), None,
        r"has '0.weight' under the optimizer AdamW, and it is under SGD now: expected the same one",
    ),
    "schedule": (
        adamw, SCHEDULES["step"], adamw, SCHEDULES["lambda"],
        r"has '0.weight' under the schedule StepLR, and it is under LambdaLR now: expected the same lr_scheduler=",
    ),
    "joined groups": (
        decayed, None, adamw, None,
        r"weight_decay=0.0 for '0.bias' and weight_decay=0.1 for '0.weight', which are in one parameter group now",
    ),
    "divided groups": (
        adamw, None, decayed, None,
        r"has '0.bias' and '0.weight' in one parameter group, and they are in groups with different options now",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS.keys())
def test_other_optimizers_are_refused_and_nothing_is_changed(case: tuple[Any, ...], tmp_path: Path) -> None:
    """Optimizer states that plain PyTorch takes half, or refuses by a number of groups."""
    before, first, after, second, message = case
    pipe = make("1f1b", 2, before, first)
    train(pipe, range(2))
    pipe.save(tmp_path)
    other = make("1f1b", 2, after, second)
    train(other, range(1))
    state = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        other.load(tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())


def test_a_schedule_may_end_or_begin_with_a_checkpoint(tmp_path: Path) -> None:
    """Rates are those that were saved; a new schedule starts from its first step."""
    pipe = make("1f1b", 2, adamw, SCHEDULES["step"])
    train(pipe, range(3))
    pipe.save(tmp_path)
    without = make("1f1b", 2, adamw)
    without.load(tmp_path)
    assert [group["lr"] for one in without.optimizers for group in one.param_groups] == [5e-3] * 2


def test_a_tensor_without_a_name_cannot_be_saved(tmp_path: Path) -> None:
    scale = nn.Parameter(torch.ones(()))
    pipe = make("1f1b", 2, lambda parameters: SGD([*parameters, scale], lr=0.1))
    with pytest.raises(ValueError, match=r"SGD holds a tensor of shape \(\) that is not the model's, so that a"):
        pipe.save(tmp_path)


def unfrozen(count: int) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)], nn.Linear(6, 2)).double()
    model[: 4 - count].requires_grad_(False)
    return model


@pytest.mark.thorough(but=["1f1b-3-False"])
@pytest.mark.parametrize(("schedule", "ranks", "builds"), [("1f1b", 2, True), ("1f1b", 3, False), ("2bw", 2, True)])
def test_what_was_frozen_begins_with_fresh_state(schedule: str, ranks: int, builds: bool, tmp_path: Path) -> None:
    """A checkpoint with fewer parameters that learn was refused, whatever one typed."""

    def pipe_of(count: int, schedule: str, **options: Any) -> PipelineModule:
        settings = {"loss_fn": nn.functional.mse_loss, "num_microbatches": 4, "optimizer": decayed}
        halving = lambda o: lr.ExponentialLR(o, 0.5)  # noqa: E731
        return PipelineModule(
            unfrozen(count), **records(schedule=schedule, lr_scheduler=halving, **settings, **options)
        )

    before = pipe_of(1, "1f1b", mesh={"pipe": 1})
    train(before, range(2))
    before.save(tmp_path)
    after = pipe_of(3, schedule, mesh={"pipe": ranks})
    if builds:
        after.build(*batch(0))
        with pytest.raises(ValueError, match=r"no optimizer state of \['1.bias', .* or load\(..., new='fresh'\) to be"):
            after.load(tmp_path)
    with pytest.raises(ValueError, match="new='old'"):
        after.load(tmp_path, new="old")  # type: ignore[arg-type]
    after.load(tmp_path, new="fresh")
    train(after, range(2, 4))

    model = unfrozen(1)
    optimizer = decayed([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    scheduler = lr.ExponentialLR(optimizer, 0.5)
    schedule_of = lambda _: scheduler  # noqa: E731
    train_alone(model, map(batch, range(2)), lambda _: optimizer, scheduler=schedule_of)
    model[1:].requires_grad_(True)
    for group, grown in zip(optimizer.param_groups, (True, False), strict=True):
        group["params"] = [p for p in model[1:].parameters() if (p.ndim > 1) is grown]
    train_alone(model, map(batch, range(2, 4)), lambda _: optimizer, scheduler=schedule_of)
    if schedule == "1f1b":
        near(after.full_state_dict(), model.state_dict())
    assert {group["lr"] for one in after.optimizers for group in one.param_groups} == {1e-2 / 16}
