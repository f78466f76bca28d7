"""Named edits that are refused, or that fail: mistakes are named, and the model is as it was."""

import gc
import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import make_model
from support.pipeline import assembled
from support.small import sgd
from torch import nn

from stagewright.pipe import Edits, PipelineModule, edit

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks at it


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
    with pytest.raises(ValueError, match=r"state: -1\.0: expected a finite number of at least 0"):
        edits.memory((torch.ones(2, 4),), limit="500kB", state=-1.0)
    edits["3.up"].dtype("float64")
    with pytest.raises(ValueError, match=r"3: dtype\(.* excludes 3\.up: dtype\(.* at '3\.up': expected only one"):
        edits["3"].dtype("bfloat16")  # it would be that of the part, too
    edits.undo()
    edits["3"].replace(lambda old: nn.Sequential(old, nn.LazyLinear(4)))
    with pytest.raises(ValueError, match="replace of '3': a Sequential without shapes: expected one that has run once"):
        edits.build()
    edits.undo()
    for add in (partial(edits[""].dtype, "float32"), partial(edits[""].keep_less, "gelu")):
        add()
        message = r"\), around the whole model, which a pipeline cuts: expected modules in it"
        with pytest.raises(ValueError, match=message):
            PipelineModule(edits, mesh={"pipe": 2})
        edits.undo()
    edits["3"].checkpoint()
    for make in (partial(edits["3.*_norm"].keep_less, "layernorm"), edits["3"].checkpoint):
        with pytest.raises(ValueError, match=r"excludes 3: checkpoint\(\) at '3': expected only one of them there"):
            make()
    with pytest.raises(ValueError, match=r"recompute= together with edits that set it: expected only one of them"):
        PipelineModule(edits, recompute="full", mesh={"pipe": 2})
    assert str(model) == before
    tied = edit(make_model("tied-gpt"))
    with pytest.raises(ValueError, match=r"dtype of 'head': its 'weight' is 'embed\.weight', too \(tied\)"):
        tied["head"].dtype("float32")
    shared = nn.Linear(4, 4)
    twice = edit(nn.Sequential(shared, nn.Tanh(), shared))
    with pytest.raises(ValueError, match=r"0: checkpoint\(\): '0' is '2', too \(shared\): expected a module with"):
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
    edits["norm"].replace(nn.Sequential)
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
    edits["blocks.2"].replace(nn.Sequential)
    assert len(edits) == 4


@pytest.mark.parametrize("word", ["verify", "memory"])
def test_an_example_that_is_no_tuple_is_refused(word: str) -> None:
    """Its rows would be taken for arguments."""
    edits, options = edit(nn.Linear(4, 4)), {"limit": "1MB"} if word == "memory" else {}
    with pytest.raises(ValueError, match=r"example: a Tensor: expected a tuple of arguments, or a dict of keywords"):
        getattr(edits, word)(torch.randn(2, 4), **options)


def test_a_replacement_is_its_own() -> None:
    new = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    edits = edit(model)
    edits["*"].replace(lambda old: new)
    with pytest.raises(ValueError, match=r"replace of '1': what make\(module\) returned has '0' in it: expected a new"):
        edits.build()
    assert new not in set(model.modules())


@pytest.mark.parametrize(
    ("word", "given"), [("keep_less", ("gelu",)), ("compile", ("eager",)), ("dtype", ("bfloat16",))]
)
def test_what_stands_around_a_forward_needs_one(word: str, given: tuple[str, ...]) -> None:
    edits = edit(nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.GELU(), nn.Linear(4, 4))])}))
    with pytest.raises(ValueError, match=rf"{word} of 'blocks', a ModuleList, which nothing calls: expected a module"):
        getattr(edits["blocks"], word)(*given)
    getattr(edits["blocks.*"], word)(*given)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"do": "compile", "gate": "no"}, r"compile\(gate='no'\): expected True or False"),
        ({"do": "compile", "gate": 0}, r"compile\(gate=0\): expected True or False"),
        ({"do": "shard", "plan": {}}, r"shard\(\{\}\) of '1': expected its modules, as in \{'up': 'column'"),
        ({"do": "shard", "plan": ["up"]}, r"shard\(\['up'\]\) of '1': expected its modules"),
        ({"do": "shard", "plan": {"0": None}}, r"shard\(\{'0': None\}\): expected one of 'column', 'row'"),
        ({"do": "checkpoint", "keep": "aten.mm.default"}, r"checkpoint\(keep='aten.mm.default'\): expected a list of"),
        ({"do": "checkpoint", "keep": 5}, r"checkpoint\(keep=5\): expected a list of operators"),
        ({"do": "melt"}, r"do='melt': expected one of 'checkpoint', 'shard'"),
        ({"do": "shard"}, r"edit 1, \{'at': '1', 'do': 'shard'\} \(TypeError\(.*missing .* 'plan'"),
        ({"do": "cut", "deep": 1}, r"edit 1, \{.*\} \(TypeError\(.*unexpected keyword argument 'deep'"),
        ({"do": "cut", "at": None}, r"edits\[None\]: expected a name or a pattern of names"),
    ],
    ids=str,
)
def test_a_list_written_by_hand_is_read_word_by_word(record: dict[str, Any], said: str, tmp_path: Path) -> None:
    edits, file = edit(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))), tmp_path / "edits.json"
    given = [{"at": "0", "do": "checkpoint"}, {"at": "1"} | record]
    file.write_text(json.dumps({"format": "stagewright-edits-1", "edits": given}))
    with pytest.raises(ValueError, match=rf"edits\.json: {said}"):
        edits.load(file)
    assert len(edits) == 0


@pytest.mark.parametrize(
    "content", [b"\xff", b"[]", b'{"format": "stagewright-edits-1", "edits": {}}', b'{"edits": [], "format": 1}']
)
def test_a_file_without_a_list_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "edits.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"edits\.json holds no edits \(.*\): expected what edits.save wrote"):
        edit(nn.Linear(4, 4)).load(tmp_path / "edits.json")


def _fail(*given: object) -> Any:
    raise RuntimeError("the user's own")


# Options, and whether they fail before the first batch.
FAILING: dict[str, tuple[dict[str, Any], bool]] = {
    "schedule": ({"schedule": "zigzag"}, True),
    "example": ({"example_inputs": (torch.zeros(4, 5),)}, True),
    "loss word": ({"loss_fn": "models"}, True),
    "stages": ({"mesh": {"pipe": 9}}, False),
    "loss": ({"loss_fn": _fail}, False),
    "optimizer": ({"optimizer": _fail}, False),
    "scheduler": ({"lr_scheduler": _fail}, False),
    "no optimizer": ({"optimizer": None}, False),
}


def _sequential() -> Edits:
    torch.manual_seed(0)
    edits = edit(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    edits["1"].replace(nn.Sequential)
    edits["2"].dtype("float64")
    edits["3"].checkpoint()
    return edits


_pipe = partial(
    assembled, mesh={"pipe": 2}, num_microbatches=2, loss_fn=nn.functional.mse_loss, optimizer=sgd, verify=False
)


def _holds(model: nn.Module) -> tuple[object, ...]:
    return {module: dict(vars(module)) for module in model.modules()}, [p.dtype for p in model.parameters()]


@pytest.mark.thorough(but=["schedule"])
@pytest.mark.parametrize("name", FAILING)
def test_a_pipeline_that_fails_leaves_the_model_without_its_edits(name: str) -> None:
    """And the list to go on with."""
    options, is_early = FAILING[name]
    edits = _sequential()
    before, x = _holds(edits.model), torch.ones(4, 4)
    with ExitStack() as stack:
        if is_early:
            stack.enter_context(pytest.raises(ValueError))  # noqa: PT011 - another one each
        pipe = _pipe(edits, **options)
        assert _holds(edits.model) != before
        with pytest.raises((ValueError, RuntimeError)):
            pipe.train_step(x, x)
    assert _holds(edits.model) == before
    edits.undo()
    assert _pipe(edits).train_step(x, x).loss == pytest.approx(_pipe(_sequential().model).train_step(x, x).loss)


@pytest.mark.parametrize("is_built", [True, False])
def test_modules_are_not_divided_among_one(is_built: bool) -> None:
    edits = _sequential()
    before, x = _holds(edits.model), torch.ones(4, 4)
    edits["0"].shard({"": "column"})
    message = r"0: shard\(plan={'': 'column'}\) without a tensor group: expected mesh=Mesh\("
    with pytest.raises(ValueError, match=message):
        _pipe(edits, example_inputs=(x,) if is_built else None)
    assert _holds(edits.model) == before
    edits.undo()
    _pipe(edits)


def test_a_first_batch_that_is_refused_is_not_the_end() -> None:
    """The next one makes the edits again, those that the pipeline was built with."""
    edits, x = _sequential(), torch.ones(4, 4)
    before, pipe = _holds(edits.model), _pipe(edits)
    for bad in ((torch.ones(4, 5), x), (x,)):
        with pytest.raises((ValueError, TypeError)):
            pipe.train_step(*bad)
        assert _holds(edits.model) == before
    assert pipe.train_step(x, x).loss == pytest.approx(_pipe(_sequential().model).train_step(x, x).loss)
    with pytest.raises(ValueError, match=r"these edits are applied"):
        edits.undo()
    with pytest.raises(ValueError):  # noqa: PT011 - behind the first batch they stay
        pipe.train_step(x)
    others, other = _sequential(), torch.ones(4, 5)
    pipe = _pipe(others)
    with pytest.raises(ValueError, match=r"cannot take"):
        pipe.train_step(other, x)
    others.undo()
    with pytest.raises(ValueError, match=r"differ from those of this pipeline: expected a new PipelineModule\(edits\)"):
        pipe.train_step(x, x)


@pytest.mark.thorough(but=["True"])
@pytest.mark.parametrize("at_once", [True, False])
def test_edits_outlive_their_pipeline(at_once: bool) -> None:
    x = torch.ones(4, 4)

    def trained() -> nn.Module:
        edits = _sequential()
        pipe = _pipe(edits, **{"example_inputs": (x,)} if at_once else {})
        if not at_once:
            pipe.train_step(x, x)
        return edits.model

    model = trained()
    gc.collect()
    assert type(model.get_submodule("1")) is nn.Sequential
