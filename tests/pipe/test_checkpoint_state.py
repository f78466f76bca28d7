"""Contents of a checkpoint alongside weights; disks that fail: the error is reported, and the next save tried."""

import errno
import json
import math
import os
import random
import sys
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.inside import DTYPES, Alone, decode, encode
from support.pool import Pool
from support.small import X, Y, trained
from torch import nn

from stagewright.pipe import PipelineModule


def test_values_come_back_with_their_types() -> None:
    value = {
        "numbers": [1, -(2**80), 0.1, math.inf, -math.inf, 1e-320, True, None, 2 - 1j],
        (1, "a"): (1, (2.5, "text \n")),
        4: Counter({2: 1}),
        "kinds": [OrderedDict(b=1, a=2), {1, 2}, frozenset({3}), deque([1, 2]), b"\0\xff", torch.Size([2, 3])],
    }
    found = decode(json.loads(json.dumps(encode(value, what="it"), allow_nan=False)))
    assert found == value
    assert [type(each) for each in found["kinds"]] == [type(each) for each in value["kinds"]]
    assert isinstance(found[4], Counter)
    assert found[4][9] == 0
    assert math.isnan(decode(encode(math.nan, what="it")))
    with pytest.raises(ValueError, match=r"it is .* of type ndarray, which a checkpoint cannot hold"):
        encode(np.zeros(2, dtype=[("a", "f8")]), what="it")  # was saved, and could not be loaded
    assert type(decode(encode(np.float64(0.5), what="it"))) is float
    for name, dtype in DTYPES.items():
        tensor = torch.arange(6).reshape(2, 3).to(dtype)[:, :2]
        back = decode(encode(tensor, what="it"))
        assert (back.dtype, back.shape) == (dtype, tensor.shape), name
        assert torch.equal(back.to(torch.complex128), tensor.to(torch.complex128))
    for array in (np.arange(4, dtype=np.uint32).reshape(2, 2), np.array(1.5), np.zeros((0, 2))):
        back = decode(encode(array, what="it"))
        assert (back.dtype, back.shape, back.tolist()) == (array.dtype, array.shape, array.tolist())
    for odd in (object(), lambda: 0, [{"a": nn.Linear(1, 1)}], np.array([None]), torch.float32, Path("x")):
        with pytest.raises(ValueError, match=r"the state.* is .* which a checkpoint cannot hold: expected numbers"):
            encode(odd, what="the state")
    for bad in ({"exec": "x"}, {}, {"tensor": "float32", "shape": [9], "data": ""}, {"dict": 3}, {"bytes": "?"}):
        with pytest.raises(ValueError, match="is not a value of a checkpoint"):
            decode(bad)


def test_generators_go_on_where_they_stood(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    pipe = trained(1)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()
    pipe.save(tmp_path)
    expected = draw()
    other = trained(0)
    torch.manual_seed(9)
    other.load(tmp_path)
    assert draw() == expected


def test_what_cannot_be_kept_is_said_once(tmp_path: Path) -> None:
    trained(1).save(tmp_path)
    with pytest.warns(UserWarning, match="saved with seed=0, and this run has seed=5: random numbers") as said:
        trained(0, seed=5).load(tmp_path)
    assert len(said) == 1


class Counted:
    """State, as a loader of another library has it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> Mapping[str, Any]:
        return {"value": self.value, "tensor": torch.tensor([self.value])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state["tensor"].tolist() == [state["value"]]
        self.value = state["value"]


class Odd(torch.optim.Optimizer):
    """Keeps values of many types, none of them like the parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "words": ("a", "b")})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state["rows/a"] = 0.9 * state.get("rows/a", torch.zeros(3)) + parameter.grad.sum(-1).mean()
            state["history"] = [*state.get("history", []), parameter.grad.mean()][-2:]
            parameter.data -= 0.1 * parameter.grad * (1 + len(state["history"])) / state["count"]
            parameter.data -= 0.01 * state["rows/a"].sum()


def test_state_of_any_optimizer_goes_on(tmp_path: Path) -> None:
    pipe, other = trained(3, optimizer=Odd), trained(1, optimizer=Odd, mesh={"pipe": 3})
    pipe.save(tmp_path)
    other.load(tmp_path)
    for _ in range(2):
        assert pipe.train_step(X, Y).loss == other.train_step(X, Y).loss


def test_state_that_is_not_there_yet_is_not_there_again(tmp_path: Path) -> None:
    """Loaded over one that is: momentum begins anew, as in the run that saved."""

    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    fresh, old = trained(0, optimizer=momentum), trained(3, optimizer=momentum)
    fresh.save(tmp_path)
    old.load(tmp_path)
    for _ in range(2):
        assert old.train_step(X, Y).loss == fresh.train_step(X, Y).loss


def _own_places(folder: str) -> list[int]:
    """Each process has a loader of its own, which stands elsewhere."""
    pipe = trained(0, mesh={"pipe": 2})
    pipe.save(f"{folder}/c", loader=Counted(pipe.rank))
    found = Counted(9)
    pipe.load(f"{folder}/c", loader=found)
    pipe.save(f"{folder}/same", loader=Counted(5))
    pipe.close()
    return [found.value]


def test_loaders_of_each_process(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(_own_places, ranks=2, args=(str(tmp_path),)) == [[0], [1]]
    pipe, loader = trained(0), Counted(9)
    with pytest.raises(ValueError, match="another position of the data loader for each of 2 processes, and there"):
        pipe.load(tmp_path / "c", loader=loader)
    pipe.load(tmp_path / "same", loader=loader)
    assert loader.value == 5


class Cut(BaseException):
    """As if the process had been killed here."""


LEFT: list[int] = []  # operations on files until one fails; empty: none does
ERROR: list[BaseException] = []  # how it fails


def _operation() -> None:
    LEFT[0] -= 1
    if LEFT[0] < 0:
        raise ERROR[0]


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if LEFT:
        writes = event == "open" and set("wx") & set(str(arguments[1]))
        assert not writes or Path(str(arguments[0])).name != "latest"  # which is renamed into its place
        removals = ("os.remove", "os.rmdir") if isinstance(ERROR[0], Cut) else ()
        if event in ("os.mkdir", "os.rename", *removals) or writes:
            _operation()


sys.addaudithook(_audit)
_fsync = os.fsync


@contextmanager
def failing(operations: int, error: BaseException) -> Iterator[None]:
    """Within, so many more operations go through; on a full disk removing always works."""

    def fsync(file: int) -> None:
        _operation()
        _fsync(file)

    LEFT[:], ERROR[:] = [operations], [error]
    os.fsync = fsync
    try:
        yield
    finally:
        LEFT.clear()
        os.fsync = _fsync


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.thorough
def test_a_save_that_is_cut_off_anywhere_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Before each of a save's file operations in turn, until one save goes through."""
    pipe, other, cuts = trained(1), trained(0), 0
    pipe.save(tmp_path)
    pipe.save(tmp_path)  # so that there is an older one to remove
    last = pipe.num_steps
    while True:
        pipe.train_step(X, Y)
        try:
            with failing(cuts, Cut()):
                pipe.save(tmp_path)
            break
        except Cut:
            cuts += 1
        other.load(tmp_path)
        assert other.num_steps in (last, pipe.num_steps)  # as it is where it was cut off after the switch
        last = other.num_steps
    other.load(tmp_path)
    assert other.num_steps == pipe.num_steps
    assert all(map(torch.equal, other.full_state_dict().values(), pipe.full_state_dict().values()))
    assert cuts > 10
    assert len(list(tmp_path.glob("step-*"))) == 2  # the newest and the one before; no leftovers


@pytest.mark.thorough
def test_a_disk_that_is_full_at_any_moment_is_told_and_the_next_save_is_tried_again(tmp_path: Path) -> None:
    pipe, other = trained(1), trained(0)
    pipe.save(tmp_path)
    pipe.train_step(X, Y)
    pipe.save(tmp_path)
    operations, told = 0, list[str]()
    while True:
        before = sorted(tmp_path.rglob("*"))
        step = pipe.num_steps
        pipe.train_step(X, Y)
        with failing(operations, full_disk()), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = pipe.save(tmp_path)
        if result.path is not None:
            break
        assert not result.is_mistake
        assert [str(one.message) for one in said] == [result.problem]
        assert "rank 0: " in result.problem
        told.append(result.problem)
        assert "No space left on device. Earlier ones are unchanged" in result.problem
        assert sorted(tmp_path.rglob("*")) == before  # its space is given back
        other.load(tmp_path)
        assert other.num_steps == (step if operations else 2)
        pipe.load(tmp_path)
        operations += 1
    assert operations > 8
    for name in ("process-0.safetensors", "checkpoint.json"):
        assert any(f"{name}: No space left on device" in problem for problem in told)
    other.load(tmp_path)
    assert other.num_steps == pipe.num_steps


def test_a_folder_that_cannot_be_written_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = trained(1)

    def mkdir(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        with pytest.raises(ValueError, match=r"no checkpoint was saved .*: rank 0: .*Read-only file system\. Earlier"):
            pipe.save(tmp_path / "c")
    pipe.train_step(X, Y)
    assert pipe.save(tmp_path / "c").path is not None
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"file is a file: expected a folder"):
        pipe.save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def _each_in_turn(folder: str) -> list[tuple[str, bool, int]]:
    """Saves of two ranks, most of which fail on one of them: what was said, and whether there is a checkpoint."""
    pipe = trained(1, mesh={"pipe": 2})
    found: list[tuple[str, bool, int]] = []

    def attempt(save: Callable[[], Any]) -> None:
        try:
            result = save()
            found.append((result.problem, result.path is not None, pipe.num_steps))
        except ValueError as error:
            found.append((str(error), False, pipe.num_steps))
        pipe.train_step(X, Y)

    own = f"{folder}/{pipe.rank}"
    attempt(lambda: pipe.save(f"{folder}/c"))
    with failing(0 if pipe.rank == 1 else 1000, full_disk()):
        attempt(lambda: pipe.save(f"{folder}/c"))
    attempt(lambda: pipe.save(own))
    attempt(lambda: pipe.save(f"{folder}/c"))
    pipe.close()
    return found


@pytest.mark.filterwarnings("ignore:no checkpoint was saved")
def test_ranks_agree_on_what_became_of_a_save(gloo: Pool, tmp_path: Path) -> None:
    gloo_filters, gloo.filters = gloo.filters, (*gloo.filters, "ignore:no checkpoint was saved")
    try:
        one, other = gloo.run(_each_in_turn, ranks=2, args=(str(tmp_path),))
    finally:
        gloo.filters = gloo_filters
    assert one == other
    good, full, apart, again = one
    assert good == ("", True, 1)
    assert again == ("", True, 4)
    assert "rank 1: " in full[0]
    assert "No space left on device" in full[0]
    assert "rank 1: " in apart[0]
    assert "is not the folder that rank 0 writes into: expected one folder that all ranks share" in apart[0]
    assert sorted(path.name.split("-")[1] for path in (tmp_path / "c").glob("step-*")) == ["1", "4"]
    assert not list((tmp_path / "0").iterdir())
    pipe = trained(0)
    pipe.load(tmp_path / "c")
    assert pipe.num_steps == 4


@pytest.mark.parametrize(
    "answer",
    [
        "x",
        ["step-1-00000000", "", None, "", "", 5],
        ["step-1-00000000", "", None, "", "", False, 1],
        ["../step-1-00000000", "", None, "", "", False],
    ],
)
def test_answers_that_no_process_gives_are_refused(answer: object, tmp_path: Path) -> None:
    """Beside training they come out of a store that others may reach."""
    pipe = trained(1)
    pipe.save(tmp_path / "c")
    before = sorted(tmp_path.rglob("*"))
    state = pipe._building.built("a test").state
    snapshot = state.snapshot(None)

    class Forged(Alone):
        rank = 1

        def gather(self, mine: Any, *, what: str) -> list[Any]:
            return [answer, mine]

    with pytest.raises(ValueError, match=r"something else than its part of a checkpoint|not the name of a checkpoint"):
        state.persist(tmp_path / "c", snapshot, processes=Forged())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_loader_without_a_place_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = PipelineModule(model, mesh={"pipe": 2}, example_inputs=(torch.ones(4, 2),))
    plain: Any = torch.utils.data.DataLoader([1, 2])
    words = (
        r"loader=DataLoader: it has no state_dict\(\).*expected pipe.loader\(dataset, batch_size=...\), or torchdata"
    )
    for call in (
        lambda: pipe.save(tmp_path / "new", loader=plain),
        lambda: pipe.load(tmp_path / "new", loader=plain),
        lambda: pipe.checkpointer(tmp_path / "new", every=1, loader=plain),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert not (tmp_path / "new").exists()
