"""A rank's moves of activations: to its host and back, and between it and partner ranks.

owner     F       SIZE: of each storage ->     partner   HOLD: takes the sizes, posts for as many
          LEND    LENT: their bytes ->                   RETURN: the same bytes
          RELOAD  <- RETURNED, waited for by the backward
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...comm import TensorSpec
from ...partition.graph.forms import Tensors
from ...schedules import Action, Message, MessageKind, Op, Schedule
from ...schedules.moves import find_moves
from ..stages.moving import Host
from ..stages.stage import Stage

_MOST = 4096  # storages of one message, which says how many bytes each has


class Mover:
    """The moves of one rank.

    Arguments:
        stages: of the rank, by number.
        device: of its tensors.

    Attributes:
        moves: of the whole schedule, by (stage, microbatch).
        moved_bytes: by stage, the most that a microbatch's activations had when they left [bytes].
    """

    def __init__(self, rank: int, schedule: Schedule, stages: Mapping[int, Stage], device: torch.device) -> None:
        self._rank, self._stages, self._device = rank, stages, device
        self.moves = find_moves(schedule)
        self.moved_bytes: dict[int, int] = {}
        self._host = Host(device) if any(move.partner is None for move in self.moves.values()) else None
        self._sizes: dict[tuple[int, int], list[int]] = {}  # of the storages of each that is lent, here or there
        self._tensors: dict[Message, Tensors] = {}

    def made(self, stage: int, index: int) -> None:
        """A forward is through: the partner of what will be lent learns how much that is.

        Raises RuntimeError for more storages than a message tells.
        """
        move = self.moves.get((stage, index))
        if move is None or move.partner is None:
            return
        sizes = self._sizes[stage, index] = self._stages[stage].moving(index).sizes
        if len(sizes) > _MOST:
            raise RuntimeError(
                f"stage {stage} keeps {len(sizes)} tensors of microbatch {index}, and at most {_MOST} can be lent: "
                f"expected a schedule that offloads it to the host, or more stages"
            )
        told = torch.tensor(sizes + [-1] * (_MOST - len(sizes)), dtype=torch.int64, device=self._device)
        self._tensors[Message(MessageKind.SIZE, stage, move.partner, index)] = (told,)

    def run(self, action: Action) -> None:
        """Begin a move."""
        stage, op, index = action
        move = self.moves[stage, index]
        match op:
            case Op.OFFLOAD | Op.LEND:
                activations = self._stages[stage].moving(index)
                self.moved_bytes[stage] = max(activations.num_bytes, self.moved_bytes.get(stage, 0))
                if move.partner is None:
                    assert self._host is not None
                    self._host.take(activations)
                else:
                    parts = tuple(activations.leave())
                    self._tensors[Message(MessageKind.LENT, stage, move.partner, index)] = parts
            case Op.RELOAD if self._host is not None and move.partner is None:
                self._host.give_back(self._stages[stage].moving(index))
            case Op.RETURN:
                lent = self._tensors.pop(Message(MessageKind.LENT, stage, self._rank, index))
                self._tensors[Message(MessageKind.RETURNED, self._rank, stage, index)] = lent
            case _:  # HOLD, and RELOAD of what was lent: its receive is posted next
                pass

    def specs(self, message: Message) -> list[TensorSpec]:
        """Layout of a message."""
        if message.kind is MessageKind.SIZE:
            return [TensorSpec((_MOST,), (1,), torch.int64, False)]
        stage = message.dst if message.kind is MessageKind.RETURNED else message.src
        return [TensorSpec((size,), (1,), torch.uint8, False) for size in self._sizes[stage, message.index]]

    def put(self, message: Message, tensors: Tensors) -> None:
        """A message arrived."""
        if message.kind is MessageKind.SIZE:
            self._sizes[message.src, message.index] = [size for size in tensors[0].tolist() if size >= 0]
        elif message.kind is MessageKind.LENT:
            self._tensors[message] = tensors
        else:
            self._stages[message.dst].moving(message.index).come(tensors)

    def take(self, message: Message) -> Tensors:
        """A message to send."""
        return self._tensors.pop(message)

    def drop(self) -> None:
        """Forget what is under way (after an error)."""
        self._tensors.clear()
        self._sizes.clear()
        if self._host is not None:
            self._host.drop()
