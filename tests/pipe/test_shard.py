"""Shares: boxes of tensors, against slices taken of real ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.inside import Shard


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
