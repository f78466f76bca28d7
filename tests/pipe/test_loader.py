"""Which samples a process passes: the same along a pipeline, each once an epoch over the data replicas."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.inside import Draw, Remainder, ReplicaBatches, ReplicaLoader
from support.small import make
from torch.utils.data import TensorDataset

Samples = list[torch.Tensor]
RUN = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 30), st.integers(0, 4))  # B, D, saved after, lost


@pytest.mark.thorough
@given(num_samples=st.integers(24, 60), runs=st.lists(RUN, min_size=1, max_size=4), shuffle=st.booleans())
@pytest.mark.parametrize("remainder", ["drop", "carry", "keep"])
def test_after_any_crash_each_sample_is_used_once_an_epoch_whatever_the_sizes(
    num_samples: int, runs: list[tuple[int, int, int, int]], shuffle: bool, remainder: Remainder
) -> None:
    """Runs of other batch sizes and replicas go on from each other's checkpoints; what came behind one is lost."""
    used: list[tuple[int, int]] = []  # (epoch, sample), by all replicas
    state = None
    for batch_size, num_replicas, saved_after, lost in runs:
        sizes = {"batch_size": batch_size, "num_replicas": num_replicas, "shuffle": shuffle, "seed": 5}
        replicas = [
            ReplicaBatches(num_samples, replica=q, remainder=remainder, **sizes)  # type: ignore[arg-type]
            for q in range(num_replicas)
        ]
        for one in replicas if state is not None else ():
            one.load_state_dict(state)
        streams = [_draws(one) for one in replicas]
        for number in range(saved_after + lost):
            if number == saved_after:
                state = replicas[-1].state_dict()
            batch = [next(stream) for stream in streams]
            assert remainder == "keep" or all(len(part) == batch_size for part in batch)
            if number < saved_after:
                used += [tuple(draw) for part in batch for draw in part]
        if lost == 0:
            state = replicas[-1].state_dict()
        assert all(one.state_dict() == replicas[0].state_dict() for one in replicas)
    assert len(used) == len(set(used))
    last = max((epoch for epoch, _ in used), default=0)
    for epoch in range(last):
        left_out = num_samples - sum(one == epoch for one, _ in used)
        most = {"carry": 1, "keep": max(d for _, d, *_ in runs), "drop": max(b * d for b, d, *_ in runs)}
        assert 0 <= left_out < most[remainder]
    if remainder == "carry":  # cut anywhere, it is the one stream of samples
        whole = _draws(ReplicaBatches(num_samples, batch_size=1, shuffle=shuffle, seed=5))
        assert used == [tuple(next(whole)[0]) for _ in used]


@given(num_samples=st.integers(24, 60), batch_size=st.integers(1, 6), num_replicas=st.integers(1, 4))
def test_with_the_rest_kept_an_epoch_has_each_sample_once_and_no_replica_is_without(
    num_samples: int, batch_size: int, num_replicas: int
) -> None:
    sizes = {"batch_size": batch_size, "num_replicas": num_replicas, "shuffle": False}
    replicas = [ReplicaBatches(num_samples, replica=q, remainder="keep", **sizes) for q in range(num_replicas)]  # type: ignore[arg-type]
    batches = [list(one) for one in replicas]
    assert {len(own) for own in batches} == {len(replicas[0])}
    assert sorted(sample for own in batches for batch in own for sample in batch) == list(range(num_samples))
    assert all(batch for own in batches for batch in own)
    assert all(len(batch) == batch_size for own in batches for batch in own[:-1])


def test_a_rest_that_is_kept_has_no_shape_of_the_others() -> None:
    batches = ReplicaBatches(5, batch_size=8, remainder="keep", shuffle=False)  # fewer samples than a batch
    assert list(batches) == [[0, 1, 2, 3, 4]]
    with pytest.raises(ValueError, match=r'same_shapes=True with remainder="keep", whose last batch is smaller'):
        ReplicaLoader(TensorDataset(torch.zeros(5)), batches, same_shapes=True)
    with pytest.raises(ValueError, match=r'drop_last= is the pipeline.s to decide: expected remainder="drop"'):
        ReplicaLoader(TensorDataset(torch.zeros(5)), batches, drop_last=False)


def _draws(one: ReplicaBatches) -> Iterator[list[Draw]]:
    while True:
        for batch in one.draws():
            one.passed()
            yield batch


def loader(rank_seed: int = 0, **options: object) -> ReplicaLoader:
    samples = torch.arange(24.0).reshape(12, 2)
    torch.manual_seed(rank_seed)  # a rank's own random state must not matter
    return ReplicaLoader(TensorDataset(samples, samples[:, 0]), ReplicaBatches(12, batch_size=3, seed=7), **options)  # type: ignore[arg-type]


def _epochs(one: ReplicaLoader, count: int) -> list[list[torch.Tensor]]:
    return [batch for _ in range(count) for batch in one]


def test_an_idle_rank_loads_one_batch_and_passes_shapes() -> None:
    busy, idle = loader(same_shapes=True), loader(same_shapes=True, is_idle=lambda: True)
    shapes = _epochs(idle, 2)
    for number, ((x, y), (shape_x, shape_y)) in enumerate(zip(_epochs(busy, 2), shapes, strict=True)):
        assert (x.shape, x.dtype, y.shape) == (shape_x.shape, shape_x.dtype, shape_y.shape)
        assert shape_x.is_meta == (number > 0)
    assert busy.batches.state_dict() == idle.batches.state_dict()


def test_equal_shapes_are_a_promise_that_is_held_to() -> None:
    class Growing(torch.utils.data.Dataset[torch.Tensor]):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(index // 2 + 1)

    growing = ReplicaLoader(Growing(), ReplicaBatches(4, batch_size=2, shuffle=False), same_shapes=True)
    with pytest.raises(ValueError, match=r"a batch with \(2, 2\) torch.float32 where the first one had \(2, 1\)"):
        list(growing)


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """Each sample is its number, and numbers drawn from every generator."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()), random.random(), np.random.random()], dtype=torch.float64)


def test_augmentation_of_a_sample_is_the_same_with_workers_and_after_a_restart_with_other_sizes() -> None:
    def drawn(state: dict[str, int] | None, *, batch_size: int, num_workers: int, is_subset: bool = False) -> Samples:
        data = torch.utils.data.Subset(Augmented(), range(24)) if is_subset else Augmented()
        batches = ReplicaBatches(24, batch_size=batch_size, seed=3)
        if state is not None:
            batches.load_state_dict(state)
        loader = ReplicaLoader(data, batches, num_workers=num_workers, persistent_workers=num_workers > 0)
        return [sample for _ in range(2) for batch in loader for sample in batch]

    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate()
    whole = drawn(None, batch_size=4, num_workers=0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    first, second = torch.stack(whole[:24]), torch.stack(whole[24:])
    assert torch.equal(first[first[:, 0].argsort(), 0], second[second[:, 0].argsort(), 0])
    assert not torch.equal(first[:, 0], second[:, 0])
    assert not torch.isin(first[:, 1:], second[:, 1:]).any()  # other ones in another epoch
    one = ReplicaBatches(24, batch_size=4, seed=3)
    for _ in range(2):
        one.passed()
    state = one.state_dict()
    for again in (
        drawn(state, batch_size=2, num_workers=2),
        drawn(state, batch_size=8, num_workers=0),
        drawn(state, batch_size=8, num_workers=1, is_subset=True),
    ):
        assert torch.equal(torch.stack(again), torch.stack(whole[8:]))


def test_augmentation_in_workers_is_alike_along_a_pipeline() -> None:
    found = []
    for rank_seed, replica in ((1, 0), (2, 0), (3, 1)):
        torch.manual_seed(rank_seed)
        batches = ReplicaBatches(8, batch_size=2, replica=replica, num_replicas=2)
        found.append(next(iter(ReplicaLoader(Augmented(), batches, num_workers=1))))
    assert torch.equal(found[0], found[1])
    assert not torch.isin(found[0][:, 1:].clone(), found[2][:, 1:].clone()).any()


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def _load(state: dict[str, int], num_samples: int = 12, **options: Any) -> None:
    ReplicaBatches(num_samples, batch_size=3, **({"seed": 7} | options)).load_state_dict(state)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "fewer samples than replicas need": (
        lambda: ReplicaBatches(5, batch_size=3, num_replicas=2),
        "expected at least",
    ),
    "other data": (lambda: _load(loader().batches.state_dict(), 13), "with num_samples=12, and this run has 13"),
    "data of a loader": (
        lambda: ReplicaLoader(TensorDataset(torch.zeros(13)), ReplicaBatches(13, batch_size=3, seed=7)).load_state_dict(
            loader().batches.state_dict()
        ),
        r"TensorDataset as the dataset: .* num_samples=12, and this run has 13",
    ),
    "another order": (
        lambda: _load(loader().batches.state_dict(), shuffle=False),
        "saved with shuffle=True, and this run has False",
    ),
    "something else": (lambda: _load({"epoch": 0}), r"has \['epoch'\]: expected \['epoch', 'num_samples', 'position'"),
    "behind the epoch": (
        lambda: _load(loader().batches.state_dict() | {"position": 77}),
        "position=77: expected an epoch of at least 0 and a position from 0 to 11",
    ),
    "what the pipeline decides": (lambda: loader(shuffle=True), "shuffle= is the pipeline's to decide"),
    "no numbers": (
        lambda: make().loader(Endless(), batch_size=2),
        r"pipe.loader was given Endless, .* expected a dataset with __len__",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
