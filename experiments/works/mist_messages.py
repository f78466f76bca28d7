"""Messages between stages of Aceso's GPT, which may be cut inside of a layer.

A layer is 13 operations; behind each of them this has to go on, of n = b s tokens, h hidden, a heads, in values:

    norm            n h, and n h that go round the attention
    Q K V           3 n h, divided over the tensor ranks, and n h
    scores, softmax, dropout
                    n a s and the values n h, divided, and n h
    context         n h, divided, and n h
    projection      2 n h
    dropout, add    n h
    norm            2 n h
    up, GeLU        4 n h, divided, and n h
    down            2 n h
    dropout, add    n h
"""

from __future__ import annotations

from dataclasses import dataclass

from .mist_plans import OPERATIONS, MeasuredPlan

VALUE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Bytes of one message on the rank that sends or receives most of it, in either direction.

    Arguments:
        sent: by that rank; a tensor rank sends its share.
        gathered_before, gathered_behind: that each tensor rank of the stage before the cut, or behind it, gets from the
            others of its group, of what all of them need whole.
    """

    sent: float
    gathered_before: float
    gathered_behind: float


def crossing(plan: MeasuredPlan, operation: int) -> tuple[int, int]:
    """Values that go on behind an operation, for one microbatch: whole on each tensor rank, and divided over them."""
    tokens = plan.microbatch_size * plan.length
    wide, scores = tokens * plan.hidden, tokens * plan.heads * plan.length
    return (
        (2 * wide, 0),  # norm
        (wide, 3 * wide),
        *((wide, scores + wide),) * 3,
        (wide, wide),
        (2 * wide, 0),
        (wide, 0),
        (2 * wide, 0),  # norm
        *((wide, 4 * wide),) * 2,
        (2 * wide, 0),
        (wide, 0),
    )[(operation - 1) % OPERATIONS]  # operation 0 is the embedding, and gives what the end of a layer does


def message_behind(plan: MeasuredPlan, stage: int) -> Message:
    """Message over the cut behind a stage, for one microbatch."""
    here, there = plan.stages[stage], plan.stages[stage + 1]
    whole, divided = crossing(plan, here.last)

    def gathered(tensor: int, data: int) -> float:
        return VALUE_BYTES * whole / data * (1 - 1 / tensor)

    fewest = min(here.tensor * here.data, there.tensor * there.data)
    return Message(
        sent=VALUE_BYTES * (whole + divided) / fewest,
        gathered_before=gathered(here.tensor, here.data),
        gathered_behind=gathered(there.tensor, there.data),
    )
