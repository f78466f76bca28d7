"""Memory that is kept beside tensors: ranges that hold measured memory, and allocators played through."""

from __future__ import annotations

import bisect
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from support.inside import Allocator, Kept, coming_and_going, kept, measured, predicted, reserved

from stagewright.partition import Cluster, MemoryUse, Node, Plan, Profile, plan

MIB = 2**20


@dataclass(eq=False)
class Block:
    """Bytes of a segment, in use or free, between their neighbours."""

    segment: int
    begin: int
    size: int
    is_free: bool = False


class CachingAllocator:
    """CUDA's caching allocator of PyTorch by its own rules, without a limit, on one stream.

    Sizes are rounded up to 512 bytes. Up to 1 MiB they come from segments of 2 MiB, up to 10 MiB from such of 20 MiB,
    above from a segment of their own, rounded to 2 MiB. The smallest free block that is large enough is taken, and
    split where 512 bytes or (above 1 MiB) more than 1 MiB are left. Free neighbours of one segment join.
    """

    def __init__(self) -> None:
        self.reserved = self.allocated = self.most = 0
        self.segments: list[list[Block]] = []
        self.free: dict[bool, list[tuple[int, int, int, Block]]] = {True: [], False: []}

    def take(self, num_bytes: int) -> Block:
        size = -(-num_bytes // 512) * 512
        is_small = size <= MIB
        pool = self.free[is_small]
        at = bisect.bisect_left(pool, (size,))
        if at == len(pool):
            whole = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append([Block(len(self.segments), 0, whole, is_free=True)])
            self.reserved += whole
            self._add(self.segments[-1][0], is_small)
            at = bisect.bisect_left(pool, (size,))
        block = pool.pop(at)[-1]
        rest = block.size - size
        if rest >= 512 if is_small else rest > MIB:
            other = Block(block.segment, block.begin + size, rest, is_free=True)
            row = self.segments[block.segment]
            row.insert(row.index(block) + 1, other)
            block.size = size
            self._add(other, is_small)
        block.is_free = False
        self.allocated += block.size
        self.most = max(self.most, self.allocated)
        return block

    def give(self, block: Block) -> None:
        self.allocated -= block.size
        row = self.segments[block.segment]
        is_small = sum(each.size for each in row) == 2 * MIB
        at = row.index(block)
        for other in [*row[at + 1 : at + 2], *(row[at - 1 : at] if at else [])]:
            if other.is_free:
                self.free[is_small].remove(self._key(other))
                block.begin, block.size = min(block.begin, other.begin), block.size + other.size
                row.remove(other)
        self._add(block, is_small)

    def _add(self, block: Block, is_small: bool) -> None:
        block.is_free = True
        bisect.insort(self.free[is_small], self._key(block))

    def _key(self, block: Block) -> tuple[int, int, int, Block]:
        return block.size, block.segment, block.begin, block

    def check(self) -> None:
        """Blocks fill their segments, and no two free ones are neighbours."""
        for row in self.segments:
            assert all(a.begin + a.size == b.begin for a, b in pairwise(row))
            assert not any(a.is_free and b.is_free for a, b in pairwise(row))
        assert sum(each.size for row in self.segments for each in row) == self.reserved


def train(allocator: CachingAllocator, draw: random.Random) -> MemoryUse:
    """Two steps of 1F1B with layers of random sizes; returns the peak by data structure."""
    layers, in_flight = draw.randint(2, 8), draw.randint(1, 5)
    weights = [draw.randint(1, 64) * MIB // 2 + draw.randint(0, 3) * 1024 for _ in range(layers)]
    saved = [[draw.randint(1, 200) * MIB // 10 for _ in range(draw.randint(2, 6))] for _ in range(layers)]
    for size in weights:
        for _ in range(3):
            allocator.take(size)
    stays = allocator.allocated
    for _ in range(2):
        gradients: dict[int, Block] = {}
        flying: list[list[list[Block]]] = []
        for microbatch in range(2 * in_flight):
            flying.append([[allocator.take(size) for size in sizes] for sizes in saved])
            if microbatch >= in_flight - 1:
                backward(allocator, flying.pop(0), weights, gradients)
        for block in [*gradients.values(), *(block for kept_of in flying for blocks in kept_of for block in blocks)]:
            allocator.give(block)
        allocator.check()
        assert allocator.allocated == stays
    return MemoryUse(parameters=stays, activations=allocator.most - stays)


def backward(
    allocator: CachingAllocator, kept_of: list[list[Block]], weights: list[int], gradients: dict[int, Block]
) -> None:
    """One microbatch's: two gradients of activations a layer while it runs; those of weights stay, or are added up."""
    for number in reversed(range(len(weights))):
        working = [allocator.take(kept_of[number][0].size), allocator.take(kept_of[number][-1].size)]
        fresh = allocator.take(weights[number])
        if gradients.setdefault(number, fresh) is not fresh:
            working.append(fresh)
        for block in [*kept_of[number], *working]:
            allocator.give(block)


@pytest.mark.parametrize("seed", range(25))
def test_a_caching_allocator_keeps_no_more_than_the_range(seed: int) -> None:
    allocator = CachingAllocator()
    use = train(allocator, random.Random(seed))
    found = reserved(use, allocator=Allocator.CUDA)
    assert found.low <= allocator.reserved - allocator.most <= found.high


def test_tensors_that_stay_leave_segments_alone() -> None:
    """One begun of either size: without anything that comes and goes, that is all there is to reserve."""
    allocator = CachingAllocator()
    for size in [64 * MIB, 2 * MIB, 512]:
        allocator.take(size)
    assert allocator.reserved == (64 + 20 + 2) * MIB
    use = MemoryUse(parameters=allocator.most)
    assert allocator.reserved - allocator.most <= reserved(use, allocator=Allocator.CUDA).high == 22 * MIB


def test_holes_of_the_caching_allocator() -> None:
    """A freed block serves what is as large, not what is larger; of one that is cut the rest serves on."""
    allocator = CachingAllocator()
    block = allocator.take(40 * MIB)
    allocator.give(block)
    allocator.take(10 * MIB)
    allocator.take(30 * MIB)
    assert allocator.reserved == 40 * MIB
    other = CachingAllocator()
    other.give(other.take(40 * MIB))
    other.take(42 * MIB)
    assert (other.reserved, other.allocated) == (82 * MIB, 42 * MIB)


def test_reserved_memory_of_measured_plans_is_within_the_range() -> None:
    """40 ranks on L4: what the formulas say of tensors, and what the allocator had reserved beside them."""
    shares = []
    for each in measured().plans:
        for number, stage in enumerate(each.stages):
            use = predicted(each, number)
            copies = 2 * use.parameters  # gradients in float32, which the engine's optimizer makes behind the batch
            found = reserved(use, allocator=Allocator.CUDA, behind_batch=copies)
            for rank in stage.ranks:
                beside = rank.peak_reserved - rank.peak_allocated
                assert found.low <= beside <= found.high
                shares.append(beside / found.high)
    assert len(shares) == 40
    assert 0.6 < max(shares) < 1  # the range is not much wider than it must be


def test_libraries_and_who_speaks() -> None:
    use = MemoryUse(parameters=100.0, gradients=20.0, optimizer=200.0, activations=8.0, workspace=4.0)
    assert coming_and_going(use) == 32
    alone, speaking = (kept(use, allocator=Allocator.CUDA, speaks=speaks) for speaks in (False, True))
    assert (alone.low, speaking.low) == (300e6, 300e6)
    assert (alone.high, speaking.high) == (16 + 22 * MIB + 700e6, 16 + 22 * MIB + 1400e6)
    assert kept(use, allocator=Allocator.MALLOC, speaks=False).low == 0
    assert Kept(low=1, high=2).beside(10) == (11, 12)
    with pytest.raises(ValueError, match=r"kept: low=3.0: expected at most high=2.0"):
        Kept(low=3, high=2)


@pytest.mark.parametrize(
    ("device", "allocator"),
    [
        ("cpu", Allocator.MALLOC),
        ("cuda:0", Allocator.CUDA),
        ("NVIDIA L4", Allocator.CUDA),
        ("A100-80GB", Allocator.CUDA),
        ("device", None),
        ("tpu", None),
    ],
)
def test_allocators_by_device(device: str, allocator: Allocator | None) -> None:
    assert Allocator.of(device) is allocator


def planned(device: str, memory: str, **options: Any) -> Plan:
    nodes = [
        Node(name=name, forward_seconds=1, backward_seconds=2, parameter_bytes=1e8, stash_bytes=1e8, activation_bytes=8)
        for name in "ab"
    ]
    profile = Profile(nodes=nodes, device=device)
    cluster = Cluster.parse(f"2:net=1GB/s:{memory}")
    options |= {"pipeline_sizes": (2,), "data_sizes": (1,)}
    return plan(profile, cluster, global_batch=4, **options)


def test_a_plan_says_what_is_kept_beside_its_tensors() -> None:
    """And which ranks fit at the low end alone; JSON keeps it."""
    wide = planned("cpu", "10GB")
    assert set(wide.kept) == {0, 1}
    assert wide.tight_ranks == ()
    assert "beside tensors malloc and libraries keep, by ranks" in wide.explain()
    assert "fits at the low end" not in wide.explain()
    assert Plan.from_json(wide.to_json(), source="plan.json") == wide
    first, second = wide.memory_bytes.values()
    tight = planned("cpu", f"{(wide.kept[1].high + second + 1e6) / 1e9}GB")
    assert second < first < wide.memory_limits[0]
    assert tight.tight_ranks == (0,)
    assert "fits at the low end alone: rank 0;" in tight.explain()
    tighter = planned("cpu", f"{(first + 1e6) / 1e9}GB")
    assert "fits at the low end alone: ranks 0-1;" in tighter.explain()
    unknown = replace(wide, allocator=None)
    assert unknown.kept == {}
    assert "beside" not in unknown.explain()
    broken = wide.to_json().replace('"malloc"', '"jemalloc"')
    with pytest.raises(ValueError, match=r"plan.json: allocator: 'jemalloc': expected one of malloc, CUDA caching"):
        Plan.from_json(broken, source="plan.json")


def test_a_plan_leaves_what_is_certain_to_be_kept_beside_tensors() -> None:
    """The low end, to the byte: CUDA's context; malloc keeps nothing for certain."""
    only: dict[str, Any] = {"schedules": "1f1b", "recompute": "none"}
    tensors = max(planned("cuda", "10GB", **only).memory_bytes.values())
    for device, beside in (("cuda", 300e6), ("cpu", 0.0), ("device", 0.0)):
        fits = planned(device, f"{(tensors + beside) / 1e9}GB", **only)
        assert fits.memory_limits[0] == pytest.approx(tensors + beside)  # all of the device's
        with pytest.raises(ValueError, match=r"nothing fits the memory: .* bytes") as error:
            planned(device, f"{(tensors + beside - 10) / 1e9}GB", **only)
        assert ("(300,000,000 of them beside tensors, for the device's context)" in str(error.value)) == (beside > 0)


_RUN = """
import torch
import stagewright as sw
from stagewright.experiments.bench.whole_models import gpt_problem
from stagewright.experiments.host import MemoryMeter
from stagewright.experiments.training.gpt import GPTConfig
torch.set_num_threads(1)
meter = MemoryMeter()
problem = gpt_problem(GPTConfig(layers=8, width=256, length=128), batch=16)
pipe = sw.PipelineModule(
    problem.make_model(), schedule="1f1b", num_microbatches=8, mesh={"pipe": 1}, loss_fn=problem.loss_fn,
    optimizer=problem.optimizer,
)
for _ in range(4):
    pipe.train_step(problem.inputs, problem.target)
resident = meter.peak()
with pipe.watch_memory() as watched:
    pipe.train_step(problem.inputs, problem.target)
weights = sum(p.numel() * p.element_size() for p in pipe.parameters())
print(resident, watched.peak_bytes, weights)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("threshold", [None, "65536"])
def test_resident_memory_of_a_run_is_within_the_range(threshold: str | None) -> None:
    """Figures of a process of its own, with malloc as it is and with one that keeps no holes: 10 s each."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment |= {} if threshold is None else {"MALLOC_MMAP_THRESHOLD_": threshold}
    out = subprocess.run([sys.executable, "-c", _RUN], env=environment, capture_output=True, text=True, check=True)
    resident, tensors, weights = map(float, out.stdout.split()[-3:])
    # SGD or AdamW: what stays is weights and state; the rest of the peak comes and goes.
    use = MemoryUse(parameters=weights, optimizer=2 * weights, activations=tensors - 3 * weights)
    low, high = kept(use, allocator=Allocator.MALLOC, speaks=False).beside(tensors)
    assert low <= resident <= high
    if threshold is not None:  # nothing but libraries
        assert resident - tensors <= 64e6
