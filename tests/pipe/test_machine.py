"""The state machine alone, in any order of arrival; a short way from `train_step` to a layer; features stay outside.

Each case of the latter is a process in which the modules of one feature cannot be imported: all but the feature runs.
"""

import random
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
import torch
from support.commands import run_forked
from support.inside import Lowered, RankMachine, RankProgram, Sharing, Transfer, Wait
from support.small import WIDTH, X, Y, make, stream
from torch import nn

from stagewright.comm import PipelineError
from stagewright.schedules import Action, Edge, Message, MessageKind, Op, build, lower

F0, B0 = Action(0, Op.F, 0), Action(0, Op.B, 0)
ACT = Message(MessageKind.ACT, 0, 1, 0)
GRAD = Message(MessageKind.GRAD, 1, 0, 0)
LOSS = Message(MessageKind.LOSS, 1, 0, 0)


def first_of_two(*, finally_needs: tuple[Message, ...] = ()) -> RankProgram:
    """Rank 0 of two stages, one microbatch."""
    return RankProgram(
        rank=0,
        steps=(Transfer(GRAD, 1, False), F0, Transfer(ACT, 1, True), B0),
        inputs={B0: (GRAD,)},
        proves={GRAD: (ACT,)},
        finally_needs=finally_needs,
    )


def test_steps_come_in_order_and_an_action_waits_for_its_inputs() -> None:
    machine = RankMachine(first_of_two())
    assert machine.next() == Transfer(GRAD, 1, False)
    assert machine.next() == F0
    assert machine.next() == Transfer(ACT, 1, True)
    assert machine.next() == Wait((GRAD,), B0)
    assert machine.next() == Wait((GRAD,), B0)  # until it is told
    machine.arrived([GRAD])
    assert machine.next() == B0
    assert machine.next() is None
    assert machine.next() is None
    assert (machine.proven(), machine.proven()) == ([ACT], [])  # each is told once


def test_the_end_waits_for_the_losses() -> None:
    machine = RankMachine(first_of_two(finally_needs=(LOSS,)))
    machine.arrived([GRAD])
    assert [machine.next() for _ in range(5)][-1] == Wait((LOSS,), None)
    machine.arrived([LOSS])
    assert machine.next() is None


def test_only_the_missing_inputs_are_waited_for() -> None:
    other = Message(MessageKind.GRAD, 2, 0, 0)
    program = RankProgram(rank=0, steps=(B0,), inputs={B0: (GRAD, other)}, proves={})
    machine = RankMachine(program)
    machine.arrived([other])
    assert machine.next() == Wait((GRAD,), B0)


def run_all(lowered: Lowered, *, seed: int) -> list[list[Action]]:
    """All ranks' machines, in random turns, with messages under way for a random time; the actions by rank."""
    pick = random.Random(seed)
    machines = [RankMachine(program) for program in lowered.programs]
    done: list[list[Action]] = [[] for _ in machines]
    posted: list[set[Message]] = [set() for _ in machines]
    under_way: list[tuple[int, Message]] = []
    running = set(range(len(machines)))
    idle_turns = 0
    while running:
        rank = pick.choice(sorted(running))
        instruction = machines[rank].next()
        idle_turns += 1
        assert idle_turns < 10_000, f"nothing moves: rank {rank} stands at {instruction}"
        if instruction is None:
            running.discard(rank)
        elif isinstance(instruction, Action):
            done[rank].append(instruction)
            idle_turns = 0
        elif isinstance(instruction, Transfer) and instruction.is_send:
            under_way.append((instruction.peer, instruction.message))
        elif isinstance(instruction, Transfer):
            posted[rank].add(instruction.message)
        elif under_way:
            receiver, message = under_way.pop(pick.randrange(len(under_way)))
            machines[receiver].arrived([message])
    assert not under_way
    for program, messages in zip(lowered.programs, posted, strict=True):
        needed = {message for inputs in program.inputs.values() for message in inputs}
        assert messages == needed | set(program.finally_needs)
    return done


SKIPS = [Edge(0, 1, True), Edge(0, 3, True), Edge(1, 2, True), Edge(2, 3, False), Edge(1, 3, True)]
ORDERS = {name: build(name, num_ranks=3, num_microbatches=5) for name in ("gpipe", "1f1b", "interleaved", "looped-bfs")}
ORDERS["skips"] = build("1f1b", num_ranks=4, num_microbatches=6).with_edges(SKIPS)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_arrival_gives_the_program(name: str, seed: int) -> None:
    done = run_all(lower(ORDERS[name], sharing=Sharing(loss=True)), seed=seed)
    assert [tuple(actions) for actions in done] == list(ORDERS[name].programs)


def test_a_standstill_in_one_process_names_who_waits_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make()
    engine = pipe._building.built("the engine").engine
    run = engine.run

    def with_a_silent_rank(programs: Mapping[int, RankProgram]) -> None:
        second = programs[1]
        lost = next(
            step for step in second.steps if isinstance(step, Transfer) and step.is_send and step.message.index == 1
        )
        silent = replace(second, steps=tuple(step for step in second.steps if step != lost))
        run({**programs, 1: silent})

    monkeypatch.setattr(engine, "run", with_a_silent_rank)
    message = (
        r"deadlock in one process: rank 0 waits for the gradients of microbatch 1 from stage 1 to stage 0, "
        r"needed before 0B1; last actions of rank 0: 0F0 0F1 0B0 0F2; rank 1 waits for .* needed before 1F3"
    )
    with pytest.raises(PipelineError, match=message):
        pipe.train_step(X, Y)


MOST = 6  # train_step, Training.step, Engine.run, Worker.run, Stage.forward, and the chain of a stage's units


class Witness(nn.Linear):
    """A layer that notes the functions of ours that stand on the stack when it is called, the outermost first."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seen: set[tuple[str, ...]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names, frame = [], sys._getframe(1)
        while frame.f_back is not None:
            if frame.f_globals.get("__name__", "").startswith("stagewright."):
                names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        if "PipelineModule.train_step" in names:  # and not the first run on fake tensors
            self.seen.add(tuple(reversed(names)))
        return super().forward(x)


@pytest.mark.parametrize("begin", [make, stream])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_walk_from_train_step_to_a_layer_is_short(begin: object, num_ranks: int) -> None:
    witnesses = [Witness() for _ in range(3)]
    assert callable(begin)
    pipe = begin(model=nn.Sequential(*witnesses), mesh={"pipe": num_ranks}, num_microbatches=4)
    for _ in range(3):
        pipe.train_step(X, Y)
    for witness in witnesses:
        assert witness.seen
        for walk in witness.seen:
            assert walk[0] == "PipelineModule.train_step"
            assert len(walk) <= MOST, " -> ".join(walk)


MOST_CALLS = 65  # of functions of ours per action: 60 now, and 88 while each decided what a program or a batch can


@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_a_steady_action_calls_few_functions(schedule: str, num_chunks: int) -> None:
    """Counted, not timed: what the engine and all around it do per action costs seconds that all ranks share."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    pipe = make(model=model, schedule=schedule, num_chunks=num_chunks, mesh={"pipe": 2}, num_microbatches=8)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("stagewright."):
            calls[f"{name}: {frame.f_code.co_qualname}"] += 1

    for _ in range(3):
        pipe.train_step(X, Y)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        pipe.train_step(X, Y)
    finally:
        sys.setprofile(before)
    per_action = calls.total() / (2 * 8 * 2 * num_chunks)
    assert per_action <= MOST_CALLS, f"{per_action:.1f}: {calls.most_common(30)}"


FEATURES = {  # rooms, and what asks for the feature
    "reroute": (("pipe.reroute",), "pipe(mesh=sw.Mesh(pipe=2, data=2, on_failure='reroute'))"),
    "compression": (
        ("pipe.compression", "pipe.compression.added"),
        "pipe(mesh=sw.Mesh(pipe=2, compress='int8')).train_step(x, x)",
    ),
    "replan": (
        ("pipe.batch.orders",),
        "pipe(schedule=sw.Auto(trials=0, replan='batch')).train_step(microbatches=[(x, x)] * 2)",
    ),
    "background work": (("pipe.run.fills",), "run.fill([print])"),
    "slices": (("pipe.batch.slicing", "pipe.stage.slices"), "pipe(schedule='seq1f1b').train_step(x, x)"),
    "trials": (("pipe.auto.trial",), "pipe(schedule=sw.Auto(trials=2)).train_step(x, x)"),
    "shared loader": (("pipe.batch.shared",), "run.loader(data, batch_size=4, shared='host')"),
    "trace": (("pipe.figures.tracer",), "run.tracer('traces')"),
}

_SCRIPT = """
import sys

GONE = {gone!r}


class Gone:
    def find_spec(self, name, path=None, target=None):
        if name in GONE:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)


for name in GONE:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Gone())

import torch
from torch import nn
from torch.utils.data import TensorDataset

import stagewright as sw


def pipe(**options):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    told = {{"schedule": "1f1b", "mesh": {{"pipe": 2}}, "num_microbatches": 4, **options}}
    if isinstance(options.get("schedule"), sw.Auto):
        told |= {{"mesh": None, "num_microbatches": None}}
    return sw.PipelineModule(model, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD, **told)


x = torch.randn(8, 4)
data = TensorDataset(x, x)
for schedule in ("1f1b", "2bw"):
    run = pipe(schedule=schedule)
    for batch in run.loader(data, batch_size=8):
        run.train_step(*batch)
    run.eval_step(x, x)
    run.full_state_dict()
try:
    {asks}
except ModuleNotFoundError as error:
    print("asked for", error.name)
"""


@pytest.mark.thorough(but=["slices", "shared loader"])
@pytest.mark.parametrize("feature", FEATURES)
def test_without_its_room_all_but_the_feature_runs(feature: str, tmp_path: Path) -> None:
    rooms, asks = FEATURES[feature]
    gone = [f"stagewright.{room}" for room in rooms]
    (tmp_path / "without.py").write_text(_SCRIPT.format(gone=gone, asks=asks))
    (done,) = run_forked([str(tmp_path / "without.py")], num_ranks=None)
    assert done.status == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].removeprefix("asked for ") in gone
