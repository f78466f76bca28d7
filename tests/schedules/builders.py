"""The names of all builders: those that end in a flush, and those whose batches overlap."""

from __future__ import annotations

from stagewright.schedules import FAMILIES

ASYNC = tuple(name for name, each in FAMILIES.items() if each.rule.is_asynchronous)
FLUSH = tuple(name for name in FAMILIES if name not in ASYNC)
