"""Messages between ranks, and their transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from .actions import Collective, Op

if TYPE_CHECKING:
    from .ir import Schedule

# Receives of a link that are posted and not yet consumed: at least 4, since a link carries several streams (chunks,
# gradients), or as many as fit these bytes, to cover the bandwidth-delay product (14 MB at 1 Gbit/s over 56 ms).
RECEIVES_AHEAD = 4
AHEAD_BYTES = 1 << 24

# Bytes of gradients in one flat buffer, for one all-reduce; a larger gradient has its own.
BUCKET_BYTES = 1 << 24

# Bytes from which a gradient has its own all-reduce: a copy into a buffer would take as long, and memory.
ALONE_BYTES = 1 << 18


def receives_ahead(num_bytes: float, schedule: Schedule | None = None) -> int:
    """Receives to post ahead on each link, if the largest message has so many bytes. In a stream at least one more than
    the forwards that a rank runs ahead of the next one: else the sends of both may wait over links that do not buffer.
    """
    ahead = max(RECEIVES_AHEAD, int(AHEAD_BYTES // max(1, num_bytes)))
    if schedule is None or not schedule.is_asynchronous:
        return ahead
    now, most = Counter[tuple[int, int, bool]](), Counter[tuple[int, int, bool]]()  # forwards, by peers, for the next
    for rank, program in enumerate(schedule.programs):
        for stage, op, index, *_ in program:
            for other in (stage - 1, stage + 1) if op in (Op.F, Op.B, Op.I) else ():
                if 0 <= other < schedule.num_stages:
                    pair = rank, schedule.owner(other, index), other > stage
                    now[pair] += 1 if op is Op.F else -1
                    most[pair] = max(most[pair], now[pair])
    return max([ahead, *(1 + most[src, dst, True] - most[dst, src, False] for src, dst, sends in most if sends)])


class MessageKind(StrEnum):
    """Content of a message."""

    ACT = "act"  # outputs of a stage, to a consumer stage
    GRAD = "grad"  # gradients of those outputs, back to the producer
    LOSS = "loss"  # losses of an update group, from a rank of the last stage to another rank
    SUM = "sum"  # gradients of an update group that several ranks add up (replicas, tied weights)
    NORM = "norm"  # squared gradient norm of one rank, to rank 0
    TOTAL = "total"  # that of all ranks, from rank 0
    WEIGHTS = "weights"  # a rank's updated parts of weights, to another rank that holds them


STAGE_KINDS = frozenset({MessageKind.ACT, MessageKind.GRAD})


class Message(NamedTuple):
    """ACT, GRAD: `src` and `dst` are stages, `index` the microbatch. All others: both are ranks, and `index` is the
    update group (the batch, if a batch is updated at once)."""

    kind: MessageKind
    src: int
    dst: int
    index: int  # type: ignore[assignment]  # hides tuple.index

    def __str__(self) -> str:
        return _WORDS[self.kind].format(*self[1:])


_WORDS = {
    MessageKind.ACT: "activations of microbatch {2} from stage {0} to stage {1}",
    MessageKind.GRAD: "gradients of microbatch {2} from stage {0} to stage {1}",
    MessageKind.LOSS: "loss of update group {2} from rank {0} to rank {1}",
    MessageKind.SUM: "shared gradients of update group {2} from rank {0} to rank {1}",
    MessageKind.NORM: "gradient norm of update group {2} from rank {0} to rank {1}",
    MessageKind.TOTAL: "global gradient norm of update group {2} from rank {0} to rank {1}",
    MessageKind.WEIGHTS: "weights updated by group {2} from rank {0} to rank {1}",
}


class Transfer(NamedTuple):
    """A send, or the posting of a receive, with the rank at the other end."""

    message: Message
    peer: int
    is_send: bool

    def __str__(self) -> str:
        kind, src, dst, index = self.message
        verb = "SEND" if self.is_send else "RECV"
        if kind not in STAGE_KINDS:
            return f"{verb}_{kind.name}{index}"
        letter = "F" if kind is MessageKind.ACT else "B"
        return f"{src if self.is_send else dst}{verb}_{letter}{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Communication besides activations and gradients, and how far ahead receives are posted."""

    loss: bool = False  # the losses, from the ranks of the last stage to every rank
    norm: bool = False  # the global gradient norm of each update group (only where the program holds updates)
    sums: tuple[tuple[int, ...], ...] = ()  # groups of ranks that sum gradients before each update (likewise)
    # groups of ranks that each update a shard of their weights and send it to the others (likewise)
    parts: tuple[tuple[int, ...], ...] = ()
    # those of a program without updates, such as all-reduces of shared gradients
    collectives: tuple[Collective, ...] = ()
    # most receives of a link that are posted and not yet consumed, unless order or sends force more
    receives_ahead: int = RECEIVES_AHEAD

    def partners(self, rank: int) -> list[int]:
        """The ranks with which `rank` sums gradients, ascending."""
        return _others(rank, self.sums)

    def counts_for(self, rank: int) -> list[int]:
        """Partners of `rank` in the sums that it counts in its share of the global norm, ascending. A sum counts on its
        lowest rank, and, where the weights of that rank are sharded, on all ranks with a shard of them."""
        counting = [
            group
            for group in self.sums
            if rank == min(group) or any(rank in parts and min(group) in parts for parts in self.parts)
        ]
        return _others(rank, counting)

    def part_partners(self, rank: int) -> list[int]:
        """The ranks to which `rank` sends its updated shards, ascending."""
        return _others(rank, self.parts)


def _others(rank: int, groups: Sequence[tuple[int, ...]]) -> list[int]:
    return sorted({other for group in groups if rank in group for other in group if other != rank})


NOTHING_SHARED = Sharing()
