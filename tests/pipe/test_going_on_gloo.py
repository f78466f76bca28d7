"""Processes die in the middle of a step, and the others go on: with the same microbatches and the exact gradient."""

import json
import os
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import going_on
from support.inside import LaunchResult, Membership, Rerouted, Verdict, launch, launcher, membership, rank_process
from support.small import sgd
from torch import nn
from torch.distributed import HashStore

import stagewright as sw
from stagewright.comm import PeerLost, PipelineTimeout, World

LIMIT = 300.0  # [s] guards against ranks that compute for ever
STILL = 90.0  # [s] that all may do nothing: longer than the pipeline's own time-out
POINTS = ["begin", "F", "B", "vote", "ready", "voted", "update"]
MESHES = [
    ("1f1b", 2, 2),
    ("zb-h1", 2, 3),
    ("interleaved", 2, 2),
    ("1f1b", 4, 2),
    ("interleaved", 2, 3),
    ("zb-h1", 4, 2),
]


def start(folder: Path, mesh: Any, steps: int, *, strikes: str, restarts: int = 0, **environment: str) -> LaunchResult:
    (_, pipe, data), words = mesh, [*map(str, mesh), str(steps)]
    paths = [str(Path(going_on.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "STRIKES": strikes}
    command = [sys.executable, going_on.__file__, str(folder), *words]
    number = pipe * data
    limits = {"timeout": LIMIT, "stall": STILL, "restarts": restarts}
    return launch(command, num_ranks=number, environment=path | environment, **limits)  # type: ignore[arg-type]


def lines(folder: Path) -> dict[int, list[list[Any]]]:
    return {
        int(path.stem): [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.log")
    }


def check_numbers(made: list[list[Any]], mesh: tuple[str, int, int], steps: int) -> None:
    """Losses, and evaluations where there are some, are those of an undisturbed run."""
    wanted = going_on.losses(*mesh, steps)
    for step, loss, _, *evaluated in made:
        assert [loss, *evaluated] == pytest.approx(wanted[step][: 1 + len(evaluated)], rel=1e-12), step


def check_losses(folder: Path, mesh: tuple[str, int, int], steps: int, survivors: set[int]) -> None:
    """Those of all ranks are the undisturbed run's, but for the order of sums; who lives has made every step, once."""
    for rank, made in lines(folder).items():
        assert [line[0] for line in made] == list(range(len(made)))
        check_numbers(made, mesh, steps)
        assert (len(made) == steps) == (rank in survivors), (rank, len(made))


@pytest.mark.gloo
@pytest.mark.nightly
@pytest.mark.parametrize("environment", [{}, {"STAGED": "1"}], ids=["direct", "staged"])
def test_what_a_failed_try_has_changed_is_taken_back(tmp_path: Path, environment: dict[str, str]) -> None:
    """Buffers count each microbatch once; a step whose gradients are whole is not run again. Staged as on CUDA devices
    over gloo."""
    result = start(tmp_path, ("1f1b", 2, 2), 5, strikes="3:1:B,0:3:ready", **environment)
    assert result.status == 0, result.report
    check_losses(tmp_path, ("1f1b", 2, 2), 5, {1, 2})
    seen = {rank: [line[2] for line in made] for rank, made in lines(tmp_path).items()}
    assert seen[2] == [4, 12, 20, 28, 36]  # of 8 microbatches a step half, and all once rank 3 is dead
    assert seen[1] == [4, 8, 12, 16, 24]  # step 3 stood when rank 0 died: nobody has done it again


@pytest.mark.gloo
@pytest.mark.nightly
@pytest.mark.parametrize("at", ["1:E", "1:save", "1:saving", "1:snapshot", "1:update", "2:update", "2:close"])
def test_evaluations_and_saves_outlast_a_death(tmp_path: Path, at: str) -> None:
    """Also the one behind a step that the dead one has voted in; and the end of the run."""
    mesh, saved = ("1f1b", 2, 2), tmp_path / "saved"
    result = start(tmp_path, mesh, 3, strikes=f"3:{at}", EVALUATES=str(saved))
    assert result.status == 0, result.report
    for rank in range(3):
        assert [len(line) for line in lines(tmp_path)[rank]] == [4] * 3  # with an evaluation each
        check_numbers(lines(tmp_path)[rank], mesh, 3)
    going_on.make_pipe(*mesh, going_on.Strikes("", 0)).load(saved)


@pytest.mark.gloo
@pytest.mark.nightly
def test_a_stage_without_a_holder_ends_the_run_by_name(tmp_path: Path) -> None:
    result = start(tmp_path, ("1f1b", 2, 2), 5, strikes="2:1:F,3:2:F")
    assert result.status != 0
    assert "ranks 2, 3 are dead, and no other rank has stage 1" in result.report
    assert "a checkpoint, of which this run has none" in result.report


@pytest.mark.gloo
@pytest.mark.nightly
def test_a_ranks_own_error_ends_the_run_by_name(tmp_path: Path) -> None:
    result = start(tmp_path, ("1f1b", 2, 2), 5, strikes="3:1:loss:raise")
    assert (result.status, result.first_failed) == (1, 3)
    assert result.report.count("rank 3 failed: ArithmeticError: so it was told") >= 3, result.report


@pytest.mark.gloo
@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [("1f1b", 2, 2), ("interleaved", 2, 3)])
def test_a_process_that_was_started_again_joins(tmp_path: Path, mesh: tuple[str, int, int]) -> None:
    """With weights, optimizer and step of the others: its losses are the undisturbed run's."""
    result = start(tmp_path, mesh, 9, strikes="3:1:B", restarts=1, WAITS="4")
    assert result.status == 0, result.report
    assert "rank 3: killed by SIGKILL and was started again" in result.report
    for rank, made in lines(tmp_path).items():
        numbers, begun = [line[0] for line in made], 0
        if rank == 3:  # it made one step before it died, and the last ones after
            assert numbers.pop(0) == 0
            begun = numbers[0]
            assert begun in (4, 5, 6)
        assert numbers == list(range(begun, 9)), (rank, numbers)
        check_numbers(made, mesh, 9)
    seen = [line[2] for line in lines(tmp_path)[0]]
    assert seen[-1] - seen[-2] == seen[0]  # of the microbatches, rank 0 has its own alone


@pytest.mark.gloo
@pytest.mark.nightly
def test_the_others_go_on_without_one_that_was_started_again_as_another(tmp_path: Path) -> None:
    result = start(tmp_path, ("1f1b", 2, 2), 6, strikes="3:1:B", restarts=1, WAITS="4", DROPOUT1="0.3")
    assert result.status == 0, result.report
    assert "rank 3: exit status 1 and the others went on without it; its last line: ValueError" in result.report
    assert "another module '0.dropout': Dropout(p=0.3" in result.report
    check_losses(tmp_path, ("1f1b", 2, 2), 6, {0, 1, 2})


@pytest.mark.gloo
@pytest.mark.nightly
@pytest.mark.parametrize("again", ["form", "B"])
def test_one_that_joins_dies_again_and_another_while_it_joins(tmp_path: Path, again: str) -> None:
    mesh = ("1f1b", 2, 3)
    strikes = {"strikes": "3:1:B,0:4:formed", "STRIKES1": f"3:4:{again}"}
    result = start(tmp_path, mesh, 12, restarts=3, WAITS="3,5,7,9", **strikes)
    assert result.status == 0, result.report
    assert result.report.count("rank 3: killed by SIGKILL and was started again") == 2
    assert result.report.count("rank 0: killed by SIGKILL and was started again") == 1
    for rank, made in lines(tmp_path).items():
        check_numbers(made, mesh, 12)
        assert made[-1][0] == 11, (rank, made)


@pytest.mark.gloo
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(24))
def test_deaths_at_random_moments(tmp_path: Path, seed: int) -> None:
    """Half of them at named points, and some in one step; a holder of each stage lives."""
    choose = random.Random(seed)
    mesh = _, pipe, data = MESHES[seed % len(MESHES)]
    lives = {p * data + choose.randrange(data) for p in range(pipe)}
    strikes, step = [], 1
    for rank in choose.sample(range(pipe * data), pipe * data):
        if rank not in lives:
            point = choose.choice(POINTS) if choose.random() < 0.5 else str(choose.randrange(60))
            strikes.append(f"{rank}:{step}:{point}")
            step += choose.choice([0, 1, 2])
    result = start(tmp_path, mesh, step + 3, strikes=",".join(strikes))
    assert result.status == 0, (strikes, result.report)
    assert result.report.count("killed by SIGKILL") == len(strikes)
    check_losses(tmp_path, mesh, step + 3, lives)


def module(*layers: nn.Module, **options: Any) -> sw.PipelineModule:
    given: dict[str, Any] = {"mesh": sw.Mesh(pipe=2, data=2, on_failure="reroute"), "optimizer": sgd}
    given["loss_fn"] = nn.functional.mse_loss
    return sw.PipelineModule(nn.Sequential(*(layers or (nn.Linear(2, 2), nn.Linear(2, 2)))), **given | options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mesh": sw.Mesh(pipe=2, on_failure="reroute")}, "with data=1: no replica could take over. Expected data=2"),
        ({"mesh": sw.Mesh(pipe=2, data=2, on_failure="again")}, "'again': expected one of 'stop', 'reroute'"),
        ({"mesh": sw.Mesh(pipe=2, data=2, on_failure="reroute", data_parallel="zero1")}, "data_parallel='zero1'"),
        ({"schedule": "2bw"}, "batches overlap, or activations move, in it"),
        ({"schedule": "auto"}, 'Mesh(on_failure=) together with schedule="auto"'),
        ({"precision": "fp16"}, "with a loss scale, which changes with each try"),
        ({"optimizer": None}, "with an optimizer of your own"),
        ({"mesh": sw.Mesh(pipe=2, data=2, on_failure="reroute", compress="int8")}, "with compress="),
    ],
)
def test_what_cannot_go_on_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        module(**options)


def test_a_launcher_that_ends_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAGEWRIGHT_JUDGES_DEATHS", raising=False)
    with pytest.raises(ValueError, match=re.escape("as torchrun does: expected stagewright.cli.launcher.launch")):
        Membership(World(rank=0, size=2), timeout=1.0, made={})


class Scaled(nn.Module):
    scale = 1.0

    def __init__(self, rate: float = 0.1, act: Any = torch.tanh, factor: float = 1.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(2, 2), nn.Dropout(rate)
        self.act, self._factor = act, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self._factor * self.dropout(self.act(self.linear(x)))


def started_again(monkeypatch: pytest.MonkeyPatch, life: int, first: nn.Module, **options: Any) -> sw.PipelineModule:
    for name, value in (("LIFE", life), ("JUDGES_DEATHS", "x")):
        monkeypatch.setenv(f"STAGEWRIGHT_{name}", str(value))
    for name, value in (("RANK", 3), ("WORLD_SIZE", 4), ("MASTER_ADDR", "x"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    return module(first, Scaled(), **{"num_microbatches": 2} | options)


@pytest.mark.thorough(but=["first2-options2-_factor=2.0"])
@pytest.mark.parametrize(
    ("first", "options", "told"),
    [
        (Scaled(0.2), {}, "another module '0.dropout': Dropout(p=0.2, inplace=False), and Dropout(p=0.1,"),
        (Scaled(act=torch.sin), {}, "another module '0': Scaled("),
        (Scaled(factor=2.0), {}, "_factor=2.0"),
        (nn.Linear(2, 2), {}, "another module '0': Linear("),
        (Scaled(), {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.1)}, "another optimizer"),
        (Scaled(), {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.2)}, "another optimizer"),
        (Scaled(), {"loss_fn": nn.functional.l1_loss}, "another loss_fn"),
        (Scaled(), {"schedule": "gpipe"}, "another set of options: schedule 'gpipe'"),
        (Scaled(), {"num_microbatches": 4}, "another set of options"),
        (Scaled(), {"seed": 1}, "seed=1"),
        (Scaled(), {"max_grad_norm": 1.0}, "max_grad_norm=1.0"),
        (Scaled(), {"precision": "bf16"}, "autocast=torch.bfloat16"),
    ],
)
def test_who_was_started_again_as_another_is_not_let_in(
    monkeypatch: pytest.MonkeyPatch, first: nn.Module, options: dict[str, Any], told: str
) -> None:
    store = HashStore()
    monkeypatch.setattr(membership, "TCPStore", lambda *_, **__: store)
    started_again(monkeypatch, 1, Scaled())
    started_again(monkeypatch, 2, Scaled())
    with pytest.raises(ValueError, match=re.escape(told)) as raised:
        started_again(monkeypatch, 3, first, **options)
    assert "rank 3, which was started again, can't join" in str(raised.value)
    monkeypatch.setattr(Scaled, "scale", 2.0)
    with pytest.raises(ValueError, match="another module '0'"):
        started_again(monkeypatch, 4, Scaled())


def test_who_was_started_again_is_told_to_begin_with_the_others_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for that of its own accord; a loop from 0 on would give it other batches than theirs."""
    store = HashStore()
    monkeypatch.setattr(membership, "TCPStore", lambda *_, **__: store)
    run = started_again(monkeypatch, 1, Scaled())
    with pytest.raises(ValueError, match=re.escape("expected for step in range(pipe.num_steps, ...)")):
        run.train_step(*torch.randn(2, 16, 2))
    assert not store.check(["stagewright/wants/3"])
    store.set(membership.admitted(3, 1), json.dumps([2, [0, 1, 2, 3], [0, 0, 0, 1], 7]))
    assert run.num_steps == 7
    assert store.get("stagewright/wants/3") == b"1"


def with_members(is_whole: bool) -> tuple[sw.PipelineModule, list[bool]]:
    """A pipeline whose members all live, and agree that what failed is whole, or not; whether it was ready is noted."""
    x, asked = torch.randn(16, 2), list[bool]()

    def agree(num_steps: int, *, is_ready: bool, has_waited: bool) -> Verdict:
        asked.append(is_ready)
        run._building.life._in_vain = 0  # as where somebody died
        return Verdict((0, 1, 2, 3), is_whole, "")

    run = module()
    run.train_step(x, x)
    members: Any = SimpleNamespace(me=0, members=(0, 1, 2, 3), agree=agree, calls=0, is_outside=False, changed=False)
    members.step_made = members.someone_died = lambda: None
    run._building.life = Rerouted(run._building, members)
    return run, asked


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_call_of_which_all_have_the_answer_is_not_made_again(is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an evaluation or a save: one that fails behind its end, and one that fails within."""
    run, asked = with_members(is_whole)
    made: list[int] = []
    lost = iter([PeerLost("lost"), None, None])

    def vote(*_: Any, **__: Any) -> None:
        if error := next(lost):
            raise error

    monkeypatch.setattr(run._building.built("").state.run.collectives, "all_reduce", vote)

    def call() -> int:
        made.append(len(made))
        return made[-1]

    assert run._building.life.outlasting(call) == (0 if is_whole else 1)
    assert asked == [True]
    failing = iter([PeerLost("lost"), None])

    def fails_within() -> int:
        if error := next(failing):
            raise error
        return 7

    assert run._building.life.outlasting(fails_within) == 7
    assert asked == [True, False]


def test_a_step_that_fails_twice_with_nobody_dead_ends_the_run() -> None:
    x, asked = torch.randn(16, 2), []

    def agree(num_steps: int, *, is_ready: bool, has_waited: bool) -> Verdict:
        asked.append(has_waited)
        return Verdict((0, 1, 2, 3), False, "")

    run = module()
    run.train_step(x, x)
    members: Any = SimpleNamespace(me=0, members=(0, 1, 2, 3), agree=agree, calls=1)
    members.someone_died = lambda: False
    life = Rerouted(run._building, members)
    assert not life._is_whole(PipelineTimeout("waited"), is_ready=False)
    with pytest.raises(PeerLost, match="a step failed twice, and no process is dead"):
        life._is_whole(PeerLost("lost"), is_ready=False)
    assert asked == [True, False]


@pytest.mark.parametrize("moment", range(2, 14))
def test_one_that_dies_between_two_looks_ends_nobody_else(tmp_path: Path, moment: int) -> None:
    """Whoever asks first whether it has ended: the judge, or the launcher beside it."""
    asked: list[int] = []

    def poll(number: int) -> int | None:
        asked.append(number)
        if number == 0:
            return -9 if asked.count(0) >= moment else None
        return 0 if asked.count(0) >= moment + 12 else None

    class Process:
        def __init__(self, number: int) -> None:
            self.number, self.returncode, self.pid = number, None, 1 << 30  # nobody's

        def poll(self) -> int | None:
            self.returncode = poll(self.number)
            if self.returncode == 0:
                (tmp_path / f"{self.number}.done").touch()
            return self.returncode

    store = HashStore()
    store.set("stagewright/goes on", "")
    ranks: Any = [
        rank_process.RankProcess(number=number, process=Process(number), folder=tmp_path) for number in range(3)
    ]
    judge = launcher._Judge(ranks, store, lambda *_: None, 0)
    result = launcher._see_through(ranks, judge, grace=0.0, timeout=LIMIT, stall=None)
    assert result.status == 0, result.report
    assert result.report == "rank 0: killed by SIGKILL and the others went on without it"
