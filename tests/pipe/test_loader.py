"""Which samples a process passes: the same along a pipeline, each once an epoch over the replicas; others are told."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.inside import UNKNOWN, Draw, Remainder, ReplicaBatches, ReplicaLoader, checksum
from support.pool import Pool
from support.small import make, sgd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stagewright.comm import PipelineError
from stagewright.pipe import PipelineModule

Samples = list[torch.Tensor]
RUN = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 30), st.integers(0, 4))  # B, D, saved after, lost


@pytest.mark.thorough
@given(num_samples=st.integers(24, 60), runs=st.lists(RUN, min_size=1, max_size=4), shuffle=st.booleans())
@pytest.mark.parametrize("remainder", ["drop", "carry", "keep"])
def test_after_a_crash_each_sample_is_used_once_an_epoch(
    num_samples: int, runs: Any, shuffle: bool, remainder: Remainder
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
    for epoch in range(max((epoch for epoch, _ in used), default=0)):
        left_out = num_samples - sum(one == epoch for one, _ in used)
        most = {"carry": 1, "keep": max(d for _, d, *_ in runs), "drop": max(b * d for b, d, *_ in runs)}
        assert 0 <= left_out < most[remainder]
    if remainder == "carry":  # cut anywhere, it is the one stream of samples
        whole = _draws(ReplicaBatches(num_samples, batch_size=1, shuffle=shuffle, seed=5))
        assert used == [tuple(next(whole)[0]) for _ in used]


@given(num_samples=st.integers(24, 60), batch_size=st.integers(1, 6), num_replicas=st.integers(1, 4))
def test_a_rest_is_kept_once_and_no_replica_is_without(num_samples: int, batch_size: int, num_replicas: int) -> None:
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
    for number, ((x, y), (shape_x, shape_y)) in enumerate(zip(_epochs(busy, 2), _epochs(idle, 2), strict=True)):
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


def test_augmentation_of_a_sample_is_the_same_with_workers_along_a_pipeline_and_after_a_restart() -> None:
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
    "fewer samples than replicas need": (lambda: ReplicaBatches(5, batch_size=3, num_replicas=2), "expected at least"),
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


SAMPLES = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))


def make_pipe(schedule: str = "1f1b", **options: Any) -> PipelineModule:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    return make(model=model, schedule=schedule, **{"mesh": None, "example_inputs": None, "timeout": 120.0} | options)


def train_unseeded(schedule: str) -> str:
    """The error of each rank whose loader shuffles by itself, before any loss of it was handed out."""
    pipe = make_pipe(schedule)
    losses = []
    torch.manual_seed(100 + torch.distributed.get_rank())
    loader = DataLoader(TensorDataset(SAMPLES, SAMPLES), batch_size=8, shuffle=True)
    try:
        for batch in loader:
            losses.append(pipe.train_step(*batch).loss)
        pipe.flush()
        pipe.close()
    except (ValueError, PipelineError) as error:
        return f"behind {losses} {error}"
    return "nothing"


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_loader_that_shuffles_by_itself_is_told_on_every_rank(gloo: Pool, schedule: str) -> None:
    for told in gloo.run(train_unseeded, ranks=3, args=(schedule,)):
        assert "behind [] " in told
        assert "passed other inputs to step 0 than rank 2" in told
        assert "shuffle=True" in told
        assert "pipe.loader(dataset, batch_size=...)" in told


def pass_another_target(step: int) -> tuple[str, list[bool]]:
    pipe = make_pipe()
    compared: list[bool] = []
    for number in range(step + 2):  # the last rank, which waits for nobody at the end of a step, is told in the next
        x = SAMPLES[number % 3 * 8 : number % 3 * 8 + 8]
        target = x.flip(0) if number == step and pipe.rank == 0 else x
        try:
            compared.append(pipe.train_step(x, target).is_compared)
        except (ValueError, PipelineError) as error:
            return str(error), compared
    return "nothing", compared


@pytest.mark.thorough
def test_another_target_is_told_with_its_step(gloo: Pool) -> None:
    (first, of_first), (last, of_last) = gloo.run(pass_another_target, ranks=2, args=(2,))
    assert "rank 0 passed other targets to step 2 than rank 1" in first
    assert "passed other targets to step 2" in last
    assert of_first == [True, True]
    assert of_last == [True, False, False]  # its loss of step 2 may be of a target that rank 0 did not pass


def test_shapes_alone_are_refused_where_values_are_read() -> None:
    pipe = make_pipe(mesh={"pipe": 2})
    with pytest.raises(ValueError, match="input 0 is a meta tensor, and a stage of this process reads it"):
        pipe.train_step(SAMPLES[:8].to("meta"), SAMPLES[:8])
    with pytest.raises(ValueError, match="the target is a meta tensor"):
        pipe.train_step(SAMPLES[:8], SAMPLES[:8].to("meta"))


def test_in_one_process_nothing_is_compared_and_nothing_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagewright.pipe.batch.reader.checksum", lambda value: time.sleep(100))
    make_pipe(mesh={"pipe": 2}).train_step(SAMPLES[:8], SAMPLES[:8])


def train_from_own_weights(how: str, folder: str) -> str:
    """The error of a rank whose processes made models of their own; how they come to the same weights, if they do."""
    options = {"loss_fn": F.mse_loss, "optimizer": sgd, "timeout": 120.0}
    rank = torch.distributed.get_rank()

    def make(seed: int) -> PipelineModule:
        torch.manual_seed(seed)
        return PipelineModule(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), **options)  # type: ignore[arg-type]

    batch = SAMPLES[:8], SAMPLES[:8]
    if how == "load":
        alike = make(0)
        alike.build(*batch)
        alike.save(folder)
        alike.close()
    with make(rank) as pipe:
        if how == "load":
            pipe.load(folder)
        if how == "load_state_dict":
            pipe.build(*batch)
            pipe.load_state_dict(pipe.full_state_dict())
        try:
            return str(pipe.train_step(*batch).loss)
        except ValueError as error:
            return str(error)


@pytest.mark.thorough(but=["nothing"])
@pytest.mark.parametrize("how", ["nothing", "load", "load_state_dict"])
def test_weights_that_processes_made_each_for_itself_are_told(gloo: Pool, how: str, tmp_path: Path) -> None:
    told = gloo.run(train_from_own_weights, ranks=2, args=(how, str(tmp_path)))
    if how == "nothing":
        expected = "process 1 has made other weights than process 0, first '0.weight', and each stage would begin with"
        assert [each[: len(expected)] for each in told] == [expected] * 2
    else:
        assert told[0] == told[1]
        assert float(told[0]) > 0


BATCHES = {
    "tokens": torch.arange(32 * 512).reshape(32, 512) % 97,
    "images": torch.linspace(0, 1, 16 * 3 * 40 * 40).reshape(16, 3, 40, 40),
    "channels last": torch.linspace(0, 1, 16 * 3 * 40 * 40).reshape(16, 40, 40, 3).permute(0, 3, 1, 2),
    "labels": torch.arange(32),
    "masks": torch.arange(64) % 3 == 0,
    "half": torch.linspace(-1, 1, 50).to(torch.bfloat16),
    "complex": torch.complex(torch.arange(9.0), -torch.arange(9.0)),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_another_order_of_the_samples_is_another_number(batch: torch.Tensor) -> None:
    number = checksum(batch)
    assert number == checksum(batch.clone()) == float(int(number)) < 2**32
    assert checksum(batch.roll(1, 0)) != number
    assert checksum((batch, batch)) != number


def test_what_counts_in_the_checksum_of_a_batch() -> None:
    tokens = torch.randint(0, 9, (8192, 16), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 1  # every sample begins alike
    assert checksum(tokens) != checksum(tokens[torch.randperm(8192, generator=torch.Generator().manual_seed(1))])
    x = torch.zeros(2, 3)
    assert len({checksum(x), checksum(x.T), checksum(x.int()), checksum(torch.zeros(0)), checksum(())}) == 5
    assert checksum((x, "mean")) == checksum((x, "sum")) == checksum(x)
    assert checksum(torch.tensor(3.0)) != checksum(torch.tensor(4.0))
    assert checksum(torch.tensor(3.0).expand(1)) == checksum(torch.tensor([3.0]))  # one element, of stride 0
    assert checksum((torch.zeros(2), torch.zeros(2, device="meta"))) == UNKNOWN
    sparse = torch.eye(3).to_sparse()
    assert checksum(sparse) == checksum(2 * sparse) != checksum(torch.eye(4).to_sparse())
