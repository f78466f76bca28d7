"""Named edits: what is the user's survives them, hooks, ties, buffers, random numbers."""

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.models import make_batch, make_model
from support.parts import GIVEN, Does, Parts
from torch import Tensor, nn

from stagewright.pipe import edit

from .test_keep_less import T4, kept_bytes

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it


def test_ties_and_buffers_survive_a_replacement() -> None:
    model = make_model("tied-gpt")
    weight = model.embed.weight

    class Scaled(nn.Embedding):
        """Another class with the same weight."""

    edits = edit(model)
    edits["embed"].replace(lambda old: Scaled(old.num_embeddings, old.embedding_dim))
    inputs, _ = make_batch("tied-gpt", index=0, size=4)
    assert edits.verify(inputs) == []
    assert type(model.embed) is nn.Embedding
    edits.build()
    assert type(model.embed) is Scaled
    assert model.embed.weight is model.head.weight is weight
    norms = edit(make_model("batchnorm-cnn"))
    old = norms.model.norms[0]
    norms["norms.0"].replace(lambda module: nn.BatchNorm2d(module.num_features).double())
    norms.build()
    assert norms.model.norms[0] is not old
    assert norms.model.norms[0].running_mean is old.running_mean


@pytest.mark.parametrize("keep", [(), ("aten.addmm.default",)])
def test_a_built_model_is_a_plain_one_for_random_numbers_and_copies(keep: tuple[str, ...]) -> None:
    """Its backward leaves the generators where they were; a copy, or one from a file, draws from the same ones."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Dropout(), nn.Linear(8, 8), nn.Dropout()))
    edits = edit(copy.deepcopy(plain))
    edits["1"].checkpoint(keep=keep)
    built, file, x = edits.build(), io.BytesIO(), torch.randn(4, 8)
    torch.save(built, file)
    file.seek(0)

    def trained(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        found = [torch.tensor(random.random() + np.random.rand())]
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            found += [p.grad for p in model.parameters() if p.grad is not None]
            found.append(torch.tensor(random.random() + np.random.rand()))
        return found

    expected = trained(plain)
    for model in (built, copy.deepcopy(built), torch.load(file, weights_only=False)):
        assert all(map(torch.equal, trained(model), expected))


class Scaling(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_verify_leaves_what_is_the_users() -> None:
    """Generators, also where a model draws past torch, and modules that a replacement holds already."""
    drawing = Does(lambda x: x.mul_(random.random() * np.random.rand()))  # in place, and past torch
    model, new = nn.Sequential(drawing, nn.Linear(4, 4)), Scaling()
    before, weight = random.getstate(), new.weight
    edits = edit(model)
    edits["0"].checkpoint()
    edits["1"].replace(lambda old: new)
    torch.manual_seed(3)
    after = torch.rand(2)
    torch.manual_seed(3)
    assert edits.verify((torch.ones(2, 4),)) == []
    assert torch.equal(torch.rand(2), after)
    assert random.getstate() == before
    assert new.weight is weight
    assert new.scale.grad is None
    assert edits.build()[1] is new  # type: ignore[index]
    assert model[1].weight is not weight


def test_edits_mean_the_modules_that_they_were_written_for() -> None:
    """Also where others stand around them by then; where one takes them away, it is said."""

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)))

    edits = edit(model())
    edits["0"].replace(nn.Sequential)  # which has a child "0.0", too
    edits["0.[02]"].dtype("float64")
    shown = str(edits)
    built: Any = edits.build()
    assert str(edits) == shown
    assert [name for name, module in built.named_modules() if module._forward_pre_hooks] == ["0.0.0", "0.0.2"]
    divided = edit(model())
    divided["0"].replace(nn.Sequential)
    divided["0"].shard({"0": "column"})
    with divided.applied() as options:
        assert options == {"tensor_parallel": {"0.0.0": "column"}}
    lost = edit(model())
    lost["0"].keep_less("gelu")
    lost["0"].replace(lambda old: model()[0])
    with pytest.raises(ValueError, match=r"^0: keep_less\(.*: a later replace takes '0' away: expected the replace"):
        lost.build()
    around = edit(model())
    around["0"].keep_less("gelu")
    around["0"].replace(nn.Sequential)
    assert around.verify((torch.randn(2, 4),)) == []
    odd = nn.Sequential()
    odd.add_module("a0", nn.Linear(4, 4))
    odd.add_module("a[0]", nn.Linear(4, 4))
    named = edit(odd)
    named["a[[]0]"].checkpoint()
    assert ["forward" in vars(module) for module in named.build().children()] == [False, True]


def test_another_type_is_that_of_a_module_alone() -> None:
    """One without weights returns its input's; complex ones are refused; where an edit fails, so are gradients."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4)).double()
    x = torch.randn(2, 4).double()
    model(x).sum().backward()
    failing = edit(model)
    failing["0"].dtype("float32")
    failing["2"].replace(lambda old: nn.Bilinear(2, 2, 2))
    with pytest.raises(ValueError, match=r"in place of Linear\.forward"):
        failing.build()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float64}
    edits = edit(model)
    edits["1"].dtype("float32")
    assert edits.build()(x).dtype is torch.float64
    with pytest.raises(ValueError, match=r"dtype of '': its 'weight' is complex: expected a module with real weights"):
        edit(nn.Linear(4, 4, dtype=torch.complex64))[""].dtype("bfloat16")


class Recorder:
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        self.seen += 1


def test_a_replacement_that_is_a_copy_calls_the_hooks_themselves() -> None:
    model, hook = nn.Sequential(nn.Linear(4, 4)), Recorder()
    model[0].register_forward_hook(hook)
    edits = edit(model)
    edits["0"].replace(copy.deepcopy)
    edits.build()(torch.randn(2, 4))
    assert hook.seen == 1


@pytest.mark.parametrize("make", [nn.Sequential, lambda old: nn.Linear(4, 4)])
def test_hooks_of_all_kinds_with_handles_and_what_they_ask_for_survive(make: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    seen: list[object] = []
    first = model[0].register_forward_hook(lambda module, args, kwargs, out: seen.append("with"), with_kwargs=True)
    model[0].register_forward_pre_hook(lambda module, args: seen.append("before"))
    model[0].register_full_backward_hook(lambda module, inputs, outputs: seen.append(inputs[0].shape))
    model[0].register_load_state_dict_pre_hook(lambda module, *args: seen.append(type(module)))
    edits = edit(model)
    edits["0"].replace(make)
    built = edits.build()
    built(torch.randn(2, 4, requires_grad=True)).sum().backward()
    built.load_state_dict(built.state_dict())
    assert seen == ["before", "with", torch.Size([2, 4]), nn.Linear]
    first.remove()
    model(torch.randn(2, 4))
    assert seen[4:] == ["before"]


USES: dict[str, Callable[[Any, Tensor], object]] = {
    "asked by keyword": lambda attention, x: attention(x, x, x, need_weights=True),
    "asked by position": lambda attention, x: attention(x, x, x, None, True),
    "method": lambda attention, x: x * attention(x, x, x)[1].mean(),
    "attribute": lambda attention, x: x * attention(x, x, x)[1].shape[0],
    "index": lambda attention, x: attention(x, x, x)[1][0],
    "arithmetic": lambda attention, x: 2 * attention(x, x, x)[1] + 1,
    "power": lambda attention, x: attention(x, x, x)[1] ** 2,
    "beside a tensor": lambda attention, x: x[..., :1] * attention(x, x, x)[1],
    "function": lambda attention, x: torch.stack([attention(x, x, x)[1]] * 2),
    "loop": lambda attention, x: sum(each for each in attention(x, x, x)[1]),
    "comparison": lambda attention, x: attention(x, x, x)[1] > 0,
}


class UsesWeights(Parts, attention=lambda: nn.MultiheadAttention(8, 2), use=GIVEN):
    def forward(self, x: Tensor) -> object:
        return self.use(self.attention, x)


@pytest.mark.parametrize("name", USES)
def test_weights_that_fused_attention_does_not_make_are_not_used(name: str) -> None:
    edits = edit(UsesWeights(USES[name]))
    edits["attention"].keep_less("attention")
    x = torch.randn(3, 1, 8)
    assert edits.model(x) is not None
    with pytest.raises(ValueError, match=r"its weights are asked for, and nothing makes them: expected need_weights=F"):
        edits.build()(x)


def test_weights_that_are_passed_on_are_missed() -> None:
    edits = edit(UsesWeights(lambda attention, x: attention(x, x, x)))
    edits["attention"].keep_less("attention")
    with pytest.raises(ValueError, match=r"the model returns 1 tensors, and 2 untouched"):
        edits.verify((torch.randn(3, 1, 8),))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_fused_attention_keeps_nothing_of_length_times_length(dropout: float) -> None:
    """With dropout torch has no such kernel on a CPU: three such tensors stayed, as many as without the edit."""
    torch.manual_seed(0)
    length = 64

    class Attends(Parts, attention=lambda: nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)):
        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    plain, x = Attends(), torch.randn(1, length, 8)
    edits = edit(copy.deepcopy(plain))
    edits["attention"].keep_less("attention")
    assert edits.verify((x,)) == []
    before, after = kept_bytes(plain, x), kept_bytes(edits.build(), x)
    tensors = 3 if dropout else 1  # with a probability for each of two heads; with dropout a mask, and both
    assert before - after >= tensors * 2 * length * length * T4
    assert not hasattr(torch.nn.functional.scaled_dot_product_attention, "func")  # it is torch's again
