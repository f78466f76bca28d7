"""The planner: sizes, schedule, chunks, microbatch, recomputation, sharding and cuts, ranked by simulation.

arguments  what is asked, checked
space      which configurations there are
search     which of them to look at next, and when none left can win
cuts       where to cut one of them, or cuts of their own with unequal replicas
evaluate   what it costs and holds on its ranks, and its step; the least step from its `paces`
simulated  its schedule, batches of it, and what is in flight
result     the Plan
given      likewise of a plan that is given
"""

from .arguments import CHUNK_SIZES, SCHEDULES
from .given import GivenStage, evaluate
from .plan import plan
from .source import ProfileSource, difference

__all__ = ["CHUNK_SIZES", "SCHEDULES", "GivenStage", "ProfileSource", "difference", "evaluate", "plan"]
