"""Cuts of a model into stages, and the ranks on which the stages stand.

read_pipedream_profile, Profile, Cluster -> partition or plan -> Plan. Only the tracer and the profiler need torch.
"""

from .analytic.pipedream import read_pipedream_profile
from .cluster import Cluster, DeviceKind, Level
from .memory import MemoryUse
from .plans.plan import Plan
from .plans.record import PlanStage, RunnerUp
from .profile import Node, Profile
from .search import GivenStage, ProfileSource, evaluate, plan
from .search.partitioner import partition

__all__ = [
    "Cluster",
    "DeviceKind",
    "GivenStage",
    "Level",
    "MemoryUse",
    "Node",
    "Plan",
    "PlanStage",
    "Profile",
    "ProfileSource",
    "RunnerUp",
    "evaluate",
    "partition",
    "plan",
    "read_pipedream_profile",
]
