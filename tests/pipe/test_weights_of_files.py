"""Models without memory, or on the meta device, and PipelineModule(weights=): equal to plain models."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from support.deferred_net import BUILDS, TOKENS, WIDTH, Net, compare, deferred, loss, make, net, trained
from support.failing import refusal
from support.inside import MappedFile, profile_model, value_of
from support.parts import Parts
from support.pool import Pool
from torch import nn

import stagewright as sw


@pytest.fixture(scope="module")
def saved() -> dict[str, torch.Tensor]:
    torch.manual_seed(9)
    return Net().state_dict()


def _one_file(state: Mapping[str, torch.Tensor], folder: Path) -> Path:
    save_file({name: x for name, x in state.items() if name != "head.weight"}, folder / "model.safetensors")
    return folder / "model.safetensors"


def _index(state: Mapping[str, torch.Tensor], folder: Path) -> Path:
    names = [name for name in state if name != "embed.weight"]
    files = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(names)}
    for file in {*files.values()}:
        save_file({name: state[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def _dcp(state: Mapping[str, torch.Tensor], folder: Path) -> Path:
    dcp.save({"app": {"model": dict(state)}}, checkpoint_id=folder, no_dist=True)
    return folder


def _checkpoint(state: Mapping[str, torch.Tensor], folder: Path) -> Path:
    sw.import_checkpoint(state, folder)
    return folder


def _with_an_optimizer(state: Mapping[str, torch.Tensor], folder: Path) -> Path:
    optimizer = {"step": torch.zeros(2)}
    dcp.save({"app": {"model": dict(state), "optim": optimizer}}, checkpoint_id=folder, no_dist=True)
    return folder


SOURCES = {
    "one": _one_file,
    "index": _index,
    "dcp": _dcp,
    "checkpoint": _checkpoint,
    "state": lambda state, _: state,
    "with optimizer": _with_an_optimizer,
    "prefixed": lambda state, _: {f"module.{name}": x for name, x in state.items() if name != "embed.weight"},
}


# Beside each source under one build: each other build under one source or two.
OTHERS = [("deferred", "one"), ("deferred", "state"), ("meta", "index"), ("meta", "prefixed"), ("plain", "dcp")]


@pytest.mark.thorough(but=["files-index", "files-state", "files-with optimizer"])
@pytest.mark.filterwarnings("ignore:.*no_dist.*", "ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(("build", "source"), [*OTHERS, *(("files", each) for each in SOURCES)])
def test_weights_of_files(build: str, source: str, saved: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model = net(build)
    pipe = make(model, weights=SOURCES[source](saved, tmp_path))
    pipe.build(TOKENS, TOKENS)
    compare(([], pipe.full_state_dict()), ([], saved))
    assert model.head.weight is model.embed.weight
    assert pipe.train_step(TOKENS, TOKENS).loss is not None


def test_the_files_type_unless_told(saved: dict[str, torch.Tensor], tmp_path: Path) -> None:
    half = {name: x.bfloat16() for name, x in saved.items()}
    for told, dtype in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        with deferred(draw=False):
            model = Net()
        model.positions = torch.zeros(6, WIDTH, dtype=dtype)
        pipe = make(model, weights=sw.Weights(_one_file(half, tmp_path), dtype=told), loss_fn=loss)
        assert pipe.train_step(TOKENS, TOKENS).loss is not None
        assert {x.dtype for x in model.parameters()} == {dtype}


def bytes_read(file: Path) -> tuple[int, int]:
    """[bytes] that this process read of a file, and of its own weights."""
    total, plain = 0, MappedFile.tensor

    def counted(own: MappedFile, *args: Any) -> torch.Tensor:
        nonlocal total
        found = plain(own, *args)
        total += found.nbytes
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MappedFile, "tensor", counted)
        model = net("files")
        pipe = make(model, weights=file, verify=False)
        pipe.build(TOKENS, TOKENS)
    return total, sum(parameter.nbytes for _, parameter in pipe.named_parameters())


@pytest.mark.thorough
def test_each_process_reads_its_own(gloo: Pool, saved: dict[str, torch.Tensor], tmp_path: Path) -> None:
    for read, own in gloo.run(bytes_read, ranks=2, args=(_one_file(saved, tmp_path),)):
        assert read == own < sum(x.nbytes for x in saved.values())


def test_who_reads_a_file_does_not_count(saved: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Processes compare what they begin with; the objects that read stand elsewhere in each."""
    file, sums = _one_file(saved, tmp_path), set()
    for _ in range(2):
        with deferred(draw=False):
            model = Net()
        make(model, weights=file)
        value = value_of(model.embed.weight)
        assert value is not None
        sums.add(value.checksum())
    assert len(sums) == 1


def refused_on_all(file: Path) -> str:
    rank = torch.distributed.get_rank()
    try:
        pipe = make(Net(), weights=file if rank == 0 else file.with_name("gone.safetensors"))
        pipe.train_step(TOKENS, TOKENS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


def test_a_file_that_one_process_misses_ends_all(gloo: Pool, saved: dict[str, torch.Tensor], tmp_path: Path) -> None:
    other, own = gloo.run(refused_on_all, ranks=2, args=(_one_file(saved, tmp_path),))
    assert "gone.safetensors' does not exist" in own
    assert "rank 1" in other
    assert "gone.safetensors" in other


WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (
        lambda state: {name: x for name, x in state.items() if "lstm" not in name},
        r"^weights of the state dict: missing \['lstm\.weight_ih_l0', .*\], unexpected none: expected the 30 names",
    ),
    "unexpected": (lambda state: {**state, "tail": state["head.weight"]}, r"missing none, unexpected \['tail'\]"),
    "shape": (
        lambda state: {**state, "blocks.1.up.bias": torch.zeros(3)},
        r"'blocks\.1\.up\.bias' has shape \(3,\): expected \(32,\)",
    ),
    "type": (
        lambda state: {**state, "blocks.1.up.bias": torch.zeros(32, dtype=torch.int8)},
        r"'blocks\.1\.up\.bias' is of torch\.int8: expected one like torch\.float32",
    ),
    "no tensor": (
        lambda state: {**state, "epoch": 3},
        r"^weights=\{'epoch': int\}: expected a state dict of tensors w",
    ),
    "no values": (lambda state: {**state, "head.weight": state["head.weight"].to("meta")}, r"of tensors with values"),
    "precision": (lambda state: sw.Weights(state, torch.int8), r"^Weights\(dtype=torch\.int8\): expected a type of fl"),
    "another model": (lambda _: {"a.b": torch.zeros(2)}, r"\] and 24 more, unexpected \['a\.b'\]"),
    "nowhere": (lambda _: "/nowhere/model.safetensors", r"^weights='/nowhere/model\.safetensors' does not exist"),
    "no file": (
        lambda _: __file__,
        r"expected a file that ends in \.safetensors or \.safetensors\.index\.json, or a f",
    ),
    "number": (lambda _: 5, r"^weights=5: expected a file of safetensors, a folder, a state dict"),
}


@pytest.mark.thorough(
    but=["unexpected", "shape", "type", "no values", "precision", "another model", "no file", "number"]
)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_change_nothing(name: str, saved: dict[str, torch.Tensor]) -> None:
    model = net("deferred")
    given, said = WRONG[name]
    before = {key: id(x) for key, x in model.named_parameters()}
    with pytest.raises(ValueError, match=said):
        make(model, weights=given(saved))
    assert before == {key: id(x) for key, x in model.named_parameters()}
    assert make(model, verify=False).train_step(TOKENS, TOKENS).loss is not None


def test_a_state_dict_is_taken_as_it_is() -> None:
    """The model's own parameters; not what it becomes later, nor where the call is refused."""
    model = Net()
    own = model.state_dict(keep_vars=True)
    values = {name: x.clone() for name, x in own.items()}
    with pytest.raises(ValueError, match="for 4 microbatches"):
        make(model, weights=own, example_inputs=(torch.randn(2, 2, 2),))
    assert not any(x.is_meta for x in model.parameters())
    pipe = make(model, weights=own)
    pipe.build(TOKENS, TOKENS)
    compare(([], pipe.full_state_dict()), ([], values))
    pipe = make(Net(), weights=values)
    values["blocks.0.up.bias"].zero_()
    with pytest.raises(ValueError, match=r"weights= has another 'blocks\.0\.up\.bias' than before: expected it unch"):
        pipe.build(TOKENS, TOKENS)


@pytest.mark.thorough(but=["verified", "2bw-False"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "interleaved", "verify": False},
        {"schedule": "2bw", "verify": False},
        {"recompute": "full", "verify": False},
        {"mesh": {"pipe": 2, "data": 2}, "verify": False},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "verified",
)
def test_trains_as_the_plain_model(options: dict[str, Any]) -> None:
    compare(trained(deferred, **options), trained(nullcontext, **options))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh",
    [
        {"pipe": 2, "data": 2},
        {"pipe": 2, "data": 2, "data_parallel": "fsdp"},
        {"pipe": 2, "tensor": 2, "tensor_parallel": {"blocks.*.up": "column", "blocks.*.down": "row"}},
    ],
    ids=lambda mesh: "-".join(map(str, mesh.values()))[:11],
)
def test_trains_as_the_plain_model_over_processes(gloo: Pool, mesh: dict[str, Any]) -> None:
    expected = gloo.run(trained, ranks=4, args=(nullcontext,), kwargs={"mesh": sw.Mesh(**mesh)})
    for found, plain in zip(
        gloo.run(trained, ranks=4, args=(deferred,), kwargs={"mesh": sw.Mesh(**mesh)}), expected, strict=True
    ):
        compare(found, plain)


def told_of_seeds(tensor: int, builds: tuple[str, str]) -> str:
    torch.manual_seed(torch.distributed.get_rank())
    with BUILDS[builds[torch.distributed.get_rank()]]():
        model = Net()
    styles = {"blocks.*.up": "column", "blocks.*.down": "row"} if tensor > 1 else None
    pipe = make(model, mesh=sw.Mesh(pipe=2 // tensor, tensor=tensor, tensor_parallel=styles))
    return refusal(lambda: pipe.train_step(TOKENS, TOKENS))


@pytest.mark.thorough(but=["2-builds1", "2-builds2"])
@pytest.mark.parametrize(
    ("tensor", "builds"),
    [
        (1, ("deferred", "deferred")),
        (2, ("deferred", "deferred")),
        (2, ("plain", "deferred")),
        (1, ("plain", "meta")),  # of which FSDP sends the first process's weights
    ],
)
def test_other_weights_in_other_processes_are_told(gloo: Pool, tensor: int, builds: tuple[str, str]) -> None:
    """Members of a tensor group make their parts alone: they would be parts of different tensors."""
    for told in gloo.run(told_of_seeds, ranks=2, args=(tensor, builds)):
        assert "has made other weights than process 0, first 'embed.weight'" in told or (
            tensor == 2 and builds[0] == "plain" and "has divided 'blocks.0.up.weight' unlike" in told
        )


def test_objects_stay_the_same() -> None:
    """An optimizer made before, hooks, attributes, references of the user's own."""
    seen: list[int] = []
    model = net("deferred")
    weight = model.blocks[0].up.weight
    weight.no_decay = True
    weight.register_hook(lambda gradient: seen.append(gradient.numel()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe = make(model, optimizer=None, verify=False)
    pipe.forward_backward(TOKENS, TOKENS)
    assert model.blocks[0].up.weight is weight
    assert type(weight) is nn.Parameter
    assert weight.no_decay
    assert sum(seen) == 4 * weight.numel()
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, before)


def test_what_is_freed_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """malloc would keep tensors as large as weights: 17% more for a model of 6 GiB on four processes."""
    asked: list[int] = []
    monkeypatch.setattr("stagewright.pipe.run.ranks.keep_freed_memory", lambda: asked.append(1))
    counts: list[int] = []
    for build in (deferred, nullcontext):
        with build():
            model = Net()
        make(model, verify=False).build(TOKENS, TOKENS)
        counts.append(len(asked))
    assert counts[0] == 0 < counts[1]


def test_a_model_of_the_meta_device_fills_itself() -> None:
    """By reset_parameters, each module with random numbers of its own, whatever the cut; else it is named."""

    def states(ranks: int) -> dict[str, torch.Tensor]:
        model = net("meta")
        pipe = make(model, mesh={"pipe": ranks}, seed=5)
        pipe.build(TOKENS, TOKENS)
        state = {name: x.clone() for name, x in pipe.full_state_dict().items()}
        assert pipe.train_step(TOKENS, TOKENS).loss is not None
        return state

    compare(([], states(1)), ([], states(2)))
    with torch.device("meta"):
        model = Net()
    message = r"^'positions' is on the meta device, and nothing fills it: Net has no reset_p"
    with pytest.raises(ValueError, match=message):
        make(model).train_step(TOKENS, TOKENS)
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))  # nothing half filled


class Part(Parts, up=lambda: nn.Linear(WIDTH, WIDTH), down=lambda: nn.Linear(WIDTH, WIDTH)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.down.weight, 3.0)


def test_a_module_fills_its_parts_after_them_and_leaves_what_has_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Part(), Part())
    model[0].up.bias = nn.Parameter(torch.full((WIDTH,), 5.0))
    x = torch.randn(8, WIDTH)
    pipe = make(model, loss_fn=F.mse_loss)
    pipe.build(x, x)
    state = pipe.full_state_dict()
    assert (state["0.down.weight"] == 3).all()
    assert (state["1.down.weight"] == 3).all()
    assert (state["0.up.bias"] == 5).all()
    assert (state["1.up.bias"] != 5).all()


class Scaled(Parts, layer=lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), scale=lambda: [torch.rand(WIDTH)]):
    """A layer with a tensor that nobody registered, and a loss with one."""

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        x = self.layer(x) * self.scale[0]
        return x if target is None else F.mse_loss(x, target)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_attributes_and_a_loss_with_weights() -> None:
    losses, x = [], torch.randn(8, WIDTH)
    for build in (nullcontext, deferred):
        torch.manual_seed(3)
        with build():
            model, loss_fn = nn.Sequential(Scaled(), Scaled()), Scaled()
        pipe = make(model, loss_fn=loss_fn)
        losses.append([pipe.train_step(x, x).loss for _ in range(2)])
    assert losses[0] == losses[1]


def test_what_was_not_drawn_is_named() -> None:
    with deferred(draw=False):
        model = Net()
    message = r"drawn at random in the constructor, which .*draw=False\) leaves out: expected w"
    with pytest.raises(ValueError, match=message):
        make(model).train_step(TOKENS, TOKENS)
    assert all(x.is_meta for x in model.parameters())


def test_edits_of_it() -> None:
    """Also where one fails, and all is put back."""
    model = net("deferred")
    edits = sw.edit(model)
    edits["blocks.1"].replace(lambda old: old.up)
    with pytest.raises(ValueError, match="would lose its"):
        make(edits)
    states = []
    for build in (deferred, nullcontext):
        torch.manual_seed(3)
        with build():
            model = Net()
        edits = sw.edit(model)
        edits["blocks.*"].checkpoint()
        edits["blocks.2"].dtype(torch.bfloat16)
        pipe = make(edits, verify=False)
        loss = pipe.train_step(TOKENS, TOKENS.flip(0)).loss
        states.append(([loss], pipe.full_state_dict()))
    compare(*states)


def test_a_kind_of_layer_is_measured_once() -> None:
    model, options = net("deferred"), {"target": TOKENS[:2], "loss_fn": loss, "seconds": 0.1, "repetitions": 3}
    found, plain = (profile_model(each, (TOKENS[:2],), **options).nodes for each in (model, Net()))
    assert {node.parameter_bytes for node in found} == {node.parameter_bytes for node in plain}
    assert all(x.is_meta and x.grad is None for x in model.parameters())
