"""A machine whose noise is known, to judge what is told of it."""

from dataclasses import replace
from math import exp
from random import Random

from stagewright.schedules import Action, Costs, Op, Schedule, simulate
from support.inside import TimedAction

Step = dict[int, list[TimedAction]]


class Machine:
    """Steps of a schedule on a machine whose noise is known: it slows steps, ranks and actions, and seldom one much.

    Arguments:
        step: deviation of what pushes the pace of all ranks in a step.
        kept: part of the pace that is left in the next step: 0 in independent steps, 1 in a random walk.
    """

    def __init__(
        self, schedule: Schedule, costs: Costs, seed: int, *, step: float, rank: float, action: float, kept: float = 0.0
    ) -> None:
        self.schedule, self.costs, self.table = schedule, costs, costs.table_for(schedule)
        self.step, self.rank, self.action = step, rank, action
        self.kept, self.pace = kept, 0.0
        self.random = Random(seed)

    def draw(self) -> tuple[Step, float]:
        """Actions that each rank ran in one step, and the seconds from batch to batch."""
        gauss = self.random.gauss
        self.pace = self.kept * self.pace + gauss(0, self.step)
        common, ran = exp(self.pace), Step()
        rows = {op: [[0.0] * self.schedule.total_indices for _ in self.table.latency] for op in (Op.F, Op.B)}
        for rank, program in enumerate(self.schedule.programs):
            own = common * exp(gauss(0, self.rank))
            for stage, op, k in program:
                tail = 3.0 if self.random.random() < 0.02 else 1.0
                seconds = self.table.of(op, stage, k) * own * exp(gauss(0, self.action)) * tail
                ran.setdefault(rank, []).append((Action(stage, op, k), seconds))
                rows[op][stage][k] = seconds
        taken = simulate(self.schedule, replace(self.costs, forward=rows[Op.F], backward=rows[Op.B]))
        return ran, taken.batch_seconds

    def ranks(self, number: int) -> list[list[list[TimedAction]]]:
        """Actions that each rank ran in so many steps."""
        steps = [self.draw()[0] for _ in range(number)]
        return [[step[rank] for step in steps] for rank in range(self.schedule.num_ranks)]
