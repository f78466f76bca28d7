"""PipelineModule(weights=): files, folders and state dicts, whatever the model was built with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.deferred_net import TOKENS, WIDTH, Net, compare, deferred, loss, make, net
from support.inside import MappedFile, value_of
from support.pool import Pool

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


def _prefixed(state: Mapping[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    return {f"module.{name}": x for name, x in state.items() if name != "embed.weight"}


SOURCES = {
    "one": _one_file,
    "index": _index,
    "dcp": _dcp,
    "checkpoint": _checkpoint,
    "state": lambda state, _: state,
    "with optimizer": _with_an_optimizer,
    "prefixed": _prefixed,
}


# Beside each source under one build: each other build under one source or two.
OTHERS = [("deferred", "one"), ("deferred", "state"), ("meta", "index"), ("meta", "prefixed"), ("plain", "dcp")]


@pytest.mark.thorough(but=["files-checkpoint", "meta-index", "plain-dcp"])
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


@pytest.mark.thorough
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
