"""What a checkpoint holds: pieces and shares of tensors under any shards, and state that modules rename and keep."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.alone import train_alone
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
from support.parts import Parts
from support.pool import Pool
from support.small import X, Y, make, sgd
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import stagewright
from stagewright import Mesh, PipelineModule

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
def test_a_share_is_the_slice_and_all_shares_are_the_tensor(case: Any) -> None:
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


class Counting(nn.Linear):
    def __init__(self, as_tensor: bool) -> None:
        super().__init__(6, 6)
        self.as_tensor, self.count = as_tensor, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training and torch.is_grad_enabled()
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return torch.tensor(self.count) if self.as_tensor else {"count": self.count, "of": ("linear", None)}

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state if self.as_tensor else state["count"])


def renames(state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}w"] = state.pop(f"{prefix}weight")


def named_back(state: dict[str, Any], prefix: str) -> None:
    if f"{prefix}w" in state:
        state[f"{prefix}weight"] = state.pop(f"{prefix}w")


def fuses(state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}both"] = torch.cat([state.pop(f"{prefix}weight"), state.pop(f"{prefix}bias")[None]])


def parted(state: dict[str, Any], prefix: str) -> None:
    if f"{prefix}both" in state:
        *rows, state[f"{prefix}bias"] = state.pop(f"{prefix}both")
        state[f"{prefix}weight"] = torch.stack(rows)


def nests(state: dict[str, Any], prefix: str) -> None:
    state[f"{prefix}made"] = {"by": "hand", "of": torch.ones(2)}


def hooked(save: Callable[..., None], load: Callable[..., None]) -> nn.Module:
    module = nn.Linear(6, 6)
    module._register_state_dict_hook(lambda _, state, prefix, *rest: save(state, prefix))
    module._register_load_state_dict_pre_hook(lambda state, prefix, *rest: load(state, prefix))
    return module


KINDS: dict[str, Callable[[], nn.Module]] = {
    "checkpoint_wrapper": lambda: checkpoint_wrapper(nn.Linear(6, 6)),
    "extra dict": lambda: Counting(as_tensor=False),
    "extra tensor": lambda: Counting(as_tensor=True),
    "renames": lambda: hooked(renames, named_back),
    "fuses": lambda: hooked(fuses, parted),
    "nests": lambda: hooked(nests, lambda state, prefix: state.pop(f"{prefix}made", None)),
}


def model_of(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    kind, _, alone = kind.partition(", ")
    second = nn.Tanh() if alone else KINDS[kind]()
    return nn.Sequential(nn.Linear(6, 6), KINDS[kind](), nn.Tanh(), nn.Linear(6, 6), second, nn.Linear(6, 6))


def trained(kind: str, folder: str) -> dict[str, Any]:
    """The state behind two steps, a checkpoint that goes on under another cut, and a step more."""
    pipe = make(model=model_of(kind), verify=True)
    for _ in range(2):
        pipe.train_step(X, Y)
    pipe.save(folder)
    pipe.load_state_dict(pipe.state_dict())
    other = make(model=model_of(kind), example_inputs=None, cut=["2"])
    other.load(folder)
    other.train_step(X, Y)
    state = other.full_state_dict()
    other.load_state_dict(state)
    assert same(other.full_state_dict(), state)
    return state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.allclose(one, other, atol=1e-6) if isinstance(one, Tensor) else bool(one == other)


def plain(kind: str) -> dict[str, Any]:
    return train_alone(model_of(kind), [(X, Y)] * 3, sgd, parts=4).state


@pytest.mark.thorough(but=["extra tensor", "fuses"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_of_the_models_own_state_travels(kind: str, tmp_path: Path) -> None:
    """It was "not in the state when the stages were built", or an AttributeError."""
    expected = plain(kind)
    assert same(trained(kind, str(tmp_path)), dict(expected))
    model_of(kind).load_state_dict(stagewright.read_checkpoint(tmp_path))
    if kind not in ("fuses", "nests"):  # a file has tensors under the model's own keys
        stagewright.import_checkpoint(dict(expected), tmp_path / "plain")
        pipe = make(model=model_of(kind))
        pipe.load(tmp_path / "plain")
        assert same(pipe.full_state_dict(), dict(expected))


@pytest.mark.thorough
def test_all_of_the_models_own_state_travels_over_processes(gloo: Pool, tmp_path: Path) -> None:
    for kind in ("checkpoint_wrapper", "extra dict", "extra tensor, alone"):
        for state in gloo.run(trained, ranks=2, args=(kind, str(tmp_path / kind))):
            assert same(state, dict(plain(kind)))


def test_a_state_dict_of_another_model_is_refused() -> None:
    pipe = make(model=model_of("renames"))
    with pytest.raises(ValueError, match=r"state dict: Error.* Missing key.s. in state_dict: .1\.weight."):
        pipe.load_state_dict({name: x for name, x in plain("renames").items() if name != "1.w"})


class _Caster(Parts, router=lambda: nn.Linear(4, 4), seen=lambda: torch.zeros(1)):
    """Turns its router into float32, as that of Switch Transformers does, and lets a buffer grow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router.to(torch.float32)
        if len(self.seen) == 1:
            self.seen = torch.full((3,), 7.0)
        return x + self.router(x.float()).to(x.dtype)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), _Caster(), nn.Linear(4, 4)).double()


_X, _Y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _pipeline(**mesh: Any) -> PipelineModule:
    options: dict[str, Any] = {"num_microbatches": 2, "loss_fn": F.mse_loss, "optimizer": sgd}
    return PipelineModule(_model(), mesh=Mesh(**mesh), **options)


def _worst(state: dict[str, Any], plain: dict[str, Any]) -> float:
    assert [(x.dtype, x.shape) for x in state.values()] == [(x.dtype, x.shape) for x in plain.values()]
    return max(float((state[name] - x).abs().max()) for name, x in plain.items())


def _saved(folder: Path, mesh: dict[str, int]) -> list[float]:
    plain = _model()
    F.mse_loss(plain(_X), _Y).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    expected = plain.state_dict()
    with _pipeline(**mesh) as pipe:
        pipe.build(_X, _Y)
        pipe.save(folder / "before")  # who writes what is agreed on here
        pipe.train_step(_X, _Y)
        pipe.save(folder / "after")
        found = [_worst(pipe.full_state_dict(), expected)]
        with pytest.raises(ValueError, match=r"is of another model|float64, and it is in float32"):
            pipe.load(folder / "before")
    with _pipeline(**mesh) as pipe:
        pipe.train_step(_X, _Y)
        pipe.train_step(_X, _Y)
        pipe.load(folder / "after")
        return [*found, _worst(pipe.full_state_dict(), expected)]


@pytest.mark.thorough(but=["{'pipe': 2}"])
@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"pipe": 1, "data": 2}], ids=str)
def test_state_has_the_types_and_shapes_after_the_forward(gloo: Pool, tmp_path: Path, mesh: dict[str, int]) -> None:
    for differences in gloo.run(_saved, ranks=2, args=(tmp_path, mesh)):
        assert max(differences) < 1e-6


def _divided(kind: str) -> None:
    text = r"parameter '2.router.weight' was torch.float64 when the stages were built, .* into torch.float32"
    with pytest.raises(ValueError, match=text), _pipeline(pipe=1, data=2, data_parallel=kind) as pipe:
        pipe.train_step(_X, _Y)


@pytest.mark.thorough(but=["fsdp"])
@pytest.mark.parametrize("kind", ["zero1", "fsdp"])
def test_replicas_that_divide_the_weight_name_it(gloo: Pool, kind: str) -> None:
    gloo.run(_divided, ranks=2, args=(kind,))


def _on_one_of_two() -> None:
    model = _model()
    with PipelineModule(model, mesh=Mesh(pipe=1, data=2), num_microbatches=2, loss_fn=F.mse_loss) as pipe:
        pipe.forward_backward(_X, _Y)
        if pipe.replica[0] == 1:
            model[2].double()
        text = r"'2.seen' was float64 .* is float32 .* on process 0 and float64 .* on process 1"
        with pytest.raises(ValueError, match=text):
            pipe.full_state_dict()


def test_processes_that_differ_are_named(gloo: Pool) -> None:
    gloo.run(_on_one_of_two, ranks=2)
