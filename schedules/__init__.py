"""Schedules: who computes what, when, on which version of the weights. Pure: no torch.

build -> Schedule -> check     complete, free of deadlock, versions as claimed; or why not
                  -> simulate  a Timeline under given Costs
                  -> lower     the same with sends and receives, for the engine
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .check import Report, check, check_lowered
from .explain.critical_path import CriticalPath, PathKind, PathStep, critical_path
from .explain.difference import Change, Departure, Difference, compare
from .explain.prediction import PredictionCheck, check_prediction
from .explain.stragglers import Straggler, find_stragglers
from .families.recognise import Family
from .families.registry import FAMILIES, build, canonical_name, family
from .ir import Action, Collective, Edge, Op, Schedule, ScheduleError
from .lowering.lower import lower
from .messages import Message, MessageKind
from .program import Lowered
from .slice_lengths import CausalSeconds, equal_work_lengths, shortest_lengths, slice_seconds
from .timing.attribution import attribute_idle
from .timing.bounds import lower_bound
from .timing.costs import Costs
from .timing.links import AllReduce, Link, LinkLevel, Links
from .timing.memory import MemoryCurve, MemoryPart, StageBytes, memory_curves
from .timing.sampling import StepSamples, simulate_spread
from .timing.simulate import ideal_makespan, simulate
from .timing.spread import Spread, estimate_spread
from .timing.timeline import Idle, RankTrace, Span, Timeline
from .transform import flushed, with_offload

if TYPE_CHECKING:
    from .search.joint import JointSynthesis, Layer, synthesize_jointly
    from .search.portfolio import Synthesis
    from .search.problem import MemoryLimitError
    from .search.synthesize import synthesize

# Loaded when asked for: a command that only draws a schedule starts without the search.
_OF_THE_SEARCH = {
    "JointSynthesis": "joint",
    "Layer": "joint",
    "synthesize_jointly": "joint",
    "MemoryLimitError": "problem",
    "Synthesis": "portfolio",
    "synthesize": "synthesize",
}

__all__ = [
    "FAMILIES",
    "Action",
    "AllReduce",
    "CausalSeconds",
    "Change",
    "Collective",
    "Costs",
    "CriticalPath",
    "Departure",
    "Difference",
    "Edge",
    "Family",
    "Idle",
    "JointSynthesis",
    "Layer",
    "Link",
    "LinkLevel",
    "Links",
    "Lowered",
    "MemoryCurve",
    "MemoryLimitError",
    "MemoryPart",
    "Message",
    "MessageKind",
    "Op",
    "PathKind",
    "PathStep",
    "PredictionCheck",
    "RankTrace",
    "Report",
    "Schedule",
    "ScheduleError",
    "Span",
    "Spread",
    "StageBytes",
    "StepSamples",
    "Straggler",
    "Synthesis",
    "Timeline",
    "attribute_idle",
    "build",
    "canonical_name",
    "check",
    "check_lowered",
    "check_prediction",
    "compare",
    "critical_path",
    "equal_work_lengths",
    "estimate_spread",
    "family",
    "find_stragglers",
    "flushed",
    "ideal_makespan",
    "lower",
    "lower_bound",
    "memory_curves",
    "shortest_lengths",
    "simulate",
    "simulate_spread",
    "slice_seconds",
    "synthesize",
    "synthesize_jointly",
    "with_offload",
]


def __getattr__(name: str) -> Any:
    if name in _OF_THE_SEARCH:
        return getattr(import_module(f".search.{_OF_THE_SEARCH[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
