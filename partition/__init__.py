"""Cuts of a model into stages, and the ranks that run the stages.

read_pipedream_profile, Profile, Cluster -> partition or plan -> Plan. Only the tracer and the profiler need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .analytic.pipedream import read_pipedream_profile
    from .cluster import Cluster, DeviceKind, Level
    from .memory import MemoryUse
    from .plans.plan import Plan
    from .plans.record import PlanStage, RunnerUp
    from .profile import Node, Profile
    from .search.arguments import GivenStage
    from .search.given import evaluate
    from .search.partitioner import partition
    from .search.plan import plan
    from .search.source import ProfileSource

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

# Where each is: loaded when asked for, since a rank that trains needs no planner.
_MODULES = {
    "analytic.pipedream": ("read_pipedream_profile",),
    "cluster": ("Cluster", "DeviceKind", "Level"),
    "memory": ("MemoryUse",),
    "plans.plan": ("Plan",),
    "plans.record": ("PlanStage", "RunnerUp"),
    "profile": ("Node", "Profile"),
    "search.arguments": ("GivenStage",),
    "search.given": ("evaluate",),
    "search.partitioner": ("partition",),
    "search.plan": ("plan",),
    "search.source": ("ProfileSource",),
}


if not TYPE_CHECKING:  # else a misspelt name would be of any type

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
