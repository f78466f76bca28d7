"""The engine: pulls each rank's machine, a program without I/O, clock, thread or torch, and executes its instructions.

    machine --Transfer--> transport.post / transport.send
            --Wait------> transport.wait, then worker.put and machine.arrived
            --Action----> worker.run, stamped by the recorder
            --GroupStep, Collective-> worker.take_part; at the end worker.settle waits for everything begun

Over processes there is one rank, and waiting blocks. In one process the ranks take turns, each running until it
waits for a message that has not arrived. Nothing else differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_tb

import torch

from ...comm import PipelineError, PipelineTimeout, Transport
from ...schedules import Action, Collective, Message, Schedule, ScheduleError, check
from ...schedules.messages import Transfer
from ...schedules.program import RankProgram, Wait, Work
from ..context import Run
from ..shards.tensor_group import TensorGroup
from ..trace.recorder import RankRecorder
from .worker import Worker

Instruction = Transfer | Wait | Work


class RankMachine:
    """One rank's program as a state machine; its driver pulls with `next()` and reports arrivals.

        next() -> Transfer (send)   give this message to the transport
               -> Transfer (post)   post a receive for this message
               -> Wait              nothing can run before these messages have arrived
               -> Action, GroupStep run it now; all its inputs have arrived
               -> Collective        begin it now, and continue
               -> None              the program is done

    Invariant: work is returned once, in program order, after all its inputs have arrived.
    """

    def __init__(self, program: RankProgram) -> None:
        self._program = program
        self._position = 0
        self._arrived: set[Message] = set()
        self._proven: list[Message] = []  # sends that are known to be received, until `proven` returns them

    def next(self) -> Instruction | None:
        """Next instruction; the same Wait again until `arrived` has reported all its messages."""
        program, position = self._program, self._position
        wait = program.waits[position]
        if wait is not None and not self._arrived.issuperset(wait.messages):
            if self._arrived.isdisjoint(wait.messages):
                return wait
            return Wait(tuple(m for m in wait.messages if m not in self._arrived), wait.before)
        if position == len(program.steps):
            return None
        self._position += 1
        return program.steps[position]

    def arrived(self, messages: Sequence[Message]) -> None:
        self._arrived.update(messages)
        for message in messages:
            self._proven += self._program.proves.get(message, ())

    def proven(self) -> list[Message]:
        """The sends of this rank that arrivals since the last call prove received."""
        proven, self._proven = self._proven, []
        return proven


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    worker: Worker
    transport: Transport
    recorder: RankRecorder


class Engine:
    """Runs lowered programs on the ranks of this process: one over processes, all P in one process."""

    def __init__(self, run: Run, ranks: Sequence[LocalRank]) -> None:
        self.ranks = ranks
        self._guard, self._seeder = run.guard, run.seeder
        self._lost_member = run.collectives.lost_member  # of a group of members, as the cause of an action's error
        self._root = run.root
        self._timeout = run.options.timeout

    def run(self, programs: Mapping[int, RankProgram]) -> None:
        """Run the programs, by rank, to their end on every rank of this process.

        In rounds, each rank until it waits for a message that has not arrived; a round without progress is a deadlock.
        All in one function, since each call between `train_step` and a layer costs time. Collective over the processes.

        Raises PipelineTimeout or PeerLost, which name the ranks, the action waited for and this rank's last actions.
        """
        torch.clear_autocast_cache()  # of casts of weights that have changed since, within one autocast
        with self._guard.together(), self._seeder.call():
            running = [(local, _begin(local, programs[local.worker.rank])) for local in self.ranks]
            while running:
                moved = False
                for local, machine in tuple(running):
                    worker, transport, recorder = local.worker, local.transport, local.recorder
                    stamp = recorder.clock.stamp
                    instruction: Instruction | None = None
                    try:
                        while (instruction := machine.next()) is not None:
                            match instruction:
                                case Action():
                                    start = stamp()
                                    worker.run(instruction)
                                    recorder.action(instruction, start, stamp())
                                case Transfer():
                                    _transfer(worker, transport, instruction)
                                case Wait():
                                    if not self._receive(local, machine, instruction):
                                        break
                                case _:
                                    worker.take_part(instruction)
                            moved = True
                        else:
                            _end(local, machine)
                            running.remove((local, machine))
                            moved = True
                    except RuntimeError as error:
                        self._explain(error, local, instruction)
                        raise
                if not moved:
                    stories = "; ".join(_why_it_waits(local, machine) for local, machine in running)
                    raise PipelineError(f"deadlock in one process: {stories}")

    def _receive(self, local: LocalRank, machine: RankMachine, wait: Wait) -> bool:
        """Take the messages; False where they have not arrived and another rank of this process must run first."""
        worker, transport, recorder = local.worker, local.transport, local.recorder
        if proven := machine.proven():  # freed before a wait, when there is time
            transport.acknowledged(proven)
        if not all(map(transport.ready, wait.messages)):
            return False
        start = recorder.clock.stamp()
        for message in wait.messages:
            worker.put(message, transport.wait(message, self._timeout))
        recorder.wait(wait.messages, start, recorder.clock.stamp())
        machine.arrived(wait.messages)
        return True

    def _explain(self, error: RuntimeError, local: LocalRank, instruction: Instruction | None) -> None:
        known = error if isinstance(error, PipelineError) else self._lost_member(error, self._module_of(error))
        if known is not None:
            own = f"rank {local.worker.rank}: "
            story = f"{own}{str(known).removeprefix(own)}, {_story(local, instruction)}"
            if known is not error and isinstance(known, PipelineTimeout):
                story += ". Did all of them make the same calls (train_step, eval_step, predict), in the same order?"
            raise type(known)(story, peers=known.peers) from error

    def _module_of(self, error: BaseException) -> str:
        """Name of the innermost module in whose forward an error was raised, or in a backward of whose exchanges."""
        names = {id(module): name for name, module in self._root.named_modules()}
        owners = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
        modules = [id(owner.module if isinstance(owner, TensorGroup) else owner) for owner in owners]
        return next((names[each] for each in reversed(modules) if each in names), "")

    def drop(self) -> None:
        for local in self.ranks:
            local.worker.drop()


def check_runnable(schedule: Schedule, *, has_optimizer: bool) -> None:
    """Raise ScheduleError or ValueError for a schedule that the engine does not run: it runs flush schedules of one
    batch, and asynchronous ones as streams, which need an optimizer."""
    if not schedule.is_asynchronous and schedule.num_batches > 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} follows the weight rule {schedule.weight_rule!r} over {schedule.num_batches} "
            f"batches: expected a flush schedule of one batch, which the engine repeats"
        )
    check(schedule)
    if schedule.is_asynchronous and not has_optimizer:
        raise ValueError(
            f"schedule {schedule.name!r} updates its weights while other batches run: expected "
            f"optimizer=lambda params: torch.optim.AdamW(params), or a flush schedule such as '1f1b'"
        )


def _begin(local: LocalRank, program: RankProgram) -> RankMachine:
    local.worker.begin(program)
    local.recorder.runs_as_one(program.fused)
    return RankMachine(program)


def _transfer(worker: Worker, transport: Transport, transfer: Transfer) -> None:
    message, peer, is_send = transfer
    specs = worker.specs(message)
    if is_send:
        transport.send(message, peer, worker.take(message, specs), specs)
    else:
        transport.post(message, peer, specs)


def _end(local: LocalRank, machine: RankMachine) -> None:
    local.worker.settle()
    local.transport.acknowledged(machine.proven())
    local.transport.end_of_program()


def _why_it_waits(local: LocalRank, machine: RankMachine) -> str:
    wait = machine.next()
    assert isinstance(wait, Wait)
    return f"rank {local.worker.rank} waits for the {wait.messages[0]}, {_story(local, wait)}"


def _story(local: LocalRank, instruction: Instruction | None) -> str:
    is_named = isinstance(instruction, Transfer | Collective)
    where = f"to {instruction}" if is_named else "at the end of the batch"
    if isinstance(instruction, Wait) and instruction.before is not None:
        where = f"needed before {instruction.before}"
    elif isinstance(instruction, Action):
        where = f"in {instruction}"
    last = " ".join(map(str, local.recorder.last_actions())) or "none yet in this batch"
    return f"{where}; last actions of rank {local.worker.rank}: {last}"
