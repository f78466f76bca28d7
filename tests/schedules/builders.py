"""The names of all builders: those that end in a flush, and those whose batches overlap."""

from __future__ import annotations

from stagewright.schedules import BUILDERS

ASYNC = ("pipedream", "2bw")
FLUSH = tuple(name for name in BUILDERS if name not in ASYNC)
