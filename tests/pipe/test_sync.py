"""Data replicas that average their weights every H-th step, or as seldom as their data allows."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import near, train_alone
from support.failing import refusal
from support.inside import Averaging, next_interval
from support.pool import Pool
from torch import nn

import stagewright as sw
from stagewright.pipe import PipelineModule

STEPS, LR = 7, 0.05
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=LR),
}


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def tied_model() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6)).double()
    model[3].weight = model[0].weight
    return model


def untied_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 6)).double()


def masked(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counts = target[:, 0] > 0
    return ((output - target).square().mean(1) * counts).sum(), counts.sum()


def batch(step: int, replica: int, *, skew: float = 0.0, samples: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """As many samples in each replica as it likes."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    x = torch.randn(samples or 8 + 2 * replica, 6, generator=generator, dtype=torch.float64)
    return x, (x.roll(1, dims=1) + skew * (2 * replica - 1))


def make(pipe: int, every: int | str, kind: str = "sgd", **options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"lr_scheduler": halved, "max_grad_norm": 0.5, "loss_fn": F.mse_loss, "timeout": 60.0}
    settings |= {"num_microbatches": 2, "optimizer": OPTIMIZERS[kind]} | options
    model = settings.pop("model", None) or tied_model()
    return PipelineModule(model, **{"mesh": sw.Mesh(pipe=pipe, data=2, sync=every)} | settings)


def plain(
    every: int, optimizer: str, *, loss_fn: Any
) -> tuple[list[float], list[list[float]], dict[str, torch.Tensor]]:
    """Losses, norms by replica and the last average, of replicas that one process trains one after the other."""
    models = [tied_model() if loss_fn is masked else untied_model() for _ in range(2)]
    made = [OPTIMIZERS[optimizer](list(model.parameters())) for model in models]
    schedulers = [halved(one) for one in made]
    losses, norms = [], []
    for step in range(STEPS):
        sums, counts = [], []
        norms.append([])
        for replica, (model, one, scheduler) in enumerate(zip(models, made, schedulers, strict=True)):
            x, y = batch(step, replica)
            value = loss_fn(model(x), y)
            total, count = value if isinstance(value, tuple) else (value * len(x), torch.tensor(len(x)))
            one.zero_grad()
            (total / count).backward()
            norms[-1].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            one.step()
            scheduler.step()
            sums.append(float(total.detach()))
            counts.append(float(count))
        losses.append(sum(sums) / sum(counts))
        if (step + 1) % every == 0 or step == STEPS - 1:  # the last: flush
            for both in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.detach() for p in both]).mean(0)
                for p in both:
                    p.data.copy_(mean)
    return losses, norms, models[0].state_dict()


def train(pipe: int, every: int, optimizer: str, tensor: int) -> dict[str, Any]:
    parallel = {"0": "column", "2": "row"} if tensor > 1 else None
    mesh = sw.Mesh(pipe=pipe, data=2, tensor=tensor, tensor_parallel=parallel, sync=every)
    options = {"loss_fn": masked} if tensor == 1 else {"model": untied_model()}
    module = make(pipe, every, optimizer, mesh=mesh, verify=True, **options)
    replica = module.rank // tensor % 2
    results = [module.train_step(*batch(step, replica)) for step in range(STEPS)]
    told = refusal(module.state_dict)
    module.flush()
    timeline = results[-1].timeline()
    holders = {name: 2 * len(stages) for name, stages in module.stages_of.items()}
    sent = sum(2 * (holders[name] - 1) * p.nbytes // holders[name] for name, p in module.named_parameters())
    found = {
        "losses": [one.loss for one in results],
        "norms": [one.grad_norm for one in results],
        "weights": module.full_state_dict(),
        "averaging": module.averaging,
        "bytes": sent,
        "told": told,
        "measured": timeline.measured and module.measured_costs() is not None,
    }
    module.close()
    return found


@pytest.mark.thorough(but=["1-3-sgd-1"])
@pytest.mark.parametrize(
    ("pipe", "every", "optimizer", "tensor"), [(1, 3, "sgd", 1), (2, 2, "adamw", 1), (1, 3, "sgd", 2)]
)
def test_replicas_step_alone_and_are_averaged(gloo: Pool, pipe: int, every: int, optimizer: str, tensor: int) -> None:
    """With tied weights, clipping, a rate that falls, batches of other sizes, and a first batch that is verified."""
    losses, norms, weights = plain(every, optimizer, loss_fn=masked if tensor == 1 else F.mse_loss)
    tolerance = 1e-12 if optimizer == "sgd" else 1e-10
    for rank, found in enumerate(gloo.run(train, ranks=2 * pipe * tensor, args=(pipe, every, optimizer, tensor))):
        assert found["losses"] == pytest.approx(losses, rel=tolerance)
        assert found["norms"] == pytest.approx([both[rank // tensor % 2] for both in norms], rel=tolerance)
        near(found["weights"], weights, rtol=tolerance, atol=tolerance)
        count = -(-STEPS // every)
        assert found["averaging"] == (every, count, count * found["bytes"], None)
        assert "state_dict between two averagings" in found["told"]
        assert found["measured"]


def first_gap(skew: float) -> float:
    """How much higher the loss of two models is on each other's next samples, behind seven steps on their own."""
    models = [tied_model() for _ in range(2)]
    for replica, model in enumerate(models):
        train_alone(model, (batch(step, replica, skew=skew, samples=32) for step in range(7)), OPTIMIZERS["sgd"])
    first = [[part[:16] for part in batch(7, replica, skew=skew, samples=32)] for replica in range(2)]
    home, abroad = (
        sum(float(F.mse_loss(m(x), y).detach()) for m, (x, y) in zip(models, each, strict=True))
        for each in (first, first[::-1])
    )
    return abroad / home - 1


def adapt(skew: float, steps: int) -> list[Averaging]:
    """How replicas averaged by then, step by step; their labels differ by `skew`."""
    module = make(1, "adaptive", lr_scheduler=None, max_grad_norm=None)
    found = []
    for step in range(steps):
        module.train_step(*batch(step, module.rank, skew=skew, samples=32))
        found.append(module.averaging)
    module.close()
    return found


@pytest.mark.thorough
def test_adaptive_averages_seldom_where_data_are_alike_and_often_where_labels_differ(gloo: Pool) -> None:
    alike, skewed = (gloo.run(adapt, ranks=2, args=(skew, 60)) for skew in (0.0, 3.0))
    for one, other in (alike, skewed):
        assert [each._replace(sent_bytes=0) for each in one] == [each._replace(sent_bytes=0) for each in other]
    assert [each.every for each in alike[0]][7::8] == [16, 16, 32, 32, 32, 32, 64]
    assert [each.every for each in skewed[0][7:14]] == [4, 4, 4, 4, 2, 2, 1]
    assert sum(each.every == 1 for each in skewed[0]) > 30
    assert max(each.every for each in skewed[0][14:]) == 2
    assert alike[0][-1].times <= 4
    assert skewed[0][-1].times > 40
    local = sum(p.numel() * 8 for p in tied_model().parameters())
    for found, skew in ((alike[0], 0.0), (skewed[0], 3.0)):
        assert found[6].gap is None
        assert found[7].gap == pytest.approx(first_gap(skew), rel=1e-10)
        assert found[6].sent_bytes == 0
        assert 0 < found[-1].sent_bytes - found[-1].times * local < 20 * 8_000  # looks: a microbatch of 16 samples each


@pytest.mark.parametrize(("every", "gap", "expected"), [(8, 0.1, 16), (8, 0.2, 8), (8, 0.5, 4), (2, 9.0, 1)])
def test_the_next_interval_weighs_the_gap_against_bytes(every: int, gap: float, expected: int) -> None:
    assert next_interval(every, gap) == expected
    assert next_interval(every, math.inf) == max(1, every // 2)


def save_between(folder: str, every: int | str, at: int, skew: float) -> tuple[Any, Any, list[str]]:
    """Weights of a run that saves between two averagings and goes on, and of one that goes on from there."""

    def given(module: PipelineModule, step: int) -> Any:
        return batch(step, module.rank % 2, skew=skew)

    def weights(module: PipelineModule, first: int, last: int) -> Any:
        for step in range(first, last):
            module.train_step(*given(module, step))
        return module.full_state_dict()

    one = make(2, every, "adamw")
    weights(one, 0, at)
    one.eval_step(*given(one, at))
    times = [one.averaging.times]
    one.train_step(*given(one, at))
    one.save(folder)
    went_on, times = weights(one, at + 1, at + 13), [*times, one.averaging.times]
    told = [refusal(lambda: one.forward_backward(*given(one, 0))), refusal(lambda: one.clip_grad_norm_(1.0))]
    intervals = [one.averaging.every]
    one.close()
    other = make(2, every, "adamw")
    other.load(folder)
    resumed = weights(other, at + 1, at + 13)
    intervals += [other.averaging.every]
    other.close()
    return went_on, resumed, [*told, str(times), str(intervals)]


@pytest.mark.thorough(but=["case1-[2, 5] [32, 32]"])
@pytest.mark.parametrize(
    ("case", "known"),
    [
        ((4, 2, 0.0), "[1, 6] [4, 4]"),
        (("adaptive", 18, 0.0), "[2, 5] [32, 32]"),
        (("adaptive", 18, 2.0), "[4, 8] [16, 16]"),
    ],
)
def test_a_checkpoint_between_two_averagings_goes_on_as_the_run_that_saved_it(
    gloo: Pool, tmp_path: Path, case: tuple[int | str, int, float], known: str
) -> None:
    """To the last bit, with AdamW's state, which replicas share from there on; and with the H that was found."""
    for went_on, resumed, told in gloo.run(save_between, ranks=4, args=(str(tmp_path), *case)):
        for name, expected in went_on.items():
            assert torch.equal(resumed[name], expected)
        assert told[0].startswith("forward_backward under sync=")
        assert told[1].startswith("clip_grad_norm_ under sync=")
        assert " ".join(told[2:]) == known  # eval_step; save, steps, full_state_dict


def same_bits() -> list[bool]:
    found = []
    for mesh in ({"pipe": 1, "data": 2}, sw.Mesh(pipe=1, data=2, sync=1)):
        module = make(1, 1, mesh=mesh)
        found.append([module.train_step(*batch(step, module.rank)).loss for step in range(3)])
        found.append(module.full_state_dict())
        module.close()
    return [found[0] == found[2], *(torch.equal(found[3][name], value) for name, value in found[1].items())]


def refused(options: dict[str, Any]) -> list[str]:
    told = []
    for each in ({"model": nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double()}, *options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                made = make(1, 4, **each)
                made.build(*batch(0, made.rank))
                made.close()
                told.append(" ".join(str(one.message) for one in caught))
            except ValueError as error:
                told.append(str(error))
    return told


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "2bw"}, "sync=4 under the asynchronous schedule '2bw'"),
    ({"mesh": sw.Mesh(pipe=1, data=2, sync=4, data_parallel="zero1")}, "sync=4 with 'zero1' or 'fsdp'"),
    ({"mesh": sw.Mesh(pipe=2, sync=4)}, "sync=4 for one replica: expected Mesh(data=D)"),
    ({"mesh": sw.Mesh(pipe=1, data=2, sync=0)}, "sync=0: expected a number of steps, at least 1, or 'adaptive'"),
    ({"mesh": sw.Mesh(pipe=1, data=2, sync="often")}, "sync='often': expected a number of steps"),
    ({"optimizer": None, "lr_scheduler": None, "max_grad_norm": None}, "sync=4 without an optimizer"),
    ({"precision": "fp16"}, "sync=4 with a grad_scaler"),
    ({"schedule": "auto", "mesh": sw.Mesh(pipe=1, sync=4)}, 'Mesh(sync=) together with schedule="auto"'),
]


def test_what_does_not_go_with_it_is_refused_before_the_first_step(gloo: Pool) -> None:
    for rank, (norm, *told) in enumerate(gloo.run(refused, ranks=2, args=([options for options, _ in REFUSED],))):
        assert ("'1' is a BatchNorm under sync=" in norm) == (rank == 0)
        for text, (_, expected) in zip(told, REFUSED, strict=True):
            assert expected in text
    assert all(all(each) for each in gloo.run(same_bits, ranks=2))
    with pytest.raises(ValueError, match="sync=4 in one process, where replicas share Parameters"):
        make(1, 4)
