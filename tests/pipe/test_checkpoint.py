"""Checkpoints: going on from one is exact, on the same cut and on another; nothing in one is executed."""

import copy
import functools
import hashlib
import itertools
import json
import os
import pickle
import random
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.inside import ReplicaLoader
from support.inside import files as checkpoint_files
from support.plain import batch as plain_batch
from support.records import records
from torch import nn
from torch.utils.data import TensorDataset

from stagewright.pipe import PipelineModule

batch = partial(plain_batch, out=2)
adamw = partial(torch.optim.AdamW, lr=1e-2)
halved = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)


def make(schedule: str, ranks: int) -> PipelineModule:
    torch.manual_seed(3)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2))]
    model = nn.Sequential(*layers, nn.BatchNorm1d(6), nn.Linear(6, 2))
    return plain(model, schedule=schedule, mesh={"pipe": ranks}, optimizer=adamw, lr_scheduler=halved)


def train(pipe: PipelineModule, steps: range) -> list[float]:
    return [pipe.train_step(*batch(step)).loss for step in steps]


def test_the_place_in_the_data_goes_to_other_batches_and_to_no_other_order(tmp_path: Path) -> None:
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*(batch(step) for step in range(4)), strict=True)))
    pipe = make("1f1b", 2)
    loader = pipe.loader(data, batch_size=8)
    for each in itertools.islice(itertools.chain(loader, loader), 6):  # to the second epoch's middle
        pipe.train_step(*each)
    pipe.save(tmp_path / "c", loader=loader)
    with pytest.warns(UserWarning, match=r"'epoch': 1.*was not loaded.*pipe.load\(folder, loader=loader\)"):
        pipe.load(tmp_path / "c")
    smaller = pipe.loader(data, batch_size=4)
    pipe.load(tmp_path / "c", loader=smaller)
    assert smaller.state_dict() == {**loader.state_dict(), "epoch": 1, "position": 16}
    assert len(list(smaller)) == 4
    with pytest.raises(ValueError, match="shuffle=True, and this run has False: expected the same dataset"):
        pipe.load(tmp_path / "c", loader=pipe.loader(data, batch_size=4, shuffle=False))
    pipe.save(tmp_path / "without")
    with pytest.raises(ValueError, match=r"no position of a data loader: expected one from pipe.save\(..., loader=\)"):
        pipe.load(tmp_path / "without", loader=loader)


def saved(folder: Path, steps: int = 1, schedule: str = "1f1b") -> Path:
    pipe = make(schedule, 2)
    train(pipe, range(steps))
    pipe.save(folder)
    return folder / (folder / "latest").read_text()


def state_of(pipe: PipelineModule) -> list[torch.Tensor]:
    states = [value for optimizer in pipe.optimizers for state in optimizer.state.values() for value in state.values()]
    return [tensor.clone() for tensor in [*pipe.full_state_dict().values(), *states]]


def refused(folder: Path, match: str) -> None:
    """Loading is refused, and has changed nothing."""
    pipe = make("1f1b", 2)
    train(pipe, range(2))
    before = state_of(pipe)
    with pytest.raises(ValueError, match=match):
        pipe.load(folder)
    assert all(map(torch.equal, before, state_of(pipe)))


def rewrite(place: Path, **changes: Any) -> None:
    """The manifest with other fields, and a hash that fits: who can write the one can write the other."""
    path = place / "checkpoint.json"
    content = json.loads(path.read_text()) | changes
    fields = {key: value for key, value in content.items() if key not in ("version", "sha256")}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(content | {"sha256": hashlib.sha256(text.encode()).hexdigest()}))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", r"nothing is not a checkpoint: expected a folder from pipe\.save")
    manifest = saved(tmp_path / "c") / "checkpoint.json"
    good = manifest.read_text()
    for changed, message in [
        (good.replace('"version": 4', '"version": 5'), "format 5, and this stagewright reads format 4: expected a"),
        (good.replace('"version": 4', '"version": 3'), "it is of format 3: expected format 4"),
        (good.replace('"step": 1', '"step": 2'), "it is damaged: its SHA-256 is not that of what was saved"),
        ("[" * 100_000, "cannot be used"),
        ("{", "cannot be used"),
        ("7", "it is not the manifest of a checkpoint"),
        (good[:-100], "cannot be used"),
    ]:
        manifest.write_text(changed)
        refused(tmp_path / "c", rf"checkpoint\.json cannot be used: .*{message}|{message}")
    manifest.unlink()
    refused(tmp_path / "c", r"checkpoint\.json cannot be used: No such file")


def test_a_manifest_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """Though its hash fits."""
    place = saved(tmp_path / "c")
    path = place / "checkpoint.json"
    good = path.read_text()
    content = json.loads(good)
    file, entry, start, sizes, sha256 = content["tensors"]["model/0.weight"][2][0]
    assert (start, sizes) == ([0, 0], [6, 6])

    def tensor(*pieces: list[Any], shape: tuple[int, ...] = (6, 6), dtype: str = "float64") -> dict[str, Any]:
        return {"tensors": content["tensors"] | {"model/0.weight": [list(shape), dtype, list(pieces)]}}

    def in_file(name: str) -> dict[str, Any]:
        return {"files": content["files"] | {name: [100, "0" * 64]}}

    top, bottom = [file, entry, [0, 0], [3, 6], sha256], [file, entry, [3, 0], [3, 6], sha256]
    for changes, message in [
        ({"step": -1}, "step=-1: expected a whole number"),
        ({"more": 1}, "it has the fields .*'more'"),
        ({"kind": "other"}, "kind='other': expected one of training, weights"),
        (in_file("../process-0.safetensors"), r"file '\.\./process-0\.safetensors': expected the plain name"),
        (in_file("stage.pt"), "expected the plain name of a .safetensors file"),
        ({"files": {}}, "which is not among the files"),
        (tensor(), "'model/0.weight' has no pieces"),
        (tensor(top), r"pieces of 18 elements in all: expected 36"),
        (tensor(top, top), "some of which overlap"),
        (tensor(top, [file, entry, [4, 0], [3, 6], sha256]), r"has a piece at \(4, 0\) of \(3, 6\)"),
        (tensor(["other.safetensors", entry, start, sizes, sha256]), "in 'other.safetensors', which is not among"),
        (tensor([file, entry, start, sizes, "x"]), "a piece without a hash"),
        (tensor([file, entry, start, sizes, sha256], dtype="object"), "is of 'object': expected one of float64"),
        (tensor([file, entry, start, sizes, sha256], dtype="int64"), "'0.weight' in int64, and it is in float64 here"),
        (tensor([file, entry, [0], [36], sha256], shape=(36,)), r"'0.weight' has shape \(36,\), expected \(6, 6\)"),
        (tensor([file, entry + "x", start, sizes, sha256]), "is not what the manifest says: it has no tensor"),
        (tensor([file, "model/0.bias", start, sizes, sha256]), r"'model/0.bias' has shape \(6,\): expected \(6, 6\)"),
        (tensor(top, bottom), r"'model/0.weight' has shape \(6, 6\): expected \(3, 6\)"),
        ({"names": [*content["names"], "0.weight"]}, "the model has a name twice"),
        ({"names": [*content["names"], "more"]}, "the model's 'more' is not in it"),
        ({"values": content["values"] | {"optimizers": [[{"class": "AdamW"}]]}}, "has optimizers of another form"),
        ({"values": content["values"] | {"random/torch": [{"exec": "x"}]}}, "has a bad value of 'random/torch'"),
        ({"values": content["values"] | {"random/python": [[1, 2]]}}, "state of the generator 'python' is not valid"),
    ]:
        rewrite(place, **changes)
        refused(tmp_path / "c", message)
        path.write_text(good)


ODD: list[Any] = [None, -1, 1.5, "x", [], {}, [[]], 10**30, True, {"tuple": [1]}, {"dict": [[[], 1]]}, [None], 0]


def places_in(content: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [*([at] if at else []), *(place for key, value in items for place in places_in(value, (*at, key)))]


@pytest.mark.thorough
def test_odd_values_anywhere_in_a_manifest_are_refused_by_its_name(tmp_path: Path) -> None:
    """Though its hash fits: what loads is whole, and what does not has changed nothing."""
    draw = random.Random(5)
    samples = TensorDataset(torch.randn(32, 6).double(), torch.randn(32, 3).double())

    def trained(schedule: str) -> tuple[PipelineModule, ReplicaLoader]:
        pipe = plain(
            nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)),
            schedule=schedule,
            grad_scaler=None if schedule == "2bw" else torch.amp.GradScaler("cpu", init_scale=8.0),
            optimizer=adamw,
            lr_scheduler=halved,
        )
        loader = pipe.loader(samples, batch_size=16)
        for batch in loader:
            pipe.train_step(*batch)
        return pipe, loader

    for schedule in ("2bw", "1f1b"):
        pipe, loader = trained(schedule)
        place = pipe.save(tmp_path / schedule, loader=loader).path
        good = json.loads((place / "checkpoint.json").read_text())
        places = [at for at in places_in(good) if at[0] not in ("version", "sha256")]
        before = state_of(pipe)
        for _ in range(50):
            *outer, last = draw.choice(places)
            content = copy.deepcopy(good)
            functools.reduce(lambda inner, key: inner[key], outer, content)[last] = draw.choice(ODD)
            rewrite(place, **content)
            try:
                pipe.load(tmp_path / schedule, loader=loader)
            except ValueError as error:
                assert str(place) in str(error), error  # noqa: PT017 - many do load
                assert all(map(torch.equal, before, state_of(pipe)))
            else:
                pipe, loader = trained(schedule)
                before = state_of(pipe)


def test_what_would_never_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = saved(tmp_path / "c")
    monkeypatch.setattr(checkpoint_files, "MANIFEST_LIMIT", 1000)
    monkeypatch.setattr("stagewright.pipe.checkpoint.reader.MANIFEST_LIMIT", 1000)
    refused(tmp_path / "c", r"checkpoint\.json cannot be used: it is not a regular file of at most 1000 bytes")
    with pytest.raises(ValueError, match=r"no checkpoint was saved.*checkpoint\.json would have \d+ bytes"):
        saved(tmp_path / "d")
    (place / "checkpoint.json").unlink()
    os.mkfifo(place / "checkpoint.json")
    refused(tmp_path / "c", r"checkpoint\.json cannot be used: it is not a regular file")
    (tmp_path / "c" / "latest").unlink()
    os.mkfifo(tmp_path / "c" / "latest")
    refused(tmp_path / "c", "c is not a checkpoint: expected a folder from pipe.save")


@pytest.mark.thorough
def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path / "c") / "process-0.safetensors"
    whole = path.read_bytes()
    pipe = make("1f1b", 2)
    for at in range(0, len(whole), len(whole) // 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        message = r"process-0\.safetensors (is damaged: the SHA-256 of '(model|optimizer)/|is damaged, or of)"
        with pytest.raises(ValueError, match=message):
            pipe.load(tmp_path / "c")
    path.write_bytes(whole)
    pipe.load(tmp_path / "c")


def test_a_file_that_was_cut_off_or_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path / "c") / "process-0.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    refused(tmp_path / "c", rf"process-0\.safetensors has {len(whole) - 7} bytes of {len(whole)}: it was cut off")
    path.write_bytes(whole + b"more")
    refused(tmp_path / "c", rf"process-0\.safetensors has {len(whole) + 4} bytes of {len(whole)}: it is another file")
    path.unlink()
    refused(tmp_path / "c", r"process-0\.safetensors cannot be read: No such file")
    (tmp_path / "moved").write_bytes(whole)
    path.symlink_to(tmp_path / "moved")
    refused(tmp_path / "c", r"process-0\.safetensors is a link: expected the file itself")


def test_a_file_of_another_step_or_run_is_refused_by_name(tmp_path: Path) -> None:
    one, other, again = saved(tmp_path / "a"), saved(tmp_path / "b", steps=2), saved(tmp_path / "c")
    for source in (other, again):
        (one / "process-0.safetensors").write_bytes((source / "process-0.safetensors").read_bytes())
        refused(tmp_path / "a", r"process-0\.safetensors is damaged, or of another checkpoint")
    (one / "checkpoint.json").write_bytes((again / "checkpoint.json").read_bytes())
    refused(tmp_path / "a", f"it is that of {again.name}")


def plain(model: nn.Module, **options: Any) -> PipelineModule:
    """A pipeline, without an optimizer unless one is given, of a model in float64."""
    settings: dict[str, Any] = {"mesh": {"pipe": 2}, "num_microbatches": 4, "example_inputs": batch(0)[:1]} | options
    return PipelineModule(model.double(), **records(loss_fn=nn.functional.mse_loss, timeout=120.0, **settings))


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    plain(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))).save(tmp_path / "narrow")
    refused(tmp_path / "narrow", r"it lacks \['3.weight', .*'9.weight'\] and 8 more and has \['1.weight', '1.bias'\]")
    plain(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))).load(tmp_path / "narrow")
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(5, 6\), expected \(4, 6\)"):
        plain(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))).load(tmp_path / "narrow")
    with pytest.raises(ValueError, match=r"'0.weight' in float64, and it is in float32 here: expected the same type"):
        PipelineModule(
            nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)), mesh={"pipe": 2}, example_inputs=(torch.zeros(8, 6),)
        ).load(tmp_path / "narrow")

    named, other = (
        nn.Sequential(OrderedDict({first: nn.Linear(6, 5), "second": nn.Linear(5, 2)})) for first in ("first", "frist")
    )
    plain(named).save(tmp_path / "named")
    with pytest.raises(ValueError, match=r"has \['first.weight', .*; its 'first.weight' looks like 'frist.weight'"):
        plain(other).load(tmp_path / "named")
    plain(make("1f1b", 2)._building.options.model).save(tmp_path / "c")  # type: ignore[arg-type]
    # To go on with a new optimizer in silence would be another training.
    refused(tmp_path / "c", r"has no optimizer state of \['0.bias', .*: expected one saved with an optimizer")


class Evil:
    """Unpickling it would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('code from a checkpoint ran')",))


def test_loading_executes_no_code(tmp_path: Path) -> None:
    place = saved(tmp_path / "c")
    path, files = place / "process-0.safetensors", "process-0.safetensors"
    for save in (lambda: torch.save(Evil(), path), lambda: path.write_bytes(pickle.dumps(Evil()) * 9)):
        save()
        refused(tmp_path / "c", r"process-0\.safetensors (has \d+ bytes|is damaged)")
        rewrite(place, files={files: [path.stat().st_size, "0" * 64]})
        refused(tmp_path / "c", r"process-0\.safetensors is damaged")
    header = path.read_bytes()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    rewrite(place, files={files: [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]})
    refused(tmp_path / "c", r"process-0\.safetensors cannot be read: .*header")
