"""What an expert group does not divide is refused by name, on all members alike."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.experts import NUMBER, WIDTH, Expert, Listed, Stacked, Weights, batch, model, pipeline
from support.inside import Column, ListedExperts, Samples, TensorStyles, without_experts
from support.parts import Parts
from support.pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stagewright import Mesh, PipelineModule, Precision


def test_a_tensor_group_divides_all_but_the_experts() -> None:
    experts = TensorStyles(count=2, styles={"1": ListedExperts("1", NUMBER, "experts")})
    inside, outside = {"1.experts.0.up": Column()}, {"1.gate": Column(), "1.experts_too": Column()}
    assert without_experts(TensorStyles(count=2, styles=inside | outside), experts).styles == outside
    with pytest.raises(ValueError, match="2 tensor ranks would divide experts alone, which 2 expert ranks divide"):
        without_experts(TensorStyles(count=2, styles=inside), experts)
    for around in ("", "1"):  # gradients of experts were wrong without a word
        with pytest.raises(ValueError, match=f"a style for module '{around}', with experts in it, '1.exp"):
            without_experts(TensorStyles(count=2, styles={**outside, around: Samples()}), experts)


class Odd(Parts, experts=lambda: nn.Linear(WIDTH, NUMBER * WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x).view(*x.shape, NUMBER).sum(-1)


class InPlace(Listed):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return super().forward(x)


class Inside(Listed):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Chained(Listed):
    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = expert(x)
        return x


class Mixing(Expert):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Centred(Weights):
    """Each expert subtracts the mean of all its rows."""

    def forward(self, hidden: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        means = torch.stack([hidden[(numbers == n).any(-1)].mean(0) for n in range(self.num_experts)]).nan_to_num()
        of_each = [
            super(Centred, self).forward(hidden - m, numbers.where(numbers == n, -1), weights)
            for n, m in enumerate(means)
        ]
        return sum(of_each, torch.zeros_like(hidden))


class Failing(Parts, layer=Listed):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("it fails before")


def _with(kind: str) -> nn.Module:
    listed, stacked = Listed(), Stacked()
    stacked.experts = Centred(NUMBER)  # type: ignore[assignment]
    match kind:
        case "norm":
            listed.experts[1].norm = nn.BatchNorm1d(WIDTH)
        case "buffer":
            listed.experts[1].register_buffer("seen", torch.zeros(()))
        case "mixed":
            listed.experts[1] = Mixing()
        case "two":
            listed.more_experts = nn.ModuleList(Expert() for _ in range(NUMBER))
        case "nested":
            listed.experts = nn.ModuleList([Listed(), Listed()])
        case "same":
            listed.experts = nn.ModuleList([*listed.experts[:2]] * 2)
    others = {"none": nn.Linear(WIDTH, WIDTH), "three": Listed(3), "odd": Odd(), "in place": InPlace()}
    others |= {"inside": Inside(), "chained": Chained(), "fails": Failing(), "centred": stacked}
    return others.get(kind, listed)


_TEXTS = {
    "none": r'mesh={"expert": 2} and the model has no experts: expected an nn.ModuleList of experts',
    "three": r"module '1' has 3 experts, over 2 members of an expert group: expected a number that",
    "odd": r"module '1.experts' \(Linear\) has experts of an unknown form: expected an nn.ModuleList",
    "norm": r"experts of '1' have a BatchNorm1d, over rows of all members",
    "buffer": r"experts of '1' have a buffer, 'seen' of a Expert, which some members would not change",
    "mixed": r"module '1' gives something else when its experts are divided",
    "in place": r"module '1' has experts, and fails where it is tried: .* changes its input in place: expected a copy",
    "chained": r"module '1' has experts, and fails where it is tried: .* calls its experts otherwise when it runs",
    "inside": r"a module that calls experts has a torch.utils.checkpoint inside: expected it around",
    "two": r"module '1' calls two lists of experts, 'experts' and 'more_experts': expected a module for each",
    "nested": r"experts of '1' have experts of their own, '1.experts.0', which only some members would call",
    "same": r"parameter '1.experts.0.up.weight' of an expert has other names, too: expected its own",
    "fails": r"the model does not call it with made-up inputs, on which it fails: it fails before",
    "centred": r"module '1.experts' gives something else when its experts are divided",
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

    def train(axis: str) -> None:
        mesh: Any = Mesh(pipe=1, **{axis: 2}, **_MESHES.get(kind, {}))
        with pipeline(mesh, model=model(_with(kind)), **_OPTIONS.get(kind, {})) as pipe:
            for step in range(3):
                pipe.train_step(*batch(0, step, 2 + 2 * (kind == "late") * pipe.replica[0]))

    for axis in ("expert", "context") if kind in ("sync", "auto", "reroute", "memory", "compiled") else ("expert",):
        with pytest.raises(ValueError, match=_TEXTS[kind].replace("expert", axis)):
            train(axis)


@pytest.mark.thorough(
    but=[
        "none",
        "three",
        "odd",
        "norm",
        "buffer",
        "in place",
        "chained",
        "two",
        "nested",
        "same",
        "fails",
        "centred",
        "auto",
        "memory",
        "late",
    ]
)
@pytest.mark.parametrize("kind", _TEXTS)
def test_what_an_expert_group_does_not_divide_is_refused_by_name(gloo: Pool, kind: str) -> None:
    gloo.run(_refused, ranks=2, args=(kind,))


def test_an_expert_group_in_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match=r'members of an expert group are processes. Expected "expert": 1, or 2 proc'):
        PipelineModule(model(), mesh={"pipe": 1, "expert": 2}, loss_fn=F.mse_loss)
