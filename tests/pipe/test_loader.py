"""Which samples a process passes: the same along a pipeline, each once an epoch over the data replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.small import make
from torch.utils.data import TensorDataset

from stagewright.pipe.batch.loader import ReplicaBatches, ReplicaLoader


@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 6),
    num_replicas=st.integers(1, 4),
    seed=st.integers(0, 3),
    epochs=st.integers(1, 3),
)
def test_each_epoch_draws_each_sample_once_over_the_replicas(
    num_samples: int, batch_size: int, num_replicas: int, seed: int, epochs: int
) -> None:
    whole = batch_size * num_replicas
    if num_samples < whole:
        with pytest.raises(ValueError, match="expected at least"):
            ReplicaBatches(num_samples, batch_size=batch_size, num_replicas=num_replicas)
        return
    replicas = [
        ReplicaBatches(num_samples, batch_size=batch_size, replica=q, num_replicas=num_replicas, seed=seed)
        for q in range(num_replicas)
    ]
    orders = []
    for _ in range(epochs):
        drawn = []
        for one in replicas:
            for batch in one:
                assert len(batch) == batch_size
                one.passed()
                drawn += batch
        assert len(drawn) == len(set(drawn)) == num_samples // whole * whole
        orders.append(drawn)
    assert all(one.epoch == epochs and one.position == 0 for one in replicas)
    if epochs > 1 and num_samples > 20:
        assert orders[0] != orders[1]


def loader(rank_seed: int = 0, **options: object) -> ReplicaLoader:
    samples = torch.arange(24.0).reshape(12, 2)
    torch.manual_seed(rank_seed)  # a rank's own random state must not matter
    return ReplicaLoader(TensorDataset(samples, samples[:, 0]), ReplicaBatches(12, batch_size=3, seed=7), **options)  # type: ignore[arg-type]


def test_ranks_with_other_random_states_pass_the_same_batches() -> None:
    one, other = loader(1), loader(2)
    for _ in range(2):
        for (x, _), (y, _) in zip(one, other, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("passed", [0, 1, 3, 4, 6])
def test_a_state_goes_on_behind_the_last_batch_that_was_passed(passed: int) -> None:
    whole = loader()
    everything = [x for _ in range(3) for x, _ in whole]
    first = loader()
    seen: list[torch.Tensor] = []
    while len(seen) < passed:
        for x, _ in first:
            seen.append(x)
            if len(seen) == passed:
                break
    again = loader()
    again.batches.load_state_dict(first.batches.state_dict())
    seen += [x for _ in range(3) for x, _ in again][: len(everything) - passed]
    assert torch.equal(torch.stack(seen), torch.stack(everything))


def test_a_state_of_other_data_is_refused() -> None:
    state = loader().batches.state_dict()
    with pytest.raises(ValueError, match="saved with num_samples=12, and this run has 13"):
        ReplicaBatches(13, batch_size=3, seed=7).load_state_dict(state)


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


def test_what_the_pipeline_decides_is_not_the_loaders() -> None:
    with pytest.raises(ValueError, match="shuffle= is the pipeline's to decide"):
        loader(shuffle=True)


def test_another_order_and_a_state_of_something_else_are_refused() -> None:
    state = ReplicaBatches(8, batch_size=2).state_dict()
    with pytest.raises(ValueError, match="saved with shuffle=True, and this run has False"):
        ReplicaBatches(8, batch_size=2, shuffle=False).load_state_dict(state)
    with pytest.raises(ValueError, match=r"has \['epoch'\]: expected \['epoch', 'global_batch'"):
        ReplicaBatches(8, batch_size=2).load_state_dict({"epoch": 0})


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(2)


def test_augmentation_in_workers_is_alike_along_a_pipeline() -> None:
    found = []
    for rank_seed, replica in ((1, 0), (2, 0), (3, 1)):
        torch.manual_seed(rank_seed)
        batches = ReplicaBatches(8, batch_size=2, replica=replica, num_replicas=2)
        found.append(next(iter(ReplicaLoader(Augmented(), batches, num_workers=1))))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_dataset_that_has_no_numbers_is_refused_by_name() -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    with pytest.raises(ValueError, match=r"pipe.loader was given Endless, .* expected a dataset with __len__"):
        make().loader(Endless(), batch_size=2)


def test_a_position_behind_the_epoch_is_refused() -> None:
    one = loader().batches
    with pytest.raises(ValueError, match="position=77: expected an epoch of at least 0 and a position from 0 to 3"):
        one.load_state_dict(one.state_dict() | {"position": 77})
