"""Asynchronous schedules, all ranks in one process, against a replay of their weight versions, float64.

    difference 0      chains: losses, parameters, buffers, optimizer states
    below 1e-12       where sums are reordered: replicas, ties, traced models, (sum, count) losses, clipping
    below 1e-10       the same after AdamW steps

What every case runs is in support/async_pipeline.py, what is right in support/async_reference.py.
"""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.async_pipeline import run
from support.async_reference import UNEVEN, AsyncCase, agree, replay
from support.grids import one_in
from support.pool import Pool
from support.small import make
from torch import nn

from stagewright.schedules import build

OPTIMIZERS = ("sgd", "adamw", "adamw-foreach", "adamw-fused")
RULES: dict[str, dict[str, Any]] = {
    "2bw": {"schedule": "2bw"},
    "pipedream": {"schedule": "pipedream"},
    "pipedream-k2": {"schedule": "pipedream", "update_every": 2},
    "pipedream-kM": {"schedule": "pipedream", "update_every": 4},
    "vertical": {"schedule": "pipedream", "vertical_sync": True},
    "vertical-k2": {"schedule": "pipedream", "update_every": 2, "vertical_sync": True},
}
ONE_OF_EACH = {name: RULES[name] for name in ("2bw", "pipedream", "vertical-k2")}
CONV: dict[str, Any] = {"task": "conv-norm", "num_ranks": 3}
Options = dict[str, Any]


def each(name: str, *values: Any) -> dict[str, Options]:
    """An axis: values of one option."""
    return {str(value): {name: value} for value in values}


def grid(what: str, count: int, *axes: Mapping[str, Options], **common: Any) -> list[Any]:
    """pytest parameters: one in `count` of the products of the axes every day."""
    found = []
    for row in one_in(count, *axes):
        options = dict(common)
        for more in row.values:
            options |= more
        found.append(pytest.param(AsyncCase(**options), id=f"{what}: {row.id}", marks=row.marks))
    return found


DRAINS = {
    "a flush": {"flushes": (3,)},
    "an evaluation": {"evals": (4,)},
    "both": {"flushes": (0, 4), "evals": (2, 4)},
    "each batch": {"flushes": tuple(range(6))},
}
REPLICAS = {
    "2-1, sgd": {"num_ranks": 3, "replicas": (2, 1)},
    "1-2, adamw": {"num_ranks": 3, "replicas": (1, 2), "optimizer": "adamw"},
    "2-2, momentum": {"num_ranks": 4, "replicas": (2, 2), "optimizer": "momentum"},
    "3-1, sgd": {"num_ranks": 4, "replicas": (3, 1)},
    "2-1, adamw": {"num_ranks": 3, "replicas": (2, 1), "optimizer": "adamw"},
}
# Deeper than plain, and with as few microbatches as a rule takes.
WARMUPS = {f"{P} {warmup}": {"num_ranks": P, "warmup": warmup} for P, warmup in
           [(2, "eager"), (4, "eager"), (3, (3, 2, 0)), (3, (6, 3, 0))]}  # fmt: skip
FEWEST = {f"{P}-{M}": {"num_ranks": P, "num_microbatches": M} for P, M in
          [(2, 1), (2, 2), (3, 2), (4, 3), (3, 8), (2, 7)]}  # fmt: skip
SHORT = {f"{P}-{M}": {"num_ranks": P, "num_microbatches": M} for P, M in [(4, 1), (4, 2), (3, 5)]}
SKIPS = {"unet": {"task": "unet", "sizes": UNEVEN}, "batchnorm-cnn": {"task": "batchnorm-cnn", "sizes": (19,) * 6}}
CLIPPED = {
    "sgd": CONV,
    "adamw": CONV | {"optimizer": "adamw"},
    "tied": {"task": "small-tied", "optimizer": "adamw"},
    "counts": {"task": "small-masked"},
}
AGAIN = each("recompute", "full", "layer", "selective")
# The cache of casted weights must not outlive a version.
CASTS = {f"{task} {word}": {"task": task, "recompute": word} for task, word in
         [("conv-norm", "none"), ("small-gpt", "full"), ("small-gpt", "selective")]}  # fmt: skip
COUNTS = {"2bw adamw": RULES["2bw"] | {"optimizer": "adamw"}, "pipedream sgd": RULES["pipedream-kM"]}

PACI: dict[str, Options] = {
    "drains": CONV | {"num_ranks": 4, "optimizer": "adamw-fused", "decay": True, "flushes": (1,), "evals": (2,)},
    "replicas": CONV | {"num_ranks": 4, "replicas": (2, 1, 1), "flushes": (3,)},
    "each microbatch": {"task": "mlp", "num_ranks": 4, "update_every": 1, "flushes": (0, 2)},
    # Casts are the forward's.
    "autocast": {"task": "small-gpt", "num_ranks": 3, "autocast": True, "optimizer": "adamw", "sizes": UNEVEN[:3]},
}
CASES = [
    *grid("ranks", 2, each("num_ranks", 1, 2, 3, 4), RULES, task="conv-norm", optimizer="momentum", sizes=UNEVEN),
    *grid("optimizer", 2, each("optimizer", *OPTIMIZERS), ONE_OF_EACH, task="conv-norm", num_ranks=4),
    *grid("warm-up", 1, WARMUPS, task="small-gpt", num_microbatches=6, optimizer="adamw", flushes=(4,)),
    *grid("replicas", 1, REPLICAS, task="conv-norm", sizes=UNEVEN),
    *grid("2bw, fewest", 1, FEWEST, task="conv-norm", evals=(4,)),
    *grid("short batches", 1, SHORT, each("vertical_sync", False, True), task="conv-norm", schedule="pipedream",
          flushes=(4,), optimizer="momentum"),
    *grid("drained", 2, ONE_OF_EACH, DRAINS, task="mlp", num_ranks=3, optimizer="momentum"),
    *grid("model", 3, each("task", "mlp", "lstm", "masked-stages", "sequential-stages"), ONE_OF_EACH, num_ranks=3,
          optimizer="adamw", sizes=UNEVEN, flushes=(3,)),
    # The backward runs the forward again: under the version of the microbatch, with its random numbers.
    *grid("recompute", 3, each("task", "small-gpt", "conv-norm", "lstm"), AGAIN,
          each("schedule", "2bw", "pipedream"), num_ranks=3, optimizer="momentum", flushes=(4,)),
    *grid("running statistics", 2, each("recompute", "none", "full"), ONE_OF_EACH, task="batchnorm", num_ranks=3,
          sizes=(19, 23, 16, 18, 20, 11), evals=(3,)),
    # Stages begin with an activation, a convolution, a LayerNorm.
    *grid("cut", 2, ONE_OF_EACH, each("bounds", (2, 9), (10, 12)), each("as_stages", False, True), **CONV,
          optimizer="adamw"),
    *grid("nothing to train", 1, ONE_OF_EACH, task="mlp", num_ranks=4, bounds=(1, 3, 6), optimizer="momentum"),
    *grid("skips", 1, SKIPS, num_ranks=3, optimizer="momentum", flushes=(4,)),
    *grid("autocast", 3, ONE_OF_EACH, CASTS, num_ranks=3, autocast=True, optimizer="adamw", flushes=(4,)),
    *grid("sum and count", 1, COUNTS, task="small-masked", num_ranks=3, sizes=UNEVEN, evals=(4,)),
    *grid("clipped", 1, CLIPPED, num_ranks=3, max_grad_norm=0.05, sizes=UNEVEN, flushes=(2,)),
    *grid("paci", 1, PACI, schedule="paci", update_every=2),
    *grid("rates", 1, ONE_OF_EACH, **CONV, optimizer="momentum", decay=True, flushes=(1,)),
]  # fmt: skip


@pytest.mark.thorough(but=["2bw, fewest: 2-1", "short batches: 3-5-True"])
@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_replay(case: AsyncCase) -> None:
    assert case.max_grad_norm is None or min(replay(case).grad_norms) > case.max_grad_norm
    agree(run(case), case)


OVER_GLOO = {
    "momentum": AsyncCase(task="conv-norm", num_ranks=3, optimizer="momentum", sizes=UNEVEN),
    "pipedream": AsyncCase(task="conv-norm", schedule="pipedream", num_ranks=4, optimizer="adamw", sizes=UNEVEN),
    "rates, flush and evaluation": AsyncCase(
        **{"task": "small-gpt", "schedule": "pipedream", "update_every": 2, "num_ranks": 3},
        **{"optimizer": "adamw-fused", "decay": True, "flushes": (2,), "evals": (4,)},
    ),
    "recompute": AsyncCase(task="lstm", num_ranks=3, recompute="full", sizes=UNEVEN, flushes=(4,)),
    "running statistics": AsyncCase(task="batchnorm", sizes=(19, 23, 16, 18, 20, 11), recompute="full", evals=(3,)),
    "tied, clipped": AsyncCase(task="small-tied", num_ranks=4, max_grad_norm=0.05, sizes=UNEVEN, evals=(3,)),
    "replicas": AsyncCase(
        task="small-gpt", num_ranks=3, replicas=(1, 2), num_microbatches=5, sizes=UNEVEN, flushes=(3,)
    ),
    "replicas with a flush": AsyncCase(
        **{"task": "small-tied", "schedule": "1f1b", "num_ranks": 4, "replicas": (2, 1, 1), "num_microbatches": 5},
        **{"optimizer": "adamw", "max_grad_norm": 0.05, "decay": True, "recompute": "full", "evals": (1,)},
    ),
    "skips": AsyncCase(task="unet", num_ranks=3, optimizer="momentum", sizes=UNEVEN),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", OVER_GLOO.values(), ids=OVER_GLOO)
def test_it_equals_one_process(gloo: Pool, case: AsyncCase) -> None:
    """Every rank has all losses in the end, and the same full_state_dict."""
    agree(gloo.run(run, ranks=case.num_ranks, args=(case,)), case)


def scalars(*weights: float) -> nn.Sequential:
    """A chain y = w_n .. w_1 x."""
    model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in weights]).double()
    for layer, weight in zip(model, weights, strict=True):
        nn.init.constant_(layer.weight, weight)
    return model


def after_two_batches(model: nn.Module, **options: Any) -> list[float]:
    options |= {"schedule": build("paci", num_ranks=2, num_microbatches=1), "num_microbatches": None, "cut": ["2"]}
    options["loss_fn"] = lambda output, target: 0.5 * (output - target).square().mean()
    pipe = make(model=model, example_inputs=None, **options)
    for _ in range(2):
        pipe.train_step(torch.ones(1, 1).double(), torch.zeros(1, 1).double())
    pipe.flush()
    return [value.item() for value in pipe.full_state_dict().values()]


def test_three_weights_by_hand() -> None:
    """Stage 0 has w1 and w2, stage 1 has w3; x = 1, target 0, so that the gradient of the output is the output.

    step  stage 1                             stage 0
    F0                                        w = (1, 2): keeps w1 x = 1, gives 2
    F1                                        the same
    B0    y = 2, to stage 0 2, w3: 1 -> 0.6   w2 -= 0.1 * 2 * 1 = 1.8, w1 -= 0.1 * 2 * 2 = 0.6
    B1    y = 1.2, to stage 0 0.72,           w2 -= 0.1 * 0.72 * 1 (kept) = 1.728,
          w3 -= 0.1 * 2.4 = 0.36              w1 -= 0.1 * 0.72 * 1.8 (new; it was 2) = 0.4704
    """
    assert after_two_batches(scalars(1.0, 2.0, 1.0)) == pytest.approx([0.4704, 1.728, 0.36], abs=1e-15)


@pytest.mark.parametrize("recompute", ["none", "selective", "layer", "full"])
def test_recomputation_runs_with_the_new_weights(recompute: str) -> None:
    """A unit from its input, or the whole stage; what "selective" keeps, the products, is as old as without it.

    As above, with a tanh behind w1: a unit of w1 and its tanh, and one of w2.
    """
    model = scalars(1.0, 2.0, 1.0)
    model = nn.Sequential(nn.Sequential(model[0], nn.Tanh()), model[1], model[2])
    found = after_two_batches(model, recompute=recompute)
    a = math.tanh(1.0)
    y = 2.0 * a
    w1, w2, w3 = 1.0 - 0.1 * y * 2.0 * (1 - a**2), 2.0 - 0.1 * y * a, 1.0 - 0.1 * y * 2.0 * a  # behind B0
    y = w3 * 2.0 * a  # F1 of stage 0 was before B0
    again = math.tanh(w1)
    slope = 1 - (again if recompute in ("layer", "full") else a) ** 2
    given = again if recompute == "full" else a  # to w2
    w1, w2 = w1 - 0.1 * y * w3 * w2 * slope, w2 - 0.1 * y * w3 * given
    assert found == pytest.approx([w1, w2, w3 - 0.1 * y * 2.0 * a], abs=1e-14)
