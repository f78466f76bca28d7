"""Liveness on a rank: which activations and messages it holds, action by action, for the checker, the simulator's
timelines and the planner. For weight versions see `versions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from .ir import LAST_USES, Action, Op
from .messages import Message, Transfer
from .program import RankProgram, Step

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_BEGIN = {Op.F, Op.RELOAD}
_END = {*LAST_USES, Op.OFFLOAD}


def activations(program: Sequence[Action]) -> Iterator[tuple[Action, Mapping[int, int]]]:
    """Each action of a rank with the stage activations alive while it runs, by stage.

        program     F0  F1  B0  F2  I1  W1  B2       whether a backward is split differs by microbatch
        alive        1   2   2   2   2   2   1       an activation lives from its F to the end of its B or W

    An offloaded activation counts until the action that begins its offload, and again from the one that begins its
    reload: here moves take no time. An activation of a stage without backward lives for its F only. In a window of a
    stream, one whose F is missing lives from the beginning. Each step yields the same mapping, changed in place.
    """
    begun = {(stage, index) for stage, op, index in program if op in _BEGIN}
    alive = {stage: 0 for stage, _, _ in program}
    for stage, op, index in program:
        alive[stage] += op in _END and (stage, index) not in begun
    with_backward = {stage for stage, op, _ in program if op is not Op.F}
    for action in program:
        if action.op in _BEGIN:
            alive[action.stage] += 1
        yield action, alive
        if action.op in _END or action.stage not in with_backward:
            alive[action.stage] -= 1


def activation_counts(
    program: Sequence[Action], stages: Sequence[int], weights: Sequence[int] = (1,)
) -> npt.NDArray[np.int64]:
    """[actions, stages] the counts of `activations`, for programs in which all activations begin and end on the rank.
    An activation of index k counts weights[k % len(weights)] times.

    >>> activation_counts([Action.parse(each) for each in "0F0 0F1 0B0 0B1".split()], [0]).ravel().tolist()
    [1, 2, 2, 1]
    """
    column = {stage: at for at, stage in enumerate(stages)}
    import numpy as np  # only planners need it

    columns, rows = np.array([column[stage] for stage, _, _ in program], dtype=np.intp), np.arange(len(program))
    begins, ends = (np.zeros((len(program), len(stages)), dtype=np.int64) for _ in range(2))
    times = np.array([weights[index % len(weights)] for _, _, index in program], dtype=np.int64)
    begins[rows, columns] = [op is Op.F for _, op, _ in program] * times
    with_backward = {stage for stage, op, _ in program if op is not Op.F}
    ends[rows, columns] = [op in LAST_USES or stage not in with_backward for stage, op, _ in program] * times
    alive = np.cumsum(begins - ends, axis=0)
    return np.asarray(alive + ends, dtype=np.int64)


def peak_activations(program: Sequence[Action]) -> int:
    return max((sum(alive.values()) for _, alive in activations(program)), default=0)


def peak_held(program: Sequence[Action], held: Sequence[Sequence[float]]) -> float:
    """The most memory on a rank at once when it runs `program`, if moves take no time, from the memory of the
    activations of each stage and microbatch, `held` [S][M].

    >>> peak_held([Action.parse(each) for each in "0F0 0F1 0I0 0F2 0W0 0B1 0B2".split()], [[3.0, 4.0, 5.0]])
    12.0
    """
    now = most = 0.0
    for stage, op, k in program:
        if op in _BEGIN:
            now += held[stage][k]
            most = max(most, now)
        elif op in _END:
            now -= held[stage][k]
    return most


def message_changes(program: RankProgram) -> Iterator[tuple[Step, Sequence[Message], Sequence[Message]]]:
    """Each step of a rank with the messages whose tensors it begins to hold before the step, and frees after it.

    A receive counts from its posting to the last step that uses it, a send from the first step that contributes to it
    until an arrival proves it received. O(steps + messages).
    """
    held: set[Message] = set()
    sent = {step.message for step in program.steps if isinstance(step, Transfer) and step.is_send}
    begun: dict[Step, list[Message]] = {}
    over: dict[Step, list[Message]] = {}
    for message, actions in program.shared.items():
        table, action = (begun, actions[0]) if message in sent else (over, actions[-1])
        table.setdefault(action, []).append(message)
    for step in program.steps:
        if isinstance(step, Transfer):
            added = [] if step.message in held else [step.message]
            held.update(added)
            yield step, added, ()
            continue
        added = [message for message in begun.get(step, ()) if message not in held]
        held.update(added)
        through = [
            done
            for message in program.inputs.get(step, ())
            for done in (*(() if message in program.shared else (message,)), *program.proves.get(message, ()))
        ]
        removed = [message for message in dict.fromkeys([*through, *over.get(step, ())]) if message in held]
        held.difference_update(removed)
        yield step, added, removed
