"""Every family of schedules runs: against one plain process, float64.

Two copies of each stage that stay in step (chimera, dualpipe), and a V whose first and last stage share a rank:

layer    0    1    2    3    4    5    6    7       chimera on 4 ranks: stage s of two layers on ranks s and 3-s
         a                             a            a: tied, of the first and the last stage
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.alone import near, train_alone
from support.parts import Parts
from support.plain import batch
from support.pool import Pool
from support.records import records
from support.sizes import fitting
from support.small import WIDTH as SMALL_WIDTH
from support.small import sgd
from torch import Tensor, nn

from stagewright.pipe import PipelineModule
from stagewright.schedules import FAMILIES, Op, Schedule, build

WIDTH, STEPS, LIMIT = 4, 3, 0.05


def make_model() -> nn.Sequential:
    torch.manual_seed(4)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    layers[7].weight = layers[0].weight
    return nn.Sequential(*[nn.Sequential(layer, nn.Tanh()) for layer in layers]).double()


def make_batch(step: int, *, replica: int = 0) -> tuple[Tensor, Tensor]:
    """Batches of different sizes, the first of each replica alike."""
    return batch(10 * replica + step, WIDTH, samples=11 + (2 * replica if step else 0))


def whole_batch(step: int, num_replicas: int) -> tuple[Tensor, ...]:
    return tuple(map(torch.cat, zip(*(make_batch(step, replica=q) for q in range(num_replicas)), strict=True)))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def make_pipe(**options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"loss_fn": F.mse_loss, "optimizer": momentum, "max_grad_norm": LIMIT, "timeout": 120.0}
    return PipelineModule(make_model(), **records(**(settings | options)))


class Trained(NamedTuple):
    """losses: of all steps; norms: before clipping; state: behind them; the others: of the first batch, evaluated."""

    losses: list[float | None]
    norms: list[float | None]
    state: dict[str, Tensor]
    evaluation: float | None
    output: Tensor | None


def alone(num_replicas: int = 1) -> Trained:
    model = make_model()
    found = train_alone(model, (whole_batch(step, num_replicas) for step in range(STEPS)), momentum, clip=LIMIT)
    x, y = whole_batch(0, num_replicas)
    output = model(x).detach()
    return Trained(*found, float(F.mse_loss(output, y)), output)  # type: ignore[arg-type]


@pytest.mark.thorough(but=["chimera-4-1"])
@pytest.mark.parametrize(
    ("schedule", "P", "M"), [("chimera", 4, 4), ("chimera", 2, 3), ("chimera", 4, 1), ("dualpipe", 4, 8)], ids=str
)
def test_both_ways_in_one_process(schedule: str, P: int, M: int) -> None:
    pipe = make_pipe(schedule=schedule, num_microbatches=M, mesh={"pipe": P})
    results = [pipe.train_step(*make_batch(step)) for step in range(STEPS)]
    x, y = make_batch(0)
    evaluation = pipe.eval_step(x, y)
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    wanted = alone()
    near(Trained(losses, norms, pipe.full_state_dict(), evaluation.loss, evaluation.output), wanted)
    near(pipe.predict(x), wanted.output)  # in the batch's order, whichever way it came


class Rank(NamedTuple):
    """State of one rank behind STEPS steps.

    own: tensors that it holds; again: all weights behind a step, and behind the same step from a checkpoint;
    one_sample: the loss of an evaluation; schedule, sums: of the measured timeline.
    """

    trained: Trained
    own: dict[str, Tensor]
    again: tuple[Tensor, ...]
    one_sample: float | None
    schedule: Schedule
    sums: set[str]


def train(options: dict[str, Any], num_replicas: int, folder: Path) -> Rank:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches = [make_batch(step, replica=rank % num_replicas) for step in range(STEPS)]
    pipe = make_pipe(mesh={"pipe": size // num_replicas, "data": num_replicas}, **options)
    results = [pipe.train_step(*batch) for batch in batches]
    evaluation = pipe.eval_step(*batches[0])
    state = {name: tensor.clone() for name, tensor in pipe.full_state_dict().items()}
    own = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    one_sample = pipe.eval_step(*(tensor[:1] for tensor in make_batch(0))).loss  # the way up has nothing to do
    pipe.save(folder)
    after = []
    for _ in range(2):  # from here and, behind a load, from the checkpoint: momentum too
        result = pipe.train_step(*batches[1])
        after.append(torch.cat([tensor.flatten() for tensor in pipe.full_state_dict().values()]))
        pipe.load(folder)
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    trained = Trained(losses, norms, state, evaluation.loss, evaluation.output)
    timeline = result.timeline()
    pipe.close()
    together = {span.what for trace in timeline.ranks for span in trace.collectives}
    sums = {str(each) for each in together if each.op is Op.REDUCE_GRAD}
    return Rank(trained, own, tuple(after), one_sample, timeline.schedule, sums)


@pytest.mark.thorough(but=["chimera-3-fsdp-2-4", "dualpipe-v-5-1-2"])
@pytest.mark.parametrize(
    ("options", "num_replicas", "ranks"),
    [
        ({"schedule": "dualpipe", "num_microbatches": 4, "data_parallel": "zero1"}, 2, 4),
        ({"schedule": "chimera", "num_microbatches": 3, "data_parallel": "fsdp"}, 2, 4),
        ({"schedule": "dualpipe-v", "num_microbatches": 5}, 1, 2),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_copies_stay_in_step(
    gloo: Pool, options: dict[str, Any], num_replicas: int, ranks: int, tmp_path: Path
) -> None:
    found = gloo.run(train, ranks=ranks, args=(options, num_replicas, tmp_path))
    wanted = alone(num_replicas)
    schedule = found[0].schedule
    for rank, each in enumerate(found):
        assert each.trained.losses == found[0].trained.losses
        near(each.trained[:-1], wanted[:-1])
        assert torch.equal(*each.again)
        assert (each.trained.output is None) == (rank not in schedule.owners[-1])
        if options.get("data_parallel") != "fsdp":  # there a rank has parts
            for name, tensor in each.own.items():
                assert torch.equal(tensor, found[0].trained.state[name]), f"{name} on rank {rank}"
        first = [tensor[:1] for tensor in make_batch(0)]
        model = make_model()
        model.load_state_dict(each.trained.state)
        assert each.one_sample == pytest.approx(float(F.mse_loss(model(first[0]), first[1]).detach()), abs=1e-12)
    last = schedule.num_stages - 1
    copies = len(schedule.owners[0])
    # In a V one rank has both stages of the tied weight: it needs no message.
    wanted_sums = {f"0+{last}REDUCE_GRAD0", *(f"{stage}REDUCE_GRAD0" for stage in range(last + 1))}
    assert found[0].sums == (wanted_sums if copies > 1 else set())


RANKS, BATCHES = 4, 2
D = 3


def make_stages(num_stages: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(num_stages)]).double()


class Noting(torch.optim.SGD):
    def __init__(self, parameters: Any, noted: dict[int, list[Tensor]]) -> None:
        super().__init__(parameters, lr=1.0)
        self.noted = noted

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                self.noted.setdefault(id(parameter), []).append(parameter.grad.clone())


@pytest.mark.thorough(but=["1f1b"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_runs(name: str) -> None:
    P, M = fitting(name, RANKS, RANKS)
    once = {"update_every": M} if "update_every" in FAMILIES[name].options else {}
    schedule = build(name, num_ranks=P, num_microbatches=M, **once)
    model, plain = make_stages(schedule.num_stages), make_stages(schedule.num_stages)
    noted: dict[int, list[Tensor]] = {}
    pipe = PipelineModule(
        model,
        schedule=schedule,
        mesh={"pipe": P},
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: Noting(parameters, noted),
    )
    shape = (M + 1, 2 * RANKS, D)  # [B, T, D], one microbatch larger than the others
    batches = [torch.randn(2, *shape, dtype=torch.float64).unbind() for _ in range(BATCHES)]
    results = [pipe.train_step(*batch) for batch in batches]
    results += pipe.flush()
    evaluated = pipe.eval_step(*batches[0]).loss
    pipe.close()
    losses = {result.loss_step: result.loss for result in results if result.loss is not None}
    for step, (x, y) in enumerate(batches):
        plain.zero_grad()
        loss = F.mse_loss(plain(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        assert losses[step] == pytest.approx(float(loss.detach()), abs=1e-12)
        if step == 0:
            assert evaluated == pytest.approx(losses[0], abs=1e-12)
        for (key, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert len(noted[id(mine)]) == BATCHES, key
            torch.testing.assert_close(noted[id(mine)][step], theirs.grad, rtol=0, atol=1e-12)


X, Y = (torch.randn(14, SMALL_WIDTH, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in range(2))


def linear() -> nn.Module:
    return nn.Linear(SMALL_WIDTH, SMALL_WIDTH)


class Head(Parts, linear=lambda: linear().double()):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.linear(output), target)


LAYOUTS: dict[str, tuple[Callable[[], Sequence[nn.Module]], Callable[[], Any]]] = {
    "empty inside": (lambda: [linear(), nn.Sequential(), nn.Identity(), linear()], nn.MSELoss),
    "empty at first": (lambda: [nn.Identity(), linear(), nn.Sequential(), linear()], nn.MSELoss),
    "loss alone": (lambda: [linear(), linear(), linear(), nn.Identity()], nn.MSELoss),
    "loss with weights alone": (lambda: [linear(), linear(), nn.Sequential(), nn.Identity()], Head),
    "one stage has all": (lambda: [nn.Identity(), nn.Identity(), linear(), nn.Identity()], nn.MSELoss),
}


@pytest.mark.thorough(but=["empty inside-zb-h1-4"])
@pytest.mark.parametrize(("schedule", "num_ranks"), [("zb-h1", 4), ("interleaved", 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_without_layers(layout: str, schedule: str, num_ranks: int) -> None:
    make_stages, loss = LAYOUTS[layout][0], LAYOUTS[layout][1]()
    model = nn.Sequential(*make_stages()).double()
    plain = copy.deepcopy(nn.ModuleList([model, loss]))
    losses = train_alone(plain, [(X, Y)] * 3, sgd, loss_of=lambda both, x, y: both[1](both[0](x), y)).losses
    options = {"schedule": schedule, "mesh": {"pipe": num_ranks}, "num_microbatches": 4, "loss_fn": loss}
    pipe = PipelineModule(**records(stages=list(model.children()), optimizer=sgd, **options))
    near([pipe.train_step(X, Y).loss for _ in range(3)], losses, rtol=1e-12, atol=0.0)
    near(model.state_dict(), plain[0].state_dict(), rtol=1e-12, atol=1e-14)
