"""All experiments that come with the package: one TOML file each in `experiments/catalog/`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..options import check_known
from .declaration import Declaration

_FOLDER = Path(__file__).resolve().parents[1] / "catalog"


def names() -> list[str]:
    """Names of all experiments."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def find(name: str) -> Declaration:
    """The experiment of this name, or of this file (`my.toml`); ValueError, with near matches, where there is none."""
    if name.endswith(".toml"):
        return Declaration.load(Path(name))
    check_known("unknown experiment", name, names(), listed="experiments")
    return replace(Declaration.load(_FOLDER / f"{name}.toml"), typed=name)
