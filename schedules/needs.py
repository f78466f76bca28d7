"""What an action needs from others: the one place that knows the data dependencies.

F(s, k)   the output of every producer of s            (and the weights, see versions)
B(s, k)   the gradient from every consumer of s, and its own F(s, k)
I(s, k)   the same as B
W(s, k)   its own I(s, k)
"""

from __future__ import annotations

from .ir import BACKWARD_OPS, Action, Op, Schedule


class Needs:
    """Answers `of(action)` for one schedule; O(in-degree) each.

    A stage may split the backward of some microbatches and not of others, so which action makes a gradient
    (B or I) is looked up by microbatch.
    """

    def __init__(self, schedule: Schedule) -> None:
        stages = range(schedule.num_stages)
        self.producers = [[e.src for e in schedule.stage_edges if e.dst == s] for s in stages]
        self.consumers = [[e.dst for e in schedule.stage_edges if e.src == s and e.grad] for s in stages]
        self._split = {
            (a.stage, a.index) for program in schedule.programs for a in program if a.op is Op.I
        }  # (stage, index) whose backward is split

    def backward(self, stage: int, index: int) -> Action:
        """The action that makes the gradient which `stage` sends on."""
        return Action(stage, Op.I if (stage, index) in self._split else Op.B, index)

    def of(self, action: Action) -> list[Action]:
        """The actions whose results `action` needs, in a fixed order."""
        stage, op, index = action
        if op is Op.F:
            return [Action(p, Op.F, index) for p in self.producers[stage]]
        if op in BACKWARD_OPS:
            return [self.backward(c, index) for c in self.consumers[stage]] + [Action(stage, Op.F, index)]
        if op is Op.W:
            return [Action(stage, Op.I, index)]
        return []
