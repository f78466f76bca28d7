"""Messages of every type and layout: within a process, and over gloo with several messages under way."""

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.inside import process_group
from support.pool import Pool
from torch import Tensor

from stagewright.comm import (
    Groups,
    InProcessTransport,
    Mailbox,
    MeshPlace,
    PeerLost,
    PipelineTimeout,
    ProcessGroupTransport,
    TensorSpec,
    World,
    link_lanes,
)
from stagewright.schedules import Message, MessageKind

CPU = torch.device("cpu")
LINKS = [(0, 1), (1, 0)]


def act(index: int) -> Message:
    return Message(MessageKind.ACT, 0, 1, index)


def grad(index: int) -> Message:
    return Message(MessageKind.GRAD, 1, 0, index)


def specs_of(tensors: list[Tensor]) -> list[TensorSpec]:
    return [TensorSpec.of(tensor) for tensor in tensors]


def payloads() -> list[list[Tensor]]:
    """Types, layouts and sizes that a stage may put out; several tensors a message."""
    plain = torch.arange(24.0).reshape(2, 3, 4)
    return [
        [plain.to(dtype)]
        for dtype in (
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.complex64,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.uint8,
            torch.uint16,
            torch.bool,
        )
    ] + [
        [plain.transpose(0, 2), plain.permute(1, 2, 0) > 5],
        [plain[:, :2, ::2], plain[:, :1].expand(2, 5, 4)],
        [torch.zeros(0, 4), torch.tensor(3.5), torch.zeros(2, 0, 3, dtype=torch.bool)],
        [torch.ones(2, 8, 3, 5).to(memory_format=torch.channels_last)],
        [torch.zeros(3, dtype=torch.int64), plain, torch.ones((), dtype=torch.bfloat16).expand(1)],
        [],
    ]


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.zeros(2, 3, 4), (12, 4, 1)),
        (torch.zeros(2, 3, 4).transpose(0, 2), (1, 4, 12)),
        (torch.zeros(2, 6)[:, ::2], (3, 1)),  # the gaps are closed
        (torch.zeros(2, 1).expand(2, 4), (4, 1)),  # and the overlaps
        (torch.tensor(1.0), ()),
    ],
)
def test_a_layout_has_no_gaps_and_keeps_the_order_of_memory(tensor: Tensor, stride: tuple[int, ...]) -> None:
    spec = TensorSpec.of(tensor.requires_grad_())
    assert spec == TensorSpec(tuple(tensor.shape), stride, torch.float32, True)


def test_in_process_messages_are_taken_once_and_dropped_on_abort() -> None:
    mailbox = Mailbox()
    left, right = InProcessTransport(0, mailbox), InProcessTransport(1, mailbox)
    tensor = torch.ones(3)
    right.post(act(0), 0, specs_of([tensor]))
    assert not right.ready(act(0))
    left.send(act(0), 1, [tensor], specs_of([tensor]))
    assert right.ready(act(0))
    assert not left.ready(act(0))
    (arrived,) = right.wait(act(0), 1.0)
    assert arrived is tensor
    assert not right.ready(act(0))
    left.send(act(0), 1, [tensor], specs_of([tensor]))
    right.abort()
    assert not right.ready(act(0))


def transport(timeout: float = 120.0) -> ProcessGroupTransport:
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    lanes = link_lanes(LINKS, Groups(MeshPlace.line(world), device=CPU, timeout=120.0))
    return ProcessGroupTransport(world.rank, lanes, device=CPU, timeout=timeout)


def exchange() -> list[str]:
    """Rank 0 sends every payload, two under way at a time; rank 1 compares and sends them back."""
    mine = transport()
    complaints = []
    messages = payloads()
    if dist.get_rank() == 0:
        for index, tensors in enumerate(messages):
            mine.post(grad(index), 1, specs_of(tensors))
            mine.send(act(index), 1, tensors, specs_of(tensors))
    else:
        for index, tensors in enumerate(messages):
            mine.post(act(index), 0, specs_of(tensors))
    for index, tensors in enumerate(messages):
        arrived = mine.wait((grad if dist.get_rank() == 0 else act)(index), 120.0)
        complaints += compare(index, tensors, arrived)
        if dist.get_rank() == 1:
            mine.send(grad(index), 0, arrived, specs_of(tensors))
        else:
            mine.acknowledged([act(index)])
    mine.drain(120.0)
    if mine.unconsumed_bytes or mine._sent or mine._leftover:
        complaints.append(f"left over: {mine.unconsumed_bytes} bytes, {mine._sent}, {mine._leftover}")
    return complaints


def compare(index: int, tensors: list[Tensor], arrived: tuple[Tensor, ...]) -> list[str]:
    found = [f"message {index}: {len(arrived)} tensors"] if len(arrived) != len(tensors) else []
    for sent, got in zip(tensors, arrived, strict=False):
        if got.dtype != sent.dtype or got.stride() != TensorSpec.of(sent).stride:
            found.append(f"message {index}: {sent.dtype} {sent.stride()} came as {got.dtype} {got.stride()}")
        wide = torch.complex128 if sent.is_complex() else torch.float64
        if not torch.equal(got.to(wide), sent.to(wide)):
            found.append(f"message {index}: other values of {sent.dtype} {tuple(sent.shape)}")
    return found


def test_every_type_and_layout_arrives_as_it_was(gloo: Pool) -> None:
    assert gloo.run(exchange, ranks=2) == [[], []]


def tell() -> None:
    dist.distributed_c10d._get_default_store().set("told", "")


def until_told() -> None:
    dist.distributed_c10d._get_default_store().wait(["told"], timedelta(seconds=200))


def seen_to_come() -> list[bool]:
    """Whether each payload that rank 1 watches is seen: in front of its send, behind it, and when it is taken."""
    mine, seen = transport(), list[bool]()
    messages = [tensors for tensors in payloads() if tensors]
    if dist.get_rank() == 0:
        until_told()
        for index, tensors in enumerate(messages):
            mine.send(act(index), 1, tensors, specs_of(tensors))
    else:
        for index, tensors in enumerate(messages):
            mine.is_watched = index > 0
            mine.post(act(index), 0, specs_of(tensors))
            seen.append(mine.is_here(act(index)))
        tell()
        deadline = time.monotonic() + 60.0
        for index in range(1, len(messages)):
            while not mine.is_here(act(index)) and time.monotonic() < deadline:
                time.sleep(0.001)
            seen.append(mine.is_here(act(index)))
        seen.append(mine.is_here(act(0)))
        for index in range(len(messages)):
            mine.wait(act(index), 120.0)
            seen.append(mine.is_here(act(index)))
    mine.drain(120.0)
    return seen


def test_a_watched_message_is_seen_to_come(gloo: Pool) -> None:
    count = sum(bool(tensors) for tensors in payloads())
    assert gloo.run(seen_to_come, ranks=2)[1] == [False] * count + [True] * (count - 1) + [False] * (count + 1)


def hold_and_free() -> list[tuple[int, int]]:
    """(sends held, sends of the program before) as a sender goes through acknowledgements and ends of programs."""
    mine, seen = transport(), []
    tensors = [torch.ones(1000)]
    if dist.get_rank() == 0:
        for index in range(3):
            mine.send(act(index), 1, tensors, specs_of(tensors))
        seen.append((len(mine._sent), len(mine._leftover)))
        mine.post(grad(0), 1, specs_of(tensors))
        mine.wait(grad(0), 120.0)
        mine.acknowledged([act(0), act(1)])  # what the answer proves
        mine.acknowledged([act(1), act(9)])  # twice, or never sent: nothing to free
        seen.append((len(mine._sent), len(mine._leftover)))
        mine.end_of_program()  # act(2) has no answer: it waits for one more program
        seen.append((len(mine._sent), len(mine._leftover)))
        mine.end_of_program()
        seen.append((len(mine._sent), len(mine._leftover)))
    else:
        for index in range(3):
            mine.post(act(index), 0, specs_of(tensors))
            seen.append((mine.unconsumed_bytes, len(mine._posted)))
        for index in range(3):
            mine.wait(act(index), 120.0)
        seen.append((mine.unconsumed_bytes, len(mine._posted)))
        mine.send(grad(0), 0, tensors, specs_of(tensors))
        mine.drain(120.0)
    return seen


def test_acknowledged_sends_are_freed_and_the_others_after_one_more_program(gloo: Pool) -> None:
    sender, receiver = gloo.run(hold_and_free, ranks=2)
    assert sender == [(3, 0), (1, 0), (0, 1), (0, 0)]
    assert receiver == [(4000, 1), (8000, 2), (12000, 3), (0, 0)]


def leave() -> tuple[int, int]:
    """(sends held before, and behind) what a process waits for at its exit; the other rank takes them late."""
    mine, tensors = transport(), [torch.ones(1_000_000)]
    if dist.get_rank() == 1:
        until_told()
        for index in range(3):
            mine.post(act(index), 0, specs_of(tensors))
            mine.wait(act(index), 120.0)
        return 0, 0
    for index in range(3):
        mine.send(act(index), 1, tensors, specs_of(tensors))
    before = len(mine._sent)
    assert mine in process_group._open
    tell()
    process_group._drain_open()
    behind = len(mine._sent) + len(mine._leftover)
    mine.close()
    assert mine not in process_group._open
    return before, behind


def test_a_process_that_ends_waits_for_what_it_has_sent(gloo: Pool) -> None:
    assert gloo.run(leave, ranks=2)[0] == (3, 0)


def caught(call: Callable[[], Any]) -> tuple[str, str, tuple[int, ...]]:
    """(type, message, peers) of the error that a call raises."""
    with pytest.raises((PipelineTimeout, PeerLost)) as error:
        call()
    tell()
    return type(error.value).__name__, str(error.value), error.value.peers


def wait_in_vain(how: str) -> tuple[str, str, tuple[int, ...]] | None:
    """Rank 0 waits for rank 1, which says nothing, or sends another size, or lets go of its links, or takes nothing."""
    mine = transport(timeout=1.0)
    tensors = [torch.ones(16_000_000 if how == "full" else 8)]  # more than the socket holds
    dist.barrier()
    if dist.get_rank() == 0:
        if how == "full":
            mine.send(act(0), 1, tensors, specs_of(tensors))
            found = caught(lambda: mine.drain(1.0))
        else:
            mine.post(grad(3), 1, specs_of(tensors))
            found = caught(lambda: mine.wait(grad(3), 1.0 if how != "abort" else 120.0))
        mine.abort()
        mine.drain(120.0)  # nothing is left to wait for
        return found
    if how == "abort":
        mine.post(act(0), 0, specs_of(tensors))  # posted, sent and left over: nothing keeps abort
        mine.send(grad(9), 0, [torch.ones(5)], specs_of([torch.ones(5)]))
        mine.abort()
        mine.abort()
        mine.drain(120.0)
    elif how == "another size":
        mine.send(grad(3), 0, [torch.ones(16)], specs_of([torch.ones(16)]))
    until_told()
    return None


MADE = "1B3 of rank 1, which makes the gradients of microbatch 3 from stage 1 to stage 0"
TAKEN = "rank 1 to take the activations of microbatch 0 from stage 0 to stage 1"


@pytest.mark.thorough(but=["silence-PipelineTimeout-said0"])
@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("silence", "PipelineTimeout", rf"waited \d+\.\d s for {MADE}"),
        ("another size", "PipelineTimeout", rf"waited \d+\.\d s for {MADE}"),
        ("full", "PipelineTimeout", rf"waited \d+\.\d s for {TAKEN}"),
        ("abort", "PeerLost", r".*lost the connection to rank 1 after waiting .*for 1B3 of rank 1.*"),
    ],
)
def test_a_wait_ends_and_names_the_action(gloo: Pool, how: str, kind: str, said: str) -> None:
    """With its time-out: a message that does not fit its buffer is not delivered, gloo would end the process; at once
    where the other rank lets go: gloo's own abort() leaves the sockets open."""
    found, _ = gloo.run(wait_in_vain, ranks=2, args=(how,))
    assert (found[0], found[2]) == (kind, (1,))
    assert re.fullmatch(said, found[1], re.DOTALL)
