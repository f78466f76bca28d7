"""Expert groups: a pipeline whose members hold different experts makes what one plain process makes of all batches."""

import copy
import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.alone import train_alone
from support.experts import NUMBER, WIDTH, Batched, Expert, Listed, Stacked, batch, model, pipeline
from support.inside import ListedExperts, TensorGroup
from support.parts import GIVEN, Parts
from support.pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright import Mesh, PeerLost


def dense() -> nn.Sequential:
    """What a tensor group divides."""
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))


def joined(counts: list[int], step: int, *, length: int = 5) -> tuple[Tensor, ...]:
    parts = (batch(replica, step, number, length=length) for replica, number in enumerate(counts))
    return tuple(map(torch.cat, zip(*parts, strict=True)))


AXES = {
    "context": {"pipe": 1, "context": 2, "expert": 2},
    "tensors": {"expert": 2, "tensor": 2, "tensor_parallel": "auto"},
}


def _trained(kind: str, options: dict[str, Any], mesh: dict[str, Any]) -> list[float]:
    """Of three steps: differences of losses, weights, evaluation and outputs from those of one plain process."""
    warnings.filterwarnings("ignore", message="the schedule splits the backward")  # experts give little to W
    delay, length = int(options.get("schedule") == "2bw"), 8 if kind == "context" else 5

    def made() -> nn.Sequential:
        return model(*((Listed(), dense(), Stacked(), dense()) if kind == "tensors" else ()))

    options = {"verify": True, "max_grad_norm": 1.0} | options
    with pipeline(Mesh(**AXES.get(kind, {}) | mesh), model=made(), **options) as pipe:
        replica, count = pipe.replica
        plain, wholes = made(), (joined([4] * count, step, length=length) for step in range(3))
        expected = train_alone(plain, wholes, partial(torch.optim.AdamW, lr=0.05), delay=delay, clip=1.0).losses
        results = [pipe.train_step(*batch(replica, step, length=length)) for step in range(3)] + pipe.flush()
        found = [result.loss for result in results if result.loss is not None]
        differences = [abs(one - other) for one, other in zip(found, expected, strict=True)]
        state = pipe.full_state_dict()
        differences += [float((state[name] - x).abs().max()) for name, x in plain.state_dict().items()]
        plain.load_state_dict(state)
        x, y = batch(replica, 3, length=length)
        whole = joined([4] * count, 3, length=length)
        loss = pipe.eval_step(x, y).loss
        differences.append(abs((math.nan if loss is None else loss) - F.mse_loss(plain(whole[0]), whole[1]).item()))
        output = pipe.predict(x)
        if output is not None:
            differences.append((output - plain(x)).abs().max().item())
        return differences


ORDER = ("expert", "pipe", "data", "tensor")
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # processes, options, axes of the mesh
    "pipe": (4, {"schedule": "1f1b"}, {"pipe": 2, "expert": 2}),
    "chunks": (4, {"schedule": "interleaved", "num_chunks": 2}, {"pipe": 2, "expert": 2}),
    "split": (4, {"schedule": "zb-h1", "recompute": "selective"}, {"pipe": 2, "expert": 2, "order": ORDER}),
    "recomputed": (4, {"schedule": "1f1b", "recompute": "full"}, {"pipe": 2, "expert": 2}),
    "stream": (4, {"schedule": "2bw"}, {"pipe": 2, "expert": 2}),
    "replicas": (4, {"schedule": "1f1b"}, {"pipe": 1, "expert": 2, "data": 2}),
    "replicas of a stream": (4, {"schedule": "2bw"}, {"pipe": 1, "expert": 2, "data": 2}),
    "zero1": (4, {"schedule": "1f1b"}, {"pipe": 1, "expert": 2, "data": 2, "data_parallel": "zero1"}),
    "zero1 of a stream": (4, {"schedule": "2bw"}, {"pipe": 1, "expert": 2, "data": 2, "data_parallel": "zero1"}),
    "fsdp": (4, {"schedule": "1f1b"}, {"pipe": 1, "expert": 2, "data": 2, "data_parallel": "fsdp"}),
    "fsdp, split": (4, {"schedule": "zb-h1"}, {"pipe": 2, "expert": 2, "data_parallel": "fsdp"}),
    "four members": (4, {"schedule": "gpipe"}, {"pipe": 1, "expert": 4}),
    "context of a stream": (4, {"schedule": "2bw"}, {}),
    "context of chunks": (8, {"schedule": "interleaved", "num_chunks": 2}, {"pipe": 2}),
    "context, fsdp": (
        4,
        {"schedule": "zb-h1", "recompute": "full"},
        {"data_parallel": "fsdp", "order": ("expert", "pipe", "data", "context", "tensor")},
    ),
    # A tensor group divides dense layers, and each of its members computes the same rows in experts of its own.
    "tensors": (8, {"schedule": "1f1b"}, {"pipe": 2}),
    "tensors of 2bw": (4, {"schedule": "2bw"}, {"pipe": 1, "order": ("pipe", "tensor", "data", "expert", "context")}),
    "tensors, zero1": (8, {"schedule": "1f1b", "recompute": "full"}, {"pipe": 1, "data": 2, "data_parallel": "zero1"}),
}


@pytest.mark.thorough(but=["zero1 of a stream"])
@pytest.mark.parametrize("name", CASES)
def test_an_expert_group_trains_evaluates_and_predicts_as_one_process(gloo: Pool, name: str) -> None:
    ranks, options, mesh = CASES[name]
    for differences in gloo.run(_trained, ranks=ranks, args=(name.replace(",", "").split()[0], options, mesh)):
        assert max(differences) < 1e-10


def _dropping_over_context() -> None:
    mesh = {"pipe": 1, "context": 2, "expert": 2}
    text = "output 0 of stage 0 .* differs over parts of the sequence"
    with pytest.raises(ValueError, match=text), pipeline(mesh, model=model(Batched())) as pipe:
        pipe.train_step(*batch(pipe.replica[0], 0, length=8))


def test_capacity_of_a_whole_sequence_is_refused_over_its_parts(gloo: Pool) -> None:
    gloo.run(_dropping_over_context, ranks=4)


def _first(folder: str, samples: list[int]) -> None:
    with pipeline({"pipe": 1, "expert": 2}) as pipe:
        for step in range(2):
            pipe.train_step(*batch(pipe.replica[0], step, samples[pipe.replica[0]]))
        pipe.save(folder)


def _second(folder: str, mesh: dict[str, int], samples: list[int]) -> float:
    """Loads it, steps once more, and clips by hand: the largest difference from one process that made all steps."""
    plain = model()
    with pipeline(mesh) as pipe:
        replica, count = pipe.replica
        pipe.build(*batch(replica, 2))
        pipe.load(folder)
        pipe.train_step(*batch(replica, 2))
        wholes = [joined(samples, 0), joined(samples, 1), joined([4] * count, 2)]
        train_alone(plain, wholes, partial(torch.optim.AdamW, lr=0.05))
        pipe.forward_backward(*batch(replica, 3))
        x, y = joined([4] * count, 3)
        plain.zero_grad()
        F.mse_loss(plain(x), y).backward()
        norms = [pipe.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()]
        state = pipe.full_state_dict()
        return max(
            abs(norms[0] - norms[1]), *(float((state[n] - x).abs().max()) for n, x in plain.state_dict().items())
        )


@pytest.mark.thorough
def test_a_checkpoint_loads_under_other_sizes_and_members_may_pass_other_numbers(gloo: Pool, tmp_path: Path) -> None:
    folder, samples = str(tmp_path / "saved"), [4, 2]
    gloo.run(_first, ranks=2, args=(folder, samples))
    for ranks, mesh in ((2, {"pipe": 2}), (4, {"pipe": 1, "expert": 4}), (4, {"pipe": 2, "expert": 2})):
        assert max(gloo.run(_second, ranks=ranks, args=(folder, mesh, samples))) < 1e-10


class Balanced(Listed):
    """Adds its auxiliary loss, which is a product of means over all tokens of a microbatch."""

    def forward(self, given: Any) -> Any:
        x, added = given if isinstance(given, tuple) else (given, given.new_zeros(len(given)))
        tokens = x.reshape(-1, WIDTH)
        _, chosen = self.choose(tokens)
        share = F.one_hot(chosen, len(self.experts)).to(x.dtype).mean((0, 1))
        return super().forward(x), added + (share * self.gate(tokens).softmax(-1).mean(0)).sum()


class Last(Parts, out=lambda: nn.Linear(WIDTH, 2)):
    def forward(self, given: Any) -> Any:
        return self.out(given[0]), given[1]


def _balanced_loss(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target) + 3 * output[1].mean()


def _auxiliary(schedule: str) -> float:
    warnings.filterwarnings("ignore", message="the schedule splits the backward")
    layers = (Balanced(), Balanced(), Balanced(), Last())
    plain = nn.Sequential(*[*model(*layers)][:-1])
    own = copy.deepcopy(plain)
    parts = [each for r in range(2) for each in zip(*(x.chunk(2) for x in batch(r, 0)), strict=True)]
    loss = sum(_balanced_loss(plain(x), y) for x, y in parts) / len(parts)
    loss.backward()
    with pipeline({"pipe": 2, "expert": 2}, model=own, loss_fn=_balanced_loss, schedule=schedule, verify=True) as pipe:
        found = pipe.forward_backward(*batch(pipe.replica[0], 0)).loss or math.nan
        expected = dict(plain.named_parameters())
        pairs = [(p.grad, expected[name].grad) for name, p in pipe.named_parameters()]
        differences = [float((x - y).abs().max()) for x, y in pairs if x is not None and y is not None]
    return max(abs(found - loss.item()), *differences)


@pytest.mark.thorough
def test_auxiliary_losses_are_of_each_members_microbatch(gloo: Pool) -> None:
    assert max(gloo.run(_auxiliary, ranks=4, args=("zb-h1",))) < 1e-10


class Hot(Listed):
    """All choices of all tokens are expert 0, so that the second member gets no rows."""

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().choose(tokens)
        return weights, torch.zeros_like(chosen)


def _counted() -> list[Any]:
    with pipeline({"pipe": 1, "expert": 2}, model=model(Hot(), Hot()), recompute="full") as pipe:
        timeline = pipe.forward_backward(*batch(pipe.replica[0], 0)).timeline()
    assert timeline.busiest_member == 2.0
    return [[(str(action), *rows) for action, rows in trace.rows] for trace in timeline.ranks]


@pytest.mark.thorough
def test_timelines_know_the_rows_of_each_members_experts(gloo: Pool) -> None:
    """Two layers, whose first member gets two choices of two samples of five tokens of both, again in the backward."""
    names = [f"0{op}{k}" for op in "FB" for k in (0, 2)]
    for found in gloo.run(_counted, ranks=2):
        assert sorted(found[0]) == sorted((name, 80, 80, 40.0) for name in names)
        assert sorted(each[1:] for each in found[1]) == [(0, 80, 40.0)] * 4


class Only(Listed):
    """Nothing is saved for its backward but by expert 0: a checkpoint of the second member has nothing to run again."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[0](x.reshape(-1, WIDTH)).view_as(x)  # type: ignore[no-any-return]


class Checkpointed(Parts, inner=GIVEN, is_on=True):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.is_on else self.inner(x)


class HotStacked(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights = self.gate(tokens).softmax(-1)[:, :2]
        out: Tensor = checkpoint(self.experts, tokens, torch.zeros(len(tokens), 2).long(), weights, use_reentrant=False)
        return x + out.view_as(x)


class Dropping(Listed):
    """No token of microbatches with a small sum goes to any expert."""

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().choose(tokens)
        return weights, torch.full_like(chosen, -1) if tokens.sum() < 0 else chosen


def _uneven(kind: str) -> float:
    """The largest difference of a gradient; infinite where one side alone has none."""
    own = {
        "frozen": lambda: model(Listed(), Stacked()),
        "batched": lambda: model(Batched(), Checkpointed(Batched(0)), Batched(20)),
    }.get(kind, lambda: model(Checkpointed(Hot()), HotStacked(), Checkpointed(Dropping()), Checkpointed(Only())))()
    frozen = ("0", "1.gate", "1.experts.0", "1.experts.1") if kind == "frozen" else ()
    for name, parameter in own.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    plain, worst = copy.deepcopy(own), 0.0
    parts = [each for r in range(2) for each in zip(*(x.chunk(2) for x in batch(r, 0)), strict=True)]
    for x, y in parts:
        (F.mse_loss(plain(x), y) / len(parts)).backward()
    recompute = "full" if kind == "recomputed" else "none"
    with pipeline({"pipe": 2, "expert": 2}, model=own, recompute=recompute, timeout=30.0) as pipe:
        pipe.forward_backward(*batch(pipe.replica[0], 0))
        for name, parameter in pipe.named_parameters():
            expected = plain.get_parameter(name).grad
            if not parameter.numel():
                continue
            if parameter.grad is None or expected is None:
                worst = max(worst, math.inf if (parameter.grad is None) != (expected is None) else 0.0)
                continue
            is_part = expected.shape != parameter.shape
            part = expected.chunk(2)[pipe.replica[0]] if is_part else expected
            worst = max(worst, float((parameter.grad - part).abs().max()))
    return worst


@pytest.mark.thorough(but=["recomputed"])
@pytest.mark.parametrize("kind", ["checkpointed", "recomputed", "frozen", "batched"])
def test_members_without_rows_or_gradients_take_part(gloo: Pool, kind: str) -> None:
    assert max(gloo.run(_uneven, ranks=4, args=(kind,))) < 1e-10


class Remembering(Listed):
    """Counts tokens in a new buffer each time, and lists what it did, as losses of balance often are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.register_buffer("load", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.load = self.load + x.numel()
        self.seen.append(len(x))
        return super().forward(x)


def test_a_forward_that_runs_twice_leaves_what_one_does() -> None:
    module, x = Remembering(), torch.randn(2, 3, WIDTH)
    style, alone = ListedExperts("1", NUMBER, "experts"), TensorGroup(None, index=0, count=1)
    found = [style.forward(module, Remembering, alone, x) for _ in range(2)]
    assert (module.load.item(), module.seen) == (2 * x.numel(), [2, 2])
    assert torch.allclose(found[1], module(x))


def _of_two_types() -> tuple[float, bool]:
    """Under autocast only the first member, of the only expert that gets rows, has results in bfloat16."""
    group, index = dist.group.WORLD, dist.get_rank()
    torch.manual_seed(0)
    module, x = Hot(), torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(index))
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
        group = TensorGroup(group, index=index, count=2)
        found = ListedExperts("1", NUMBER, "experts").forward(module, Hot, group, x)
    found.sum().backward()
    return float((found - expected).detach().abs().max()), module.experts[0].up.weight.grad is not None


def test_rows_travel_in_one_type_whichever_members_have_some(gloo: Pool) -> None:
    """A member without rows sent float32 for bfloat16, which ended the process within gloo."""
    for index, (difference, has_gradient) in enumerate(gloo.run(_of_two_types, ranks=2)):
        assert difference < 1e-2
        assert has_gradient == (index == 0)


class Noisy(Listed):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(Expert(), nn.Dropout(0.5)) for _ in range(NUMBER))


def _with_dropout(mesh: Mesh) -> list[float]:
    """Largest differences of a loss and of gradients of those who recompute from those who do not. Members of a tensor
    group, which compare gradients of what they hold whole, draw the same numbers in experts."""
    found: list[list[Tensor]] = []
    for is_on, recompute in ((False, "none"), (True, "none"), (False, "full")):
        own = model(dense(), Checkpointed(Noisy(), is_on=is_on), Checkpointed(Noisy(), is_on=is_on))
        with pipeline(mesh, model=own, recompute=recompute) as pipe:
            pipe.forward_backward(*batch(0, 0))  # the same on both members
            found.append([p.grad for p in pipe.parameters() if p.grad is not None])
    first, *others = found
    return [max(float((x - y).abs().max()) for x, y in zip(first, each, strict=True)) for each in others]


@pytest.mark.thorough
@pytest.mark.parametrize("tensor", [1, 2])
def test_dropout_in_experts_is_the_same_where_it_is_computed_again(gloo: Pool, tensor: int) -> None:
    """A checkpoint of the user's restored the numbers of the code around experts, but not theirs: gradients were of
    another mask than the loss."""
    mesh = Mesh(pipe=1, expert=2, tensor=tensor, tensor_parallel="auto" if tensor > 1 else None)
    assert gloo.run(_with_dropout, ranks=2 * tensor, args=(mesh,)) == [[0.0, 0.0]] * 2 * tensor


class Breaking(Expert):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and len(x):
            raise RuntimeError("an expert broke")
        return super().forward(x)


def _broken() -> str:
    own = Listed()
    own.experts[0] = Breaking()
    with (
        pytest.raises((RuntimeError, PeerLost)) as caught,
        pipeline({"pipe": 1, "expert": 2}, model=model(own), timeout=60.0) as pipe,
    ):
        pipe.train_step(*batch(pipe.replica[0], 0))
    return str(caught.value)


def test_an_expert_that_fails_ends_the_step_of_all_members_with_its_cause(gloo: Pool) -> None:
    first, second = gloo.run(_broken, ranks=2)
    assert first == "an expert broke"
    assert "cause: rank 0 failed: RuntimeError: an expert broke" in second
