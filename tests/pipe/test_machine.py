"""The state machine alone, without processes or clock: the driver delivers in any order. The engine's own guard."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.inside import Lowered, RankMachine, RankProgram, Sharing, Transfer, Wait
from support.small import X, Y, make

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


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_arrival_gives_the_program(name: str, seed: int) -> None:
    schedule = build(name, num_ranks=3, num_microbatches=5)
    done = run_all(lower(schedule, sharing=Sharing(loss=True)), seed=seed)
    assert [tuple(actions) for actions in done] == list(schedule.programs)


def test_with_skips_over_several_stages() -> None:
    edges = [Edge(0, 1, True), Edge(0, 3, True), Edge(1, 2, True), Edge(2, 3, False), Edge(1, 3, True)]
    schedule = build("1f1b", num_ranks=4, num_microbatches=6).with_edges(edges)
    done = run_all(lower(schedule, sharing=Sharing(loss=True)), seed=7)
    assert [tuple(actions) for actions in done] == list(schedule.programs)


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
