"""Pairs of a forward and a backward that run together, so that one computes while the other exchanges within its stage.

    apart      F compute ══exchange══ B compute ════exchange════        exchange: all-to-alls to experts and back,
                                                                        gathers of keys and values
    together   F compute ══exchange══                                   F takes its time; B begins with it, computes
               ════exchange════                                         during F's exchange, exchanges while F computes,
                         B compute                                      and ends with what is left of either

Both begin when both have their inputs, as DualPipe's pairs do (DeepSeek-AI, 2024); F's output leaves when F ends. With
f and b seconds of compute, x and y of exchange, F takes f + x and B (b - x)+ + (y - f)+ after it, max(f, y) + max(b, x)
together. Which actions are a pair is in the schedule, not found when it runs: all members of a stage must run the same
ones together, since their exchanges are in one order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from .actions import Action, Op, ScheduleError


def pairs_in(programs: Sequence[Sequence[Action]], overlapped: Collection[Action]) -> dict[Action, Action]:
    """By forward of `overlapped`, the backward of another stage directly after it; without those that have none."""
    wanted = frozenset(overlapped)
    return {
        one: then
        for program in programs
        for one, then in pairwise(program)
        if one in wanted and one.op is Op.F and then.op is Op.B and one.stage != then.stage
    }


def read_pairs(given: Iterable[object]) -> tuple[Action, ...]:
    """The forwards that a user gave, each once. Raises ScheduleError for what is no sequence of actions."""
    try:
        found = [Action(int(stage), Op(op), int(index)) for stage, op, index in given]  # type: ignore[misc, has-type]
    except (TypeError, ValueError):
        raise ScheduleError(f"overlapped={given!r:.60}: expected forwards, such as (Op.F(0, 3),)") from None
    return tuple(dict.fromkeys(found))


def refuse_apart(overlapped: Sequence[Action], pairs: dict[Action, Action]) -> None:
    """Raise ScheduleError for a forward that has no backward of another stage directly after it."""
    apart = next((action for action in overlapped if action not in pairs), None)
    if apart is not None:
        raise ScheduleError(
            f"overlapped={apart}: expected a forward with the whole backward of another stage directly after it on its "
            f"rank"
        )
