"""Named edits: each alone and in pairs computes what the untouched model does, in one process and in a pipeline."""

import copy
import itertools
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.inside import beside
from support.models import make_batch, make_model, task_of
from support.parts import GIVEN, Backwards, Parts
from support.pool import Pool
from support.small import sgd
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

from stagewright.pipe import Edits, PipelineModule, edit

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it

Make = Callable[[Edits], object]


# A model, and edits of it. Its own dropout draws the same numbers in both.
MODELS: dict[str, dict[str, Make]] = {
    "gpt": {
        "checkpoint": lambda edits: edits["[45]"].checkpoint(),
        "keeping": lambda edits: edits["6"].checkpoint(keep=["aten.mm.default", "aten.addmm.default"]),
        "replace": lambda edits: edits["*.down"].replace(nn.Sequential),
        "cut": lambda edits: edits["5"].cut(),
        "dtype": lambda edits: edits["3.up"].dtype(torch.float32),
        "compile": lambda edits: edits["2.project"].compile("aot_eager", gate=False),
        "layernorm": lambda edits: edits["[78].*_norm"].keep_less("layernorm"),
    },
    "batchnorm-cnn": {
        "checkpoint": lambda edits: edits["convolutions.1"].checkpoint(),
        "replace": lambda edits: edits["norms.*"].replace(nn.Sequential),
        "cut": lambda edits: edits["convolutions.3"].cut(),
    },
    "lstm": {
        "checkpoint": lambda edits: edits["3"].checkpoint(),
        "replace": lambda edits: edits["11"].replace(nn.Sequential),
        "cut": lambda edits: edits["5"].cut(),
        "dtype": lambda edits: edits["0"].dtype("float32"),
        "layernorm": lambda edits: edits["10"].keep_less("layernorm"),
    },
}

# The first model has every kind, and so every pair of kinds.
CASES = [(model, (name,)) for model, edits in MODELS.items() for name in edits]
CASES += [("gpt", names) for names in itertools.combinations(MODELS["gpt"], 2)]


def edited(model: str, *names: str) -> Edits:
    found = edit(make_model(model))
    for name in names:
        MODELS[model][name](found)
    return found


def losses(model: nn.Module | Edits, name: str) -> list[float]:
    task = task_of(name)
    pipe = PipelineModule(model, num_microbatches=2, mesh={"pipe": 2}, loss_fn=task.loss, optimizer=sgd, verify=False)
    found = []
    for index in range(2):
        inputs, target = make_batch(name, index=index, size=task.batch_size // 2 * 2)
        found.append(pipe.train_step(*inputs, target).loss)
    pipe.close()
    assert None not in found
    return found  # type: ignore[return-value]


@cache
def unedited_losses(name: str) -> list[float]:
    return losses(make_model(name), name)


@pytest.mark.thorough(but=["batchnorm-cnn-cut"])
@pytest.mark.parametrize(
    ("model", "names"), CASES, ids=lambda value: "-".join(value) if isinstance(value, tuple) else value
)
def test_each_edit_and_each_pair_computes_what_the_model_does(model: str, names: tuple[str, ...]) -> None:
    inputs, _ = make_batch(model, index=0, size=task_of(model).batch_size)
    edits = edited(model, *names)
    before = {key: value.clone() for key, value in edits.model.state_dict().items()}
    assert edits.verify(inputs) == []
    assert all(torch.equal(value, before[key]) for key, value in edits.model.state_dict().items())
    assert losses(edits, model) == pytest.approx(unedited_losses(model), rel=1e-6)


def test_a_list_is_shown_saved_replayed_and_taken_back(tmp_path: Path) -> None:
    edits = edited("gpt", "checkpoint", "keeping", "cut", "dtype", "layernorm")
    assert [line.rstrip() for line in str(edits).splitlines()] == [
        "Sequential, 5 edits",
        "[45]         checkpoint()                                                2 modules",
        "6            checkpoint(keep=('aten.mm.default', 'aten.addmm.default'))  1 module",
        "5            cut()                                                       1 module",
        "3.up         dtype(dtype='float32')                                      1 module",
        "[78].*_norm  keep_less(what='layernorm')                                 4 modules",
    ]
    edits.save(tmp_path / "edits.json")
    again = edit(make_model("gpt"))
    again.load(tmp_path / "edits.json")
    assert list(map(str, again)) == list(map(str, edits))
    assert str(again.undo()) == "[78].*_norm: keep_less(what='layernorm')"
    assert len(again) == 4
    other = edit(make_model("lstm"))
    with pytest.raises(ValueError, match=r"edits\.json: edits\['3\.up'\] matches no module: expected names"):
        other.load(tmp_path / "edits.json")
    assert len(other) == 0
    (tmp_path / "bad.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"bad\.json holds no edits .*: expected what edits.save wrote"):
        other.load(tmp_path / "bad.json")
    other["3"].replace(nn.Sequential)
    with pytest.raises(ValueError, match=r"is code, which no file can hold: expected it in the script"):
        other.save(tmp_path / "code.json")


class Louder(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.01 * super().forward(x)


class Detached(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach())


@pytest.mark.parametrize(
    ("kind", "told"), [(Louder, "output 0 "), (Detached, "'10.bias' has no gradient with this edit")]
)
def test_the_first_edit_that_departs_is_named(kind: type[nn.Linear], told: str) -> None:
    edits = edit(make_model("lstm"))
    edits["3"].checkpoint()
    edits["11"].replace(lambda old: kind(old.in_features, old.out_features).double())
    edits["5"].checkpoint()
    inputs, _ = make_batch("lstm", index=0, size=4)
    with pytest.raises(ValueError, match=rf"^11: replace\(.*: {told}"):
        edits.verify(inputs)


class Around(nn.Module):
    """Holds the layer in whose place it is, so that weights have other names, and trains them as it is told."""

    def __init__(self, inner: nn.Linear, train: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.train_as = inner, train

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # as in nn.Linear
        return functional.linear(input, self.train_as(self.inner.weight), self.inner.bias)


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (torch.Tensor.detach, "'1.weight' has no gradient with this edit"),
        (lambda w: 2 * w - w.detach(), "the gradient of '1.weight' differs"),
        (lambda w: 2 * w.detach() - w, "the gradient of '1.weight' differs"),
    ],
    ids=["none", "twice", "of the other sign"],
)
def test_a_weight_is_compared_under_its_new_name(train: Callable[[torch.Tensor], torch.Tensor], told: str) -> None:
    edits = edit(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    edits["1"].replace(lambda old: Around(old, lambda weight: weight.clone()))
    assert edits.verify((torch.randn(5, 4),)) == []
    edits.undo()
    edits["1"].replace(lambda old: Around(old, train))
    with pytest.raises(ValueError, match=told):
        edits.verify((torch.randn(5, 4),))


def test_a_buffer_that_an_edit_takes_away_is_not_compared_and_said() -> None:
    edits = edit(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    edits["1"].replace(lambda old: nn.BatchNorm1d(4, track_running_stats=False))
    said = edits.verify((torch.randn(5, 4),))
    assert [each.rpartition(": ")[2] for each in said] == [
        f"'1.{name}', which it takes away" for name in ("running_mean", "running_var", "num_batches_tracked")
    ]
    assert said[0].startswith("not compared: 1: replace(")


class Attention(Parts, q=lambda: nn.Linear(8, 8), k=lambda: nn.Linear(8, 8), v=lambda: nn.Linear(8, 8)):
    """Its keys' bias has no gradient but for rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_behind_a_shorter_type_neither_rounding_is_told_nor_a_mistake_missed(dtype: str) -> None:
    torch.manual_seed(0)
    edits = edit(nn.Sequential(Attention(), nn.Linear(8, 8), Attention()))
    edits["*"].dtype(dtype)
    example = (torch.randn(4, 16, 8),)
    edits["1"].replace(lambda old: Around(old, lambda weight: (1.0 * weight.double()).to(weight.dtype)))
    assert edits.verify(example) == []
    edits["2.v"].replace(lambda old: Around(old, lambda weight: 1.03 * weight))
    with pytest.raises(ValueError, match=r"^2\.v: replace\(.* changes by .* of its norm, for which rounding accounts"):
        edits.verify(example)


def test_edits_are_tried_on_layers_of_the_copy() -> None:
    layer: Any = nn.BatchNorm1d(4)
    old = layer.forward
    layer.forward = lambda x: 1.0 * old(x)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    edits = edit(model)
    edits["0"].checkpoint()
    assert edits.verify((torch.randn(5, 4),)) == []
    assert int(layer.num_batches_tracked) == 0
    layer.parents = [weakref.ref(model)]
    with pytest.raises(ValueError, match="'parents' of module '1' of it still uses the model's own"):
        edits.verify((torch.randn(5, 4),))


def test_an_untied_weight_is_seen() -> None:
    edits = edit(make_model("tied-gpt"))

    def untied(old: nn.Module) -> nn.Module:
        old.forward = copy.deepcopy(old).forward  # type: ignore[method-assign]
        return nn.Sequential(old)

    edits["head"].replace(untied)
    inputs, _ = make_batch("tied-gpt", index=0, size=4)
    with pytest.raises(ValueError, match=r"^head: replace\(.*: the gradient of "):
        edits.verify(inputs)


class Moving(Parts, norm=lambda: nn.BatchNorm1d(8), drop=lambda: nn.Dropout(0.5)):
    """A norm with moving averages, and dropout: a second run could move and draw again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(x))


def test_what_runs_again_moves_buffers_once_and_draws_the_same() -> None:
    torch.manual_seed(0)
    edits = edit(nn.Sequential(nn.Linear(8, 8), Moving(), nn.Linear(8, 8), Moving()))
    edits["[13]"].checkpoint()
    edits["2"].checkpoint(keep=[torch.ops.aten.addmm.default])
    assert edits.verify((torch.randn(6, 8),)) == []
    edits["1.norm"].replace(lambda old: nn.BatchNorm1d(8, momentum=0.2))
    with pytest.raises(ValueError, match=r"^1\.norm: replace\(.*buffer '1\.norm\.running_(mean|var)' differs"):
        edits.verify((torch.randn(6, 8),))


class Longer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).double()


class Returning(Parts, linear=lambda: nn.Linear(4, 4), tell=GIVEN):
    def forward(self, x: torch.Tensor) -> object:
        return self.tell(self.linear(x))


@pytest.mark.parametrize(
    ("kind", "tell", "said"),
    [
        (Louder, lambda x: (100 * x).long(), "output 0 .* is not the plain module's"),
        (Louder, torch.fft.rfft, "output 0 .* differs"),
        (Louder, lambda x: None, "returns no tensor that could be compared"),
        (Longer, lambda x: x, r"output 0 is of torch\.float64, and of torch\.float32 untouched"),
    ],
)
def test_outputs_of_each_type_are_compared(kind: Any, tell: Callable[[torch.Tensor], object], said: str) -> None:
    edits = edit(Returning(tell))
    edits["linear"].replace(lambda old: kind(4, 4))
    with pytest.raises(ValueError, match=said):
        edits.verify((torch.arange(8.0).view(2, 4),))


def test_a_compiled_module_that_is_slower_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    edits = edited("gpt", "cut")
    edits["2.project"].compile("eager")
    edits["3.project"].compile("eager", gate=False)
    inputs, _ = make_batch("gpt", index=0, size=4)
    monkeypatch.setattr(beside, "_seconds", lambda *models, **_: [1.0, 1.5])
    assert edits.verify(inputs) == [
        "taken back: 2.project: compile(backend='eager'): 1.50 times as long as without; gate=False keeps it"
    ]
    assert list(map(str, edits)) == ["5: cut()", "3.project: compile(backend='eager', gate=False)"]


def as_it_is(graph: Any, example: object) -> Any:
    return graph.forward


@pytest.mark.thorough(but=["as_it_is"])
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # inductor imports it
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor", as_it_is])
def test_compiled_modules_compute_the_same(backend: Any) -> None:
    """Those of torch, too; a function is a backend."""
    torch.manual_seed(0)
    edits = edit(nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4)))
    for name in "01":
        edits[name].compile(backend, gate=False)
    torch._dynamo.reset()
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    assert edits.verify((torch.randn(6, 8),)) == []
    assert frames["ok"] >= 2


class Unsummed(ColwiseParallel):
    """Each member's gradient of the input is taken for the whole one."""

    @staticmethod
    def _prepare_input_fn(input_layouts: Any, desired: Any, mod: Any, inputs: Any, device_mesh: Any) -> Any:
        return (DTensor.from_local(Backwards.apply(inputs[0], lambda grad: 0.5 * grad), device_mesh, [Replicate()]),)


def divide(column: bool) -> str:
    """What verify says of a divided MLP in a group of two, whose column's input has its gradient summed or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))).double()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    edits = edit(model)
    edits["1"].shard({"0": ColwiseParallel() if column else Unsummed(), "2": RowwiseParallel()})
    x = torch.randn(4, 8, dtype=torch.float64)
    try:
        return str(edits.verify((x,), mesh=mesh))
    except ValueError as error:
        return str(error)


def test_a_divided_linear_without_its_sum_is_found(gloo: Pool) -> None:
    assert gloo.run(divide, ranks=2, args=(True,)) == ["[]", "[]"]
    for said in gloo.run(divide, ranks=2, args=(False,)):
        assert said.startswith("1: shard("), said
