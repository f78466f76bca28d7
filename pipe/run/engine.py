"""The engine: pulls each rank's machine and carries out what it says.

    machine --Transfer--> transport.post / transport.send
            --Wait------> transport.wait, then worker.put and machine.arrived
            --Action----> worker.run, stamped by the recorder
            --GroupStep-> worker.run

One generator a rank yields whenever it waits. Over processes there is one rank, and waiting blocks; in one process
the ranks take turns, each running until it waits for what is not there yet. Nothing else differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...comm import PipelineError, Transport
from ...schedules import Action, Message, Op, Schedule, ScheduleError
from ...schedules.messages import Transfer
from ...schedules.program import GroupStep, RankProgram
from ..measure.recorder import Recorder
from .machine import Instruction, Machine, Wait
from .worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    """All that one rank of this process is made of."""

    worker: Worker
    transport: Transport
    recorder: Recorder


class Engine:
    """Runs lowered programs on the ranks of this process.

    Arguments:
        ranks: of this process: one over processes, all P in one process.
        timeout: of each wait [s].
    """

    def __init__(self, ranks: Sequence[LocalRank], *, timeout: float) -> None:
        self.ranks = ranks
        self._timeout = timeout

    def run(self, programs: Mapping[int, RankProgram]) -> None:
        """Run the programs, by rank, to their end on every rank of this process.

        Raises PipelineTimeout or PeerLost, with who waited for which action of whom and this rank's last actions.
        """
        runs = [self._drive(local, Machine(programs[local.worker.rank])) for local in self.ranks]
        if len(runs) == 1:
            for _ in runs[0]:
                raise AssertionError("a single rank has nobody to wait for")
        else:
            self._take_turns(runs)

    def _drive(self, local: LocalRank, machine: Machine) -> Iterator[Wait]:
        """One rank's run; yields a Wait whose messages are not there, to be resumed when they may be."""
        worker, transport, recorder = local.worker, local.transport, local.recorder
        stamp = recorder.clock.stamp
        proves = machine.proves
        proven: list[Message] = []  # sends known to be received: freed before the next wait, when there is time
        instruction: Instruction | None = None
        try:
            while (instruction := machine.next()) is not None:
                if isinstance(instruction, Action):
                    start = stamp()
                    worker.run(instruction)
                    recorder.action(instruction, start, stamp())
                elif isinstance(instruction, GroupStep):
                    worker.finish(instruction)
                elif isinstance(instruction, Transfer):
                    message, peer, is_send = instruction
                    if is_send:
                        transport.send(message, peer, worker.take(message), worker.specs(message))
                    else:
                        transport.post(message, peer, worker.specs(message))
                else:
                    if proven:
                        transport.acknowledged(proven)
                        proven.clear()
                    while not all(transport.ready(message) for message in instruction.messages):
                        yield instruction
                    start = stamp()
                    for message in instruction.messages:
                        worker.put(message, transport.wait(message, self._timeout))
                        proven += proves.get(message, ())
                    recorder.wait(instruction.messages, start, stamp())
                    machine.arrived(instruction.messages)
            transport.acknowledged(proven)
            transport.end_of_program()
        except PipelineError as error:
            story = f"rank {worker.rank}: {error}, {_story(local, instruction)}"
            raise type(error)(story, peers=error.peers) from error

    def _take_turns(self, runs: Sequence[Iterator[Wait]]) -> None:
        """Round and round until all have ended; a round in which none got on is a deadlock."""
        standing: dict[int, Wait | None] = dict.fromkeys(range(len(runs)))
        while standing:
            moved = False
            for index in list(standing):
                before = standing[index]
                wait = next(runs[index], None)
                moved = moved or wait is not before
                if wait is None:
                    del standing[index]
                    moved = True
                else:
                    standing[index] = wait
            if not moved:
                waits = [(self.ranks[i], wait) for i, wait in standing.items() if wait is not None]
                stories = [f"rank {r.worker.rank} waits for the {w.messages[0]}, {_story(r, w)}" for r, w in waits]
                raise PipelineError("deadlock in one process: " + "; ".join(stories))


def refuse_what_cannot_run(schedule: Schedule) -> None:
    """The engine runs whole backwards; flush schedules of one batch; asynchronous ones as streams."""
    if not schedule.is_asynchronous and schedule.num_batches > 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} follows the weight rule {schedule.weight_rule!r} over {schedule.num_batches} "
            f"batches: expected a flush schedule of one batch, which the engine repeats"
        )
    odd = next((a for program in schedule.programs for a in program if a.op not in (Op.F, Op.B, Op.U)), None)
    if odd is not None:
        raise ScheduleError(
            f"{odd} in schedule {schedule.name!r}: expected F and B; the runtime splits no backward yet"
        )


def _story(local: LocalRank, instruction: Instruction | None) -> str:
    where = f"to {instruction}" if isinstance(instruction, Transfer) else "at the end of the batch"
    if isinstance(instruction, Wait) and instruction.before is not None:
        where = f"needed before {instruction.before}"
    last = " ".join(map(str, local.recorder.last_actions())) or "none yet in this batch"
    return f"{where}; last actions of rank {local.worker.rank}: {last}"
