"""Pieces and shares of a tensor: written under any shards, read under any others, and only those that are needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.inside import (
    Alone,
    Checkpoint,
    HeldPiece,
    OwnCheckpoints,
    Shard,
    Snapshot,
    TensorPiece,
    _shared_out,
    files,
    model_key,
    persist,
    tensor_bytes,
)

FULL = torch.arange(12 * 6, dtype=torch.float64).reshape(12, 6)
WHOLE = Shard.whole((12, 6))
WAYS = {
    "whole": [WHOLE],
    "rows": [WHOLE.divided(0, index=i, count=5) for i in range(5)],
    "columns": [WHOLE.divided(1, index=i, count=4) for i in range(4)],
    "fused": [WHOLE.divided(0, index=i, count=2, blocks=3) for i in range(2)],
    "fused, then rows": [
        WHOLE.divided(0, index=i, count=2, blocks=3).divided(0, index=j, count=4) for i in range(2) for j in range(4)
    ],
    "both": [WHOLE.divided(1, index=i, count=3).divided(0, index=j, count=2) for i in range(3) for j in range(2)],
}


def written(folder: Path, shards: list[Shard]) -> Checkpoint:
    pieces = [
        HeldPiece(key=model_key("w"), shape=shard.full, start=box.start, tensor=shard.take(FULL)[box.of_local()])
        for shard in shards
        for box in shard.boxes
    ]
    snapshot = Snapshot(step=1, kind="weights", names=("w",), tied={}, pieces=tuple(pieces), values={}, by_process={})
    result = persist(folder, snapshot, processes=Alone(), own=OwnCheckpoints())
    assert result.path is not None, result.problem
    return Checkpoint(folder)


@pytest.mark.parametrize("before", WAYS.values(), ids=WAYS.keys())
def test_written_under_any_shares_read_under_any_others(before: list[Shard], tmp_path: Path) -> None:
    checkpoint = written(tmp_path, before)
    for after in WAYS.values():
        for shard in after:
            checkpoint.check(model_key("w"), shard)
            assert torch.equal(checkpoint.read(model_key("w"), shard), shard.take(FULL))


def test_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = written(tmp_path, WAYS["rows"])
    read: list[tuple[int, ...]] = []
    tensor = Checkpoint._tensor

    def count(self: Checkpoint, key: str, piece: TensorPiece) -> torch.Tensor:
        read.append(piece.start)
        return tensor(self, key, piece)

    monkeypatch.setattr(Checkpoint, "_tensor", count)
    for _ in range(2):
        checkpoint.check(model_key("w"), WHOLE.divided(0, index=1, count=2))  # rows 6 to 11, of pieces of 3 rows
    assert read == [(6, 0), (9, 0)]


def test_pieces_that_overlap_or_are_missing_are_not_published(tmp_path: Path) -> None:
    for shards, said in (
        (WAYS["rows"][1:], "pieces of 54 elements in all: expected 72"),
        (WAYS["rows"] + WAYS["whole"], "pieces of 144 elements in all, some of which overlap"),
    ):
        with pytest.raises(AssertionError, match=said):
            written(tmp_path, shards)
        assert not [each for each in tmp_path.iterdir() if each.is_dir()]
        assert not (tmp_path / "latest").exists()


def test_a_file_that_is_not_there_as_it_was_written_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of a network may show rank 0 less than another rank wrote."""
    write = files.write_tensors

    def cut_off(file: Any, *what: Any) -> Any:
        found = write(file, *what)
        file.truncate(found[0].num_bytes - 1)
        return found

    monkeypatch.setattr(files, "write_tensors", cut_off)
    with pytest.raises(AssertionError, match="is missing or has another size: expected a folder that all ranks share"):
        written(tmp_path, WAYS["whole"])


def test_all_is_on_the_disk_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, sync, replace = list[str](), os.fsync, Path.replace

    def flushed(descriptor: int) -> None:
        sync(descriptor)
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name.partition(".partial")[0])

    def replaced(self: Path, target: Path) -> Path:
        done.append(f"{target.name} is there")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", replaced)
    name = written(tmp_path, WAYS["whole"]).place.name
    files_of_it = ["process-0.safetensors", name, "latest", "checkpoint.json", name]
    assert done == [*files_of_it, f"{name} is there", tmp_path.name, "latest is there", tmp_path.name]


def test_what_several_hold_is_shared_out() -> None:
    """What one alone holds is its own to write; the rest goes to who has least."""
    a, b, c, d = ((key, (), ()) for key in "abcd")
    assert _shared_out([{a: 8, b: 4, c: 3, d: 2}, {b: 4, c: 3, d: 2}]) == [{a}, {b, c, d}]
    assert _shared_out([{b: 4, c: 3, d: 2}] * 2) == [{b}, {c, d}]


def test_one_element_of_any_stride() -> None:
    one = torch.tensor(0.5, dtype=torch.float64).expand(1, 1)
    assert (
        tensor_bytes(one).tobytes()
        == tensor_bytes(one.clone()).tobytes()
        == torch.ones(1).double().div(2).numpy().tobytes()
    )


def cut(tensor: torch.Tensor, dim: int, index: int, count: int, blocks: int) -> torch.Tensor:
    """Part of each block, by torch's own means."""
    parts = []
    for block in tensor.chunk(blocks, dim):
        chunks = block.chunk(count, dim)
        parts.append(chunks[index] if index < len(chunks) else block.narrow(dim, 0, 0))
    return torch.cat(parts, dim)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int, int]]]:
    """Shape, and (dimension, members, blocks) of one or two divisions."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    steps = []
    for number in range(draw(st.integers(1, 2))):
        dim = draw(st.integers(0, len(shape) - 1))
        divisors = [b for b in (1, 2, 3) if shape[dim] and shape[dim] % b == 0]
        blocks = draw(st.sampled_from(divisors or [1])) if number == 0 else 1
        steps.append((dim, draw(st.integers(1, 4)), blocks))
    return shape, steps


@pytest.mark.thorough
@given(cuts())
def test_a_share_is_the_slice_and_all_shares_are_the_tensor(
    case: tuple[tuple[int, ...], list[tuple[int, int, int]]],
) -> None:
    shape, steps = case
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    shards = [(Shard.whole(shape), full)]
    for dim, count, blocks in steps:
        shards = [
            (shard.divided(dim, index=index, count=count, blocks=blocks), cut(part, dim, index, count, blocks))
            for shard, part in shards
            for index in range(count)
        ]
    again = torch.full_like(full, -1)
    for shard, part in shards:
        assert torch.equal(shard.take(full), part)
        assert shard.numel == part.numel() == sum(torch.Size(box.sizes).numel() for box in shard.boxes)
        shard.put(part, again)
    assert torch.equal(again, full)
    assert sum(shard.numel for shard, _ in shards) == full.numel()


def test_neighbouring_boxes_are_one() -> None:
    whole = Shard.whole((6, 4))
    assert whole.divided(0, index=0, count=1, blocks=3) == whole
    assert whole.is_whole
    assert not whole.divided(0, index=0, count=2).is_whole


def test_mistakes_are_named() -> None:
    shard = Shard.whole((6, 4))
    with pytest.raises(ValueError, match=r"dim=2 of a tensor of shape \(6, 4\): expected one of its dimensions"):
        shard.divided(2, index=0, count=2)
    with pytest.raises(ValueError, match="part 2 of 2: expected 0 to 1"):
        shard.divided(0, index=2, count=2)
    with pytest.raises(ValueError, match="dimension 1 of size 4 in 3 equal blocks: expected a divisor of 4"):
        shard.divided(1, index=0, count=2, blocks=3)
    with pytest.raises(ValueError, match=r"local tensor of shape \(6, 4\): expected \(3, 4\)"):
        shard.divided(0, index=0, count=2).put(torch.zeros(6, 4), torch.zeros(6, 4))
