"""The folder of a run: what is written, and that nothing is ever overwritten."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from mmap import mmap
from pathlib import Path

import pytest
from support.inside import Manifest, MemoryMeter, Metrics, RunFolder, find_run

METRICS = Metrics(
    step=0,
    samples=2,
    tokens=8,
    loss=2.0,
    bits_per_byte=2.9,
    learning_rate=0.1,
    grad_norm=None,
    step_seconds=0.5,
    samples_per_s=4.0,
    tokens_per_s=16.0,
)


def manifest(name: str) -> Manifest:
    return Manifest.of(name=name, config={"steps": 3}, corpus_source="a text", corpus_sha256="ab")


def test_a_run_that_exists_is_never_touched_and_the_error_says_what_to_type(tmp_path: Path) -> None:
    RunFolder.create(manifest("one"), root=tmp_path)
    (tmp_path / "one-2").mkdir()
    with pytest.raises(ValueError, match=r"exists already: .*\(--name one-3\).*\(rm -r .*one\)"):
        RunFolder.create(manifest("one"), root=tmp_path)


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp/x", ".hidden", "a b"])
def test_a_name_stays_inside_the_folder_of_runs(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run name .*: expected letters"):
        RunFolder.check_free(name, root=tmp_path)


def test_a_run_is_found_by_path_and_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no runs yet, type `stagewright train`"):
        find_run(Path("one"), root=tmp_path / "runs")
    path = RunFolder.create(manifest("one"), root=tmp_path / "runs").path
    assert find_run(path, root=tmp_path / "runs") == path
    assert find_run(Path("one"), root=tmp_path / "runs") == path
    with pytest.raises(ValueError, match=r"no run folder two: expected .*<name>; there are one"):
        find_run(Path("two"), root=tmp_path / "runs")


def test_peak_memory_counts_what_is_taken_after_the_start() -> None:
    meter = MemoryMeter()
    if meter.at_start == 0:
        pytest.skip("no /proc/self/status here")
    with mmap(-1, 50_000_000) as taken:  # what malloc gives may be of a pipeline before, which keeps what it frees
        taken.write(bytes(len(taken)))
        assert 40e6 < meter.peak() < 400e6
    assert meter.peak() > 40e6  # a peak stays


@contextmanager
def disk_with_room_for(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond `num_bytes`; the write that would is cut off there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_steps_that_another_version_wrote_are_kept_and_named(tmp_path: Path) -> None:
    folder = RunFolder.create(manifest("gpt"), root=tmp_path)
    for step in range(3):
        folder.log(replace(METRICS, step=step, simulated_bubble=0.5))
    path = folder.path / "metrics.jsonl"
    old = path.read_text().replace("simulated_bubble", "predicted_bubble")
    path.write_text(old)
    with pytest.raises(ValueError, match=r"line 1: .*'predicted_bubble'.* expected lines of this version"):
        folder.keep_before(3)
    assert path.read_text() == old
    folder.close()


def test_a_full_disk_is_told_and_leaves_no_torn_line(tmp_path: Path) -> None:
    folder = RunFolder.create(manifest("one"), root=tmp_path)
    folder.log(METRICS)
    path = folder.path / "metrics.jsonl"
    line = path.read_text()
    with disk_with_room_for(2 * len(line) + 7):
        folder.log(METRICS)
        with pytest.raises(ValueError, match=r"cannot write .*metrics\.jsonl: .*: expected room on the disk"):
            folder.log(METRICS)
    assert path.read_text() == 2 * line
    folder.log(METRICS)
    assert path.read_text() == 3 * line


def test_a_full_disk_leaves_no_half_summary(tmp_path: Path) -> None:
    folder = RunFolder.create(manifest("one"), root=tmp_path)
    with disk_with_room_for(20), pytest.raises(ValueError, match=r"cannot write .*plan\.json: "):
        folder.write_plan("x" * 100)
    assert sorted(path.name for path in folder.path.iterdir()) == [".writer", "manifest.json"]  # the lock, and no half


def test_latest_leads_to_the_newest_run(tmp_path: Path) -> None:
    for name in ("one", "two"):
        RunFolder.create(manifest(name), root=tmp_path)
        assert find_run(Path("latest"), root=tmp_path).resolve() == tmp_path / name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "two"]
    with pytest.raises(ValueError, match="there are one, two"):
        find_run(Path("three"), root=tmp_path)
    with pytest.raises(ValueError, match="is a link to the newest run"):
        RunFolder.check_free("latest", root=tmp_path)
