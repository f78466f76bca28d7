"""Mistakes of users, all ranks in one process: each message names the value, what was expected, what to type.

Over processes the same checks run on every rank before anything is sent: see test_failures_gloo.py.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parts import Does, Parts
from support.small import X, Y, make, sgd
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from stagewright.pipe import PipelineModule
from stagewright.schedules import ScheduleError


class Tower(Parts, blocks=lambda: nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), head=lambda: nn.Linear(6, 6)):
    """Traced, since it is no nn.Sequential."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Two(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown schedule": (
        {"schedule": "1f2b"},
        r"unknown schedule '1f2b': expected one of gpipe, 1f1b, .*interleaved, looped-bfs.*; did you mean '1f1b'\?",
    ),
    "schedule of another type": ({"schedule": 3}, r"schedule=3: expected a name, a .*, a function, or FILE\.csv"),
    "no microbatches": ({"num_microbatches": 0}, "num_microbatches=0 for schedule '1f1b': expected a whole number, at"),
    "chunks that 1f1b has not": (
        {"num_chunks": 2},
        r"num_chunks=2 for schedule '1f1b': it has one stage per rank; expected 1, or .*interleaved",
    ),
    "no ranks": ({"mesh": {"pipe": 0}}, r"mesh axis 'pipe' has size 0: expected a whole number, at least 1"),
    "more ranks than stages": (
        {"mesh": {"pipe": 7}},
        r"num_stages=7 for a model of 6 units .*: expected 1 to 6; take fewer ranks or chunks",
    ),
    "mesh": ({"mesh": "automatic"}, r'mesh=\'automatic\': expected "auto", or sizes by axis'),
    "tensor axis": (
        {"mesh": {"pipe": 2, "tensor": 4}},
        r"in one process: the members of a tensor group are processes. Expected .tensor.: 1, or 8 processes",
    ),
    "mesh of a list, auto": ({"mesh": [2], "schedule": "auto"}, r"mesh=\[2\]: expected sizes by axis, as in mesh"),
    "cut of a sequential": ({"cut": ["33"]}, r"cut='33' is no child of the nn\.Sequential: expected .* such as '3'"),
    "split point of a traced model": (
        {"model": Tower(), "cut": ["block.2"]},
        r"cut='block\.2' is no module that the model runs: expected .* such as 'blocks\.2'",
    ),
    "split points out of order": (
        {"model": Tower(), "mesh": {"pipe": 3}, "cut": ["head", "blocks.1"]},
        r"cut='blocks\.1' begins at or before .*: expected names in the order in which the model runs them",
    ),
    "too many split points": ({"cut": ["1", "2"]}, "begins 3 stages, the schedule has 2: expected 1 names"),
    "too few stages": (
        {"stages": [nn.Linear(6, 6)]},
        r"a list of 1 stages, and the schedule has 2 \(ranks x chunks\): expected one module per stage",
    ),
    "stages that are none": ({"stages": [3]}, r"3 is int: expected a torch.nn.Module"),
    "no module": ({"model": F.relu}, r"is function: expected a torch\.nn\.Module"),
    "an optimizer that is made": (
        {"optimizer": sgd([nn.Parameter(torch.zeros(1))])},
        r"^optimizer=SGD\(\.\.\.\): expected a function .*; optimizer=lambda params: SGD\(params, lr=0\.1\)$",
    ),
    "optimizers that are made": (
        {"optimizer": [sgd([nn.Parameter(torch.zeros(1))])]},
        r"^optimizer=\[SGD \( .*: expected a callable; optimizer=lambda params",
    ),
    "a function without parameters": (
        {"optimizer": lambda: None},
        r"<lambda>: called with 1 argument, it fails \(too many positional arguments\); optimizer=lambda params",
    ),
    "a scheduler that is made": (
        {"lr_scheduler": StepLR(sgd([nn.Parameter(torch.zeros(1))]), 1)},
        r"^lr_scheduler=StepLR\(\.\.\.\): expected a function .* lr_scheduler=lambda optimizer: StepLR\(opt",
    ),
    "a class of schedulers": (
        {"lr_scheduler": StepLR},
        r"^lr_scheduler=StepLR: called with 1 argument, it fails .*'step_size'\); lr_scheduler=lambda optimizer",
    ),
    "a class of losses": ({"loss_fn": nn.MSELoss}, r"^loss_fn=MSELoss: a class: .* of it; loss_fn=MSELoss\(\)$"),
    "a loss without a target": (
        {"loss_fn": lambda output: output.sum()},
        r"called with 2 arguments, it fails \(too many .*\); loss_fn=lambda output, target",
    ),
    "a report that takes nothing": ({"on_step": lambda: None}, r"called with 1 argument, it fails .*on_step=lambda re"),
    "a class of models": ({"model": nn.Linear}, r"is type: expected a torch\.nn\.Module, made of .*: Linear\(\.\.\.\)"),
    "no stages": ({"stages": []}, r"PipelineModule\(\[\]\): expected a list of modules"),
    "split points as numbers": ({"cut": [3]}, r"cut=\[3\]: expected a list of names"),
    "a device that nobody has": ({"device": "gpu"}, r"device='gpu': Expected one of cpu, .* Expected a device of this"),
    "a scheduler that is none": ({"lr_scheduler": lambda _: None}, r"lr_scheduler= returned NoneType: expected"),
    "a scheduler alone": (
        {"optimizer": None, "lr_scheduler": lambda optimizer: None},
        r"lr_scheduler=.* without an optimizer: expected optimizer= as well",
    ),
    "clipping alone": (
        {"optimizer": None, "max_grad_norm": 1.0},
        r"max_grad_norm=1\.0 without an optimizer: .* call clip_grad_norm_",
    ),
    "one example for several": ({"example_inputs": X}, r"example_inputs= is Tensor: expected a tuple of tensors"),
    "other inputs": (
        {"model": Two()},
        r"Two\.forward\(.*mask.*\).* does not take 1 by position \(missing .*'mask'\): expected",
    ),
    "a stage that returns no tensor": (
        {"stages": [Does(lambda x: (x, {3})), nn.Identity()]},
        r"Does returns a set \(\{3\}\) at the end of a stage: expected tensors",
    ),
    "layers that do not fit": (
        {"model": nn.Sequential(nn.Linear(6, 6), nn.Linear(5, 5))},
        r"stage 1 cannot take \(\(2, 6\) torch\.float32\): .*\[2, 6\] X \[5, 5\]",  # no line of ours is told
    ),
}


@pytest.mark.thorough(
    but=[
        "mesh",
        "mesh of a list, auto",
        "split points out of order",
        "too many split points",
        "too few stages",
        "stages that are none",
        "an optimizer that is made",
        "a scheduler that is made",
        "a class of losses",
        "no stages",
        "a scheduler that is none",
    ]
)
@pytest.mark.parametrize(("options", "message"), OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


class _Elsewhere(torch.Tensor):
    """As a pipeline leaves them."""


def test_a_model_whose_weights_another_process_holds() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(torch.empty(2, 2, device="meta").as_subclass(_Elsewhere))
    with pytest.raises(ValueError, match=r"parameter '1\.weight' is a meta tensor, .*: expected a model made anew"):
        PipelineModule(model)


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda pipe: pipe.parameters(), "parameters and state"),
        (lambda pipe: pipe.stage_names, "stage_names"),
        (lambda pipe: pipe.clip_grad_norm_(1.0), "clip_grad_norm_"),
        (lambda pipe: pipe.measured_costs(), "measured_costs"),
    ],
)
def test_before_the_stages_are_built(use: Callable[[PipelineModule], object], name: str) -> None:
    message = rf"{name}: the stages are not built yet\. Expected PipelineModule\(\.\.\., example_inputs=\(x,\)\), "
    with pytest.raises(ValueError, match=message):
        use(make(example_inputs=None))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda pipe: pipe.save(3), r"folder=3: expected a path, such as 'checkpoints'"),
        (lambda pipe: pipe.load(None), r"folder=None: expected a path"),
        (lambda pipe: pipe.checkpointer(b"c", every=1), r"folder=b'c': expected a path"),
        (lambda pipe: pipe.load_state_dict([X]), r"a state dict of type list: expected tensors by name"),
    ],
)
def test_what_methods_are_given(use: Callable[[PipelineModule], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use(make())


FILE = "0F0,,,0B0\n,1F0,1B0,\n"
FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "bad cell": ("0F0,,,0B0\n,1F0,1X0,\n", {}, r"plan\.csv: row 2, column 3: cannot read the .* '1X0': .*3F12"),
    "microbatches": (
        FILE,
        {"num_microbatches": 4},
        "num_microbatches=4 for a schedule of 1: expected 1, or leave it out",
    ),
    "ranks": (FILE, {"mesh": {"pipe": 3}}, 'mesh={"pipe": 3} for a schedule of 2 ranks: expected mesh={"pipe": 2}'),
    "chunks": (FILE, {"num_chunks": 2}, "num_chunks=2 for a schedule of 1 stages per rank"),
}


@pytest.mark.parametrize(("text", "options", "message"), FILES.values(), ids=FILES.keys())
def test_schedule_files(tmp_path: Path, text: str, options: dict[str, Any], message: str) -> None:
    file = tmp_path / "plan.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        make(**({"schedule": file, "mesh": None, "num_microbatches": None} | options))


def test_a_schedule_without_backward_evaluates_and_refuses_to_train(tmp_path: Path) -> None:
    (tmp_path / "plan.csv").write_text("0F0,0F1\n,1F0,1F1\n")
    pipe = make(schedule=tmp_path / "plan.csv", mesh=None, num_microbatches=None)
    assert pipe.eval_step(X, Y).loss is not None
    with pytest.raises(ScheduleError, match=r"schedule 'plan' has no backward: expected F and B"):
        pipe.train_step(X, Y)


class Undecided(Parts, first=lambda: nn.Linear(6, 6), second=lambda: nn.Linear(6, 6)):
    """Python that asks for values between its modules, which no record can follow."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:  # the line that the error must show
            x = x * 2
        return self.second(x)


class Misshapen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.zeros(7, 7)


@pytest.mark.parametrize(
    ("model", "culprit", "code", "beginning"),
    [
        (Undecided(), Undecided, "if x.sum() > 0:", "Undecided cannot be recorded: .* reads a tensor's value"),
        (
            nn.Sequential(nn.Linear(6, 6), Misshapen()),
            Misshapen,
            "return x @ torch.zeros(7, 7)",
            r"stage 1 cannot take \(\(2, 6\) torch\.float32\)",
        ),
    ],
    ids=["recorded", "in a sequential"],
)
def test_a_model_that_cannot_run_in_stages(model: nn.Module, culprit: Any, code: str, beginning: str) -> None:
    lines, first = inspect.getsourcelines(culprit.forward)
    number = first + next(i for i, line in enumerate(lines) if code in line)
    source = re.escape(f"{__file__}:{number}, in forward: `{code}")
    with pytest.raises(ValueError, match=rf"{beginning} at {source}.*`[:.] .*[Ee]xpected"):
        make(model=model)


class Counts(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x + 1, x.shape[0]


def test_a_recorded_model_that_returns_a_size() -> None:
    """A microbatch's size would stand in the output of the whole batch."""
    pipe = make(model=Counts(), mesh={"pipe": 1}, loss_fn=lambda output, target: output[0].mean())
    with pytest.raises(ValueError, match=r"the model returns \(_, 3\) for .* and \(_, 2\) for .*: expected the same f"):
        pipe.eval_step(X, Y)


def test_a_number_between_stages_stays_what_it_was() -> None:
    class Half(nn.Linear):
        number = 0.5

        def forward(self, x: Tensor) -> tuple[Tensor, float]:
            return super().forward(x), self.number

    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: float) -> Tensor:
            return x * by

    half = Half(6, 6)
    nn.init.constant_(half.weight, 0.25)  # random ones may have a mean near zero, where float32 has few digits
    pipe = make(stages=[half, Scaled()], loss_fn=_mean)
    x = torch.ones(4, 6)
    assert pipe.forward_backward(x, x).loss == pytest.approx(float(_mean(half(x)[0] * 0.5, x).detach()))
    half.number = 2.0
    with pytest.raises(ValueError, match=r"returns 1 tensors as \(_, 2.0\), and returned 1 as \(_, 0.5\) when"):
        pipe.forward_backward(x, x)


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()
