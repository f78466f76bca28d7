"""Programs of ranks run without time: how far each of them gets, and receives posted earlier so that all end.

A transport may hold a rank at a send until its receive is posted on the other side, as NCCL does where a message is too
large for its buffers. Then ranks may stand still that go on where sends never wait:

    rank 0   0F5 >0SEND_F5 .. 2RECV_F1 2F1        waits for rank 1 to post the receive of F5
    rank 1   1F1 >1SEND_F1 .. 1RECV_F5 1F5        waits for rank 0 to post the receive of F1

What a rank can do next it can still do after whatever others do first. So one run decides; and where ranks stand still,
a receive that is posted right where its rank stands lets the sender go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .messages import MOVE_KINDS, Message, Transfer
from .program import RankProgram, Step


class Progress:
    """A run, which goes on where it stands still when receives are posted earlier.

    Attributes:
        steps: of each rank.
        at: position of each rank in them.
    """

    def __init__(self, programs: Sequence[RankProgram], *, sends_wait: bool) -> None:
        self.steps: list[list[Step]] = [list(program.steps) for program in programs]
        self.at = [0] * len(programs)
        self._inputs = [program.inputs for program in programs]
        self._sends_wait = sends_wait
        self._sent: set[Message] = set()
        self._posted: set[Message] = set()
        self._held: dict[Message, int] = {}  # ranks that stand still, by what they wait for

    def run(self, ends: Sequence[int]) -> list[int]:
        """Go on as far as possible, at most to these positions; the ranks that do not get there."""
        runnable = list(range(len(ends)))
        while runnable:
            rank = runnable.pop()
            self._go_on(rank, ends[rank], runnable)
        return [rank for rank, end in enumerate(ends) if self.at[rank] < end]

    def waits_for(self, rank: int) -> tuple[Message, int]:
        """The message at which a rank stands still, and the rank on its other side."""
        step = self.steps[rank][self.at[rank]]
        if isinstance(step, Transfer):
            return step.message, step.peer
        message = next(each for each in self._inputs[rank][step] if each not in self._sent)
        transfers = (each for each in self.steps[rank] if isinstance(each, Transfer) and not each.is_send)
        return message, next(each.peer for each in transfers if each.message == message)

    def circle(self, stuck: Sequence[int]) -> list[int]:
        """Of ranks that stand still some of which each waits for the next."""
        path = [stuck[0]]
        while (peer := self.waits_for(path[-1])[1]) in stuck:
            if peer in path:
                return path[path.index(peer) :]
            path.append(peer)
        return path[-1:]

    def post(self, rank: int, cuts: Sequence[list[int]], call: int) -> bool:
        """Post the receive that a sender waits for where its peer stands; False where `rank` waits for no such one.

        Activations that move are received where their move stands. What is behind may begin a step later (`cuts`).
        """
        step = self.steps[rank][self.at[rank]]
        if not isinstance(step, Transfer) or step.message.kind in MOVE_KINDS:
            return False
        peer = step.peer
        receive, new = Transfer(step.message, rank, False), self.at[peer]
        old = self.steps[peer].index(receive, new)
        self.steps[peer].insert(new, self.steps[peer].pop(old))
        cuts[peer][call + 1 :] = [begin + (begin <= old) for begin in cuts[peer][call + 1 :]]
        return True

    def _go_on(self, rank: int, end: int, runnable: list[int]) -> None:
        """Run a rank until it ends or waits; those that waited for it can go on."""
        steps, inputs, sent, posted, held = self.steps[rank], self._inputs[rank], self._sent, self._posted, self._held
        for at in range(self.at[rank], end):
            step = steps[at]
            if isinstance(step, Transfer):
                message, _, is_send = step
                if is_send and self._sends_wait and message not in posted:
                    held[message] = rank
                    break
                (sent if is_send else posted).add(message)
                if message in held:
                    runnable.append(held.pop(message))
            elif (needed := inputs.get(step)) and not sent.issuperset(needed):
                held[next(each for each in needed if each not in sent)] = rank
                break
        else:
            at = end
        self.at[rank] = at


def post_in_time(programs: Sequence[RankProgram]) -> tuple[RankProgram, ...]:
    """The same with receives posted as much earlier as it takes that sends which wait for them end.

    Each call of programs that were lowered call by call ends by itself, too. Where receives cannot help, as where
    activations that are lent meet those that come back, all stay as they are.
    """
    run = Progress(programs, sends_wait=True)
    cuts = [[*(program.cuts or [0]), len(program.steps)] for program in programs]
    for call in range(max(map(len, cuts)) - 1):
        while stuck := run.run([own[min(call + 1, len(own) - 1)] for own in cuts]):
            if not any(run.post(rank, cuts, call) for rank in run.circle(stuck)):
                return tuple(programs)
    return tuple(
        replace(program, steps=tuple(steps), cuts=tuple(own[:-1]) if program.cuts else ())
        for program, steps, own in zip(programs, run.steps, cuts, strict=True)
    )


def where_sends_wait(programs: Sequence[RankProgram]) -> str | None:
    """The circle in which ranks would wait for each other if a send held its rank until its receive is posted."""
    run = Progress(programs, sends_wait=True)
    stuck = run.run([len(program.steps) for program in programs])
    lines = []
    for rank in run.circle(stuck) if stuck else ():
        (message, peer), step = run.waits_for(rank), run.steps[rank][run.at[rank]]
        lacking = f"posts the receive of the {message}" if isinstance(step, Transfer) else f"sends the {message}"
        lines.append(f"rank {rank} stands at {step} until rank {peer} {lacking}")
    return "; ".join(lines) or None
