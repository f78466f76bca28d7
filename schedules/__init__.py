"""Schedules: who computes what, when, on which version of the weights. Pure: no torch.

build -> Schedule -> check     complete, free of deadlock, versions as claimed; or why not
                  -> simulate  a Timeline under given Costs
                  -> lower     the same with sends and receives, for the engine
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checks import check as check
    from .checks import check_lowered as check_lowered
    from .explain.critical_path import CriticalPath as CriticalPath
    from .explain.critical_path import critical_path as critical_path
    from .explain.difference import Change as Change
    from .explain.difference import Difference as Difference
    from .explain.difference import Straggler as Straggler
    from .explain.difference import compare as compare
    from .explain.difference import find_stragglers as find_stragglers
    from .explain.prediction import PredictionCheck as PredictionCheck
    from .explain.prediction import check_prediction as check_prediction
    from .families.family import Family as Family
    from .families.registry import FAMILIES as FAMILIES
    from .families.registry import build as build
    from .families.registry import canonical_name as canonical_name
    from .families.registry import family as family
    from .families.registry import register as register
    from .ir import Action as Action
    from .ir import Collective as Collective
    from .ir import Edge as Edge
    from .ir import Op as Op
    from .ir import Schedule as Schedule
    from .ir import ScheduleError as ScheduleError
    from .lowering.calls import flushed as flushed
    from .lowering.lower import lower as lower
    from .messages import Message as Message
    from .messages import MessageKind as MessageKind
    from .orders.problem import MemoryLimitError as MemoryLimitError
    from .search.arranged import Layer as Layer
    from .search.joint import synthesize_jointly as synthesize_jointly
    from .search.synthesize import synthesize as synthesize
    from .slice_lengths import CausalSeconds as CausalSeconds
    from .slice_lengths import equal_work_lengths as equal_work_lengths
    from .slice_lengths import shortest_lengths as shortest_lengths
    from .timing.bounds import lower_bound as lower_bound
    from .timing.costs import Costs as Costs
    from .timing.links import AllReduce as AllReduce
    from .timing.links import Link as Link
    from .timing.links import Links as Links
    from .timing.memory import MemoryCurve as MemoryCurve
    from .timing.memory import MemoryPart as MemoryPart
    from .timing.memory import StageBytes as StageBytes
    from .timing.memory import memory_curves as memory_curves
    from .timing.sampling import StepSamples as StepSamples
    from .timing.sampling import simulate_spread as simulate_spread
    from .timing.simulate import ideal_makespan as ideal_makespan
    from .timing.simulate import simulate as simulate
    from .timing.spread import Spread as Spread
    from .timing.spread import estimate_spread as estimate_spread
    from .timing.timeline import Idle as Idle
    from .timing.timeline import RankTrace as RankTrace
    from .timing.timeline import Span as Span
    from .timing.timeline import Timeline as Timeline
    from .timing.waits import attribute_idle as attribute_idle
    from .transform import with_offload as with_offload
    from .transform import with_overlap as with_overlap

# A name's file loads when the name is asked for: who only draws a schedule starts without the search.
_FILES = {
    "checks": "check check_lowered",
    "explain.critical_path": "CriticalPath critical_path",
    "explain.difference": "Change Difference Straggler compare find_stragglers",
    "explain.prediction": "PredictionCheck check_prediction",
    "families.family": "Family",
    "families.registry": "FAMILIES build canonical_name family register",
    "ir": "Action Collective Edge Op Schedule ScheduleError",
    "lowering.calls": "flushed",
    "lowering.lower": "lower",
    "messages": "Message MessageKind",
    "search.arranged": "Layer",
    "search.joint": "synthesize_jointly",
    "orders.problem": "MemoryLimitError",
    "search.synthesize": "synthesize",
    "slice_lengths": "CausalSeconds equal_work_lengths shortest_lengths",
    "timing.waits": "attribute_idle",
    "timing.bounds": "lower_bound",
    "timing.costs": "Costs",
    "timing.links": "AllReduce Link Links",
    "timing.memory": "MemoryCurve MemoryPart StageBytes memory_curves",
    "timing.sampling": "StepSamples simulate_spread",
    "timing.simulate": "ideal_makespan simulate",
    "timing.spread": "Spread estimate_spread",
    "timing.timeline": "Idle RankTrace Span Timeline",
    "transform": "with_offload with_overlap",
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}


if not TYPE_CHECKING:  # else a misspelt name would be of any type
    __all__ = list(_FILE_OF)

    def __getattr__(name: str) -> Any:
        if name in _FILE_OF:
            return getattr(import_module(f".{_FILE_OF[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_FILE_OF)
