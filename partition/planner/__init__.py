"""The planner: sizes, schedule, chunks, microbatch, recomputation, sharding and cuts, ranked by simulation.

space      which configurations there are
search     which of them to look at next, and when none left can win
cuts       where to cut one of them, or cuts of their own with unequal replicas
evaluate   what it costs and holds on the ranks of its `placement` (`evaluated`); the least step from its `paces`
simulated  the step of what was evaluated, on the schedule that is `built` of it
result     the Plan
"""

from .plan import CHUNK_SIZES, SCHEDULES, plan
from .search import Tally
from .source import ProfileSource, difference

__all__ = ["CHUNK_SIZES", "SCHEDULES", "ProfileSource", "Tally", "difference", "plan"]
