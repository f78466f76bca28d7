"""Jobs that `--only` asks for."""

from __future__ import annotations

from collections.abc import Sequence

from ..options import check_known
from .case import shown
from .job import Job


def select(jobs: Sequence[Job], words: Sequence[str]) -> list[Job]:
    """Jobs of the named parts that have a case with the given values.

    Arguments:
        words: names of parts and KEY=VALUE; several of one kind or key: any of them; none: all.

    Raises ValueError, with near matches, for a part, key or value that no job has, and where nothing is left.
    """
    parts = list(dict.fromkeys(job.part.name for job in jobs))
    known: dict[str, list[str]] = {}
    for job in jobs:
        for case in job.cases:
            for key, value in case.items:
                if shown(value) not in known.setdefault(key, []):
                    known[key].append(shown(value))
    wanted_parts: list[str] = []
    wanted_values: dict[str, list[str]] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            check_known("--only: unknown part", word, parts, listed="parts")
            wanted_parts.append(word)
            continue
        check_known("--only: unknown key", key, list(known), listed="keys")
        check_known(f"--only: no case with {key}", value, known[key], listed=f"values of {key}")
        wanted_values.setdefault(key, []).append(value)
    chosen = [
        job
        for job in jobs
        if (not wanted_parts or job.part.name in wanted_parts)
        and any(
            all(key in case and shown(case.values[key]) in values for key, values in wanted_values.items())
            for case in job.cases
        )
    ]
    if not chosen:
        raise ValueError(f"--only {' '.join(words)}: no job has all of these: expected some of {', '.join(parts)}")
    return chosen
