"""Schedules from rules over (op, stage, microbatch) instead of tables.

Constraints(rules=...)  ──ground──>  relations, limits, filters  ──solve──>  Schedule, or the rules that contradict
"""

from ..ir import Relation
from .notation import B, F, I, Rule, SoFar, U, W, in_flight, in_order, only_if
from .search import ContradictionError
from .solve import Constraints

__all__ = [
    "B",
    "Constraints",
    "ContradictionError",
    "F",
    "I",
    "Relation",
    "Rule",
    "SoFar",
    "U",
    "W",
    "in_flight",
    "in_order",
    "only_if",
]
