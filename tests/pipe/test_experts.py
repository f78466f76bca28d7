"""Expert groups: a pipeline whose members hold different experts makes what one plain process makes of all batches."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright import Mesh, PipelineModule, Precision

WIDTH, NUMBER = 6, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Listed(nn.Module):
    """Experts in a list, of which only those with tokens are called; no token goes to the last one."""

    def __init__(self, number: int = NUMBER, *, top: int = 2) -> None:
        super().__init__()
        self.gate, self.top = nn.Linear(WIDTH, number, bias=False), top
        self.experts = nn.ModuleList(Expert() for _ in range(number))

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(tokens).softmax(-1)
        last = torch.arange(len(self.experts)) == len(self.experts) - 1
        weights, chosen = scores.masked_fill(last, 0.0).topk(self.top)
        return weights, chosen

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.choose(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                out = out.index_add(0, token, weights[token, place, None] * expert(tokens[token]))
        return x + out.view_as(x)


class Weights(nn.Module):
    """Stacked weights of experts."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.randn(number, 8, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(number, WIDTH, 8) / 3)

    def forward(self, hidden: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for number in range(self.num_experts):
            token, place = torch.where(numbers == number)
            if len(token):
                made = F.linear(F.gelu(F.linear(hidden[token], self.up[number])), self.down[number])
                out = out.index_add(0, token, made * weights[token, place, None])
        return out


class Stacked(Listed):
    def __init__(self, number: int = NUMBER, *, top: int = 2) -> None:
        super().__init__(1, top=top)
        self.gate, self.experts = nn.Linear(WIDTH, number, bias=False), Weights(number)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.top)
        out: Tensor = self.experts(tokens, chosen, weights).view_as(x)
        return x + out


def model(*layers: nn.Module) -> nn.Sequential:
    """A dense layer is among those of experts."""
    torch.manual_seed(0)
    own = layers or (Listed(), nn.Linear(WIDTH, WIDTH), Stacked(), Listed())
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, WIDTH), *own, nn.Linear(WIDTH, 2)).double()
    for parameter in whole.parameters():
        parameter.data = torch.randn_like(parameter) / 2
    return whole


def batch(replica: int, step: int, samples: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(samples, 5, 3, generator=generator, dtype=torch.float64), torch.randn(
        samples, 5, 2, generator=generator, dtype=torch.float64
    )


def _plain(steps: int, replicas: int, *, delay: int = 0, max_norm: float | None = 1.0) -> tuple[list[float], Any]:
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    losses, versions = [], [{k: v.clone() for k, v in plain.state_dict().items()}] * (delay + 1)
    for step in range(steps):
        newest = {k: v.clone() for k, v in plain.state_dict().items()}
        plain.load_state_dict(versions[-1 - delay])
        whole = [torch.cat(x) for x in zip(*(batch(r, step) for r in range(replicas)), strict=True)]
        loss = F.mse_loss(plain(whole[0]), whole[1])
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        plain.load_state_dict(newest)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        optimizer.step()
        versions.append({k: v.clone() for k, v in plain.state_dict().items()})
    return losses, plain


def _trained(options: dict[str, Any], mesh: dict[str, Any], folder: str = "") -> list[float]:
    """Of three steps: differences of losses, weights, evaluation and outputs from those of one plain process."""
    warnings.filterwarnings("ignore", message="the schedule splits the backward")  # experts give little to W
    delay = int(options.get("schedule") == "2bw")
    with PipelineModule(
        model(),
        mesh=Mesh(**mesh),
        num_microbatches=2,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        max_grad_norm=1.0,
        verify=True,
        **options,
    ) as pipe:
        replica, count = pipe.replica
        expected, plain = _plain(3, count, delay=delay)
        results = [pipe.train_step(*batch(replica, step)) for step in range(3)] + pipe.flush()
        found = [result.loss for result in results if result.loss is not None]
        differences = [abs(one - other) for one, other in zip(found, expected, strict=True)]
        state = pipe.full_state_dict()
        differences += [float((state[name] - x).abs().max()) for name, x in plain.state_dict().items()]
        plain.load_state_dict(state)
        x, y = batch(replica, 3)
        whole = [torch.cat(x) for x in zip(*(batch(r, 3) for r in range(count)), strict=True)]
        loss = pipe.eval_step(x, y).loss
        differences.append(abs((math.nan if loss is None else loss) - F.mse_loss(plain(whole[0]), whole[1]).item()))
        output = pipe.predict(x)
        if output is not None:
            assert isinstance(output, Tensor)
            differences.append((output - plain(x)).abs().max().item())
        if folder:
            pipe.save(folder)
        return differences


@pytest.mark.gloo
def test_an_expert_group_trains_evaluates_and_predicts_as_one_process(gloo: Pool) -> None:
    for differences in gloo.run(_trained, ranks=4, args=({"schedule": "1f1b"}, {"pipe": 2, "expert": 2})):
        assert max(differences) < 1e-10


@pytest.mark.gloo
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "mesh"),
    [
        ({"schedule": "interleaved", "num_chunks": 2}, {"pipe": 2, "expert": 2}),
        (
            {"schedule": "zb-h1", "recompute": "selective"},
            {"pipe": 2, "expert": 2, "order": ("expert", "pipe", "data", "tensor")},
        ),
        ({"schedule": "1f1b", "recompute": "full"}, {"pipe": 2, "expert": 2}),
        ({"schedule": "2bw"}, {"pipe": 2, "expert": 2}),
        ({"schedule": "1f1b"}, {"pipe": 1, "expert": 2, "data": 2}),
        ({"schedule": "2bw"}, {"pipe": 1, "expert": 2, "data": 2}),
        ({"schedule": "gpipe"}, {"pipe": 1, "expert": 4}),
    ],
    ids=lambda each: "-".join(map(str, each.values())),
)
def test_with_schedules_and_data_replicas(gloo: Pool, options: dict[str, Any], mesh: dict[str, Any]) -> None:
    for differences in gloo.run(_trained, ranks=4, args=(options, mesh)):
        assert max(differences) < 1e-10


def _first(folder: str, samples: list[int]) -> None:
    with _pipeline({"pipe": 1, "expert": 2}) as pipe:
        for step in range(2):
            pipe.train_step(*batch(pipe.replica[0], step, samples[pipe.replica[0]]))
        pipe.save(folder)


def _pipeline(mesh: Any, **options: Any) -> PipelineModule:
    options = {"num_microbatches": 2, "loss_fn": F.mse_loss, "verify": False, **options}
    return PipelineModule(
        options.pop("model", None) or model(),
        mesh=mesh,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        **options,
    )


def _second(folder: str, mesh: dict[str, int], samples: list[int]) -> float:
    """Loads it, steps once more, and clips by hand: the largest difference from one process that made all steps."""
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)

    def pass_back(counts: list[int], step: int) -> None:
        whole = [torch.cat(x) for x in zip(*(batch(r, step, n) for r, n in enumerate(counts)), strict=True)]
        optimizer.zero_grad()
        F.mse_loss(plain(whole[0]), whole[1]).backward()

    for step in range(2):
        pass_back(samples, step)
        optimizer.step()
    with _pipeline(mesh) as pipe:
        replica, count = pipe.replica
        pipe.build(*batch(replica, 2))
        pipe.load(folder)
        pipe.train_step(*batch(replica, 2))
        pass_back([4] * count, 2)
        optimizer.step()
        pipe.forward_backward(*batch(replica, 3))
        pass_back([4] * count, 3)
        norms = [pipe.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()]
        state = pipe.full_state_dict()
        return max(
            abs(norms[0] - norms[1]), *(float((state[n] - x).abs().max()) for n, x in plain.state_dict().items())
        )


@pytest.mark.gloo
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


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 2)

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
    assert isinstance(loss, Tensor)
    loss.backward()
    with _pipeline({"pipe": 2, "expert": 2}, model=own, loss_fn=_balanced_loss, schedule=schedule, verify=True) as pipe:
        found = pipe.forward_backward(*batch(pipe.replica[0], 0)).loss or math.nan
        expected = dict(plain.named_parameters())
        pairs = [(p.grad, expected[name].grad) for name, p in pipe.named_parameters()]
        differences = [float((x - y).abs().max()) for x, y in pairs if x is not None and y is not None]
    return max(abs(found - loss.item()), *differences)


@pytest.mark.gloo
@pytest.mark.thorough
def test_auxiliary_losses_are_of_each_members_microbatch(gloo: Pool) -> None:
    assert max(gloo.run(_auxiliary, ranks=4, args=("zb-h1",))) < 1e-10


class Hot(Listed):
    """All choices of all tokens are expert 0, so that the second member gets no rows."""

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().choose(tokens)
        return weights, torch.zeros_like(chosen)


class Only(Listed):
    """Nothing is saved for its backward but by expert 0: a checkpoint of the second member has nothing to run again."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[0](x.reshape(-1, WIDTH)).view_as(x)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


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
    own = (
        model(Checkpointed(Hot()), HotStacked(), Checkpointed(Dropping()), Checkpointed(Only()))
        if kind != "frozen"
        else model(Listed(), Stacked())
    )
    frozen = ("0", "1.gate", "1.experts.0", "1.experts.1") if kind == "frozen" else ()
    for name, parameter in own.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    plain, worst = copy.deepcopy(own), 0.0
    parts = [each for r in range(2) for each in zip(*(x.chunk(2) for x in batch(r, 0)), strict=True)]
    for x, y in parts:
        (F.mse_loss(plain(x), y) / len(parts)).backward()
    recompute = "full" if kind == "recomputed" else "none"
    with _pipeline({"pipe": 2, "expert": 2}, model=own, recompute=recompute, timeout=30.0) as pipe:
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


@pytest.mark.gloo
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["checkpointed", "recomputed", "frozen"])
def test_members_without_rows_or_gradients_take_part(gloo: Pool, kind: str) -> None:
    assert max(gloo.run(_uneven, ranks=4, args=(kind,))) < 1e-10


class Odd(nn.Module):
    """Experts of a form of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(WIDTH, NUMBER * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x).view(*x.shape, NUMBER).sum(-1)
        return out


class InPlace(Listed):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return super().forward(x)


class Inside(Listed):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


class Chained(Listed):
    """Each expert takes what the one before gives."""

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = expert(x)
        return x


class Doubled(Weights):
    def forward(self, hidden: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, numbers, weights) * self.num_experts


def _with(kind: str) -> nn.Module:
    match kind:
        case "none":
            return nn.Linear(WIDTH, WIDTH)
        case "three":
            return Listed(3)
        case "norm":
            listed = Listed()
            listed.experts[1].norm = nn.BatchNorm1d(WIDTH)
            return listed
        case "doubled":
            stacked = Stacked()
            stacked.experts = Doubled(NUMBER)  # type: ignore[assignment]
            return stacked
    return {"odd": Odd, "in place": InPlace, "inside": Inside, "chained": Chained}.get(kind, Listed)()


_TEXTS = {
    "none": r'mesh={"expert": 2} and the model has no experts: expected an nn.ModuleList of experts',
    "three": r"module '1' has 3 experts, over 2 members of an expert group: expected a number that",
    "odd": r"module '1.experts' \(Linear\) has experts of an unknown form: expected an nn.ModuleList",
    "norm": r"experts of '1' have a BatchNorm1d, over rows of all members",
    "in place": r"module '1' has experts, and fails where it is tried: .* changes its input in place: expected a copy",
    "chained": r"module '1' has experts, and fails where it is tried: .* calls its experts otherwise when it runs",
    "inside": r"a module that calls experts has a torch.utils.checkpoint inside: expected it around",
    "doubled": r"module '1.experts' gives something else when its experts are divided",
    "zero1": r'mesh={"expert": 2} with data_parallel=.zero1.: expected "expert": 1, or only one of them',
    "sync": r'mesh={"expert": 2} with sync=4, whose replicas',
    "sliced": r'mesh={"expert": 2} under .seq1f1b., over slices',
    "compressed": r'mesh={"expert": 2} with compress=',
    "auto": r'mesh={"expert": 2} with schedule="auto", whose plans have none',
    "reroute": r'mesh={"expert": 2} with on_failure="reroute"',
    "memory": r'mesh={"expert": 2} with recompute= of a budget',
    "compiled": r'mesh={"expert": 2} with compile=',
    "late": r"members of an expert group passed other numbers of samples",
}
_MESHES: dict[str, dict[str, Any]] = {
    "zero1": {"data_parallel": "zero1"},
    "sync": {"sync": 4},
    "compressed": {"compress": "int8"},
    "reroute": {"on_failure": "reroute"},
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "sliced": {"schedule": "seq1f1b"},
    "auto": {"schedule": "auto"},
    "memory": {"recompute": {"memory_budget": "1MiB"}},
    "compiled": {"precision": Precision(compile=True)},
    "late": {"schedule": "2bw"},
}


def _refused(kind: str) -> None:
    warnings.filterwarnings("ignore", message=".*torch.jit")  # of compile=
    mesh: Any = Mesh(pipe=1, expert=2, **_MESHES.get(kind, {}))

    def train() -> None:
        with _pipeline(mesh, model=model(_with(kind)), **_OPTIONS.get(kind, {})) as pipe:
            for step in range(3):
                pipe.train_step(*batch(0, step, 2 + 2 * (kind == "late") * pipe.replica[0]))

    with pytest.raises(ValueError, match=_TEXTS[kind]):
        train()


@pytest.mark.gloo
@pytest.mark.thorough
@pytest.mark.parametrize("kind", _TEXTS)
def test_what_an_expert_group_does_not_divide_is_refused_by_name(gloo: Pool, kind: str) -> None:
    gloo.run(_refused, ranks=2, args=(kind,))


def test_an_expert_group_in_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match=r'members of an expert group are processes. Expected "expert": 1, or 2 proc'):
        PipelineModule(model(), mesh={"pipe": 1, "expert": 2}, loss_fn=F.mse_loss)
