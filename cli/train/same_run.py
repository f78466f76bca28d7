"""Checks that a resumed run has the options of the first, and the record of each resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Options that may change at a resume: where and how fast the run runs, not its results.
MAY_DIFFER = frozenset(
    {
        *("checkpoint_every", "checkpoint_overhead", "checkpoint_dir"),
        *("name", "resume", "dry_run", "json", "timeout", "verify", "trace_every"),
        *("ranks", "schedule", "plan", "chunks", "slices", "microbatches", "recompute"),
        *("tensor", "tensor_parallel"),
        *("delay_correction", "delay_factor", "flush_first"),  # of its present schedule
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """One resume of a run.

    Arguments:
        step: number of the first step after it; lost_steps: number of steps that run again.
        started: local time, ISO 8601; command and host: as in the manifest.
        num_ranks, schedule: of the run from here on.
        predicted_step_seconds, predicted_before: by the plans of now and before, if there are plans.
        changes: sentences on differences from before.
    """

    step: int
    lost_steps: int
    started: str
    command: tuple[str, ...]
    host: str
    num_ranks: int
    schedule: str
    predicted_step_seconds: float | None = None
    predicted_before: float | None = None
    changes: tuple[str, ...] = ()


def read_manifest(path: Path) -> dict[str, Any] | None:
    """manifest.json of the run folder `path`, None without one. Raises ValueError if unreadable."""
    file = path / "manifest.json"
    if not file.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found["config"], dict):
            raise ValueError("expected options by name")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is unreadable: {error}: expected another --name, which begins anew") from None
    return found


def refuse_other_options(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError if an option changed that may not change at a resume; `before`, `now`: all options by name."""
    for option, value in json.loads(json.dumps(dict(now))).items():
        if option in MAY_DIFFER or option not in before or before[option] == value:
            continue
        typed = f"--{option.replace('_', '-')}"
        raise ValueError(
            f"the run {name} was begun with {_typed(typed, before[option])}, and is to go on with "
            f"{_typed(typed, value)}: expected the same options; type {_typed(typed, before[option], is_advice=True)}, "
            f"or begin another run with another --name"
        )


def _typed(option: str, value: object, *, is_advice: bool = False) -> str:
    if value is None or value == []:
        return f"the command without {option}" if is_advice else f"no {option}"
    if isinstance(value, bool):
        return option if value else option.replace("--", "--no-", 1)
    return f"{option} {' '.join(map(str, value)) if isinstance(value, list) else value}"
