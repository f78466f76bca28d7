"""PACI runs: one set of weights a stage, changed between the forward and the backward of a microbatch.

Against three references that import nothing of stagewright: three weights by hand, a chain of layers whose gradients
are written out (no autograd), and the replay of support/async_reference.py for other models, optimizers and drains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.async_pipeline import make_pipeline, run
from support.async_reference import UNEVEN, AsyncCase, agree, make_model
from support.records import records
from torch import Tensor, nn

from stagewright import PipelineModule
from stagewright.schedules import build

PACI = AsyncCase(task="conv-norm", schedule="paci", num_ranks=3, update_every=2, sizes=UNEVEN[:4])


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().mean()


def sgd(rate: float) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def scalars(*weights: float) -> nn.Sequential:
    """A chain y = w_n .. w_1 x."""
    model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in weights]).double()
    for layer, weight in zip(model, weights, strict=True):
        nn.init.constant_(layer.weight, weight)
    return model


def test_three_weights_by_hand() -> None:
    """Stage 0 has w1 and w2, stage 1 has w3; x = 1, target 0, so that the gradient of the output is the output.

    step  stage 1                             stage 0
    F0                                        w = (1, 2): keeps w1 x = 1, gives 2
    F1                                        the same
    B0    y = 2, to stage 0 2, w3: 1 -> 0.6   w2 -= 0.1 * 2 * 1 = 1.8, w1 -= 0.1 * 2 * 2 = 0.6
    B1    y = 1.2, to stage 0 0.72,           w2 -= 0.1 * 0.72 * 1 (kept) = 1.728,
          w3 -= 0.1 * 2.4 = 0.36              w1 -= 0.1 * 0.72 * 1.8 (new; it was 2) = 0.4704
    """
    model = scalars(1.0, 2.0, 1.0)
    schedule = build("paci", num_ranks=2, num_microbatches=1)
    options: dict[str, Any] = {"loss_fn": half_square, "optimizer": sgd(0.1), "cut": ["2"]}
    with PipelineModule(model, **records(schedule=schedule, mesh={"pipe": 2}, **options)) as pipe:
        for _ in range(2):
            pipe.train_step(torch.ones(1, 1).double(), torch.zeros(1, 1).double())
        pipe.flush()
        state = pipe.full_state_dict()
    assert [value.item() for value in state.values()] == pytest.approx([0.4704, 1.728, 0.36], abs=1e-15)


# --- a chain of layers, written out ---


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """Stages of two units tanh(W x + b) each, trained by gradient descent on a mean of squares.

    backward: "new", or "old" for weights as they were in the forward (which is pipedream).
    drains: batches behind which the pipeline is empty.
    """

    num_ranks: int
    num_microbatches: int
    every: int
    recompute: str = "none"
    drains: tuple[int, ...] = ()
    backward: str = "new"
    num_batches: int = 4

    def model(self) -> nn.Sequential:
        torch.manual_seed(7)
        units = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2 * self.num_ranks)]
        return nn.Sequential(*units).double()

    def batch(self, t: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(t)
        x, y = torch.randn(2, 2 * self.num_microbatches, 3, generator=generator, dtype=torch.float64)
        return x, y

    def by_hand(self) -> list[Tensor]:
        """Weights in the end: W, b of each unit."""
        M, K, last = self.num_microbatches, self.every, self.num_ranks - 1
        first = [p.detach() for p in self.model().parameters()]
        # versions[s][v]: [(W, b), (W, b)] of stage s
        versions = [[list(zip(first[4 * s : 4 * s + 4 : 2], first[4 * s + 1 : 4 * s + 4 : 2], strict=True))]
                    for s in range(self.num_ranks)]  # fmt: skip
        sums = [[[torch.zeros(3, 3).double(), torch.zeros(3).double()] for _ in range(2)] for _ in versions]
        begin = 0
        for i in range(self.num_batches * M):
            t, k = divmod(i, M)
            if k == 0 and t - 1 in self.drains:
                begin = i
            x, y = (part[2 * k : 2 * k + 2] for part in self.batch(t))
            kept = []
            for s in range(self.num_ranks):
                weights = versions[s][max(i - (last - s), begin) // K]
                kept.append((weights, inputs := self.run(x, weights)))
                x = inputs[-1]
            gradient = 2 * (x - y) / x.numel() / K
            for s in reversed(range(self.num_ranks)):
                weights, results = kept[s]
                now = weights if self.backward == "old" else versions[s][i // K]
                if self.recompute == "full":
                    results = self.run(results[0], now)
                for unit in (1, 0):
                    result = results[unit + 1]
                    if self.recompute == "layer":
                        result = self.run(results[unit], now[unit : unit + 1])[-1]
                    gradient = gradient * (1 - result**2)
                    sums[s][unit][0] += gradient.T @ results[unit]
                    sums[s][unit][1] += gradient.sum(0)
                    gradient = gradient @ now[unit][0]
            if (i + 1) % K == 0:
                for s, own in enumerate(sums):
                    newest = versions[s][-1]
                    versions[s].append(
                        [(w - 0.5 * dw, b - 0.5 * db) for (w, b), (dw, db) in zip(newest, own, strict=True)]
                    )
                    for pair in own:
                        for total in pair:
                            total.zero_()
        return [each for own in versions for pair in own[-1] for each in pair]

    @staticmethod
    def run(x: Tensor, weights: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The input, and the results of the units."""
        results = [x]
        for w, b in weights:
            results.append(torch.tanh(results[-1] @ w.T + b))
        return results

    def piped(self) -> list[Tensor]:
        P, M = self.num_ranks, self.num_microbatches
        with PipelineModule(
            self.model(),
            schedule=build("paci", num_ranks=P, num_microbatches=M, update_every=self.every),
            mesh={"pipe": P},
            loss_fn=nn.functional.mse_loss,
            optimizer=sgd(0.5),
            recompute=self.recompute,
        ) as pipe:
            for t in range(self.num_batches):
                pipe.train_step(*self.batch(t))
                if t in self.drains:
                    pipe.flush()
            pipe.flush()
            return list(pipe.full_state_dict().values())


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.thorough(but=["P2-K2"])
@pytest.mark.parametrize(
    "case",
    [
        ByHand(num_ranks=2, num_microbatches=2, every=2),
        ByHand(num_ranks=3, num_microbatches=4, every=2, drains=(1,)),
        ByHand(num_ranks=4, num_microbatches=2, every=1),
        ByHand(num_ranks=4, num_microbatches=3, every=3, drains=(0, 2)),
    ],
    ids=["P2-K2", "P3-K2", "P4-K1", "P4-K3"],
)
def test_a_chain_written_out(case: ByHand) -> None:
    found = case.piped()
    assert apart(found, case.by_hand()) < 1e-14
    assert apart(found, replace(case, backward="old").by_hand()) > 1e-5


@pytest.mark.thorough
def test_recomputation_runs_with_the_new_weights() -> None:
    """A unit from its input, or the whole stage; what "selective" keeps, the products, is as old as without it."""
    case = ByHand(num_ranks=3, num_microbatches=2, every=1)
    whole, layers = replace(case, recompute="full"), replace(case, recompute="layer")
    outcomes = [case.by_hand(), whole.by_hand(), layers.by_hand()]
    assert apart(whole.piped(), outcomes[1]) < 1e-14
    assert apart(layers.piped(), outcomes[2]) < 1e-14
    assert apart(replace(case, recompute="selective").piped(), outcomes[0]) < 1e-14
    assert min(apart(outcomes[i], outcomes[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-5


# --- other models, optimizers, drains ---


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        replace(PACI, num_ranks=4, optimizer="adamw-fused", decay=True, flushes=(1,), evals=(2,), sizes=UNEVEN),
        replace(PACI, num_ranks=4, replicas=(2, 1, 1), flushes=(3,)),
        replace(PACI, task="small-gpt", autocast=True, optimizer="adamw", sizes=UNEVEN[:3]),  # casts are the forward's
    ],
    ids=["drains", "replicas", "autocast"],
)
def test_other_models_against_the_replay(case: AsyncCase) -> None:
    agree(run(case), case)


def test_no_norm_over_all_stages() -> None:
    with pytest.raises(ValueError, match=r"max_grad_norm=1.0 under schedule 'paci': .* Expected schedule='2bw'"):
        make_pipeline(PACI, make_model(PACI), max_grad_norm=1.0)
