"""Profiles that outlive a run: taken where all that they depend on is the same, measured again wherever it is not."""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.commands import Done, run_forked
from support.inside import AutoLayout, cache_folder, keep, profile_key
from support.pool import Pool
from torch import nn

from stagewright.pipe import Auto, PipelineModule

CPU = torch.device("cpu")
LAYER = """
import torch
from torch import nn
import kept_helper

FACTOR = 2.0

def grown(x):
    return kept_helper.wide(x) * FACTOR

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.names = {"one", "two", "three"}

    def forward(self, x):
        return grown(self.linear(x))
"""
HELPER = "def wide(x):\n    return x.relu()\n"


FILES = {"kept_layer": LAYER, "kept_helper": HELPER}


@pytest.fixture
def make_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., nn.Module]:
    """A layer of a file of the user's, which names another file."""
    monkeypatch.syspath_prepend(tmp_path)

    def made(old: str = "", new: str = "") -> nn.Module:
        for name, code in FILES.items():
            (tmp_path / f"{name}.py").write_text(code.replace(old, new) if old else code)
            sys.modules.pop(name, None)
        for path in tmp_path.glob("__pycache__/*"):
            path.unlink()
        layer: nn.Module = importlib.import_module("kept_layer").Layer()
        return layer

    yield made
    for name in FILES:
        sys.modules.pop(name, None)


def key_of(model: nn.Module, *, batch: int = 2, loss: Any = F.mse_loss) -> str:
    return profile_key(model, torch.zeros(batch, 4), loss, device=CPU)


def test_the_same_work_has_the_same_key(make_layer: Callable[..., nn.Module]) -> None:
    """Other weights, other objects; files loaded again."""
    assert key_of(make_layer()) == key_of(make_layer()) == key_of(copy.deepcopy(make_layer()))


@pytest.mark.thorough(but=["FACTOR = 2.0-FACTOR = 3.0"])
@pytest.mark.parametrize(
    ("old", "new"),
    [("self.linear(x))", "self.linear(x).tanh())"), ("FACTOR = 2.0", "FACTOR = 3.0"), ("(4, 4)", "(4, 4, bias=False)"),
     ("kept_helper.wide(x)", "kept_helper.wide(kept_helper.wide(x))"), ('"three"', '"four"'), ("relu", "sigmoid")],
)  # fmt: skip
def test_an_edit_of_a_file_is_another_key(old: str, new: str, make_layer: Callable[..., nn.Module]) -> None:
    before = key_of(make_layer())
    assert key_of(make_layer(old, new)) != before


def test_state_that_code_reads_is_in_the_key(make_layer: Callable[..., nn.Module]) -> None:
    plain, edited, listed, patched, hooked, frozen, evaluated, tied = (make_layer() for _ in range(8))
    edited.flag = True  # type: ignore[assignment]
    listed.widths = [range(3)]  # type: ignore[assignment]
    patched.forward = lambda x: x  # type: ignore[method-assign]
    hooked.register_forward_hook(lambda module, args, out: None)
    frozen.requires_grad_(False)
    evaluated.eval()
    tied.other = tied.linear
    models = [plain, edited, listed, patched, hooked, frozen, evaluated, tied, make_layer().half()]
    make_layer()
    keys = [key_of(each) for each in models]
    keys += [key_of(plain, batch=4), key_of(plain, loss=F.l1_loss), key_of(plain, loss=lambda a, b: (a - b).sum())]
    losses = [partial(F.huber_loss, delta=delta) for delta in (1.0, 2.0)]
    keys += [key_of(plain, loss=each) for each in losses]
    listed.widths = [range(4)]  # type: ignore[assignment]
    keys.append(key_of(listed))
    assert len(set(keys)) == len(keys)


@pytest.mark.thorough(but=["train.py-None-True", "__main__.py-stagewright.__main__-False"])
@pytest.mark.parametrize(
    ("file", "spec", "counts"),
    [("train.py", None, True), (None, None, True), ("train/__main__.py", "train.__main__", True),
     pytest.param(f"{sysconfig.get_path('scripts')}/stagewright", None, False, id="command"),
     ("__main__.py", "stagewright.__main__", False)],
)  # fmt: skip
def test_arguments_count_where_code_of_the_users_may_read_them(
    file: str | None, spec: str | None, counts: bool, make_layer: Callable[..., nn.Module]
) -> None:
    """Each `stagewright train` names its run in them."""
    model, main = make_layer(), ModuleType("__main__")
    main.__spec__ = None if spec is None else ModuleSpec(spec, None)
    if file is not None:
        main.__file__ = file
    with mock.patch.dict(sys.modules, {"__main__": main}):
        keys = set()
        for name in ("monday", "tuesday"):
            with mock.patch.object(sys, "argv", ["train", "--name", name]):
                keys.add(key_of(model))
    assert len(keys) == 1 + counts


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


@contextmanager
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.thorough
def test_settings_of_the_process_are_in_the_key(make_layer: Callable[..., nn.Module]) -> None:
    model, keys = make_layer(), []
    settings: list[Callable[[], Any]] = [
        lambda: mock.patch.object(torch, "__name__", "torch"),  # nothing
        lambda: threads(torch.get_num_threads() + 1),
        double,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: mock.patch.object(torch, "__version__", "0.0"),
        lambda: mock.patch.object(os, "cpu_count", return_value=77),
        lambda: mock.patch.dict(os.environ, {"OMP_PROC_BIND": "spread"}),
        lambda: mock.patch("stagewright.pipe.auto.kept._package", return_value="other code"),
    ]
    for each in settings:
        with each():
            keys.append(key_of(model))
    assert len(set(keys)) == len(keys)
    assert key_of(model) == keys[0]


SCRIPT = """
import os
import torch
from kept_layer import Layer
from stagewright import PipelineModule
torch.manual_seed(0)
pipe = PipelineModule(torch.nn.Sequential(Layer(), Layer()), schedule="auto", num_microbatches=2,
                      loss_fn=torch.nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
pipe.train_step(torch.ones(2, 4), torch.ones(2, 4))
"""


def run_script(folder: Path, code: str, *, hashes: int) -> Done:
    """A script of its own in a process of its own."""
    for name, text in {**FILES, "script": f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"}.items():
        if not (folder / f"{name}.py").exists():  # or its bytecode would be stale
            (folder / f"{name}.py").write_text(text)
    environment = {"STAGEWRIGHT_CACHE": str(folder / "cache")}
    (done,) = run_forked([str(folder / "script.py")], num_ranks=None, environment=environment, hashes=hashes)
    assert not done.status, done.stderr
    return done


def test_another_process_finds_what_the_first_kept(tmp_path: Path) -> None:
    """The real thing: a script, twice, in processes with other hash seeds."""
    told = [run_script(tmp_path, SCRIPT, hashes=hashes).stderr for hashes in (0, 1)]
    assert "kept for the next run in" in told[0], told
    assert "kept from" in told[1], told
    assert "kept for the next run in" not in told[1], told


def test_code_in_no_file_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ModuleType("typed")
    exec(LAYER.replace("import kept_helper", ""), vars(typed))
    monkeypatch.setitem(sys.modules, "typed", typed)
    with pytest.raises(ValueError, match="typed has code that stands in no file"):
        profile_key(typed.Layer(), device=CPU)
    with (
        mock.patch.object(nn.Linear, "pad", property(lambda self: 1 / 0), create=True),
        mock.patch.object(nn.Linear, "__slots__", ("pad",), create=True),
        pytest.raises(ValueError, match="ZeroDivisionError: division by zero"),
    ):
        profile_key(nn.Linear(2, 2), device=CPU)


def trained(folder: str) -> tuple[str, int, bool]:
    """A plan, how often this rank measured for it, and whether weights are those of one process."""
    make = AutoLayout._measure
    with (
        mock.patch.dict(os.environ, {"STAGEWRIGHT_CACHE": folder}),
        mock.patch.object(AutoLayout, "_measure", autospec=True, side_effect=make) as measure,
    ):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()
        x = torch.ones(2, 4, dtype=torch.float64)
        wanted = F.mse_loss(model(x), x)
        pipe = PipelineModule(
            model, schedule=Auto(trials=0), loss_fn=F.mse_loss, num_microbatches=2,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), timeout=120.0,
        )  # fmt: skip
        result = pipe.train_step(x, x)
        assert pipe.plan is not None
        found = pipe.plan.to_json(), measure.call_count, abs(result.loss - wanted.item()) < 1e-12
        pipe.close()
    return found


@pytest.mark.thorough
def test_a_second_run_takes_what_the_first_has_measured(gloo: Pool, tmp_path: Path) -> None:
    first = gloo.run(trained, ranks=2, args=(str(tmp_path),))
    assert [(times, equal) for _, times, equal in first] == [(1, True)] * 2
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["key"] == path.stem.removeprefix("profile-")
    second = gloo.run(trained, ranks=2, args=(str(tmp_path),))
    assert [(times, equal) for _, times, equal in second] == [(0, True)] * 2
    assert second[0][0] == second[1][0]
    assert [times for _, times, _ in gloo.run(trained, ranks=2, args=("off",))] == [1, 1]


@pytest.mark.thorough
def test_a_foreign_file_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="stagewright"):
        assert trained(str(tmp_path))[1] == 1
        assert f"kept for the next run in {tmp_path}" in caplog.text
        assert trained(str(tmp_path))[1] == 0
        assert f"in {tmp_path} (STAGEWRIGHT_CACHE=off in front of the command measures again)" in caplog.text
        (path,) = tmp_path.iterdir()
        for text in ("", "{", "[]", '{"format": 1}', "profile of another version", "\udcff", "other figures"):
            changed = json.loads(path.read_text())  # what was kept behind the last one
            if text == "other figures":
                changed["measured"][0][1] = changed["measured"][0][1].replace("forward_seconds", "forward_days")
                text = json.dumps(changed)
            path.write_bytes(text.encode("utf-8", "surrogateescape"))
            assert trained(str(tmp_path))[1] == 1, text
    assert trained(str(tmp_path))[1] == 0
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_the_newest_files_stay_and_foreign_ones(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    for number in range(70):
        assert keep(tmp_path, f"{number:064x}", [])
        os.utime(tmp_path / f"profile-{number:064x}.json", (number, number))
    assert keep(tmp_path, f"{70:064x}", [])
    kept = {each.name for each in tmp_path.iterdir()}
    assert kept == {"mine.json", *(f"profile-{number:064x}.json" for number in range(7, 71))}


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level("INFO", logger="stagewright"):
        trained(str(tmp_path / "file" / "cache"))
    assert f"not kept: {tmp_path / 'file' / 'cache'} is not writable" in caplog.text


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STAGEWRIGHT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", mock.Mock(side_effect=KeyError))
    assert cache_folder() is None
