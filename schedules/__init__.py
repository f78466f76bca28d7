"""Schedules: who computes what, when, on which version of the weights. Pure: no torch.

build -> Schedule -> check     complete, free of deadlock, versions as claimed; or why not
                  -> simulate  a Timeline under given Costs
                  -> lower     the same with sends and receives, for the engine
"""

from .attribution import attribute_idle
from .bounds import lower_bound
from .check import Report, check, check_lowered
from .costs import Costs
from .ir import Action, Edge, Op, Schedule, ScheduleError
from .lower import Lowered, Message, MessageKind, lower
from .registry import BUILDERS, build, canonical_name
from .simulate import ideal_makespan, simulate
from .timeline import Idle, RankTrace, Span, Timeline

__all__ = [
    "BUILDERS",
    "Action",
    "Costs",
    "Edge",
    "Idle",
    "Lowered",
    "Message",
    "MessageKind",
    "Op",
    "RankTrace",
    "Report",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "attribute_idle",
    "build",
    "canonical_name",
    "check",
    "check_lowered",
    "ideal_makespan",
    "lower",
    "lower_bound",
    "simulate",
]
