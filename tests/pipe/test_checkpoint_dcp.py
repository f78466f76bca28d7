"""Folders of torch.distributed.checkpoint: FSDP2 ranks save and a pipeline goes on, and back; none runs code."""

import os
import pickle
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.inside import main
from support.plain import batch as plain_batch
from support.pool import Pool
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import stagewright
from stagewright.pipe import PipelineModule


def model(seed: int = 0) -> nn.Sequential:
    """Rows that two ranks divide unevenly, and one that only the first has."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    flat, rest = ([p for p in parameters if (p.ndim < 2) is is_flat] for is_flat in (True, False))
    return torch.optim.AdamW([{"params": rest}, {"params": flat, "weight_decay": 0.0}], lr=1e-2, betas=(0.8, 0.9))


batch = partial(plain_batch, out=1)


def make(**options: Any) -> PipelineModule:
    settings: dict[str, Any] = {"mesh": {"pipe": 2}, "num_microbatches": 1, "optimizer": adamw, "verify": False}
    return PipelineModule(
        model(9), loss_fn=nn.functional.mse_loss, **(settings | {"example_inputs": batch(0)[:1]} | options)
    )


def train(plain: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses of whole batches; ranks of FSDP take a share each, and average the gradients."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in steps:
        x, y = (each.tensor_split(size)[rank] for each in batch(step))
        loss = nn.functional.mse_loss(plain(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / size
        if size > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def wrapped(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = model(seed)
    for layer in plain:
        fully_shard(layer)
    fully_shard(plain)
    return plain, adamw(plain.parameters())


def fsdp_saves(folder: Path) -> list[float]:
    """Both forms of get_state_dict, and the weights alone; returns the losses of two steps behind it."""
    plain, optimizer = wrapped()
    train(plain, optimizer, range(2))
    weights, state = get_state_dict(plain, optimizer)
    dcp.save({"model": weights, "optimizer": state, "dataloader": {"at": print}}, checkpoint_id=folder / "nested")
    dcp.save(weights, checkpoint_id=folder / "weights")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(plain, optimizer, options=flat)
    dcp.save({"app": {"model": weights, "optim": state}}, checkpoint_id=folder / "flat")
    return train(plain, optimizer, range(2, 4))


def fsdp_loads(folder: Path, is_flat: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    plain, optimizer = wrapped(3)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    weights, state = get_state_dict(plain, optimizer, options=options)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(plain, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    full = {name: x.full_tensor().clone() for name, x in plain.state_dict().items()}
    return full, train(plain, optimizer, range(2, 4))


def plain_loads(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = model(3)
    optimizer = adamw(plain.parameters())
    weights, state = get_state_dict(plain, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=True)
    set_state_dict(plain, optimizer, model_state_dict=weights, optim_state_dict=state)
    return plain, optimizer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_pipeline_goes_on_from_what_fsdp_saved(gloo: Pool, tmp_path: Path) -> None:
    behind = gloo.run(fsdp_saves, ranks=2, args=(tmp_path,))[0]
    plain, optimizer = plain_loads(tmp_path / "nested")
    before = {name: x.clone() for name, x in plain.state_dict().items()}
    expected = train(plain, optimizer, range(2, 4))
    for name in ("nested", "flat"):
        words = ["export", str(tmp_path / name), "--to-checkpoint", str(tmp_path / f"{name}-in"), "--optimizer"]
        told = pytest.warns(UserWarning, match="has no place for dataloader, left out")
        with told if name == "nested" else nullcontext():
            assert main(words) == 0
        pipe = make()
        pipe.load(tmp_path / f"{name}-in")
        assert pipe.num_steps == 2
        losses = [pipe.train_step(*batch(step)).loss for step in range(2, 4)]
        assert losses == expected
        assert losses == pytest.approx(behind, abs=1e-13)
        found = pipe.full_state_dict()
        assert all(torch.equal(found[key], x) for key, x in plain.state_dict().items())
    stagewright.import_checkpoint(tmp_path / "weights", tmp_path / "begun")
    found = stagewright.read_checkpoint(tmp_path / "begun")
    assert found.keys() == before.keys()
    assert all(torch.equal(found[key], x) for key, x in before.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_fsdp_and_a_plain_process_go_on_from_what_a_pipeline_saved(gloo: Pool, tmp_path: Path) -> None:
    pipe = make()
    for step in range(2):
        pipe.train_step(*batch(step))
    pipe.save(tmp_path / "c")
    state = pipe.full_state_dict()
    assert main(["export", str(tmp_path / "c"), "-o", str(tmp_path / "out"), "--dcp", "--optimizer"]) == 0
    losses = [pipe.train_step(*batch(step)).loss for step in range(2, 4)]
    for is_flat in (False, True):
        for full, found in gloo.run(fsdp_loads, ranks=2, args=(tmp_path / "out", is_flat)):
            assert all(torch.equal(full[name], x) for name, x in state.items())
            assert found == pytest.approx(losses, abs=1e-13)
    plain, optimizer = plain_loads(tmp_path / "out")
    assert train(plain, optimizer, range(2, 4)) == losses
    assert not list(tmp_path.glob(".*"))


class Evil:
    def __init__(self, folder: Path) -> None:
        self.file = folder.parent / "ran"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.file,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plain = model()
    optimizer = adamw(plain.parameters())
    train(plain, optimizer, range(1))
    weights, state = get_state_dict(plain, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "d", no_dist=True)
    return tmp_path / "d"


def metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def rewrite(folder: Path, content: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def written(data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / ".metadata").write_bytes(data)


def edited(change: Callable[[Any, Path], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        content = metadata(folder)
        change(content, folder)
        rewrite(folder, content)

    return spoil


def saved(content: dict[str, Any], folder: Path) -> None:
    """In place of the folder."""
    shutil.rmtree(folder)
    dcp.save(content, checkpoint_id=folder, no_dist=True)


def chunk_of(folder: Path, name: str, data: bytes, **more: Any) -> None:
    """Its entry of this name is that file."""
    content = metadata(folder)
    info = next(x for at, x in content.storage_data.items() if at.fqn == name)
    (folder / "evil.distcp").write_bytes(data)
    vars(info).update({"relative_path": "evil.distcp", "offset": 0, "length": len(data)} | more)
    rewrite(folder, content)


def archive(pickled: bytes, folder: Path) -> bytes:
    writer = torch._C.PyTorchFileWriter(str(folder / "made"))
    writer.write_record("data.pkl", pickled, len(pickled))
    writer.write_end_of_file()
    return (folder / "made").read_bytes()


def ended(front: bytes, start: int) -> bytes:
    """An archive whose list of entries begins there and ends it, with the records that torch writes behind."""
    length, at = len(front) - start, len(front)
    number = front[start:].count(b"PK\1\2")
    large = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, number, number, length, start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, at, 1)
    return front + large + locator + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, number, number, length, start, 0)


def packed(into: Path, pickled: bytes, kind: int) -> tuple[bytes, int]:
    with ZipFile(into, "w", kind) as written:
        written.writestr("archive/data.pkl", pickled)
        start = written.start_dir
    return into.read_bytes()[:-22], start


NAMED = "optimizer.param_groups.0.lr"


def two_lists(folder: Path) -> None:
    """Python finds the last list of entries, and torch the one that the end names."""
    front, start = packed(folder / "made", bytes(10**6), ZIP_DEFLATED)
    other, at = packed(folder / "made", b"N.", ZIP_STORED)
    found = ended(front + other[at:], start)
    chunk_of(
        folder, NAMED, found.replace(struct.pack("<Q", len(found) - 98 - start), struct.pack("<Q", len(other) - at))
    )


def stretched(folder: Path) -> None:
    """One element, of a tensor as large as memory."""
    content, one = metadata(folder), torch.Size((10**5, 10**5))
    torch.save(torch.ones(1).expand(one), folder / "made")
    entry = content.state_dict_metadata["model.0.weight"]
    entry.size = entry.chunks[0].sizes = one
    rewrite(folder, content)
    chunk_of(folder, "model.0.weight", (folder / "made").read_bytes())


def fifo_of_chunks(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "there")
    (folder / "__0_0.distcp").symlink_to(folder / "there")


def value_of(pickled: bytes) -> Callable[[Path], object]:
    return lambda folder: chunk_of(folder, NAMED, archive(pickled, folder))


WEIGHT, RECORD = "model.0.weight", b"ctorch.distributed.checkpoint.metadata\n"
UNREAD = "cannot be read as a folder of torch.distributed.checkpoint"
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "evil": (
        lambda folder: rewrite(folder, Evil(folder)),
        "names pathlib.Path.touch|names builtins.getattr|names pathlib.Path, which is not one of DCP's records",
    ),
    # Changing a class that a pickle may name: found.chunks = None, and torch's own must stay as they are.
    "evil_class": (written(RECORD + b"Metadata\n(N}S'storage_data'\nI5\nstb."), "cannot be read as a folder"),
    # Changing a member of torch's own enum, for the whole process.
    "evil_member": (
        written(RECORD + b"_MEM_FORMAT_ENCODING\n(I0\ntR}S'_value_'\nI77\nsb."),
        "cannot be read as a folder",
    ),
    # The optimizer's rate is a pickle that runs code: torch's own reader runs it.
    "evil_value": (
        lambda folder: chunk_of(folder, NAMED, archive(pickle.dumps(Evil(folder), protocol=2), folder)),
        "which a checkpoint cannot hold",
    ),
    "elsewhere": (
        edited(lambda content, _: vars(next(iter(content.storage_data.values()))).update(relative_path="../d/x")),
        "names files elsewhere",
    ),
    "without_chunk": (
        edited(lambda content, _: content.state_dict_metadata[WEIGHT].chunks.clear()),
        "'model.0.weight' is not there whole",
    ),
    "cut_off": (lambda folder: os.truncate(folder / "__0_0.distcp", 2000), UNREAD),
    "no_folder": (
        lambda folder: (folder / ".metadata").unlink(),
        "expected a plain file, or a folder of DCP, with .metadata",
    ),
    "no_optimizer": (
        lambda folder: saved({"model": model().state_dict()}, folder),
        "has no optimizer: expected one next to 'model'",
    ),
    "by_numbers": (
        lambda folder: saved(
            {"model": model().state_dict(), "optimizer": adamw(model().parameters()).state_dict()}, folder
        ),
        "of torch.distributed.checkpoint.state_dict.get_state_dict",
    ),
    "nested": (lambda folder: saved({"model": {"a": {"b": torch.ones(1)}}}, folder), "expected a model's state_dict"),
    # A thousand times its size in memory, before it was refused.
    "deflated": (
        lambda folder: chunk_of(folder, NAMED, ended(*packed(folder / "made", bytes(10**6), ZIP_DEFLATED))),
        "it is compressed, or damaged: expected a file of torch.save, which unpacks to its own size",
    ),
    "two_lists": (two_lists, "it is compressed, or damaged"),
    "bytes_of_any_number": (
        value_of(b"\x80\x02c__builtin__\nbytearray\nq\x00J\x00\x00\x00\x10\x85R."),
        "it has a bytearray, which checkpoints never have",
    ),
    "tensor_of_any_size": (
        value_of(b"\x80\x02ctorch\nFloatTensor\nq\x00J\x00\x00\x00\x10\x85R."),
        "its tensors are larger than it is",
    ),
    "stretched": (stretched, "a chunk of 'model.0.weight' is larger than what its file has of it"),
    "taken_twice": (
        lambda folder: chunk_of(
            folder, NAMED, b"", relative_path="__0_0.distcp", length=(folder / "__0_0.distcp").stat().st_size
        ),
        "__0_0.distcp is shorter than .metadata says",
    ),
    "packed_otherwise": (
        lambda folder: chunk_of(folder, NAMED, b"x", transform_descriptors=["stream.zstd/1"]),
        "evil.distcp is shorter than .metadata says, or compressed",
    ),
    "far_in_a_list": (
        edited(lambda content, _: content.planner_data.update({WEIGHT: ("model", 10**9)})),
        "has an entry beyond the end of its list",
    ),
    # Object number 2**28: Python's reader in C makes a list of as many.
    "far_in_the_pickle": (written(b"\x80\x02Nr\x00\x00\x00\x10."), f"{UNREAD}: AttributeError"),
    "long_in_the_pickle": (written(b"\x80\x05\x96" + struct.pack("<Q", 10**10) + b"."), UNREAD),
    "fifo": (
        lambda folder: ((folder / ".metadata").unlink(), os.mkfifo(folder / ".metadata")),
        ".metadata is not a regular file",
    ),
    "fifo_of_chunks": (fifo_of_chunks, "__0_0.distcp is not a regular file"),
}


@pytest.mark.thorough(
    but=[
        "evil",
        "elsewhere",
        "without_chunk",
        "cut_off",
        "no_folder",
        "bytes_of_any_number",
        "tensor_of_any_size",
        "stretched",
        "far_in_a_list",
        "fifo",
    ]
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("name", SPOILT)
def test_what_is_no_folder_of_dcp_is_refused_and_runs_no_code(name: str, folder: Path, tmp_path: Path) -> None:
    """Nor changes it anything, or takes more memory than it has bytes."""
    before = [vars(each).copy() for each in dcp.metadata._MEM_FORMAT_ENCODING]
    spoil, message = SPOILT[name]
    spoil(folder)
    tracemalloc.start()
    with pytest.raises(ValueError, match=message):
        stagewright.import_checkpoint(folder, tmp_path / "c", optimizer=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20
    assert not (tmp_path / "ran").exists()
    assert not hasattr(dcp.metadata.Metadata, "storage_data") or dcp.metadata.Metadata.storage_data is None
    assert [vars(each) for each in dcp.metadata._MEM_FORMAT_ENCODING] == before
    assert not (tmp_path / "c").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_dcp_for_another_model_or_optimizer_is_refused(folder: Path, tmp_path: Path, capsys: Any) -> None:
    stagewright.import_checkpoint(folder, tmp_path / "c", optimizer=True)
    for options, message in [
        ({"optimizer": torch.optim.Adam}, "under an optimizer with .*and Adam has"),
        ({"optimizer": torch.optim.Adamax}, "and Adamax has"),
        ({"optimizer": torch.optim.SGD}, "and SGD has"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(**options).load(tmp_path / "c")
    narrow = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    other = PipelineModule(
        narrow, loss_fn=nn.functional.mse_loss, optimizer=adamw, mesh={"pipe": 2}, example_inputs=batch(0)[:1]
    )
    with pytest.raises(ValueError, match=r"is of another model: '0.weight' has shape"):
        other.load(tmp_path / "c")
    pipe = make(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))
    pipe.train_step(*batch(0))
    pipe.save(tmp_path / "own")
    with pytest.warns(UserWarning, match="no place for learning-rate schedules, left out") as told:
        stagewright.export_checkpoint(tmp_path / "own", tmp_path / "out", dcp=True, optimizer=True)
    assert told[0].filename == __file__
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(ValueError, match=r"there: expected a new folder for torch\.distributed\.checkpoint"):
        stagewright.export_checkpoint(tmp_path / "own", tmp_path / "there", dcp=True)
    with pytest.raises(ValueError, match="the state dict has no optimizer: expected one next to 'model'"):
        stagewright.import_checkpoint(model().state_dict(), tmp_path / "c", optimizer=True)
    assert main(["export", str(folder), "--to-checkpoint", str(tmp_path / "x"), "--dcp"]) == 2
    assert "--dcp with --to-checkpoint" in capsys.readouterr().err
