"""Plans that run nodes of a stage by samples, divided or whole on each tensor rank: against one plain process."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.alone import near, train_alone
from support.failing import refusal
from support.inside import GPT, GPTConfig, profile_cut
from support.parts import Parts
from support.pool import Pool
from support.tensor_models import make_pipe
from support.uneven import plan_of, stage
from torch import Tensor, nn

from stagewright.partition import Cluster, Node, Plan, Profile, plan
from stagewright.pipe import Mesh, PipelineModule

WIDE = {"fc1": "column", "fc2": "row"}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    parts: dict[str, nn.Module] = {
        "c1": nn.Conv2d(2, 4, 3, padding=1),
        "r1": nn.ReLU(inplace=True),
        "c2": nn.Conv2d(4, 3, 3),
        "pool": nn.AvgPool2d(2),
        "flat": nn.Flatten(),
        "fc1": nn.Linear(12, 8),
        "r2": nn.ReLU(),
        "fc2": nn.Linear(8, 5),
    }
    return nn.Sequential(OrderedDict(parts)).double()


def batch(seed: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, 6, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 5, (size,), generator=generator)


def train(plan: Plan, **options: Any) -> dict[str, Any]:
    settings = {"tensor_parallel": WIDE, "loss_fn": F.cross_entropy, "optimizer": SGD, "verify": True}
    with make_pipe(cnn(), num_microbatches=None, plan=plan, **(settings | options)) as pipe:
        results = [pipe.train_step(*batch(step)) for step in range(3)]
        return {
            "losses": [one.loss for one in results],
            "norms": [one.grad_norm for one in results],
            "eval": pipe.eval_step(*batch(3)).loss,
            "state": pipe.full_state_dict(),
        }


def train_plain() -> dict[str, Any]:
    model = cnn()
    found = train_alone(model, map(batch, range(3)), SGD, loss_fn=F.cross_entropy, clip=0.7)
    x, y = batch(3)
    return found._asdict() | {"eval": F.cross_entropy(model(x), y).item()}


ON, BY, CUT, WHOLE = "samples on", "samples", "divided", "whole"
ONE = plan_of(stage("c1 r1 c2 pool flat fc1 r2 fc2", 0, 1, splits=(ON, ON, ON, ON, BY, CUT, CUT, CUT)))
CASES = {
    "one stage": ONE,
    "a cut between parts": plan_of(
        stage("c1 r1 c2", 0, 1, splits=(ON, ON, ON)),
        stage("pool flat fc1 r2 fc2", 2, 3, splits=(ON, BY, CUT, CUT, CUT)),
    ),
    "all by samples, and one size a stage": plan_of(
        stage("c1 r1 c2", 0, splits=()), stage("pool flat fc1 r2 fc2", 1, 2, splits=(ON, ON, ON, BY, BY))
    ),
    "whole": plan_of(stage("c1 r1 c2 pool flat fc1 r2 fc2", 0, 1, splits=(BY, BY, ON, BY, CUT, WHOLE, WHOLE, WHOLE))),
}


@pytest.mark.thorough(but=["whole"])
@pytest.mark.parametrize("case", CASES)
def test_it_equals_one_process(gloo: Pool, case: str) -> None:
    plan, wanted = CASES[case], train_plain()
    for found in gloo.run(train, ranks=plan.num_devices, args=(plan,)):
        near(found, wanted)


class Centred(nn.Module):
    """A module that nobody knows, with all samples in its mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_what_may_run_by_samples() -> None:
    """Children of an nn.Sequential that give a part of the results for a part of the samples."""
    twice = nn.Tanh()
    parts: dict[str, nn.Module] = {
        "conv": nn.Conv2d(2, 4, 3),
        "batch": nn.BatchNorm2d(4),
        "twice": twice,
        "group": nn.GroupNorm(2, 4),
        "again": twice,
        "centred": Centred(),
        "drop": nn.Dropout(0.5),
        "inner": nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), nn.Flatten()),
        "fold": nn.Unflatten(0, (2, 2)),
        "unfold": nn.Flatten(0, 1),
        "last": nn.Linear(16, 3),
    }
    model, x = nn.Sequential(OrderedDict(parts)), torch.rand(4, 2, 6, 6)
    found = profile_cut(model, (x,), tensor=1, repetitions=1)
    assert [node.name for node in found.nodes if node.split == "any"] == ["conv", "group", "inner", "last"]
    single = profile_cut(nn.Sequential(nn.Linear(3, 3)), (torch.rand(1, 3),), tensor=1, repetitions=1)
    assert single.nodes[0].split == "divided"


class Called(
    Parts, c1=lambda: nn.Conv2d(2, 4, 3, padding=1), fc1=lambda: nn.Linear(144, 8), fc2=lambda: nn.Linear(8, 5)
):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(self.c1(x).flatten(1)))


def refusals() -> list[str]:
    settings = {"tensor_parallel": WIDE, "loss_fn": F.cross_entropy, "optimizer": SGD}

    def train_one(make: Callable[[], nn.Module], own: Plan, size: int) -> None:
        with make_pipe(make().double(), num_microbatches=None, plan=own, **settings) as pipe:
            pipe.train_step(*batch(0, size))

    return [refusal(partial(train_one, *row[:3])) for row in REFUSED]


def normed() -> nn.Module:
    return nn.Sequential(OrderedDict(cnn().named_children()) | {"pool": nn.BatchNorm2d(3), "fc1": nn.Linear(48, 8)})


def halves(*splits: str, nodes: str = "c1 r1 c2 pool flat fc1 r2 fc2") -> Plan:
    return plan_of(stage(nodes, 0, 1, splits=splits))


REFUSED: list[tuple[Callable[[], nn.Module], Plan, int, str]] = [
    (normed, halves(ON, ON, ON, ON, BY, CUT, CUT, CUT), 8, "module 'pool' (BatchNorm2d) has all samples"),
    (cnn, ONE, 12, "a tensor of shape (3, 2, 6, 6) over 2 tensor ranks: expected dimension 0 to be"),
    (
        Called, halves(BY, CUT, CUT, nodes="c1 fc1 fc2"), 8,
        "the plan runs 1 by samples and 2 divided of c1 .. fc2: expected an nn.Sequential with these children",
    ),
]  # fmt: skip


def test_refused_before_anything_runs(gloo: Pool) -> None:
    for told in gloo.run(refusals, ranks=2):
        assert all(why in said for said, (*_, why) in zip(told, REFUSED, strict=True)), told


B, T, D, V = 2, 8, 16, 32


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_one_member_of_a_group() -> None:
    """Bytes and sums against a count by hand; the model itself, and which units are equal, stay as they were."""
    model = GPT(GPTConfig(vocabulary=V, layers=3, width=D, heads=4, length=T))
    tokens = torch.zeros(B, T, dtype=torch.int64)
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    one, half = (
        profile_cut(model, (tokens,), tensor=tensor, target=tokens, loss_fn=cross_entropy, repetitions=1)
        for tensor in (1, 2)
    )
    assert {name: (id(p), p.shape) for name, p in model.named_parameters()} == before
    assert [node.name for node in half.nodes] == [node.name for node in one.nodes]
    assert "timed as blocks.0" in half.nodes[2].description
    assert (one.tensor, half.tensor) == (1, 2)
    divided, whole = 4 * D * D + 3 * D + 8 * D * D + 4 * D, 6 * D  # two biases, two norms: each member has them
    embedding, block, *_, head = half.nodes
    assert one.nodes[1].parameter_bytes == 4 * (divided + whole)
    assert block.parameter_bytes == 4 * (divided / 2 + whole)
    assert (embedding.parameter_bytes, head.parameter_bytes) == tuple(one.nodes[i].parameter_bytes for i in (0, -1))
    hidden = 4 * B * T * D
    for node in half.nodes:
        sums = (2, 2 * hidden, 2, 2 * hidden) if node.name.startswith("blocks") else (0, 0, 0, 0)
        assert (node.forward_sums, node.forward_sum_bytes, node.backward_sums, node.backward_sum_bytes) == sums
    assert block.stash_bytes < one.nodes[1].stash_bytes
    assert block.activation_bytes == one.nodes[1].activation_bytes
    assert Profile.from_json(half.to_json()) == half


def measured(tensor: int, size: int = 1) -> Profile:
    nodes = [Node(name="a", forward_seconds=1.0, backward_seconds=2.0)]
    return Profile(nodes=nodes, tensor=tensor, microbatch_size=size)


def test_refused_by_name() -> None:
    cluster = Cluster.parse("4:link=10GB/s")
    with pytest.raises(ValueError, match=r"no profile of microbatches of 2 over 2 tensor ranks, .* --tensor 2"):
        plan([measured(1), measured(1, size=2), measured(2)], cluster, global_batch=2)
    with pytest.raises(ValueError, match="a second profile of microbatches of 1 over 2 tensor ranks"):
        plan([measured(2), measured(2)], cluster, global_batch=2)
    with pytest.raises(ValueError, match="tensor_sizes=3: expected some of 1, 2"):
        plan([measured(1), measured(2)], cluster, global_batch=2, tensor_sizes=[3])
    with pytest.raises(ValueError, match="tensor: 0: expected a whole number"):
        Profile(nodes=measured(1).nodes, tensor=0)


def predicted() -> float:
    """How far the output is from the plain model's, for microbatches with as many samples as features."""
    torch.manual_seed(0)
    plain, x = (
        nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double(),
        torch.randn(8, 6, dtype=torch.float64),
    )
    model, mesh = copy.deepcopy(plain), Mesh(tensor=2, tensor_parallel={"0": "samples"})
    found = PipelineModule(model, mesh=mesh, num_microbatches=4).predict(x)
    return float((found - plain(x).detach()).abs().max()) if isinstance(found, Tensor) else torch.inf


@pytest.mark.thorough
def test_predictions_of_divided_samples_are_joined(gloo: Pool) -> None:
    """Of the sizes of a microbatch that were tried, the members divided none, and it came as a list."""
    assert max(gloo.run(predicted, ranks=2)) < 1e-12
