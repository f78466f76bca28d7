"""The planner: sizes, schedule, chunks, microbatch, recomputation, sharding and cuts, ranked by simulation.

space     which configurations there are
search    which of them to look at next, and when none left can win
cuts      where to cut one of them, or `unequal` with unequal replicas
evaluate  what it costs, holds (`memory`) and takes, simulated
result    the Plan
"""

from .plan import CHUNK_SIZES, SCHEDULES, plan
from .search import Tally
from .source import ProfileSource, difference

__all__ = ["CHUNK_SIZES", "SCHEDULES", "ProfileSource", "Tally", "difference", "plan"]
