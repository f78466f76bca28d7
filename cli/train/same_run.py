"""Whether a run that goes on is the run that was begun, and the record of each time that it did."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Options that a run may go on with as they are now: where and how fast it runs, not what it computes.
MAY_DIFFER = frozenset(
    {
        *("checkpoint_every", "checkpoint_overhead", "checkpoint_dir"),
        *("name", "resume", "dry_run", "json", "timeout", "verify", "trace_every"),
        *("ranks", "schedule", "plan", "chunks", "slices", "microbatches", "recompute"),
        *("tensor", "tensor_parallel"),
        *("delay_correction", "delay_factor", "flush_first"),  # of the schedule that it goes on with
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """One time that a run went on.

    Arguments:
        step: number of the first step after it; lost_steps: that were run before and are run again.
        started: local time, ISO 8601; command and host: as in the manifest.
        num_ranks, schedule: of the run from here on.
        predicted_step_seconds, predicted_before: by the plans of now and before, where there are plans.
        changes: what is not as it was, for people.
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
    """manifest.json of the run folder `path`, None without one. Raises ValueError where it is unreadable."""
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
    """ValueError where a run that goes on would not be the run that was begun.

    Arguments:
        before, now: every option by name.
    """
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
    """An option as a user types it."""
    if value is None or value == []:
        return f"the command without {option}" if is_advice else f"no {option}"
    if isinstance(value, bool):
        return option if value else option.replace("--", "--no-", 1)
    return f"{option} {' '.join(map(str, value)) if isinstance(value, list) else value}"
