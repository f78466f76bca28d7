"""recompute={"memory_budget": ...}: the least that must runs again, what was predicted is held, all else stays."""

import copy
import itertools
import re
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.failing import refusal
from support.inside import Budgets, HeldMoments, LiveBytes, fit, least
from support.parts import Parts
from support.pool import Pool
from support.small import X, make
from torch import Tensor, nn

from stagewright.comm import PipelineError
from stagewright.pipe import PipelineModule
from stagewright.schedules import Op

WIDTH, SAMPLES, M = 32, 256, 4


def random_case(seed: int) -> tuple[np.ndarray, HeldMoments, np.random.Generator]:
    """Up to four units under three rules: rules that keep less may take more for a while, and some help nowhere."""
    rng = np.random.default_rng(seed)
    num_units = int(rng.integers(1, 5))
    seconds = np.hstack(
        [np.zeros((num_units, 1)), rng.uniform(0.1, 5.0, (num_units, 2)).round(int(rng.integers(0, 3)))]
    )
    held = rng.integers(0, 50, (int(rng.integers(1, 8)), num_units, 3)).astype(float)
    return seconds, HeldMoments(1e7 * rng.integers(0, 100, len(held)), 1e7 * held), rng


def took(seconds: np.ndarray, choice: Any) -> float:
    return sum(seconds[unit, rule] for unit, rule in enumerate(choice))


@pytest.mark.thorough(but=["3"])
@pytest.mark.parametrize("block", range(4))
def test_the_choice_is_that_of_brute_force(block: int) -> None:
    for seed in range(block * 90, block * 90 + 90):
        seconds, moments, rng = random_case(seed)
        every = list(itertools.product(range(3), repeat=len(seconds)))
        peaks = sorted({moments.peak(choice) for choice in every})
        limit = float(rng.choice(peaks)) + rng.choice([-1.0, 0.0, 1.0])  # a byte: far below what the solver tells apart
        fitting = [choice for choice in every if moments.peak(choice) <= limit]
        found = fit(seconds, moments, limit)
        assert (found is None) == (not fitting), seed
        if found is not None:
            assert moments.peak(found) <= limit, seed
            assert took(seconds, found) == pytest.approx(min(took(seconds, each) for each in fitting), abs=1e-9), seed
        smallest = least(seconds, moments)
        assert moments.peak(smallest) == peaks[0], seed
        at_least = [took(seconds, each) for each in every if moments.peak(each) == peaks[0]]
        assert took(seconds, smallest) == pytest.approx(min(at_least), abs=1e-9), seed


def test_many_units_that_are_alike() -> None:
    """As in a stage of 40 blocks."""
    seconds, held = np.tile([0.0, 1.0, 2.5], (40, 1)), np.tile([30.0, 14.0, 2.0], (80, 40, 1))
    found = fit(seconds, HeldMoments(np.arange(80.0), held), 800.0 + 79)
    assert took(seconds, found) == 25.0  # 16 bytes a second, and then 12 for 1.5


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


def blocks(recompute: Any, **options: Any) -> PipelineModule:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(3))).double()
    given: dict[str, Any] = {"mesh": {"pipe": 2}, "num_microbatches": M, "cut": ["4"], "optimizer": torch.optim.AdamW}
    given |= {"loss_fn": F.mse_loss, "recompute": recompute, "verify": False}
    return PipelineModule(model, **given | options)


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(SAMPLES * M, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))


def gradients(pipe: PipelineModule, *inputs: Tensor) -> list[Tensor]:
    pipe.forward_backward(*inputs)
    found = [p.grad for p in pipe.parameters() if p.grad is not None]
    for parameter in pipe.parameters():
        parameter.grad = None
    return found


def measured(pipe: PipelineModule, *inputs: Tensor) -> dict[int, float]:
    """The most bytes of each stage of this one process: all that it holds, and what its actions leave and take.

    The gradient that a stage sends is from then on the one's that gets it.
    """
    pipe.train_step(*inputs)  # the optimizers have their state
    pipeline = pipe._building.pipeline
    message = inputs[0].nbytes // M
    level, most, live = defaultdict[int, int](int), defaultdict[int, int](int), LiveBytes()

    def watched(run: Any, action: Any) -> None:
        live.settle()
        before = live.most = live.level
        sent = message if action.op is Op.B and action.stage == 1 else 0
        run(action)
        live.settle()
        most[action.stage] = max(most[action.stage], level[action.stage] + live.most - before)
        level[action.stage] += live.level - before - sent
        level[0] += sent

    with ExitStack() as stack:
        for worker in (local.worker for local in pipeline.engine.ranks):
            stack.enter_context(patch.object(worker, "run", partial(watched, worker.run)))
        stack.enter_context(live)
        pipe.train_step(*inputs)
    weights = {s: sum(p.nbytes for p in pipeline.parts.train.stages[s].module.parameters()) for s in (0, 1)}
    states = {one.stage: sum(x.nbytes for x in one.tensors()) for one in pipeline.state.update.stages}
    return {s: weights[s] + states[s] + most[s] for s in (0, 1)}


def told(pipe: PipelineModule) -> dict[int, tuple[float, float]]:
    """By stage under a budget: it, and the most that is predicted [bytes], to three digits."""
    units = {"kB": 1e3, "MB": 1e6}
    found = re.findall(r"stage (\d) .*: budget ([\d.]+) (.B): ([\d.]+) (.B) at the most", pipe.explain())
    return {int(s): (float(a) * units[b], float(c) * units[d]) for s, a, b, c, d in found}


def test_the_first_stage_runs_again_what_it_must_and_the_last_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(self: Any, every: Any) -> np.ndarray:  # what a busy machine measures may decide for three blocks
        return np.outer(np.ones(len(self.units)), [0.0, 1.0, 2.0][: len(every)])

    monkeypatch.setattr("stagewright.pipe.run.budget._Probe.seconds", seconds)
    plain, x_y = blocks("none"), rows()
    wanted = gradients(plain, *x_y)
    whole = measured(plain, *x_y)
    budget = int(whole[1] * 1.02)
    assert whole[0] > budget * 1.2
    pipe = blocks({"memory_budget": f"{budget}B"})
    assert "as the first batch to train on decides" in (pipe.build(*x_y), pipe.explain())[1]
    assert all(torch.equal(one, other) for one, other in zip(gradients(pipe, *x_y), wanted, strict=True))
    first, last = pipe.explain().split("\nstage 1")
    assert first.count("runs again  ") == 2  # of three blocks
    assert "nothing runs again" in last
    assert "refused     3: it keeps as much" in first  # a linear layer keeps its input
    found = measured(pipe, *x_y)
    for stage, (limit, predicted) in told(pipe).items():
        assert found[stage] <= budget
        assert limit == pytest.approx(budget, rel=0.01)
        assert found[stage] == pytest.approx(predicted, rel=0.05)
        assert found[stage] <= whole[stage] * 1.001


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["gpipe", "2bw", "interleaved"])
def test_what_is_predicted_holds_under_other_schedules(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages in one process hold at most both budgets; gradients are those without recomputation."""
    x_y, known, chosen = rows(), list[float](), list[float]()

    def noted(seconds: np.ndarray, moments: HeldMoments, limit: float | None) -> Any:
        known.append(moments.peak([0] * len(seconds)))
        found = fit(seconds, moments, limit)
        chosen.append(moments.peak(found or ()))
        return found

    monkeypatch.setattr("stagewright.pipe.run.budget.fit", noted)
    options: dict[str, Any] = {"schedule": schedule, "cut": None}
    plain, pipe = blocks("none", **options), blocks({"memory_budget": "3.2MB"}, **options)
    for each in (plain, pipe):
        each.train_step(*x_y)
        each.train_step(*x_y)
        each.flush()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), pipe.parameters(), strict=True))
    assert "runs again  " in pipe.explain()
    both = re.findall(r"([\d.]+) MB at the most, ([\d.]+) MB with nothing run again", pipe.explain())
    for numbers, measured_whole in zip((chosen, known), zip(*both, strict=True), strict=True):
        # What the units' bytes add up to is what the stage held as a whole.
        assert sorted(numbers) == pytest.approx(sorted(1e6 * float(each) for each in measured_whole), rel=0.02)
    with pipe.watch_memory() as memory:
        pipe.train_step(*x_y)
        pipe.flush()
    assert memory.peak_bytes <= sum(predicted for _, predicted in told(pipe).values()) * 1.01


@pytest.mark.thorough
def test_a_larger_batch_is_decided_on_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where one before had all dimensions as large, its choice is taken; other microbatches of one batch count."""
    x_y, decided = rows(), list[int]()
    half, uneven = tuple(x[: SAMPLES * M // 2] for x in x_y), [(x_y[0][:8], x_y[1][:8])] * M
    plain, decide = blocks("none"), Budgets._decided
    wanted = gradients(plain, *half), gradients(plain, *x_y)
    budget = int(measured(plain, *x_y)[1] * 1.02)

    def noted(self: Budgets, batch: Any) -> Any:
        decided.append(batch.num_samples)
        return decide(self, batch)

    monkeypatch.setattr(Budgets, "_decided", noted)
    pipe = blocks({"memory_budget": f"{budget}B"})
    assert all(map(torch.equal, gradients(pipe, *half), wanted[0]))
    assert "runs again  " not in pipe.explain()
    assert all(map(torch.equal, gradients(pipe, *x_y), wanted[1]))
    assert "runs again  " in pipe.explain()
    assert max(measured(pipe, *x_y).values()) <= budget
    for each in (half, x_y, half):
        pipe.train_step(*each)
    pipe.train_step(microbatches=uneven)
    assert decided == [SAMPLES * M // 2, SAMPLES * M]


def test_a_larger_batch_beside_one_under_way_is_refused() -> None:
    x_y = rows()
    half = tuple(x[: SAMPLES * M // 2] for x in x_y)
    pipe = blocks({"memory_budget": "1GB"}, schedule="2bw", cut=None)
    pipe.train_step(*half)
    with pytest.raises(ValueError, match=r"step 1: microbatches larger than those .* expected the largest batch first"):
        pipe.train_step(*x_y)
    first = blocks({"memory_budget": "1GB"}, schedule="2bw", cut=None)
    first.train_step(*x_y)
    first.train_step(*half)


class SyncOnCPU(nn.SyncBatchNorm):
    forward = nn.BatchNorm1d.forward  # its own wants a GPU


def by_replica() -> tuple[str, str]:
    """Answers to a larger batch of the second replica, and to a norm over both."""
    x_y, more = rows(), 1 + torch.distributed.get_rank()
    pipe = blocks({"memory_budget": "1GB"}, mesh={"pipe": 1, "data": 2}, cut=None)
    pipe.forward_backward(*(x[: SAMPLES * M // 2] for x in x_y))
    larger = tuple(x[: SAMPLES * M * more // 2] for x in x_y)
    told = refusal(lambda: pipe.forward_backward(*larger), ValueError, PipelineError)
    norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), SyncOnCPU(WIDTH))
    given: dict[str, Any] = {"mesh": {"pipe": 1, "data": 2}, "recompute": {"memory_budget": "1GB"}}
    normed = PipelineModule(norm, num_microbatches=2, loss_fn=F.mse_loss, **given)
    return told, refusal(lambda: normed.build(*(x.float() for x in x_y)), ValueError, PipelineError)


@pytest.mark.thorough
def test_replicas_are_told_of_what_they_cannot_decide_alone(gloo: Pool) -> None:
    for larger, norm in gloo.run(by_replica, ranks=2):
        assert "larger than those that recompute={'memory_budget': ...} was decided for, with data replicas" in larger
        assert "recompute={'memory_budget': ...} with an nn.SyncBatchNorm: expected a word" in norm


@pytest.mark.thorough
def test_what_does_not_fit_names_the_least_that_does() -> None:
    x_y = rows()
    pipe = blocks({"memory_budget": ["1MB", None]})
    pipe.build(*x_y)
    with pytest.raises(ValueError, match=r"1000000 bytes for stage 0 \(0 .. 3\), and the least that fits is") as error:
        pipe.train_step(*x_y)
    alone = re.search(r"messages alone take (\d+)B", str(error.value))
    smallest = re.search(r"Expected \{'memory_budget': '(\d+B)'\}", str(error.value))
    weights = sum(p.nbytes for p in list(pipe.parameters())[:20])
    assert 4 * weights <= int(alone[1]) <= 4.4 * weights  # AdamW takes something while it steps
    assert pipe.num_steps == 0
    exact = blocks({"memory_budget": [smallest[1], None]})
    exact.train_step(*x_y)
    assert measured(exact, *x_y)[0] <= int(smallest[1][:-1])
    below = blocks({"memory_budget": [f"{int(smallest[1][:-1]) - 1}B", None]})
    with pytest.raises(ValueError, match=rf"the least that fits is {smallest[1]}"):
        below.train_step(*x_y)


def by_budget(recompute: Any) -> tuple[str, int, list[Tensor]]:
    pipe, x_y, random_state = blocks(recompute), rows(), torch.get_rng_state()
    found = gradients(pipe, *x_y)
    pipe.train_step(*x_y)
    assert torch.equal(random_state, torch.get_rng_state())  # a bug: the inputs of a later stage's trial were drawn
    with pipe.watch_memory() as memory:
        pipe.train_step(*x_y)
    return pipe.explain(), memory.peak_bytes, found


@pytest.mark.thorough
def test_processes_choose_for_their_own_stages(gloo: Pool) -> None:
    (text, first, own), (same, last, others) = gloo.run(by_budget, ranks=2, args=({"memory_budget": "3.6MB"},))
    assert text == same
    assert "runs again" in text.split("\nstage 1")[0]
    predicted = [float(each) * 1e6 for each in re.findall(r"([\d.]+) MB at the most", text)]
    for peak, most in zip((first, last), predicted, strict=True):
        assert peak <= 3.6e6
        assert peak <= most * 1.001
        assert peak == pytest.approx(most, rel=0.06)  # messages count as if as many waited as may
    for one, other in zip((*own, *others), gradients(blocks("none"), *rows()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("recompute", "said"),
    [
        ({"memory_budget": "0B"}, "above 0"),
        ({"memory_budget": "six"}, "'six': expected a number and a unit"),
        ({"memory_budget": 6}, "for 2 stages"),
        ({"memory_budget": ["6GiB"]}, "for 2 stages"),
        ({"memory_budget": "6GiB", "0": "full"}, "'0': 'full'} for 2 stages"),
    ],
)
def test_a_budget_that_makes_no_sense(recompute: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf'{said}.*expected recompute={{"memory_budget": "6GiB"}}, or one per stage'):
        make(recompute=recompute)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"schedule": "zb-h1"}, r"schedule='zb-h1', which splits backwards: .*'1f1b'"),
        ({"compile": {"backend": "eager"}}, "compile="),
    ],
)
def test_a_budget_beside_what_it_does_not_count(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=rf"recompute=\{{'memory_budget': \.\.\.\}} with {what}"):
        make(recompute={"memory_budget": "1GB"}, max_grad_norm=1.0, example_inputs=(X,), **options)


class LearnedLoss(Parts, scale=lambda: nn.Parameter(torch.ones((), dtype=torch.float64))):
    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out * self.scale, target)


@pytest.mark.parametrize("ranks", [1, 2])
def test_measuring_larger_microbatches_leaves_no_gradient_in_a_learned_loss(ranks: int) -> None:
    """The stage for new shapes has no loss in it: its gradient from the measurement was added to the batch's."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), LearnedLoss()
    plain, plain_loss = copy.deepcopy((model, loss))
    options: dict[str, Any] = {"optimizer": torch.optim.AdamW, "recompute": {"memory_budget": "1GiB"}}
    pipe = make(model=model, loss_fn=loss, mesh={"pipe": ranks}, num_microbatches=1, example_inputs=None, **options)
    optimizer = torch.optim.AdamW([*plain.parameters(), *plain_loss.parameters()])
    for samples in (1, 2, 2, 3):
        x, y = torch.randn(samples, 4).double(), torch.randn(samples, 4).double()
        pipe.train_step(x, y)
        optimizer.zero_grad()
        plain_loss(plain(x), y).backward()
        optimizer.step()
        torch.testing.assert_close(loss.scale, plain_loss.scale, rtol=1e-12, atol=0)
