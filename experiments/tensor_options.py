"""`--tensor-parallel`: "auto", or a JSON file of {pattern: word}. No torch."""

from __future__ import annotations

import json
from pathlib import Path

AUTO = "auto"


def read_tensor_parallel(given: str) -> str | dict[str, str]:
    """Value for PipelineModule's tensor_parallel=. Raises ValueError for a file that cannot be read so."""
    if given == AUTO:
        return AUTO
    path = Path(given)
    such = 'expected auto, or a .json file such as {"blocks.*.up": "column", "blocks.*.down": "row"}'
    if path.suffix != ".json":
        raise ValueError(f"--tensor-parallel {given}: {such}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--tensor-parallel {given}: {error.strerror or error}: {such}") from None
    except ValueError as error:
        raise ValueError(f"--tensor-parallel {given}: no JSON ({error}): {such}") from None
    if not isinstance(found, dict) or not all(isinstance(word, str) for word in found.values()):
        raise ValueError(f"--tensor-parallel {given}: {found!r:.60}: {such}")
    return found
