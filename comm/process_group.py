"""Messages over torch.distributed process groups: gloo for the CPU, NCCL for CUDA.

gloo: several groups (lanes) for each direction. Each tensor has its own tag: a counter per directed link and a
checksum of its layout, since one that does not fit its buffer would end the process. Waiting blocks the thread. A
work that is dropped before it is complete breaks its pair, and one that timed out closes every pair of its group for
good: so a time-out is fatal.

NCCL: a communicator for each directed link, so that no order between links can deadlock: on one link both
sides issue the same messages in the same order (`check_lowered`). Waiting orders the current stream.

Messages of a process that ends before they have left are lost. So at its exit (gloo) it waits for all sends of its open
transports.
"""

from __future__ import annotations

import atexit
import math
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from itertools import count, cycle
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..schedules import Action, Message, MessageKind, Op
from ..schedules.messages import STAGE_KINDS
from .failures import PeerLost, PipelineTimeout, short_reason
from .transport import TensorSpec, Transport, in_layout, memory_of

Link = tuple[int, int]  # (sender, receiver), ranks of the schedule


class Lanes(NamedTuple):
    """The groups that the messages of one directed link use in turn, the peer's index in them, its process."""

    groups: tuple[dist.ProcessGroup, ...]
    peer: int
    process: int


_UnderWay = tuple[int, list[torch.Tensor], list[dist.Work]]  # with its peer
_Start = Callable[[list[torch.Tensor], int, int], dist.Work]  # send or receive: of a tensor, the peer's index, the tag
_Round = Sequence[tuple[_Start, int]]  # of each lane, with the peer's index in it

_COUNTS = 1 << 14  # far above the messages in flight on a link
_LAYOUTS = 1 << 16
_NEVER_SENT = _COUNTS * _LAYOUTS
_AS_BYTES = (torch.bool, torch.bfloat16)  # types that not every backend supports
_UNTOUCHED = 0xA5  # bytes of a buffer before anything has arrived


class ProcessGroupTransport(Transport):
    """One rank's end over real processes."""

    def __init__(
        self, rank: int, lanes: Mapping[Link, Sequence[Lanes]], *, device: torch.device, timeout: float
    ) -> None:
        super().__init__(rank)
        self._lanes = lanes  # see `link_lanes`: a link receives over one of its lanes, and sends over all
        # By link: what its next message is sent or received with, and the number of its next tensor.
        self._rounds = {link: cycle(_rounds(each, sends=link[0] == rank)) for link, each in lanes.items()}
        self._counts = {link: count() for link in lanes}
        self._processes: dict[int, set[int]] = {}  # by peer
        for (sender, receiver), each in lanes.items():
            self._processes.setdefault(sender + receiver - rank, set()).update(lane.process for lane in each)
        self._device = device
        self._timeout = timeout  # for sends whose receipt is known, which should be complete at once [s]
        self.pins = False  # whether buffers of receives are pinned, to be copied to a device
        self._blocking = device.type != "cuda"
        self._posted: dict[Message, _UnderWay] = {}
        self._watched: dict[Message, list[torch.Tensor]] = {}  # posted ones' last elements
        self._sent: dict[Message, _UnderWay] = {}
        self._leftover: deque[tuple[Message, _UnderWay]] = deque()
        _open.add(self)

    @property
    def unconsumed_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, tensors, _ in self._posted.values() for t in tensors)

    def post(self, message: Message, peer: int, specs: Sequence[TensorSpec]) -> None:
        buffers = []
        for spec in specs:
            shape, stride, dtype, *_ = spec
            buffer = torch.empty_strided(shape, stride, dtype=dtype, device=self._device, pin_memory=self.pins)
            buffers.append(buffer)
            if self.is_watched and self._blocking and buffer.numel():
                last = buffer.as_strided((1,), (1,), buffer.numel() - 1).view(torch.uint8)
                self._watched.setdefault(message, []).append(last.fill_(_UNTOUCHED))
        self._posted[message] = (peer, buffers, self._start((peer, self.rank), buffers, specs, message, peer))

    def is_here(self, message: Message) -> bool:
        """Whether it was received: the last bytes of its buffers, which gloo fills in order, are there."""
        last = self._watched.get(message, ())
        return len(last) > 0 and all(any(byte != _UNTOUCHED for byte in one.tolist()) for one in last)

    def send(self, message: Message, peer: int, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> None:
        """Start the sends; their tensors are kept until their receipt is known."""
        whole = [in_layout(tensor, spec) for tensor, spec in zip(tensors, specs, strict=True)]
        self._sent[message] = (peer, whole, self._start((self.rank, peer), whole, specs, message, peer))

    def wait(self, message: Message, timeout: float) -> tuple[torch.Tensor, ...]:
        peer, buffers, works = self._posted.pop(message)
        self._watched.pop(message, None)
        for work in works:
            self._finish(work, message, peer, timeout, _arrival)
        return tuple(buffers)

    def acknowledged(self, messages: Sequence[Message]) -> None:
        """Free these sends; gloo requires a wait for each work, which returns at once."""
        for message in messages:
            sent = self._sent.pop(message, None)
            if sent is not None and self._blocking:
                for work in sent[2]:
                    self._finish(work, message, sent[0], self._timeout, _receipt)

    def end_of_program(self) -> None:
        """Keep sends without an answer for one more program, at whose end they are complete."""
        self._free_leftover(self._timeout)
        self._leftover.extend(self._sent.items())
        self._sent.clear()

    def drain(self, timeout: float) -> None:
        self.end_of_program()
        self._free_leftover(timeout)

    def abort(self) -> None:
        lanes = [lane for each in self._lanes.values() for lane in each]
        for group in {id(group): group for lane in lanes for group in lane.groups}.values():
            break_group(group, self._device)
        self._posted.clear()
        self._watched.clear()
        self._sent.clear()
        self._leftover.clear()

    def close(self) -> None:
        """Drop the groups, so that their owner can destroy them."""
        self._lanes, self._rounds = {}, {}
        _open.discard(self)

    def at_exit(self) -> None:
        """Wait for what other ranks will still receive. Never raises: they report what they miss."""
        if self._blocking:
            with suppress(PipelineTimeout, PeerLost):
                self.drain(self._timeout)

    def _free_leftover(self, timeout: float) -> None:
        while self._leftover:
            message, (peer, _, works) = self._leftover.popleft()
            for work in works:
                self._finish(work, message, peer, timeout, _receipt)

    def _start(
        self, link: Link, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], message: Message, peer: int
    ) -> list[dist.Work]:
        lanes, counts, works = next(self._rounds[link]), self._counts[link], []
        try:
            for tensor, spec in zip(tensors, specs, strict=True):
                checksum, is_empty, travels_as_it_is = _on_wire(spec)
                tag = next(counts) % _COUNTS * _LAYOUTS + checksum
                for operation, index in () if is_empty else lanes:
                    works.append(operation([tensor if travels_as_it_is else _wire(tensor)], index, tag))
        except RuntimeError as error:
            story = f"lost the connection to rank {peer} before the {message} ({short_reason(error)})"
            raise PeerLost(story, peers=sorted(self._processes[peer])) from error
        return works

    def _finish(
        self, work: dist.Work, message: Message, peer: int, timeout: float, describe: Callable[[Message, int], str]
    ) -> None:
        started = time.monotonic()
        try:
            if self._blocking:
                work.wait(_as_timedelta(timeout))
            else:
                work.wait()
        except RuntimeError as error:
            waited, what = time.monotonic() - started, describe(message, peer)
            if "timed out" in str(error).lower() or waited >= timeout:
                raise PipelineTimeout(
                    f"waited {waited:.1f} s for {what}", peers=sorted(self._processes[peer])
                ) from error
            story = (
                f"lost the connection to rank {peer} after waiting {waited:.1f} s for {what} ({short_reason(error)})"
            )
            raise PeerLost(story, peers=sorted(self._processes[peer])) from error


def _rounds(lanes: Sequence[Lanes], *, sends: bool) -> list[_Round]:
    """Sends or receives of each lane for messages 0, 1, ..., up to where they repeat."""
    period = math.lcm(*[len(lane.groups) for lane in lanes])
    of_message = [[(lane.groups[n % len(lane.groups)], lane.peer) for lane in lanes] for n in range(period)]
    return [[(group.send if sends else group.recv, index) for group, index in each] for each in of_message]


_as_timedelta = cache(partial(timedelta, 0))  # of seconds


_open: weakref.WeakSet[ProcessGroupTransport] = weakref.WeakSet()


@atexit.register
def _drain_open() -> None:
    for transport in list(_open):
        transport.at_exit()


def break_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Close this rank's connections in a group, so that ranks that wait for it there fail at once. Never raises. gloo's
    own abort() leaves its sockets open (torch 2.13); a receive that times out closes all of them."""
    if device.type == "cuda":
        with suppress(RuntimeError):  # it is broken already
            group.abort()
        return
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


@cache
def _on_wire(spec: TensorSpec) -> tuple[int, bool, bool]:
    """A layout's checksum, whether there is nothing to send, and whether tensors travel as they are, in order,
    without gaps, and of a type that every backend supports."""
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    is_plain = spec.dtype not in _AS_BYTES and tensor.is_contiguous()
    return zlib.crc32(repr(spec[:3]).encode()) % _LAYOUTS, tensor.numel() == 0, is_plain


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    return memory_of(tensor).view(torch.uint8) if tensor.dtype in _AS_BYTES else memory_of(tensor)


def _arrival(message: Message, peer: int) -> str:
    """The action that a wait is for, its rank, and the message that it makes."""
    if message.kind not in STAGE_KINDS:
        return f"rank {peer}: the {message}"
    made_by = Action(message.src, Op.F if message.kind is MessageKind.ACT else Op.B, message.index)
    return f"{made_by} of rank {peer}, which makes the {message}"


def _receipt(message: Message, peer: int) -> str:
    return f"rank {peer} to take the {message}"
