"""`pipe.loader(shared="host")`: each sample is read and prepared once an epoch on a host."""

import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.inside import HostShare, ReplicaBatches, ReplicaLoader, SharedLoader, keep_sample, kept_sample
from support.pool import Pool
from support.small import WIDTH, make
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from stagewright.pipe import PipelineModule

NUM_SAMPLES, BATCH = 16, 4


class Counted(Dataset[Any]):
    def __init__(self, folder: Path | str, *, most: int = 1 << 30) -> None:
        self.folder, self.left = folder, most

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        note(self.folder, "fetched", number)
        self.left -= 1
        if self.left < 0:
            raise OSError("no such file")
        generator = torch.Generator().manual_seed(number)
        return torch.randn(WIDTH, generator=generator), torch.rand(WIDTH)

    def collate(self, samples: list[Any]) -> Any:
        note(self.folder, "collated", len(samples))
        return default_collate(samples)


def note(folder: Path | str, what: str, number: int) -> None:
    with (Path(folder) / what).open("a") as file:
        file.write(f"{number}\n")


def noted(folder: Path, what: str) -> Counter[int]:
    path = folder / what
    found = Counter(map(int, path.read_text().split())) if path.exists() else Counter[int]()
    path.unlink(missing_ok=True)
    return found


def trained(folder: str, mesh: dict[str, int], options: dict[str, Any]) -> tuple[list[Any], str | None]:
    """Losses of two epochs, left and gone on in between as from a checkpoint, and the folder of the host."""
    torch.manual_seed(0)
    pipe: PipelineModule = make(mesh=mesh, num_microbatches=2, timeout=60.0)
    data, losses = Counted(folder), list[Any]()
    loader = pipe.loader(data, batch_size=BATCH // mesh.get("data", 1), collate_fn=data.collate, **options)
    with pipe:
        for batch in loader:
            losses.append(pipe.train_step(*batch).loss)
            if len(losses) == 2:
                break
        state = loader.state_dict()
        loader.load_state_dict(state)
        while len(losses) < 2 * NUM_SAMPLES // BATCH:
            losses += [pipe.train_step(*batch).loss for batch in loader]
    share = getattr(loader, "_share", None)
    return losses, None if share is None else str(share.folder)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"pipe": 2, "data": 2}], ids=["2 ranks", "4 ranks"])
def test_each_sample_is_read_and_prepared_once_an_epoch_on_a_host(
    gloo: Pool, tmp_path: Path, mesh: dict[str, int]
) -> None:
    ranks = mesh["pipe"] * mesh.get("data", 1)
    alone = gloo.run(trained, ranks=ranks, args=(str(tmp_path), mesh, {}))
    assert noted(tmp_path, "fetched") == dict.fromkeys(range(NUM_SAMPLES), 2 * mesh["pipe"])
    noted(tmp_path, "collated")
    shared = gloo.run(trained, ranks=ranks, args=(str(tmp_path), mesh, {"shared": "host"}))
    assert [losses for losses, _ in shared] == [losses for losses, _ in alone]
    assert noted(tmp_path, "fetched") == dict.fromkeys(range(NUM_SAMPLES), 2)  # in each of two epochs
    replicas = mesh.get("data", 1)
    assert noted(tmp_path, "collated") == {BATCH // replicas: 2 * replicas * NUM_SAMPLES // BATCH}
    folders = {folder for _, folder in shared}
    assert len(folders) == 1


def test_a_cache_is_of_the_whole_host(gloo: Pool, tmp_path: Path) -> None:
    options = {"shared": "host", "cache": 1 << 20}
    gloo.run(trained, ranks=2, args=(str(tmp_path), {"pipe": 1, "data": 2}, options))
    # In the second epoch every sample was in memory, also those that the other replica had read.
    assert noted(tmp_path, "fetched") == dict.fromkeys(range(NUM_SAMPLES), 1)


def loader_of(
    folder: Path, process: int, processes: tuple[int, ...] = (0, 1), cache: int = 0, **options: Any
) -> SharedLoader:
    data = Counted(folder, most=options.pop("most", 1 << 30))
    batches = ReplicaBatches(NUM_SAMPLES, batch_size=BATCH, seed=7)
    share = HostShare(folder, process, processes, timeout=options.pop("timeout", 60.0))
    return SharedLoader(data, batches, share=share, cache=cache, **options)


def read_some(folder: Path, number: int, how: str) -> None:
    loader = loader_of(folder, 0, most=BATCH if how == "fails" else NUM_SAMPLES)
    (folder / "stands").touch()
    for batch in loader:
        number -= 1
        if number == 0 and how == "killed":
            child = os.fork()  # a worker that is busy outlives it
            if not child:
                signal.pause()
            (folder / "child").write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        del batch


def started(folder: Path, number: int, how: str) -> Any:
    process = multiprocessing.get_context("fork").Process(target=read_some, args=(folder, number, how), daemon=True)
    process.start()
    while not (folder / "stands").exists():  # a lock that is not held yet looks like that of one that has ended
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("how", ["killed", "all"])
def test_a_dead_readers_samples_are_taken_over(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    alone = list(ReplicaLoader(Counted(tmp_path), ReplicaBatches(NUM_SAMPLES, batch_size=BATCH, seed=7)))
    noted(tmp_path, "fetched")
    loader = loader_of(tmp_path, 1)
    process = started(tmp_path, 2 if how == "killed" else NUM_SAMPLES, how)
    try:
        found = list(loader)
    finally:
        process.join()
        if how == "killed":
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    for batch, expected in zip(found, alone, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(batch, expected, strict=True))
    assert (loader.batches.epoch, loader.batches.position) == (1, 0)
    assert ("process 0, which read the data for process 1, has ended" in caplog.text) == (how == "killed")
    assert sum(noted(tmp_path, "fetched").values()) == NUM_SAMPLES  # what it had read is not read again
    del loader
    assert how == "killed" or not tmp_path.exists()  # the last one takes the folder with it


@pytest.mark.parametrize("are_views", [False, True])
def test_a_cache_keeps_about_as_many_bytes_as_it_may(tmp_path: Path, are_views: bool) -> None:
    """A cache of a view kept all the memory behind it, as of samples of a TensorDataset, and so held hardly any."""
    whole = torch.arange(50.0)[:, None].repeat(1, 100)
    for number in range(50):
        sample = whole[number] if are_views else whole[number].clone()
        keep_sample(tmp_path, number, sample, share_of=750.0)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) == pytest.approx(50 * 750, rel=0.1)
    kept = {number: found[0] for number in range(50) if (found := kept_sample(tmp_path, number))}
    assert len(kept) == len(sizes)
    assert all(bool((sample == number).all()) for number, sample in kept.items())


def test_a_batch_that_is_a_view_is_handed_on_alone(tmp_path: Path) -> None:
    share = HostShare(tmp_path, 0, (0, 1), timeout=1.0)
    share.put(torch.zeros(100_000)[:8], (0, 0))
    (path,) = tmp_path.glob("*.for1")
    assert path.stat().st_size < 10_000


def test_a_cache_that_no_longer_fits_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Path] = []

    def full(folder: Path, number: int, *_: object, **__: object) -> None:
        kept.append(folder / f"new.{os.getpid()}.{number}")
        kept[-1].touch()
        if len(kept) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules[SharedLoader.__module__], "keep_sample", full)
    found = list(loader_of(tmp_path, 0, (0,), cache=1 << 20))
    assert len(found) == NUM_SAMPLES // BATCH
    assert len(kept) == 2
    assert not kept[-1].exists()
    assert caplog.text.count("cache= keeps no more samples in ") == 1


def test_what_the_reader_raises_is_told_to_the_others(tmp_path: Path) -> None:
    loader, found = loader_of(tmp_path, 1), list[Any]()
    process = started(tmp_path, 2, "fails")
    with pytest.raises(RuntimeError, match="process 0 reads the data for this one and failed: OSError: no such file"):
        found += loader
    process.join()
    assert len(found) <= 1


def test_loops_that_differ_end_by_name(tmp_path: Path) -> None:
    reader = HostShare(tmp_path, 0, (0, 1), timeout=0.05)
    other = HostShare(tmp_path, 1, (0, 1), timeout=0.05)
    reader.begin()
    other.begin()
    for number in range(2):
        reader.put(torch.zeros(3), (0, 4 * number))
    with pytest.raises(RuntimeError, match=r"process 1, which takes the batches of process 0 on this host"):
        reader.put(torch.zeros(3), (0, 8))
    assert torch.equal(other.take((0, 0))[0], torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"is at \(epoch, sample\) \(0, 4\), not \(3, 4\): expected the same loops"):
        other.take((3, 4))
    other.begin()
    with pytest.raises(RuntimeError, match="process 0, which reads the data for process 1 on this host"):
        other.take((0, 8))
    other.rest()
    reader.put(torch.zeros(3), (0, 8))  # for nobody
    assert not list(tmp_path.glob("0.2.for1"))


def test_options_that_cannot_be_meant() -> None:
    pipe = make()
    with pytest.raises(ValueError, match='cache=7 without shared="host"'):
        pipe.loader(Counted("."), batch_size=4, cache=7)
    with pytest.raises(ValueError, match="shared='net'"):
        pipe.loader(Counted("."), batch_size=4, shared="net")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cache=-1"):
        pipe.loader(Counted("."), batch_size=4, shared="host", cache=-1)
