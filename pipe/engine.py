"""The engine: pulls each rank's machine and carries out what it says.

    machine --Transfer--> transport.post / transport.send
            --Wait------> transport.wait, then worker.put and machine.arrived
            --Action----> worker.run, stamped by the recorder

One generator a rank yields whenever it waits. Over processes there is one rank, and waiting blocks; in one process
the ranks take turns, each running until it waits for what is not there yet. Nothing else differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..comm import PipelineError, Transport
from ..schedules import Action, Lowered, Message
from ..schedules.lower import Transfer
from .machine import Machine, Wait
from .recorder import Recorder
from .stage import Tensors
from .wiring import Wiring
from .worker import Batch, Worker


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

    def run(self, lowered: Lowered, wiring: Wiring, batch: Batch, *, training: bool) -> None:
        """Run one batch to the end of its program on every rank of this process.

        Raises PipelineTimeout or PeerLost, with who waited for which action of whom and this rank's last actions.
        """
        runs = []
        for local in self.ranks:
            local.worker.begin(batch, wiring, training=training)
            local.recorder.begin()
            machine = Machine(lowered.programs[local.worker.rank])
            runs.append(self._drive(local, machine))
        if len(runs) == 1:
            for _ in runs[0]:
                raise AssertionError("a single rank has nobody to wait for")
        else:
            self._take_turns(runs)
        for local in self.ranks:
            local.transport.end_of_program()

    def _drive(self, local: LocalRank, machine: Machine) -> Iterator[Wait]:
        """One rank's run; yields a Wait whose messages are not there, to be resumed when they may be."""
        worker, transport, recorder = local.worker, local.transport, local.recorder
        stamp = recorder.clock.stamp
        proves = machine.proves
        while (instruction := machine.next()) is not None:
            if isinstance(instruction, Action):
                start = stamp()
                worker.run(instruction)
                recorder.action(instruction, start, stamp())
            elif isinstance(instruction, Transfer):
                message, peer, is_send = instruction
                if is_send:
                    transport.send(message, peer, worker.take(message), worker.specs(message))
                else:
                    transport.post(message, peer, worker.specs(message))
            else:
                while not all(transport.ready(message) for message in instruction.messages):
                    yield instruction
                start = stamp()
                for message in instruction.messages:
                    worker.put(message, self._wait(local, message, instruction))
                    transport.acknowledged(proves.get(message, ()))
                recorder.wait(instruction.messages, start, stamp())
                machine.arrived(instruction.messages)

    def _wait(self, local: LocalRank, message: Message, wait: Wait) -> Tensors:
        try:
            return local.transport.wait(message, self._timeout)
        except PipelineError as error:
            story = f"rank {local.worker.rank}: {error}, needed {_story(local, wait)}"
            raise type(error)(story, peer=error.peer) from error

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
                stories = [
                    f"rank {r.worker.rank} waits for the {w.messages[0]}, needed {_story(r, w)}" for r, w in waits
                ]
                raise PipelineError("deadlock in one process: " + "; ".join(stories))


def _story(local: LocalRank, wait: Wait) -> str:
    where = "at the end of the batch" if wait.before is None else f"before {wait.before}"
    last = " ".join(map(str, local.recorder.last_actions())) or "none yet in this batch"
    return f"{where}; last actions of rank {local.worker.rank}: {last}"
