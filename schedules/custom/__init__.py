"""Schedules from rules over (op, stage, microbatch) instead of tables.

Constraints(rules=...)  ──ground──>  relations, limits, filters  ──solve──>  Schedule, or the rules that contradict
"""

from ..ir import Relation as Relation
from .notation import B as B
from .notation import F as F
from .notation import I as I
from .notation import Rule as Rule
from .notation import SoFar as SoFar
from .notation import U as U
from .notation import W as W
from .notation import in_flight as in_flight
from .notation import in_order as in_order
from .notation import only_if as only_if
from .search import ContradictionError as ContradictionError
from .solve import Constraints as Constraints

# A type checker would take names that it cannot read for none.
globals()["__all__"] = [n for n, v in [*globals().items()] if n[0] != "_" and not hasattr(v, "__spec__")]
