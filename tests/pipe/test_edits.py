"""Named edits: each alone and in pairs computes what the untouched model does, in one process and in a pipeline."""

from __future__ import annotations

import copy
import io
import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import tensor_models
from support.inside import beside
from support.models import make_batch, make_model, task_of
from support.pool import Pool
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from stagewright.pipe import Edits, PipelineModule, edit

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it
Make = Callable[[Edits], object]


class Wrapped(nn.Module):
    """Around a module that stays in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made


def _replaced(pattern: str) -> Make:
    return lambda edits: edits[pattern].replace(Wrapped)


# A model, and edits of it. Its own dropout draws the same numbers in both.
MODELS: dict[str, dict[str, Make]] = {
    "gpt": {
        "checkpoint": lambda edits: edits["[45]"].checkpoint(),
        "keeping": lambda edits: edits["6"].checkpoint(keep=["aten.mm.default", "aten.addmm.default"]),
        "replace": _replaced("*.down"),
        "cut": lambda edits: edits["5"].cut(),
        "dtype": lambda edits: edits["3.up"].dtype(torch.float32),
        "compile": lambda edits: edits["2.project"].compile("aot_eager", gate=False),
        "layernorm": lambda edits: edits["[78].*_norm"].keep_less("layernorm"),
    },
    "batchnorm-cnn": {
        "checkpoint": lambda edits: edits["convolutions.1"].checkpoint(),
        "replace": _replaced("norms.*"),
        "cut": lambda edits: edits["convolutions.3"].cut(),
    },
    "lstm": {
        "checkpoint": lambda edits: edits["3"].checkpoint(),
        "replace": _replaced("11"),
        "cut": lambda edits: edits["5"].cut(),
        "dtype": lambda edits: edits["0"].dtype("float32"),
        "layernorm": lambda edits: edits["10"].keep_less("layernorm"),
    },
    "unet": {
        "checkpoint": lambda edits: edits["down.*"].checkpoint(),
        "replace": _replaced("up.*.second"),
        "cut": lambda edits: edits["middle"].cut(),
        "dtype": lambda edits: edits["stem"].dtype(torch.float32),
    },
}
CASES = [
    (model, names)
    for model, edits in MODELS.items()
    for names in [*((name,) for name in edits), *itertools.combinations(edits, 2)]
]


def edited(model: str, *names: str) -> Edits:
    found = edit(make_model(model))
    for name in names:
        MODELS[model][name](found)
    return found


def losses(model: nn.Module | Edits, name: str) -> list[float]:
    task = task_of(name)
    pipe = PipelineModule(
        model,
        num_microbatches=2,
        mesh={"pipe": 2},
        loss_fn=task.loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        verify=False,
    )
    found = []
    for index in range(2):
        inputs, target = make_batch(name, index=index, size=task.batch_size)
        found.append(pipe.train_step(*inputs, target).loss)
    pipe.close()
    assert None not in found
    return found  # type: ignore[return-value]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "names"), CASES, ids=lambda value: "-".join(value) if isinstance(value, tuple) else value
)
def test_each_edit_and_each_pair_computes_what_the_model_does(model: str, names: tuple[str, ...]) -> None:
    inputs, _ = make_batch(model, index=0, size=task_of(model).batch_size)
    edits = edited(model, *names)
    before = {key: value.clone() for key, value in edits.model.state_dict().items()}
    assert edits.verify(inputs) == []
    assert all(torch.equal(value, before[key]) for key, value in edits.model.state_dict().items())
    assert losses(edits, model) == pytest.approx(losses(make_model(model), model), rel=1e-6)


def test_hooks_ties_and_buffers_survive_a_replacement() -> None:
    model = make_model("tied-gpt")
    called: list[str] = []
    model.embed.register_forward_hook(lambda module, args, out: called.append(type(module).__name__))
    weight = model.embed.weight

    class Scaled(nn.Embedding):
        """Another class with the same weight."""

    edits = edit(model)
    edits["embed"].replace(lambda old: Scaled(old.num_embeddings, old.embedding_dim))
    inputs, _ = make_batch("tied-gpt", index=0, size=4)
    assert edits.verify(inputs) == []
    assert type(model.embed) is nn.Embedding
    assert called == []
    edits.build()
    model(*inputs)
    assert type(model.embed) is Scaled
    assert called == ["Scaled"]
    assert model.embed.weight is model.head.weight is weight
    norms = edit(make_model("batchnorm-cnn"))
    old = norms.model.norms[0]
    norms["norms.0"].replace(lambda module: nn.BatchNorm2d(module.num_features).double())
    norms.build()
    assert norms.model.norms[0] is not old
    assert norms.model.norms[0].running_mean is old.running_mean


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
    other["3"].replace(Wrapped)
    with pytest.raises(ValueError, match=r"is code, which no file of edits holds: expected it in the script"):
        other.save(tmp_path / "code.json")


class Louder(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.01 * super().forward(x)


class Detached(nn.Linear):
    """The same output, and no gradient for its input."""

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


def test_an_untied_weight_is_seen() -> None:
    edits = edit(make_model("tied-gpt"))

    def untied(old: nn.Module) -> nn.Module:
        made = copy.deepcopy(old)
        old.forward = made.forward  # type: ignore[method-assign]
        return Wrapped(old)

    edits["head"].replace(untied)
    inputs, _ = make_batch("tied-gpt", index=0, size=4)
    with pytest.raises(ValueError, match=r"^head: replace\(.*: the gradient of "):
        edits.verify(inputs)


def test_mistakes_are_named_and_leave_the_model_untouched() -> None:
    model = make_model("gpt")
    edits = edit(model)
    before = str(model)
    cases: dict[Any, str] = {
        lambda: edits["blocks.*"]: r"edits\['blocks\.\*'\] matches no module: expected names of the model",
        lambda: edits["3"].checkpoint(keep=["mm"]): r"checkpoint\(keep=\['mm'\]\): expected operators such as",
        lambda: edits["3"].shard({"fc1": "column"}): r"shard of '3': it has no 'fc1': expected names in it, such as '",
        lambda: edits["3"].compile("gcc"): r"compile\(backend='gcc'\): expected one of .*inductor",
        lambda: edits["3"].dtype(torch.int64): r"dtype\('int64'\): expected one of 'float64'",
        edits[""].compile: r"compile of the whole model: expected a module in it",
        edits[""].checkpoint: r"checkpoint of the whole model: expected a module in it",
        lambda: edits[3]: r"edits\[3\]: expected a name or a pattern",  # type: ignore[index]
        lambda: edits["3"].shard({"up": "colum"}): r"shard\({'up': 'colum'}\): expected one of 'column', 'row'",
        lambda: edits["3"].keep_less(["gelu"]): r"keep_less\(\['gelu'\]\): expected one of",  # type: ignore[arg-type]
        lambda: edit(nn.LazyLinear(4)): r"edit: 'weight' has no shape yet: expected a model that has run once",
        lambda: edits["3"].keep_less("dropout"): r"keep_less\('dropout'\): expected one of 'gelu', 'layernorm', 'atten",
        lambda: edits["3.up"].keep_less("gelu"): r"keep_less of '3\.up', a Linear: expected a module with a GELU",
        edits.undo: r"undo: expected an edit before",
        lambda: edit("gpt"): r"edit\('gpt'\): expected a torch\.nn\.Module",  # type: ignore[arg-type]
    }
    for make, told in cases.items():
        with pytest.raises(ValueError, match=told):
            make()
    edits["3"].checkpoint()
    for make in (partial(edits["3.*_norm"].keep_less, "layernorm"), edits["3"].checkpoint):
        with pytest.raises(ValueError, match=r"meets 3: checkpoint\(\) at '3': expected one of them there"):
            make()
    with pytest.raises(ValueError, match=r"recompute= beside edits that say the same: expected one of them"):
        PipelineModule(edits, recompute="full", mesh={"pipe": 2})
    assert str(model) == before
    tied = edit(make_model("tied-gpt"))
    with pytest.raises(ValueError, match=r"dtype of 'head': its 'weight' is 'embed\.weight', too \(tied\)"):
        tied["head"].dtype("float32")
    shared = nn.Linear(4, 4)
    twice = edit(nn.Sequential(shared, nn.Tanh(), shared))
    with pytest.raises(ValueError, match=r"0: checkpoint\(\): '0' is '2', too \(shared\): expected a module that st"):
        twice["0"].checkpoint()
    done = edit(make_model("gpt"))
    done.build()
    with pytest.raises(ValueError, match=r"these edits are applied: expected edit\(model\) of a model that is not"):
        done["3"].checkpoint()


@pytest.mark.parametrize("apply", [Edits.build, lambda edits: PipelineModule(edits, mesh={"pipe": 2})])
def test_where_an_edit_fails_nothing_is_changed(apply: Callable[[Edits], object]) -> None:
    model = make_model("tied-gpt")
    model.norm.register_forward_hook(lambda module, args, out: None)
    before = str(model), {key: (value, value.clone(), value.dtype) for key, value in model.state_dict().items()}
    held = {module: dict(vars(module)) for module in model.modules()}
    edits = edit(model)
    edits["norm"].replace(Wrapped)
    edits["blocks.0"].dtype("float32")
    edits["blocks.1"].compile("eager", gate=False)
    edits["blocks.2"].replace(lambda old: nn.Bilinear(2, 2, 2))
    with pytest.raises(ValueError, match=r"replace of 'blocks\.2': Bilinear\.forward\(.*in place of Block\.forward"):
        apply(edits)
    assert str(model) == before[0]
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[1][key][1])
        assert value.dtype == before[1][key][2]
    assert {module: dict(vars(module)) for module in model.modules()} == held
    edits.undo()
    edits["blocks.2"].replace(Wrapped)
    assert len(edits) == 4


class Moving(nn.Module):
    """A norm with moving averages, and dropout: a second run could move and draw again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.drop(self.norm(x))
        return made


def test_what_runs_again_moves_buffers_once_and_draws_the_same() -> None:
    torch.manual_seed(0)
    edits = edit(nn.Sequential(nn.Linear(8, 8), Moving(), nn.Linear(8, 8), Moving()))
    edits["[13]"].checkpoint()
    edits["2"].checkpoint(keep=[torch.ops.aten.addmm.default])
    assert edits.verify((torch.randn(6, 8),)) == []
    edits["1.norm"].replace(lambda old: nn.BatchNorm1d(8, momentum=0.2))
    with pytest.raises(ValueError, match=r"^1\.norm: replace\(.*buffer '1\.norm\.running_(mean|var)' differs"):
        edits.verify((torch.randn(6, 8),))


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


class Drawing(nn.Module):
    """Draws past torch, and changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(random.random() * np.random.rand())


class Returning(nn.Module):
    """A linear layer whose result is told as something else."""

    def __init__(self, tell: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear, self.tell = nn.Linear(4, 4), tell

    def forward(self, x: torch.Tensor) -> object:
        return self.tell(self.linear(x))


@pytest.mark.parametrize(
    ("tell", "said"),
    [
        (lambda x: (100 * x).long(), "output 0 .* is not the plain module's"),
        (torch.fft.rfft, "output 0 .* differs"),
        (lambda x: None, "returns no tensor that could be compared"),
    ],
)
def test_outputs_of_each_type_are_compared(tell: Callable[[torch.Tensor], object], said: str) -> None:
    edits = edit(Returning(tell))
    edits["linear"].replace(lambda old: Louder(4, 4))
    with pytest.raises(ValueError, match=said):
        edits.verify((torch.arange(8.0).view(2, 4),))


class Shorter(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float()


@pytest.mark.parametrize("word", ["verify", "memory"])
def test_an_example_that_is_no_tuple_is_refused(word: str) -> None:
    """Its rows would be taken for arguments."""
    edits, options = edit(nn.Linear(4, 4)), {"limit": "1MB"} if word == "memory" else {}
    with pytest.raises(ValueError, match=r"example: a Tensor: expected a tuple of arguments, or a dict of keywords"):
        getattr(edits, word)(torch.randn(2, 4), **options)


def test_another_type_of_an_output_is_seen() -> None:
    edits = edit(nn.Sequential(nn.Linear(4, 4)).double())
    edits["0"].replace(lambda old: Shorter(4, 4))
    with pytest.raises(ValueError, match=r"output 0 is of torch\.float32, and of torch\.float64 untouched"):
        edits.verify((torch.randn(2, 4).double(),))


class Scaling(nn.Linear):
    """A weight that no other has."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_verify_leaves_what_is_the_users() -> None:
    """Generators, also where a model draws past torch, and modules that a replacement holds already."""
    model, new = nn.Sequential(Drawing(), nn.Linear(4, 4)), Scaling()
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


def test_a_replacement_is_its_own() -> None:
    new = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    edits = edit(model)
    edits["*"].replace(lambda old: new)
    with pytest.raises(ValueError, match=r"replace of '1': what make\(module\) returned has '0' in it: expected a new"):
        edits.build()
    assert new not in set(model.modules())


def test_edits_mean_the_modules_that_they_were_written_for() -> None:
    """Also where others stand around them by then; where one takes them away, it is said."""

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)))

    edits = edit(model())
    edits["0"].replace(Wrapped)
    edits["0.[02]"].dtype("float64")
    shown = str(edits)
    built: Any = edits.build()
    assert str(edits) == shown
    assert [name for name, module in built.named_modules() if module._forward_pre_hooks] == ["0.inner.0", "0.inner.2"]
    lost = edit(model())
    lost["0"].keep_less("gelu")
    lost["0"].replace(lambda old: model()[0])
    with pytest.raises(
        ValueError, match=r"^0: keep_less\(.*: a replace behind it takes '0' away: expected the replace"
    ):
        lost.build()
    around = edit(model())
    around["0"].keep_less("gelu")
    around["0"].replace(Wrapped)
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


@pytest.mark.parametrize(
    ("word", "given"), [("keep_less", ("gelu",)), ("compile", ("eager",)), ("dtype", ("bfloat16",))]
)
def test_what_stands_around_a_forward_needs_one(word: str, given: tuple[str, ...]) -> None:
    edits = edit(nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.GELU(), nn.Linear(4, 4))])}))
    with pytest.raises(ValueError, match=rf"{word} of 'blocks', a ModuleList, which nothing calls: expected a module"):
        getattr(edits["blocks"], word)(*given)
    getattr(edits["blocks.*"], word)(*given)


def test_a_part_that_stands_elsewhere_too_has_one_type() -> None:
    edits = edit(nn.Sequential(*(nn.Sequential(shared) for shared in [nn.Embedding(5, 4)] * 2)))
    with pytest.raises(ValueError, match=r"dtype of '0': its '0\.weight' is '1\.0\.weight', too \(tied\)"):
        edits["0"].dtype("bfloat16")


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
def test_torchs_own_modules_are_compiled(make: Callable[[], nn.Module]) -> None:
    edits = edit(nn.Sequential(make()))
    edits["0"].compile("eager")
    torch._dynamo.reset()
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    edits.build()(torch.randn(2, 4))
    assert frames["ok"] >= 1


@pytest.mark.parametrize("make", [Wrapped, lambda old: nn.Linear(4, 4)])
def test_hooks_of_gradients_and_of_loading_survive(make: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    seen: list[object] = []
    model[0].register_full_backward_hook(lambda module, inputs, outputs: seen.append(inputs[0].shape))
    model[0].register_load_state_dict_pre_hook(lambda module, *args: seen.append(type(module)))
    edits = edit(model)
    edits["0"].replace(make)
    built = edits.build()
    built(torch.randn(2, 4, requires_grad=True)).sum().backward()
    built.load_state_dict(built.state_dict())
    assert seen == [torch.Size([2, 4]), nn.Linear]


class Recorder:
    """A hook that is an object."""

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


@pytest.mark.parametrize("make", [Wrapped, lambda old: nn.Linear(4, 4)])
def test_handles_of_hooks_and_what_they_ask_for_survive(make: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    seen: list[str] = []
    first = model[0].register_forward_hook(lambda module, args, kwargs, out: seen.append("with"), with_kwargs=True)
    model[0].register_forward_pre_hook(lambda module, args: seen.append("before"))
    edits = edit(model)
    edits["0"].replace(make)
    edits.build()(torch.randn(2, 4))
    assert seen == ["before", "with"]
    first.remove()
    model(torch.randn(2, 4))
    assert seen == ["before", "with", "before"]


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


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # inductor imports it
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_modules_compute_the_same(backend: str) -> None:
    torch.manual_seed(0)
    edits = edit(nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4)))
    edits["1"].compile(backend, gate=False)
    assert edits.verify((torch.randn(6, 8),)) == []


class Unsummed(ColwiseParallel):
    """Each member's gradient of the input is taken for the whole one."""

    @staticmethod
    def _prepare_input_fn(input_layouts: Any, desired: Any, mod: Any, inputs: Any, device_mesh: Any) -> Any:
        return (DTensor.from_local(OwnGradient.apply(inputs[0]), device_mesh, [Replicate()]),)


class OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (0.5 * grads[0],)


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


@pytest.mark.gloo
def test_a_divided_linear_without_its_sum_is_found(gloo: Pool) -> None:
    assert gloo.run(divide, ranks=2, args=(True,)) == ["[]", "[]"]
    for said in gloo.run(divide, ranks=2, args=(False,)):
        assert said.startswith("1: shard("), said


def train_divided() -> dict[str, torch.Tensor]:
    """Weights behind two steps of a pipeline of tensor groups, all of whose edits are its options or made before."""
    edits = edit(tensor_models.make_model())
    edits["blocks.*"].shard({"q": "column", "k": "column", "v": "column", "o": "row"})
    edits["blocks.*.mlp"].shard({"up": "column", "down": "row"}).keep_less("gelu")
    edits["blocks.0"].replace(Wrapped)
    with tensor_models.make_pipe(edits, mesh={"pipe": 1, "tensor": 2}) as pipe:
        for seed in range(2):
            pipe.train_step(*tensor_models.make_batch(seed))
        return {name.replace(".inner", ""): value for name, value in pipe.full_state_dict().items()}


@pytest.mark.gloo
def test_a_divided_pipeline_takes_its_edits(gloo: Pool) -> None:
    with tensor_models.make_pipe(tensor_models.make_model(), mesh={"pipe": 1}) as pipe:
        for seed in range(2):
            pipe.train_step(*tensor_models.make_batch(seed))
        expected = pipe.full_state_dict()
    for found in gloo.run(train_divided, ranks=2):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert torch.allclose(value, expected[name], rtol=0, atol=1e-12), name
