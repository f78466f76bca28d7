"""Cuts of a model into stages, and the ranks that run the stages.

read_pipedream_profile, Profile, Cluster -> partition or plan -> Plan. Only the tracer and the profiler need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .analytic.pipedream import read_pipedream_profile as read_pipedream_profile
    from .cluster import Cluster as Cluster
    from .cluster import DeviceKind as DeviceKind
    from .cluster import Level as Level
    from .memory import MemoryUse as MemoryUse
    from .plans.plan import Plan as Plan
    from .plans.record import PlanStage as PlanStage
    from .plans.record import RunnerUp as RunnerUp
    from .profile import Node as Node
    from .profile import Profile as Profile
    from .search.arguments import GivenStage as GivenStage
    from .search.given import evaluate as evaluate
    from .search.partitioner import partition as partition
    from .search.plan import plan as plan
    from .search.source import ProfileSource as ProfileSource

# A name's file loads when the name is asked for, since a rank that trains needs no planner.
_FILES = {
    "analytic.pipedream": "read_pipedream_profile",
    "cluster": "Cluster DeviceKind Level",
    "memory": "MemoryUse",
    "plans.plan": "Plan",
    "plans.record": "PlanStage RunnerUp",
    "profile": "Node Profile",
    "search.arguments": "GivenStage",
    "search.given": "evaluate",
    "search.partitioner": "partition",
    "search.plan": "plan",
    "search.source": "ProfileSource",
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}


if not TYPE_CHECKING:  # else a misspelt name would be of any type
    __all__ = list(_FILE_OF)

    def __getattr__(name: str) -> Any:
        if name in _FILE_OF:
            return getattr(import_module(f".{_FILE_OF[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FILE_OF])
