"""Names that pipelines give to their slices, as actions.

    PP:1F0, 1F0            torch.distributed.pipelining, all schedules but GPipe and 1F1B; and this package
    PP:(0F1;1B0)OVERLAP_F_B    likewise, of two actions one behind the other
    Forward 0              torch's ScheduleGPipe: the microbatch alone; a rank has one stage

torch's Schedule1F1B (2.13) names nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...schedules import Action, Op

_ACTION = re.compile(r"(?:PP:)?(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(r"PP:\((\d+[FBIW]\d+);(\d+[FBIW]\d+)\)OVERLAP_F_B")
_RECEIVE = re.compile(r"PP:(\d+)RECV_([FB])(\d+)")
_OF_ONE_STAGE = re.compile(r"(Forward|Backward) (\d+)")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_COMMUNICATION = ("c10d::", "gloo:", "nccl:", "ncclx:", "record_param_comms", "PP:")
_ARRIVALS = ("gloo:recv",)


class Named(NamedTuple):
    """An action as its name has it; stage None: the one stage of its rank."""

    stage: int | None
    op: Op
    index: int  # type: ignore[assignment]  # hides tuple.index


def actions_of(name: str, args: Mapping[str, Any]) -> tuple[Named, ...]:
    """The actions of a slice, in order; none where it is something else.

    >>> actions_of("PP:1F0", {})
    (Named(stage=1, op=<Op.F: 'F'>, index=0),)
    """
    given = args.get("action")
    if isinstance(given, str):
        try:
            return (Named(*Action.parse(given)),)
        except ValueError:
            return ()
    if match := _ACTION.fullmatch(name):
        return (Named(int(match[1]), Op(match[2]), int(match[3])),)
    if match := _OVERLAP.fullmatch(name):
        return tuple(Named(*Action.parse(each)) for each in match.groups())
    if match := _OF_ONE_STAGE.fullmatch(name):
        return (Named(None, Op.F if match[1] == "Forward" else Op.B, int(match[2])),)
    return ()


def received_by(name: str) -> Named | None:
    """The action whose input a slice of torch's runtime begins to receive.

    >>> received_by("PP:1RECV_F0")
    Named(stage=1, op=<Op.F: 'F'>, index=0)
    """
    match = _RECEIVE.fullmatch(name)
    return None if match is None else Named(int(match[1]), Op(match[2]), int(match[3]))


def step_of(name: str) -> int | None:
    """Number of a step that torch.profiler marks."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def is_communication(name: str) -> bool:
    """Whether a slice sends or receives, or marks that."""
    return name.startswith(_COMMUNICATION)


def is_arrival(name: str) -> bool:
    """Whether a slice lasts from the posting of a receive until its message is there."""
    return name in _ARRIVALS
