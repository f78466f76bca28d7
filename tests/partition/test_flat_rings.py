"""Sums in gloo's flat ring: the formula beside the algorithm of gloo's allreduce.cc, carried out step by step.

Nothing computes here: a segment takes its bytes' time on the link from rank r + 1 to rank r, and half a step's latency
on the way; it leaves when rank r has said that it waits for it. Seconds are a clock's of an event queue.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from support.inside import Topology

from stagewright.partition import Cluster, Level

MIB = 1 << 20
STEP, BANDWIDTH = 4e-3, 1.25e8  # 1 Gbit/s, 2 ms one way
WAKING = 1e-7  # [s] of a thread: what arrives with a segment is read before the next one is asked for
Waiting = tuple[int, int, str, int]  # rank, sum, "sent" or "received", number of a segment


class Ring:
    """Ranks of one ring that carry out sums, two at a time, each on a thread that takes its segments in order."""

    def __init__(self, ranks: int, num_bytes: int, *, number: int, step: float, bandwidth: float) -> None:
        self.ranks, self.number, self.step, self.bandwidth = ranks, number, step, bandwidth
        segments = max(-(-num_bytes // MIB), 2 * ranks)
        self.a_part = -(-segments // ranks)
        self.segment = num_bytes / (self.a_part * ranks)
        self.clock, self._order = 0.0, count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._done: set[Waiting] = set()
        self._blocked: dict[Waiting, Iterator[Waiting]] = {}
        self._asked: set[Waiting] = set()  # segments that the next rank waits for, and those that are ready to leave
        self._ready: set[Waiting] = set()
        self._lines: list[deque[tuple[float, Callable[[], None]]]] = [deque() for _ in range(ranks)]
        self._idle = [True] * ranks

    def seconds(self) -> float:
        for rank in range(self.ranks):
            queue = deque(range(self.number))
            for _ in range(2):
                self._go_on(self._thread(rank, queue))
        while self._events:
            self.clock, _, act = heapq.heappop(self._events)
            act()
        assert not self._blocked
        return self.clock

    def _thread(self, rank: int, queue: deque[int]) -> Iterator[Waiting]:
        while queue:
            number = queue.popleft()
            in_a_half = (self.ranks - 1) * self.a_part
            for half in range(2):
                for i in range(in_a_half + 2):
                    if i >= 2:
                        yield rank, number, "received", half * in_a_half + i - 2
                        yield rank, number, "sent", half * in_a_half + i - 2
                    if i < in_a_half:
                        self._ask(rank, number, half * in_a_half + i)
                        self._send(rank, number, half * in_a_half + i)

    def _go_on(self, thread: Iterator[Waiting]) -> None:
        for what in thread:
            if what not in self._done:
                self._blocked[what] = thread
                return

    def _is_done(self, what: Waiting) -> None:
        self._done.add(what)
        if what in self._blocked:
            thread = self._blocked.pop(what)
            self._at(self.clock + WAKING, lambda: self._go_on(thread))

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), act))

    def _ask(self, rank: int, number: int, i: int) -> None:
        """Tell the rank above that a segment is waited for; of two ranks, behind what travels there by now."""
        above = (rank + 1) % self.ranks

        def arrive() -> None:
            self._asked.add((above, number, "sent", i))
            self._leave(above, number, i)

        if self.ranks == 2:
            self._lines[rank].append((0.0, lambda: self._at(self.clock + self.step / 2, arrive)))
            self._carry(rank)
        else:
            self._at(self.clock + self.step / 2, arrive)

    def _send(self, rank: int, number: int, i: int) -> None:
        self._ready.add((rank, number, "sent", i))
        self._leave(rank, number, i)

    def _leave(self, rank: int, number: int, i: int) -> None:
        sent = (rank, number, "sent", i)
        if sent in self._asked and sent in self._ready:
            below = (rank - 1) % self.ranks

            def gone() -> None:
                self._at(self.clock + self.step / 2, lambda: self._is_done((below, number, "received", i)))
                self._is_done(sent)

            self._lines[rank].append((self.segment / self.bandwidth, gone))
            self._carry(rank)

    def _carry(self, rank: int) -> None:
        if self._idle[rank] and self._lines[rank]:
            self._idle[rank] = False
            seconds, gone = self._lines[rank].popleft()

            def through() -> None:
                self._idle[rank] = True
                gone()
                self._carry(rank)

            self._at(self.clock + seconds, through)


def predicted(ranks: int, num_bytes: int, *, number: int = 1, step: float = STEP) -> float:
    level = Level(name="net", size=ranks, bandwidth=BANDWIDTH, latency=step / 2, reduce_latency=step)
    ring = Topology(Cluster(levels=(level,), rings="flat")).ring(range(ranks))
    return float(ring.seconds(number * num_bytes, number=number))


def carried_out(ranks: int, num_bytes: int, *, number: int = 1, step: float = STEP) -> float:
    return Ring(ranks, num_bytes, number=number, step=step, bandwidth=BANDWIDTH).seconds()


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("num_bytes", [1 << 10, 1 << 18, MIB, 4 * MIB])
@pytest.mark.parametrize("step", [STEP, 5 * STEP])
def test_one_sum_takes_as_long_as_its_segments(ranks: int, num_bytes: int, step: float) -> None:
    """Exactly, where each rank's part has two segments: each step waits, or the link is busy but for two waits."""
    assert predicted(ranks, num_bytes, step=step) == pytest.approx(carried_out(ranks, num_bytes, step=step), rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("number", [1, 2])
def test_large_sums_go_at_the_pace_of_the_link(ranks: int, number: int) -> None:
    """Segments of 1 MiB on a link that is no longer than one of them: what is asked for arrives while others leave."""
    found = predicted(ranks, 64 * MIB, number=number)
    assert found == pytest.approx(carried_out(ranks, 64 * MIB, number=number), rel=0.06)
    if ranks > 2:
        wire = 2 * (ranks - 1) / ranks * number * 64 * MIB / BANDWIDTH
        assert found == pytest.approx(2 * STEP + wire)  # all other steps are hidden


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_large_sums_over_a_long_link_wait_for_each_pair_of_segments(ranks: int) -> None:
    """A round trip's worth of bytes is more than what is asked for at a time. Two ranks count as if they still had to
    wait behind each other's segments, which is up to a quarter too slow there."""
    found, wire = predicted(ranks, 64 * MIB, step=5 * STEP), 2 * (ranks - 1) / ranks * 64 * MIB / BANDWIDTH
    assert found == pytest.approx(carried_out(ranks, 64 * MIB, step=5 * STEP), rel=0.3 if ranks == 2 else 0.1)
    assert found > 1.5 * wire
    pair = predicted(ranks, 64 * MIB, number=2, step=5 * STEP)
    assert wire < pair / 2 < found  # two sums wait side by side
    assert predicted(ranks, 64 * MIB, number=8, step=5 * STEP) == pytest.approx(4 * pair)  # and no more than two


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_sums_go_two_at_a_time(ranks: int) -> None:
    """Never less than they take, and at most a third more, since rounds run into each other."""
    for num_bytes in (1 << 14, MIB, 4 * MIB):
        found, truth = predicted(ranks, num_bytes, number=8), carried_out(ranks, num_bytes, number=8)
        assert truth * (1 - 1e-4) <= found <= 4 / 3 * truth
        assert found > 2 * predicted(ranks, num_bytes, number=2)
